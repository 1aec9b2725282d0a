"""Codec `klms`: a mask drawn from probabilities that only the sender knows, as candidates of ones that both sides know.

Isik et al., "Adaptive Compression in Federated Learning via Side Information", AISTATS 2024 (minimal random coding).
The positions are dealt to blocks at random, so that each block has about the same share of KL(target || prior). Both
sides can draw the same 256 candidates for a block from the prior. The sender weights each candidate x by
target(x) / prior(x), draws one of them and sends its number, a byte. The fewer bits of KL a block has, the closer the
mean of the mask comes to the target: `KL_PER_BLOCK` bits bring it .89 of the way from the prior. docs/codecs.md
specifies the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError, check_size

CANDIDATES = 256
KL_PER_BLOCK = 4.0  # bits
LEAST, MOST = 8, 4096  # positions of a block
_TILE = 1 << 20  # bits of candidates compared at a time

Probabilities = NDArray[np.floating[Any]]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]


def encode(target: Probabilities, prior: Probabilities, stream: int, choice: int) -> bytes:
    """A mask drawn from about target[d], as a byte for each block.

    `stream` keys the blocks and the candidates, and the reader needs it; `choice` keys the sender's own draws. Raises
    CodecError for what is no probability.
    """
    limits, q = _limits(prior), _probabilities(target).astype(np.float64)
    d = len(limits)
    if len(q) != d:
        raise CodecError(f"the target has {len(q)} entries and the prior {d}; they must be equal")
    np.clip(q, 1 / 65536, 65535 / 65536, out=q)
    p = limits / 65536
    ones, zeros = np.log2(q / p), np.log2((1 - q) / (1 - p))
    blocks = int(np.clip(np.ceil((q * ones + (1 - q) * zeros).sum() / KL_PER_BLOCK), *_block_range(d)))
    gains = np.rint((ones - zeros) * 2**30) / 2**30  # their sums are exact in any order: the same bytes on any BLAS
    order, pool = _shared(stream, d, blocks)
    limits, gains = _dealt(limits, order, blocks), _dealt(gains, order, blocks)
    own, chosen = counter.uniform(choice, blocks), np.empty(blocks, np.uint8)
    rows = max(_TILE // max(pool.size, 1), 1)
    for low in range(0, blocks, rows):
        part = slice(low, low + rows)
        candidates = (pool < limits[part, :, None]).astype(np.float64)
        scores = (gains[part, None, :] @ candidates)[:, 0]
        weights = np.cumsum(np.exp2(scores - scores.max(axis=1, keepdims=True)), axis=1)
        below = weights <= own[part, None] * weights[:, -1:]
        chosen[part] = np.minimum(np.count_nonzero(below, axis=1), CANDIDATES - 1)
    return chosen.tobytes()


def decode(data: bytes, prior: Probabilities, stream: int) -> NDArray[np.bool_]:
    """The mask bool[d] that :func:`encode` drew, from the same prior[d] and stream. Raises CodecError."""
    limits, chosen = _limits(prior), np.frombuffer(data, np.uint8)
    d, blocks = len(limits), len(chosen)
    check_blocks(blocks, d)
    order, pool = _shared(stream, d, blocks)
    drawn = pool[:, chosen] < _dealt(limits, order, blocks).T
    mask = np.empty(d, np.bool_)
    mask[order] = drawn.ravel()[:d]
    return mask


def check_blocks(blocks: int, d: int) -> None:
    """Raise CodecError unless `d` positions may have so many blocks."""
    least, most = _block_range(d)
    if not least <= blocks <= most:
        raise CodecError(f"{blocks} bytes are not a byte for each of {least} to {most} blocks; is d = {d} right?")


def _block_range(d: int) -> tuple[int, int]:
    return -(-d // MOST), -(-d // LEAST)


def _shared(stream: int, d: int, blocks: int) -> tuple[NDArray[np.int64], U16]:
    """The order in which positions are dealt, and by place in a block the uniforms uint16[places, candidates].

    All blocks share the uniforms, which saves time. Where most positions move the same way, blocks prefer the same
    candidates, and the number of ones of a mask varies more: up to nine times as much on a pre-trained ResNet, .15 % of
    its size. The mean of a position and those of other devices do not change: each device has uniforms of its own.
    """
    places = -(-d // blocks) if blocks else 0
    numbers = counter.uint64(stream, places * CANDIDATES // 4, d).astype("<u8", copy=False)
    return counter.permutation(stream, d), numbers.view("<u2").reshape(places, CANDIDATES)


def _dealt(values: NDArray[Any], order: NDArray[np.int64], blocks: int) -> NDArray[Any]:
    """Values [d] by block and place, [blocks, places]; 0 after the end."""
    places = -(-len(order) // blocks) if blocks else 0
    dealt = np.zeros(places * blocks, values.dtype)
    dealt[: len(order)] = values[order]
    by_block: NDArray[Any] = dealt.reshape(places, blocks).T
    return by_block


def _limits(prior: Probabilities) -> U16:
    """The prior in 65536ths, as both sides use it. Exact in float64."""
    scaled = _probabilities(prior).astype(np.float64) * 65536 + 0.5
    limits: U16 = np.clip(np.floor(scaled), 1, 65535).astype(np.uint16)
    return limits


def _probabilities(values: Probabilities) -> Probabilities:
    check_size(len(values))
    if values.ndim != 1 or values.dtype.kind != "f" or not 0 <= values.min(initial=0) <= values.max(initial=0) <= 1:
        raise CodecError("the probabilities must be a flat array of floats from 0 to 1")
    return values
