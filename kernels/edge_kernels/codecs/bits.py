"""Codec `bits`: one bit per position, the baseline every other codec must beat.

Position i is bit ``i % 8`` (least significant first) of byte ``i // 8``; the last byte's unused bits are 0.
The length is ``ceil(d / 8)`` bytes, whatever the set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError, Positions, check_size, mask_of, popcount

_CHUNK = 1 << 16  # bytes unpacked at a time


def size(d: int) -> int:
    """Bytes of any set out of `d`."""
    return (d + 7) // 8


def encode(positions: Positions, d: int) -> bytes:
    """Pack the set into ``ceil(d / 8)`` bytes."""
    return np.packbits(mask_of(positions, d), bitorder="little").tobytes()


def packed(data: bytes, d: int) -> NDArray[np.uint8]:
    """The payload as checked uint8[ceil(d / 8)], without unpacking: what folding adds. Raises CodecError."""
    check_size(d)
    if len(data) != size(d):
        raise CodecError(f"bits of {d} positions take {size(d)} bytes, not {len(data)}; is d right?")
    array = np.frombuffer(data, np.uint8)
    if d % 8 and array[-1] >> (d % 8):
        raise CodecError("bits beyond the last position are set; the payload was made for a larger d")
    return array


def decode(data: bytes, d: int) -> Positions:
    """The set of a payload made by :func:`encode`. Raises CodecError."""
    array = packed(data, d)
    out = np.empty(popcount(array), np.uint32)
    end = 0
    for low in range(0, len(array), _CHUNK):
        found = np.flatnonzero(np.unpackbits(array[low : low + _CHUNK], bitorder="little"))
        out[end : end + len(found)] = found + low * 8
        end += len(found)
    return out
