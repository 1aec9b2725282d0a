"""Compiled loops: those of a module `x` are in `x_compiled`, which needs numba (extra `fast`)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def loops(module: str) -> Any:
    """The compiled loops of the module called so (its `__name__`), or None.

    Ask when they are needed, not at import: numba takes 40 MB, and an idle coordinator needs none.
    """
    try:
        return import_module(f"{module}_compiled")
    except (ImportError, OSError, RuntimeError):  # no numba, one that does not fit, or no folder for its cache
        return None
