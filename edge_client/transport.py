"""One request to a coordinator, and what its answer means. `edge_client.retry` repeats requests, `remote` uses both.

`Transport.send` is the only function that reaches the network. Every answer but a 2xx becomes an error:

    Transient     no usable answer this time: a connection error, a timeout, 408, 425, 429, 5xx, a captive portal
    ServerError   the coordinator's refusal, with its problem+json: the same request would be refused again

Redirects are not followed: the credential goes to the address the device was given and to no other.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from hashlib import sha256
from importlib.metadata import version

import httpx

from edge_client.errors import ConfigError, ServerError

TIMEOUT = 60.0  # seconds without a byte in either direction
RETRY_AFTER_LEAST, RETRY_AFTER_MOST = 0.5, 3600.0  # seconds: neither a busy loop nor a day's sleep on a server's word
MESSAGE_MOST = 1 << 18  # bytes of a JSON answer
BUSY = (408, 425, 429)  # statuses below 500 that ask for another try
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Transient(Exception):
    """No usable answer this time. `after` is set when the coordinator is alive and names the seconds to stay away."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def content_digest(data: bytes) -> str:
    """The `Content-Digest` header of RFC 9530."""
    return f"sha-256=:{b64encode(sha256(data).digest()).decode()}:"


class Transport:
    """One coordinator, spoken to by one device. `credential` is sent with every request once it is set."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` is httpx's, a seam for tests. Raises ConfigError for an address that is not http."""
        parsed = _parse(url)
        self.url = str(parsed).rstrip("/")
        self.secure = parsed.scheme == "https" or parsed.host in ("127.0.0.1", "localhost", "::1")
        self.credential: str | None = None
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

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @contextmanager
    def send(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None, wait: float = 0.0
    ) -> Iterator[httpx.Response]:
        """The 2xx answer to one request; the body is not read yet. Raises Transient, ServerError.

        `wait` is how many seconds the coordinator may hold its answer.
        """
        sent = {**self._headers, **headers}
        if self.credential is not None:
            sent["Authorization"] = f"Bearer {self.credential}"
        timeout = {"connect": TIMEOUT, "read": TIMEOUT + wait, "write": TIMEOUT, "pool": TIMEOUT}
        # httpx.Client.build_request merges addresses and headers, which costs more than sending.
        request = httpx.Request(method, self.url + path, headers=sent, content=content, extensions={"timeout": timeout})
        try:
            with closing(self._http.send(request, stream=True)) as response:
                _check(response)
                yield response
        except httpx.RequestError as error:
            raise Transient(f"{type(error).__name__}: {error}".rstrip(": ")) from None


def body(response: httpx.Response, most: int = MESSAGE_MOST) -> bytes:
    """The body of an answer. Raises Transient as soon as it is longer than `most` bytes."""
    if response.headers.get("Content-Encoding", "identity") != "identity":  # a small one can expand to any size
        raise Transient("its answer is compressed, which was not asked for")
    pieces, received = [], 0
    for chunk in response.iter_bytes():
        pieces.append(chunk)
        received += len(chunk)
        if received > most:
            raise Transient(f"its answer is longer than {most} bytes; it is not a coordinator's")
    return b"".join(pieces)


def _check(response: httpx.Response) -> None:
    """Raise what an answer other than 2xx means."""
    status = response.status_code
    if 200 <= status < 300:
        return
    after, problem = _retry_after(response.headers.get("Retry-After")), _problem(body(response))
    if status in BUSY or status >= 500:
        reason = f"it answered {status} {response.reason_phrase}".rstrip() + (f": {problem[0]}" if problem else "")
        raise Transient(reason, after if after is not None or status != 429 else RETRY_AFTER_LEAST)
    url = response.request.url
    if 300 <= status < 400:
        raise ServerError(f"{url} redirects to {response.headers.get('Location')}; use that address", status, "moved")
    detail, kind = problem or (f"{url} answered {status} and no explanation; is it a maskfleet coordinator?", "unknown")
    raise ServerError(detail, status, kind)


def _problem(data: bytes) -> tuple[str, str] | None:
    """Detail and kind of a coordinator's problem (RFC 9457); None when the bytes are something else."""
    try:
        problem = json.loads(data)
        return str(problem["detail"]), str(problem["type"]).rstrip("/").rpartition("/")[2]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, within this client's limits; None for none or nonsense."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, RETRY_AFTER_LEAST), RETRY_AFTER_MOST) if seconds == seconds else None


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is not the address of a coordinator; give one like https://fleet.example.org")
    return parsed
