"""One request to a coordinator, and what its answer means. `retry` repeats requests, `remote` uses both.

`Transport.send` is the only function that reaches the network. Every answer but a 2xx becomes an error:

    Transient     no usable answer this time: a connection error, a timeout, 408, 425, 429, 5xx, a web page
    ServerError   the coordinator's refusal, with its problem+json: the same request would be refused again

Redirects are not followed: the credential goes to the address the device was given and to no other. Every request has
a total time, however many bytes arrive: httpx limits only the wait for the next one.
"""

from __future__ import annotations

import json
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from hashlib import sha256
from importlib.metadata import version
from threading import Timer
from typing import Any

import httpx

from edge_client.errors import ConfigError, ServerError

TIMEOUT = 60.0  # seconds without a byte in either direction, and in all for a request without a large body
LEAST_RATE = 1000.0  # bytes a second, averaged over a large body, below which a request is cut off
RETRY_AFTER_LEAST, RETRY_AFTER_MOST = 0.5, 3600.0  # seconds: neither a busy loop nor a day's sleep
MESSAGE_MOST = 1 << 18  # bytes of a JSON answer
PIECE = 1 << 16  # bytes of a body sent at a time: httpcore copies what is left of one after every write to the socket
BUSY = (408, 425, 429)  # statuses below 500 that ask for another try
PORTAL = "a network that asks people to log in answers so"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Transient(Exception):
    """No usable answer this time. `after` are the seconds that a coordinator which answers asks to wait."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def content_digest(data: bytes) -> str:
    """The `Content-Digest` header of RFC 9530."""
    return f"sha-256=:{b64encode(sha256(data).digest()).decode()}:"


class Transport:
    """The connection of one device to its coordinator. `credential` is sent with every request once it is set."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` is httpx's, a seam for tests. Raises ConfigError for an address that is not http."""
        parsed = address(url)
        self.url = str(parsed).rstrip("/")
        self.secure = parsed.scheme == "https" or parsed.host in ("127.0.0.1", "localhost", "::1")
        self.credential: str | None = None
        self._streams: list[Any] = []
        # A proxy from the environment is not used for this machine's own addresses.
        mounts = {f"all://{host}": None for host in LOOPBACK} if transport is None else None
        self._http = httpx.Client(
            transport=transport,
            mounts=mounts,
            verify=parsed.scheme == "https",  # reading the certificates takes a fifth of a second
        )
        self._headers = {
            "User-Agent": f"maskfleet/{version('maskfleet')}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
        }

    def name_engine(self, engine: str) -> None:
        """Send the name of the training engine too: the operator sees it beside the version."""
        self._headers["User-Agent"] = f"maskfleet/{version('maskfleet')} ({engine})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @contextmanager
    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        wait: float = 0.0,
        size: int = 0,
    ) -> Iterator[httpx.Response]:
        """The 2xx answer to one request; the body is not read yet. Raises Transient, ServerError.

        `wait` is how many seconds the coordinator may hold its answer, `size` the bytes of a large one.
        """
        sent = {**self._headers, **headers}
        if self.credential is not None:
            sent["Authorization"] = f"Bearer {self.credential}"
        timeout = {"connect": TIMEOUT, "read": TIMEOUT + wait, "write": TIMEOUT, "pool": TIMEOUT}
        # httpx.Client.build_request merges addresses and headers, which costs more than sending.
        limit = Limit(TIMEOUT + wait + (len(content or b"") + size) / LEAST_RATE, self._streams)
        extensions = {"timeout": timeout, "trace": limit.trace}
        pieces = None
        if content is not None:
            sent["Content-Length"] = str(len(content))
            pieces = (content[low : low + PIECE] for low in range(0, len(content), PIECE))
        request = httpx.Request(method, self.url + path, headers=sent, content=pieces, extensions=extensions)
        try:
            with limit, closing(self._http.send(request, stream=True)) as response:
                _check(response)
                yield response
        except (httpx.RequestError, httpx.InvalidURL) as error:  # the second: a redirect to what is no address
            raise Transient(limit.late or broken(error)) from None


