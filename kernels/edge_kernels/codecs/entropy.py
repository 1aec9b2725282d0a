"""Codec `entropy`: a set at its conditional entropy, given contexts that both sides know.

Neighbouring contexts may be merged; each that then occurs is a class (`classes`). Positions are grouped by class, in
order within a group. Within a group, flips are coded as independent, with the rate that the flip count in the header
gives. Their gaps are then geometric: the high part of a gap is one rANS symbol (`rans`), the low bits are raw. There
are as many symbols as flips, not as positions. Payloads of a kilobyte and more cost within one per cent of the
conditional entropy, beside a few bits a class. Without contexts there is one group. Bytes: ``mode, flip counts,
states, words, raw bits`` (docs/codecs.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import classes, rans
from edge_kernels.codecs.classes import UNCODED
from edge_kernels.codecs.sets import CodecError, Contexts, Positions, complement
from edge_kernels.codecs.streams import (
    Bits,
    Reader,
    bit_lengths,
    gamma,
    pack,
    planes,
    read_gamma,
    read_planes,
)

MAX_CONTEXTS = 4096
_TILE = 1 << 16  # positions grouped at a time

I64 = NDArray[np.int64]


def encode(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """Write the set. Contexts whose own rates would cost more than they save are merged or ignored."""
    mode = _mode(positions, contexts)
    groups = _Groups.of(None if mode == UNCODED else contexts, d, mode)
    places = groups.places(positions)
    flips = np.diff(np.searchsorted(places, groups.starts))
    model = _Model.of(groups.sizes, flips)
    gaps = _gaps_by_group(places, groups, flips, model)
    owners = np.repeat(np.arange(len(model.coded), dtype=np.uint16), model.runs)
    high = gaps >> model.raw[owners]
    escape = (model.tables.first[1:] - model.tables.first[:-1] - np.uint32(1))[owners]
    entries = np.minimum(high, escape) + model.tables.first[owners]
    raw = np.concatenate([planes(gaps, model.raw[owners].astype(np.uint8)), gamma((high - escape)[high >= escape])])
    states, raw = _hide(raw, model.lanes)
    words = rans.encode(entries, model.tables, states)
    head = pack(np.concatenate([classes.count_bits(groups.sizes, flips), _state_bits(states)]))
    return bytes([mode]) + head + words.astype("<u2").tobytes() + pack(raw)


def decode(data: bytes, d: int, contexts: Contexts | None = None) -> Positions:
    """The set of a payload made by :func:`encode` with the same contexts. Raises CodecError."""
    reader = Reader(data)
    mode = classes.read_mode(reader)
    if mode == UNCODED:
        contexts = None
    elif contexts is None:
        raise CodecError("this payload was coded with contexts; pass the same contexts to decode it")
    groups = _Groups.of(contexts, d, mode)
    used = 0 if contexts is None else len(groups.sizes)
    if len(data) > size_limit(d, used):
        raise CodecError(f"{len(data)} bytes are more than entropy needs for any set out of {d}; is d right?")
    flips, at = classes.read_counts(reader.peek_bits(70 * used + 100), groups.sizes)
    model = _Model.of(groups.sizes, flips)
    total = int(model.runs.sum())
    if total > 8 * len(data) + 64:
        raise CodecError(f"{total} flips do not fit in {len(data)} bytes; the payload is damaged")
    ahead = reader.peek_bits(at + (4 + 31) * model.lanes)
    states, more = _read_states(ahead[at:], model.lanes)
    reader.skip_bits(ahead, at + more)
    gaps = _read_gaps(reader, model, states, total)
    places = _places_of_gaps(gaps, groups, flips, model)
    return groups.positions(places)


def size_limit(d: int, contexts: int = MAX_CONTEXTS) -> int:
    """An upper bound on the bytes of a set out of `d` with so many contexts."""
    return d // 4 + 1024 + 16 * contexts


@dataclass(frozen=True)
class _Groups:
    """The grouped order: all positions of class 0, then of class 1, and so on. A position's *place* is its index there.

    `sizes` int64[K] counts the positions of each class. `starts` int64[K + 1] are their first places. `counts`
    int64[tiles, K] splits `sizes` by tile. `labels` [d] are the classes of the positions, None for a single group.
    """

    d: int
    sizes: I64
    starts: I64
    counts: I64
    labels: NDArray[np.uint8] | NDArray[np.uint16] | None

    @staticmethod
    def of(contexts: Contexts | None, d: int, shift: int) -> _Groups:
        """Group `d` positions by ``contexts >> shift``: the values that occur are classes 0, 1, ... in their order."""
        if contexts is None:
            sizes = np.array([d] if d else [], np.int64)
            return _Groups(d, sizes, np.append(np.zeros(1, np.int64), sizes), sizes[None], None)
        present = classes.merged(_sizes(contexts), shift) > 0
        count = int(np.count_nonzero(present))
        table = np.zeros(len(present), np.uint8 if count <= 256 else np.uint16)
        table[present] = np.arange(count)
        labels = np.empty(d, table.dtype)
        counts = np.zeros((max(-(-d // _TILE), 1), count), np.int64)
        for tile, low in enumerate(range(0, d, _TILE)):
            np.take(table, contexts[low : low + _TILE] >> shift, out=labels[low : low + _TILE])
            counts[tile] = np.bincount(labels[low : low + _TILE], minlength=count)
        sizes = counts.sum(axis=0)
        return _Groups(d, sizes, np.append(0, np.cumsum(sizes)), counts, labels)

    def places(self, positions: Positions) -> NDArray[np.uint32]:
        """Sorted places of sorted positions."""
        if self.labels is None:
            return positions
        out = np.empty(len(positions), np.uint32)
        cuts = np.searchsorted(positions, np.arange(0, self.d + _TILE, _TILE))
        begin = self.starts[:-1].copy()  # the first place of each group in the tile
        for tile, low in enumerate(range(0, self.d, _TILE)):
            here = positions[cuts[tile] : cuts[tile + 1]]
            if len(here):
                labels = self.labels[low : low + _TILE]
                rank = np.empty(len(labels), np.int64)
                rank[np.argsort(labels, kind="stable")] = np.arange(len(labels))
                ahead = np.cumsum(self.counts[tile]) - self.counts[tile]
                local = here - np.uint32(low)
                out[cuts[tile] : cuts[tile + 1]] = rank[local] + (begin - ahead)[labels[local]]
            begin += self.counts[tile]
        out.sort()
        return out

    def positions(self, places: NDArray[np.uint32]) -> Positions:
        """Sorted positions of sorted places: the inverse of :meth:`places`."""
        if self.labels is None:
            return places
        out = np.empty(len(places), np.uint32)
        begin = self.starts[:-1].copy()
        end = 0
        cut = np.searchsorted(places, begin.astype(np.uint32))  # with int64, numpy would copy the places to int64
        for tile, low in enumerate(range(0, self.d, _TILE)):
            begin += self.counts[tile]
            until = np.searchsorted(places, begin.astype(np.uint32))
            runs = until - cut
            if runs.any():
                # Group g's flips in this tile are places cut[g] .. until[g] - 1, turned into ranks within the tile.
                total = int(runs.sum())
                index = np.arange(total) + np.repeat(cut - (np.cumsum(runs) - runs), runs)
                ahead = np.cumsum(self.counts[tile]) - begin
                rank = places[index] + np.repeat(ahead, runs)
                local = np.argsort(self.labels[low : low + _TILE], kind="stable")[rank]
                local.sort()
                out[end : end + total] = local + low
                end += total
            cut = until
        return out


@dataclass(frozen=True)
class _Model:
    """The parameters that follow from the flip counts.

    `coded` int64[C] numbers the groups that have both flips and zeros. `inverted` bool[C]: the rarer symbol is the
    zero. `runs` int64[C] counts the rarer symbol. `raw` uint32[C] is the number of raw low bits of a gap. `lanes` is
    the number of rANS coders, 0 if nothing is coded.
    """

    coded: I64
    inverted: NDArray[np.bool_]
    runs: I64
    raw: NDArray[np.uint32]
    tables: rans.Tables
    lanes: int

    @staticmethod
    def of(sizes: I64, flips: I64) -> _Model:
        """The model of groups of `sizes` positions with `flips` flips."""
        rarer = np.minimum(flips, sizes - flips)
        coded = np.flatnonzero(rarer)
        runs, size = rarer[coded], sizes[coded]
        logs = bit_lengths((size // runs).astype(np.uint32)).astype(np.int64)  # 1 + floor(log2(mean gap))
        raw = np.maximum(logs - 4, 0).astype(np.uint32)
        ratios = [_ratio(int(n), int(r), int(k)) for n, r, k in zip(size, runs, raw, strict=True)]
        tables = rans.geometric_tables(ratios)
        bits = int((runs * logs).sum())
        hidden = int((runs * raw).sum()) >> 4  # lanes whose states carry raw bits; the others cost two bytes more
        lanes = min(max(bits >> 12, min(bits >> 11, hidden), 1), 1 << 14) if len(coded) else 0
        return _Model(coded, (flips * 2 > sizes)[coded], runs, raw, tables, lanes)


def _sizes(contexts: Contexts) -> I64:
    """The number of positions of context 0, 1, ... Raises CodecError for a context that is too large."""
    top = int(contexts.max(initial=0))
    if top >= MAX_CONTEXTS:
        raise CodecError(f"context {top} is not below {MAX_CONTEXTS}; quantise more coarsely")
    out = np.zeros(top + 1, np.int64)
    for low in range(0, len(contexts), _TILE):  # in tiles: bincount copies to int64
        out += np.bincount(contexts[low : low + _TILE], minlength=top + 1)
    return out


def _mode(positions: Positions, contexts: Contexts | None) -> int:
    """The mode of a set's payload."""
    if contexts is None:
        return UNCODED
    sizes = _sizes(contexts)
    return classes.best(sizes, np.bincount(contexts[positions], minlength=len(sizes)))


