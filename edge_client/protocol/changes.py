"""The events of a stream: messages of `GET .../events`, each with a `kind` of its own."""

from __future__ import annotations

from typing import Literal

from edge_client.protocol.messages import Failure, Federation, Message, Phase


class Joined(Message):
    """So many devices have asked for work and are not removed."""

    kind: Literal["joined"] = "joined"
    devices: int


class RoundOpened(Message):
    """An attempt of a round asks its cohort; `deadline` is when it ends, in seconds since the epoch."""

    kind: Literal["round_opened"] = "round_opened"
    round: int
    attempt: int
    cohort: list[str]
    deadline: float


class UpdateTaken(Message):
    """A device's update is durable and counts."""

    kind: Literal["update"] = "update"
    round: int
    device: str


class UpdateRefused(Message):
    """A device's update was refused. Only the coordinator process that refused it sends this event."""

    kind: Literal["refused"] = "refused"
    round: int
    device: str
    problem: str
    """The kind of problem that was answered."""
    detail: str


class DeviceFailed(Message):
    """A device could not do its round."""

    kind: Literal["failed"] = "failed"
    round: int
    device: str
    failure: Failure


class RoundClosed(Message):
    """A round is aggregated; GET its record."""

    kind: Literal["round_closed"] = "round_closed"
    round: int


class PhaseChanged(Message):
    """The federation starts, pauses, goes on or ends."""

    kind: Literal["phase"] = "phase"
    phase: Phase
    round: int


class SettingsChanged(Message):
    """The operator changed settings; `settings` has the new values."""

    kind: Literal["changed"] = "changed"
    settings: dict[str, int | float]


class Faulted(Message):
    """What stops the federation from continuing by itself; null when that is over."""

    kind: Literal["fault"] = "fault"
    fault: str | None


class Snapshot(Message):
    """The federation as it stands: the first event of a stream that cannot continue from its reader's last event."""

    kind: Literal["snapshot"] = "snapshot"
    federation: Federation


AnyChange = (
    Joined | RoundOpened | UpdateTaken | UpdateRefused | DeviceFailed | RoundClosed | PhaseChanged | SettingsChanged
    | Faulted
)  # fmt: skip
