"""The only writer of a federation: event -> engine -> one transaction over the version it was decided on.

Queued events are applied in order and written in one transaction (group commit). Another process may commit to the same
federation: then the transaction finds another version, memory is loaded again and the events are applied again. Memory
is a cache of one version; nothing is acknowledged, sent or started before its transaction is on disk. The timer of the
round's deadline is here too, because time is an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coord_server import engine, metrics
from coord_server.events import Acknowledge, Decision, Draw, Event, Present, Refuse, Removed, Tick
from coord_server.live.status import Faults
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.rows import Rows
from coord_server.store.tables import Head
from edge_client.errors import MaskfleetError, StateError, StorageUnreachableError
from edge_client.protocol.messages import FederationConfig

log = logging.getLogger("maskfleet")

LOOK_MOST = 60.0  # seconds between looks at the deadline, so that setting the clock does no harm
LOOK_DRAWING = 5.0  # seconds between looks at which devices can be drawn while a round waits for them
RETRY = 1.0  # seconds until a deadline that could not be written is tried again
TRIES = 50  # commits of other processes in between until a batch is given up

Write = Callable[[Rows], Any]
Answer = tuple[Decision, ...]


@dataclass(frozen=True)
class Followers:
    """What the rest of a live federation does about a commit."""

    present: Callable[[float], Awaitable[Present]]
    """The devices that can be drawn now."""
    committed: Callable[[engine.State], None]
    """Memory holds a new version; the argument is the state before, which may be the same."""
    carry_out: Callable[[Sequence[Decision]], None]
    """Begin what a commit of this process decided."""
    reloaded: Callable[[Head], None]
    """Another process has committed; called before `committed`."""


@dataclass
class _Waiting:
    """An event that waits for its answer."""

    event: Event
    write: Write | None
    adopt: Callable[[], None]
    answer: asyncio.Future[Answer]

    def resolve(self, answer: Answer | Exception) -> None:
        """Give the answer, unless the caller was cancelled."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


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
        self.id, self.initial_config = id_, config
        self.version, self.first, self.state = head.version, head.first, engine.load(head.state)
        self._metadata, self._followers, self.faults, self.clock = metadata, followers, faults, clock
        self._queue: list[_Waiting] = []
        self._memory = asyncio.Lock()  # held while the state and its version change
        self._refresh: asyncio.Task[None] | None = None  # until it starts to read
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def config(self) -> FederationConfig:
        """The settings in force: `initial_config` with what the operator has changed since."""
        return engine.in_force(self.initial_config, self.state)

    # --- events

    async def submit(
        self, event: Event, write: Write | None = None, adopt: Callable[[], None] = lambda: None
    ) -> Answer:
        """Apply `event` and write the new state; its decisions once they are on disk.

        `write` adds rows to the same transaction, except for a duplicate. `adopt` runs when memory takes the new state,
        before anything else can see it. The event is committed even when the caller is cancelled. Raises Refusal when
        the engine refuses, StateError when that was not confirmed: the caller then sends the same request again.
        """
        if self._closed:
            await self._head()  # of a deleted federation there is none
            raise StorageUnreachableError("the coordinator is going down; send the request again soon")
        waiting = _Waiting(event, write, adopt, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._writer is None:
            self._writer = asyncio.create_task(self._drain())
        return await waiting.answer

    async def refresh(self, since: int | None = None) -> bool:
        """Reload memory; whether its version changed since `since`, None: since before the call. Raises StateError."""
        before = self.version if since is None else since
        if self._refresh is None:
            self._refresh = asyncio.create_task(self._refreshed())
        await asyncio.shield(self._refresh)
        return self.version != before

    async def _refreshed(self) -> None:
        """One read for all callers that wait for it; a caller that comes after its start needs another."""
        async with self._memory:
            self._refresh = None
            await self._reload()

    async def ask(self, event: Event) -> Decision | None:
        """The engine's first decision about `event`, without applying it. Raises Refusal, StateError."""
        _, decisions = engine.apply(self.initial_config, self.state, event)
        if decisions and isinstance(decisions[0], Refuse) and await self.refresh():
            _, decisions = engine.apply(self.initial_config, self.state, event)
        first = decisions[0] if decisions else None
        if isinstance(first, Refuse):
            raise Refusal(first.kind, first.detail)
        return first

    async def _drain(self) -> None:
        """Commit what waits in the queue until it is empty."""
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                try:
                    async with self._memory:
                        answers = await self._commit(batch)
                except Exception as error:
                    answers = [error] * len(batch)
                for waiting, answer in zip(batch, answers, strict=True):
                    waiting.resolve(answer)
        finally:
            self._writer = None

    async def _commit(self, batch: list[_Waiting]) -> list[Answer | Exception]:
        """Apply the events one after another and write them together; the answer to each."""
        draws = not any(isinstance(one.event, Removed) for one in batch)
        for _ in range(TRIES):
            state, answers, counted = self.state, list[Answer | Exception](), list[_Waiting]()
            for one in batch:
                state, decisions = await self._apply(state, one.event, draws)
                first = decisions[0] if decisions else None
                if isinstance(first, Refuse):
                    answers.append(Refusal(first.kind, first.detail))
                    continue
                if one.write is not None and not (isinstance(first, Acknowledge) and first.duplicate):
                    counted.append(one)
                answers.append(decisions)
            if any(isinstance(answer, Refusal) for answer in answers) and await self._reload():
                continue  # the refusal was decided on an old state; decide again
            if (state == self.state and not counted) or await self._write(state, counted):
                break
            await self._reload()
        else:
            raise StorageUnreachableError("other coordinators commit without a pause; send the request again")
        self.faults.clear("commits")
        self._followers.carry_out([d for answer in answers if isinstance(answer, tuple) for d in answer])
        return answers

    async def _apply(self, state: engine.State, event: Event, draws: bool) -> tuple[engine.State, Answer]:
        """Apply an event. With `draws` a Draw is answered at once; not beside a removal, which is not written yet."""
        state, decisions = engine.apply(self.initial_config, state, event)
        if draws and any(isinstance(d, Draw) for d in decisions):
            state, more = engine.apply(self.initial_config, state, await self._followers.present(self.clock()))
            decisions = (*decisions, *more)
        return state, decisions

    async def _write(self, state: engine.State, counted: list[_Waiting]) -> bool:
        """Write the state with its rows and take it; False when another process was first.

        Raises StateError. If the transaction was committed nevertheless, the next one finds a new version and reloads.
        """
        rows, text = [one.write for one in counted if one.write is not None], engine.dump(state)
        try:
            with metrics.COMMIT.time():
                written = await asyncio.to_thread(self._metadata.commit, self.id, self.version, text, rows)
        except StateError as error:
            self.faults.set("commits", str(error))
            raise
        if written:
            before, self.state = self.state, state
            self.version += 1
            for one in counted:
                one.adopt()
            self._arm()
            self._followers.committed(before)
        return written

    async def _reload(self) -> bool:
        """Load the database's state when its version differs; whether it did. Raises Refusal, StateError."""
        head = await self._head()
        if head.version == self.version:
            return False
        before, self.state = self.state, engine.load(head.state)
        self.version = head.version
        self._followers.reloaded(head)
        self._arm()
        self._followers.committed(before)
        return True

    async def _head(self) -> Head:
        """The federation's row as it stands. Raises Refusal when it was deleted, StateError."""
        head = await asyncio.to_thread(self._metadata.head, self.id)
        if head.first != self.first:
            raise Refusal("not-found", f"federation {self.id!r} was deleted; another one has its name now")
        return head

    # --- time

    def begin(self) -> None:
        """Start the timer; a round that waits for devices looks for them at once."""
        self._arm(0.0)

    def _arm(self, look: float | None = None) -> None:
        """Set the timer to the state's deadline; in stage drawing to `look` seconds, by default LOOK_DRAWING."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        s = self.state
        if self._closed or s.phase != "running" or s.stage not in ("drawing", "collecting"):
            return
        delay = LOOK_DRAWING if look is None else look
        if s.deadline is not None:
            delay = min(max(s.deadline - self.clock(), 0.0), LOOK_MOST)
        self._timer = asyncio.get_running_loop().call_later(delay, self._start_tick)

    def _start_tick(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        now = self.clock()
        try:
            with self.faults.watch("clock", "the deadline cannot be acted upon"):
                drawing = self.state.stage == "drawing"
                await self.submit(await self._followers.present(now) if drawing else Tick(now))
        except MaskfleetError as error:
            if not isinstance(error, Refusal):  # another coordinator has just deleted it
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
