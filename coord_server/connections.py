"""Connections: how many there may be at once, and how long one may hold its place without asking anything.

Who takes up a place and says nothing is let go, so that nobody can keep the fleet out for long. What a request may do
is the API's business; the body of one that is being read has its own patience in `api.wire`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coord_server.api.problems import problem
from edge_client.errors import ConfigError

try:
    import resource
except ImportError:  # not a POSIX system: nothing is known of its limit
    resource = None  # type: ignore[assignment]

MOST = 8192  # connections at once: each takes some ten kilobytes
SPARE = 64  # connections beyond those that are told why they have to come again; any more are closed unheard
OWN_FILES = 128  # descriptors kept for the database, the blobs and the like
PATIENCE = 20.0  # seconds until a request's head must be whole
BUSY_PATIENCE = 2.0  # the same for those beyond the limit
PIECE = 4096  # bytes of a body that was answered already, at least, within PATIENCE: what follows is not read
UNACKNOWLEDGED = 120  # seconds until a caller that takes nothing of its answer any more is given up
AGAIN = "5"  # seconds until a refused caller is to come again
COMPLAIN = 60.0  # seconds between two log lines on the same trouble

log = logging.getLogger("maskfleet")


def room(most: int) -> int:
    """How many connections there can be, at most `most`, having raised this process's limit of open files for them.

    Each may have a file open beside its socket. Raises ConfigError.
    """
    if resource is None:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (most + SPARE) + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # a system may allow less than it says: then it stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = most if soft == resource.RLIM_INFINITY else min(most, (soft - OWN_FILES) // 2 - SPARE)
    if found < 1:
        raise ConfigError(f"`ulimit -n` is {soft}, too few files to serve anybody; raise it to {needed}")
    if found < most:
        log.warning("%d connections at once, not %d: `ulimit -n` is %d; raise it to %d", found, most, soft, needed)
    return found


class _Taken(socket.socket):
    """A caller's socket, which its listening socket counts until it is closed."""

    def __init__(self, taken: socket.socket, listening: Listening) -> None:
        super().__init__(fileno=taken.detach())
        self._listening: Listening | None = listening
        listening.taken += 1

    def close(self) -> None:
        """Close it."""
        if self._listening is not None:
            self._listening.taken -= 1
            self._listening = None
        super().close()


class Listening(socket.socket):
    """A listening socket that hangs up on callers beyond `most` and `SPARE`, and when no descriptor is left.

    `taken` counts its callers, those too whose TLS handshake is not done, of whom no protocol knows.
    """

    def __init__(self, host: str, port: int, most: int = MOST) -> None:
        """Bind. Raises ConfigError."""
        self.taken, self._most = 0, most
        # With the protocol named, asyncio turns Nagle's delay off: else an answer may wait 40 ms for its last segment.
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._complained = -COMPLAIN
        self._kept = os.open(os.devnull, os.O_RDONLY)  # given up for a moment to take a caller off the queue
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED * 1000)
            self.bind((host, port))
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None

    def close(self) -> None:
        """Close it and what it keeps."""
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1
        super().close()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next caller. Raises BlockingIOError when there is none, or none that there is a place for."""
        try:
            taken, caller = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._kept < 0:
                raise
            self._turn_away()
            raise BlockingIOError(errno.EAGAIN, "no descriptor is left") from None
        if self.taken >= self._most + SPARE:
            taken.close()
            raise BlockingIOError(errno.EAGAIN, "no place is left")
        return _Taken(taken, self), caller

    def _turn_away(self) -> None:
        """Take a caller off the queue and hang up: one that is left there would wake the event loop for ever."""
        if time.monotonic() - self._complained >= COMPLAIN:
            self._complained = time.monotonic()
            log.error("callers are turned away: no more files can be opened; raise `ulimit -n`")
        os.close(self._kept)
        self._kept = -1
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):
            self._kept = os.open(os.devnull, os.O_RDONLY)


def hurry_handshakes(loop: asyncio.AbstractEventLoop) -> None:
    """Give TLS handshakes of the servers made on `loop` the time of a head: uvicorn has no setting for it."""
    loop.create_server = partial(loop.create_server, ssl_handshake_timeout=PATIENCE)  # type: ignore[method-assign]


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of those for whom there is no place."""
    detail = "the coordinator has as many connections as it can serve; come again in a few seconds"
    await problem("too-busy", detail, {"Retry-After": AGAIN, "Connection": "close"})(scope, receive, send)


class Connection(H11Protocol):
    """uvicorn's HTTP connection, closed when it asks nothing. `limit_concurrency` is how many there may be at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's own answer is no problem+json
        self._timer: asyncio.TimerHandle | None = None
        self._for: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
        self._came = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """There is a caller."""
        super().connection_made(transport)
        over = 0 if self._most is None else len(self.connections) - self._most
        if over > 0:
            self.app = _busy
        self._wait(h11.IDLE, BUSY_PATIENCE if over > 0 else PATIENCE)

    def data_received(self, data: bytes) -> None:
        """The caller said something."""
        super().data_received(data)
        caller = self.conn.their_state
        if caller is h11.IDLE:
            if self._for is not h11.IDLE:
                self._wait(h11.IDLE, PATIENCE)
        elif caller is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._came += len(data)
            if self._for is not h11.SEND_BODY or self._came >= PIECE:
                self._wait(h11.SEND_BODY, PATIENCE)
        else:
            self._wait(None, 0.0)

    def on_response_complete(self) -> None:
        """The answer is out; of a request that was answered unread, nothing is kept."""
        self.cycle.body = bytearray()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller is gone."""
        self._wait(None, 0.0)
        super().connection_lost(exc)

    def _wait(self, part: type[h11.IDLE] | type[h11.SEND_BODY] | None, seconds: float) -> None:
        """Give the caller `seconds` for the head (IDLE) or a piece of the body, or any time at all (None)."""
        if self._timer is not None:
            self._timer.cancel()
        self._for, self._came = part, 0
        self._timer = None if part is None else self.loop.call_later(seconds, self._let_go)

    def _let_go(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
