"""What people and devices are told about a federation's state, in words and figures. Pure functions."""

from __future__ import annotations

from coord_server.engine import State, left, missing, usable
from edge_client.protocol.messages import Federation, FederationConfig


def visible(state: State) -> tuple[object, ...]:
    """What a waiting device could see change."""
    return state.phase, state.round, state.attempt, state.stage, state.cohort


def summary(config: FederationConfig, state: State, now: float, fault: str | None) -> Federation:
    """The federation as it stands at `now`."""
    return Federation(
        id=config.name,
        config=config,
        phase=state.phase,
        round=state.round,
        devices=len(state.devices),
        updates=len(usable(state)),
        expected=len(missing(state)) if state.stage == "collecting" else 0,
        attempt=state.attempt,
        deadline_in=left(config, state, now),
        fault=fault,
    )


def reason(config: FederationConfig, state: State, device: str, closing: bool) -> str:
    """Why there is nothing to do for `device`; `closing` when the coordinator goes down."""
    if closing:
        return "the coordinator is going down and will be back"
    if state.phase == "paused":
        return f"the operator paused {config.name} in round {state.round}"
    if state.phase == "recruiting":
        due = "the operator's start" if config.start == "manual" else f"{config.min_devices} devices"
        return f"waiting for {due}; {len(state.devices)} ready"
    if state.stage == "idle":
        able = len(set(state.devices) - set(state.unusable))
        left_out = f"; updates of {', '.join(state.unusable)} could not be used" if state.unusable else ""
        return f"round {state.round} needs {config.min_updates} devices; {able} ready{left_out}"
    if state.stage == "aggregating":
        return f"round {state.round} is being aggregated"
    mine = "your update is in" if device in state.received else "this device was not drawn"
    return f"round {state.round}: {mine}; {len(missing(state))} of {len(state.cohort)} devices still train"
