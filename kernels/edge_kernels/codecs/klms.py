"""Codec `klms`: a sample of Bernoulli(target) sent as the index of a sample of Bernoulli(prior) (KLMS, AISTATS 2024).

Minimal random coding: for a block of positions both sides can draw the same candidate masks from the prior that both
know. The device weighs each candidate x by target(x) / prior(x), picks one in proportion, and sends its index. What
arrives is a sample whose law is close to the target as long as the index has more bits than KL(target || prior) has;
the target itself is never sent. Blocks are cut so that each carries about the same KL (block-adaptive); a block whose
first unit alone carries more gets a longer index. Not a codec of given bits: `decode` returns the mask that was drawn.

Bytes: ``log2(unit), bits, k, varint(blocks), numbers`` (docs/codecs.md). Candidate c of the block at position `lo`
uses the stream's 64-bit numbers from ``(lo / 4) * 2**16 + c * ceil(n / 4)`` on, n positions in the block, four 16-bit
uniforms in each, least significant first; a position is set where its uniform is below ``round(prior * 2**16)``,
kept within 1 .. 65535.
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
MIN_UNIT, MAX_UNIT = 4, 16  # log2 of the positions in a unit, the grain of block lengths
MIN_BITS = 4
_UNITS_A_BLOCK = 12  # blocks are about this many units long
_ROWS = 1 << 22  # candidate bits drawn at a time

Probabilities = NDArray[np.floating[Any]]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]


@dataclass(frozen=True)
class Block:
    """Positions `start` .. `start + size - 1` and the bits of their index."""

    start: int
    size: int
    bits: int


def encode(target: Probabilities, prior: Probabilities, stream: int, choice: int, bits: int = 8,
           margin: int = 3) -> bytes:  # fmt: skip
    """Sample a mask of the target[d] and write it as indices of at least `bits` (4 .. 16) bits.

    `stream` keys the candidates and is known to the reader, `choice` keys the device's own draws. An index has `margin`
    bits more than its block's KL: more margin brings the sample's law closer to the target and costs bytes. A block's
    work is its size times ``2**bits`` uniforms. Raises CodecError for numbers that are no probabilities.
    """
    if not MIN_BITS <= bits <= MAX_BITS or not 0 <= margin < bits:
        raise CodecError(f"an index has {MIN_BITS} to {MAX_BITS} bits and less margin, not {bits} and {margin}")
    thresholds, p = _prior(prior)
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
    thresholds, p = _prior(prior)
    blocks, indices = _read(data, len(p))
    mask = np.zeros(len(p), np.bool_)
    for block, index in zip(blocks, indices, strict=True):
        part = slice(block.start, block.start + block.size)
        mask[part] = _candidates(block, thresholds[part], stream, int(index), 1)[0]
    return mask


def _prior(prior: Probabilities) -> tuple[U16, F64]:
    """The prior in 65536ths as both sides use it, and as probabilities. Exact in float64."""
    scaled = np.floor(_probabilities(prior, "the prior").astype(np.float64) * 65536 + 0.5)
    thresholds = np.clip(scaled, 1, 65535).astype(np.uint16)
    return thresholds, thresholds / 65536


def _probabilities(values: Probabilities, what: str) -> Probabilities:
    check_size(len(values))
    if values.ndim != 1 or values.dtype.kind != "f" or not bool(((values >= 0) & (values <= 1)).all()):
        raise CodecError(f"{what} must be a flat array of probabilities")
    return values


def _cut(kl: F64, bits: int, margin: int) -> tuple[int, list[Block]]:
    """The log2 of the unit, and blocks of whole units that carry about ``bits - margin`` bits of KL each."""
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
    """The index of the candidate chosen in proportion to target / prior."""
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
    k = max(int(units.mean()).bit_length() - 1, 0) if len(units) else 0
    parts = [unary(units >> np.uint32(k)), planes(units, np.full(len(units), k, np.uint8)),
             unary(widths - np.uint8(bits)), planes(indices, widths)]  # fmt: skip
    return bytes([log, bits, k]) + varint(len(blocks)) + pack(np.concatenate(parts))


def _read(data: bytes, d: int) -> tuple[list[Block], NDArray[np.uint32]]:
    reader = Reader(data)
    log, bits, k = reader.byte(), reader.byte(), reader.byte()
    count = reader.varint()
    if not MIN_UNIT <= log <= MAX_UNIT or not MIN_BITS <= bits <= MAX_BITS or k > 31:
        raise CodecError(f"({log}, {bits}, {k}) are no first bytes of a klms payload; is this another codec's?")
    total = -(-d >> log)
    if count > total or count * bits > 8 * len(data):
        raise CodecError(f"{count} blocks do not fit {d} positions in {len(data)} bytes; is d right?")
    ahead = reader.peek_bits(min(8 * reader.left, (total >> k) + count * (k + 2 + 2 * MAX_BITS)))
    high, at = read_unary(ahead, count)
    low, used = read_planes(ahead[at:], np.full(count, k, np.uint8))
    at += used
    if int(high.max(initial=0)) << k > total:
        raise CodecError("a klms block is longer than the vector; the payload is damaged")
    units = (high << k) + low + 1
    if int(units.sum()) != total:
        raise CodecError(f"the klms blocks cover {int(units.sum())} units, not {total}; is d right?")
    more, used = read_unary(ahead[at:], count)
    at += used
    widths = more + bits
    if int(widths.max(initial=0)) > MAX_BITS:
        raise CodecError(f"a klms index has more than {MAX_BITS} bits; the payload is damaged")
    indices, used = read_planes(ahead[at:], widths.astype(np.uint8))
    reader.skip_bits(ahead, at + used)
    reader.end()
    ends = np.minimum(np.cumsum(units) << log, d)
    starts = np.append(0, ends)[: len(ends)]
    return [Block(int(a), int(b - a), int(w)) for a, b, w in zip(starts, ends, widths, strict=True)], indices
