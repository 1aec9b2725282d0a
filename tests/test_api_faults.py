"""Full and damaged disks, commits that fail late, restarts: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from coordination import (
    LARGE,
    LIMIT,
    D,
    Fleet,
    bearer,
    credential,
    flipped,
    play,
    refused,
    trained,
    unfinished,
    until,
    whole,
)

from coord_server import aggregation, coordinator
from coord_server.store.metadata import Metadata
from coord_server.store.rows import Rows
from coord_server.store.values import Content
from edge_client.errors import StateError, StorageDamagedError, StorageFullError, StorageUnreachableError
from edge_client.methods.fedavg import FedAvg

FED = "/v1/federations/fed"


async def undisturbed(fleet: Fleet, d: int = D, rounds: int = 2) -> bytes:
    await fleet.federation("a", "bb", d=d, rounds=rounds)
    return await whole(fleet, "a", "bb", rounds=rounds)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("faults", "logged"),
    [
        ([StorageUnreachableError("no answer"), StorageUnreachableError("a reset")], ["no answer"]),
        ([ValueError("a defect"), StorageUnreachableError("no answer")], ["a defect"]),
        ([StorageUnreachableError("no answer"), ValueError("a defect")], ["no answer", "a defect"]),
    ],
    ids=["two wordings", "a defect first", "a defect later"],
)
def test_an_outage_of_the_database_is_logged_when_it_begins_and_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    faults: list[Exception],
    logged: list[str],
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 0.0)
    looks, known, mended = list[int](), Metadata.known, Event()

    def failing(metadata: Metadata) -> Any:
        looks.append(1)
        if not mended.is_set():
            raise faults[(len(looks) + 1) % 2]
        return known(metadata)

    async def script(fleet: Fleet) -> None:
        monkeypatch.setattr(Metadata, "known", failing)
        for _ in range(2):
            least = len(looks) + 10
            while len(looks) < least:
                await asyncio.sleep(0.01)
            mended.set()

    caplog.set_level("INFO", "maskfleet")
    play(tmp_path, script)
    *began, ended = [r for r in caplog.records if "watched" in r.message]
    assert [r.message for r in began] == [f"the database cannot be watched: {text}" for text in logged]
    assert [bool(r.exc_info) for r in began] == [text == "a defect" for text in logged]
    assert ended.message == "the database can be watched again"


@pytest.mark.parametrize("silent", [False, True])
def test_health_says_when_the_database_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(coordinator, "WATCH", 0.0)
    monkeypatch.setattr(coordinator, "SILENT", 0.5)
    known, mended = Metadata.known, Event()

    def away(metadata: Metadata) -> Any:
        if not (mended.wait(LIMIT) if silent else mended.is_set()):
            raise StorageUnreachableError("no answer")
        return known(metadata)

    async def script(fleet: Fleet) -> None:
        monkeypatch.setattr(Metadata, "known", away)
        for status in ("faulty", "ok"):
            end = time.monotonic() + LIMIT / 2
            while (found := (await fleet.http.get("/v1/health")).json()["status"]) != status:
                assert time.monotonic() < end, found
                await asyncio.sleep(0.01)
            mended.set()

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StorageFullError("the database is full"), "storage-full"),
        (StorageUnreachableError("the database does not answer"), "storage-unreachable"),
        (StorageDamagedError("the database is damaged"), "storage-damaged"),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["first update", "last update"])
def test_a_database_that_fails_loses_nothing_and_its_kind_of_fault_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StateError, kind: str, last: bool
) -> None:
    def fails(*_: object) -> None:
        raise error

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb")
        if last:
            assert (await fleet.train("a")).status_code == 201
        device = "bb" if last else "a"
        work = await fleet.work(device)
        body = trained(await fleet.fetch(device, work), device)
        with monkeypatch.context() as m:
            m.setattr(Metadata, "commit", fails)
            answer = await fleet.upload(device, 1, work["lease"], body)
            assert str(error) in refused(answer, kind)
            assert ("retry-after" in answer.headers) == (kind != "storage-damaged")
            assert str(error) in (await fleet.operator("GET", FED)).json()["fault"]
        assert (await fleet.upload(device, 1, work["lease"], body)).status_code == 201
        await until(fleet, lambda f: f["fault"] is None)
        if not last:
            assert (await fleet.train("bb")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)
        return await whole(fleet, "a", "bb", rounds=1)

    assert play(tmp_path / "x", script) == play(tmp_path / "y", undisturbed)


def test_a_round_that_cannot_be_closed_is_a_fault_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=LARGE)
        commit = Metadata.commit

        def fails(self: Metadata, federation: str, version: int, state: str, *rest: Any) -> bool:
            if json.loads(state)["round"] == 2:
                raise StorageFullError("the database is full")
            return commit(self, federation, version, state, *rest)

        with monkeypatch.context() as m:
            m.setattr(Metadata, "commit", fails)
            for device in ("a", "bb"):
                assert (await fleet.train(device)).status_code == 201
            found = await until(fleet, lambda f: f["fault"] is not None)
            assert ("the database is full" in found["fault"], found["round"]) == (True, 1)
            assert (await fleet.work("a"))["status"] == "wait"
        await until(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        return await whole(fleet, "a", "bb", rounds=1)

    assert play(tmp_path / "x", script) == play(tmp_path / "y", lambda fleet: undisturbed(fleet, LARGE))


def test_a_downlink_that_the_method_cannot_write_is_a_fault_that_names_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a value is beyond the range")

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        for device in ("a", "bb"):
            assert (await fleet.train(device)).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)
        with monkeypatch.context() as m:
            m.setattr(FedAvg, "downlink", broken)
            answer = await fleet.http.get("/v1/federations/fed/work?wait=0", headers=bearer(credential("bb")))
            refused(answer, "internal-error")
            said = "method fedavg fails to write the downlink of round 2 (ValueError: a value is beyond the range)"
            assert said in (await fleet.operator("GET", FED)).json()["fault"]
        assert (await fleet.work("bb"))["status"] == "train"
        assert (await fleet.operator("GET", FED)).json()["fault"] is None

    play(tmp_path, script)


def test_a_disk_that_is_full_when_an_update_arrives_is_a_fault_until_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=1 << 19)
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        with monkeypatch.context() as m:
            m.setattr("coord_server.store.blobs.os.write", full)
            answer = await fleet.upload("a", 1, work["lease"], body)
        assert "No space left" in refused(answer, "storage-full")
        assert int(answer.headers["retry-after"]) > 0
        assert "No space left" in (await fleet.operator("GET", FED)).json()["fault"]
        assert unfinished(tmp_path) == []
        assert (await fleet.upload("a", 1, work["lease"], body)).status_code == 201
        assert (await fleet.operator("GET", FED)).json()["fault"] is None

    play(tmp_path, script)


@pytest.mark.parametrize("device", ["a", "bb"], ids=["first update", "last update"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_commit_that_was_made_although_it_failed_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, rounds: int
) -> None:
    """The transaction is on disk, but its answer is lost, as when a connection breaks."""

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=rounds)
        if device == "bb":
            assert (await fleet.train("a")).status_code == 201
        work = await fleet.work(device)
        body = trained(await fleet.fetch(device, work), device)
        commit, lost = Metadata.commit, list[int]()

        def answer_lost(self: Metadata, *given: Any) -> bool:
            done = commit(self, *given)
            if not lost:
                lost.append(1)
                raise StorageUnreachableError("the connection broke")
            return done

        monkeypatch.setattr(Metadata, "commit", answer_lost)
        first = await fleet.upload(device, 1, work["lease"], body)
        assert first.status_code in (200, 201, 503), first.text
        assert (await fleet.upload(device, 1, work["lease"], body)).status_code in (200, 201)
        assert lost
        if device == "a":
            assert (await fleet.train("bb")).status_code == 201
        await until(fleet, lambda f: (f["round"] == 2 or f["phase"] == "finished") and f["fault"] is None)
        devices = (await fleet.operator("GET", f"{FED}/devices")).json()
        assert [d["updates"] for d in devices] == [1, 1]
        return await whole(fleet, "a", "bb", rounds=rounds - 1)

    assert play(tmp_path / "x", script) == play(tmp_path / "y", lambda fleet: undisturbed(fleet, rounds=rounds))


def test_a_restart_continues_the_round_with_the_updates_that_were_acknowledged(tmp_path: Path) -> None:
    async def first(fleet: Fleet) -> dict[str, Any]:
        await fleet.federation("a", "bb")
        assert (await fleet.train("a")).status_code == 201
        return await fleet.work("bb")

    async def second(fleet: Fleet, work: dict[str, Any]) -> bytes:
        found = (await fleet.operator("GET", "/v1/federations/fed")).json()
        assert (found["round"], found["updates"], found["expected"]) == (1, 1, 1)
        body = trained(await fleet.fetch("bb", work), "bb")  # asked before, fetched after
        assert (await fleet.upload("bb", 1, work["lease"], body)).status_code == 201
        return await whole(fleet, "a", "bb", rounds=1)

    work = play(tmp_path / "x", first)
    assert play(tmp_path / "x", lambda fleet: second(fleet, work)) == play(tmp_path / "y", undisturbed)


def test_an_aggregation_that_a_restart_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")

        def dies(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(aggregation, "close_round", dies)
        for device in ("a", "bb"):
            assert (await fleet.train(device)).status_code == 201
        found = await until(fleet, lambda f: f["fault"] is not None)
        assert (found["round"], found["updates"]) == (1, 2)
        assert "being aggregated" in (await fleet.work("a"))["reason"]

    async def second(fleet: Fleet) -> bytes:
        await until(fleet, lambda f: f["round"] == 2)
        return await whole(fleet, "a", "bb", rounds=1)

    play(tmp_path / "x", first)
    monkeypatch.undo()
    assert play(tmp_path / "x", second) == play(tmp_path / "y", undisturbed)


def test_an_update_that_cannot_be_folded_is_left_out_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fold = FedAvg.fold

    def fragile(self: FedAvg, a: Any, state: Any, total: Any, u: Any, record: Any) -> Any:
        found = fold(self, a, state, total, u, record)  # it has changed the sum before it fails
        if a.device in bad and a.round == 1:
            raise OverflowError("too much")
        return found

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", "ccc", cohort=3, min_devices=3, min_updates=2)
        for device in ("a", "bb", "ccc"):
            assert (await fleet.train(device)).status_code == 201
        await until(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        record = (await fleet.operator("GET", "/v1/federations/fed/rounds/1")).json()
        assert (record["devices"], record["skipped"]) == (["a", "ccc"], ["bb"])
        return (await fleet.operator("GET", "/v1/federations/fed/state")).content

    async def without(fleet: Fleet) -> bytes:
        await fleet.federation("a", "ccc", rounds=1)
        return await whole(fleet, "a", "ccc", rounds=1)

    bad: tuple[str, ...] = ()
    expected = play(tmp_path / "x", without)
    monkeypatch.setattr(FedAvg, "fold", fragile)
    bad = ("bb",)
    assert play(tmp_path / "y", script) == expected
    assert "the update of 'bb' cannot be folded: OverflowError: too much; it is left out" in caplog.text


def test_a_round_without_a_foldable_update_is_run_again_with_other_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = FedAvg.fold

    def fragile(self: FedAvg, a: Any, *rest: Any) -> Any:
        if a.device in bad:
            raise ValueError("odd")
        return fold(self, a, *rest)

    async def script(fleet: Fleet) -> None:
        monkeypatch.setattr(FedAvg, "fold", fragile)
        await fleet.federation("a", "bb", "ccc", cohort=1, min_devices=3)
        works = {d: await fleet.work(d) for d in ("a", "bb", "ccc")}
        (first,) = [d for d, w in works.items() if w["status"] == "train"]
        bad.append(first)
        assert (await fleet.train(first)).status_code == 201
        found = await until(fleet, lambda f: f["attempt"] == 2)
        assert (found["round"], found["updates"], found["expected"]) == (1, 0, 1)
        works = {d: await fleet.work(d) for d in ("a", "bb", "ccc")}
        (second,) = [d for d, w in works.items() if w["status"] == "train"]
        assert second != first
        assert (await fleet.train(second)).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)

    bad: list[str] = []
    play(tmp_path, script)


def test_an_update_that_was_damaged_on_disk_enters_no_round(tmp_path: Path) -> None:
    """The coordinator was restarted since, so it reads the update back before it folds it."""

    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        assert (await fleet.train("a")).status_code == 201

    async def second(fleet: Fleet) -> bytes:
        (blob,) = (tmp_path / "x" / "blobs").glob("fed~*/updates/1/*")
        good = blob.read_bytes()
        blob.write_bytes(flipped(good))
        assert (await fleet.train("bb")).status_code == 201
        found = await until(fleet, lambda f: f["fault"] is not None)
        assert "is damaged: its SHA-256 is" in found["fault"]
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds")).json() == []
        blob.write_bytes(good)
        await until(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        return await whole(fleet, "a", "bb", rounds=1)

    play(tmp_path / "x", first)
    assert play(tmp_path / "x", second) == play(tmp_path / "y", lambda fleet: undisturbed(fleet, LARGE))


def test_a_global_state_that_was_damaged_on_disk_is_not_sent(tmp_path: Path) -> None:
    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")

    async def second(fleet: Fleet) -> None:
        for answer in (
            await fleet.operator("GET", "/v1/federations/fed/state"),
            await fleet.http.get("/v1/federations/fed/work", headers=bearer(credential("a"))),
        ):
            assert "damaged" in refused(answer, "storage-damaged")

    play(tmp_path, first)
    with closing(sqlite3.connect(tmp_path / "coordinator.db")) as database, database:
        (content,) = database.execute("SELECT values_content FROM federations").fetchone()
        database.execute("UPDATE federations SET values_content = ?", (flipped(content),))
    play(tmp_path, second)


def test_updates_and_values_of_closed_rounds_are_swept(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        await whole(fleet, "a", "bb")

        def rounds(kind: str) -> list[str]:
            return sorted(p.name for p in (tmp_path / "blobs").glob(f"fed~*/{kind}/*"))

        end = time.monotonic() + LIMIT
        while (left := [rounds(kind) for kind in ("updates", "values")]) != [[], ["1", "2"]]:
            assert time.monotonic() < end, left
            await asyncio.sleep(0.02)

    play(tmp_path, script)


def test_a_sweep_leaves_what_another_process_may_still_read_and_a_record_that_its_row_names(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        there = fleet.http._transport.app.state.coordinator  # type: ignore[attr-defined]
        blobs, rounds = there.store.blobs, there.federation("fed")._rounds
        root = rounds._method_state.root
        for shelf in ("updates", "downlinks", "values", "records/a", "records/bb"):
            for round_ in range(1 - (shelf == "values"), 4):
                blobs.put(f"{root}/{shelf}/{round_}", b"x")
        with there.store.metadata.database.writing("fed") as c:
            Rows(c, "fed").set_record("a", 1, Content("0" * 64, None))
        rounds._sweep(None)
        left = {shelf: blobs.shelves(f"{root}/{shelf}") for shelf in ("updates", "downlinks", "values")}
        assert left == {"updates": [], "downlinks": ["2", "3"], "values": ["1", "2", "3"]}
        assert [blobs.shelves(f"{root}/records/{d}") for d in ("a", "bb")] == [["1", "2", "3"], ["2", "3"]]

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("rounds", "stopped"), [(1, False), (2, False), (2, True)], ids=["at the end", "at the next round", "at a stop"]
)
def test_the_fault_of_an_update_goes_with_its_round(
    rounds: int, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device may never send it again."""

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE, rounds=rounds)
        assert (await fleet.train("a")).status_code == 201
        work = await fleet.due("bb")
        body = trained(await fleet.fetch("bb", work), "bb")
        with monkeypatch.context() as m:
            m.setattr("os.fsync", full)
            refused(await fleet.upload("bb", work["round"], work["lease"], body), "storage-full")
        await until(fleet, lambda f: "update of 'bb' could not be accepted" in (f["fault"] or ""))
        if stopped:
            assert (await fleet.operator("POST", "/v1/federations/fed/stop")).status_code == 200
        else:
            assert (await fleet.fail("bb", work, "data")).status_code == 204
        after = await until(fleet, lambda f: f["phase"] in ("finished", "stopped") or f["round"] == 2)
        assert after["fault"] is None

    play(tmp_path, script)
