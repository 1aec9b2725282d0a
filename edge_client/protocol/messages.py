"""JSON messages of the REST API, as pydantic models: the one place where a field's name and range are written.

Here are a federation's configuration, a device's conversation with the coordinator, and the record of a round; what an
operator alone exchanges is in `operator`, the events of a stream in `changes`. Times are seconds, sizes are bytes,
rounds count from 1, digests are SHA-256 in lower-case hex. Examples are those of the OpenAPI document,
`coord_server/http/examples.json`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from edge_client.protocol.patterns import DIGEST, NAME

Name = Annotated[str, Field(pattern=NAME)]
Sha256 = Annotated[str, Field(pattern=DIGEST)]

MAX_SAMPLES = 2**31 - 1  # a device states its own weight in a mean: more is refused
MAX_LOSS = 1e6  # of either sign; the mean loss over a federation stays finite

MAX_ROUNDS = 1_000_000
MAX_DEVICES = 1_000_000
MAX_SECONDS = 1e9
MAX_SIZE = 2**40  # bytes of one payload
REASON_MOST = 1000  # characters of a device's reason
WAITS_SHOWN = 10

Reason = Annotated[str, Field(max_length=REASON_MOST)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_SAMPLES)]
Rounds = Annotated[int, Field(strict=True, ge=1, le=MAX_ROUNDS)]
Devices = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)]
Parameters = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Size = Annotated[int, Field(strict=True, ge=0, le=MAX_SIZE)]
Deadline = Annotated[float, Field(strict=True, ge=0.5, le=MAX_SECONDS, allow_inf_nan=False)]


class Message(BaseModel):
    """Base: unknown fields are refused, values are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Problem(BaseModel):
    """RFC 9457 problem. `type` ends in a fixed word ("wrong-round"); `detail` has the fault, the value, what to do."""

    type: str
    title: str
    status: int
    detail: str


Guard = Literal["clip", "drop", "none"]
"""What happens to an update whose norm or weight is far beyond the round's others."""

Personalise = Literal["best", "global", "local"]
Source = Literal["global", "local", "last"]


class StartFrom(Message):
    """Where a federation's first values are from instead of its bundle."""

    federation: Name
    """Its global model after its last closed round."""


class FederationConfig(Message):
    """What an operator asks for. `method` is ``{"name": ..., **settings}``."""

    name: Name
    bundle: Sha256
    method: dict[str, Any]
    rounds: Rounds
    cohort: Devices
    """Devices asked in each round."""
    min_devices: Devices = 1
    """The federation starts by itself once so many devices have asked for work."""
    start: Literal["auto", "manual"] = "auto"
    """"manual": it waits for the operator's start, however many have enrolled."""
    min_updates: Devices = 1
    """Fewest updates a round may be aggregated from when its deadline passes; with fewer it is run again."""
    deadline_seconds: Deadline = 3600.0
    """An attempt is journalled when it opens: more than two a second only wear the disk out."""
    seed: Seed = 0
    backend: Name | None = None
    """Training backend the devices are asked to use; None leaves it to each device."""
    max_attempts: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """Attempts of one round; when the last one fails too, the federation pauses and `fault` has the reason."""
    presence_seconds: Annotated[float, Field(strict=True, ge=1, le=MAX_SECONDS, allow_inf_nan=False)] = 300.0
    """A device is drawn only if it made a request within so many seconds before the round opens."""
    guard: Guard = "clip"
    """What happens to an update whose norm or weight is far beyond the round's others."""
    personalise: Personalise = "best"
    """The model a device ends with: from the last downlink alone, after one more round's local epochs, or the best on
    its validation samples of these two and the one it trained last."""
    licence: Annotated[str, Field(max_length=4096)] = ""
    """Terms of use, written into every personal model."""
    start_from: StartFrom | None = None
    """Start from another federation's global model: `bundle` becomes that of the same graphs with these values."""

    @field_validator("method", "start_from", mode="before")
    @classmethod
    def _no_plain_name(cls, given: Any, field: ValidationInfo) -> Any:
        if isinstance(given, str):
            name, key = given[:64], "name" if field.field_name == "method" else "federation"
            raise ValueError(f'write {field.field_name} = {{ {key} = "{name}" }}, or {{"{key}": "{name}"}} in JSON')
        return given

    @model_validator(mode="after")
    def _rounds_can_close(self) -> FederationConfig:
        if self.min_updates > self.cohort:
            raise ValueError(f"min_updates {self.min_updates} is more than the cohort of {self.cohort}; lower it")
        return self


