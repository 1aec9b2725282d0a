"""The round engine: the rules of its docstring, one by one, every cell of its tables, then random histories."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from edge_kernels import counter
from engine_steps import config, here, opened, run, updated
from hypothesis import given, settings
from hypothesis import strategies as st

from coord_server import engine
from coord_server.engine import State, apply
from coord_server.events import (
    Acknowledge,
    Aggregate,
    Aggregated,
    Arrived,
    Changed,
    Decision,
    Deleted,
    Draw,
    Event,
    Failed,
    Finish,
    GiveUp,
    OpenRound,
    Paused,
    Present,
    Refuse,
    Removed,
    Resumed,
    Started,
    Stopped,
    Tick,
    Unusable,
    Updated,
)
from coord_server.problems import PROBLEMS
from coord_server.state import Stage
from edge_client.protocol.messages import Failure, FederationConfig, Phase


def failed(c: FederationConfig, state: State, device: str, now: float = 1.0, kind: Any = "diverged") -> Failed:
    return Failed(now, state.round, device, engine.lease(c, state, device), kind, "loss is NaN")


def refused(said: list[Decision]) -> str:
    assert isinstance(said[0], Refuse), said
    assert said[0].kind in PROBLEMS
    assert len(said) == 1
    return said[0].kind


def test_the_federation_starts_by_itself_when_enough_devices_are_present() -> None:
    c = config()
    state, said = run(c, here("ab"))
    assert (state, said) == (State(), [])
    state, said = run(c, here("abc"), state=state)
    assert (state.phase, state.round, state.attempt) == ("running", 1, 1)
    assert said == [OpenRound(1, 1, state.cohort, 10.0)]


def test_a_manual_start_waits_for_the_operator() -> None:
    c = config(start="manual")
    state, said = run(c, here("abcd"))
    assert (state.phase, said) == ("recruiting", [])
    state, said = run(c, Started(5.0, tuple("abcd"), 4), state=state)
    assert isinstance(said[0], OpenRound)
    assert said[0].deadline == 15.0


def test_starting_without_a_device_is_refused() -> None:
    assert refused(run(config(), Started(0.0, (), 0))[1]) == "no-devices"


def test_the_cohort_is_the_devices_with_the_smallest_keys() -> None:
    c = config(min_devices=5)
    by_key = sorted("edcba", key=lambda n: counter.key(7, "cohort", 1, 1, n))
    assert opened(c, "abcde").cohort == tuple(sorted(by_key[:2]))


@given(st.sets(st.text("abcdefgh", min_size=1, max_size=4), max_size=40), st.integers(1, 8), st.integers(0, 2**63 - 1))
def test_a_cohort_chosen_at_once_is_the_one_chosen_key_by_key(names: set[str], size: int, seed: int) -> None:
    c, devices = config(seed=seed), tuple(sorted(names))
    by_key = sorted((counter.key(seed, "cohort", 3, 2, n), n) for n in devices)
    assert engine.choose_cohort(c, devices, 3, 2, size) == tuple(sorted(n for _, n in by_key[:size]))


def test_the_state_holds_no_device_that_was_not_asked() -> None:
    c = config()
    names = tuple(f"d{i:05}" for i in range(10_000))
    state, _ = run(c, Present(0.0, names, len(names)))
    assert len(engine.dump(state)) < 1000
    assert tuple(state.asked) == state.cohort == engine.choose_cohort(c, names, 1, 1, c.cohort)


def test_the_fleet_is_that_of_the_last_attempt_and_holds_every_device_that_was_asked() -> None:
    c = config(max_attempts=5)
    state, _ = run(c, Present(0.0, tuple("abc"), 7))
    assert state.fleet == 7
    state, _ = run(c, Present(1.0, tuple("abc"), 9), state=state)
    assert state.fleet == 7  # the attempt is open already
    state, _ = run(c, Tick(1e6), Present(1e6, tuple("abc"), 6), state=state)
    assert (state.attempt, state.fleet) == (2, 6)
    assert engine.load(engine.dump(state)).fleet == 6
    state, _ = run(c, Tick(2e6), Present(2e6, ("x", "y"), 1), state=state)
    assert state.fleet == len(state.asked) == 5
    started, _ = run(config(start="manual"), Started(0.0, tuple("abc"), 8))
    assert started.fleet == 8


def test_a_round_closes_when_its_whole_cohort_has_reported_and_the_next_one_is_drawn_after_aggregation() -> None:
    c = config()
    state = opened(c)
    first, second = state.cohort
    state, said = run(c, updated(c, state, second), state=state)
    assert said == [Acknowledge(1, second, "s", False)]
    state, said = run(c, updated(c, state, first), state=state)
    assert said == [Acknowledge(1, first, "s", False), Aggregate(1, 1, (first, second))]
    state, said = run(c, Aggregated(2.0, 1, 1), state=state)
    assert (state.round, state.attempt, dict(state.received), said) == (2, 0, {}, [Draw(2, 1)])
    state, said = run(c, here("abc", 2.0), state=state)
    assert said == [OpenRound(2, 1, state.cohort, 12.0)]


def test_after_the_last_round_the_federation_is_finished_and_late_devices_change_nothing() -> None:
    c = config(rounds=1)
    state = opened(c)
    for device in state.cohort:
        state, _ = run(c, updated(c, state, device), state=state)
    state, said = run(c, Aggregated(2.0, 1, 1), state=state)
    assert (state.phase, state.round, said) == ("finished", 1, [Finish(1)])
    assert run(c, here("z"), state=state) == (state, [])


def test_a_repeated_round_asks_fresh_devices_first_then_asked_ones_and_failed_ones_last() -> None:
    c = config(cohort=1, max_attempts=9)
    again = State(phase="running", stage="drawing", round=1, attempt=1, asked={"a": 0, "b": 1},
                  failed={"a": Failure(kind="backend", reason="x")})  # fmt: skip
    drawn = [run(c, here(present), state=again)[0].cohort for present in ("abc", "ab", "a")]
    assert drawn == [("c",), ("b",), ("a",)]


def test_at_the_deadline_a_round_closes_with_enough_updates() -> None:
    c = config()
    state = opened(c)
    state, said = run(c, updated(c, state, state.cohort[0]), Tick(9.9), state=state)
    assert not any(isinstance(d, Aggregate) for d in said)
    state, said = run(c, Tick(10.0), state=state)
    assert said == [Aggregate(1, 1, (state.cohort[0],))]


def test_with_too_few_updates_the_round_asks_as_many_other_devices_as_are_missing_and_keeps_its_updates() -> None:
    c = config(min_updates=2, min_devices=6, cohort=3)
    state = opened(c, "abcdef")
    early, slow, _ = asked = state.cohort
    state, said = run(c, updated(c, state, early), Tick(10.0), state=state)
    assert said[1:] == [Draw(1, 2)]
    state, _ = run(c, here("abcdef", 10.0), state=state)
    assert (state.round, state.attempt, state.deadline) == (1, 2, 20.0)
    others = tuple(sorted(set("abcdef") - set(asked)))  # devices that the round has not asked yet come first
    assert state.cohort == engine.choose_cohort(c, others, 1, 2, 2)
    assert dict(state.received) == {early: "s"}
    state, said = run(c, updated(c, state, slow, 11.0), state=state)  # asked by the first attempt: its work counts
    assert said[0] == Acknowledge(1, slow, "s", False)


def test_a_device_keeps_its_place_in_a_round_and_later_attempts_take_those_of_missing_devices() -> None:
    c = config(min_updates=3, min_devices=6, cohort=4)
    state = opened(c, "abcdef")
    first = state.cohort
    assert [state.asked[d] for d in first] == [0, 1, 2, 3]
    new, others = [d for d in "abcdef" if d not in first], "".join(sorted(set("abcdef") - {first[0]}))
    state, _ = run(c, updated(c, state, first[2]), Removed(1.0, first[0]), Tick(10.0), here(others, 10.0), state=state)
    assert set(new) < set(state.cohort)
    assert [state.asked[d] for d in first[1:]] == [1, 2, 3]
    counted = [state.asked[d] for d in {first[2], *state.cohort}]
    assert sorted(counted) == [0, 1, 2, 3]  # no two updates that are expected share a place
    assert engine.load(engine.dump(state)) == state


def test_a_late_update_closes_an_attempt_that_lacked_it() -> None:
    c = config(min_updates=2)
    state = opened(c)
    early, slow = state.cohort
    state, _ = run(c, updated(c, state, early), Tick(10.0), here(early, 10.0), state=state)
    assert state.stage == "drawing"  # the only device present has reported
    state, said = run(c, updated(c, state, slow, 11.0), state=state)
    assert said == [Acknowledge(1, slow, "s", False), Aggregate(1, 1, (early, slow))]


def test_a_round_stays_undrawn_while_fewer_devices_are_present_than_it_needs_updates() -> None:
    c = config(min_updates=2)
    state, said = run(c, Started(0.0, ("a",), 1))
    assert (state.phase, state.stage, said) == ("running", "drawing", [Draw(1, 1)])
    assert engine.pending(state) == (Draw(1, 1),)
    assert run(c, here("a", 2.0), Tick(1000.0), state=state) == (state, [])
    state, said = run(c, here("ab", 3.0), state=state)
    assert said == [OpenRound(1, 1, ("a", "b"), 13.0)]


def test_the_same_update_again_is_acknowledged_again_and_another_body_is_refused() -> None:
    c = config()
    state = opened(c)
    device = state.cohort[0]
    once, _ = run(c, updated(c, state, device), state=state)
    again, said = run(c, updated(c, once, device), state=once)
    assert (again, said) == (once, [Acknowledge(1, device, "s", True)])
    other, said = run(c, updated(c, once, device, sha256="t"), state=once)
    assert (other, refused(said)) == (once, "conflicting-update")


@pytest.mark.parametrize("make", [updated, failed])
def test_foreign_rounds_leases_and_devices_are_refused_and_change_nothing(make: Any) -> None:
    c = config()
    state = opened(c)
    device, outside = state.cohort[0], (set("abc") - set(state.cohort)).pop()
    good = make(c, state, device)
    foreign = {
        "wrong-round": replace(good, round=2),
        "wrong-lease": replace(good, lease=engine.lease(c, state, outside)),
        "not-in-cohort": make(c, state, outside),
    }
    for kind, event in foreign.items():
        after, said = run(c, event, state=state)
        assert (after, refused(said)) == (state, kind)


def test_a_removed_device_is_not_waited_for_and_its_acknowledged_update_stays() -> None:
    c = config()
    state = opened(c)
    first, second = state.cohort
    late = updated(c, state, second)
    state, said = run(c, updated(c, state, first), Removed(2.0, first), state=state)
    assert [type(d) for d in said] == [Acknowledge]
    gone, said = run(c, Removed(3.0, second), state=state)
    assert said == [Aggregate(1, 1, (first,))]
    assert refused(run(c, late, state=gone)[1]) == "not-in-cohort"
    assert run(c, updated(c, gone, first), state=gone)[1] == [Acknowledge(1, first, "s", True)]


def test_a_pause_stops_the_clock_accepts_updates_and_opens_nothing() -> None:
    c = config()
    state = opened(c)
    first, second = state.cohort
    state, said = run(c, Paused(4.0), Tick(1000.0), updated(c, state, first), updated(c, state, second), state=state)
    assert [type(d) for d in said] == [Acknowledge, Acknowledge]
    resumed, said = run(c, Resumed(1000.0), state=state)
    assert said == [Aggregate(1, 1, (first, second))]
    assert resumed.phase == "running"
    state, _ = run(c, Paused(4.0), Resumed(100.0), state=opened(c))
    assert state.deadline == 106.0


def test_a_round_folded_during_a_pause_is_drawn_when_the_federation_resumes() -> None:
    c = config()
    state = opened(c)
    state, _ = run(c, *(updated(c, state, d) for d in state.cohort), Paused(2.0), state=state)
    state, said = run(c, Aggregated(3.0, 1, 1), here("abc", 4.0), state=state)
    assert (state.phase, state.stage, state.round, said) == ("paused", "drawing", 2, [])
    assert run(c, Resumed(5.0), state=state)[1] == [Draw(2, 1)]


def test_a_round_without_a_usable_update_is_run_again_without_the_devices_that_sent_them() -> None:
    c = config(min_devices=4)
    state = opened(c, "abcd")
    bad = state.cohort
    for device in bad:
        state, _ = run(c, updated(c, state, device), state=state)
    again, said = run(c, Unusable(2.0, 1, 1, bad), state=state, present="abcd")
    others = tuple(sorted(set("abcd") - set(bad)))
    assert (again.round, again.attempt, again.cohort) == (1, 2, others)
    assert said == [OpenRound(1, 2, others, 12.0)]
    assert run(c, updated(c, again, bad[0]), state=again)[1] == [Acknowledge(1, bad[0], "s", True)]
    for device in others:
        again, said = run(c, updated(c, again, device), state=again)
    assert said[-1] == Aggregate(1, 2, others)
    assert engine.pending(again) == (said[-1],)
    assert refused(run(c, Unusable(3.0, 1, 1, bad), state=again)[1]) == "wrong-round"  # of the first attempt
    after, _ = run(c, Aggregated(3.0, 1, 2), state=again)
    assert (after.round, after.unusable) == (2, ())
    waiting, said = run(c, Unusable(2.0, 1, 1, bad), here("".join(bad)), state=state)
    assert (waiting.stage, said) == ("drawing", [Draw(1, 2)])
    assert refused(run(c, Unusable(3.0, 1, 1, bad), state=waiting)[1]) == "wrong-round"


def test_a_device_that_failed_is_not_waited_for_and_may_be_drawn_again() -> None:
    c = config()
    state = opened(c)
    first, second = state.cohort
    state, said = run(c, failed(c, state, first), state=state)
    assert (said, engine.missing(state)) == ([], (second,))
    assert run(c, failed(c, state, first), state=state) == (state, [])  # reported again
    closed, said = run(c, updated(c, state, second), state=state)
    assert said[-1] == Aggregate(1, 1, (second,))
    assert dict(closed.failed) == {first: Failure(kind="diverged", reason="loss is NaN")}
    assert refused(run(c, failed(c, closed, second), state=closed)[1]) == "conflicting-update"
    assert refused(run(c, failed(c, closed, first), state=closed)[1]) == "round-closed"
    again, said = run(c, failed(c, state, second), state=state, present="".join(state.cohort))
    assert (again.stage, said) == ("drawing", [])
    again, said = run(c, here("".join(state.cohort), 1.0 + engine.RETRY), state=again)
    assert (again.attempt, again.cohort, engine.missing(again)) == (2, state.cohort, state.cohort)
    mended, said = run(c, updated(c, again, first), state=again)
    assert said == [Acknowledge(1, first, "s", False)]
    assert set(mended.failed) == {second}


def test_a_device_that_failed_is_drawn_again_only_when_the_others_do_not_suffice_and_not_at_once() -> None:
    c = config(min_updates=2, min_devices=4)
    state, _ = run(c, here("abcd"))
    bad, good = state.cohort
    others = tuple(sorted(set("abcd") - {bad, good}))
    state, _ = run(c, updated(c, state, good), failed(c, state, bad), state=state)
    assert run(c, here("abcd", 100.0), state=state)[0].cohort == engine.choose_cohort(c, others, 1, 2, 1)
    for now in (1.0, 0.9 + engine.RETRY):
        assert run(c, here(bad + good, now), state=state) == (state, [])
    for now in (1.0 + engine.RETRY, 0.0):  # also when the clock was set back
        assert run(c, here(bad + good, now), state=state)[0].cohort == (bad,)
    c = config(cohort=1)
    one = opened(c)
    again, _ = run(c, failed(c, one, one.cohort[0]), here("".join(one.cohort), 1.0), state=one)
    assert again.attempt == 1
    again, _ = run(c, failed(c, one, one.cohort[0], kind="lost"), here("".join(one.cohort)), state=one)
    assert (again.attempt, again.cohort) == (2, one.cohort)


def test_the_state_keeps_the_beginning_of_a_reason() -> None:
    c = config()
    state = opened(c)
    state, _ = run(c, replace(failed(c, state, state.cohort[0]), reason="x" * 2000), state=state)
    assert state.failed[state.cohort[0]].reason == "x" * engine.REASON


def test_a_device_may_say_that_it_lost_its_values_in_its_round_and_after_the_last() -> None:
    c = config(rounds=1)
    state = opened(c)
    first, second = state.cohort
    state, said = run(c, failed(c, state, first, kind="lost"), updated(c, state, second), state=state)
    assert said == [Acknowledge(1, second, "s", False), Aggregate(1, 1, (second,))]
    state, _ = run(c, Aggregated(2.0, 1, 1), state=state)
    assert run(c, Failed(3.0, 2, "z", "any", "lost", ""), state=state) == (state, [])
    for event in (Failed(3.0, 1, "a", "", "lost", ""), Failed(3.0, 2, "a", "", "diverged", "")):
        assert refused(run(c, event, state=state)[1]) == "wrong-phase"


def test_after_the_last_attempt_the_federation_pauses_with_its_fault_and_resuming_counts_anew() -> None:
    c = config(max_attempts=2, min_updates=2)
    state = opened(c)
    state, said = run(c, failed(c, state, state.cohort[0]), Tick(10.0), state=state, present="abc")
    assert (state.attempt, state.tries, state.phase) == (2, 2, "running")
    one, other = state.cohort
    state, said = run(c, updated(c, state, one, 11.0), failed(c, state, other, 12.0), state=state, present="abc")
    assert (state.phase, state.stage, state.deadline) == ("paused", "drawing", None)
    assert isinstance(said[-1], GiveUp)
    assert said[-1].fault == state.fault
    for words in ("round 1 has 1 of the 2 updates", "after 2 attempts", f"{other}: diverged (loss is NaN)", "resume"):
        assert words in said[-1].fault
    assert run(c, here("abc", 20.0), Tick(1e6), state=state) == (state, [])
    given_up = state
    state, said = run(c, Resumed(30.0), state=state, present="abc")
    assert (state.phase, state.attempt, state.tries, state.fault) == ("running", 3, 1, None)
    assert dict(state.received) == {one: "s"}  # acknowledged updates still count
    state, _ = run(c, Tick(40.0), here("abc", 40.0 + engine.RETRY), state=state)
    assert (state.phase, state.attempt, state.tries) == ("running", 4, 2)
    state, said = run(c, Tick(99.0), state=state, present="abc")
    assert (state.phase, [type(d) for d in said]) == ("paused", [GiveUp])

    once = config(max_attempts=1, min_updates=2)
    state, _ = run(once, Tick(99.0), state=opened(once))
    assert "updates it needs after 1 attempt; the other devices did not report in time" in str(state.fault)

    state, said = run(c, updated(c, given_up, other, 50.0), state=given_up)  # it completes the round after all
    assert (state.phase, said) == ("paused", [Acknowledge(1, other, "s", False)])
    assert state.fault == (
        "round 1 has 2 of the 2 updates it needs, but the last came after 2 attempts; resume to go on"
    )
    state, said = run(c, Resumed(60.0), state=state)
    assert (state.phase, state.fault) == ("running", None)
    assert said == [Aggregate(1, 2, tuple(sorted((one, other))))]


def test_attempts_whose_updates_cannot_be_folded_count_too() -> None:
    c = config(max_attempts=1)
    state = opened(c)
    bad = state.cohort
    state, _ = run(c, *(updated(c, state, d) for d in bad), state=state)
    state, said = run(c, Unusable(2.0, 1, 1, bad), state=state)
    assert (state.phase, [type(d) for d in said]) == ("paused", [GiveUp])


# --- settings that change


def changed(c: FederationConfig, state: State, now: float = 5.0, **new: Any) -> tuple[State, list[Decision]]:
    return run(c, Changed(now, new), state=state)


def test_a_new_deadline_counts_for_the_attempt_under_way_and_for_a_pause() -> None:
    c = config()
    state, said = changed(c, opened(c), deadline_seconds=30.0)
    assert (state.deadline, said) == (30.0, [])
    paused, _ = run(c, Paused(10.0), state=state)
    assert paused.remaining == 20.0
    shorter, _ = changed(c, paused, deadline_seconds=15.0)
    assert run(c, Resumed(20.0), state=shorter)[0].deadline == 25.0
    one_in, _ = run(c, updated(c, state, state.cohort[0]), state=state)
    closed, said = changed(c, one_in, now=6.0, deadline_seconds=2.0)
    assert (closed.stage, said) == ("aggregating", [Aggregate(1, 1, (state.cohort[0],))])


def test_fewer_updates_that_are_enough_close_an_attempt_that_failed_and_open_one_that_waits() -> None:
    c = config(min_updates=2)
    state, _ = run(c, updated(c, opened(c), opened(c).cohort[0]), Tick(10.0), state=opened(c))
    assert state.stage == "drawing"
    assert changed(c, state, min_updates=1)[0].stage == "aggregating"
    state, _ = run(c, Tick(10.0), here("a", 11.0), state=opened(c))
    assert state.stage == "drawing"
    state, _ = run(c, Changed(12.0, {"min_updates": 1}), state=state, present="a")
    assert (state.stage, state.cohort) == ("collecting", ("a",))


def test_a_new_number_of_rounds_is_in_force_from_the_next_round() -> None:
    c = config(rounds=2)
    state, _ = changed(c, opened(c), rounds=3)
    assert (engine.in_force(c, state).rounds, state.next_rounds) == (2, 3)
    closes = [updated(c, state, d) for d in state.cohort]
    state, _ = run(c, *closes, Aggregated(6.0, 1, 1), state=state, present="abc")
    assert (engine.in_force(c, state).rounds, state.next_rounds, state.round) == (3, None, 2)
    less, _ = changed(c, state, rounds=4)
    assert engine.in_force(c, less).rounds == 3
    last = [updated(c, less, d) for d in less.cohort]
    less, _ = run(c, *last, Aggregated(7.0, 2, 1), state=less, present="abc")
    assert (less.phase, less.round) == ("running", 3)
    assert changed(c, State(), rounds=7)[0].changed == {"rounds": 7}


def test_a_smaller_cohort_counts_from_the_next_attempt_and_keeps_the_places_of_the_first() -> None:
    c = config(cohort=4, min_devices=5, rounds=3)
    state, _ = changed(c, opened(c, "abcde"), cohort=2)
    assert len(state.cohort) == 4
    state, _ = run(
        c, *(updated(c, state, d) for d in state.cohort), Aggregated(6.0, 1, 1), state=state, present="abcde"
    )
    assert (len(state.cohort), sorted(state.asked.values())) == (2, [0, 1])
    again, _ = changed(c, state, cohort=4)
    assert refused(changed(c, again, cohort=5)[1]) == "cannot-change"


@pytest.mark.parametrize(
    "new", [{"rounds": 1}, {"cohort": 3}, {"min_updates": 3}, {"min_devices": 1}, {"cohort": 1, "min_updates": 2}]
)
def test_what_the_round_under_way_does_not_allow_is_refused_and_changes_nothing(new: dict[str, Any]) -> None:
    c = config()
    state = opened(c)
    after, said = changed(c, state, **new)
    assert (refused(said), after) == ("cannot-change", state)


# --- the tables

EXAMPLES: dict[type, Event] = {
    Arrived: Arrived(5.0, "a"), Present: here("abc", 5.0), Started: Started(5.0, ("a", "b", "c"), 3),
    Removed: Removed(5.0, "z"), Tick: Tick(5.0), Paused: Paused(5.0), Resumed: Resumed(5.0), Stopped: Stopped(5.0),
    Changed: Changed(5.0, {"rounds": 9}), Deleted: Deleted(5.0),
}  # fmt: skip


def standing(c: FederationConfig, phase: Phase, stage: Stage) -> State | None:
    """A state in this phase and stage, None when the machines never meet in it."""
    collecting = opened(c)
    full, _ = run(c, *(updated(c, collecting, d) for d in collecting.cohort), state=collecting)
    drawing, _ = run(c, Aggregated(2.0, 1, 1), state=full)
    running = {"drawing": drawing, "collecting": collecting, "aggregating": full}
    if phase == "running":
        return running.get(stage)
    if phase == "paused":
        return run(c, Paused(3.0), state=running[stage])[0] if stage in running else None
    if stage != "idle":
        return None
    return {"recruiting": State(), "finished": State(phase="finished", round=c.rounds),
            "stopped": run(c, Stopped(3.0), state=collecting)[0]}[phase]  # fmt: skip


# For each standing: the events that move it, and where to. Every other accepted event leaves phase and stage alone.
MOVES: dict[tuple[str, str], dict[type, tuple[str, str]]] = {
    ("recruiting", "idle"): {Present: ("running", "collecting"), Started: ("running", "collecting"),
                             Stopped: ("stopped", "idle")},
    ("running", "drawing"): {Present: ("running", "collecting"), Paused: ("paused", "drawing"),
                             Stopped: ("stopped", "idle")},
    ("running", "collecting"): {Paused: ("paused", "collecting"), Stopped: ("stopped", "idle")},
    ("running", "aggregating"): {Aggregated: ("running", "drawing"), Unusable: ("running", "drawing"),
                                 Paused: ("paused", "aggregating"), Stopped: ("stopped", "idle")},
    ("paused", "drawing"): {Resumed: ("running", "drawing"), Stopped: ("stopped", "idle")},
    ("paused", "collecting"): {Resumed: ("running", "collecting"), Stopped: ("stopped", "idle")},
    ("paused", "aggregating"): {Aggregated: ("paused", "drawing"), Unusable: ("paused", "drawing"),
                                Resumed: ("running", "aggregating"), Stopped: ("stopped", "idle")},
    ("finished", "idle"): {},
    ("stopped", "idle"): {},
}  # fmt: skip


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("stage", get_args(Stage))
def test_every_event_in_every_phase_and_stage_is_refused_or_leads_where_the_tables_say(
    phase: Phase, stage: Stage
) -> None:
    c = config()
    state = standing(c, phase, stage)
    assert (state is not None) == ((phase, stage) in MOVES)
    if state is None:
        return
    assert (state.phase, state.stage) == (phase, stage)
    kinds = Event.__subclasses__()
    assert set(kinds) == set(engine._HANDLERS)
    for kind in kinds:
        device = state.cohort[0] if state.cohort else "a"
        examples = {
            **EXAMPLES, Updated: updated(c, state, device, 5.0), Failed: failed(c, state, device, 5.0),
            Aggregated: Aggregated(5.0, state.round, state.attempt),
            Unusable: Unusable(5.0, state.round, state.attempt, state.cohort),
        }  # fmt: skip
        after, said = run(c, examples[kind], state=state)
        due = MOVES[phase, stage].get(kind, (phase, stage))
        assert (after.phase, after.stage) == due, kind
        if kind not in engine.ACCEPTED[phase] or (kind is Deleted and phase in ("running", "paused")):
            assert refused(said) == "wrong-phase", kind
        if kind is Arrived or any(isinstance(d, Refuse) for d in said):
            assert after == state


def test_every_signal_leads_to_a_phase_and_a_stage_that_exist_and_both_tables_agree_on_the_rest() -> None:
    for table, names in ((engine.PHASES, get_args(Phase)), (engine.STAGES, get_args(Stage))):
        assert set(table) == set(names)
        assert {after for row in table.values() for after in row.values()} <= set(names)
    signals = set(get_args(engine.Signal))
    for table in (engine.PHASES, engine.STAGES):
        assert {signal for row in table.values() for signal in row} == signals


def test_the_events_of_the_manual_are_the_events_of_the_code() -> None:
    assert engine.__doc__ is not None
    rows = re.findall(r"^    ([A-Z][a-z]+) +\S", engine.__doc__.partition("The tables")[2], re.MULTILINE)
    assert set(rows) == {kind.__name__ for kind in Event.__subclasses__()}
    assert set().union(*engine.ACCEPTED.values()) == set(Event.__subclasses__())


def test_who_wants_to_go_on_with_a_federation_that_has_ended_is_told_how() -> None:
    c = config()
    state, _ = run(c, Stopped(1.0), state=opened(c))
    for event in (Started(2.0, ("a",), 1), Resumed(2.0), Changed(2.0, {"rounds": 9})):
        _, (said,) = run(c, event, state=state)
        assert isinstance(said, Refuse)
        assert said.detail.endswith("stopped for good; to go on from its model, create another one with start_from")


def test_stopping_is_final() -> None:
    c = config()
    running = opened(c)
    state, _ = run(c, Stopped(1.0), state=running)
    for event in (Started(2.0, ("a",), 1), Resumed(2.0), Aggregated(2.0, 1, 1), updated(c, running, "a")):
        after, said = run(c, event, state=state)
        assert (after, refused(said)) == (state, "wrong-phase")
    assert run(c, here("abc"), state=state) == (state, [])


def test_after_a_restart_the_decisions_that_are_not_carried_out_are_pending() -> None:
    c = config()
    state, said = run(c, here("abc"))
    assert engine.pending(engine.load(engine.dump(state))) == (said[-1],)
    for device in state.cohort:
        state, said = run(c, updated(c, state, device), state=state)
    assert engine.pending(engine.load(engine.dump(state))) == (said[-1],)
    state, said = run(c, Aggregated(2.0, 1, 1), state=state)
    assert engine.pending(engine.load(engine.dump(state))) == (said[-1],)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["come", "go", "remove", "update", "again", "other", "fail", "lost", "tick", "late",
                         "aggregated", "unusable", "pause", "resume", "start", "change"]),
        st.integers(0, 7),
    ),
    max_size=120,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 4), st.data())
def test_in_any_history_no_round_is_skipped_and_every_acknowledged_update_is_counted_once(
    actions: list[tuple[str, int]], cohort: int, data: st.DataObject
) -> None:
    c = config(
        cohort=cohort,
        min_updates=data.draw(st.integers(1, cohort)),
        rounds=3,
        max_attempts=data.draw(st.integers(1, 3)),
    )
    state, now, present = State(), 0.0, set[str]()
    acknowledged: Counter[tuple[int, str]] = Counter()
    counted: Counter[tuple[int, str]] = Counter()
    closed: list[int] = []
    left_out: set[tuple[int, str]] = set()
    folding: Aggregate | None = None
    for word, i in actions:
        now += 1.0
        device = f"d{i}"
        event: Event
        if word == "come":
            present.add(device)
        elif word in ("go", "remove"):
            present.discard(device)
        if word in ("update", "again", "other"):
            event = updated(c, state, device, now, "t" if word == "other" else "s")
        elif word in ("fail", "lost"):
            event = failed(c, state, device, now, "lost" if word == "lost" else "data")
        elif word == "change":
            names = ["deadline_seconds", "rounds", "cohort", "min_devices", "min_updates"]
            event = Changed(now, data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 6), max_size=3)))
        elif word == "unusable":
            event = Unusable(now, state.round, state.attempt, engine.usable(state))
        else:
            now += 100.0 if word == "late" else 0.0
            here_now = Present(now, tuple(sorted(present)), len(present))
            event = {"come": here_now, "go": Tick(now), "remove": Removed(now, device),
                     "tick": Tick(now), "late": Tick(now), "aggregated": Aggregated(now, state.round, state.attempt),
                     "pause": Paused(now), "resume": Resumed(now),
                     "start": Started(now, tuple(sorted(present)), len(present))}[word]  # fmt: skip
        for happening in (event, Present(now, tuple(sorted(present)), len(present))):
            before, force = state, engine.in_force(c, state)
            state, decisions = apply(c, state, happening)
            if isinstance(happening, Changed):
                force = engine.in_force(c, state)
            places = [place for d, place in state.asked.items() if d in {*state.cohort, *state.received}]
            assert sorted(set(places)) == sorted(places)
            assert set(places) <= set(range(cohort))
            assert engine.load(engine.dump(state)) == state
            for decision in decisions:
                if isinstance(decision, Acknowledge) and not decision.duplicate:
                    acknowledged[decision.round, decision.device] += 1
                elif isinstance(decision, Aggregate):
                    assert folding is None
                    assert len(decision.devices) >= force.min_updates
                    folding = decision
                elif isinstance(decision, OpenRound):
                    assert set(decision.cohort) <= present - set(state.received)
                    assert 0 < len(decision.cohort) <= force.cohort - len(engine.usable(state))
                    asked_again = {d for d in decision.cohort if d in state.failed and state.failed[d].kind != "lost"}
                    spared = present - set(state.received) - set(state.failed) - set(decision.cohort)
                    assert not (asked_again and spared)
                    assert state.tries <= c.max_attempts
                    assert folding is None
                elif isinstance(decision, GiveUp):
                    assert state.phase == "paused"
                    assert state.fault is not None
                elif isinstance(decision, Refuse):
                    assert state == before
            if isinstance(happening, Aggregated | Unusable) and not any(isinstance(d, Refuse) for d in decisions):
                assert folding is not None
                if isinstance(happening, Aggregated):
                    counted.update((folding.round, d) for d in folding.devices)
                    closed.append(folding.round)
                else:
                    left_out |= {(folding.round, d) for d in folding.devices}
                folding = None
    assert closed == list(range(1, len(closed) + 1))
    if state.phase == "finished":
        assert len(closed) == engine.in_force(c, state).rounds
    assert all(n == 1 for n in acknowledged.values())
    done = {key: n for key, n in acknowledged.items() if key[0] in closed and key not in left_out}
    assert counted == Counter(done)
    waiting = {d for r, d in acknowledged if r not in closed}
    assert waiting == set(state.received)
