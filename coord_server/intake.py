"""Updates taken into their round: welcome or not, then received, journalled together, acknowledged.

How one body is received and checked is in `uploads`; what the round does with its updates, in `closing`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from coord_server import aggregation, engine, events
from coord_server.aggregation import Checked, Course
from coord_server.closing import AtOnce, Closing
from coord_server.journal import Journal
from coord_server.refusals import Refusal
from coord_server.roster import Roster
from coord_server.store import Store
from coord_server.uploads import Batch, Turns, Upload, Valid, receive, validate, weigh
from coord_server.values import Values
from edge_client.errors import StateError
from edge_client.protocol.messages import Receipt
from edge_client.protocol.payload import Arrays

IN_TURN = 0.002  # seconds that the last check took at most, for the next ones to be done one by one under the lock


class Intake:
    """The updates of one federation on their way in. Coroutines may be called concurrently."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        values: Values,
        roster: Roster,
        closing: Closing,
        clock: Callable[[], float],
    ) -> None:
        self.id = journal.id
        self._store, self._journal, self._values = store, journal, values
        self._roster, self._closing, self._clock = roster, closing, clock
        self._uploads: list[Upload] = []
        self._turns = Turns()
        self._check_took = math.inf  # nothing is known of the first check
        self._fault: tuple[int, str] | None = None  # the round then under way, and why an update could not be taken in

    @property
    def fault(self) -> str | None:
        """Why an update of the round under way could not be taken in, until one is; None when nothing is in the way."""
        if self._fault is None or self._over(self._fault[0]):
            return None
        return self._fault[1]

    @contextmanager
    def _storing(self, device: str) -> Iterator[None]:
        """What the disk refuses meanwhile is told to the operator too."""
        try:
            yield
        except StateError as error:
            self._fault = self._journal.state.round, f"the update of {device!r} could not be taken in: {error}"
            raise

    async def admit(self, round_: int, device: str, lease: str, sha256: str) -> Receipt | None:
        """Before the body is read: the receipt when the update is already in, None when it is welcome.

        Raises Refusal otherwise.
        """
        event = events.Updated(self._clock(), round_, device, lease, sha256)
        if self._over(round_):
            size = await asyncio.to_thread(self._size_in_journal, event)
            if size is not None:
                return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=size)
        _, decisions = engine.apply(self._journal.config, self._journal.state, event)
        first = decisions[0]
        if isinstance(first, events.Refuse):
            raise Refusal(first.kind, first.detail)
        if isinstance(first, events.Acknowledge) and first.duplicate:
            size = await asyncio.to_thread(self._size_in_journal, event)
            if size is None:
                raise Refusal("internal-error", f"the update of {device!r} in round {round_} is not in the journal")
            return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=size)
        return None

    def _over(self, round_: int) -> bool:
        """Whether the engine no longer remembers which updates of a round it has."""
        return round_ < self._journal.state.round or self._journal.state.phase in ("finished", "stopped")

    def _size_in_journal(self, event: events.Updated) -> int | None:
        """The size of exactly this update, when it was acknowledged. Blocks. Raises StateError."""
        found = self._store.metadata.acknowledged(self.id, event.round, event.device)
        return found[1] if found is not None and found[0] == event.sha256 else None

    async def limit(self) -> int:
        """The most bytes an update may have."""
        course, _ = await self._values.ready()
        return aggregation.update_limit(course)

    async def take(self, round_: int, device: str, lease: str, sha256: str, body: AsyncIterator[bytes]) -> Receipt:
        """Receive, check, journal, acknowledge. Raises Refusal, StateError; then nothing of it is kept.

        A large update is checked and made durable by itself; small ones are journalled together with those that
        arrive while the disk is busy, and checked then too unless that takes long, so that one transaction and one
        thread take in all of them.
        """
        shelf = self._values.updates_shelf(round_)
        reading = receive(self._store.blobs, shelf, body, await self.limit(), "an update")
        with self._storing(device):
            received = await self._turns.read(device, reading)
        try:
            upload = Upload(events.Updated(self._clock(), round_, device, lease, sha256), received)
            if received.incoming is not None or self._check_took > IN_TURN:
                course, arrays = await self._values.ready()
                with self._storing(device):
                    upload.valid = await asyncio.to_thread(self._validate, course, arrays, upload)
            self._uploads.append(upload)
            await self._journal.uninterrupted(self._take_in)
            size = await upload.answer
        finally:
            received.discard()
        return Receipt(federation=self.id, round=round_, device=device, sha256=sha256, size=size)

    def _validate(self, course: Course, arrays: Arrays, upload: Upload) -> Valid:
        """Check a body against its claims; one whose round is over is left to the engine."""
        e = upload.event

        def check(data: bytes) -> Checked | None:
            if self._journal.state.round != e.round:
                return None
            began = thread_time()  # of this thread alone: others that check meanwhile do not make it look slow
            try:
                return self._values.check(course, arrays, e.round, e.device, data)
            finally:
                self._check_took = thread_time() - began

        return validate(upload.body, e.sha256, check)

    async def _take_in(self) -> None:
        """Take in every upload that waits, in one transaction. The lock is held; each upload gets its answer."""
        uploads, self._uploads = self._uploads, []
        if not uploads:
            return
        try:
            await self._journal.flush()  # whose fault is not the updates' but the closing's, which tells it
            course, arrays = await self._values.ready()
            with self._storing(uploads[0].event.device):
                batch, closed = await asyncio.to_thread(self._write, course, arrays, uploads)
        except BaseException as error:
            for upload in uploads:
                upload.answered(error if isinstance(error, Exception) else StateError("going down; send it again"))
            if isinstance(error, Exception):
                return
            raise

        if batch.taken:
            self._fault = None

        def adopt() -> None:
            for row, checked in batch.taken:
                self._roster.written(row.device, row.seen)
                if closed is None:
                    self._values.remember(row.device, checked)
            if closed is not None:
                self._closing.adopt(closed)

        if closed is None:
            self._journal.adopt(batch.state, tuple(batch.decisions), adopt)
        else:
            self._journal.adopt(closed.state, closed.decisions, adopt)
        for upload, answer in batch.answers:
            upload.answered(answer)

    def _write(self, course: Course, arrays: Arrays, uploads: list[Upload]) -> tuple[Batch, AtOnce | None]:
        """Check uploads, ask the engine about each in turn, and journal those it takes. Blocks. Raises StateError.

        When they complete a small round it is closed together with them.
        """
        journal = self._journal
        batch = weigh(
            journal.config, journal.state, uploads, lambda u: self._validate(course, arrays, u), self._roster.seen()
        )
        closed: AtOnce | None = None
        for i, (upload, answer) in enumerate(batch.answers):
            if isinstance(answer, Refusal) and self._over(upload.event.round):
                # The write that took it in, and closed its round, may have failed only to say so.
                batch.answers[i] = upload, self._size_in_journal(upload.event) or answer
        if batch.taken:
            taken = {row.device: checked for row, checked in batch.taken}
            for decision in batch.decisions:  # at most one
                if isinstance(decision, events.Aggregate):
                    closed = self._closing.at_once(batch.state, decision, taken)
            rows, final = [row for row, _ in batch.taken], batch.state if closed is None else closed.state
            journal.write(
                lambda state: self._store.metadata.acknowledge(
                    self.id, rows, state, None if closed is None else closed.rows
                ),
                engine.dump(final),
            )
        return batch, closed
