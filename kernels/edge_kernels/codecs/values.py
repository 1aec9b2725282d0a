"""Value codecs: a float32 vector as bytes, and back.

    data = encode("stochastic8", values, stream)
    values = decode("stochastic8", data, d, stream)

`stream` is a counter key that both sides derive from the round, so the same values give the same bytes. A codec that
rounds at random draws from it; the others ignore it. A payload takes at most 4 bytes a value and `SLACK` more.
Other packages add codecs by entry points of the group `maskfleet.codecs.values`, each naming a `ValueCodec`.

- ``float32``: little endian, exact.
- ``float16``: little endian, rounded to the nearest.
- ``stochastic8``: QSGD (Alistarh et al., NeurIPS 2017) with the largest magnitude of each block as its norm. For each
  block of 512 values (the last one shorter) a float32 scale = max |v|; then an int8 q for each value. A value is
  scale * q / 127. q has the sign of v and the magnitude floor(127 |v| / scale + u) with u uniform in [0, 1), so the
  decoded value has the expectation v, and 0 stays 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs import registry
from edge_kernels.codecs.sets import CodecError, check_size

F32 = NDArray[np.float32]
GROUP = "maskfleet.codecs.values"
SLACK = 4096
BLOCK = 512  # values that share a scale
_LEVELS = 127


@dataclass(frozen=True)
class ValueCodec:
    """One way to write a vector. `encode` is given finite float32[d]; whatever `decode` returns is checked."""

    name: str
    encode: Callable[[F32, int], bytes]
    decode: Callable[[bytes, int, int], F32]


def encode(name: str, values: NDArray[Any], stream: int) -> bytes:
    """`values` [d] as bytes. Raises CodecError for an unknown name and for values that are not finite in the codec."""
    chosen = codec(name)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, np.float32)
    if array.ndim != 1 or not bool(np.isfinite(array).all()):
        raise CodecError("a value codec takes a flat vector of numbers that are finite in float32")
    return chosen.encode(array, stream)


def decode(name: str, data: bytes, d: int, stream: int) -> F32:
    """The float32[d] in `data`, finite. Raises CodecError."""
    check_size(d)
    decoder = codec(name).decode
    values = registry.decode("value codec", name, VALUES, lambda: decoder(data, d, stream))
    if values.dtype != np.float32 or values.shape != (d,) or not bool(np.isfinite(values).all()):
        raise CodecError(f"the {name} payload does not hold {d} finite values; is it whole?")
    return values


def codec(name: str) -> ValueCodec:
    """The value codec `name`. Raises CodecError with the choices."""
    return registry.find(name, VALUES, GROUP, "value codec")


def limit(d: int) -> int:
    """The most bytes that `d` values may take, whatever the codec."""
    return 4 * d + SLACK


def _encode_float(values: F32, stream: int, dtype: str) -> bytes:
    with np.errstate(over="ignore"):
        array = values.astype(dtype)
    if not bool(np.isfinite(array).all()):
        raise CodecError("a value is beyond the range of float16; choose another codec")
    return array.tobytes()


def _decode_float(data: bytes, d: int, stream: int, dtype: str) -> F32:
    due = d * np.dtype(dtype).itemsize
    if len(data) != due:
        raise CodecError(f"{d} values take {due} bytes, not {len(data)}; is d right?")
    return np.frombuffer(data, dtype).astype(np.float32)


def _encode_stochastic(values: F32, stream: int) -> bytes:
    d = len(values)
    scales = np.maximum.reduceat(np.abs(values), np.arange(0, d, BLOCK)) if d else values
    wide = np.repeat(scales.astype(np.float64), BLOCK)[:d]
    levels = np.abs(values) * (_LEVELS / np.where(wide > 0, wide, 1.0)) + counter.uniform(stream, d)
    magnitudes = np.minimum(np.floor(levels), _LEVELS)  # the largest one could round up to 128
    return scales.astype("<f4").tobytes() + np.copysign(magnitudes, values).astype(np.int8).tobytes()


def _decode_stochastic(data: bytes, d: int, stream: int) -> F32:
    blocks = -(-d // BLOCK)
    if len(data) != 4 * blocks + d:
        raise CodecError(f"{d} values take {4 * blocks + d} bytes, not {len(data)}; is d right?")
    scales, levels = np.frombuffer(data, "<f4", blocks), np.frombuffer(data, np.int8, d, 4 * blocks)
    if not bool((np.isfinite(scales) & (scales >= 0)).all()) or int(levels.min(initial=0)) < -_LEVELS:
        raise CodecError("a scale is negative or not finite, or a level is -128; the payload is damaged")
    out: F32 = np.repeat(scales.astype(np.float32), BLOCK)[:d]
    out *= levels.astype(np.float32) / np.float32(_LEVELS)
    return out


VALUES: Mapping[str, ValueCodec] = {
    c.name: c
    for c in (
        *(
            ValueCodec(name, partial(_encode_float, dtype=dtype), partial(_decode_float, dtype=dtype))
            for name, dtype in (("float32", "<f4"), ("float16", "<f2"))
        ),
        ValueCodec("stochastic8", _encode_stochastic, _decode_stochastic),
    )
}
