"""Who is drawn: devices that asked for work and made a request lately; what they sent is written once."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from coordination import LIMIT, Fleet, credential, served, until, whole
from sqlalchemy import insert

from coord_server import auth
from coord_server.events import Started, Stopped
from coord_server.live import commits
from coord_server.live.devices import Devices
from coord_server.live.status import Faults
from coord_server.store import tables
from coord_server.store.metadata import Metadata
from coord_server.store.tables import Seen
from edge_client.errors import StorageFullError, StorageUnreachableError
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import Enrol, Failure, Report, Wait

pytestmark = pytest.mark.usefixtures("each_database")

FED = "/v1/federations/fed"


class Clock:
    """A clock that stands still unless the test sets it ahead."""

    def __init__(self) -> None:
        self.began, self.ahead = time.time(), 0.0

    def __call__(self) -> float:
        return self.began + self.ahead


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set ahead is noticed soon; counts are written only when a test says so."""
    monkeypatch.setattr(commits, "LOOK_MOST", 0.02)
    monkeypatch.setattr("coord_server.live.devices.FLUSH", 1e6)


def room(fleet: Fleet) -> Devices:
    found: Devices = live(fleet).devices
    return found


def live(fleet: Fleet) -> Any:
    return fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]


def test_a_device_that_has_been_silent_too_long_is_not_drawn_until_it_returns(tmp_path: Path) -> None:
    clock = Clock()

    async def main() -> None:
        async with served(tmp_path, clock) as fleet:
            await fleet.federation("a", "b", "c", cohort=3, min_devices=3, rounds=3, presence_seconds=100.0)
            for device in "abc":
                assert (await fleet.train(device)).status_code == 201
            await until(fleet, lambda f: f["round"] == 2)
            clock.ahead = 90.0
            for device in "bc":
                assert (await fleet.train(device)).status_code == 201
            polls = [asyncio.create_task(fleet.due(device)) for device in "bc"]
            while room(fleet)._polls.keys() != {"b", "c"}:  # whose polls are open is there, whatever the clock says
                await asyncio.sleep(0.001)
            clock.ahead = 4000.0  # the deadline closes round 2 without a, which was last here 4000 s ago
            assert [(await poll)["round"] for poll in polls] == [3, 3]
            assert (await fleet.operator("GET", FED)).json()["expected"] == 2
            assert (await fleet.work("a"))["status"] == "wait"
            for device in "bc":
                assert (await fleet.train(device)).status_code == 201
            await until(fleet, lambda f: f["phase"] == "finished")
            records = (await fleet.operator("GET", f"{FED}/rounds")).json()
            assert [r["devices"] for r in records] == [["a", "b", "c"], ["b", "c"], ["b", "c"]]

    asyncio.run(main())


def test_a_removed_device_is_neither_drawn_nor_counted_in_the_attempt_that_its_removal_leads_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b", "c", min_devices=3, min_updates=2)
            gone, other = live(fleet)._commits.state.cohort
            assert (await fleet.fail(other, await fleet.work(other), "lost")).status_code == 204
            live(fleet)._faults.set(f"report of {gone}", "it could not be written down")
            assert (await fleet.operator("DELETE", f"{FED}/devices/{gone}")).status_code == 204
            assert (await fleet.operator("GET", FED)).json()["fault"] is None  # nothing of that device will clear it
            state = live(fleet)._commits.state
            assert (state.attempt, state.fleet) == (2, 2)
            assert state.cohort == tuple(sorted({"a", "b", "c"} - {gone}))

    asyncio.run(main())


@pytest.mark.parametrize("start", ["auto", "manual"])
def test_the_fleet_is_every_device_that_has_asked_for_work_and_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    clock, fleets = Clock(), list[int]()
    monkeypatch.setattr(FedAvg, "sized", lambda self, state, fleet: fleets.append(fleet) or state)

    async def main() -> None:
        async with served(tmp_path, clock) as fleet:
            await fleet.federation("silent", "gone", start=start, min_devices=3)
            assert (await fleet.enrol("new")).status_code == 200
            assert (await fleet.operator("DELETE", f"{FED}/devices/gone")).status_code == 204
            clock.ahead = 4000.0
            for device in "ab":
                assert (await fleet.enrol(device)).status_code == 200
                await fleet.work(device)
            if start == "manual":
                assert (await fleet.operator("POST", f"{FED}/start")).status_code == 200
            else:
                assert (await fleet.operator("PATCH", FED, json={"min_devices": 2})).status_code == 200
                await fleet.work("a")
            await whole(fleet, "a", "b")

    asyncio.run(main())
    assert fleets == [3, 3]


