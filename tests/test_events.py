"""Events as they happen: what a stream says, where it goes on, and what it may cost the coordinator."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from coordination import LIMIT, OPERATOR, Fleet, bearer, refused
from engine_steps import config, here, opened, run, updated
from listening import Served, listening
from pydantic import TypeAdapter

from coord_server.engine import State
from coord_server.events import Aggregated
from coord_server.http import watch
from coord_server.http.bodies import JSON_LIMIT
from coord_server.live.feed import KEPT, Feed, changes
from edge_client.protocol.changes import AnyChange, Snapshot, UpdateRefused

FED = "/v1/federations/fed"
SAID: TypeAdapter[Any] = TypeAdapter(AnyChange | Snapshot)
Event = tuple[int | None, Any]


@asynccontextmanager
async def stream(fleet: Fleet, seen: int | None = None, token: str = OPERATOR) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a stream: id and model."""
    headers = bearer(token) | ({} if seen is None else {"Last-Event-ID": str(seen)})
    async with fleet.http.stream("GET", f"{FED}/events", headers=headers, timeout=LIMIT) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[Event]:
            fields: dict[str, str] = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "data" in fields:
                    found = SAID.validate_json(fields["data"])
                    assert found.kind == fields["event"]
                    yield (int(fields["id"]) if "id" in fields else None), found
                    fields = {}
                else:
                    fields = {}

        yield events()


async def until(events: AsyncIterator[Event], done: Callable[[Any], bool]) -> list[Event]:
    """The events up to the first for which `done` holds."""
    found = []
    async for event in events:
        found.append(event)
        if done(event[1]):
            return found
    raise AssertionError(found)


def finished(said: Any) -> bool:
    return said.kind == "phase" and bool(said.phase == "finished")


def kinds(events: list[Event]) -> list[str]:
    return [said.kind for _, said in events]


def play(folder: Path, script: Callable[[Served, Fleet], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        async with listening(folder, **more) as server:
            found = []

            async def call(fleet: Fleet) -> None:
                found.append(await script(server, fleet))

            await asyncio.wait_for(server.fleet(call), 2 * LIMIT)
            return found[0]

    return asyncio.run(main())


def test_a_stream_says_all_that_happens_to_a_federation_and_goes_on_where_its_reader_was(tmp_path: Path) -> None:
    async def script(_: Served, fleet: Fleet) -> int:
        await fleet.federation()
        async with stream(fleet) as events:
            first = [await anext(events)]
            for device in ("a", "bb"):
                await fleet.enrol(device)
                await fleet.work(device)
            bad = await fleet.work("a")
            refused(await fleet.upload("a", 1, bad["lease"], b"nonsense"), "bad-payload")
            await fleet.fail("bb", await fleet.work("bb"), "data")
            await fleet.operator("PATCH", FED, json={"rounds": 9, "deadline_seconds": 600.0})
            assert (await fleet.train("a")).status_code == 201  # the only update that round 1 can have
            for device in ("a", "bb"):
                assert (await fleet.due(device))["round"] == 2
            await fleet.operator("POST", f"{FED}/pause")
            await fleet.operator("POST", f"{FED}/resume")
            await fleet.operator("POST", f"{FED}/stop")
            found = first + await until(events, lambda said: said.kind == "phase" and said.phase == "stopped")
        said = kinds(found)
        assert said[0] == "snapshot"
        for kind in ("joined", "round_opened", "refused", "failed", "changed", "update", "round_closed", "phase"):
            assert kind in said, (kind, said)
        ids = [id_ for id_, _ in found if id_ is not None]
        assert ids == sorted(ids)
        assert all(id_ is None for id_, event in found if event.kind == "refused")
        assert said.index("round_opened") < said.index("refused") < said.index("round_closed")
        phases = [event.phase for _, event in found if event.kind == "phase"]
        assert phases == ["running", "paused", "running", "stopped"]
        for i in range(1, len(ids)):
            if ids[i] == ids[i - 1]:
                continue
            async with stream(fleet, seen=ids[i - 1]) as events:
                again = [await anext(events)]
            at = max(n for n, event in enumerate(found) if event[0] == ids[i - 1])
            following = [event for event in found[at + 1 :] if event[1].kind != "refused"]  # which is not committed
            assert again[:1] == following[:1]
        async with stream(fleet, seen=10**9) as events:
            assert kinds([await anext(events)]) == ["snapshot"]
        return ids[-1]

    last = play(tmp_path, script)

    async def restarted(_: Served, fleet: Fleet) -> None:
        async with stream(fleet, seen=last - 1) as events:
            id_, said = await anext(events)
            assert (id_, said.kind, said.federation.phase) == (last, "snapshot", "stopped")
        await fleet.operator("DELETE", FED)

    play(tmp_path, restarted)


def test_a_stream_shows_what_another_coordinator_commits_and_ends_when_the_federation_is_deleted(
    tmp_path: Path,
) -> None:
    async def script(_: Served, fleet: Fleet) -> None:
        async def elsewhere(other: Fleet) -> None:
            await fleet.federation("a", "bb", rounds=1)
            async with stream(other) as events:
                assert kinds([await anext(events)]) == ["snapshot"]
                for device in ("a", "bb"):
                    await fleet.train(device)
                found = await until(events, finished)
                assert kinds(found).count("round_closed") == 1
                await fleet.operator("DELETE", FED)
                assert [event async for event in events] == []
            refused(await other.operator("GET", f"{FED}/events"), "not-found")

        async with listening(tmp_path) as second:
            await second.fleet(elsewhere)

    play(tmp_path, script)


def test_streams_are_bounded_end_with_their_token_and_leave_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT", 0.1)

    async def script(_: Served, fleet: Fleet) -> None:
        await fleet.federation("a")
        viewer = (await fleet.operator("POST", "/v1/viewers", json={})).json()
        async with stream(fleet, token=viewer["token"]) as one, stream(fleet) as two:
            await anext(one)
            await anext(two)
            more = await fleet.http.get(f"{FED}/events", headers=bearer(viewer["token"]))
            assert "1 may be" in refused(more, "too-many")
            assert "2 may be" in refused(await fleet.operator("GET", f"{FED}/events"), "too-many")
            await fleet.operator("DELETE", f"/v1/viewers/{viewer['id']}")
            assert [event async for event in one] == []
        while True:
            async with fleet.http.stream("GET", f"{FED}/events", headers=bearer(OPERATOR)) as answer:
                if answer.status_code == 200:
                    break
            await asyncio.sleep(0.02)
        refused(await fleet.http.get(f"{FED}/events"), "unauthorized")

    play(tmp_path, script, most=8)


def test_a_stream_on_which_nothing_happens_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT", 0.05)

    async def script(_: Served, fleet: Fleet) -> None:
        await fleet.federation()
        async with fleet.http.stream("GET", f"{FED}/events", headers=bearer(OPERATOR), timeout=LIMIT) as answer:
            async for line in answer.aiter_lines():
                if line == ": nothing new":
                    return
        raise AssertionError("the stream ended before it said so")

    play(tmp_path, script)


def test_a_stream_says_each_fault_once_and_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT", 0.05)

    async def script(server: Served, fleet: Fleet) -> None:
        await fleet.federation("a", "bb", max_attempts=1)
        own = server.server.config.app.state.coordinator.federation("fed")._faults  # type: ignore[union-attr]
        async with stream(fleet) as events:
            await anext(events)
            own.set("fold", "the disk is full")
            found = [await anext(events)]
            own.clear("fold")
            found.append(await anext(events))
            assert [(id_, said.kind, said.fault) for id_, said in found] == [
                (None, "fault", "the disk is full"), (None, "fault", None),
            ]  # fmt: skip
            for device in ("a", "bb"):
                await fleet.fail(device, await fleet.work(device), "data")
            paused = await until(events, lambda said: said.kind == "fault")
            assert paused[-1][0] is not None  # committed, so every coordinator says it
            await fleet.operator("POST", f"{FED}/resume")
            following = await until(events, lambda said: said.kind == "fault")
            assert following[-1][1].fault is None  # the first fault was not said again

    play(tmp_path, script)


def test_a_reader_that_takes_nothing_is_cut_off_and_nothing_is_buffered_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SLOW", 0.3)

    async def script(server: Served, fleet: Fleet) -> None:
        await fleet.federation("a")
        coordinator = server.server.config.app.state.coordinator  # type: ignore[union-attr]
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port))
        head = f"GET {FED}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(raw, head.encode())
        streams = server.server.config.app.state.streams  # type: ignore[union-attr]
        while not streams:
            await asyncio.sleep(0.01)
        live, said = coordinator.federation("fed"), UpdateRefused(round=1, device="a", problem="x", detail="y" * 60_000)
        while streams:
            live.feed.refused(said)
            assert len(live.feed._held) <= KEPT
            await asyncio.sleep(0.001)
        raw.close()
        assert (await fleet.operator("GET", FED)).status_code == 200

    play(tmp_path, script)


