"""The end of a federation on the device: its personal model is written, verified and measured. No network here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from edge_client.align import Align
from edge_client.bundle import Bundle
from edge_client.card import card, describe
from edge_client.compaction.personal import dense_model, write_smallest
from edge_client.compaction.tuning import clock
from edge_client.errors import StateError
from edge_client.measure.latency import latency
from edge_client.methods import Method, below
from edge_client.protocol.messages import REASON_MOST, Report
from edge_client.task import Personal, Task


def conclude(
    bundle: Bundle,
    task: Task,
    personal: Personal,
    path: Path,
    threads: int = 1,
    align: Align = "rule",
    facts: Mapping[str, str | int] = MappingProxyType({}),
) -> Report:
    """Write the personal model to `path`; report its score, size and latency beside the dense model's.

    Latency is the median of one sample at a time, the two models timed in turns. When the compact model cannot be shown
    equal to the masked one, the masked dense one is written instead, and the report's `uncompacted` has the reason.
    `align` sets how wide the compact model's layers are; `auto` measures on this device (`compaction.tuning`). `facts`
    join the file's metadata (`card`). Raises CompactionError when the values do not fit the bundle, StateError when the
    model cannot be written.
    """
    data, d = task.data, bundle.manifest.d
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot make {path.parent}: {error.strerror or error}; choose another --out") from None
    score = task.score(personal)
    entries = card(bundle.manifest, **facts)
    measure = clock(data.x[:1]) if align == "auto" else None
    compact = write_smallest(bundle, personal, path, data.x, align=align, clock=measure)
    describe(path, entries)
    if isinstance(compact, str):
        (of_dense,) = latency([path], data.x[:1], threads=threads)
        return Report(
            score=score,
            test_samples=len(data.y_test),
            parameters_dense=d,
            parameters_compact=d,
            latency_dense_ms=of_dense,
            latency_compact_ms=of_dense,
            uncompacted=compact[:REASON_MOST],
        )
    dense = dense_model(bundle, personal, data.x)
    of_dense, of_compact = latency([dense, path], data.x[:1], threads=threads)
    return Report(
        score=score,
        test_samples=len(data.y_test),
        parameters_dense=compact.parameters_dense,
        parameters_compact=compact.parameters_compact,
        latency_dense_ms=of_dense,
        latency_compact_ms=of_compact,
        max_abs_diff=compact.max_abs_diff,
    )


def remarks(method: Method, task: Task, personal: Personal, report: Report, took_part: bool) -> Iterator[str]:
    """What the device's owner should know of the model: it is not compacted, not pruned, or below the bundle's start.

    `took_part`: whether the device ever trained a round; an unpruned model of one that did not is no surprise.
    """
    if report.uncompacted is not None:
        yield f"the personal model is the masked dense one, not compacted: {report.uncompacted}"
    whole = took_part and (personal.mask is None or bool(personal.mask.all()))
    if whole and (unpruned := method.unpruned()):
        yield f"warning: {unpruned}"
    if report.test_samples:
        hints = method.hints(task.assignment.model)
        poor = below(method.name, report.score, task.score_start(), "the bundle's own start", hints)
        if poor is not None:
            yield f"warning: {poor}"
