"""`/metrics`, traces, and pages of other origins: who may ask, and what the answer says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from coordination import OPERATOR, Fleet, bearer, open_folder, play, refused, settings, whole
from prometheus_client.parser import text_string_to_metric_families

from coord_server import metrics
from coord_server.app import create_app
from coord_server.coordinator import Coordinator

Figures = dict[tuple[str, tuple[str, ...]], float]


async def figures(fleet: Fleet) -> Figures:
    """Every sample by its name and label values."""
    answer = await fleet.operator("GET", "/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_metrics_count_updates_bytes_rounds_and_requests_and_show_what_stands(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        before = await figures(fleet)
        await fleet.federation("a", "bb")
        await fleet.operator("POST", "/v1/federations", json=settings(name="other"))
        during = await figures(fleet)
        assert during["maskfleet_federation_round", ("fed",)] == 1
        assert during["maskfleet_federation_devices_present", ("fed",)] == 2
        assert during["maskfleet_federations", ("recruiting",)] == 1
        work = await fleet.work("a")
        refused(await fleet.upload("a", 1, work["lease"], b"nonsense"), "bad-payload")
        await whole(fleet, "a", "bb")
        await fleet.http.get("/nothing/here")
        after = await figures(fleet)

        def more(name: str, *labels: str) -> float:
            return after[name, labels] - before.get((name, labels), 0.0)

        assert more("maskfleet_updates_accepted_total") == 4
        assert more("maskfleet_updates_refused_total", "bad-payload") == 1
        assert more("maskfleet_round_seconds_count") == 2
        assert more("maskfleet_commit_seconds_count") >= 6
        devices = (await fleet.operator("GET", "/v1/federations/fed/devices")).json()
        assert more("maskfleet_bytes_total", "up", "update") == sum(d["bytes_up"] for d in devices)
        assert more("maskfleet_bytes_total", "down", "downlink") == sum(d["bytes_down"] for d in devices)
        assert more("maskfleet_bytes_total", "up", "enrol") == sum(d["messages_up"]["enrol"] for d in devices)
        route = "/v1/federations/{federation}/rounds/{round}/updates/{device}"
        assert more("maskfleet_requests_total", "PUT", route, "201") == 4
        assert more("maskfleet_requests_total", "GET", "other", "404") == 1
        assert after["maskfleet_federations", ("finished",)] == 1
        assert ("maskfleet_federation_round", ("fed",)) not in after

    play(tmp_path, script)


def test_only_so_many_federations_have_figures_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LABELLED", 2)

    async def script(fleet: Fleet) -> None:
        await fleet.bundle()
        for name in "abc":
            await fleet.operator("POST", "/v1/federations", json=settings(name=name))
        found = await figures(fleet)
        assert [labels for name, labels in found if name == "maskfleet_federation_round"] == [("a",), ("b",)]
        assert found["maskfleet_federations_unlabelled", ()] == 1

    play(tmp_path, script)


def test_a_request_on_which_the_coordinator_fails_counts_as_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fleet: Fleet) -> None:
        failed = "maskfleet_requests_total", ("GET", "/v1/federations", "500")
        before = (await figures(fleet)).get(failed, 0)  # of other tests: the figures are the process's
        with monkeypatch.context() as broken:
            broken.setattr(Coordinator, "summaries", lambda _: 1 / 0)
            refused(await fleet.operator("GET", "/v1/federations"), "internal-error")
        found = await figures(fleet)
        assert found[failed] == before + 1
        assert ("maskfleet_requests_total", ("GET", "/v1/federations", "0")) not in found

    play(tmp_path, script)


def called(folder: Path, method: str, path: str, headers: dict[str, str], **more: Any) -> httpx.Response:
    """The answer of an application that was made with these arguments."""

    async def main() -> httpx.Response:
        store = open_folder(folder)
        coordinator = Coordinator(store, OPERATOR)
        await coordinator.start()
        transport = httpx.ASGITransport(create_app(coordinator, **more))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            answer = await http.request(method, path, headers=headers)
        await coordinator.close()
        store.close()
        return answer

    return asyncio.run(main())


def test_metrics_need_a_token_unless_they_are_open(tmp_path: Path) -> None:
    refused(called(tmp_path, "GET", "/metrics", {}), "unauthorized")
    assert called(tmp_path, "GET", "/metrics", bearer(OPERATOR)).status_code == 200
    assert called(tmp_path, "GET", "/metrics", {}, open_metrics=True).status_code == 200


def test_only_pages_of_the_allowed_origins_may_call(tmp_path: Path) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "PATCH",
           "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    allowed = {"allow_origins": ["https://a.example"]}
    answer = called(tmp_path, "OPTIONS", "/v1/federations", ask, **allowed)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "PATCH" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    answer = called(tmp_path, "GET", "/v1/federations", {"Origin": "https://a.example"}, **allowed)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
    assert {"Link", "Maskfleet-Round"} <= set(answer.headers["access-control-expose-headers"].split(", "))
    for origin, more in (("https://b.example", allowed), ("https://a.example", {})):
        answer = called(tmp_path, "GET", "/v1/federations", {"Origin": origin}, **more)
        assert "access-control-allow-origin" not in answer.headers


def test_a_device_in_a_browser_may_send_every_header_of_an_update(tmp_path: Path) -> None:
    headers = "authorization,content-digest,content-type,maskfleet-cost,maskfleet-lease"
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT",
           "Access-Control-Request-Headers": headers}  # fmt: skip
    path = "/v1/federations/har/rounds/1/updates/pi-07"
    answer = called(tmp_path, "OPTIONS", path, ask, allow_origins=["https://a.example"])
    assert (answer.status_code, answer.text) == (200, "OK")


def test_spans_are_sent_only_when_the_environment_says_where_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    class Anything(SimpleNamespace):
        def __init__(self, *given: Any) -> None:
            super().__init__(add_span_processor=told.append)

    names = {"sdk.trace": "TracerProvider", "sdk.trace.export": "BatchSpanProcessor",
             "exporter.otlp.proto.http.trace_exporter": "OTLPSpanExporter",
             "instrumentation.fastapi": "FastAPIInstrumentor"}  # fmt: skip
    for name, class_ in names.items():
        module = ModuleType(f"opentelemetry.{name}")
        setattr(module, class_, Anything)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Anything.instrument_app = staticmethod(lambda app, tracer_provider: told.append(app))  # type: ignore[attr-defined]
    called(tmp_path, "GET", "/v1/health", {})
    assert told == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    called(tmp_path, "GET", "/v1/health", {})
    assert len(told) == 2
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert called(tmp_path, "GET", "/v1/health", {}).status_code == 200
    assert "maskfleet[otel]" in caplog.text
