"""Cuts channels out of an exported graph, training or evaluation: the same nodes on smaller tensors.

`edge_client.narrow` gives the entries of each parameter that stay. This module follows these entries through the graph:
which entries of each axis of a value stay; `cut_rules` has the rule of each operator. The exporter writes sizes
as constants, such as the target of a `Reshape`; these are rewritten, and so are constant tensors that meet a cut value.
A sum or a product over an axis that loses entries is cut only where both factors lose the same ones. So for values that
are zero in all that was cut, every number that stays is the whole graph's.

An operator without a rule, and one that would mix the channels of a group, is refused if a cut value reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from edge_client.bundle import Bundle, Manifest
from edge_client.errors import BundleError, ConfigError
from edge_client.graph.axes import Shape
from edge_client.narrow import Axes, Channels, cuts, narrow, taken
from edge_client.training.cut_rules import RULES, UNLIKE, equal, named, refusal

PROBE = 2  # samples of the batch for which shapes are inferred


def cut(model: ModelProto, sample: Shape, tensors: Mapping[str, Axes]) -> ModelProto:
    """A copy of `model` in which of each of `tensors`, by name, the entries given stay.

    `sample` is the shape of one sample, the input `x` without its batch axis. A gradient ``grad:<name>`` and a
    statistic ``new:<name>`` lose what their tensor loses; no other output may lose anything. Raises ConfigError that
    names what of the graph does not allow the cut.
    """
    made = ModelProto()
    made.CopyFrom(model)
    return Cut(made, _shapes(made, sample), tensors).run()


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


class Cut:
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
            if not equal(axes, due):
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
                rule = RULES.get(node.op_type, named)
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
            if stays is not None and not equal((mine,), (stays,)):
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


def _declare(value: ValueInfoProto, axes: Axes) -> None:
    for dim, stays in zip(value.type.tensor_type.shape.dim, axes, strict=False):
        if stays is not None:
            dim.dim_value = int(stays.sum())


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
