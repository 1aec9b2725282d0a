"""Models for other engines: asked for, watched and fetched, by the operator and by the device whose model it is."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from coord_server.exports import Exports
from coord_server.http import blobs, head
from coord_server.http.access import Calling, FederationId, Operated, Viewed
from coord_server.http.openapi import headers
from coord_server.http.problems import documented
from coord_server.problems import Refusal
from edge_client.protocol.messages import Name, Sha256
from edge_client.protocol.operator import Export, ExportRequest, Kind

router = APIRouter(prefix="/v1", tags=["operator"])
own = APIRouter(prefix="/v1", tags=["device"])

AGAIN = "5"  # seconds until a file that is being made is asked for again
ExportId = Annotated[Sha256, Path(alias="export", description="The file's id.")]
_LATER = headers({"Location": "The address to ask later, relative to this one.", "Retry-After": "Seconds until then."})
_MADE: dict[int | str, dict[str, Any]] = {
    200: {"model": Export, "description": "the file is there already"},
    202: {"model": Export, "description": "the file is being made", "headers": _LATER},
}


async def _exports(request: Request) -> Exports:
    found: Exports = request.app.state.exports
    return found


Files = Annotated[Exports, Depends(_exports)]


def _answer(found: Export, where: str) -> Response:
    """The file's state; `where` is its later address, relative to the one that was asked for."""
    done = found.state == "ready"
    said = {"Location": where, **({} if done else {"Retry-After": AGAIN})}
    return Response(found.model_dump_json(), 200 if done else 202, said, "application/json")


@router.post(
    "/federations/{federation}/exports",
    status_code=202,
    response_model=Export,
    responses={**_MADE, **documented("not-installed", "too-many")},
)
async def export_model(served: Operated, files: Files, federation: FederationId, wanted: ExportRequest) -> Any:
    """A model after the last closed round, as ONNX or as an ExecuTorch program, compact and proved equal.

    It is made in a process of its own while rounds go on. Asking again gives the same file, and starts one that failed.
    """
    live = await served.find(federation)
    found = await files.ask(live, wanted.kind, wanted.device)
    return _answer(found, f"exports/{found.id}")


@router.get("/federations/{federation}/exports")
async def list_exports(served: Viewed, files: Files, federation: FederationId) -> list[Export]:
    """The files of a federation, the latest first; the oldest go when there are many."""
    return await asyncio.to_thread(files.of, (await served.find(federation)).id)


@router.get("/federations/{federation}/exports/{export}")
async def show_export(served: Viewed, files: Files, federation: FederationId, id_: ExportId) -> Export:
    """How far a file is: waiting, running, ready or failed, and the worker's last line."""
    return files.show(id_, (await served.find(federation)).id)


@router.get(
    "/federations/{federation}/exports/{export}/file",
    response_class=Response,
    responses=blobs.described("the file", blobs.BINARY),
)
async def fetch_export(
    request: Request, served: Viewed, files: Files, federation: FederationId, id_: ExportId
) -> Response:
    """The file, once it is ready. A single `Range` is honoured, so a broken download can resume."""
    files.show(id_, (await served.find(federation)).id)
    return blobs.file(request, files.file(id_), {})


@own.get(
    "/federations/{federation}/devices/{device}/model",
    response_class=Response,
    responses={
        **blobs.described(
            "the file", blobs.BINARY, more={"Maskfleet-Source": "Whose model it is: personal or global."}
        ),
        202: {"model": Export, "description": "the file is being made", "headers": _LATER},
        **documented("not-installed", "too-many", "forbidden", "wrong-phase", "export-failed"),
    },
)
async def fetch_own_model(
    calling: Calling,
    request: Request,
    files: Files,
    device: Name,
    kind: Annotated[Kind, Query(description="The form.")] = "pte",
) -> Response:
    """The device's own model when its federation is over, for a device that cannot make the file itself.

    The header Maskfleet-Source is "personal", or "global" where a part of that is on the device alone: then the file
    holds the model that all devices share.
    """
    calling.check(device, "fetch")
    phase = calling.live.summary().phase
    if phase not in ("finished", "stopped"):
        raise Refusal("wrong-phase", f"{calling.live.id} is {phase}; a device's model is final when it is finished")
    found = await files.ask(calling.live, kind, device, again=False)
    if found.state == "failed":
        raise Refusal("export-failed", found.detail)
    if found.state != "ready":
        return _answer(found, f"model?kind={kind}")
    path = files.file(found.id)
    answer = blobs.file(request, path, {"Maskfleet-Source": str(found.source)})
    calling.live.devices.count(device, "down", "bundle", head.sent(request, answer))  # of no round
    return answer
