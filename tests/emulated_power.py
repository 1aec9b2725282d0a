"""Devices that take a known power, a clock that jumps, and a loop that polls a meter on it: no real time passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_client.measure.energy import Trace
from edge_client.measure.polling import Polled, poll


@dataclass(frozen=True)
class Truth:
    """Power that is a straight line between corners: `at` seconds, `watts`. Two corners at one time make a jump."""

    at: NDArray[np.float64]
    watts: NDArray[np.float64]

    def power(self, t: float) -> float:
        return float(np.interp(t, self.at, self.watts))

    def energy(self, start: float, end: float) -> float:
        """Exact joules, summed over the lines."""
        corners = np.concatenate([[start], self.at[(self.at > start) & (self.at < end)], [end]])
        left = np.interp(corners[:-1] + 1e-12, self.at, self.watts)
        right = np.interp(corners[1:] - 1e-12, self.at, self.watts)
        return float(np.sum(np.diff(corners) * (left + right) / 2))


def constant(watts: float, seconds: float) -> Truth:
    return Truth(np.array([0.0, seconds]), np.array([watts, watts]))


def ramp(low: float, high: float, seconds: float) -> Truth:
    return Truth(np.array([0.0, seconds]), np.array([low, high]))


def pulses(low: float, high: float, period: float, duty: float, seconds: float) -> Truth:
    edges = [0.0]
    levels = [low]
    begin = 0.37 * period
    while begin < seconds:
        end = begin + duty * period
        edges += [begin, begin + 1e-9, end, end + 1e-9]
        levels += [low, high, high, low]
        begin += period
    return Truth(np.array([*edges, max(seconds, edges[-1] + 1.0)]), np.array([*levels, low]))


SECONDS = 40.0
SHAPES: dict[str, Truth] = {
    "constant": constant(4.0, SECONDS + 5),
    "ramp": ramp(0.5, 9.0, SECONDS + 5),
    "pulses": pulses(1.5, 8.0, 1.7, 0.4, SECONDS + 5),
}


@dataclass
class VirtualClock:
    """Time that passes only when somebody waits or works. `moved` is called after every change, to update a device."""

    end: float
    t: float = 0.0
    jitter: float = 0.0
    moved: Callable[[float], None] = lambda t: None
    stalls: dict[float, float] = field(default_factory=dict)  # at this time, this long: lost samples
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def now(self) -> float:
        return self.t

    def pass_(self, seconds: float) -> None:
        self.t += seconds
        self.moved(self.t)

    def wait(self, seconds: float) -> bool:
        stall = sum(self.stalls.pop(at) for at in [at for at in self.stalls if at <= self.t])
        self.pass_(seconds + stall + self.jitter * float(self._random.random()))
        return self.t >= self.end


def record(meter: Polled, clock: VirtualClock) -> Trace:
    """What the meter records until the clock's end."""
    clock.moved(clock.t)
    return meter.trace(poll(meter.read, meter.period, clock.now, clock.wait))
