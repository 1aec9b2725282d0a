"""What REST refuses: bad updates, federations, bundles and messages. Immutable answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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
    play,
    refused,
    settings,
    trained,
    unfinished,
    until,
    update,
)

from coord_server.http import blobs
from coord_server.http.bodies import JSON_DEPTH, JSON_LIMIT
from edge_client.bundle import MAX_MANIFEST, digest


@pytest.mark.parametrize("whole", [blobs.WHOLE, 0], ids=["in one piece", "as a stream"])
def test_bundles_and_payloads_have_etags_ranges_and_their_readers(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "WHOLE", whole)

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        address, mine = digest(manifest().to_bytes()), bearer(credential("a"))
        whole = await fleet.http.get(f"/v1/bundles/{address}", headers=mine)
        assert whole.content == manifest().to_bytes()
        device, _ = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert device["messages_down"]["bundle"] == len(whole.content)
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
            stale = await fleet.http.get(path, headers={**mine, "Range": "bytes=2-", "If-Range": '"another"'})
            assert (stale.status_code, stale.content) == (200, whole.content)
            last = await fleet.http.get(path, headers={**mine, "Range": "bytes=-2"})
            assert last.content == whole.content[-2:]
            refused(await fleet.http.get(path, headers={**mine, "Range": f"bytes={size}-"}), "bad-range")
            refused(await fleet.http.get(path, headers=bearer("x")), "unauthorized")
            refused(await fleet.http.get(path), "unauthorized")
        refused(await fleet.http.get(f"/v1/federations/fed/payloads/{'0' * 64}", headers=mine), "not-found")
        refused(await fleet.http.get(f"/v1/bundles/{address}/parts/other", headers=mine), "not-found")

    play(tmp_path, script)


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

        path, leased = "/v1/federations/fed/rounds/1/updates/a", {**bearer(credential("a")), "Maskfleet-Lease": lease}
        huge = good + bytes(10_000)
        too_long = {**sound, "Content-Length": str(10**12)}
        for kind, said, answer in [
            ("bad-payload", "NaN", fleet.upload("a", 1, lease, update(np.full(D, np.nan)))),
            ("bad-payload", "float32", fleet.upload("a", 1, lease, update(np.ones(D + 1)))),
            ("bad-payload", "not a maskfleet payload", fleet.upload("a", 1, lease, good[:-9])),
            ("bad-payload", "not a maskfleet payload", fleet.upload("a", 1, lease, b"")),
            ("bad-payload", "score_after", fleet.upload("a", 1, lease, update(np.ones(D), score_after=1.25))),
            ("bad-digest", "damaged", fleet.upload("a", 1, lease, bytes(flipped), sound)),
            ("bad-digest", "RFC 9530", fleet.upload("a", 1, lease, good, {"Content-Digest": "md5=:AAAA:"})),
            ("bad-message", "content-digest", fleet.http.put(path, headers=leased, content=good)),
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
        assert unfinished(tmp_path) == []
        assert (await fleet.upload("a", 1, lease, chunks(good), sound)).status_code == 201
        assert (await fleet.train("b")).status_code == 201
        await until(fleet, lambda f: f["round"] == 2)

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
        ({"backend": "torch"}, "bad-config", "needs model-eval.pt2, model.pt2 of bundle 'small'"),
        ({"bundle": "0" * 64}, "not-found", "POST its manifest"),
        ({"bundle": "short"}, "bad-message", "bundle = 'short': it must be 64 lower-case hexadecimal digits; correct"),
        ({"rounds": 0}, "bad-message", "rounds"),
        ({"rounds": True}, "bad-message", "rounds = true: "),
        ({"rounds": None}, "bad-message", "rounds = null: "),
        ({"method": {"nam": "fedavg"}}, "bad-config", "the method has no `name`; choose one of bnn"),
        ({"min_updates": 3}, "bad-message", "min_updates 3 is more than the cohort of 2; lower it\n"),
        ({"name": "../x"}, "bad-message", "name = '../x': a name has letters, digits, '.'"),
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
        assert said in f"{refused(answer, kind)}\n"
        assert (await fleet.operator("GET", "/v1/federations")).json() == []

    play(tmp_path, script)


def test_a_federation_stores_and_sends_every_setting_of_its_method(tmp_path: Path) -> None:
    complete = {"name": "fedavg", "epochs": 3, "batch": 32, "lr": None, "momentum": 0.9, "up": "float32",
                "down": "float32", "per_tensor": False, "feedback": False, "average": 0.0,
                "server_momentum": 0.0}  # fmt: skip

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
        twice = b'{"seed":4,' + manifest().to_bytes()[1:]
        assert "the key 'seed' is there" in refused(
            await fleet.operator("POST", "/v1/bundles", content=twice), "bad-bundle"
        )
        odd = manifest().to_bytes().replace(b"train.onnx", b"../train.onnx")
        assert "../train.onnx" in refused(await fleet.operator("POST", "/v1/bundles", content=odd), "bad-bundle")
        huge = manifest(d=1 << 29).to_bytes()  # some hundred bytes that would make a coordinator fill gigabytes
        assert "--max-parameters" in refused(await fleet.operator("POST", "/v1/bundles", content=huge), "bad-bundle")
        long = await fleet.operator("POST", "/v1/bundles", content=b" " * (MAX_MANIFEST + 1))  # too long for devices
        assert f"at most {MAX_MANIFEST}" in refused(long, "too-large")
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
        for path in ("/v1", "/v1/nothing", "/v1/federations/none", "/v1/federations/none/nothing"):
            refused(await fleet.operator("GET", path), "not-found")
        for path, allowed in (
            ("/v1/federations", "GET, HEAD, POST"), ("/v1/federations/fed", "DELETE, GET, HEAD, PATCH"),
            ("/", "GET, HEAD"),
            ("/v1/federations/fed/devices/a", "DELETE"), ("/v1/federations/fed/pause", "POST"),
            ("/v1/federations/fed/devices", "GET, HEAD"),
            ("/v1/health", "GET, HEAD"),
        ):  # fmt: skip
            answer = await fleet.operator("PUT", path)
            refused(answer, "method-not-allowed")
            assert answer.headers["allow"] == allowed, path
        for typed in ({}, {"Content-Type": "application/json"}):
            empty = refused(await fleet.operator("POST", "/v1/viewers", typed), "bad-message")
            assert "the message is empty; send a JSON object" in empty
        for body, shown in ((b"[]", "[]"), (b"null", "null"), (b"true", "true")):
            listed = refused(await fleet.operator("POST", "/v1/federations", typed, content=body), "bad-message")
            assert listed.startswith(f"body = {shown}: give a table, which is an object in JSON; ")
        lacking = refused(await fleet.operator("POST", "/v1/federations", typed, content=b"{}"), "bad-message")
        assert lacking.startswith("body.name: it is missing; ")
        untyped = refused(await fleet.operator("POST", "/v1/federations", content=b"{"), "bad-message")
        assert "the message has no Content-Type; send" in untyped
        refused(await fleet.operator("POST", "/v1/federations", content=b" " * (JSON_LIMIT + 1)), "too-large")
        for token in ("", "x", "é"):
            shown = {"Authorization": f"Bearer {token}".encode("latin-1")}
            detail = refused(await fleet.http.get("/v1/federations", headers=shown), "unauthorized")
            assert "the one sent is not valid" in detail
        answer = await fleet.http.get("/v1/federations")
        assert "none was sent" in refused(answer, "unauthorized")
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
        (b'{"method": {"name": "fedavg", "lr": 1, "lr": 1}}', "the key 'lr' is there twice"),
        (b"{}" + b" " * JSON_LIMIT, "bytes, this one has more; shorten it"),
    ],
    ids=["deep", "very deep", "cut off", "long number", "a slip", "not UTF-8", "a key twice", "huge"],
)
def test_the_answer_to_unreadable_json_says_what_where_and_which_limit(tmp_path: Path, body: bytes, said: str) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        fed, mine, json_ = "/v1/federations/fed", bearer(credential("a")), {"Content-Type": "application/json"}
        kind = "too-large" if "shorten it" in said else "bad-message"
        for answer in (
            await fleet.http.post("/v1/enrol", content=body, headers=json_),
            await fleet.http.put(f"{fed}/devices/a/report", content=body, headers={**mine, **json_}),
            await fleet.operator("POST", "/v1/federations", content=body, more=json_),
            await fleet.operator("POST", f"{fed}/tokens", content=body, more=json_),
            await fleet.operator(
                "POST", f"{fed}/tokens", content=body, more={"Content-Type": "Application/JSON ; v=1"}
            ),
            await fleet.operator("PATCH", fed, content=body, more={"Content-Type": "application/merge-patch+json"}),
            await fleet.operator("PATCH", fed, content=body, more={"Content-Type": "application/+json"}),
        ):
            detail = refused(answer, kind)
            assert said in detail
            assert kind == "too-large" or detail.endswith("; correct it and send it again")

    play(tmp_path, script)


def test_a_compressed_body_is_refused_with_what_is_taken_instead(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        work, gzip = await fleet.work("a"), {"Content-Encoding": "gzip"}
        body = trained(await fleet.fetch("a", work), "a")
        answers = [
            await fleet.upload("a", work["round"], work["lease"], body, gzip),
            await fleet.operator("POST", "/v1/bundles", gzip, content=manifest().to_bytes()),
            await fleet.operator("PATCH", "/v1/federations/fed", gzip, json={}),
        ]
        both = [("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
        second = await fleet.http.patch("/v1/federations/fed", json={}, headers=[*bearer(OPERATOR).items(), *both])
        assert "Content-Encoding is 'identity, gzip'" in refused(second, "compressed")
        for answer in answers:
            assert "Content-Encoding is 'gzip'; send the body as it is" in refused(answer, "compressed")
            assert answer.headers["accept-encoding"] == "identity"
        refused(await fleet.http.patch("/v1/federations/fed", json={}, headers=gzip), "unauthorized")
        plain = {"Content-Encoding": "identity"}
        assert (await fleet.upload("a", work["round"], work["lease"], body, plain)).status_code == 201

    play(tmp_path, script)


def test_a_message_as_deep_as_the_limit_is_read(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        depth = JSON_DEPTH - 1
        body = b'{"token":' + b"[" * depth + b"]" * depth + b"}"
        detail = refused(
            await fleet.http.post("/v1/enrol", content=body, headers={"Content-Type": "application/json"}),
            "bad-message",
        )
        assert "body.token: Input should be a valid string" in detail

    play(tmp_path, script)
