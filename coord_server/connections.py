"""Room for connections: which ones are closed, and in which order, when a new one needs a place.

At the limit, a new connection replaces one that has no request, or whose request has shown no valid credential: the
oldest of the address with most of those, so that a caller who opens many displaces its own. A connection younger than
YOUNG seconds is spared while there are long polls: then the oldest long poll is answered at once and its connection is
closed. When neither is left, new callers get a 503, except the operator.

uvicorn has no time limit for a request's head, and answers its own limit on connections to every caller alike; hence
the small subclass of its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coord_server.problems import MEDIA_TYPE, message

MOST = 8192  # connections at once; each takes some ten kilobytes
SPARE = 64  # connections beyond the limit whose request is still read, in case it is the operator's
YOUNG = 5.0  # seconds that a connection has to show its credential before a long poll is preferred to it
PATIENCE = 20.0  # seconds until a request's head must be complete

T = TypeVar("T")
Poll = tuple[str, str]  # federation and device


class Places:
    """The connections and long polls of one server process."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.open: set[Connection] = set()
        self._unproven: dict[str, dict[Connection, float]] = {}  # since when, by address; the oldest first
        self._polls: dict[Poll, tuple[asyncio.Future[Any], Connection | None]] = {}  # the oldest first

    def full(self, connection: Connection | None) -> bool:
        """Whether there are more connections than places, and none beside `connection` that can be closed."""
        if connection is None or len(self.open) <= self.most:
            return False
        self.proven(connection)
        full = not self._make_room()
        self.unproven(connection)
        return full

    def enter(self, connection: Connection) -> bool:
        """Take a place for a connection, if need be by closing another one; False when the new one has to be closed."""
        if len(self.open) >= self.most and not self._make_room() and len(self.open) >= self.most + SPARE:
            return False
        self.open.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """The connection is closed."""
        self.open.discard(connection)
        self.proven(connection)

    def unproven(self, connection: Connection) -> None:
        """The connection has no request, or one of an unknown caller: it may be closed."""
        if connection in self.open:
            self._unproven.setdefault(connection.address, {}).setdefault(connection, time.monotonic())

    def proven(self, connection: Connection) -> None:
        """The request under way is the operator's or a device's."""
        of_address = self._unproven.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._unproven.pop(connection.address, None)

    async def hold(self, poll: Poll, answer: Coroutine[Any, Any, T], connection: Connection | None) -> T | None:
        """The answer of a long poll; None when it had to give up its place first.

        A device has one long poll at a time: a newer one ends the older one, whose link may have broken.
        """
        self._let_go(poll)
        task = asyncio.ensure_future(answer)
        entry = self._polls[poll] = task, connection
        try:
            return await task
        except asyncio.CancelledError:
            if self._polls.get(poll) is not entry and task.cancelled():
                return None
            raise
        finally:
            if self._polls.get(poll) is entry:
                del self._polls[poll]

    def _let_go(self, poll: Poll) -> None:
        found = self._polls.pop(poll, None)
        if found is not None:
            task, connection = found
            task.cancel()
            if connection is not None:  # its answer has Connection: close
                self.leave(connection)

    def _make_room(self) -> bool:
        if self._unproven:
            address = max(self._unproven, key=lambda a: len(self._unproven[a]))
            connection, since = next(iter(self._unproven[address].items()))
            many, old = len(self._unproven[address]) > SPARE, time.monotonic() - since > YOUNG
            if many or old or not self._polls:
                self.leave(connection)
                connection.transport.abort()
                return True
        if self._polls:
            self._let_go(next(iter(self._polls)))
            return True
        return False


class Connection(H11Protocol):
    """uvicorn's HTTP connection with a place in `Places` and a time limit for the head of a request."""

    def __init__(
        self,
        places: Places,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self.address = ""
        self._places = places
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or close."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._places.enter(self):
            self._places.unproven(self)
            self._start_timer()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived: part of a head, or of a body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # a request is under way
        elif self._timer is None or self.conn.their_state is h11.SEND_BODY:
            self._start_timer()

    def on_response_complete(self) -> None:
        """The answer is sent. What was received of an unread body is dropped."""
        self.cycle.body = bytearray()
        self._places.unproven(self)
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self._start_timer()  # the rest of an unread body has to arrive piece by piece

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        self._stop_timer()
        self._places.leave(self)
        super().connection_lost(exc)
        self.app_state = {}  # which refers to this connection

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with a problem, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun, and cannot become another
            body = message("bad-request", f"{msg} Send HTTP/1.1 as RFC 9112 defines it").model_dump_json().encode()
            headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body)), "Connection": "close"}
            for event in (
                h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
