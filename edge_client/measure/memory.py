"""Memory of this process: what it holds, and the most it held since a moment; None where the system does not say it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # see proc_pid_clear_refs(5)


def _field(name: str) -> float | None:
    """A field of /proc/self/status in megabytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return None


def forget_peak() -> bool:
    """Let the peak begin anew at what is held now; False where the system does not allow it."""
    try:
        CLEAR.write_text(FORGET_PEAK)
    except OSError:
        return False
    return True


def peak_mb() -> float | None:
    """Megabytes this process held at most since `forget_peak`, else since its start."""
    return _field("VmHWM")


def resident_mb() -> float | None:
    """Megabytes it holds now."""
    return _field("VmRSS")


def give_back() -> None:
    """Give what is free back to the system, where the C library can: glibc keeps freed arrays of up to 32 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
