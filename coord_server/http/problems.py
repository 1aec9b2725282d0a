"""Errors as RFC 9457 `application/problem+json`: in the answers and in the OpenAPI document."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from coord_server.problems import MEDIA_TYPE, PROBLEMS, Refusal, message
from edge_client.errors import StateError, StorageDamagedError, StorageFullError, first_fault

BY_STATUS = {400: "bad-request", 401: "unauthorized", 403: "forbidden", 404: "not-found", 405: "method-not-allowed",
             408: "too-slow", 413: "too-large", 422: "bad-message"}  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECRET = {"enrol", "tokens", "viewers"}  # parts of paths that take or give secrets
_HEX = re.compile("[0-9a-fA-F]{16,}")  # a token, a credential, or a piece of one, wherever a request has it by mistake
JSON = re.compile(r"application/(.*\+)?json\s*(;|$)", re.IGNORECASE)
"""A Content-Type whose message is read as JSON."""
UNREADABLE = "maskfleet.unreadable"  # where the scope has the Refusal of a message that cannot be read
_STORAGE = ("storage-full", "storage-damaged", "storage-unreachable")
COMMON: dict[str, tuple[str, ...]] = {
    "health": ("too-many", "too-busy"),
    "device": ("unauthorized", "device-removed", "not-loaded", "bad-message", "too-many", "too-busy", *_STORAGE),
    "operator": (
        "unauthorized",
        "forbidden",
        "too-many",
        "too-busy",
        "not-found",
        "not-loaded",
        "bad-message",
        *_STORAGE,
    ),
}
"""What every operation with this tag may answer."""

log = logging.getLogger("maskfleet")


def problem(
    scope: Scope,
    kind: str,
    detail: str,
    headers: dict[str, str] | None = None,
    status: int | None = None,
    about: str = "",
) -> Response:
    """The response for a problem of this kind, which is logged too, up to a limit, because anyone can cause it.

    The log names the method and route, or what the problem is `about`.
    """
    body = message(kind, detail, status)
    level = logging.INFO if body.status in (400, 404, 408, 409) else logging.WARNING
    asked, client = called(scope), caller(scope)
    extra = {"refused": kind, "request": asked, "client": client, "limited": f"refused {kind}"}
    said = _HEX.sub("...", body.detail)
    log.log(level, "refused, %s: %s from %s: %s", kind, about or asked, client, said, extra=extra)
    return Response(body.model_dump_json(), body.status, {**PROBLEMS[kind].headers(), **(headers or {})}, MEDIA_TYPE)


def called(scope: Scope) -> str:
    """Method and route of a request for the log: the route's pattern, because a path may hold a secret by mistake."""
    method = scope["method"] if scope["method"] in METHODS else "an unknown method"
    return f"{method} {getattr(scope.get('route'), 'path', '')}".rstrip()


def caller(scope: Scope) -> str:
    """The address that a request came from, for the log."""
    return str(scope["client"][0]) if scope.get("client") else "an unknown address"


def documented(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that may answer with these problems."""
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        example = message(kind, PROBLEMS[kind].example)
        content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}}
        entry = found.setdefault(example.status, {"description": example.title, "content": content})
        entry["content"][MEDIA_TYPE]["examples"][kind] = {"value": example.model_dump()}
    return found


def describe(operation: dict[str, Any]) -> None:
    """Add to an operation of the OpenAPI document the problems that all with its tag have in common."""
    answers, taking = operation["responses"], ("compressed",) if "requestBody" in operation else ()
    for status, entry in documented(*COMMON.get(operation["tags"][0], ()), *taking).items():
        known = answers.get(str(status), {}).get("content", {}).get(MEDIA_TYPE)
        if known is None:
            answers[str(status)] = entry
        else:
            known["examples"] |= entry["content"][MEDIA_TYPE]["examples"]
    operation["responses"] = dict(sorted(answers.items()))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return problem(request.scope, error.kind, str(error), about=error.about)


async def _storage(request: Request, error: Exception) -> Response:
    full = "storage-full" if isinstance(error, StorageFullError) else "storage-unreachable"
    kind = "storage-damaged" if isinstance(error, StorageDamagedError) else full
    return problem(request.scope, kind, str(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientDisconnect):  # while FastAPI read a message
        return await _disconnected(request, error)
    kind = BY_STATUS.get(error.status_code, "bad-request")
    path = "this path" if _secret(request) else request.url.path
    detail = {
        "not-found": f"there is nothing at {path}; check the address: /docs lists every path",
        "method-not-allowed": f"{path} does not take {request.method}; see /docs",
    }.get(kind, str(error.detail))
    headers = dict(error.headers or {})
    if "Allow" in headers:
        headers["Allow"] = ", ".join(_allowed(request))
    return problem(request.scope, kind, detail, headers, error.status_code)


def _allowed(request: Request) -> list[str]:
    """The methods of a path. The router names those of its first operation only."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    routes = request.app.routes
    found = {m for m, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in routes)}
    return sorted(found | {"HEAD"} if "GET" in found else found)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    unreadable: Refusal | None = request.scope.get(UNREADABLE)
    if unreadable is not None:
        return await _refused(request, unreadable)
    first = error.errors()[0]
    sent_as = request.headers.get("content-type", "")
    if first["loc"] == ("body",) and first["type"] == "missing":
        what = "the message is empty; send a JSON object with Content-Type: application/json, {} for the defaults"
    elif first["loc"] == ("body",) and not JSON.match(sent_as):
        sent = f"was sent as {sent_as}" if sent_as else "has no Content-Type"
        what = f"the message {sent}; send Content-Type: application/json"
    else:
        advised = first["type"] == "value_error"  # a sentence of ours, which says what to do
        what = first_fault(error, secret=_secret(request)) + ("" if advised else "; correct it and send again")
    return problem(request.scope, "bad-message", what)


def _secret(request: Request) -> bool:
    """Whether a request may hold a token or a credential, also in its path by mistake: then nothing of it is quoted."""
    return not SECRET.isdisjoint(request.url.path.split("/"))


async def _disconnected(request: Request, error: Exception) -> Response:
    detail = "the caller disconnected before the body was complete; send it again"
    return problem(request.scope, "bad-request", detail)


async def _broken(request: Request, error: Exception) -> Response:
    return problem(request.scope, "internal-error", PROBLEMS["internal-error"].example)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(StateError, _storage)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _broken)
