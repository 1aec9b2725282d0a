"""How coarse the next moves and changes of N of Lattice are: what the budget asks for.

The server compares what the rounds left would take with what is left of the budget. What a device takes in a round
depends on how many rounds it has missed by then, so the rounds between two of a device are estimated first.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge_client.methods.lattice_grid import HIGHEST, HISTORY
from edge_client.methods.lattice_values import State

COARSEST = 2  # levels of the cell above the moves that the budget asks for
MOST_RISE = 3  # levels of the moves at a time


def apart(state: State) -> float:
    """The rounds from one of a device to its next, at least 1; also the devices over the cohort.

    It is the most likely number if all devices are drawn alike: of the devices of all rounds, the rounds that they had
    been away for, over those that had taken part before, with one more of each. A device that is new in round t has
    been away for t - 1 rounds. So the number is right from the second round on, when most devices are still new.
    """
    return (state.away + 1) / (state.again + 1)


def lateness(state: State, round_: int) -> tuple[int, int, float]:
    """For a device of the next round: the rounds of which it receives the change; those of them whose moves are of the
    level that the next ones have; how many times the bytes of these a change will take when enough rounds are played.

    The moves of the first round are finer. The noise of rounding goes to and fro, so bytes grow as the root of rounds.
    """
    most = round(apart(state))
    late = min(most, round_)
    like = min(late, round_ - state.first)
    return late, like, math.sqrt(max(1.0, min(most, HISTORY) / max(1, like)))


def settled(state: State, rounds: int) -> bool:
    """Whether N changed by the present cell, or not at all, in each of the last rounds, so many."""
    last, lengths = state.history.levels[-rounds:], state.history.lengths[-rounds:]
    return bool(((last == state.cell) | (lengths == 0)).all())


def raised(state: State, need: float) -> State:
    """The state with coarser cells or moves, where the rounds left need so many times, above 1, what is left.

    A level for each factor of 2. Cells first, up to as many levels as the logarithm of the rounds that devices are
    apart: where every device takes part in every round they would only delay N. Then, in a later round, moves.
    """
    rise, coarsest = math.ceil(math.log2(need)), min(COARSEST, round(math.log2(apart(state))))
    if state.coarser < coarsest:
        return replace(state, coarser=min(state.coarser + rise, coarsest))
    return replace(state, level=min(state.level + min(rise, MOST_RISE), HIGHEST))
