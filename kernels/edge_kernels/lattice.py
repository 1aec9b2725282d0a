"""Whole numbers near zero at a few bits each: the entropy coder of Lattice.

A device rounds ``a`` to ``floor(a + u)`` with dither u that both sides know. A small a gives 0, or 1 if u is close to
1, or -1 if u is close to 0. So the chance of a number other than 0 falls with the *distance* of u from its nearer end,
about as ``exp(-distance / b) / 2``, where b is the typical size of a. Gradients are sums of outer products, so b is
modelled as a product of a factor of the tensor, of the row and of the column (`lattice_model`).

Of this model one byte travels, the first guess of b. The factors begin with the activity of rows and columns in the
vector N that both sides hold, and follow what has been decoded. `codecs.arrivals` codes where the values are not 0,
then the signs where they are not those that the dither suggests, then what is beyond 1 in unary. Many large numbers
would take a reader too many steps; their lowest bits travel as they are. docs/codecs.md specifies the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits
from edge_kernels.codecs import CodecError, arrivals
from edge_kernels.codecs.arrivals import MAX_LANES, MOST_STEPS, ends, hazard, most_steps
from edge_kernels.lattice_model import (
    GUESS,
    HIGHEST,
    I32,
    I64,
    LOWEST,
    OCTAVE,
    U32,
    Exchange,
    Known,
    Model,
    Span,
    log,
    looked_up,
    tiles,
)

Bits = NDArray[np.bool_]

_HIGH = 4  # bits of a large number that are coded where its lowest ones are not
_MOST_LOW = 15  # bits
_UNARY = 16  # magnitudes below this are unary
_CLASSES = 16  # of flags
_BLOCK = 32  # flags of the first block; each later end is five times the one before


def up(dither: U32, spans: Sequence[Span], held: I32, level: int = 0) -> Known:
    """For a device's numbers ``floor(a + dither / 2**32)``; `held` int32[d] is the model's vector N, see `Known`."""
    return Known(spans, dither, None, held, level)


def down(fall: U32, rise: U32, spans: Sequence[Span], held: I32, level: int = 0) -> Known:
    """For a change of N: the least dither and the least ``~dither`` over the streams of the missed rounds."""
    return Known(spans, fall, rise, held, level)


def whole(spans: Sequence[Span]) -> Known:
    """For N itself, sent to a device that holds nothing."""
    return Known(spans, None, None, None)


def encode(values: I32, known: Known) -> bytes:
    """The values int32[d] as bytes; none if all are 0."""
    if values.shape != (known.d,) or values.dtype != np.int32:
        raise CodecError(f"values are int32[{known.d}], not {values.dtype}{list(values.shape)}")
    if not values.any():
        return b""
    if (data := _encoded(values, known)) is not None:
        return data
    usual = int(np.quantile(np.abs(values[values.nonzero()].astype(np.int64)), 0.9)).bit_length()
    for low in range(min(max(1, usual - _HIGH), _MOST_LOW), _MOST_LOW + 1):
        if (data := _encoded(values, known, low)) is not None:
            return data
    raise CodecError(
        f"{np.count_nonzero(values)} of {known.d} values are not 0, about 2^{usual} each: too much for this codec; "
        "split the vector"
    )


def _encoded(values: I32, known: Known, low: int = 0) -> bytes | None:
    """The bytes with the `low` lowest bits of all values in planes; None where a reader would take too many steps."""
    places, given, planes = _split(values, low)
    if _symbols(_magnitudes(given)) > MAX_LANES * MOST_STEPS:
        return None
    lanes = min(max((len(places) >> 8).bit_length() - 1, 0), MAX_LANES.bit_length() - 1)
    while 1 << lanes <= MAX_LANES:
        model, writer = Model(known), arrivals.Writer(1 << lanes)
        guess = model.guess(max(1, len(places)))
        _code(model, guess, writer.code, places, given)
        body = writer.bytes()
        if writer.steps() <= most_steps(len(body), 1 << lanes):
            return bytes([low << 4 | lanes, guess]) + planes + body
        lanes += 1
    return None


def _magnitudes(values: I32) -> U32:
    """|value|; that of -2**31 has no int32."""
    return np.abs(values).view(np.uint32)


def _symbols(sizes: U32) -> int:
    """The fewest symbols that these magnitudes take: one for each set flag of `_sizes`, less the bits below the top."""
    beyond = sizes[sizes > _UNARY].astype(np.float64) - (_UNARY - 1)
    return int(np.minimum(sizes, _UNARY).sum()) + int((np.frexp(beyond)[1] - 1).sum())


def _split(values: I32, low: int) -> tuple[I64, I32, bytes]:
    """Where the values are not 0 in units of 2**`low`, to the nearest, and those; the bit planes of what is left."""
    planes = b""
    if low:
        raised = (values & (1 << low) - 1) + (1 << low - 1)  # without the high bits, to stay within 32
        values, planes = (values >> low) + (raised >> low), bits.pack_planes(raised & (1 << low) - 1, low).tobytes()
    places = values.nonzero()[0]
    return places, values[places], planes


def decode(data: bytes, known: Known) -> I32:
    """The values of :func:`encode`, int32[d], with what the writer knew. Raises CodecError."""
    if not data:
        return np.zeros(known.d, np.int32)
    if len(data) < 2 or 1 << (data[0] & 15) > MAX_LANES or data[1] * GUESS > HIGHEST - LOWEST:
        raise CodecError(
            "the first two bytes are not those of Lattice's coder; the payload is damaged, or the versions differ"
        )
    low, body = data[0] >> 4, 2 + (data[0] >> 4) * bits.size(known.d)
    if len(data) < body:
        raise CodecError(f"{known.d} numbers with {low} low bits take more than {len(data)} bytes; the payload is cut")
    reader = arrivals.Reader(data[body:], 1 << (data[0] & 15))
    none = np.zeros(0, np.int64), np.zeros(0, np.int32)
    places, values = _code(Model(known), data[1], reader.code, *none)
    reader.end()
    out = np.zeros(known.d, np.int32)
    out[places] = values
    if low:
        out = _joined(out, low, data[2:body])
    if not len(places) and not out.any():  # with a place there is a value, whatever its low bits are
        raise CodecError("a vector of zeros takes no bytes; the payload is damaged")
    return out


def _joined(high: I32, low: int, planes: bytes) -> I32:
    """What `_split` took apart."""
    each = np.frombuffer(planes, np.uint8).reshape(low, bits.size(high.size))
    try:
        rest = bits.unpack_planes(each, low, high.size)
    except ValueError as error:
        raise CodecError(f"low bits: {error}") from None
    values = high.astype(np.int64)
    values <<= low
    values += rest
    del rest  # each takes as much memory as the result
    values -= 1 << low - 1
    if int(values.min(initial=0)) < -(2**31) or int(values.max(initial=0)) >= 2**31:
        raise CodecError("a value is beyond 32 bits; the payload is damaged")
    return values.astype(np.int32)


def _code(model: Model, guess: int, exchange: Exchange, places: I64, given: I32) -> tuple[I64, I64]:
    """Where the values are not 0, and those values; a writer gives both, a reader gives none."""
    places = model.places(guess, exchange, places)
    if not len(given):
        given = np.zeros(len(places), np.int32)
    signs = _signs(model, places, exchange, given)
    values = signs * _sizes(model, places, exchange, _magnitudes(given))
    if int(values.min(initial=0)) < -(2**31) or int(values.max(initial=0)) >= 2**31:
        raise CodecError("a value is beyond 32 bits; the payload is damaged")
    return places, values


def _signs(model: Model, places: I64, exchange: Exchange, given: I32) -> NDArray[np.int8]:
    """1 or -1 for every place. The dither expects a sign; those that differ from it are members of a list."""
    known = model.known
    expected, classes = np.ones(len(places), np.int8), np.zeros(len(places), np.uint8)
    start = 0.25 if model.dithered else 0.5
    for s in tiles(len(places)):
        if (distances := known.distances(places[s])) is not None:
            fall, rise = distances
            expected[s] = np.where(rise <= fall, 1, -1)
            lead = log(np.maximum(fall, rise) - np.minimum(fall, rise)).astype(np.int64) - model.scales_at(places[s])
            classes[s] = np.clip((lead + 6 * OCTAVE) // OCTAVE, 0, 9)
    wrong = _flags(classes, start, exchange, np.sign(given) != expected)
    return np.where(wrong, -expected, expected)


def _sizes(model: Model, places: I64, exchange: Exchange, given: U32) -> I64:
    """The magnitudes, from 1: unary below 16, then the bits of what is beyond, as Elias-gamma numbers."""
    size = np.ones(len(places), np.int64)
    classes = np.empty(len(places), np.uint8)
    for s in tiles(len(places)):
        classes[s] = np.clip((model.scales_at(places[s]) - 12 * OCTAVE) // OCTAVE, 0, 15)
    left = np.arange(len(places))
    for level in range(1, _UNARY):
        more = _flags(classes[left], 0.1 if level == 1 else 0.3, exchange, given[left] > level)
        left = left[more]
        size[left] += 1
        if not len(left):
            return size
    beyond = given[left].astype(np.int64) - _UNARY + 1
    width, growing = np.zeros(len(left), np.int64), np.arange(len(left))
    while len(growing):
        more = _flags(np.zeros(len(growing), np.uint8), 0.3, exchange, beyond[growing] >> (width[growing] + 1) > 0)
        growing = growing[more]
        width[growing] += 1
        if len(growing) and int(width[growing[0]]) > 31:
            raise CodecError("a value is beyond 32 bits; the payload is damaged")
    number = np.int64(1) << width
    for j in range(int(width.max()) - 1, -1, -1):
        has = (width > j).nonzero()[0]
        number[has] |= (
            _flags(np.zeros(len(has), np.uint8), 0.5, exchange, beyond[has] >> j & 1 > 0).astype(np.int64) << j
        )
    size[left] += number - 1
    return size


def _flags(classes: NDArray[np.uint8], start: float, exchange: Exchange, given: Bits) -> Bits:
    """Flags with a rate per class, which begins at `start` and is learnt from blocks of growing size."""
    flags = np.zeros(len(classes), np.bool_)
    ones, all_ = np.full(_CLASSES, 2 * start), np.full(_CLASSES, 2.0)
    low, high = 0, _BLOCK
    while low < len(flags):
        here = classes[low:high]
        hazards = hazard(np.floor(ones / all_ * 2.0**24).astype(np.int64))
        members = exchange(ends(looked_up(hazards, here)), given[low:high].nonzero()[0])
        flags[low:high][members] = True
        ones += np.bincount(here[members], minlength=_CLASSES)
        all_ += np.bincount(here, minlength=_CLASSES)
        low, high = high, 5 * high
    return flags
