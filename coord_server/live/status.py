"""A federation's state in words and figures, for its operator and its devices, and what keeps it from going on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from coord_server import engine
from coord_server.state import Stage
from edge_client.errors import StateError
from edge_client.protocol.messages import WAITS_SHOWN, Failure, Federation, FederationConfig


class MethodError(Exception):
    """The code of a method failed on the server's own values: a fault of the method, which may be another package's."""


def summary(config: FederationConfig, state: engine.State, devices: int, now: float, fault: str | None) -> Federation:
    """The federation as it stands at `now`."""
    missing = engine.missing(state) if state.stage == "collecting" else ()
    return Federation(
        id=config.name,
        config=engine.announced(config, state),
        phase=state.phase,
        round=state.round,
        devices=devices,
        updates=len(engine.usable(state)),
        expected=len(missing),
        waits_for=sorted(missing)[:WAITS_SHOWN],
        attempt=state.attempt,
        deadline_in=engine.left(config, state, now),
        fault=fault,
        places=state.places or config.cohort,
    )


@dataclass(frozen=True)
class Progress:
    """The round under way by device, as it stands at `now`. Names are sorted."""

    now: float
    stage: Stage
    seconds: float | None
    """Since the round's first attempt opened; None when none has."""
    reported: tuple[str, ...]
    training: tuple[str, ...]
    """Devices of this attempt that it waits for."""
    overdue: tuple[str, ...]
    """Devices of earlier attempts that did not report; their updates would still count."""
    failed: Mapping[str, Failure]
    unusable: tuple[str, ...]
    """Devices whose acknowledged update cannot be folded."""


def progress(state: engine.State, now: float) -> Progress:
    """The round under way at `now`."""
    training = engine.missing(state) if state.stage == "collecting" else ()
    failed = {d: f for d, f in sorted(state.failed.items()) if d not in training}
    overdue = state.asked.keys() - state.received.keys() - failed.keys() - set(training)
    return Progress(
        now=now,
        stage=state.stage,
        seconds=max(now - state.opened, 0.0) if state.asked else None,
        reported=engine.usable(state),
        training=training,
        overdue=tuple(sorted(overdue)),
        failed=failed,
        unusable=state.unusable,
    )


def reason(config: FederationConfig, state: engine.State, device: str, ready: int, closing: bool) -> str:
    """Why there is nothing to do for `device`; `closing` when the coordinator goes down."""
    if closing:
        return "the coordinator is going down and will be back"
    if state.phase == "paused":
        why = f": {state.fault}" if state.fault else " by the operator"
        return f"{config.name} is paused in round {state.round}{why}"
    if state.phase == "recruiting":
        due = "the operator's start" if config.start == "manual" else f"{config.min_devices} devices"
        return f"waiting for {due}; {ready} ready"
    if state.stage == "drawing":
        left_out = f"; updates of {', '.join(state.unusable)} could not be used" if state.unusable else ""
        return f"round {state.round} needs {config.min_updates} devices that are present; {ready} ready{left_out}"
    if state.stage == "aggregating":
        return f"round {state.round} is being aggregated"
    if device in state.received:
        mine = "your update is in"
    elif device in state.excused and device in state.failed:
        mine = "this device reported a failure and sits it out"
    else:
        mine = "this device was not drawn"
    return f"round {state.round}: {mine}; {len(engine.missing(state))} of {len(state.cohort)} devices still train"


class Faults:
    """The faults that stand. A fault is cleared by the next success of the same thing: "fold", or "work of DEVICE"."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def set(self, thing: str, sentence: str) -> None:
        """`thing` fails."""
        self._found[thing] = sentence

    def clear(self, thing: str) -> None:
        """`thing` works again."""
        self._found.pop(thing, None)

    def forget(self, device: str) -> None:
        """Clear every fault of a device that was removed: no success of its own will."""
        for thing in [thing for thing in self._found if thing.endswith(f" of {device}")]:
            self.clear(thing)

    @contextmanager
    def watch(self, thing: str, sentence: str) -> Iterator[None]:
        """Set the fault of `thing` for a StateError or MethodError; clear it without. A refusal leaves it alone."""
        try:
            yield
        except (StateError, MethodError) as error:
            self.set(thing, f"{sentence}: {error}")
            raise
        else:
            self.clear(thing)

    @property
    def text(self) -> str | None:
        """The fault found first; None when there is none."""
        return next(iter(self._found.values()), None)
