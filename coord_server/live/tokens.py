"""The join tokens of one federation: made, listed, revoked. A device spends one use of a token when it enrols."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coord_server import auth
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from edge_client.protocol.messages import Phase
from edge_client.protocol.operator import JoinToken, TokenRequest, TokenSummary

log = logging.getLogger("maskfleet")


class JoinTokens:
    """The join tokens of federation `id`; only their digests are stored."""

    def __init__(self, metadata: Metadata, id_: str, clock: Callable[[], float]) -> None:
        self.id, self._metadata, self._clock = id_, metadata, clock

    async def new(self, request: TokenRequest, phase: Phase | None) -> JoinToken:
        """A fresh join token for the federation in its `phase`. Raises Refusal, StateError."""
        if phase == "stopped":
            raise Refusal("wrong-phase", f"{self.id} is stopped and enrols no more devices; create another federation")
        token, expires = auth.new_secret(), self._clock() + request.expires_in
        digest = auth.hashed(token)
        await asyncio.to_thread(self._metadata.add_token, digest, self.id, request.uses, expires)
        id_ = auth.token_id(digest)
        log.info("%s: the join token %s is made by the operator", self.id, id_, extra={"federation": self.id})
        return JoinToken(token=token, id=id_, federation=self.id, uses=request.uses, expires_at=expires)

    async def listed(self, after: str, limit: int) -> list[TokenSummary]:
        """The join tokens that were not revoked, by id beyond `after`. Raises StateError."""
        return [
            TokenSummary(id=auth.token_id(row.token), uses_left=row.uses_left, expires_at=row.expires_at)
            for row in await asyncio.to_thread(self._metadata.tokens, self.id, after, limit)
        ]

    async def revoke(self, token: str) -> None:
        """Revoke the join token of this id; devices that have joined with it stay. Raises Refusal, StateError."""
        if not await asyncio.to_thread(self._metadata.remove_token, self.id, token):
            where = f"`maskfleet federation tokens {self.id}` or GET .../tokens has them"
            raise Refusal("not-found", f"{self.id} has no join token {token}; {where}")
        log.info("%s: the join token %s is revoked by the operator", self.id, token, extra={"federation": self.id})
