"""Operators that move elements and compute nothing.

Where each element of the output comes from is found by running the operator on the numbers of its input's elements. The
smaller graph holds the same operator on fewer elements, or none where the elements that are left only change places
among the channels: weights behind it are then read in that order. Reshapes are in `reshapes`.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import NodeProto

from edge_client.compaction.net import Net, Shape
from edge_client.compaction.operators import Array
from edge_client.compaction.pieces import Ids, Lists, Ragged, by_axis, grid, whole_along
from edge_client.compaction.reshapes import REGROUP, regroup
from edge_client.compaction.study import Labels, Rule, Study, entries, mixed
from edge_client.compaction.writer import Writer
from edge_client.errors import CompactionError
from edge_client.graph.nodes import settings

PICK = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
_MOVES = REGROUP | PICK | {"Concat", "DepthToSpace", "Pad", "SpaceToDepth", "Tile", "Transpose"}


def sources(s: Study, node: NodeProto) -> Ids:
    """For each element of the output, its flat place in the inputs that carry data, one behind the other; -1: none."""
    key = ("sources", node.output[0])
    if key not in s.notes:
        given: list[Array | None] = []
        start = 1
        for k, v in enumerate(node.input):
            if not v:
                given.append(None)
            elif k in s.net.data(node):
                size = prod(s.shape(v))
                given.append(np.arange(start, start + size, dtype=np.float64).reshape(s.shape(v)))
                start += size
            else:
                known = s.net.known(v)
                moved = known.dtype.kind == "f" or node.op_type == "Concat"
                given.append(np.zeros(known.shape) if moved else known)
        s.notes[key] = s.net.operators.run(node, given)[0].astype(np.int64) - 1
    found: Ids = s.notes[key]
    return found


def _forward(s: Study, node: NodeProto) -> None:
    source = sources(s, node)
    facts = [s.facts(node.input[k]) for k in s.net.data(node)]
    value = s.net.operators.run(node, [s.facts(v).value if v else None for v in node.input])[0]
    varies = np.concatenate([f.varies.reshape(-1) for f in facts])
    at = np.maximum(source, 0)
    out = node.output[0]
    s.store(out, value, varies[at] & (source >= 0), _labels(s, node, source))


def _labels(s: Study, node: NodeProto, source: Ids) -> Labels:
    """Labels of the output; an axis that a concatenation or padding extends is one of channels if it was before."""
    labels = [s.facts(v).label for v in node.input if v and (v in s.varies or node.op_type == "Concat")]
    if node.op_type == "Pad":
        shape, widths, axes = labels[0].shape, s.net.known(node.input[1]).reshape(2, -1), _pad_axes(s, node)
        places = []
        for a, n in enumerate(shape):
            low, high = widths[:, axes.index(a)] if a in axes else (0, 0)
            places.append(np.clip(np.arange(-low, n + high), 0, n - 1))
        return np.asarray(labels[0][np.ix_(*places)])
    if node.op_type != "Concat":
        return np.asarray(np.where(source >= 0, labels[0].reshape(-1)[np.maximum(source, 0)], 0))
    axis = settings(node)["axis"] % source.ndim
    if any((label != np.take(label, [0], axis)).any() for label in labels):
        return np.concatenate([label * (i + 1) + i for i, label in enumerate(labels)], axis)
    joined = np.zeros((), np.int64)
    for label in labels:
        joined = mixed(joined, np.take(label, [0], axis))
    return joined


def _backward(s: Study, node: NodeProto) -> None:
    source = sources(s, node)
    live, due = s.live(node.output[0]), s.due[node.output[0]]
    start = 0
    for k in s.net.data(node):
        name = node.input[k]
        size = prod(s.shape(name))
        for marks, mark in ((live, s.mark), (due, s.need)):
            found = source[marks]
            if found.size:
                mask = np.zeros(size, np.bool_)
                mask[found[(found >= start) & (found < start + size)] - start] = True
                mark(name, mask.reshape(s.shape(name)))
        start += size


def rewrite(w: Writer, node: NodeProto) -> None:
    """The move of what is left."""
    if node.op_type == "Transpose":
        piece = w.pieces[node.input[0]]
        order = settings(node).get("perm", list(range(piece.ids.ndim))[::-1])
        # ids are places in the input; the output numbers its elements in its own order
        w.put(
            node.output[0],
            w.emit("Transpose", [piece.name], perm=order),
            _renumbered(w, node, piece.ids.transpose(order)),
        )
    elif node.op_type in REGROUP:
        regroup(w, node)
    elif node.op_type in PICK:
        _pick(w, node)
    elif node.op_type == "Concat":
        _concat(w, node)
    elif node.op_type == "Pad":
        _pad(w, node)
    else:
        _regular(w, node)


def _renumbered(w: Writer, node: NodeProto, ids: Ids) -> Ids:
    """Places in the input as places in the output, of which every element has one source of its own."""
    source = sources(w.study, node)
    back = np.full(prod(w.study.shape(node.input[0])) + 2, -1)
    back[source.reshape(-1)] = np.arange(source.size)
    return np.where(ids >= 0, back[np.maximum(ids, 0)], ids)


# --- slices and gathers, concatenation, padding


def _pick(w: Writer, node: NodeProto) -> None:
    s, name, out = w.study, node.input[0], node.output[0]
    source = sources(s, node)
    from_ = by_axis(source, s.shape(name))
    if from_ is None or len(s.net.data(node)) != 1:
        w.copy_whole(node)
        return
    if by_axis(w.pieces[name].ids, s.shape(name)) is None:
        _pick_ragged(w, node, from_)
        return
    lists, made = w.lists(name), w.pieces[name].name
    wanted = s.wanted(out)
    kept: Lists = []
    free = [a or b for a, b in zip(s.channels(name), s.channels(out), strict=True)]
    for axis, (given, own) in enumerate(zip(from_, lists, strict=True)):
        size = s.shape(name)[axis]
        if np.array_equal(given, np.arange(size)):
            kept.append(own)
            continue
        held = own[own >= 0]
        count = np.bincount(given, minlength=size)
        if free[axis] and (count[held] == 1).all() and len(own) <= len(given):
            place = np.full(size, -1)
            place[given] = np.arange(len(given))
            kept.append(np.where(own >= 0, place[np.maximum(own, 0)], own))
            continue
        at = np.full(size, -1)
        at[held] = np.flatnonzero(own >= 0)
        due = wanted[axis][at[given[wanted[axis]]] >= 0] if free[axis] else np.arange(len(given))
        places = at[given[due]]
        if (places < 0).any():
            raise Ragged(name, "some of them are gone")
        made = w.picked(made, axis, places, len(own))
        kept.append(due)
    w.put(out, made, w.grid(out, kept))


def _pick_ragged(w: Writer, node: NodeProto, from_: Lists) -> None:
    """Entries of an axis each of which is cut in its own way, as one direction's state of a recurrent layer."""
    name, out = node.input[0], node.output[0]
    made, ids, shape = w.pieces[name].name, w.pieces[name].ids, w.study.shape(name)
    for axis, given in enumerate(from_):
        if np.array_equal(given, np.arange(shape[axis])):
            continue
        if not whole_along(ids, shape, axis):
            w.lists(name)  # raises
        made = w.picked(made, axis, given, shape[axis])
        ids, shape = _carried(np.take(ids, given, axis), shape, axis, np.arange(len(given)), len(given))
    w.put(out, made, ids)


