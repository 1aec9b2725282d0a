"""The device's side of `/v1`: enrol, ask for work, fetch, upload, report."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from coord_server.api import wire
from coord_server.api.access import BundleDigest, Calling, Reading, Served
from coord_server.api.document import MANIFEST_SCHEMA
from coord_server.api.problems import documented
from coord_server.bundles import bundle_shelf
from coord_server.refusals import Refusal
from edge_client.errors import StateError
from edge_client.protocol.messages import Enrol, Enrolled, Name, Receipt, Report, Sha256, Wait, Work
from edge_client.protocol.payload import MEDIA_TYPE

WAIT_MOST = 60.0  # seconds an answer is held back at most

log = logging.getLogger("maskfleet")
router = APIRouter(prefix="/v1", tags=["device"])

DeviceName = Annotated[Name, Path(description="The device's name.", examples=["pi-07"])]


def _bytes(description: str, media_type: str, schema: dict[str, str] | None = None) -> dict[int | str, dict[str, Any]]:
    binary = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    whole = {media_type: {"schema": schema}} if schema else binary
    return {
        200: {"description": description, "content": whole},
        206: {"description": "the range that was asked for", "content": binary},
        304: {"description": "the copy that If-None-Match names is good"},
    }


def _length(answer: Response) -> int:
    return int(answer.headers.get("content-length", 0))


_AGAIN: dict[int | str, dict[str, Any]] = {200: {"model": Receipt, "description": "it was in already"}}


@router.post(
    "/enrol",
    summary="Enrol with a join token",
    response_model=Enrolled,
    responses=documented("unauthorized", "device-removed", "token-spent", "name-taken", "wrong-phase", "not-loaded",
                         "bad-message", "storage-full"),
)  # fmt: skip
async def enrol(
    served: Served,
    request: Enrol,
    raw: Request,
) -> Any:
    """The device makes its credential itself and sends it once; later requests carry it as a bearer token.

    Enrolling lets it fetch the bundle; it takes part once it asks for work. Sending the same name and credential
    again gets the same answer.
    """
    found = await served.enrol(request)
    live, body = served.federation(found.federation), found.model_dump_json().encode()
    live.members.count(found.device, "up", "enrol", len(await raw.body()))
    live.members.count(found.device, "down", "enrol", len(body))
    return Response(body, media_type="application/json")


@router.get(
    "/federations/{federation}/work",
    summary="Ask for work",
    response_model=Work,
    responses=documented("unauthorized", "device-removed", "not-found", "not-loaded", "bad-message", "storage-full"),
)
async def work(
    calling: Calling,
    wait: Annotated[
        float, Query(ge=0, allow_inf_nan=False, description=f"Seconds to hold the answer, at most {WAIT_MOST:g}.")
    ] = 0.0,
) -> Any:
    """What this device is to do now: `train`, `finish`, `stopped`, or `wait` and ask again after `poll_after` seconds.

    A device counts, and may be drawn, from its first question on. With `wait` the answer is held back until there is
    something to do.
    """
    calling.live.members.note(calling.device)
    body = (await calling.live.polls.work(calling.device, min(wait, WAIT_MOST))).model_dump_json().encode()
    calling.live.members.count(calling.device, "down", "work", len(body))
    return Response(body, media_type="application/json")


@router.get(
    "/bundles/{digest}",
    summary="Fetch a bundle's manifest",
    response_class=Response,
    responses=_bytes("the manifest's bytes; their SHA-256 is the address", "application/json", MANIFEST_SCHEMA)
    | documented("unauthorized", "not-found", "not-loaded", "bad-range", "bad-message"),
)
async def manifest(request: Request, reading: Reading, digest: BundleDigest) -> Response:
    """Immutable. For the operator and the devices of federations that use the bundle."""
    await reading.served.bundle(digest)
    shelf, blobs = bundle_shelf(digest), reading.served.store.blobs
    answer = await wire.immutable(request, blobs, shelf, digest, blobs.size(shelf, digest) or 0, "application/json")
    reading.count(_length(answer))
    return answer


@router.get(
    "/bundles/{digest}/parts/{name}",
    summary="Fetch a part of a bundle",
    response_class=Response,
    responses=_bytes("the part's bytes", "application/octet-stream")
    | documented("unauthorized", "not-found", "not-loaded", "bad-range", "bad-message"),
)
async def part(request: Request, reading: Reading, digest: BundleDigest, name: Name) -> Response:
    """Immutable; its SHA-256 is in the manifest. A single `Range` is honoured, so a broken download goes on."""
    shelf, sha256, size = await reading.served.part(digest, name)
    blobs = reading.served.store.blobs
    if blobs.size(shelf, sha256) != size:
        raise Refusal("not-found", f"part {name!r} of bundle {digest} has not been uploaded yet; PUT it first")
    answer = await wire.immutable(request, blobs, shelf, sha256, size, "application/octet-stream")
    reading.count(_length(answer))
    return answer


@router.get(
    "/federations/{federation}/payloads/{sha256}",
    summary="Fetch a round's payload",
    response_class=Response,
    responses=_bytes("a payload: one safetensors file", MEDIA_TYPE)
    | documented("unauthorized", "device-removed", "not-found", "not-loaded", "bad-range", "bad-message"),
)
async def payload(
    request: Request, calling: Calling, sha256: Annotated[Sha256, Path(description="From the work message.")]
) -> Response:
    """Immutable. Only what is due now is here: when it is gone, ask for work again."""
    down = await calling.live.polls.payload(calling.device, sha256)
    answer = await wire.immutable(
        request, calling.live.blobs, down.shelf, sha256, down.size, MEDIA_TYPE, data=down.data
    )
    calling.live.members.fetched(calling.device, down, _length(answer), wire.to_the_end(answer, down.size))
    return answer


@router.put(
    "/federations/{federation}/rounds/{round}/updates/{device}",
    summary="Upload an update",
    status_code=201,
    response_model=Receipt,
    responses=_AGAIN
    | documented("unauthorized", "device-removed", "forbidden", "not-found", "not-loaded", "wrong-round",
                 "round-closed", "wrong-lease", "not-in-cohort", "conflicting-update", "wrong-phase", "too-large",
                 "bad-digest", "bad-payload", "bad-message", "too-slow", "superseded", "round-not-open",
                 "storage-full"),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)  # fmt: skip
async def put_update(
    request: Request,
    calling: Calling,
    round_: Annotated[int, Path(alias="round", ge=1, lt=2**31, description="The round of the lease.", examples=[3])],
    device: DeviceName,
    maskfleet_lease: Annotated[str, Header(description="The lease from the work message.", max_length=64)],
    content_digest: Annotated[str | None, Header(description="`sha-256=:BASE64:` of the body (RFC 9530).")] = None,
    wait: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description=f"As in `work`, at most {WAIT_MOST:g}.")
    ] = None,
) -> Any:
    """Idempotent: the same body again gets the same receipt. 201 or 200 means it is safe on disk and counts once.

    Round, lease, device, digest and length are checked before the body is read. With `wait` the receipt is held back
    until there is something to do, which it then carries as `work`: a device of a fast round need not ask for it.
    """
    if device != calling.device:
        raise Refusal("forbidden", f"this credential is {calling.device!r}'s; it cannot upload for {device!r}")
    sha256 = wire.sha256_of_header(content_digest)
    known = await calling.live.intake.admit(round_, device, maskfleet_lease, sha256)
    receipt = known
    if receipt is None:
        wire.check_length(request, await calling.live.intake.limit(), "an update of this method")
        receipt = await calling.live.intake.take(round_, device, maskfleet_lease, sha256, request.stream())
    if wait is not None:
        try:  # a body that is sent again is still on its way: its sender reads no answer yet
            following = await calling.live.polls.work(device, min(wait, WAIT_MOST) if known is None else 0.0)
            if not isinstance(following, Wait):
                receipt = receipt.model_copy(update={"work": following})
        except (Refusal, StateError):
            pass
        except Exception:  # the update is in, whatever keeps the device from going on: it will hear when it asks
            log.exception("no next work for %s after its update of round %d", device, round_)
    body = receipt.model_dump_json(exclude_none=True).encode()
    calling.live.members.count(device, "down", "receipt", len(body))
    return Response(body, 201 if known is None else 200, media_type="application/json")


@router.put(
    "/federations/{federation}/devices/{device}/report",
    summary="Report the personal model",
    status_code=204,
    responses=documented(
        "unauthorized", "device-removed", "forbidden", "not-found", "not-loaded", "bad-message", "storage-full"
    ),
)
async def put_report(request: Request, calling: Calling, device: DeviceName, report: Report) -> None:
    """A device's last word on its own test data. Sent again, the newest counts."""
    if device != calling.device:
        raise Refusal("forbidden", f"this credential is {calling.device!r}'s; it cannot report for {device!r}")
    calling.live.members.note(device)
    calling.live.members.count(device, "up", "report", len(await request.body()))
    await calling.live.members.report(device, report)
