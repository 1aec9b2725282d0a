"""Which entries, and in which order, a layer reads and writes where several ways are exact."""

from __future__ import annotations

import numpy as np

from edge_client.compaction.moves import REGROUP, slots
from edge_client.compaction.writer import Ids, Writer

MOVED = 4
"""Multiply-adds that take as long as moving one element."""
FILL = 1.02
"""A layer writes zeros for the sake of a layout up to so many times its live outputs."""


def worth(held: Ids, due: Ids, each: int) -> Ids:
    """The inputs a layer reads: `due`, or all those `held` where leaving some out costs more than it saves.

    `each` is the multiply-adds per input entry and place.
    """
    if len(held) == len(due) and np.array_equal(np.sort(held), due):
        return held
    due = due if due.size else np.zeros(1, np.int64)
    if not np.isin(due, held).all():
        return due
    saved = (len(held) - len(due)) * each
    return due if saved > MOVED * len(due) else held


def preferred(w: Writer, value: str) -> Ids | None:
    """The order in which a layer had better write its outputs, for a reshape behind it; None for any.

    The model's own outputs are written whole.
    """
    if value == w.net.output:
        axes = [a for a, free in enumerate(w.study.channels(value)) if free]
        return np.arange(w.study.shape(value)[axes[0]]) if len(axes) == 1 else None
    last = value
    while len(w.study.users.get(last, [])) == 1 and last != w.net.output:
        node = w.study.users[last][0]
        if node.op_type in REGROUP and node.input[0] == last:
            if w.study.shape(last) != w.study.shape(value):
                return None
            axis = w.study.channels(value).index(True) if sum(w.study.channels(value)) == 1 else None
            found = slots(w, node).get(axis) if axis is not None else None
            live = len(w.study.wanted(value)[axis]) if axis is not None else 0
            if found is None or len(found) > FILL * live:
                return None
            own = set(w.study.wanted(value)[axis].tolist()) if axis is not None else set()
            return found if own <= set(found.tolist()) else None
        out = [o for o in node.output if o]
        if w.net.data(node) != [list(node.input).index(last)] or len(out) != 1:
            return None
        if w.study.shape(out[0]) != w.study.shape(value):
            return None
        last = out[0]
    return None
