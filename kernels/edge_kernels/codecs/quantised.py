"""Quantised values: QSGD, and signs with one magnitude.

- QSGD (Alistarh et al., NeurIPS 2017): in a bucket of 512 values v with Euclidean norm |v|, value v_i becomes
  ``|v| * sign(v_i) * l / levels``, where l is ``levels * |v_i| / |v|`` rounded at random to one of its neighbours, so
  that the decoded value has the expectation v_i. The paper codes l with Elias numbers; `counts` takes less.
- signs (scaled signSGD, Bernstein et al., ICML 2018; Karimireddy et al., ICML 2019): a bit a value, and the mean
  magnitude of all. It is biased and needs error feedback.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs import counts
from edge_kernels.codecs.sets import CodecError
from edge_kernels.codecs.streams import Reader, framed, pack

F32 = NDArray[np.float32]
BUCKET = 512  # values that share a norm


def encode_qsgd(values: F32, stream: int, levels: int) -> bytes:
    """Norms, the magnitudes by `counts`, and the signs of those that are not 0."""
    d = len(values)
    squares = np.square(values, dtype=np.float64)
    norms = np.sqrt(np.add.reduceat(squares, np.arange(0, d, BUCKET))) if d else squares
    wide = np.repeat(norms, BUCKET)[:d]
    scaled = np.abs(values) * (levels / np.where(wide > 0, wide, 1.0)) + counter.uniform(stream, d)
    magnitudes = np.minimum(scaled, levels).astype(counts.dtype_for(levels))
    return norms.astype("<f4").tobytes() + framed(counts.encode(magnitudes, levels)) + pack(values[magnitudes > 0] < 0)


def decode_qsgd(data: bytes, d: int, stream: int, levels: int) -> F32:
    """The values that `encode_qsgd` wrote. Raises CodecError."""
    reader = Reader(data)
    norms = read_scales(reader, -(-d // BUCKET))
    magnitudes = counts.decode(reader.framed(), d, levels)
    negative = magnitudes > 0
    negative[negative] = reader.bits(int(np.count_nonzero(negative)))
    reader.end()
    values: F32 = magnitudes.astype(np.float32)
    values /= np.float32(levels)
    values *= np.repeat(norms, BUCKET)[:d]
    np.negative(values, out=values, where=negative)
    return values


def encode_signs(values: F32, stream: int) -> bytes:
    """The mean magnitude, float32, and a bit for each value, 1 below 0."""
    mean = np.abs(values).mean(dtype=np.float64) if len(values) else 0.0
    return np.array(mean, "<f4").tobytes() + pack(values < 0)


def decode_signs(data: bytes, d: int, stream: int) -> F32:
    """The values that `encode_signs` wrote. Raises CodecError."""
    reader = Reader(data)
    (magnitude,) = read_scales(reader, 1)
    signs = reader.bits(d)
    reader.end()
    values: F32 = np.full(d, magnitude, np.float32)
    np.negative(values, out=values, where=signs)
    return values


def read_scales(reader: Reader, count: int) -> F32:
    """`count` finite numbers, float32, at least 0. Raises CodecError."""
    scales = reader.floats(count)
    if not bool((np.isfinite(scales) & (scales >= 0)).all()):
        raise CodecError("a scale is negative or not finite; the payload is damaged")
    return scales
