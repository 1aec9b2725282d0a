"""Silent and slow connections over real sockets are closed; what is too long is not kept."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from coordination import LIMIT, Fleet, bearer, content_digest, credential, served, trained
from listening import HEALTH, answer, ask, closed, listening, until

from coord_server import connections, serve
from coord_server.connections import Connection
from coord_server.http.bodies import DEVICE_LIMIT

SOON = 0.3  # seconds of the patience that is to end


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is closed for its silence before the test says so, however slow the machine is."""
    monkeypatch.setattr(connections, "PATIENCE", 10 * LIMIT)
    monkeypatch.setattr(serve, "PATIENCE", 10 * LIMIT)


# --- silence


@pytest.mark.parametrize("said", [b"", b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-", HEALTH + b"GET /v1/hea"])
def test_a_connection_whose_head_stays_incomplete_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            if said.startswith(HEALTH):
                reader, writer = await here.connect()
                assert (await ask((reader, writer), HEALTH))[0] == 200
                monkeypatch.setattr(connections, "PATIENCE", SOON)
            else:
                monkeypatch.setattr(connections, "PATIENCE", SOON)
                reader, writer = await here.connect()
            writer.write(said.removeprefix(HEALTH))
            await closed(reader)
            writer.close()

    asyncio.run(main())


def test_a_head_that_arrives_line_by_line_has_no_more_time_than_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE", SOON)

    async def main() -> None:
        async with listening(tmp_path) as here:
            reader, writer = await here.connect(b"GET /v1/health HTTP/1.1\r\n")
            gone = asyncio.create_task(closed(reader))
            while not gone.done():
                writer.write(b"X: x\r\n")
                await asyncio.sleep(SOON / 5)
            await gone

    asyncio.run(main())


def test_a_long_poll_and_an_idle_connection_last_longer_than_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")  # which waits for a second device; its connection stays open
        monkeypatch.setattr(connections, "PATIENCE", SOON)
        began = time.monotonic()
        assert (await fleet.work("a", 3 * SOON))["status"] == "wait"
        assert time.monotonic() - began > 2.5 * SOON

    async def main() -> None:
        async with listening(tmp_path) as here:
            streams = await here.connect()
            await here.fleet(script)
            assert (await ask(streams, HEALTH))[0] == 200
            await asyncio.sleep(2 * SOON)
            assert (await ask(streams, HEALTH))[0] == 200
            streams[1].close()

    asyncio.run(main())


def test_an_update_that_arrives_slowly_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        monkeypatch.setattr(connections, "PATIENCE", SOON)

        async def slowly() -> AsyncIterator[bytes]:
            for at in range(0, len(body), len(body) // 4):
                yield body[at : at + len(body) // 4]
                await asyncio.sleep(SOON / 2)

        headers = {"Content-Digest": content_digest(body)}
        assert (await fleet.upload("a", 1, work["lease"], slowly(), headers)).status_code == 201

    async def main() -> None:
        async with listening(tmp_path) as here:
            await here.fleet(script)

    asyncio.run(main())


def test_the_rest_of_a_body_that_was_answered_unread_may_be_slow_but_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            size = 2 * DEVICE_LIMIT
            head = f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
            streams = await here.connect()
            assert (await ask(streams, head + b"x"))[0] == 413
            (connection,) = here.server.server_state.connections
            for _ in range(4):  # each piece begins its patience anew
                ends = connection._timer.when()
                streams[1].write(b"x")
                await until(lambda ends=ends: connection._timer.when() > ends)  # type: ignore[misc]
            streams[1].write(b"x" * (size - 5))
            assert (await ask(streams, HEALTH))[0] == 200
            assert (await ask(streams, head + b"x"))[0] == 413
            monkeypatch.setattr(connections, "PATIENCE", SOON)
            streams[1].write(b"x")
            await closed(streams[0])

    asyncio.run(main())


def test_under_tls_a_handshake_has_as_long_as_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = Path(__file__).parent / "loopback.pem"  # certificate and key of these tests alone
    trusting = ssl.create_default_context(cafile=str(pem))

    async def main() -> None:
        async with listening(tmp_path, certificate=pem) as here:
            streams = await asyncio.open_connection("127.0.0.1", here.port, ssl=trusting)
            assert (await ask(streams, HEALTH))[0] == 200
            streams[1].close()
        monkeypatch.setattr(serve, "PATIENCE", SOON)
        async with listening(tmp_path, certificate=pem) as here:
            silent = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(3)]
            for reader, _ in silent:
                await closed(reader)

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


# --- messages


def test_a_message_of_any_announced_length_beyond_the_limit_is_refused_before_its_body(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as here:
            for size in (str(DEVICE_LIMIT + 1), "9" * 18, "9" * 20):
                streams = await here.connect()
                head = f"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
                status, _, problem = await ask(streams, head.encode())
                assert (status, problem["type"]) == (413, "/problems/too-large")
                streams[1].close()

    asyncio.run(main())


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
