"""Who is asking: dependencies that turn a bearer token into the operator or a device, or refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from coord_server import auth
from coord_server.coordinator import Coordinator
from coord_server.federation import LiveFederation
from coord_server.refusals import Refusal
from edge_client.protocol.messages import Name, Sha256

_operator_scheme = HTTPBearer(
    scheme_name="operator", description="The operator's token, from the data folder.", auto_error=False
)
_device_scheme = HTTPBearer(
    scheme_name="device", description="The credential a device made for itself.", auto_error=False
)

OperatorHeader = Annotated[HTTPAuthorizationCredentials | None, Depends(_operator_scheme)]
DeviceHeader = Annotated[HTTPAuthorizationCredentials | None, Depends(_device_scheme)]
FederationId = Annotated[Name, Path(description="The federation's id: its name.", examples=["har"])]
BundleDigest = Annotated[Sha256, Path(description="SHA-256 of the bundle's manifest.")]


async def coordinator(request: Request) -> Coordinator:
    """The coordinator this application serves."""
    found: Coordinator = request.app.state.coordinator
    return found


Served = Annotated[Coordinator, Depends(coordinator)]


async def operator(served: Served, given: OperatorHeader) -> Coordinator:
    """The coordinator, for its operator. Raises Refusal."""
    if given is None:
        raise Refusal("unauthorized", "this needs the operator's token: send Authorization: Bearer TOKEN")
    if not served.is_operator(given.credentials):
        raise Refusal("unauthorized", "this is not the operator's token; `maskfleet serve` prints where it is")
    return served


Operated = Annotated[Coordinator, Depends(operator)]


@dataclass(frozen=True)
class Caller:
    """A device and the federation it has enrolled in."""

    live: LiveFederation
    device: str


async def caller(served: Served, federation: FederationId, given: DeviceHeader) -> Caller:
    """The device that asks. Raises Refusal."""
    if given is None:
        raise Refusal("unauthorized", "this needs the device's credential: send Authorization: Bearer CREDENTIAL")
    live = served.federation(federation)
    device = live.members.device_of(auth.hashed(given.credentials))
    if device is None:
        raise Refusal("unauthorized", f"no device of {federation} has this credential; enrol with a join token")
    return Caller(live, device)


Calling = Annotated[Caller, Depends(caller)]


@dataclass(frozen=True)
class Reader:
    """Who may read a bundle: a device of a federation that uses it, or (`device` None) the operator."""

    served: Coordinator
    device: Caller | None

    def count(self, size: int) -> None:
        """Account for bytes of the bundle that a device fetches."""
        if self.device is not None:
            self.device.live.members.count(self.device.device, "down", "bundle", size)


async def reader(served: Served, digest: BundleDigest, given: DeviceHeader) -> Reader:
    """The operator, or a device whose federation uses bundle `digest`. Raises Refusal."""
    if given is not None:
        credential = auth.hashed(given.credentials)
        removed: Refusal | None = None
        for live in served.federations():
            try:
                device = live.members.device_of(credential) if live.config.bundle == digest else None
            except Refusal as refused:  # out of this federation, perhaps not of another one
                removed, device = refused, None
            if device is not None:
                return Reader(served, Caller(live, device))
        if served.is_operator(given.credentials):
            return Reader(served, None)
        if removed is not None:
            raise removed
        unloaded = served.unloaded_of(credential)
        if unloaded is not None:
            served.federation(unloaded)
    raise Refusal("unauthorized", f"bundle {digest} is for the devices of its federations; enrol with a join token")


Reading = Annotated[Reader, Depends(reader)]
