"""Codec `entropy`: a set at its conditional entropy, given contexts that both sides know.

Positions are grouped by context, in order within a group; in a group, flips are taken as independent with the rate
that the header's flip count gives, so the gaps between them are geometric. A gap's high part is one rANS symbol
(`rans`), its low bits are raw: there are as many symbols as flips, not as positions. This costs within one per cent of
``sum_c N_c * H(n_c / N_c)`` for payloads of a kilobyte and more. Without contexts there is one group.

Bytes: ``mode, flip counts, states, words, raw bits`` (docs/codecs.md). What is specific to a pair of
theta_g and shared uniforms, the choice of contexts, is :func:`coupling_contexts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import rans
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
    read_unary,
    unary,
)

MAX_CONTEXTS = 4096
_TILE = 1 << 16  # positions grouped at a time
_NONE = 15  # `mode` of a payload without contexts; 0 .. 11 is the shift that merges neighbouring contexts
_SHIFTS = range(12)

I64 = NDArray[np.int64]


def encode(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """Write the set; contexts are merged by dropping low bits, or ignored, where their flip counts cost too much."""
    mode, _ = _best_mode(positions, d, contexts)
    groups = _Groups.of(None if mode == _NONE else contexts, d, mode)
    places = groups.places(positions)  # sorted places in the grouped order
    bounds = np.searchsorted(places, groups.starts)
    flips = np.diff(bounds)
    model = _Model.of(groups.sizes, flips)
    gaps = _gaps_by_group(places, groups, flips, model)
    owners = np.repeat(np.arange(len(model.coded), dtype=np.uint16), model.runs)
    high = gaps >> model.raw[owners]
    escape = (model.tables.first[1:] - model.tables.first[:-1] - np.uint32(1))[owners]
    entries = np.minimum(high, escape) + model.tables.first[owners]
    beyond = (high - escape)[high >= escape]
    raw = np.concatenate([planes(gaps, model.raw[owners].astype(np.uint8)), gamma(beyond)])
    states, raw = _hide(raw, model.lanes)
    words = rans.encode(entries, model.tables, states)
    header = bytes([mode]) + pack(_flip_bits(flips, groups.sizes))
    return header + states.astype("<u4").tobytes() + words.astype("<u2").tobytes() + pack(raw)


def decode(data: bytes, d: int, contexts: Contexts | None = None) -> Positions:
    """The set of a payload made by :func:`encode` with the same contexts. Raises CodecError."""
    reader = Reader(data)
    mode = reader.byte()
    if mode != _NONE and mode not in _SHIFTS:
        raise CodecError(f"{mode} is no first byte of an entropy payload; is this another codec's?")
    if mode != _NONE and contexts is None:
        raise CodecError("this payload was coded with contexts; pass the same ones")
    groups = _Groups.of(None if mode == _NONE else contexts, d, mode)
    if len(data) > size_limit(d, len(groups.sizes)):
        raise CodecError(f"{len(data)} bytes are more than entropy needs for any set out of {d}; is d right?")
    flips = _read_flips(reader, groups.sizes)
    model = _Model.of(groups.sizes, flips)
    total = int(model.runs.sum())
    if total > 8 * len(data) + 64:
        raise CodecError(f"{total} flips in {len(data)} bytes are impossible; the payload is damaged")
    gaps = _read_gaps(reader, model, total)
    places = _places_of_gaps(gaps, groups, flips, model)
    return groups.positions(places)


def size_limit(d: int, groups: int = MAX_CONTEXTS) -> int:
    """More bytes than any set out of `d` takes in so many groups."""
    return d // 4 + 64 + 16 * groups


def size_estimate(positions: Positions, d: int, contexts: Contexts | None = None) -> float:
    """About the bytes of :func:`encode`, from the flip counts alone."""
    return _best_mode(positions, d, contexts)[1]


def coupling_contexts(theta: NDArray[np.floating[Any]], uniforms: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Contexts of a flip between ``u < theta`` and ``u < theta'``: 16 bins of theta x 16 log-bins of |u - theta|.

    `theta` and `uniforms` are [d] and the same numbers on both sides; the bins use exact float64 operations only. The
    distance lies in the low four bits, so that merging contexts merges distances first.
    """
    out = np.empty(len(theta), np.uint8)
    for low in range(0, len(theta), _TILE):
        t = theta[low : low + _TILE].astype(np.float64)
        log = -np.frexp(np.abs(uniforms[low : low + _TILE] - t))[1]  # |u - theta| in [2**(-log-1), 2**-log)
        out[low : low + _TILE] = np.clip(t * 16, 0, 15).astype(np.uint8) * 16 + np.clip(log, 0, 15).astype(np.uint8)
    return out


