"""Cuts channels out of an exported graph, training or evaluation: the same nodes on smaller tensors.

`edge_client.narrow` says which entries of each parameter stay. This module follows these entries through the graph, one
rule for each kind of operator: which entries of each axis of a value stay. The exporter writes sizes as constants in
two places, the target of a `Reshape` and the shape of an `Expand`; these are rewritten, and so are constant tensors
that meet a cut value. A sum or a product over an axis that loses entries is cut only where both factors lose the same
ones. So for values that are zero in all that was cut, every number that stays is the whole graph's.

An operator without a rule, and one that would mix the channels of a group, is refused if a cut value reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from edge_client.bundle import Bundle, Manifest
from edge_client.errors import BundleError, ConfigError
from edge_client.narrow import Axes, Channels, cuts, narrow, taken
from edge_client.nodes import settings
from edge_client.runtimes.onnx import open_onnx

PROBE = 2  # samples of the batch for which shapes are inferred
POINTWISE = re.compile(
    "Abs|Add|And|Cast|Ceil|Clip|Cos|Div|Elu|Equal|Erf|Exp|Floor|Gelu|Greater|GreaterOrEqual|HardSigmoid|HardSwish|"
    "Identity|LeakyRelu|Less|LessOrEqual|Log|Max|Mean|Min|Mish|Mod|Mul|Neg|Not|Or|PRelu|Pow|Reciprocal|Relu|Round|"
    "Selu|Sigmoid|Sign|Sin|Softplus|Softsign|Sqrt|Sub|Sum|Tanh|ThresholdedRelu|Where|Xor"
)
POOLS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool")
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")


def cut(
    model: ModelProto,
    sample: tuple[int, ...],
    tensors: Mapping[str, Axes],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelProto:
    """A copy of `model` in which of each of `tensors`, by name, the entries given stay.

    `sample` is the shape of one sample, the input `x` without its batch axis. A gradient ``grad:<name>`` and a
    statistic ``new:<name>`` lose what their tensor loses; no other output may lose anything. `shapes` are those of
    `shapes_of`, when the caller has them. Raises ConfigError when the graph does not allow the cut.
    """
    made = ModelProto()
    made.CopyFrom(model)
    return _Cut(made, shapes or shapes_of(made, sample), tensors).run()


class _Cut:
    """The graph during the cut: `axes` of the values that lose something, `lengths` of the shape vectors of such."""

    def __init__(self, model: ModelProto, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Axes]) -> None:
        self.model, self.tensors = model, tensors
        self.graph = model.graph
        self.shapes = shapes
        self.inputs = {v.name for v in self.graph.input}
        self.constants = {t.name: t for t in self.graph.initializer}
        self.makers = {name: node for node in self.graph.node for name in node.output}
        self.axes: dict[str, Axes] = {v.name: tensors[v.name] for v in self.graph.input if v.name in tensors}
        self.lengths: dict[str, Axes] = {}
        self.nodes: list[NodeProto] = []
        self._made: dict[tuple[Any, ...], str] = {}
        self._names = 0

    def run(self) -> ModelProto:
        for node in self.graph.node:
            if any(name in self.axes or name in self.lengths for name in node.input):
                rule = _pointwise if POINTWISE.fullmatch(node.op_type) else RULES.get(node.op_type)
                if rule is None or len(node.output) != 1:
                    raise refusal(node, "is not an operator whose channels can be cut")
                if node.op_type not in ("Concat", "Expand") and any(name in self.lengths for name in node.input):
                    raise refusal(node, "computes with the number of channels")
                axes = rule(self, node)
                if any(stays is not None for stays in axes):
                    self.axes[node.output[0]] = axes
            self.nodes.append(node)
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        for value in self.graph.input:
            _declare(value, self.axes.get(value.name, ()))
        for value in self.graph.output:
            axes = self.axes.get(value.name, ())
            kind, _, name = value.name.partition(":")
            due = self.tensors.get(name, ()) if kind in ("grad", "new") else ()
            if len(axes) != len(due) or not all(map(_equal, axes, due)):
                raise ConfigError(
                    f"the channels cannot be cut out of the graph: its output {value.name!r} would not fit; keep the "
                    "groups whole"
                )
            _declare(value, axes)
        return self.model

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the whole graph, for PROBE samples."""
        if name not in self.shapes:
            raise ConfigError(f"the channels cannot be cut out of the graph: value {name!r} has no known shape")
        return self.shapes[name]

    def stays(self, name: str) -> Axes:
        """What stays of a value."""
        return self.axes.get(name) or (None,) * len(self.shape(name))

    def values(self, node: NodeProto, index: int) -> list[int]:
        """Input `index` of `node`, which must be a constant of integers."""
        if len(node.input) <= index or node.input[index] not in self.constants:
            raise refusal(node, "takes no constant sizes")
        found: list[int] = numpy_helper.to_array(self.constants[node.input[index]]).ravel().tolist()
        return found

    def fresh(self) -> str:
        """A name that no value has."""
        self._names += 1
        name = f"n{self._names}"
        used = name in self.constants or name in self.makers or name in self.inputs
        return self.fresh() if used else name

    def constant(self, value: NDArray[Any]) -> str:
        """The name of a new constant, one for all that are equal."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            self._made[key] = self.fresh()
            self.graph.initializer.append(numpy_helper.from_array(value, self._made[key]))
        return self._made[key]


def refusal(node: NodeProto, why: str) -> ConfigError:
    return ConfigError(
        f"the channels cannot be cut out of the graph: node {node.output[0]!r} ({node.op_type}) {why}; keep the groups "
        "that reach it whole"
    )


def shapes_of(model: ModelProto, sample: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of every value for PROBE samples, by running the graph. Raises ConfigError when it does not run."""
    probe = ModelProto()
    probe.CopyFrom(model)
    feed: dict[str, NDArray[Any]] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        size = (PROBE, *sample) if value.name == "x" else tuple(d.dim_value for d in kind.shape.dim)
        size = (PROBE, *size[1:]) if value.name == "y" and size else size
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feed[value.name] = np.full(size, 0.5 if dtype.kind == "f" else 0, dtype)
    names = [name for node in model.graph.node for name in node.output if name]
    del probe.graph.output[:]
    probe.graph.output.extend(ValueInfoProto(name=name) for name in names)
    session = open_onnx(probe.SerializeToString(), what="the graph whose channels are cut", rewrite=False)
    try:
        made = session.run(names, feed)
    except Exception as error:  # onnxruntime raises a class of its own for every status
        raise ConfigError(f"the channels cannot be cut out of the graph, which does not run: {error}") from None
    found = {t.name: tuple(t.dims) for t in model.graph.initializer}
    found |= {name: value.shape for name, value in feed.items()}
    return found | {name: np.shape(value) for name, value in zip(names, made, strict=True)}


