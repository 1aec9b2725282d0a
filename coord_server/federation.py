"""One federation, alive: the engine's state in memory, journalled before anything is promised.

Every change is a step of `journalled.Journalled`, uploads several at a time. One step is journalled behind: the closing
of a round, because a coordinator that dies first folds the same acknowledged updates to the same bits. Nothing else
is taken in before it is on disk, so devices can already fetch the next round while the disk works.

Decisions are carried out here too: rounds are folded in a thread, devices that wait are woken by an event, deadlines
come from a timer. What a round is made of is in `values`, how an upload is received and checked in `uploads`, who may
call in `roster`. HTTP is not known here; blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from coord_server import aggregation, auth, engine, events, outlook
from coord_server.aggregation import Checked, Course
from coord_server.journalled import Journalled
from coord_server.refusals import Refusal
from coord_server.roster import Roster
from coord_server.store import Store
from coord_server.store.blobs import Blobs
from coord_server.store.tables import DeviceRow, FederationRow
from coord_server.uploads import Batch, Turns, Upload, Valid, receive, validate, weigh
from coord_server.values import Downlink, NothingUsable, Values
from edge_client.errors import MaskfleetError, StateError
from edge_client.protocol.messages import (
    Device,
    Enrol,
    Enrolled,
    Federation,
    FederationConfig,
    Finish,
    Receipt,
    Report,
    Stopped,
    Train,
    Wait,
    Work,
)
from edge_client.protocol.payload import Arrays

log = logging.getLogger("maskfleet")

RETRY_FIRST, RETRY_MOST = 1.0, 60.0  # seconds between attempts to aggregate while something is in the way
TIMER_MOST = 60.0  # the deadline is looked at this often, so that a set wall clock does no harm
POLL_AFTER = 5.0  # seconds a device that does not long-poll is asked to stay away
POLL_AGAIN = 1.0  # the same for one that has just waited in a long poll


class LiveFederation(Journalled):
    """A federation of a running coordinator. Its public coroutines may be called concurrently."""

    def __init__(
        self,
        store: Store,
        row: FederationRow,
        devices: list[DeviceRow],
        records: dict[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        config = FederationConfig.model_validate_json(row.config)
        super().__init__(store, row.id, config, engine.load(row.state))
        self.values = Values(store, row, self.config, records)
        self.fault: str | None = None
        self._clock = clock
        self._roster = Roster(row.id, devices)
        self._folding = asyncio.Lock()  # a sweep must not meet the blobs of a round that is being folded
        self._changed = asyncio.Event()
        self._uploads: list[Upload] = []
        self._turns = Turns()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    # --- life

    def begin(self) -> None:
        """Take up what the journal says is still to be done."""
        self._spawn(self._sweep_first())  # ahead of any aggregation: it takes the lock first
        self._carry_out(engine.pending(self.state))
        self._arm()

    def wake(self, closing: bool = False) -> None:
        """Let every long poll look again; with `closing` they all answer."""
        self._closing = self._closing or closing
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop timers and tasks and write down who called. What is not journalled is done again at the next start."""
        self.wake(closing=True)
        if self._timer is not None:
            self._timer.cancel()
        async with self._lock:
            for task in self._tasks:
                task.cancel()
            try:
                await self._flush()
            except StateError as error:
                log.error("%s: round is folded again at the next start: %s", self.id, error)
            seen = self._roster.take_seen()
            if seen:
                await asyncio.to_thread(self._store.metadata.save_seen, self.id, seen)

    # --- decisions carried out

    def _moved(self, before: engine.State) -> None:
        self._arm()
        if outlook.visible(before) != outlook.visible(self.state):
            self.wake()

    async def _reload(self) -> None:
        metadata, before = self._store.metadata, self.state
        row = await asyncio.to_thread(metadata.federation, self.id)
        devices = await asyncio.to_thread(metadata.all_devices, self.id)
        records = await asyncio.to_thread(metadata.all_records, self.id)
        log.warning("%s: a write that failed is in the journal after all; going on from there", self.id)
        self._roster.reload(devices)
        self.values = Values(self._store, row, self.config, records)
        self.state = engine.load(row.state)
        self._moved(before)
        if (before.stage, before.round) != ("aggregating", self.state.round):  # else it is being aggregated already
            self._carry_out(engine.pending(self.state))

    def _carry_out(self, decisions: tuple[events.Decision, ...]) -> None:
        for decision in decisions:
            if isinstance(decision, events.Aggregate):
                self._spawn(self._aggregate(decision))
            elif isinstance(decision, events.OpenRound):
                log.info("%s: round %d, attempt %d, asks %d devices", self.id, decision.round, decision.attempt,
                         len(decision.cohort))  # fmt: skip
            elif isinstance(decision, events.Finish):
                log.info("%s: finished after round %d", self.id, decision.round)

    async def operate(self, event: events.Event) -> None:
        """Start, pause, resume or stop. Raises Refusal."""
        await self._uninterrupted(lambda: self._step(event, self._save))

    def now(self) -> float:
        """The coordinator's clock, seconds."""
        return self._clock()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state.deadline is not None and not self._closing:
            delay = min(max(self.state.deadline - self._clock(), 0.0), TIMER_MOST)
            self._timer = asyncio.get_running_loop().call_later(delay, lambda: self._spawn(self._tick()))

    async def _tick(self) -> None:
        try:
            await self._uninterrupted(lambda: self._step(events.Tick(self._clock()), self._save))
            self.fault = None
        except MaskfleetError as error:
            self.fault = str(error)
            log.error("%s: %s", self.id, error)
            await asyncio.sleep(RETRY_FIRST)
        self._arm()

    # --- devices

    async def enrol(self, request: Enrol, token: str, uses_left: int, expires_at: float) -> Enrolled:
        """Register a device; the same request again gets the same answer. Raises Refusal, StateError.

        It takes part from the moment it first asks for work. `token` and `credential` are compared and stored as
        digests.
        """
        credential = auth.hashed(request.credential)

        async def join() -> None:
            name = request.device
            if self._roster.knows(name, credential):
                return
            now = self._clock()
            if now >= expires_at:
                raise Refusal("token-spent", "this join token has expired; ask the operator for a new one")
            spent = Refusal("token-spent", "this join token has been used up; ask the operator for a new one")
            if uses_left <= 0:
                raise spent

            if self.state.phase == "stopped":
                raise Refusal("wrong-phase", f"the federation is stopped; nobody can enrol in {self.id} any more")
            if not await asyncio.to_thread(self._store.metadata.enrol, self.id, name, credential, token, now):
                raise spent
            self._roster.add(name, credential)

        await self._uninterrupted(join)
        c = self.config
        return Enrolled(
            federation=self.id, device=request.device, bundle=c.bundle, method=c.method, rounds=c.rounds, seed=c.seed,
            backend=c.backend,
        )  # fmt: skip

    def device_of(self, credential: str) -> str | None:
        """The device with this credential digest. Raises Refusal when it was removed."""
        return self._roster.device_of(credential)

    def note(self, device: str, bytes_down: int = 0) -> None:
        """Remember that a device called and how many payload bytes it fetched; written with its next update."""
        self._roster.note(device, self._clock(), bytes_down)

    def count(self, device: str, side: str, kind: str, size: int) -> None:
        """Account for a message that is no payload, "up" or "down"; written with the device's next update."""
        self._roster.count(device, side, kind, size)

    async def remove(self, device: str) -> None:
        """Take a device out for good. Raises Refusal."""

        async def leave() -> None:
            if not self._roster.has(device):
                raise Refusal("not-found", f"no device {device!r} is enrolled in {self.id}")
            if device not in self.state.devices:  # it never asked for work: the engine does not know it
                await self._flush()
                await asyncio.to_thread(self._store.metadata.remove_device, self.id, device, engine.dump(self.state))
                self._roster.remove(device)
                return
            await self._step(
                events.Removed(self._clock(), device),
                lambda state: self._store.metadata.remove_device(self.id, device, state),
                lambda: self._roster.remove(device),
            )

        await self._uninterrupted(leave)

    async def report(self, device: str, report: Report) -> None:
        """Keep a device's last word."""
        await asyncio.to_thread(self._store.metadata.save_report, self.id, device, report.model_dump_json())

    async def devices(self) -> list[Device]:
        """Every device that ever enrolled, with what happened since its row was written."""
        rows = await asyncio.to_thread(self._store.metadata.all_devices, self.id)
        ready = set(self.state.devices)
        return [self._roster.shown(row, row.device in ready) for row in rows]

    # --- what there is to see

    def summary(self) -> Federation:
        """The federation as it stands."""
        return outlook.summary(self.config, self.state, self._clock(), self.fault)

    @property
    def blobs(self) -> Blobs:
        """Where its payloads lie."""
        return self._store.blobs

    async def settled(self) -> None:
        """Wait until the round that was closed last is in the journal; a full disk is not waited for."""
        with suppress(StateError):
            await self._uninterrupted(self._flush)

    async def exported(self) -> bytes:
        """The global state after the last closed round, as safetensors bytes."""
        await self._uninterrupted(self._flush)
        return await asyncio.to_thread(self.values.exported)

    # --- work

    async def work(self, device: str, wait: float) -> Work:
        """What `device` is to do, held back up to `wait` seconds while that is nothing. Raises Refusal, StateError.

        The first question makes it one of those that take part.
        """
        if device not in self.state.devices and self.state.phase != "stopped":
            await self._uninterrupted(lambda: self._admit_device(device))
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            changed = self._changed
            due = await self._due(device, waited=wait > 0)
            left = until - loop.time()
            if not isinstance(due, Wait) or left <= 0 or self._closing:
                return due
            try:
                await asyncio.wait_for(changed.wait(), left)
            except asyncio.TimeoutError:
                return await self._due(device, waited=True)

    async def _admit_device(self, device: str) -> None:
        """Let a device that has asked for work take part. The lock is held."""
        if self._roster.has(device) and self.state.phase != "stopped":  # neither may hold any more by now
            await self._step(events.Ready(self._clock(), device), self._save)

    async def _due(self, device: str, waited: bool) -> Work:
        s = self.state
        if s.phase == "stopped":
            return Stopped(reason=f"the operator stopped {self.id} in round {s.round}")
        if s.phase == "finished":
            last = self.config.rounds + 1
            down = await self.values.downlink(last, device)
            return Finish(round=last, downlink=down.sha256, downlink_size=down.size)
        asked = s.phase == "running" and s.stage == "collecting" and device in s.cohort and device not in s.received
        if asked and s.deadline is not None:
            down = await self.values.downlink(s.round, device)
            return Train(
                round=s.round,
                lease=engine.lease(self.config, s.round, device),
                downlink=down.sha256,
                downlink_size=down.size,
                deadline_in=max(s.deadline - self._clock(), 0.0),
            )
        reason = outlook.reason(self.config, s, device, self._closing)
        return Wait(reason=reason, poll_after=POLL_AGAIN if waited else POLL_AFTER)

    async def payload(self, device: str, sha256: str) -> Downlink:
        """The downlink with this digest, when it is one that `device` has to fetch now. Raises Refusal."""
        s = self.state
        if s.phase != "recruiting":
            down = await self.values.downlink(self.config.rounds + 1 if s.phase == "finished" else s.round, device)
            if down.sha256 == sha256:
                return down
        raise Refusal("not-found", f"payload {sha256} is not due in round {s.round} of {self.id}; ask for work again")

    # --- updates

    async def admit(self, round_: int, device: str, lease: str, sha256: str) -> Receipt | None:
        """Before the body is read: the receipt when the update is already in, None when it is welcome.

        Raises Refusal otherwise.
        """
        if round_ < self.state.round or self.state.phase in ("finished", "stopped"):
            found = await asyncio.to_thread(self._store.metadata.acknowledged, self.id, round_, device)
            if found is not None and found[0] == sha256:
                return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=found[1])
        event = events.Updated(self._clock(), round_, device, lease, sha256)
        _, decisions = engine.apply(self.config, self.state, event)
        first = decisions[0]
        if isinstance(first, events.Refuse):
            raise Refusal(first.kind, first.detail)
        if isinstance(first, events.Acknowledge) and first.duplicate:
            return await self._receipt(round_, device, sha256)
        return None

    async def _receipt(self, round_: int, device: str, sha256: str) -> Receipt:
        found = await asyncio.to_thread(self._store.metadata.acknowledged, self.id, round_, device)
        if found is None:
            raise Refusal("internal-error", f"the update of {device!r} in round {round_} is not in the journal")
        return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=found[1])

    async def update_limit(self) -> int:
        """The most bytes an update may have."""
        course, _ = await self.values.ready()
        return aggregation.update_limit(course)

    async def take_update(
        self, round_: int, device: str, lease: str, sha256: str, body: AsyncIterator[bytes]
    ) -> Receipt:
        """Receive, check, journal, acknowledge. Raises Refusal, StateError; then nothing of it is kept.

        A large update is checked and made durable by itself; a small one together with those that arrive while the
        disk is busy, so that one transaction takes in all of them.
        """
        limit = await self.update_limit()
        shelf = self.values.updates_shelf(round_)
        reading = receive(self._store.blobs, shelf, body, limit, "an update")
        received = await self._turns.read(device, reading)
        try:
            upload = Upload(events.Updated(self._clock(), round_, device, lease, sha256), received)
            if received.incoming is not None:
                course, arrays = await self.values.ready()
                upload.valid = await asyncio.to_thread(self._validate, course, arrays, upload)
            self._uploads.append(upload)
            await self._uninterrupted(self._take_in)
            size = await upload.answer
        finally:
            received.discard()
        return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=size)

    def _validate(self, course: Course, arrays: Arrays, upload: Upload) -> Valid:
        """Check a body against its claims; one whose round is over is left to the engine."""
        e = upload.event

        def check(data: bytes) -> Checked | None:
            current = self.state.round == e.round
            return self.values.check(course, arrays, e.round, e.device, data) if current else None

        return validate(upload.body, e.sha256, check)

    async def _take_in(self) -> None:
        """Take in every upload that waits, in one transaction. The lock is held; each upload gets its answer."""
        uploads, self._uploads = self._uploads, []
        if not uploads:
            return
        try:
            await self._flush()
            course, arrays = await self.values.ready()
            batch = await asyncio.to_thread(self._journal_uploads, course, arrays, uploads)
        except BaseException as error:
            for upload in uploads:
                upload.answered(error if isinstance(error, Exception) else StateError("going down; send it again"))
            if isinstance(error, Exception):
                return
            raise

        def adopt() -> None:
            for row, checked in batch.taken:
                self._roster.written(row.device, row.seen)
                self.values.remember(row.device, checked)

        self._adopt(batch.state, tuple(batch.decisions), adopt)
        for upload, answer in batch.answers:
            upload.answered(answer)

    def _journal_uploads(self, course: Course, arrays: Arrays, uploads: list[Upload]) -> Batch:
        """Check uploads, ask the engine about each in turn, and journal those it takes. Blocks. Raises StateError."""
        batch = weigh(
            self.config, self.state, uploads, lambda u: self._validate(course, arrays, u), self._roster.seen()
        )
        if batch.taken:
            rows = [row for row, _ in batch.taken]
            self._journal(
                lambda state: self._store.metadata.acknowledge(self.id, rows, state), engine.dump(batch.state)
            )
        return batch

    # --- closing a round

    async def _aggregate(self, decision: events.Aggregate) -> None:
        """Fold the round until it is done: a full disk is waited out, nothing is lost meanwhile."""
        delay, folded = RETRY_FIRST, False
        while True:
            try:
                async with self._folding:
                    if self._unsure:
                        await self._uninterrupted(self._flush)
                        if (self.state.stage, self.state.round) != ("aggregating", decision.round):
                            return  # it was closed, although the journal could not say so
                    if not folded:
                        await self._fold_and_step(decision)
                        folded = True
                    await self._uninterrupted(self._flush)
                    self.fault = None
                    if self.values.large:
                        await asyncio.to_thread(self._sweep)
                return
            except Refusal as refused:  # stopped meanwhile
                log.info("%s: round %d is not counted: %s", self.id, decision.round, refused)
                return
            except MaskfleetError as error:
                self.fault = f"round {decision.round} cannot be aggregated: {error}"
            except Exception:
                self.fault = f"round {decision.round} cannot be aggregated: see the coordinator's log"
                log.exception("%s: aggregating round %d failed", self.id, decision.round)
            log.error("%s: %s; trying again in %.0f s", self.id, self.fault, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_MOST)

    async def _fold_and_step(self, decision: events.Aggregate) -> None:
        round_, opened = decision.round, self.state.opened
        try:
            folded = await self.values.fold(decision)
        except NothingUsable as nothing:
            log.error("%s: %s", self.id, nothing)
            event = events.Unusable(self._clock(), round_, nothing.devices)
            await self._uninterrupted(lambda: self._step(event, self._save))
            return
        now = self._clock()
        await self._uninterrupted(
            lambda: self._step(
                events.Aggregated(now, round_),
                lambda state: self.values.journal(folded, now - opened, state),
                lambda: self.values.adopt(folded),
                # Records are read back from the journal for the next downlinks, so they have to be in it.
                behind=not folded.kept,
            )
        )

    async def _sweep_first(self) -> None:
        async with self._folding:
            await asyncio.to_thread(self._sweep, True)

    def _sweep(self, first: bool = False) -> None:
        self.values.sweep(self.state.round, self.state.phase in ("finished", "stopped"), first)
