"""What both sides of Lattice compute alike: which parameters lie on the grid, its steps, the dither, past changes.

The weights are ``w0 + step / K / 2**MIDDLE * count``: an integer count for each trainable parameter, one step for each
tensor, K the federation's cohort. A move at *level* j adds 2**j to a count, so at MIDDLE it moves the weight by
step / K. Everything here is integers, or float64 with nothing but +, -, *, / and square roots, so that machines agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from edge_kernels import counter
from edge_kernels.lattice_model import Span
from numpy.typing import NDArray

from edge_client.blocks import Blocks, rest
from edge_client.bundle import F32, Manifest
from edge_client.methods.shared.averaging import BLOCK
from edge_client.task import Assignment, Course

Counts = NDArray[np.int32]
U32 = NDArray[np.uint32]

FINEST = 0.02  # of the step of a tensor that moves no more than the average
SMALLEST = 1e-12  # rms of a network that does not move at all: its steps must not be 0
HISTORY = 16  # rounds whose changes the server keeps for late devices
MIDDLE = 8  # the level of the first round's moves
HIGHEST = 16  # the level of the coarsest cells
MOST = 1 << 30  # of a count, so that no sum of a few of them leaves 32 bits


def trainable(manifest: Manifest) -> Blocks:
    """The parameters on the grid: every tensor that is not frozen."""
    return rest(manifest)


def spans(part: Blocks) -> list[Span]:
    """The tensors of the grid as matrices of axis 0 by the rest, as the coder takes them."""
    shapes = [(b.shape[0] if b.shape else 1, b.size) for b in part.blocks]
    return [(place, rows, size // rows) for place, (rows, size) in zip(part.places, shapes, strict=True)]


def rms(part: Blocks, change: F32) -> F32:
    """The root of the mean square of each tensor's change, float32[tensors]."""
    squares = [float(np.mean(np.square(change[p], dtype=np.float64))) for p in part.places]
    each: F32 = np.sqrt(np.array(squares)).astype(np.float32)
    return each


def steps(part: Blocks, each: F32, quantum: float, cohort: int) -> F32:
    """The step of each tensor from its rms: finer for a tensor that moves more than the average parameter."""
    square = math.fsum(b.size * float(r) ** 2 for b, r in zip(part.blocks, each, strict=True)) / max(1, part.size)
    average = max(math.sqrt(square), SMALLEST)
    shares = [min(1.0, max(FINEST, average / max(float(r), SMALLEST))) for r in each]
    return np.array([quantum * cohort * average * share for share in shares], np.float32)


def spread(part: Blocks, each: F32) -> F32:
    """A value for each tensor as one for each parameter of the grid."""
    return np.repeat(each, [b.size for b in part.blocks])


# --- dither


def _stream(course: Course, round_: int) -> int:
    return counter.key(course.seed, "dither", round_)


def _high(stream: int, count: int, start: int) -> U32:
    """The high halves of a stretch of the stream."""
    high: U32 = (counter.uint64(stream, count, start) >> np.uint64(32)).astype(np.uint32)
    return high


def _drawn(stream: int, size: int) -> U32:
    """The uniform numbers of a round that all its devices share, in units of 2**-32."""
    drawn = np.empty(size, np.uint32)
    for s in _pieces(0, size):
        drawn[s] = _high(stream, s.stop - s.start, s.start)
    return drawn


_kept = lru_cache(maxsize=1)(_drawn)


