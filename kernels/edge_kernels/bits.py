"""Bits in bytes: element `i` is bit ``i % 8`` (least significant first) of byte ``i // 8``; unused bits are zero."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def size(count: int) -> int:
    """Bytes that `count` bits take."""
    return -(-count // 8)


def pack(bits: NDArray[Any]) -> U8:
    """bool[n] (or 0/1 integers) to uint8[size(n)]."""
    return np.packbits(bits, bitorder="little")


def check(data: NDArray[Any], count: int) -> None:
    """Raises ValueError when `data` has another dtype or shape than `count` bits, or unused bits that are set."""
    if data.dtype != np.uint8 or data.shape != (size(count),):
        raise ValueError(f"{data.dtype}{list(data.shape)} instead of uint8[{size(count)}] for {count} bits")
    if count % 8 and data[-1] >> (count % 8):
        raise ValueError(f"the {8 - count % 8} unused bits of the last byte are not zero")


def unpack(data: NDArray[Any], count: int) -> NDArray[np.bool_]:
    """bool[count] from what `pack` wrote. Raises ValueError like `check`."""
    check(data, count)
    return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)


def pack_planes(values: NDArray[Any], width: int) -> U8:
    """Integers below ``2**width`` as bit planes, least significant first: [n] to uint8[width, size(n)]."""
    return np.stack([pack(values >> j & 1) for j in range(width)])


def unpack_planes(data: NDArray[Any], width: int, count: int) -> NDArray[np.uint32]:
    """uint32[count] from what `pack_planes` wrote. Raises ValueError like `unpack`."""
    if data.shape != (width, size(count)):
        raise ValueError(f"{data.dtype}{list(data.shape)} instead of uint8[{width}, {size(count)}]")
    values = np.zeros(count, np.uint32)
    for j in range(width):
        values |= unpack(data[j], count).astype(np.uint32) << np.uint32(j)
    return values