class Change(Message):
    """New values of settings, before or while the federation runs; what is left out stays."""

    deadline_seconds: Deadline | None = None
    """Of the attempt under way too: its deadline moves by the difference."""
    rounds: Rounds | None = None
    """In force from the next round, hence more than the rounds that have begun."""
    cohort: Devices | None = None
    """From the next attempt; at most as many as at the creation."""
    min_devices: Devices | None = None
    """Only while the federation recruits."""
    min_updates: Devices | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_that_is_fixed(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name in FederationConfig.model_fields and name not in cls.model_fields:
                can = ", ".join(cls.model_fields)
                raise ValueError(
                    f"{name} is fixed at the creation, what can change is {can}; create another federation"
                )
        return given


Phase = Literal["recruiting", "running", "paused", "finished", "stopped"]


class Federation(Message):
    """A federation as it stands."""

    id: str
    config: FederationConfig | None
    """None, as is `phase`, when the coordinator cannot read it: `fault` has the reason."""
    phase: Phase | None
    round: int
    """The round under way (or about to start), 0 while recruiting, `rounds` when finished."""
    devices: int
    updates: int
    """Updates acknowledged in the round under way."""
    expected: int = 0
    """Devices of the cohort the round still waits for."""
    waits_for: list[str] = []
    """The first of them by name, at most `WAITS_SHOWN`."""
    attempt: int = 0
    """How many cohorts the round under way has asked; more than 1 when too few reported in time."""
    deadline_in: float | None = None
    """Seconds until the round's deadline; None while there is none (idle, aggregating, paused)."""
    fault: str | None = None
    """Why the federation cannot continue by itself (a full disk, a damaged record); None when it can."""
    created_at: float = 0.0
    places: int | None = None
    """The cohort it was created with, which methods divide by even after a change; None when not readable."""
    caution: str | None = None
    """In the answer to its creation alone: what its method warns of with this bundle and these settings."""
    no_global_model: str | None = None
    """Why there is no model that all devices share; None when there is one, in lists, and for a damaged bundle."""

    @property
    def closed(self) -> int:
        """The last closed round, 0 before the first."""
        return self.round if self.phase == "finished" else max(self.round - 1, 0)


class Enrol(Message):
    """A device presents a join token and the credential it made for itself (256 random bits, hex).

    Sending the same name and credential again is harmless, so a lost answer loses nothing.
    """

    token: str
    device: Name
    credential: Annotated[str, Field(pattern=DIGEST)]
    sample: Annotated[tuple[Parameters, ...], Field(max_length=64)] | None = None
    """The shape of one of its samples: of another shape than the model's input, it is refused and the token kept."""


class Enrolled(Message):
    """What the device needs to take part."""

    federation: Name
    device: Name
    bundle: Sha256
    method: dict[str, Any]
    rounds: Rounds
    cohort: Devices
    """Devices asked in each round."""
    seed: Seed
    backend: Name | None = None
    personalise: Personalise = "best"
    licence: Annotated[str, Field(max_length=4096)] = ""

    @property
    def path(self) -> str:
        """The federation's address at the coordinator."""
        return f"/v1/federations/{self.federation}"


class Train(Message):
    """Work: fetch `downlink`, train round `round`, PUT the update with this lease before `deadline_in` seconds."""

    status: Literal["train"] = "train"
    round: Rounds
    lease: Name
    rounds: Rounds | None = None
    """The federation's rounds as they stand, which the operator can change; None: as at the enrolment."""
    place: Annotated[int, Field(strict=True, ge=0, lt=MAX_DEVICES)]
    """The device's place in the round's cohort, from 0: methods with shared randomness use it."""
    downlink: Sha256
    downlink_size: Size
    deadline_in: Annotated[FiniteFloat, Field(ge=0, le=MAX_SECONDS)]


class Wait(Message):
    """No work now: ask again after `poll_after` seconds. `reason` is for the person watching."""

    status: Literal["wait"] = "wait"
    reason: str
    poll_after: Annotated[FiniteFloat, Field(ge=0, le=3600)]


class Finish(Message):
    """The rounds are over: fetch `downlink`, make the personal model, PUT a report."""

    status: Literal["finish"] = "finish"
    round: Annotated[int, Field(strict=True, ge=2, le=MAX_ROUNDS + 1)]
    """One more than the last that was trained."""
    downlink: Sha256
    downlink_size: Size


class Stopped(Message):
    """The operator stopped the federation; no work is left."""

    status: Literal["stopped"] = "stopped"
    reason: str


Work = Annotated[Train | Wait | Finish | Stopped, Field(discriminator="status")]


class Receipt(Message):
    """The update is safe on disk and will be counted exactly once."""

    federation: Name
    round: Rounds
    device: Name
    sha256: Sha256
    size: Size
    work: Annotated[Train | Finish | Stopped, Field(discriminator="status")] | None = None
    """The device's next work, when its request had a `wait` and work came in time; None: ask for it."""


class Report(Message):
    """A device's last word: its personal model on its own test data."""

    score: Annotated[float, Field(strict=True, ge=-MAX_LOSS, le=1, allow_inf_nan=False)]
    test_samples: Count
    parameters_dense: Parameters
    parameters_compact: Parameters
    latency_dense_ms: FiniteFloat | None = None
    latency_compact_ms: FiniteFloat | None = None
    max_abs_diff: FiniteFloat | None = None
    uncompacted: Reason | None = None
    """Why the device kept the masked dense model: its compact one could not be shown equal. None when it was."""
    source: Source = "global"
    """Which model it kept: from the last downlink, after local epochs from there, or as trained in its last round."""


FailureKind = Literal["lost", "downlink", "diverged", "out-of-memory", "backend", "data", "refused"]


class Failure(Message):
    """A device cannot do its round. The round goes on without it.

    `lost`: the device no longer holds what the downlink builds on; the coordinator sends everything with the next one.
    `downlink`: the received model cannot be read, or its first gradient is not finite. `diverged`: the device's
    training did not stay finite.
    `out-of-memory`, `data`: the device's memory or samples are the cause. `backend`: its training engine is.
    `refused`: the coordinator refused its update as too large or not valid.
    """

    kind: FailureKind
    reason: Reason


class DeviceMetrics(Message):
    """One device's figures of one round: a list in the metadata of its update (`protocol.metrics`)."""

    samples: Count
    loss: Annotated[float, Field(strict=True, ge=-MAX_LOSS, le=MAX_LOSS, allow_inf_nan=False)]
    score_before: Annotated[float, Field(strict=True, ge=-MAX_LOSS, le=1, allow_inf_nan=False)] = 0.0
    """The target's score of the received model on the device's test samples; accuracy for labels."""
    score_after: Annotated[float, Field(strict=True, ge=-MAX_LOSS, le=1, allow_inf_nan=False)] = 0.0
    """The same after the local epochs."""
    test_samples: Count = 0
    """The weight of the scores in a mean."""


class MeanCost(Message):
    """One figure over the devices that gave it: mean, most, and how many they are."""

    mean: float
    most: float
    devices: int


class Traffic(Message):
    """Bytes of one round, all its devices together, by kind.

    Kinds: the names of the payload's arrays, and "header" for the container's own bytes.
    """

    up: dict[str, int] = {}
    down: dict[str, int] = {}
    one_time_up: dict[str, int] = {}
    one_time_down: dict[str, int] = {}
    last_down: dict[str, int] = {}
    """Only of the last round: the downlinks after it, of every device that has fetched its own, each counted once."""


class Scores(Message):
    """Local-test scores over devices: the mean is weighted by test samples, capped as those of a round's loss."""

    mean: float
    worst: float
    p10: float
    best: float


class Round(Message):
    """The record of one finished round."""

    round: int
    devices: list[str]
    traffic: Traffic
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    loss: float | None
    """Mean over the samples trained on. A device counts with at most 10 times the median number of samples."""
    score_before: Scores | None
    """None, as is the next, when no device that took part has test samples."""
    score_after: Scores | None
    seconds: float
    cost: dict[str, MeanCost] = {}
    """What the round cost a device: "seconds", "joules", "megabytes", "celsius", as far as devices gave them."""
    skipped: list[str] = []
    """Devices whose acknowledged update could not be folded; it is left out of everything above."""
    guarded: dict[str, str] = {}
    """By device: an update that was out of line, clipped to the medians of the round or left out, and why."""
    failed: dict[str, Failure] = {}
    """By device, why it could not do the round."""
