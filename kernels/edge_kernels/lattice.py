"""Whole numbers near zero at a few bits each: the entropy coder of Lattice.

A device rounds ``a`` to ``floor(a + u)`` with dither u that both sides know. A small a gives 0, or 1 if u is close to 1,
or -1 if u is close to 0. So the chance of a number other than 0 falls with the *distance* of u from its nearer end,
about as ``exp(-distance / b) / 2``, where b is the typical size of a. Gradients are sums of outer products. So b is
modelled as a product of a factor of the tensor, of the row and of the column.

Nothing of this model travels but one byte, the first guess of b. The elements are coded in passes of growing size. The
factors begin with the activity of rows and columns in the vector N that both sides hold; after each pass both sides
correct them by what that pass brought and what was expected. `codecs.arrivals` codes a pass. Then follow the signs,
where the dither leaves doubt, and the numbers beyond 1 in unary, with adaptive rates.

All tables follow by integer and exact float64 operations (no exp, no log), so both sides get the same.
docs/codecs.md specifies the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import CodecError, arrivals
from edge_kernels.codecs.arrivals import LEAST, MAX_LANES, MAX_STEPS, MOST, UNIT, chance, ends, hazard

F64 = NDArray[np.float64]
I16 = NDArray[np.int16]
Bits = NDArray[np.bool_]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
Span = tuple[slice, int, int]
"""A tensor's place in the flat vector, its rows and its columns. The spans of a vector lie end to end."""
Exchange = Callable[[I64, I64], I64]
"""Codes the members of a list, given the hazards before each element; a reader ignores the members it is given."""

OCTAVE = 32  # logarithms are in 32nds of an octave
_TOP = 24 * OCTAVE  # the logarithm of distance 1
_PERIOD, _PASSES = 61, (0, 1, 3, 9, 25, 61)  # pass k has the positions i with PASSES[k] <= i % 61 < PASSES[k + 1]
_FACTOR = 4 * OCTAVE  # the largest factor of a row or column, and 1 / the smallest
_LEAST, _MOST = 2 * OCTAVE, 30 * OCTAVE  # of a tensor's factor
_DEEP, _FAR = 12 * OCTAVE, 6 * OCTAVE  # distance / b runs from 2**-12 to 2**6
_OFFSET = _MOST + 2 * _FACTOR  # added to log(distance / b), which makes it an index
_SIZE = _OFFSET + _TOP + 2 * _FACTOR + 1  # of the table of one class of |N|
_BIN = OCTAVE // 2  # of distance / b, for the correction of the curve
_CLASSES = 4  # |N| = 0, 1, 2, or more
_UNARY = 16  # magnitudes below this are unary
_GUESS = OCTAVE // 4  # one step of the first guess of b
_BLOCK, _FLAG_CLASSES = 32, 16


@dataclass(frozen=True)
class Known:
    """What both sides know of values int32[d].

    `fall` and `rise` uint32[d] are the distances to -1 and to 1 in units of 2**-32, `held` int32[d] the vector N that
    both have. None: not known.
    """

    spans: Sequence[Span]
    fall: U32 | None
    rise: U32 | None
    held: I32 | None

    @property
    def d(self) -> int:
        """The number of values."""
        return self.spans[-1][0].stop if self.spans else 0


def up(dither: U32, spans: Sequence[Span], held: I32) -> Known:
    """For a device's numbers ``floor(a + dither / 2**32)``; `held` int32[d] is the model's vector N."""
    return Known(spans, dither, ~dither, held)


def down(fall: U32, rise: U32, spans: Sequence[Span], held: I32) -> Known:
    """For a change of N: the least dither and the least ``~dither`` over the streams of the missed rounds."""
    return Known(spans, fall, rise, held)


def whole(spans: Sequence[Span]) -> Known:
    """For N itself, sent to a device that holds nothing."""
    return Known(spans, None, None, None)


def encode(values: I32, known: Known) -> bytes:
    """The values int32[d] as bytes; none if all are 0."""
    if values.shape != (known.d,) or values.dtype != np.int32:
        raise CodecError(f"values are int32[{known.d}], not {values.dtype}{list(values.shape)}")
    places = values.nonzero()[0]
    if not len(places):
        return b""
    model = _Model(known)
    guess = model.guess(len(places))
    lanes = max((len(places) >> 8).bit_length() - 1, 0)
    while True:
        writer = arrivals.Writer(1 << lanes)
        _code(model, guess, writer.code, values)
        if writer.steps() <= MAX_STEPS:
            return bytes([lanes, guess]) + writer.bytes()
        lanes, model = lanes + 1, _Model(known)


