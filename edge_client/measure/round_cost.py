"""What a round costs this device: seconds, joules above idle where there is a meter, peak memory, temperature."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from edge_client.errors import MeterError
from edge_client.measure import machine, memory
from edge_client.measure.energy import Energy, Meter, above_idle, joules
from edge_client.protocol.cost import Cost

T = TypeVar("T")
IDLE = 2.0  # seconds of rest before the first round, from which idle power is taken
log = logging.getLogger("maskfleet")


@dataclass
class RoundCost:
    """Measures one round after another. A meter that fails is left out from then on; training never fails by it."""

    meter: Meter | None
    rest: Callable[[float], None] = time.sleep
    idle: list[Energy] = field(default_factory=list)

    def of(self, work: Callable[[], T]) -> tuple[T, Cost]:
        """What `work` returns, and what it cost. Its exceptions pass through."""
        self._start(measure_idle=not self.idle)
        memory.forget_peak()
        begin = time.monotonic()
        try:
            result = work()
        except BaseException:
            if self.meter is not None:
                with suppress(MeterError):
                    self.meter.stop()
            raise
        end = time.monotonic()
        cost = Cost(
            seconds=end - begin,
            joules=self._joules(begin, end),
            megabytes=memory.peak_mb(),
            celsius=machine.temperature(),
        )
        return result, cost

    def _start(self, measure_idle: bool) -> None:
        if self.meter is None:
            return
        try:
            if measure_idle:
                self.meter.start()
                begin = time.monotonic()
                self.rest(IDLE)
                end = time.monotonic()
                self.idle = [joules(self.meter.stop(), begin, end)]
            self.meter.start()
        except MeterError as error:
            self._give_up(error)

    def _joules(self, begin: float, end: float) -> float | None:
        if self.meter is None:
            return None
        try:
            return max(above_idle(joules(self.meter.stop(), begin, end), self.idle).joules, 0.0)
        except MeterError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: MeterError) -> None:
        log.warning("no joules from now on: %s", error)
        self.meter = None
