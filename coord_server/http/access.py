"""Callers: admission of requests, and dependencies that turn a bearer token into the operator, a viewer or a device.

Each dependency checks the query's names after the token, so a caller without a token does not learn them.

`Admission` limits the requests under way: of an address while no credential is known, of a credential after that. The
operator is always admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coord_server import auth
from coord_server.connections import Connection, Places
from coord_server.coordinator import Coordinator
from coord_server.http.openapi import documented_query
from coord_server.http.problems import problem
from coord_server.live.federation import LiveFederation
from coord_server.problems import Refusal
from coord_server.roles import Role
from edge_client.protocol.messages import Name, Sha256

OF_ADDRESS = 64  # requests under way of one address that have shown no valid credential
OF_VIEWER = 32  # requests under way of one viewer's token, streams of events among them
OF_CREDENTIAL = 8  # requests under way of one device: a poll, an upload, and those whose link broke
CALL = "maskfleet.call"  # where the scope holds a request's Call

T = TypeVar("T")


class Call:
    """One request under way, counted for its address, then for the credential it has shown."""

    def __init__(self, counted: Counter[str], address: str, places: Places, connection: Connection | None) -> None:
        self.places, self.connection = places, connection
        self.role: Role | None = None
        self._counted, self._key = counted, address
        counted[address] += 1

    def of_operator(self) -> None:
        """It has shown the operator's token."""
        self.role = "operator"
        self._proven()

    def of_viewer(self, token: str) -> None:
        """It has shown a viewer's token, this SHA-256, and counts for that. Raises Refusal when that has too many."""
        self.role = "viewer"
        if self._count(token) > OF_VIEWER:
            raise Refusal("too-many", f"this viewer's token has {OF_VIEWER} requests under way; wait for their answers")

    def of_device(self, credential: str) -> None:
        """It has shown a device's credential and now counts for that. Raises Refusal when that has too many."""
        if self._count(credential) > OF_CREDENTIAL:
            raise Refusal("too-many", f"this device has {OF_CREDENTIAL} requests under way; wait for their answers")

    def _proven(self) -> None:
        if self.connection is not None:
            self.places.proven(self.connection)

    def _count(self, secret: str) -> int:
        """Count for a secret, no longer for the address; how many requests it has under way now."""
        self._proven()
        self.over()
        self._key = secret
        self._counted[secret] += 1
        return self._counted[secret]

    def over(self) -> None:
        """The request is answered and no longer counts."""
        self._counted[self._key] -= 1
        if not self._counted[self._key]:
            del self._counted[self._key]


class Admission:
    """ASGI middleware: refuses requests over the limits, and all but the operator's when there is no place left."""

    def __init__(self, app: ASGIApp, coordinator: Coordinator, places: Places) -> None:
        self._app, self._coordinator, self._places = app, coordinator, places
        self._counted: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        shown = Headers(scope=scope).get("authorization", "").partition(" ")[2]
        role = self._coordinator.roles.of(shown)
        connection: Connection | None = scope.get("state", {}).get("connection")
        if role != "operator":
            refused = None
            if self._places.full(connection):
                text = f"all {self._places.most} connections are in use; try again in a few seconds"
                refused = problem(scope, "too-busy", text)
            elif self._counted[address] >= OF_ADDRESS:
                text = f"{address} has {OF_ADDRESS} requests under way; wait for their answers"
                refused = problem(scope, "too-many", text)
            if refused is not None:
                await refused(scope, receive, send)
                return
        call = scope[CALL] = Call(self._counted, address, self._places, connection)
        try:
            if role == "operator":
                call.of_operator()
            elif role == "viewer":
                call.of_viewer(auth.hashed(shown))
            await self._app(scope, receive, send)
        except Refusal as refusal:  # of `of_viewer`: the application answers its own
            await problem(scope, refusal.kind, str(refusal))(scope, receive, send)
        finally:
            call.over()


_operator_scheme = HTTPBearer(
    scheme_name="operator",
    description="The operator's token, from the data folder; for every GET a viewer's token too.",
    auto_error=False,
)
_device_scheme = HTTPBearer(
    scheme_name="device", description="The credential that the device made when it enrolled.", auto_error=False
)

OperatorHeader = Annotated[HTTPAuthorizationCredentials | None, Depends(_operator_scheme)]
DeviceHeader = Annotated[HTTPAuthorizationCredentials | None, Depends(_device_scheme)]
FederationId = Annotated[Name, Path(description="The federation's id: its name.", examples=["har"])]
RoundNumber = Annotated[int, Path(alias="round", ge=1, lt=2**31, description="The round.", examples=[3])]
BundleDigest = Annotated[Sha256, Path(description="SHA-256 of the bundle's manifest.")]


