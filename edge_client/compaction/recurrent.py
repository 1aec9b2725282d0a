"""LSTM, GRU and plain RNN, one or both directions.

A unit leaves with its rows of all gates and its column of the recurrence. What it added to the gates of the others, at
each step another amount, is replaced by further inputs or a few units (`recurrent_units`).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from edge_client.compaction.layouts import worth
from edge_client.compaction.operators import F64
from edge_client.compaction.pieces import Ids, Ragged, by_axis, whole_along
from edge_client.compaction.recurrent_units import Direction, Whole, fewest, filled, spanned
from edge_client.compaction.study import Bools, Rule, Study, some
from edge_client.compaction.writer import Writer
from edge_client.graph.nodes import GATES, settings


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


def _made(node: NodeProto) -> str:
    return str(next(o for o in node.output if o))


def _starts(node: NodeProto) -> list[str]:
    return [node.input[k] for k in (5, 6) if len(node.input) > k and node.input[k]]


def _forward(s: Study, node: NodeProto) -> None:
    inputs, units = _links(s, node)
    moves = some(s.facts(node.input[0]).varies, (0, 1))
    varies = some(inputs & moves, 2)
    for name in _starts(node):
        varies = varies | s.facts(name).varies[:, 0]
    for _ in range(units.shape[1]):
        more = varies | (units & varies[:, None, :]).any(axis=2)
        if (more == varies).all():
            break
        varies = more
    values = s.net.operators.run(node, [s.facts(v).value if v else None for v in node.input])
    label = np.arange(units.shape[1])
    for name, value in zip([o for o in node.output if o], values, strict=True):
        s.store(name, value, np.broadcast_to(varies[:, None], value.shape), label)


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
    for name in _starts(node):
        s.mark(name, np.broadcast_to(live[:, None], s.shape(name)))
    s.notes["live", tuple(node.output)] = live


def _backwards(node: NodeProto, way: int) -> bool:
    return settings(node).get("direction", b"forward") == b"reverse" or way == 1


def _courses(s: Study, node: NodeProto) -> F64:
    """The state that each step reads, float64[d, t, h]; right for units that do not vary."""
    full = NodeProto()
    full.CopyFrom(node)
    full.output[:] = ["y"]
    states = s.net.operators.run(full, [s.facts(v).value if v else None for v in node.input])[0][:, :, 0].swapaxes(0, 1)
    start = (
        s.facts(node.input[5]).value
        if len(node.input) > 5 and node.input[5]
        else np.zeros((len(states), 1, states.shape[2]))
    )
    found = []
    for way, own in enumerate(states):
        before = [own[1:], start[way]] if _backwards(node, way) else [start[way], own[:-1]]
        found.append(np.concatenate(before))
    return np.stack(found)


def _wholes(s: Study, node: NodeProto, live: Bools, columns: Ids) -> list[Whole]:
    """Each direction as it is. `columns` are the inputs that the smaller layer is given."""
    gates, (ways, h) = GATES[node.op_type], live.shape
    weight, recurrent = (s.net.constants[node.input[k]] for k in (1, 2))
    has_bias = len(node.input) > 3 and bool(node.input[3])
    bias = s.net.constants[node.input[3]] if has_bias else np.zeros((ways, 2 * gates * h))
    x = np.array(s.facts(node.input[0]).value)[:, 0]
    x[:, columns[columns >= 0]] = 0
    found = []
    for way, courses in enumerate(_courses(s, node)):
        varying = s.varies[node.output[0]].reshape(-1, ways, h)[0, way] if node.output[0] else live[way]
        still = np.flatnonzero(~varying & np.abs(courses).max(axis=0).astype(bool))
        each = (weight[way].reshape(gates, h, -1), recurrent[way].reshape(gates, h, h), bias[way].reshape(2, gates, h))
        found.append(Whole(*each, np.flatnonzero(live[way]), still, courses, x, _backwards(node, way)))
    return found


def rewrite(w: Writer, node: NodeProto) -> None:
    """The layer with its live units, and what stands for the others."""
    s, name = w.study, node.input[0]
    gates = GATES[node.op_type]
    live: Bools = s.notes["live", tuple(node.output)]
    inputs, _ = _links(s, node)
    moves = s.live(name).any(axis=(0, 1))
    due = np.flatnonzero((inputs & live[:, :, None]).any(axis=(0, 1)) & moves)
    lists = w.lists(name)
    columns = worth(w, lists[2], due, gates * int(live.sum()), last=True)
    free = not any(s.facts(v).varies.any() for v in _starts(node))
    made = fewest(node.op_type, _wholes(s, node, live, columns), len(columns), free)
    _note(w, node, live, made)
    most = max(1, *(len(way.own) for way in made))
    ways = [filled(way, most, live.shape[1]) for way in made]
    own_x, extra = spanned(np.stack([way.maps for way in ways]))
    weight, recurrent, bias = [], [], []
    for way, more in zip(ways, extra, strict=True):
        part = way.weight[:, :, np.maximum(columns, 0)] * (columns >= 0)
        weight.append(np.concatenate([part, more], axis=2).reshape(gates * most, -1))
        recurrent.append(way.recurrent.reshape(gates * most, most))
        way.biases[0] += way.maps.mean(axis=0)
        bias.append(way.biases.reshape(-1))
    given = w.adapted(name, [np.arange(n) for n in s.shape(name)[:2]] + [columns])
    if own_x.shape[1]:
        count = own_x.shape[1]
        w.stays(_made(node), f"reads extra inputs ({count}) for what dead channels add differently at each step")
        course = w.emit("Expand", [w.constant(own_x[:, None]), w.batch_shape((len(own_x), 1, own_x.shape[1]), 1)])
        given = w.emit("Concat", [given, course], axis=2)
    units = [way.own for way in ways]
    names = [given, *(w.constant(np.stack(v)) for v in (weight, recurrent, bias)), ""]
    names += [_start(w, v, units) if v else "" for v in list(node.input)[5:7]]
    outs = w.emit_many(node.op_type, names, len(node.output), **{**settings(node), "hidden_size": most})
    for value, piece in zip(node.output, outs, strict=True):
        if value:
            w.put(value, piece, _elements(s, value, units))


def _elements(s: Study, value: str, units: list[Ids]) -> Ids:
    """The elements of an output that the layer with these `units` gives, -1 for those that do not vary."""
    whole = np.arange(int(np.prod(s.shape(value)))).reshape(s.shape(value))
    each = [
        np.where(own >= 0, whole[..., way, :, np.maximum(own, 0)].transpose(_last(whole.ndim)), -1)
        for way, own in enumerate(units)
    ]
    ids = np.stack(each, axis=-3)
    return np.where(np.isin(ids, whole[s.varies[value]]), ids, -1)


def _note(w: Writer, node: NodeProto, live: Bools, made: list[Direction]) -> None:
    """Lines for units that stay or come."""
    most = max(len(way.own) for way in made)
    for count, way in zip(live.sum(axis=1), made, strict=True):
        if len(way.own) > count:
            more = len(way.own) - count
            w.stays(_made(node), f"keeps extra units ({more} of {len(way.own)}) for what dead ones add at each step")
        kept = way.own[way.own >= 0]
        used = some(way.weight != 0, (0, 2)) | some(way.recurrent != 0, (0, 2))
        idle = int((~used[: len(kept)]).sum())
        if idle and any(w.study.facts(v).varies.any() for v in _starts(node)):
            w.stays(_made(node), f"keeps units without weights ({idle}), which carry their start on")
        if most > len(way.own):
            w.stays(_made(node), f"gives both directions {most} units; one needs {len(way.own)}")


def _last(rank: int) -> list[int]:
    """Advanced indexing put the units first; they belong last."""
    return [*range(1, rank - 1), 0] if rank > 3 else [1, 0]


def _start(w: Writer, name: str, units: list[Ids]) -> str:
    """The state or cell that the layer starts from; none where it is zero."""
    value, varies, _ = w.study.facts(name)
    if varies.any():
        parts = [_start_of(w, name, way, own) for way, own in enumerate(units)]
        return w.emit("Concat", parts, axis=0) if len(parts) > 1 else parts[0]
    held = np.stack([value[way][:, np.maximum(own, 0)] * (own >= 0) for way, own in enumerate(units)])
    return w.batched(name, held) if held.any() else ""


def _start_of(w: Writer, name: str, way: int, own: Ids) -> str:
    """The units `own` of one direction of a start that depends on the input; -1: any content."""
    shape, piece = w.study.shape(name), w.pieces[name]
    if by_axis(piece.ids, shape) is not None or not whole_along(piece.ids, shape, 0):
        return w.adapted(name, [np.array([way]), np.zeros(1, np.int64), own])
    # Each direction of another layer holds units of its own.
    held = np.where(piece.ids[way, 0] >= 0, piece.ids[way, 0] % shape[2], -1)
    at = np.full(shape[2] + 1, -1)
    at[held[held >= 0]] = np.flatnonzero(held >= 0)
    places = np.where(own >= 0, at[own], 0)
    absent = places < 0
    value, varies, _ = w.study.facts(name)
    if varies[way, 0, own[absent]].any():
        raise Ragged(name, "one that varies is gone")
    made, length = w.picked(piece.name, 0, np.array([way]), shape[0]), len(held)
    if absent.any():
        made, places, length = w.padded(made, 2, 3, length, places, absent, True)
    made = w.picked(made, 2, places, length)
    fill = np.where(absent, value[way, 0, own], 0.0)
    return w.emit("Add", [made, w.constant(fill)]) if fill.any() else made


RECURRENT = Rule(_forward, _backward)
