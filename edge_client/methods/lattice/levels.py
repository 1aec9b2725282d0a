"""How coarse Lattice's next moves and changes of N have to be for the budget.

The server compares the bytes that the rounds left need with what is left of the budget. In the mean a device sends an
update every n rounds; its downlink grows with n.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge_client.methods.lattice import grid
from edge_client.methods.lattice.grid import MIDDLE
from edge_client.methods.lattice.values import State

COARSEST = 2  # levels of a cell above the first moves, at most
FAR = 4.5  # with n at least this, coarse cells are worth the delay
SHORT = 6  # a run of SHORT * 2**j rounds suffices for cells j levels above the first moves
FINER = 1  # levels that moves become finer when cells become coarse: their noise is most of what travels down
MOST_RISE = 3  # levels of the moves at a time


def lateness(state: State, n: float) -> tuple[int, int, float]:
    """What a typical device of the next round receives: ``(late, like, grown)``.

    `late`: the rounds that its change covers. `like`: those of them without the first round, whose moves are finer than
    all later ones. `grown`: a change takes this many times the bytes of `like` rounds once enough rounds are played.
    The noise of rounding is a random walk, so bytes grow as the root of the number of rounds.
    """
    most = min(round(n), grid.HISTORY)
    late = min(most, state.round)
    like = min(late, state.round - state.first)
    return late, like, math.sqrt(most / max(1, like))


def settled(state: State, rounds: int) -> bool:
    """Whether each of the last `rounds` changes of N was in present cells or empty."""
    last, lengths = state.history.levels[-rounds:], state.history.lengths[-rounds:]
    return bool(((last == state.cell) | (lengths == 0)).all())


def between(state: State, reports: int) -> float:
    """n, the rounds from one update of a device to its next, at least 1: the fleet / the updates of a round.

    These are the `reports` of the last round, or the mean of all rounds if that is more. So neither a small first round
    nor a single round of few updates makes n large.
    """
    return max(1.0, state.fleet / max(reports, state.reports / (state.round + 1 - state.first)))


def coarsest(state: State, n: float, rounds: int) -> int:
    """The level of a cell above the first moves where the rounds of a device are far apart; 0 elsewhere.

    Also 0 where moves are coarser than the first ones by then: a fleet may grow.
    """
    far = n >= FAR and state.level <= MIDDLE
    return max(0, min(COARSEST, round(math.log2(rounds / SHORT)))) if far else 0


def coarse(state: State, level: int) -> State:
    """The state with cells `level` above the first moves, and finer moves; most bytes travel down there.

    They stay so: what the rounds left still need beyond that exceeds the budget.
    """
    moves = min(state.level, MIDDLE - FINER)
    return replace(state, level=moves, coarser=MIDDLE + level - moves)


def raised(state: State, need: float, top: int) -> State:
    """The state with coarser moves, where the rounds left need `need` > 1 times the bytes that are left.

    They rise a level for each factor of 2, up to the level `top`; the rest of the need exceeds the budget.
    """
    rise = min(math.ceil(math.log2(need)), MOST_RISE)
    return replace(state, level=min(state.level + rise, max(state.level, top)))
