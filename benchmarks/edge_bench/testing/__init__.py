"""The contracts of the seams, as functions that another package calls in its own tests.

Each raises AssertionError with a sentence: what was expected and what came. maskfleet's tests call the same
functions on its own methods, codecs, engines and meters. docs/extending.md has an example of each.
"""

from __future__ import annotations

from edge_bench.testing.codecs import check_codec as check_codec
from edge_bench.testing.meters import check_meter as check_meter
from edge_bench.testing.methods import Ground as Ground
from edge_bench.testing.methods import check_method as check_method
from edge_bench.testing.methods import digits as digits
from edge_bench.testing.trainers import check_trainer as check_trainer
