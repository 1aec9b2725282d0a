"""The operator's side of `/v1`: bundles, federations, tokens, devices, rounds, the final state."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from coord_server import events
from coord_server.http import bodies
from coord_server.http.access import BundleDigest, FederationId, Operated, RoundNumber, Served, Viewed
from coord_server.http.openapi import MANIFEST_SCHEMA
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from edge_client.protocol.messages import (
    BundleReceipt,
    Change,
    Device,
    Federation,
    FederationConfig,
    Health,
    Name,
    Round,
)
from edge_client.protocol.payload import MEDIA_TYPE

MANIFEST_LIMIT = 64 << 20  # bytes; a manifest grows with the number of tensors, not of parameters

router = APIRouter(prefix="/v1", tags=["operator"])
health = APIRouter(prefix="/v1", tags=["health"])

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_MANIFEST = {"required": True, "content": {"application/json": {"schema": MANIFEST_SCHEMA}}}
_PART = {"required": True, "content": {"application/octet-stream": _BINARY}}
_STATE: dict[int | str, dict[str, Any]] = {
    200: {"description": "the method's global state after the last closed round", "content": {MEDIA_TYPE: _BINARY}}
}
_OPERATIONS: dict[str, type[events.Event]] = {
    "start": events.Started, "pause": events.Paused, "resume": events.Resumed, "stop": events.Stopped,
}  # fmt: skip


@health.get("/health")
async def show_health(served: Served) -> Health:
    """Whether the coordinator is up. No token needed."""
    return Health(version=version("maskfleet"), federations=len(served.federations()))


@router.post(
    "/bundles",
    status_code=201,
    responses=documented("too-large", "bad-bundle"),
    openapi_extra={"requestBody": _MANIFEST},
)
async def upload_manifest(request: Request, served: Operated) -> BundleReceipt:
    """The body is `manifest.json` byte for byte; its SHA-256 is the bundle's address. PUT the missing parts next."""
    return await served.add_bundle(await bodies.read_bounded(request, MANIFEST_LIMIT, "a manifest"))


@router.put(
    "/bundles/{digest}/parts/{name}",
    responses=documented("too-large", "bad-bundle"),
    openapi_extra={"requestBody": _PART},
)
async def upload_part(request: Request, served: Operated, digest: BundleDigest, name: Name) -> BundleReceipt:
    """Checked against the size and SHA-256 in the manifest. Sending it again is harmless."""
    shelf, sha256, size = await served.part(digest, name)
    if served.store.blobs.size(shelf, sha256) != size:
        await bodies.store(request, served.store.blobs, shelf, sha256, size, f"part {name!r}")
    return await served.bundle(digest)


# --- federations


@router.post("/federations", status_code=201, responses=documented("name-taken", "bundle-incomplete", "bad-config"))
async def create_federation(served: Operated, response: Response, config: FederationConfig) -> Federation:
    """Its name is its id. It recruits until `min_devices` have asked for work, then runs by itself."""
    live = await served.create(config)
    response.headers["Location"] = f"/v1/federations/{live.id}"
    return live.summary()


@router.get("/federations")
async def list_federations(served: Viewed) -> list[Federation]:
    """All federations, oldest first; those that could not be loaded come last, with their `fault`."""
    return served.summaries()


@router.get("/federations/{federation}")
async def show_federation(served: Viewed, federation: FederationId) -> Federation:
    """Phase, round, devices, updates in, and `fault` when something keeps it from going on."""
    with suppress(Refusal):  # a federation that could not be loaded has a summary too
        await served.find(federation)
    return served.summary(federation)


@router.patch("/federations/{federation}", responses=documented("cannot-change", "wrong-phase", "bad-config"))
async def change_federation(served: Operated, federation: FederationId, change: Change) -> Federation:
    """`deadline_seconds` moves the deadline of the attempt under way too; `min_updates` counts at once.

    `cohort` counts from the next attempt and is at most that of the creation, `rounds` from the next round.
    `min_devices` can change while the federation recruits. Everything else is fixed.
    """
    live = await served.find(federation)
    await live.change(change)
    return live.summary()


@router.post("/federations/{federation}/{action}", responses=documented("wrong-phase", "no-devices"))
async def operate_federation(
    served: Operated, federation: FederationId, action: Literal["start", "pause", "resume", "stop"]
) -> Federation:
    """`start` begins round 1 with the devices there are.

    `pause` stops the round's clock: updates under way are still taken, no round closes or opens. `resume` goes on with
    the seconds the round had left; after a pause by `max_attempts` it allows as many again. `stop` ends the federation
    for good: the state after the last closed round can still be exported.
    """
    live = await served.find(federation)
    await live.operate(_OPERATIONS[action])
    return live.summary()


@router.get("/federations/{federation}/devices")
async def list_devices(served: Viewed, federation: FederationId) -> list[Device]:
    """Every device that ever enrolled, by name, with its bytes, its last failure and its report."""
    return await (await served.find(federation)).devices.listed()


@router.delete("/federations/{federation}/devices/{device}", status_code=204)
async def remove_device(served: Operated, federation: FederationId, device: Name) -> None:
    """The round no longer waits for the device, and it cannot come back. Its acknowledged updates still count."""
    await (await served.find(federation)).remove(device)


@router.get("/federations/{federation}/rounds", response_model=list[Round])
async def list_rounds(served: Viewed, federation: FederationId) -> Any:
    """Traffic, bits per parameter, loss, scores, failures and guarded updates of every closed round.

    The last round's `traffic.last_down` grows as devices fetch the downlink after it.
    """
    records = await (await served.find(federation)).rounds()
    return Response("[" + ",".join(records) + "]", media_type="application/json")


@router.get("/federations/{federation}/rounds/{round}", response_model=Round)
async def show_round(served: Viewed, federation: FederationId, round_: RoundNumber) -> Any:
    """One closed round's record."""
    record = await (await served.find(federation)).round(round_)
    if record is None:
        raise Refusal("not-found", f"round {round_} of {federation} is not closed; GET .../rounds lists those that are")
    return Response(record, media_type="application/json")


@router.get("/federations/{federation}/state", response_class=Response, responses=_STATE)
async def export_state(served: Viewed, federation: FederationId) -> Response:
    """The same seed and updates give the same bytes, here and in the simulator."""
    return Response(await (await served.find(federation)).exported(), media_type=MEDIA_TYPE)
