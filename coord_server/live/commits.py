"""The only writer of a federation: event -> engine -> one transaction over the version it was decided on.

What waits together is applied in turn and written together (group commit). Another process may commit to the same
federation: then the transaction finds another version, memory is loaded again and the events are applied again. Memory
is a cache of one version; nothing is acknowledged, sent or started before its transaction is on disk. The timer of the
round's deadline is here too, because time is an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from coord_server import engine
from coord_server.events import Acknowledge, Decision, Draw, Event, Present, Refuse, Tick
from coord_server.live.faults import Faults
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.rows import Rows
from coord_server.store.tables import Head
from edge_client.errors import MaskfleetError, StateError, StorageUnreachableError
from edge_client.protocol.messages import FederationConfig

log = logging.getLogger("maskfleet")

LOOK_MOST = 60.0  # seconds until the deadline is looked at again, so that a clock that is set does no harm
LOOK_DRAWING = 5.0  # seconds between looks at who is present while a round waits for devices
RETRY = 1.0  # seconds until a deadline that could not be written is tried again
TRIES = 50  # commits of other processes in between until a batch is given up

Write = Callable[[Rows], None]


@dataclass(frozen=True)
class Followers:
    """What the rest of a live federation does about a commit."""

    present: Callable[[float], Awaitable[tuple[str, ...]]]
    """The devices that can be drawn now, sorted by name."""
    moved: Callable[[engine.State], None]
    """Memory holds a new state; the argument is the one before."""
    carry_out: Callable[[Sequence[Decision]], None]
    """Begin what a commit of this process decided."""
    reloaded: Callable[[Head], None]
    """Another process has committed; called before `moved`."""


@dataclass
class _Waiting:
    """An event until its answer; None asks only that memory is brought up to date."""

    event: Event | None
    write: Write | None
    adopt: Callable[[], None]
    answer: asyncio.Future[tuple[Decision, ...]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def resolve(self, answer: tuple[Decision, ...] | Exception) -> None:
        """Give the answer, unless the caller has gone."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass
class _Batch:
    """Events applied one after another: the state to write, the rows that go with it, and each event's answer."""

    state: engine.State
    writes: list[Write] = field(default_factory=list)
    adopts: list[Callable[[], None]] = field(default_factory=list)
    answers: list[tuple[_Waiting, tuple[Decision, ...] | Refusal]] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, in order."""
        return [d for _, answer in self.answers if not isinstance(answer, Refusal) for d in answer]


class Commits:
    """The engine's state of federation `id` at `version`, and the queue of events that change it."""

    def __init__(
        self,
        metadata: Metadata,
        id_: str,
        config: FederationConfig,
        head: Head,
        followers: Followers,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        self.id, self.config = id_, config
        self.version, self.state = head.version, engine.load(head.state)
        self._metadata, self._followers, self._faults, self._clock = metadata, followers, faults, clock
        self._queue: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    # --- events

    async def submit(
        self, event: Event, write: Write | None = None, adopt: Callable[[], None] = lambda: None
    ) -> tuple[Decision, ...]:
        """Apply `event` and write the new state; its decisions once they are on disk.

        `write` adds rows to the same transaction, except for a duplicate. `adopt` runs when memory takes the new state,
        before anything else can see it. Raises Refusal when the engine refuses, StateError when nothing was written.
        """
        return await self._enqueue(_Waiting(event, write, adopt))

    async def refresh(self, since: int | None = None) -> bool:
        """Bring memory up to date; whether it then differs from version `since`, None: from now. Raises StateError."""
        before = self.version if since is None else since
        await self._enqueue(_Waiting(None, None, lambda: None))
        return self.version != before

    async def ask(self, event: Event) -> Decision | None:
        """The engine's first decision about `event`, without applying it. Raises Refusal, StateError."""
        _, decisions = engine.apply(self.config, self.state, event)
        if decisions and isinstance(decisions[0], Refuse) and await self.refresh():
            _, decisions = engine.apply(self.config, self.state, event)
        first = decisions[0] if decisions else None
        if isinstance(first, Refuse):
            raise Refusal(first.kind, first.detail)
        return first

    async def _enqueue(self, waiting: _Waiting) -> tuple[Decision, ...]:
        if self._closed:
            raise StorageUnreachableError("the coordinator is going down; send the request again soon")
        self._queue.append(waiting)
        if self._writer is None:
            self._writer = asyncio.create_task(self._drain())
        return await waiting.answer

    async def _drain(self) -> None:
        """Commit what waits until nothing does."""
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                try:
                    await self._commit(batch)
                except Exception as error:
                    for waiting in batch:
                        waiting.resolve(error)
        finally:
            self._writer = None

    async def _commit(self, waiting: list[_Waiting]) -> None:
        if any(w.event is None for w in waiting):
            await self._reload()
        for _ in range(TRIES):
            batch = await self._apply(waiting)
            if any(isinstance(answer, Refusal) for _, answer in batch.answers) and await self._reload():
                continue  # a refusal that an old memory decided
            if (batch.state == self.state and not batch.writes) or await self._write(batch):
                break
            await self._reload()
        else:
            raise StorageUnreachableError("other coordinators commit without a pause; send the request again")
        self._faults.clear("commits")
        self._followers.carry_out(batch.decisions)
        for one, answer in batch.answers:
            one.resolve(answer)

    async def _apply(self, waiting: list[_Waiting]) -> _Batch:
        """Apply every event to the state that the one before it left; a Draw is answered at once."""
        batch = _Batch(self.state)
        for one in waiting:
            if one.event is None:
                batch.answers.append((one, ()))
                continue
            after, decisions = engine.apply(self.config, batch.state, one.event)
            if decisions and isinstance(decisions[0], Refuse):
                batch.answers.append((one, Refusal(decisions[0].kind, decisions[0].detail)))
                continue
            if any(isinstance(d, Draw) for d in decisions):
                now = self._clock()
                after, more = engine.apply(self.config, after, Present(now, await self._followers.present(now)))
                decisions = (*decisions, *more)
            if one.write is not None and not any(isinstance(d, Acknowledge) and d.duplicate for d in decisions):
                batch.writes.append(one.write)
                batch.adopts.append(one.adopt)
            batch.state = after
            batch.answers.append((one, decisions))
        return batch

    async def _write(self, batch: _Batch) -> bool:
        """Write the batch and take its state; False when another process was first. Raises StateError."""
        stamp, text = uuid4().hex, engine.dump(batch.state)
        try:
            written = await asyncio.to_thread(self._metadata.commit, self.id, self.version, text, stamp, batch.writes)
        except StateError as error:
            self._faults.set("commits", str(error))
            if (await asyncio.to_thread(self._metadata.head, self.id)).stamp != stamp:
                await self._reload()
                raise
            written = True  # only the confirmation was lost
        if written:
            before, self.state = self.state, batch.state
            self.version += 1
            for adopt in batch.adopts:
                adopt()
            self._moved(before)
        return written

    async def _reload(self) -> bool:
        """Take the database's state if its version is another one; whether it was. Raises StateError."""
        head = await asyncio.to_thread(self._metadata.head, self.id)
        if head.version == self.version:
            return False
        before, self.state = self.state, engine.load(head.state)
        self.version = head.version
        self._followers.reloaded(head)
        self._moved(before)
        return True

    # --- time

    def begin(self) -> None:
        """Start the timer."""
        self._arm()

    def _moved(self, before: engine.State) -> None:
        self._arm()
        if before != self.state:
            self._followers.moved(before)

    def _arm(self) -> None:
        """Wait for the deadline that the state has now, or for devices, instead of what it had."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        s = self.state
        if self._closed or s.phase != "running" or s.stage not in ("drawing", "collecting"):
            return
        delay = LOOK_DRAWING
        if s.deadline is not None:
            delay = min(max(s.deadline - self._clock(), 0.0), LOOK_MOST)
        self._timer = asyncio.get_running_loop().call_later(delay, self._start_tick)

    def _start_tick(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        now = self._clock()
        try:
            with self._faults.watch("clock", "the deadline cannot be acted upon"):
                drawing = self.state.stage == "drawing"
                await self.submit(Present(now, await self._followers.present(now)) if drawing else Tick(now))
        except MaskfleetError as error:
            log.error("%s: %s", self.id, error)
            await asyncio.sleep(RETRY)
        finally:
            self._ticking = None
            self._arm()

    async def close(self) -> None:
        """Finish what is being written, then accept nothing more."""
        self._closed = True
        self._arm()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._writer is not None:
            await asyncio.wait([self._writer])