def test_a_device_whose_long_poll_is_open_is_present(tmp_path: Path) -> None:
    clock = Clock()

    async def main() -> None:
        async with served(tmp_path, clock) as fleet:
            await fleet.federation("a", "b", "c", min_devices=4, presence_seconds=100.0)
            devices = room(fleet)
            held = asyncio.create_task(fleet.work("a", LIMIT))
            while "a" not in devices._polls:
                await asyncio.sleep(0.001)
            clock.ahead = 200.0
            assert (await devices.present(clock())).devices == ("a",)
            newer = asyncio.create_task(fleet.work("a", LIMIT))
            assert (await held)["status"] == "wait"  # the newer one has replaced it
            assert (await devices.present(clock())).devices == ("a",)
            clock.ahead = 250.0
            live(fleet).answer_polls()
            await asyncio.wait_for(newer, LIMIT / 2)
            assert devices._polls == {}
            clock.ahead = 340.0
            assert (await devices.present(clock())).devices == ("a",)  # it was here until its poll ended
            clock.ahead = 360.0
            assert (await devices.present(clock())).devices == ()

    asyncio.run(main())


def test_the_end_of_an_older_poll_leaves_the_newer_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a")
            with ExitStack() as older:
                older.enter_context(room(fleet).polling("a"))
                with room(fleet).polling("a") as newer:
                    older.close()
                    room(fleet).wake(["a"])
                    assert newer.is_set()

    asyncio.run(main())


def test_a_read_of_who_is_present_forgets_no_request_that_is_not_written_yet(tmp_path: Path) -> None:
    clock = Clock()

    async def main() -> None:
        async with served(tmp_path, clock) as fleet:
            await fleet.federation("a", min_devices=4, presence_seconds=100.0)
            devices = room(fleet)
            for clock.ahead in (60.0, 120.0):
                if clock.ahead == 60.0:
                    devices.note("a")
                assert (await devices.present(clock())).devices == ("a",)

    asyncio.run(main())


def test_what_another_coordinator_commits_about_devices_counts_here_at_once(tmp_path: Path) -> None:
    clock = Clock()  # it stands still, so nothing is too old

    async def main() -> None:
        async with served(tmp_path, clock) as first, served(tmp_path, clock) as second:
            await first.federation("a", "b", min_devices=9)
            second.join = first.join
            await until(second, lambda f: f["devices"] == 2)
            assert (await room(second).present(clock())).devices == ("a", "b")
            await first.enrol("c")
            await first.work("c")
            await until(second, lambda f: f["devices"] == 3)
            assert (await room(second).present(clock())).devices == ("a", "b", "c")
            assert (await first.operator("DELETE", f"{FED}/devices/a")).status_code == 204
            await until(second, lambda f: f["devices"] == 2)
            assert await room(second).device_of(auth.hashed(credential("b"))) == "b"
            assert not room(second).arrives("b")  # no commit for each device after each commit elsewhere
            assert (await room(second).present(clock())).devices == ("b", "c")

    asyncio.run(main())


def test_requests_are_written_often_enough_for_other_coordinators_to_see_who_is_present(tmp_path: Path) -> None:
    clock = Clock()

    async def main() -> None:
        async with served(tmp_path, clock) as first, served(tmp_path, clock) as second:
            await first.federation("a", min_devices=9, presence_seconds=20.0)
            await until(second, lambda f: f["devices"] == 1)
            assert (await room(second).present(clock())).devices == ("a",)
            await room(first).flush()
            clock.ahead = 15.0
            room(first).note("a")
            timer = room(first)._timer
            assert timer is not None
            assert timer.when() - asyncio.get_running_loop().time() <= 20.0 / 4
            await room(first).flush()
            clock.ahead = 30.0
            assert (await room(second).present(clock())).devices == ("a",)

    asyncio.run(main())


