"""Cuts channels out of an exported graph, training or evaluation: the same nodes on smaller tensors.

`edge_client.narrow` says which entries of each parameter stay. This module follows these entries through the graph:
which entries of each axis of a value stay. What an operator does with its axes is said in `edge_client.axes`; the rules
here are for operators that move entries from one axis to others, and for recurrent layers. The exporter writes sizes as
constants, such as the target of a `Reshape`; these are rewritten, and so are constant tensors that meet a cut value. A
sum or a product over an axis that loses entries is cut only where both factors lose the same ones. So for values that
are zero in all that was cut, every number that stays is the whole graph's.

An operator without a rule, and one that would mix the channels of a group, is refused if a cut value reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from edge_client.axes import Shape, axes_of
from edge_client.bundle import Bundle, Manifest
from edge_client.errors import BundleError, ConfigError
from edge_client.narrow import Axes, Channels, cuts, narrow, taken
from edge_client.nodes import settings

PROBE = 2  # samples of the batch for which shapes are inferred
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
UNLIKE = "joins values of which different channels stay"
Mask = NDArray[np.bool_] | None
"""The entries of an axis that stay; None: all."""


def cut(model: ModelProto, sample: Shape, tensors: Mapping[str, Axes]) -> ModelProto:
    """A copy of `model` in which of each of `tensors`, by name, the entries given stay.

    `sample` is the shape of one sample, the input `x` without its batch axis. A gradient ``grad:<name>`` and a
    statistic ``new:<name>`` lose what their tensor loses; no other output may lose anything. Raises ConfigError that
    says what of the graph does not allow the cut.
    """
    made = ModelProto()
    made.CopyFrom(model)
    return _Cut(made, _shapes(made, sample), tensors).run()


def _shapes(model: ModelProto, sample: Shape) -> dict[str, Shape | None]:
    """The shape of every value for PROBE samples, None where it does not follow from the graph. Raises ConfigError."""
    probe = ModelProto()
    probe.CopyFrom(model)
    for value in probe.graph.input:
        dims = value.type.tensor_type.shape.dim
        sizes = (PROBE, *sample) if value.name == "x" else [d.dim_value or PROBE for d in dims]
        value.type.tensor_type.shape.CopyFrom(helper.make_tensor_type_proto(1, sizes).tensor_type.shape)
    try:
        graphs = [onnx.shape_inference.infer_shapes(probe, strict_mode=True, data_prop=True).graph]
    except onnx.shape_inference.InferenceError as error:
        raise ConfigError(f"its shapes disagree: {error}") from None
    found: dict[str, Shape | None] = {}
    for graph in graphs:
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
        found |= dict.fromkeys(name for node in graph.node for name in node.output)
        found |= {t.name: tuple(t.dims) for t in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
                found[value.name] = tuple(d.dim_value for d in kind.shape.dim)
    return found


class _Cut:
    """The graph during the cut: `axes` of the values that lose something, `lengths` of the shape vectors of such.

    `nodes` are those written so far, of the graph or, within a Scan, of its body. Where `lenient`, a sum over entries
    of which one factor has more is let pass.
    """

    def __init__(self, model: ModelProto, shapes: dict[str, Shape | None], tensors: Mapping[str, Axes]) -> None:
        self.model, self.graph, self.tensors = model, model.graph, tensors
        self.shapes = shapes
        self.constants = {t.name: t for t in self.graph.initializer}
        self.axes: dict[str, Axes] = {v.name: tensors[v.name] for v in self.graph.input if v.name in tensors}
        self.lengths: dict[str, Axes] = {}
        self.nodes: list[NodeProto] = []
        self.lenient = False
        self._made: dict[tuple[Any, ...], str] = {}
        self._count = 0

    def run(self) -> ModelProto:
        self.follow(self.graph)
        for value in self.graph.input:
            _declare(value, self.axes.get(value.name, ()))
        for value in self.graph.output:
            axes = self.axes.get(value.name, ())
            kind, _, name = value.name.partition(":")
            due = self.tensors.get(name, ()) if kind in ("grad", "new") else ()
            if not _equal(axes, due):
                raise ConfigError(f"its output {value.name!r} would not fit")
            _declare(value, axes)
        return self.model

    def follow(self, graph: GraphProto) -> None:
        """Write the nodes of `graph` on what stays, in place."""
        outside, self.nodes = self.nodes, []
        for node in graph.node:
            if node.op_type == "Scan" or any(v in self.axes or v in self.lengths for v in node.input):
                if node.op_type != "Expand" and any(v in self.lengths for v in node.input):
                    raise refusal(node, "computes with the number of channels")
                rule = RULES.get(node.op_type, _named)
                for name, axes in zip(list(node.output), rule(self, node), strict=True):
                    self.put(name, axes)
            self.nodes.append(node)
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        self.nodes = outside

    def put(self, name: str, axes: Axes) -> None:
        """Of the value `name` stays `axes`."""
        self.axes.pop(name, None)
        axes = tuple(None if stays is None or stays.all() else stays for stays in axes)
        if any(stays is not None for stays in axes):
            self.axes[name] = axes

    def shape(self, name: str) -> Shape:
        """The shape in the whole graph, for PROBE samples; of an input left out ()."""
        found = self.shapes[name] if name else ()
        if found is None:
            raise ConfigError(f"value {name!r} has no known shape")
        return found

    def stays(self, name: str) -> Axes:
        """What stays of a value."""
        return self.axes.get(name) or (None,) * len(self.shape(name))

    def values(self, node: NodeProto, index: int) -> list[int]:
        """Input `index` of `node`, which must be a constant of integers."""
        if len(node.input) <= index or node.input[index] not in self.constants:
            raise refusal(node, "takes no constant sizes")
        found: list[int] = numpy_helper.to_array(self.constants[node.input[index]]).ravel().tolist()
        return found

    def fit(self, node: NodeProto, index: int, due: Axes) -> None:
        """Let `node` read of input `index` only `due`, entries that stay of it."""
        name, own = node.input[index], self.stays(node.input[index])
        if name in self.constants and any(stays is not None for stays in due):
            node.input[index] = self.constant(taken(numpy_helper.to_array(self.constants[name]), due))
            return
        for axis, (mine, stays) in enumerate(zip(own, due, strict=True)):
            if stays is not None and not _equal((mine,), (stays,)):
                if mine is not None and not mine[stays].all():
                    raise refusal(node, UNLIKE)
                kept = self.constant(np.flatnonzero(stays if mine is None else stays[mine]))
                node.input[index] = self.emit("Gather", [node.input[index], kept], axis=axis)

    def sized(self, name: str, axes: Axes) -> str:
        """The vector `name`, the sizes of the last of `axes`, with the sizes of what stays."""
        due = axes[len(axes) - self.shape(name)[0] :]
        sizes = np.array([0 if stays is None else stays.sum() for stays in due], np.int64)
        if not sizes.any():
            return name
        if name in self.constants:
            before = numpy_helper.to_array(self.constants[name])
            return self.constant(np.where((sizes > 0) & (before > 1), sizes, before))
        return self.emit("Where", [self.constant(sizes > 0), self.constant(sizes), name])

    def emit(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        made = self.fresh()
        self.nodes.append(helper.make_node(op, inputs, [made], **attributes))
        return made

    def fresh(self) -> str:
        """A name that no value has."""
        while (name := f"n{self._count}") in self.shapes:
            self._count += 1
        self.shapes[name] = None
        return name

    def constant(self, value: NDArray[Any]) -> str:
        """The name of a new constant, one for all that are equal."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            made = numpy_helper.from_array(value, self.fresh())
            self._made[key], self.constants[made.name], self.shapes[made.name] = made.name, made, value.shape
            self.graph.initializer.append(made)
        return self._made[key]


