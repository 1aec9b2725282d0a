"""The round state machine. Every rule about what a federation does next is in this file.

It has no clock, socket or disk: an event goes in, the new state and the decisions come out. The caller writes the
state, then carries the decisions out. The HTTP coordinator and the simulator call the same function.

The rules
---------
* A federation recruits, runs, may be paused, and ends finished or stopped. `stopped` and `finished` are final.
* The engine holds no list of members. The caller reports which devices are present (they have asked for work, are not
  removed and made a request recently) with `Present`, whenever a `Draw` is open or the federation recruits; and the
  size of the fleet, those that have asked for work at any time and are not removed.
* It starts when `min_devices` are present, or when the operator starts it (`start = "manual"`).
* Rounds are 1 .. N, one at a time, none skipped. A round asks a *cohort*: the `cohort` devices with the smallest
  ``key(seed, "cohort", round, attempt, device)`` among those present. A later attempt asks only as many as are still
  missing, devices first that the round has not asked yet, and none that has already reported. When too few devices are
  present for `min_updates` updates, the round stays in stage `drawing`.
* A round closes when every device of its cohort has reported, failed or been removed, or at its deadline; either way
  it needs `min_updates` updates. With fewer, the same round is run again: next attempt, new cohort, new deadline. The
  global value has not changed, so updates that are already acknowledged count, and a device that an earlier attempt
  asked may still report.
* After `max_attempts` attempts the federation pauses with a fault. Resuming starts the count of attempts anew.
* A device has a place in the round's cohort, the same in all attempts: those of the first attempt in the order of
  their names; devices that later attempts add take the places of those that have not reported.
* A device that reports a failure is not waited for in this attempt. The same round draws it again only when the other
  devices do not suffice, and at the earliest RETRY seconds after the last attempt ended or once the operator resumes;
  so a device that always fails cannot use up the attempts at once. The next round draws it like any other.
* A failure of kind `lost` drops the device's record and does not delay its next draw. After the last round this is the
  only failure that is accepted.
* An attempt that could not be closed may still get updates. Once they are enough, the round closes at once, or when the
  federation resumes.
* A lease depends on the round's global value: an update trained from another value, which a restored backup has lost,
  is refused.
* An update is named by round, device, lease and digest. The same one again gets the same acknowledgement; another
  body for the same lease is refused; so are a foreign round, lease or device. An acknowledged update is counted
  exactly once, even when its device is removed afterwards.
* An update that is acknowledged but cannot be folded is left out of the round. When no update is left, the round is
  run again without its devices.
* While aggregating, the round takes no more updates. The engine decides `Aggregate` once and waits for `Aggregated`;
  a coordinator that restarts reads `pending` and folds again from the stored updates.
* A clock that is set back makes no attempt longer than `deadline_seconds`: the next Tick moves the deadline.
* A pause stops the round's clock. Updates are still accepted; no round closes or opens until the federation resumes.
* The operator may change some settings until the last round is aggregated. A new `deadline_seconds` moves the deadline
  of the attempt under way by the difference; a new `min_updates` counts at once, a new `cohort` from the next attempt.
  A cohort is never larger than at the creation: a round has so many places, which devices and methods count with. A
  new number of `rounds` is in force from the next round, because devices train the round under way with the old one;
  hence it must leave a next round. `min_devices` can change while the federation recruits. A change is refused if
  the settings changed after its sender read them.

The tables
----------
ACCEPTED lists the events of each phase; every other event is refused, kind "wrong-phase". An accepted event leads to
one signal or none. PHASES and STAGES give the next phase and the next stage for a signal; a signal that is missing in
the row of either is a bug and raises KeyError.

    event       signal
    Arrived     none: the caller follows with Present when the engine waits for devices
    Present     begin and open (recruiting, enough devices), open (drawing), or none
    Started     begin, then open if enough devices are present
    Updated     close when it was the last one the cohort owed or the last one a failed attempt lacked, else none
    Failed      close, retry or give_up when no device is left to wait for, else none
    Removed     as Failed
    Tick        close, retry or give_up after the deadline, else none
    Aggregated  advance, after the last round end
    Unusable    retry, after the last attempt give_up
    Paused      pause
    Resumed     resume, then close, retry or give_up when that is due
    Changed     close, retry or give_up when that is now due, else none
    Stopped     stop
    Deleted     none; refused while the federation runs or is paused
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from coord_server import events
from coord_server.events import Acknowledge, Aggregate, Decision, Draw, Event, Finish, GiveUp, OpenRound, Refuse
from coord_server.state import (
    Stage,
    State,
    announced,
    choose_cohort,
    dump,
    in_force,
    lease,
    left,
    load,
    missing,
    tag,
    usable,
)
from edge_client.protocol.messages import Change, Failure, FederationConfig, Phase

__all__ = ["ACCEPTED", "PHASES", "STAGES", "State", "announced", "apply", "choose_cohort", "dump", "in_force", "lease",
           "left", "load", "missing", "pending", "usable"]  # fmt: skip

Signal = Literal["begin", "open", "close", "retry", "give_up", "advance", "end", "pause", "resume", "stop"]

Step = tuple[State, tuple[Decision, ...]]

PHASES: Mapping[Phase, Mapping[Signal, Phase]] = {
    "recruiting": {"begin": "running", "stop": "stopped"},
    "running": {"open": "running", "close": "running", "retry": "running", "give_up": "paused", "advance": "running",
                "end": "finished", "pause": "paused", "stop": "stopped"},
    "paused": {"retry": "paused", "give_up": "paused", "advance": "paused", "end": "finished", "resume": "running",
               "stop": "stopped"},
    "finished": {},
    "stopped": {},
}  # fmt: skip
STAGES: Mapping[Stage, Mapping[Signal, Stage]] = {
    "idle": {"begin": "drawing", "stop": "idle"},
    "drawing": {"open": "collecting", "close": "aggregating", "pause": "drawing", "resume": "drawing", "stop": "idle"},
    "collecting": {"close": "aggregating", "retry": "drawing", "give_up": "drawing", "pause": "collecting",
                   "resume": "collecting", "stop": "idle"},
    "aggregating": {"advance": "drawing", "end": "idle", "retry": "drawing", "give_up": "drawing",
                    "pause": "aggregating", "resume": "aggregating", "stop": "idle"},
}  # fmt: skip

RETRY = 30.0  # seconds after an attempt until a device that failed in the round is drawn again
SHOWN = 3  # failures that a fault quotes
REASON = 200  # characters of a failure's reason that the state keeps


def pending(state: State) -> tuple[Decision, ...]:
    """The decisions of `state` that are not carried out yet, for a coordinator that has just loaded it."""
    if state.phase in ("running", "paused") and state.stage == "aggregating":
        return (Aggregate(state.round, state.attempt, usable(state)),)
    if state.phase == "running" and state.stage == "drawing":
        return (Draw(state.round, state.attempt + 1),)
    if state.phase == "running" and state.stage == "collecting" and state.deadline is not None:
        return (OpenRound(state.round, state.attempt, state.cohort, state.deadline),)
    return ()


# --- transitions


def _move(state: State, signal: Signal, **changes: Any) -> State:
    """Follow `signal` in both tables and set the fields that change with it."""
    return replace(state, phase=PHASES[state.phase][signal], stage=STAGES[state.stage][signal], **changes)


def _refuse(state: State, kind: str, detail: str) -> Step:
    return state, (Refuse(kind, detail),)


def _open(config: FederationConfig, state: State, event: events.Present | events.Started) -> Step:
    """Open the next attempt with a cohort of those present; stay in stage drawing when too few could ever report."""
    attempt, counted = state.attempt + 1, usable(state)
    cohort = _draw(config, state, event, attempt, config.cohort - len(counted))
    if not cohort or len(cohort) + len(counted) < config.min_updates:
        return state, ()
    deadline, asked = event.now + config.deadline_seconds, _places(config, state, (*counted, *cohort))
    opened = _move(
        state, "open", attempt=attempt, tries=state.tries + 1, cohort=tuple(sorted(cohort)), excused=(),
        deadline=deadline, asked=asked, opened=event.now if attempt == 1 else state.opened,
        fleet=max(event.fleet, len(asked)),
    )  # fmt: skip
    return opened, (OpenRound(state.round, attempt, opened.cohort, deadline),)


def _draw(
    config: FederationConfig, state: State, event: events.Present | events.Started, attempt: int, size: int
) -> tuple[str, ...]:
    """At most `size` devices: first those the round has not asked, then asked ones, then those that failed."""
    fresh, asked, failed = list[str](), list[str](), list[str]()
    for d in event.devices:
        failure = state.failed.get(d)
        if d in state.received:
            continue
        if d not in state.asked:
            fresh.append(d)
        elif failure is None or failure.kind == "lost":
            asked.append(d)
        else:
            failed.append(d)
    if state.ended is not None and 0.0 <= event.now - state.ended < RETRY:
        failed = []
    cohort: tuple[str, ...] = ()
    for pool in (fresh, asked, failed):
        cohort += choose_cohort(config, tuple(pool), state.round, attempt, size - len(cohort))
    return cohort


def _places(config: FederationConfig, state: State, devices: tuple[str, ...]) -> dict[str, int]:
    """`asked` with a place for each of `devices` that has none: the lowest that none of them holds."""
    taken = {state.asked[d] for d in devices if d in state.asked}
    free = iter(sorted(set(range(state.places or config.cohort)) - taken))
    return {**state.asked, **{d: next(free) for d in sorted(set(devices) - state.asked.keys())}}


def _close(state: State) -> Step:
    """Stop collecting; the updates received are aggregated."""
    closed = _move(state, "close", deadline=None, remaining=None)
    return closed, (Aggregate(state.round, state.attempt, usable(state)),)


def _again(config: FederationConfig, state: State, now: float) -> Step:
    """The attempt cannot be closed: draw a new cohort, or give up after the last attempt."""
    over: dict[str, Any] = {"cohort": (), "excused": (), "deadline": None, "remaining": None, "ended": now}
    if state.tries >= config.max_attempts:
        fault = _fault(config, state)
        return _move(state, "give_up", fault=fault, **over), (GiveUp(state.round, fault),)
    retried = _move(state, "retry", **over)
    return retried, pending(retried)


def _enough(config: FederationConfig, state: State) -> bool:
    return len(usable(state)) >= config.min_updates


def _fault(config: FederationConfig, state: State) -> str:
    """Why the round was given up, with the updates that are in by now."""
    tries = f"{state.tries} attempt{'' if state.tries == 1 else 's'}"
    has = f"round {state.round} has {len(usable(state))} of the {config.min_updates} updates it needs"
    if _enough(config, state):
        return f"{has}, but the last came after {tries}; resume to go on"
    reasons = "; ".join(f"{d}: {f.kind} ({f.reason})" for d, f in list(state.failed.items())[-SHOWN:])
    why = f"last failures: {reasons}" if reasons else "the other devices did not report in time"
    return f"{has} after {tries}; {why}; mend the devices or lower the demands, then resume to go on"


def _proceed(config: FederationConfig, state: State, now: float) -> Step:
    """Close or repeat the attempt when that is due at `now`."""
    if state.phase != "running":
        return state, ()
    if state.stage == "drawing" and _enough(config, state):
        return _close(state)
    late = state.deadline is not None and now >= state.deadline
    if state.stage == "collecting" and (late or not missing(state)):
        return _close(state) if _enough(config, state) else _again(config, state, now)
    return state, ()


def _begin(config: FederationConfig, state: State, event: events.Present | events.Started) -> Step:
    state, decisions = _open(config, _move(state, "begin", round=1), event)
    return state, decisions or pending(state)


def _arrived(config: FederationConfig, state: State, event: events.Arrived) -> Step:
    return state, ()


def _present(config: FederationConfig, state: State, event: events.Present) -> Step:
    if state.phase == "recruiting":
        due = config.start == "auto" and len(event.devices) >= config.min_devices
        return _begin(config, state, event) if due else (state, ())
    if state.phase == "running" and state.stage == "drawing":
        return _open(config, state, event)
    return state, ()


def _started(config: FederationConfig, state: State, event: events.Started) -> Step:
    if not event.devices:
        return _refuse(state, "no-devices", "no device has asked for work lately; hand out a join token first")
    return _begin(config, state, event)


def _removed(config: FederationConfig, state: State, event: events.Removed) -> Step:
    device = event.device
    if device not in state.received:
        state = replace(state, asked={d: place for d, place in state.asked.items() if d != device})
    return _proceed(config, _excuse(state, device), event.now)


def _tick(config: FederationConfig, state: State, event: events.Tick) -> Step:
    if state.deadline is not None and state.deadline - event.now > config.deadline_seconds:
        state = replace(state, deadline=event.now + config.deadline_seconds)
    return _proceed(config, state, event.now)


def _foreign(config: FederationConfig, state: State, event: events.Updated | events.Failed, what: str) -> Step | None:
    """Refuse an update or failure that the round under way does not wait for; None when it does."""
    device, round_ = event.device, event.round
    if round_ != state.round:
        at = f"the federation is at round {state.round}; ask for work again"
        return _refuse(state, "wrong-round", f"this {what} is for round {round_}, {at}")
    if event.lease != lease(config, state, device):
        due = f"the one device {device!r} has in round {round_}; ask for work"
        return _refuse(state, "wrong-lease", f"lease {event.lease!r} is not {due}")
    if device in state.received:
        first = f"with SHA-256 {state.received[device]}; that one counts, drop this {what}"
        return _refuse(
            state, "conflicting-update", f"device {device!r} already sent its update of round {round_} {first}"
        )
    if device not in state.asked:
        return _refuse(state, "not-in-cohort", f"device {device!r} was not asked in round {round_}; ask for work")
    if state.stage == "aggregating":
        return _refuse(state, "round-closed", f"round {round_} is closed; drop this {what} and ask for work")
    return None


def _updated(config: FederationConfig, state: State, event: events.Updated) -> Step:
    device, sha256 = event.device, event.sha256
    mine = event.round == state.round and event.lease == lease(config, state, device)
    if mine and state.received.get(device) == sha256:
        return state, (Acknowledge(event.round, device, sha256, duplicate=True),)
    foreign = _foreign(config, state, event, "update")
    if foreign is not None:
        return foreign
    failed = {d: f for d, f in state.failed.items() if d != device}
    state = replace(state, received={**state.received, device: sha256}, failed=failed)
    if state.fault is not None:
        state = replace(state, fault=_fault(config, state))
    state, decisions = _proceed(config, state, event.now)
    return state, (Acknowledge(event.round, device, sha256, duplicate=False), *decisions)


def _failed(config: FederationConfig, state: State, event: events.Failed) -> Step:
    device = event.device
    if state.phase == "finished":
        if event.kind == "lost" and event.round == config.rounds + 1:
            return state, ()
        return _refuse(state, "wrong-phase", "the federation is finished; only kind 'lost' can be reported now")
    foreign = _foreign(config, state, event, "failure")
    if foreign is not None:
        return foreign
    failed = {d: f for d, f in state.failed.items() if d != device}
    state = replace(state, failed={**failed, device: Failure(kind=event.kind, reason=event.reason[:REASON])})
    return _proceed(config, _excuse(state, device), event.now)


def _excuse(state: State, device: str) -> State:
    """Wait for a device of the cohort no longer."""
    return replace(state, excused=tuple(sorted({*state.excused, device}))) if device in state.cohort else state


def _stale(state: State, event: events.Aggregated | events.Unusable) -> Step | None:
    """Refuse the outcome of a fold that is not the one under way."""
    if state.stage == "aggregating" and (event.round, event.attempt) == (state.round, state.attempt):
        return None
    at = f"the federation is at round {state.round}, attempt {state.attempt}"
    return _refuse(state, "wrong-round", f"round {event.round}, attempt {event.attempt} is not being aggregated; {at}")


def _aggregated(config: FederationConfig, state: State, event: events.Aggregated) -> Step:
    stale = _stale(state, event)
    if stale is not None:
        return stale
    changed = state.changed if state.next_rounds is None else {**state.changed, "rounds": state.next_rounds}
    signal: Signal = "end" if state.round == (state.next_rounds or config.rounds) else "advance"
    moved = _move(state, signal)
    clean = State(phase=moved.phase, stage=moved.stage, round=state.round, value=event.value, fault=state.fault,
                  changed=changed, places=state.places)  # fmt: skip
    if signal == "end":
        return replace(clean, fault=None), (Finish(state.round),)
    following = replace(clean, round=state.round + 1)
    return following, pending(following)


def _unusable(config: FederationConfig, state: State, event: events.Unusable) -> Step:
    unusable = tuple(sorted({*state.unusable, *event.devices}))
    return _stale(state, event) or _again(config, replace(state, unusable=unusable), event.now)


def _paused(config: FederationConfig, state: State, event: events.Paused) -> Step:
    return _move(state, "pause", deadline=None, remaining=left(config, state, event.now)), ()


def _resumed(config: FederationConfig, state: State, event: events.Resumed) -> Step:
    deadline = None if state.remaining is None else event.now + state.remaining
    tries = 1 if state.stage == "collecting" else 0
    state = _move(state, "resume", deadline=deadline, remaining=None, tries=tries, ended=None, fault=None)
    state, decisions = _proceed(config, state, event.now)
    return state, decisions or (pending(state) if state.stage == "drawing" else ())


def _changed(config: FederationConfig, state: State, event: events.Changed) -> Step:
    now, new = announced(config, state), dict(event.settings)
    if event.seen is not None and tag(now) not in event.seen:
        there = ", ".join(f"{name} = {getattr(now, name)}" for name in Change.model_fields)
        return _refuse(state, "changed-meanwhile", f"the settings changed since they were read: {there} now; GET them "
                       "again, then PATCH with their ETag")  # fmt: skip
    most = state.places or config.cohort
    after = config.model_copy(update=new)
    why = _unchangeable(after, state, new, most)
    if why is not None:
        return _refuse(state, "cannot-change", why)
    if state.round and "rounds" in new:
        state = replace(state, next_rounds=int(new.pop("rounds")))
    later = after.deadline_seconds - config.deadline_seconds
    state = replace(
        state,
        changed={**state.changed, **new},
        places=most if "cohort" in new else state.places,
        deadline=None if state.deadline is None else state.deadline + later,
        remaining=None if state.remaining is None else max(state.remaining + later, 0.0),
    )
    state, decisions = _proceed(after, state, event.now)
    draws = state.phase == "running" and state.stage == "drawing"
    return state, decisions or (pending(state) if draws else ())


def _unchangeable(after: FederationConfig, state: State, new: Mapping[str, float], most: int) -> str | None:
    """Why the settings cannot become those of `after`, None when they can; a round has `most` places."""
    if "min_devices" in new and state.phase != "recruiting":
        return f"min_devices = {after.min_devices}: the federation has started already; leave it out"
    if after.cohort > most:
        return f"cohort = {after.cohort} is more than {most}, with which the federation was created; create another one"
    if after.min_updates > after.cohort:
        return f"min_updates {after.min_updates} is more than the cohort of {after.cohort}; lower it"
    if "rounds" in new and new["rounds"] <= state.round:
        return (
            f"rounds = {after.rounds}, but round {state.round} has begun; give at least {state.round + 1}, or stop it"
        )
    return None


def _stopped(config: FederationConfig, state: State, event: events.Stopped) -> Step:
    return stopped(state), ()


def _deleted(config: FederationConfig, state: State, event: events.Deleted) -> Step:
    why = keeps(state)
    return (state, ()) if why is None else _refuse(state, "wrong-phase", why)


def stopped(state: State) -> State:
    """A state that accepts Stopped, stopped. It takes no settings, so that a damaged federation can be stopped too."""
    return _move(state, "stop", cohort=(), deadline=None, remaining=None, fault=None)


def keeps(state: State) -> str | None:
    """Why the federation cannot be deleted now, None when it can."""
    if state.phase not in ("running", "paused"):
        return None
    return f"the federation is {state.phase} in round {state.round}; stop it, then delete it"


_Handler = Callable[[FederationConfig, State, Any], Step]

_HANDLERS: Mapping[type, _Handler] = {
    events.Arrived: _arrived, events.Present: _present, events.Started: _started, events.Removed: _removed,
    events.Tick: _tick, events.Updated: _updated, events.Failed: _failed, events.Aggregated: _aggregated,
    events.Unusable: _unusable, events.Paused: _paused, events.Resumed: _resumed, events.Stopped: _stopped,
    events.Changed: _changed, events.Deleted: _deleted,
}  # fmt: skip
_ALWAYS = frozenset({events.Arrived, events.Present, events.Removed, events.Tick, events.Deleted})
_ROUNDS = _ALWAYS | {events.Updated, events.Failed, events.Aggregated, events.Unusable, events.Stopped, events.Changed}
ACCEPTED: Mapping[Phase, frozenset[type]] = {
    "recruiting": _ALWAYS | {events.Started, events.Stopped, events.Changed},
    "running": _ROUNDS | {events.Paused},
    "paused": _ROUNDS | {events.Resumed},
    "finished": _ALWAYS | {events.Failed},
    "stopped": _ALWAYS,
}


def apply(config: FederationConfig, state: State, event: Event) -> Step:
    """The state after `event`, and the decisions that follow from it. Pure: same arguments, same answer."""
    if type(event) not in ACCEPTED[state.phase]:
        word = type(event).__name__.lower()
        if not PHASES[state.phase] and isinstance(event, events.Started | events.Resumed | events.Changed):
            go_on = "to go on from its model, create another one with start_from"
            return _refuse(state, "wrong-phase", f"the federation is {state.phase} for good; {go_on}")
        return _refuse(state, "wrong-phase", f"the federation is {state.phase}; it cannot be {word} now")
    return _HANDLERS[type(event)](in_force(config, state), state, event)
