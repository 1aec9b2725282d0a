"""Rounds over REST without a socket: state, records, bytes, long polls, deadlines."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from coordination import (
    LIMIT,
    D,
    Fleet,
    bearer,
    credential,
    manifest,
    play,
    refused,
    served,
    trained,
    until,
    update,
    whole,
)

from coord_server import aggregation
from coord_server.store.values import INLINE
from edge_client.bundle import Model, generate
from edge_client.methods import make_method
from edge_client.task import Course


@pytest.mark.parametrize("d", [D, 2 * ((INLINE // 8) + 100)])
def test_two_devices_go_through_two_rounds_and_the_state_is_the_simulators_bit_for_bit(tmp_path: Path, d: int) -> None:
    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=d)
        return await whole(fleet, "bb", "a")

    state = play(tmp_path, script)
    m = manifest(d)
    model = Model(m, generate(m.parameters, 3), np.zeros(0, np.float32))
    method, course = make_method({"name": "fedavg"}), Course(model, 7, 2, 2)
    expected = method.start(course)
    for r in (1, 2):
        down = aggregation.downlink(method, course, r, expected, None)
        parts = [aggregation.Contribution(n, trained(down.data, n), None, down.sizes) for n in ("a", "bb")]
        expected = aggregation.close_round(method, course, r, expected, parts, {}, "clip", 2).state
    assert state == aggregation.pack(expected)


def test_the_records_of_a_federation_count_the_bytes_that_went_over_the_wire(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        rounds = (await fleet.operator("GET", "/v1/federations/fed/rounds")).json()
        assert [r["round"] for r in rounds] == [1, 2]
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json() == rounds[1]
        devices = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert sum(v for r in rounds for v in r["traffic"]["up"].values()) == sum(d["bytes_up"] for d in devices)
        assert sum(v for r in rounds for v in r["traffic"]["down"].values()) == sum(d["bytes_down"] for d in devices)
        refused(await fleet.operator("GET", "/v1/federations/fed/rounds/3"), "not-found")
        for d in devices:
            assert d["messages_up"].keys() >= {"enrol"}
            assert {"enrol", "work", "receipt"} <= d["messages_down"].keys()
            assert all(n > 0 for kinds in (d["messages_up"], d["messages_down"]) for n in kinds.values())

    play(tmp_path, script)


def test_a_downlink_that_led_to_no_update_is_in_its_device_s_total_and_in_no_round(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=1, min_updates=1)
        work = await fleet.due("bb")
        wasted = len(await fleet.fetch("bb", work))
        assert (await fleet.fail("bb", work, "backend")).status_code == 204
        await fleet.train("a")
        await fleet.due("a")
        (traffic,) = (r["traffic"] for r in (await fleet.operator("GET", "/v1/federations/fed/rounds")).json())
        devices = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert sum(traffic["down"].values()) == devices[0]["bytes_down"] > 0
        assert (devices[1]["bytes_down"], devices[1]["bytes_up"]) == (wasted, 0)

    play(tmp_path, script)


def test_the_last_rounds_record_has_the_downlinks_after_it_by_kind_each_device_once(tmp_path: Path) -> None:
    report = {"score": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def last_down(fleet: Fleet) -> dict[str, int]:
        rounds = (await fleet.operator("GET", "/v1/federations/fed/rounds")).json()
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json() == rounds[1]
        assert rounds[0]["traffic"]["last_down"] == {}
        found: dict[str, int] = rounds[1]["traffic"]["last_down"]
        return found

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        assert await last_down(fleet) == {}
        finish = await fleet.work("a")
        data = await fleet.fetch("a", finish)
        one = {"buffers": 0, "header": len(data) - 4 * D, "parameters": 4 * D}
        assert await last_down(fleet) == one
        await fleet.fetch("a", finish)  # again: it costs a's link twice, and leads to no other model
        assert await last_down(fleet) == one
        mine = bearer(credential("a"))
        assert (
            await fleet.http.put("/v1/federations/fed/devices/a/report", json=report, headers=mine)
        ).status_code == 204
        with closing(sqlite3.connect(tmp_path / "coordinator.db")) as journal:  # a crash from here on loses nothing
            said, down = journal.execute("select last_down, bytes_down from devices where device = 'a'").fetchone()
        assert json.loads(said) == one
        assert down == (await fleet.operator("GET", "/v1/federations/fed/devices")).json()[0]["bytes_down"]
        await fleet.fetch("bb", await fleet.work("bb"))
        assert await last_down(fleet) == {kind: 2 * size for kind, size in one.items()}

    async def later(fleet: Fleet) -> None:
        assert (await last_down(fleet))["parameters"] == 2 * 4 * D

    play(tmp_path, script)
    play(tmp_path, later)


def test_a_device_whose_report_was_taken_has_all_its_bytes_counted_after_a_kill(tmp_path: Path) -> None:
    report = {"score": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def script() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "bb")
            await whole(fleet, "a", "bb")
            work, mine = await fleet.work("a"), bearer(credential("a"))
            before = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()[0]["bytes_down"]
            assert (await fleet.http.head(f"/v1/federations/fed/payloads/{work['downlink']}", headers=mine)).is_success
            devices = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
            assert devices[0]["bytes_down"] == before  # nothing but headers went down
            record = (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json()
            assert record["traffic"]["last_down"] == {}
            size = len(await fleet.fetch("a", work))
            sent = await fleet.http.put("/v1/federations/fed/devices/a/report", json=report, headers=mine)
            assert sent.status_code == 204
            told = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()[0]
            async with served(tmp_path) as next_one:  # which has nothing but what is on disk
                record = (await next_one.operator("GET", "/v1/federations/fed/rounds/2")).json()
                assert sum(record["traffic"]["last_down"].values()) == size
                kept = (await next_one.operator("GET", "/v1/federations/fed/devices")).json()[0]
                assert kept["bytes_down"] == before + size
                assert kept["messages_up"]["report"] > 0
                assert kept == told

    asyncio.run(script())


def test_an_update_to_a_value_that_a_restored_backup_has_lost_does_not_count(tmp_path: Path) -> None:
    """In one course of events "a" trains round 1, in the other it has another update; both go on to round 2."""
    folder, backup = tmp_path / "data", tmp_path / "backup"

    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")

    async def second(fleet: Fleet, values: int) -> dict[str, Any]:
        work = await fleet.due("a")
        body = update(np.full(D, values, np.float32))
        assert (await fleet.upload("a", work["round"], work["lease"], body)).status_code == 201
        assert (await fleet.train("bb")).status_code == 201
        return await fleet.due("a")

    async def late(fleet: Fleet) -> None:
        now, body = await second(fleet, 2), update(np.ones(D, np.float32))
        assert now["round"] == lost["round"] == 2
        assert "ask for work" in refused(await fleet.upload("a", 2, lost["lease"], body), "wrong-lease")
        assert (await fleet.upload("a", 2, now["lease"], body)).status_code == 201

    play(folder, first)
    shutil.copytree(folder, backup)
    lost = play(folder, lambda fleet: second(fleet, 1))
    same = backup.with_name("same")
    shutil.copytree(backup, same)
    assert play(same, lambda fleet: second(fleet, 1))["lease"] == lost["lease"]
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    play(folder, late)


def test_a_report_before_the_last_round_counts_no_last_downlink(tmp_path: Path) -> None:
    report = {"score": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=1)
        path = "/v1/federations/fed/devices/a/report"
        assert (await fleet.http.put(path, json=report, headers=bearer(credential("a")))).status_code == 204
        await whole(fleet, "a", "bb", rounds=1)
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds/1")).json()["traffic"]["last_down"] == {}

    play(tmp_path, script)


def test_a_last_downlink_that_is_fetched_in_parts_counts_once(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        work = await fleet.work("a")
        size = work["downlink_size"]
        for asked in ("0-0", f"0-{size - 2}", f"{size - 1}-"):
            headers = {**bearer(credential("a")), "Range": f"bytes={asked}"}
            part = await fleet.http.get(f"/v1/federations/fed/payloads/{work['downlink']}", headers=headers)
            assert part.status_code == 206
            found = (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json()
            assert sum(found["traffic"]["last_down"].values()) == size

    play(tmp_path, script)


def test_decoded_updates_beyond_the_room_for_them_are_read_again_for_the_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=1)
        here = fleet.http._transport.app.state.coordinator.federation("fed")._rounds  # type: ignore[attr-defined]
        assert (await fleet.train("a")).status_code == 201
        kept.append(set(here._fresh))
        assert (await fleet.train("bb")).status_code == 201
        await until(fleet, lambda f: f["phase"] == "finished")
        return (await fleet.operator("GET", "/v1/federations/fed/state")).content

    kept = list[set[str]]()
    state = play(tmp_path / "kept", script)
    monkeypatch.setattr("coord_server.live.rounds.FRESH", 0)
    assert play(tmp_path / "not", script) == state
    assert kept == [{"a"}, set()]


def test_a_federation_that_nothing_asks_for_leaves_memory_and_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=3)
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]

        async def rests() -> None:
            """It is not used for a while; then only the database has its state, its downlink and its updates."""
            with monkeypatch.context() as m:
                m.setattr("coord_server.live.method_state.IDLE", 0.0)
                await live.look(live._commits.version)
            state = live._method_state
            assert (state._current, state._course) == (None, None)
            assert (live._downlinks._made, live._rounds._fresh) == ({}, {})

        for _ in range(3):
            work = await fleet.due("a")
            if rest:
                await rests()
            down = await fleet.fetch("a", work)
            assert (await fleet.upload("a", work["round"], work["lease"], trained(down, "a"))).status_code == 201
            if rest:
                await rests()
            assert (await fleet.train("bb")).status_code == 201
        final = await fleet.fetch("a", await fleet.due("a"))
        assert live._method_state._current is not None
        return final

    rest = False
    held = play(tmp_path / "held", script)
    rest = True
    assert play(tmp_path / "not", script) == held


def test_a_federation_whose_round_another_coordinator_closed_leaves_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await fleet.fetch("a", await fleet.due("a"))
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
        live._rounds._stand_at(0, None)  # as after the other's commit
        monkeypatch.setattr("coord_server.live.method_state.IDLE", 0.0)
        await live.look(live._commits.version)
        assert (live._method_state._course, live._downlinks._made) == (None, {})

    play(tmp_path, script)


def test_a_device_that_waits_is_woken_when_its_work_is_there(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", start="manual", cohort=1)
        live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
        waiting = asyncio.create_task(live.work("a", 10 * LIMIT))
        while "a" not in live.devices._polls:
            await asyncio.sleep(0.001)
        assert (await fleet.operator("POST", "/v1/federations/fed/start")).json()["phase"] == "running"
        assert (await asyncio.wait_for(waiting, LIMIT)).status == "train"  # of ten times as long that it would wait

    play(tmp_path, script)


def test_a_receipt_carries_the_next_work_when_the_upload_waits_for_it(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work = {d: await fleet.work(d) for d in ("a", "bb")}
        body = {d: trained(await fleet.fetch(d, w), d) for d, w in work.items()}

        async def upload(device: str, wait: float | None) -> httpx.Response:
            return await fleet.upload(device, 1, work[device]["lease"], body[device], wait=wait)

        waiting = asyncio.create_task(upload("a", LIMIT))
        await until(fleet, lambda f: bool(f["updates"] == 1))
        early = await upload("a", LIMIT)  # sent again: nothing to do yet, and no answer is held back while a body comes
        assert (early.status_code, "work" in early.json()) == (200, False)
        last = await upload("bb", LIMIT)
        for device, answer in (("a", await waiting), ("bb", last)):
            assert answer.status_code == 201
            assert (await upload(device, LIMIT)).json()["work"]["round"] == 2
            following = answer.json().pop("work")
            assert (following["status"], following["round"]) == ("train", 2)
            now = await fleet.work(device)
            assert {k: v for k, v in following.items() if k != "deadline_in"} == {
                k: v for k, v in now.items() if k != "deadline_in"
            }
            assert (await upload(device, None)).json() == {k: v for k, v in answer.json().items() if k != "work"}
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert [d["updates"] for d in shown] == [1, 1]

    play(tmp_path, script)


def test_a_receipt_is_given_whatever_is_wrong_with_the_next_downlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        monkeypatch.setattr("coord_server.live.federation.LiveFederation.work", broken)
        answer = await fleet.upload("a", 1, work["lease"], body, wait=5)
        assert (answer.status_code, answer.json()["size"], "work" in answer.json()) == (201, len(body), False)

    play(tmp_path, script)
    assert "no next work for a after its update of round 1" in caplog.text


def test_a_device_removed_while_its_upload_waits_still_gets_the_receipt(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        waiting = asyncio.create_task(fleet.upload("a", 1, work["lease"], body, wait=0.5))
        await until(fleet, lambda f: bool(f["updates"] == 1))
        assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/a")).status_code == 204
        answer = await waiting
        assert (answer.status_code, answer.json()["size"], "work" in answer.json()) == (201, len(body), False)

    play(tmp_path, script)


def test_pause_resume_stop_and_removal(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        assert (await fleet.operator("POST", "/v1/federations/fed/pause")).json()["phase"] == "paused"
        assert "paused" in (await fleet.work("b"))["reason"]
        body = trained(await fleet.fetch("a", work), "a")
        assert (await fleet.upload("a", 1, work["lease"], body)).status_code == 201
        assert (await fleet.operator("POST", "/v1/federations/fed/resume")).json()["updates"] == 1
        refused(await fleet.operator("POST", "/v1/federations/fed/resume"), "wrong-phase")
        assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/b")).status_code == 204
        refused(await fleet.operator("DELETE", "/v1/federations/fed/devices/b"), "not-found")
        refused(await fleet.enrol("b"), "device-removed")
        await until(fleet, lambda f: f["round"] == 2)  # b is no longer waited for
        path = "/v1/federations/fed/work"
        refused(await fleet.http.get(path, headers=bearer(credential("b"))), "device-removed")
        assert (await fleet.operator("POST", "/v1/federations/fed/stop")).json()["phase"] == "stopped"
        assert (await fleet.work("a"))["status"] == "stopped"

    play(tmp_path, script)


def test_at_the_deadline_the_round_closes_without_the_late_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord_server.live.commits.LOOK_MOST", 0.02)
    now = [time.time()]  # it stands still unless the test sets it

    async def main() -> None:
        async with served(tmp_path, lambda: now[0]) as fleet:
            await fleet.federation("a", "b", deadline_seconds=10.0)
            late = await fleet.work("b")
            assert (await fleet.train("a")).status_code == 201
            now[0] += 11.0
            await until(fleet, lambda f: f["round"] == 2)
            refused(await fleet.upload("b", 1, late["lease"], update(np.ones(D))), "wrong-round")

    asyncio.run(main())
