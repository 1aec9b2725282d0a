"""Chains of moves in their plainest form, before anything is cut.

A fused projection of queries, keys and values goes through reshapes, transposes and gathers until each part arrives at
its product. Where the whole chain is a slice, a reshape and a transpose, it is written so: each part may then be cut by
itself. A chain that only takes entries of one axis in some order, as a channel shuffle does, becomes one `Gather`.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import NodeProto, helper

from edge_client.compaction.batch_axis import unmerge_batch
from edge_client.compaction.moves import PICK, is_move
from edge_client.compaction.net import Net, Shape, drop_unused
from edge_client.compaction.operators import Array
from edge_client.compaction.pieces import Ids, by_axis
from edge_client.compaction.reshapes import REGROUP

_CHAINED = REGROUP | PICK | {"Transpose"}


def straighten(net: Net) -> None:
    """Write every chain of moves of `net` in its plainest form, in place."""
    unmerge_batch(net)
    makers = {n.output[0]: n for n in net.nodes}
    users = net.users()
    made: list[NodeProto] = []
    for node in net.nodes:
        made.append(node)
        out = node.output[0]
        if not _chained(net, node) or (out != net.output and all(_chained(net, n) for n in users.get(out, []))):
            continue
        chain = [node]
        while chain[0].input[0] in makers and _chained(net, makers[chain[0].input[0]]):
            chain.insert(0, makers[chain[0].input[0]])
        for first in range(len(chain) - 1):
            plain = _plainest(net, chain[first:])
            if plain is not None and len(plain) <= len(chain) - first:
                made[-1:] = plain
                break
    net.nodes = made
    drop_unused(net)
    if not net.ids:
        _split_layers(net)


def _split_layers(net: Net) -> None:
    """A linear layer of which only slices are read becomes a layer for each, free to write its outputs in any order."""
    users = net.users()
    made: list[NodeProto] = []
    parted: dict[str, list[NodeProto]] = {}
    for node in net.nodes:
        if node.output[0] in parted:
            made += parted[node.output[0]]
            continue
        if node.op_type != "MatMul" or node.input[1] not in net.constants or net.constants[node.input[1]].ndim != 2:
            made.append(node)
            continue
        chain, out = [node], node.output[0]
        after = users.get(out, [])
        if len(after) == 1 and after[0].op_type == "Add":
            bias = [v for v in after[0].input if v in net.constants and net.constants[v].ndim == 1]
            if bias and len(net.constants[bias[0]]) == net.shapes[out][-1]:
                chain, out = [*chain, after[0]], after[0].output[0]
                after = users.get(out, [])
        bounds = [_last_slice(net, n, out) for n in after]
        if out == net.output or len(after) < 2 or any(b is None for b in bounds):
            made.append(node)
            continue
        parted.update({n.output[0]: [] for n in chain[1:]})
        for user, bound in zip(after, bounds, strict=True):
            assert bound is not None
            parted[user.output[0]] = _part(net, chain, user.output[0], *bound)
    net.nodes = made


def _last_slice(net: Net, node: NodeProto, value: str) -> tuple[int, int] | None:
    """The bounds of a slice along the last axis of `value`."""
    if node.op_type != "Slice" or node.input[0] != value or any(v not in net.constants for v in node.input[1:]):
        return None
    low, high, axis, *step = (net.constants[v].reshape(-1).tolist() for v in node.input[1:])
    rank = len(net.shapes[value])
    if len(low) != 1 or axis[0] % rank != rank - 1 or step not in ([], [[1]]):
        return None
    return slice(low[0], high[0]).indices(net.shapes[value][-1])[:2]


def _part(net: Net, chain: list[NodeProto], out: str, low: int, high: int) -> list[NodeProto]:
    """The outputs from `low` to `high` of a layer and its bias."""
    weight = chain[0].input[1]
    name = net.add_constant(f"{out}.weight", net.constants[weight][:, low:high], weight)
    if len(chain) == 1:
        return [helper.make_node("MatMul", [chain[0].input[0], name], [out])]
    (bias,) = (v for v in chain[1].input if v in net.constants)
    bias = net.add_constant(f"{out}.bias", net.constants[bias][low:high])
    part = net.declare(f"{out}.part", out)
    return [
        helper.make_node("MatMul", [chain[0].input[0], name], [part]),
        helper.make_node("Add", [part, bias], [out]),
    ]


def _chained(net: Net, node: NodeProto) -> bool:
    return node.op_type in _CHAINED and node.output[0] not in net.sizes and is_move(net, node) and net.data(node) == [0]


def _plainest(net: Net, chain: list[NodeProto]) -> list[NodeProto] | None:
    name, out = chain[0].input[0], chain[-1].output[0]
    ids: Array = np.arange(prod(net.shapes[name]), dtype=np.float64).reshape(net.shapes[name])
    for node in chain:
        ids = net.operators.run(node, [ids, *(net.known(v) if v else None for v in node.input[1:])])[0]
    moved: Ids = ids.astype(np.int64)
    return _permuted(net, name, out, moved) or _affine(net, name, out, moved)


def _permuted(net: Net, name: str, out: str, moved: Ids) -> list[NodeProto] | None:
    """One `Gather`, when the chain takes entries of one axis."""
    shape = net.shapes[name]
    lists = by_axis(moved, shape)
    if lists is None or net.moving[out] != net.moving[name]:
        return None
    changed = [a for a, own in enumerate(lists) if not np.array_equal(own, np.arange(shape[a]))]
    if len(changed) != 1 or net.moving[name][changed[0]]:
        return None
    order = net.add_constant(f"{out}.order", lists[changed[0]])
    return [helper.make_node("Gather", [name, order], [out], axis=changed[0])]


def _affine(net: Net, name: str, out: str, moved: Ids) -> list[NodeProto] | None:
    """Slices, a reshape and a transpose, when every axis of the output steps evenly through the input."""
    shape, size = net.shapes[name], moved.shape
    if sum(net.moving[name]) != 1 or sum(net.moving[out]) != 1:
        return None
    batch, arrived = net.moving[name].index(True), net.moving[out].index(True)
    if shape[batch] != 1 or size[arrived] != 1:
        return None
    steps = _steps(moved)
    if steps is None:
        return None
    stretches = [(0, [arrived]) if a == batch else _stretch(shape, a, moved, steps) for a in range(len(shape))]
    nodes: list[NodeProto] = []
    reads = name
    order: list[int] = []  # the axes of the output, as they follow each other in the input
    for a, stretch in enumerate(stretches):
        if stretch is None:
            return None
        low, own = stretch
        span = prod(size[b] for b in own)
        if span != shape[a]:
            bounds = [net.add_constant(f"{out}.{a}.{k}", np.array([v])) for k, v in enumerate((low, low + span, a))]
            cut = f"{out}.{a}"
            nodes.append(helper.make_node("Slice", [reads, *bounds], [cut]))
            reads = net.declare(cut, reads, [span if b == a else m for b, m in enumerate(net.shapes[reads])], batch)
        order += own
    order += [b for b in range(len(size)) if b not in order]
    lengths, at = [size[b] for b in order], order.index(arrived)
    if lengths != list(net.shapes[reads]) or at != batch:
        due = [-1 if k == at else n for k, n in enumerate(lengths)]
        target = net.add_constant(f"{out}.shape", np.array(due))
        nodes.append(helper.make_node("Reshape", [reads, target], [f"{out}.apart"]))
        reads = net.declare(f"{out}.apart", reads, lengths, at)
    perm = [order.index(b) for b in range(len(size))]
    if perm != list(range(len(size))):
        nodes.append(helper.make_node("Transpose", [reads], [out], perm=perm))
    elif nodes:
        nodes[-1].output[0] = out
    return nodes or None


def _steps(moved: Ids) -> list[int] | None:
    """Distances of neighbours along each axis, 0 for an axis of one entry; None where it varies or is not above 0."""
    size = moved.shape
    steps = [int(np.take(moved, 1, a).flat[0] - moved.flat[0]) if n > 1 else 0 for a, n in enumerate(size)]
    even = moved.flat[0] + sum(
        np.arange(n).reshape(-1, *(1,) * (len(size) - 1 - a)) * steps[a] for a, n in enumerate(size)
    )
    if not np.array_equal(even, moved) or any(s <= 0 for s, n in zip(steps, size, strict=True) if n > 1):
        return None
    return steps


def _stretch(shape: Shape, axis: int, moved: Ids, steps: list[int]) -> tuple[int, list[int]] | None:
    """The first entry of an input's axis that the output holds, and the output's axes that go on from there.

    None where these leave entries out between them.
    """
    size, n, inner = moved.shape, shape[axis], prod(shape[axis + 1 :])
    own = [b for b, s in enumerate(steps) if size[b] > 1 and inner <= s < inner * n]
    own.sort(key=lambda b: -steps[b])
    dense = [inner * prod(size[c] for c in own[k + 1 :]) for k in range(len(own))]
    low = int(moved.flat[0]) // inner % n
    if [steps[b] for b in own] != dense or low + prod(size[b] for b in own) > n:
        return None
    return low, own
