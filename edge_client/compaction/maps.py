"""Operators that treat the entries of some axes alike and apart: activations, norms, pools, sums, softmax, and others.

Which axes these are is found by running the operator: when one entry of an input changes, only the same entry of the
output may change. The other axes are mixed (the spatial ones of a pool, the normalised ones of a norm, the axis of a
softmax) and stay whole. In the same way it is found which axis of the output each axis of a parameter belongs to: the
slopes of a PReLU, the scales of a norm. So there is no list of activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_client.compaction.layouts import extended
from edge_client.compaction.net import Net
from edge_client.compaction.operators import Array
from edge_client.compaction.pieces import whole_along
from edge_client.compaction.study import Bools, Labels, Rule, Study, entries, mixed, narrowed, some
from edge_client.compaction.writer import Writer
from edge_client.errors import CompactionError
from edge_client.graph.nodes import settings

RESIZING = frozenset({"Expand", "Resize"})
"""Operators with an input that holds the sizes of their output."""
_KEEP_ZERO = frozenset({"Add", "Mul", "Sub"})
"""Operators that make a zero of zeros; a constant they take is zero there too."""


@dataclass(frozen=True)
class Behaviour:
    """How an operator treats axes. `apart` marks the axes of the output whose entries do not mix.

    `parameters` gives for each constant input with several entries the axis of the output that each of its axes
    belongs to, None for an axis of one entry.
    """

    apart: tuple[bool, ...]
    parameters: dict[int, tuple[int | None, ...]]


def behaviour(s: Study, node: NodeProto) -> Behaviour | None:
    """How `node` treats axes; None when it is no map: an output of another rank, of integers, or nothing kept apart.

    Places by element, as those of a scatter, make no map: a few entries that stay do not show that all do.
    """
    net = s.net
    data = net.data(node)
    out = [o for o in node.output if o]
    if len(out) != 1 or not data or not net.is_plain(out[0]):
        return None
    known = [v for k, v in enumerate(node.input) if v and k not in data]
    if any(net.kinds[v].kind in "iu" and len(net.shapes[v]) > 1 for v in known):
        return None
    rank = len(net.shapes[out[0]])
    ranks = [len(net.shapes[node.input[k]]) for k in data]
    if max(ranks) != rank or any(not net.is_plain(node.input[k]) for k in data):
        return None
    key = ("behaviour", node.op_type, _key(net, node))
    if key not in s.notes:
        try:
            s.notes[key] = _probe(net, node, data, rank)
        except CompactionError:
            s.notes[key] = None
    found: Behaviour | None = s.notes[key]
    return found


def _key(net: Net, node: NodeProto) -> Any:
    inputs = []
    for v in node.input:
        known = v in net.constants or v in net.sizes
        inputs.append((net.shapes.get(v, ()), net.known(v).tobytes() if known and net.known(v).size < 16 else known))
    return (tuple(inputs), tuple(a.SerializeToString(deterministic=True) for a in node.attribute))


class _Probe:
    """A node on random inputs, once of both signs and once positive."""

    def __init__(self, net: Net, node: NodeProto) -> None:
        self.net, self.node = net, node
        self.data = net.data(node)
        self.random = np.random.default_rng(0)
        self.given = [self._inputs(positive) for positive in (False, True)]
        self.before = [net.operators.run(node, given)[0] for given in self.given]

    def _inputs(self, positive: bool) -> list[Array | None]:
        made: list[Array | None] = []
        for k, v in enumerate(self.node.input):
            if not v:
                made.append(None)
            elif k in self.data:
                x = 2 * self.random.standard_normal(self.net.shapes[v])
                if not self.net.is_float(v):
                    made.append(x > 0)
                else:
                    made.append(np.abs(x) + 0.5 if positive else x)
            elif self.is_parameter(k):
                made.append(self.random.uniform(0.5, 1.5, self.net.known(v).shape))
            else:
                made.append(self.net.known(v))
        return made

    def is_parameter(self, k: int) -> bool:
        """Whether input `k` is a constant with several entries, one for each of something."""
        if k in self.data or not self.node.input[k] or self.node.op_type in RESIZING:
            return False
        known = self.net.known(self.node.input[k])
        return known.dtype.kind == "f" and known.size > 1

    def changed(self, k: int, axis: int, entry: int) -> Bools:
        """The elements of the output that change with one entry of input `k`."""
        made = np.zeros(self.before[0].shape, np.bool_)
        for positive, (given, before) in enumerate(zip(self.given, self.before, strict=True)):
            x = np.array(given[k])
            place = (slice(None),) * axis + (entry,)
            if x.dtype.kind == "b":
                x[place] = ~x[place]
            else:
                x[place] = self.random.uniform(0.5, 3.0, x[place].shape)
            if not positive and x.dtype.kind == "f":
                x[place] *= self.random.choice([-1, 1], x[place].shape)
            after = self.net.operators.run(self.node, [*given[:k], x, *given[k + 1 :]])[0]
            made |= ~((after == before) | ((after != after) & (before != before)))
        return made

    def owner(self, k: int, axis: int) -> int | None:
        """The axis of the output that an axis of parameter `k` belongs to; None if there is no such axis."""
        x = self.given[0][k]
        assert x is not None
        n, shape = x.shape[axis], self.before[0].shape
        moved = self.changed(k, axis, n // 2)
        found = []
        for at in [a for a, size in enumerate(shape) if size == n]:
            hit = entries(moved, at)
            if hit[n // 2] and hit.sum() == 1:
                found.append(at)
        right = axis + len(shape) - x.ndim
        return right if right in found else next(iter(found), None)


def _probe(net: Net, node: NodeProto, data: list[int], rank: int) -> Behaviour | None:
    probe, shape = _Probe(net, node), net.shapes[node.output[0]]
    if any(before.shape != shape for before in probe.before):
        return None
    apart = [True] * rank
    for k in data:
        size = net.shapes[node.input[k]]
        for axis, n in enumerate(size):
            at = axis + rank - len(size)
            if n == shape[at]:
                for entry in {0, n // 2, n - 1} if n > 1 and apart[at] else ():
                    moved = probe.changed(k, axis, entry)
                    moved[(slice(None),) * at + (entry,)] = False
                    apart[at] &= not moved.any()
            elif n != 1 or len(data) == 1:
                apart[at] = False
    parameters: dict[int, tuple[int | None, ...]] = {}
    for k, v in enumerate(node.input):
        if probe.is_parameter(k):
            owners = [None if n == 1 else probe.owner(k, axis) for axis, n in enumerate(net.shapes[v])]
            if any(at is None and n > 1 for at, n in zip(owners, net.shapes[v], strict=True)):
                return None
            parameters[k] = tuple(owners)
        elif v in net.constants and net.constants[v].dtype.kind == "b" and net.constants[v].size > 1:
            lead = rank - net.constants[v].ndim  # a condition: it broadcasts
            parameters[k] = tuple(None if n == 1 else a + lead for a, n in enumerate(net.constants[v].shape))
    return Behaviour(tuple(apart), parameters) if any(apart) else None


def _spread(mask: Bools, shape: tuple[int, ...], apart: tuple[bool, ...]) -> Bools:
    """Whether any element that an output element may depend on is marked, in the output's shape."""
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    axes = tuple(a for a, free in enumerate(apart) if not free)
    return np.broadcast_to(mask.any(axis=axes, keepdims=True) if axes else mask, shape)


