"""The round engine: the rules of its docstring, one by one, then random histories."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from edge_kernels import counter
from hypothesis import given, settings
from hypothesis import strategies as st

from coord_server import engine
from coord_server.engine import State, apply
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
from edge_client.protocol.messages import FederationConfig


def config(**more: Any) -> FederationConfig:
    base: dict[str, Any] = {"name": "fed", "bundle": "0" * 64, "method": {"name": "x"}, "rounds": 2, "cohort": 2,
                            "min_devices": 3, "min_updates": 1, "deadline_seconds": 10.0, "seed": 7}  # fmt: skip
    return FederationConfig.model_validate({**base, **more})


def run(c: FederationConfig, *events: Event, state: State | None = None) -> tuple[State, list[Decision]]:
    state, said = state or State(), []
    for event in events:
        state, decisions = apply(c, state, event)
        said += decisions
    return state, said


def enrol(*names: str) -> list[Event]:
    return [Ready(0.0, n) for n in names]


def updated(c: FederationConfig, state: State, device: str, now: float = 1.0, sha256: str = "s") -> Updated:
    return Updated(now, state.round, device, engine.lease(c, state.round, device), sha256)


def test_the_federation_starts_by_itself_when_enough_devices_have_enrolled() -> None:
    c = config()
    state, said = run(c, *enrol("a", "b"))
    assert (state.phase, said) == ("recruiting", [])
    state, said = run(c, *enrol("c"), state=state)
    assert (state.phase, state.round, state.attempt) == ("running", 1, 1)
    assert said == [OpenRound(1, 1, state.cohort, 10.0)]


def test_a_manual_start_waits_for_the_operator() -> None:
    c = config(start="manual")
    state, said = run(c, *enrol("a", "b", "c", "d"))
    assert (state.phase, said) == ("recruiting", [])
    state, said = run(c, Started(5.0), state=state)
    assert isinstance(said[0], OpenRound)
    assert said[0].deadline == 15.0


def test_starting_without_a_device_is_refused() -> None:
    assert isinstance(run(config(), Started(0.0))[1][0], Refuse)


def test_the_cohort_is_the_devices_with_the_smallest_keys_whatever_the_order_of_enrolment() -> None:
    c = config(min_devices=5)
    names = ("e", "d", "c", "b", "a")
    by_key = sorted(names, key=lambda n: counter.key(7, "cohort", 1, 1, n))
    for order in (names, names[::-1]):
        state, _ = run(c, *enrol(*order))
        assert state.cohort == tuple(sorted(by_key[:2]))


def test_a_round_closes_when_its_whole_cohort_has_reported_and_the_next_one_opens_after_aggregation() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    first, second = state.cohort
    state, said = run(c, updated(c, state, second), state=state)
    assert said == [Acknowledge(1, second, "s", False)]
    state, said = run(c, updated(c, state, first), state=state)
    assert said == [Acknowledge(1, first, "s", False), Aggregate(1, 1, (first, second))]
    state, said = run(c, Aggregated(2.0, 1), state=state)
    assert (state.round, state.attempt, dict(state.received)) == (2, 1, {})
    assert said == [OpenRound(2, 1, state.cohort, 12.0)]


def test_after_the_last_round_the_federation_is_finished_and_late_devices_may_still_enrol() -> None:
    c = config(rounds=1)
    state, _ = run(c, *enrol("a", "b", "c"))
    for device in state.cohort:
        state, _ = run(c, updated(c, state, device), state=state)
    state, said = run(c, Aggregated(2.0, 1), state=state)
    assert (state.phase, state.round, said) == ("finished", 1, [Finish(1)])
    state, said = run(c, *enrol("z"), state=state)
    assert "z" in state.devices
    assert said == []


def test_at_the_deadline_a_round_closes_with_enough_updates() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    state, said = run(c, updated(c, state, state.cohort[0]), Tick(9.9), state=state)
    assert not any(isinstance(d, Aggregate) for d in said)
    state, said = run(c, Tick(10.0), state=state)
    assert said == [Aggregate(1, 1, (state.cohort[0],))]


def test_with_too_few_updates_the_round_runs_again_with_another_cohort_and_keeps_what_is_in() -> None:
    c = config(min_updates=2, min_devices=6, cohort=3)
    state, _ = run(c, *enrol(*"abcdef"))
    early, slow, _ = state.cohort
    state, _ = run(c, updated(c, state, early), Tick(10.0), state=state)
    assert (state.round, state.attempt, state.deadline) == (1, 2, 20.0)
    assert state.cohort == engine.choose_cohort(c, state.devices, 1, 2)
    assert dict(state.received) == {early: "s"}
    state, said = run(c, updated(c, state, slow, 11.0), state=state)  # asked by the first attempt: its work counts
    assert said[0] == Acknowledge(1, slow, "s", False)


def test_a_round_waits_while_fewer_devices_are_enrolled_than_it_needs_updates() -> None:
    c = config(min_updates=2)
    state, said = run(c, *enrol("a"), Started(0.0))
    assert (state.phase, state.stage, said) == ("running", "idle", [])
    state, said = run(c, Ready(3.0, "b"), state=state)
    assert said == [OpenRound(1, 1, ("a", "b"), 13.0)]


def test_the_same_update_again_is_acknowledged_again_and_another_body_is_refused() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    device = state.cohort[0]
    once, _ = run(c, updated(c, state, device), state=state)
    again, said = run(c, updated(c, once, device), state=once)
    assert (again, said) == (once, [Acknowledge(1, device, "s", True)])
    other, said = run(c, updated(c, once, device, sha256="t"), state=once)
    assert other == once
    assert isinstance(said[0], Refuse)
    assert said[0].kind == "conflicting-update"


def test_foreign_rounds_leases_and_devices_are_refused_and_change_nothing() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    device, outside = state.cohort[0], (set("abc") - set(state.cohort)).pop()
    good = updated(c, state, device)
    foreign = {
        "wrong-round": Updated(1.0, 2, device, good.lease, "s"),
        "wrong-lease": Updated(1.0, 1, device, engine.lease(c, 1, outside), "s"),
        "not-in-cohort": Updated(1.0, 1, outside, engine.lease(c, 1, outside), "s"),
    }
    for kind, event in foreign.items():
        after, said = run(c, event, state=state)
        assert after == state
        assert isinstance(said[0], Refuse)
        assert said[0].kind == kind


def test_an_update_of_the_next_round_waits_while_a_restarted_coordinator_folds_this_one() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    state, said = run(c, *(updated(c, state, d) for d in state.cohort), state=state)
    assert isinstance(said[-1], Aggregate)
    ahead = Updated(2.0, 2, "a", engine.lease(c, 2, "a"), "s")
    after, said = run(c, ahead, state=state)
    assert after == state
    assert isinstance(said[0], Refuse)
    assert said[0].kind == "round-not-open"


def test_a_removed_device_is_not_waited_for_and_its_acknowledged_update_stays() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    first, second = state.cohort
    state, said = run(c, updated(c, state, first), Removed(2.0, first), Removed(3.0, second), state=state)
    assert said[-1] == Aggregate(1, 1, (first,))
    assert state.devices == tuple(sorted(set("abc") - {first, second}))


def test_a_pause_stops_the_clock_takes_updates_and_opens_nothing() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    first, second = state.cohort
    state, said = run(c, Paused(4.0), Tick(1000.0), updated(c, state, first), updated(c, state, second), state=state)
    assert [type(d) for d in said] == [Acknowledge, Acknowledge]
    resumed, said = run(c, Resumed(1000.0), state=state)
    assert said == [Aggregate(1, 1, (first, second))]
    state, _ = run(c, *enrol("a", "b", "c"))
    state, _ = run(c, Paused(4.0), Resumed(100.0), state=state)
    assert state.deadline == 106.0
    assert resumed.phase == "running"


def test_a_round_without_a_usable_update_is_run_again_without_the_devices_that_sent_them() -> None:
    c = config(min_devices=4)
    state, _ = run(c, *enrol("a", "b", "c", "d"))
    bad = state.cohort
    for device in bad:
        state, _ = run(c, updated(c, state, device), state=state)
    again, said = run(c, Unusable(2.0, 1, bad), state=state)
    others = tuple(sorted(set("abcd") - set(bad)))
    assert (again.round, again.attempt, again.cohort) == (1, 2, others)
    assert said == [OpenRound(1, 2, others, 12.0)]
    assert run(c, updated(c, again, bad[0]), state=again)[1] == [Acknowledge(1, bad[0], "s", True)]
    for device in others:
        again, said = run(c, updated(c, again, device), state=again)
    assert said[-1] == Aggregate(1, 2, others)
    assert engine.pending(again) == (said[-1],)
    after, _ = run(c, Aggregated(3.0, 1), state=again)
    assert (after.round, after.unusable) == (2, ())
    waiting, said = run(c, Removed(1.5, others[0]), Removed(1.5, others[1]), Unusable(2.0, 1, bad), state=state)
    assert (waiting.stage, said) == ("idle", [])
    assert isinstance(run(c, Unusable(3.0, 1, bad), state=waiting)[1][0], Refuse)


def test_the_table_in_the_manual_is_the_table_in_the_code() -> None:
    assert engine.__doc__ is not None
    rows = re.findall(
        r"^    (any alive|any|\w+) +([A-Z][a-z]+) ", engine.__doc__.partition("The table")[2], re.MULTILINE
    )
    alive = [phase for phase in engine.TABLE if phase not in ("finished", "stopped")]
    phases = {"any": list(engine.TABLE), "any alive": alive}
    written = {(phase, event) for word, event in rows for phase in phases.get(word, [word])}
    assert written == {(phase, event.__name__) for phase, events in engine.TABLE.items() for event in events}


def test_stopping_is_for_good() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"), Stopped(1.0))
    for event in (Started(2.0), Resumed(2.0), Ready(2.0, "d"), Aggregated(2.0, 1), updated(c, state, "a")):
        after, said = run(c, event, state=state)
        assert after == state
        assert isinstance(said[0], Refuse)


def test_a_restart_in_mid_aggregation_is_told_to_aggregate_again() -> None:
    c = config()
    state, _ = run(c, *enrol("a", "b", "c"))
    for device in state.cohort:
        state, said = run(c, updated(c, state, device), state=state)
    assert engine.pending(engine.load(engine.dump(state))) == (said[-1],)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["enrol", "remove", "update", "again", "other", "tick", "late", "aggregated", "pause", "resume",
                         "start"]),
        st.integers(0, 7),
    ),
    max_size=120,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 4), st.data())
def test_in_any_history_no_round_is_skipped_and_every_acknowledged_update_is_counted_once(
    actions: list[tuple[str, int]], cohort: int, data: st.DataObject
) -> None:
    c = config(cohort=cohort, min_updates=data.draw(st.integers(1, cohort)), rounds=3)
    state, now = State(), 0.0
    acknowledged: Counter[tuple[int, str]] = Counter()
    counted: Counter[tuple[int, str]] = Counter()
    closed: list[int] = []
    folding: Aggregate | None = None
    for word, i in actions:
        now += 1.0
        device = f"d{i}"
        event: Event
        if word in ("update", "again", "other"):
            event = updated(c, state, device, now, "t" if word == "other" else "s")
        elif word == "aggregated":
            event = Aggregated(now, state.round)
        else:
            event = {"enrol": Ready(now, device), "remove": Removed(now, device), "tick": Tick(now),
                     "late": Tick(now + 100.0), "pause": Paused(now), "resume": Resumed(now),
                     "start": Started(now)}[word]  # fmt: skip
            now += 100.0 if word == "late" else 0.0
        before = state
        state, decisions = apply(c, state, event)
        assert engine.load(engine.dump(state)) == state
        for decision in decisions:
            if isinstance(decision, Acknowledge) and not decision.duplicate:
                acknowledged[decision.round, decision.device] += 1
            elif isinstance(decision, Aggregate):
                assert folding is None
                assert len(decision.devices) >= c.min_updates
                folding = decision
            elif isinstance(decision, OpenRound):
                assert decision.cohort == engine.choose_cohort(c, state.devices, decision.round, decision.attempt)
                assert folding is None or isinstance(event, Aggregated)
            elif isinstance(decision, Refuse):
                assert state == before
        if isinstance(event, Aggregated) and not any(isinstance(d, Refuse) for d in decisions):
            assert folding is not None
            counted.update((folding.round, d) for d in folding.devices)
            closed.append(folding.round)
            folding = None
    assert closed == list(range(1, len(closed) + 1))
    assert all(n == 1 for n in acknowledged.values())
    done = {key: n for key, n in acknowledged.items() if key[0] in closed}
    assert counted == Counter(done)
    waiting = {d for r, d in acknowledged if r not in closed}
    assert waiting == set(state.received)
