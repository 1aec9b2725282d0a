"""The one way a federation's state changes: asked of the engine, journalled, adopted, its decisions carried out.

Everything happens under one lock. A step may be journalled behind, at the next one: who asks for that must know that
a coordinator that dies first will take the same step again. What the decisions mean is in `federation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from coord_server import engine, events
from coord_server.refusals import Refusal
from coord_server.store import Store
from edge_client.errors import StateError
from edge_client.protocol.messages import FederationConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Followers:
    """What follows from a change; all are called under the lock."""

    moved: Callable[[engine.State], None]
    """The state has changed; it was the argument."""
    carry_out: Callable[[tuple[events.Decision, ...]], None]
    """Begin to do what the engine decided."""
    reload: Callable[[], Awaitable[None]]
    """Take everything from the database anew, the state last. Raises StateError."""


class Journal:
    """The engine's state of federation `id`, never ahead of the disk by more than one step."""

    def __init__(
        self, store: Store, id_: str, config: FederationConfig, state: engine.State, followers: Followers
    ) -> None:
        self.id, self.config, self.state = id_, config, state
        self._store, self._followers = store, followers
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._behind: Callable[[], None] | None = None
        self.unsure = False
        """Whether the last write may be in the database although it failed."""

    # --- who works

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` beside its caller, until `close` at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def uninterrupted(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` under the lock to its end, even when whoever asked for it goes away."""

        async def locked() -> T:
            async with self._lock:
                return await work()

        return await asyncio.shield(self.spawn(locked()))

    async def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Once nobody has the lock, end every task, then do `last`."""
        async with self._lock:
            for task in self._tasks:
                task.cancel()
            await last()

    # --- steps

    async def step(
        self,
        event: events.Event,
        write: Callable[[str], None],
        adopt: Callable[[], None] = lambda: None,
        written: Callable[[], None] = lambda: None,
        behind: bool = False,
    ) -> tuple[events.Decision, ...]:
        """Ask the engine, journal its new state, adopt it and carry out its decisions. The lock is held.

        `write` gets the state as JSON and runs in a thread, with `behind` at the next `flush`; then `written`, once the
        journal has it, even when `write` could not say so. `adopt` changes what else memory holds. Raises Refusal when
        the engine refuses, StateError when the disk takes nothing: then nothing has changed.
        """
        await self.flush()
        state, decisions = engine.apply(self.config, self.state, event)
        for decision in decisions:
            if isinstance(decision, events.Refuse):
                raise Refusal(decision.kind, decision.detail)
        if state != self.state:
            text = engine.dump(state)

            def journalled() -> None:
                self.write(write, text)
                written()

            if behind:
                self._behind = journalled
            else:
                await asyncio.to_thread(journalled)
        self.adopt(state, decisions, adopt)
        return decisions

    def adopt(
        self,
        state: engine.State,
        decisions: tuple[events.Decision, ...],
        adopt: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on from a state that is journalled, or will be before the next one. The lock is held."""
        if state != self.state:
            before, self.state = self.state, state
            adopt()
            self._followers.moved(before)
        self._followers.carry_out(decisions)

    async def flush(self) -> None:
        """Journal what was left behind, and make sure that memory and disk agree. The lock is held.

        Raises StateError.
        """
        if self.unsure and self._behind is None:  # what is left behind is simply written again
            if await asyncio.to_thread(self._store.metadata.state, self.id) != engine.dump(self.state):
                await self._followers.reload()
            self.unsure = False
        if self._behind is not None:
            await asyncio.to_thread(self._behind)
            self._behind, self.unsure = None, False

    def write(self, write: Callable[[str], None], state: str) -> None:
        """Write; when the database is not sure that it did, look; when it cannot be asked, look next time. Blocks."""
        try:
            write(state)
        except StateError as failed:
            try:
                found = self._store.metadata.state(self.id)
            except StateError:
                self.unsure = True
                raise failed from None
            if found != state:
                raise

    def save(self, state: str) -> None:
        """The `write` of a step that changes nothing else. Blocks."""
        self._store.metadata.save_state(self.id, state)
