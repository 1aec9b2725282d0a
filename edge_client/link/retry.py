"""Repeating a request until it is answered.

A failed attempt is repeated after a random time below a bound that doubles ("full jitter", so that devices which failed
together do not return together), until `patience` seconds have passed without a usable answer. When the coordinator's
answer has a Retry-After, it is up: that wait is kept and costs no patience, for `BUSY_MOST` seconds in all.

Written here because retry libraries count attempts or elapsed time, and do not stop the clock for a Retry-After; with
that and the events, a loop on top of one is as long as this one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from edge_client.errors import UnreachableError
from edge_client.events import Event, OnEvent
from edge_client.link.transport import RETRY_AFTER_MOST, Transient

FIRST = 0.5  # seconds: the bound of the first wait
MOST = 60.0
BUSY_MOST = RETRY_AFTER_MOST  # seconds in all that Retry-After of one request costs no patience

T = TypeVar("T")


def longest(failures: int) -> float:
    """The bound of the wait after so many failures in a row (from 0), in seconds."""
    return min(MOST, FIRST * 2.0 ** min(failures, 64))  # 2.0**1024 is an error


def backoff(failures: int) -> float:
    """The random wait after so many failures in a row (from 0), in seconds."""
    return random.uniform(0.0, longest(failures))


class Retry:
    """Calls one function until it answers. `busy`: the seconds of Retry-After to wait, in all; BUSY_MOST at most.

    `sleep` and `clock` are seams for tests.
    """

    def __init__(
        self,
        url: str,
        patience: float,
        on_event: OnEvent,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        busy: float = BUSY_MOST,
    ) -> None:
        self.url, self.patience, self.on_event, self.busy = url, patience, on_event, busy
        self._sleep, self._clock = sleep or time.sleep, clock

    def pause(self, seconds: float, why: str = "") -> None:
        """Wait; `why` becomes an event."""
        if why:
            self.on_event(Event("wait", why, seconds=seconds))
        self._sleep(seconds)

    def __call__(self, what: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns once it does not raise Transient. Raises UnreachableError when patience ends."""
        failing_since: float | None = None
        failures, told = 0, 0.0
        while True:
            try:
                return attempt()
            except Transient as error:
                reason, after = str(error), error.after
            if after is not None and told < self.busy:
                failing_since, failures, delay = None, 0, after + random.uniform(0.0, FIRST)
                told += delay
                text = f"{what}: {self.url} is busy ({reason}); asking again in {delay:.0f} s"
            else:
                now = self._clock()
                failing_since = now if failing_since is None else failing_since
                left = self.patience - (now - failing_since)
                if left <= 0:
                    raise UnreachableError(
                        f"{what}: {self.url} gave no usable answer for {self.patience:.0f} s ({reason}); check the "
                        "address and the link, then run the same command again: nothing is lost"
                    )
                delay = min(backoff(failures) if after is None else after, left)
                failures += 1
                text = (
                    f"{what}: no usable answer from {self.url} ({reason}); trying again in {delay:.1f} s, "
                    f"giving up in {left:.0f} s"
                )
            self.pause(delay, text)
