"""Energy: what a meter is, what it records, and the joules of a window of time.

A meter is started and stopped; it gives a `Trace`: values at times of this machine's `time.monotonic`. Values are
watts, or joules of a counter that only rises. `joules` integrates a window by the trapezoid rule, `above_idle`
subtracts what the machine takes anyway. Each result has an error estimate and the number of lost samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import MeterError

F64 = NDArray[np.float64]
LATE = 1.5  # an interval of more periods than this has lost samples
REACH = 2.0  # periods that a window may begin before the first sample, or end after the last


@dataclass(frozen=True)
class Accuracy:
    """What a meter may be wrong by: `gain` as a share, `offset` in watts, `step` the resolution of a value."""

    gain: float = 0.0
    offset: float = 0.0
    step: float = 0.0


EXACT = Accuracy()


@dataclass(frozen=True)
class Trace:
    """A recording. `times` float64[n] rises, `values` float64[n] are watts ("W") or joules counted ("J").

    `period` is the intended time between two samples, `lost` counts samples that did not come, `clipped` those at the
    end of the meter's range, and `skew` is the error of the times in seconds.
    """

    times: F64
    values: F64
    unit: Literal["W", "J"]
    period: float
    accuracy: Accuracy = EXACT
    lost: int = 0
    clipped: int = 0
    skew: float = 0.0


class Meter(Protocol):
    """An energy meter that was found. `what` describes what it measures."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    def start(self) -> None:
        """Begin to record. Raises MeterError."""
        ...

    def stop(self) -> Trace:
        """End the recording; it has a sample at or after this call where the meter can give one. Raises MeterError."""
        ...


@dataclass(frozen=True)
class Energy:
    """Joules of a window of `seconds`. `scatter` (J) is the error of sampling, `accuracy` the meter's own."""

    joules: float
    seconds: float
    samples: int
    lost: int
    clipped: int
    scatter: float
    accuracy: Accuracy

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds

    @property
    def error(self) -> float:
        """The estimated error in joules, as a standard deviation."""
        return hypot(self.scatter, self.accuracy.gain * self.joules, self.accuracy.offset * self.seconds)


def joules(trace: Trace, start: float, end: float) -> Energy:
    """Energy from `start` to `end`, times of `time.monotonic`.

    Raises MeterError when the trace does not cover them, holds a value that is no number, or is of a counter that goes
    back.
    """
    _check_covers(trace, start, end)
    times, values = trace.times, trace.values
    if trace.unit == "J":
        times, values = _prolonged(times, values, start, end)
    low, high = np.searchsorted(times, [start, end], "right")
    inside = times[low:high][times[low:high] < end]
    t = np.concatenate([[start], inside, [end]])
    v = np.interp(t, times, values)
    # The intervals that the window touches, whole: their ends are samples.
    around = slice(max(low - 1, 0), min(high + 1, len(times)))
    found = _of_power(t, v) if trace.unit == "W" else _of_counter(times[around], values[around], v)
    if not isfinite(found.joules):
        raise MeterError("the meter's recording has a value that is no number; check its wiring, and measure again")
    late = found.gaps > LATE * trace.period
    changes = np.where(late, np.maximum(found.changes, np.std(found.power)), found.changes)
    # A change of power somewhere within a gap moves the trapezoid by up to half of it: uniform, so /sqrt(12). So does
    # the resolution of a value.
    sampling = float(np.sqrt(np.sum((changes * found.gaps) ** 2) / 12))
    rounding = trace.accuracy.step * found.values / 12**0.5
    edges = trace.skew * float(np.ptp(found.power))
    return Energy(
        found.joules, end - start, int(high - low), lost(times[around], trace.period), trace.clipped,
        hypot(sampling, rounding, edges), trace.accuracy,
    )  # fmt: skip


@dataclass(frozen=True)
class _Sum:
    """The joules of a window, and what may be wrong with them."""

    joules: float
    values: float
    """By how much they move if all values move by one, each its own way."""
    power: F64
    """Watts, wherever the samples show them."""
    gaps: F64
    """Seconds between samples, in which a change of power may be anywhere."""
    changes: F64
    """Watts by which it changed in each gap."""


def _of_power(times: F64, watts: F64) -> _Sum:
    gaps = np.diff(times)
    total = float(np.dot(gaps, (watts[1:] + watts[:-1]) / 2))
    return _Sum(total, float(np.linalg.norm(gaps)), watts, gaps, np.abs(np.diff(watts)))


def _of_counter(times: F64, counted: F64, window: F64) -> _Sum:
    """From a counter's readings around the window, and those within. Only the window's two ends are uncertain."""
    gaps = np.diff(times)
    power = np.diff(counted) / gaps
    if np.any(power < 0):
        raise MeterError("the meter's counter goes back: it was reset, or began again at its end; measure again")
    return _Sum(float(window[-1] - window[0]), 1.0, power, gaps[[0, -1]], np.full(2, np.ptp(power)))


