"""The inputs of the round engine (events) and its outputs (decisions). `engine` holds the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_client.protocol.messages import FailureKind

# --- events: what happened


@dataclass(frozen=True)
class Event:
    """Something happened at `now`, the caller's clock in seconds."""

    now: float


@dataclass(frozen=True)
class Arrived(Event):
    """A device that was not present has asked for work; its row is written with this commit."""

    device: str


@dataclass(frozen=True)
class Present(Event):
    """The devices that can be drawn at this moment, sorted by name: the answer to `Draw`, or what may end recruiting.

    `fleet` devices have asked for work at any time and are not removed.
    """

    devices: tuple[str, ...]
    fleet: int


@dataclass(frozen=True)
class Started(Event):
    """The operator started the federation; `devices` and `fleet` as in `Present`."""

    devices: tuple[str, ...]
    fleet: int


@dataclass(frozen=True)
class Removed(Event):
    """The operator removed a device."""

    device: str


@dataclass(frozen=True)
class Updated(Event):
    """A device's update arrived whole and valid; it is written together with the state that acknowledges it."""

    round: int
    device: str
    lease: str
    sha256: str


@dataclass(frozen=True)
class Failed(Event):
    """A device reported that it cannot do its round."""

    round: int
    device: str
    lease: str
    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class Aggregated(Event):
    """The updates of this attempt are folded; the new global value is written together with the state."""

    round: int
    attempt: int
    value: str = ""
    """SHA-256 of the new global value; a simulation, which sends no lease, gives none."""


@dataclass(frozen=True)
class Unusable(Event):
    """No update of this attempt can be folded; those of `devices` are left out for good."""

    round: int
    attempt: int
    devices: tuple[str, ...]


class Tick(Event):
    """Time passed."""


class Paused(Event):
    """The operator paused the federation."""


class Resumed(Event):
    """The operator resumed the federation."""


@dataclass(frozen=True)
class Changed(Event):
    """The operator changed settings: fields of `messages.Change`, by name."""

    settings: Mapping[str, float]
    seen: tuple[str, ...] | None = None
    """Refused unless the settings have one of these tags; None: whatever they are."""


class Stopped(Event):
    """The operator ended the federation."""


class Deleted(Event):
    """The operator deleted the federation; it leaves the database with this commit."""


# --- decisions: what the caller has to do


@dataclass(frozen=True)
class Draw:
    """Attempt `attempt` of `round` needs a cohort: answer with `Present`, now and whenever a device arrives."""

    round: int
    attempt: int


@dataclass(frozen=True)
class OpenRound:
    """Ask each device of `cohort` to train `round`; `deadline` is when the attempt ends."""

    round: int
    attempt: int
    cohort: tuple[str, ...]
    deadline: float


@dataclass(frozen=True)
class Aggregate:
    """Fold the acknowledged updates of `devices` (sorted), then answer with `Aggregated` or `Unusable`."""

    round: int
    attempt: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Acknowledge:
    """The update is accepted; `duplicate` when it was accepted before."""

    round: int
    device: str
    sha256: str
    duplicate: bool


@dataclass(frozen=True)
class GiveUp:
    """The round cannot be closed without the operator: the federation is paused, `fault` is the reason."""

    round: int
    fault: str


@dataclass(frozen=True)
class Finish:
    """The last round is aggregated: devices fetch the final downlink, round `round` + 1."""

    round: int


@dataclass(frozen=True)
class Refuse:
    """The event was not admissible and changed nothing. `kind` is a key of `problems.PROBLEMS`."""

    kind: str
    detail: str


Decision = Draw | OpenRound | Aggregate | Acknowledge | GiveUp | Finish | Refuse
