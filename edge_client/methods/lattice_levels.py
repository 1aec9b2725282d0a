"""How coarse the next moves and changes of N of Lattice are: what the budget asks for.

The server compares what the rounds left would take with what is left of the budget. What a device takes in a round
depends on how many rounds it has missed by then, so the rounds between two of a device are estimated first.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge_client.methods import lattice_grid
from edge_client.methods.lattice_grid import HIGHEST
from edge_client.methods.lattice_values import State

COARSEST = 2  # levels of the cell above the moves that the budget asks for
FAR = 4.0  # where the rounds of a device are at least so far apart, coarser cells are worth the delay
SHORT = 8  # rounds in which a coarser cell would delay N too much; twice as many allow one level, and so on
MOST_RISE = 3  # levels of the moves at a time


def apart(state: State) -> float:
    """The rounds from one of a device to its next, at least 1; also the devices over the cohort.

    The sum of absences over the number of returns, one added to each: the most likely number if all devices are drawn
    alike. The absence of a new device began with the first round. So the number is about right from the third round on,
    when most devices are still new.
    """
    return (state.away + 1) / (state.again + 1)


def lateness(state: State, round_: int) -> tuple[int, int, float]:
    """How late a device of the next round is: the rounds of which it receives the change; those of them whose moves are
    like later ones; and how many times more bytes than for these a change takes when enough rounds are played.

    The moves of the first round are finer than all others. The noise of rounding goes to and fro, so bytes grow as the
    root of the rounds.
    """
    most = min(round(apart(state)), lattice_grid.HISTORY)
    late = min(most, round_)
    like = min(late, round_ - state.first)
    return late, like, math.sqrt(most / max(1, like))


def settled(state: State, rounds: int) -> bool:
    """Whether N changed by the present cell, or not at all, in each of the last rounds, so many."""
    last, lengths = state.history.levels[-rounds:], state.history.lengths[-rounds:]
    return bool(((last == state.cell) | (lengths == 0)).all())


def raised(state: State, need: float, rounds: int) -> State:
    """The state with coarser cells or moves, where the rounds left need so many times, above 1, what is left.

    A level for each factor of 2. Cells first, where the rounds of a device are far apart: elsewhere they would delay N
    and save little. With few `rounds` in all they would delay it too much. Then, in a later round, moves.
    """
    rise = math.ceil(math.log2(need))
    coarsest = min(COARSEST, round(math.log2(rounds / SHORT))) if apart(state) >= FAR else 0
    if state.coarser < coarsest:
        return replace(state, coarser=min(state.coarser + rise, coarsest))
    return replace(state, level=min(state.level + min(rise, MOST_RISE), HIGHEST))
