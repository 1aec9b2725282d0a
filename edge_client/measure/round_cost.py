"""What a round costs this device: seconds, joules above idle where there is a meter, peak memory, temperature."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from edge_client.measure import machine, memory
from edge_client.measure.energy import Energy, Meter, above_idle, joules
from edge_client.protocol.cost import Cost, measured

T = TypeVar("T")
IDLE = 2.0  # seconds of rest before a round, from which idle power is taken
LASTS = 3600.0  # seconds until it is taken anew: a device's power at rest drifts
log = logging.getLogger("maskfleet")


@dataclass
class RoundCost:
    """Measures one round after another. A meter that fails is left out from then on; no round is lost by it."""

    meter: Meter | None
    rest: Callable[[float], None] = time.sleep
    idle: list[Energy] = field(default_factory=list)
    lasts: float = LASTS
    _rested: float = field(default_factory=time.monotonic, init=False)

    def of(self, work: Callable[[], T]) -> tuple[T, Cost]:
        """What `work` returns, and what it cost. Its exceptions pass through."""
        self._start(measure_idle=not self.idle or time.monotonic() - self._rested >= self.lasts)
        memory.forget_peak()
        begin = time.monotonic()
        try:
            result = work()
        except BaseException:
            if self.meter is not None:
                with suppress(Exception):
                    self.meter.stop()
            raise
        end = time.monotonic()
        figures = {
            "seconds": end - begin,
            "joules": self._joules(begin, end),
            "megabytes": memory.peak_mb(),
            "celsius": machine.temperature(),
            "battery": machine.battery(),
        }
        return result, measured(figures)

    def _start(self, measure_idle: bool) -> None:
        if self.meter is None:
            return
        try:
            if measure_idle:
                self.meter.start()
                begin = time.monotonic()
                self.rest(IDLE)
                end = time.monotonic()
                self.idle, self._rested = [joules(self.meter.stop(), begin, end)], end
            self.meter.start()
        except Exception as error:  # another package's meter may fail in any way
            self._give_up(error)

    def _joules(self, begin: float, end: float) -> float | None:
        if self.meter is None:
            return None
        try:
            return above_idle(joules(self.meter.stop(), begin, end), self.idle).joules
        except Exception as error:  # see _start
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        log.warning("no joules from now on: %s", error)
        self.meter = None
