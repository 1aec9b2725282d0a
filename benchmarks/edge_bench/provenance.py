"""Where a figure comes from: command, commit, machine with its load and versions. Every results file has these."""

from __future__ import annotations

import os
import platform
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


def origin(command: str) -> dict[str, Any]:
    """The first fields of a results file. Call it before measuring, so that the load is that of other processes."""
    return {"command": command, "commit": commit(), "machine": machine()}
