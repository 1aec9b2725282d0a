"""Lists in pages, one scheme for all: `limit`, an opaque `cursor`, and a `Link` header (RFC 8288) to the next page.

The cursor is the place of the page's last item in the list's order, so that items that come and go between two requests
move no other item. The link is relative, because a proxy may serve the coordinator below a path of its own.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request, Response

from coord_server.http.openapi import headers
from coord_server.problems import Refusal
from edge_client.protocol.messages import MAX_ROUNDS

MOST = 1000  # items of a page, also without `limit`: small installations see all on one page

T = TypeVar("T")
LINK: dict[int | str, dict[str, Any]] = {
    200: {"headers": headers({"Link": '`<?...>; rel="next"` when there are more.'})}
}
"""What the answer of every list has in the OpenAPI document."""


@dataclass(frozen=True)
class Page:
    """One page that was asked for."""

    limit: int
    request: Request
    response: Response
    _cursor: str | None

    def after(self, *like: type) -> tuple[Any, ...] | None:
        """The place that the page begins beyond, a value of each type; None at the list's beginning. Raises Refusal."""
        if self._cursor is None:
            return None
        try:
            found = json.loads(urlsafe_b64decode(self._cursor.encode()))
            if isinstance(found, list) and [type(v) for v in found] == list(like) and all(map(_plain, found)):
                return tuple(found)
        except ValueError:
            pass
        raise Refusal("bad-message", f"cursor = {self._cursor!r} is not of this list; take it from the Link header")

    def cut(self, items: Sequence[T], places: Sequence[tuple[Any, ...]]) -> Sequence[T]:
        """The page of `items` that were read, one more than it holds if there are more; `places` are theirs."""
        if len(items) > self.limit:
            text = json.dumps(places[self.limit - 1], separators=(",", ":")).encode()
            url = self.request.url.include_query_params(cursor=urlsafe_b64encode(text).decode(), limit=self.limit)
            self.response.headers["Link"] = f'<?{url.query}>; rel="next"'
        return items[: self.limit]


def _plain(value: Any) -> bool:
    """Whether every database takes the value: a list's own cursors hold names, digests, times and round numbers."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable()
    return bool(abs(value) < (MAX_ROUNDS if isinstance(value, int) else 2**53))


async def page(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MOST, description="The most items of the answer.")] = MOST,
    cursor: Annotated[str | None, Query(max_length=400, description="From the Link header of the page before.")] = None,
) -> Page:
    """The page that a request asks for."""
    return Page(limit, request, response, cursor)


Paged = Annotated[Page, Depends(page)]
