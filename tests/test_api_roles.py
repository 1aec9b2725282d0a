"""Who may do what: the operator all, a viewer every GET but secrets, until its token is revoked or expires."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordination import OPERATOR, D, Fleet, bearer, credential, digest, manifest, play, refused, served, settings
from listening import LIMIT, listening
from safetensors.numpy import save

from coord_server.http import access
from edge_client import logs

FED = "/v1/federations/fed"
READS = ("/v1/federations", FED, f"{FED}/devices", f"{FED}/rounds", f"{FED}/state")


async def viewer(fleet: Fleet, **more: Any) -> tuple[str, str]:
    """A fresh viewer's token and its id."""
    made = await fleet.operator("POST", "/v1/viewers", json=more)
    assert made.status_code == 201, made.text
    return made.json()["token"], made.json()["id"]


def test_a_viewer_reads_everything_but_secrets_and_changes_nothing(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        token, _ = await viewer(fleet)
        for path in (*READS, f"/v1/bundles/{settings()['bundle']}"):
            assert (await fleet.http.get(path, headers=bearer(token))).status_code == 200, path
        for method, path, body in (
            ("POST", f"{FED}/pause", None),
            ("POST", f"{FED}/tokens", {}),
            ("POST", "/v1/federations", settings(name="other")),
            ("POST", "/v1/viewers", {}),
            ("GET", "/v1/viewers", None),
            ("DELETE", f"{FED}/devices/a", None),
        ):
            answer = await fleet.http.request(method, path, json=body, headers=bearer(token))
            assert "viewer" in refused(answer, "forbidden"), path
        refused(await fleet.http.get(f"{FED}/work", headers=bearer(token)), "unauthorized")

    play(tmp_path, script)


def test_a_viewers_token_is_never_shown_again_and_ends_when_it_is_revoked_or_expires(tmp_path: Path) -> None:
    now = [1000.0]

    async def script() -> None:
        async with served(tmp_path, lambda: now[0]) as fleet:
            token, id_ = await viewer(fleet, expires_in=60.0)
            other, _ = await viewer(fleet)
            listed = await fleet.operator("GET", "/v1/viewers")
            assert {v["id"] for v in listed.json()} >= {id_}
            assert token not in listed.text
            assert (await fleet.http.get("/v1/federations", headers=bearer(token))).status_code == 200
            now[0] += 61
            refused(await fleet.http.get("/v1/federations", headers=bearer(token)), "unauthorized")
            assert (await fleet.http.get("/v1/federations", headers=bearer(other))).status_code == 200
            for v in listed.json():
                assert (await fleet.operator("DELETE", f"/v1/viewers/{v['id']}")).status_code == 204
            refused(await fleet.http.get("/v1/federations", headers=bearer(other)), "unauthorized")
            refused(await fleet.operator("DELETE", f"/v1/viewers/{id_}"), "not-found")
            assert OPERATOR not in listed.text

    asyncio.run(script())


def test_another_coordinator_on_the_folder_learns_of_viewers_and_a_restart_keeps_them(tmp_path: Path) -> None:
    async def both() -> tuple[str, str]:
        async with served(tmp_path) as first, served(tmp_path) as second:
            token, id_ = await viewer(first)
            while (await second.http.get("/v1/federations", headers=bearer(token))).status_code != 200:
                await asyncio.sleep(0.02)
            gone, gone_id = await viewer(first)
            await first.operator("DELETE", f"/v1/viewers/{gone_id}")
            while (await second.http.get("/v1/federations", headers=bearer(gone))).status_code != 401:
                await asyncio.sleep(0.02)
            return token, id_

    async def again(token: str) -> None:
        async with served(tmp_path) as fleet:
            assert (await fleet.http.get("/v1/federations", headers=bearer(token))).status_code == 200

    token, _ = asyncio.run(asyncio.wait_for(both(), LIMIT))
    asyncio.run(again(token))


def test_a_viewers_requests_are_counted_for_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, begun = asyncio.Event(), list[int]()

    async def wait(*_: object) -> Any:
        begun.append(1)
        await held.wait()
        return []

    async def script() -> None:
        async with listening(tmp_path) as server:

            async def calls(fleet: Fleet) -> None:
                token, _ = await viewer(fleet)
                monkeypatch.setattr(access, "OF_VIEWER", 2)
                monkeypatch.setattr("coord_server.live.devices.Devices.listed", wait)
                await fleet.federation()
                under_way = [
                    asyncio.create_task(fleet.http.get(f"{FED}/devices", headers=bearer(token))) for _ in range(2)
                ]
                while len(begun) < 2:
                    await asyncio.sleep(0.01)
                refused(await fleet.http.get(f"{FED}/devices", headers=bearer(token)), "too-many")
                form = {"Origin": str(fleet.http.base_url).rstrip("/")}
                assert (await fleet.http.post("/login", data={"token": token}, headers=form)).status_code == 303
                refused(await fleet.http.get("/federations/fed"), "too-many")  # the dashboard's cookie counts as well
                held.set()
                assert [r.status_code for r in await asyncio.gather(*under_way)] == [200, 200]

            await server.fleet(calls)

    asyncio.run(asyncio.wait_for(script(), LIMIT))


def test_no_secret_that_was_sent_by_mistake_is_answered_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole token where its id belongs, in a misspelt field, in a list, in upper case."""
    secret = credential("x")

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        for method, path, body in (
            ("DELETE", f"/v1/viewers/{secret}", None),
            ("GET", f"/v1/viewers/{secret}", None),
            ("GET", f"/v1/viewers/{secret}/more", None),
            ("DELETE", f"/v1/federations/fed/tokens/{secret}", None),
            ("POST", "/v1/enrol", {"tokens": secret}),
            ("POST", "/v1/enrol", [secret]),
            ("POST", "/v1/enrol", {"token": fleet.join, "device": "b", "credential": secret.upper()}),
            ("POST", "/v1/viewers", {"expires_in": secret}),
        ):
            answer = await fleet.operator(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code in (404, 405, 422), (path, answer.text)
            assert secret[:20] not in answer.text.lower(), path
        for method, path, body in (  # the caller's own mistake in a place that takes no secret is answered, not logged
            ("DELETE", f"/v1/federations/fed/token/{secret}", None),
            ("GET", f"/v1/federations/{secret}", None),
            ("GET", f"/v1/federations?limit={secret}", None),
            ("POST", "/v1/federations", {"token": secret}),
        ):
            answer = await fleet.operator(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code in (404, 405, 422), (path, answer.text)
        refusal = await fleet.http.post("/login", data={"token": secret}, headers={"Origin": "http://coordinator"})
        assert refusal.status_code == 401

    with caplog.at_level("INFO", "maskfleet"):
        play(tmp_path, script)
    assert "log-in from 127.0.0.1 with a wrong token" in caplog.text
    assert secret[:20] not in caplog.text.lower()


def test_the_log_says_who_was_refused_where_and_what_the_operator_changed_and_revoked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The route without the path's ids and without the query, because both may hold a secret."""
    secret = credential("y")

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        viewer = (await fleet.operator("POST", "/v1/viewers", json={})).json()
        for method, path, status in (
            ("GET", f"/v1/federations/fed?token={secret}", 422),
            ("PATCH", "/v1/federations/fed", 403),
            ("DELETE", f"/v1/viewers/{secret}", 403),
        ):
            answer = await fleet.http.request(method, path, headers=bearer(viewer["token"]), json={"min_updates": 2})
            assert answer.status_code == status
        assert (await fleet.http.head("/v1/health")).status_code == 200  # what load balancers send
        await fleet.http.request("BREW", "/v1/health")
        await fleet.operator("PATCH", "/v1/federations/fed", json={"min_updates": 2})
        assert (await fleet.operator("DELETE", f"/v1/viewers/{viewer['id']}")).status_code == 204
        (join,) = (await fleet.operator("GET", "/v1/federations/fed/tokens")).json()
        assert (await fleet.operator("DELETE", f"/v1/federations/fed/tokens/{join['id']}")).status_code == 204
        assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/a")).status_code == 204
        bundle, values = digest(manifest().to_bytes()), save({"w": np.ones((D // 2, 2), np.float32)})
        made = (await fleet.operator("POST", f"/v1/bundles/{bundle}/weights", content=values)).json()["digest"]
        assert (await fleet.operator("DELETE", f"/v1/bundles/{made}")).status_code == 204
        for said in (
            "refused, bad-message: GET /v1/federations/{federation} from 127.0.0.1: ",
            "refused, forbidden: PATCH /v1/federations/{federation} from 127.0.0.1: a viewer's token may read",
            "DELETE /v1/viewers/{id} from 127.0.0.1: ",
            "refused, method-not-allowed: an unknown method /v1/health from 127.0.0.1: ",
            "fed: changed by the operator: min_updates = 2",
            "fed: created by the operator",
            f"the viewer's token {viewer['id']} is made by the operator",
            f"the viewer's token {viewer['id']} is revoked by the operator",
            f"fed: the join token {join['id']} is made by the operator",
            f"fed: the join token {join['id']} is revoked by the operator",
            "fed: a is removed by the operator",
            f"bundle {bundle} (small) is stored by the operator",
            f"bundle {made} ({bundle} with other values) is stored by the operator",
            f"bundle {made} is deleted by the operator",
        ):
            assert said in caplog.text, said
        for token in (secret, viewer["token"], fleet.join):
            assert token[:20] not in caplog.text

    with caplog.at_level("INFO", "maskfleet"):
        play(tmp_path, script)


def test_failed_log_ins_cannot_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def script(fleet: Fleet) -> None:
        for _ in range(logs.MOST + 5):
            answer = await fleet.http.post("/login", data={"token": "x"}, headers={"Origin": "http://coordinator"})
            assert answer.status_code == 401

    caplog.handler.addFilter(limit := logs.Limit(lambda: 0.0))  # however long the attempts take
    try:
        play(tmp_path, script)
    finally:
        caplog.handler.removeFilter(limit)
    assert caplog.text.count("a log-in from 127.0.0.1 with a wrong token") == logs.MOST
