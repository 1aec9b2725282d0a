"""Hostile requests, and failures of the coordinator itself, are problems."""

from __future__ import annotations

import json
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
    unfinished,
    update,
)

from coord_server.coordinator import Coordinator
from edge_client.bundle import digest


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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "work"),
        ("GET", f"payloads/{'0' * 64}"),
        ("PUT", "rounds/1/updates/a"),
        ("PUT", "rounds/1/failures/a"),
        ("PUT", "devices/a/report"),
    ],
)
def test_without_a_device_s_credential_the_answer_does_not_tell_whether_a_federation_exists(
    tmp_path: Path, method: str, path: str
) -> None:
    body = {"kind": "data", "reason": "odd"} if "failures" in path else REPORT
    headers = {"Maskfleet-Lease": "0", "Content-Digest": content_digest(b"")}

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        for token in ("0" * 64, OPERATOR):
            details = []
            for id_ in ("fed", "none"):
                answer = await fleet.http.request(
                    method, f"/v1/federations/{id_}/{path}", json=body, headers={**bearer(token), **headers}
                )
                details.append(refused(answer, "unauthorized").replace(repr(id_), "ID"))
            assert details[0] == details[1]

    play(tmp_path, script)


def test_a_path_with_a_slash_at_its_end_is_not_redirected(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        refused(await fleet.http.get("/v1/health/"), "not-found")
        refused(await fleet.operator("GET", "/v1/federations/"), "not-found")

    play(tmp_path, script)


REPORT = {"score": 0.5, "test_samples": 4, "parameters_dense": 12, "parameters_compact": 3}
HALF = "\\ud800"  # half a surrogate pair, as JSON may hold it


@pytest.mark.usefixtures("each_database")
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


def test_a_range_of_thousands_of_digits_is_ignored_and_a_length_of_as_many_refused(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        work = await fleet.work("a")
        path, mine = f"/v1/federations/fed/payloads/{work['downlink']}", bearer(credential("a"))
        whole = await fleet.http.get(path, headers={**mine, "Range": f"bytes={'9' * 5000}-"})
        assert whole.status_code == 200  # what is not understood is ignored
        body = update(np.ones(D))
        answer = await fleet.upload("a", 1, work["lease"], body, {"Content-Length": "9" * 5000})
        refused(answer, "too-large")

    play(tmp_path, script)


def test_a_refused_update_is_one_line_in_the_log_that_names_the_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        lease = (await fleet.work("a"))["lease"]
        caplog.set_level("INFO", "maskfleet")
        caplog.clear()
        refused(await fleet.upload("a", 2, lease, b"x"), "wrong-round")
        (line,) = (r.message for r in caplog.records if r.name == "maskfleet")
        assert line.startswith("refused, wrong-round: fed: the update of a for round 2 from ")
        assert line.endswith("ask for work again")

    play(tmp_path, script)


def test_a_dropped_upload_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def drop(app: Any, path: str, headers: dict[str, str], method: str = "PUT") -> None:
        said = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return said.pop(0) if len(said) > 1 else said[0]

        async def send(_: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": method,
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
        part = manifest(64).to_bytes()
        await fleet.operator("POST", "/v1/bundles", content=part)
        caplog.set_level("INFO", "maskfleet")
        caplog.clear()
        await drop(app, "/v1/federations/fed/rounds/1/updates/a", shown)
        await drop(app, f"/v1/bundles/{digest(part)}/parts/train.onnx", bearer(OPERATOR))
        await drop(app, "/v1/enrol", {"Content-Type": "application/json"}, "POST")
        assert [r.levelname for r in caplog.records if r.name == "maskfleet"] == ["INFO", "INFO", "INFO"]
        assert all(r.exc_info is None and "disconnected" in r.message for r in caplog.records if r.name == "maskfleet")
        assert unfinished(tmp_path) == []
        assert (await fleet.train("a")).status_code == 201

    play(tmp_path, script)
