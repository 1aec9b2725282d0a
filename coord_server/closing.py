"""Rounds closed: the engine's `Aggregate` carried out until it is done, then what nobody needs any more swept away.

The closing is journalled behind, because a coordinator that dies first folds the same acknowledged updates to the same
bits. Nothing else is taken in before it is on disk, so devices can already fetch the next round while the disk works.
How values are folded is in `values`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coord_server import events
from coord_server.journal import Journal
from coord_server.refusals import Refusal
from coord_server.values import NothingUsable, Values
from edge_client.errors import MaskfleetError

log = logging.getLogger("maskfleet")

RETRY_FIRST, RETRY_MOST = 1.0, 60.0  # seconds between attempts to aggregate while something is in the way


class Closing:
    """The closing of one federation's rounds. `fault` says what is in its way, None when nothing is."""

    def __init__(self, journal: Journal, values: Values, clock: Callable[[], float]) -> None:
        self.fault: str | None = None
        self._journal, self._values, self._clock = journal, values, clock
        self._folding = asyncio.Lock()  # a sweep must not meet the blobs of a round that is being folded

    def begin(self) -> None:
        """Sweep what an earlier process left, ahead of any aggregation."""
        self._journal.spawn(self._sweep_first())

    def aggregate(self, decision: events.Aggregate) -> None:
        """Begin to fold a round; the engine hears of its end."""
        self._journal.spawn(self._until_closed(decision))

    async def _until_closed(self, decision: events.Aggregate) -> None:
        """Fold the round until it is done: a full disk is waited out, nothing is lost meanwhile."""
        journal, delay, folded = self._journal, RETRY_FIRST, False
        while True:
            try:
                async with self._folding:
                    if journal.unsure:
                        await journal.uninterrupted(journal.flush)
                        if (journal.state.stage, journal.state.round) != ("aggregating", decision.round):
                            return  # it was closed, although the journal could not say so
                    if not folded:
                        await self._fold_and_step(decision)
                        folded = True
                    await journal.uninterrupted(journal.flush)
                    self.fault = None
                    if self._values.large:
                        await asyncio.to_thread(self._sweep)
                return
            except Refusal as refused:  # stopped meanwhile
                log.info("%s: round %d is not counted: %s", journal.id, decision.round, refused)
                return
            except MaskfleetError as error:
                self.fault = f"round {decision.round} cannot be aggregated: {error}"
            except Exception:
                self.fault = f"round {decision.round} cannot be aggregated: see the coordinator's log"
                log.exception("%s: aggregating round %d failed", journal.id, decision.round)
            log.error("%s: %s; trying again in %.0f s", journal.id, self.fault, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_MOST)

    async def _fold_and_step(self, decision: events.Aggregate) -> None:
        journal, values, round_ = self._journal, self._values, decision.round
        opened = journal.state.opened
        try:
            folded = await values.fold(decision)
        except NothingUsable as nothing:
            log.error("%s: %s", journal.id, nothing)
            event = events.Unusable(self._clock(), round_, nothing.devices)
            await journal.uninterrupted(lambda: journal.step(event, journal.save))
            return
        now = self._clock()
        await journal.uninterrupted(
            lambda: journal.step(
                events.Aggregated(now, round_),
                lambda state: values.journal(folded, now - opened, state),
                lambda: values.adopt(folded),
                # Records are read back from the journal for the next downlinks, so they have to be in it.
                behind=not folded.kept,
            )
        )

    async def _sweep_first(self) -> None:
        async with self._folding:
            await asyncio.to_thread(self._sweep, True)

    def _sweep(self, first: bool = False) -> None:
        state = self._journal.state
        self._values.sweep(state.round, state.phase in ("finished", "stopped"), first)
