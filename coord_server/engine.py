"""The round state machine. Everything that decides what a federation does next lives here, and nothing else does.

No clock, socket or disk: an event goes in, the new state and the decisions come out. Whoever calls `apply`
journals the state, then carries the decisions out. The HTTP coordinator and the simulator call the same function.

The rules, in plain words
-------------------------
* A federation recruits, runs, may be paused, and ends finished or stopped. `stopped` and `finished` are for good.
* Enrolling only registers a credential. A device takes part once it has asked for work: then it has fetched its
  bundle and read its data, so nobody waits for one that never could.
* It starts once `min_devices` take part, or when the operator says so (`start = "manual"` leaves it to them).
* Rounds are 1 .. N, one at a time, none skipped. A round asks a *cohort*: the `cohort` devices with the smallest
  ``key(seed, "cohort", round, attempt, device)`` among those that take part and are not removed. When
  they first asked plays no part in it. With fewer than `min_updates` eligible devices the round waits for more.
* A round closes when the whole cohort has reported, or at its deadline with at least `min_updates` updates. With
  fewer the same round is run again: next attempt, new cohort, new deadline. The global value has not changed, so
  updates that are already acknowledged stay in, and a device asked by an earlier attempt may still report.
* An update is named by round, device, lease and digest. The same one again gets the same acknowledgement; another
  body for the same lease is refused; so are a foreign round, lease or device. An acknowledged update is counted
  exactly once, even when its device is removed afterwards.
* An update that is acknowledged but cannot be folded is left out of the round. When that leaves nothing, the round
  is run again without its devices.
* While aggregating, nothing more is taken into the round. The engine says `Aggregate` once and waits for
  `Aggregated`; a coordinator that restarts asks `pending` and does it again from its journal.
* A clock that is set back makes no attempt longer than `deadline_seconds` from the next Tick on: the deadline is moved.
* A pause stops the round's clock: updates are still taken, nothing closes or opens until the federation resumes.
  A removed device is not waited for.

The table (an event that a phase does not list is refused, kind "wrong-phase")
-------------------------------------------------------------------------------
    phase       event       next phase      decisions
    recruiting  Ready       recruiting      - or, with min_devices, running: OpenRound
    recruiting  Started     running         OpenRound
    running     Ready       running         OpenRound when the round waited for devices
    running     Updated     running         Acknowledge | Refuse; Aggregate when the cohort is complete
    running     Tick        running         after the deadline: Aggregate, or OpenRound with the next attempt; the
                                            deadline is moved when it is further away than an attempt lasts
    running     Aggregated  running         OpenRound of the next round; after the last: finished, Finish
    running     Unusable    running         OpenRound with the next attempt, without the devices it names
    running     Paused      paused
    paused      Ready       paused
    paused      Updated     paused          Acknowledge | Refuse
    paused      Aggregated  paused          after the last round: finished, Finish
    paused      Unusable    paused
    paused      Resumed     running         Aggregate or OpenRound when it is due
    finished    Ready       finished        (a late device fetches the final model)
    any         Removed     as it was       as running/Updated when the cohort is complete without it
    any         Tick        as it was       (of use while running)
    any alive   Stopped     stopped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edge_kernels import counter
from pydantic import TypeAdapter

from coord_server.events import (
    Acknowledge,
    Aggregate,
    Aggregated,
    Decision,
    Event,
    Finish,
    OpenRound,
    Paused,
    Ready,
    Refuse,
    Removed,
    Resumed,
    Started,
    Stopped,
    Tick,
    Unusable,
    Updated,
)
from edge_client.protocol.messages import FederationConfig, Phase

Stage = Literal["idle", "collecting", "aggregating"]


@dataclass(frozen=True)
class State:
    """All that the engine remembers of one federation. Times are the caller's seconds, names are sorted."""

    phase: Phase = "recruiting"
    devices: tuple[str, ...] = ()
    """Those that take part: they have asked for work and are not removed."""
    round: int = 0
    """The round under way or about to start; 0 while recruiting, N when finished."""
    attempt: int = 0
    stage: Stage = "idle"
    cohort: tuple[str, ...] = ()
    """Devices this attempt waits for."""
    asked: tuple[str, ...] = ()
    """Devices asked by any attempt of this round: their updates are taken."""
    received: Mapping[str, str] = field(default_factory=dict)
    """Acknowledged updates of this round: device -> SHA-256."""
    unusable: tuple[str, ...] = ()
    """Devices whose acknowledged update of this round cannot be folded: not counted, not asked again."""
    opened: float = 0.0
    """When the round's first attempt opened."""
    deadline: float | None = None
    """When this attempt ends; None while nothing is collected or the clock stands still."""
    remaining: float | None = None
    """Seconds left of the attempt while paused."""


Step = tuple[State, tuple[Decision, ...]]


