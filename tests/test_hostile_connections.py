"""Connections that only take up room, over real sockets: who asks nothing is let go, the others are served."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from coordination import Fleet, bearer, content_digest, credential, served, trained

from coord_server import connections
from coord_server.api import create_app
from coord_server.api.wire import DEVICE_LIMIT
from coord_server.connections import PIECE, SPARE, Connection, Listening
from coord_server.coordinator import Coordinator
from coord_server.store import open_store

PATIENCE = 0.5  # seconds that a head may take in these tests
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Served:
    """A coordinator behind a socket of this process."""

    port: int
    server: uvicorn.Server

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def fleet(self, script: Callable[[Fleet], Awaitable[None]]) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            await script(Fleet(http))


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the next answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


async def seconds_until_closed(reader: asyncio.StreamReader) -> float:
    """How long until the coordinator hangs up."""
    began = time.monotonic()
    with suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 10)
    return time.monotonic() - began


async def seconds_until_closed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drop: bytes) -> float:
    """The same of a caller that goes on saying `drop`, ten times a second for three."""
    gone = asyncio.create_task(seconds_until_closed(reader))
    for _ in range(30):
        if gone.done():
            break
        writer.write(drop)
        await asyncio.sleep(0.1)
    return await gone


@asynccontextmanager
async def listening(folder: Path, most: int = 100, certificate: Path | None = None) -> AsyncIterator[Served]:
    store = open_store(folder)
    bound = Listening("127.0.0.1", 0, most)
    app = create_app(Coordinator(store, "o" * 64))
    config = uvicorn.Config(
        app,
        http=Connection,
        limit_concurrency=most,
        ws="none",
        log_config=None,
        access_log=False,
        ssl_certfile=certificate,
    )
    if certificate is not None:
        connections.hurry_handshakes(asyncio.get_running_loop())
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield Served(bound.getsockname()[1], server)
    finally:
        server.should_exit = True
        await running
        store.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", PATIENCE)


@pytest.mark.parametrize("said", [b"", b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-", HEALTH + b"GET /v1/hea"])
def test_who_does_not_finish_a_requests_head_is_let_go(tmp_path: Path, said: bytes) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect()
            if said.startswith(HEALTH):
                writer.write(HEALTH)
                assert (await answer(reader))[0] == 200
            writer.write(said.removeprefix(HEALTH))
            assert PATIENCE / 2 < await seconds_until_closed(reader) < 5
            writer.close()

    asyncio.run(main())


def test_a_head_that_comes_in_drops_has_no_more_time_than_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect()
            writer.write(b"GET /v1/health HTTP/1.1\r\n")
            assert await seconds_until_closed_on(reader, writer, b"X: x\r\n") < 2

    asyncio.run(main())


def test_a_long_poll_and_an_idle_connection_last_longer_than_a_head(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")  # which waits for a second device
        began = time.monotonic()
        assert (await fleet.work("a", 3 * PATIENCE))["status"] == "wait"
        assert time.monotonic() - began > 2.5 * PATIENCE

    async def main() -> None:
        async with listening(tmp_path) as here:
            await here.fleet(script)
            reader, writer = await here.connect()
            for pause in (0.0, 2 * PATIENCE):
                await asyncio.sleep(pause)
                writer.write(HEALTH)
                assert (await answer(reader))[0] == 200
            writer.close()

    asyncio.run(main())


def test_an_update_that_comes_slowly_is_taken(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")

        async def slowly() -> AsyncIterator[bytes]:
            for at in range(0, len(body), len(body) // 4):
                yield body[at : at + len(body) // 4]
                await asyncio.sleep(PATIENCE / 2)

        headers = {"Content-Digest": content_digest(body)}
        assert (await fleet.upload("a", 1, work["lease"], slowly(), headers)).status_code == 201

    async def main() -> None:
        async with listening(tmp_path) as here:
            await here.fleet(script)

    asyncio.run(main())


def test_the_rest_of_a_body_that_was_answered_already_may_be_slow_but_not_stand_still(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            size = 8 * PIECE
            head = f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
            assert size > DEVICE_LIMIT
            reader, writer = await here.connect()
            writer.write(head + b"x")
            assert (await answer(reader))[0] == 413
            for piece in [PIECE] * 7 + [PIECE - 1]:
                await asyncio.sleep(PATIENCE / 2)
                writer.write(b"x" * piece)
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
            writer.write(head + b"x")
            assert (await answer(reader))[0] == 413
            assert await seconds_until_closed_on(reader, writer, b"x") < 2

    asyncio.run(main())


def test_beyond_the_limit_callers_are_told_to_come_again_and_beyond_that_they_are_not_heard(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, most=3) as here:
            connections.PATIENCE = 30.0
            held = [await here.connect() for _ in range(3)]
            reader, writer = await here.connect()
            writer.write(HEALTH)
            status, headers, said = await answer(reader)
            assert (status, said["type"], headers["retry-after"]) == (503, "/problems/too-busy", connections.AGAIN)
            assert headers["content-type"] == "application/problem+json"
            assert await seconds_until_closed(reader) < 1
            held += [await here.connect() for _ in range(SPARE)]
            reader, writer = await here.connect()
            assert await seconds_until_closed(reader) < 1  # without a word
            for _, other in held:
                other.close()
            await asyncio.sleep(0.2)
            reader, writer = await here.connect()
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200

    asyncio.run(main())


def test_under_tls_too_silent_callers_are_counted_and_let_go(tmp_path: Path) -> None:
    pem = Path(__file__).parent / "loopback.pem"  # certificate and key of these tests alone
    trusting = ssl.create_default_context(cafile=str(pem))

    async def hello(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(HEALTH)
        status = (await answer(reader))[0]
        writer.close()
        return status

    async def main() -> None:
        async with listening(tmp_path, most=3, certificate=pem) as here:
            assert await hello(here.port) == 200
            held = [await here.connect() for _ in range(3 + SPARE)]
            await asyncio.sleep(0.05)
            reader, _ = await here.connect()
            assert await seconds_until_closed(reader) < PATIENCE / 2  # there is no place
            closed = [await seconds_until_closed(reader) for reader, _ in held]
            assert sum(closed) < 4 * PATIENCE  # they have as long for the handshake as for a head
            assert await hello(here.port) == 200

    asyncio.run(main())


def test_when_no_descriptor_is_left_a_caller_is_hung_up_on_and_the_queue_moves_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Listening("127.0.0.1", 0)) as here:
        here.listen(8)
        callers = [socket.create_connection(here.getsockname()) for _ in range(3)]
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            for _ in callers[:2]:
                with pytest.raises(BlockingIOError):
                    here.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for caller in callers[:2]:
            caller.settimeout(5)
            assert caller.recv(1) == b""
        taken, _ = here.accept()
        taken.sendall(b"x")
        assert callers[2].recv(1) == b"x"
        for each in (*callers, taken):
            each.close()
    assert [r.message for r in caplog.records] == [
        "callers are turned away: no more files can be opened; raise `ulimit -n`"
    ]


SERVE = "from coord_server import cli, connections; connections.PATIENCE = 1.0; import typer; typer.run(cli.serve)"


def test_more_idle_callers_than_descriptors_do_not_stop_a_coordinator_or_fill_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["bash", "-c", 'ulimit -S -n 200; ulimit -H -n 400; exec "$@"', "-", sys.executable, "-c", SERVE]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--port", "0", "--data", str(tmp_path / "d")], stdout=out, stderr=out)
    callers: list[socket.socket] = []
    try:
        deadline = time.monotonic() + 30
        while b"ready at" not in log.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.05)
        text = log.read_text()
        port = int(text.split("http://127.0.0.1:")[1].split()[0])
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (400, 400)
        assert "72 connections at once, not 8192" in text
        for i in range(500):
            caller = socket.create_connection(("127.0.0.1", port), timeout=5)
            if i % 2:
                caller.sendall(b"GET /v1/health HTTP/1.1\r\nX-")
            callers.append(caller)
        deadline = time.monotonic() + 10
        status = 0
        while status != 200 and time.monotonic() < deadline:  # the callers are all still there
            try:
                status = httpx.get(f"http://127.0.0.1:{port}/v1/health", timeout=5, trust_env=False).status_code
            except httpx.TransportError:
                time.sleep(0.2)
        assert status == 200
        assert len(log.read_text()) < 5000, log.read_text()[:3000]
        assert "Traceback" not in log.read_text()
    finally:
        for caller in callers:
            caller.close()
        process.kill()
        process.wait()


# --- messages


def test_nothing_is_kept_of_a_message_that_was_refused_for_its_length(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect()
            size = 10 * DEVICE_LIMIT
            writer.write(f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
            writer.write(b"x" * (size - 1))
            assert (await answer(reader))[0] == 413
            await asyncio.sleep(0.1)
            (connection,) = here.server.server_state.connections
            assert isinstance(connection, Connection)
            assert len(connection.cycle.body) + len(connection.conn._receive_buffer) == 0
            writer.close()

    asyncio.run(main())


def test_a_message_is_small_unless_the_operator_sends_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a")
            body = b" " * DEVICE_LIMIT + b"{}"
            json_ = {"Content-Type": "application/json"}
            read: list[int] = []

            async def counted() -> AsyncIterator[bytes]:
                for _ in range(100):
                    read.append(4096)
                    yield b" " * 4096

            for given in (body, counted()):
                for path in ("/v1/enrol", "/v1/federations"):
                    found = await fleet.http.post(path, content=given, headers={**json_, **bearer(credential("a"))})
                    assert (found.status_code, f"at most {DEVICE_LIMIT} bytes" in found.text) == (413, True)
                    if not isinstance(given, bytes):
                        break
            assert 0 < sum(read) <= DEVICE_LIMIT + 2 * 4096
            found = await fleet.operator("POST", "/v1/federations/fed/tokens", content=body, more=json_)
            assert found.status_code == 201, found.text

    asyncio.run(main())


def test_a_message_that_comes_in_drops_is_given_up(tmp_path: Path) -> None:
    async def drops() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" "
            await asyncio.sleep(0.1)

    async def main() -> None:
        async with served(tmp_path, patience=0.5) as fleet:
            began = time.monotonic()
            found = await fleet.http.post("/v1/enrol", content=drops(), headers={"Content-Type": "application/json"})
            assert (found.status_code, found.json()["type"]) == (408, "/problems/too-slow")
            assert time.monotonic() - began < 2
            assert found.headers["connection"] == "close"

    asyncio.run(main())