def _carried(ids: Ids, shape: Shape, axis: int, at: Ids, size: int) -> tuple[Ids, Shape]:
    """The places of `ids` in a value that has `size` entries in `axis`, where theirs are `at`; and its shape."""
    places = list(np.unravel_index(np.maximum(ids, 0), shape))
    places[axis] = np.broadcast_to(at.reshape(-1, *(1,) * (ids.ndim - 1 - axis)), ids.shape)
    whole = (*shape[:axis], size, *shape[axis + 1 :])
    return np.where(ids >= 0, np.ravel_multi_index(places, whole), ids), whole


def _stacked(w: Writer, node: NodeProto, axis: int) -> bool:
    """Values whose entries of `axis` are cut each in its own way, each as wide as the widest; False: not so."""
    s, out = w.study, node.output[0]
    if not all(v in w.pieces for v in node.input) or not w.net.is_plain(out):
        return False
    pieces, shapes = [w.pieces[v] for v in node.input], [s.shape(v) for v in node.input]
    each = list(zip((p.ids for p in pieces), shapes, strict=True))
    if all(by_axis(*own) is not None for own in each) or not all(whole_along(*own, axis) for own in each):
        return False
    most = np.max([p.ids.shape for p in pieces], axis=0)
    made, kept, start = [], [], 0
    for piece, shape in zip(pieces, shapes, strict=True):
        more = [0 if a == axis else int(most[a] - n) for a, n in enumerate(piece.ids.shape)]
        pads = w.integers(*[0] * len(more), *more)
        made.append(w.emit("Pad", [piece.name, pads], mode="constant") if any(more) else piece.name)
        ids = np.pad(piece.ids, [(0, n) for n in more], constant_values=-2)
        kept.append(_carried(ids, shape, axis, start + np.arange(shape[axis]), s.shape(out)[axis])[0])
        start += shape[axis]
    w.put(out, w.emit("Concat", made, axis=axis), np.concatenate(kept, axis))
    return True


