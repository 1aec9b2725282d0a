"""A coordinator behind a real socket of the test's own process, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from coordination import LIMIT, OPERATOR, Fleet, open_folder

from coord_server import serve
from coord_server.connections import Places
from coord_server.coordinator import Coordinator

HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
LIST = f"GET /v1/federations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR}\r\n\r\n".encode()
SLOW = b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """A coordinator behind a socket of this process."""

    port: int
    server: uvicorn.Server
    places: Places
    connected: list[Streams] = field(default_factory=list)
    """Kept, because asyncio closes a connection that nothing refers to."""

    async def connect(self, said: bytes = b"", source: str = "127.0.0.1") -> Streams:
        """A connection from the loopback address `source`, once it has a place or is closed, that has sent `said`."""
        before = self.places.open.copy()
        streams = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        self.connected.append(streams)
        streams[1].write(said)
        await until(lambda: bool(self.places.open - before) or streams[0].at_eof())
        return streams

    async def busy(self, said: bytes, source: str = "127.0.0.1") -> Streams:
        """A connection whose request is under way."""
        before = self.server.server_state.tasks.copy()
        streams = await self.connect(said, source)
        await until(lambda: bool(self.server.server_state.tasks - before))
        return streams

    async def fleet(self, script: Callable[[Fleet], Awaitable[None]]) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=LIMIT) as http:
            await script(Fleet(http))


async def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the next answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)).decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


async def ask(streams: Streams, said: bytes) -> tuple[int, dict[str, str], Any]:
    """The answer to a request on this connection."""
    streams[1].write(said)
    return await answer(streams[0])


async def closed(reader: asyncio.StreamReader) -> None:
    """Return once the coordinator has closed the connection."""
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), LIMIT) == b""


@asynccontextmanager
async def listening(folder: Path, most: int = 100, certificate: Path | None = None) -> AsyncIterator[Served]:
    store, places = open_folder(folder), Places(most)
    bound = serve.listen("127.0.0.1", 0)
    if certificate is not None:
        serve.limit_handshakes(asyncio.get_running_loop())
    server = uvicorn.Server(serve.configured(Coordinator(store, OPERATOR), places, ssl_certfile=certificate))
    running = asyncio.create_task(server._serve([bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    found = Served(bound.getsockname()[1], server, places)
    try:
        yield found
    finally:
        for _, writer in found.connected:
            writer.close()
        server.should_exit = server.force_exit = True
        await running
        store.close()
