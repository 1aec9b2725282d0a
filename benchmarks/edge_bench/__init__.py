"""Benchmarks, simulation, demo. `python -m edge_bench` lists the benchmarks.

A benchmark started by `python -m edge_bench.ROOM.NAME` ends with one sentence when a package is missing, by the hook
below; `command_line.run_module` does the same for a wrong input. The hook is set before typer is imported, which keeps
it.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One sentence for a missing package, a traceback for anything else."""
    from edge_client.extras import needs

    if isinstance(error, ImportError):
        print(f"edge_bench: {needs('this benchmark', __name__, error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # so it is while `python -m edge_bench...` imports this package, and never else
    os.environ.setdefault("TYPER_STANDARD_TRACEBACK", "1")
    sys.excepthook = _say
