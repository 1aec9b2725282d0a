"""Connections over real sockets: silent and slow ones are closed, and make room for those that ask."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from coordination import LIMIT, OPERATOR, Fleet, bearer, content_digest, credential, served, trained

from coord_server import connections, serve
from coord_server.connections import SPARE, Connection, Places
from coord_server.coordinator import Coordinator
from coord_server.http import access
from coord_server.http.bodies import DEVICE_LIMIT
from coord_server.store import open_store

PATIENCE = 0.5  # seconds that a head may take in these tests
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

    async def connect(self, said: bytes = b"", source: str = "127.0.0.1") -> Streams:
        """A connection from the loopback address `source`, once it has a place or is closed, that has sent `said`."""
        before = self.places.open.copy()
        streams = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        streams[1].write(said)
        await until(lambda: bool(self.places.open - before) or streams[0].at_eof())
        return streams

    async def busy(self, said: bytes, source: str = "127.0.0.1") -> Streams:
        """A connection whose request is under way."""
        tasks = len(self.server.server_state.tasks)
        streams = await self.connect(said, source)
        await until(lambda: len(self.server.server_state.tasks) > tasks)
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
    store, places = open_store(folder), Places(most)
    bound = serve.listen("127.0.0.1", 0)
    if certificate is not None:
        serve.limit_handshakes(asyncio.get_running_loop())
    server = uvicorn.Server(serve.configured(Coordinator(store, OPERATOR), places, ssl_certfile=certificate))
    running = asyncio.create_task(server._serve([bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield Served(bound.getsockname()[1], server, places)
    finally:
        server.should_exit = server.force_exit = True
        await running
        store.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", PATIENCE)
    monkeypatch.setattr(serve, "PATIENCE", PATIENCE)


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is closed for its silence in this test."""
    monkeypatch.setattr(connections, "PATIENCE", 10 * LIMIT)


# --- silence


@pytest.mark.parametrize("said", [b"", b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-", HEALTH + b"GET /v1/hea"])
def test_a_connection_whose_head_stays_incomplete_is_closed(tmp_path: Path, said: bytes) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect()
            if said.startswith(HEALTH):
                assert (await ask((reader, writer), HEALTH))[0] == 200
            writer.write(said.removeprefix(HEALTH))
            await closed(reader)
            writer.close()

    asyncio.run(main())


def test_a_head_that_arrives_line_by_line_has_no_more_time_than_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect(b"GET /v1/health HTTP/1.1\r\n")
            gone = asyncio.create_task(closed(reader))
            while not gone.done():
                writer.write(b"X: x\r\n")
                await asyncio.sleep(0.1)
            await gone

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
            streams = await here.connect()
            for pause in (0.0, 2 * PATIENCE):
                await asyncio.sleep(pause)
                assert (await ask(streams, HEALTH))[0] == 200
            streams[1].close()

    asyncio.run(main())


def test_an_update_that_arrives_slowly_is_taken(tmp_path: Path) -> None:
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


def test_the_rest_of_a_body_that_was_answered_unread_may_be_slow_but_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 3.0)

    async def main() -> None:
        async with listening(tmp_path) as here:
            size = 2 * DEVICE_LIMIT
            head = f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
            streams = await here.connect()
            assert (await ask(streams, head + b"x"))[0] == 413
            for piece in (1, 1, 1, 1, size - 5):  # in more than PATIENCE altogether
                await asyncio.sleep(0.7)
                streams[1].write(b"x" * piece)
            assert (await ask(streams, HEALTH))[0] == 200
            assert (await ask(streams, head + b"x"))[0] == 413
            await closed(streams[0])

    asyncio.run(main())


def test_under_tls_a_handshake_has_as_long_as_a_head(tmp_path: Path) -> None:
    pem = Path(__file__).parent / "loopback.pem"  # certificate and key of these tests alone
    trusting = ssl.create_default_context(cafile=str(pem))

    async def main() -> None:
        async with listening(tmp_path, certificate=pem) as here:
            silent = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(3)]
            streams = await asyncio.open_connection("127.0.0.1", here.port, ssl=trusting)
            assert (await ask(streams, HEALTH))[0] == 200
            streams[1].close()
            for reader, _ in silent:
                await closed(reader)

    asyncio.run(main())


