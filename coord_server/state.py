"""What the round engine stores of one federation, and what can be asked of it. `engine` holds the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from edge_kernels import counter
from pydantic import TypeAdapter

from edge_client.bundle import digest
from edge_client.protocol.messages import Failure, FederationConfig, Phase

Stage = Literal["idle", "drawing", "collecting", "aggregating"]


@dataclass(frozen=True)
class State:
    """All that the engine stores of one federation: O(cohort). Times are the caller's seconds, names are sorted."""

    phase: Phase = "recruiting"
    stage: Stage = "idle"
    round: int = 0
    """The round under way or about to start; 0 while recruiting, N when finished."""
    value: str = ""
    """SHA-256 of the global value that the last round left; empty before the first has closed."""
    attempt: int = 0
    """Attempts of this round that have opened."""
    tries: int = 0
    """The same since the federation was last resumed: at most `max_attempts`."""
    cohort: tuple[str, ...] = ()
    """Devices this attempt asked."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """Devices asked by any attempt of this round, with their place, 0 .. cohort - 1: their updates are accepted."""
    received: Mapping[str, str] = field(default_factory=dict)
    """Acknowledged updates of this round: device -> SHA-256."""
    unusable: tuple[str, ...] = ()
    """Devices whose acknowledged update of this round cannot be folded: neither counted nor asked again."""
    excused: tuple[str, ...] = ()
    """Devices of the cohort that failed or were removed: this attempt does not wait for them."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """The last failure in this round of each device that has not reported since; the reason is cut."""
    ended: float | None = None
    """When the round's last attempt ended without closing it; None once the operator has resumed."""
    opened: float = 0.0
    """When the round's first attempt opened."""
    deadline: float | None = None
    """When this attempt ends; None while nothing is collected or the clock stands still."""
    remaining: float | None = None
    """Seconds left of the attempt while paused."""
    fault: str | None = None
    """Why the federation paused by itself; None when the operator paused it, or it runs."""
    changed: Mapping[str, int | float] = field(default_factory=dict)
    """Settings that the operator has changed and that are in force."""
    next_rounds: int | None = None
    """The number of rounds that is in force from the next round on; None when it stays."""
    places: int | None = None
    """Places of a round, once the operator has changed the cohort: the cohort as it was created. Else None."""
    fleet: int = 0
    """Devices that had asked for work and were not removed when the last attempt opened; at least those asked."""


def in_force(config: FederationConfig, state: State) -> FederationConfig:
    """The settings of the round under way: those the federation was created with, and what the operator changed."""
    return config.model_copy(update=dict(state.changed)) if state.changed else config


def announced(config: FederationConfig, state: State) -> FederationConfig:
    """The settings as the operator sees them: those in force, with the number of rounds from the next round on."""
    now = in_force(config, state)
    return now if state.next_rounds is None else now.model_copy(update={"rounds": state.next_rounds})


def tag(settings: FederationConfig) -> str:
    """A name for these settings and no others: 16 hex digits."""
    return digest(settings.model_dump_json().encode())[:16]


def lease(config: FederationConfig, state: State, device: str) -> str:
    """The name of one device's turn in the round under way, the same in every attempt: 16 hex digits.

    It depends on the global value: an update trained from a value that a restored backup has lost is refused.
    """
    return f"{counter.key(config.seed, 'lease', config.name, state.round, state.value, device):016x}"


def choose_cohort(
    config: FederationConfig, devices: tuple[str, ...], round_: int, attempt: int, size: int
) -> tuple[str, ...]:
    """The `size` devices that the attempt asks first; both are sorted by name."""
    prefix = counter.key(config.seed, "cohort", round_, attempt)
    keys = counter.keys(prefix, np.fromiter(map(counter.word, devices), np.uint64, len(devices)))
    smallest = np.argsort(keys, kind="stable")[: max(size, 0)]  # equal keys: the smaller name
    return tuple(sorted(devices[i] for i in smallest))


def missing(state: State) -> tuple[str, ...]:
    """Devices of the cohort that the attempt still waits for."""
    return tuple(d for d in state.cohort if d not in state.received and d not in state.excused)


def usable(state: State) -> tuple[str, ...]:
    """Devices whose updates of this round count, sorted."""
    return tuple(sorted(state.received.keys() - set(state.unusable)))


def left(config: FederationConfig, state: State, now: float) -> float | None:
    """Seconds until the attempt's deadline, 0 when it has passed; None while there is none.

    Never more than an attempt has, even when `now` comes from a clock that was set back.
    """
    return None if state.deadline is None else min(max(state.deadline - now, 0.0), config.deadline_seconds)


# --- the stored form

_STATE = TypeAdapter(State)


def dump(state: State) -> str:
    """The state as JSON; `load` restores an equal one."""
    return _STATE.dump_json(state).decode()


def load(text: str) -> State:
    """The state that `dump` wrote."""
    return _STATE.validate_json(text)
