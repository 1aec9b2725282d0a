"""Requests to one coordinator, repeated until they are answered: what is transient, how long to wait, when to give up.

Connection errors, timeouts, 5xx and answers that are not a coordinator's are tried again with exponential backoff and
full jitter until `patience` seconds have passed without a usable answer; 429 and 503 wait as long as Retry-After
says. Anything else the coordinator says is final: a ServerError carrying its problem+json. Bytes are checked against
their SHA-256, and files resume where they broke off. What the messages mean is `edge_client.client`'s business.
"""

from __future__ import annotations

import json
import random
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from edge_client.bundle import Part, digest
from edge_client.errors import BundleError, ConfigError, PayloadError, ServerError, UnreachableError, first_fault
from edge_client.events import Event, OnEvent
from edge_client.files import disk, write_whole

BACKOFF_FIRST = 0.5  # seconds: the longest first wait; doubled after each failure
BACKOFF_MOST = 60.0
TIMEOUT = 60.0  # seconds without a byte in either direction
RETRY_AFTER_MOST = 86400.0
MESSAGE_MOST = 1 << 18  # bytes of an answer that is no payload or part
DIGEST_TRIES = 3  # fetches of the same damaged bytes before giving up
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

T = TypeVar("T")


class _Transient(Exception):
    """No usable answer this time; `after` is the coordinator's own wish when it is alive but busy."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def content_digest(data: bytes, sha256_hex: str | None = None) -> str:
    """The `Content-Digest` header of RFC 9530; whoever knows the digest already gives it."""
    raw = sha256(data).digest() if sha256_hex is None else bytes.fromhex(sha256_hex)
    return f"sha-256=:{b64encode(raw).decode()}:"


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_MOST) if seconds == seconds else None


def _message(response: httpx.Response) -> bytes:
    """The body of an answer that is a message, read to its end unless that is further than any message's."""
    if response.headers.get("Content-Encoding", "identity") != "identity":  # a small one may unfold to any size
        raise _Transient("its answer is compressed, which was not asked for")
    pieces, received = [], 0
    for chunk in response.iter_bytes():
        pieces.append(chunk)
        received += len(chunk)
        if received > MESSAGE_MOST:
            raise _Transient(f"its answer is longer than {MESSAGE_MOST} bytes; it is not a coordinator's")
    return b"".join(pieces)


def _problem(body: bytes) -> tuple[str, str] | None:
    """Detail and kind of an answer that is a coordinator's problem (RFC 9457), None when it is not."""
    try:
        problem = json.loads(body)
        return str(problem["detail"]), str(problem["type"]).rstrip("/").rpartition("/")[2]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _check(response: httpx.Response) -> None:
    """Raise what a final answer other than 2xx means, whose body is still to be read."""
    status = response.status_code
    if 200 <= status < 300:
        return
    after, problem = _retry_after(response.headers.get("Retry-After")), _problem(_message(response))
    if status in (408, 425, 429) or status >= 500:
        reason = f"it answered {status} {response.reason_phrase}".rstrip() + (f": {problem[0]}" if problem else "")
        raise _Transient(reason, after if after is not None or status != 429 else BACKOFF_FIRST)
    url = response.request.url
    if 300 <= status < 400:
        raise ServerError(f"{url} redirects to {response.headers.get('Location')}; use that address", status, "moved")
    if problem is None:
        problem = f"{url} answered {status} and no explanation; is it a maskfleet coordinator?", "not-a-problem"
    detail, kind = problem
    raise ServerError(detail, status, kind)