def _declare(value: ValueInfoProto, axes: Axes) -> None:
    for dim, stays in zip(value.type.tensor_type.shape.dim, axes, strict=False):
        if stays is not None:
            dim.dim_value = int(stays.sum())


def _equal(a: NDArray[np.bool_] | None, b: NDArray[np.bool_] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _whole(node: NodeProto, axes: Axes, indices: Any) -> None:
    """Refuse `node` if it works along an axis that loses entries."""
    if any(axes[i] is not None for i in indices):
        raise refusal(node, "works along the axis of the channels")


def _agree(node: NodeProto, *axes: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    if not all(_equal(axes[0], other) for other in axes[1:]):
        raise refusal(node, "joins values of which different channels stay")
    return axes[0]


# --- one rule for each kind of operator: (graph, node) -> the axes of its output


def _pointwise(g: _Cut, node: NodeProto) -> Axes:
    """Values are broadcast; a constant with an entry for each channel is cut as the others are."""
    rank = len(g.shape(node.output[0]))
    axes: list[NDArray[np.bool_] | None] = [None] * rank
    for name in filter(None, node.input):
        for i, stays in enumerate(g.stays(name), rank - len(g.shape(name))):
            axes[i] = axes[i] if stays is None else stays
    for k, name in enumerate(node.input):
        shape = g.shape(name) if name else ()
        own = [a if n > 1 else None for a, n in zip(axes[rank - len(shape) :], shape, strict=True)]
        if name in g.constants and any(a is not None for a in own):
            node.input[k] = g.constant(taken(numpy_helper.to_array(g.constants[name]), tuple(own)))
        elif name:
            for mine, stays in zip(own, g.stays(name), strict=True):
                _agree(node, mine, stays)
    return tuple(axes)


def _gemm(g: _Cut, node: NodeProto) -> Axes:
    given = settings(node)
    a, b = g.stays(node.input[0]), g.stays(node.input[1])
    a = a[::-1] if given.get("transA") else a
    b = b[::-1] if given.get("transB") else b
    _agree(node, a[1], b[0])
    if len(node.input) > 2 and g.shape(node.input[2]) and g.shape(node.input[2])[-1] > 1:
        _agree(node, b[1], g.stays(node.input[2])[-1])
    return a[0], b[1]


def _matmul(g: _Cut, node: NodeProto) -> Axes:
    """Axes before the matrices are broadcast."""
    a, b = (g.stays(name) for name in node.input)
    _agree(node, a[-1], b[-2])
    rank = max(len(a), len(b))
    lead: list[NDArray[np.bool_] | None] = []
    for i in range(rank - 2):
        own = []
        for name, x in zip(node.input, (a, b), strict=True):
            k = i - (rank - len(x))
            own += [x[k]] if k >= 0 and g.shape(name)[k] > 1 else []
        lead.append(_agree(node, *own) if own else None)
    return (*lead, a[-2], b[-1])


def _conv(g: _Cut, node: NodeProto) -> Axes:
    """Both directions: a weight is [out, in, ...], and a transposed convolution reads `out` and makes `in`."""
    x, weight = g.stays(node.input[0]), g.stays(node.input[1])
    _whole(node, x, [0, *range(2, len(x))])
    groups = settings(node).get("group", 1)
    if groups == 1:
        made, read = weight[:2] if node.op_type == "Conv" else weight[1::-1]
        _agree(node, x[1], read)
    else:
        made = _groups(g, node, groups, x[1], weight)
    if len(node.input) > 2 and node.input[2]:
        _agree(node, made, g.stays(node.input[2])[0])
    return (None, made, *x[2:])


def _groups(
    g: _Cut, node: NodeProto, groups: int, x: NDArray[np.bool_] | None, weight: Axes
) -> NDArray[np.bool_] | None:
    """Whole groups leave a grouped convolution."""
    if node.op_type != "Conv" or weight[1] is not None or (x is None) != (weight[0] is None):
        raise refusal(node, "is a grouped convolution")
    if x is None or weight[0] is None:
        return None
    parts = [x.reshape(groups, -1), weight[0].reshape(groups, -1)]
    stays = parts[0][:, 0]
    if any((part != stays[:, None]).any() for part in parts):
        raise refusal(node, "loses a part of a group")
    kept = [a for a in node.attribute if a.name != "group"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("group", int(stays.sum()))])
    return weight[0]


def _softmax(g: _Cut, node: NodeProto) -> Axes:
    x = g.stays(node.input[0])
    axis = settings(node).get("axis", -1) % len(x)
    _whole(node, x, range(axis, len(x)) if node.op_type == "LayerNormalization" else [axis])
    return x


def _batch_norm(g: _Cut, node: NodeProto) -> Axes:
    x = g.stays(node.input[0])
    _whole(node, x, [0, *range(2, len(x))])
    _agree(node, x[1], *(g.stays(name)[0] for name in node.input[1:]))
    return x


def _pool(g: _Cut, node: NodeProto) -> Axes:
    x = g.stays(node.input[0])
    _whole(node, x, range(2, len(x)))
    return x


def _reduce(g: _Cut, node: NodeProto) -> Axes:
    x, given = g.stays(node.input[0]), settings(node)
    axes = g.values(node, 1) if len(node.input) > 1 else given.get("axes", [])
    reduced = {i % len(x) for i in axes or ([] if given.get("noop_with_empty_axes") else range(len(x)))}
    _whole(node, x, reduced)
    keep = given.get("keepdims", 1)
    return tuple(stays for i, stays in enumerate(x) if keep or i not in reduced)


def _reshape(g: _Cut, node: NodeProto) -> Axes:
    """What stays is marked in a whole tensor, which is reshaped; the marks must again be those of whole axes."""
    target = g.shape(node.output[0])
    marks = np.ones(g.shape(node.input[0]), np.bool_)
    for i, stays in enumerate(g.stays(node.input[0])):
        if stays is not None:
            marks &= stays.reshape(-1, *[1] * (marks.ndim - 1 - i))
    moved = marks.reshape(target)
    others = [tuple(j for j in range(moved.ndim) if j != i) for i in range(moved.ndim)]
    found: list[NDArray[np.bool_]] = [np.asarray(moved.any(axis=rest)) for rest in others]
    if np.count_nonzero(moved) != prod(int(stays.sum()) for stays in found):
        raise refusal(node, "spreads the channels over several axes")
    axes: Axes = tuple(None if stays.all() else stays for stays in found)
    if node.op_type == "Reshape":
        sizes = [
            size if size == -1 or stays is None else int(stays.sum())
            for size, stays in zip(g.values(node, 1), axes, strict=True)
        ]
        node.input[1] = g.constant(np.array(sizes, np.int64))
    return axes


def _transpose(g: _Cut, node: NodeProto) -> Axes:
    x = g.stays(node.input[0])
    order: Sequence[int] = settings(node).get("perm", range(len(x))[::-1])
    return tuple(x[i] for i in order)


def _unsqueeze(g: _Cut, node: NodeProto) -> Axes:
    rank, left = len(g.shape(node.output[0])), list(g.stays(node.input[0]))
    added = {i % rank for i in g.values(node, 1)}
    return tuple(None if i in added else left.pop(0) for i in range(rank))


def _squeeze(g: _Cut, node: NodeProto) -> Axes:
    x = g.stays(node.input[0])
    removed = {i % len(x) for i in g.values(node, 1)}  # without axes it would also remove a last channel
    return tuple(stays for i, stays in enumerate(x) if i not in removed)


def _concat(g: _Cut, node: NodeProto) -> Axes:
    axis = int(settings(node)["axis"])
    if any(name in g.lengths for name in node.input):
        parts = [g.lengths.get(name) or (None,) * g.shape(name)[0] for name in node.input]
        g.lengths[node.output[0]] = tuple(stays for part in parts for stays in part)
        return (None,)
    every = [g.stays(name) for name in node.input]
    axis %= len(every[0])
    joined = [
        np.ones(g.shape(name)[axis], np.bool_) if x[axis] is None else x[axis]
        for name, x in zip(node.input, every, strict=True)
    ]
    axes: list[NDArray[np.bool_] | None] = [
        None if i == axis else _agree(node, *(x[i] for x in every)) for i in range(len(every[0]))
    ]
    if any(x[axis] is not None for x in every):
        axes[axis] = np.concatenate([j for j in joined if j is not None])
    return tuple(axes)


def _slice(g: _Cut, node: NodeProto) -> Axes:
    """Along an axis that loses entries, the bounds move by what is gone before them."""
    x = g.stays(node.input[0])
    if len(node.input) > 1 and all(stays is None for stays in x):
        return x
    starts, ends = g.values(node, 1), g.values(node, 2)
    axes = [i % len(x) for i in g.values(node, 3)] if len(node.input) > 3 else list(range(len(starts)))
    if all(x[i] is None for i in axes):
        return x
    steps = g.values(node, 4) if len(node.input) > 4 else [1] * len(axes)
    made = list(x)
    for k, i in enumerate(axes):
        stays = x[i]
        if stays is None:
            continue
        if steps[k] != 1:
            raise refusal(node, "works along the axis of the channels")
        low, high, _ = slice(starts[k], ends[k]).indices(len(stays))
        made[i] = stays[low:high]
        starts[k], ends[k] = int(stays[:low].sum()), int(stays[:high].sum())
        if starts[k] == ends[k]:
            raise refusal(node, "loses all its channels")
    node.input[1], node.input[2] = g.constant(np.array(starts, np.int64)), g.constant(np.array(ends, np.int64))
    return tuple(made)


def _pad(g: _Cut, node: NodeProto) -> Axes:
    x, widths = g.stays(node.input[0]), g.values(node, 1)
    axes = [i % len(x) for i in g.values(node, 3)] if len(node.input) > 3 and node.input[3] else list(range(len(x)))
    _whole(node, x, [i for k, i in enumerate(axes) if widths[k] or widths[k + len(axes)]])
    return x


def _shape(g: _Cut, node: NodeProto) -> Axes:
    given, x = settings(node), g.stays(node.input[0])
    lengths = x[given.get("start", 0) : given.get("end", len(x))]
    if any(stays is not None for stays in lengths):
        g.lengths[node.output[0]] = lengths
    return (None,)


def _expand(g: _Cut, node: NodeProto) -> Axes:
    """An axis gets its channels from the value, or from the shape of a cut value; a constant size is rewritten."""
    name = node.input[1]
    rank = len(g.shape(node.output[0]))
    size, own = g.shape(node.input[0]), g.stays(node.input[0])
    lengths: Axes = g.lengths.get(name) or (None,) * g.shape(name)[0]
    axes: list[NDArray[np.bool_] | None] = [*(None,) * (rank - len(lengths)), *lengths]
    fixed: dict[int, int] = {}
    for i, (n, stays) in enumerate(zip(size, own, strict=True), rank - len(size)):
        if stays is not None and axes[i] is None:
            fixed[i - (rank - len(lengths))] = int(stays.sum())
            axes[i] = stays
        elif n > 1:
            _agree(node, axes[i], stays)
    fixed = {i: n for i, n in fixed.items() if i >= 0}  # an axis before the shape's first is the value's own
    if fixed:
        node.input[1] = _resized(g, node, name, fixed)
    return tuple(axes)


def _resized(g: _Cut, node: NodeProto, name: str, fixed: Mapping[int, int]) -> str:
    """The shape vector `name` with other sizes at the places `fixed`: a constant, or a `Concat` of which parts are."""
    if name not in g.constants and (name not in g.makers or g.makers[name].op_type != "Concat"):
        raise refusal(node, "takes no constant sizes")
    parts, low = [], 0
    for part in [name] if name in g.constants else g.makers[name].input:
        places = {i - low: n for i, n in fixed.items() if low <= i < low + g.shape(part)[0]}
        low += g.shape(part)[0]
        if places and part not in g.constants:
            raise refusal(node, "takes no constant sizes")
        if places:
            sizes = numpy_helper.to_array(g.constants[part]).copy()
            for i, n in places.items():
                sizes[i] = 1 if sizes[i] == 1 else n
            part = g.constant(sizes)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    made = g.fresh()
    g.nodes.append(helper.make_node("Concat", parts, [made], axis=0))
    return made


RULES: dict[str, Callable[[_Cut, NodeProto], Axes]] = {
    **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gemm": _gemm,
    "LayerNormalization": _softmax,
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Softmax": _softmax,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


@dataclass(frozen=True)
class CutGraphs:
    """What a trainer opens instead of a bundle: a smaller network's manifest and its graphs, in memory."""

    manifest: Manifest
    graphs: Mapping[str, bytes]

    def part(self, name: str) -> bytes:
        """A graph of the smaller network."""
        return self.graphs[name]


def cut_graphs(bundle: Bundle | CutGraphs, kept: Channels, parts: Iterable[str]) -> CutGraphs:
    """The graphs `parts` of a bundle with the channels `kept`. Raises ConfigError when they cannot be cut."""
    m, graphs = bundle.manifest, {}
    tensors = cuts(m, kept)
    for name in parts:
        part = bundle.part(name)
        try:
            model = onnx.load_from_string(part if isinstance(part, bytes) else part.read_bytes())
        except Exception as error:  # protobuf's own error class depends on its version
            raise BundleError(f"{name} does not open: {error}; export the bundle again") from None
        graphs[name] = cut(model, m.input.shape, tensors).SerializeToString()
    return CutGraphs(narrow(m, kept).manifest, graphs)
