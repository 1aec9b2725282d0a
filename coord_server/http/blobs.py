"""Answers with content-addressed bytes: ETag, 304, single ranges."""

from __future__ import annotations

import asyncio
import re

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from coord_server.problems import Refusal
from coord_server.store.blobs import FolderBlobs

WHOLE = 8 << 20  # a blob up to this size is answered in one piece
IMMUTABLE = "private, max-age=31536000, immutable"
_RANGE = re.compile(r"^bytes=([0-9]{0,18})-([0-9]{0,18})$")


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last that a single-range header asks for; None to send all. Raises Refusal."""
    found = _RANGE.match(header or "")
    if found is None or found.groups() == ("", ""):
        return None  # RFC 9110: a range that is not understood is ignored
    first, last = found.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size or start >= stop:
        raise Refusal("bad-range", f"{header} of {size} bytes is empty; ask for a range inside the content")
    return start, stop


async def immutable(
    request: Request, blobs: FolderBlobs, shelf: str, sha256: str, size: int, media_type: str, data: bytes | None = None
) -> Response:
    """Content-addressed bytes, `data` or a blob.

    The caller may keep them for good. A shared cache may not, because every reader needs a credential.
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
