"""HTML answers: templates filled in, the headers every page carries, compression, and errors as pages of the same look.

Jinja escapes all text. The Content-Security-Policy allows files of this package alone, and nothing inside a page.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException

from coord_server.dashboard import words
from coord_server.dashboard.session import Session
from coord_server.problems import MEDIA_TYPE
from coord_server.roles import Role
from edge_client.errors import MaskfleetError
from edge_client.protocol.messages import Problem

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with less, browsers send "Origin: null" with a form
    "Cross-Origin-Opener-Policy": "same-origin",
}
SMALL = 1000  # bytes that are not worth compressing
TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_API = ("/v1", "/openapi.json")  # paths whose errors stay JSON

Handler = Callable[[Request, Any], Awaitable[Response]]


class SignIn(Exception):
    """The page needs a session."""


@dataclass(frozen=True)
class Asset:
    """A file of the package as it is sent. `address` changes with its content, so that browsers may keep it."""

    content: bytes
    packed: bytes
    media_type: str
    address: str


def _asset(name: str, content: bytes) -> Asset:
    address = f"/assets/{name}?{hashlib.sha256(content).hexdigest()[:12]}"
    return Asset(content, gzip.compress(content, mtime=0), TYPES[name.rpartition(".")[2]], address)


ASSETS = {f.name: _asset(f.name, f.read_bytes()) for f in (files(__package__) / "assets").iterdir() if "." in f.name}

TURNS = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROLS = [*range(9), *range(14, 32), *range(127, 160)]  # but white space
HIDDEN = dict.fromkeys(TURNS + CONTROLS, "\N{REPLACEMENT CHARACTER}")
"""Of a device's words: what would turn the direction of the page's text around them, or shows nothing."""


def _plain(value: Any) -> Any:
    return value.translate(HIDDEN) if isinstance(value, str) else value


_templates = Environment(
    loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    finalize=_plain,
)  # fmt: skip
_templates.filters |= {
    f.__name__: f for f in (words.number, words.size, words.duration, words.ago, words.score, words.coded)
}
_templates.globals |= {
    "nothing": words.NOTHING,
    "version": version("maskfleet"),
    "asset": {name: a.address for name, a in ASSETS.items()},
}


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """A template as an answer. `values` are its variables, beside the session and the path."""
    return _sent(request, _rendered(request, template, **values), None, status)


def kept(request: Request, template: str, values: Callable[[], dict[str, Any]]) -> Response:
    """A page that shows the same to all of one role for as long as the application lives: rendered once for each."""
    pages: dict[tuple[str, Role | None], tuple[bytes, bytes]] = request.app.state.pages
    session: Session | None = request.state.session
    key = template, None if session is None else session.role
    if key not in pages:
        content = _rendered(request, template, **values())
        pages[key] = content, gzip.compress(content, mtime=0)
    return _sent(request, *pages[key])


def _rendered(request: Request, template: str, **values: Any) -> bytes:
    session: Session | None = getattr(request.state, "session", None)
    text = _templates.get_template(f"{template}.html").render(session=session, path=request.url.path, **values)
    return text.encode(errors="backslashreplace")  # a reason may quote half a surrogate pair


def _sent(request: Request, content: bytes, packed: bytes | None, status: int = 200) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store", "Vary": "Accept-Encoding, Cookie"}
    return _packed(request, content, packed, status, headers, "text/html; charset=utf-8")


def asset(request: Request, name: str) -> Response | None:
    """A file of the package; None when there is none of this name."""
    found = ASSETS.get(name)
    if found is None:
        return None
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    return _packed(request, found.content, found.packed, 200, headers, found.media_type)


def _packed(
    request: Request, content: bytes, packed: bytes | None, status: int, headers: dict[str, str], kind: str
) -> Response:
    if len(content) >= SMALL and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        content = gzip.compress(content, 6, mtime=0) if packed is None else packed
    return Response(content, status, headers, kind)


def install(app: FastAPI) -> None:
    """Answer errors on the pages of `app` with pages, in the words of the problems that its handlers write."""
    app.state.pages = {}
    for kind in (MaskfleetError, HTTPException, RequestValidationError, Exception):
        for known in [k for k in app.exception_handlers if isinstance(k, type) and issubclass(k, kind)]:
            app.exception_handlers[known] = _as_page(app.exception_handlers[known])
    app.add_exception_handler(SignIn, _sign_in)


def _as_page(handler: Any) -> Handler:
    if getattr(handler, "shown_as_page", False):
        return handler  # type: ignore[no-any-return]

    async def handle(request: Request, error: Any) -> Response:
        answer: Response = await handler(request, error)
        reads = "text/html" in request.headers.get("accept", "")
        if request.url.path.startswith(_API) or not reads or answer.media_type != MEDIA_TYPE:
            return answer
        problem = Problem.model_validate_json(bytes(answer.body))
        return page(request, "error", problem.status, title=problem.title, detail=problem.detail)

    handle.shown_as_page = True  # type: ignore[attr-defined]
    return handle


async def _sign_in(request: Request, _: Exception) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    where = f"{request.url.path}{query}" if request.method == "GET" else "/"
    address = "/login" if where == "/" else f"/login?next={quote(where, safe='/')}"
    return Response(status_code=303, headers={**HEADERS, "Location": address, "Cache-Control": "no-store"})
