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
            matrix @ matrix  # numpy lets go of the interpreter meanwhile

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


def locate(times: F64, watts: F64, pulse: Pulse, low: float | None = None, high: float | None = None) -> float:
    """Where on the recording's own clock the pulse began, searched between `low` and `high`. Raises MeterError."""
    low = times[0] if low is None else max(low, times[0])
    high = times[-1] if high is None else min(high, times[-1])
    step = pulse.chip / GRID
    grid = np.arange(low, high, step)
    pattern = np.repeat(BARKER - BARKER.mean(), GRID)
    n = len(pattern)
    if len(grid) < n:
        raise MeterError(
            f"the recording has {max(high - low, 0):.1f} s where a sync pulse of {pulse.seconds:.1f} s is searched; "
            "record from before the measurement until after it"
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
    at = int(np.argmax(likeness))
    if likeness[at] < CLEAR:
        raise MeterError(
            f"no sync pulse in the recording: the best place is {likeness[at]:.2f} like it, {CLEAR} is due; use a "
            f"meter of more than {2 / pulse.chip:.0f} samples a second, and let nothing else run"
        )
    shift = 0.0
    if 0 < at < len(likeness) - 1:  # the peak between grid points, by a parabola
        before, peak, after = likeness[at - 1 : at + 2]
        bend = before - 2 * peak + after
        shift = 0.0 if bend == 0 else float(np.clip((before - after) / (2 * bend), -0.5, 0.5))
    return float(grid[at] + shift * step)


def aligned(times: F64, watts: F64, first: Pulse, last: Pulse) -> Alignment:
    """The recording's clock on this machine's, by a pulse before the measurement and one after. Raises MeterError."""
    begin = locate(times, watts, first, high=float((times[0] + times[-1]) / 2) + first.seconds)
    expected = begin + last.start - first.start
    slack = 5.0 + 0.01 * (last.start - first.start)
    end = locate(times, watts, last, expected - slack, expected + slack + last.seconds)
    rate = (last.start - first.start) / (end - begin)
    # What is left is how exactly a peak can be placed, about a grid point.
    return Alignment(begin, first.start, rate, first.chip / GRID)
