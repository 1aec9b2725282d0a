"""Which entries, and in which order, a layer reads and writes where several ways are exact.

A layer that leaves a dead entry out saves multiply-adds, but where another value still has that entry it must be put
back in, or taken out of the other. `Costs` has the cost of moving an element against a multiply-add.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from edge_client.compaction.pieces import Ids, by_axis
from edge_client.compaction.reshapes import REGROUP, slots
from edge_client.compaction.writer import Writer

FILL = 1.02
"""A layer writes zeros for the sake of a reshape behind it up to so many times its live outputs."""


def worth(w: Writer, held: Ids, due: Ids, each: int, last: bool = False) -> Ids:
    """The inputs a layer reads: `due`, or all those `held` where leaving some out costs more than it saves.

    `each` is the multiply-adds per input entry and place; `last`: the entries lie along the last axis.
    """
    real = held if w.costs.multiple == 1 else held[held != -2]
    if len(real) == len(due) and np.array_equal(np.sort(real), due):
        return held
    due = due if due.size else np.zeros(1, np.int64)
    if not np.isin(due, held).all():
        return due
    saved = (len(held) - len(due)) * each
    return due if saved > (w.costs.last if last else w.costs.moved) * len(due) else held


def preferred(w: Writer, value: str, each: int = 0) -> Ids | None:
    """The outputs that a layer had better write, in order, for the sake of what follows; None: its live ones.

    `each` is the multiply-adds of one output and place. The model's own outputs are written whole.
    """
    axes = [a for a, free in enumerate(w.study.channels(value)) if free]
    if len(axes) != 1:
        return None
    axis, shape = axes[0], w.study.shape(value)
    if value == w.net.output:
        return np.arange(shape[axis])
    own = w.study.wanted(value)[axis]
    last = value
    while len(w.study.users.get(last, [])) == 1 and last != w.net.output:
        node = w.study.users[last][0]
        if node.op_type in REGROUP and node.input[0] == last:
            found = slots(w, node).get(axis)
            if found is None or not np.isin(own, found).all():
                return None
            few = len(found) <= FILL * len(own)
            dear = axis == len(shape) - 1 and (len(found) - len(own)) * each <= (w.costs.last - 4) * len(found)
            return found if few or dear else None
        out = [o for o in node.output if o]
        if len(out) != 1 or w.study.shape(out[0]) != shape:
            return None
        if w.net.data(node) != [list(node.input).index(last)]:
            return _stream(w, node, out[0], axis, own, each)
        last = out[0]
    return None


def _stream(w: Writer, node: NodeProto, out: str, axis: int, own: Ids, each: int) -> Ids | None:
    """What a sum holds, where zeros cost less than moves: of images its channels, and all of a stream read whole."""
    size = w.study.shape(out)[axis]
    if node.op_type == "Add" and axis == 1 < len(w.study.shape(out)) - 1 and w.costs.block > 1:
        sides = [w.pieces[v].ids for v in node.input if v in w.pieces and w.study.shape(v) == w.study.shape(out)]
        lists = by_axis(sides[0], w.study.shape(out)) if len(sides) == 1 else None
        due = None if lists is None else extended(w, lists[axis], w.study.wanted(out)[axis])
        if due is None or not np.isin(own, due).all():
            return None
        blocks = [-(-len(k) // w.costs.block) * w.costs.block for k in (due, own)]
        return due if (blocks[0] - blocks[1]) * each <= 2 * w.costs.moved * len(due) else None
    if node.op_type != "Add" or axis != len(w.study.shape(out)) - 1 or not _mixed(w, out, axis):
        return None
    return np.arange(size) if (size - len(own)) * each <= w.costs.last * size else None


def extended(w: Writer, held: Ids, wanted: Ids) -> Ids | None:
    """The entries `wanted`, those `held` first and in their order, so that they need no gather; then zeros.

    None where others are held.
    """
    held = held[: max(1, int((held >= 0).sum()))]
    if not np.isin(held, wanted).all():
        return None
    zeros = -len(wanted) % w.costs.multiple if len(wanted) > w.costs.block or w.costs.block == 1 else 0
    return np.concatenate([held, np.setdiff1d(wanted, held), np.full(zeros, -2)])


def _mixed(w: Writer, value: str, axis: int) -> bool:
    """Whether a value, or a sum of it, is read by an operator that mixes the entries of `axis`."""
    for user in w.study.users.get(value, []):
        out = user.output[0]
        same = out in w.study.varies and w.study.shape(out) == w.study.shape(value)
        if same and not w.study.channels(out)[axis] and user.op_type not in ("MatMul", "Gemm"):
            return True
    return False
