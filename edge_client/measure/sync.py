"""A sync pulse: bursts of load in a known pattern, found again in the recording of a meter with its own clock.

The pattern is Barker's of length 13, whose correlation with itself has one peak. `emit` plays it on the processor;
`locate` finds where a recording has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge_client.errors import MeterError
from edge_client.measure.energy import F64, Alignment

BARKER = np.array([1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1], np.float64)
CHIP = 0.4  # seconds a bit of the pattern takes
GRID = 20  # points of the comparison in one bit
CLEAR = 0.6  # correlation below which a pulse is not recognised
SLACK, DRIFT = 1.0, 0.01  # seconds, and share of the time between two pulses, by which a meter's clock may be off
RIVAL = 0.85  # of the best pair's likeness, from which another pair might be it


@dataclass(frozen=True)
class Pulse:
    """A pulse that was emitted: when its first bit began, a time of `time.monotonic`, and seconds a bit."""

    start: float
    chip: float = CHIP

    @property
    def seconds(self) -> float:
        """How long the whole pattern took."""
        return len(BARKER) * self.chip


def load(seconds: float, threads: int = 1) -> None:
    """Keep `threads` processors busy."""
    end = time.monotonic() + seconds

    def spin() -> None:
        matrix = np.ones((192, 192), np.float32)
        while time.monotonic() < end:
            matrix @ matrix  # numpy releases the interpreter's lock meanwhile

    others = [threading.Thread(target=spin, daemon=True) for _ in range(threads - 1)]
    for other in others:
        other.start()
    spin()
    for other in others:
        other.join()


def emit(busy: Callable[[float], None] = load, chip: float = CHIP) -> Pulse:
    """Play the pattern: `busy` for a one, rest for a zero. Bits begin on time whatever the one before took."""
    start = time.monotonic()
    for i, bit in enumerate(BARKER):
        left = start + (i + 1) * chip - time.monotonic()
        if left > 0:
            (busy if bit else time.sleep)(left)
    return Pulse(start, chip)


def locate(times: F64, watts: F64, pulse: Pulse) -> tuple[F64, F64]:
    """Every place on the recording's own clock where the pulse may have begun, and how like it. Raises MeterError."""
    step = pulse.chip / GRID
    grid = np.arange(times[0], times[-1], step)
    pattern = np.repeat(BARKER - BARKER.mean(), GRID)
    n = len(pattern)
    if len(grid) < n:
        raise MeterError(
            f"the recording has {times[-1] - times[0]:.1f} s, and a sync pulse takes {pulse.seconds:.1f} s; record "
            "from before the measurement until after it"
        )
    power = np.interp(grid, times, watts)
    total, square = (np.concatenate([[0.0], np.cumsum(v)]) for v in (power - power.mean(), (power - power.mean()) ** 2))
    spread = np.sqrt(np.maximum(square[n:] - square[:-n] - (total[n:] - total[:-n]) ** 2 / n, 0))
    # Through the Fourier transform: a recording of an hour has 200,000 points.
    size = len(power) + n
    product = np.fft.irfft(
        np.fft.rfft(power - power.mean(), size) * np.conj(np.fft.rfft(pattern, size)), size
    )[: len(power) - n + 1]  # fmt: skip
    floor = 1e-9 + 1e-6 * float(np.max(spread))
    likeness = product / (np.maximum(spread, floor) * float(np.linalg.norm(pattern)))
    edged = np.concatenate([[-1.0], likeness, [-1.0]])
    before, peak, after = edged[:-2], edged[1:-1], edged[2:]
    at = np.flatnonzero((peak >= CLEAR) & (peak >= before) & (peak > after))
    if not len(at):
        raise MeterError(
            f"no sync pulse in the recording: no place is more than {likeness.max():.2f} like it, below {CLEAR}; use a "
            f"meter of more than {2 / pulse.chip:.0f} samples a second, and let nothing else run"
        )
    # The peak between grid points, by a parabola.
    bend = before[at] - 2 * peak[at] + after[at]
    shift = np.clip((before[at] - after[at]) / (2 * bend), -0.5, 0.5)
    inner = (at > 0) & (at < len(likeness) - 1)
    return grid[at] + np.where(inner, shift, 0.0) * step, likeness[at]


def aligned(times: F64, watts: F64, first: Pulse, last: Pulse) -> Alignment:
    """The recording's clock on this machine's, by a pulse before the measurement and one after.

    The two are known by the time between them. Raises MeterError when no pair, or more than one, has that.
    """
    places, likeness = locate(times, watts, first)
    span = last.start - first.start
    apart = places[None, :] - places[:, None]
    like = np.where(np.abs(apart - span) <= SLACK + DRIFT * span, likeness[None, :] + likeness[:, None], 0.0)
    i, j = np.unravel_index(int(np.argmax(like)), like.shape)
    if like[i, j] <= 0:
        raise MeterError(
            f"the recording has sync pulses, and no two that are {span:.1f} s apart; record from before the "
            "measurement until after it"
        )
    other = np.abs(places - places[i])[:, None] > first.chip
    other = other | (np.abs(places - places[j])[None, :] > first.chip)
    if np.any(other & (like >= RIVAL * like[i, j])):
        raise MeterError(
            f"the recording has several pairs of sync pulses {span:.1f} s apart; record each measurement in a file of "
            "its own"
        )
    # What is left is how exactly a peak can be placed, about a grid point.
    return Alignment(float(places[i]), first.start, span / float(places[j] - places[i]), first.chip / GRID)