# --- questions anyone may ask


def lease(config: FederationConfig, round_: int, device: str) -> str:
    """The name of one device's turn in one round, the same in every attempt: 16 hex digits."""
    return f"{counter.key(config.seed, 'lease', config.name, round_, device):016x}"


def choose_cohort(config: FederationConfig, devices: tuple[str, ...], round_: int, attempt: int) -> tuple[str, ...]:
    """The attempt's cohort among `devices`, sorted by name."""
    drawn = sorted((counter.key(config.seed, "cohort", round_, attempt, d), d) for d in devices)
    return tuple(sorted(d for _, d in drawn[: config.cohort]))


def missing(state: State) -> tuple[str, ...]:
    """Devices of the cohort that still take part and have not reported."""
    present = set(state.devices)
    return tuple(d for d in state.cohort if d not in state.received and d in present)


def usable(state: State) -> tuple[str, ...]:
    """Devices whose updates of this round count, sorted."""
    return tuple(sorted(state.received.keys() - set(state.unusable)))


def left(config: FederationConfig, state: State, now: float) -> float | None:
    """Seconds until the attempt's deadline, 0 when it has passed; None while there is none.

    Never more than an attempt has, even when `now` is of a clock that was set back.
    """
    return None if state.deadline is None else min(max(state.deadline - now, 0.0), config.deadline_seconds)


def pending(state: State) -> tuple[Decision, ...]:
    """What a coordinator that has just loaded `state` still has to carry out."""
    if state.phase in ("running", "paused"):
        if state.stage == "aggregating":
            return (Aggregate(state.round, state.attempt, usable(state)),)
        if state.stage == "collecting" and state.deadline is not None:
            return (OpenRound(state.round, state.attempt, state.cohort, state.deadline),)
    return ()


# --- transitions


def _refuse(state: State, kind: str, detail: str) -> Step:
    return state, (Refuse(kind, detail),)


def _open(config: FederationConfig, state: State, now: float) -> Step:
    """Open the next attempt of `state.round`, or wait when too few devices could ever report."""
    able = tuple(d for d in state.devices if d not in state.unusable)
    if not able or len({*able, *usable(state)}) < config.min_updates:
        return replace(state, stage="idle", cohort=(), deadline=None, remaining=None), ()
    attempt = state.attempt + 1
    cohort = choose_cohort(config, able, state.round, attempt)
    deadline = now + config.deadline_seconds
    opened = replace(
        state,
        attempt=attempt,
        stage="collecting",
        cohort=cohort,
        asked=tuple(sorted({*state.asked, *cohort})),
        opened=now if attempt == 1 else state.opened,
        deadline=deadline,
        remaining=None,
    )
    if not missing(opened) and len(usable(opened)) >= config.min_updates:
        return _close(opened)
    return opened, (OpenRound(state.round, attempt, cohort, deadline),)


def _close(state: State) -> Step:
    """Stop collecting and aggregate what is in."""
    closed = replace(state, stage="aggregating", deadline=None, remaining=None)
    return closed, (Aggregate(state.round, state.attempt, usable(state)),)


def _proceed(config: FederationConfig, state: State, now: float) -> Step:
    """Do what is due at `now` in a federation that runs."""
    if state.phase != "running" or state.stage == "aggregating":
        return state, ()
    if state.stage == "idle":
        return _open(config, state, now)
    late = state.deadline is not None and now >= state.deadline
    if late or not missing(state):
        return _close(state) if len(usable(state)) >= config.min_updates else _open(config, state, now)
    return state, ()


def _begin(config: FederationConfig, state: State, now: float) -> Step:
    return _proceed(config, replace(state, phase="running", round=1), now)


def _ready(config: FederationConfig, state: State, event: Ready) -> Step:
    state = replace(state, devices=tuple(sorted({*state.devices, event.device})))
    if state.phase == "recruiting":
        if config.start == "auto" and len(state.devices) >= config.min_devices:
            return _begin(config, state, event.now)
        return state, ()
    # A newcomer changes nothing for the cohort under way; it may be what an idle round waited for.
    return _proceed(config, state, event.now) if state.stage == "idle" else (state, ())


def _removed(config: FederationConfig, state: State, event: Removed) -> Step:
    state = replace(state, devices=tuple(d for d in state.devices if d != event.device))
    return _proceed(config, state, event.now) if state.stage == "collecting" else (state, ())


def _started(config: FederationConfig, state: State, event: Started) -> Step:
    if not state.devices:
        return _refuse(state, "no-devices", "no device has asked for work yet; hand out a join token first")
    return _begin(config, state, event.now)


def _tick(config: FederationConfig, state: State, event: Tick) -> Step:
    if state.deadline is not None and state.deadline - event.now > config.deadline_seconds:
        state = replace(state, deadline=event.now + config.deadline_seconds)
    return _proceed(config, state, event.now)


