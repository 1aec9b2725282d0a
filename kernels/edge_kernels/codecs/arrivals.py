"""Rare members of a list, each with its own probability, by interleaved rANS: one symbol per member, not per element.

Element i of a list has a *hazard* h[i], a whole number in units of 2**-20, and is a member with probability
``1 - exp(-h)``. With the hazards laid end to end, members are arrivals of a Poisson process. From an element a, the
symbol is the next member j within a window of hazard 4, or none. Its interval follows from the hazards between a and j
and a fixed table of ``1 - exp(-t)``. So the length of the code is that of coding element by element.

A list is cut into one stretch per lane, of equal hazard, and a step decodes one symbol of every lane. Several lists
follow one another in the same lanes. The states must end as they began, which detects damage and wrong hazards.
docs/codecs.md specifies the bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError
from edge_kernels.compiled import loops

I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]

UNIT = 20  # log2 of hazard 1
MOST = 4 << UNIT  # the largest hazard, and the length of a window
LEAST = 4  # the smallest hazard: every element of a window has a frequency of at least 1
MAX_LANES = 1 << 12
MOST_STEPS = 1 << 12  # of all lanes together
FEW = 16  # lanes, whose symbols Python reads sooner one by one than numpy a step of all
SCALE = 24  # log2 of the sum of the frequencies; also the bits of a word, and of the smallest state

_TILE = 1 << 16  # elements or members handled at a time
_CELL = 18  # log2 of the hazard between two entries of the table
_LOW = 1 << SCALE


def _table() -> I64:
    """``2**24 * (1 - exp(-k / 4))`` for k = 0 .. 16, from ``exp(-1/4) = 3344923893 / 2**32``, each rounded down."""
    rest, out = 1 << 56, []
    for _ in range(17):
        out.append(_LOW - (rest >> 32))
        rest = rest * 3344923893 >> 32
    return np.array(out, np.int64)


_BELOW = _table()
_INSIDE = np.append(np.diff(_BELOW), 0)
_START = np.arange(17, dtype=np.int64) << _CELL
_OFFSET = (_BELOW << _CELL) - _START * _INSIDE  # so that chance(t) is t * _INSIDE + _OFFSET, in cells
# The inverse, by the number of entries at or below a slot, of which there is at least one.
_DIVISOR = np.append(1, np.maximum(_INSIDE, 1))
_ROUND = np.append(0, ((1 - _BELOW) << _CELL) + (_START + 1) * _DIVISOR[1:] - 1)
_NEXT = np.array([[0], [1]])
_NUMBERS = tuple(table.tolist() for table in (_BELOW, _INSIDE, _OFFSET, _ROUND, _DIVISOR))


def most_steps(size: int, lanes: int) -> int:
    """The most steps of a payload of `size` bytes, which bounds the work of a reader: 4 symbols for each bit."""
    return min(256 + 32 * size // lanes, MOST_STEPS)


def chance(hazards: I64) -> I64:
    """``2**24 * (1 - exp(-t))`` of hazards 0 .. MOST, linear between the entries of the table, rounded down."""
    cell = hazards >> _CELL
    out: I64 = _INSIDE.take(cell)
    out *= hazards
    out += _OFFSET.take(cell)
    out >>= _CELL
    return out


def hazard(chances: I64) -> U32:
    """The hazard of ``chance / 2**24``, the inverse of :func:`chance` up to rounding, at least LEAST."""
    cell = np.minimum(_BELOW.searchsorted(chances, "right") - 1, 15)
    inside = ((chances - _BELOW[cell]) << _CELL) // _INSIDE[cell]
    found = np.minimum(np.maximum((cell << _CELL) + inside, LEAST), MOST)  # np.clip takes twice as long
    hazards: U32 = found.astype(np.uint32)
    return hazards


def ends(hazards: U32) -> I64:
    """The hazard before each element, and at last that of the whole list, int64[n + 1]."""
    out = np.empty(len(hazards) + 1, np.int64)
    out[0] = 0
    for low in range(0, len(hazards), _TILE):  # numpy copies what it sums up to int64
        here = out[low + 1 : low + 1 + _TILE]
        np.cumsum(hazards[low : low + _TILE], out=here)
        here += out[low]
    return out


def _cuts(before: I64, lanes: int) -> I64:
    """The first element of each lane's stretch, and the end of the list, int64[lanes + 1]."""
    marks = np.arange(lanes + 1, dtype=np.int64) * (int(before[-1]) // lanes)
    cuts: I64 = before.searchsorted(marks)
    cuts[-1] = len(before) - 1
    return cuts


def _symbols(before: I64, cuts: I64, members: I64) -> tuple[U32, U32]:
    """The starts and frequencies of some lanes' symbols by step and lane; `members` are those of their stretches."""
    lanes, n = len(cuts) - 1, len(before) - 1
    first = members.searchsorted(cuts)
    lane = np.repeat(np.arange(lanes), np.diff(first))
    # A gap begins at each stretch and after each member; `until` is the member that ends it, n if none does.
    at, end, until = (np.empty(lanes + len(members), np.int64) for _ in range(3))
    heads, others = first[:-1] + np.arange(lanes), np.arange(len(members)) + lane + 1
    at[heads], at[others] = cuts[:-1], members + 1
    end[heads], end[others] = cuts[1:], cuts[lane + 1]
    until.fill(n)
    until[others - 1] = members
    gaps = (at < end).nonzero()[0]
    gap_of, starts, freqs = [], [], []  # of each symbol
    while len(gaps):  # one symbol of each gap that is left: its member, or the end of a window
        low, here, stop = at[gaps], before[at[gaps]], end[gaps]
        window = np.minimum(before.searchsorted(here + MOST, "right") - 1, stop)
        hit = until[gaps] < window
        low = np.where(hit, until[gaps], window)
        start = chance(before[low] - here)
        gap_of.append(gaps)
        starts.append(start)
        freqs.append(np.where(hit, chance(before[np.where(hit, low + 1, low)] - here), _LOW) - start)
        at[gaps] = low
        gaps = gaps[~hit & (window < stop)]
    gap = np.concatenate([*gap_of, np.zeros(0, np.int64)])
    order = gap.argsort(kind="stable")
    lane = np.searchsorted(heads, gap[order], "right") - 1
    step = np.arange(len(gap)) - np.searchsorted(lane, np.arange(lanes))[lane]
    shape = int(step.max(initial=-1)) + 1, lanes
    by_step = np.zeros(shape, np.uint32), np.full(shape, _LOW, np.uint32)
    for out, parts in zip(by_step, (starts, freqs), strict=True):
        out[step, lane] = np.concatenate([*parts, np.zeros(0, np.int64)])[order]
    return by_step


class Writer:
    """Collects lists, and then codes them backwards."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._starts: list[U32] = []  # uint32[steps, lanes] of each list: half of what int64 takes
        self._freqs: list[U32] = []

    def steps(self) -> int:
        """The steps so far."""
        return sum(map(len, self._starts))

    def code(self, before: I64, members: I64) -> I64:
        """Add the sorted members of a list whose hazards are `before`; returns the members."""
        lanes = self._lanes
        cuts = _cuts(before, lanes)
        first = members.searchsorted(cuts)  # the first member of each stretch
        some = max(1, lanes * _TILE // max(1, len(members)))  # lanes handled at a time, to hold less
        parts = [
            _symbols(before, cuts[low : low + some + 1], members[first[low] : first[min(low + some, lanes)]])
            for low in range(0, lanes, some)
        ]
        shape = max(len(starts) for starts, _ in parts), lanes
        self._starts.append(np.zeros(shape, np.uint32))
        self._freqs.append(np.full(shape, _LOW, np.uint32))  # a lane without a symbol keeps its state
        for low, (starts, freqs) in zip(range(0, lanes, some), parts, strict=True):
            self._starts[-1][: len(starts), low : low + some] = starts
            self._freqs[-1][: len(freqs), low : low + some] = freqs
        return members

    def bytes(self) -> bytes:
        """The states, then the words."""
        x = np.full(self._lanes, _LOW, np.int64)
        words, compiled = list[U32](), loops(__name__)
        for starts, freqs in zip(reversed(self._starts), reversed(self._freqs), strict=True):
            if compiled is not None:
                words.append(compiled.write(starts, freqs, x))
                continue
            for step in range(len(starts) - 1, -1, -1):
                freq = freqs[step].astype(np.int64)
                over = (x >= freq << SCALE).nonzero()[0]
                if len(over):
                    full = x[over]
                    words.append((full & (_LOW - 1)).astype(np.uint32))
                    x[over] = full >> SCALE
                quotient = x // freq
                quotient *= _LOW - freq
                x += quotient
                x += starts[step]
        words.reverse()
        more = (x >= 1 << 32).astype(np.uint8) + (x >= 1 << 40)
        widths = np.packbits((more[:, None] >> np.arange(2) & 1).reshape(-1).astype(np.uint8), bitorder="little")
        kept = np.arange(6) < 4 + more[:, None]
        states = x.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :6][kept]
        flat = np.concatenate([*words, np.zeros(0, "<u4")], dtype="<u4").view(np.uint8).reshape(-1, 4)[:, :3]
        return widths.tobytes() + states.tobytes() + flat.tobytes()


class Reader:
    """Reads lists in the order in which they were added. Every fault is a CodecError."""

    def __init__(self, data: bytes, lanes: int) -> None:
        head = -(-lanes // 4)
        raw = np.frombuffer(data, np.uint8)
        if len(raw) < head + 4 * lanes:
            raise CodecError(f"the states of {lanes} lanes do not fit in {len(raw)} bytes; the payload is truncated")
        bits = np.unpackbits(raw[:head], bitorder="little")
        more = bits[0 : 2 * lanes : 2] + 2 * bits[1 : 2 * lanes : 2]
        kept = np.arange(6) < 4 + more[:, None]
        count = int(kept.sum())
        if (more > 2).any() or bits[2 * lanes :].any() or len(raw) < head + count or (len(raw) - head - count) % 3:
            raise CodecError("the states or words of the lanes are damaged")
        states = np.zeros((lanes, 8), np.uint8)
        states[:, :6][kept] = raw[head : head + count]
        self._x: I64 = states.view("<i8").reshape(-1).astype(np.int64)
        if ((self._x >> (8 * (3 + more.astype(np.int64)))) == 0).any():
            raise CodecError("the state of a lane is shorter than its width; the payload is damaged")
        words = np.zeros(((len(raw) - head - count) // 3, 4), np.uint8)
        words[:, :3] = raw[head + count :].reshape(-1, 3)
        self._words: I64 = words.view("<u4").reshape(-1).astype(np.int64)
        self._used = self._steps = 0
        self._most = most_steps(len(data), lanes)

    def code(self, before: I64, _: I64 | None = None) -> I64:
        """The sorted members of the next list, whose hazards are `before`."""
        x, words = self._x, self._words
        cuts = _cuts(before, len(x))
        if (compiled := loops(__name__)) is not None:
            return self._compiled(compiled, before, cuts)
        if len(x) <= FEW:
            return self._one_by_one(before, cuts)
        at, end, after = cuts[:-1], cuts[1:], before[1:]
        here = before[at]
        lows, hits = [], []
        while np.count_nonzero(at < end):
            self._steps += 1
            self._check()
            slot = x & (_LOW - 1)
            # The least hazard t with chance(t) > slot, by which the next member comes, or one beyond the window.
            cell = _BELOW.searchsorted(slot, "right")
            t = slot << _CELL
            t += _ROUND.take(cell)
            t //= _DIVISOR.take(cell)
            np.minimum(t, MOST + 1, out=t)
            t += here
            low = after.searchsorted(t)  # the next member, if the window has one
            np.minimum(low, end, out=low)
            sums = before.take(low + _NEXT, mode="clip")
            sums -= here
            hit = sums[1] <= MOST
            hit &= low < end
            at = low + hit
            here = before[at]
            start, stop = chance(np.minimum(sums, MOST))
            x >>= SCALE
            x *= np.where(hit, stop, _LOW) - start
            x += slot
            x -= start
            under = (x < _LOW).nonzero()[0]
            if len(under):
                self._used += len(under)
                self._check()
                x[under] = (x[under] << SCALE) | words[self._used - len(under) : self._used]
            lows.append(low)
            hits.append(hit)
        if not lows:
            return np.zeros(0, np.int64)
        members: I64 = np.concatenate(lows)[np.concatenate(hits)]
        members.sort()
        return members

    def _one_by_one(self, before: I64, cuts: I64) -> I64:
        """The same, a symbol at a time."""
        sums, after = before.data, before[1:].data  # their elements are Python's numbers
        below, inside, offset, round_, divisor = _NUMBERS
        at, ends_, states, members = cuts[:-1].tolist(), cuts[1:].tolist(), self._x.tolist(), list[int]()
        while at != ends_:
            self._steps += 1
            self._check()
            for lane, end in enumerate(ends_):
                if at[lane] == end:
                    continue
                state, here = states[lane], sums[at[lane]]
                slot = state & (_LOW - 1)
                cell = bisect_right(below, slot)
                t = min(((slot << _CELL) + round_[cell]) // divisor[cell], MOST + 1)
                low = at[lane] = bisect_left(after, here + t, at[lane], end)
                first, beyond = sums[low] - here, _LOW
                start = first * inside[first >> _CELL] + offset[first >> _CELL] >> _CELL
                if low < end and (last := after[low] - here) <= MOST:
                    members.append(low)
                    at[lane] = low + 1
                    beyond = last * inside[last >> _CELL] + offset[last >> _CELL] >> _CELL
                state = (state >> SCALE) * (beyond - start) + slot - start
                if state < _LOW:
                    self._used += 1
                    self._check()
                    state = state << SCALE | int(self._words[self._used - 1])
                states[lane] = state
        self._x[:] = states
        return np.array(sorted(members), np.int64)

    def _compiled(self, compiled: Any, before: I64, cuts: I64) -> I64:
        """The same by the compiled loop."""
        left = self._most - self._steps
        tables = _BELOW, _INSIDE, _OFFSET
        found, used, steps = compiled.read(before, cuts, self._x, self._words[self._used :], left, *tables, MOST)
        self._used, self._steps = self._used + used, self._steps + steps
        self._check()
        members: I64 = np.sort(found)
        return members

    def _check(self) -> None:
        """Raise CodecError when a list took more steps or words than there are."""
        if self._steps > self._most:
            raise CodecError(f"the payload needs more than {self._most} steps; it is damaged")
        if self._used > len(self._words):
            raise CodecError("the payload ends within its coded symbols; it is truncated or damaged")

    def end(self) -> None:
        """Raise CodecError unless all was read and the states are those that the writer began with."""
        if self._used != len(self._words) or (self._x != _LOW).any():
            raise CodecError("the states do not end as they began: the payload is damaged, or the two sides differ")