def decode(data: bytes, known: Known) -> I32:
    """The values of :func:`encode`, int32[d], with what the writer knew. Raises CodecError."""
    if not data:
        return np.zeros(known.d, np.int32)
    if len(data) < 2 or 1 << data[0] > MAX_LANES or data[1] * _GUESS > _MOST - _LEAST:
        raise CodecError("the first two bytes are not those of Lattice's coder; was another codec used?")
    reader = arrivals.Reader(data[2:], 1 << data[0])
    values = _code(_Model(known), data[1], reader.code, np.zeros(known.d, np.int32))
    reader.end()
    if not values.any():
        raise CodecError("a vector of zeros takes no bytes; the payload is damaged")
    return values


def _code(model: _Model, guess: int, exchange: Exchange, given: I32) -> I32:
    """The values, either read by `exchange` or, by a writer, given to it."""
    values = np.zeros(model.d, np.int32)
    places = model.places(guess, exchange, given)
    if len(places):
        signs = _signs(model, places, exchange, given[places])
        signed = signs * _sizes(model, places, exchange, np.abs(given[places].astype(np.int64)))
        if int(signed.min()) < -(2**31) or int(signed.max()) >= 2**31:
            raise CodecError("a value is beyond 32 bits; the payload is damaged")
        values[places] = signed
    return values