def refusal(node: NodeProto, why: str) -> ConfigError:
    return ConfigError(f"node {node.output[0]!r} ({node.op_type}) {why}")


def _declare(value: ValueInfoProto, axes: Axes) -> None:
    for dim, stays in zip(value.type.tensor_type.shape.dim, axes, strict=False):
        if stays is not None:
            dim.dim_value = int(stays.sum())


def _equal(a: Axes, b: Axes) -> bool:
    return len(a) == len(b) and all(
        x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in zip(a, b, strict=True)
    )


# --- one rule for each kind of operator: (graph, node) -> the axes of its outputs


def _named(g: _Cut, node: NodeProto) -> list[Axes]:
    """An operator that keeps axes together: what one input lost of an axis is taken out of the others.

    Not of an axis that is summed over: there all must have lost the same.
    """
    listed = None
    if node.op_type.startswith("Reduce"):
        listed = g.values(node, 1) if len(node.input) > 1 else settings(node).get("axes")
    known = axes_of(node, [g.shape(v) for v in node.input], g.shape(node.output[0]), listed)
    if known is None:
        raise refusal(node, "is not an operator whose channels can be cut")
    left: dict[Any, NDArray[np.bool_]] = {}
    for name, names in zip(node.input, known.inputs, strict=False):
        for key, stays in zip(names, g.stays(name), strict=True):
            if stays is not None:
                left[key] = left.get(key, stays) & stays
    if (known.whole | {None}) & left.keys():
        raise refusal(node, "works along the axis of the channels")
    for k, names in enumerate(known.inputs):
        due = tuple(
            left.get(key) if key in known.output else own
            for key, own in zip(names, g.stays(node.input[k]), strict=True)
        )
        if not g.lenient and not _equal(due, tuple(left.get(key) for key in names)):
            raise refusal(node, UNLIKE)
        g.fit(node, k, due)
    return [tuple(left.get(key) for key in known.output)] * len(node.output)


