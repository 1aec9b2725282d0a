"""The loops of `rans` over symbols with numba (extra `fast`): the same words, one symbol at a time.

Only `rans` imports this module, and goes on without it where numba is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from edge_kernels.codecs.rans import LOW, SCALE

_FULL = 1 << SCALE


@njit(cache=True)
def read(runs: Any, edges: Any, freqs: Any, first: Any, states: Any, words: Any) -> tuple[Any, int]:
    """The symbols of all runs, uint8[n], and the words used; one more than there are if they ran out."""
    lanes = len(states)
    symbols = np.empty(runs.sum(), np.uint8)
    at = used = 0
    for table in range(len(runs)):
        begin, end = np.int64(first[table]), np.int64(first[table + 1])
        base = np.int64(table) << SCALE
        for _ in range(runs[table]):
            x = np.int64(states[at % lanes])
            slot = base + (x & (_FULL - 1))
            low, high = begin, end  # edges[low] <= slot < edges[high]
            while high - low > 1:
                middle = (low + high) >> 1
                if edges[middle] <= slot:
                    low = middle
                else:
                    high = middle
            symbols[at] = low - begin
            x = (x >> SCALE) * np.int64(freqs[low]) + slot - np.int64(edges[low])
            if x < LOW:
                if used == len(words):
                    return symbols, used + 1
                x = x << 16 | np.int64(words[used])
                used += 1
            states[at % lanes] = x
            at += 1
    return symbols, used


@njit(cache=True)
def write(entries: Any, edges: Any, freqs: Any, states: Any) -> Any:
    """The words of the entries, uint16[n], coded backwards."""
    lanes = len(states)
    words = np.empty(len(entries), np.uint16)
    at = len(words)
    for i in range(len(entries) - 1, -1, -1):
        freq, x = np.int64(freqs[entries[i]]), np.int64(states[i % lanes])
        if x >= freq << (32 - SCALE):
            at -= 1
            words[at] = x & (LOW - 1)
            x >>= 16
        states[i % lanes] = x + x // freq * (_FULL - freq) + (np.int64(edges[entries[i]]) & (_FULL - 1))
    return words[at:]
