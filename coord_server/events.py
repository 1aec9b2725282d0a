"""What the round engine is told (events) and what it answers (decisions). What follows from what is in `engine`."""

from __future__ import annotations

from dataclasses import dataclass

# --- events: what happened


@dataclass(frozen=True)
class Ready:
    """A device asked for work: from now on it counts and may be drawn."""

    now: float
    device: str


@dataclass(frozen=True)
class Removed:
    """The operator removed a device."""

    now: float
    device: str


@dataclass(frozen=True)
class Started:
    """The operator started the federation with the devices there are."""

    now: float


@dataclass(frozen=True)
class Tick:
    """Time passed."""

    now: float


@dataclass(frozen=True)
class Updated:
    """A device's update arrived whole and valid, and is safe on disk."""

    now: float
    round: int
    device: str
    lease: str
    sha256: str


@dataclass(frozen=True)
class Aggregated:
    """The round's new global value is safe on disk."""

    now: float
    round: int


@dataclass(frozen=True)
class Unusable:
    """Not one update of the round could be folded: those of `devices` are left out for good."""

    now: float
    round: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Paused:
    """The operator paused the federation."""

    now: float


@dataclass(frozen=True)
class Resumed:
    """The operator resumed it."""

    now: float


@dataclass(frozen=True)
class Stopped:
    """The operator ended it."""

    now: float


Event = Ready | Removed | Started | Tick | Updated | Aggregated | Unusable | Paused | Resumed | Stopped


# --- decisions: what is to be done


@dataclass(frozen=True)
class OpenRound:
    """Ask each device of `cohort` to train `round`; `deadline` is when the attempt ends."""

    round: int
    attempt: int
    cohort: tuple[str, ...]
    deadline: float


@dataclass(frozen=True)
class Aggregate:
    """Fold the acknowledged updates of `devices` (sorted), then say `Aggregated`."""

    round: int
    attempt: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Acknowledge:
    """The update is in; `duplicate` when it already was."""

    round: int
    device: str
    sha256: str
    duplicate: bool


@dataclass(frozen=True)
class Finish:
    """The last round is aggregated: devices fetch the final downlink, round `round` + 1."""

    round: int


@dataclass(frozen=True)
class Refuse:
    """The event was not admissible and changed nothing. `kind` is a problem's fixed word."""

    kind: str
    detail: str


Decision = OpenRound | Aggregate | Acknowledge | Finish | Refuse
