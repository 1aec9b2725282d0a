"""A federation's settings, events by hand, and the engine's state after them."""

from __future__ import annotations

from typing import Any

from coord_server import engine
from coord_server.engine import State, apply
from coord_server.events import Decision, Draw, Event, Present, Updated
from edge_client.protocol.messages import FederationConfig


def config(**more: Any) -> FederationConfig:
    base: dict[str, Any] = {"name": "fed", "bundle": "0" * 64, "method": {"name": "x"}, "rounds": 2, "cohort": 2,
                            "min_devices": 3, "min_updates": 1, "deadline_seconds": 10.0, "seed": 7}  # fmt: skip
    return FederationConfig.model_validate({**base, **more})


def run(
    c: FederationConfig, *events: Event, state: State | None = None, present: str | None = None
) -> tuple[State, list[Decision]]:
    """The state after `events`; each `Draw` is answered with the devices `present` (one letter each), if given."""
    state, said = state or State(), []
    for event in events:
        state, decisions = apply(c, state, event)
        if present is not None and any(isinstance(d, Draw) for d in decisions):
            state, more = apply(c, state, Present(event.now, tuple(present), len(present)))
            decisions = (*(d for d in decisions if not isinstance(d, Draw)), *more)
        said += decisions
    return state, said


def here(names: str, now: float = 0.0) -> Present:
    return Present(now, tuple(sorted(names)), len(names))


def opened(c: FederationConfig, names: str = "abc") -> State:
    return run(c, here(names))[0]


def updated(c: FederationConfig, state: State, device: str, now: float = 1.0, sha256: str = "s") -> Updated:
    return Updated(now, state.round, device, engine.lease(c, state, device), sha256)
