"""Two coordinators on one database and data folder: devices spread over both, and the same final bytes as with one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from coordination import (
    LARGE,
    LIMIT,
    Fleet,
    bearer,
    credential,
    play,
    refused,
    served,
    trained,
    until,
)
from dashboard_pages import form_of, log_in, said, send
from numpy.typing import NDArray
from sqlalchemy import event as sql
from sqlalchemy import insert

from coord_server import coordinator, engine
from coord_server.live import devices
from coord_server.live import rounds as live_rounds
from coord_server.store import tables
from coord_server.store.metadata import Metadata
from edge_client import extras
from edge_client.methods import fedavg
from edge_client.protocol.payload import Payload, decode
from edge_client.task import Assignment, Course

pytestmark = pytest.mark.usefixtures("each_database")

DEVICES = ("a", "bb", "ccc", "dddd", "eeeee")
ALL = {"cohort": len(DEVICES), "min_devices": len(DEVICES), "min_updates": len(DEVICES)}
FED = "/v1/federations/fed"


@dataclass(frozen=True)
class Record:
    """How often a device took part, and something large."""

    rounds: int
    values: NDArray[np.float32]


class Counting(fedavg.FedAvg):
    """FedAvg whose server keeps a record of each device and whose downlink says what it holds."""

    name: ClassVar[str] = "counting"
    record_type: ClassVar[type[Record]] = Record  # type: ignore[assignment]

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return "new" if record is None else f"{record.rounds} rounds"

    def downlink(self, course: Course, round_: int, state: fedavg.State, record: Any) -> Payload:
        found = super().downlink(course, round_, state, None)
        return replace(found, meta={"known": 0 if record is None else record.rounds})

    def read_update(self, a: Assignment, state: fedavg.State, record: Any, payload: Payload) -> fedavg.Update:
        return super().read_update(a, state, None, payload)

    def fold(self, a: Assignment, state: fedavg.State, total: Any, update: fedavg.Update, record: Any) -> Any:
        total, _ = super().fold(a, state, total, update, None)
        return total, Record(1 if record is None else record.rounds + 1, update.parameters)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: fedavg.State, total: fedavg.Total
    ) -> tuple[fedavg.State, Mapping[str, Any]]:
        return super().finish(course, round_, took_part, state, total)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method `counting`, as a package would bring it."""
    theirs = EntryPoint("counting", f"{__name__}:Counting", "maskfleet.methods")
    monkeypatch.setattr(
        extras, "entry_points", lambda group: [*entry_points(group=group), *([theirs] if group == theirs.group else [])]
    )


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[tuple[Fleet, Fleet]]:
    """Two coordinators on one folder."""
    async with served(folder) as first, served(folder) as second:
        yield first, second


async def join(first: Fleet, second: Fleet, *devices: str, **more: Any) -> None:
    """A federation made at the first coordinator; its devices enrol and ask for work at both in turn."""
    await first.federation(**more)
    second.join = first.join
    for i, device in enumerate(devices):
        at = (first, second)[i % 2]
        assert (await at.enrol(device)).status_code == 200
        await at.work(device)


async def trained_at(asked: Fleet, fetched: Fleet, sent: Fleet, device: str) -> int:
    """One round of a device that speaks to any coordinator; the round's number."""
    work = await asked.due(device)
    assert work["status"] == "train", work
    body = trained(await fetched.fetch(device, work), device)
    answer = await sent.upload(device, work["round"], work["lease"], body)
    assert answer.status_code == 201, answer.text
    return int(work["round"])


