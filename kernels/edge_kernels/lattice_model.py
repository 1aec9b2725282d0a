"""Where a vector of small whole numbers is not 0: the model of Lattice's coder, which both sides build alike.

The chance that an element is not 0 is a curve of ``distance / b``. The distance is that of the dither to its nearer
end. b is a product of factors: of the tensor, the row, the column and the class of |N|. All logarithms are whole
numbers of 1/32 octave and piecewise linear. The elements are coded in passes; the *members* are those not 0.
After each pass the factors and the curve are corrected by the ratio of the members seen to those expected. The more
members a factor has seen, the less it changes. Everything is computed by integer and exact float64 operations (no exp,
no log), so both sides get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import CodecError
from edge_kernels.codecs.arrivals import LEAST, MOST, UNIT, chance, ends
from edge_kernels.compiled import loops

F64 = NDArray[np.float64]
I16 = NDArray[np.int16]
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
LOWEST, HIGHEST = 2 * OCTAVE, 30 * OCTAVE  # of a tensor's factor
_DEEP, _FAR = 12 * OCTAVE, 6 * OCTAVE  # distance / b runs from 2**-12 to 2**6
_OFFSET = HIGHEST + 2 * _FACTOR  # added to log(distance / b), which makes it an index
_SIZE = _OFFSET + _TOP + 2 * _FACTOR + 1  # of the table of one class of |N|
_BIN = OCTAVE // 2  # of distance / b, for the correction of the curve
_CLASSES = 4  # |N| = 0, 1, 2, or more
GUESS = OCTAVE // 4  # one step of the first guess of b
_INDEX = np.arange(_SIZE)
_TILE = 1 << 15  # elements handled at a time


@dataclass(frozen=True)
class Known:
    """What both sides know of values int32[d].

    `fall` and `rise` uint32[d] are the distances to -1 and to 1 in units of 2**-32, `held` int32[d] the vector N that
    both have, which counts in whole 2**`level`. None: not known, but for a `rise` None beside a `fall`: ``~fall``.
    """

    spans: Sequence[Span]
    fall: U32 | None
    rise: U32 | None
    held: I32 | None
    level: int = 0

    def distances(self, at: slice | I64) -> tuple[U32, U32] | None:
        """`fall` and `rise` at some places."""
        if self.fall is None:
            return None
        fall = self.fall[at]
        return fall, ~fall if self.rise is None else self.rise[at]

    def magnitudes(self, at: slice) -> U32 | None:
        """|N| at some places, in whole 2**`level`; that of -2**31 has no int32."""
        return None if self.held is None else np.abs(self.held[at]).view(np.uint32) >> np.uint32(self.level)

    @property
    def d(self) -> int:
        """The number of values."""
        return self.spans[-1][0].stop if self.spans else 0


class Model:
    """The factors, the curve, and what is known of the elements."""

    def __init__(self, known: Known) -> None:
        self.known, self.d = known, known.d
        _check(known)
        self.dithered = known.fall is not None
        self.base = np.full(self.d, _TOP + _OFFSET, np.int16)
        for s in tiles(self.d):
            if (distances := known.distances(s)) is not None:
                self.base[s] = log(np.minimum(*distances)) + np.int16(_OFFSET)
            if (held := known.magnitudes(s)) is not None:
                self.base[s] += np.minimum(held, np.uint32(_CLASSES - 1)).astype(np.int16) * np.int16(_SIZE)
        self.tensors = [_Tensor.of(*span, known) for span in known.spans if span[1] * span[2]]
        self.curve = _curve(self.dithered)
        self.bin_weight = np.full(len(self.curve) // _BIN, 8.0)
        self.own = np.zeros(_CLASSES, np.int64)
        self.own_weight = np.full(_CLASSES, 8.0)

    def guess(self, members: int) -> int:
        """The first guess of b with which about so many members are expected."""
        counts = np.bincount(self.base[::5] - self.scales()[::5], minlength=_CLASSES * _SIZE) * 5
        flat = counts.reshape(_CLASSES, _SIZE).sum(axis=0)
        table = chance(self.hazards())[self.grid()[0]] * 2.0**-24
        steps = range((HIGHEST - LOWEST) // GUESS + 1)
        # A larger b moves every index down.
        expected = [flat[s:] @ table[: len(table) - s] for s in (LOWEST + GUESS * g for g in steps)]
        return int(np.argmin(np.abs(np.log((np.array(expected) + 0.5) / members))))

    def places(self, guess: int, exchange: Exchange, given: I64) -> I64:
        """Where the values are not 0, int64[n]; a writer gives it."""
        for tensor in self.tensors:
            tensor.factor = LOWEST + GUESS * guess
        found, part = [], (given % _PERIOD).astype(np.uint8)
        for low, high in pairwise(_PASSES):
            grid, hazards = self.grid(), self.hazards()
            own = given[(part >= low) & (part < high)]
            index, before = self.indices(low, high, _table(hazards, grid))
            mine = exchange(before, own // _PERIOD * (high - low) + own % _PERIOD - low)
            del before, own  # the largest arrays of a pass
            here = mine // (high - low) * _PERIOD + mine % (high - low) + low
            found.append(here)
            if high < _PERIOD:
                self.learn(low, high, index, grid, _table(chance(hazards) >> 4, grid), mine, here)
        places = np.concatenate(found)
        places.sort()
        return places

    def indices(self, low: int, high: int, table: U32) -> tuple[I16, I64]:
        """Of a pass the elements' indices into the curve, int16[n], and by `table` the hazard before each of them."""
        compiled = loops(__name__)
        if compiled is None or not self.tensors:
            index = _part(self.base, low, high)
            index -= _part(self.scales(), low, high)
            return index, ends(looked_up(table, index))
        found: tuple[I16, I64] = compiled.indices(self.base, *self._laid_out(), low, high, _PERIOD, table)
        return found

    def expected(self, low: int, high: int, index: I16, table: U32) -> tuple[list[tuple[I64, I64]], I64]:
        """The members that `table` expects in a pass, in units of 2**-20: by each tensor's rows and columns; and how
        many elements have each index."""
        compiled = loops(__name__)
        if compiled is None or not self.tensors:
            due = looked_up(table, index)
            before = ends(due)
            parts = [tensor.sums(due, before, low, high) for tensor in self.tensors]
            return parts, np.bincount(index, minlength=_CLASSES * _SIZE)
        laid, size = self._laid_out(), _CLASSES * _SIZE
        rows, columns, counts = compiled.expected(index, *laid, low, high, _PERIOD, table, size)
        by_row, by_column = (
            np.split(f, np.cumsum(n)[:-1]) for f, n in ((rows, laid[0][:, 2]), (columns, laid[0][:, 3]))
        )
        return list(zip(by_row, by_column, strict=True)), counts

    def _laid_out(self) -> tuple[I64, I64, I64]:
        """The tensors for compiled loops: where each begins and ends, its rows and columns; all factors end to end."""
        shapes = [(t.where.start, t.where.stop, len(t.row), len(t.column)) for t in self.tensors]
        rows = np.concatenate([t.row + t.factor for t in self.tensors])
        return np.array(shapes, np.int64), rows, np.concatenate([t.column for t in self.tensors])

    def scales(self) -> I16:
        """The logarithm of b of every element, in units of 2**-24, int16[d]."""
        out = np.empty(self.d, np.int16)
        for tensor in self.tensors:
            row, column = (tensor.row + tensor.factor).astype(np.int16), tensor.column.astype(np.int16)
            block = out[tensor.where].reshape(-1, max(len(column), 1))
            np.add(row[:, None], column, out=block)
        return out

    def scales_at(self, places: I64) -> I64:
        """:meth:`scales` at some sorted places only, int64[n]."""
        out = np.empty(len(places), np.int64)
        for tensor in self.tensors:
            mine = slice(*np.searchsorted(places, (tensor.where.start, tensor.where.stop)))
            here = places[mine] - tensor.where.start
            columns = len(tensor.column)
            out[mine] = (
                tensor.factor
                + tensor.row[np.minimum(here // columns, len(tensor.row) - 1)]
                + tensor.column[here % columns]
            )
        return out

    def hazards(self) -> I64:
        """The curve in units of 2**-20, within what the coder takes."""
        limited: I64 = _within(np.floor(self.curve * 2.0**UNIT), LEAST, MOST).astype(np.int64)
        return limited

    def grid(self) -> I64:
        """The place on the curve of a class of |N| and an index that lacks the class's ``_SIZE``, int64[4, _SIZE]."""
        steps: I64 = _within(_INDEX - (_OFFSET - _DEEP) - self.own[:, None], 0, len(self.curve) - 1)
        return steps

    def learn(self, low: int, high: int, index: I16, grid: I64, chances: U32, mine: I64, here: I64) -> None:
        """Correct the factors by a pass: `mine` are the members' numbers in the pass, `here` their positions.

        `grid` was that of the pass, and `chances` are those of each index, in units of 2**-20.
        """
        parts, due = self.expected(low, high, index, chances)
        for tensor, (rows, columns) in zip(self.tensors, parts, strict=True):
            members = slice(*np.searchsorted(here, (tensor.where.start, tensor.where.stop)))
            tensor.learn(here[members] - tensor.where.start, rows, columns)
        total = (len(mine) + 4.0) / (int(sum(rows.sum() for rows, _ in parts)) * 2.0**-UNIT + 4.0)
        due *= chances
        due = due.reshape(_CLASSES, _SIZE)
        bins, found = grid.reshape(-1) // _BIN, index[mine].astype(np.int64)
        seen = np.bincount(bins[found], minlength=len(self.bin_weight))
        awaited = np.bincount(bins, due.reshape(-1), len(seen))  # sums of whole numbers, so exact
        ratio = (seen + self.bin_weight) / (awaited * 2.0**-UNIT * total + self.bin_weight)
        self.curve = self.curve * np.repeat(ratio, _BIN)
        self.bin_weight += seen
        seen = np.bincount(found // _SIZE, minlength=_CLASSES)
        self.own = _corrected(self.own, seen, due.sum(axis=1) * 2.0**-UNIT * total, self.own_weight)
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
    def of(where: slice, rows: int, columns: int, known: Known) -> _Tensor:
        if columns == 1:  # a factor of each row would be one of each element
            rows = 1
        sums = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
        for some in tiles(rows, columns) if columns > 1 else ():
            held = known.magnitudes(slice(where.start + some.start * columns, where.start + some.stop * columns))
            if held is not None:
                moved = held.reshape(-1, columns)
                most = int(moved.max(initial=0))
                sums[0][some] = _sum(moved, 1, most)
                sums[1][:] += _sum(moved, 0, most)
        row, column = (_corrected(np.zeros(len(x), np.int64), x, x.sum() / max(len(x), 1), 2.0) for x in sums)
        row_weight, column_weight = (_within(x.astype(np.float64), 2.0, 8.0) for x in sums)
        return _Tensor(where, row, column, row_weight, column_weight)

    def sums(self, due: U32, before: I64, low: int, high: int) -> tuple[I64, I64]:
        """What is due in each row and column in a pass, int64[rows] and int64[columns].

        `due` is that of each element of the pass, and `before` that before it.
        """
        rows, columns = len(self.row), len(self.column)
        marks = self.where.start + np.arange(rows + 1) * ((self.where.stop - self.where.start) // max(rows, 1))
        by_row = np.diff(before[marks // _PERIOD * (high - low) + _within(marks % _PERIOD - low, 0, high - low)])
        if columns == 1:
            return by_row, by_row
        by_column = np.zeros(columns, np.int64)
        for some in tiles(rows, columns):
            here = self.where.start + some.start * columns, self.where.start + some.stop * columns
            by_column += _sum(_spread(due, *here, low, high).reshape(-1, columns), 0, 1 << UNIT)
        return by_row, by_column

    def learn(self, members: I64, rows: I64, columns: I64) -> None:
        """Correct the factors by a pass with `members` among the tensor's elements.

        Those expected are `rows`, int64[rows], and `columns`, int64[columns], in units of 2**-20.
        """
        ratio = (len(members) + self.weight) / (int(rows.sum()) * 2.0**-UNIT + self.weight)
        self.factor = min(max(self.factor + int(_log2(np.float64(ratio))), LOWEST), HIGHEST)
        self.weight += len(members)
        wide = len(columns)
        if wide > 1:
            seen = np.bincount(members // wide, minlength=len(rows))
            self.row = _corrected(self.row, seen, rows * 2.0**-UNIT * ratio, self.row_weight)
            self.row_weight += seen
            seen = np.bincount(members % wide, minlength=wide)
            self.column = _corrected(self.column, seen, columns * 2.0**-UNIT * ratio, self.column_weight)
            self.column_weight += seen


def tiles(rows: int, columns: int = 1) -> Iterator[slice]:
    """The rows of a tensor, or the elements of a vector, as many at a time as make a tile."""
    some = max(1, _TILE // columns)
    for low in range(0, rows, some):
        yield slice(low, min(low + some, rows))


def _sum(values: NDArray[Any], axis: int, most: int) -> I64:
    """The sums along an axis of numbers up to `most`; numpy adds 32 bits several times as fast as 64."""
    small = most * values.shape[axis] < 1 << 31
    sums: I64 = values.sum(axis=axis, dtype=values.dtype if small else np.int64).astype(np.int64)
    return sums


def _corrected(factors: I64, seen: NDArray[Any], due: NDArray[Any] | float, weights: F64 | float) -> I64:
    """Logarithms of factors, moved by the ratio of what was seen and what was due."""
    moved: I64 = _within(factors + _log2((seen + weights) / (due + weights)), -_FACTOR, _FACTOR)
    return moved


def _table(curve: I64, grid: I64) -> U32:
    """A curve of ``log(distance / b)`` by index ``_OFFSET + log + class * _SIZE``, where b lacks the class."""
    return curve.astype(np.uint32).take(grid.reshape(-1))


def _within(values: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """The values, none below `low` or above `high`. In a small array np.clip takes twice as long."""
    found: NDArray[Any] = np.minimum(np.maximum(values, low), high)
    return found


def _check(known: Known) -> None:
    end = 0
    for where, rows, columns in known.spans:
        if where.start != end or rows * columns != where.stop - where.start or where.step not in (None, 1):
            raise CodecError(f"span {where} of {rows} x {columns} does not follow the one before it, or has holes")
        end = where.stop
    for what, dtype in ((known.fall, np.uint32), (known.rise, np.uint32), (known.held, np.int32)):
        if what is not None and (what.shape != (end,) or what.dtype != dtype):
            raise CodecError(f"distances are uint32[{end}] and N is int32[{end}], not {what.dtype}{list(what.shape)}")


def log(distances: U32) -> I16:
    """32 log2(distance / 256), linear between powers of two, 0 for less than 1, int16[n]."""
    whole = np.right_shift(distances, np.uint32(8))
    np.maximum(whole, np.uint32(1), out=whole)
    exact = whole.astype(np.float32).view(np.uint32)  # 24 bits: nothing is rounded
    exact >>= np.uint32(18)
    exact -= np.uint32(127 * OCTAVE)
    logs: I16 = exact.astype(np.int16)
    return logs


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
    whole, wide = len(a) // _PERIOD, high - low
    rest = a[whole * _PERIOD :][low:high]
    out = np.empty(whole * wide + len(rest), a.dtype)
    out[: whole * wide].reshape(whole, wide)[:] = a[: whole * _PERIOD].reshape(whole, _PERIOD)[:, low:high]
    out[whole * wide :] = rest
    return out


def looked_up(table: U32, index: NDArray[Any]) -> U32:
    """The table's entries, uint32[n]. In tiles: numpy copies an index to int64."""
    out = np.empty(len(index), np.uint32)
    for s in tiles(len(index)):
        table.take(index[s], out=out[s], mode="wrap")
    return out


def _spread(part: U32, start: int, stop: int, low: int, high: int) -> U32:
    """The elements of a pass at their places, zeros elsewhere: those of `start` .. `stop` - 1."""
    first, wide = start // _PERIOD, high - low
    own = part[first * wide : -(-stop // _PERIOD) * wide]
    out = np.zeros((-(-stop // _PERIOD) - first, _PERIOD), np.uint32)
    whole = len(own) // wide
    out[:whole, low:high] = own[: whole * wide].reshape(whole, wide)
    if len(own) > whole * wide:
        out[whole, low : low + len(own) - whole * wide] = own[whole * wide :]
    return out.reshape(-1)[start - first * _PERIOD : stop - first * _PERIOD]
