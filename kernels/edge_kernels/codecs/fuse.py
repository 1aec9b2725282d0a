"""Codecs `fuse8`, `fuse16`, `fuse32`: 3-wise binary fuse filters (Graf and Lemire 2022), as DeltaMask sends them.

The bytes are those of FastFilter's xor_singleheader with a `Size` field (pyfusefilter 1.3): little-endian
``uint64 Seed, uint32 Size, SegmentLength, SegmentCount, SegmentCountLength, ArrayLength``, then ArrayLength
fingerprints of 1 or 2 bytes; `fuse32` is the same with 4. (The C library counts 4 bytes too many when asked for the
length of a 16-bit filter and never writes them: we leave them out and read past zeros.) A key is a position as uint64.
Decoding asks all d positions, so the set comes back with about ``(d - n) / 2**width`` false positives: these codecs
are not exact.

    hash = murmur64(key + Seed):  h ^= h >> 33; h *= 0xFF51AFD7ED558CCD; h ^= h >> 33; h *= 0xC4CEB9FE1A85EC53;
                                  h ^= h >> 33                                                     (mod 2**64)
    h0 = (hash * SegmentCountLength) >> 64
    h1 = (h0 + SegmentLength) ^ ((hash >> 18) & (SegmentLength - 1))
    h2 = (h0 + 2 * SegmentLength) ^ (hash & (SegmentLength - 1))
    member: low `width` bits of (hash ^ (hash >> 32)) == F[h0] ^ F[h1] ^ F[h2]

Where pyfusefilter is installed its C library builds the 8- and 16-bit filters; else numpy peels. Either reads the
other's, since the header carries the geometry, but the bytes of the same set differ.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError, Positions, check_size, positions_of

HEADER = struct.Struct("<Q5I")
_SEEDS = 0x726B2B9D438B9D4D  # stream of the seeds that the C library tries, in order
_TRIES = 100
_CHUNK = 1 << 14  # positions asked at a time: eight passes stay in the cache
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
    """A filter with `width` = 8, 16 or 32 bits a fingerprint that holds every position of the set."""
    check_size(d)
    compiled = _build_compiled(positions, width)
    return compiled if compiled is not None else build(positions, width).to_bytes()


def decode(data: bytes | memoryview, d: int, width: int) -> Positions:
    """All positions below `d` that the filter holds: the set and its false positives. Raises CodecError."""
    check_size(d)
    filter_ = parse(data, d, width)
    held = np.empty(d, np.bool_)
    for low in range(0, d, _CHUNK):
        held[low : low + _CHUNK] = members(filter_, low, min(_CHUNK, d - low))
    count = int(np.count_nonzero(held))
    if count < filter_.size:
        raise CodecError(f"the filter was built of {filter_.size} keys and {count} of {d} positions match; "
                         "it is damaged or d is wrong")  # fmt: skip
    return positions_of(held)


def false_positives(data: bytes, d: int, width: int, positions: Positions) -> Positions:
    """What decoding adds to the set: known to the encoder, which may price or correct it."""
    return np.setdiff1d(decode(data, d, width), positions, assume_unique=True).astype(np.uint32)


def parse(data: bytes | memoryview, d: int, width: int) -> Filter:
    """The fields of a serialised filter of positions below `d`, checked. Raises CodecError."""
    seed, size, length, segments, cells = fields(data, d)
    end = HEADER.size + cells * width // 8
    if len(data) != end and (width != 16 or len(data) != end + 4 or any(data[end:])):
        raise CodecError(f"a fuse{width} filter of {cells} cells takes {end} bytes, not {len(data)}")
    return Filter(seed, size, length, segments, np.frombuffer(data, f"<u{width // 8}", cells, HEADER.size))


def fields(data: bytes | memoryview, d: int) -> tuple[int, int, int, int, int]:
    """Seed, size, segment length, segments and cells of a filter's header, which is all that is read.

    Raises CodecError for a geometry that no builder chooses for so many keys, before anything is allocated for it.
    """
    if len(data) < HEADER.size:
        raise CodecError(f"a fuse filter has a header of {HEADER.size} bytes, the payload only {len(data)}")
    seed, size, length, segments, span, cells = HEADER.unpack_from(data)
    if size > d:
        raise CodecError(f"the filter claims {size} keys out of {d}; it is damaged or d is wrong")
    if length & (length - 1) or not 4 <= length <= 1 << 18 or not segments or span != segments * length:
        raise CodecError(f"{segments} segments of {length} cells are no geometry of a fuse filter")
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
        mixed ^= cells.take(h.view(np.int64), mode="clip")  # clip: in range by construction, and faster
    hits: NDArray[np.bool_] = mixed == 0
    return hits


def geometry(size: int) -> tuple[int, int]:
    """Segment length and number of segments for `size` keys, as Graf and Lemire choose them."""
    length, capacity = _length_and_capacity(size)
    return length, max(-(-capacity // length) - 2, 1)


def most_cells(size: int) -> int:
    """Cells of the largest filter of `size` keys that is read.

    The geometry above makes at most capacity + 3 * length; twice that length is left to logarithms that round up.
    """
    length, capacity = _length_and_capacity(size)
    return capacity + 6 * length


def _length_and_capacity(size: int) -> tuple[int, int]:
    """Segment length and the least number of cells for `size` keys; of one key or none, a single segment's suffice."""
    if size <= 1:
        return 4, 0
    length = min(1 << math.floor(math.log(size) / math.log(3.33) + 2.25), 1 << 18)
    factor = max(1.125, 0.875 + 0.25 * math.log(1e6) / math.log(size))
    return length, math.floor(size * factor + 0.5)


def build(positions: Positions, width: int) -> Filter:
    """Build a filter with numpy alone: peel cells that one key touches, whole layers at a time.

    Every layer's keys own a cell that no other remaining key touches, so a layer is assigned at once, in the reverse
    order of peeling.
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
    """Layers of (keys, the cell each owns) in peeling order, or None where the keys cannot all be peeled."""
    count = cells.shape[1]
    touched = cells.ravel()
    degree = np.bincount(touched, minlength=total)
    # Sums of key numbers: a cell of degree 1 holds its key's number. float64 is exact far beyond 2**32 keys a cell.
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


def _build_compiled(positions: Positions, width: int) -> bytes | None:
    """The filter by pyfusefilter's C library, on the whole array; None where it is not installed or has no such width.

    Its Python layer is not used: that hashes ``str(item)`` key by key and fails with xxhash >= 4.
    """
    if width not in (8, 16):
        return None
    try:
        from pyfusefilter._xorfilter import ffi, lib
    except ImportError:
        return None
    call = {name: getattr(lib, f"binary_fuse{width}_{name}")
            for name in ("allocate", "populate", "serialization_bytes", "serialize", "free")}  # fmt: skip
    filter_ = ffi.new(f"binary_fuse{width}_t *")
    keys = positions.astype(np.uint64)  # a copy: the library may reorder it
    if not call["allocate"](len(keys), filter_):
        raise MemoryError(f"no memory for a fuse filter of {len(keys)} keys")
    try:
        if not call["populate"](ffi.from_buffer("uint64_t[]", keys), len(keys), filter_):
            raise CodecError(f"no fuse filter of {len(keys)} keys could be built; are the positions distinct?")
        out = bytearray(call["serialization_bytes"](filter_))
        call["serialize"](filter_, ffi.from_buffer("char[]", out))
        return bytes(out[: HEADER.size + filter_.ArrayLength * width // 8])
    finally:
        call["free"](filter_)


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
