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
- ``eden:BITS``, ``drive:SCALE``, ``drive+:SCALE``: a random rotation, then a few bits a value (`rotation`).
- ``qsgd:LEVELS``: random rounding between levels of a norm; ``sign``: a bit a value (`quantised`).
- ``topk:FRACTION``, ``stc:FRACTION``: only the largest values travel (`sparse`).

A name may carry one parameter after a colon; a plain name means the default. `encode_parts` codes each part of a vector
by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs import quantised, registry, rotation, sparse
from edge_kernels.codecs.sets import CodecError, check_size
from edge_kernels.codecs.streams import Reader, framed

F32 = NDArray[np.float32]
GROUP = "maskfleet.codecs.values"
SLACK = 4096
BLOCK = 512  # values that share a scale
_LEVELS = 127


@dataclass(frozen=True)
class ValueCodec:
    """One way to write a vector. `encode` is given float32[d] of magnitudes up to `most`; whatever `decode` returns is
    checked.

    `coarse` codecs lose so much that they carry changes and no models. `with_parameter` makes the codec of
    ``NAME:PARAMETER``, or raises ValueError with the choices; None if the codec has no parameter.
    """

    encode: Callable[[F32, int], bytes]
    decode: Callable[[bytes, int, int], F32]
    coarse: bool = False
    with_parameter: Callable[[str], ValueCodec] | None = None
    most: float = 1e30


def encode(name: str, values: NDArray[Any], stream: int) -> bytes:
    """`values` [d] as bytes. Raises CodecError for an unknown name and for values beyond the codec's range."""
    chosen = codec(name)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, np.float32)
    largest = np.abs(array).max(initial=0)  # NaN where one is
    if array.ndim != 1 or not np.isfinite(largest):
        raise CodecError("a value codec takes a flat vector of numbers that are finite in float32")
    if largest > np.float32(chosen.most):
        raise CodecError(f"a value of magnitude {largest:.6g} is beyond the range of {name}, {chosen.most:.6g}")
    return chosen.encode(array, stream)


def decode(name: str, data: bytes, d: int, stream: int) -> F32:
    """The float32[d] in `data`, finite. Raises CodecError."""
    check_size(d)
    decoder = codec(name).decode
    values = registry.decode("value codec", name.partition(":")[0], VALUES, lambda: decoder(data, d, stream))
    if values.dtype != np.float32 or values.shape != (d,) or not bool(np.isfinite(values).all()):
        raise CodecError(f"the {name} payload does not hold {d} finite values; is it whole?")
    return values


def codec(name: str) -> ValueCodec:
    """The value codec ``NAME`` or ``NAME:PARAMETER``. Raises CodecError with the choices."""
    return registry.find(name, VALUES, GROUP, "value codec")


def checked_name(name: str) -> str:
    """The name of a value codec in one form, for a setting. Raises CodecError as `codec` does."""
    codec(name)
    return registry.one_form(name, VALUES)


def encode_parts(name: str, values: NDArray[Any], ends: Sequence[int], stream: int) -> bytes:
    """`values` [d] in parts that end at `ends`, each coded by itself: its length as a varint, and its bytes.

    Part i has the stream (stream, i). One part alone is what `encode` writes. Raises CodecError, also for parts that
    are not the whole vector.
    """
    if np.size(values) != (d := _size(ends)):
        raise CodecError(f"the parts have {d} values, but the vector has {np.size(values)}")
    if len(ends) == 1:
        return encode(name, values, stream)
    parts = (encode(name, values[part], key) for part, key in _parts(ends, stream))
    return b"".join(map(framed, parts))


def decode_parts(name: str, data: bytes, ends: Sequence[int], stream: int) -> F32:
    """The float32[d] that `encode_parts` wrote, finite. Raises CodecError."""
    d = _size(ends)
    if len(ends) == 1:
        return decode(name, data, d, stream)
    reader, values = Reader(data), np.empty(d, np.float32)
    for part, key in _parts(ends, stream):
        values[part] = decode(name, reader.framed(), part.stop - part.start, key)
    reader.end()
    return values


