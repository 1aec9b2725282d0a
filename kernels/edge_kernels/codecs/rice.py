"""Codec `rice`: the gaps between positions as Golomb numbers, with a parameter 2**k or 3 * 2**k for each block.

The cost is within about two per cent of the entropy of independent flips, and a block adapts to their local rate.
A set of more than d / 2 positions is written as its complement. Each part of a block (unary quotients, planes of low
bits, thirds) is a bit sequence of its own, so a block takes a few numpy calls. docs/codecs.md specifies the bytes.
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError, Positions, complement
from edge_kernels.codecs.streams import Reader, pack, read_unary, unary, varint

_SMALLEST, _LARGEST = 8, 16  # log2 of the gaps in a block
_COMPLEMENT, _THIRDS = 128, 32
_BLOCK_BYTES = 5.0  # parameter, length and padding of a block, on average


def encode(positions: Positions, d: int) -> bytes:
    """Write the set, with the block size that costs least."""
    inverted = len(positions) > d // 2
    if inverted:
        positions = complement(positions, d)
    log = _block_log(positions)
    out = [bytes([log | (_COMPLEMENT if inverted else 0)]), varint(len(positions))]
    for low in range(0, len(positions), 1 << log):
        out.append(_encode_block(_gaps(positions, low, 1 << log)))
    return b"".join(out)


def decode(data: bytes, d: int) -> Positions:
    """The set of a payload made by :func:`encode`. Raises CodecError."""
    if len(data) > d // 4 + 64:
        raise CodecError(f"{len(data)} bytes are more than rice needs for any set out of {d}; is d right?")
    reader = Reader(data)
    log, count, inverted = read_head(reader)
    if inverted and 2 * count >= d:
        raise CodecError(f"{count} of {d} positions are too many for a complement; the payload is damaged")
    if count > min(d // 2, 8 * len(data)):
        raise CodecError(f"{count} of {d} positions in {len(data)} bytes are impossible; the payload is damaged")
    out = np.empty(count, np.uint32)
    before = -1
    for low in range(0, count, 1 << log):
        block = out[low : low + (1 << log)]
        steps = _decode_block(reader, len(block), d)
        steps += np.uint64(1)
        np.cumsum(steps, out=steps)
        if before + int(steps[-1]) >= d:
            raise CodecError(f"a position is {before + int(steps[-1])}, not below {d}; is d right?")
        steps += np.uint64(before & 0xFFFFFFFFFFFFFFFF)  # modulo 2**64, so -1 works
        block[:] = steps
        before = int(block[-1])
    reader.end()
    return complement(out, d) if inverted else out


def read_head(reader: Reader) -> tuple[int, int, bool]:
    """The log2 of a block's gaps, the number of positions listed, and whether these are the complement's."""
    flags = reader.byte()
    log = flags & 31
    if flags & 96 or not _SMALLEST <= log <= _LARGEST:
        raise CodecError(f"{flags} is not the first byte of a rice payload; was another codec used?")
    return log, reader.varint(), bool(flags & _COMPLEMENT)


def _gaps(positions: Positions, low: int, count: int) -> NDArray[np.uint32]:
    """Gaps before positions `low` .. `low + count - 1`."""
    block = positions[low : low + count]
    gaps = np.empty(len(block), np.uint32)
    np.subtract(block[1:], block[:-1], out=gaps[1:])
    gaps[1:] -= np.uint32(1)
    gaps[0] = block[0] - positions[low - 1] - np.uint32(1) if low else block[0]
    return gaps


def _block_log(positions: Positions) -> int:
    """The block size with the least ideal cost: large for an even rate, small for an uneven one."""
    return min((16, 14, 12, 10, 8), key=lambda log: _ideal_bytes(positions, log))


def _ideal_bytes(positions: Positions, log: int) -> float:
    """The bytes of all blocks if each cost the entropy of geometric gaps with its mean."""
    ends = np.minimum(np.arange(1 << log, len(positions) + (1 << log), 1 << log), len(positions))
    counts = np.diff(ends, prepend=0)
    mean = np.diff(positions[ends - 1].astype(np.float64), prepend=-1.0) / counts  # positions per flip
    rest = np.maximum(1 - 1 / mean, 1e-300)
    bits = counts * (np.log2(mean) - (mean - 1) * np.log2(rest))
    return float(bits.sum()) / 8 + _BLOCK_BYTES * len(ends)


def _parameter(rank: int) -> tuple[int, bool]:
    """The parameters 1, 2, 3, 4, 6, 8, 12, ... as (k, thirds)."""
    if rank < 2:
        return rank, False
    return (rank // 2 - 1, True) if rank % 2 == 0 else (rank // 2 + 1, False)


def _encode_block(gaps: NDArray[np.uint32]) -> bytes:
    k, thirds = _best(gaps)
    high = gaps >> np.uint32(k)
    parts = [unary(high // np.uint32(3) if thirds else high)]
    head = bytes([k | (_THIRDS if thirds else 0)]) + varint(len(parts[0]))
    parts += [(gaps >> np.uint32(j)) & np.uint32(1) != 0 for j in range(k)]
    if thirds:
        rest = high % np.uint32(3)
        parts += [rest != 0, rest[rest != 0] == 2]
    return head + pack(np.concatenate(parts))


def _best(gaps: NDArray[np.uint32]) -> tuple[int, bool]:
    """The cheapest parameter (k, thirds) of those near the best one for geometric gaps with this mean."""
    ideal = max(0.69 * (float(gaps.mean(dtype=np.float64)) + 1), 1.0)
    near = round(2 * log2(ideal)) - 1 if ideal > 1.5 else 0
    candidates = [_parameter(rank) for rank in range(max(near - 2, 0), min(near + 3, 60))]
    return min(candidates, key=lambda parameter: (_cost(gaps, *parameter), parameter))


def _cost(gaps: NDArray[np.uint32], k: int, thirds: bool) -> int:
    """The bits of a block's gaps under a parameter."""
    high = gaps >> np.uint32(k)
    if not thirds:
        return len(gaps) * (1 + k) + int(high.sum(dtype=np.int64))
    quotient = high // np.uint32(3)
    rests = int(np.count_nonzero(high - quotient * np.uint32(3)))
    return len(gaps) * (2 + k) + int(quotient.sum(dtype=np.int64)) + rests


