"""One graph, one mask: exported, masked, compacted, compared with the masked module in float64, counted and timed.

A bundle here is `eval.onnx` and the tables, all that compaction reads: tracing the training graph as well would take
minutes for the deep networks. A refusal is a result: an error of this project with its sentence. Any other exception
counts as a crash.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from edge_export.graphs import eval_graph
from edge_export.tables import tables
from numpy.typing import NDArray
from torch import Tensor

from edge_bench.compaction.masks import Masked, MaskKind, masked
from edge_bench.compaction.oracle import Bound, bound
from edge_bench.compaction.zoo import Case
from edge_client.align import Align
from edge_client.bundle import MANIFEST, Bundle, Input, Manifest, Part, digest
from edge_client.bundle import Tensor as Row
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.compaction.tuning import Clock
from edge_client.errors import MaskfleetError
from edge_client.measure.engines import onnx_call
from edge_client.measure.latency import in_turns
from edge_client.measure.macs import macs
from edge_client.targets import target_type
from edge_client.task import Personal

EXACT = 1e-5
"""Largest error of an exact model, in standard deviations of the logits."""
NEAR = 1.05
"""A model has reached its bound when it has at most so many times the bound's multiply-adds."""


@dataclass
class Result:
    """A row of the results.

    `status` is "ok", "refused: SENTENCE" or "crashed: ERROR". Multiply-adds are those of one sample; `mac_ratio` is
    dense over compact, `mac_bound` dense over the oracle's bound. `speedup` is dense over compact milliseconds of one
    sample: processor time on one thread, the median of calls that all variants take in turns. `error_std` is the
    largest error against the masked module in float64, over the standard deviation of its outputs; `error_dense_std`
    is the same for the dense graph in float32, which has that much rounding of its own. `error_rms` is the root mean
    square of the errors, `agreement` the share of samples whose largest output is the masked module's (`engines`).
    """

    model: str
    mask: str
    kept: float
    engine: str = "onnxruntime"
    tool: str = "maskfleet"
    aligned: bool = False
    status: str = "ok"
    mac_ratio: float | None = None
    mac_bound: float | None = None
    speedup: float | None = None
    error_std: float | None = None
    error_dense_std: float | None = None
    error_rms: float | None = None
    agreement: float | None = None
    macs_dense: int | None = None
    macs_compact: int | None = None
    macs_bound: int | None = None
    ms_dense: float | None = None
    ms: float | None = None
    seconds: float | None = None
    bytes: int | None = None
    stopped_by: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the written model's outputs equal the masked module's, up to float32's own rounding."""
        return self.error_std is not None and self.error_std <= max(EXACT, 2 * (self.error_dense_std or 0.0))

    @property
    def reached(self) -> bool:
        """Whether its multiply-adds are within 5 % of the bound."""
        return self.macs_compact is not None and self.macs_compact <= NEAR * max(1, self.macs_bound or 0)

    def row(self) -> dict[str, Any]:
        """The fields that are known, rounded."""
        found = {k: v for k, v in asdict(self).items() if v not in (None, [])}
        return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}


@dataclass(frozen=True)
class Subject:
    """A masked graph, ready to be compacted: the outputs that it must have, and what it may cost at least."""

    case: Case
    masked: Masked
    bundle: Bundle
    personal: Personal
    x: NDArray[Any]
    expected: NDArray[np.float64]
    bound: Bound


