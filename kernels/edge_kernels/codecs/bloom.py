"""Codec `bloom`: a Bloom filter of the positions, the index codec of DeepReduce.

Kostopoulou et al., "DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning", NeurIPS 2021. A
reader queries every position and takes all that the filter has (the paper's policy P0), so about the share `rate` of
the other positions comes with the set. With n positions and k hashes a filter has
``m = -k n / ln(1 - rate ** (1 / k))`` cells, near 1.44 log2(1 / rate) bits a position.

Bytes: k, the varints n and m, then the cells as a bit sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log, log2

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError, Positions, positions_of
from edge_kernels.codecs.streams import PADDING, Reader, pack, varint

HASHES = 32  # the most
_KEY = counter.key("bloom")
_TILE = 1 << 14  # positions hashed at a time


def encode(positions: Positions, d: int, rate: float) -> bytes:
    """The filter of the set with this share of false positives."""
    hashes = max(1, round(-log2(rate)))
    cells = ceil(-hashes * len(positions) / log(1 - rate ** (1 / hashes)))
    filled = np.zeros(cells, np.bool_)
    for low in range(0, d if cells else 0, _TILE):
        part = positions[slice(*np.searchsorted(positions, [low, low + _TILE]))] - np.uint32(low)
        for cell in _cells(low, min(_TILE, d - low), hashes, cells):
            filled[cell[part]] = True
    return bytes([hashes]) + varint(len(positions)) + varint(cells) + pack(filled)


def decode(data: bytes, d: int) -> Positions:
    """Every position that the filter has. Raises CodecError."""
    filter_ = parse(data)
    hashes, cells, packed = filter_.hashes, filter_.cells, filter_.packed
    found = np.zeros(d, np.bool_)
    for low in range(0, d if cells else 0, _TILE):
        tile = found[low : low + _TILE]
        tile[:] = True
        for cell in _cells(low, len(tile), hashes, cells):
            tile &= (packed[cell >> np.uint64(3)] >> (cell & np.uint64(7)).astype(np.uint8) & np.uint8(1)).view(
                np.bool_
            )
    positions = positions_of(found)
    if len(positions) < filter_.size:
        raise CodecError(f"{len(positions)} of {filter_.size} positions are in the filter; the payload is damaged")
    return positions


@dataclass(frozen=True)
class Filter:
    """The number of positions, of hashes and of cells; the cells, packed."""

    size: int
    hashes: int
    cells: int
    packed: NDArray[np.uint8]


def parse(data: bytes) -> Filter:
    """The filter of a payload. Raises CodecError."""
    reader = Reader(data)
    hashes, size, cells = reader.byte(), reader.varint(), reader.varint()
    if not 1 <= hashes <= HASHES or cells >= 1 << 32:
        raise CodecError(f"a filter of {hashes} hashes and {cells} cells is damaged, or another codec was used")
    packed = reader.bytes(-(-cells // 8))
    reader.end()
    if cells % 8 and packed[-1] >> (cells % 8):
        raise CodecError(PADDING)
    return Filter(size, hashes, cells, packed)


def _cells(low: int, count: int, hashes: int, cells: int) -> Iterator[NDArray[np.uint64]]:
    """Cell j of each of `count` positions from `low` on: ``((h + j g) mod 2**32) * cells >> 32``.

    h and g are the low and the high half of number `position` of the stream "bloom"; g is made odd.
    """
    numbers = counter.uint64(_KEY, count, low)
    h, g = numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32) | np.uint64(1)
    for j in range(hashes):
        yield ((h + np.uint64(j) * g) & np.uint64(0xFFFFFFFF)) * np.uint64(cells) >> np.uint64(32)
