"""LSTM and GRU, one or both directions: a unit leaves with its rows of all gates and its column of the recurrence.

A unit without varying inputs still moves over time, from its start towards a limit. What it adds to the gates of the
others is a map over time. For an LSTM the few vectors that span this map become further inputs of the layer. A GRU has
a gate on the recurrent sum, so there the few units whose courses span all the others' stay and stand for them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_client.compaction.layouts import worth
from edge_client.compaction.operators import F64
from edge_client.compaction.study import Bools, Rule, Study, some
from edge_client.compaction.writer import Ids, Writer
from edge_client.errors import CompactionError
from edge_client.nodes import settings

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_Number = TypeVar("_Number", np.int64, np.float64)
SPAN = 1e-7
"""How far, relative to the largest, a course may lie from those that stand for it."""


def is_recurrent(s: Study, node: NodeProto) -> bool:
    """Whether `node` is a recurrent layer in a form that is written here."""
    if node.op_type not in GATES:
        return False
    given, net = settings(node), s.net
    names = list(node.input) + [""] * 8
    constant = all(names[k] in net.constants for k in (1, 2)) and (not names[3] or names[3] in net.constants)
    plain = not given.get("layout", 0) and not names[4] and not names[7] and not given.get("input_forget", 0)
    resets = node.op_type != "GRU" or given.get("linear_before_reset", 0) == 1
    moving = net.moving[names[0]]
    return constant and plain and resets and moving == (False, True, False) and s.shape(names[0])[1] == 1


def _links(s: Study, node: NodeProto) -> tuple[Bools, Bools]:
    """Which unit reads which input, bool[d, h, i], and which other unit, bool[d, h, h], through any gate."""
    found = []
    for k in (1, 2):
        weight = s.net.constants[node.input[k]] != 0
        found.append(weight.reshape(len(weight), GATES[node.op_type], -1, weight.shape[2]).any(axis=1))
    return found[0], found[1]


def _starts(s: Study, node: NodeProto) -> list[str]:
    return [node.input[k] for k in (5, 6) if len(node.input) > k and node.input[k]]


def _forward(s: Study, node: NodeProto) -> None:
    inputs, units = _links(s, node)
    moves = some(s.facts(node.input[0])[1], (0, 1))
    varies = some(inputs & moves, 2)
    for name in _starts(s, node):
        varies = varies | s.facts(name)[1][:, 0]
    for _ in range(units.shape[1]):
        more = varies | (units & varies[:, None, :]).any(axis=2)
        if (more == varies).all():
            break
        varies = more
    values = s.net.operators.run(node, [s.facts(v)[0] if v else None for v in node.input])
    label = np.arange(units.shape[1])
    for name, value in zip([o for o in node.output if o], values, strict=True):
        s.learn(name, value, np.broadcast_to(varies[:, None], value.shape), label)


def _live(s: Study, node: NodeProto) -> Bools:
    """The units that vary and that the output depends on, bool[d, h]."""
    _, units = _links(s, node)
    varies = np.zeros(units.shape[:2], np.bool_)
    read = np.zeros(units.shape[:2], np.bool_)
    for name in [o for o in node.output if o]:
        own, seen = s.varies[name], s.read[name]
        lead = tuple(range(own.ndim - 3))  # [t] d n h
        varies |= some(own, lead)[:, 0]
        read |= some(seen, lead)[:, 0]
    live = varies & read
    for _ in range(units.shape[1]):
        more = live | (varies & (units & live[:, :, None]).any(axis=1))
        if (more == live).all():
            break
        live = more
    return live


def _backward(s: Study, node: NodeProto) -> None:
    live = _live(s, node)
    inputs, _ = _links(s, node)
    read = (inputs & live[:, :, None]).any(axis=(0, 1))
    s.mark(node.input[0], np.broadcast_to(read, s.shape(node.input[0])))
    for name in _starts(s, node):
        s.mark(name, np.broadcast_to(live[:, None], s.shape(name)))
    s.notes["live", node.output[0]] = live


def _courses(s: Study, node: NodeProto) -> F64:
    """The state that each step reads, float64[d, t, h]; right for units that do not vary."""
    full = NodeProto()
    full.CopyFrom(node)
    full.output[:] = ["y"]
    states = s.net.operators.run(full, [s.facts(v)[0] if v else None for v in node.input])[0][:, :, 0].swapaxes(0, 1)
    start = (
        s.facts(node.input[5])[0]
        if len(node.input) > 5 and node.input[5]
        else np.zeros((len(states), 1, states.shape[2]))
    )
    found = []
    for way, own in enumerate(states):
        backwards = settings(node).get("direction", b"forward") == b"reverse" or way == 1
        found.append(np.concatenate([own[1:], start[way]]) if backwards else np.concatenate([start[way], own[:-1]]))
    return np.stack(found)


def _basis(courses: F64) -> tuple[Ids, F64]:
    """Columns of `courses` [t, k] that span all with a constant, and coefficients [1 + columns, k]."""
    rest = courses - courses.mean(axis=0)
    scale = np.abs(courses).max(initial=0.0)
    chosen: list[int] = []
    while len(chosen) < courses.shape[1] and np.abs(rest).max(initial=0.0) > SPAN * scale:
        chosen.append(int(np.argmax((rest**2).sum(axis=0))))
        unit = rest[:, chosen[-1]] / np.linalg.norm(rest[:, chosen[-1]])
        rest = rest - np.outer(unit, unit @ rest)
    span = np.concatenate([np.ones((len(courses), 1)), courses[:, chosen]], axis=1)
    return np.array(chosen, np.int64), np.linalg.lstsq(span, courses, rcond=None)[0]


def _rewrite(w: Writer, node: NodeProto) -> None:
    s, name = w.study, node.input[0]
    gates = GATES[node.op_type]
    live: Bools = s.notes["live", node.output[0]]
    weight, recurrent = (s.net.constants[node.input[k]] for k in (1, 2))
    ways, h = live.shape
    has_bias = len(node.input) > 3 and bool(node.input[3])
    bias = s.net.constants[node.input[3]] if has_bias else np.zeros((ways, 2 * gates * h))
    weight, recurrent = weight.reshape(ways, gates, h, -1), recurrent.reshape(ways, gates, h, h)
    biases = bias.reshape(ways, 2, gates, h).copy()
    inputs, _ = _links(s, node)
    moves = s.live(name).any(axis=(0, 1))
    due = np.flatnonzero((inputs & live[:, :, None]).any(axis=(0, 1)) & moves)
    lists = w.lists(name)
    columns = worth(w, lists[2], due, gates * int(live.sum()), last=True)
    x = np.array(s.facts(name)[0])[:, 0]
    x[:, columns[columns >= 0]] = 0
    courses = _courses(s, node)
    units: list[Ids] = []
    maps: list[F64] = []
    recurrent = recurrent.copy()
    for way in range(ways):
        own = np.flatnonzero(live[way])
        varying = s.varies[node.output[0]].reshape(-1, ways, h)[0, way] if node.output[0] else live[way]
        still = np.flatnonzero(~varying & np.abs(courses[way]).max(axis=0).astype(bool))
        if node.op_type == "GRU" and still.size:
            rows = own
            basis, mix = _basis(courses[way][:, still])
            rows = np.concatenate([own, still[basis]])
            share = recurrent[way][:, rows][:, :, still]
            biases[way, 1][:, rows] += share @ mix[0]
            recurrent[way][np.ix_(np.arange(gates), rows, still)] = 0
            for k, unit in enumerate(still[basis]):
                recurrent[way][:, rows, unit] = share @ mix[1 + k]
            own = rows
            maps.append(np.einsum("ti,goi->tgo", x, weight[way][:, own]))
        else:
            share = recurrent[way][:, own][:, :, still]
            maps.append(
                np.einsum("ti,goi->tgo", x, weight[way][:, own])
                + np.einsum("tk,gok->tgo", courses[way][:, still], share)
            )
        units.append(own)
    most = max(1, *map(len, units))
    # Where they are as many as there were, each lies at its own entry.
    order = [own if most == h else np.arange(len(own)) for own in units]
    units = [_placed(own, at, most, -1) for own, at in zip(units, order, strict=True)]
    maps = [_placed(m, at, most, 0.0) for m, at in zip(maps, order, strict=True)]
    own_x, extra = _spanned(np.stack(maps))
    small_w, small_r, small_b = [], [], []
    for way, own in enumerate(units):
        at, on = np.maximum(own, 0), own >= 0
        part = weight[way][:, at][:, :, np.maximum(columns, 0)] * (columns >= 0) * on[:, None]
        small_w.append(np.concatenate([part, extra[way]], axis=2).reshape(gates * most, -1))
        small_r.append((recurrent[way][:, at][:, :, at] * on * on[:, None]).reshape(gates * most, most))
        both = biases[way][:, :, at] * on
        both[0] += np.stack(maps)[way].mean(axis=0)
        small_b.append(both.reshape(-1))
    given = w.adapted(name, [lists[0], lists[1], columns])
    if own_x.shape[1]:
        course = w.emit("Expand", [w.constant(own_x[:, None]), w.batch_shape((len(own_x), 1, own_x.shape[1]), 1)])
        given = w.emit("Concat", [given, course], axis=2)
    stacked = [np.stack(v) for v in (small_w, small_r, small_b)]
    names = [given, w.constant(stacked[0]), w.constant(stacked[1]), w.constant(stacked[2]), ""]
    names += [_start(w, v, units) if v else "" for v in list(node.input)[5:7]]
    attributes = {**settings(node), "hidden_size": most}
    made = w.emit_many(node.op_type, names, len(node.output), **attributes)
    for value, piece in zip(node.output, made, strict=True):
        if value:
            shape = s.shape(value)
            whole = np.arange(int(np.prod(shape))).reshape(shape)
            ids = np.stack(
                [
                    np.where(own >= 0, whole[..., way, :, np.maximum(own, 0)].transpose(_last(whole.ndim)), -1)
                    for way, own in enumerate(units)
                ],
                axis=-3,
            )
            w.put(value, piece, np.where(np.isin(ids, whole[s.varies[value]]), ids, -1))


def _placed(values: NDArray[_Number], at: Ids, length: int, fill: float) -> NDArray[_Number]:
    """`values` at the entries `at` of a last axis of `length`, `fill` elsewhere."""
    made = np.full((*values.shape[:-1], length), fill, values.dtype)
    made[..., at] = values
    return made


def _last(rank: int) -> list[int]:
    """Advanced indexing put the units first; they belong last."""
    return [*range(1, rank - 1), 0] if rank > 3 else [1, 0]


def _spanned(maps: F64) -> tuple[F64, NDArray[np.float64]]:
    """Maps [d, t, gates, h] less their mean over time as inputs [t, r] and weights [d, gates, h, r]."""
    ways, steps, gates, h = maps.shape
    rest = (maps - maps.mean(axis=1, keepdims=True)).transpose(1, 0, 2, 3).reshape(steps, -1)
    if not np.abs(rest).max(initial=0.0) > 1e-12 * max(1e-30, float(np.abs(maps).max(initial=0.0))):
        return np.zeros((steps, 0)), np.zeros((ways, gates, h, 0))
    u, scale, v = np.linalg.svd(rest, full_matrices=False)
    rank = int((scale > SPAN * scale[0]).sum())
    root = np.sqrt(scale[:rank])
    return u[:, :rank] * root, (v[:rank].T * root).reshape(ways, gates, h, rank)


def _start(w: Writer, name: str, units: list[Ids]) -> str:
    """The state or cell that the layer starts from; none where it is zero."""
    value, varies, _ = w.study.facts(name)
    if varies.any():
        if len(units) > 1:
            raise CompactionError(f"the start {name!r} of a layer of two directions depends on the input")
        return w.adapted(name, [np.zeros(1, np.int64), np.zeros(1, np.int64), units[0]])
    held = np.stack([value[way][:, np.maximum(own, 0)] * (own >= 0) for way, own in enumerate(units)])
    return w._batched(name, held) if held.any() else ""


RECURRENT = Rule(_forward, _backward, _rewrite)
