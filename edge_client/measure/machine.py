"""The machine: its description, and its state now. What the system does not report is None."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ENGINES = ("onnxruntime", "executorch", "torch")
PACKAGES = ("maskfleet", "numpy", "onnx", "numba")
CPU_NAMES = ("model name", "Model", "Hardware", "Processor", "cpu model")
WARMEST = ("coretemp", "k10temp", "cpu_thermal", "cpu-thermal", "soc_thermal", "zenpower")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip("\0\n ") or None
    except OSError:
        return None


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def description(root: Path = Path("/")) -> dict[str, Any]:
    """The machine's parts and software: figures of two machines are compared beside these."""
    cpu = root / "sys/devices/system/cpu"
    frequency = cpu / "cpu0/cpufreq"
    limits = [_read(frequency / f"cpuinfo_{end}_freq") for end in ("min", "max")]
    release = {} if root != Path("/") else _release()
    return {
        "board": _read(root / "proc/device-tree/model") or _read(root / "sys/class/dmi/id/product_name"),
        "processor": processor(root),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "governor": _read(frequency / "scaling_governor"),
        "frequency_mhz": [None if v is None else int(v) / 1000 for v in limits],
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "system": release.get("PRETTY_NAME", platform.system()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "engines": installed(ENGINES),
        "packages": installed(PACKAGES),
        "virtual": _virtual(root),
    }


def _release() -> Mapping[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _virtual(root: Path) -> bool | None:
    text = _read(root / "proc/cpuinfo")
    return None if text is None else "hypervisor" in text


def processor(root: Path = Path("/")) -> str:
    """The processor's name."""
    text = _read(root / "proc/cpuinfo") or ""
    table: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        table.setdefault(key.strip(), value.strip())
    named = next((table[name] for name in CPU_NAMES if table.get(name)), None)
    return named or platform.processor() or platform.machine()


def commit(root: Path = Path(__file__).parents[2]) -> str:
    """The checkout's commit, with "+" when tracked files but results differ from it; empty outside a checkout."""
    if not (root / ".git").exists():  # installed, perhaps below another project's checkout
        return ""
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "diff", "--name-only", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=root).stdout.strip()


def state() -> dict[str, Any]:
    """How the machine is now: temperature, frequency of each core's policy, load, free memory."""
    try:
        frequency = psutil.cpu_freq()
    except (AttributeError, NotImplementedError, OSError):  # not on every system
        frequency = None
    return {
        "celsius": temperature(),
        "mhz": None if frequency is None else round(frequency.current),
        "load": round(os.getloadavg()[0], 2),
        "free_mb": round(psutil.virtual_memory().available / 1e6),
    }


def battery() -> float | None:
    """What is left in the battery, in percent; None without one."""
    try:
        found = psutil.sensors_battery()
    except (AttributeError, OSError):  # not on every system
        return None
    return None if found is None else float(found.percent)


def temperature() -> float | None:
    """The processor's temperature, else the warmest sensor's; None without any."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):  # not on every system
        return None
    named = [s.current for name in WARMEST for s in sensors.get(name, []) if s.current]
    every = named or [s.current for group in sensors.values() for s in group if s.current]
    return max(every, default=None)
