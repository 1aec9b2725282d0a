"""Full and damaged disks, commits that fail late, restarts: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from coordination import (
    D,
    Fleet,
    bearer,
    credential,
    flipped,
    play,
    refused,
    trained,
    until,
    whole,
)

from coord_server import aggregation
from coord_server.store.tables import INLINE
from edge_client.errors import StateError
from edge_client.methods.fedavg import FedAvg


@pytest.mark.parametrize(
    ("d", "at_once"), [(D, False), (D, True), (2 * ((INLINE // 8) + 100), False)], ids=["small", "at once", "large"]
)
def test_a_full_disk_gives_507_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, d: int, at_once: bool
) -> None:
    """A round's closing is journalled with its last update when both are small, else behind it."""
    monkeypatch.setattr("coord_server.values.AT_ONCE", math.inf if at_once else 0.0)

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=d)
        work = await fleet.work("a", 10)
        body = trained(await fleet.fetch("a", work), "a")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def locked(*_: object) -> None:
            raise StateError("database or disk is full")

        with monkeypatch.context() as m:
            m.setattr(os, "fsync", full)
            m.setattr("coord_server.store.metadata.Metadata.acknowledge", locked)
            said = refused(await fleet.upload("a", 1, work["lease"], body), "storage-full")
            found = (await fleet.operator("GET", "/v1/federations/fed")).json()
            assert (found["updates"], found["fault"]) == (0, f"the update of 'a' could not be taken in: {said}")
        assert (await fleet.upload("a", 1, work["lease"], body)).status_code == 201
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"] is None
        with monkeypatch.context() as m:
            m.setattr(os, "fsync", full)
            m.setattr(f"coord_server.store.metadata.Metadata.{'_close' if at_once else 'close_round'}", locked)
            behind = d == D and not at_once
            assert (await fleet.train("bb")).status_code == (201 if behind else 507)
            if behind:  # the round is folded, the disk full: nothing more is taken until it is written
                found = await until(fleet, lambda f: f["fault"] is not None)
                assert "disk is full" in found["fault"]
                refused(await fleet.train("a"), "storage-full")
                refused(await fleet.operator("GET", "/v1/federations/fed/state"), "storage-full")
        if not behind:
            assert (await fleet.train("bb")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        return await whole(fleet, "a", "bb", rounds=1)

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=d)
        return await whole(fleet, "a", "bb")

    assert play(tmp_path / "x", script) == play(tmp_path / "y", undisturbed)


def test_a_megabyte_that_finds_no_room_is_told_to_the_operator_until_its_round_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that is spooled while it arrives meets the full disk before it is whole."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=1 << 19)
        work = await fleet.work("a", 10)
        body = trained(await fleet.fetch("a", work), "a")
        with monkeypatch.context() as m:
            m.setattr("coord_server.store.blobs.os.write", full)
            said = refused(await fleet.upload("a", 1, work["lease"], body), "storage-full")
        assert "No space left" in said
        found = (await fleet.operator("GET", "/v1/federations/fed")).json()
        assert found["fault"] == f"the update of 'a' could not be taken in: {said}"
        assert (await fleet.operator("POST", "/v1/federations/fed/stop")).json()["fault"] is None

    play(tmp_path, script)


@pytest.mark.parametrize(("write", "at_once"), [("acknowledge", True), ("acknowledge", False), ("close_round", False)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_commit_that_was_made_but_neither_said_nor_shown_is_found_in_the_journal_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, at_once: bool, rounds: int
) -> None:
    monkeypatch.setattr("coord_server.values.AT_ONCE", math.inf if at_once else 0.0)

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=rounds)
        assert (await fleet.train("a")).status_code == 201
        work = await fleet.work("bb")
        body = trained(await fleet.fetch("bb", work), "bb")
        met = unsure_once(monkeypatch, write)
        first = await fleet.upload("bb", 1, work["lease"], body)
        assert first.status_code == (507 if write == "acknowledge" else 201)
        assert (await fleet.upload("bb", 1, work["lease"], body)).status_code in (200, 201)
        await until(fleet, lambda f: met == ["unsaid", "unseen"] and f["fault"] is None)
        if rounds == 2:
            await until(fleet, lambda f: f["round"] == 2)
        return await whole(fleet, "a", "bb", rounds=rounds - 1)

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=rounds)
        return await whole(fleet, "a", "bb", rounds=rounds)

    assert play(tmp_path / "x", script) == play(tmp_path / "y", undisturbed)


def test_a_restart_goes_on_in_the_same_round_with_the_updates_that_were_acknowledged(tmp_path: Path) -> None:
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

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb")
        return await whole(fleet, "a", "bb")

    work = play(tmp_path / "x", first)
    assert play(tmp_path / "x", lambda fleet: second(fleet, work)) == play(tmp_path / "y", undisturbed)


def test_a_coordinator_that_went_down_in_mid_aggregation_does_it_again(
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

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb")
        return await whole(fleet, "a", "bb")

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


def test_a_round_of_which_no_update_can_be_folded_is_run_again_with_other_devices(
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


def test_an_update_that_was_damaged_on_disk_is_in_no_round(tmp_path: Path) -> None:
    """The coordinator was restarted since, so it reads the update back before it folds it."""
    large = 2 * ((INLINE // 8) + 100)

    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=large)
        assert (await fleet.train("a")).status_code == 201

    async def second(fleet: Fleet) -> bytes:
        (blob,) = (tmp_path / "x" / "blobs" / "fed" / "updates" / "1").iterdir()
        good = blob.read_bytes()
        blob.write_bytes(flipped(good))
        assert (await fleet.train("bb")).status_code == 201
        found = await until(fleet, lambda f: f["fault"] is not None)
        assert "is damaged: its SHA-256 is" in found["fault"]
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds")).json() == []
        blob.write_bytes(good)
        await until(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        return await whole(fleet, "a", "bb", rounds=1)

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=large)
        return await whole(fleet, "a", "bb")

    play(tmp_path / "x", first)
    assert play(tmp_path / "x", second) == play(tmp_path / "y", undisturbed)


def test_a_global_state_that_was_damaged_on_disk_reaches_nobody(tmp_path: Path) -> None:
    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")

    async def second(fleet: Fleet) -> None:
        for answer in (
            await fleet.operator("GET", "/v1/federations/fed/state"),
            await fleet.http.get("/v1/federations/fed/work", headers=bearer(credential("a"))),
        ):
            assert "the database's fed/state is damaged" in refused(answer, "storage-full")

    play(tmp_path, first)
    with closing(sqlite3.connect(tmp_path / "coordinator.db")) as database, database:
        (content,) = database.execute("SELECT global_content FROM federations").fetchone()
        database.execute("UPDATE federations SET global_content = ?", (flipped(content),))
    play(tmp_path, second)


def test_updates_and_downlinks_of_closed_rounds_are_swept(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=2 * ((INLINE // 8) + 100))
        await whole(fleet, "a", "bb")
        for _ in range(200):
            left = [p.name for p in (tmp_path / "blobs" / "fed" / "updates").iterdir()]
            if not left:
                break
            await asyncio.sleep(0.02)
        assert left == []
        assert len(list((tmp_path / "blobs" / "fed" / "state").iterdir())) == 1

    play(tmp_path, script)
