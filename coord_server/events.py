"""The inputs of the round engine (events) and its outputs (decisions). `engine` holds the rules."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.protocol.messages import FailureKind

# --- events: what happened; `now` is the caller's clock in seconds


@dataclass(frozen=True)
class Present:
    """The devices that can be drawn at this moment, sorted by name: the answer to `Draw`, or a newcomer's arrival."""

    now: float
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Removed:
    """The operator removed a device."""

    now: float
    device: str


@dataclass(frozen=True)
class Started:
    """The operator started the federation with the devices that are present, sorted by name."""

    now: float
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tick:
    """Time passed."""

    now: float


@dataclass(frozen=True)
class Updated:
    """A device's update arrived whole and valid; it is written together with the state that acknowledges it."""

    now: float
    round: int
    device: str
    lease: str
    sha256: str


@dataclass(frozen=True)
class Failed:
    """A device reported that it cannot do its round."""

    now: float
    round: int
    device: str
    lease: str
    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class Aggregated:
    """The updates of this attempt are folded; the new global value is written together with the state."""

    now: float
    round: int
    attempt: int


@dataclass(frozen=True)
class Unusable:
    """No update of this attempt can be folded; those of `devices` are left out for good."""

    now: float
    round: int
    attempt: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Paused:
    """The operator paused the federation."""

    now: float


@dataclass(frozen=True)
class Resumed:
    """The operator resumed the federation."""

    now: float


@dataclass(frozen=True)
class Stopped:
    """The operator ended the federation."""

    now: float


Event = Present | Removed | Started | Tick | Updated | Failed | Aggregated | Unusable | Paused | Resumed | Stopped


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
class Forget:
    """Drop the record of `device`: its next downlink is that of a device of which nothing is known."""

    device: str


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


Decision = Draw | OpenRound | Aggregate | Acknowledge | Forget | GiveUp | Finish | Refuse
