"""The REST API without a socket: rounds, idempotence, refusals, restarts."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from coordination import (
    OPERATOR,
    D,
    Fleet,
    bearer,
    content_digest,
    credential,
    manifest,
    served,
    settings,
    trained,
    update,
)

from coord_server import aggregation
from coord_server.api import create_app
from coord_server.api.wire import JSON_DEPTH, JSON_LIMIT
from coord_server.coordinator import Coordinator
from coord_server.intake import Intake
from coord_server.refusals import STATUS
from coord_server.store import open_store
from coord_server.store.metadata import Metadata
from coord_server.store.tables import INLINE
from coord_server.values import Values
from edge_client.bundle import Model, digest, generate
from edge_client.errors import StateError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import FederationConfig, Problem

Script = Callable[[Fleet], Awaitable[Any]]


def play(folder: Path, script: Script) -> Any:
    """Run `script` against a coordinator on `folder`."""

    async def main() -> Any:
        async with served(folder) as fleet:
            return await script(fleet)

    return asyncio.run(main())


def refused(answer: httpx.Response, kind: str) -> str:
    """The sentence of a problem of this kind."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = Problem.model_validate_json(answer.content)
    assert (problem.type, problem.status, answer.status_code) == (f"/problems/{kind}", STATUS[kind], STATUS[kind])
    assert "Traceback" not in answer.text
    return problem.detail


async def until_round(fleet: Fleet, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(400):
        found: dict[str, Any] = (await fleet.operator("GET", "/v1/federations/fed")).json()
        if done(found):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


def unsure_once(monkeypatch: pytest.MonkeyPatch, write: str) -> list[str]:
    """Let the next `write` of the database land and not say so, and the next look at the state fail.

    The list has "unsaid" and then "unseen" once that has happened.
    """
    journal, state, met = getattr(Metadata, write), Metadata.state, list[str]()

    def unsaid(*given: Any) -> None:
        journal(*given)
        met.append("unsaid")
        monkeypatch.setattr(Metadata, write, journal)
        raise StateError("disk I/O error")

    def unseen(*given: Any) -> Any:
        if met == ["unsaid"]:
            met.append("unseen")
            raise StateError("disk I/O error")
        return state(*given)

    monkeypatch.setattr(Metadata, write, unsaid)
    monkeypatch.setattr(Metadata, "state", unseen)
    return met


async def whole(fleet: Fleet, *devices: str, rounds: int = 2) -> bytes:
    for _ in range(rounds):
        for device in devices:
            assert (await fleet.train(device)).status_code == 201
    assert (await fleet.work(devices[0], 10))["status"] == "finish"
    return (await fleet.operator("GET", "/v1/federations/fed/state")).content


def flipped(data: bytes) -> bytes:
    """The same with one bit changed."""
    return data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]


# --- a federation from end to end


