"""The method's side of one federation: its global state, what it keeps of each device, and the shelves of both.

Memory holds the global state of one closed round; records are read when they are needed. Each round has shelves of its
own. A sweep drops only shelves of older rounds, never one that another process is about to commit.
"""

from __future__ import annotations

import asyncio
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


class StaleError(MaskfleetError):
    """Memory holds an older round than the database: reload it and try again."""


@dataclass(frozen=True)
class Values:
    """The method's global state after closed round `round` (0: before round 1), and the course it belongs to."""

    course: Course
    round: int
    state: Any


class MethodState:
    """The values of one federation."""

    def __init__(self, store: Store, commits: Commits, method: Method, head: Head) -> None:
        self.id, self.method = commits.id, method
        self.closed = head.values_round
        """The last closed round, 0 at first."""
        self.root = federation_shelf(commits.id, head.first)
        self._store, self._commits = store, commits
        self._course: Course | None = None
        self._values: Values | None = None
        self._loading = asyncio.Lock()

    async def values(self) -> Values:
        """The method's global state in memory, loaded on first use. Raises StateError."""
        while self._values is None:
            async with self._loading:
                if self._values is None:
                    await self._load()
        rounds = self._commits.config.rounds
        if rounds != self._values.course.rounds:
            self._values = replace(self._values, course=replace(self._values.course, rounds=rounds))
        return self._values

    async def check_rounds(self, rounds: int) -> None:
        """Refuse a number of rounds that the method would not start with. Raises Refusal, StateError."""
        course = replace((await self.values()).course, rounds=rounds)
        try:
            await asyncio.to_thread(self.method.start, course)
        except ConfigError as error:
            raise Refusal("bad-config", str(error)) from None

    async def _load(self) -> None:
        config = self._commits.config
        if self._course is None:
            model = await asyncio.to_thread(load_model, self._store, config.bundle)
            self._course = Course(model, config.seed, config.rounds, self._commits.created.cohort)
        round_, data = await asyncio.to_thread(self._stored)
        if round_ != self.closed:
            await self._commits.refresh()
            return
        state = await asyncio.to_thread(aggregation.unpack, self.method.state_type, data)
        if round_ == self.closed:
            self._values = Values(self._course, round_, state)

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
        return self._record(device, round_)[1]

    def left(self, device: str, round_: int) -> tuple[int, Content | None]:
        """What the method still keeps of `device`, which lost what it kept, and the round that wrote it. Blocks.

        Raises StaleError, StateError.
        """
        written, record = self._record(device, round_)
        left = None if record is None else self.method.lost(record)
        if left is None:
            return written, None
        return written, put(self._store.blobs, self.record_shelf(device, written), aggregation.pack(left))

    def _record(self, device: str, round_: int) -> tuple[int, Any]:
        kind = self.method.record_type
        found = None if kind is None else self._store.metadata.record(self.id, device)
        if kind is None or found is None:
            return 0, None
        written, content = found
        if written >= round_:
            raise StaleError(f"round {round_} of {self.id} is closed")
        try:
            data = read(self._store.blobs, self.record_shelf(device, written), content)
            return written, aggregation.unpack(kind, data)
        except StorageDamagedError as error:
            why = f"the record of device {device!r} in {self.id} cannot be read: {error}"
            raise StorageDamagedError(f"{why}, or remove the device so that the others go on") from None

    def stand_at(self, closed: int, values: Values | None) -> None:
        """Set the state after round `closed`; None: load it on the next use."""
        self.closed, self._values = closed, values

    def shelf(self, kind: str, round_: int) -> str:
        """Where the large values, updates or downlinks of a round lie."""
        return f"{self.root}/{kind}/{round_}"

    def record_shelf(self, device: str, round_: int) -> str:
        """Where a large record that a round has written lies."""
        return f"{self.root}/records/{device}/{round_}"
