"""HTTP behind a proxy that loses answers: the request is carried out, its sender does not learn it."""

from __future__ import annotations

from collections.abc import Callable

import httpx


class Lossy(httpx.BaseTransport):
    """Loses the first answer to each method and path, and calls `then`."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._http, self._then, self.asked = httpx.HTTPTransport(), then, list[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer, asked = self._http.handle_request(request), f"{request.method} {request.url.path}"
        self.asked.append(asked)
        if self.asked.count(asked) > 1:
            return answer
        answer.read()
        answer.close()
        self._then()
        raise httpx.ReadError("the proxy has gone")
