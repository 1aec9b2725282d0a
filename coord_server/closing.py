"""Rounds closed: the engine's `Aggregate` carried out until it is done, then what nobody needs any more swept away.

The closing is journalled behind, because a coordinator that dies first folds the same acknowledged updates to the same
bits. Nothing else is taken in before it is on disk, so devices can already fetch the next round while the disk works.
A small round, one that folds fast, is closed before that: in the transaction that takes in the last of its updates, so
that a round costs one commit less and nothing is left behind. How values are folded is in `values`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from coord_server import engine, events
from coord_server.aggregation import Checked
from coord_server.journal import Journal
from coord_server.refusals import Refusal
from coord_server.store.tables import ClosedRound
from coord_server.values import Folded, NothingUsable, Values
from edge_client.errors import MaskfleetError

log = logging.getLogger("maskfleet")

RETRY_FIRST, RETRY_MOST = 1.0, 60.0  # seconds between attempts to aggregate while something is in the way


@dataclass(frozen=True)
class AtOnce:
    """A small round folded before its last updates are journalled, the rows to go with them, and what follows."""

    folded: Folded
    rows: ClosedRound
    state: engine.State
    decisions: tuple[events.Decision, ...]


class Closing:
    """The closing of one federation's rounds."""

    def __init__(self, journal: Journal, values: Values, clock: Callable[[], float]) -> None:
        self._faults: dict[events.Aggregate, str] = {}  # what is in the way of each that is tried again
        self._journal, self._values, self._clock = journal, values, clock
        self._folding = asyncio.Lock()  # a sweep must not meet the blobs of a round that is being folded

    @property
    def fault(self) -> str | None:
        """What is in the way of the newest round that cannot be closed; None when nothing is."""
        return next(reversed(self._faults.values()), None)

    def begin(self) -> None:
        """Sweep what an earlier process left, ahead of any aggregation."""
        self._journal.spawn(self._sweep_later(first=True))

    def aggregate(self, decision: events.Aggregate) -> None:
        """Begin to fold a round; the engine hears of its end."""
        self._journal.spawn(self._until_closed(decision))

    def at_once(self, state: engine.State, decision: events.Aggregate, taken: Mapping[str, Checked]) -> AtOnce | None:
        """Fold a small round whose last updates, `taken`, are about to be journalled; `state` is what they lead to.

        Blocks; the lock is held. None when `aggregate` is to do it: it is not small, or something is in the way.
        """
        now, journal = self._clock(), self._journal
        try:
            folded = self._values.fold_at_once(decision, taken)
        except Exception:  # `aggregate` will meet it again, say so, and go on trying
            log.debug("%s: round %d is not closed at once", journal.id, decision.round, exc_info=True)
            return None
        if folded is None:
            return None
        after, decisions = engine.apply(journal.config, state, events.Aggregated(now, decision.round))
        return AtOnce(folded, self._values.rows(folded, max(now - state.opened, 0.0)), after, decisions)

    def adopt(self, done: AtOnce) -> None:
        """Go on from a round that was closed at once and is in the journal."""
        self._values.written(done.rows)
        self._values.adopt(done.folded)
        if self._values.large:
            self._journal.spawn(self._sweep_later())

    async def _until_closed(self, decision: events.Aggregate) -> None:
        """Fold the round until it is done: a full disk is waited out, nothing is lost meanwhile."""
        journal, delay = self._journal, RETRY_FIRST
        while True:
            try:
                async with self._folding:
                    if await journal.uninterrupted(lambda: self._due(decision)):
                        await self._fold_and_step(decision)
                        await journal.uninterrupted(journal.flush)
                    self._faults.pop(decision, None)
                    if self._values.large:
                        await asyncio.to_thread(self._sweep)
                return
            except Refusal as refused:  # stopped meanwhile
                self._faults.pop(decision, None)
                log.info("%s: round %d is not counted: %s", journal.id, decision.round, refused)
                return
            except MaskfleetError as error:
                self._faults[decision] = f"round {decision.round} cannot be aggregated: {error}"
            except Exception:
                self._faults[decision] = f"round {decision.round} cannot be aggregated: see the coordinator's log"
                log.exception("%s: aggregating round %d failed", journal.id, decision.round)
            log.error("%s: %s; trying again in %.0f s", journal.id, self._faults[decision], delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_MOST)

    async def _due(self, decision: events.Aggregate) -> bool:
        """Whether the round is still to be folded, once memory and disk agree. The lock is held. Raises StateError.

        An earlier attempt may have closed it without being able to say so, and whoever wrote next have found that out.
        """
        await self._journal.flush()
        due = engine.pending(self._journal.state)
        return any(
            isinstance(d, events.Aggregate) and (d.round, d.attempt) == (decision.round, decision.attempt) for d in due
        )

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

        @cache
        def rows() -> ClosedRound:
            return values.rows(folded, max(now - opened, 0.0))

        await journal.uninterrupted(
            lambda: journal.step(
                events.Aggregated(now, round_),
                lambda state: values.journal(rows(), state),
                lambda: values.adopt(folded),
                lambda: values.written(rows()),
                # Records are read back from the journal for the next downlinks, so they have to be in it.
                behind=not folded.kept,
            )
        )

    async def _sweep_later(self, first: bool = False) -> None:
        async with self._folding:
            await asyncio.to_thread(self._sweep, first)

    def _sweep(self, first: bool = False) -> None:
        state = self._journal.state
        self._values.sweep(state.round, state.phase in ("finished", "stopped"), first)
