"""Uploads on their way in: received within their limit, digested, checked, shown to the engine.

A small body stays in memory and goes into its row of the database; a large one is spooled to the blob store while it
arrives and is durable there before anybody hears of it. Journalling what the engine takes is not done here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from coord_server.aggregation import Checked
from coord_server.engine import State, apply
from coord_server.events import Acknowledge, Decision, Refuse, Updated
from coord_server.refusals import Refusal
from coord_server.store.blobs import Blobs, Incoming
from coord_server.store.tables import INLINE, Acknowledged, Content, Seen
from edge_client.bundle import digest as sha256_of
from edge_client.errors import PayloadError
from edge_client.protocol.messages import FederationConfig

SPOOL = 1 << 20  # bytes of an upload gathered before a thread writes them


@dataclass(frozen=True)
class Body:
    """A received body: all of it in `data`, or spooled in `incoming` with `data` still to be appended."""

    data: bytes
    incoming: Incoming | None

    def digest(self) -> str:
        """SHA-256 of all of it; the rest of a spooled body is appended. Blocks; ask once. Raises StateError."""
        if self.incoming is None:
            return sha256_of(self.data)
        self.incoming.write(self.data)
        return self.incoming.stored().sha256

    def discard(self) -> None:
        """Forget what was not made durable."""
        if self.incoming is not None:
            self.incoming.discard()


@dataclass(frozen=True)
class Valid:
    """A body that is what it should be. Its content is durable, or small enough for its row."""

    content: Content
    size: int
    checked: Checked | None
    """None when its round was over before it was read: the engine will refuse it."""


@dataclass
class Upload:
    """A body and what it claims to be, until `answer` is given."""

    event: Updated
    body: Body
    valid: Valid | None = None
    answer: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The update's size in bytes once it is journalled, or what is in the way."""

    def answered(self, answer: int | Exception) -> None:
        """Give the answer, unless whoever asked has gone."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass
class Batch:
    """What the engine says to several uploads, one after the other: a state to be journalled together with `taken`."""

    state: State
    decisions: list[Decision] = field(default_factory=list)
    taken: list[tuple[Acknowledged, Checked]] = field(default_factory=list)
    answers: list[tuple[Upload, int | Exception]] = field(default_factory=list)


async def receive(blobs: Blobs, shelf: str, body: AsyncIterator[bytes], limit: int, what: str) -> Body:
    """Read at most `limit` bytes; of a large body, a thread writes full megabytes while the next one arrives.

    Raises Refusal, StateError; then nothing is kept.
    """
    pieces: list[bytes] = []
    size = waiting = 0
    incoming: Incoming | None = None
    writing: asyncio.Future[None] | None = None
    try:
        async for chunk in body:
            size += len(chunk)
            if size > limit:
                raise Refusal("too-large", f"the body exceeds {limit} bytes, the most that {what} has here")
            pieces.append(chunk)
            waiting += len(chunk)
            if waiting >= SPOOL:
                if writing is not None:
                    await writing
                incoming = incoming or blobs.receive(shelf)
                writing = asyncio.ensure_future(asyncio.to_thread(incoming.write, b"".join(pieces)))
                pieces, waiting = [], 0
        if writing is not None:
            await writing
    except BaseException:
        if incoming is not None:
            incoming.discard()
        raise
    if incoming is None and size > INLINE:
        incoming = blobs.receive(shelf)
    return Body(b"".join(pieces), incoming)


class Turns:
    """At most one body of a device is read at a time: a newer one takes the turn of an older one."""

    def __init__(self) -> None:
        self._reading: dict[str, asyncio.Task[Body]] = {}

    async def read(self, device: str, reading: Coroutine[Any, Any, Body]) -> Body:
        """What `reading` receives. Raises Refusal when a newer one of `device` begins, and what `reading` raises."""
        older = self._reading.get(device)
        if older is not None:
            older.cancel()
        task = self._reading[device] = asyncio.create_task(reading)
        try:
            return await task
        except asyncio.CancelledError:
            if self._reading.get(device) is task:  # not the turn was lost: whoever asked is going away
                raise
            raise Refusal("superseded", f"{device!r} has begun another upload; this one was given up") from None
        finally:
            if self._reading.get(device) is task:
                del self._reading[device]


def validate(body: Body, sha256: str, check: Callable[[bytes], Checked | None]) -> Valid:
    """Digest, then content, then, for a large body, the disk. Blocks. Raises Refusal, StateError."""
    found = body.digest()
    size = len(body.data) if body.incoming is None else body.incoming.stored().size
    if found != sha256:
        raise Refusal(
            "bad-digest",
            f"the body's SHA-256 is {found}, Content-Digest says {sha256}; it was damaged on the way, send it again",
        )
    data = body.data if body.incoming is None else body.incoming.content()
    try:
        checked = check(data)
    except PayloadError as error:
        raise Refusal("bad-payload", str(error)) from None
    if body.incoming is None:
        return Valid(Content(sha256, data), size, checked)
    body.incoming.commit(indexed=True)
    return Valid(Content(sha256, None), size, checked)


def weigh(
    config: FederationConfig,
    state: State,
    uploads: list[Upload],
    check: Callable[[Upload], Valid],
    seen: Mapping[str, Seen],
) -> Batch:
    """Check each upload that is not yet, and ask the engine about it in the state that the one before it left.

    `seen` is what the journal does not know yet of a device. Raises StateError.
    """
    batch = Batch(state)
    for upload in uploads:
        event = upload.event
        try:
            valid = upload.valid or check(upload)
        except Refusal as refused:
            batch.answers.append((upload, refused))
            continue
        after, (first, *more) = apply(config, batch.state, event)
        if isinstance(first, Refuse):
            batch.answers.append((upload, Refusal(first.kind, first.detail)))
            continue
        batch.answers.append((upload, valid.size))
        if isinstance(first, Acknowledge) and not first.duplicate and valid.checked is not None:
            known = seen.get(event.device, Seen(event.now))
            row = Acknowledged(event.round, event.device, valid.content, valid.size, event.now, known)
            batch.taken.append((row, valid.checked))
            batch.state = after
            batch.decisions += more
    return batch