def test_a_body_with_the_request_for_a_stream_does_not_disturb_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(server: Served, fleet: Fleet) -> None:
        await fleet.federation("a")
        head = f"GET {FED}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR}\r\n"
        reader, writer = await server.connect(f"{head}Content-Length: {2 * JSON_LIMIT}\r\n\r\n".encode())
        writer.write(b" " * 2 * JSON_LIMIT)
        await asyncio.wait_for(reader.readuntil(b"event: snapshot"), LIMIT)
        assert (await fleet.operator("POST", f"{FED}/stop")).status_code == 200
        await asyncio.wait_for(reader.readuntil(b"event: phase"), LIMIT)

    play(tmp_path, script)
    assert "Exception" not in caplog.text


# --- the feed alone


def test_a_reader_that_falls_behind_what_is_held_is_told_so() -> None:
    feed = Feed(0, 0)
    begin = feed.end
    for version in range(1, KEPT + 2):
        feed.committed(version, State(), State(), version)
    assert feed.since(begin) is None
    assert feed.place(0) is None
    assert feed.place(1) is not None
    assert feed.place(KEPT + 2) is None
    place = feed.place(KEPT)
    assert place is not None
    assert [h.version for h in feed.since(place) or []] == [KEPT + 1]


def test_commits_that_are_read_together_still_say_which_rounds_closed() -> None:
    c = config(rounds=2)
    first = opened(c)
    done, _ = run(c, *(updated(c, first, d) for d in first.cohort), Aggregated(2.0, 1, 1), state=first)
    both, _ = run(c, here("abc", 3.0), state=done)
    both, _ = run(c, *(updated(c, both, d) for d in both.cohort), Aggregated(4.0, 2, 1), state=both)
    assert [(x.kind, getattr(x, "round", 0)) for x in changes(State(), both)] == [
        ("round_closed", 1), ("round_closed", 2), ("phase", 2),
    ]  # fmt: skip
    assert [x.kind for x in changes(first, first)] == []
    (opens,) = [x for x in changes(done, run(c, here("abc", 3.0), state=done)[0]) if x.kind == "round_opened"]
    assert (opens.round, opens.attempt, opens.deadline) == (2, 1, 13.0)
