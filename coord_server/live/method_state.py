"""The method's side of one federation: its global state, what it keeps of each device, and the shelves of both.

Memory holds the global state of one closed round while it is in use; records are read when they are needed. Each round
has shelves of its own. A sweep drops only shelves of older rounds, never one that another process is about to commit.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from coord_server import aggregation
from coord_server.bundles import load_model
from coord_server.live.commits import Commits
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.blobs import federation_shelf
from coord_server.store.tables import Head
from coord_server.store.values import Content, put, read
from edge_client.errors import ConfigError, MaskfleetError, StorageDamagedError
from edge_client.methods import Method
from edge_client.task import Course

IDLE = 600.0  # seconds without a use until the state leaves memory: it takes 8 bytes a parameter and more


class StaleError(MaskfleetError):
    """Memory holds an older round than the database: reload it and try again."""


@dataclass(frozen=True)
class GlobalState:
    """The method's global state after closed round `round` (0: before round 1), and the course it belongs to."""

    course: Course
    round: int
    state: Any


class MethodState:
    """The method's state of one federation."""

    def __init__(self, store: Store, commits: Commits, method: Method, head: Head) -> None:
        self.id, self.method = commits.id, method
        self.closed = head.values_round
        """The last closed round, 0 at first."""
        self.root = federation_shelf(commits.id, head.first)
        self._store, self._commits = store, commits
        self._course: Course | None = None
        self._stays: tuple[int, str | None] | None = None  # with the number of rounds that it was asked for
        self._current: GlobalState | None = None
        self._used = 0.0  # when it was asked for, on the monotonic clock
        self._loading = asyncio.Lock()

    async def current(self) -> GlobalState:
        """The method's global state in memory, loaded on first use. Raises StateError."""
        self._used = time.monotonic()
        while self._current is None:
            async with self._loading:
                if self._current is None:
                    await self._load()
        rounds = self._commits.config.rounds
        if rounds != self._current.course.rounds:
            self._current = replace(self._current, course=replace(self._current.course, rounds=rounds))
        return self._current

    def rest(self) -> bool:
        """Drop the state from memory if it has not been used lately; whether that was done."""
        if (self._current is None and self._course is None) or time.monotonic() - self._used < IDLE:
            return False
        self._course = self._current = None
        return True

    async def no_global_model(self) -> str | None:
        """Why there is no global model; None when there is one, and while the bundle cannot be read."""
        rounds = self._commits.config.rounds
        if self._stays is None or self._stays[0] != rounds:
            with suppress(MaskfleetError):  # what needs the bundle shows its fault
                self._used = time.monotonic()
                async with self._loading:
                    course = await self._begun()
                self._stays = rounds, self.method.stays(replace(course, rounds=rounds))
        return None if self._stays is None else self._stays[1]

    async def check_rounds(self, rounds: int) -> None:
        """Refuse a number of rounds that the method would not start with. Raises Refusal, StateError."""
        course = replace((await self.current()).course, rounds=rounds)
        try:
            await asyncio.to_thread(self.method.start, course)
        except ConfigError as error:
            why = f"{error}; the method's settings are fixed, only the rounds can change"
            raise Refusal("bad-config", why) from None

    async def _load(self) -> None:
        course = await self._begun()
        round_, data = await asyncio.to_thread(self._stored)
        if round_ != self.closed:
            await self._commits.refresh()
            return
        state = await asyncio.to_thread(aggregation.unpack, self.method.state_type, data)
        if round_ == self.closed:
            self._current = GlobalState(course, round_, state)

    async def _begun(self) -> Course:
        """The course as it began; the caller holds `_loading`. Raises StateError."""
        if self._course is None:
            config = self._commits.config
            model = await asyncio.to_thread(load_model, self._store, config.bundle)
            self._course = Course(model, config.seed, config.rounds, self._commits.initial_config.cohort)
        return self._course

    def _stored(self) -> tuple[int, bytes]:
        round_, content = self._store.metadata.values(self.id)
        return round_, read(self._store.blobs, self.shelf("values", round_), content)

    async def exported(self) -> tuple[int, bytes]:
        """The last closed round and the method's global state after it, as safetensors bytes. Raises StateError."""
        return await asyncio.to_thread(self._stored)

    def record(self, device: str, round_: int) -> Any:
        """What the method keeps of `device` at the start of `round_`; None at first. Blocks.

        Raises StaleError when a later round has changed it already, StateError.
        """
        found = self._found(device, round_)
        return None if found is None else self._read(device, *found)

    def record_after_loss(self, device: str, round_: int) -> tuple[int, Content | None]:
        """What the method still keeps of `device`, which lost what it kept, and the round that wrote it. Blocks.

        Nothing is left of a record that cannot be read. Raises StaleError, StateError.
        """
        found, left = self._found(device, round_), None
        if found is None:
            return 0, None
        if type(self.method).lost is not Method.lost:  # which leaves nothing
            with suppress(StorageDamagedError):  # what cannot be read is lost as well
                left = self.method.lost(self._read(device, *found))
        written, _ = found
        if left is None:
            return written, None
        return written, put(self._store.blobs, self.record_shelf(device, written), aggregation.pack(left))

    def _found(self, device: str, round_: int) -> tuple[int, Content] | None:
        """The round that wrote the record of `device`, and its stored bytes. Raises StaleError, StateError."""
        found = None if self.method.record_type is None else self._store.metadata.record(self.id, device)
        if found is not None and found[0] >= round_:
            raise StaleError(f"round {round_} of {self.id} is closed")
        return found

    def _read(self, device: str, written: int, content: Content) -> Any:
        kind = self.method.record_type
        assert kind is not None
        try:
            data = read(self._store.blobs, self.record_shelf(device, written), content)
            return aggregation.unpack(kind, data)
        except StorageDamagedError as error:
            why = f"the record of device {device!r} in {self.id} cannot be read: {error}"
            raise StorageDamagedError(f"{why}, or remove the device so that the others go on") from None

    def stand_at(self, closed: int, current: GlobalState | None) -> None:
        """Set the state after round `closed`; None: load it on the next use."""
        self.closed, self._current = closed, current

    def shelf(self, kind: str, round_: int) -> str:
        """Where the large values, updates or downlinks of a round lie."""
        return f"{self.root}/{kind}/{round_}"

    def record_shelf(self, device: str, round_: int) -> str:
        """Where a large record that a round has written lies."""
        return f"{self.root}/records/{device}/{round_}"
