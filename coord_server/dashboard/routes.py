"""The dashboard over HTTP: log-in, pages, and the operator's commands as forms.

A command needs an operator's session, the token of one of its pages, and headers of a form sent from one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any
from urllib.parse import parse_qsl

import segno
from fastapi import APIRouter, Depends, Query, Request, Response
from markupsafe import Markup
from pydantic import ValidationError

from coord_server import auth
from coord_server.coordinator import Coordinator
from coord_server.dashboard import answers, devices, reference, session, view
from coord_server.dashboard.answers import SignIn, kept, page
from coord_server.dashboard.history import Histories
from coord_server.dashboard.session import Session
from coord_server.dashboard.view import ACTIONS, Action
from coord_server.exports import lacking
from coord_server.http import blobs, watch
from coord_server.http.access import CALL, Call, FederationId, Served
from coord_server.http.artifacts import ExportId, Files
from coord_server.http.problems import caller
from coord_server.problems import Refusal
from edge_client.errors import first_fault
from edge_client.protocol.operator import Kind, TokenRequest
from edge_client.protocol.payload import MEDIA_TYPE

LASTS = {"3600": "an hour", "86400": "a day", "604800": "7 days", "2592000": "30 days"}
"""How long a join token may be good for: seconds, and in words."""
CONFIRMED: dict[Action, str] = {
    "start": "Round 1 begins with the devices that are present now. A federation starts once.",
    "pause": "No round closes or opens. Updates under way are still taken, and resume goes on with the time left.",
    "resume": "The round goes on with the time it had left.",
    "stop": "The federation ends for good. The state after the last closed round can still be exported.",
}
"""What each command does, said before it is carried out."""
FORMATS: dict[Kind, str] = {"onnx": "ONNX", "pte": "ExecuTorch"}
"""What a model can be made as, and its button's text."""

log = logging.getLogger("maskfleet")
router = APIRouter()


# --- who


def _session(request: Request, served: Coordinator) -> Session | None:
    shown = request.cookies.get(_cookie(request), "")
    return session.read(shown, served.roles.named, time.time())


def _cookie(request: Request) -> str:
    return session.cookie(request.headers.get("host", ""))


async def _known(request: Request, served: Served) -> Session | None:
    """The session of the request's cookie, which then counts as a request of its token. Raises Refusal."""
    found = _session(request, served)
    request.state.session = found
    if found is not None:
        call: Call = request.scope[CALL]
        if found.operates:
            call.of_operator()
        else:
            call.of_viewer(found.digest)
    return found


Known = Annotated[Session | None, Depends(_known)]


async def _seen(known: Known) -> Session:
    """The session of the operator or a viewer. Raises SignIn."""
    if known is None:
        raise SignIn
    return known


Seen = Annotated[Session, Depends(_seen)]


def _ours(request: Request) -> None:
    """Refuse a form that another site's page has sent. Raises Refusal.

    Browsers send Sec-Fetch-Site over TLS and to this machine, Origin always.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin", "")
    ours = origin.partition("://")[2]
    if site == "same-origin" or (site is None and ours and ours == request.headers.get("host")):
        return
    said = f"Sec-Fetch-Site {site!r}" if site else f"Origin {origin!r}"
    raise Refusal("forbidden", f"this form was not sent by a page of this coordinator ({said}); open the page and send "
                        "it again. A proxy in front has to pass the Host header on")  # fmt: skip


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form that a page of this coordinator sent. Raises Refusal."""
    _ours(request)
    body = (await request.body()).decode(errors="replace")
    try:
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise Refusal("bad-request", "the form has too many fields; open its page and send it again") from None


async def _command(request: Request, served: Served, known: Seen) -> dict[str, str]:
    """The fields of an operator's form, which goes by what is stored now. Raises Refusal, SignIn, StateError."""
    fields = await _form(request)
    if not known.operates:
        raise Refusal("forbidden", "a viewer changes nothing; log in with the operator's token")
    if not auth.same(known.form, fields.get("form", "")):
        raise Refusal("forbidden", "the form is from another session; go back, load the page again and repeat it")
    await served.look()
    return fields


