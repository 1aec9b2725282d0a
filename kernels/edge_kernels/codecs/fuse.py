"""Codecs `fuse8`, `fuse16`, `fuse32`: 3-wise binary fuse filters (Graf and Lemire 2022), as DeltaMask sends them.

The bytes are those of FastFilter's xor_singleheader with a `Size` field (pyfusefilter 1.3), specified in
docs/codecs.md: a header that carries seed and geometry, then one fingerprint per cell. A key is a position as uint64.
A key is in the filter if its fingerprint is the xor of three cells, which its hash names. Decoding queries all d
positions, so about ``(d - n) / 2**width`` false positives come back with the set: these codecs are not exact.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError, Positions, positions_of

HEADER = struct.Struct("<Q5I")
_SEEDS = 0x726B2B9D438B9D4D  # stream of the seeds to try, in order; the same as in the C library
_TRIES = 100
_TILE = 1 << 14  # positions queried at a time: eight passes stay in the cache
_LOW32, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)

U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Filter:
    """A filter's fields; `fingerprints` is uint8, uint16 or uint32[(segments + 2) * segment_length]."""

    seed: int
    size: int
    segment_length: int
    segments: int
    fingerprints: NDArray[np.unsignedinteger[Any]]

    def to_bytes(self) -> bytes:
        """The C library's serialisation."""
        span = self.segments * self.segment_length
        head = HEADER.pack(
            self.seed, self.size, self.segment_length, self.segments, span, span + 2 * self.segment_length
        )
        return head + self.fingerprints.astype(self.fingerprints.dtype.newbyteorder("<")).tobytes()


def encode(positions: Positions, d: int, width: int) -> bytes:
    """A filter that holds every position of the set; a fingerprint has `width` = 8, 16 or 32 bits."""
    return build(positions, width).to_bytes()


def decode(data: bytes | memoryview, d: int, width: int) -> Positions:
    """All positions below `d` that the filter holds: the set and its false positives. Raises CodecError."""
    filter_ = parse(data, d, width)
    held = np.empty(d, np.bool_)
    for low in range(0, d, _TILE):
        held[low : low + _TILE] = members(filter_, low, min(_TILE, d - low))
    count = int(np.count_nonzero(held))
    if count < filter_.size:
        raise CodecError(f"the filter was built from {filter_.size} keys, but {count} of {d} positions match; "
                         "it is damaged or d is wrong")  # fmt: skip
    return positions_of(held)


def parse(data: bytes | memoryview, d: int, width: int) -> Filter:
    """The fields of a serialised filter of positions below `d`, checked. Raises CodecError."""
    seed, size, length, segments, cells = fields(data, d)
    end = HEADER.size + cells * width // 8
    if len(data) != end and (width != 16 or len(data) != end + 4 or any(data[end:])):
        raise CodecError(f"a fuse{width} filter of {cells} cells takes {end} bytes, not {len(data)}")
    return Filter(seed, size, length, segments, np.frombuffer(data, f"<u{width // 8}", cells, HEADER.size))


def fields(data: bytes | memoryview, d: int) -> tuple[int, int, int, int, int]:
    """Seed, size, segment length, segments and cells from a filter's header.

    Raises CodecError for a geometry that no builder chooses for so many keys. Reads nothing after the header.
    """
    if len(data) < HEADER.size:
        raise CodecError(f"a fuse filter has a header of {HEADER.size} bytes; the payload has {len(data)}")
    seed, size, length, segments, span, cells = HEADER.unpack_from(data)
    if size > d:
        raise CodecError(f"the filter claims {size} keys out of {d} positions; it is damaged or d is wrong")
    if length & (length - 1) or not 4 <= length <= 1 << 18 or not segments or span != segments * length:
        raise CodecError(f"{segments} segments of {length} cells are not the geometry of a fuse filter")
    if cells != span + 2 * length or cells > most_cells(size):
        raise CodecError(f"{cells} cells do not fit {segments} segments of {length} and {size} keys")
    return seed, size, length, segments, cells


def members(filter_: Filter, low: int, count: int) -> NDArray[np.bool_]:
    """Which of the positions `low` .. `low + count - 1` the filter holds, bool[count]."""
    keys = np.arange(count, dtype=np.uint64)
    keys += np.uint64((low + filter_.seed) & 0xFFFFFFFFFFFFFFFF)
    hashes = _murmur(keys)
    cells = filter_.fingerprints
    h0, h1, h2 = _cells(hashes, filter_.segment_length, filter_.segments)
    mixed = _prints(hashes, cells.dtype)
    for h in (h0, h1, h2):
        mixed ^= cells.take(h.view(np.int64), mode="clip")  # in range by construction; mode "clip" is the fastest
    hits: NDArray[np.bool_] = mixed == 0
    return hits