@pytest.mark.parametrize("d", [D, 2 * ((INLINE // 8) + 100)])
def test_two_devices_go_through_two_rounds_and_the_state_is_the_simulators_bit_for_bit(tmp_path: Path, d: int) -> None:
    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=d)
        return await whole(fleet, "bb", "a")

    state = play(tmp_path, script)
    m = manifest(d)
    model = Model(m, generate(m.parameters, 3), np.zeros(0, np.float32))
    course = aggregation.Course(make_method({"name": "fedavg"}), model, 7, 2)
    expected = course.method.start(model, 7)
    for r in (1, 2):
        down, kinds = aggregation.downlink(course, r, "a", expected, {})
        parts = [aggregation.Contribution(n, trained(down, n), {}, kinds) for n in ("a", "bb")]
        expected = aggregation.close_round(course, r, expected, parts, lambda *_: None, 0.0).state
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


def test_the_last_rounds_record_has_the_downlinks_after_it_by_kind_each_device_once(tmp_path: Path) -> None:
    report = {"accuracy": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

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
            said, down = journal.execute("select messages, bytes_down from devices where device = 'a'").fetchone()
        assert json.loads(said)["last"] == one
        assert down == (await fleet.operator("GET", "/v1/federations/fed/devices")).json()[0]["bytes_down"]
        await fleet.fetch("bb", await fleet.work("bb"))
        assert await last_down(fleet) == {kind: 2 * size for kind, size in one.items()}

    async def later(fleet: Fleet) -> None:
        assert (await last_down(fleet))["parameters"] == 2 * 4 * D

    play(tmp_path, script)
    play(tmp_path, later)


def test_a_report_tells_of_the_last_downlink_that_a_coordinator_that_died_knew_of(tmp_path: Path) -> None:
    report = {"accuracy": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}
    path, mine = "/v1/federations/fed/devices/a/report", bearer(credential("a"))

    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        assert (await fleet.http.put(path, json=report, headers=mine)).status_code == 204

    async def last_down(fleet: Fleet) -> dict[str, int]:
        found = (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json()["traffic"]["last_down"]
        return {str(kind): int(size) for kind, size in found.items()}

    async def second(fleet: Fleet) -> int:
        assert await last_down(fleet) == {}
        size = int((await fleet.work("a"))["downlink_size"])
        before = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()[0]["bytes_down"]
        for _ in range(2):  # said twice, it was fetched once
            assert (await fleet.http.put(path, json=report, headers=mine)).status_code == 204
        with closing(sqlite3.connect(tmp_path / "coordinator.db")) as journal:
            said, down = journal.execute("select messages, bytes_down from devices where device = 'a'").fetchone()
        assert json.loads(said)["last"] == await last_down(fleet)
        assert (sum((await last_down(fleet)).values()), down) == (size, before + size)
        return size

    async def third(fleet: Fleet) -> int:
        return sum((await last_down(fleet)).values())

    play(tmp_path, first)
    with closing(sqlite3.connect(tmp_path / "coordinator.db")) as journal, journal:  # what a kill leaves behind
        journal.execute("update devices set messages = null, report = null")
    assert play(tmp_path, second) == play(tmp_path, third)


def test_a_report_before_the_last_round_tells_of_no_last_downlink(tmp_path: Path) -> None:
    report = {"accuracy": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=1)
        path = "/v1/federations/fed/devices/a/report"
        assert (await fleet.http.put(path, json=report, headers=bearer(credential("a")))).status_code == 204
        await whole(fleet, "a", "bb", rounds=1)
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds/1")).json()["traffic"]["last_down"] == {}

    play(tmp_path, script)


def test_a_part_of_the_last_downlink_counts_once_it_reaches_the_end(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        work = await fleet.work("a")
        size = work["downlink_size"]
        for asked, counted in (("0-0", 0), (f"0-{size - 2}", 0), (f"{size - 1}-", size)):
            headers = {**bearer(credential("a")), "Range": f"bytes={asked}"}
            part = await fleet.http.get(f"/v1/federations/fed/payloads/{work['downlink']}", headers=headers)
            assert part.status_code == 206
            found = (await fleet.operator("GET", "/v1/federations/fed/rounds/2")).json()
            assert sum(found["traffic"]["last_down"].values()) == counted

    play(tmp_path, script)


def test_a_device_that_waits_is_woken_when_its_work_is_there(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", start="manual", cohort=1)
        waiting = asyncio.create_task(fleet.work("a", 30))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        begun = time.monotonic()
        assert (await fleet.operator("POST", "/v1/federations/fed/start")).json()["phase"] == "running"
        assert (await waiting)["status"] == "train"
        assert time.monotonic() - begun < 10

    play(tmp_path, script)


def test_a_receipt_brings_the_next_work_when_the_upload_may_wait_for_it(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work = {d: await fleet.work(d) for d in ("a", "bb")}
        body = {d: trained(await fleet.fetch(d, w), d) for d, w in work.items()}

        async def upload(device: str, wait: float | None) -> httpx.Response:
            return await fleet.upload(device, 1, work[device]["lease"], body[device], wait=wait)

        waiting = asyncio.create_task(upload("a", 30))
        await until_round(fleet, lambda f: bool(f["updates"] == 1))
        early = await upload("a", 30)  # sent again: nothing to do yet, and no answer is held back while a body comes
        assert (early.status_code, "work" in early.json()) == (200, False)
        last = await upload("bb", 30)
        for device, answer in (("a", await waiting), ("bb", last)):
            assert answer.status_code == 201
            assert (await upload(device, 30)).json()["work"]["round"] == 2
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
        monkeypatch.setattr("coord_server.polls.Polls.work", broken)
        answer = await fleet.upload("a", 1, work["lease"], body, wait=5)
        assert (answer.status_code, answer.json()["size"], "work" in answer.json()) == (201, len(body), False)

    play(tmp_path, script)
    assert "no next work for a after its update of round 1" in caplog.text


def test_a_device_that_is_removed_while_it_waits_with_its_upload_still_gets_the_receipt(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        waiting = asyncio.create_task(fleet.upload("a", 1, work["lease"], body, wait=0.5))
        await until_round(fleet, lambda f: bool(f["updates"] == 1))
        assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/a")).status_code == 204
        answer = await waiting
        assert (answer.status_code, answer.json()["size"], "work" in answer.json()) == (201, len(body), False)

    play(tmp_path, script)


def test_a_device_with_nothing_to_do_is_told_why_and_when_to_ask_again(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        found = await fleet.work("a", 0.05)
        assert found["status"] == "wait"
        assert found["reason"] == "waiting for 2 devices; 1 ready"
        assert found["poll_after"] > 0

    play(tmp_path, script)


def test_a_device_that_never_asks_for_work_is_neither_counted_nor_drawn_nor_waited_for(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        for ghost in ("ghost", "gone"):
            assert (await fleet.enrol(ghost)).status_code == 200
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["devices"] == 1
        assert (await fleet.work("a"))["reason"] == "waiting for 2 devices; 1 ready"
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert {d["device"]: d["ready"] for d in shown} == {"a": True, "ghost": False, "gone": False}
        assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/gone")).status_code == 204
        path = "/v1/federations/fed/work"
        refused(await fleet.http.get(path, headers=bearer(credential("gone"))), "device-removed")
        await fleet.enrol("b")
        assert (await fleet.work("b"))["status"] == "train"
        for device in ("a", "b"):
            assert (await fleet.train(device)).status_code == 201
        record = await until_round(fleet, lambda f: f["round"] == 2)
        assert record["devices"] == 2

    play(tmp_path, script)

    async def restarted(fleet: Fleet) -> None:
        assert (await fleet.work("ghost"))["status"] == "wait"
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert [(d["ready"], d["removed"]) for d in shown if d["device"] in ("ghost", "gone")] == [
            (True, False),
            (False, True),
        ]
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["devices"] == 3

    play(tmp_path, restarted)


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
        await until_round(fleet, lambda f: f["round"] == 2)  # nobody waits for b any more
        path = "/v1/federations/fed/work"
        refused(await fleet.http.get(path, headers=bearer(credential("b"))), "device-removed")
        assert (await fleet.operator("POST", "/v1/federations/fed/stop")).json()["phase"] == "stopped"
        assert (await fleet.work("a"))["status"] == "stopped"

    play(tmp_path, script)


def test_at_the_deadline_the_round_goes_on_without_the_late(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b", deadline_seconds=0.6)
        late = await fleet.work("b")
        assert (await fleet.train("a")).status_code == 201
        await until_round(fleet, lambda f: f["round"] == 2)
        refused(await fleet.upload("b", 1, late["lease"], update(np.ones(D))), "wrong-round")

    play(tmp_path, script)


def test_the_final_report_is_shown_to_the_operator(tmp_path: Path) -> None:
    report = {"accuracy": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        path, mine = "/v1/federations/fed/devices/a/report", bearer(credential("a"))
        assert (await fleet.http.put(path, json=report, headers=mine)).status_code == 204
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert shown[0]["report"]["parameters_compact"] == 3
        refused(await fleet.http.put(path, json={**report, "accuracy": 2}, headers=mine), "bad-message")
        refused(await fleet.http.put(path, json=report, headers=bearer(credential("b"))), "forbidden")

    play(tmp_path, script)


# --- the same thing twice


def test_enrolling_again_is_harmless_and_a_name_cannot_be_taken_over(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        again = await fleet.enrol("a")
        assert (again.status_code, again.json()["device"]) == (200, "a")
        refused(await fleet.enrol("a", "f" * 64), "name-taken")
        refused(await fleet.enrol("b", credential("a")), "name-taken")
        fleet.join = "wrong"
        refused(await fleet.enrol("c"), "unauthorized")
        once = (await fleet.operator("POST", "/v1/federations/fed/tokens", json={"uses": 1})).json()
        fleet.join = once["token"]
        assert (await fleet.enrol("b")).status_code == 200
        assert (await fleet.enrol("b")).status_code == 200  # the answer was lost; the token is used up meanwhile
        refused(await fleet.enrol("c"), "token-spent")
        brief = (await fleet.operator("POST", "/v1/federations/fed/tokens", json={"expires_in": 1e-3})).json()
        fleet.join = brief["token"]
        await asyncio.sleep(0.01)
        assert "expired" in refused(await fleet.enrol("c"), "token-spent")

    play(tmp_path, script)


def test_an_upload_sent_again_gets_the_same_receipt_even_rounds_later(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        first = await fleet.upload("a", 1, work["lease"], body)
        same = await fleet.upload("a", 1, work["lease"], body)
        assert (first.status_code, same.status_code) == (201, 200)
        assert first.json() == same.json()
        refused(await fleet.upload("a", 1, work["lease"], update(np.ones(D))), "conflicting-update")
        await fleet.train("b")
        await until_round(fleet, lambda f: f["round"] == 2)
        later = await fleet.upload("a", 1, work["lease"], body)
        assert (later.status_code, later.json()) == (200, first.json())
        both = await asyncio.gather(*(fleet.train("a") for _ in range(4)))
        assert {r.status_code for r in both} <= {200, 201, 429}  # 429: a newer one took its place
        assert len({r.text for r in both if r.is_success}) == 1
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert shown[0]["updates"] == 2

    play(tmp_path, script)


# --- what is immutable


def test_bundles_and_payloads_have_etags_ranges_and_their_readers(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        address, mine = digest(manifest().to_bytes()), bearer(credential("a"))
        whole = await fleet.http.get(f"/v1/bundles/{address}", headers=mine)
        assert whole.content == manifest().to_bytes()
        assert whole.headers["cache-control"] == "private, max-age=31536000, immutable"
        work = await fleet.work("a")
        for path in (f"/v1/bundles/{address}/parts/train.onnx", f"/v1/federations/fed/payloads/{work['downlink']}"):
            whole = await fleet.http.get(path, headers=mine)
            assert whole.headers["etag"] == f'"{digest(whole.content)}"'
            known = await fleet.http.get(path, headers={**mine, "If-None-Match": whole.headers["etag"]})
            assert (known.status_code, known.content) == (304, b"")
            rest = await fleet.http.get(path, headers={**mine, "Range": "bytes=2-"})
            assert (rest.status_code, rest.content) == (206, whole.content[2:])
            size = len(whole.content)
            assert rest.headers["content-range"] == f"bytes 2-{size - 1}/{size}"
            last = await fleet.http.get(path, headers={**mine, "Range": "bytes=-2"})
            assert last.content == whole.content[-2:]
            refused(await fleet.http.get(path, headers={**mine, "Range": f"bytes={size}-"}), "bad-range")
            refused(await fleet.http.get(path, headers=bearer("x")), "unauthorized")
            refused(await fleet.http.get(path), "unauthorized")
        refused(await fleet.http.get(f"/v1/federations/fed/payloads/{'0' * 64}", headers=mine), "not-found")
        refused(await fleet.http.get(f"/v1/bundles/{address}/parts/other", headers=mine), "not-found")

    play(tmp_path, script)


# --- bad input


def test_bad_updates_are_refused_with_a_reason_and_the_round_goes_on(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        lease = (await fleet.work("a"))["lease"]
        good = trained(await fleet.fetch("a", await fleet.work("a")), "a")
        flipped = bytearray(good)
        flipped[-5] ^= 0x40
        sound = {"Content-Digest": content_digest(good)}

        async def chunks(data: bytes) -> AsyncIterator[bytes]:
            for low in range(0, len(data), 1000):
                yield data[low : low + 1000]

        huge = good + bytes(10_000)
        too_long = {**sound, "Content-Length": str(10**12)}
        for kind, said, answer in [
            ("bad-payload", "NaN", fleet.upload("a", 1, lease, update(np.full(D, np.nan)))),
            ("bad-payload", "float32", fleet.upload("a", 1, lease, update(np.ones(D + 1)))),
            ("bad-payload", "not a maskfleet payload", fleet.upload("a", 1, lease, good[:-9])),
            ("bad-payload", "not a maskfleet payload", fleet.upload("a", 1, lease, b"")),
            ("bad-payload", "5 of 4 test samples", fleet.upload("a", 1, lease, update(np.ones(D), correct=[1, 5, 4]))),
            ("bad-digest", "damaged", fleet.upload("a", 1, lease, bytes(flipped), sound)),
            ("bad-digest", "RFC 9530", fleet.upload("a", 1, lease, good, {"Content-Digest": "md5=:AAAA:"})),
            ("bad-digest", "RFC 9530", fleet.upload("a", 1, lease, good, {"Content-Digest": "sha-256=:AAAA:"})),
            ("too-large", "at most", fleet.upload("a", 1, lease, huge)),
            ("too-large", "Content-Length", fleet.upload("a", 1, lease, chunks(good), too_long)),
            ("too-large", "exceeds", fleet.upload("a", 1, lease, chunks(huge), sound)),
            ("wrong-lease", "lease", fleet.upload("a", 1, "0" * 16, good)),
            ("wrong-round", "round 1", fleet.upload("a", 2, lease, good)),
            ("wrong-round", "round 1", fleet.upload("a", 10**9, lease, good)),
            ("bad-message", "round", fleet.upload("a", 0, lease, good)),
            ("forbidden", "'a'", fleet.upload("b", 1, lease, good, bearer(credential("a")))),
            ("unauthorized", "credential", fleet.upload("a", 1, lease, good, bearer("0" * 64))),
        ]:
            assert said in refused(await answer, kind)
        assert os.listdir(tmp_path / "blobs" / "incoming") == []
        assert (await fleet.upload("a", 1, lease, chunks(good), sound)).status_code == 201
        assert (await fleet.train("b")).status_code == 201
        await until_round(fleet, lambda f: f["round"] == 2)

    play(tmp_path, script)


def test_a_refused_update_is_not_read(tmp_path: Path) -> None:
    read: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"x"

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        sound = {"Content-Digest": content_digest(b"x")}
        refused(await fleet.upload("a", 1, "0" * 16, body(), sound), "wrong-lease")

    play(tmp_path, script)
    assert read == []


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"method": {"name": "fedmagic"}}, "bad-config", "choose one of"),
        ({"method": {"name": "fedavg", "lr": -1}}, "bad-config", "lr"),
        ({"method": {}}, "bad-config", "choose one of"),
        ({"backend": "abacus"}, "bad-config", "leave `backend` out and join with --backend"),
        ({"backend": "torch"}, "bad-config", "needs ['model.pt2'] of bundle 'small'"),
        ({"bundle": "0" * 64}, "not-found", "POST its manifest"),
        ({"bundle": "short"}, "bad-message", "bundle"),
        ({"rounds": 0}, "bad-message", "rounds"),
        ({"min_updates": 3}, "bad-message", "min_updates 3 is more than the cohort"),
        ({"name": "../x"}, "bad-message", "name"),
        ({"name": "bundles"}, "name-taken", "bundles"),
        ({"speed": 1}, "bad-message", "speed"),
        ({"deadline_seconds": float("inf")}, "bad-message", "finite"),
        ({"method": {"name": "fedavg", "lr": float("inf")}}, "bad-config", "lr"),
    ],
)
def test_a_bad_federation_is_refused_with_what_to_do(
    tmp_path: Path, change: dict[str, Any], kind: str, said: str
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.bundle()
        body = json.dumps({**settings(), **change})
        headers = {**bearer(OPERATOR), "Content-Type": "application/json"}
        answer = await fleet.http.post("/v1/federations", content=body, headers=headers)
        assert said in refused(answer, kind)
        assert (await fleet.operator("GET", "/v1/federations")).json() == []

    play(tmp_path, script)


def test_a_federation_keeps_and_sends_every_setting_so_that_no_device_fills_in_its_own(tmp_path: Path) -> None:
    complete = {"name": "fedavg", "epochs": 3, "batch": 32, "lr": 0.01, "momentum": 0.9}

    async def create(fleet: Fleet) -> None:
        await fleet.federation(method={"name": "fedavg", "epochs": 3})

    async def after_a_restart(fleet: Fleet) -> None:
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["config"]["method"] == complete
        fleet.join = (await fleet.operator("POST", "/v1/federations/fed/tokens", json={})).json()["token"]
        assert (await fleet.enrol("a")).json()["method"] == complete

    play(tmp_path, create)
    play(tmp_path, after_a_restart)


def test_bundles_are_checked_part_by_part_and_needed_whole(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        refused(await fleet.operator("POST", "/v1/bundles", content=b"{}"), "bad-bundle")
        odd = manifest().to_bytes().replace(b"train.onnx", b"../train.onnx")
        assert "../train.onnx" in refused(await fleet.operator("POST", "/v1/bundles", content=odd), "bad-bundle")
        huge = manifest(d=1 << 29).to_bytes()  # some hundred bytes that would make a coordinator fill gigabytes
        assert "--max-parameters" in refused(await fleet.operator("POST", "/v1/bundles", content=huge), "bad-bundle")
        receipt = (await fleet.operator("POST", "/v1/bundles", content=manifest().to_bytes())).json()
        assert receipt["missing"] == ["train.onnx"]
        refused(await fleet.operator("POST", "/v1/federations", json=settings()), "bundle-incomplete")
        path = f"/v1/bundles/{receipt['digest']}/parts/"
        refused(await fleet.operator("PUT", path + "train.onnx", content=b"grapf"), "bad-bundle")
        refused(await fleet.operator("PUT", path + "train.onnx", content=b"gra"), "bad-bundle")
        refused(await fleet.operator("PUT", path + "train.onnx", content=b"graph and more"), "too-large")
        refused(await fleet.operator("PUT", path + "other.onnx", content=b"graph"), "not-found")
        for _ in range(2):
            whole = await fleet.operator("PUT", path + "train.onnx", content=b"graph")
            assert (whole.status_code, whole.json()["missing"]) == (200, [])
        assert (await fleet.operator("POST", "/v1/federations", json=settings())).status_code == 201
        refused(await fleet.operator("POST", "/v1/federations", json=settings()), "name-taken")

    play(tmp_path, script)


def test_every_other_error_is_a_problem_too(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        for path in ("/", "/v1/nothing", "/v1/federations/none"):
            refused(await fleet.operator("GET", path), "not-found")
        refused(await fleet.operator("PATCH", "/v1/federations"), "method-not-allowed")
        refused(await fleet.operator("POST", "/v1/federations", content=b"{"), "bad-message")
        refused(await fleet.operator("POST", "/v1/federations", content=b" " * (JSON_LIMIT + 1)), "too-large")
        for token in ("", "x", "é"):
            shown = {"Authorization": f"Bearer {token}".encode("latin-1")}
            refused(await fleet.http.get("/v1/federations", headers=shown), "unauthorized")
        answer = await fleet.http.get("/v1/federations")
        refused(answer, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b"[" * (JSON_DEPTH + 1) + b"]" * (JSON_DEPTH + 1),
            f"deeper than {JSON_DEPTH} levels: line 1 column 202",
        ),
        (b'{"a":' * 3_000, f"nests deeper than {JSON_DEPTH} levels"),
        (b'{"token": "t", "device"', "EOF while parsing an object at line 1 column 23"),
        (b'{"uses": ' + b"9" * 5000 + b"}", "number out of range"),
        (b'{"uses": 1,\n "uses" 2}', "expected `:` at line 2 column 9"),
        (b"\xff\xfe{}", "expected value at line 1 column 1"),
        (b"{}" + b" " * JSON_LIMIT, "bytes, this one more; shorten it"),
    ],
    ids=["deep", "very deep", "cut off", "long number", "a slip", "not UTF-8", "huge"],
)
def test_a_message_whose_json_cannot_be_read_is_told_what_where_and_which_limit(
    tmp_path: Path, body: bytes, said: str
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        fed, mine, json_ = "/v1/federations/fed", bearer(credential("a")), {"Content-Type": "application/json"}
        kind = "too-large" if "shorten it" in said else "bad-message"
        for answer in (
            await fleet.http.post("/v1/enrol", content=body, headers=json_),
            await fleet.http.put(f"{fed}/devices/a/report", content=body, headers={**mine, **json_}),
            await fleet.operator("POST", "/v1/federations", content=body, more=json_),
            await fleet.operator("POST", f"{fed}/tokens", content=body, more=json_),
        ):
            detail = refused(answer, kind)
            assert said in detail
            assert kind == "too-large" or detail.endswith("; correct it and send it again")

    play(tmp_path, script)


def test_a_message_as_deep_as_the_limit_is_read(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        depth = JSON_DEPTH - 1
        body = b'{"token":' + b"[" * depth + b"]" * depth + b"}"
        detail = refused(
            await fleet.http.post("/v1/enrol", content=body, headers={"Content-Type": "application/json"}),
            "bad-message",
        )
        assert "body.token = [[[[[[[...]]]]]]]: Input should be a valid string" in detail

    play(tmp_path, script)


def test_a_failure_of_the_coordinator_itself_is_a_problem_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> list[object]:
        raise RuntimeError("secret detail")

    async def script(fleet: Fleet) -> None:
        monkeypatch.setattr(Coordinator, "summaries", broken)
        detail = refused(await fleet.operator("GET", "/v1/federations"), "internal-error")
        assert "secret" not in detail

    play(tmp_path, script)


HALF = "\\ud800"  # half a surrogate pair, as JSON may hold it


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/enrol", f'{{"token": "{HALF}", "device": "a", "credential": "{"0" * 64}"}}'),
        ("POST", "/v1/enrol", f'{{"token": "x", "device": "{HALF}", "credential": "{"0" * 64}"}}'),
        ("POST", "/v1/enrol", f'{{"token": "x", "{HALF}": 1}}'),
        ("POST", "/v1/enrol", f'{{"token": "x", "device": {"9" * 5000}, "credential": 1}}'),
        ("POST", "/v1/enrol", "[" * 100_000),
        ("POST", "/v1/federations", json.dumps(settings(method={"name": "\ud800"}))),
        ("POST", "/v1/federations", json.dumps(settings(method={"name": "fedavg", "\ud800": 1}))),
        ("POST", "/v1/federations", json.dumps(settings(backend="\ud800"))),
        ("GET", f"/v1/federations/fed/work?wait={'9' * 5000}", None),
        ("GET", "/v1/federations/fed/rounds/" + "9" * 4000, None),
        ("GET", "/v1/federations/fed/rounds/" + "9" * 5000, None),
        ("GET", "/v1/federations/%ff%00", None),
    ],
)
def test_hostile_text_and_numbers_are_refused_as_the_callers_mistake(
    tmp_path: Path, method: str, path: str, body: str | None
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.bundle()
        answer = await fleet.http.request(
            method, path, content=body, headers={**bearer(OPERATOR), "Content-Type": "application/json"}
        )
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.headers["content-type"] == "application/problem+json"

    play(tmp_path, script)


def test_a_range_or_length_of_thousands_of_digits_is_no_number(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        path, mine = f"/v1/federations/fed/payloads/{work['downlink']}", bearer(credential("a"))
        whole = await fleet.http.get(path, headers={**mine, "Range": f"bytes={'9' * 5000}-"})
        assert whole.status_code == 200  # what is not understood is ignored
        body = update(np.ones(D))
        answer = await fleet.upload("a", 1, work["lease"], body, {"Content-Length": "9" * 5000})
        refused(answer, "bad-request")

    play(tmp_path, script)


def test_a_dropped_upload_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def drop(app: Any, path: str, headers: dict[str, str]) -> None:
        said = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return said.pop(0) if len(said) > 1 else said[0]

        async def send(_: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "PUT",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("x", 80),
            "client": ("x", 1),
            "root_path": "",
            "asgi": {"version": "3.0"},
        }
        await app(scope, receive, send)

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        lease = (await fleet.work("a"))["lease"]
        transport: Any = fleet.http._transport
        app = transport.app
        shown = {"Maskfleet-Lease": lease, "Content-Digest": content_digest(b"x"), **bearer(credential("a"))}
        caplog.set_level("INFO", "maskfleet")
        caplog.clear()
        await drop(app, "/v1/federations/fed/rounds/1/updates/a", shown)
        part = manifest(64).to_bytes()
        await fleet.operator("POST", "/v1/bundles", content=part)
        await drop(app, f"/v1/bundles/{digest(part)}/parts/train.onnx", bearer(OPERATOR))
        assert [r.levelname for r in caplog.records if r.name == "maskfleet"] == ["INFO", "INFO"]
        assert all(r.exc_info is None and "went away" in r.message for r in caplog.records if r.name == "maskfleet")
        assert os.listdir(tmp_path / "blobs" / "incoming") == []
        assert (await fleet.train("a")).status_code == 201

    play(tmp_path, script)


def test_a_body_that_stands_still_is_given_up(tmp_path: Path) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(30)

    async def main() -> None:
        async with served(tmp_path, patience=0.2) as fleet:
            await fleet.federation("a", "b")
            lease = (await fleet.work("a"))["lease"]
            slow = await fleet.upload("a", 1, lease, stuck(), {"Content-Digest": content_digest(b"x")})
            assert "0.2 s" in refused(slow, "too-slow")
            assert slow.headers["connection"] == "close"
            headers = {"Content-Type": "application/json"}
            refused(await fleet.http.post("/v1/enrol", content=stuck(), headers=headers), "too-slow")
            assert os.listdir(tmp_path / "blobs" / "incoming") == []
            assert (await fleet.work("a", 0.5))["status"] == "train"  # an answer may be held back for longer
            assert (await fleet.train("a")).status_code == 201

    asyncio.run(main())


def test_a_newer_upload_of_a_device_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        began = asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            yield body[:5]
            began.set()
            await asyncio.sleep(30)

        sound = {"Content-Digest": content_digest(body)}
        older = asyncio.create_task(fleet.upload("a", 1, work["lease"], stuck(), sound))
        await began.wait()
        assert (await fleet.train("b")).status_code == 201  # another device's upload is nobody's business
        assert (await fleet.upload("a", 1, work["lease"], body)).status_code == 201
        refused(await older, "superseded")

    play(tmp_path, script)


def test_a_credential_that_one_federation_removed_still_opens_what_another_one_shares(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        other = settings(name="other")
        assert (await fleet.operator("POST", "/v1/federations", json=other)).status_code == 201
        fleet.join = (await fleet.operator("POST", "/v1/federations/other/tokens", json={})).json()["token"]
        assert (await fleet.enrol("a")).status_code == 200
        path = f"/v1/bundles/{other['bundle']}"
        await fleet.operator("DELETE", "/v1/federations/fed/devices/a")
        assert (await fleet.http.get(path, headers=bearer(credential("a")))).status_code == 200
        await fleet.operator("DELETE", "/v1/federations/other/devices/a")
        refused(await fleet.http.get(path, headers=bearer(credential("a"))), "device-removed")

    play(tmp_path, script)


# --- faults


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
                found = await until_round(fleet, lambda f: f["fault"] is not None)
                assert "disk is full" in found["fault"]
                refused(await fleet.train("a"), "storage-full")
                refused(await fleet.operator("GET", "/v1/federations/fed/state"), "storage-full")
        if not behind:
            assert (await fleet.train("bb")).status_code == 201
        await until_round(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
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


def test_an_old_attempt_that_finds_its_round_closed_leaves_a_newer_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord_server.closing.RETRY_FIRST", 0.5)
    fold = FedAvg.fold

    def broken_later(method: FedAvg, a: Any, *given: Any) -> Any:
        if a.round == 2:
            raise RuntimeError("broken")
        return fold(method, a, *given)

    async def script(fleet: Fleet) -> set[str | None]:
        await fleet.federation("a", "bb", rounds=3)
        unsure_once(monkeypatch, "close_round")
        monkeypatch.setattr(FedAvg, "fold", broken_later)
        for _ in range(2):
            assert (await fleet.train("a")).status_code == 201
            assert (await fleet.train("bb")).status_code == 201
        await until_round(fleet, lambda f: "round 2" in (f["fault"] or ""))
        seen = set()
        for _ in range(35):  # the attempt at round 1 wakes up meanwhile
            seen.add((await fleet.operator("GET", "/v1/federations/fed")).json()["fault"])
            await asyncio.sleep(0.02)
        return seen

    assert len(play(tmp_path, script)) == 1


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
        await until_round(fleet, lambda f: met == ["unsaid", "unseen"] and f["fault"] is None)
        if rounds == 2:
            await until_round(fleet, lambda f: f["round"] == 2)
        return await whole(fleet, "a", "bb", rounds=rounds - 1)

    async def undisturbed(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=rounds)
        return await whole(fleet, "a", "bb", rounds=rounds)

    assert play(tmp_path / "x", script) == play(tmp_path / "y", undisturbed)


def closed_with_an_update(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that are closed in the transaction of their last update; the list grows."""
    acknowledge, rounds = Metadata.acknowledge, list[int]()

    def watched(self: Metadata, federation: str, rows: Any, state: str, closed: Any = None) -> None:
        acknowledge(self, federation, rows, state, closed)
        if closed is not None:
            rounds.append(closed.round)

    monkeypatch.setattr(Metadata, "acknowledge", watched)
    return rounds


def test_a_round_is_closed_with_its_last_update_once_the_one_before_it_folded_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, now, slow = FedAvg.fold, [0.0], {2, 3, 5}

    def timed(self: FedAvg, a: Any, *rest: Any) -> Any:
        now[0] += 0.011 if a.round in slow else 0.009  # two devices: 22 and 18 ms
        return fold(self, a, *rest)

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=7)
        return await whole(fleet, "a", "bb", rounds=7)

    with monkeypatch.context() as m:
        m.setattr("coord_server.values.AT_ONCE", 0.0)
        expected = play(tmp_path / "never", script)
    rounds = closed_with_an_update(monkeypatch)
    monkeypatch.setattr("coord_server.values.perf_counter", lambda: now[0])
    monkeypatch.setattr(FedAvg, "fold", timed)
    assert play(tmp_path / "x", script) == expected
    assert rounds == [2, 5, 7]  # of the first nothing is known; 3, 4 and 6 come after slow ones
    rounds.clear()
    monkeypatch.setattr("coord_server.values.AT_ONCE", math.inf)
    monkeypatch.setattr("coord_server.values.FRESH", 0)  # what was not kept in memory is read back
    assert play(tmp_path / "always", script) == expected
    assert rounds == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("large", ["state", "records"])
def test_a_round_with_a_large_value_is_closed_after_its_last_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    """It needs syncs of its own, for which no acknowledgement waits."""
    fold, folded = FedAvg.fold, list[tuple[int, str]]()

    def keeping(self: FedAvg, a: Any, *rest: Any) -> Any:
        folded.append((a.round, a.device))
        total, record = fold(self, a, *rest)
        return total, {"kept": np.zeros(INLINE, np.uint8)} if large == "records" else record

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=2 * ((INLINE // 8) + 100) if large == "state" else D)
        await whole(fleet, "a", "bb")

    monkeypatch.setattr(FedAvg, "fold", keeping)
    monkeypatch.setattr("coord_server.values.AT_ONCE", math.inf)
    rounds = closed_with_an_update(monkeypatch)
    play(tmp_path, script)
    assert rounds == []
    if large == "state":  # known beforehand: it is not even tried
        assert folded == [(r, device) for r in (1, 2) for device in ("a", "bb")]


def test_small_updates_are_checked_under_the_lock_only_while_that_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, write, now = Values.check, Intake._write, [0.0]
    locked, where = list[bool](), list[tuple[int, str, bool]]()

    def timed(self: Values, course: Any, arrays: Any, round_: int, device: str, data: bytes) -> Any:
        where.append((round_, device, bool(locked)))
        now[0] += 0.003 if round_ == 2 else 0.001
        return check(self, course, arrays, round_, device, data)

    def writing(*given: Any) -> Any:
        locked.append(True)
        try:
            return write(*given)
        finally:
            locked.pop()

    async def script(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", rounds=4)
        for r in (1, 2, 3, 4):
            work = await fleet.work("a", 10)
            refused(await fleet.upload("a", r, work["lease"], b"nonsense"), "bad-payload")
            for device in ("a", "bb"):
                assert (await fleet.train(device)).status_code == 201
        return await whole(fleet, "a", "bb", rounds=0)

    expected = play(tmp_path / "x", script)
    monkeypatch.setattr("coord_server.intake.thread_time", lambda: now[0])
    monkeypatch.setattr(Values, "check", timed)
    monkeypatch.setattr(Intake, "_write", writing)
    assert play(tmp_path / "y", script) == expected
    turns = [(r, device, i) for r in (1, 2, 3, 4) for i, device in enumerate(("a", "a", "bb"))]
    outside = {(1, "a", 0), (2, "a", 1), (2, "bb", 2), (3, "a", 0)}  # nothing is known, or the last one was slow
    assert where == [(r, device, (r, device, i) not in outside) for r, device, i in turns]


@pytest.mark.parametrize("first", ["the closing", "another", "a later round"])
def test_a_round_that_was_closed_unseen_is_not_folded_again_whoever_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Its large updates are swept: to fold it again would be a fault that nothing ends."""
    monkeypatch.setattr("coord_server.closing.RETRY_FIRST", 1.0 if first == "a later round" else 0.3)
    fold = FedAvg.fold

    def keeping(self: FedAvg, a: Any, *rest: Any) -> Any:
        if a.round == 2 and first == "a later round" and not failed:
            failed.append(1)
            raise RuntimeError("later")
        folded.append((a.round, a.device))
        return fold(self, a, *rest)[0], {"seen": np.array([a.round])}  # with records it is journalled at once

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=2 * ((INLINE // 8) + 100))
        assert (await fleet.train("a")).status_code == 201
        unsure_once(monkeypatch, "close_round")
        assert (await fleet.train("bb")).status_code == 201
        found = await until_round(fleet, lambda f: f["fault"] is not None)
        assert "disk I/O error" in found["fault"]
        if first != "the closing":
            assert (await fleet.operator("GET", "/v1/federations/fed/state")).status_code == 200
            assert (await fleet.operator("GET", "/v1/federations/fed")).json()["round"] == 2
        if first != "a later round":  # there it is being aggregated when the first attempt to close round 1 wakes up
            await until_round(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
        await whole(fleet, "a", "bb", rounds=1)
        assert folded == [(r, device) for r in (1, 2) for device in ("a", "bb")]

    folded: list[tuple[int, str]] = []
    failed: list[int] = []
    monkeypatch.setattr(FedAvg, "fold", keeping)
    play(tmp_path, script)


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
        found = await until_round(fleet, lambda f: f["fault"] is not None)
        assert (found["round"], found["updates"]) == (1, 2)
        assert "being aggregated" in (await fleet.work("a"))["reason"]

    async def second(fleet: Fleet) -> bytes:
        await until_round(fleet, lambda f: f["round"] == 2)
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
        await until_round(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
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
        found = await until_round(fleet, lambda f: f["attempt"] == 2)
        assert (found["round"], found["updates"], found["expected"]) == (1, 0, 1)
        works = {d: await fleet.work(d) for d in ("a", "bb", "ccc")}
        (second,) = [d for d, w in works.items() if w["status"] == "train"]
        assert second != first
        assert (await fleet.train(second)).status_code == 201
        await until_round(fleet, lambda f: f["round"] == 2)

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
        found = await until_round(fleet, lambda f: f["fault"] is not None)
        assert "is damaged: its SHA-256 is" in found["fault"]
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds")).json() == []
        blob.write_bytes(good)
        await until_round(fleet, lambda f: f["round"] == 2 and f["fault"] is None)
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


def test_what_is_taken_from_the_journal_anew_still_knows_of_large_values(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")

    play(tmp_path, script)
    store = open_store(tmp_path)
    (row,) = store.metadata.all_federations()

    async def reload() -> None:
        values = Values(store, row, FederationConfig.model_validate_json(row.config), {})
        store.blobs.put(values.updates_shelf(1), b"large")
        values.sweep(1, over=False, first=True)
        await values.reload(row, {})
        values.sweep(2, over=False)
        assert store.blobs.shelves("fed/updates") == []

    asyncio.run(reload())
    store.close()


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


# --- the document


def test_the_openapi_document_is_complete(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    document = create_app(Coordinator(store, "x")).openapi()
    store.close()
    assert "Problem" in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            codes = set(operation["responses"])
            assert codes & {"200", "201", "204"}, (method, path)
            if path != "/v1/health":
                assert "401" in codes, (method, path)
            for code, answer in operation["responses"].items():
                if int(code) >= 400:
                    assert "application/problem+json" in answer["content"], (method, path, code)
    example = document["paths"]["/v1/federations"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert example


def test_every_kind_of_problem_is_in_the_manual() -> None:
    manual = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    found = dict(
        re.findall(r"^\| (\d{3}) \| `([a-z-]+)` \|", manual, re.MULTILINE)[i][::-1] for i in range(len(STATUS))
    )
    assert {kind: int(status) for kind, status in found.items()} == STATUS
