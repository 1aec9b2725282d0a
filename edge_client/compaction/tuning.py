"""How wide a compact model's layers should be: by a rule, or on this device by measurement.

    `none`  as narrow as the mask allows
    `rule`  what ONNX Runtime's convolutions need, from shapes alone (`ruled`): the same bytes on every device
    N       widths that are read are multiples of N, as far as there are channels
    `auto`  what runs fastest here

`auto` looks up in a table how long each layer takes alone, at widths that are multiples of 1, 4, 8 and 16. Each stream
of channels (`width.Stream`) gets the multiple that suits the layers at both its ends. The table is measured as far as
needed, and kept in a file for this processor and this version of ONNX Runtime. Then whole models are timed in turns: as
narrow as possible, by the rule, with the table's widths, with all layers of a stream alike, with the channels besides
that no layer reads directly (such as those of attention heads), with all channels of streams, and whole. The fastest is
taken; of two as fast, the one with fewer multiply-adds. Without a clock `auto` is the rule. All but `auto` have no more
multiply-adds than the dense model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edge_client.align import Align
from edge_client.compaction import convolutions
from edge_client.compaction.smaller import Smaller, cut, whole
from edge_client.compaction.study import Study, study
from edge_client.compaction.width import (
    Stream,
    everywhere,
    forced,
    is_depthwise,
    live_channels,
    rounded,
    streams,
    widened,
)
from edge_client.compaction.writer import FASTEST, FEWEST, Costs
from edge_client.errors import CompactionError, ConfigError
from edge_client.graph.nodes import settings
from edge_client.measure.engines import onnx_call
from edge_client.measure.latency import in_turns
from edge_client.measure.machine import processor
from edge_client.measure.macs import macs

STEPS = (1, 4, 8, 16)
RULE = 4  # channels of ONNX Runtime's blocked convolutions
SECONDS = 1.0  # for timing whole models, beyond the fewest runs
EQUAL = 1.01  # times within this factor count as equal


@dataclass(frozen=True)
class Work:
    """A layer alone: `places` it is computed at (a linear layer), or the size of its image and its settings."""

    kind: str
    inner: int
    out: int
    places: tuple[int, ...]
    kernel: tuple[int, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()
    depthwise: bool = False

    @property
    def key(self) -> str:
        """The layer as a line of the table."""
        words = [
            self.kind + ("-depthwise" if self.depthwise else ""),
            f"{self.inner}->{self.out}",
            *map(str, self.places),
        ]
        words += [f"kernel {'x'.join(map(str, self.kernel))}"] if self.kernel else []
        return " ".join([*words, *(f"{k} {v}" for k, v in self.given if k != "group")])


@dataclass(frozen=True)
class Clock:
    """What measures: `layer` gives the microseconds of a layer alone, `models` the milliseconds of whole models."""

    layer: Callable[[Work], float]
    models: Callable[[Sequence[bytes]], Sequence[float]]


@dataclass
class Table:
    """Microseconds of layers on this device, in a file that is read once and added to; None: kept in memory only."""

    path: Path | None
    measure: Callable[[Work], float]
    known: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None:
            with suppress(OSError, ValueError, AttributeError):  # another file there: measured again
                found = json.loads(self.path.read_text("utf-8"))
                self.known = {str(k): float(v) for k, v in found.items() if isinstance(v, (int, float)) and v > 0}

    def __call__(self, work: Work) -> float:
        """Microseconds of `work`."""
        if work.key not in self.known:
            self.known[work.key] = self.measure(work)
        return self.known[work.key]

    def save(self) -> None:
        """Write the file; a folder that cannot be written only costs the next measurement."""
        if self.path is not None:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self.path.with_suffix(f".{os.getpid()}")
                fresh.write_text(json.dumps(self.known, indent=0, sort_keys=True), "utf-8")
                os.replace(fresh, self.path)


def table() -> Table:
    """This device's table, in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maskfleet"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"layers onnxruntime {ort.__version__} {processor()}").strip("-")
    return Table(folder / f"{name}.json", microseconds)


def microseconds(work: Work) -> float:
    """Time `work` alone in ONNX Runtime, one thread: the median processor time of a call."""
    random = np.random.default_rng(0)
    shape: tuple[int, ...] = (1, work.inner, *work.places)
    given = {**dict(work.given), "group": work.inner if work.depthwise else 1}
    if work.kind == "Conv":
        size = (work.out, 1 if work.depthwise else work.inner, *work.kernel)
    elif work.kind == "ConvTranspose":
        size = (work.inner, work.out, *work.kernel)
    else:
        shape, given, size = (*work.places, work.inner), {}, (work.inner, work.out)
    weight = random.standard_normal(size)
    node = helper.make_node(work.kind, ["x", "w"], ["y"], **given)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "layer",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight.astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    call = onnx_call(model.SerializeToString(), random.standard_normal(shape).astype(np.float32))
    return 1e3 * float(np.median(in_turns([call], runs=15, warm_up=3).cpu))


