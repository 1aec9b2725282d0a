"""The operator's side of `/v1`: federations, their devices, rounds and final state."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response

from coord_server import events
from coord_server.http import blobs
from coord_server.http.access import FederationId, Operated, RoundNumber, Served, Viewed
from coord_server.http.openapi import BYTES, headers
from coord_server.http.pages import LINK, Paged
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from coord_server.state import tag
from edge_client.errors import StorageDamagedError, suggestion
from edge_client.methods import installed_methods
from edge_client.protocol.messages import MAX_ROUNDS, Change, Federation, FederationConfig, Name, Phase, Round
from edge_client.protocol.operator import Device, DeviceState, Health
from edge_client.protocol.payload import MEDIA_TYPE

router = APIRouter(prefix="/v1", tags=["operator"])
health = APIRouter(prefix="/v1", tags=["health"])

_STATE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the method's global state after the last closed round",
        "content": {MEDIA_TYPE: BYTES},
        "headers": headers({"Maskfleet-Round": "After which round it is; 0 before the first."}),
    }
}
_CREATED: dict[int | str, dict[str, Any]] = {201: {"headers": headers({"Location": "The federation's address."})}}
_TAGGED: dict[int | str, dict[str, Any]] = {200: {"headers": headers({"ETag": "Of its settings, for If-Match."})}}


@health.get("/health")
async def show_health(served: Served) -> Health:
    """Whether the coordinator is up, and can read its database. No token needed."""
    status: Literal["ok", "faulty"] = "faulty" if served.faulty else "ok"
    return Health(status=status, version=version("maskfleet"), federations=len(served.federations()))


# --- federations


@router.post(
    "/federations", status_code=201, responses=_CREATED | documented("name-taken", "bundle-incomplete", "bad-config")
)
async def create_federation(served: Operated, response: Response, config: FederationConfig) -> Federation:
    """Its name is its id. It recruits until `min_devices` have asked for work, then runs by itself."""
    made = await served.create(config)
    response.headers["Location"] = f"federations/{made.id}"  # relative, as in `pages`
    return made


@router.get("/federations", responses=LINK)
async def list_federations(
    served: Viewed,
    page: Paged,
    phase: Annotated[Phase | None, Query(description="Only those in this phase.")] = None,
    method: Annotated[str | None, Query(description="Only those of this method.")] = None,
    prefix: Annotated[str, Query(description="Only those whose name begins with it.")] = "",
) -> list[Federation]:
    """All federations, oldest first; those that could not be loaded have a `fault`."""
    after = page.after(float, str) or ()
    everything = served.summaries()
    if method is not None:
        _check_method(method, everything)
    found = [
        (place, f)
        for f in sorted(everything, key=lambda f: (f.created_at, f.id))
        if (place := (f.created_at, f.id)) > after
        and (phase is None or f.phase == phase)
        and (method is None or (f.config is not None and f.config.method.get("name") == method))
        and f.id.startswith(prefix)
    ]
    return list(page.cut([f for _, f in found], [place for place, _ in found]))


def _check_method(name: str, listed: Sequence[Federation]) -> None:
    """Refuse a method that is neither installed nor, since its package was removed, that of a federation."""
    known = sorted({*installed_methods(), *(str(f.config.method.get("name")) for f in listed if f.config is not None)})
    if name not in known:
        raise Refusal(
            "bad-message",
            f"query.method = {name[:40]!r}: there is no such method; choose one of {', '.join(known)}"
            f"{suggestion(name, known)}",
        )


@router.get("/federations/{federation}", responses=_TAGGED)
async def show_federation(served: Viewed, response: Response, federation: FederationId) -> Federation:
    """Phase, round, devices, updates in, and `fault` when something keeps it from going on.

    The `ETag` stands for the settings, so that a PATCH with it is refused for no progress of the rounds. Hence
    `If-None-Match` is never answered with 304.
    """
    return _tagged(await (await served.find_any(federation)).shown(), response)


def _tagged(found: Federation, response: Response) -> Federation:
    """The federation, with the tag of its settings in the header ETag."""
    if found.config is not None:
        response.headers["ETag"] = f'"{tag(found.config)}"'
    return found


@router.patch(
    "/federations/{federation}",
    responses=_TAGGED | documented("cannot-change", "wrong-phase", "bad-config", "changed-meanwhile"),
)
async def change_federation(
    served: Operated,
    response: Response,
    federation: FederationId,
    change: Change,
    if_match: Annotated[str | None, Header(description="The ETag that came with the settings.")] = None,
) -> Federation:
    """With `If-Match` it is refused if the settings changed since they were read; without it they are overwritten.

    `deadline_seconds` moves the deadline of the attempt under way too; `min_updates` counts at once.

    `cohort` counts from the next attempt and is at most that of the creation, `rounds` from the next round.
    `min_devices` can change while the federation recruits. Everything else is fixed.
    """
    live = await served.find(federation)
    tags = blobs.tags("*" if if_match is None else if_match)
    await live.change(change, None if "*" in tags else tags)
    return _tagged(await live.shown(), response)


@router.delete(
    "/federations/{federation}", status_code=204, response_class=Response, responses=documented("wrong-phase")
)
async def delete_federation(request: Request, served: Operated, federation: FederationId) -> None:
    """Delete it with its devices, tokens, rounds, state, blobs and exports; its name is free again.

    A federation that runs or is paused is refused: stop it first, also one that could not be loaded. Devices of a
    finished one that have not fetched their last downlink get none.
    """
    await served.delete(federation)
    await request.app.state.exports.tidy()


@router.post("/federations/{federation}/start", responses=documented("wrong-phase", "no-devices"))
async def start_federation(served: Operated, federation: FederationId) -> Federation:
    """Begin round 1 with the devices there are."""
    return await served.operate(federation, events.Started)


@router.post("/federations/{federation}/pause", responses=documented("wrong-phase"))
async def pause_federation(served: Operated, federation: FederationId) -> Federation:
    """Stop the round's clock: updates under way are still taken, no round closes or opens."""
    return await served.operate(federation, events.Paused)