def _updated(config: FederationConfig, state: State, event: Updated) -> Step:
    who = f"device {event.device!r}"
    if event.round == state.round + 1 and state.stage == "aggregating":
        return _refuse(
            state,
            "round-not-open",
            f"round {state.round} is being aggregated again after a restart; send round {event.round} once more soon",
        )
    if event.round != state.round:
        return _refuse(
            state,
            "wrong-round",
            f"this update is for round {event.round}, the federation is at round {state.round}; ask for work again",
        )
    due = lease(config, event.round, event.device)
    if event.lease != due:
        return _refuse(
            state, "wrong-lease", f"lease {event.lease!r} is not the one {who} has in round {event.round}; ask for work"
        )
    if event.device in state.received:
        if state.received[event.device] == event.sha256:
            return state, (Acknowledge(event.round, event.device, event.sha256, duplicate=True),)
        return _refuse(
            state,
            "conflicting-update",
            f"{who} already sent round {event.round} with SHA-256 {state.received[event.device]}, this body has "
            f"{event.sha256}; the first one counts, drop this one",
        )
    if event.device not in state.asked or event.device not in state.devices:
        return _refuse(state, "not-in-cohort", f"{who} was not asked in round {event.round}; ask for work")
    if state.stage == "aggregating":
        return _refuse(state, "round-closed", f"round {event.round} is closed; drop this update and ask for work")
    state = replace(state, received={**state.received, event.device: event.sha256})
    state, decisions = _proceed(config, state, event.now)
    return state, (Acknowledge(event.round, event.device, event.sha256, duplicate=False), *decisions)


def _aggregated(config: FederationConfig, state: State, event: Aggregated) -> Step:
    if state.stage != "aggregating" or event.round != state.round:
        return _refuse(state, "wrong-round", f"round {event.round} is not being aggregated; round {state.round} is on")
    empty = replace(
        state, attempt=0, stage="idle", cohort=(), asked=(), received={}, unusable=(), deadline=None, remaining=None
    )
    if state.round == config.rounds:
        return replace(empty, phase="finished"), (Finish(state.round),)
    return _proceed(config, replace(empty, round=state.round + 1), event.now)


def _unusable(config: FederationConfig, state: State, event: Unusable) -> Step:
    if state.stage != "aggregating" or event.round != state.round:
        return _refuse(state, "wrong-round", f"round {event.round} is not being aggregated; round {state.round} is on")
    left_out = tuple(sorted({*state.unusable, *event.devices}))
    return _proceed(config, replace(state, stage="idle", cohort=(), unusable=left_out), event.now)


def _paused(config: FederationConfig, state: State, event: Paused) -> Step:
    return replace(state, phase="paused", deadline=None, remaining=left(config, state, event.now)), ()


def _resumed(config: FederationConfig, state: State, event: Resumed) -> Step:
    deadline = None if state.remaining is None else event.now + state.remaining
    return _proceed(config, replace(state, phase="running", deadline=deadline, remaining=None), event.now)


def _stopped(config: FederationConfig, state: State, event: Stopped) -> Step:
    return replace(state, phase="stopped", stage="idle", cohort=(), deadline=None, remaining=None), ()


_Handler = Callable[[FederationConfig, State, Any], Step]

TABLE: Mapping[Phase, Mapping[type, _Handler]] = {
    "recruiting": {Ready: _ready, Removed: _removed, Started: _started, Tick: _tick, Stopped: _stopped},
    "running": {
        Ready: _ready,
        Removed: _removed,
        Tick: _tick,
        Updated: _updated,
        Aggregated: _aggregated,
        Unusable: _unusable,
        Paused: _paused,
        Stopped: _stopped,
    },
    "paused": {
        Ready: _ready,
        Removed: _removed,
        Tick: _tick,
        Updated: _updated,
        Aggregated: _aggregated,
        Unusable: _unusable,
        Resumed: _resumed,
        Stopped: _stopped,
    },
    "finished": {Ready: _ready, Removed: _removed, Tick: _tick},
    "stopped": {Removed: _removed, Tick: _tick},
}


def apply(config: FederationConfig, state: State, event: Event) -> Step:
    """The state after `event` and what is to be done about it. Pure: same arguments, same answer."""
    handler = TABLE[state.phase].get(type(event))
    if handler is None:
        word = type(event).__name__.lower()
        return _refuse(state, "wrong-phase", f"the federation is {state.phase}; it cannot be {word} now")
    return handler(config, state, event)


# --- the journal's form

_STATE = TypeAdapter(State)


def dump(state: State) -> str:
    """The state as JSON; `load` gives an equal one back."""
    return _STATE.dump_json(state).decode()


def load(text: str) -> State:
    """The state that `dump` wrote."""
    return _STATE.validate_json(text)
