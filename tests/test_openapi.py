"""The OpenAPI document: every JSON body and answer has an example, and every example is one the code would take."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from coordination import LIMIT, OPERATOR, Fleet, bearer, credential, play, refused, settings
from fastapi import Response
from fastapi.routing import APIRoute
from listening import listening
from pydantic import TypeAdapter

from coord_server.app import create_app
from coord_server.coordinator import Coordinator
from coord_server.http import bundles, device, operator, tokens
from coord_server.problems import PROBLEMS
from coord_server.store import open_store
from edge_client.bundle import Manifest, generate
from edge_client.methods import make_method
from edge_client.protocol import messages
from edge_client.protocol.messages import FederationConfig, Message, Problem

JSON, PROBLEM = "application/json", "application/problem+json"
COMPONENTS = "#/components/schemas/"
MODELS = {model.__name__: model for model in (*Message.__subclasses__(), Problem, Manifest)}
Said = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = open_store(Path(tmp_path_factory.mktemp("store")) / "data")
    found = create_app(Coordinator(store, "x")).openapi()
    store.close()
    return found


def operations(document: dict[str, Any]) -> Iterator[Said]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def said(operation: dict[str, Any], media_type: str) -> Iterator[Said]:
    """Every body and answer of this type that is not just bytes."""
    whole = {"body": operation.get("requestBody", {}), **operation["responses"]}
    for what, message in whole.items():
        content = message.get("content", {}).get(media_type)
        if content is not None and content["schema"].get("format") != "binary":
            yield what, content


def check(schema: dict[str, Any], example: Any) -> None:
    """Raise unless the models that a schema refers to take the example."""
    if schema.get("type") == "array":
        assert example
        for item in example:
            check(schema["items"], item)
    elif "oneOf" in schema:
        assert {choice["$ref"].removeprefix(COMPONENTS) for choice in schema["oneOf"]} <= MODELS.keys()
        TypeAdapter(messages.Work).validate_json(json.dumps(example))
    else:
        MODELS[schema["$ref"].removeprefix(COMPONENTS)].model_validate_json(json.dumps(example))


def test_every_json_body_and_answer_has_an_example_that_its_model_takes(document: dict[str, Any]) -> None:
    found = []
    for operation, content in operations(document):
        for what, message in said(content, JSON):
            examples = [named["value"] for named in message.get("examples", {}).values()]
            assert examples, (operation, what)
            for example in examples:
                check(message["schema"], example)
            found.append(f"{operation} {what}")
    for expected in (
        "POST /v1/enrol body",
        "POST /v1/bundles body",
        "POST /v1/bundles 201",
        "POST /v1/federations body",
        "GET /v1/bundles/{digest} 200",
        "GET /v1/federations/{federation}/rounds 200",
        "PUT /v1/federations/{federation}/devices/{device}/report body",
        "PUT /v1/federations/{federation}/rounds/{round}/failures/{device} body",
        "PUT /v1/federations/{federation}/rounds/{round}/updates/{device} 200",
    ):
        assert expected in found


def test_no_answer_is_json_without_a_schema(document: dict[str, Any]) -> None:
    for operation, content in operations(document):
        assert content.get("requestBody", {"content": 1})["content"], operation
        good = [answer for code, answer in content["responses"].items() if code.startswith("2") and code != "204"]
        for answer in good:
            for message in answer["content"].values():
                assert message["schema"] not in ({}, {"type": "object"}), operation


def test_each_answer_to_a_question_for_work_has_its_own_example(document: dict[str, Any]) -> None:
    work = document["paths"]["/v1/federations/{federation}/work"]["get"]["responses"]["200"]["content"][JSON]
    assert [named["value"]["status"] for named in work["examples"].values()] == ["train", "wait", "finish", "stopped"]


def test_every_problem_has_an_example_of_its_kind_and_status(document: dict[str, Any]) -> None:
    kinds = set()
    for operation, content in operations(document):
        for code, message in said(content, PROBLEM):
            assert message["examples"], (operation, code)
            for kind, named in message["examples"].items():
                problem = Problem.model_validate(named["value"])
                assert (problem.type, problem.status) == (f"/problems/{kind}", PROBLEMS[kind].status)
                assert problem.status == int(code)
                assert len(problem.detail) > 20
                kinds.add(kind)
    # Any request may get these; the document would repeat them under every operation.
    assert kinds == PROBLEMS.keys() - {"bad-request", "method-not-allowed", "internal-error"}


def test_every_message_shows_itself_in_its_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, model in MODELS.items():
        if name in ("DeviceMetrics", "Cost"):  # a payload's metadata and a header, not JSON on the wire
            continue
        for example in schemas[name]["examples"]:
            model.model_validate_json(json.dumps(example))


def test_the_examples_are_of_a_model_and_a_method_that_exist(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    (config,) = schemas["FederationConfig"]["examples"]
    assert make_method(FederationConfig.model_validate(config).method).name == "coupled"
    manifest = Manifest.model_validate(schemas["Manifest"]["examples"][0])
    assert generate(manifest.parameters, 1).size == manifest.d == 1152 * 100 + 100 + 100 * 6 + 6
    names = {t.name: t.shape for t in manifest.parameters}
    for group in manifest.groups:
        assert all(p.of(group.size).shape == (names[p.tensor][p.axis], 1) for p in group.places)


def test_the_openapi_document_is_complete(document: dict[str, Any]) -> None:
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


def test_the_headers_that_a_client_needs_are_in_the_document(document: dict[str, Any]) -> None:
    found = {
        (name, code): set(answer["headers"])
        for name, operation in operations(document)
        for code, answer in operation["responses"].items()
        if "headers" in answer and "Link" not in answer["headers"]
    }
    files = ("bundles/{digest}", "bundles/{digest}/parts/{name}", "federations/{federation}/payloads/{sha256}",
             "federations/{federation}/exports/{export}/file")  # fmt: skip
    model, exports = "GET /v1/federations/{federation}/devices/{device}/model", "/v1/federations/{federation}/exports"
    assert found == {
        ("POST /v1/federations", "201"): {"Location"},
        ("GET /v1/federations/{federation}", "200"): {"ETag"},
        ("PATCH /v1/federations/{federation}", "200"): {"ETag"},
        ("GET /v1/federations/{federation}/state", "200"): {"Maskfleet-Round"},
        (f"POST {exports}", "202"): {"Location", "Retry-After"},
        (model, "202"): {"Location", "Retry-After"},
        (model, "200"): {"ETag", "Maskfleet-Source"},
        (model, "206"): {"ETag", "Content-Range", "Maskfleet-Source"},
        (model, "304"): {"ETag", "Maskfleet-Source"},
        **{(f"GET /v1/{path}", code): {"ETag"} for path in files for code in ("200", "304")},
        **{(f"GET /v1/{path}", "206"): {"ETag", "Content-Range"} for path in files},
    }


def test_every_kind_of_problem_is_in_the_manual() -> None:
    manual = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    found = re.findall(r"^\| (\d{3}) \| `([a-z-]+)` \|", manual, re.MULTILINE)
    assert {kind: int(status) for status, kind in found} == {kind: p.status for kind, p in PROBLEMS.items()}
    assert len(found) == len(PROBLEMS)


def test_every_field_of_a_federation_is_in_the_manual() -> None:
    manual = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    (table,) = re.findall(r"^\| field \| default \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", manual, re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(FederationConfig.model_fields)


def test_every_call_is_in_the_manual(document: dict[str, Any]) -> None:
    """As a curl line, with values in place of the names of the path."""
    manual = (Path(__file__).parent.parent / "docs" / "api.md").read_text().replace("\\\n", " ")
    lines = [line for line in manual.splitlines() if line.startswith("$ curl")]
    for path, operations in document["paths"].items():
        pattern = re.sub(r"\{\w+\}", '[^/ "?]+', path)
        for method in operations:
            shown = [line for line in lines if re.search(rf"\$URL{pattern}[?\"]", line)]
            sent = [
                line for line in shown if ("-X " + method.upper() in line) or (method == "get" and "-X" not in line)
            ]
            assert sent, (method, path)


def test_a_query_parameter_that_the_document_does_not_have_is_refused_once_the_caller_is_known(
    document: dict[str, Any], tmp_path: Path
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        ids = {"federation": "fed", "digest": settings()["bundle"]}
        probed = {"GET /v1/health", "GET /metrics"}  # which may have a parameter against caches
        for name, operation in operations(document):
            method, path = name.split(" ")
            if name in probed:
                answer = await fleet.operator(method, f"{path}?odd=1")
                assert answer.status_code == 200
                continue
            url = re.sub(r"{(\w+)}", lambda found: ids.get(found[1], "x"), path) + "?odd=1"
            if name != "POST /v1/enrol":  # the one without a token in its header
                refused(await fleet.http.request(method, url), "unauthorized")
            who = next(iter(operation.get("security", [{"none": []}])[-1]))
            shown = {"operator": bearer(OPERATOR), "device": bearer(credential("a")), "none": {}}[who]
            said = refused(await fleet.http.request(method, url, headers=shown), "bad-message")
            assert f"{name} takes" in said
            assert "'odd'" in said
        misspelt = refused(await fleet.operator("GET", "/v1/federations?phsae=paused"), "bad-message")
        assert "phase, method, prefix, limit, cursor, not 'phsae'; did you mean 'phase'?" in misspelt
        said = refused(await fleet.operator("GET", "/v1/federations?phase=paused&phase=running"), "bad-message")
        assert "'phase' 2 times" in said
        assert (await fleet.operator("HEAD", "/v1/health")).status_code == 200
        assert (await fleet.operator("GET", "/login?next=/&odd=1")).status_code == 200  # a page's address may have more

    play(tmp_path, script)


def test_a_caller_without_a_token_does_not_learn_what_is_wrong_with_its_message(
    document: dict[str, Any], tmp_path: Path
) -> None:
    async def script(fleet: Fleet) -> None:
        viewer = (await fleet.operator("POST", "/v1/viewers", json={})).json()["token"]
        asked = 0
        for name, operation in operations(document):
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                continue
            method, path = name.split(" ")
            url, cut = (
                re.sub(r"{(\w+)}", "1", path),
                {"content": b'{"a"', "headers": {"Content-Type": "application/json"}},
            )
            answer = await fleet.http.request(method, url, **cut)
            if name == "POST /v1/enrol":  # the one without a token in its header
                assert "EOF while parsing an object" in refused(answer, "bad-message")
                continue
            asked += 1
            refused(answer, "unauthorized")
            if operation["tags"] == ["operator"]:
                cut["headers"] |= bearer(viewer)
                refused(await fleet.http.request(method, url, **cut), "forbidden")
        assert asked > 5

    play(tmp_path, script)


def test_head_is_answered_as_get_without_the_body_wherever_there_is_a_get(
    document: dict[str, Any], tmp_path: Path
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", min_devices=9)
        ids = {"federation": "fed", "digest": settings()["bundle"], "name": "train.onnx", "sha256": "0" * 64}
        answered = Counter[int]()
        for name, operation in operations(document):
            method, path = name.split(" ")
            if method != "GET":
                continue
            url = re.sub(r"{(\w+)}", lambda found: ids.get(found[1], "a"), path)
            shown = bearer(credential("a") if "device" in operation["tags"] else OPERATOR)
            async with fleet.http.stream("GET", url, headers=shown) as get:
                pass  # the stream of events has no end
            head = await asyncio.wait_for(fleet.http.head(url, headers=shown), LIMIT)
            async with fleet.http.stream("GET", url, headers=shown) as again:
                pass
            if path != "/metrics":  # whose figures change
                due = [(found.status_code, said_of(found)) for found in (get, again)]  # a device may have gone silent
                assert (head.status_code, said_of(head)) in due, name
            assert head.content == b""
            answered[head.status_code] += 1
            assert (await fleet.http.get("/v1/health")).status_code == 200  # on the same connection
        assert answered[200] > 12, answered
        # No stream goes on after its headers: a viewer has 32 requests under way at most.
        viewer = bearer((await fleet.operator("POST", "/v1/viewers", json={})).json()["token"])
        for _ in range(40):
            assert (await fleet.http.head("/v1/federations/fed/events", headers=viewer)).status_code == 200
        refused_ = await fleet.http.head("/v1/federations")
        assert (refused_.status_code, refused_.content, refused_.headers["www-authenticate"]) == (401, b"", "Bearer")

    async def main() -> None:
        async with listening(tmp_path) as here:
            await here.fleet(script)

    asyncio.run(main())


def said_of(answer: httpx.Response) -> dict[str, str]:
    """The headers of an answer that do not change with the time."""
    return {name: value for name, value in answer.headers.items() if name != "date"}


def test_answers_without_a_body_name_no_content_type() -> None:
    routes = [route for part in (bundles, device, operator, tokens) for route in part.router.routes]
    bodiless = [r for r in routes if isinstance(r, APIRoute) and r.status_code == 204]
    assert len(bodiless) == 7
    assert {route.response_class for route in bodiless} == {Response}  # JSON's class names its type with no body too


def test_every_operation_has_a_short_name_of_its_own_for_generated_clients(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert {"list_federations", "upload_update", "show_metrics"} <= set(names)


def test_headers_that_are_due_are_required(document: dict[str, Any]) -> None:
    sent = document["paths"]["/v1/federations/{federation}/rounds/{round}/updates/{device}"]["put"]["parameters"]
    assert {p["name"] for p in sent if p["in"] == "header" and p["required"]} == {"maskfleet-lease", "content-digest"}
