"""A coordinator's messages, payloads and files, each request repeated until it is answered.

Downloads are checked against their SHA-256. Their size is known beforehand: it is compared with the free disk, and
nothing beyond it is read. A file continues where an earlier download broke off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from edge_client.bundle import Part, digest
from edge_client.errors import ServerError, UnreachableError, first_fault
from edge_client.files import append, check_room, digest_of, disk
from edge_client.link.retry import Retry, backoff
from edge_client.link.transport import Transient, Transport, body, content_digest

DOWNLOADS = 5  # tries of a download whose bytes do not match their digest

T = TypeVar("T")
JSON = {"Content-Type": "application/json"}


class Remote:
    """What a device asks of its coordinator."""

    def __init__(self, transport: Transport, retry: Retry) -> None:
        self.transport, self.retry = transport, retry

    def ask(
        self,
        method: str,
        path: str,
        answer: type[T] | TypeAdapter[T],
        what: str,
        *,
        message: BaseModel | None = None,
        wait: float | None = None,
    ) -> T:
        """Send a JSON message and read one. `wait` asks the coordinator to hold its answer so many seconds."""
        content = None if message is None else message.model_dump_json().encode()
        return self._answer(method, path, {} if message is None else JSON, content, answer, what, wait)

    def tell(self, method: str, path: str, message: BaseModel, what: str, headers: Mapping[str, str] = {}) -> None:
        """Send a JSON message whose answer has no body."""
        content = message.model_dump_json().encode()

        def attempt() -> None:
            with self.transport.send(method, path, {**JSON, **headers}, content) as response:
                if body(response):
                    raise Transient("its answer is not a coordinator's: it has a body")

        self.retry(what, attempt)

    def put(
        self,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        answer: type[T],
        what: str,
        wait: float | None = None,
    ) -> T:
        """Upload `content` with its digest; it may be sent several times, so the request must be idempotent.

        `wait` as in `ask`. An upload that arrived damaged is sent again.
        """
        headers = {**headers, "Content-Digest": content_digest(content)}
        return self._answer("PUT", path, headers, content, answer, what, wait)

    def fetch(self, path: str, most: int, sha256_hex: str, what: str) -> bytes:
        """Download at most `most` bytes with the given SHA-256. Raises UnreachableError when they stay damaged."""

        def attempt() -> bytes | None:
            with self.transport.send("GET", path, {}, size=most) as response:
                data = None if _announced(response) > most else b"".join(_chunks(response, most))
            return data if data is not None and digest(data) == sha256_hex else None

        return self._undamaged(what, attempt)

    def fetch_file(self, path: str, part: Part, partial: Path, what: str) -> None:
        """Download a bundle's part to `partial`, continuing what is there. Raises StateError, UnreachableError."""

        def attempt() -> bool | None:
            self._resume(path, part.size, partial)
            if digest_of(partial) == part.sha256:
                return True
            with disk(partial):
                partial.unlink(missing_ok=True)
            return None

        self._undamaged(what, attempt)

    def _resume(self, path: str, size: int, partial: Path) -> None:
        """Append to `partial` until it holds `size` bytes or the answer ends."""
        with disk(partial):
            have = partial.stat().st_size if partial.is_file() else 0
        if have >= size:
            return
        check_room(partial, size - have)
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self.transport.send("GET", path, headers, size=size - have) as response:
            if response.status_code != 206:  # this coordinator, or a cache before it, sends the whole again
                have = 0
            append(partial, have, _chunks(response, size - have))

    def _undamaged(self, what: str, attempt: Callable[[], T | None]) -> T:
        """What `attempt` returns once it is not None, tried again after growing waits."""
        for failures in range(DOWNLOADS):
            found = self.retry(what, attempt)
            if found is not None:
                return found
            if failures < DOWNLOADS - 1:
                delay = 1.0 + backoff(failures + 1)
                self.retry.pause(delay, f"{what}: the bytes arrived damaged; fetching them again in {delay:.0f} s")
        raise UnreachableError(
            f"{what}: the bytes do not match their SHA-256 after {DOWNLOADS} downloads; check the link and any proxy "
            f"between here and {self.transport.url}; for a model part, the operator can upload the bundle again"
        )

    def _answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None,
        answer: type[T] | TypeAdapter[T],
        what: str,
        wait: float | None,
    ) -> T:
        adapter = answer if isinstance(answer, TypeAdapter) else TypeAdapter(answer)
        if wait is not None:
            path = f"{path}?wait={wait:.3f}"

        def attempt() -> T:
            try:
                with self.transport.send(method, path, headers, content, wait or 0.0) as response:
                    data = body(response)
            except ServerError as error:
                if error.kind == "bad-digest":
                    raise Transient(str(error)) from None
                raise
            try:
                return adapter.validate_json(data)
            except ValidationError as error:
                raise Transient(f"its answer is not a coordinator's ({first_fault(error, 'answer')})") from None

        return self.retry(what, attempt)


def _announced(response: httpx.Response) -> int:
    """The Content-Length of an answer, 0 where it has none."""
    length = response.headers.get("Content-Length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0


def _chunks(response: httpx.Response, most: int) -> Iterator[bytes]:
    """The first `most` bytes of a body, so that a longer one fails its digest."""
    for chunk in response.iter_bytes():  # as they came: `Transport.send` refuses a compressed answer
        yield chunk[:most]
        most -= len(chunk)
        if most < 0:
            return
