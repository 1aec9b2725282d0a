"""When all places are taken: which connections make room, and who is served all the same."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from coordination import LIMIT, Fleet, bearer, content_digest, credential
from listening import HEALTH, LIST, SLOW, Served, Streams, answer, ask, closed, listening, until

from coord_server import connections, serve
from coord_server.connections import SPARE
from coord_server.http import access


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is closed for its silence here."""
    monkeypatch.setattr(connections, "PATIENCE", 10 * LIMIT)


def test_a_new_connection_replaces_the_oldest_silent_one_of_the_address_with_most(tmp_path: Path) -> None:
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


@asynccontextmanager
async def polling(folder: Path, *devices: str, more: int = 0) -> AsyncIterator[tuple[Served, list[Streams]]]:
    """A coordinator with a place for each device, all of them in long polls, and `more` free places."""
    async with listening(folder, most=len(devices) + more) as here:

        async def script(fleet: Fleet) -> None:
            await fleet.federation(*devices, min_devices=len(devices) + 1)

        await here.fleet(script)
        await until(lambda: not here.places.open)
        polls: list[Streams] = []
        for device in devices:
            head = "GET /v1/federations/fed/work?wait=60 HTTP/1.1\r\nHost: x\r\n"
            polls.append(await here.busy(f"{head}Authorization: Bearer {credential(device)}\r\n\r\n".encode()))
            await until(lambda: len(here.places._polls) == len(polls))
        yield here, polls
        for _, writer in polls:
            writer.close()


def test_when_all_places_hold_long_polls_the_oldest_is_answered_and_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with polling(tmp_path, "a", "b", "c") as (here, polls):
            assert (await ask(await here.connect(), LIST))[0] == 200
            status, headers, said = await answer(polls[0][0])
            assert (status, said["status"], headers["connection"]) == (200, "wait", "close")
            await closed(polls[0][0])
            assert len(here.places._polls) == 2

    asyncio.run(main())


@pytest.mark.parametrize("young", [True, False])
def test_a_long_poll_is_let_go_before_a_connection_that_is_only_just_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, young: bool
) -> None:
    monkeypatch.setattr(connections, "YOUNG", 10 * LIMIT if young else 0.0)

    async def main() -> None:
        async with polling(tmp_path, "a", "b", "c") as (here, polls):
            first, second = await here.connect(), await here.connect()
            assert len(here.places._polls) == (1 if young else 2)
            assert (await answer(polls[0][0]))[2]["status"] == "wait"
            if young:
                assert (await answer(polls[1][0]))[2]["status"] == "wait"
                assert (await ask(first, HEALTH))[0] == 200
            else:
                await closed(first[0])
            assert (await ask(second, HEALTH))[0] == 200

    asyncio.run(main())


def test_one_address_does_not_displace_long_polls_with_many_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "YOUNG", 10 * LIMIT)
    monkeypatch.setattr(connections, "SPARE", 1)

    async def main() -> None:
        async with polling(tmp_path, "a", "b", "c", more=2) as (here, _):
            held = [await here.connect(source="127.0.0.2") for _ in range(20)]
            assert len(here.places._polls) == 3
            for reader, _ in held[:18]:
                await closed(reader)

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


def test_slow_bodies_of_unknown_callers_make_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path, most=3) as here:
            held = [await here.busy(SLOW, source="127.0.0.2") for _ in range(3)]
            assert (await ask(await here.connect(), HEALTH))[0] == 200
            await closed(held[0][0])
            assert len(here.places.open) == 3

    asyncio.run(main())


@asynccontextmanager
async def uploading(folder: Path, most: int, *devices: str) -> AsyncIterator[tuple[Served, list[Streams]]]:
    """A coordinator with `most` places, each with an upload of a device under way that does not go on."""
    async with listening(folder, most=most) as here:
        leases = {}

        async def script(fleet: Fleet) -> None:
            await fleet.federation(*devices, cohort=len(devices), min_devices=len(devices))
            leases.update({d: (await fleet.work(d))["lease"] for d in devices})

        await here.fleet(script)
        await until(lambda: not here.places.open)
        held = []
        for d in devices:
            head = f"PUT /v1/federations/fed/rounds/1/updates/{d} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
            head += f"Authorization: Bearer {credential(d)}\r\nMaskfleet-Lease: {leases[d]}\r\n"
            held.append(await here.busy(f"{head}Content-Digest: {content_digest(b'')}\r\n\r\nx".encode()))
        await until(lambda: not here.places._unproven)
        yield here, held
        for _, writer in held:
            writer.close()


def test_when_nothing_can_be_closed_the_operator_is_served_and_others_get_503(tmp_path: Path) -> None:
    async def main() -> None:
        async with uploading(tmp_path, 3, "a", "b", "c") as (here, held):
            status, headers, said = await ask(stranger := await here.connect(), HEALTH)
            assert (status, said["type"], headers["retry-after"]) == (503, "/problems/too-busy", "5")
            assert headers["content-type"] == "application/problem+json"
            await closed(stranger[0])
            operator = await here.connect()
            assert (await ask(operator, LIST))[0] == 200
            operator[1].close()
            held[0][1].close()
            await until(lambda: len(here.places.open) == 2)  # the other two uploads
            assert (await ask(await here.connect(), HEALTH))[0] == 200

    asyncio.run(main())


def test_beyond_the_spare_places_a_connection_is_closed_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SPARE", 2)
    monkeypatch.setattr(connections.Places, "full", lambda *_: False)  # so that the spare places have uploads too

    async def main() -> None:
        async with uploading(tmp_path, 3, "a", "b", "c", "d", "e") as (here, held):
            reader, _ = await here.connect()
            await closed(reader)
            assert len(here.places.open) == len(held)

    asyncio.run(main())


def test_requests_of_an_address_are_limited_until_they_show_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "OF_ADDRESS", 2)

    async def main() -> None:
        async with listening(tmp_path) as here:

            async def script(fleet: Fleet) -> None:
                await fleet.federation("a", "b", "c", min_devices=4)
                polls = [asyncio.create_task(fleet.work(device, LIMIT)) for device in ("a", "b", "c")]
                await until(lambda: len(here.places._polls) == 3)  # more than OF_ADDRESS, with credentials
                held = [await here.busy(SLOW) for _ in range(2)]
                status, headers, said = await ask(await here.connect(), HEALTH)
                assert (status, said["type"], headers["retry-after"]) == (429, "/problems/too-many", "1")
                assert (await ask(await here.connect(), LIST))[0] == 200
                assert (await ask(await here.connect(source="127.0.0.2"), HEALTH))[0] == 200
                for poll in polls:
                    poll.cancel()
                for _, writer in held:
                    writer.close()

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


SERVE = "from coord_server.serve import serve; import typer; typer.run(serve)"


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
