"""Interleaved rANS: many entropy coders side by side, one numpy operation for all (Duda 2013, Giesen 2014).

Symbol i of a list belongs to lane ``i % lanes`` and step ``i // lanes``. A lane's state is a number in
[2**16, 2**32); a symbol with table entry (start, freq), both of 2**15, is decoded by

    slot = x % 2**15;  find start <= slot < start + freq;  x = freq * (x // 2**15) + slot - start;
    if x < 2**16: x = x * 2**16 + next 16-bit word

all lanes of a step in ascending order before the next step. The encoder does the same in reverse. The decoder ends in
the states that the encoder began with. So each of these carries 16 payload bits (see `entropy`), and a lane costs about
one byte. The frequency table of a geometric number is made in integer arithmetic, so it is the same on all machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError
from edge_kernels.compiled import loops

SCALE = 15  # log2 of the sum of a table's frequencies
LOW = 1 << 16  # the smallest state
SYMBOLS = 128  # the most symbols in a table, the escape included
_STEPS = 64  # steps whose tables are looked up together
_ENDS = "the payload ends within its coded symbols; it is truncated or d is wrong"
_TAIL = 4  # a table ends when at most this much frequency is left

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Tables:
    """Frequency tables laid end to end. Table t has entries `first[t]` .. `first[t + 1] - 1`, the last is its escape.

    `edges[e]` is ``(t << 15) + start`` of entry e, ascending; `freqs[e]` is its frequency.
    """

    edges: U32
    freqs: U32
    first: U32


def geometric_tables(ratios: Sequence[int]) -> Tables:
    """One table per ratio x = ratio / 2**32: symbol s has probability ``(1 - x) * x**s``, the escape has the rest."""
    freqs = [_geometric(ratio) for ratio in ratios]
    first = np.cumsum([0, *(len(table) for table in freqs)], dtype=np.uint32)
    flat = np.array([freq for table in freqs for freq in table], np.uint32)
    edges = np.zeros(len(flat), np.uint32)
    np.cumsum(flat[:-1], out=edges[1:])  # each table sums to 2**15, so table t begins at t << 15
    return Tables(edges, flat, first)


@lru_cache(maxsize=512)
def _geometric(ratio: int) -> tuple[int, ...]:
    """Frequencies ``max(1, (rest * (2**32 - ratio)) >> 32)``, each subtracted from `rest`, which begins at 2**15.

    The table ends after 127 symbols or when `rest` <= 4; `rest` is then the frequency of the escape.
    """
    rest = 1 << SCALE
    freqs: list[int] = []
    while rest > _TAIL and len(freqs) < SYMBOLS - 1:
        freqs.append(max(rest * ((1 << 32) - ratio) >> 32, 1))
        rest -= freqs[-1]
    return (*freqs, rest)


def encode(entries: U32, tables: Tables, states: U64) -> NDArray[np.uint16]:
    """Encode table entries, one per symbol, into 16-bit words and `states` (uint64[lanes], changed in place)."""
    compiled = loops(__name__)
    if compiled is not None and len(states):
        coded: NDArray[np.uint16] = compiled.write(entries, tables.edges, tables.freqs, states)
        return coded
    lanes = max(len(states), 1)
    starts = (tables.edges & np.uint32((1 << SCALE) - 1)).astype(np.uint64)
    freqs = tables.freqs.astype(np.uint64)
    out: list[NDArray[np.uint16]] = []
    begin = len(entries)
    for low in range((len(entries) - 1) // lanes * lanes, -1, -lanes):
        if low < begin:  # look up what depends on the symbols alone, for many steps at once
            begin = max(low - (_STEPS - 1) * lanes, 0)
            chunk = entries[begin : low + lanes]
            freq_of, start_of = freqs[chunk], starts[chunk]
            bound_of, rest_of = freq_of << np.uint64(32 - SCALE), np.uint64(1 << SCALE) - freq_of
        step = slice(low - begin, low - begin + lanes)
        bound = bound_of[step]
        x = states[: len(bound)]
        over = (x >= bound).nonzero()[0]
        if len(over):
            full = x[over]
            out.append(full.astype(np.uint16))
            x[over] = full >> np.uint64(16)
        quotient = x // freq_of[step]
        quotient *= rest_of[step]  # (quotient << 15) + (x % freq) = x + quotient * (2**15 - freq)
        x += quotient
        x += start_of[step]
    out.reverse()
    return np.concatenate(out) if out else np.zeros(0, np.uint16)


def decode(runs: NDArray[np.int64], tables: Tables, states: U64, words: NDArray[np.uint16]) -> tuple[U8, int]:
    """Decode ``sum(runs)`` symbols, the first ``runs[0]`` with table 0, and so on.

    Returns the symbols and the number of words read. Changes `states`. Raises CodecError when the words run out.
    """
    compiled = loops(__name__)
    if compiled is not None and len(states):
        read, used = compiled.read(runs, tables.edges, tables.freqs, tables.first, states, words)
        if used > len(words):
            raise CodecError(_ENDS)
        return read, used
    lanes = max(len(states), 1)
    mask, shift, sixteen, low_state = np.uint64((1 << SCALE) - 1), np.uint64(SCALE), np.uint64(16), np.uint64(LOW)
    edges, freqs = tables.edges.astype(np.uint64), tables.freqs.astype(np.uint64)
    numbers = (
        np.arange(len(edges)) - np.repeat(tables.first[:-1], (tables.first[1:] - tables.first[:-1]).astype(np.int64))
    ).astype(np.uint8)
    symbols = np.empty(int(runs.sum()), np.uint8)
    ends = np.cumsum(runs)
    used = 0
    for low in range(0, len(symbols), lanes):
        if low % (lanes * _STEPS) == 0:
            bases = owners(ends, low, min(low + lanes * _STEPS, len(symbols))).astype(np.uint64) << shift
            begin = low
        slots = bases[low - begin : low - begin + lanes]
        x = states[: len(slots)]
        slots |= x & mask
        found = edges.searchsorted(slots, "right")
        found -= 1
        symbols[low : low + lanes] = numbers.take(found)
        slots -= edges.take(found)
        x >>= shift
        x *= freqs.take(found)
        x += slots
        under = (x < low_state).nonzero()[0]
        more = len(under)
        if more:
            if used + more > len(words):
                raise CodecError(_ENDS)
            x[under] = (x[under] << sixteen) | words[used : used + more]
            used += more
    return symbols, used


def owners(ends: NDArray[np.int64], low: int, high: int) -> NDArray[np.uint16]:
    """The table of each of symbols `low` .. `high - 1`, where the symbols of table t end before ``ends[t]``."""
    until = np.clip(ends, low, high)
    runs = until.copy()
    runs[:1] -= low
    runs[1:] -= until[:-1]
    return np.repeat(np.arange(len(ends), dtype=np.uint16), runs)
