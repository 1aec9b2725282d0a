"""The device's side of `/v1`: enrol, ask for work, fetch, upload, fail, report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel

from coord_server.http import blobs, bodies, head
from coord_server.http.access import BundleDigest, Caller, Calling, Reading, RoundNumber, Served
from coord_server.http.openapi import BYTES, MANIFEST_SCHEMA, documented_query
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from coord_server.store.blobs import bundle_shelf
from edge_client.errors import PayloadError, StateError
from edge_client.protocol.cost import UNITS, from_header
from edge_client.protocol.messages import Enrol, Enrolled, Failure, Name, Receipt, Report, Sha256, Wait, Work
from edge_client.protocol.payload import MEDIA_TYPE

AGENT_MOST = 64  # characters of a User-Agent that are kept
WAIT_MOST = 60.0  # seconds that an answer is held back at most

log = logging.getLogger("maskfleet")
router = APIRouter(prefix="/v1", tags=["device"])

DeviceName = Annotated[Name, Path(description="The device's name.", examples=["pi-07"])]
Lease = Annotated[str, Header(description="The lease from the work message.", max_length=64)]
Hold = Query(ge=0, allow_inf_nan=False, description=f"Seconds to hold the answer back, at most {WAIT_MOST:g}.")

_LEASED = (
    "forbidden",
    "wrong-round",
    "round-closed",
    "wrong-lease",
    "not-in-cohort",
    "conflicting-update",
    "wrong-phase",
)


_AGAIN: dict[int | str, dict[str, Any]] = {200: {"model": Receipt, "description": "the update was in already"}}
_BODY = {"required": True, "content": {MEDIA_TYPE: BYTES}}


def _json(found: BaseModel, status: int = 200, released: bool = False) -> Response:
    """The message as JSON; with `released`, for a long poll that gave up its place, the connection is closed."""
    body = found.model_dump_json(exclude_none=isinstance(found, Receipt)).encode()
    return Response(body, status, {"Connection": "close"} if released else None, "application/json")


@router.post(
    "/enrol",
    response_model=Enrolled,
    responses=documented("token-spent", "name-taken", "wrong-phase", "wrong-samples"),
    dependencies=[Depends(documented_query)],
)
async def enrol(served: Served, request: Enrol, raw: Request) -> Any:
    """The device makes its credential itself and sends it once; later requests carry it as a bearer token.

    Enrolling lets it fetch the bundle; it takes part once it asks for work. The same name and credential again get the
    same answer.
    """
    found = await served.enrol(request)
    live, answer = served.federation(found.federation), _json(found)
    live.devices.count(found.device, "up", "enrol", len(await raw.body()))
    live.devices.count(found.device, "down", "enrol", head.sent(raw, answer))
    return answer


@router.get("/federations/{federation}/work", response_model=Work)
async def ask_for_work(request: Request, calling: Calling, wait: Annotated[float, Hold] = 0.0) -> Any:
    """What this device has to do now: `train`, `finish`, `stopped`, or `wait` and ask again after `poll_after` seconds.

    A device counts, and may be drawn, from its first request on. With `wait` the answer is held back until there is
    work. When connections run out, held answers are given early and their connections closed.
    """
    calling.live.devices.introduces(calling.device, request.headers.get("user-agent", "")[:AGENT_MOST])
    found = await _work(calling, min(wait, WAIT_MOST))
    answer = _json(await calling.live.work(calling.device, 0.0), released=True) if found is None else _json(found)
    calling.live.devices.count(calling.device, "down", "work", head.sent(request, answer))
    return answer


async def _work(calling: Caller, wait: float) -> Work | None:
    """The device's work; None when the answer was held back and its place is needed now."""
    asking: Coroutine[Any, Any, Work] = calling.live.work(calling.device, wait)
    return await calling.hold(asking) if wait > 0 else await asking


@router.get(
    "/bundles/{digest}",
    response_class=Response,
    responses=blobs.described(
        "the manifest's bytes; their SHA-256 is the address", "application/json", MANIFEST_SCHEMA
    ),
)
async def fetch_manifest(request: Request, reading: Reading, digest: BundleDigest) -> Response:
    """Immutable. For the operator and the devices of federations that use the bundle."""
    await reading.served.bundles.receipt(digest)
    shelf, store = bundle_shelf(digest), reading.served.store.blobs
    size = await asyncio.to_thread(store.size, shelf, digest) or 0
    answer = await blobs.immutable(request, store, shelf, digest, size, "application/json")
    reading.count(head.sent(request, answer))
    return answer


@router.get(
    "/bundles/{digest}/parts/{name}",
    response_class=Response,
    responses=blobs.described("the part's bytes", blobs.BINARY),
)
async def fetch_part(request: Request, reading: Reading, digest: BundleDigest, name: Name) -> Response:
    """Immutable; its SHA-256 is in the manifest. A single `Range` is honoured, so a broken download can resume."""
    shelf, sha256, size = await reading.served.bundles.part(digest, name)
    store = reading.served.store.blobs
    if await asyncio.to_thread(store.size, shelf, sha256) != size:
        raise Refusal("not-found", f"part {name!r} of bundle {digest} has not been uploaded yet; PUT it first")
    answer = await blobs.immutable(request, store, shelf, sha256, size, blobs.BINARY)
    reading.count(head.sent(request, answer))
    return answer


