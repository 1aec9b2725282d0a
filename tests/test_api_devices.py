"""Devices over REST without a socket: enrolling, waiting, failing, reporting, sending again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from coordination import (
    D,
    Fleet,
    bearer,
    content_digest,
    credential,
    play,
    refused,
    served,
    settings,
    trained,
    unfinished,
    until,
    update,
)


def test_an_answer_without_work_says_why_and_when_to_ask_again(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        found = await fleet.work("a", 0.05)
        assert found["status"] == "wait"
        assert found["reason"] == "waiting for 2 devices; 1 ready"
        assert found["poll_after"] > 0

    play(tmp_path, script)


def test_a_device_that_never_asks_for_work_is_not_counted_and_not_drawn(tmp_path: Path) -> None:
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
        record = await until(fleet, lambda f: f["round"] == 2)
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


def test_the_final_report_is_shown_to_the_operator(tmp_path: Path) -> None:
    report = {"score": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        path, mine = "/v1/federations/fed/devices/a/report", bearer(credential("a"))
        taken = await fleet.http.put(path, json=report, headers=mine)
        assert taken.status_code == 204
        assert "content-type" not in taken.headers  # a client that reads JSON by that header would read an empty text
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert shown[0]["report"]["parameters_compact"] == 3
        refused(await fleet.http.put(path, json={**report, "score": 2}, headers=mine), "bad-message")
        refused(await fleet.http.put(path, json=report, headers=bearer(credential("b"))), "forbidden")

    play(tmp_path, script)


def test_enrolling_again_is_harmless_and_a_name_cannot_be_taken_over(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        again = await fleet.enrol("a")
        assert (again.status_code, again.json()["device"]) == (200, "a")
        taken = await fleet.enrol("a", "f" * 64)
        refused(taken, "name-taken")
        assert "choose another name, or use the state folder that it enrolled with" in taken.text
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


def test_a_device_whose_samples_have_another_shape_is_refused_and_the_token_can_be_used(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        once = (await fleet.operator("POST", "/v1/federations/fed/tokens", json={"uses": 1})).json()
        body = {"token": once["token"], "device": "b", "credential": credential("b")}
        odd = await fleet.http.post("/v1/enrol", json={**body, "sample": [7, 7]})
        assert "have shape (7, 7), the model of fed takes (2,); correct" in refused(odd, "wrong-samples")
        assert (await fleet.http.post("/v1/enrol", json={**body, "sample": [2]})).status_code == 200

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
        await until(fleet, lambda f: f["round"] == 2)
        later = await fleet.upload("a", 1, work["lease"], body)
        assert (later.status_code, later.json()) == (200, first.json())
        both = await asyncio.gather(*(fleet.train("a") for _ in range(4)))
        assert {r.status_code for r in both} <= {200, 201, 429}  # 429: a newer one ended it
        assert len({r.text for r in both if r.is_success}) == 1
        shown = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert shown[0]["updates"] == 2

    play(tmp_path, script)


def test_a_body_that_stops_arriving_is_given_up(tmp_path: Path) -> None:
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
            assert unfinished(tmp_path) == []
            assert (await fleet.work("a", 0.5))["status"] == "train"  # an answer may be held back for longer
            assert (await fleet.train("a")).status_code == 201

    asyncio.run(main())


def test_a_device_may_upload_again_while_an_older_upload_stands_still(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        body = trained(await fleet.fetch("a", work), "a")
        began, ended = asyncio.Event(), asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            yield body[:5]
            began.set()
            await ended.wait()
            yield body[5:]

        sound = {"Content-Digest": content_digest(body)}
        older = asyncio.create_task(fleet.upload("a", 1, work["lease"], stuck(), sound))
        await began.wait()
        assert (await fleet.upload("a", 1, work["lease"], body)).status_code == 201
        assert (await fleet.train("b")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)
        ended.set()
        assert (await older).status_code in (200, 201)  # the same update again, after its round

    play(tmp_path, script)


def test_a_device_removed_from_one_federation_still_reads_the_bundle_of_another(tmp_path: Path) -> None:
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


def test_what_one_coordinator_does_is_seen_through_another_on_the_same_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as one, served(tmp_path) as other:
            await one.federation("a")
            other.join = one.join
            await until(other, lambda f: f.get("devices") == 1)
            assert (await other.enrol("b")).status_code == 200
            assert (await other.due("b"))["status"] == "train"  # neither saw two devices arrive
            assert (await one.due("a"))["status"] == "train"
            assert (await other.train("a")).status_code == 201
            assert (await one.train("b")).status_code == 201
            for fleet in (one, other):
                found = await until(fleet, lambda f: f["round"] == 2)
                assert found["devices"] == 2

    asyncio.run(main())