class Limit(Timer):
    """Cuts the connection when a request takes too long, from a thread of its own: httpcore skips 1xx answers unseen.

    `streams` has the open connection, which a later request may use again.
    """

    def __init__(self, seconds: float, streams: list[Any]) -> None:
        super().__init__(seconds, self._cut)
        self.daemon, self._streams, self.late = True, streams, ""

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Called by httpcore at each step of a request: keeps the new connection, or its TLS layer."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._streams[:] = [info["return_value"]]
        if self.late:  # the time ended within a TLS handshake, where no socket can be shut down
            raise httpx.ReadTimeout(self.late)

    def _cut(self) -> None:
        self.late = f"it was not done after {self.interval:.0f} s"
        for stream in self._streams:
            with suppress(OSError):  # it is closed; an SSLSocket's own shutdown would disturb a read under way
                socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)


def broken(error: Exception) -> str:
    """Why a request got no answer, in words."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if "WRONG_VERSION_NUMBER" in text:
        return f"{text}; the server does not speak TLS there: is its address http:// and not https://?"
    if "CERTIFICATE_VERIFY_FAILED" not in text:
        return text
    if "expired" in text or "not yet valid" in text:
        return f"{text}; the clock here says {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    return f"{text}; set SSL_CERT_FILE to a certificate to trust"


def body(response: httpx.Response) -> bytes:
    """The body of an answer. Raises Transient as soon as it is longer than MESSAGE_MOST."""
    pieces, received = [], 0
    for chunk in response.iter_bytes():
        pieces.append(chunk)
        received += len(chunk)
        if received > MESSAGE_MOST:
            raise Transient(f"its answer is longer than {MESSAGE_MOST} bytes; it is not a coordinator's")
    return b"".join(pieces)


def _check(response: httpx.Response) -> None:
    """Raise what an answer other than 2xx means, and refuse a compressed one: a small one can expand to any size."""
    status = response.status_code
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise Transient("its answer is compressed, which was not asked for")
    if 200 <= status < 300:
        page = response.headers.get("Content-Type", "").lower().startswith("text/html")
        if page and status != 204:  # to an answer without a body some proxies add their default type
            raise Transient(f"it answered with a web page; {PORTAL}")
        return
    after, problem = _retry_after(response.headers), refusal(body(response))
    if status in BUSY or status >= 500:
        phrase = httpx.codes.get_reason_phrase(status)  # what a proxy writes may quote the request, with its secrets
        reason = f"it answered {status} {phrase}".rstrip() + (f": {problem[0]}" if problem else "")
        raise Transient(reason, after if after is not None or status != 429 else RETRY_AFTER_LEAST)
    url = response.request.url
    if status in (301, 308):
        to, base = redirected(url, response.headers.get("Location", ""))
        raise ServerError(f"{url} redirects to {to}; use {base}", status, "moved")
    if problem is None:  # a proxy's page, or the login page of a network: not the coordinator's answer
        raise Transient(f"{url} answered {status} and no explanation; is it a maskfleet coordinator? {PORTAL}")
    raise ServerError(problem[0], status, problem[1])


def redirected(asked: httpx.URL, location: str) -> tuple[str, str]:
    """Where a redirect leads, and that address without the path below the coordinator's, which begins with /v1/."""
    to, (_, version_1, rest) = str(asked.join(location)), str(asked).partition("/v1/")
    return to, to.removesuffix(version_1 + rest)


def refusal(data: bytes) -> tuple[str, str] | None:
    """Detail and kind of a coordinator's problem (RFC 9457); None when the bytes are something else."""
    try:
        problem = json.loads(data)
        return str(problem["detail"]), str(problem["type"]).rstrip("/").rpartition("/")[2]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, within this client's limits; None for none or nonsense.

    A date counts from the answer's own date: the clock of a small device may begin in 1970.
    """
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(timezone.utc)
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, RETRY_AFTER_LEAST), RETRY_AFTER_MOST) if seconds == seconds else None


def address(url: str) -> httpx.URL:
    """A coordinator's address. Raises ConfigError for one that is not http."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"{url!r} is not the address of a coordinator; give one like https://fleet.example.org or "
            "http://127.0.0.1:8750"
        )
    return parsed