def dither(a: Assignment, size: int, keep: bool = False) -> U32:
    """A device's uniform numbers: the shared ones shifted by its place, so that a cohort's are stratified.

    `keep` keeps the shared ones: a coordinator needs them for each of its devices.
    """
    shared = (_kept if keep else _drawn)(_stream(a.course, a.round), size)
    shifted: U32 = shared + np.uint32((a.place << 32) // a.course.cohort)
    return shifted


def closeness(course: Course, rounds: Iterable[int], size: int) -> tuple[U32, U32]:
    """How near the numbers of a full cohort come to 0 and to 1 in any of the rounds, uint32[size] each."""
    streams, cohort = [_stream(course, round_) for round_ in rounds], np.uint32(course.cohort)
    fall, rise = np.empty(size, np.uint32), np.empty(size, np.uint32)
    for s in _pieces(0, size):
        count = s.stop - s.start
        least, most = np.full(count, 0xFFFFFFFF, np.uint32), np.zeros(count, np.uint32)
        for stream in streams:
            folded = _high(stream, count, s.start) * cohort  # modulo 2**32: the place drops out
            np.minimum(least, folded, out=least)
            np.maximum(most, folded, out=most)
        fall[s], rise[s] = least // cohort, ~most // cohort
    return fall, rise


def extra_levels(samples: int, mean: float) -> int:
    """Levels that a device's moves are above the round's: 1 for 16 to 32 times the mean samples, 2 up to 64 times, ...

    Otherwise these moves, which grow with the samples, would take more bytes than they are worth. `mean` is that of the
    weights that the server counted, and is rounded to the float32 that travels, so both sides agree.
    """
    return max(0, math.frexp(samples / float(np.float32(mean)))[1] - 4)


def moves(part: Blocks, change: F32, factors: NDArray[np.float64], dither: U32, most: int) -> Counts:
    """``floor(change * factor + dither)`` within +-`most`, a factor for each tensor; `dither` in units of 2**-32."""
    out = np.empty(part.size, np.int32)
    for s, _, factor in _blocks(part, factors):
        exact = np.multiply(change[s], factor, dtype=np.float64)  # numpy 1 would multiply float32 in float32
        exact += dither[s] * 2.0**-32
        np.floor(exact, out=exact)
        out[s] = np.minimum(np.maximum(exact, -most), most)
    return out


def add(part: Blocks, unit: F32, counts: Counts, parameters: F32) -> None:
    """Add ``unit * counts`` to parameters, with a unit for each tensor, in float64; they may become infinite."""
    with np.errstate(over="ignore"):
        for s, own, each in _blocks(part, unit.astype(np.float64)):
            parameters[own] = parameters[own] + each * counts[s]


def _blocks(part: Blocks, each: NDArray[np.float64]) -> Iterator[tuple[slice, slice, np.float64]]:
    """Pieces of every tensor: where they are in `part` and among the parameters, and the tensor's value."""
    for block, place, value in zip(part.blocks, part.places, each, strict=True):
        before = block.span.start - place.start
        for s in _pieces(place.start, place.stop):
            yield s, slice(before + s.start, before + s.stop), value


def _pieces(start: int, stop: int) -> Iterator[slice]:
    """Pieces that stay in the cache."""
    for low in range(start, stop, BLOCK):
        yield slice(low, min(low + BLOCK, stop))


@dataclass(frozen=True)
class History:
    """The changes of N in the last rounds: a round's `lengths` places uint32 and values int32, multiples of
    2**`levels`."""

    lengths: NDArray[np.int64]
    places: NDArray[np.uint32]
    values: Counts
    levels: NDArray[np.int64]

    def mean(self, counts: Counts, rounds: int) -> Counts:
        """The mean of the last `rounds` N, of which `counts` is the latest, as a multiple of 2^`fine(rounds)`."""
        level, back = self.fine(rounds), np.zeros(counts.size, np.int64)
        for past in range(1, rounds):
            back += np.subtract(counts, self.before(counts, past), dtype=np.int64)
        whole = (2 * back + (rounds << level)) // (2 * rounds << level) << level
        return (counts - whole).astype(np.int32)

    def fine(self, rounds: int) -> int:
        """The level of the mean of the last `rounds` N: quarters of their cells; halves would add noise."""
        return max(0, self.lowest(rounds) - 2)

    def lowest(self, rounds: int) -> int:
        """The lowest level of the last `rounds` changes; HIGHEST for 0 rounds."""
        return int(self.levels[len(self.levels) - rounds :].min(initial=HIGHEST))

    def before(self, counts: Counts, rounds: int) -> Counts:
        """N as it was `rounds` rounds ago."""
        first = int(self.lengths[: len(self.lengths) - rounds].sum())
        held: Counts = counts.copy()
        np.subtract.at(held, self.places[first:], self.values[first:])
        return held

    def then(self, change: Counts, level: int) -> History:
        """With one round more, and without those that are too old."""
        places = np.flatnonzero(change)
        old = max(0, len(self.lengths) + 1 - HISTORY)
        first = int(self.lengths[:old].sum())
        return History(
            np.append(self.lengths[old:], len(places)),
            np.append(self.places[first:], places.astype(np.uint32)),
            np.append(self.values[first:], change[places]),
            np.append(self.levels[old:], level),
        )
