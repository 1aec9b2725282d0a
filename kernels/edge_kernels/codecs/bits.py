"""Codec `bits`: one bit per position, the baseline every other codec must beat.

The bits lie as `edge_kernels.bits` has them; here are the payload's checks and the positions.
The length is ``ceil(d / 8)`` bytes, whatever the set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits
from edge_kernels.codecs.sets import CodecError, Positions, check_size, mask_of, popcount

_CHUNK = 1 << 13  # bytes unpacked at a time


def size(d: int) -> int:
    """Bytes of any set out of `d`."""
    return bits.size(d)


def encode(positions: Positions, d: int) -> bytes:
    """Pack the set into ``ceil(d / 8)`` bytes."""
    return bits.pack(mask_of(positions, d)).tobytes()


def packed(data: bytes, d: int) -> NDArray[np.uint8]:
    """The payload as checked uint8[ceil(d / 8)], without unpacking: what folding adds. Raises CodecError."""
    check_size(d)
    if len(data) != size(d):
        raise CodecError(f"bits of {d} positions take {size(d)} bytes, not {len(data)}; is d right?")
    array = np.frombuffer(data, np.uint8)
    try:
        bits.check(array, d)
    except ValueError as error:
        raise CodecError(
            f"bits beyond the last position are set: {error}; was the payload made for a larger d?"
        ) from None
    return array


def decode(data: bytes, d: int) -> Positions:
    """The set of a payload made by :func:`encode`. Raises CodecError."""
    array = packed(data, d)
    out = np.empty(popcount(array), np.uint32)
    end = 0
    for low in range(0, len(array), _CHUNK):
        part = array[low : low + _CHUNK]
        found = np.flatnonzero(bits.unpack(part, 8 * len(part)))
        out[end : end + len(found)] = found + low * 8
        end += len(found)
    return out