def export(case: Case, folder: Path) -> Bundle:
    """The bundle of `case` without its training graph; one that is in `folder` already is opened. Raises ModelError."""
    if (folder / MANIFEST).is_file():
        return Bundle.open(folder)
    torch.manual_seed(0)
    module, example = case.make(), case.batch(3)
    found = tables(module, example, "he", None)
    graph = eval_graph(module, example, [r.name for r in found.parameters], [r.name for r in found.buffers])
    with torch.no_grad():
        shape = tuple(module.eval()(example).shape[1:])
    kind = target_type("classification" if len(shape) == 1 else "sequence")
    data = graph.SerializeToString(deterministic=True)
    manifest = Manifest(
        name=case.name,
        input=Input(shape=case.shape, dtype="float32" if case.ids is None else "int64"),
        target=kind(kind=kind.model_fields["kind"].default, **kind.sizes(shape)),
        parameters=found.parameters,
        buffers=found.buffers,
        layers=found.layers,
        parts={"eval.onnx": Part(sha256=digest(data), size=len(data))},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.onnx").write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return Bundle.open(folder)


def prepare(case: Case, bundle: Bundle, kind: MaskKind, kept: float, seed: int = 0) -> Subject:
    """`case` with a random mask, in the bundle's own layout, and its outputs in float64."""
    made = masked(case, kind, kept, seed)
    state = dict(made.module.state_dict())
    x = case.batch(8 if bundle.manifest.d > 1_000_000 else 32, seed=99)
    with torch.no_grad():
        wide = copy.deepcopy(made.module).double()
        expected = wide(x if case.ids is not None else x.double()).numpy()
    personal = Personal(
        _flat(bundle.manifest.parameters, state),
        _flat(bundle.manifest.buffers, state),
        _flat(bundle.manifest.parameters, made.masks).astype(np.bool_),
    )
    return Subject(case, made, bundle, personal, x.numpy(), expected, bound(made.module, case))


def _flat(table: Sequence[Row], tensors: dict[str, Tensor]) -> NDArray[np.float32]:
    parts = [np.zeros(0, np.float32), *(tensors[row.name].numpy().astype(np.float32).reshape(-1) for row in table)]
    return np.concatenate(parts)


def compacted(
    subject: Subject, kind: MaskKind, kept: float, path: Path, align: Align = "none", clock: Clock | None = None
) -> Result:
    """`subject` written to `path` as `write_personal` does, and how it came out.

    By default it is as narrow as the mask leaves it: the bound is compared with that.
    """
    result = Result(subject.case.name, kind, kept)
    start = time.perf_counter()
    try:
        report = write_personal(subject.bundle, subject.personal, path, subject.x, align=align, clock=clock)
        result.seconds = time.perf_counter() - start
        result.bytes = path.stat().st_size
        result.stopped_by = list(report.stopped)
        result.error_std = _error(path, subject)
        result.macs_dense = macs(subject.bundle.part("eval.onnx"))
        result.macs_compact, result.macs_bound = macs(path), subject.bound.live
        result.mac_ratio = result.macs_dense / max(1, result.macs_compact)
        result.mac_bound = result.macs_dense / max(1, result.macs_bound)
        dense = path.with_suffix(".dense.onnx")
        write_dense(subject.bundle, subject.personal, dense, subject.x)
        result.error_dense_std = _error(dense, subject)
    except MaskfleetError as error:
        result.status = f"refused: {error}"
    except Exception as error:  # a crash is a result too
        result.status = f"crashed: {type(error).__name__}: {error}"
    return result


def _error(path: Path, subject: Subject) -> float:
    """The largest error of a model over the outputs' standard deviation (over 1 where they do not vary)."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: subject.x})[0]
    spread = float(subject.expected.std())
    return float(np.abs(found - subject.expected).max()) / (spread if spread > 1e-12 else 1.0)


def timed(models: Sequence[Path], subject: Subject, runs: int) -> list[float]:
    """Milliseconds of one sample of each model, timed in turns on one thread: the median processor time.

    Wall time would measure how often the system took the processor away, which a longer call suffers more from.
    """
    found = in_turns([onnx_call(m, subject.x[:1]) for m in models], runs, max(3, runs // 10))
    return [float(np.median(t)) for t in found.cpu]


def summary(rows: list[Result]) -> dict[str, Any]:
    """Counts of graphs over both masks and all shares; a graph counts as its worst row."""
    plain = [r for r in rows if not r.aligned and r.engine == "onnxruntime" and r.tool == "maskfleet"]
    by: dict[str, list[Result]] = {}
    for r in plain:
        by.setdefault(r.model, []).append(r)
    done = {n: rs for n, rs in by.items() if all(r.status == "ok" for r in rs)}
    return {
        "graphs": len(by),
        "exact": sum(all(r.exact for r in rs) for rs in done.values()),
        "at_the_bound": sum(all(r.reached for r in rs) for rs in done.values()),
        "refused": sorted(n for n, rs in by.items() if any(r.status.startswith("refused") for r in rs)),
        "crashed": sorted(n for n, rs in by.items() if any(r.status.startswith("crashed") for r in rs)),
        "wrong": sorted(n for n, rs in done.items() if not all(r.exact for r in rs)),
        "above_the_bound": sorted(n for n, rs in done.items() if not all(r.reached for r in rs)),
    }