@router.get(
    "/federations/{federation}/payloads/{sha256}",
    response_class=Response,
    responses=blobs.described("a payload: one safetensors file", MEDIA_TYPE),
)
async def fetch_payload(
    request: Request,
    served: Served,
    calling: Calling,
    sha256: Annotated[Sha256, Path(description="From the work message.")],
) -> Response:
    """Immutable. Only payloads that are due now are here; after a 404 ask for work again."""
    down = await calling.live.payload(calling.device, sha256)
    answer = await blobs.immutable(
        request, served.store.blobs, down.shelf, sha256, down.size, MEDIA_TYPE, data=down.data
    )
    calling.live.fetched(calling.device, down, head.sent(request, answer))
    return answer


@router.put(
    "/federations/{federation}/rounds/{round}/updates/{device}",
    status_code=201,
    response_model=Receipt,
    responses=_AGAIN | documented(*_LEASED, "too-large", "bad-digest", "bad-payload", "too-slow"),
    openapi_extra={"requestBody": _BODY},
)
async def upload_update(
    request: Request,
    calling: Calling,
    round_: RoundNumber,
    device: DeviceName,
    maskfleet_lease: Lease,
    content_digest: Annotated[str, Header(description="`sha-256=:BASE64:` of the body (RFC 9530).")],
    maskfleet_cost: Annotated[
        str | None,
        Header(description=f"`{','.join(UNITS)}`, then `,battery` if it has one; empty: unknown."),
    ] = None,
    wait: Annotated[float | None, Hold] = None,
) -> Any:
    """Idempotent: the same body again gets the same receipt. 201 or 200 means it is durable and counts once.

    Round, lease, device, digest and length are checked before the body is read. With `wait` the receipt is held back
    until there is work, which it then carries as `work`: the device of a fast round need not ask for it.
    """
    calling.check(device, "upload")
    sha256 = bodies.sha256_of_header(content_digest)
    if maskfleet_cost is not None:
        try:
            from_header(maskfleet_cost)
        except PayloadError as error:
            raise Refusal("bad-message", str(error)) from None
    uploads = calling.live.uploads
    try:
        known = received = await uploads.admit(round_, device, maskfleet_lease, sha256)
        if received is None:
            bodies.check_length(request, await uploads.limit(), "an update of this method")
            body = request.stream()
            received = await uploads.take(round_, device, maskfleet_lease, sha256, body, maskfleet_cost)
    except Refusal as error:
        calling.live.refused(round_, device, error)
        raise
    if known is None:
        receipt, released = await _with_work(calling, received, wait)
        answer = _json(receipt, 201, released)
    else:  # its sender reads the answer only after sending the whole body: answer at once
        receipt, _ = await _with_work(calling, received, None if wait is None else 0.0)
        answer = _json(receipt)
    calling.live.devices.count(device, "down", "receipt", head.sent(request, answer))
    return answer


async def _with_work(calling: Caller, receipt: Receipt, wait: float | None) -> tuple[Receipt, bool]:
    """The receipt with the device's next work, and whether the answer gave up its place while it was held back."""
    if wait is None:
        return receipt, False
    try:
        following = await _work(calling, min(wait, WAIT_MOST))
    except (Refusal, StateError):
        return receipt, False
    except Exception:  # the update is in; the fault shows again when the device asks for work
        log.exception("no next work for %s after its update of round %d", calling.device, receipt.round)
        return receipt, False
    if following is None or isinstance(following, Wait):
        return receipt, following is None
    return receipt.model_copy(update={"work": following}), False


@router.put(
    "/federations/{federation}/rounds/{round}/failures/{device}",
    status_code=204,
    response_class=Response,
    responses=documented(*_LEASED),
)
async def report_failure(
    request: Request,
    calling: Calling,
    round_: RoundNumber,
    device: DeviceName,
    failure: Failure,
    maskfleet_lease: Lease = "",
) -> None:
    """Idempotent. The round goes on without the device; a later attempt or round may draw it again.

    After `lost` the device's next downlink holds everything. Once the federation is finished only `lost` of the round
    after the last is accepted, which has no lease.
    """
    calling.check(device, "report a failure")
    calling.live.devices.note(device)
    calling.live.devices.count(device, "up", "failure", len(await request.body()))
    await calling.live.fail(round_, device, maskfleet_lease, failure)


@router.put(
    "/federations/{federation}/devices/{device}/report",
    status_code=204,
    response_class=Response,
    responses=documented("forbidden"),
)
async def report_personal_model(request: Request, calling: Calling, device: DeviceName, report: Report) -> None:
    """The device's final result on its own test data. The newest report counts."""
    calling.check(device, "report")
    calling.live.devices.note(device)
    calling.live.devices.count(device, "up", "report", len(await request.body()))
    await calling.live.report(device, report)
