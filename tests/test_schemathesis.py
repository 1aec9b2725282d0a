"""Schemathesis asks a running coordinator what its OpenAPI document allows and forbids, as an operator and a viewer.

Every answer has to be one that the document knows (status, content type, body), and none may be a fault of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from coordination import LIMIT, OPERATOR, bearer, credential, settings, write_bundle
from coordinator_process import coordinator
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks

from coord_server.operator.client import Operator
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.operator import TokenRequest
from edge_client.protocol.payload import MEDIA_TYPE

EXAMPLES = 4  # of each operation and role
schemathesis.serializer.alias([MEDIA_TYPE], "application/octet-stream")
NAMES = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
         "response_schema_conformance")  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator with a federation named as in the document's examples, and a device."""
    folder: Path = tmp_path_factory.mktemp("coordinator")
    with coordinator(folder / "data") as (_, address), Operator(address, OPERATOR) as operator:
        bundle = operator.upload_bundle(write_bundle(folder / "bundle"))
        operator.create(FederationConfig.model_validate(settings(name="har", bundle=bundle, min_devices=1)))
        join = operator.token("har", TokenRequest()).token
        with httpx.Client(base_url=address, timeout=LIMIT, trust_env=False) as http:
            body = {"token": join, "device": "pi-07", "credential": credential("pi-07")}
            assert http.post("/v1/enrol", json=body).status_code == 200
            http.get("/v1/federations/har/work", headers=bearer(credential("pi-07")))
        yield address


@pytest.mark.parametrize("role", ["operator", "viewer", "device"])
def test_every_answer_is_one_that_the_document_knows(url: str, role: str) -> None:
    http = httpx.Client(timeout=LIMIT, trust_env=False)
    viewer = http.post(f"{url}/v1/viewers", json={}, headers=bearer(OPERATOR)).json()["token"]
    token = {"operator": OPERATOR, "viewer": viewer, "device": credential("pi-07")}[role]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    wanted = [checks.CHECKS.get_one(name) for name in NAMES]  # which are registered by now
    answered: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith("/events"):  # an answer without end
            continue

        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @examples(
                max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(operation.as_strategy(mode))
            def ask(case: schemathesis.Case) -> None:
                answered[case.call_and_validate(headers=bearer(token), checks=wanted).status_code] += 1

            try:
                ask()
            except Unsatisfiable:  # nothing can be wrong in a request without parameters
                assert mode == GenerationMode.NEGATIVE
    assert answered.total() > 100
    assert {200, 401, 404, 422} <= answered.keys()
