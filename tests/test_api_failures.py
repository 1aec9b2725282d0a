"""Devices that cannot do their round: the round goes on, the operator sees why, attempts are capped."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordination import D, Fleet, bearer, credential, play, refused, trained, until

from coord_server import engine
from coord_server.live import commits
from edge_client.protocol.payload import decode

FED = "/v1/federations/fed"


async def shown(fleet: Fleet, device: str) -> dict[str, Any]:
    """A device as the operator sees it."""
    found: list[dict[str, Any]] = (await fleet.operator("GET", f"{FED}/devices")).json()
    return next(d for d in found if d["device"] == device)


@pytest.mark.parametrize("kind", ["lost", "downlink", "diverged", "out-of-memory", "backend", "data", "refused"])
def test_a_round_closes_without_the_device_that_failed_and_the_operator_sees_why(tmp_path: Path, kind: str) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        failure = {"kind": kind, "reason": "96 MB are free"}
        for _ in range(2):  # the first answer was lost
            assert (await fleet.fail("a", work, **failure)).status_code == 204
        assert (await fleet.operator("GET", FED)).json()["expected"] == 1
        assert (await fleet.work("a"))["status"] == "wait"
        assert (await fleet.train("b")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)
        record = (await fleet.operator("GET", f"{FED}/rounds/1")).json()
        assert (record["devices"], record["failed"]) == (["b"], {"a": failure})
        device = await shown(fleet, "a")
        assert (device["failure"], device["messages_up"]["failure"] > 0) == (failure, True)
        assert (await fleet.train("a")).status_code == 201  # it is drawn again
        assert (await shown(fleet, "a"))["failure"] is None

    play(tmp_path, script)


def test_a_failure_needs_the_device_s_own_lease_and_a_known_kind(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        refused(await fleet.fail("a", {**work, "lease": "0" * 16}, "data"), "wrong-lease")
        refused(await fleet.fail("a", {**work, "round": 2}, "data"), "wrong-round")
        refused(await fleet.fail("a", work, "tired"), "bad-message")
        refused(await fleet.fail("a", work, "data", "x" * 1001), "bad-message")
        path, body = f"{FED}/rounds/1/failures/b", {"kind": "data", "reason": "odd"}
        shown_as_a = {**bearer(credential("a")), "Maskfleet-Lease": work["lease"]}
        refused(await fleet.http.put(path, json=body, headers=shown_as_a), "forbidden")
        refused(await fleet.http.put(path, json=body), "unauthorized")
        assert (await fleet.train("a")).status_code == 201
        refused(await fleet.fail("a", work, "data"), "conflicting-update")  # its update is in, and counts
        assert (await fleet.train("b")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)
        assert (await fleet.operator("GET", f"{FED}/rounds/1")).json()["failed"] == {}

    play(tmp_path, script)


def test_after_max_attempts_the_federation_pauses_with_its_fault_until_the_operator_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RETRY", 0.1)  # seconds until both, which failed, are drawn again
    monkeypatch.setattr(commits, "LOOK_DRAWING", 0.02)

    async def attempt(fleet: Fleet) -> None:
        for device in ("a", "b"):
            assert (await fleet.fail(device, await fleet.work(device), "data", f"{device} is odd")).status_code == 204

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b", max_attempts=2)
        for first in (1, 3):
            await attempt(fleet)
            await until(fleet, lambda f, n=first: f["attempt"] == n + 1)
            await attempt(fleet)
            found = await until(fleet, lambda f: f["phase"] == "paused")
            for words in ("round 1", "after 2 attempts", "a is odd", "b is odd"):
                assert words in found["fault"]
            assert (await fleet.work("a"))["status"] == "wait"
            found = (await fleet.operator("POST", f"{FED}/resume")).json()
            assert (found["phase"], found["round"], found["fault"]) == ("running", 1, None)
        for device in ("a", "b"):
            assert (await fleet.train(device)).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)

    play(tmp_path, script)


@pytest.mark.parametrize("d", [D, 70_000])  # records in their rows, and as blobs
def test_a_device_that_lost_its_values_counts_once_in_a_mean_of_last_reflections(tmp_path: Path, d: int) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=d, rounds=4, method={"name": "feddr"})
        last = {}
        for round_, unlucky in enumerate(("", "a", "a", ""), 1):
            for device in ("a", "bb"):
                work = await fleet.due(device)
                if device == unlucky:
                    assert (await fleet.fail(device, work, "lost")).status_code == 204
                    continue
                body = trained(await fleet.fetch(device, work), device)
                last[device] = decode(body).arrays["parameters"]
                assert (await fleet.upload(device, work["round"], work["lease"], body)).status_code == 201
            await until(fleet, lambda f, n=round_: f["round"] > n or f["phase"] == "finished")
        state = decode((await fleet.operator("GET", f"{FED}/state")).content).arrays
        assert state["weight"] == 2
        assert state["parameters"] == pytest.approx(np.mean(list(last.values()), axis=0), rel=1e-6)

    play(tmp_path, script)


def test_of_a_damaged_record_nothing_is_left_when_its_device_lost_its_values(tmp_path: Path) -> None:
    def records() -> dict[str, bytes]:
        with closing(sqlite3.connect(next(tmp_path.rglob("coordinator.db")))) as database, database:
            database.execute("UPDATE records SET content = ? WHERE device = 'a' AND round = 1", (b"x",))
            return dict(database.execute("SELECT device, content FROM records").fetchall())

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", method={"name": "feddr"})
        work = {}
        for device in ("a", "bb"):
            assert (await fleet.train(device)).status_code == 201
        for device in ("a", "bb"):
            work[device] = await fleet.due(device)
        before = records()
        assert before["a"] == b"x"
        assert (await fleet.fail("a", work["a"], "data")).status_code == 204  # which costs no record
        assert records() == before
        assert (await fleet.fail("a", work["a"], "lost")).status_code == 204
        assert set(records()) == {"bb"}

    play(tmp_path, script)


def test_after_the_last_round_only_lost_is_taken_and_the_device_gets_its_downlink_again(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b", rounds=1)
        for device in ("a", "b"):
            assert (await fleet.train(device)).status_code == 201
        await until(fleet, lambda f: f["phase"] == "finished")
        finish = await fleet.work("a")
        refused(await fleet.fail("a", finish, "data"), "wrong-phase")
        assert (await fleet.fail("a", finish, "lost")).status_code == 204
        again = await fleet.work("a")
        assert (again["status"], again["round"]) == ("finish", 2)
        await fleet.fetch("a", again)

    play(tmp_path, script)
