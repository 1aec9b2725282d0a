"""What HTTP adds to bytes: bounded bodies, `Content-Digest`, immutable answers with ETag and ranges."""

from __future__ import annotations

import asyncio
import binascii
import re
import sys
from base64 import b64decode
from collections.abc import Callable

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coord_server.refusals import Refusal
from coord_server.store.blobs import Blobs

JSON_LIMIT = 256 * 1024  # bytes of a JSON message of the operator
DEVICE_LIMIT = 16 * 1024  # the same of anybody else: a report with a long reason, every character of it escaped
JSON_DEPTH = 201  # objects and lists within each other that the parser takes
WHOLE = 8 << 20  # a blob up to this size is answered in one piece
IMMUTABLE = "private, max-age=31536000, immutable"
_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):\s*(?:,|$)")
_RANGE = re.compile(r"^bytes=([0-9]{0,18})-([0-9]{0,18})$")
_COUNT = re.compile(r"^[0-9]{1,18}$")
_UPLOADS = re.compile(r"^/v1/(bundles$|bundles/[^/]+/parts/|federations/[^/]+/rounds/[^/]+/updates/)")


class BoundedBody:
    """ASGI middleware: an upload that stands still for `patience` seconds is given up with 408.

    A body that is not an upload is a message, held in memory whole before anybody is asked who sent it. So it is small,
    unless it comes with the operator's token; it has arrived after `patience` seconds, and is JSON that can be read.
    """

    def __init__(self, app: ASGIApp, patience: float, is_operator: Callable[[str], bool]) -> None:
        self._app, self._patience, self._is_operator = app, patience, is_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        whole, upload = False, _UPLOADS.match(scope["path"]) is not None

        async def bounded() -> Message:
            nonlocal whole
            if whole:  # what comes now is that the caller goes away, whenever that is
                return await receive()
            try:
                message = await _within(self._patience, receive if upload else lambda: self._message(scope, receive))
            except asyncio.TimeoutError:
                text = f"{'nothing of the body' if upload else 'no whole message'} came for {self._patience:g} s"
                raise HTTPException(408, f"{text}; send it again", {"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            return message

        await self._app(scope, bounded, send)

    async def _message(self, scope: Scope, receive: Receive) -> Message:
        """A message in one piece, or that its sender went away. Raises HTTPException."""
        headers, said = Headers(scope=scope), bytearray()
        shown = headers.get("authorization", "").partition(" ")[2]
        limit = JSON_LIMIT if self._is_operator(shown) else DEVICE_LIMIT
        too_long = HTTPException(413, f"a message has at most {limit} bytes, this one more; shorten it")
        announced, more = headers.get("content-length", ""), True
        if _COUNT.match(announced) and int(announced) > limit:
            raise too_long
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            said += message.get("body", b"")
            if len(said) > limit:
                raise too_long
            more = message.get("more_body", False)
        if said and headers.get("content-type", "").startswith("application/json"):
            _check_json(bytes(said))
        return {"type": "http.request", "body": bytes(said), "more_body": False}


def _check_json(message: bytes) -> None:
    """Refuse what is no JSON, or JSON that not every reader takes, before anybody unpacks it. Raises HTTPException."""
    try:
        from_json(message)
    except ValueError as error:
        why = str(error)
        if why.startswith("recursion limit"):
            why = f"it nests deeper than {JSON_DEPTH} levels: {why.partition(' at ')[2]}"
        raise HTTPException(422, f"the message's JSON cannot be read: {why}; correct it and send it again") from None


async def _within(seconds: float, receive: Receive) -> Message:
    """What `receive` gives. Raises asyncio.TimeoutError when that takes longer."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(receive(), seconds)
    async with asyncio.timeout(seconds):  # wait_for makes a task of each piece of a body
        return await receive()


def sha256_of_header(value: str | None) -> str:
    """The hex SHA-256 in a `Content-Digest` header (RFC 9530). Raises Refusal."""
    found = _DIGEST.search(value or "")
    try:
        raw = b64decode(found.group(1), validate=True) if found else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise Refusal(
            "bad-digest", f"Content-Digest is {value!r}; send sha-256=:BASE64:, the SHA-256 of the body (RFC 9530)"
        )
    return raw.hex()


def check_length(request: Request, limit: int, what: str) -> None:
    """Refuse a body whose announced length is over `limit` before a byte of it is read. Raises Refusal."""
    announced = request.headers.get("content-length")
    if announced is not None and not _COUNT.match(announced):
        raise Refusal("bad-request", f"Content-Length is {announced[:40]!r}; send the number of bytes")
    if announced is not None and int(announced) > limit:
        raise Refusal("too-large", f"{what} has at most {limit} bytes, Content-Length says {announced}")


async def read_bounded(request: Request, limit: int, what: str) -> bytes:
    """The whole body, at most `limit` bytes. Raises Refusal."""
    check_length(request, limit, what)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Refusal("too-large", f"{what} has at most {limit} bytes; this body has more")
    return bytes(body)


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last that a single-range header asks for; None to send all. Raises Refusal."""
    found = _RANGE.match(header or "")
    if found is None or found.groups() == ("", ""):
        return None  # RFC 9110: what is not understood is ignored
    first, last = found.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size or start >= stop:
        raise Refusal("bad-range", f"{header} of {size} bytes is empty; ask for what is there")
    return start, stop


async def immutable(
    request: Request, blobs: Blobs, shelf: str, sha256: str, size: int, media_type: str, data: bytes | None = None
) -> Response:
    """Content-addressed bytes, `data` or a blob: ETag, 304, single ranges.

    Whoever fetched it may keep it for good; a shared cache may not, since all of it is for those with a credential.
    """
    headers = {"ETag": f'"{sha256}"', "Cache-Control": IMMUTABLE, "Accept-Ranges": "bytes"}
    asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["ETag"] in asked or "*" in asked:
        return Response(status_code=304, headers=headers)
    span = _range(request.headers.get("range"), size)
    start, stop = span or (0, size)
    if span:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 206 if span else 200
    if data is None and size <= WHOLE:
        data = await asyncio.to_thread(blobs.read, shelf, sha256)
    if data is not None:
        return Response(data[start:stop] if span else data, status, headers, media_type)
    headers["Content-Length"] = str(stop - start)
    return StreamingResponse(blobs.stream(shelf, sha256, start, stop), status, headers, media_type)


def to_the_end(answer: Response, size: int) -> bool:
    """Whether an answer of `immutable` carries the last of the content's `size` bytes."""
    if answer.status_code == 206:
        return answer.headers["content-range"].endswith(f"-{size - 1}/{size}")
    return answer.status_code == 200