def _concat(w: Writer, node: NodeProto) -> None:
    s, out = w.study, node.output[0]
    shape = s.shape(out)
    axis = settings(node)["axis"] % len(shape)
    if _stacked(w, node, axis):
        return
    free = s.channels(out)[axis] and out not in s.whole
    parts = [v for v in node.input if v in w.pieces and (not free or s.live(v).any())] if free else list(node.input)
    held = {v: w.lists(v) for v in dict.fromkeys(parts) if v in w.pieces}
    wanted = s.wanted(out)
    target = []
    for k in range(len(shape)):
        here = [lists[k] for lists in held.values()]
        same = all(np.array_equal(here[0], other) for other in here[1:]) and len(held) == len(set(parts))
        target.append(here[0] if same else wanted[k])
    made, kept, start = [], [], 0
    for v in node.input:
        size = s.shape(v)[axis]
        if v in parts:
            own = held[v][axis] if v in held and free else np.arange(size)
            made.append(w.adapted(v, [own if k == axis else target[k] for k in range(len(shape))], batch=True))
            kept.append(np.where(own >= 0, own + start, own))
        start += size
    target[axis] = np.concatenate(kept)
    name = w.emit("Concat", made, axis=axis) if len(made) > 1 else made[0]
    w.put(out, name, w.grid(out, target))


def _pad(w: Writer, node: NodeProto) -> None:
    s, name, out = w.study, node.input[0], node.output[0]
    shape, given = s.shape(name), settings(node)
    widths = s.net.known(node.input[1]).reshape(2, -1)
    full = np.zeros((2, len(shape)), np.int64)
    full[:, _pad_axes(s, node)] = widths
    free = (False,) * len(shape) if out in s.whole else s.channels(name)
    within = [a for a in range(len(shape)) if full[:, a].any() and free[a]]
    if (full < 0).any() or (within and given.get("mode", b"constant") != b"constant"):
        w.copy_whole(node)
        return
    lists = w.lists(name)
    target = [lists[a] if free[a] or not full[:, a].any() else np.arange(shape[a]) for a in range(len(shape))]
    made = w.adapted(name, target)
    kept = []
    for a in range(len(shape)):
        if not full[:, a].any():
            kept.append(target[a])
        elif a in within:
            kept.append(np.where(target[a] >= 0, target[a] + full[0, a], target[a]))
            full[:, a] = 0
        else:
            kept.append(np.arange(s.shape(out)[a]))
    if full.any():
        value = [w.whole(node.input[2])] if len(node.input) > 2 and node.input[2] else []
        made = w.emit("Pad", [made, w.constant(full.reshape(-1)), *value], **given)
    w.put(out, made, w.grid(out, kept))


def _pad_axes(s: Study, node: NodeProto) -> list[int]:
    rank = len(s.shape(node.input[0]))
    given = s.net.known(node.input[3]).reshape(-1) if len(node.input) > 3 and node.input[3] else np.arange(rank)
    return [int(a) % rank for a in given]


def _regular(w: Writer, node: NodeProto) -> None:
    """Any other move: on the entries that its wanted outputs come from, if what it makes of them is again a product."""
    s, name, out = w.study, node.input[0], node.output[0]
    source = sources(s, node)
    needed = np.zeros(prod(s.shape(name)), np.bool_)
    read = source.reshape(-1)[w.grid(out, s.wanted(out)).reshape(-1)]
    needed[read[read >= 0]] = True
    mask = needed.reshape(s.shape(name))
    target = [np.flatnonzero(entries(mask, axis)) for axis in range(mask.ndim)]
    lists = _kept_by(w, node, target) if len(np.unique(source)) == source.size else None
    if lists is None:
        w.copy_whole(node)
        return
    made = w.emit(node.op_type, [w.adapted(name, target), *(w.whole(v) for v in node.input[1:])], **settings(node))
    w.put(out, made, w.grid(out, lists))


def _kept_by(w: Writer, node: NodeProto, target: Lists) -> Lists | None:
    """The entries of each axis of the output that the operator makes of the entries `target`; None: no product."""
    s, shape = w.study, w.study.shape(node.output[0])
    ids = grid(s.shape(node.input[0]), target)
    given: list[Array | None] = [ids.astype(np.float64) + 1, *(s.net.known(v) if v else None for v in node.input[1:])]
    try:
        moved = s.net.operators.run(node, given)[0].astype(np.int64) - 1
    except CompactionError:
        return None
    lists = by_axis(_renumbered(w, node, moved), shape)
    if lists is None or any(
        len(own) == n and not np.array_equal(own, np.arange(n)) for own, n in zip(lists, shape, strict=True)
    ):
        return None
    return lists


MOVE = Rule(_forward, _backward)


def is_move(net: Net, node: NodeProto) -> bool:
    """Whether `node` moves the elements of what carries data, by indices and sizes that are known."""
    data = net.data(node)
    if node.op_type not in _MOVES or len([o for o in node.output if o]) != 1:
        return False
    return data == [0] or node.op_type == "Concat"
