"""Callers: admission of requests, and dependencies that turn a bearer token into the operator or a device.

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
from coord_server.http.problems import problem
from coord_server.live.federation import LiveFederation
from coord_server.problems import Refusal
from edge_client.protocol.messages import Name, Sha256

OF_ADDRESS = 64  # requests under way of one address that have shown no valid credential
OF_CREDENTIAL = 8  # requests under way of one device: a poll, an upload, and those whose link broke
CALL = "maskfleet.call"  # where the scope holds a request's Call

T = TypeVar("T")


class Call:
    """One request under way, counted for its address, then for the credential it has shown."""

    def __init__(self, counted: Counter[str], address: str, places: Places, connection: Connection | None) -> None:
        self.places, self.connection, self.operator = places, connection, False
        self._counted, self._key = counted, address
        counted[address] += 1

    def of_operator(self) -> None:
        """It has shown the operator's token."""
        self.operator = True
        if self.connection is not None:
            self.places.proven(self.connection)

    def of_device(self, credential: str) -> None:
        """It has shown a device's credential and now counts for that. Raises Refusal when that has too many."""
        if self.connection is not None:
            self.places.proven(self.connection)
        self.over()
        self._key = credential
        self._counted[credential] += 1
        if self._counted[credential] > OF_CREDENTIAL:
            raise Refusal("too-many", f"this device has {OF_CREDENTIAL} requests under way; wait for their answers")

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
        operator = self._coordinator.is_operator(shown)
        connection: Connection | None = scope.get("state", {}).get("connection")
        if not operator:
            refused = None
            if self._places.full(connection):
                text = f"all {self._places.most} connections are in use; try again in a few seconds"
                refused = problem("too-busy", text)
            elif self._counted[address] >= OF_ADDRESS:
                refused = problem("too-many", f"{address} has {OF_ADDRESS} requests under way; wait for their answers")
            if refused is not None:
                await refused(scope, receive, send)
                return
        call = scope[CALL] = Call(self._counted, address, self._places, connection)
        if operator:
            call.of_operator()
        try:
            await self._app(scope, receive, send)
        finally:
            call.over()


_operator_scheme = HTTPBearer(
    scheme_name="operator", description="The operator's token, from the data folder.", auto_error=False
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
    if not call.operator:
        how = "send Authorization: Bearer TOKEN; `maskfleet serve` prints where it is"
        raise Refusal("unauthorized", f"this needs the operator's token: {how}")
    return served


Operated = Annotated[Coordinator, Depends(operator)]


@dataclass(frozen=True)
class Caller:
    """A device and the federation it has enrolled in."""

    live: LiveFederation
    device: str
    _call: Call

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
    return Caller(live, device, call)


Calling = Annotated[Caller, Depends(caller)]


@dataclass(frozen=True)
class Reader:
    """A reader of a bundle: a device of a federation that uses it, or the operator (`device` is None)."""

    served: Coordinator
    live: LiveFederation | None
    device: str | None

    def count(self, size: int) -> None:
        """Account for bytes of the bundle that a device fetches."""
        if self.live is not None and self.device is not None:
            self.live.devices.count(self.device, "down", "bundle", size)


async def reader(request: Request, served: Served, digest: BundleDigest, given: DeviceHeader) -> Reader:
    """The operator, or a device whose federation uses bundle `digest`. Raises Refusal."""
    call: Call = request.scope[CALL]
    if call.operator:
        return Reader(served, None, None)
    refused = Refusal("unauthorized", f"bundle {digest} is for the devices of its federations; enrol with a join token")
    credential = "" if given is None else auth.hashed(given.credentials)
    for id_ in await served.federations_of(credential):
        try:
            live = await served.find(id_)
            device = await live.devices.device_of(credential) if live.config.bundle == digest else None
        except Refusal as refusal:  # removed from this federation or not loaded; perhaps another one has the bundle
            refused = refusal
            continue
        if device is not None:
            call.of_device(credential)
            return Reader(served, live, device)
    raise refused


Reading = Annotated[Reader, Depends(reader)]
