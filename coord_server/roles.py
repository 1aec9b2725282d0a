"""Whose a token is: the operator's, a viewer's, or of neither. Viewers' tokens are made, listed and revoked here.

Join tokens and devices' credentials belong to one federation: `live.tokens` and `live.devices` hold them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from coord_server import auth
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from edge_client.protocol.operator import Viewer, ViewerRequest, ViewerToken

log = logging.getLogger("maskfleet")

Role = Literal["operator", "viewer"]


class Roles:
    """The operator and the viewers of one data folder. `operator` is the operator's token."""

    def __init__(self, metadata: Metadata, operator: str, clock: Callable[[], float]) -> None:
        self._metadata, self._clock = metadata, clock
        self._operator = auth.hashed(operator)
        self._viewers: dict[str, float] = {}  # when each viewer's token expires, by its SHA-256

    async def look(self) -> None:
        """Read which viewers there are, also those of other coordinators of the data folder. Raises StateError."""
        self._viewers = await asyncio.to_thread(self._metadata.viewers)

    def of(self, token: str) -> Role | None:
        """Whose token this is. One made or revoked at another coordinator counts here after the next `look`."""
        digest = auth.hashed(token)
        if auth.same(digest, self._operator):
            return "operator"
        return "viewer" if self._clock() < self._viewers.get(digest, 0.0) else None

    def named(self, id_: str) -> tuple[Role, str] | None:
        """The role and the SHA-256 of the operator's or a viewer's token with this id; None when none is valid."""
        if id_ == auth.token_id(self._operator):
            return "operator", self._operator
        valid = (d for d, expires in self._viewers.items() if auth.token_id(d) == id_ and self._clock() < expires)
        digest = next(valid, None)
        return None if digest is None else ("viewer", digest)

    async def new_viewer(self, request: ViewerRequest) -> ViewerToken:
        """A fresh token that may read; only its digest is stored. Raises StateError."""
        token, expires = auth.new_secret(), self._clock() + request.expires_in
        await asyncio.to_thread(self._metadata.add_viewer, auth.hashed(token), expires)
        id_ = auth.token_id(auth.hashed(token))
        log.info("the viewer's token %s is made by the operator", id_)
        await self.look()
        return ViewerToken(token=token, id=id_, expires_at=expires)

    async def viewers(self) -> list[Viewer]:
        """Every viewer's token that was not revoked, in the order of ids. Raises StateError."""
        found = await asyncio.to_thread(self._metadata.viewers)
        return [Viewer(id=auth.token_id(token), expires_at=expires) for token, expires in found.items()]

    async def remove_viewer(self, id_: str) -> None:
        """Revoke a viewer's token. Raises Refusal, StateError."""
        if not await asyncio.to_thread(self._metadata.remove_viewer, id_):
            where = "`maskfleet federation viewers` or GET /v1/viewers has them"
            raise Refusal("not-found", f"there is no viewer's token {id_}; {where}")
        log.info("the viewer's token %s is revoked by the operator", id_)
        await self.look()
