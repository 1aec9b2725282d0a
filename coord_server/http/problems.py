"""Every error as RFC 9457 `application/problem+json`, in the answers and in the OpenAPI document."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coord_server.refusals import STATUS, Refusal
from edge_client.errors import StateError, first_fault
from edge_client.protocol.messages import Problem

MEDIA_TYPE = "application/problem+json"
BY_STATUS = {400: "bad-request", 401: "unauthorized", 403: "forbidden", 404: "not-found", 405: "method-not-allowed",
             408: "too-slow", 413: "too-large", 422: "bad-message"}  # fmt: skip

EXAMPLES = {
    "bad-request": "Content-Length is 'many'; send the number of bytes",
    "unauthorized": "this needs the device's credential: send Authorization: Bearer CREDENTIAL",
    "forbidden": "this credential is 'pi-07''s; it cannot upload for 'pi-08'",
    "device-removed": "device 'pi-07' was removed from har by its operator",
    "not-found": "there is no federation 'hat'; GET /v1/federations lists them",
    "method-not-allowed": "/v1/federations/har/work does not take POST; see /docs",
    "too-slow": "nothing of the body came for 60 s; send it again",
    "wrong-round": "this update is for round 2, the federation is at round 3; ask for work again",
    "round-closed": "round 3 is closed; drop this update and ask for work",
    "wrong-lease": "lease '0c61' is not the one pi-07 has in round 3; ask for work",
    "not-in-cohort": "pi-07 was not asked in round 3; ask for work",
    "conflicting-update": "pi-07 already sent round 3 with another SHA-256; the first one counts, drop this one",
    "wrong-phase": "the federation is finished; it cannot be paused now",
    "no-devices": "no device has asked for work yet; hand out a join token first",
    "name-taken": "there is already a federation 'har'; choose another name",
    "bundle-incomplete": "bundle 'har-mlp' lacks parts ['train.onnx']; PUT them under /v1/bundles/DIGEST/parts/ first",
    "token-spent": "this join token has been used up; ask the operator for a new one",
    "too-large": "an update of this method has at most 51174 bytes, Content-Length says 1506424",
    "bad-range": "bytes=9000- of 1874 bytes is empty; ask for what is there",
    "bad-digest": "Content-Digest is None; send sha-256=:BASE64:, the SHA-256 of the body (RFC 9530)",
    "bad-bundle": "part 'train.onnx' has another SHA-256 than the manifest says; send the file it was written with",
    "bad-config": "there is no method 'fedmusk'; choose one of ['coupled', 'fedavg', 'fedmask']",
    "bad-message": "rounds: Input should be greater than or equal to 1, got 0; correct it and send again",
    "bad-payload": "the payload holds arrays ['mask']; FedAvg sends ['buffers', 'parameters']",
    "superseded": "'pi-07' has begun another upload; this one was given up",
    "internal-error": "the coordinator failed on this request; its log says why. Try again later",
    "round-not-open": "round 2 is being aggregated again after a restart; send round 3 once more soon",
    "too-busy": "the coordinator has as many connections as it can serve; come again in a few seconds",
    "not-loaded": "federation 'har' could not be loaded; its `fault` tells the operator what to mend",
    "storage-full": "cannot write coordinator/blobs: No space left on device; free some",
}
"""A sentence of each kind, as it may come, for the OpenAPI document."""

log = logging.getLogger("maskfleet")


def problem(kind: str, detail: str, headers: dict[str, str] | None = None, status: int | None = None) -> Response:
    """The response for a problem of this kind."""
    status = STATUS[kind] if status is None else status
    headers = dict(headers or {})
    detail = detail.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = Problem(type=f"/problems/{kind}", title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(body.model_dump_json(), status, headers, MEDIA_TYPE)


def documented(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that may answer with these problems."""
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        status = STATUS[kind]
        entry = found.setdefault(
            status,
            {
                "description": HTTPStatus(status).phrase,
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        example = Problem(type=f"/problems/{kind}", title=HTTPStatus(status).phrase, status=status,
                          detail=EXAMPLES[kind])  # fmt: skip
        entry["content"][MEDIA_TYPE]["examples"][kind] = {"value": example.model_dump()}
    return found


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"superseded": {"Connection": "close"}, "round-not-open": {"Retry-After": "1"},
               "not-loaded": {"Retry-After": "60"}}  # fmt: skip
    return problem(error.kind, str(error), headers.get(error.kind))


async def _no_room(_: Request, error: Exception) -> Response:
    log.error("%s", error)
    return problem("storage-full", str(error), {"Retry-After": "10"})


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = BY_STATUS.get(error.status_code, "bad-request")
    detail = {
        "not-found": f"there is nothing at {request.url.path}; see /docs for what there is",
        "method-not-allowed": f"{request.url.path} does not take {request.method}; see /docs",
    }.get(kind, str(error.detail))
    return problem(kind, detail, dict(error.headers or {}), error.status_code)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    sent_as = request.headers.get("content-type")
    if first["loc"] == ("body",) and not (sent_as or "").startswith("application/json"):
        return problem("bad-message", f"the message was sent as {sent_as}; send Content-Type: application/json")
    return problem("bad-message", f"{first_fault(error)}; correct it and send again")


async def _gone(request: Request, error: Exception) -> Response:
    log.info("%s %s: the caller went away", request.method, request.url.path)
    return problem("bad-request", "the body ended before it was whole; send it again")


async def _broken(_: Request, error: Exception) -> Response:
    return problem("internal-error", "the coordinator failed on this request; its log says why. Try again later")


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(StateError, _no_room)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _broken)