Command = Annotated[dict[str, str], Depends(_command)]


@router.get("/login")
async def show_login(request: Request, known: Known, next: str = "/") -> Response:
    """Ask for a token."""
    return page(request, "login", next=_local(next), wrong=False)


def _local(address: str) -> str:
    """An address of this site, "/" in place of any other."""
    local = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if local and address.isascii() else "/"


@router.post("/login")
async def log_in(request: Request, served: Served) -> Response:
    """Begin a session."""
    fields = await _form(request)
    token, to = fields.get("token", "").strip(), _local(fields.get("next", "/"))
    if served.roles.of(token) is None:
        client = caller(request.scope)
        extra = {"client": client, "limited": "log-in"}
        log.warning("refused: a log-in from %s with a wrong token", client, extra=extra)
        return page(request, "login", 401, next=to, wrong=True)
    answer = _see(to)
    _set(answer, request, session.begin(token, time.time()), session.LASTS)
    return answer


@router.post("/logout")
async def log_out(request: Request) -> Response:
    """End the session in this browser."""
    _ours(request)
    answer = _see("/login")
    _set(answer, request, "", 0)
    return answer


def _set(answer: Response, request: Request, cookie: str, lasts: int) -> None:
    secure = request.url.scheme == "https"
    answer.set_cookie(_cookie(request), cookie, lasts, secure=secure, httponly=True, samesite="strict")


def _see(address: str) -> Response:
    return Response(status_code=303, headers={**answers.HEADERS, "Location": address, "Cache-Control": "no-store"})


# --- pages


async def _histories(request: Request) -> Histories:
    found: Histories = request.app.state.histories
    return found


Read = Annotated[Histories, Depends(_histories)]


@router.get("/assets/{name}")
async def show_asset(request: Request, name: str) -> Response:
    """A file of the package."""
    found = answers.asset(request, name)
    if found is None:
        raise Refusal("not-found", f"there is no file {name!r} of the pages; load the page again")
    return found


@router.get("/favicon.ico")
async def show_icon(request: Request) -> Response:
    """What browsers ask for on pages that name no icon."""
    return _see(answers.ASSETS["icon.svg"].address)


@router.get("/")
async def show_federations(request: Request, served: Served, known: Seen, histories: Read) -> Response:
    """All federations."""
    listed = await view.summaries(served, histories)
    phases = [found.phase for found, _ in listed]
    return page(request, "federations", listed=listed, refresh=min(map(view.refresh, phases), default=view.QUIET))


@router.get("/federations/{federation}")
async def show_federation(
    request: Request,
    served: Served,
    known: Seen,
    histories: Read,
    files: Files,
    federation: FederationId,
    state: str = "",
    name: Annotated[str, Query(max_length=64)] = "",
    part: Annotated[int, Query(ge=1, le=10**6)] = 1,
) -> Response:
    """One federation; `state`, `name` and `part` choose among its devices."""
    try:
        live = await served.find(federation)
    except Refusal as refusal:
        if refusal.kind != "not-loaded":
            raise
        found = served.summary(federation)
        return page(request, "unloaded", found=found, stops="stop" in view.allowed(found.phase), refresh=view.QUIET)
    chosen = state if state in devices.STATES else ""
    shown = await view.federation(live, histories, chosen, name, part)
    phase = shown.found.phase
    made = await asyncio.to_thread(files.of, live.id)
    working = any(one.state in ("waiting", "running") for one in made)
    again, quiet = view.refresh(phase, sum(shown.states.values()), working), view.WORKING if working else view.QUIET
    return page(request, "federation", v=shown, config=shown.found.config, state=chosen, name=name, lasts=LASTS,
                meaning=devices.STATES, allowed=view.allowed(phase), refresh=again, quiet=quiet, kinds=view.KINDS,
                made=made, names=FORMATS, offered=[kind for kind in FORMATS if not lacking(kind)])  # fmt: skip