def test_a_round_that_opens_wakes_its_cohort_and_no_other_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"d{i:03}" for i in range(500)]

    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation(cohort=50, min_devices=500, start="manual", rounds=1)
            fed, looked = live(fleet), list[str]()
            with fed._store.metadata.database.writing("fed") as c:
                c.execute(
                    insert(tables.devices),
                    [{"federation": "fed", "device": n, "credential": n, "enrolled_at": 0.0, "last_seen_at": 0.0}
                     for n in names],
                )  # fmt: skip
            due = fed._due

            async def noted(device: str, waited: bool) -> Any:
                looked.append(device)
                return await due(device, waited)

            monkeypatch.setattr(fed, "_due", noted)
            polls = {n: asyncio.create_task(fed.work(n, 10 * LIMIT)) for n in names}
            while len(looked) < 500:
                await asyncio.sleep(0.001)
            looked.clear()
            await fed.operate(Started)
            while sum(p.done() for p in polls.values()) < 50:
                await asyncio.sleep(0.001)
            assert sorted(looked) == names  # a new phase concerns every device
            looked.clear()
            trains = {n: p.result() for n, p in polls.items() if p.done()}
            for name, work in trains.items():
                await fed.fail(1, name, work.lease, Failure(kind="data", reason="odd"))
            while sum(p.done() for p in polls.values()) < 100:
                await asyncio.sleep(0.001)
            assert len(looked) == 50
            assert not trains.keys() & set(looked)
            looked.clear()
            await fed.operate(Stopped)
            await asyncio.gather(*polls.values())
            assert len(looked) == 400

    asyncio.run(main())


def test_a_round_that_waits_for_devices_opens_when_one_returns(tmp_path: Path) -> None:
    clock = Clock()

    async def main() -> None:
        async with served(tmp_path, clock) as fleet:
            await fleet.federation("a", "b", min_updates=2, presence_seconds=100.0)
            clock.ahead = 4000.0  # both are away when the deadline passes
            await until(fleet, lambda f: f["expected"] == 0 and f["attempt"] == 1)
            assert "that are present" in (await fleet.work("a"))["reason"]
            assert (await fleet.work("b"))["status"] == "train"
            assert (await fleet.train("a")).status_code == 201

    asyncio.run(main())


def test_presence_outlives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b", min_devices=3)
        async with served(tmp_path) as again:
            again.join = fleet.join
            assert (await again.enrol("c")).status_code == 200
            assert (await again.work("c"))["status"] in ("train", "wait")
            found = await until(again, lambda f: f["phase"] == "running")
            assert found["devices"] == 3

    asyncio.run(main())


def test_counts_that_could_not_be_written_are_written_later_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
            devices = room(fleet)
            await devices.flush()
            before = (await devices.listed())[0].messages_down["work"]
            devices.count("a", "down", "work", 7)
            devices.fetched("a", 11)

            def fails(*_: object) -> int:
                raise StorageFullError("full")

            with monkeypatch.context() as m:
                m.setattr(Metadata, "save_seen", fails)
                with pytest.raises(StorageFullError):
                    await devices.flush()
            for _ in range(2):
                shown = (await devices.listed())[0]
                assert (shown.messages_down["work"], shown.bytes_down) == (before + 7, 11)
                await devices.flush()
            with pytest.raises(ValueError, match="no message"):
                devices.count("a", "up", "work", 1)

    asyncio.run(main())


def test_only_devices_that_changed_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
            devices = room(fleet)
            await devices.flush()
            written: list[set[str]] = []
            save = Metadata.save_seen

            def noted(self: Metadata, federation: str, seen: dict[str, Seen], *more: Any) -> None:
                written.append(set(seen))
                save(self, federation, seen, *more)

            monkeypatch.setattr(Metadata, "save_seen", noted)
            devices.note("b")
            await devices.flush()
            await devices.flush()
            assert written == [{"b"}]

    asyncio.run(main())


def test_reports_at_once_are_written_one_write_at_a_time_those_that_wait_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b", "c")
            devices = room(fleet)
            await devices.flush()
            written: list[list[str]] = []
            save, one = Metadata.save_seen, threading.Lock()

            def noted(self: Metadata, federation: str, seen: dict[str, Seen]) -> None:
                assert one.acquire(blocking=False), "two writes at once"
                time.sleep(0.05)
                written.append(list(seen))
                one.release()
                if len(written) == 1:
                    raise StorageFullError("full")
                save(self, federation, seen)

            monkeypatch.setattr(Metadata, "save_seen", noted)
            scores = {"b": 0.1, "a": 0.2, "c": 0.3}
            reports = {d: Report(score=s, test_samples=4, parameters_dense=12, parameters_compact=3)
                       for d, s in scores.items()}  # fmt: skip
            ends = await asyncio.gather(*(devices.report(d, r) for d, r in reports.items()), return_exceptions=True)
            assert [type(end) for end in ends] == [StorageFullError, type(None), type(None)]
            assert written == [["b"], ["a", "c", "b"]]  # what a write did not store is stored by the next
            assert {d.device: d.report for d in await devices.listed()} == reports

    asyncio.run(main())