@dataclass(frozen=True)
class _Groups:
    """The grouped order: all positions of context 0, then 1, ...; `place` of a position is its index in it.

    `sizes` int64[G] counts the positions of every context in use, `starts` int64[G + 1] their first places;
    `counts` int64[tiles, G] splits `sizes` by tile. `labels` are the contexts as group numbers, None for one group.
    """

    d: int
    sizes: I64
    starts: I64
    counts: I64
    labels: NDArray[np.uint8] | NDArray[np.uint16] | None

    @staticmethod
    def of(contexts: Contexts | None, d: int, shift: int) -> _Groups:
        """Group `d` positions by ``contexts >> shift``."""
        if contexts is None:
            sizes = np.array([d] if d else [], np.int64)
            return _Groups(d, sizes, np.append(np.zeros(1, np.int64), sizes), sizes[None], None)
        merged = (_top(contexts) >> shift) + 1
        labels = np.empty(d, np.uint8 if merged <= 256 else np.uint16)
        counts = np.zeros((max(-(-d // _TILE), 1), merged), np.int64)
        for tile, low in enumerate(range(0, d, _TILE)):
            np.right_shift(contexts[low : low + _TILE], shift, out=labels[low : low + _TILE], casting="unsafe")
            counts[tile] = np.bincount(labels[low : low + _TILE], minlength=merged)
        used = np.flatnonzero(counts.any(axis=0))
        counts = counts[:, used]
        numbers = np.zeros(merged, labels.dtype)
        numbers[used] = np.arange(len(used))
        if len(used) < merged:
            for low in range(0, d, _TILE):
                labels[low : low + _TILE] = numbers[labels[low : low + _TILE]]
        sizes = counts.sum(axis=0)
        return _Groups(d, sizes, np.append(0, np.cumsum(sizes)), counts, labels)

    def places(self, positions: Positions) -> NDArray[np.uint32]:
        """Sorted places of sorted positions."""
        if self.labels is None:
            return positions
        out = np.empty(len(positions), np.uint32)
        cuts = np.searchsorted(positions, np.arange(0, self.d + _TILE, _TILE))
        begin = self.starts[:-1].copy()  # first place of every group in the tile
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
        cut = np.searchsorted(places, begin)
        for tile, low in enumerate(range(0, self.d, _TILE)):
            begin += self.counts[tile]
            until = np.searchsorted(places, begin)
            runs = until - cut
            if runs.any():
                # This tile's flips by group: places cut[g] .. until[g] - 1, made ranks in the tile's grouped order.
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
    """What the flip counts imply. Groups with flips and zeros both are `coded` (their numbers, int64[C]);

    `inverted` bool[C] says that the rarer symbol is the zero; `runs` int64[C] counts the rarer symbol, `raw` uint32[C]
    are the low bits of a gap that are stored raw; `lanes` is 0 if nothing is coded.
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
        lanes = min(max((bits >> 12) + min(bits >> 13, 3), 1), 1 << 14) if len(coded) else 0
        return _Model(coded, (flips * 2 > sizes)[coded], runs, raw, tables, lanes)


def _top(contexts: Contexts) -> int:
    """The greatest context. Raises CodecError where it is too great."""
    top = int(contexts.max(initial=0))
    if top >= MAX_CONTEXTS:
        raise CodecError(f"context {top} is not below {MAX_CONTEXTS}; quantise more coarsely")
    return top


def _ratio(size: int, flips: int, raw: int) -> int:
    """((1 - flips / size) ** (2 ** raw)) * 2**32, by repeated squaring of 64-bit fractions, rounded down."""
    x = ((size - flips) << 64) // size
    for _ in range(raw):
        x = (x * x) >> 64
    return x >> 32


def _gaps_by_group(places: NDArray[np.uint32], groups: _Groups, flips: I64, model: _Model) -> NDArray[np.uint32]:
    """Gaps before the rarer symbol's places, group after group, uint32[sum(model.runs)]."""
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
    for group in np.flatnonzero(flips == groups.sizes):  # nothing but flips: nothing was coded
        out[ends[group] - flips[group] : ends[group]] = np.arange(groups.starts[group], groups.starts[group + 1])
    at = 0
    for group, inverted, run in zip(model.coded, model.inverted, model.runs, strict=True):
        mine, size = gaps[at : at + run], int(groups.sizes[group])
        if int(mine.sum(dtype=np.uint64)) + int(run) > size:
            raise CodecError("a flip lies beyond the end of its context; the payload is damaged or d is wrong")
        mine += np.uint32(1)  # gaps become places in place: nothing overflows below `size`
        np.cumsum(mine, out=mine)
        mine -= np.uint32(1)
        target = out[ends[group] - flips[group] : ends[group]]
        target[:] = complement(mine, size) if inverted else mine
        target += np.uint32(groups.starts[group])
        at += int(run)
    return out


def _flip_bits(flips: I64, sizes: I64) -> Bits:
    """The flip counts: of n + 1, the bit length less one as a step from the group before, then the bits below the top.

    Steps are zigzag (0, 1, -1, 2, ... as 0, 1, 2, 3, ...) in unary; before the first group stands half the bit length
    of its size.
    """
    numbers = (flips + 1).astype(np.uint32)
    widths = bit_lengths(numbers) - np.uint8(1)
    steps = np.diff(widths.astype(np.int64), prepend=_first_width(sizes))
    zigzag = np.where(steps > 0, 2 * steps - 1, -2 * steps).astype(np.uint32)
    return np.concatenate([unary(zigzag), planes(numbers, widths)])


def _read_flips(reader: Reader, sizes: I64) -> I64:
    ahead = reader.peek_bits(len(sizes) * 100 + 64)
    zigzag, used = read_unary(ahead, len(sizes))
    steps = np.where(zigzag % 2 == 1, (zigzag + 1) // 2, -(zigzag // 2))
    widths = np.cumsum(steps) + _first_width(sizes)
    if widths.min(initial=0) < 0 or widths.max(initial=0) > 31:
        raise CodecError("a flip count does not have 0 to 31 bits; the payload is damaged")
    small = widths.astype(np.uint8)
    low, more = read_planes(ahead[used:], small)
    reader.skip_bits(ahead, used + more)
    flips = low.astype(np.int64) + (1 << widths) - 1
    if (flips > sizes).any():
        raise CodecError("a context has more flips than positions; the payload is damaged or d is wrong")
    return flips


def _first_width(sizes: I64) -> int:
    return int(sizes[0]).bit_length() // 2 if len(sizes) else 0


def _read_gaps(reader: Reader, model: _Model, total: int) -> NDArray[np.uint32]:
    """All gaps, in the order they were coded. Raises CodecError."""
    states = reader.bytes(4 * model.lanes).view("<u4").astype(np.uint64)
    if (states < rans.LOW).any():
        raise CodecError("a coder's state is below 2**16; the payload is damaged")
    rest = reader.bytes(reader.left)
    words = rest[: len(rest) // 2 * 2].view("<u2")
    symbols, used = rans.decode(model.runs, model.tables, states, words)
    if (states >= 2 * rans.LOW).any():
        raise CodecError("the coders do not end where they began; the payload is damaged or d is wrong")
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
    for (a, b), count in zip(chunks, escapes, strict=True):  # in chunks, for memory
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
    """First states that carry the first 16 raw bits of each lane (zeros where there are fewer), and the other bits."""
    head = np.zeros(16 * lanes, np.bool_)
    count = min(len(head), len(raw))
    head[:count] = raw[:count]
    states = np.packbits(head, bitorder="little").view("<u2").astype(np.uint64) + np.uint64(rans.LOW)
    return states, raw[count:]


def _best_mode(positions: Positions, d: int, contexts: Contexts | None) -> tuple[int, float]:
    """The cheapest merging of contexts, and about the bytes it needs."""
    best = (_NONE, _bytes(np.array([d]), np.array([len(positions)])))
    if contexts is None or not d:
        return best
    sizes = np.zeros(_top(contexts) + 1, np.int64)
    for low in range(0, d, _TILE):
        part = np.bincount(contexts[low : low + _TILE])
        sizes[: len(part)] += part
    flips = np.bincount(contexts[positions], minlength=len(sizes))
    for shift in _SHIFTS:
        if shift:
            sizes = np.append(sizes, 0)[: -(-len(sizes) // 2) * 2].reshape(-1, 2).sum(axis=1)
            flips = np.append(flips, 0)[: -(-len(flips) // 2) * 2].reshape(-1, 2).sum(axis=1)
        best = min(best, (shift, _bytes(sizes, flips)), key=lambda choice: choice[1])
        if len(sizes) == 1:
            break
    return best


def _bytes(sizes: I64, flips: I64) -> float:
    """About the bytes of a payload: flip counts, lanes and the groups' entropy."""
    used = sizes > 0
    size, flip = sizes[used].astype(np.float64), flips[used].astype(np.float64)
    widths = np.floor(np.log2(flip + 1))
    header = float((2 * np.abs(np.diff(widths)) + 0.5).sum() + widths.sum())
    rate = flip / size
    part = np.clip(rate, 1e-300, 1 - 1e-16)
    bits = float((-size * (rate * np.log2(part) + (1 - rate) * np.log2(1 - part))).sum())
    return 1 + header / 8 + bits * 1.004 / 8 + 3