def _size(ends: Sequence[int]) -> int:
    """How many values the parts have together. Raises CodecError."""
    if any(low > end for low, end in zip((0, *ends), ends, strict=False)):
        raise CodecError(f"parts end one after another, not at {list(ends)}")
    d = ends[-1] if ends else 0
    check_size(d)
    return d


def _parts(ends: Sequence[int], stream: int) -> Iterator[tuple[slice, int]]:
    for i, (low, end) in enumerate(zip((0, *ends), ends, strict=False)):
        yield slice(low, end), counter.key(stream, i)


def limit(d: int, parts: int = 1) -> int:
    """The most bytes that `d` values in so many parts may take, whatever the codec."""
    return 4 * d + (SLACK + 5) * parts  # 5: a part's length


def _encode_float(values: F32, stream: int, dtype: str) -> bytes:
    return values.astype(dtype).tobytes()


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


def _eden(text: str) -> ValueCodec:
    """EDEN at 1, 2, 3 or 4 bits, or at a share of the coordinates below 1."""
    bits = float(text)
    if bits not in rotation.CENTROIDS and not 1e-4 <= bits < 1:
        raise ValueError(f"the bits are 1, 2, 3, 4, or a share from 0.0001 to below 1, not {text}")
    return ValueCodec(partial(rotation.encode, bits=bits), partial(rotation.decode, bits=bits), bits < 1)


def _drive(text: str, write: Callable[..., bytes], read: Callable[..., F32]) -> ValueCodec:
    """DRIVE or DRIVE+ with one of two scales, which read alike."""
    if text not in ("unbiased", "mse"):
        raise ValueError(f"the scale is unbiased or mse, not {text}")
    return ValueCodec(partial(write, least_error=text == "mse"), read)


def _qsgd(text: str) -> ValueCodec:
    levels = int(text)
    if not 1 <= levels <= 255:
        raise ValueError(f"the levels are 1 to 255, not {text}")
    return ValueCodec(partial(quantised.encode_qsgd, levels=levels), partial(quantised.decode_qsgd, levels=levels))


def _sparse(text: str, write: Callable[..., bytes], read: Callable[..., F32]) -> ValueCodec:
    fraction = float(text)
    if not 1e-6 <= fraction <= 1:
        raise ValueError(f"the fraction is 0.000001 to 1, not {text}")
    return ValueCodec(partial(write, fraction=fraction), partial(read, fraction=fraction), coarse=True)


def _family(make: Callable[[str], ValueCodec], default: str) -> ValueCodec:
    """The codec of the parameter `default`, which makes those of others."""
    return replace(make(default), with_parameter=make)


VALUES: Mapping[str, ValueCodec] = {
    "float32": ValueCodec(
        partial(_encode_float, dtype="<f4"),
        partial(_decode_float, dtype="<f4"),
        most=float(np.finfo(np.float32).max),
    ),
    "float16": ValueCodec(partial(_encode_float, dtype="<f2"), partial(_decode_float, dtype="<f2"), most=65504.0),
    "stochastic8": ValueCodec(_encode_stochastic, _decode_stochastic),
    "eden": _family(_eden, "1"),
    "drive": _family(
        partial(_drive, write=rotation.encode_drive, read=partial(rotation.decode, bits=1, unit=True)), "unbiased"
    ),
    "drive+": _family(partial(_drive, write=rotation.encode_means, read=rotation.decode_means), "unbiased"),
    "qsgd": _family(_qsgd, "7"),
    "topk": _family(partial(_sparse, write=sparse.encode_top, read=sparse.decode_top), "0.01"),
    "stc": _family(partial(_sparse, write=sparse.encode_ternary, read=sparse.decode_ternary), "0.01"),
    "sign": ValueCodec(quantised.encode_signs, quantised.decode_signs, coarse=True),
}
"""The built-in codecs."""