# --- no place left


def test_at_the_limit_a_new_connection_replaces_the_longest_silent_one_of_the_address_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)

    async def main() -> None:
        async with listening(tmp_path, most=4) as here:
            idle = await here.connect()
            assert (await ask(idle, HEALTH))[0] == 200
            held = [await here.connect(source="127.0.0.2") for _ in range(3)]
            for _ in range(20):
                held.append(await here.connect(b"GET /v1/hea", source="127.0.0.2"))
                assert len(here.places.open) == 4
            for reader, _ in held[:20]:
                await closed(reader)
            assert (await ask(idle, HEALTH))[0] == 200
            assert (await ask(await here.connect(), HEALTH))[0] == 200
            await closed(held[20][0])

    asyncio.run(main())


def test_when_all_places_hold_long_polls_the_oldest_is_answered_and_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, most=3) as here:
            polls: list[Streams] = []

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a", "b", "c", min_devices=4)

            await here.fleet(script)
            await until(lambda: not here.places.open)
            for device in ("a", "b", "c"):
                path = f"GET /v1/federations/fed/work?wait={LIMIT} HTTP/1.1\r\nHost: x\r\n"
                polls.append(await here.busy(f"{path}Authorization: Bearer {credential(device)}\r\n\r\n".encode()))
            await until(lambda: len(here.places._polls) == 3)
            assert (await ask(await here.connect(), LIST))[0] == 200
            status, headers, said = await answer(polls[0][0])
            assert (status, said["status"], headers["connection"]) == (200, "wait", "close")
            await closed(polls[0][0])
            assert len(here.places._polls) == 2

    asyncio.run(main())


def test_a_device_has_one_long_poll_and_a_newer_one_ends_the_older(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a")
                older = asyncio.create_task(fleet.work("a", LIMIT))
                await until(lambda: len(here.places._polls) == 1)
                (first,) = here.places._polls.values()
                newer = asyncio.create_task(fleet.work("a", LIMIT))
                await until(lambda: list(here.places._polls.values()) not in ([], [first]))
                assert (await older)["status"] == "wait"
                await fleet.enrol("b")
                await fleet.work("b")  # the second device: the round opens
                assert (await newer)["status"] == "train"

            await here.fleet(script)

    asyncio.run(main())


def test_when_nothing_can_be_closed_the_operator_is_served_and_others_try_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)

    async def main() -> None:
        async with listening(tmp_path, most=3) as here:
            held = [await here.busy(SLOW) for _ in range(3)]
            status, headers, said = await ask(stranger := await here.connect(), HEALTH)
            assert (status, said["type"], headers["retry-after"]) == (503, "/problems/too-busy", "5")
            assert headers["content-type"] == "application/problem+json"
            await closed(stranger[0])
            assert (await ask(await here.connect(), LIST))[0] == 200
            for _, writer in held:
                writer.close()
            await until(lambda: not any(c.cycle and not c.cycle.response_complete for c in here.places.open))
            assert (await ask(await here.connect(), HEALTH))[0] == 200

    asyncio.run(main())


def test_beyond_the_spare_places_a_connection_is_closed_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    monkeypatch.setattr(connections, "SPARE", 2)
    monkeypatch.setattr(access.Places, "full", lambda _: False)  # so that the spare places too have a slow request

    async def main() -> None:
        async with listening(tmp_path, most=3) as here:
            for _ in range(5):
                await here.busy(SLOW)
            reader, _ = await here.connect()
            await closed(reader)
            assert len(here.places.open) == 5

    asyncio.run(main())