class _Model:
    """The factors, the curve, and what is known of the elements."""

    def __init__(self, known: Known) -> None:
        self.known, self.d = known, known.d
        _check(known)
        near = None if known.fall is None or known.rise is None else np.minimum(known.fall, known.rise)
        self.base = np.full(self.d, _TOP + _OFFSET, np.int16) if near is None else _log(near)
        if near is not None:
            self.base += np.int16(_OFFSET)
        self.dithered = near is not None
        self.tensors = [_Tensor.of(*span, known.held) for span in known.spans]
        if known.held is not None:
            top = _CLASSES - 1
            self.base += np.abs(np.clip(known.held, -top, top)).astype(np.int16) * np.int16(_SIZE)
        self.curve = _curve(self.dithered)
        self.bin_weight = np.full(len(self.curve) // _BIN, 8.0)
        self.own = np.zeros(_CLASSES, np.int64)
        self.own_weight = np.full(_CLASSES, 8.0)

    def guess(self, members: int) -> int:
        """The first guess of b with which about so many members are expected."""
        counts = np.bincount((self.base - self.scales())[::3], minlength=_CLASSES * _SIZE) * 3
        flat = counts.reshape(_CLASSES, _SIZE).sum(axis=0)
        table = chance(self.table()[:_SIZE].astype(np.int64)) * 2.0**-24
        steps = range((_MOST - _LEAST) // _GUESS + 1)
        # A larger b moves every index down.
        expected = [flat[s:] @ table[: len(table) - s] for s in (_LEAST + _GUESS * g for g in steps)]
        return int(np.argmin(np.abs(np.log((np.array(expected) + 0.5) / members))))

    def places(self, guess: int, exchange: Exchange, given: I32) -> I64:
        """Where the values are not 0, int64[n]."""
        for tensor in self.tensors:
            tensor.factor = _LEAST + _GUESS * guess
        found = []
        for low, high in zip(_PASSES[:-1], _PASSES[1:], strict=True):
            index = _part(self.base, low, high) - _part(self.scales(), low, high)
            hazards = self.table().take(index)
            mine = exchange(ends(hazards), _part(given, low, high).nonzero()[0])
            here = mine // (high - low) * _PERIOD + mine % (high - low) + low
            found.append(here)
            if high < _PERIOD:
                self.learn(low, high, index, hazards, mine, here)
        return np.sort(np.concatenate(found))

    def scales(self) -> I16:
        """The logarithm of b of every element, in units of 2**-24, int16[d]."""
        out = np.empty(self.d, np.int16)
        for tensor in self.tensors:
            np.add.outer(
                (tensor.row + tensor.factor).astype(np.int16),
                tensor.column.astype(np.int16),
                out=out[tensor.where].reshape(len(tensor.row), len(tensor.column)),
            )
        return out

    def table(self) -> U32:
        """The hazard of an index ``_OFFSET + log(distance / b) + class * _SIZE``."""
        index = np.arange(_SIZE) - _OFFSET + _DEEP
        hazards = np.clip(np.floor(self.curve * 2.0**UNIT), LEAST, MOST).astype(np.uint32)
        return np.concatenate([hazards[np.clip(index - own, 0, len(hazards) - 1)] for own in self.own])

    def learn(self, low: int, high: int, index: I16, hazards: U32, mine: I64, here: I64) -> None:
        """Correct the factors by a pass: `mine` are the members' numbers in the pass, `here` their positions."""
        expected = (chance(hazards.astype(np.int64)) >> 4).astype(np.uint32)  # in units of 2**-20
        before, sums = ends(expected), _spread(expected, self.d, low, high)
        for tensor in self.tensors:
            mask = slice(*np.searchsorted(here, (tensor.where.start, tensor.where.stop)))
            tensor.learn(here[mask] - tensor.where.start, before, sums[tensor.where], low, high)
        total = (len(mine) + 4.0) / (float(before[-1]) * 2.0**-UNIT + 4.0)
        size = _CLASSES * _SIZE
        ones = np.bincount(index[mine], minlength=size)
        due = np.bincount(index, minlength=size) * (chance(self.table().astype(np.int64)) >> 4) * 2.0**-UNIT * total
        column = np.arange(_SIZE) - _OFFSET + _DEEP
        bins = (np.clip(column - self.own[:, None], 0, len(self.curve) - 1) // _BIN).reshape(-1)
        seen, awaited = (np.bincount(bins, weights=x, minlength=len(self.bin_weight)) for x in (ones, due))
        self.curve = self.curve * np.repeat((seen + self.bin_weight) / (awaited + self.bin_weight), _BIN)
        self.bin_weight += seen
        seen, awaited = (x.reshape(_CLASSES, _SIZE).sum(axis=1) for x in (ones, due))
        moved = self.own + _log2((seen + self.own_weight) / (awaited + self.own_weight))
        self.own = np.clip(moved, -_FACTOR, _FACTOR)
        self.own_weight += seen


@dataclass
class _Tensor:
    where: slice
    row: I64
    column: I64
    row_weight: F64
    column_weight: F64
    factor: int = 0
    weight: float = 1.5

    @staticmethod
    def of(where: slice, rows: int, columns: int, held: I32 | None) -> _Tensor:
        sums = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
        if held is not None and columns > 1:
            moved = np.abs(held[where].astype(np.int64)).reshape(rows, columns)
            sums = moved.sum(axis=1), moved.sum(axis=0)
        factors = [np.clip(_log2((s + 2.0) / (s.sum() / max(len(s), 1) + 2.0)), -_FACTOR, _FACTOR) for s in sums]
        weights = [np.clip(s.astype(np.float64), 2.0, 8.0) for s in sums]
        return _Tensor(where, *factors, *weights)

    def learn(self, members: I64, before: I64, sums: U32, low: int, high: int) -> None:
        """Correct the factors by a pass with `members` among the tensor's elements."""
        rows, columns = len(self.row), len(self.column)
        edges = self.where.start + np.arange(rows + 1) * columns
        edges = edges // _PERIOD * (high - low) + np.clip(edges % _PERIOD - low, 0, high - low)
        due = np.diff(before[edges]) * 2.0**-UNIT
        ratio = (len(members) + self.weight) / (float(due.sum()) + self.weight)
        self.factor = int(np.clip(self.factor + int(_log2(np.array([ratio]))[0]), _LEAST, _MOST))
        self.weight += len(members)
        if columns == 1:
            return
        seen = np.bincount(members // columns, minlength=rows)
        self.row = np.clip(self.row + _log2((seen + self.row_weight) / (due * ratio + self.row_weight)),
                           -_FACTOR, _FACTOR)
        self.row_weight += seen
        seen = np.bincount(members % columns, minlength=columns)
        due = sums.reshape(rows, columns).sum(axis=0, dtype=np.int64) * 2.0**-UNIT
        self.column = np.clip(self.column + _log2((seen + self.column_weight) / (due * ratio + self.column_weight)),
                              -_FACTOR, _FACTOR)
        self.column_weight += seen


def _signs(model: _Model, places: I64, exchange: Exchange, given: I32) -> I64:
    """1 or -1 for every place. The dither expects a sign; those that differ from it are members of a list."""
    known = model.known
    if known.fall is None or known.rise is None:
        expected = np.ones(len(places), np.int64)
        classes = np.zeros(len(places), np.int64)
        start = 0.5
    else:
        fall, rise = known.fall[places], known.rise[places]
        expected = np.where(rise <= fall, 1, -1)
        lead = _log(np.maximum(fall, rise) - np.minimum(fall, rise)).astype(np.int64) - model.scales()[places]
        classes = np.clip((lead + 6 * OCTAVE) // OCTAVE, 0, 9)
        start = 0.25
    wrong = _flags(classes, start, exchange, np.sign(given) != expected)
    return np.where(wrong, -expected, expected)


def _sizes(model: _Model, places: I64, exchange: Exchange, given: I64) -> I64:
    """The magnitudes, from 1: unary below 16, then the bits of what is beyond, as Elias-gamma numbers."""
    size = np.ones(len(places), np.int64)
    classes = np.clip((model.scales()[places].astype(np.int64) - 12 * OCTAVE) // OCTAVE, 0, 15)
    left = np.arange(len(places))
    for level in range(1, _UNARY):
        more = _flags(classes[left], 0.1 if level == 1 else 0.3, exchange, given[left] > level)
        left = left[more]
        size[left] += 1
        if not len(left):
            return size
    beyond = given[left] - _UNARY + 1
    width, growing = np.zeros(len(left), np.int64), np.arange(len(left))
    while len(growing):
        more = _flags(np.zeros(len(growing), np.int64), 0.3, exchange, beyond[growing] >> (width[growing] + 1) > 0)
        growing = growing[more]
        width[growing] += 1
        if len(growing) and int(width[growing[0]]) > 31:
            raise CodecError("a value is beyond 32 bits; the payload is damaged")
    number = np.int64(1) << width
    for j in range(int(width.max()) - 1, -1, -1):
        has = (width > j).nonzero()[0]
        number[has] |= _flags(np.zeros(len(has), np.int64), 0.5, exchange, beyond[has] >> j & 1 > 0).astype(np.int64) << j
    size[left] += number - 1
    return size


def _flags(classes: I64, start: float, exchange: Exchange, given: Bits) -> Bits:
    """Flags with a rate per class, which begins at `start` and is learnt from blocks of growing size."""
    flags = np.zeros(len(classes), np.bool_)
    ones, all_ = np.full(_FLAG_CLASSES, 2 * start), np.full(_FLAG_CLASSES, 2.0)
    low, high = 0, _BLOCK
    while low < len(flags):
        here = classes[low:high]
        hazards = hazard(np.floor(ones / all_ * 2.0**24).astype(np.int64))
        members = exchange(ends(hazards[here]), given[low:high].nonzero()[0])
        flags[low:high][members] = True
        ones += np.bincount(here[members], minlength=_FLAG_CLASSES)
        all_ += np.bincount(here, minlength=_FLAG_CLASSES)
        low, high = high, 5 * high
    return flags


def _check(known: Known) -> None:
    end = 0
    for where, rows, columns in known.spans:
        if where.start != end or rows * columns != where.stop - where.start or where.step not in (None, 1):
            raise CodecError(f"span {where} of {rows} x {columns} does not follow the one before it, or has holes")
        end = where.stop
    for what, dtype in ((known.fall, np.uint32), (known.rise, np.uint32), (known.held, np.int32)):
        if what is not None and (what.shape != (end,) or what.dtype != dtype):
            raise CodecError(f"distances are uint32[{end}] and N is int32[{end}], not {what.dtype}{list(what.shape)}")


def _log(distances: U32) -> I16:
    """32 log2(distance / 256), linear between powers of two, 0 for less than 1, int16[n]."""
    whole = np.right_shift(distances, np.uint32(8))
    np.maximum(whole, np.uint32(1), out=whole)
    exact = whole.astype(np.float32).view(np.uint32)  # 24 bits: nothing is rounded
    exact >>= np.uint32(18)
    exact -= np.uint32(127 * OCTAVE)
    return exact.astype(np.int16)


def _log2(x: F64) -> I64:
    """32 log2(x), linear between powers of two, rounded."""
    mantissa, exponent = np.frexp(x)
    value: I64 = np.floor(OCTAVE * (exponent + (2 * mantissa - 2)) + 0.5).astype(np.int64)
    return value


def _curve(dithered: bool) -> F64:
    """The hazard at distance / b from 2**-12 to 2**6, in steps of 1/32 octave.

    Where b is all that is known, it is the hazard itself.
    """
    steps = np.arange(-_DEEP, _FAR)
    x = np.ldexp(1 + steps % OCTAVE / OCTAVE, steps // OCTAVE)
    if not dithered:
        return 1 / x
    chances = 1 / (1 + x / 64)
    for _ in range(6):
        chances = chances * chances  # about exp(-x)
    curve: F64 = chances / (2 - 0.557 * chances)  # about -log(1 - chance / 2)
    return curve


def _part(a: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """The elements of a pass, in order."""
    body = len(a) // _PERIOD * _PERIOD
    return np.concatenate([a[:body].reshape(-1, _PERIOD)[:, low:high].reshape(-1), a[body + low : body + high]])


def _spread(part: NDArray[np.uint32], d: int, low: int, high: int) -> NDArray[np.uint32]:
    """The elements of a pass at their places, zeros elsewhere, uint32[d]."""
    out = np.zeros((-(-d // _PERIOD), _PERIOD), np.uint32)
    body, wide = d // _PERIOD, high - low
    out[:body, low:high] = part[: body * wide].reshape(body, wide)
    if len(part) > body * wide:
        out[body, low : low + len(part) - body * wide] = part[body * wide :]
    return out.reshape(-1)[:d]
