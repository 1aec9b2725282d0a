"""Bits in bytes: element `i` is bit ``i % 8`` (least significant first) of byte ``i // 8``; unused bits are zero."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def size(count: int) -> int:
    """The number of bytes that `count` bits take."""
    return -(-count // 8)


def pack(bits: NDArray[Any]) -> U8:
    """bool[n] (or 0/1 integers) to uint8[size(n)]."""
    return np.packbits(bits, bitorder="little")


def check(data: NDArray[Any], count: int) -> None:
    """Raise ValueError unless `data` has the dtype and shape of `count` bits, and its unused bits are zero."""
    if data.dtype != np.uint8 or data.shape != (size(count),):
        raise ValueError(f"{count} bits take uint8[{size(count)}], not {data.dtype}{list(data.shape)}")
    if count % 8 and data[-1] >> (count % 8):
        raise ValueError(f"the {8 - count % 8} unused bits after position {count - 1} are not zero")


def unpack(data: NDArray[Any], count: int) -> NDArray[np.bool_]:
    """The bool[count] that `pack` wrote. Raises ValueError as `check` does."""
    check(data, count)
    return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)


def pack_planes(values: NDArray[Any], width: int) -> U8:
    """Integers below ``2**width`` as bit planes, least significant first: [n] to uint8[width, size(n)]."""
    return np.stack([pack(values >> j & 1) for j in range(width)])


def unpack_planes(data: NDArray[Any], width: int, count: int) -> NDArray[np.uint32]:
    """The uint32[count] that `pack_planes` wrote. Raises ValueError as `check` does."""
    if data.shape != (width, size(count)):
        raise ValueError(f"{width} planes take uint8[{width}, {size(count)}], not {data.dtype}{list(data.shape)}")
    values = np.zeros(count, np.uint32)
    for j in range(width):
        values |= unpack(data[j], count).astype(np.uint32) << np.uint32(j)
    return values


def checksum(tiles: Iterable[NDArray[np.bool_] | NDArray[np.integer[Any]]]) -> int:
    """CRC-32 of a mask or of counts that both sides must have, not of the payload.

    The tiles may have any size; those of a mask are multiples of 8, except the last. Masks are packed as by codec
    `bits`. Counts are 32-bit integers, little endian.
    """
    crc = 0
    for tile in tiles:
        crc = zlib.crc32((pack(tile) if tile.dtype == np.bool_ else tile.astype("<i4")).tobytes(), crc)
    return crc
