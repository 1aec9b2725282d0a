"""Codecs of plain values: `signs` (one bit each), `float16` and `float32` (raw, little endian).

Sets of positions, counts and samples have files of their own.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import bits
from edge_kernels.codecs.sets import CodecError, check_size

FloatName = Literal["float16", "float32"]
_FLOATS: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


def encode_signs(signs: NDArray[Any]) -> bytes:
    """Pack values of -1 and +1, one bit each as in `bits`: a set bit is +1."""
    if signs.ndim != 1 or not bool(np.isin(signs, (-1, 1)).all()):
        raise CodecError("signs are a flat array of -1 and +1")
    return np.packbits(signs > 0, bitorder="little").tobytes()


def decode_signs(data: bytes, d: int) -> NDArray[np.int8]:
    """The int8[d] of -1 and +1 of a payload made by :func:`encode_signs`. Raises CodecError."""
    signs = np.unpackbits(bits.packed(data, d), count=d, bitorder="little").view(np.int8)
    signs *= 2
    signs -= 1
    return signs


def encode_floats(values: NDArray[Any], kind: FloatName) -> bytes:
    """Raw little-endian values. Raises CodecError for a NaN, an infinity or a float16 overflow."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, _FLOATS[kind])
    if array.ndim != 1 or not bool(np.isfinite(array).all()):
        raise CodecError(f"{kind} payloads carry a flat array of finite numbers that fit the type")
    return array.tobytes()


def decode_floats(data: bytes, d: int, kind: FloatName) -> NDArray[np.floating[Any]]:
    """The float[d] of a payload made by :func:`encode_floats`. Raises CodecError."""
    check_size(d)
    dtype = _FLOATS[kind]
    if len(data) != d * dtype.itemsize:
        raise CodecError(f"{d} values of {kind} take {d * dtype.itemsize} bytes, not {len(data)}; is d right?")
    array: NDArray[np.floating[Any]] = np.frombuffer(data, dtype)
    if not bool(np.isfinite(array).all()):
        raise CodecError(f"the {kind} payload holds a NaN or an infinity")
    return array