def test_requests_of_an_address_are_limited_until_they_show_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    monkeypatch.setattr(access, "OF_ADDRESS", 2)

    async def main() -> None:
        async with listening(tmp_path) as here:

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a", "b", "c", min_devices=4)
                polls = [asyncio.create_task(fleet.work(device, LIMIT)) for device in ("a", "b", "c")]
                await until(lambda: len(here.places._polls) == 3)  # more than OF_ADDRESS, with credentials
                for _ in range(2):
                    await here.busy(SLOW)
                status, headers, said = await ask(await here.connect(), HEALTH)
                assert (status, said["type"], headers["retry-after"]) == (429, "/problems/too-many", "1")
                assert (await ask(await here.connect(), LIST))[0] == 200
                assert (await ask(await here.connect(source="127.0.0.2"), HEALTH))[0] == 200
                for poll in polls:
                    poll.cancel()

            await here.fleet(script)

    asyncio.run(main())


def test_a_device_s_requests_under_way_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "OF_CREDENTIAL", 1)

    async def main() -> None:
        async with listening(tmp_path) as here:

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a")
                poll = asyncio.create_task(fleet.work("a", LIMIT))
                await until(lambda: len(here.places._polls) == 1)
                path, mine = "/v1/federations/fed/work", bearer(credential("a"))
                refused = await fleet.http.get(path, headers=mine)
                assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many")
                await fleet.enrol("b")
                await fleet.work("b")
                assert (await poll)["status"] == "train"
                assert (await fleet.http.get(path, headers=mine)).status_code == 200

            await here.fleet(script)

    asyncio.run(main())


def test_bytes_that_are_not_http_get_a_problem(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            for said in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nHost x\r\n\r\n", b"A" * 99_999):
                streams = await here.connect()
                status, headers, problem = await ask(streams, said)
                assert (status, problem["type"]) == (400, "/problems/bad-request")
                assert headers["content-type"] == "application/problem+json"
                await closed(streams[0])

    asyncio.run(main())


SERVE = """
from coord_server import connections, serve
connections.PATIENCE = 1.0
import typer; typer.run(serve.serve)
"""


def test_more_silent_connections_than_descriptors_do_not_stop_a_coordinator_or_fill_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["bash", "-c", 'ulimit -S -n 200; ulimit -H -n 400; exec "$@"', "-", sys.executable, "-c", SERVE]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--port", "0", "--data", str(tmp_path / "d")], stdout=out, stderr=out)
    callers: list[socket.socket] = []
    try:
        end = time.monotonic() + LIMIT
        while b"ready at" not in log.read_bytes() and time.monotonic() < end:
            time.sleep(0.05)
        text = log.read_text()
        port = int(text.split("http://127.0.0.1:")[1].split()[0])
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (400, 400)
        assert "72 connections at once, not 8192" in text
        for i in range(500):
            caller = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
            if i % 2:
                caller.sendall(b"GET /v1/health HTTP/1.1\r\nX-")
            callers.append(caller)
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/health", timeout=LIMIT, trust_env=False)
        assert answer.status_code == 200  # while the silent callers are still there
        assert len(log.read_text()) < 5000, log.read_text()[:3000]
        assert "Traceback" not in log.read_text()
    finally:
        for caller in callers:
            caller.close()
        process.kill()
        process.wait()


def test_the_limit_of_open_files_is_raised_and_else_the_connections_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert serve.room(100) == 100
    assert serve.room(8192) == (4096 - serve.OWN_FILES) // 2 - SPARE
    assert limits["now"] == (4096, 4096)


# --- messages


def test_nothing_is_kept_of_a_message_that_was_refused_for_its_length(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect()
            size = 10 * DEVICE_LIMIT
            writer.write(f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
            writer.write(b"x" * (size - 1))
            assert (await answer(reader))[0] == 413
            (connection,) = here.server.server_state.connections
            assert isinstance(connection, Connection)
            await until(lambda: len(connection.cycle.body) + len(connection.conn._receive_buffer) == 0)
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


def test_a_message_that_arrives_byte_by_byte_is_given_up(tmp_path: Path) -> None:
    async def drops() -> AsyncIterator[bytes]:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            yield b" "
            await asyncio.sleep(0.1)

    async def main() -> None:
        async with served(tmp_path, patience=0.5) as fleet:
            found = await fleet.http.post("/v1/enrol", content=drops(), headers={"Content-Type": "application/json"})
            assert (found.status_code, found.json()["type"]) == (408, "/problems/too-slow")
            assert found.headers["connection"] == "close"

    asyncio.run(main())
