"""Tokens under `/v1`: those that devices join with, and those of viewers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from coord_server.http.access import FederationId, Operated
from coord_server.http.pages import LINK, Paged
from coord_server.http.problems import documented
from edge_client.protocol.operator import JoinToken, TokenRequest, TokenSummary, Viewer, ViewerRequest, ViewerToken
from edge_client.protocol.patterns import TOKEN_ID

router = APIRouter(prefix="/v1", tags=["operator"])

TokenId = Annotated[str, Path(pattern=TOKEN_ID, description="The token's id, from the list.")]


@router.post("/federations/{federation}/tokens", status_code=201, responses=documented("wrong-phase"))
async def make_join_token(served: Operated, federation: FederationId, request: TokenRequest) -> JoinToken:
    """The token is shown once; only its digest is kept. Refused for a stopped federation, which no device can join."""
    live = await served.find(federation)
    return await live.tokens.new(request, live.summary().phase)


@router.get("/federations/{federation}/tokens", responses=LINK)
async def list_join_tokens(served: Operated, federation: FederationId, page: Paged) -> list[TokenSummary]:
    """Every join token that was not revoked: its id, the uses left, when it expires. Never the token."""
    (after,) = page.after(str) or ("",)
    found = await (await served.find(federation)).tokens.listed(after, page.limit + 1)
    return list(page.cut(found, [(t.id,) for t in found]))


@router.delete("/federations/{federation}/tokens/{id}", status_code=204, response_class=Response)
async def revoke_join_token(
    served: Operated, federation: FederationId, id_: Annotated[TokenId, Path(alias="id")]
) -> None:
    """No further device joins with it; those that have joined stay."""
    await (await served.find(federation)).tokens.revoke(id_)


@router.post("/viewers", status_code=201)
async def make_viewer_token(served: Operated, request: ViewerRequest) -> ViewerToken:
    """The token is shown once; only its digest is kept. It may GET everything but secrets, and change nothing."""
    return await served.roles.new_viewer(request)


@router.get("/viewers", responses=LINK)
async def list_viewer_tokens(served: Operated, page: Paged) -> list[Viewer]:
    """Every viewer's token that was not revoked: its id and when it expires."""
    after = page.after(str) or ()
    found = [v for v in await served.roles.viewers() if (v.id,) > after]
    return list(page.cut(found, [(v.id,) for v in found]))


@router.delete("/viewers/{id}", status_code=204, response_class=Response)
async def revoke_viewer_token(served: Operated, id_: Annotated[TokenId, Path(alias="id")]) -> None:
    """Other coordinators on the same data folder refuse it within a second."""
    await served.roles.remove_viewer(id_)
