"""Answers with content-addressed bytes or a file: ETag, 304, single ranges."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from coord_server.http.openapi import BYTES, headers
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from coord_server.store.blobs import FolderBlobs, stream

WHOLE = 8 << 20  # a blob up to this size is answered in one piece
BINARY = "application/octet-stream"
IMMUTABLE = "private, max-age=31536000, immutable"
_RANGE = re.compile(r"^bytes=([0-9]{0,18})-([0-9]{0,18})$")


def described(
    what: str, media_type: str, schema: Mapping[str, str] | None = None, more: Mapping[str, str] | None = None
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that answers with `immutable` or `file`; `more` are headers in words."""
    binary = {media_type: BYTES}
    whole = {media_type: {"schema": schema}} if schema else binary
    said = headers({"ETag": "For If-None-Match and If-Range.", **(more or {})})
    return {
        200: {"description": what, "content": whole, "headers": said},
        206: {
            "description": "the range that was asked for",
            "content": binary,
            "headers": said | headers({"Content-Range": "`bytes FIRST-LAST/SIZE`."}),
        },
        304: {"description": "the copy that If-None-Match names is valid", "headers": said},
        **documented("not-found", "bad-range"),
    }


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
    said = {"ETag": f'"{sha256}"', "Cache-Control": IMMUTABLE, "Accept-Ranges": "bytes"}
    if _is_known(request, said["ETag"]):
        return Response(status_code=304, headers=said)
    start, stop, status = _part(request, size, said)
    if data is None and size <= WHOLE:
        data = await asyncio.to_thread(blobs.read, shelf, sha256)
    if data is not None:
        return Response(data[start:stop], status, said, media_type)
    said["Content-Length"] = str(stop - start)
    return StreamingResponse(blobs.stream(shelf, sha256, start, stop), status, said, media_type)


def file(request: Request, path: Path, more: Mapping[str, str]) -> Response:
    """The bytes of a file, or of a single range of it, with `more` headers. Raises Refusal."""
    found = path.stat()
    said = {"ETag": f'"{found.st_mtime_ns:x}-{found.st_size:x}"', "Accept-Ranges": "bytes", **more}
    if _is_known(request, said["ETag"]):
        return Response(status_code=304, headers=said)
    start, stop, status = _part(request, found.st_size, said)
    said["Content-Length"] = str(stop - start)
    return StreamingResponse(stream(path, start, stop), status, said, BINARY)


def _is_known(request: Request, etag: str) -> bool:
    """Whether the caller has the bytes with this ETag."""
    asked = tags(request.headers.get("if-none-match", ""))
    return etag.strip('"') in asked or "*" in asked


def tags(header: str) -> tuple[str, ...]:
    """The tags in a header, without quotes. A compressing proxy makes strong tags weak, so weak ones count too."""
    return tuple(each.strip().removeprefix("W/").strip('"') for each in header.split(","))


def _part(request: Request, size: int, said: dict[str, str]) -> tuple[int, int, int]:
    """First byte, the one after the last and the status of an answer, whose headers `said` name the part.

    If `If-Range` names another ETag, the whole file is sent.
    """
    same = request.headers.get("if-range", said["ETag"]) == said["ETag"]
    span = _range(request.headers.get("range") if same else None, size)
    if span is None:
        return 0, size, 200
    said["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    return *span, 206
