"""The units of a smaller recurrent layer: what stands for those that are gone. Numbers alone, no graph.

Without varying inputs a unit still moves over time, from its start towards a limit. What it adds to the gates of the
others is a map over time. For an LSTM and a plain RNN the few vectors that span this map become further inputs of the
layer. A GRU has a gate on the recurrent sum. There either the few units whose courses span all the others' stay and
stand for them, or new units carry the sum's share, no more of them than live units; whichever is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_client.compaction.operators import F64
from edge_client.compaction.pieces import Ids

RESET = 2  # the gate of a GRU whose recurrent sum the reset gate multiplies; gate 0 is the update gate
SHUT = -40.0  # the bias of a gate that is zero
SPAN = 1e-7
"""How far what stands for courses may lie from them, relative to their size: as float32 rounds them."""
_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True)
class Direction:
    """One direction on fewer units u. `own` are their numbers in the whole layer, -1 for a unit that is new.

    `maps` are what dead inputs and units add to the gates at each step, beside the constant biases.
    """

    own: Ids
    weight: F64  # [gates, u, i]
    recurrent: F64  # [gates, u, u]
    biases: F64  # [2, gates, u]
    maps: F64  # [t, gates, u]


@dataclass(frozen=True)
class Whole:
    """One direction as it is: `live` units, and those `still` whose states, `courses` [t, h], do not vary."""

    weight: F64  # [gates, h, i]
    recurrent: F64  # [gates, h, h]
    biases: F64  # [2, gates, h]
    live: Ids
    still: Ids
    courses: F64
    x: F64  # [t, i], what dead inputs hold
    backwards: bool


def fewest(kind: str, wholes: list[Whole], inputs: int, free: bool) -> list[Direction]:
    """The directions of a layer of this `kind` on fewer units, with the fewest multiply-adds for `inputs` inputs.

    `free`: no start depends on the input.
    """
    if kind != "GRU":
        return [_added(a) for a in wholes]
    found = []
    for form in (_spanning, _driven) if free else (_spanning,):
        ways = [form(a) if a.still.size else _added(a) for a in wholes]
        units = max(len(way.own) for way in ways)
        more = spanned(_stacked(ways, units))[0].shape[1]
        found.append((units * (units + inputs + more), ways))
    return min(found, key=lambda f: f[0])[1]


def _added(a: Whole) -> Direction:
    """What still units add goes into the maps."""
    own, share = a.live, a.recurrent[:, a.live][:, :, a.still]
    maps = np.einsum("ti,goi->tgo", a.x, a.weight[:, own]) + np.einsum("tk,gok->tgo", a.courses[:, a.still], share)
    return Direction(own, a.weight[:, own], a.recurrent[:, own][:, :, own], a.biases[:, :, own], maps)


def _spanning(a: Whole) -> Direction:
    """The few still units whose courses span all the others' stay and stand for them."""
    basis, mix = _basis(a.courses[:, a.still])
    own = np.concatenate([a.live, a.still[basis]])
    share = a.recurrent[:, own][:, :, a.still]
    biases, recurrent = a.biases.copy(), a.recurrent.copy()
    biases[1][:, own] += share @ mix[0]
    recurrent[np.ix_(np.arange(len(recurrent)), own, a.still)] = 0
    for k, unit in enumerate(a.still[basis]):
        recurrent[:, own, unit] = share @ mix[1 + k]
    maps = np.einsum("ti,goi->tgo", a.x, a.weight[:, own])
    return Direction(own, a.weight[:, own], recurrent[:, own][:, :, own], biases[:, :, own], maps)


def _driven(a: Whole) -> Direction:
    """New units carry what still units of a GRU add behind the reset gate; further inputs drive them step by step.

    A new unit forgets at once (its update gate is shut), so its state is the tanh of what drove it the step before.
    """
    plain = _added(a)
    own = a.live
    behind = a.courses[:, a.still] @ a.recurrent[RESET][own][:, a.still].T
    first = len(behind) - 1 if a.backwards else 0
    u, scale, v = np.linalg.svd(behind - behind[first], full_matrices=False)
    count = int((scale > SPAN * scale.max(initial=1e-30)).sum())
    most = 2 * np.abs(u[:, :count]).max(axis=0, initial=1e-30)
    states, onto = u[:, :count] / most, (v[:count].T * scale[:count]) * most
    states = np.where(np.arange(len(states))[:, None] == first, 0.0, states)  # the start is zero
    drive = np.zeros_like(states)
    if a.backwards:
        drive[1:] = np.arctanh(states[:-1])
    else:
        drive[:-1] = np.arctanh(states[1:])

    def wider(values: F64, axis: int) -> F64:
        return np.pad(values, [(0, count if k == axis % values.ndim else 0) for k in range(values.ndim)])

    recurrent = wider(wider(plain.recurrent, -1), -2)
    recurrent[RESET, : len(own), len(own) :] = onto
    biases, maps = wider(plain.biases, -1), wider(plain.maps, -1)
    biases[1, RESET, : len(own)] += behind[first]
    biases[0, 0, len(own) :] = SHUT
    maps[:, RESET, : len(own)] -= behind
    maps[:, RESET, len(own) :] = drive
    return Direction(np.pad(own, (0, count), constant_values=-1), wider(plain.weight, 1), recurrent, biases, maps)


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


def _stacked(ways: list[Direction], units: int) -> F64:
    """The maps of all directions, [d, t, gates, units]."""
    return np.stack([_placed(way.maps, np.arange(len(way.own)), units, 0.0) for way in ways])


def spanned(maps: F64) -> tuple[F64, NDArray[np.float64]]:
    """Maps [d, t, gates, h] less their mean over time as inputs [t, r] and weights [d, gates, h, r]."""
    ways, steps, gates, h = maps.shape
    rest = (maps - maps.mean(axis=1, keepdims=True)).transpose(1, 0, 2, 3).reshape(steps, -1)
    u, scale, v = np.linalg.svd(rest, full_matrices=False)
    rank = int((scale > SPAN * np.linalg.norm(maps)).sum())
    root = np.sqrt(scale[:rank])
    return u[:, :rank] * root, (v[:rank].T * root).reshape(ways, gates, h, rank)


def filled(way: Direction, units: int, before: int) -> Direction:
    """The direction, filled with zeros to the `units` of the smaller layer.

    Where that has as many as `before`, each unit stays at its own entry.
    """
    at = way.own if units == before and (way.own >= 0).all() else np.arange(len(way.own))
    rows = _placed(way.recurrent, at, units, 0.0).swapaxes(1, 2)
    return Direction(
        _placed(way.own, at, units, -1),
        _placed(way.weight.swapaxes(1, 2), at, units, 0.0).swapaxes(1, 2),
        _placed(rows, at, units, 0.0).swapaxes(1, 2),
        _placed(way.biases, at, units, 0.0),
        _placed(way.maps, at, units, 0.0),
    )


def _placed(values: NDArray[_Number], at: Ids, length: int, fill: float) -> NDArray[_Number]:
    """`values` at the entries `at` of a last axis of `length`, `fill` elsewhere."""
    made = np.full((*values.shape[:-1], length), fill, values.dtype)
    made[..., at] = values
    return made
