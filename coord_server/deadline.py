"""The clock of a live federation's round: the engine is told when the attempt's deadline has passed, and only then.

What follows is the engine's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coord_server import events
from coord_server.journal import Journal
from edge_client.errors import MaskfleetError

log = logging.getLogger("maskfleet")

LOOK_MOST = 60.0  # seconds until the deadline is looked at again, so that a set wall clock does no harm
RETRY = 1.0  # seconds until the engine is told again when the disk took nothing


class Deadline:
    """One federation's timer. `fault` says why the last deadline could not be acted upon, None when it could."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.fault: str | None = None
        self._journal, self._clock = journal, clock
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def arm(self) -> None:
        """Wait for the deadline that the state has now, instead of the one it had."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._journal.state.deadline
        if deadline is not None and not self._over:
            delay = min(max(deadline - self._clock(), 0.0), LOOK_MOST)
            self._timer = asyncio.get_running_loop().call_later(delay, lambda: self._journal.spawn(self._tick()))

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._over = True
        self.arm()

    async def _tick(self) -> None:
        journal = self._journal
        try:
            await journal.uninterrupted(lambda: journal.step(events.Tick(self._clock()), journal.save))
            self.fault = None
        except MaskfleetError as error:
            self.fault = str(error)
            log.error("%s: %s", journal.id, error)
            await asyncio.sleep(RETRY)
        self.arm()