def geometry(size: int) -> tuple[int, int]:
    """Segment length and number of segments for `size` keys, as Graf and Lemire choose them."""
    length, capacity = _length_and_capacity(size)
    return length, max(-(-capacity // length) - 2, 1)


def most_cells(size: int) -> int:
    """The most cells that a reader accepts for `size` keys.

    :func:`geometry` makes at most capacity + 3 * length; the limit doubles the length, since another machine's
    logarithms may round up.
    """
    length, capacity = _length_and_capacity(size)
    return capacity + 6 * length


def _length_and_capacity(size: int) -> tuple[int, int]:
    """Segment length and the least number of cells for `size` keys; 0 and 1 keys take a single segment."""
    if size <= 1:
        return 4, 0
    length = min(1 << math.floor(math.log(size) / math.log(3.33) + 2.25), 1 << 18)
    factor = max(1.125, 0.875 + 0.25 * math.log(1e6) / math.log(size))
    return length, math.floor(size * factor + 0.5)


def build(positions: Positions, width: int) -> Filter:
    """Build a filter: peel the cells that a single key touches, a whole layer at a time.

    Each key of a layer owns a cell that no other remaining key touches. So the layers are assigned in the reverse
    order of peeling, each at once.
    """
    keys = positions.astype(np.uint64)
    length, segments = geometry(len(keys))
    dtype = np.dtype(f"<u{width // 8}")
    for seed in counter.uint64(_SEEDS, _TRIES):
        hashes = _murmur(keys + seed)
        cells = np.stack(_cells(hashes, length, segments)).astype(np.int64)
        layers = _peel(cells, (segments + 2) * length)
        if layers is None:
            continue
        prints = np.zeros((segments + 2) * length, dtype)
        own = _prints(hashes, dtype)
        for layer, owned in reversed(layers):
            a, b, c = cells[:, layer]
            prints[owned] = own[layer] ^ prints[a] ^ prints[b] ^ prints[c]  # prints[owned] is still 0
        return Filter(int(seed), len(keys), length, segments, prints)
    raise CodecError(f"no fuse filter of {len(keys)} keys after {_TRIES} seeds; are the positions distinct?")


def _peel(cells: NDArray[np.int64], total: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]] | None:
    """Layers of (keys, the cell each owns) in peeling order, or None when some keys cannot be peeled."""
    count = cells.shape[1]
    touched = cells.ravel()
    degree = np.bincount(touched, minlength=total)
    # The sum of the key numbers of each cell; a cell of degree 1 holds its key's number. Exact in float64.
    total_of = np.bincount(touched, np.tile(np.arange(count, dtype=np.float64), 3), total).astype(np.int64)
    single = np.flatnonzero(degree == 1)
    layers = []
    peeled = 0
    while len(single):
        layer, first = np.unique(total_of[single], return_index=True)
        layers.append((layer, single[first]))
        peeled += len(layer)
        touched = cells[:, layer].ravel()
        np.subtract.at(degree, touched, 1)
        np.subtract.at(total_of, touched, np.tile(layer, 3))
        single = np.unique(touched[degree[touched] == 1])
    return layers if peeled == count else None


def _murmur(h: U64) -> U64:
    """Murmur's 64-bit finaliser, in place."""
    t = h >> np.uint64(33)
    h ^= t
    h *= np.uint64(0xFF51AFD7ED558CCD)
    np.right_shift(h, np.uint64(33), out=t)
    h ^= t
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    np.right_shift(h, np.uint64(33), out=t)
    h ^= t
    return h


def _cells(hashes: U64, length: int, segments: int) -> tuple[U64, U64, U64]:
    """The three cells of every hash."""
    span, mask, step = np.uint64(segments * length), np.uint64(length - 1), np.uint64(length)
    h0 = hashes & _LOW32  # (hash * span) >> 64 from 32-bit halves
    h0 *= span
    h0 >>= _32
    h1 = hashes >> _32
    h1 *= span
    h0 += h1
    h0 >>= _32
    np.right_shift(hashes, np.uint64(18), out=h1)
    h1 &= mask
    h2 = hashes & mask
    above = h0 + step
    h1 ^= above
    above += step
    h2 ^= above
    return h0, h1, h2


def _prints(hashes: U64, dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger[Any]]:
    """Fingerprints of hashes."""
    prints: NDArray[np.unsignedinteger[Any]] = (hashes ^ (hashes >> _32)).astype(dtype)
    return prints