def _decode_block(reader: Reader, count: int, d: int) -> NDArray[np.uint64]:
    parameter = reader.byte()
    if parameter & 192:
        raise CodecError(f"{parameter} is not the parameter of a rice block; the payload is damaged")
    k, thirds, length = parameter & 31, bool(parameter & _THIRDS), reader.varint()
    if not count <= length <= count + (d >> k):
        raise CodecError(f"a rice block of {count} gaps cannot have {length} unary bits; the payload is damaged")
    bits = reader.peek_bits(length + (k + 2) * count)
    used = length + (k + 1 if thirds else k) * count
    if len(bits) < used:
        raise CodecError("the payload ends within a rice block; it is truncated or damaged")
    if not bits[length - 1] or np.count_nonzero(bits[:length]) != count:  # checked before 8 bytes a gap are allocated
        raise CodecError("the unary bits of a rice block do not match its length; the payload is damaged")
    quotients, _ = read_unary(bits[:length], count)
    values = quotients.view(np.uint64)
    if thirds:
        above = bits[used - count : used]
        more = int(np.count_nonzero(above))
        values *= np.uint64(3)
        values += above
        if len(bits) < used + more:
            raise CodecError("the payload ends within a rice block; it is truncated or damaged")
        values[above] += bits[used : used + more]
        used += more
    values <<= np.uint64(k)
    for j in range(k):
        plane = bits[length + j * count : length + (j + 1) * count]
        values += plane.astype(np.uint64) << np.uint64(j)
    reader.skip_bits(bits, used)
    return values