def alone(folder: Path, rounds: int, d: int, **more: Any) -> bytes:
    """The final state of one coordinator."""

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation(*DEVICES, d=d, rounds=rounds, **ALL, **more)
        for _ in range(rounds):
            for device in DEVICES:
                await trained_at(fleet, fleet, fleet, device)
        assert (await fleet.due("a"))["status"] == "finish"
        return bytes((await fleet.operator("GET", f"{FED}/state")).content)

    found: bytes = play(folder, script)
    return found


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("d", [12, LARGE], ids=["in the database", "in the folder"])
@pytest.mark.parametrize("method", ["fedavg", "counting"])
def test_devices_that_change_between_two_coordinators_end_with_the_bytes_of_one(
    tmp_path: Path, d: int, method: str
) -> None:
    dice, rounds = random.Random(d), 4

    async def main() -> bytes:
        async with both(tmp_path / "two") as sites:
            await join(*sites, *DEVICES, d=d, rounds=rounds, method={"name": method}, **ALL)
            for n in range(1, rounds + 1):
                asked = [trained_at(*dice.choices(sites, k=3), device) for device in DEVICES]
                assert await asyncio.gather(*asked) == [n] * len(DEVICES)
            for site in sites:
                assert (await site.due("a"))["status"] == "finish"
            shown = (await sites[0].operator("GET", f"{FED}/devices")).json()
            assert {s["device"]: s["updates"] for s in shown} == dict.fromkeys(DEVICES, rounds)
            records = [(await site.operator("GET", f"{FED}/rounds")).json() for site in sites]
            assert records[0] == records[1]
            assert [r["devices"] for r in records[0]] == [list(DEVICES)] * rounds
            states = [(await site.operator("GET", f"{FED}/state")).content for site in sites]
            assert states[0] == states[1]
            return bytes(states[0])

    assert asyncio.run(main()) == alone(tmp_path / "one", rounds, d, method={"name": method})


@pytest.mark.usefixtures("counting")
def test_a_record_that_is_lost_at_one_coordinator_is_unknown_at_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await join(first, second, "a", "b", rounds=3, method={"name": "counting"})
            for n in (1, 2):
                for device in ("a", "b"):
                    work = await second.due(device)
                    assert decode(await second.fetch(device, work)).meta["known"] == n - 1
                    await trained_at(first, first, second, device)
            works = [await site.due("a") for site in (first, second)]
            assert works[0]["downlink"] == works[1]["downlink"]
            headers = {"Maskfleet-Lease": works[0]["lease"], **bearer(credential("a"))}
            lost = {"kind": "lost", "reason": "the disk was replaced"}
            answer = await first.http.put(f"{FED}/rounds/3/failures/a", json=lost, headers=headers)
            assert answer.status_code == 204, answer.text
            await trained_at(second, second, second, "b")
            for site in (first, second):
                finish = await site.due("a")
                assert (finish["status"], decode(await site.fetch("a", finish)).meta["known"]) == ("finish", 0)
                finish = await site.due("b")
                assert decode(await site.fetch("b", finish)).meta["known"] == 3

    asyncio.run(main())


@pytest.mark.usefixtures("counting")
def test_a_record_that_is_lost_in_a_round_changes_its_next_attempt_at_every_coordinator(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await join(first, second, "a", "b", method={"name": "counting"}, min_updates=2)
            for device in ("a", "b"):
                await trained_at(first, first, first, device)
            works = {}
            for device in ("a", "b"):
                for site in (first, second):  # both have the downlink of a device with a record in memory
                    works[device] = await site.due(device)
                    assert decode(await site.fetch(device, works[device])).meta["known"] == 1
            for device in ("a", "b"):
                assert (await first.fail(device, works[device], "lost")).status_code == 204
            for device in ("a", "b"):
                for site in (first, second):
                    work = await site.due(device)
                    assert (work["status"], work["round"]) == ("train", 2)
                    assert decode(await site.fetch(device, work)).meta["known"] == 0

    asyncio.run(main())


def test_a_federation_starts_through_arrivals_at_another_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await first.federation()
            await until(second, lambda f: f.get("phase") == "recruiting")
            live = first.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]

            async def dies() -> None:
                """The arrival is committed, but its coordinator does not start the federation."""

            monkeypatch.setattr(live, "_call", dies)
            for device in ("a", "b"):
                assert (await first.enrol(device)).status_code == 200
                await first.work(device)
            await until(second, lambda f: f["phase"] == "running")

    asyncio.run(main())


