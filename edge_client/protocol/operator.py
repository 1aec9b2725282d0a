"""The messages that an operator alone exchanges with the coordinator: tokens, devices, exports, bundles, methods.

Units are those of `messages`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edge_client.protocol.messages import MAX_SECONDS, Devices, Failure, Message, Name, Report, Sha256


class TokenRequest(Message):
    """Ask for a join token."""

    uses: Devices = 1000
    expires_in: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 7 * 86400.0


class JoinToken(Message):
    """A token a device enrols with. Shown once."""

    token: str
    id: str
    """Its name in lists, and for revoking it."""
    federation: str
    uses: int
    expires_at: float


class TokenSummary(Message):
    """A join token as lists show it."""

    id: str
    uses_left: int
    expires_at: float


class ViewerRequest(Message):
    """Ask for a viewer's token: it may read everything but secrets, and change nothing."""

    expires_in: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 30 * 86400.0


class ViewerToken(Message):
    """A viewer's token. Shown once."""

    token: str
    id: str
    expires_at: float


class Viewer(Message):
    """A viewer's token as lists show it."""

    id: str
    expires_at: float


DeviceState = Literal["new", "ready", "failed", "removed"]


class Device(Message):
    """A device as the operator sees it.

    `bytes_up` and `bytes_down` are payloads: acknowledged updates, and downlinks as often as they were fetched (the one
    after the last round too). `messages_up` and `messages_down` are the bodies of everything else, by kind: "enrol",
    "report" up, "enrol", "work", "receipt", "bundle" (manifest and parts) down. HTTP's own headers are not counted.
    """

    device: str
    enrolled_at: float
    last_seen_at: float
    updates: int
    bytes_up: int
    bytes_down: int
    messages_up: dict[str, int] = Field(default={})
    messages_down: dict[str, int] = Field(default={})
    removed: bool = False
    state: DeviceState = "ready"
    """"new": enrolled only; "failed": `failure` has the reason, it may be drawn again; "removed" by the operator."""
    ready: bool = True
    """It has asked for work: it counts and may be drawn. No round waits for a device that has only enrolled."""
    report: Report | None = None
    failure: Failure | None = None
    """Why it failed in its last failed round; None once a later update of it was taken."""
    cost: dict[str, float] = Field(default={})
    """The cost of its last update, as far as it was reported: "seconds", "joules", "megabytes", "celsius", and
    "battery", the charge left in percent."""
    client: str = ""
    """Its program and version, as `maskfleet/0.1.0`; empty until it has asked for work."""
    engine: str = ""
    """Its training engine, as `onnxruntime`; empty when it is not reported."""


class BundleReceipt(Message):
    """What the coordinator still lacks of a bundle: PUT each missing part, then create federations from it."""

    digest: Sha256
    name: str
    missing: list[str]


Kind = Literal["onnx", "pte"]
"""What a model is made as."""


class ExportRequest(Message):
    """Ask for a model as a file of this kind: the global one, or with `device` that device's own.

    A device's own model may be unknown to the coordinator: a part of it stays on the device, or the device kept a model
    of its own training. Then the file has the global model, and `source` of the answer is `global`.
    """

    kind: Kind
    device: Name | None = None


class Export(Message):
    """An export: what the file is, and how far it is.

    `detail` is the worker's last line, why it failed, or what was written. `source` of a ready file is "global" for the
    model that all devices share, "personal" for that of `device`.
    """

    id: Sha256
    kind: Kind
    device: str | None
    round: int
    """The last closed round when it was asked for."""
    state: Literal["waiting", "running", "ready", "failed"]
    source: Literal["global", "personal"] | None = None
    detail: str = ""
    size: int | None = None


class BundleSummary(Message):
    """A bundle in figures: those of its manifest, what is missing, what uses it."""

    digest: Sha256
    added_at: float
    federations: list[str]
    """Those that use it; while there is one, the bundle cannot be deleted."""
    fault: str | None = None
    """Why its manifest cannot be read; the other fields are empty then."""
    name: str = ""
    missing: list[str] = Field(default=[])
    input: list[int] = Field(default=[])
    """The shape of a sample."""
    target: str = ""
    parameters: int = 0
    statistics: int = 0
    """Values of batch normalisation."""
    layers: int = 0
    groups: int = 0
    """Groups of channels that can be pruned together."""
    seed: int | None = None
    """What the weights are drawn from; null when they are stored."""
    parts: dict[str, int] = Field(default={})
    """Bytes of each part."""


class MethodSummary(Message):
    """A method that federations can run."""

    name: str
    description: str
    defaults: dict[str, Any]
    """Of every setting that has one."""
    settings: dict[str, Any]
    """The JSON Schema of its settings, those of `method` beside `name` in a federation's configuration."""


class Health(Message):
    """The coordinator is up; `faulty`: it cannot read its database."""

    status: Literal["ok", "faulty"]
    version: str
    federations: int