def _gathered(mask: Bools, shape: tuple[int, ...], apart: tuple[bool, ...]) -> Bools:
    """Of an input of `shape`, what the marked elements of the output depend on."""
    axes = tuple(a for a, free in enumerate(apart) if not free)
    return np.broadcast_to(narrowed(some(mask, axes, keepdims=True) if axes else mask, shape), shape)


def _nonzero(s: Study, name: str) -> Bools:
    value, varies, _ = s.facts(name)
    return np.asarray(varies | (value != 0))


def _others(s: Study, node: NodeProto, k: int) -> Bools | None:
    """Where input `k` counts: a product's other factor or its dividend is not zero, a choice takes it. None: all."""
    if node.op_type == "Mul" or (node.op_type == "Div" and k == 1):
        return _nonzero(s, node.input[1 - k])
    if node.op_type == "Where":
        (condition, may, _), (x, x_moves, _), (y, y_moves, _) = (s.facts(v) for v in node.input)
        return np.asarray([x_moves | y_moves | (x != y), may | condition, may | ~condition][k])
    if node.op_type == "BatchNormalization" and k == 0:
        scale = _nonzero(s, node.input[1])
        return scale.reshape(-1, *(1,) * (len(s.shape(node.input[0])) - 2))
    return None


def _forward(s: Study, node: NodeProto) -> None:
    found = behaviour(s, node)
    assert found is not None
    out = node.output[0]
    shape = s.shape(out)
    value = s.net.operators.run(node, [s.facts(v).value if v else None for v in node.input])[0]
    varies: Bools = np.zeros(shape, np.bool_)
    label: Labels = np.zeros(shape, np.int64)
    for k in s.net.data(node):
        _, mine, own = s.facts(node.input[k])
        own = own.reshape((1,) * (len(shape) - own.ndim) + own.shape)
        for axis, free in enumerate(found.apart):
            if not free:
                own = np.take(own, [0], axis)
        label = mixed(label, np.broadcast_to(own, shape))
        factor = _others(s, node, k)
        varies |= _spread(mine, shape, found.apart) & (True if factor is None else factor)
    s.store(out, value if value.dtype.kind == "b" else np.where(np.isnan(value), 0.0, value), varies, label)


def _backward(s: Study, node: NodeProto) -> None:
    found = behaviour(s, node)
    assert found is not None
    live, due = s.live(node.output[0]), s.due[node.output[0]]
    if not live.any():
        return
    for k in s.net.data(node):
        if due.any() and due.shape == s.shape(node.input[k]):
            s.need(node.input[k], due)
        factor = _others(s, node, k)
        mask = live if factor is None else live & factor
        s.mark(node.input[k], _gathered(mask, s.shape(node.input[k]), found.apart))


