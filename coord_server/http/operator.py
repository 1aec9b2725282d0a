"""The operator's side of `/v1`: bundles, federations, tokens, devices, rounds, the final state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from coord_server import events
from coord_server.coordinator import Coordinator
from coord_server.http import bodies
from coord_server.http.access import BundleDigest, FederationId, Operated, Served
from coord_server.http.openapi import MANIFEST_SCHEMA
from coord_server.http.problems import STORAGE, documented
from coord_server.problems import Refusal
from edge_client.protocol.messages import (
    BundleReceipt,
    Device,
    Federation,
    FederationConfig,
    Health,
    JoinToken,
    Name,
    Round,
    TokenRequest,
)
from edge_client.protocol.payload import MEDIA_TYPE

MANIFEST_LIMIT = 64 << 20  # bytes; a manifest grows with the number of tensors, not of parameters

router = APIRouter(prefix="/v1", tags=["operator"])
_COMMON = ("unauthorized", "not-found", "bad-message", *STORAGE)
_OF_ONE = (*_COMMON, "not-loaded")

_STATE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the method's global state after the last closed round, one safetensors file",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("/health", summary="Is the coordinator up", tags=["health"])
async def health(served: Served) -> Health:
    """No token needed."""
    return Health(version=version("maskfleet"), federations=len(served.federations()))


# --- bundles


@router.post(
    "/bundles",
    summary="Upload a bundle's manifest",
    status_code=201,
    responses=documented(*_COMMON, "too-large", "bad-bundle"),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": MANIFEST_SCHEMA}}}},
)
async def post_bundle(request: Request, served: Operated) -> BundleReceipt:
    """The body is `manifest.json` byte for byte; its SHA-256 is the bundle's address. PUT the missing parts next."""
    return await served.add_bundle(await bodies.read_bounded(request, MANIFEST_LIMIT, "a manifest"))


@router.put(
    "/bundles/{digest}/parts/{name}",
    summary="Upload a part of a bundle",
    responses=documented(*_COMMON, "too-large", "bad-bundle"),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def put_part(request: Request, served: Operated, digest: BundleDigest, name: Name) -> BundleReceipt:
    """Checked against the size and SHA-256 in the manifest. Sending it again is harmless."""
    shelf, sha256, size = await served.part(digest, name)
    if served.store.blobs.size(shelf, sha256) != size:
        await bodies.store(request, served.store.blobs, shelf, sha256, size, f"part {name!r}")
    return await served.bundle(digest)


# --- federations


@router.post(
    "/federations",
    summary="Create a federation",
    status_code=201,
    responses=documented(*_COMMON, "name-taken", "bundle-incomplete", "bad-config"),
)
async def post_federation(
    served: Operated,
    response: Response,
    config: FederationConfig,
) -> Federation:
    """Its name is its id. It recruits until `min_devices` have asked for work, then runs by itself."""
    live = await served.create(config)
    response.headers["Location"] = f"/v1/federations/{live.id}"
    return live.summary()


@router.get("/federations", summary="List federations", responses=documented("unauthorized"))
async def get_federations(served: Operated) -> list[Federation]:
    """All federations, oldest first; those that could not be loaded come last, with their `fault`."""
    return served.summaries()


@router.get("/federations/{federation}", summary="Show a federation", responses=documented(*_COMMON))
async def get_federation(served: Operated, federation: FederationId) -> Federation:
    """Phase, round, devices, updates in, and `fault` when something keeps it from going on."""
    with suppress(Refusal):  # one that could not be loaded has a summary all the same
        await served.find(federation)
    return served.summary(federation)


async def _operate(served: Coordinator, federation: str, make: Callable[[float], events.Event]) -> Federation:
    live = await served.find(federation)
    await live.operate(make(live.now()))
    return live.summary()


_IN_PHASE = documented(*_OF_ONE, "wrong-phase")


@router.post(
    "/federations/{federation}/start",
    summary="Start a federation",
    responses=documented(*_OF_ONE, "wrong-phase", "no-devices"),
)
async def start(served: Operated, federation: FederationId) -> Federation:
    """Begin round 1 with the devices there are."""
    return await _operate(served, federation, events.Started)


@router.post("/federations/{federation}/pause", summary="Pause a federation", responses=_IN_PHASE)
async def pause(served: Operated, federation: FederationId) -> Federation:
    """Stop the round's clock. Updates under way are still taken; no round closes or opens."""
    return await _operate(served, federation, events.Paused)


@router.post("/federations/{federation}/resume", summary="Resume a federation", responses=_IN_PHASE)
async def resume(served: Operated, federation: FederationId) -> Federation:
    """Go on with the seconds the round had left. After a pause by `max_attempts` it allows as many again."""
    return await _operate(served, federation, events.Resumed)


@router.post("/federations/{federation}/stop", summary="Stop a federation", responses=_IN_PHASE)
async def stop(served: Operated, federation: FederationId) -> Federation:
    """End it for good. The state after the last closed round can still be exported."""
    return await _operate(served, federation, events.Stopped)


@router.post(
    "/federations/{federation}/tokens",
    summary="Make a join token",
    status_code=201,
    responses=documented(*_OF_ONE),
)
async def post_token(
    served: Operated,
    federation: FederationId,
    request: TokenRequest,
) -> JoinToken:
    """The token is shown once; only its digest is kept."""
    return await served.new_token(federation, request)


@router.get("/federations/{federation}/devices", summary="List devices", responses=documented(*_OF_ONE))
async def get_devices(served: Operated, federation: FederationId) -> list[Device]:
    """Every device that ever enrolled, by name, with its bytes, its last failure and its report."""
    return await (await served.find(federation)).listed()


@router.delete(
    "/federations/{federation}/devices/{device}",
    summary="Remove a device",
    status_code=204,
    responses=documented(*_OF_ONE),
)
async def delete_device(served: Operated, federation: FederationId, device: Name) -> None:
    """The round no longer waits for it, and it cannot come back. Its acknowledged updates still count."""
    await (await served.find(federation)).remove(device)


@router.get(
    "/federations/{federation}/rounds",
    summary="List closed rounds",
    response_model=list[Round],
    responses=documented(*_OF_ONE),
)
async def get_rounds(served: Operated, federation: FederationId) -> Any:
    """Traffic, bits per parameter, loss, scores, failures and guarded updates of every closed round.

    The last round's `traffic.last_down` grows as devices fetch the downlink after it.
    """
    records = await (await served.find(federation)).rounds()
    return Response("[" + ",".join(records) + "]", media_type="application/json")


@router.get(
    "/federations/{federation}/rounds/{round}",
    summary="Show a closed round",
    response_model=Round,
    responses=documented(*_OF_ONE),
)
async def get_round(
    served: Operated,
    federation: FederationId,
    round_: Annotated[int, Path(alias="round", ge=1, lt=2**31, examples=[3])],
) -> Any:
    """One closed round's record."""
    record = await (await served.find(federation)).round(round_)
    if record is None:
        raise Refusal("not-found", f"round {round_} of {federation} is not closed; GET .../rounds lists those that are")
    return Response(record, media_type="application/json")


@router.get(
    "/federations/{federation}/state",
    summary="Export the global state",
    response_class=Response,
    responses=_STATE | documented(*_OF_ONE),
)
async def get_state(served: Operated, federation: FederationId) -> Response:
    """The same seed and updates give the same bytes, here and in the simulator."""
    return Response(await (await served.find(federation)).exported(), media_type=MEDIA_TYPE)