def _ratio(size: int, flips: int, raw: int) -> int:
    """((1 - flips / size) ** (2 ** raw)) * 2**32, by repeated squaring of 64-bit fractions, rounded down."""
    x = ((size - flips) << 64) // size
    for _ in range(raw):
        x = (x * x) >> 64
    return x >> 32


def _gaps_by_group(places: NDArray[np.uint32], groups: _Groups, flips: I64, model: _Model) -> NDArray[np.uint32]:
    """The gaps before each place of the rarer symbol, group after group, uint32[sum(model.runs)]."""
    out = np.empty(int(model.runs.sum()), np.uint32)
    ends = np.cumsum(flips)
    at = 0
    for group, inverted, run in zip(model.coded, model.inverted, model.runs, strict=True):
        mine = places[ends[group] - flips[group] : ends[group]] - np.uint32(groups.starts[group])
        if inverted:
            mine = complement(mine, int(groups.sizes[group]))
        gaps = out[at : at + run]
        gaps[0] = mine[0]
        np.subtract(mine[1:], mine[:-1], out=gaps[1:])
        gaps[1:] -= np.uint32(1)
        at += int(run)
    return out


def _places_of_gaps(gaps: NDArray[np.uint32], groups: _Groups, flips: I64, model: _Model) -> NDArray[np.uint32]:
    """The flips' sorted places from the gaps: the inverse of :func:`_gaps_by_group`. Raises CodecError."""
    out = np.empty(int(flips.sum()), np.uint32)
    ends = np.cumsum(flips)
    for group in np.flatnonzero(flips == groups.sizes):  # all flips: nothing was coded
        whole = out[ends[group] - flips[group] : ends[group]]
        whole[:] = 1
        whole[:1] = groups.starts[group]
        np.cumsum(whole, out=whole)
    at = 0
    for group, inverted, run in zip(model.coded, model.inverted, model.runs, strict=True):
        mine, size = gaps[at : at + run], int(groups.sizes[group])
        if int(mine.sum(dtype=np.uint64)) + int(run) > size:
            raise CodecError("a flip lies beyond the end of its context; the payload is damaged or d is wrong")
        mine += np.uint32(1)  # gaps become places, in the same memory; below `size` nothing overflows
        np.cumsum(mine, out=mine)
        mine -= np.uint32(1)
        target = out[ends[group] - flips[group] : ends[group]]
        if inverted:
            complement(mine, size, target)
        else:
            target[:] = mine
        target += np.uint32(groups.starts[group])
        at += int(run)
    return out