def _conv(g: _Cut, node: NodeProto) -> list[Axes]:
    """Whole groups leave a grouped convolution."""
    groups = settings(node).get("group", 1)
    if groups == 1:
        return _named(g, node)
    x, weight = g.stays(node.input[0]), g.stays(node.input[1])
    if x[1] is None or weight[0] is None or sum(stays is not None for stays in (*x, *weight)) > 2:
        raise refusal(node, "is a grouped convolution")
    parts = np.concatenate([x[1].reshape(groups, -1), weight[0].reshape(groups, -1)], axis=1)
    if (parts != parts[:, :1]).any():
        raise refusal(node, "loses a part of a group")
    made = np.repeat(parts[:, 0], g.shape(node.output[0])[1] // groups)
    if len(node.input) > 2:
        g.fit(node, 2, (made,))
    _set(node, "group", int(parts[:, 0].sum()))
    return [(None, made, *x[2:])]


def _set(node: NodeProto, name: str, value: int) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _reshape(g: _Cut, node: NodeProto) -> list[Axes]:
    """What stays is marked in a whole tensor, which is reshaped; the marks must again be those of whole axes."""
    marks = np.ones(g.shape(node.input[0]), np.bool_)
    for i, stays in enumerate(g.stays(node.input[0])):
        if stays is not None:
            marks &= stays.reshape(-1, *[1] * (marks.ndim - 1 - i))
    moved = marks.reshape(g.shape(node.output[0]))
    others = [tuple(j for j in range(moved.ndim) if j != i) for i in range(moved.ndim)]
    found = [np.asarray(moved.any(axis=rest)) for rest in others]
    if np.count_nonzero(moved) != prod(int(stays.sum()) for stays in found):
        raise refusal(node, "spreads the channels over several axes")
    if node.op_type == "Squeeze" and len(node.input) < 2:  # it would also remove a last channel
        raise refusal(node, "takes no constant sizes")
    if node.op_type == "Reshape":
        node.input[1] = g.sized(node.input[1], tuple(None if stays.all() else stays for stays in found))
    return [tuple(found)]


def _concat(g: _Cut, node: NodeProto) -> list[Axes]:
    before = list(node.input)
    every = [g.stays(name) for name in before]
    axis = settings(node)["axis"] % len(every[0])
    axes: list[Mask] = [next((x[i] for x in every if x[i] is not None), None) for i in range(len(every[0]))]
    for k, own in enumerate(every):
        g.fit(node, k, (*axes[:axis], own[axis], *axes[axis + 1 :]))
    parts = [np.ones(g.shape(name)[axis], np.bool_) for name in before]
    for part, own in zip(parts, every, strict=True):
        part &= True if own[axis] is None else own[axis]
    axes[axis] = np.concatenate(parts)
    return [tuple(axes)]


def _split(g: _Cut, node: NodeProto) -> list[Axes]:
    x = g.stays(node.input[0])
    axis = settings(node).get("axis", 0) % len(x)
    stays = x[axis]
    if stays is None:
        return [x] * len(node.output)
    parts = np.split(stays, np.cumsum([g.shape(name)[axis] for name in node.output])[:-1])
    sizes = np.array([part.sum() for part in parts])
    if not sizes.all():
        raise refusal(node, "loses all its channels")
    if len(node.input) > 1 or (sizes != sizes[0]).any():
        node.CopyFrom(helper.make_node("Split", [node.input[0], g.constant(sizes)], node.output, axis=axis))
    return [(*x[:axis], part, *x[axis + 1 :]) for part in parts]


def _slice(g: _Cut, node: NodeProto) -> list[Axes]:
    """Along an axis that loses entries, the bounds move by what is gone before them."""
    made = list(g.stays(node.input[0]))
    if len(node.input) > 3 and all(made[i] is None for i in g.values(node, 3)):
        return [tuple(made)]
    starts, ends = g.values(node, 1), g.values(node, 2)
    axes = g.values(node, 3) if len(node.input) > 3 else list(range(len(starts)))
    steps = g.values(node, 4) if len(node.input) > 4 else [1] * len(axes)
    for k, i in enumerate(axes):
        stays = made[i]
        if stays is None:
            continue
        if steps[k] != 1:
            raise refusal(node, "works along the axis of the channels")
        low, high, _ = slice(starts[k], ends[k]).indices(len(stays))
        made[i] = stays[low:high]
        starts[k], ends[k] = int(stays[:low].sum()), int(stays[:high].sum())
        if starts[k] == ends[k]:
            raise refusal(node, "loses all its channels")
    node.input[1], node.input[2] = g.constant(np.array(starts)), g.constant(np.array(ends))
    return [tuple(made)]


def _pad(g: _Cut, node: NodeProto) -> list[Axes]:
    """What is added to an axis stays; where a negative width takes entries away, it takes those that stay."""
    made, widths = list(g.stays(node.input[0])), g.values(node, 1)
    axes = [i % len(made) for i in g.values(node, 3)] if len(node.input) > 3 and node.input[3] else range(len(made))
    for k, i in enumerate(axes):
        stays, low, high = made[i], widths[k], widths[k + len(axes)]
        if stays is None or not (low or high):
            continue
        if settings(node).get("mode", b"constant") != b"constant":
            raise refusal(node, "works along the axis of the channels")
        gone = stays[: max(0, -low)], stays[len(stays) - max(0, -high) :]
        widths[k], widths[k + len(axes)] = (max(n, 0) - int(x.sum()) for n, x in zip((low, high), gone, strict=True))
        inner = stays[len(gone[0]) : len(stays) - len(gone[1])]
        made[i] = np.pad(inner, (max(low, 0), max(high, 0)), constant_values=True)
    node.input[1] = g.constant(np.array(widths))
    return [tuple(made)]


def _shape(g: _Cut, node: NodeProto) -> list[Axes]:
    given, x = settings(node), g.stays(node.input[0])
    lengths = x[given.get("start", 0) : given.get("end", len(x))]
    if any(stays is not None for stays in lengths):
        g.lengths[node.output[0]] = lengths
    return [(None,)]


def _expand(g: _Cut, node: NodeProto) -> list[Axes]:
    """An axis gets its channels from the value, or all of them from the shape of a cut value."""
    if node.input[1] not in g.lengths:
        (axes,) = _named(g, node)
        node.input[1] = g.sized(node.input[1], axes)
        return [axes]
    if prod(g.shape(node.input[0])) > 1:
        raise refusal(node, "computes with the number of channels")
    return [g.lengths[node.input[1]]]


def _recurrent(g: _Cut, node: NodeProto) -> list[Axes]:
    """Units leave with their rows of all gates, alike in both directions."""
    names = [*node.input, *[""] * 5]
    if names[7] or settings(node).get("layout", 0):
        raise refusal(node, "is not an operator whose channels can be cut")
    read, unit = g.stays(names[0])[2], g.stays(names[2])[2]
    gates, both = (None if unit is None else np.tile(unit, k * GATES[node.op_type]) for k in (1, 2))
    weights: list[Axes] = [(None, None, read), (None, gates, read), (None, gates, unit), (None, both), (None,)]
    start: Axes = (None, None, unit)
    for k, (name, axes) in enumerate(zip(node.input, [*weights, start, start], strict=False)):
        if k > 4 and name:
            g.fit(node, k, axes)
        elif name and not _equal(g.stays(name), axes):
            raise refusal(node, UNLIKE)
    if unit is not None:
        _set(node, "hidden_size", int(unit.sum()))
    return [(None, None, None, unit), start, start][: len(node.output)]


def _scan(g: _Cut, node: NodeProto) -> list[Axes]:
    """The body is cut as a graph is. Of a state stays what stays at the end of a step, found in a trial before."""
    given = settings(node)
    body = next(a.g for a in node.attribute if a.name == "body")
    count = len(node.input) - given["num_scan_inputs"]
    scanned = [g.stays(name) for name in node.input[count:]]
    others = (*given.get("scan_input_axes", ()), *given.get("scan_output_axes", ()))
    if any(others) or any(x[0] is not None for x in scanned):
        raise refusal(node, "works along the axis of the channels")
    starts = [g.stays(name) for name in node.input[:count]]
    for g.lenient in (True, False):
        step = GraphProto()
        step.CopyFrom(body)
        for value, axes in zip(body.input, [*starts, *(x[1:] for x in scanned)], strict=True):
            g.put(value.name, axes)
        g.follow(step)
        found = [g.stays(value.name) for value in step.output]
        if not g.lenient and not all(map(_equal, starts, found)):
            raise refusal(node, "carries channels from step to step of which different ones stay")
        starts = found[:count]
    body.CopyFrom(step)
    for k, axes in enumerate(starts):
        g.fit(node, k, axes)
    return [*starts, *((None, *axes) for axes in found[count:])]


RULES: dict[str, Callable[[_Cut, NodeProto], list[Axes]]] = {
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Expand": _expand,
    "Flatten": _reshape,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "Pad": _pad,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Scan": _scan,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
}


@dataclass(frozen=True)
class CutGraphs:
    """What a trainer opens instead of a bundle: a smaller network's manifest and its graphs, in memory."""

    manifest: Manifest
    graphs: Mapping[str, bytes]
    whole: Bundle
    kept: Channels
    """The channels of the whole network that stay."""

    def part(self, name: str) -> bytes:
        """A graph of the smaller network."""
        return self.graphs[name]


def cut_graphs(bundle: Bundle | CutGraphs, kept: Channels, parts: Iterable[str]) -> CutGraphs:
    """The graphs `parts` of a bundle with the channels `kept`. Raises ConfigError when they cannot be cut."""
    small = narrow(bundle.manifest, kept).manifest
    if isinstance(bundle, CutGraphs):  # the whole graphs are cut once, by the channels of both
        kept = {**bundle.kept, **{k: bundle.kept[k][v] if k in bundle.kept else v for k, v in kept.items()}}
        bundle = bundle.whole
    tensors, graphs = cuts(bundle.manifest, kept), {}
    for name in parts:
        try:
            model = onnx.load(bundle.part(name))
        except Exception as error:  # protobuf's own error class depends on its version
            raise BundleError(f"{name} does not open: {error}; export the bundle again") from None
        try:
            graphs[name] = cut(model, small.input.shape, tensors).SerializeToString()
        except ConfigError as error:
            advice = "keep the groups that reach it whole"
            raise ConfigError(f"the channels cannot be cut out of {name}: {error}; {advice}") from None
    return CutGraphs(small, graphs, bundle, kept)
