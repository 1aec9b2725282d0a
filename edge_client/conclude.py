"""The end of a federation on the device: its personal model written, verified, measured. No network here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from edge_client.bundle import Bundle
from edge_client.errors import CompactionError, StateError
from edge_client.local import accuracy
from edge_client.measure.latency import latency
from edge_client.methods import Personal, Task
from edge_client.personal import write_dense, write_personal
from edge_client.protocol.messages import Report


def conclude(bundle: Bundle, task: Task, personal: Personal, path: Path, threads: int = 1) -> Report:
    """Write the personal model to `path` and report its accuracy, size and latency beside the dense model's.

    Latency is the median of one sample at a time, both models in turns. When the compact model cannot be shown equal
    to the masked one, the masked dense one is written instead, and the report's `uncompacted` says why. Raises
    CompactionError when the values do not fit the bundle, StateError when the model cannot be written.
    """
    data = task.data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot make {path.parent}: {error.strerror or error}; choose another --personal") from None
    right = accuracy(task.trainer, personal, data.x_test, data.y_test)
    try:
        compact = write_personal(bundle, personal, path, data.x)
    except CompactionError as error:
        write_dense(bundle, personal, path, data.x)
        (of_dense,) = latency([path], data.x[:1], threads=threads)
        return Report(
            accuracy=right,
            test_samples=len(data.y_test),
            parameters_dense=bundle.manifest.d,
            parameters_compact=bundle.manifest.d,
            latency_dense_ms=of_dense.p50_ms,
            latency_compact_ms=of_dense.p50_ms,
            uncompacted=str(error)[:1000],
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        dense = Path(folder) / "dense.onnx"
        write_dense(bundle, personal, dense, data.x)
        of_dense, of_compact = latency([dense, path], data.x[:1], threads=threads)
    return Report(
        accuracy=right,
        test_samples=len(data.y_test),
        parameters_dense=compact.parameters_dense,
        parameters_compact=compact.parameters_compact,
        latency_dense_ms=of_dense.p50_ms,
        latency_compact_ms=of_compact.p50_ms,
        max_abs_diff=compact.max_abs_diff,
    )
