"""Codec `klms`: a sample of Bernoulli(target) sent as the index of a sample of Bernoulli(prior) (KLMS, AISTATS 2024).

This is minimal random coding. For each block of positions, both sides can draw the same candidate masks from the prior.
The device weights each candidate x by target(x) / prior(x), draws one in proportion to its weight, and sends its index.
The decoded sample's distribution is close to the target if the index has more bits than KL(target || prior). The target
itself is never sent. Blocks carry about the same KL each (block-adaptive); a block whose first unit alone carries more
has a longer index. `decode` returns the mask that was drawn. docs/codecs.md specifies the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError, check_size
from edge_kernels.codecs.streams import Reader, pack, planes, read_planes, read_unary, unary, varint

MAX_BITS = 16
MIN_UNIT, MAX_UNIT = 4, 16  # log2 of the positions in a unit; block lengths are whole units
MIN_BITS = 4
_UNITS_A_BLOCK = 12  # the usual length of a block, in units
_ROWS = 1 << 22  # candidate bits drawn at a time
_TILE = 1 << 14  # positions decoded at a time; a multiple of the smallest unit

Probabilities = NDArray[np.floating[Any]]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]


@dataclass(frozen=True)
class Block:
    """Positions `start` .. `start + size - 1`, coded as an index of `bits` bits."""

    start: int
    size: int
    bits: int


def encode(target: Probabilities, prior: Probabilities, stream: int, choice: int, bits: int = 8,
           margin: int = 3) -> bytes:  # fmt: skip
    """Sample a mask from target[d] and write it as indices of at least `bits` (4 .. 16) bits.

    `stream` keys the candidates; the reader needs it too. `choice` keys the device's own draws. An index has `margin`
    bits more than the KL of its block. A larger margin brings the sample's distribution closer to the target and costs
    bytes. Encoding a block draws its size times ``2**bits`` uniforms. Raises CodecError for invalid probabilities.
    """
    if not MIN_BITS <= bits <= MAX_BITS or not 0 <= margin < bits:
        raise CodecError(f"an index has {MIN_BITS} to {MAX_BITS} bits, and the margin is smaller; got {bits}, {margin}")
    thresholds = _thresholds(_probabilities(prior, "the prior"))
    p = thresholds / 65536
    q = _probabilities(target, "the target").astype(np.float64)
    if len(q) != len(p):
        raise CodecError(f"the target has {len(q)} entries and the prior {len(p)}; they must be equal")
    np.clip(q, 1 / 65536, 65535 / 65536, out=q)
    kl = q * np.log2(q / p) + (1 - q) * np.log2((1 - q) / (1 - p))
    log, blocks = _cut(kl, bits, margin)
    gain = np.log(q / p) - np.log((1 - q) / (1 - p))
    draws = counter.uniform(choice, len(blocks))
    indices = np.array([_pick(b, thresholds, gain, stream, u) for b, u in zip(blocks, draws, strict=True)], np.uint32)
    return _write(log, bits, blocks, indices)


def decode(data: bytes, prior: Probabilities, stream: int) -> NDArray[np.bool_]:
    """The mask bool[d] that :func:`encode` drew, from the same prior[d] and stream. Raises CodecError."""
    d = len(_probabilities(prior, "the prior"))
    starts, indices = _read(data, d)
    mask = np.empty(d, np.bool_)
    for low in range(0, d, _TILE):
        # A number of the stream serves four positions. Blocks never share one: units are multiples of four.
        fours = np.arange(low // 4, -(-min(low + _TILE, d) // 4), dtype=np.uint32)
        block = np.searchsorted(starts[:-1], fours * np.uint32(4), side="right") - 1
        start, first = starts[block], fours - starts[block] // np.uint32(4)
        widths = (starts[block + 1] - start - np.uint32(1)) // np.uint32(4) + np.uint32(1)
        where = (start // np.uint32(4)).astype(np.uint64) << np.uint64(16)
        where += indices[block].astype(np.uint64) * widths
        where += first
        uniforms = counter.uint64_at(stream, where).astype("<u8", copy=False).view("<u2")
        part = _thresholds(prior[low : low + _TILE])
        np.less(uniforms[: len(part)], part, out=mask[low : low + _TILE])
    return mask


def _thresholds(prior: Probabilities) -> U16:
    """The prior in 65536ths, as both sides use it. Exact in float64."""
    return np.clip(np.floor(prior.astype(np.float64) * 65536 + 0.5), 1, 65535).astype(np.uint16)


def _probabilities(values: Probabilities, what: str) -> Probabilities:
    check_size(len(values))
    if values.ndim != 1 or values.dtype.kind != "f" or not 0 <= values.min(initial=0) <= values.max(initial=0) <= 1:
        raise CodecError(f"{what} must be a flat array of probabilities")
    return values


def _cut(kl: F64, bits: int, margin: int) -> tuple[int, list[Block]]:
    """The log2 of the unit, and blocks of whole units, each with about ``bits - margin`` bits of KL."""
    d = len(kl)
    budget = float(bits - margin)
    ideal = d / max(float(kl.sum()) / budget, 1.0) / _UNITS_A_BLOCK
    log = min(max(int(ideal).bit_length() - 1, MIN_UNIT), MAX_UNIT)
    unit = 1 << log
    ends = np.cumsum(np.add.reduceat(kl, np.arange(0, d, unit))) if d else np.zeros(0)
    blocks: list[Block] = []
    at, spent = 0, 0.0
    while at < len(ends):
        until = max(int(np.searchsorted(ends, spent + budget, side="right")), at + 1)
        need = int(np.ceil(ends[until - 1] - spent)) + margin
        blocks.append(Block(at * unit, min(until * unit, d) - at * unit, min(max(bits, need), MAX_BITS)))
        at, spent = until, float(ends[until - 1])
    return log, blocks


def _pick(block: Block, thresholds: U16, gain: F64, stream: int, u: float) -> int:
    """The index of a candidate, drawn with weights target / prior."""
    part = slice(block.start, block.start + block.size)
    used = np.flatnonzero(gain[part])
    gains, limits = gain[part][used], thresholds[part]
    scores = np.empty(1 << block.bits)
    rows = max(_ROWS // block.size, 1)
    for low in range(0, len(scores), rows):
        x = _candidates(block, limits, stream, low, min(rows, len(scores) - low))
        scores[low : low + len(x)] = x[:, used] @ gains
    weights = np.cumsum(np.exp(scores - scores.max()))
    return min(int(np.searchsorted(weights, u * weights[-1], side="right")), len(scores) - 1)


def _candidates(block: Block, thresholds: U16, stream: int, first: int, count: int) -> NDArray[np.bool_]:
    """Candidates `first` .. `first + count - 1` of a block, bool[count, size]."""
    width = (block.size + 3) // 4
    start = (block.start // 4 << 16) + first * width
    uniforms = counter.uint64(stream, count * width, start).astype("<u8", copy=False).view("<u2")
    drawn: NDArray[np.bool_] = uniforms.reshape(count, 4 * width)[:, : block.size] < thresholds
    return drawn


def _write(log: int, bits: int, blocks: list[Block], indices: NDArray[np.uint32]) -> bytes:
    units = np.array([-(-b.size >> log) - 1 for b in blocks], np.uint32)
    widths = np.array([b.bits for b in blocks], np.uint8)
    k = _quotient_shift(int(units.sum(dtype=np.int64)) + len(units), len(units))
    parts = [unary(units >> np.uint32(k)), planes(units, np.full(len(units), k, np.uint8)),
             unary(widths - np.uint8(bits)), planes(indices, widths)]  # fmt: skip
    return bytes([log, bits, k]) + varint(len(blocks)) + pack(np.concatenate(parts))


def _read(data: bytes, d: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The starts of the blocks, uint32[blocks + 1] with `d` at the end, and their indices, uint32[blocks]."""
    reader = Reader(data)
    log, bits, k, count = read_head(reader)
    total = -(-d >> log)
    if not min(total, 1) <= count <= total or count * bits > 8 * len(data):
        raise CodecError(f"{count} blocks do not fit {d} positions in {len(data)} bytes; is d right?")
    if k != _quotient_shift(total, count):
        raise CodecError(f"k = {k} does not belong to {count} blocks of {total} units; the payload is damaged or d is "
                         "wrong")  # fmt: skip
    most = (total >> k) + count * (1 + k), count * (1 + MAX_BITS - bits), count * MAX_BITS  # limits on the parts' bits
    ahead = reader.peek_bits(min(8 * reader.left, sum(most)))
    high, at = read_unary(ahead[: most[0]], count)
    low, used = read_planes(ahead[at:], np.full(count, k, np.uint8))
    at += used
    if int(high.max(initial=0)) << k > total:
        raise CodecError("a klms block is longer than the vector; the payload is damaged")
    high <<= k
    high += low
    high += 1
    np.cumsum(high, out=high)
    if count and int(high[-1]) != total:
        raise CodecError(f"the klms blocks cover {int(high[-1])} units, not {total}; is d right?")
    starts = np.zeros(count + 1, np.uint32)
    starts[1:] = np.minimum(high << log, d)
    del high, low
    more, used = read_unary(ahead[at : at + most[1]], count)
    at += used
    if int(more.max(initial=0)) > MAX_BITS - bits:
        raise CodecError(f"a klms index has more than {MAX_BITS} bits; the payload is damaged")
    widths = more.astype(np.uint8) + np.uint8(bits)
    del more
    indices, used = read_planes(ahead[at:], widths)
    reader.skip_bits(ahead, at + used)
    reader.end()
    return starts, indices


def read_head(reader: Reader) -> tuple[int, int, int, int]:
    """The log2 of the unit, the least bits of an index, k and the number of blocks. Raises CodecError."""
    log, bits, k = reader.byte(), reader.byte(), reader.byte()
    if not MIN_UNIT <= log <= MAX_UNIT or not MIN_BITS <= bits <= MAX_BITS:
        raise CodecError(f"({log}, {bits}) are not the first bytes of a klms payload; was another codec used?")
    return log, bits, k, reader.varint()


def _quotient_shift(total: int, count: int) -> int:
    """k for `count` blocks of `total` units: the low bits of a block length that are written as planes."""
    return max(((total - count) // count).bit_length() - 1, 0) if count else 0
