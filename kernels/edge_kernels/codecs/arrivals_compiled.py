"""The loops of `arrivals` over symbols with numba (extra `fast`): the same bytes, one symbol at a time.

Only `arrivals` imports this module, and goes on without it where numba is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def read(
    before: Any, cuts: Any, x: Any, words: Any, left: int, below: Any, inside: Any, offset: Any, most: int
) -> tuple[Any, int, int]:
    """Decode a list with the states `x`, changed in place: its members by step and lane, the words and steps used.

    `below`, `inside` and `offset` are the tables of `arrivals.chance`. Steps beyond `left`, or words beyond those
    there are, mean that it ended too soon.
    """
    lanes, low_bound, n = len(x), 1 << 24, len(before) - 1
    at, here = cuts[:-1].copy(), before[cuts[:-1]]
    members = np.empty(min(n, left * lanes), np.int64)
    found = used = steps = 0
    while (at < cuts[1:]).any():
        steps += 1
        if steps > left:
            break
        for lane in range(lanes):
            end = cuts[lane + 1]
            if at[lane] == end:
                continue
            slot = x[lane] & (low_bound - 1)
            cell = 0
            while cell < 17 and below[cell] <= slot:
                cell += 1
            t = most + 1
            if cell <= 16:
                t = min(t, ((slot + 1 - below[cell - 1] << 18) - 1) // inside[cell - 1] + 1 + (cell - 1 << 18))
            t += here[lane]
            low, high = at[lane], end
            while low < high:
                middle = (low + high) >> 1
                if before[middle + 1] < t:
                    low = middle + 1
                else:
                    high = middle
            start, stop = before[low] - here[lane], before[min(low + 1, n)] - here[lane]
            hit = low < end and stop <= most
            at[lane] = low + hit
            here[lane] += stop if hit else start
            first = inside[start >> 18] * start + offset[start >> 18] >> 18
            last = inside[stop >> 18] * stop + offset[stop >> 18] >> 18 if hit else low_bound
            x[lane] = (x[lane] >> 24) * (last - first) + slot - first
            if hit:
                members[found] = low
                found += 1
            if x[lane] < low_bound:
                if used == len(words):
                    return members[:found], used + 1, steps
                x[lane] = x[lane] << 24 | words[used]
                used += 1
    return members[:found], used, steps


@njit(cache=True)
def write(starts: Any, freqs: Any, x: Any) -> Any:
    """The words of a list's symbols, uint32[steps, lanes], coded backwards with the states `x`, changed in place."""
    steps, lanes = starts.shape
    words = np.empty(steps * lanes, np.uint32)
    at = len(words)
    for step in range(steps - 1, -1, -1):
        for lane in range(lanes - 1, -1, -1):
            freq, state = np.int64(freqs[step, lane]), x[lane]
            if state >= freq << 24:
                at -= 1
                words[at] = state & ((1 << 24) - 1)
                state >>= 24
            x[lane] = state + state // freq * ((1 << 24) - freq) + np.int64(starts[step, lane])
    return words[at:].copy()
