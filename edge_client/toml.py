"""Reading TOML on every supported Python: by the standard library, before 3.11 by `tomli`."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from tomllib import TOMLDecodeError as TOMLDecodeError
    from tomllib import loads as loads
else:
    from tomli import TOMLDecodeError as TOMLDecodeError
    from tomli import loads as loads
