"""Interleaved rANS: many range coders side by side, one numpy operation for all of them (Duda 2013, Giesen 2014).

Symbol i of a list belongs to lane ``i % lanes`` and step ``i // lanes``. A lane's state is a number in
[2**16, 2**32); a symbol with table entry (start, freq), both of 2**15, is decoded by

    slot = x % 2**15;  find start <= slot < start + freq;  x = freq * (x // 2**15) + slot - start;
    if x < 2**16: x = x * 2**16 + next 16-bit word

all lanes of a step in ascending order before the next step. Encoding runs the same backwards. The decoder ends in the
states the encoder began with, so these carry 16 payload bits each (see `entropy`) and a lane costs about one byte.
Also here: the frequency table of a geometric number, in integer arithmetic, so that all machines agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError

SCALE = 15  # log2 of the sum of a table's frequencies
LOW = 1 << 16  # least state
SYMBOLS = 128  # most symbols in a table, the escape included
_TAIL = 4  # a table ends where at most this much probability is left

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Tables:
    """Frequency tables laid end to end. Table t has entries `first[t]` .. `first[t + 1] - 1`, the last its escape.

    `edges[e]` is ``(t << 15) + start`` of entry e, ascending, and `freqs[e]` its frequency.
    """

    edges: U32
    freqs: U32
    first: U32


def geometric_tables(ratios: U64) -> Tables:
    """One table per ratio: symbol s has probability ``(1 - x) * x**s`` with x = ratio / 2**32, the escape the rest.

    Frequencies are ``f = max(1, (rest * (2**32 - ratio)) >> 32)`` taken off `rest`, 2**15 at first; the table ends,
    with frequency `rest` for its escape, after 127 symbols or when `rest` <= 4.
    """
    count = len(ratios)
    rest = np.full(count, 1 << SCALE, np.uint64)
    freqs = np.zeros((count, SYMBOLS), np.uint32)
    stops = np.uint64(1 << 32) - ratios
    lengths = np.zeros(count, np.int64)
    live = np.ones(count, np.bool_)
    for s in range(SYMBOLS - 1):
        freq = np.maximum((rest * stops) >> np.uint64(32), np.uint64(1))
        freq[~live] = 0
        freqs[:, s] = freq
        rest -= freq
        lengths += live
        live &= rest > _TAIL
        if not live.any():
            break
    rows = np.arange(count)
    freqs[rows, lengths] = rest
    lengths += 1
    starts = np.cumsum(freqs, axis=1, dtype=np.uint32) - freqs + (rows.astype(np.uint32) << np.uint32(SCALE))[:, None]
    used = np.arange(SYMBOLS) < lengths[:, None]
    first = np.zeros(count + 1, np.uint32)
    np.cumsum(lengths, out=first[1:])
    return Tables(starts[used], freqs[used], first)


def encode(entries: U32, tables: Tables, states: U64) -> NDArray[np.uint16]:
    """Encode table entries (one per symbol) into `states` (uint64[lanes], changed in place) and 16-bit words."""
    lanes = max(len(states), 1)
    starts = (tables.edges & np.uint32((1 << SCALE) - 1)).astype(np.uint64)
    freqs = tables.freqs.astype(np.uint64)
    out: list[NDArray[np.uint16]] = []
    for low in range((len(entries) - 1) // lanes * lanes, -1, -lanes):
        step = entries[low : low + lanes]
        x = states[: len(step)]
        freq = freqs[step]
        over = x >= freq << np.uint64(32 - SCALE)
        if over.any():
            out.append(x[over].astype(np.uint16))
            x[over] >>= np.uint64(16)
        quotient = x // freq
        x += quotient * (np.uint64(1 << SCALE) - freq)  # = (quotient << 15) + (x % freq)
        x += starts[step]
    out.reverse()
    return np.concatenate(out) if out else np.zeros(0, np.uint16)


def decode(owners: NDArray[np.uint16], tables: Tables, states: U64, words: NDArray[np.uint16]) -> tuple[U32, int]:
    """Decode one table entry per symbol; `owners[i]` is symbol i's table. Changes `states`; also returns words read.

    Raises CodecError when the words run out.
    """
    lanes = max(len(states), 1)
    mask, shift = np.uint64((1 << SCALE) - 1), np.uint64(SCALE)
    edges, freqs = tables.edges, tables.freqs.astype(np.uint64)
    entries = np.empty(len(owners), np.uint32)
    used = 0
    for low in range(0, len(owners), lanes):
        bases = owners[low : low + lanes].astype(np.uint32) << np.uint32(SCALE)
        x = states[: len(bases)]
        slots = (x & mask).astype(np.uint32)
        slots |= bases
        found = np.searchsorted(edges, slots, side="right") - 1
        entries[low : low + lanes] = found
        slots -= edges[found]
        x >>= shift
        x *= freqs[found]
        x += slots
        under = x < LOW
        if under.any():
            more = np.count_nonzero(under)
            if used + more > len(words):
                raise CodecError("the payload ends within its coded symbols; it is truncated or d is wrong")
            x[under] = (x[under] << np.uint64(16)) | words[used : used + more]
            used += int(more)
    return entries, used
