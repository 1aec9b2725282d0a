"""Bodies of requests: bounded in size and time, digested, stored."""

from __future__ import annotations

import asyncio
import binascii
import json
import re
import sys
from base64 import b64decode

from fastapi import Request
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coord_server.http.access import CALL, Call
from coord_server.http.problems import JSON, UNREADABLE
from coord_server.live.uploads import receive
from coord_server.problems import Refusal
from coord_server.store.blobs import FolderBlobs
from edge_client.protocol.payload import without_repeats

JSON_LIMIT = 256 * 1024  # bytes of the operator's JSON messages
DEVICE_LIMIT = 16 * 1024  # bytes of all other messages: a report with a long reason, every character escaped
JSON_DEPTH = 201  # levels of nested objects and lists that the parser reads
_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):\s*(?:,|$)")
_COUNT = re.compile(r"^[0-9]{1,18}$")
_UPLOADS = re.compile(r"^/v1/(bundles$|bundles/[^/]+/(parts/|weights$)|federations/[^/]+/rounds/[^/]+/updates/)")


class BoundedBody:
    """ASGI middleware: ends an upload of which no byte arrives for `patience` seconds with 408.

    Every other body is a message, which is read into memory before its sender is authenticated. Hence its limits: it is
    small (larger from the operator), arrives completely within `patience` seconds, and nests no deeper than JSON_DEPTH.
    FastAPI reads it before the token: one that cannot be read is handed on as null, and refused after that.
    """

    def __init__(self, app: ASGIApp, patience: float) -> None:
        self._app, self._patience = app, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":  # no GET takes a body: it is not kept
            await self._app(scope, receive, send)
            return
        complete, upload = False, _UPLOADS.match(scope["path"]) is not None

        async def bounded() -> Message:
            nonlocal complete
            if complete:  # after the last chunk only a disconnect can arrive
                return await receive()
            if upload:
                _check_coding(Headers(scope=scope))
            try:
                message = await _within(self._patience, receive if upload else lambda: _message(scope, receive))
            except asyncio.TimeoutError:
                text = f"{'no byte of the body' if upload else 'no complete message'} arrived for {self._patience:g} s"
                raise HTTPException(408, f"{text}; send it again") from None
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, bounded, send)


async def _message(scope: Scope, receive: Receive) -> Message:
    """A message in one piece, or the disconnect of its sender. Raises HTTPException."""
    headers, body = Headers(scope=scope), bytearray()
    call: Call = scope[CALL]
    limit = JSON_LIMIT if call.role == "operator" else DEVICE_LIMIT
    too_long = HTTPException(413, f"a message has at most {limit} bytes, this one has more; shorten it")
    if not _fits(headers.get("content-length", "0"), limit):
        raise too_long
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return message
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_long
        more = message.get("more_body", False)
    try:
        _check_coding(headers)
        if body and JSON.match(headers.get("content-type", "")):
            _check_json(bytes(body))
    except Refusal as refusal:
        scope[UNREADABLE], body = refusal, bytearray(b"null")  # no operation accepts null: refused after the token
    return {"type": "http.request", "body": bytes(body), "more_body": False}


def _check_coding(headers: Headers) -> None:
    """Refuse a compressed body: a small one can expand to any size, and updates are entropy coded. Raises Refusal."""
    coding = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise Refusal("compressed", f"Content-Encoding is {coding[:40]!r}; send the body as it is, without that header")


def _check_json(message: bytes) -> None:
    """Refuse text that is not JSON, nests too deeply or repeats a key, before it is unpacked. Raises Refusal."""
    try:
        from_json(message)
        json.loads(message, object_pairs_hook=without_repeats)
    except ValueError as error:
        why = str(error)
        if why.startswith("recursion limit"):
            why = f"it nests deeper than {JSON_DEPTH} levels: {why.partition(' at ')[2]}"
        why = f"the message's JSON cannot be read: {why}; correct it and send it again"
        raise Refusal("bad-message", why) from None


async def _within(seconds: float, receive: Receive) -> Message:
    """The next message of `receive`. Raises asyncio.TimeoutError when it takes longer."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(receive(), seconds)
    async with asyncio.timeout(seconds):  # wait_for would make a task of each piece of a body
        return await receive()


def sha256_of_header(value: str) -> str:
    """The hex SHA-256 in a `Content-Digest` header (RFC 9530). Raises Refusal."""
    found = _DIGEST.search(value)
    try:
        raw = b64decode(found.group(1), validate=True) if found else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        said = f"Content-Digest is {value[:80]!r}"
        raise Refusal("bad-digest", f"{said}; send sha-256=:BASE64:, the SHA-256 of the body (RFC 9530)")
    return raw.hex()


def check_length(request: Request, limit: int, what: str) -> None:
    """Refuse a body whose announced length is over `limit` before a byte of it is read. Raises Refusal."""
    announced = request.headers.get("content-length", "0")
    if not _fits(announced, limit):
        raise Refusal("too-large", f"{what} has at most {limit} bytes, Content-Length says {announced[:40]}")


def _fits(announced: str, limit: int) -> bool:
    """Whether a Content-Length, which may have any number of digits, is at most `limit`."""
    return _COUNT.match(announced) is not None and int(announced) <= limit


async def read_bounded(request: Request, limit: int, what: str) -> bytes:
    """The whole body, at most `limit` bytes. Raises Refusal."""
    check_length(request, limit, what)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Refusal("too-large", f"{what} has at most {limit} bytes; this body has more")
    return bytes(body)


async def store(request: Request, blobs: FolderBlobs, shelf: str, sha256: str, size: int, what: str) -> None:
    """Make the body durable as the blob `sha256` of `shelf`. Raises Refusal, StateError; then nothing is kept."""
    check_length(request, size, what)
    incoming = blobs.receive(shelf)
    try:
        _, small = await receive(incoming, request.stream(), size, what)
        if small is not None:
            await asyncio.to_thread(incoming.write, small)
        found = incoming.sha256
        if found != sha256:
            raise Refusal(
                "bad-bundle", f"{what} has SHA-256 {found} instead of {sha256}; send the file of its manifest"
            )
        await asyncio.to_thread(incoming.commit)
    finally:
        incoming.discard()
