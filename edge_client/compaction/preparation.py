"""From an evaluation graph to a `Net`: one plain way of writing each operator, and the shape of every value.

`prepare` is what compaction starts from. `dense` is the same graph with all its channels, in its own operators.

What depends on constants alone is computed, batch-norms are folded into the layers before them, and a few operators are
written in one way: reductions keep their axes, a `Gather` takes a vector of indices, a `Split` is slices. Shapes are
measured, not inferred: the graph runs on one sample and on two, and an axis whose size differs holds the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from edge_client.compaction.net import Net, Shape, build, drop_unused, inner_reads, narrow, subgraphs
from edge_client.compaction.operators import Array, Operators
from edge_client.errors import CompactionError
from edge_client.graph.nodes import REARRANGING, set_attribute, settings
from edge_client.runtimes.onnx import open_onnx

_LAYERS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0}
"""Layers that a batch-norm folds into, and the axis of the weight that holds their outputs."""
LARGE = 1024
"""Elements beyond which a constant is given to a graph that runs once: in its file it would be copied four times."""
_PRODUCTS = frozenset({"Gemm", "MatMul"})


def opened(model: ModelProto) -> Net:
    """`model`, all its tensors constants, as a `Net` without the shapes of its values."""
    graph = model.graph
    constants = {t.name: _wide(numpy_helper.to_array(t)) for t in graph.initializer}
    (given,) = (i.name for i in graph.input if i.name not in constants)
    bare = _without_values(model, given)  # also for the operators: a part of a message keeps all of it in memory
    operators = Operators(bare.opset_import, bare.ir_version)
    net = Net(bare, list(graph.node), constants, given, graph.output[0].name, operators)
    net.origins = {name: name for name in constants}
    return net


def _without_values(model: ModelProto, given: str) -> ModelProto:
    """What `build` takes of a model: its tensors would stay in memory beside the constants made of them."""
    made = ModelProto(opset_import=model.opset_import, ir_version=model.ir_version, producer_name=model.producer_name)
    made.graph.name = model.graph.name
    made.graph.input.extend(i for i in model.graph.input if i.name == given)
    made.graph.output.extend(model.graph.output)
    return made


def dense(model: ModelProto) -> ModelProto:
    """`model`, all its tensors constants, with all its channels: what `prepare` computes and folds, no more.

    Raises whatever an operator raises that does not run.
    """
    net = opened(model)
    _fold_constants(net)
    _fold_batch_norms(net)
    drop_unused(net)
    return build(net, net.nodes, net.constants, [model.graph.output[0]])


def prepare(model: ModelProto, probe: Array, tensors: Mapping[str, Shape] | None = None) -> Net:
    """`model`, all its tensors constants, as a `Net`. `probe` is a batch of at least two samples.

    With `tensors`, the names and shapes of the bundle's tensors, their elements are numbered in order and followed
    through the moves of constants; batch-norms stay, and so do products of tensors, such as a layer on learned queries.

    Raises CompactionError when the graph does not run, or not for every batch size.
    """
    net = opened(model)
    start = 0
    for name, shape in (tensors or {}).items():
        net.ids[name] = np.arange(start, start + int(np.prod(shape))).reshape(shape)
        start += net.ids[name].size
    kept = _PRODUCTS if tensors is not None else frozenset[str]()
    _fold_constants(net, kept)
    if tensors is None:
        _fold_batch_norms(net)
    drop_unused(net)  # the weights as they were before they were folded
    _plain_forms(net)
    _measure(net, probe, kept)
    _split_splits(net)
    _plain_matrices(net)
    drop_unused(net)
    return net


def _wide(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _fold_constants(net: Net, stay: Collection[str] = ()) -> None:
    """Compute the nodes whose inputs are all constants, but the operators that `stay`.

    Nodes that do nothing are read through.
    """
    same: dict[str, str] = {}
    inner = set[str]().union(*map(inner_reads, net.nodes))
    kept = []
    for old in net.nodes:
        node = NodeProto()
        node.CopyFrom(old)
        node.input[:] = [same.get(name, name) for name in node.input]
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        if node.op_type == "Constant":
            net.constants[node.output[0]] = _wide(_constant(node))
        elif (
            node.op_type in ("Identity", "Dropout")
            and node.input[0] not in net.constants
            and node.output[0] not in inner  # there names stay
        ):
            same[node.output[0]] = node.input[0]
        elif node.op_type not in stay and _is_constant(net, node):
            _compute(net, node)
        else:
            kept.append(node)
    if net.output in same or net.output in net.constants:
        kept.append(helper.make_node("Identity", [same.get(net.output, net.output)], [net.output]))
    net.nodes = kept


def _is_constant(net: Net, node: NodeProto) -> bool:
    return bool(node.input) and all(not v or v in net.constants for v in node.input) and not subgraphs(node)


def _compute(net: Net, node: NodeProto) -> None:
    """Enter what `node` makes of constants, and the bundle's tensor that it comes from."""
    made = net.operators.run(node, [net.constants[v] if v else None for v in node.input])
    outs = [o for o in node.output if o]
    net.constants.update(zip(outs, made, strict=True))
    named = [net.origins[v] for v in node.input if v in net.origins and net.constants[v].dtype.kind == "f"]
    net.origins.update(dict.fromkeys(outs, named[0]) if named else {})
    _follow(net, node, outs)