def clock(sample: NDArray[Any]) -> Clock:
    """The clock of this device for models that read `sample`, a batch of one."""

    def models(data: Sequence[bytes]) -> list[float]:
        found = in_turns([onnx_call(d, sample) for d in data], runs=200, warm_up=5, seconds=SECONDS * len(data))
        return [float(np.median(t)) for t in found.cpu]

    return Clock(table(), models)


def aligned(found: Study, align: Align, clock: Clock | None) -> Smaller:
    """The smaller graph of `found` with the widths of `align`. Raises CompactionError when it cannot be written.

    Where a model of `none`, `rule` or N has more multiply-adds than the dense one, the narrowest is taken, and where
    that has more too, the dense one.
    """
    if align == "none":
        return _no_dearer(found, cut(found, FEWEST))
    if align == "rule" or (align == "auto" and clock is None):
        return _no_dearer(found, ruled(found))
    if align != "auto":
        costs = replace(FEWEST, multiple=align)
        return _no_dearer(found, _wide(found, lambda stream, n: align, False, costs) or cut(found, costs))
    assert clock is not None
    steps = {s.values: _step(found, s, clock.layer) for s in streams(found)}
    if isinstance(clock.layer, Table):
        clock.layer.save()
    narrow = cut(found, FEWEST)
    made = [
        narrow,
        ruled(found),
        *(_wide(found, lambda s, n: steps[s.values], joined, FASTEST) for joined in (False, True)),
        _wide(found, lambda s, n: steps[s.values] if s.readers else s.size, True, FASTEST),
        _wide(found, lambda s, n: s.size, True, FASTEST),
        whole(found, "the model with all channels runs fastest here"),
    ]
    candidates = list({m.model.SerializeToString(): m for m in made if m is not None}.items())
    if len(candidates) == 1:
        return narrow
    times = clock.models([data for data, _ in candidates])
    # In the order of their multiply-adds, nearly: the first of those as fast as the fastest.
    return next(m for (_, m), ms in zip(candidates, times, strict=True) if ms <= EQUAL * min(times))


def _no_dearer(found: Study, made: Smaller) -> Smaller:
    """`made`, or the narrowest graph, or the dense one: the first that has no more multiply-adds than the dense one."""
    why = "what a smaller model needs instead of dead channels has more multiply-adds, so all stay"
    try:
        most = macs(whole(found, why).model)
        if macs(made.model) <= most:
            return made
        narrow = cut(found, FEWEST)
        return narrow if macs(narrow.model) <= most else whole(found, why)
    except ConfigError:  # work that depends on the data cannot be compared
        return made


def ruled(found: Study) -> Smaller:
    """The smaller graph with the widths that ONNX Runtime's convolutions need, from shapes alone."""

    def multiple(stream: Stream, count: int) -> int:
        block = FASTEST.block
        if stream.depthwise:
            return block if -(-count // block) * block <= stream.size else RULE
        return RULE if stream.convolved and count > block else 1

    return _wide(found, multiple, False, FASTEST) or cut(found, FASTEST)


def _wide(found: Study, multiple: Callable[[Stream, int], int], joined: bool, costs: Costs) -> Smaller | None:
    """The graph with channels that come back; None where none does, or where it cannot be written with them."""
    extra = forced(found, multiple, joined)
    if not extra:
        return None
    try:
        return cut(study(found.net, widened(extra)), costs)
    except CompactionError:
        return None


def _step(s: Study, stream: Stream, layer: Callable[[Work], float]) -> int:
    """The multiple at which the layers of `stream` take the least time; the smallest of equal ones."""
    axes = dict(stream.values)
    union = everywhere(s, stream)
    times = []
    for step in STEPS:
        total = 0.0
        for node in (*stream.layers, *stream.depthwise):
            kept = live_channels(s, node.output[0], axes[node.output[0]])
            out = int(rounded(kept, step, union).sum())
            total += layer(_work(s, node, out if node in stream.depthwise else None, out, step))
        inner = int(rounded(union, step, union).sum())
        total += sum(layer(_work(s, node, inner, None, step)) for node in stream.readers)
        times.append(total)
    return next(step for step, time in zip(STEPS, times, strict=True) if time <= EQUAL * min(times))


def _work(s: Study, node: NodeProto, inner: int | None, out: int | None, step: int) -> Work:
    """`node` with so many inputs and outputs; where None, its own live ones at multiples of `step`."""
    given, made = s.shape(node.input[0]), s.shape(node.output[0])
    convolves = convolutions.is_convolution(s, node)
    axes = (1, 1) if convolves else (len(given) - 1, len(made) - 1)
    widths = []
    for name, axis, width in ((node.input[0], axes[0], inner), (node.output[0], axes[1], out)):
        if width is None:
            kept = live_channels(s, name, axis)
            width = int(rounded(kept, step, kept).sum())
        widths.append(max(1, width))
    if not convolves:
        return Work("MatMul", widths[0], widths[1], (prod(given[:-1]),))
    kernel = s.net.constants[node.input[1]].shape[2:]
    kept_settings = tuple((k, v) for k, v in sorted(settings(node).items()) if k not in ("group", "output_shape"))
    return Work(node.op_type, widths[0], widths[1], given[2:], kernel, kept_settings, is_depthwise(s, node))
