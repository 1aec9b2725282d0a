"""Tokens under `/v1`: those that devices join with, and those of viewers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from coord_server.http.access import FederationId, Operated
from edge_client.protocol.messages import TOKEN_ID, JoinToken, TokenRequest, Viewer, ViewerRequest, ViewerToken

router = APIRouter(prefix="/v1", tags=["operator"])

TokenId = Annotated[str, Path(pattern=TOKEN_ID, description="The token's id, from the list.")]


@router.post("/federations/{federation}/tokens", status_code=201)
async def make_join_token(served: Operated, federation: FederationId, request: TokenRequest) -> JoinToken:
    """The token is shown once; only its digest is kept."""
    return await served.new_token(federation, request)


@router.post("/viewers", status_code=201)
async def make_viewer_token(served: Operated, request: ViewerRequest) -> ViewerToken:
    """The token is shown once; only its digest is kept. It may GET everything but secrets, and change nothing."""
    return await served.new_viewer(request)


@router.get("/viewers")
async def list_viewer_tokens(served: Operated) -> list[Viewer]:
    """Every viewer's token that was not revoked: its id and when it expires."""
    return await served.viewers()


@router.delete("/viewers/{id}", status_code=204)
async def revoke_viewer_token(served: Operated, id_: Annotated[TokenId, Path(alias="id")]) -> None:
    """Other coordinators on the same data folder refuse it within a second."""
    await served.remove_viewer(id_)
