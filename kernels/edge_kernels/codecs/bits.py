"""Codec `bits`: one bit per position, ``ceil(d / 8)`` bytes for any set. The layout is that of `edge_kernels.bits`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits
from edge_kernels.codecs.sets import CodecError, Positions, check_size, mask_of, popcount

_TILE = 1 << 13  # bytes unpacked at a time


def encode(positions: Positions, d: int) -> bytes:
    """Pack the set into ``ceil(d / 8)`` bytes."""
    return bits.pack(mask_of(positions, d)).tobytes()


def packed(data: bytes, d: int) -> NDArray[np.uint8]:
    """The payload as uint8[ceil(d / 8)], checked but not unpacked. Raises CodecError."""
    check_size(d)
    array = np.frombuffer(data, np.uint8)
    try:
        bits.check(array, d)
    except ValueError as error:
        raise CodecError(f"not a bits payload: {error}; is d right?") from None
    return array


def decode(data: bytes, d: int) -> Positions:
    """The set of a payload made by :func:`encode`. Raises CodecError."""
    array = packed(data, d)
    out = np.empty(popcount(array), np.uint32)
    end = 0
    for low in range(0, len(array), _TILE):
        part = array[low : low + _TILE]
        found = np.flatnonzero(bits.unpack(part, 8 * len(part)))
        out[end : end + len(found)] = found + low * 8
        end += len(found)
    return out