def _state_bits(states: NDArray[np.uint64]) -> Bits:
    """The states, 2**16 .. 2**32 - 1: the bit lengths less 17 in four bits each, then the bits below the top."""
    small = states.astype(np.uint32)
    widths = bit_lengths(small) - np.uint8(1)
    return np.concatenate([planes(widths - np.uint8(16), np.full(len(states), 4, np.uint8)), planes(small, widths)])


def _read_states(bits: Bits, lanes: int) -> tuple[NDArray[np.uint64], int]:
    """The states, uint64[lanes], and the number of bits they took. Raises CodecError."""
    lengths, used = read_planes(bits, np.full(lanes, 4, np.uint8))
    lengths += np.uint32(16)
    low, more = read_planes(bits[used:], lengths)
    return (low + (np.uint32(1) << lengths)).astype(np.uint64), used + more


def _read_gaps(reader: Reader, model: _Model, states: NDArray[np.uint64], total: int) -> NDArray[np.uint32]:
    """All gaps, in the order they were coded. Raises CodecError."""
    rest = reader.bytes(reader.left)
    words = rest[: len(rest) // 2 * 2].view("<u2")
    symbols, used = rans.decode(model.runs, model.tables, states, words)
    if (states >= 2 * rans.LOW).any():
        raise CodecError("the coders do not end in their initial states; the payload is damaged or d is wrong")
    hidden = np.unpackbits((states - np.uint64(rans.LOW)).astype("<u2").view(np.uint8), bitorder="little")
    bits = np.concatenate([hidden, np.unpackbits(rest[2 * used :], bitorder="little")]).view(np.bool_)
    low_bits = int((model.runs * model.raw).sum())
    if low_bits > len(bits):
        raise CodecError("the payload ends within its raw bits; it is truncated or damaged")
    escape = (model.tables.first[1:] - model.tables.first[:-1] - np.uint32(1)).astype(np.uint8)
    ends = np.cumsum(model.runs)
    chunks = [(low, min(low + _TILE, total)) for low in range(0, total, _TILE)]
    escapes = [int(np.count_nonzero(symbols[a:b] == escape[rans.owners(ends, a, b)])) for a, b in chunks]
    beyond, more = read_gamma(bits[low_bits:], sum(escapes))
    taken = low_bits + more
    if len(bits) - max(taken, len(hidden)) >= 8 or bits[taken:].any():
        raise CodecError("bytes or padding bits follow the end of the payload; it is damaged or d is wrong")
    planes_at = np.cumsum([0] + [int(model.runs[model.raw > j].sum()) for j in range(int(model.raw.max(initial=0)))])
    gaps = np.empty(total, np.uint32)
    at = 0
    for (a, b), count in zip(chunks, escapes, strict=True):
        owner = rans.owners(ends, a, b)
        raw = model.raw[owner]
        high = symbols[a:b].astype(np.uint64)
        high[symbols[a:b] == escape[owner]] += beyond[at : at + count]
        at += count
        high <<= raw
        for j in range(int(raw.max())):
            kept = raw > j
            end = planes_at[j] + np.count_nonzero(kept)
            high[kept] += bits[planes_at[j] : end].astype(np.uint64) << np.uint64(j)
            planes_at[j] = end
        if int(high.max()) > 0xFFFFFFFF:
            raise CodecError("a gap is longer than any vector; the payload is damaged")
        gaps[a:b] = high
    return gaps


def _hide(raw: NDArray[np.bool_], lanes: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Initial states that carry 16 raw bits per lane, zeros where there are fewer, and the remaining raw bits."""
    head = np.zeros(16 * lanes, np.bool_)
    count = min(len(head), len(raw))
    head[:count] = raw[:count]
    states = np.packbits(head, bitorder="little").view("<u2").astype(np.uint64) + np.uint64(rans.LOW)
    return states, raw[count:]
