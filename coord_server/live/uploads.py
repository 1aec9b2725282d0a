"""Updates on their way in: received within their limit, checked, committed together with the state that counts them.

A small body goes into its row of the database. A large one is spooled to the blob store while it arrives and is durable
there before its row refers to it. A body is in memory once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from coord_server import aggregation
from coord_server.aggregation import Checked
from coord_server.events import Acknowledge, Updated
from coord_server.live.commits import Commits
from coord_server.live.devices import Devices
from coord_server.live.faults import Faults
from coord_server.live.method_state import MethodState, StaleError, Values
from coord_server.live.rounds import Rounds
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.blobs import Blobs, Incoming
from coord_server.store.tables import UpdateRow
from coord_server.store.values import INLINE, Content
from edge_client.bundle import digest
from edge_client.errors import PayloadError
from edge_client.protocol.messages import Receipt
from edge_client.task import Assignment

SPOOL = 1 << 20  # bytes of an upload gathered before a thread writes them


@dataclass
class Upload:
    """An update on its way in. `receive` sets one of the first two fields, `check` the last two."""

    event: Updated
    body: bytes | None = None
    """A small body."""
    spooled: Incoming | None = None
    """A large one."""
    size: int = 0
    content: Content | None = None
    """What its row will hold; a large body is durable by then."""
    checked: Checked | None = None
    """None while its round is not the one that memory stands at."""


class Uploads:
    """The updates of one federation on their way in. Coroutines may be called concurrently."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        method_state: MethodState,
        rounds: Rounds,
        devices: Devices,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        self.id = commits.id
        self._store, self._commits, self._values = store, commits, method_state
        self._rounds, self._devices = rounds, devices
        self._faults, self._clock = faults, clock
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._committing: set[asyncio.Task[Receipt]] = set()

    async def limit(self) -> int:
        """The most bytes an update may have. Raises StateError."""
        return aggregation.update_limit(self._values.method, (await self._values.values()).course)

    async def admit(self, round_: int, device: str, lease: str, sha256: str) -> Receipt | None:
        """Before the body is read: the receipt when the update is already in, None when it is welcome.

        Raises Refusal otherwise, StateError.
        """
        event = Updated(self._clock(), round_, device, lease, sha256)
        try:
            first = await self._commits.ask(event)
        except Refusal:  # its round may be over: then only the database remembers it
            known = await self._known(event)
            if known is None:
                raise
            return known
        return await self._known(event) if isinstance(first, Acknowledge) and first.duplicate else None

    async def _known(self, event: Updated) -> Receipt | None:
        """The receipt of exactly this update, when it was acknowledged. Raises StateError."""
        found = await asyncio.to_thread(self._store.metadata.acknowledged, self.id, event.round, event.device)
        return self._receipt(event, found[1]) if found is not None and found[0] == event.sha256 else None

    def _receipt(self, event: Updated, size: int) -> Receipt:
        return Receipt(federation=self.id, round=event.round, device=event.device, sha256=event.sha256, size=size)

    async def take(self, round_: int, device: str, lease: str, sha256: str, body: AsyncIterator[bytes]) -> Receipt:
        """Receive, check, commit, acknowledge. Raises Refusal, StateError; then nothing of it is kept.

        Once it is checked it is committed even when the caller goes away.
        """
        upload = Upload(Updated(self._clock(), round_, device, lease, sha256))
        try:
            with self._faults.watch("updates", f"the update of {device!r} could not be accepted"):
                shelf, limit = self._values.updates_shelf(round_), await self.limit()
                await self._one_at_a_time(device, receive(upload, self._store.blobs, shelf, body, limit))
                await self._check(upload)
                task = asyncio.create_task(self._commit(upload))
                self._committing.add(task)
                task.add_done_callback(self._committing.discard)
                return await asyncio.shield(task)
        finally:
            if upload.spooled is not None:
                upload.spooled.discard()

    async def _one_at_a_time(self, device: str, reading: Coroutine[Any, Any, None]) -> None:
        """Read a body of `device`. Raises Refusal when the device begins another one, and what `reading` raises."""
        older = self._reading.get(device)
        if older is not None:
            older.cancel()
        task = self._reading[device] = asyncio.create_task(reading)
        try:
            await task
        except asyncio.CancelledError:
            if self._reading.get(device) is task:  # cancelled by the caller, not superseded
                task.cancel()
                raise
            raise Refusal("superseded", f"{device!r} has begun another upload; this one was dropped") from None
        finally:
            if self._reading.get(device) is task:
                del self._reading[device]

    async def _check(self, upload: Upload) -> None:
        """Check the body against its claims and its round. Raises Refusal, StateError."""
        for _ in range(3):
            version, values = self._commits.version, await self._values.values()
            try:
                await asyncio.to_thread(self._check_now, upload, values)
            except PayloadError as error:
                fault = f"the update of {upload.event.device!r} for round {upload.event.round}: {error}"
                if not await self._commits.refresh(version):
                    raise Refusal("bad-payload", fault) from None
            if upload.checked is not None:
                return
            await self._commits.refresh()  # another process may have opened or closed the update's round
            await self._commits.ask(upload.event)
        raise Refusal("round-not-open", f"round {upload.event.round} is just being opened; send its update again soon")

    def _check_now(self, upload: Upload, values: Values) -> None:
        """Digest, then content, then, for a large body, the disk. Blocks. Raises Refusal, PayloadError, StateError."""
        e, spooled = upload.event, upload.spooled
        found = digest(upload.body or b"") if spooled is None else spooled.stored().sha256
        if found != e.sha256:
            raise Refusal(
                "bad-digest",
                f"the body's SHA-256 is {found}, Content-Digest says {e.sha256}; it was damaged on the way, send it "
                "again",
            )
        if values.round + 1 == e.round:
            data = (upload.body or b"") if spooled is None else spooled.content()
            assignment, method = Assignment(values.course, e.round, e.device), self._values.method
            try:
                record = self._values.record(e.device, e.round)
                upload.checked = aggregation.check_update(method, assignment, values.state, record, data)
            except StaleError:
                return
        if spooled is not None and upload.checked is not None:
            self._values.large = True
            spooled.commit()
        upload.content = Content(e.sha256, upload.body)

    async def _commit(self, upload: Upload) -> Receipt:
        """Commit an update that is checked. Raises Refusal, StateError."""
        event, checked = upload.event, upload.checked
        assert checked is not None
        assert upload.content is not None
        i = checked.influence
        figures: tuple[float | None, float | None, float | None] = (None, None, None)
        if i is not None:
            figures = i.norm, i.weight, i.statistics
        seen = self._devices.take(event.device)
        row = UpdateRow(
            event.round, event.device, upload.content, upload.size, self._clock(),
            *figures, seen,
        )  # fmt: skip
        written = False

        def adopt() -> None:
            nonlocal written
            written = True
            self._rounds.remember(event.device, event.round, checked)

        try:
            await self._commits.submit(event, lambda rows: rows.add_update(row), adopt)
        except Refusal:  # the commit that accepted it may have failed to report that
            known = await self._known(event)
            if known is None:
                raise
            return known
        finally:
            if not written:
                self._devices.give_back(event.device, seen)
        return self._receipt(event, upload.size)

    async def close(self) -> None:
        """Wait for the commits under way."""
        if self._committing:
            await asyncio.wait(list(self._committing))


async def receive(upload: Upload, blobs: Blobs, shelf: str, body: AsyncIterator[bytes], limit: int) -> None:
    """Read at most `limit` bytes; of a large body, a thread writes full megabytes while the next one arrives.

    Raises Refusal, StateError.
    """
    pieces = bytearray()
    writing: asyncio.Future[None] | None = None
    async for chunk in body:
        upload.size += len(chunk)
        if upload.size > limit:
            raise Refusal("too-large", f"the body exceeds {limit} bytes, the most that an update has here")
        pieces += chunk
        if len(pieces) >= SPOOL:
            upload.spooled = upload.spooled or blobs.receive(shelf)
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(asyncio.to_thread(upload.spooled.write, pieces))
            pieces = bytearray()
    if writing is not None:
        await writing
    if upload.spooled is None and upload.size > INLINE:
        upload.spooled = blobs.receive(shelf)
    if upload.spooled is None:
        upload.body = bytes(pieces)
    elif pieces:
        await asyncio.to_thread(upload.spooled.write, pieces)
