"""Downlinks by audience: encoded once, in threads, off every lock; devices of one audience get the same bytes.

They are a cache: the same state and record give the same bytes again. Large ones lie in the blob store; one that is
lost there, or cut, is made again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from coord_server import aggregation
from coord_server.live.method_state import GlobalState, MethodState, StaleError
from coord_server.live.status import MethodError
from coord_server.store.blobs import FolderBlobs
from edge_client.bundle import digest

IN_MEMORY = 16 << 20  # bytes of downlinks of one round that stay in memory; those beyond lie in the blob store
PARALLEL = 2  # downlinks encoded at a time


@dataclass(frozen=True)
class Downlink:
    """A round's downlink: digest, size in bytes, bytes by kind; its content, or None when it lies on its shelf."""

    round: int
    shelf: str
    sha256: str
    size: int
    sizes: dict[str, int]
    data: bytes | None


class Downlinks:
    """The downlinks of one federation's round under way."""

    def __init__(self, blobs: FolderBlobs, method_state: MethodState) -> None:
        self._blobs, self._method_state = blobs, method_state
        self._round = 0
        self._audiences: dict[str, str] = {}  # of each device that has asked
        self._made: dict[str, asyncio.Task[Downlink]] = {}  # by audience
        self._room = IN_MEMORY
        self._encoding = asyncio.Semaphore(PARALLEL)

    def forget(self, device: str) -> None:
        """The record of `device` has changed."""
        self._audiences.pop(device, None)

    def forget_all(self) -> None:
        """Records may have changed at another process."""
        self._audiences.clear()

    def clear(self) -> None:
        """Drop what can be encoded again."""
        self._start(0)

    def _start(self, round_: int) -> None:
        self._round, self._audiences, self._made, self._room = round_, {}, {}, IN_MEMORY

    async def get(self, round_: int, device: str) -> Downlink:
        """What `device` fetches in `round_`. Raises StaleError when that is not the round under way, StateError."""
        current = await self._method_state.current()
        if current.round + 1 != round_:
            raise StaleError(f"round {round_} is not under way")
        if self._round != round_:
            self._start(round_)
        if (made := await self._usable(self._audiences.get(device))) is None:
            record = await asyncio.to_thread(self._method_state.record, device, round_)
            audience = self._method_state.method.audience(current.course, round_, record)
            made = await self._usable(audience)
            if self._round != round_:
                raise StaleError(f"round {round_} is not under way")
            self._audiences[device] = audience
            if made is None:
                made = self._made[audience] = asyncio.create_task(self._make(current, round_, record))
        return await asyncio.shield(made)

    async def _usable(self, audience: str | None) -> asyncio.Task[Downlink] | None:
        """The downlink of an audience, made or in the making; None where there is none, it has failed or is damaged."""
        made = None if audience is None else self._made.get(audience)
        if made is None or not made.done():
            return made
        if made.cancelled() or made.exception() is not None:
            return None
        down = made.result()
        if down.data is None and await asyncio.to_thread(self._blobs.size, down.shelf, down.sha256) != down.size:
            return None
        return made

    async def _make(self, current: GlobalState, round_: int, record: Any) -> Downlink:
        async with self._encoding:
            fits = self._room
            found = await asyncio.to_thread(self._encode, current, round_, record, fits)
        if found.data is not None and self._round == round_:
            self._room -= found.size
        return found

    def _encode(self, current: GlobalState, round_: int, record: Any, fits: int) -> Downlink:
        method = self._method_state.method
        try:
            encoded = aggregation.downlink(method, current.course, round_, current.state, record)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise MethodError(f"method {method.name} fails to write the downlink of round {round_} ({why})") from error
        shelf, size = self._method_state.shelf("downlinks", round_), len(encoded.data)
        if size <= fits:
            return Downlink(round_, shelf, digest(encoded.data), size, encoded.sizes, encoded.data)
        return Downlink(round_, shelf, self._blobs.put(shelf, encoded.data), size, encoded.sizes, None)
