"""The one way a federation's state changes: asked of the engine, journalled, adopted, its decisions carried out.

Everything happens under one lock. A step may be journalled behind, at the next one: who asks for that must know that
a coordinator that dies first will take the same step again. What the decisions mean is in `federation`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from coord_server import engine, events
from coord_server.refusals import Refusal
from coord_server.store import Store
from edge_client.errors import StateError
from edge_client.protocol.messages import FederationConfig

T = TypeVar("T")


class Journalled(ABC):
    """The engine's state of federation `id`, never ahead of the journal by more than one step."""

    def __init__(self, store: Store, id_: str, config: FederationConfig, state: engine.State) -> None:
        self.id, self.config, self.state = id_, config, state
        self._store = store
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._behind: Callable[[], None] | None = None
        self._unsure = False  # whether the last write may be in the journal although it failed

    @abstractmethod
    async def _reload(self) -> None:
        """Take everything from the journal anew. The lock is held. Raises StateError."""

    @abstractmethod
    def _moved(self, before: engine.State) -> None:
        """The state has changed."""

    @abstractmethod
    def _carry_out(self, decisions: tuple[events.Decision, ...]) -> None:
        """Begin to do what the engine decided."""

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _uninterrupted(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` under the lock to its end, even when whoever asked for it goes away."""

        async def locked() -> T:
            async with self._lock:
                return await work()

        return await asyncio.shield(self._spawn(locked()))

    async def _step(
        self,
        event: events.Event,
        journal: Callable[[str], None],
        adopt: Callable[[], None] = lambda: None,
        behind: bool = False,
    ) -> tuple[events.Decision, ...]:
        """Ask the engine, journal its new state, adopt it and carry out its decisions. The lock is held.

        `journal` gets the state as JSON and runs in a thread, with `behind` at the next `_flush`; `adopt` changes what
        else memory holds. Raises Refusal when the engine refuses, StateError when the journal cannot be written:
        then nothing has changed.
        """
        await self._flush()
        state, decisions = engine.apply(self.config, self.state, event)
        for decision in decisions:
            if isinstance(decision, events.Refuse):
                raise Refusal(decision.kind, decision.detail)
        if state != self.state:
            text = engine.dump(state)
            if behind:
                self._behind = lambda: self._journal(journal, text)
            else:
                await asyncio.to_thread(self._journal, journal, text)
        self._adopt(state, decisions, adopt)
        return decisions

    def _adopt(
        self,
        state: engine.State,
        decisions: tuple[events.Decision, ...],
        adopt: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on from a state that is in the journal, or will be before the next one. The lock is held."""
        if state != self.state:
            before, self.state = self.state, state
            adopt()
            self._moved(before)
        self._carry_out(decisions)

    async def _flush(self) -> None:
        """Journal what was left behind, and make sure that memory and journal agree. The lock is held.

        Raises StateError.
        """
        if self._unsure and self._behind is None:  # what is left behind is simply written again
            if await asyncio.to_thread(self._store.metadata.state, self.id) != engine.dump(self.state):
                await self._reload()
            self._unsure = False
        if self._behind is not None:
            await asyncio.to_thread(self._behind)
            self._behind, self._unsure = None, False

    def _journal(self, journal: Callable[[str], None], state: str) -> None:
        """Write, and when the database is not sure that it did, look; when it cannot be asked, look next time."""
        try:
            journal(state)
        except StateError as failed:
            try:
                found = self._store.metadata.state(self.id)
            except StateError:
                self._unsure = True
                raise failed from None
            if found != state:
                raise

    def _save(self, state: str) -> None:
        self._store.metadata.save_state(self.id, state)
