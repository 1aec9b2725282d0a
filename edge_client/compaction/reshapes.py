"""Reshapes in the smaller graph: of axes that are cut, and of such that a reshape splits, as it does into heads.

A reshape that only joins or splits whole axes is the same on fewer elements. One that splits an axis of which channels
are dead makes parts of one width: each part may keep its own entries, or all the same, or the axis stays whole.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from onnx import NodeProto

from edge_client.compaction.net import Shape
from edge_client.compaction.pieces import Ids, Piece, by_axis, grid, whole_along
from edge_client.compaction.study import Bools, entries, some
from edge_client.compaction.writer import Writer

REGROUP = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def blocks(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Axes of a reshape that belong together: the fewest with equal products, in order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        mine: list[int] = []
        made: list[int] = []
        a = b = 1
        while not (mine or made) or a != b:
            if (a <= b and i < len(before)) or j >= len(after):
                a *= before[i]
                mine.append(i)
                i += 1
            else:
                b *= after[j]
                made.append(j)
                j += 1
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            mine.append(i)
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            made.append(j)
            j += 1
        found.append((mine, made))
    return found


def regroup(w: Writer, node: NodeProto) -> None:
    """Write a reshape: of the piece as it is where its elements fit, else of as much as `slots` allows."""
    name, out = node.input[0], node.output[0]
    before, after = w.study.shape(name), w.study.shape(out)
    if name not in w.pieces:  # constants that differ along an axis which is joined with the batch
        w.put(out, w.reshaped(w.whole(name), after, out, name), np.arange(prod(after)).reshape(after))
        return
    piece, live = w.pieces[name], w.study.live(out)
    if w.study.merged(out) and not np.isin(np.flatnonzero(live), piece.ids).all():  # constants that a batch repeats
        needed = live.reshape(before)
        lists = [np.union1d(own, np.flatnonzero(entries(needed, a))) for a, own in enumerate(w.lists(name))]
        piece = Piece(w.adapted(name, lists), grid(before, lists))
    for lengths in _lengths(before, after, piece.ids.shape):
        ids = piece.ids.reshape(lengths)
        if _aligned(ids, after) and (not w.levels.get(out) or by_axis(ids, after) is not None):
            if by_axis(ids, after) is None:
                w.split.add(out)
                _note(w, node, dict(enumerate(by_axis(piece.ids, before) or [])))
            w.put(out, w.reshaped(piece.name, lengths, out, name), ids)
            return
    w.split.add(out)
    target = slots(w, node)
    _note(w, node, target)
    lists = w.lists(name)
    due = [lists[axis] if axis not in target else target[axis] for axis in range(len(before))]
    given = w.adapted(name, due)
    ids = grid(before, due)
    for lengths in _lengths(before, after, ids.shape):
        moved = ids.reshape(lengths)
        if _aligned(moved, after):
            w.put(out, w.reshaped(given, lengths, out, name), moved)
            return
    whole = [np.arange(n) for n in before]
    w.put(out, w.reshaped(w.adapted(name, whole), after, out, name), np.arange(prod(after)).reshape(after))


def _note(w: Writer, node: NodeProto, target: dict[int, Ids]) -> None:
    """A line where heads keep more than their own live entries: `target` is what stays of the axes that it splits."""
    name, live = node.input[0], w.study.live(node.output[0]) | w.study.due[node.output[0]]
    split = live.reshape(w.study.shape(name))
    for axis, kept in target.items():
        more = len(kept) - int(entries(split, axis).sum())
        if more > 0 and w.study.channels(name)[axis]:
            reason = f", which {w.why} behind it needs" if w.levels.get(node.output[0]) else ""
            w.stays(name, f"makes parts of one width{reason}, so dead entries stay ({more} of {len(kept)})")


def _lengths(before: Shape, after: Shape, cut: Shape) -> list[list[int]]:
    """The shapes that a value of shape `cut`, cut from `before`, may take when `before` becomes `after`."""
    options: list[list[dict[int, int]]] = []
    for mine, made in blocks(before, after):
        have = prod(cut[a] for a in mine)
        if all(cut[a] == before[a] for a in mine):
            options.append([{a: after[a] for a in made}])
        elif sum(after[a] > 1 for a in made) <= 1:
            wide = next((a for a in made if after[a] > 1), made[0] if made else None)
            options.append([{a: have if a == wide else 1 for a in made}])
        else:
            found = []
            for axis in made[::-1]:
                rest = prod(after[a] for a in made if a != axis)
                if after[axis] > 1 and have % rest == 0:
                    found.append({a: have // rest if a == axis else after[a] for a in made})
            options.append(found)
    shapes = []
    for choice in product(*options):
        joined = {k: n for part in choice for k, n in part.items()}
        shapes.append([joined[a] for a in range(len(after))])
    return shapes


def _aligned(ids: Ids, shape: Shape) -> bool:
    """Whether along every axis that is whole each element of meaning lies at its own entry."""
    return all(whole_along(ids, shape, axis) for axis in range(len(shape)) if ids.shape[axis] == shape[axis])


def slots(w: Writer, node: NodeProto) -> dict[int, Ids]:
    """For the axes of a reshape's input that it splits: their entries in an order that the split fits, -2 for zeros.

    One axis of the output is cut: the one whose cut leaves the fewest elements. At level 0 each index of the other axes
    may keep its own entries of the last axis (each head of an attention its own), as many as the one with the most; of
    any other axis, such as that of the heads, all keep the same. At level 1 all keep the same on every axis. At level 2
    nothing is cut.
    """
    name, out = node.input[0], node.output[0]
    before, after = w.study.shape(name), w.study.shape(out)
    live = w.study.live(out) | w.study.due[out]
    found: dict[int, Ids] = {}
    for mine, made in blocks(before, after):
        big = [a for a in mine if before[a] > 1]
        level = w.levels.get(out, 0)
        if level > 1 or len(big) != 1 or sum(after[a] > 1 for a in made) < 2 or any(w.net.moving[out][a] for a in made):
            found.update({a: np.arange(before[a]) for a in mine})
            continue
        others = tuple(a for a in range(len(after)) if a not in made)
        mask = some(live, others) if others else live
        axes = [axis for axis in range(mask.ndim) if mask.shape[axis] > 1]
        tried = axes if level else axes[::-1]
        found[big[0]] = min((_slots(mask, axis, axis != axes[-1] or level > 0) for axis in tried), key=len)
    return found


def _slots(mask: Bools, axis: int, alike: bool) -> Ids:
    ids = np.moveaxis(np.arange(mask.size).reshape(mask.shape), axis, -1)
    mask = np.moveaxis(mask, axis, -1)
    if alike:
        mask = np.broadcast_to(mask.any(axis=tuple(range(mask.ndim - 1))), mask.shape)
    most = max(1, int(mask.sum(axis=-1).max()))
    order = np.argsort(~mask, axis=-1, kind="stable")[..., :most]
    kept = np.where(np.take_along_axis(mask, order, -1), np.take_along_axis(ids, order, -1), -2)
    return np.ascontiguousarray(np.moveaxis(kept, -1, axis)).reshape(-1)
