"""The batch gets an axis of its own, wherever a reshape has merged it with another one.

An attention may reach its products with batch and heads in one axis. What is known for one sample does not hold for
such an axis in a batch. So what lies between the reshape that merges and the one that splits is written on unmerged
axes: products, moves along other axes and operators on single elements. Both reshapes then go.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from edge_client.compaction.net import Net, drop_unused
from edge_client.compaction.reshapes import REGROUP
from edge_client.graph.axes import POINTWISE
from edge_client.graph.nodes import settings


def unmerge_batch(net: Net) -> None:
    """Write on unmerged axes what `net` computes on axes that merge the batch with others, in place."""
    # By value: its copy with a batch axis of its own, and that axis. Where rows merged axes on both sides of the batch,
    # the copy has more than one additional axis; only linear layers and reshapes read it.
    unmerged: dict[str, tuple[str, int]] = {}
    same: dict[str, str] = {}
    nodes, net.nodes = net.nodes, []
    for node in nodes:
        node.input[:] = [same.get(v, v) for v in node.input]
        out = node.output[0]
        if out in net.sizes or len([o for o in node.output if o]) != 1 or sum(net.moving[out]) != 1:
            net.nodes.append(node)
            continue
        axis = net.moving[out].index(True)
        made = _written(net, node, unmerged, axis)
        if made is None:
            net.nodes.append(node)
        elif net.shapes[out][axis] > 1:
            unmerged[out] = (made, net.moving[made].index(True))
            net.nodes.append(_reshape(net, made, out, net.shapes[out], axis))
        elif out != net.output:
            same[out] = made
        else:
            net.nodes.append(helper.make_node("Identity", [made], [out]))
    drop_unused(net)


def _written(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """The name of the output of `node` on unmerged axes, its nodes appended to `net`; None: it stays as it is."""
    out, op, data = node.output[0], node.op_type, net.data(node)
    shape, name = net.shapes[out], node.input[0] if node.input else ""
    if op == "Expand" and data == [0] and net.shapes[name] == shape and net.moving[name] == net.moving[out]:
        return name if shape[axis] == 1 else unmerged[name][0] if name in unmerged else None
    if op in REGROUP and data == [0]:
        source = unmerged[name][0] if name in unmerged else name
        return _regrouped(net, node, source, axis) if source != name or shape[axis] > 1 else None
    if not any(node.input[k] in unmerged for k in data) or shape[axis] == 1:
        return None
    if op == "Gemm":
        return _layer(net, node, unmerged, axis)
    if any(len(net.shapes[unmerged[v][0]]) != len(net.shapes[v]) + 1 for v in node.input if v in unmerged):
        return None
    for ops, write in _WRITERS:
        if ops.fullmatch(op):
            return write(net, node, unmerged, axis)
    return None


def _transposed(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str:
    """The output of a `Transpose`: the two axes stay side by side."""
    order = settings(node).get("perm", list(range(len(net.shapes[node.output[0]])))[::-1])
    source, at = unmerged[node.input[0]]
    perm = [b for a in order for b in ((a, a + 1) if a == at else (a + (a > at),))]
    return _emit(net, node, [source], axis, given={"perm": perm})


def _along(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """The output of an operator that joins the elements behind the merged axis. Its own axis counts from the end."""
    given, rank = settings(node), len(net.shapes[node.output[0]])
    at = given.get("axis", -1)
    given["axis"] = at - rank if at >= 0 else at
    return _on_elements(net, node, unmerged, axis, given) if given["axis"] > axis - rank else None


def _product(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """The output of a `MatMul` whose merged axis is its rows, or one before them."""
    (left, right), behind = node.input, len(net.shapes[node.output[0]]) - axis
    if behind < 2 or any(len(net.shapes[v]) < 2 for v in node.input):
        return None
    if behind > 2:
        return _on_elements(net, node, unmerged, axis)
    rows = _operand(net, node, 0, unmerged, axis) if left in unmerged else None
    if rows is None or len(net.shapes[right]) > 2 or any(net.moving[right]):
        return None
    return _emit(net, node, [rows, right], axis)


def _on_elements(
    net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int, given: dict[str, Any] | None = None
) -> str | None:
    """The output of an operator that treats every element of the merged axis alike."""
    inputs = [_operand(net, node, k, unmerged, axis) for k in range(len(node.input))]
    known = [v for v in inputs if v is not None]
    return _emit(net, node, known, axis, given=given or settings(node)) if len(known) == len(inputs) else None


def _operand(net: Net, node: NodeProto, k: int, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """Input `k` of `node` on unmerged axes, or as it is where the merged axis of the output is not one of its own."""
    v: str = node.input[k]
    shape = net.shapes[node.output[0]]
    size, behind = net.shapes.get(v, ()), len(shape) - axis
    if v in unmerged:
        return unmerged[v][0] if len(size) - unmerged[v][1] == behind and size[-behind] == shape[axis] else None
    if not v or (len(size) < behind and not any(net.moving[v])):
        return v
    if len(size) < behind:
        return None
    name, at = f"{node.output[0]}.{k}", len(size) - behind
    if v in net.constants and size[at] == 1:
        return net.move_constant(v, name, lambda value: np.expand_dims(value, at))
    if v in net.repeated and net.moving[v][at]:
        return net.add_constant(name, np.expand_dims(net.sizes[v], at))
    return None


def _elsewhere(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """The output of a move along axes other than the merged one, which all of the data have unmerged."""
    rank, given = len(net.shapes[node.output[0]]), settings(node)
    data, rest = net.data(node), [v for k, v in enumerate(node.input) if k not in net.data(node)]
    if any(node.input[k] not in unmerged or unmerged[node.input[k]][1] != axis for k in data):
        return None
    if any(v and v not in net.constants for v in rest):
        return None
    inputs = [unmerged[node.input[k]][0] for k in data]
    if node.op_type == "Slice":
        low = net.constants[rest[0]]
        along = net.constants[rest[2]] if len(rest) > 2 and rest[2] else np.arange(len(low))
        moved = along % rank
        if axis in moved:
            return None
        rest = [*rest[:2], net.add_constant(f"{node.output[0]}.axes", moved + (moved > axis)), *rest[3:]]
    else:
        along = given.get("axis", 0) % rank
        index = net.shapes[rest[0]] if rest else (1,)
        if (rest and data != [0]) or along == axis or len(index) != 1:
            return None
        given["axis"] = int(along + (along > axis))
    return _emit(net, node, [*inputs, *rest], axis, given=given)


def _regrouped(net: Net, node: NodeProto, source: str, axis: int) -> str | None:
    """The output of a reshape of `source`, which has the batch in an axis of its own."""
    out, moving = node.output[0], net.moving[source]
    if sum(moving) != 1 or net.shapes[source][moving.index(True)] != 1:
        return None
    shape = net.shapes[out]
    at = moving.index(True)
    if prod(net.shapes[source][:at]) == prod(shape[:axis]):
        whole, at = (*shape[:axis], 1, *shape[axis:]) if shape[axis] > 1 else shape, axis
    elif len(shape) == 2 and axis == 0:  # rows
        last = next((k for k in range(at + 1, len(moving)) if prod(net.shapes[source][k:]) == shape[1]), 0)
        if not last:
            return None
        whole = (*net.shapes[source][:last], shape[1])
    else:
        return None
    if whole == net.shapes[source] and moving[at]:
        return source
    name = net.declare(f"{out}.apart", out, whole, at)
    net.nodes.append(_reshape(net, source, name, whole, at))
    return name


def _layer(net: Net, node: NodeProto, unmerged: dict[str, tuple[str, int]], axis: int) -> str | None:
    """A `Gemm` on merged rows as a product and a sum."""
    given, out = settings(node), node.output[0]
    plain = not given.get("transA", 0) and all(given.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
    if axis or not plain or node.input[0] not in unmerged or any(v and v not in net.constants for v in node.input[1:]):
        return None
    bias = node.input[2] if len(node.input) > 2 else ""
    if bias and prod(net.shapes[bias][:-1]) != 1:
        return None
    weight = node.input[1]
    if given.get("transB", 0):
        weight = net.move_constant(weight, f"{out}.weight", np.transpose)
    rows, at = unmerged[node.input[0]]
    whole = (*net.shapes[rows][:-1], net.shapes[out][-1])
    if not bias:
        return _emit(net, helper.make_node("MatMul", [], [out]), [rows, weight], at, shape=whole)
    product = _emit(net, helper.make_node("MatMul", [], [out]), [rows, weight], at, ".product", shape=whole)
    return _emit(net, helper.make_node("Add", [], [out]), [product, bias], at, shape=whole)


def _emit(
    net: Net,
    node: NodeProto,
    inputs: list[str],
    axis: int,
    tail: str = ".apart",
    given: dict[str, Any] | None = None,
    shape: tuple[int, ...] | None = None,
) -> str:
    """Append `node` on `inputs`; `axis` of its output becomes two, or the output has `shape`, the batch at `axis`."""
    out = node.output[0]
    before = net.shapes[out]
    name = net.declare(f"{out}{tail}", out, shape or (*before[:axis], 1, *before[axis:]), axis)
    net.nodes.append(helper.make_node(node.op_type, inputs, [name], **(given or {})))
    return name


def _reshape(net: Net, name: str, out: str, shape: tuple[int, ...], axis: int) -> NodeProto:
    due = np.array([-1 if a == axis else n for a, n in enumerate(shape)], np.int64)
    return helper.make_node("Reshape", [name, net.add_constant(f"{out}.sizes", due)], [out])


_WRITERS = (
    (re.compile("Transpose"), _transposed),
    (re.compile("Concat|Gather|Slice"), _elsewhere),
    (re.compile("LayerNormalization|LogSoftmax|Softmax"), _along),
    (re.compile("MatMul"), _product),
    (POINTWISE, _on_elements),
)
"""What writes a node by its operator, the first that fits."""
