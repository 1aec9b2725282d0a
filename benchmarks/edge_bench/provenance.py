"""Where a figure comes from: command, commit, machine with its load and versions. Every results file has these."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from edge_client.measure.machine import commit as commit
from edge_client.measure.machine import installed, processor

_PACKAGES = ("numpy", "onnxruntime", "torch", "executorch", "numba")


def machine() -> dict[str, Any]:
    """Processor, cores, one-minute load average, system, Python, numeric packages."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        **installed(_PACKAGES),
    }


def program() -> str:
    """What this process was started as: `maskfleet`, or `python -m edge_bench.ROOM.NAME`."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).stem if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def command() -> str:
    """The command line of this process, to be given again in a shell."""
    return shlex.join([*program().split(" "), *sys.argv[1:]])


def origin() -> dict[str, Any]:
    """The first fields of a results file. Call it before measuring, so that the load is that of other processes."""
    return {"command": command(), "commit": commit(), "machine": machine()}
