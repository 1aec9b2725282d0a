"""Updates on their way in: received within their limit, checked, committed together with the state that counts them.

A small body goes into its row of the database. A large one is spooled to the blob store while it arrives and is durable
there before its row refers to it. A body is in memory once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from coord_server import aggregation, metrics
from coord_server.aggregation import Checked
from coord_server.events import Acknowledge, Updated
from coord_server.live.commits import Commits
from coord_server.live.method_state import GlobalState, MethodState, StaleError
from coord_server.live.rounds import Rounds
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.blobs import Incoming
from coord_server.store.values import INLINE, Content
from edge_client.bundle import digest
from edge_client.errors import PayloadError, StorageUnreachableError
from edge_client.protocol.messages import Receipt
from edge_client.task import Assignment

SPOOL = 1 << 20  # bytes of an upload gathered before a thread writes them


class Uploads:
    """The updates of one federation on their way in. Coroutines may be called concurrently."""

    def __init__(self, store: Store, commits: Commits, method_state: MethodState, rounds: Rounds) -> None:
        self.id = commits.id
        self._store, self._commits, self._method_state, self._rounds = store, commits, method_state, rounds

    async def limit(self) -> int:
        """The most bytes an update may have. Raises StateError."""
        return aggregation.update_limit(self._method_state.method, (await self._method_state.current()).course)

    async def admit(self, round_: int, device: str, lease: str, sha256: str) -> Receipt | None:
        """Before the body is read: the receipt of an update that is already in, None when the body should be read.

        Raises Refusal when the update cannot be accepted, StateError.
        """
        event = Updated(self._commits.clock(), round_, device, lease, sha256)
        try:
            first = await self._commits.ask(event)
        except Refusal:  # the round may be over; the database still has its updates
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

    async def take(
        self,
        round_: int,
        device: str,
        lease: str,
        sha256: str,
        body: AsyncIterator[bytes],
        cost: str | None = None,
    ) -> Receipt:
        """Receive, check, commit, acknowledge; `cost` is the header beside the update, checked before.

        Raises Refusal, StateError. A refused update leaves nothing behind. A checked one is committed even when the
        caller disconnects.
        """
        event = Updated(self._commits.clock(), round_, device, lease, sha256)
        incoming = self._store.blobs.receive(self._method_state.shelf("updates", round_))
        try:
            with self._commits.faults.watch("updates", f"the update of {device!r} could not be accepted"):
                size, small = await receive(incoming, body, await self.limit(), "an update of this method")
                await self._commits.ask(event)  # the round may be over by now, and then nothing is stored
                checked = await self._check(event, incoming, small)
                now, content = self._commits.clock(), Content(sha256, small)
                await self._commits.submit(
                    event,
                    lambda rows: rows.add_update(round_, device, content, size, now, checked.influence, cost),
                    lambda: self._rounds.remember(device, checked),
                )
        except Refusal:  # an earlier request may have committed it without a confirmation
            known = await self._known(event)
            if known is None:
                raise
            return known
        finally:
            incoming.discard()
        metrics.ACCEPTED.inc()
        metrics.BYTES.labels("up", "update").inc(size)
        return self._receipt(event, size)

    async def _check(self, event: Updated, incoming: Incoming, small: bytes | None) -> Checked:
        """Check the body against its claims and its round. Raises Refusal, StateError."""
        for _ in range(3):
            version, current = self._commits.version, await self._method_state.current()
            try:
                checked = await asyncio.to_thread(self._check_now, event, incoming, small, current)
            except PayloadError as error:
                if not await self._commits.refresh(version):
                    fault = f"the update of {event.device!r} for round {event.round}: {error}"
                    raise Refusal("bad-payload", fault) from None
                continue
            if checked is not None:
                return checked
            await self._commits.refresh()  # another process may have opened or closed the update's round
            await self._commits.ask(event)
        raise StorageUnreachableError("other coordinators commit without a pause; send the update again")

    def _check_now(self, e: Updated, incoming: Incoming, small: bytes | None, current: GlobalState) -> Checked | None:
        """Check digest and content, then write a large body to disk; None when memory holds the state of another round
        or has no place for the device.

        Blocks. Raises Refusal, PayloadError, StateError.
        """
        found = incoming.sha256 if small is None else digest(small)
        if found != e.sha256:
            fault = f"the body's SHA-256 is {found}, Content-Digest says {e.sha256}; it was damaged on the way"
            raise Refusal("bad-digest", f"{fault}, send it again")
        state = self._commits.state
        if not current.round + 1 == e.round == state.round or e.device not in state.asked:
            return None
        data = incoming.content() if small is None else small
        try:
            assignment = Assignment(current.course, e.round, e.device, state.asked[e.device])
            record = self._method_state.record(e.device, e.round)
            checked = aggregation.check_update(self._method_state.method, assignment, current.state, record, data)
        except StaleError:
            return None
        if small is None:
            incoming.commit()
        return checked


async def receive(incoming: Incoming, body: AsyncIterator[bytes], limit: int, what: str) -> tuple[int, bytes | None]:
    """Read at most `limit` bytes: their number, and a small body itself; a large one is in `incoming`.

    Of a large body, a thread writes full megabytes while the next one arrives. Raises Refusal, StateError.
    """
    size, pieces, writing = 0, bytearray(), asyncio.ensure_future(asyncio.sleep(0))
    async for chunk in body:
        size += len(chunk)
        if size > limit:
            raise Refusal("too-large", f"{what} has at most {limit} bytes; this body exceeds that")
        pieces += chunk
        if len(pieces) >= SPOOL:
            await writing
            writing = asyncio.ensure_future(asyncio.to_thread(incoming.write, pieces))
            pieces = bytearray()
    await writing
    if size <= INLINE:
        return size, bytes(pieces)
    await asyncio.to_thread(incoming.write, pieces)
    return size, None