@router.get("/federations/{federation}/state")
async def export_state(served: Served, known: Seen, federation: FederationId) -> Response:
    """The method's global state after the last closed round, as a file."""
    live = await served.find(federation)
    closed, content = await live.exported()
    file = f'attachment; filename="{live.id}-round-{closed}.safetensors"'
    return Response(content, headers={**answers.HEADERS, "Content-Disposition": file}, media_type=MEDIA_TYPE)


@router.get("/federations/{federation}/exports/{export}/file")
async def fetch_export(
    request: Request, served: Served, known: Seen, files: Files, federation: FederationId, id_: ExportId
) -> Response:
    """A model as a file."""
    live = await served.find(federation)
    found = await asyncio.to_thread(files.show, id_, live.id)
    of = "" if found.device is None else f"-{found.device}"
    name = f'attachment; filename="{live.id}{of}-round-{found.round}.{found.kind}"'
    return blobs.file(request, files.file(id_), {**answers.HEADERS, "Content-Disposition": name})


@router.get("/federations/{federation}/events")
async def follow(request: Request, served: Served, known: Seen, federation: FederationId) -> Response:
    """What happens to a federation, as it happens: the page's script then asks for the page again."""
    live, seen = await served.find(federation), request.headers.get("last-event-id", "")
    return await watch.follow(request, live, seen, lambda: _session(request, served) is not None)


@router.get("/federations/{federation}/{action}")
async def confirm(request: Request, served: Served, known: Seen, federation: FederationId, action: Action) -> Response:
    """Ask before a command is carried out."""
    if action != "stop":  # which one that could not be loaded takes too
        await served.find(federation)
    found = served.summary(federation)
    possible = action in view.allowed(found.phase)
    return page(request, "confirm", found=found, action=action, what=CONFIRMED[action], possible=possible)


# --- commands


@router.post("/federations/{federation}/tokens")
async def make_token(request: Request, served: Served, fields: Command, federation: FederationId) -> Response:
    """A fresh join token, shown once with the command to type and a QR code of it."""
    asked: dict[str, Any] = {}
    try:
        asked = {"uses": int(fields.get("uses", "")), "expires_in": float(fields.get("expires_in", ""))}
        wanted = TokenRequest.model_validate(asked)
    except ValidationError as error:
        raise Refusal("bad-message", f"{first_fault(error)}; go back, correct it and send it again") from None
    except ValueError:
        raise Refusal("bad-message", "the uses and the time of a token are numbers; go back and correct them") from None
    live = await served.find(federation)
    token = await live.tokens.new(wanted, live.summary().phase)
    command = f"maskfleet join {str(request.base_url).rstrip('/')} --token {token.token} --data mine.npz"
    lasts = LASTS.get(fields["expires_in"], "")
    return page(request, "token", token=token, command=command, code=_code(command), lasts=lasts)


def _code(text: str) -> Markup:
    """A QR code as SVG, dark on light whatever the page's colours are."""
    drawn = segno.make_qr(text, error="m").svg_inline(
        scale=4, border=4, light="#fff", dark="#000", svgclass="code", lineclass=None, omitsize=True
    )
    return Markup(drawn)


@router.post("/federations/{federation}/exports")
async def export(served: Served, files: Files, fields: Command, federation: FederationId) -> Response:
    """Have the model that all devices share made as a file; the page shows how far it is."""
    kind = next((kind for kind in FORMATS if kind == fields.get("kind")), None)
    if kind is None:
        raise Refusal("bad-message", f"a model is made as one of {', '.join(FORMATS)}; go back and choose one")
    live = await served.find(federation)
    await files.ask(live, kind)
    return _see(f"/federations/{live.id}#models")


@router.post("/federations/{federation}/{action}")
async def operate(served: Served, _: Command, federation: FederationId, action: Action) -> Response:
    """Carry out a command."""
    found = await served.operate(federation, ACTIONS[action])
    return _see(f"/federations/{found.id}")


# --- the API's reference


@router.get("/docs")
async def show_reference(request: Request, known: Known) -> Response:
    """Every call of the API."""
    return kept(request, "reference", lambda: reference.of(request.app))