def test_a_long_poll_at_one_coordinator_ends_when_the_other_opens_a_round(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await join(first, second, "a", min_devices=2)
            waiting = asyncio.create_task(second.work("a", LIMIT))
            assert (await first.enrol("b")).status_code == 200
            await first.work("b")
            assert (await waiting)["status"] == "train"

    asyncio.run(main())


def test_the_operator_may_speak_to_either(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await join(first, second, "a", "b")
            assert (await first.operator("POST", f"{FED}/pause")).status_code == 200
            assert (await second.operator("POST", f"{FED}/pause")).status_code == 409
            resumed = await second.operator("POST", f"{FED}/resume")
            assert resumed.json()["phase"] == "running"
            assert (await first.operator("DELETE", f"{FED}/devices/b")).status_code == 204
            end = time.monotonic() + LIMIT
            while True:
                answer = await second.http.get(f"{FED}/work", headers=bearer(credential("b")))
                if answer.status_code == 403:
                    break
                assert time.monotonic() < end
                await asyncio.sleep(0.02)
            assert answer.json()["type"] == "/problems/device-removed"
            await until(second, lambda f: f["devices"] == 1)
            await trained_at(second, second, second, "a")
            await until(first, lambda f: f["round"] == 2)

    asyncio.run(main())


def test_a_round_whose_coordinator_does_not_fold_it_is_folded_by_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord_server.live.rounds.OTHERS_FOLD", 0.1)
    fold, deciders = live_rounds.Rounds.fold, list[Any]()

    def late(self: live_rounds.Rounds, decision: Any, delay: float = 0.0) -> None:
        if delay == 0.0:
            deciders.append(self)  # it dies here
        else:
            fold(self, decision, delay)

    monkeypatch.setattr(live_rounds.Rounds, "fold", late)

    async def main() -> bytes:
        async with both(tmp_path / "two") as sites:
            await join(*sites, *DEVICES, rounds=2, **ALL)
            for _ in range(2):
                await asyncio.gather(*(trained_at(sites[0], sites[0], sites[0], device) for device in DEVICES))
            assert (await sites[0].due("a"))["status"] == "finish"
            return (await sites[1].operator("GET", f"{FED}/state")).content

    state = asyncio.run(main())
    assert len(deciders) == 2
    monkeypatch.undo()
    assert state == alone(tmp_path / "one", 2, 12)


def test_a_round_that_both_fold_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coord_server.live.rounds.OTHERS_FOLD", 0.0)
    submitted: list[int] = []
    close = live_rounds.Rounds._close

    def slow(self: live_rounds.Rounds, *given: Any) -> Any:
        found = close(self, *given)
        submitted.append(1)
        end = time.monotonic() + LIMIT
        while len(submitted) < 2 and time.monotonic() < end:  # neither commits before both have folded
            time.sleep(0.005)
        return found

    monkeypatch.setattr(live_rounds.Rounds, "_close", slow)

    async def main() -> bytes:
        async with both(tmp_path / "two") as sites:
            await join(*sites, *DEVICES, rounds=1, **ALL)
            await asyncio.gather(*(trained_at(sites[0], sites[0], sites[0], device) for device in DEVICES))
            for site in sites:
                await until(site, lambda f: f["phase"] == "finished" and f["fault"] is None)
            assert len((await sites[0].operator("GET", f"{FED}/rounds")).json()) == 1
            return (await sites[1].operator("GET", f"{FED}/state")).content

    state = asyncio.run(main())
    assert len(submitted) == 2
    monkeypatch.undo()
    assert state == alone(tmp_path / "one", 1, 12)


@pytest.mark.parametrize("here", ["loaded", "unknown", "ticking"])
def test_a_deletion_that_a_look_meets_half_way_is_no_error_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, here: str
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 1e6)
    known = Metadata.known

    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await second.federation("a", "bb")
            one, other = (f.http._transport.app.state.coordinator for f in (first, second))  # type: ignore[attr-defined]
            if here != "unknown":
                await one.look()
                assert (await second.operator("PATCH", FED, json={"deadline_seconds": 60.0})).status_code == 200

            def deleted_meanwhile(self: Metadata) -> dict[str, tables.Known]:
                found = known(self)
                if "fed" in found:
                    assert other.store.metadata.delete_federation("fed", found["fed"].version)
                return found

            if here == "ticking":
                deleted_meanwhile(one.store.metadata)
                commits = one.federation("fed")._commits
                commits.clock = lambda: time.time() + 1e6  # a deadline has passed
                await commits._tick()
            else:
                with monkeypatch.context() as m:
                    m.setattr(Metadata, "known", deleted_meanwhile)
                    await one.look()
            await one.look()
            assert (await first.operator("GET", "/v1/federations")).json() == []

    asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_the_operators_requests_at_two_coordinators_in_turn_do_as_at_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 1e6)

    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await first.federation()
            assert (await second.operator("GET", FED)).status_code == 200
            assert (await first.operator("DELETE", FED)).status_code == 204
            await second.federation(rounds=9)
            assert (await second.operator("GET", FED)).json()["config"]["rounds"] == 9
            assert (await first.operator("POST", f"{FED}/tokens", json={})).status_code == 201
            assert (await first.operator("POST", f"{FED}/stop")).status_code == 200
            refused(await second.operator("POST", f"{FED}/tokens", json={}), "wrong-phase")

    asyncio.run(main())


