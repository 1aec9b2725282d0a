"""One model in a process of its own: how long until its first result, and how much memory it takes.

    python -m edge_client.bench.child '{"file": ..., "shape": [...], "dtype": ..., "threads": 1, "runs": 20}'

Prints one JSON object: milliseconds to import the engine, and from opening the file to the first result; megabytes that
the process held at most, and the model's part of them, each null where the system does not report it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError, MaskfleetError

SECONDS = 300.0


def drop_from_cache(file: Path) -> None:
    """Drop the file from the system's cache, so that opening it reads the disk."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(text: str) -> dict[str, Any]:
    """Measure what `text` describes."""
    spec = json.loads(text)
    file = Path(spec["file"])
    begin = time.perf_counter()
    from edge_client.measure import engines, memory

    if engines.engine_of(file) == engines.EXECUTORCH:
        import edge_client.runtimes.executorch  # noqa: F401 (its import is what is timed)
    imported = time.perf_counter()
    x = engines.batch(tuple(spec["shape"]), spec["dtype"])
    before = memory.resident_mb() if memory.forget_peak() else None  # else the peak may be that of the import
    opening = time.perf_counter()
    call = engines.open_model(file, x, spec["threads"])  # which runs it once
    ready = time.perf_counter()
    for _ in range(spec["runs"]):
        call()
    peak = memory.peak_mb()
    return {
        "import_ms": 1e3 * (imported - begin),
        "first_result_ms": 1e3 * (ready - opening),
        "peak_mb": peak,
        "model_mb": None if before is None or peak is None else max(peak - before, 0.0),
    }


def measure(file: Path, shape: tuple[int, ...], dtype: str, threads: int, runs: int = 20) -> dict[str, Any]:
    """`main` in a new process. Raises ConfigError when the process fails."""
    spec = json.dumps({"file": str(file), "shape": shape, "dtype": dtype, "threads": threads, "runs": runs})
    command = [sys.executable, "-m", "edge_client.bench.child", spec]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{file.name} in a process of its own took more than {SECONDS:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise ConfigError(f"{file.name} in a process of its own failed: {said}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1])))
    except MaskfleetError as error:
        sys.exit(str(error))
