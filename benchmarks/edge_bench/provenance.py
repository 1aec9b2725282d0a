"""Where a figure comes from: command, commit, machine with its load and versions. Every results file has these."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "onnxruntime", "torch", "executorch", "numba")


def machine() -> dict[str, Any]:
    """Processor, cores, one-minute load average, system, Python, numeric packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def origin(command: str) -> dict[str, Any]:
    """The first fields of a results file. Call it before measuring, so that the load is that of other processes."""
    return {"command": command, "commit": commit(), "machine": machine()}


def commit() -> str:
    """The checkout's commit, with "+" when tracked files differ from it; empty outside a checkout."""
    words = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