def test_a_form_of_the_dashboard_goes_by_what_another_coordinator_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 1e6)

    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await first.federation()
            assert (await second.operator("GET", FED)).status_code == 200
            await log_in(second)
            form = await form_of(second)
            assert (await first.operator("POST", f"{FED}/stop")).status_code == 200
            answer = await send(second, "tokens", form=form, uses="1", expires_in="60")
            assert (answer.status_code, "is stopped and enrols no more" in said(answer)) == (409, True)

    asyncio.run(main())


def test_a_federation_that_is_replaced_while_it_is_loaded_has_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 1e6)
    read = Metadata._of_federation

    async def main() -> None:
        async with both(tmp_path) as (first, second):
            await second.federation(rounds=3)
            one, other = (f.http._transport.app.state.coordinator for f in (first, second))  # type: ignore[attr-defined]
            config, found = other.federation("fed").config, other.store.metadata
            state, (_, values) = engine.dump(engine.State()), found.values("fed")

            def replaced_meanwhile(self: Metadata, *given: Any) -> Any:
                row = read(self, *given)
                if found.known()["fed"].first != 7:
                    assert found.delete_federation("fed", found.known()["fed"].version)
                    text = config.model_copy(update={"rounds": 9}).model_dump_json()
                    assert found.add_federation("fed", text, config.bundle, state, values, 1.0, 7) == "added"
                return row

            with monkeypatch.context() as m:
                m.setattr(Metadata, "_of_federation", replaced_meanwhile)
                await one.look()
            await one.look()
            assert (await first.operator("GET", FED)).json()["config"]["rounds"] == 9

    asyncio.run(main())


def test_an_update_costs_as_many_statements_among_many_members_as_among_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 1e6)  # no timer makes a statement of its own
    monkeypatch.setattr(devices, "FLUSH", 1e6)

    def statements(folder: Path, members: int) -> list[str]:
        """The database's statements from a device's work to its receipt, and after it."""

        async def script(fleet: Fleet) -> list[str]:
            await fleet.federation("a", "bb", "ccc", cohort=3, min_devices=3, presence_seconds=1e6)
            store = fleet.http._transport.app.state.coordinator.store  # type: ignore[attr-defined]
            names = [f"m{i:05}" for i in range(members)]
            with store.metadata.database.writing("fed") as c:
                c.execute(
                    insert(tables.devices),
                    [{"federation": "fed", "device": n, "credential": credential(n), "ready": True,
                      "enrolled_at": 0.0, "last_seen_at": 0.0} for n in names],
                )  # fmt: skip
            await fleet.work("a")
            said: list[str] = []
            sql.listen(store.metadata.database.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
            assert (await fleet.train("a")).status_code == 201
            return list(said)  # closing makes more

        found: list[str] = play(folder, script)
        return found

    few, many = statements(tmp_path / "few", 10), statements(tmp_path / "many", 3000)
    assert few == many
    assert len(few) < 15