class Transport:
    """One coordinator, spoken to by one device. `credential` is sent with every request once it is set."""

    def __init__(
        self,
        url: str,
        *,
        patience: float = 3600.0,
        on_event: OnEvent = lambda _: None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transport`, `sleep` and `clock` are seams for tests. Raises ConfigError for an address that is not http."""
        parsed = _parse(url)
        self.url = str(parsed).rstrip("/")
        self.secure = parsed.scheme == "https" or parsed.host in ("127.0.0.1", "localhost", "::1")
        self.credential: str | None = None
        self._patience, self._on_event, self._sleep, self._clock = patience, on_event, sleep or time.sleep, clock
        # A proxy of the environment is not asked for an address of this very machine.
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

    def pause(self, seconds: float) -> None:
        """Wait. Whoever calls has said for what."""
        self._sleep(seconds)

    def ask(
        self,
        method: str,
        path: str,
        answer: type[T] | TypeAdapter[T],
        what: str,
        *,
        body: BaseModel | None = None,
        wait: float | None = None,
    ) -> T:
        """Send a JSON message and read one. `wait` asks the coordinator to hold its answer so many seconds."""
        adapter = answer if isinstance(answer, TypeAdapter) else TypeAdapter(answer)
        content = None if body is None else body.model_dump_json().encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        return self._answer(method, path, adapter, what, content, headers, wait)

    def tell(self, method: str, path: str, body: BaseModel, what: str) -> None:
        """Send a JSON message whose answer has nothing to read."""
        content, headers = body.model_dump_json().encode(), {"Content-Type": "application/json"}
        self._persist(what, lambda: self._send(self._request(method, path, headers, content)))

    def put(
        self,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        answer: type[T],
        what: str,
        *,
        sha256_hex: str | None = None,
        wait: float | None = None,
    ) -> T:
        """Upload `content` with its Content-Digest. May be sent several times: the request must be idempotent.

        `sha256_hex` is the content's digest when it is known already; `wait` as in `ask`.
        """
        headers = {**headers, "Content-Digest": content_digest(content, sha256_hex)}
        return self._answer("PUT", path, TypeAdapter(answer), what, content, headers, wait)

    def fetch(self, path: str, sha256_hex: str, size: int, what: str) -> bytes:
        """Download `size` bytes with the given SHA-256; never reads more. Raises PayloadError."""
        for _ in range(DIGEST_TRIES):
            data = self._persist(what, lambda: self._read(path, size))
            if digest(data) == sha256_hex:
                return data
            self._on_event(Event("info", f"{what} arrived damaged; fetching it again"))
        raise PayloadError(
            f"{what} does not match its SHA-256 {sha256_hex[:12]}... after {DIGEST_TRIES} downloads; "
            f"check the link, or any proxy between here and {self.url}"
        )

    def fetch_file(self, path: str, part: Part, target: Path, what: str) -> None:
        """Download a bundle's part to `target`, going on where an earlier call broke off. Raises BundleError."""
        partial = target.with_name(target.name + ".partial")
        for _ in range(DIGEST_TRIES):
            data = self._persist(what, lambda: self._resume(path, part.size, partial))
            if digest(data) == part.sha256:
                write_whole(target, data)
                partial.unlink(missing_ok=True)
                return
            partial.unlink(missing_ok=True)
            self._on_event(Event("info", f"{what} arrived damaged; fetching it again"))
        raise BundleError(f"{what} does not match its SHA-256 after {DIGEST_TRIES} downloads; upload the bundle again")

    # --- one attempt

    def _request(
        self,
        method: str,
        path: str,
        extra: Mapping[str, str],
        content: bytes | None = None,
        read: float = TIMEOUT,
    ) -> httpx.Request:
        """A whole request. Made here, since `httpx.Client` merges addresses and headers at more cost than it sends."""
        headers = {**self._headers, **extra}
        if self.credential is not None:
            headers["Authorization"] = f"Bearer {self.credential}"
        timeout = {"connect": TIMEOUT, "read": read, "write": TIMEOUT, "pool": TIMEOUT}
        return httpx.Request(method, self.url + path, headers=headers, content=content, extensions={"timeout": timeout})

    def _answer(
        self,
        method: str,
        path: str,
        adapter: TypeAdapter[T],
        what: str,
        content: bytes | None,
        headers: Mapping[str, str],
        wait: float | None,
    ) -> T:
        if wait is not None:
            path = f"{path}?wait={wait:.3f}"

        def send() -> T:
            body = self._send(self._request(method, path, headers, content, TIMEOUT + (wait or 0.0)))
            try:
                return adapter.validate_json(body)
            except ValidationError as error:
                raise _Transient(f"its answer is not a coordinator's ({first_fault(error, 'answer')})") from None

        return self._persist(what, send)

    def _send(self, request: httpx.Request) -> bytes:
        """The message that answers a request. Raises what a final answer other than 2xx means."""
        with closing(self._http.send(request, stream=True)) as response:
            _check(response)
            return _message(response)

    @contextmanager
    def _get(self, path: str, extra: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer to a GET, whose body is still to be read. Raises what a final answer other than 2xx means."""
        with closing(self._http.send(self._request("GET", path, extra), stream=True)) as response:
            _check(response)
            yield response

    def _read(self, path: str, size: int) -> bytes:
        """The body of one GET, cut off one byte after `size`: what is too long will not match its digest."""
        pieces, received = [], 0
        with self._get(path, {}) as response:
            for chunk in response.iter_bytes():
                pieces.append(chunk)
                received += len(chunk)
                if received > size:
                    break
        return b"".join(pieces)

    def _resume(self, path: str, size: int, partial: Path) -> bytes:
        """Append to `partial` until it holds `size` bytes, and return them."""
        have = partial.stat().st_size if partial.is_file() else 0
        if have >= size:
            return partial.read_bytes()
        extra = {"Range": f"bytes={have}-"} if have else {}
        with self._get(path, extra) as response:
            # 200 instead of 206: this coordinator or a cache before it sends the whole again.
            append = response.status_code == 206
            with disk(partial), open(partial, "ab" if append else "wb") as file:
                received = have if append else 0
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    received += len(chunk)
                    if received > size:
                        break
        return partial.read_bytes()

    # --- again and again

    def _persist(self, what: str, send: Callable[[], T]) -> T:
        """Call `send` until it answers. Raises UnreachableError when nothing usable came for `patience` seconds."""
        failing_since: float | None = None
        failures = 0
        while True:
            try:
                return send()
            except _Transient as busy:
                reason, after = str(busy), busy.after
            except httpx.RequestError as error:
                reason, after = f"{type(error).__name__}: {error}".rstrip(": "), None
            now = self._clock()
            if after is not None:  # it is alive, and says how long to stay away
                failing_since, failures, delay = None, 0, after + random.uniform(0.0, BACKOFF_FIRST)
                text = f"{what}: {self.url} is busy ({reason}); asking again in {delay:.0f} s"
            else:
                failing_since = now if failing_since is None else failing_since
                left = self._patience - (now - failing_since)
                if left <= 0:
                    raise UnreachableError(
                        f"{what}: {self.url} gave no usable answer for {self._patience:.0f} s ({reason}); check the "
                        "address and the link, then run the same command again: nothing is lost"
                    )
                delay = min(random.uniform(0.0, min(BACKOFF_MOST, BACKOFF_FIRST * 2.0**failures)), left)
                failures += 1
                text = (
                    f"{what}: no usable answer from {self.url} ({reason}); trying again in {delay:.1f} s, "
                    f"giving up in {left:.0f} s"
                )
            self._on_event(Event("wait", text, seconds=delay))
            self.pause(delay)


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is not the address of a coordinator; give one like https://fleet.example.org")
    return parsed
