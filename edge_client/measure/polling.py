"""A meter that is read from time to time: the loop, and the thread it runs in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np

from edge_client.errors import MeterError
from edge_client.measure.energy import EXACT, Accuracy, Trace, lost

DITHER = 0.24  # of a period: an interval then has less than `energy.LATE` periods
Now = Callable[[], float]
Wait = Callable[[float], bool]
"""Pause so many seconds; True when it is time to stop."""


@dataclass
class Readings:
    """Times and values. `failed` counts readings without a value, `fault` is the reason of the last of them."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    failed: int = 0
    fault: str = ""


def poll(read: Callable[[], float], period: float, now: Now, wait: Wait) -> Readings:
    """Read about every `period` seconds until `wait` returns true, then once more.

    Intervals vary by a quarter, so that a load that repeats does not keep step with the readings. A reading's time is
    the middle of the call. A reading that raises OSError is lost. After a late reading the next is due at once.
    """
    found, due, stopped, chance = Readings(), now(), False, Random(0)
    while True:
        before = now()
        try:
            value = read()
        except OSError as error:
            found.failed, found.fault = found.failed + 1, error.strerror or str(error)
        else:
            middle = (before + now()) / 2
            if not found.times or middle > found.times[-1]:
                found.times.append(middle)
                found.values.append(value)
        if stopped:
            return found
        due = max(due + period * chance.uniform(1 - DITHER, 1 + DITHER), now())
        stopped = wait(max(due - now(), 0.0))


@dataclass
class Polled:
    """A meter behind `read`, which gives watts, or joules of a counter that only rises.

    `clipped`, if given, counts the readings so far at the end of the range. `at_start` prepares the device and
    `at_end` leaves it as it was; both may raise OSError.
    """

    name: str
    what: str
    read: Callable[[], float]
    unit: Literal["W", "J"]
    period: float
    accuracy: Accuracy = EXACT
    clipped: Callable[[], int] = lambda: 0
    at_start: Callable[[], None] = lambda: None
    at_end: Callable[[], None] = lambda: None
    now: Now = time.monotonic
    _thread: threading.Thread | None = field(default=None, init=False, repr=False)
    _begun: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _found: Readings = field(default_factory=Readings, init=False, repr=False)
    _fault: Exception | None = field(default=None, init=False, repr=False)
    _clipped: int = field(default=0, init=False, repr=False)

    def start(self) -> None:
        """Begin to read in a thread; the first reading is over once this returns. Raises MeterError."""
        try:
            self.at_start()
        except OSError as error:
            raise MeterError(f"meter {self.name} does not start: {error.strerror or error}") from None
        self._clipped = self.clipped()
        self._stop.clear()
        self._begun.clear()
        self._fault = None
        self._thread = threading.Thread(target=self._run, name=f"meter {self.name}", daemon=True)
        self._thread.start()
        self._begun.wait()  # a thread may start late: the recording is to cover what the caller does next

    def _run(self) -> None:
        def read() -> float:
            try:
                return self.read()
            finally:
                self._begun.set()

        try:
            self._found = poll(read, self.period, self.now, self._stop.wait)
        except Exception as error:  # it is raised in `stop`, in the caller's thread
            self._found, self._fault = Readings(), error

    def stop(self) -> Trace:
        """End the thread; what it read. Raises MeterError."""
        if self._thread is None:
            raise MeterError(f"meter {self.name} was not started")
        self._stop.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError):  # what was read stands
            self.at_end()
        if self._fault is not None:
            raise MeterError(f"meter {self.name} failed: {self._fault}") from self._fault
        return self.trace(self._found)

    def trace(self, found: Readings) -> Trace:
        """The readings as a recording. Raises MeterError when there is none."""
        if not found.times:
            why = f": {found.fault}" if found.fault else ""
            raise MeterError(f"meter {self.name} gave no reading{why}; check its wiring and permissions")
        times, values = np.array(found.times), np.array(found.values)
        missing = max(lost(times, self.period), found.failed)
        return Trace(times, values, self.unit, self.period, self.accuracy, missing, self.clipped() - self._clipped)
