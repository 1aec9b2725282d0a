"""A wall clock that is set while rounds run: no attempt becomes longer, no figure negative."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from coordination import served, until
from hypothesis import given
from hypothesis import strategies as st

from coord_server import engine
from coord_server.engine import State, apply
from coord_server.events import Draw, Paused, Present, Resumed, Tick
from coord_server.live import commits
from edge_client.protocol.messages import FederationConfig

CONFIG = FederationConfig.model_validate(
    {"name": "fed", "bundle": "0" * 64, "method": {"name": "x"}, "rounds": 2, "cohort": 2, "min_devices": 2,
     "deadline_seconds": 10.0}
)  # fmt: skip


def opened(now: float = 1000.0) -> State:
    return apply(CONFIG, State(), Present(now, ("a", "b"), 2))[0]


def test_a_clock_set_back_moves_the_deadline_to_one_attempt_from_now() -> None:
    state, said = apply(CONFIG, opened(), Tick(400.0))
    assert (state.deadline, state.attempt, said) == (410.0, 1, ())
    assert apply(CONFIG, state, Tick(409.9)) == (state, ())
    assert apply(CONFIG, state, Tick(410.0))[1] == (Draw(1, 2),)


@given(st.floats(min_value=-1e10, max_value=1e10), st.sampled_from(["tick", "pause"]))
def test_an_attempt_never_has_more_time_left_than_it_was_given(now: float, meanwhile: str) -> None:
    state = opened()
    before = engine.left(CONFIG, state, now)
    assert before is not None
    assert 0.0 <= before <= CONFIG.deadline_seconds
    if meanwhile == "tick":
        state, said = apply(CONFIG, state, Tick(now))
    else:
        state, _ = apply(CONFIG, state, Paused(now))
        assert state.remaining is not None
        assert 0.0 <= state.remaining <= CONFIG.deadline_seconds
        state, said = apply(CONFIG, state, Resumed(now))
    if Draw(1, 2) in said:  # the deadline had passed
        state, _ = apply(CONFIG, state, Present(now, ("a", "b"), 2))
    assert state.deadline is not None
    assert state.deadline <= now + CONFIG.deadline_seconds


def test_a_clock_that_stands_still_or_runs_leaves_the_deadline_where_it_is() -> None:
    state = opened()
    for now in (1000.0, 1000.5, 1009.9):
        assert apply(CONFIG, state, Tick(now)) == (state, ())


def test_a_coordinators_round_ends_although_the_clock_was_set_back_and_lasted_no_negative_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "LOOK_MOST", 0.02)
    now = [time.time()]  # it stands still unless the test sets it

    async def main() -> None:
        async with served(tmp_path, lambda: now[0]) as fleet:
            await fleet.federation("a", "b", deadline_seconds=10.0, rounds=1)
            assert (await fleet.train("a")).status_code == 201
            now[0] -= 7 * 86400.0
            assert (await fleet.work("b"))["deadline_in"] <= 10.0
            live = fleet.http._transport.app.state.coordinator.federation("fed")  # type: ignore[attr-defined]
            await until(fleet, lambda f: live._commits.state.deadline == now[0] + 10.0)
            assert (await fleet.operator("GET", "/v1/federations/fed")).json()["deadline_in"] == 10.0
            now[0] += 11.0
            await until(fleet, lambda f: f["phase"] == "finished")
            rounds = (await fleet.operator("GET", "/v1/federations/fed/rounds")).json()
            assert rounds[0]["devices"] == ["a"]
            assert rounds[0]["seconds"] >= 0.0

    asyncio.run(main())