def test_a_report_that_is_written_later_than_asked_is_no_fault_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a")
            report = Report(score=0.5, test_samples=4, parameters_dense=12, parameters_compact=3)

            def fails(*_: object) -> None:
                raise StorageFullError("full")

            with monkeypatch.context() as m:
                m.setattr(Metadata, "save_seen", fails)
                with pytest.raises(StorageFullError):
                    await live(fleet).report("a", report)
            fault = "the report of 'a' could not be written down: full"
            assert (await fleet.operator("GET", FED)).json()["fault"] == fault
            await room(fleet).flush()
            assert (await fleet.operator("GET", FED)).json()["fault"] is None
            assert (await room(fleet).listed())[0].report == report

    asyncio.run(main())


def test_devices_that_arrive_together_are_written_together_and_a_fault_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation(min_devices=50)
            fed, devices, names = live(fleet), room(fleet), [f"d{i:02}" for i in range(20)]
            for name in names:
                assert (await fleet.enrol(name)).status_code == 200
            calls: list[int] = []
            commit = Metadata.commit

            def noted(self: Metadata, *given: Any) -> bool:
                calls.append(1)
                if len(calls) == 1:
                    raise StorageUnreachableError("no answer")
                return commit(self, *given)

            monkeypatch.setattr(Metadata, "commit", noted)
            said = await asyncio.gather(*(fed.work(name, 0.0) for name in names), return_exceptions=True)
            assert all(isinstance(s, StorageUnreachableError) for s in said)
            assert all(isinstance(s, Wait) for s in await asyncio.gather(*(fed.work(n, 0.0) for n in names)))
            assert len(calls) == 2
            assert fed.summary().devices == 20
            assert (await devices.present(time.time())).devices == tuple(names)

    asyncio.run(main())


def test_a_credential_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a")
            asked: list[str] = []
            member = Metadata.member

            def noted(self: Metadata, federation: str, credential_: str) -> Any:
                asked.append(credential_)
                return member(self, federation, credential_)

            monkeypatch.setattr(Metadata, "member", noted)
            for _ in range(3):
                await fleet.work("a")
            assert asked == []
            assert (await fleet.operator("DELETE", f"{FED}/devices/a")).status_code == 204
            for _ in range(2):
                with pytest.raises(AssertionError, match="device-removed"):
                    await fleet.work("a")
            assert len(asked) == 1

    asyncio.run(main())


def test_a_thing_that_fails_is_a_fault_until_it_succeeds() -> None:
    faults = Faults()
    with pytest.raises(StorageFullError), faults.watch("updates", "the update of 'a' was not accepted"):
        raise StorageFullError("full")
    assert faults.text == "the update of 'a' was not accepted: full"
    with pytest.raises(ValueError), faults.watch("updates", "x"):
        raise ValueError
    assert faults.text is not None
    with faults.watch("other", "x"):
        pass
    assert faults.text is not None
    for thing in ("work of a", "report of a", "work of aa"):
        faults.set(thing, thing)
    faults.forget("a")
    assert (faults.text, faults._found.keys()) == (
        "the update of 'a' was not accepted: full",
        {"updates", "work of aa"},
    )
    faults.clear("work of aa")
    with faults.watch("updates", "x"):
        pass
    assert faults.text is None


def test_an_enrolment_carries_the_digest_of_the_credential_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a")
            Enrol(token=fleet.join, device="a", credential=credential("a"))
        stored = b"".join(p.read_bytes() for p in tmp_path.rglob("coordinator.db*"))
        assert credential("a").encode() not in stored
        assert fleet.join.encode() not in stored

    asyncio.run(main())


def test_a_device_that_asks_after_the_end_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "bb")
            await whole(fleet, "a", "bb")
            before = live(fleet).feed.version
            assert (await fleet.enrol("late")).status_code == 200
            assert (await fleet.work("late"))["status"] == "finish"
            assert live(fleet).feed.version == before
            assert (await fleet.operator("GET", FED)).json()["devices"] == 2

    asyncio.run(main())
