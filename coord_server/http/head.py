"""HEAD wherever there is a GET, which FastAPI does not add: the same status and headers, no body (RFC 9110, 9.3.2)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ASKED = "maskfleet.head"  # where the scope says that a GET was a HEAD


class Head:
    """ASGI middleware: the application answers a HEAD as a GET, and nothing is sent after the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def bodiless(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body"})  # a stream sees that its reader has gone

        await self._app({**scope, "method": "GET", _ASKED: True}, receive, bodiless)


def sent(request: Request, answer: Response) -> int:
    """Bytes of an answer's body that its caller gets: none after a HEAD."""
    return 0 if _ASKED in request.scope else int(answer.headers.get("Content-Length", 0))