@router.post("/federations/{federation}/resume", responses=documented("wrong-phase"))
async def resume_federation(served: Operated, federation: FederationId) -> Federation:
    """Go on with the seconds the round had left; after a pause by `max_attempts` it allows as many again."""
    return await served.operate(federation, events.Resumed)


@router.post("/federations/{federation}/stop", responses=documented("wrong-phase"))
async def stop_federation(served: Operated, federation: FederationId) -> Federation:
    """End it for good, also one that could not be loaded. The state after the last closed round can be exported."""
    return await served.operate(federation, events.Stopped)


@router.get("/federations/{federation}/devices", responses=LINK)
async def list_devices(
    served: Viewed,
    federation: FederationId,
    page: Paged,
    state: Annotated[DeviceState | None, Query(description="Only those in this state.")] = None,
) -> list[Device]:
    """Every device that ever enrolled, by name, with its bytes, its last failure and its report."""
    (after,) = page.after(str) or ("",)
    found = await (await served.find(federation)).devices.listed(state, after, page.limit + 1)
    return list(page.cut(found, [(d.device,) for d in found]))


@router.delete("/federations/{federation}/devices/{device}", status_code=204, response_class=Response)
async def remove_device(served: Operated, federation: FederationId, device: Name) -> None:
    """The round no longer waits for the device, and it cannot come back. Its acknowledged updates still count."""
    await (await served.find(federation)).remove(device)


@router.get("/federations/{federation}/rounds", response_model=list[Round], responses=LINK)
async def list_rounds(
    served: Viewed,
    federation: FederationId,
    page: Paged,
    first: Annotated[int, Query(alias="from", ge=1, le=MAX_ROUNDS, description="The first round.")] = 1,
    last: Annotated[int, Query(alias="to", ge=1, le=MAX_ROUNDS, description="The last round.")] = MAX_ROUNDS,
) -> Any:
    """Traffic, bits per parameter, loss, scores, failures and guarded updates of every closed round.

    A record that is damaged is left out, and the federation's `fault` names it. The last round's `traffic.last_down`
    grows as devices fetch the downlink after it.
    """
    (after,) = page.after(int) or (0,)
    found = await (await served.find(federation)).rounds(max(first, after + 1), last, page.limit + 1)
    records = page.cut(list(found.values()), [(number,) for number in found])
    text = ",".join(record for record in records if record is not None)
    return Response(f"[{text}]", headers=page.response.headers, media_type="application/json")


@router.get("/federations/{federation}/rounds/{round}", response_model=Round)
async def show_round(served: Viewed, federation: FederationId, round_: RoundNumber) -> Any:
    """One closed round's record."""
    live = await served.find(federation)
    records = await live.rounds(round_, round_)
    if not records:
        raise Refusal("not-found", f"round {round_} of {federation} is not closed; GET .../rounds lists those that are")
    if records[round_] is None:
        raise StorageDamagedError(f"the record of round {round_} of {federation} is damaged; restore the database")
    return Response(records[round_], media_type="application/json")


@router.get("/federations/{federation}/state", response_class=Response, responses=_STATE)
async def export_state(served: Viewed, federation: FederationId) -> Response:
    """The same seed, fleet and updates give the same bytes, also in the simulator. `Maskfleet-Round` is the round."""
    round_, content = await (await served.find(federation)).exported()
    return Response(content, headers={"Maskfleet-Round": str(round_)}, media_type=MEDIA_TYPE)