def rewrite(w: Writer, node: NodeProto) -> None:
    """The map on the entries that are left."""
    found = behaviour(w.study, node)
    assert found is not None
    out = node.output[0]
    shape = w.study.shape(out)
    rank = len(shape)
    data = w.study.net.data(node)
    pieces = {k: w.pieces[node.input[k]] for k in data if node.input[k] in w.pieces}
    whole = [k for k in pieces if w.study.shape(node.input[k]) == shape]
    if len(pieces) == len(whole) == 1 and _alone(w, node, found, whole[0]):
        return
    target = _target(w, out, [node.input[k] for k in pieces], found.apart)
    inputs = []
    for k, v in enumerate(node.input):
        if k in data:
            own = [
                target[at] if found.apart[at] and n == shape[at] else np.arange(n)
                for at, n in enumerate(w.study.shape(v), rank - len(w.study.shape(v)))
            ]
            inputs.append(w.adapted(v, own, pooled=node.op_type.endswith("Pool")))
        else:
            inputs.append(_parameter(w, node, k, found, target))
    if rank and not pieces:
        raise CompactionError(f"node {out!r} has no varying input")
    ids = w.grid(out, target)
    made = w.emit(node.op_type, inputs, **settings(node))
    w.put(out, made, ids if node.op_type in _KEEP_ZERO else np.maximum(ids, -1))


def _target(w: Writer, out: str, inputs: list[str], apart: tuple[bool, ...]) -> list[NDArray[np.int64]]:
    """The entries of each axis of `out` that are written, an output of a map of the varying `inputs`.

    An axis that all inputs list alike keeps its list. Of others only the wanted entries stay; along the last axis,
    where gathers are slow, all entries of the input that has the most of them. A mixed axis stays whole.
    """
    shape, target = w.study.shape(out), []
    lists = {v: w.lists(v) for v in inputs}
    for axis, wanted in enumerate(w.study.wanted(out)):
        here: list[NDArray[np.int64]] = []
        for v, own in lists.items():
            at = axis - len(shape) + len(own)
            if at >= 0 and w.study.shape(v)[at] == shape[axis]:
                here.append(own[at])
        same = bool(here) and all(np.array_equal(here[0], other) for other in here[1:])
        enough = [own for own in here if np.isin(wanted, own).all() and (same or (own >= 0).all())]
        if enough and (same or axis == len(shape) - 1):
            kept = max(enough, key=len)
        else:
            more = extended(w, max(here, key=len), wanted) if here and axis == 1 < len(shape) - 1 else None
            kept = wanted if more is None else more
        target.append(kept if apart[axis] else np.arange(shape[axis]))
    return target


def _alone(w: Writer, node: NodeProto, found: Behaviour, k: int) -> bool:
    """A map of one varying value in any layout, ragged ones too. False when it needs lists by axis."""
    name, out, net = node.input[k], node.output[0], w.study.net
    piece, shape = w.pieces[name], w.study.shape(out)
    by_entry = [j for j in (*net.data(node), *found.parameters) if j != k and np.prod(w.study.shape(node.input[j])) > 1]
    if node.op_type in RESIZING or by_entry:
        return False
    whole = all(free or whole_along(piece.ids, shape, axis) for axis, free in enumerate(found.apart))
    if not whole or (not all(found.apart) and (piece.ids < 0).any()):
        return False
    inputs = [piece.name if j == k else w.whole(v) for j, v in enumerate(node.input)]
    ids = piece.ids
    if (ids == -2).any():
        zero: list[Array | None] = [w.study.facts(v).value if v else None for v in node.input]
        zero[k] = np.zeros((1,) * len(shape))
        if net.operators.run(node, zero)[0].any():
            ids = np.maximum(ids, -1)
    w.put(out, w.emit(node.op_type, inputs, **settings(node)), ids)
    return True


def _parameter(w: Writer, node: NodeProto, k: int, found: Behaviour, target: list[NDArray[np.int64]]) -> str:
    """Constant input `k` for the entries `target` of the output."""
    name = node.input[k]
    if not name:
        return ""
    if (
        node.op_type in RESIZING
        and name in {*w.study.net.constants, *w.study.net.sizes}
        and k == (1 if node.op_type == "Expand" else 3)
    ):
        return w.sized(name, [len(t) for t in target], node.output[0])
    if k not in found.parameters:
        return w.whole(name)
    value, net = w.study.net.known(name), w.study.net
    if any(n > 1 and moves for n, moves in zip(value.shape, net.moving[name], strict=True)):
        raise CompactionError(f"the constant value {name!r} mixes the batch with another axis")
    for axis, at in enumerate(found.parameters[k]):
        if at is not None and found.apart[at]:
            value = np.take(value, np.maximum(target[at], 0), axis)
            if node.op_type in _KEEP_ZERO:
                value = value * np.expand_dims(target[at] >= 0, tuple(k for k in range(value.ndim) if k != axis))
    return w.constant(value)


MAP = Rule(_forward, _backward)
