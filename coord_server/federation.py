"""One federation, alive: its rooms put together, and what follows when its state has changed.

journal    the engine's state; every change is written before anything is promised
members    devices enrol and leave
polls      what a device is to do, and what it may fetch
intake     updates are taken into the round
closing    rounds are folded
deadline   rounds end in time
values     global state, downlinks, records

Here are only its life, the operator's commands and what there is to see. HTTP is not known in any of these rooms;
blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from coord_server import engine, events, outlook
from coord_server.closing import Closing
from coord_server.deadline import Deadline
from coord_server.intake import Intake
from coord_server.journal import Followers, Journal
from coord_server.members import Members
from coord_server.polls import Polls
from coord_server.roster import Roster
from coord_server.store import Store
from coord_server.store.blobs import Blobs
from coord_server.store.tables import DeviceRow, FederationRow
from coord_server.values import Values
from edge_client.errors import StateError
from edge_client.protocol.messages import Federation, FederationConfig

log = logging.getLogger("maskfleet")


class LiveFederation:
    """A federation of a running coordinator. Its public coroutines may be called concurrently."""

    def __init__(
        self,
        store: Store,
        row: FederationRow,
        devices: list[DeviceRow],
        records: dict[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id, self.config = row.id, FederationConfig.model_validate_json(row.config)
        self._store, self._clock = store, clock
        self._roster = Roster(row.id, devices)
        self._values = Values(store, row, self.config, records)
        followers = Followers(self._moved, self._carry_out, self._reload)
        self._journal = Journal(store, row.id, self.config, engine.load(row.state), followers)
        self.members = Members(store, self._journal, self._values, self._roster, clock)
        self.polls = Polls(self._journal, self._values, self._roster, clock)
        self._closing = Closing(self._journal, self._values, clock)
        self.intake = Intake(store, self._journal, self._values, self._roster, self._closing, clock)
        self._deadline = Deadline(self._journal, clock)

    # --- life

    def begin(self) -> None:
        """Take up what the journal says is still to be done."""
        self._closing.begin()
        self._carry_out(engine.pending(self._journal.state))
        self._deadline.arm()

    async def close(self) -> None:
        """Stop timers and tasks and write down who called. What is not journalled is done again at the next start."""
        self.polls.wake(closing=True)
        self._deadline.stop()
        await self._journal.close(self._write_last)

    async def _write_last(self) -> None:
        try:
            await self._journal.flush()
        except StateError as error:
            log.error("%s: round is folded again at the next start: %s", self.id, error)
        seen = self._roster.take_seen()
        if seen:
            await asyncio.to_thread(self._store.metadata.save_seen, self.id, seen)

    # --- what follows from a change

    def _moved(self, before: engine.State) -> None:
        self._deadline.arm()
        if outlook.visible(before) != outlook.visible(self._journal.state):
            self.polls.wake()

    def _carry_out(self, decisions: tuple[events.Decision, ...]) -> None:
        for decision in decisions:
            if isinstance(decision, events.Aggregate):
                self._closing.aggregate(decision)
            elif isinstance(decision, events.OpenRound):
                log.info("%s: round %d, attempt %d, asks %d devices", self.id, decision.round, decision.attempt,
                         len(decision.cohort))  # fmt: skip
            elif isinstance(decision, events.Finish):
                log.info("%s: finished after round %d", self.id, decision.round)

    async def _reload(self) -> None:
        metadata, before = self._store.metadata, self._journal.state
        row = await asyncio.to_thread(metadata.federation, self.id)
        devices = await asyncio.to_thread(metadata.all_devices, self.id)
        records = await asyncio.to_thread(metadata.all_records, self.id)
        log.warning("%s: a write that failed is in the journal after all; going on from there", self.id)
        self._roster.reload(devices)
        await self._values.reload(row, records)
        now = self._journal.state = engine.load(row.state)
        self._moved(before)
        if (before.stage, before.round) != ("aggregating", now.round):  # else it is being aggregated already
            self._carry_out(engine.pending(now))

    # --- the operator

    def now(self) -> float:
        """The coordinator's clock, seconds."""
        return self._clock()

    async def operate(self, event: events.Event) -> None:
        """Start, pause, resume or stop. Raises Refusal."""
        await self._journal.uninterrupted(lambda: self._journal.step(event, self._journal.save))

    def summary(self) -> Federation:
        """The federation as it stands."""
        fault = self._closing.fault or self._deadline.fault or self.intake.fault
        return outlook.summary(self.config, self._journal.state, self._clock(), fault)

    @property
    def blobs(self) -> Blobs:
        """Where its payloads lie."""
        return self._store.blobs

    async def settled(self) -> None:
        """Wait until the round that was closed last is in the journal; a full disk is not waited for."""
        with suppress(StateError):
            await self._journal.uninterrupted(self._journal.flush)

    async def exported(self) -> bytes:
        """The global state after the last closed round, as safetensors bytes."""
        await self._journal.uninterrupted(self._journal.flush)
        return await asyncio.to_thread(self._values.exported)
