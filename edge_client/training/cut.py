"""Cuts channels out of an exported graph, training or evaluation: the same nodes on smaller tensors.

`edge_client.narrow` gives the entries of each parameter that stay. `cut_rules` follows them through the graph, with a
rule for each operator: which entries of each axis of a value stay. The exporter writes sizes as constants, such as the
target of a `Reshape`; these are rewritten, and so are constant tensors that meet a cut value. A product that sums over
an axis that loses entries is cut only where both factors lose the same ones, or where a parameter loses them, which is
zero there. A plain sum leaves them out, and the export offers only groups of which it adds nothing (`group_trial`). So
for values that are zero in all that was cut, every number that stays is the whole graph's.

An operator without a rule, and one that would mix the channels of a group, is refused if a cut value reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, ValueInfoProto, helper

from edge_client.bundle import Bundle, Manifest
from edge_client.errors import BundleError, ConfigError
from edge_client.graph.axes import Shape
from edge_client.narrow import Axes, Channels, cuts, narrow
from edge_client.runtimes.onnx import open_onnx
from edge_client.training.cut_graph import Cut, equal
from edge_client.training.cut_rules import follow

PROBE = 2  # samples of the batch for which shapes are inferred


def cut(model: ModelProto, sample: Shape, tensors: Mapping[str, Axes]) -> ModelProto:
    """A copy of `model` in which of each of `tensors`, by name, the entries given stay.

    `sample` is the shape of one sample, the input `x` without its batch axis. A gradient ``grad:<name>`` and a
    statistic ``new:<name>`` lose what their tensor loses; no other output may lose anything. Raises ConfigError that
    names what of the graph does not allow the cut.
    """
    made = ModelProto()
    made.CopyFrom(model)
    g = Cut(made.graph, _shapes(made, sample), tensors)
    follow(g, made.graph)
    for value in made.graph.input:
        _declare(value, g.axes.get(value.name, ()))
    for value in made.graph.output:
        axes = g.axes.get(value.name, ())
        kind, _, name = value.name.partition(":")
        due = tensors.get(name, ()) if kind in ("grad", "new") else ()
        if not equal(axes, due):
            kept = f"tensor {name!r} would stay whole, and its gradient" if name else f"output {value.name!r}"
            raise ConfigError(f"{kept} would lose channels")
        _declare(value, axes)
    return made


def _shapes(model: ModelProto, sample: Shape) -> dict[str, Shape | None]:
    """The shape of every value for PROBE samples, None where it does not follow from the graph. Raises ConfigError."""
    probe = ModelProto()
    probe.CopyFrom(model)
    for value in probe.graph.input:
        dims = value.type.tensor_type.shape.dim
        sizes = (PROBE, *sample) if value.name == "x" else [d.dim_value or PROBE for d in dims]
        value.type.tensor_type.shape.CopyFrom(helper.make_tensor_type_proto(1, sizes).tensor_type.shape)
    found: dict[str, Shape | None] = {}
    ran: dict[str, Shape] = {}
    try:
        graphs = [_inferred(probe, data_prop=True)]
    except ConfigError:  # onnx takes the values of small tables for sizes, and compares their lengths
        graphs, ran = [_inferred(probe, data_prop=False)], _ran(probe)
    for graph in graphs:
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
        found |= dict.fromkeys(name for node in graph.node for name in node.output)
        found |= {t.name: tuple(t.dims) for t in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
                found[value.name] = tuple(d.dim_value for d in kind.shape.dim)
    return found | ran


def _ran(probe: ModelProto) -> dict[str, Shape]:
    """The shape of every value but those within a Scan, from a run on zeros. Raises ConfigError."""
    made = ModelProto()
    made.CopyFrom(probe)
    names = [name for node in made.graph.node for name in node.output if name]
    del made.graph.output[:]
    made.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = open_onnx(made.SerializeToString(), what="the graph", rewrite=False)
    zeros = {v.name: np.zeros(v.shape, np.int64 if "int64" in v.type else np.float32) for v in session.get_inputs()}
    try:
        return {name: np.shape(value) for name, value in zip(names, session.run(names, zeros), strict=True)}
    except Exception as error:  # onnxruntime raises a class of its own for every status
        raise ConfigError(f"it does not run on zeros: {error}") from None


def _inferred(model: ModelProto, data_prop: bool) -> onnx.GraphProto:
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=data_prop).graph
    except onnx.shape_inference.InferenceError as error:
        raise ConfigError(f"its shapes disagree: {' '.join(str(error).split())}") from None


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
