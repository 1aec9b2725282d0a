"""The contracts of the seams, as functions that another package calls in its own tests.

Each raises AssertionError with a sentence that says what was expected and what came. maskfleet's tests call the same
functions on its own methods, codecs, engines and meters. docs/extending.md has an example of each.
"""

from __future__ import annotations

from edge_bench.testing.methods import Ground as Ground
from edge_bench.testing.methods import check_method as check_method
from edge_bench.testing.methods import digits as digits