def _follow(net: Net, node: NodeProto, outs: Sequence[str]) -> None:
    """Follow element numbers through `node`, if it only moves constants; keep a node that computes with such."""
    if node.op_type not in {*REARRANGING, "Concat"} or node.input[0] not in net.ids:
        if any(v in net.ids or v in net.computed for v in node.input):
            net.computed.update(dict.fromkeys(outs, node))
        return
    given: list[Array | None] = []
    for v in node.input:
        constant = net.known(v) if v else None
        floats = constant is not None and constant.dtype.kind == "f"
        given.append(net.ids.get(v, np.full(constant.shape, -1)).astype(np.float64) if floats else constant)  # type: ignore[union-attr]
    made = net.operators.run(node, given)
    net.ids.update((name, v.astype(np.int64)) for name, v in zip(outs, made, strict=True))


def _constant(node: NodeProto) -> Array:
    (attribute,) = node.attribute
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return np.asarray(numpy_helper.to_array(value))
    return np.asarray(value, np.float32 if attribute.name.startswith("value_float") else np.int64)


def _fold_batch_norms(net: Net) -> None:
    """Fold every batch-norm that alone reads a layer into that layer's weights, in float64."""
    uses = Counter(name for node in net.nodes for name in (*node.input, *inner_reads(node)))
    uses[net.output] += 1
    makers = {name: node for node in net.nodes for name in node.output}
    for norm in [n for n in net.nodes if n.op_type == "BatchNormalization"]:
        layer = makers.get(norm.input[0])
        if layer is None or layer.op_type not in _LAYERS or uses[norm.input[0]] != 1:
            continue
        given, own = settings(layer), settings(norm)
        if own.get("training_mode", 0):  # its statistics are those of the batch
            continue
        plain = layer.op_type != "Gemm" or (
            given.get("transB", 0) and all(given.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
        )
        axis = _LAYERS[layer.op_type]
        names = [*layer.input[1:], *norm.input[1:]]
        if not plain or any(v and v not in net.constants for v in names) or (axis and given.get("group", 1) != 1):
            continue
        weight = net.constants[layer.input[1]]
        bias = net.constants[layer.input[2]] if len(layer.input) > 2 and layer.input[2] else None
        values = [net.constants[v] for v in norm.input[1:]]
        weight, bias = _folded(weight, bias, values, own.get("epsilon", 1e-5), axis)
        out = norm.output[0]
        layer.input[1:] = [
            net.add_constant(f"{out}.weight", weight, layer.input[1]),
            net.add_constant(f"{out}.bias", bias),
        ]
        layer.output[0] = out
        net.nodes.remove(norm)


def _folded(weight: Array, bias: Array | None, norm: Sequence[Array], epsilon: float, axis: int) -> tuple[Array, Array]:
    """Weight and bias of a layer with the batch-norm in it: ``norm(layer(x))`` for every x.

    `norm` is the scale, shift, mean and variance of each output; the outputs lie along `axis` of the weight.
    """
    gamma, beta, mean, variance = norm
    scale = gamma / np.sqrt(variance + epsilon)
    others = tuple(k for k in range(weight.ndim) if k != axis)
    return weight * np.expand_dims(scale, others), ((0.0 if bias is None else bias) - mean) * scale + beta


def _plain_forms(net: Net) -> None:
    """Reductions keep their axes and a `Squeeze` drops them; a `Gather` of one index takes a vector of one."""
    nodes = []
    for node in net.nodes:
        given, tail = settings(node), None
        if node.op_type.startswith("Reduce") and not given.get("keepdims", 1):
            axes = net.constants.get(node.input[1]) if len(node.input) > 1 else given.get("axes")
            if axes is not None and np.size(axes):
                tail = np.asarray(axes, np.int64).reshape(-1)
                set_attribute(node, "keepdims", 1)
        elif node.op_type == "Gather" and node.input[0] not in net.constants:
            index = net.constants.get(node.input[1])
            if index is not None and index.ndim == 0:
                tail = np.array([given.get("axis", 0)], np.int64)
                node.input[1] = net.add_constant(f"{node.output[0]}.index", index.reshape(1))
        nodes.append(node)
        if tail is not None:
            out, node.output[0] = node.output[0], f"{node.output[0]}.kept"
            axes = net.add_constant(f"{out}.axes", tail)
            nodes.append(helper.make_node("Squeeze", [node.output[0], axes], [out]))
    net.nodes = nodes


def _measure(net: Net, probe: Array, data: Collection[str] = ()) -> None:
    """Run the graph on one sample and on two: shapes, types, the axes that hold the batch, and all sizes.

    What the operators `data` make is none.
    """
    sizes: set[str] = set()
    for node in net.nodes:
        known = all(not v or v in net.constants or v in sizes for v in node.input)
        if node.op_type in ("Shape", "Size") or (known and node.op_type not in data):
            sizes.update(o for o in node.output if o)
    one, two = _values(net, probe, sizes)
    for name, value in one.items():
        if value.ndim != two[name].ndim:
            raise CompactionError(
                f"value {name!r} has another number of axes for another batch size; write the model without that"
            )
        net.shapes[name], net.kinds[name] = value.shape, value.dtype
        net.moving[name] = tuple(a != b for a, b in zip(value.shape, two[name].shape, strict=True))
    for name, constant in list(net.constants.items()):
        net.add_constant(name, constant)
    for node in net.nodes:
        if any(o in sizes for o in node.output):
            net.sizes.update((o, one[o]) for o in node.output if o)
            net.growing.update(o for o in node.output if o and not np.array_equal(one[o], two[o]))
            net.repeated.update(o for o in node.output if o and _repeats(one[o], two[o]))
            _follow(net, node, [o for o in node.output if o])


def _values(net: Net, probe: Array, sizes: Collection[str]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Every value for one sample and for two; of all but `sizes` only the shape and the type count."""
    names = [o for node in net.nodes for o in node.output if o]
    outputs = [*(onnx.ValueInfoProto(name=name) for name in names if name != net.output), net.model.graph.output[0]]
    large = {name: narrow(v) for name, v in net.constants.items() if v.dtype.kind == "f" and v.size > LARGE}
    small = {name: v for name, v in net.constants.items() if name not in large}
    model = build(net, net.nodes, small, outputs, large).SerializeToString()
    ran = open_onnx(
        model, what="eval.onnx", advice="export the bundle again", refused=CompactionError, rewrite=False, arena=False
    )
    order = [o.name for o in outputs]

    def of(n: int) -> dict[str, Array]:
        try:
            made = ran.run(order, {net.input: np.ascontiguousarray(probe[:n]), **large})
        except Exception as error:  # onnxruntime raises a class of its own for every status
            raise CompactionError(f"eval.onnx does not run on {n} samples: {error}; export the bundle again") from None
        values = dict(zip(order, map(np.asarray, made), strict=True))
        light = {o: v if o in sizes else np.broadcast_to(v.dtype.type(), v.shape) for o, v in values.items()}
        return {**light, net.input: probe[:n]}

    return of(1), of(2)


def _repeats(one: Array, two: Array) -> bool:
    """Whether `two` is twice `one` along one axis."""
    longer = [a for a, (n, m) in enumerate(zip(one.shape, two.shape, strict=True)) if n != m]
    return len(longer) == 1 and np.array_equal(np.concatenate([one, one], longer[0]), two)


def _plain_matrices(net: Net) -> None:
    """A constant second factor of one matrix is written with two axes, as `einsum` does not."""
    for node in net.nodes:
        weight = node.input[1] if node.op_type == "MatMul" else ""
        size = net.shapes.get(weight, ())
        if weight not in net.constants or not 2 < len(size) <= len(net.shapes[node.input[0]]) or prod(size[:-2]) != 1:
            continue
        node.input[1] = net.move_constant(weight, f"{node.output[0]}.matrix", lambda v: v.reshape(v.shape[-2:]))


def _split_splits(net: Net) -> None:
    """Write each `Split` of data, but along the batch, as slices."""
    nodes = []
    for node in net.nodes:
        outs = [o for o in node.output if o]
        if node.op_type != "Split" or node.input[0] in net.sizes or len(outs) < len(node.output):
            nodes.append(node)
            continue
        axis = settings(node).get("axis", 0) % len(net.shapes[node.input[0]])
        if net.moving[node.input[0]][axis]:  # the lengths depend on the number of samples
            nodes.append(node)
            continue
        low = 0
        for out in outs:
            high = low + net.shapes[out][axis]
            bounds = [
                net.add_constant(f"{out}.{key}", np.array([value], np.int64))
                for key, value in (("low", low), ("high", high), ("axis", axis))
            ]
            nodes.append(helper.make_node("Slice", [node.input[0], *bounds], [out]))
            low = high
    net.nodes = nodes