def _check_covers(trace: Trace, start: float, end: float) -> None:
    """Raise MeterError unless the trace covers nearly all of the window from `start` to `end`."""
    times, reach = trace.times, REACH * trace.period + trace.skew
    if not end > start:
        raise MeterError(f"a window from {start:.3f} to {end:.3f} s has no length; measure for longer")
    if len(times) < 2 or times[0] > start + reach or times[-1] < end - reach:
        covered = f"from {times[0] - start:+.2f} to {times[-1] - start:+.2f} s" if len(times) else "no time at all"
        raise MeterError(
            f"the meter's recording covers {covered} of a window of {end - start:.2f} s; start it earlier, stop it "
            "later, and see that it sampled throughout"
        )


def _prolonged(times: F64, values: F64, start: float, end: float) -> tuple[F64, F64]:
    """A counter's readings from `start` to `end`: beyond its ends it goes on as it did there."""
    pace = np.diff(values[[0, 1, -2, -1]])[[0, 2]] / np.diff(times[[0, 1, -2, -1]])[[0, 2]]
    early, late = max(times[0] - start, 0.0), max(end - times[-1], 0.0)
    if early:
        times, values = np.insert(times, 0, start), np.insert(values, 0, values[0] - pace[0] * early)
    if late:
        times, values = np.append(times, end), np.append(values, values[-1] + pace[1] * late)
    return times, values


def added(rails: Iterable[tuple[str, float]], zero: float) -> float:
    """The watts of all `rails`, pairs of name and watts. What a device takes is positive in every meter.

    Raises OSError for a rail of less than -`zero`, which is how far a meter's zero may be off: added to the others it
    would make them smaller.
    """
    total = 0.0
    for name, watts in rails:
        if watts < -zero:
            said = "what a device takes is positive; swap the two wires of its shunt"
            raise OSError(f"{name} reads {watts:.3g} W, and {said}")
        total += watts
    return total


def above_idle(measured: Energy, idle: Sequence[Energy]) -> Energy:
    """What was taken beyond the mean power of the `idle` windows, which lie before and after where possible.

    A constant offset of the meter cancels. How much the idle windows differ is part of the scatter; a single one cannot
    show how the idle power drifts. Without idle windows the result is `measured`.
    """
    if not idle:
        return measured
    seconds = sum(e.seconds for e in idle)
    watts = sum(e.joules for e in idle) / seconds
    drift = float(np.std([e.watts for e in idle], ddof=1)) if len(idle) > 1 else 0.0
    noise = hypot(*(e.scatter for e in idle)) / seconds
    return replace(
        measured,
        joules=measured.joules - watts * measured.seconds,
        scatter=hypot(measured.scatter, drift * measured.seconds, noise * measured.seconds),
        accuracy=replace(measured.accuracy, offset=0.0),
    )


def lost(times: F64, period: float) -> int:
    """Samples missing between `times`, if they should be `period` seconds apart."""
    gaps = np.diff(times) / period
    return int(np.sum(np.where(gaps > LATE, np.rint(gaps) - 1, 0)))


@dataclass(frozen=True)
class Alignment:
    """A device's clock on this machine's: ``host = origin + rate * (device - first)``, to `error` seconds."""

    first: float
    origin: float
    rate: float
    error: float

    def __call__(self, device: F64) -> F64:
        """Times of the device's clock as times of this machine's."""
        return self.origin + self.rate * (np.asarray(device, np.float64) - self.first)


BLOCKS = 8  # parts of a recording of which each gives its quickest message
SHORT = 2.0  # seconds too few to see how two clocks drift


def align(device: F64, host: F64) -> Alignment:
    """The clocks' relation from messages that carry a time of the `device` and arrive at a time of the `host`.

    Messages arrive late by a varying time, so the line goes through the quickest of each part of the recording. The
    error is the scatter of these. A recording of less than two seconds is taken to run at the host's rate.
    """
    device, host = np.asarray(device, np.float64), np.asarray(host, np.float64)
    if not len(device):
        raise MeterError("the meter sent no time at all; check that it is on and connected")
    late = (host - host[0]) - (device - device[0])
    parts = [p for p in np.array_split(np.arange(len(device)), BLOCKS) if len(p)]
    best = np.array([part[np.argmin(late[part])] for part in parts])
    rate = 1.0
    if device[-1] - device[0] >= SHORT and len(best) >= 3:
        rate = 1.0 + float(np.polyfit(device[best] - device[0], late[best], 1)[0])
    delays = host[best] - rate * (device[best] - device[0])
    # With few messages the quickest is the best guess; the line's scatter shows its error.
    return Alignment(float(device[0]), float(np.mean(delays)), rate, float(np.std(delays)))