async def coordinator(request: Request) -> Coordinator:
    """The coordinator this application serves."""
    found: Coordinator = request.app.state.coordinator
    return found


Served = Annotated[Coordinator, Depends(coordinator)]


async def operator(request: Request, served: Served, _: OperatorHeader) -> Coordinator:
    """The coordinator, for its operator. Raises Refusal."""
    call: Call = request.scope[CALL]
    if call.role == "viewer":
        raise Refusal("forbidden", "a viewer's token may read, not change or create; this needs the operator's token")
    await viewer(request, served, None)
    await served.look()  # what is asked may follow from what another coordinator has just done
    return served


async def viewer(request: Request, served: Served, _: OperatorHeader) -> Coordinator:
    """The coordinator, for a viewer or its operator. Raises Refusal."""
    check_reads(request)
    await documented_query(request)
    return served


def check_reads(request: Request) -> None:
    """Refuse all but a viewer and the operator. Raises Refusal."""
    call: Call = request.scope[CALL]
    if call.role is None:
        said = "the one sent is not valid" if "authorization" in request.headers else "none was sent"
        how = "send Authorization: Bearer TOKEN, with the token whose file `maskfleet serve` names at its start"
        raise Refusal("unauthorized", f"this needs the operator's token, and {said}; {how}")


Operated = Annotated[Coordinator, Depends(operator)]
Viewed = Annotated[Coordinator, Depends(viewer)]


@dataclass(frozen=True)
class Caller:
    """A device and the federation it has enrolled in."""

    live: LiveFederation
    device: str
    _call: Call

    def check(self, device: str, what: str) -> None:
        """Refuse what a device asks in the name of another one. Raises Refusal."""
        if device != self.device:
            raise Refusal("forbidden", f"this credential belongs to {self.device!r}; it cannot {what} for {device!r}")

    async def hold(self, answer: Coroutine[Any, Any, T]) -> T | None:
        """The answer of a long poll, or None when it has to answer now to free its place."""
        return await self._call.places.hold((self.live.id, self.device), answer, self._call.connection)


async def caller(request: Request, served: Served, federation: FederationId, given: DeviceHeader) -> Caller:
    """The device that calls. Raises Refusal, in the same words whether the federation exists or not."""
    if given is None:
        raise Refusal("unauthorized", "this needs the device's credential: send Authorization: Bearer CREDENTIAL")
    credential = auth.hashed(given.credentials)
    live = device = None
    try:
        live = await served.find(federation)
    except Refusal:  # missing or not loaded: only its own devices may see which
        if federation in await served.federations_of(credential):
            raise
    else:
        device = await live.devices.device_of(credential)
    if live is None or device is None:
        raise Refusal(
            "unauthorized",
            f"there is no federation {federation!r} with this credential; check its id, or enrol with a join token",
        )
    call: Call = request.scope[CALL]
    call.of_device(credential)
    await documented_query(request)
    return Caller(live, device, call)


Calling = Annotated[Caller, Depends(caller)]


@dataclass(frozen=True)
class Reader:
    """A reader of a bundle: a device of a federation that uses it, or the operator or a viewer (`device` is None)."""

    served: Coordinator
    live: LiveFederation | None
    device: str | None

    def count(self, size: int) -> None:
        """Account for bytes of the bundle that a device fetches."""
        if self.live is not None and self.device is not None:
            self.live.devices.count(self.device, "down", "bundle", size)


async def reader(
    request: Request, served: Served, digest: BundleDigest, _: OperatorHeader, given: DeviceHeader
) -> Reader:
    """The operator, a viewer, or a device whose federation uses bundle `digest`. Raises Refusal."""
    call: Call = request.scope[CALL]
    live = device = None
    if call.role is None:
        credential = "" if given is None else auth.hashed(given.credentials)
        live, device = await _user(served, digest, credential)
        call.of_device(credential)
    await documented_query(request)
    return Reader(served, live, device)


async def _user(served: Coordinator, bundle: str, credential: str) -> tuple[LiveFederation, str]:
    """A federation that uses the bundle, and its device with this credential. Raises Refusal."""
    refused = Refusal("unauthorized", f"bundle {bundle} is for the devices of its federations; enrol with a join token")
    for id_ in await served.federations_of(credential):
        try:
            live = await served.find(id_)
            device = await live.devices.device_of(credential) if live.config.bundle == bundle else None
        except Refusal as refusal:  # removed from this federation or not loaded; perhaps another one has the bundle
            refused = refusal
            continue
        if device is not None:
            return live, device
    raise refused


Reading = Annotated[Reader, Depends(reader)]
