"""How coarse Lattice's steps and cells become: the budget, and the guard against bad rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lattice_fleet import THREE, D, LatticeFleet, M, samples
from numpy_mlp import mlp, model

from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice import settings as settings_module
from edge_client.methods.lattice.delivery import CHANGE
from edge_client.methods.lattice.grid import HISTORY, MIDDLE
from edge_client.methods.lattice.levels import between, coarse, coarsest, lateness, raised, settled
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.lattice.values import Record, Total
from edge_client.methods.shared.averaging import Mean
from edge_client.methods.shared.network import network
from edge_client.task import Course

pytestmark = pytest.mark.usefixtures("no_network_is_small")


def test_two_bad_rounds_halve_the_steps_and_leave_the_model_where_it_is() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc", gain=1.0)
    fleet.play(*"abc", gain=-1.0)
    fleet.play(*"abc", gain=1.0)
    assert (fleet.state.bad, fleet.state.level) == (1, MIDDLE)
    unguarded = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1, guard=False), THREE)
    for _ in range(4):
        unguarded.play(*"abc", gain=1.0)
    fleet.play(*"abc", gain=1.0)
    assert (fleet.state.bad, fleet.state.level) == (0, MIDDLE - 1)
    assert np.array_equal(fleet.state.counts, unguarded.state.counts)
    assert not (fleet.state.counts % 2**MIDDLE).any()
    fleet.play(*"abc")
    assert (fleet.state.counts % 2**MIDDLE).any()


def test_levels_rise_as_far_as_the_budget_asks_and_wait_until_the_bytes_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def played(budget: float, average: float = 0.0) -> list[int]:
        method = Lattice(epochs=1, quantum=0.25, lr=0.1, budget=budget, average=average, server_momentum=0.0)
        fleet = LatticeFleet(method, THREE, rounds=14)
        for _ in range(14):
            fleet.play(*"abc")
        if budget < 10:  # beyond, steps would be coarser than the budget may make them
            assert fleet.state.spent < fleet.method.allowed(network(fleet.course, None), 1.0)
        return (fleet.state.history.levels - MIDDLE).tolist()

    assert played(1e9) == [0] * 14  # a network so small always has bytes enough
    monkeypatch.setattr(settings_module, "LEAST", 0.0)
    assert played(1.0) == [0] * 14
    assert played(1e9) == [0, 0, 3, *[5] * 11]  # a quantum of 8; the first round says little of the later ones
    assert played(1e9, average=0.9) == [0] * 14
    assert played(5.0) == [0, 0, *[1] * 12]
    assert played(10.0)[:6] == [0, 0, 2, 3, 4, 5]


@pytest.mark.parametrize(("quantum", "top"), [(0.25, 5), (2.5, 2), (4.9, 1), (5.0, 1), (5.1, 0), (10.0, 0), (40.0, 0)])
def test_the_budget_asks_for_no_steps_beyond_a_quantum_of_ten(quantum: float, top: int) -> None:
    fleet = LatticeFleet(Lattice(quantum=quantum), THREE)
    assert fleet.method.top == MIDDLE + top
    assert raised(fleet.state, 1e9, fleet.method.top).level == MIDDLE + min(top, 3)
    high = replace(fleet.state, level=MIDDLE + top + 1)
    assert raised(high, 1e9, fleet.method.top).level == high.level


def test_the_budget_is_a_share_of_fedavgs_bytes_and_six_kilobytes_at_least() -> None:
    small, large = (network(Course(model(m), 3, 20, 3), None) for m in (M, mlp(300, 300, 10)))
    assert Lattice().allowed(small, 4.0) == 22 * 6144
    d = 300 * 300 + 300 + 300 * 10 + 10
    assert Lattice().allowed(large, 4.0) == pytest.approx(22 * 8 * d / 110)
    assert Lattice(budget=1000.0).allowed(large, 4.0) == 22 * 6144


@pytest.mark.parametrize(
    ("fleet", "rounds", "due"),
    [
        (12, [4, 4], 3.0),
        (12, [1, 4], 3.0),  # a small first round
        (20, [10, 10, 10, 4], 20 / 8.5),  # a round of few updates
        (40, [2] * 9, 20.0),  # of a cohort of any size
        (3, [4, 4], 1.0),  # devices were removed
    ],
)
def test_the_rounds_between_two_of_a_device_are_the_fleet_by_the_updates_of_a_round(
    fleet: int, rounds: list[int], due: float
) -> None:
    start = LatticeFleet(Lattice(), THREE).state
    state = replace(start, fleet=fleet, first=3, round=2 + len(rounds), reports=sum(rounds))
    assert between(state, rounds[-1]) == pytest.approx(due)


def test_a_change_over_more_rounds_than_the_history_counts_as_one_over_the_history() -> None:
    start = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE).state

    def late(round_: int, first: int = 1) -> tuple[int, int, float]:
        return lateness(replace(start, first=first, round=round_), 100.0)

    assert late(40) == (HISTORY, HISTORY, 1.0)
    assert late(5) == (5, 4, 2.0)
    assert late(1) == (1, 0, 4.0)
    assert late(5, first=3) == (5, 2, 8**0.5)
    assert [lateness(replace(start, first=1, round=9), n)[0] for n in (2.4, 2.6)] == [2, 3]


def test_a_rise_waits_for_the_bytes_of_the_last_one_but_not_for_a_round_without_updates() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    for _ in range(3):
        fleet.play(*"abc")
    assert settled(fleet.state, 2)
    assert not settled(replace(fleet.state, level=MIDDLE - 1), 1)  # the guard made moves finer
    fleet.state = replace(fleet.state, level=MIDDLE + 1)
    assert not settled(fleet.state, 1)
    fleet.play(*"abc")
    assert (settled(fleet.state, 1), settled(fleet.state, 2)) == (True, False)
    fleet.play(*"abc", dropped=True)
    fleet.play(*"abc")
    assert (settled(fleet.state, 3), settled(fleet.state, 4)) == (True, False)
    assert fleet.state.history.lowest(3) == MIDDLE + 1  # the round without updates makes no change finer


def test_cells_are_coarse_where_devices_are_many_rounds_apart_and_the_run_is_long_enough() -> None:
    start = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE).state
    assert [coarsest(start, n, 60) for n in (1.0, 2.0, 4.4, 4.5, 50.0)] == [0, 0, 0, 2, 2]
    assert [coarsest(start, 5.0, rounds) for rounds in (2, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]
    assert coarsest(replace(start, level=MIDDLE + 1), 50.0, 60) == 0  # the fleet grew after moves had become coarser
    assert coarsest(replace(start, level=MIDDLE - 1), 50.0, 60) == 2


def test_with_coarse_cells_moves_are_finer() -> None:
    start = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE).state

    def after(level: int, cells: int = 2) -> tuple[int, int]:
        """The levels of moves, less MIDDLE, and of cells above them."""
        now = coarse(replace(start, level=MIDDLE + level), cells)
        return now.level - MIDDLE, now.coarser

    assert [after(0), after(0, cells=1)] == [(-1, 3), (-1, 2)]
    assert after(-2) == (-2, 4)  # the guard made moves finer


def test_moves_rise_by_a_level_for_each_factor_of_two_up_to_the_top() -> None:
    start = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE).state

    def after(level: int, need: float, top: int) -> int:
        return raised(replace(start, level=MIDDLE + level), need, MIDDLE + top).level - MIDDLE

    assert [after(0, need, 9) for need in (1.1, 2.0, 2.1, 4.1, 100.0)] == [1, 1, 2, 3, 3]
    assert [after(0, 100.0, 2), after(1, 100.0, 2), after(3, 100.0, 2)] == [2, 2, 3]


def test_beyond_the_budget_moves_rise_where_devices_are_near_and_cells_become_coarse_where_they_are_far() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1000.0), THREE, rounds=30)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])

    def levels(devices: int, level: int = 0, coarser: int = 0) -> tuple[int, int]:
        now = {"fleet": devices, "level": MIDDLE + level, "coarser": coarser, "spent": 1e9}
        after = fleet.method.levelled(fleet.course, 2, replace(fleet.state, **now), total)
        return after.level - MIDDLE, after.coarser

    assert [levels(devices) for devices in (3, 13, 14, 40)] == [(3, 0), (3, 0), (-1, 3), (-1, 3)]
    assert levels(40, level=-3, coarser=3) == levels(3, level=-3, coarser=3) == (-3, 3)  # coarse cells stay


def test_what_is_left_of_the_budget_counts_as_one_round_s_bytes_at_least() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1000.0, average=0.0), THREE, rounds=30)
    fleet.play(*"abc")
    fleet.play(*"abc")
    state, total = replace(fleet.state, spent=1e9), Total(np.zeros(D), Mean(0), sizes=[1])
    risen = [fleet.method.levelled(fleet.course, r, state, total).level - MIDDLE for r in (25, 27, 28, 29)]
    assert risen == [3, 2, 2, 0]  # for 6, 4 and 3 rounds, the last delivery among them


def test_nothing_rises_from_the_first_round_of_the_mean_on() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1000.0, average=0.5), THREE, rounds=12)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])

    def level(round_: int, **now: float) -> int:
        state = replace(fleet.state, **{"spent": 1e9, **now})
        return fleet.method.levelled(fleet.course, round_, state, total).level

    assert [level(round_) for round_ in (4, 5, 6, 7)] == [MIDDLE + 3, MIDDLE + 3, MIDDLE, MIDDLE]  # 7 to 12: the mean


def test_n_moves_onto_coarser_cells_and_loses_nothing() -> None:
    counts = np.array([0, 100, -100, 300, 3 * 256, -700], np.int32)
    state = replace(
        LatticeFleet(Lattice(), THREE).state,
        counts=counts,
        residual=np.full(6, 60.0, np.float32),
        velocity=np.zeros(6, np.float32),
        level=MIDDLE - 1,
        coarser=3,
    )
    moved = np.array([0.0, 0, 0, 5, 0, 1])
    now, left, _ = method_module.applied(state, moved, 0.0)
    now = now.astype(np.int64)
    assert not (now % 2 ** (MIDDLE + 2)).any()
    assert np.array_equal(now + left, counts + 60 + moved * 2 ** (MIDDLE - 1))
    assert now.tolist() == [0, 0, 0, 1024, 1024, -1024]
    assert np.abs(left).max() <= 0.7 * 1024


def test_a_new_device_receives_n_in_whole_cells_once_they_are_coarse() -> None:
    fleet = LatticeFleet(
        Lattice(epochs=1, quantum=0.25, lr=0.1, server_momentum=0.0), {**THREE, "d": samples(3, 40)}, rounds=14
    )
    for _ in range(3):
        fleet.play(*"ab")
    fine = len(fleet.method.downlink(fleet.course, 4, fleet.state, None).arrays[CHANGE])
    assert fleet.state.lowest == MIDDLE
    fleet.state = replace(fleet.state, level=MIDDLE - 1, coarser=5)
    fleet.play(*"ab")
    assert fleet.state.lowest == MIDDLE + 4
    assert not (fleet.state.counts % 2 ** (MIDDLE + 4)).any()
    fleet.play("a", "c")  # c has no N, a and b hold finer ones
    assert len(fleet.method.downlink(fleet.course, 6, fleet.state, None).arrays[CHANGE]) < fine
    for device in "abd":
        assert np.array_equal(fleet.receive(device).counts, fleet.state.counts)
    assert not fleet.lost


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_hold_the_same_numbers_where_the_budget_makes_cells_coarse(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "LEAST", 0.0)
    names = [f"device-{i}" for i in range(24)]
    method = Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1e9)
    fleet = LatticeFleet(method, {d: samples(i % 3) for i, d in enumerate(names)}, seed=seed, rounds=20)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(names) for _ in range(3)])
    for round_ in range(1, 21):
        fleet.play(*order[3 * round_ - 3 : 3 * round_])
        history, ends = fleet.state.history, np.cumsum(fleet.state.history.lengths)
        for values, level in zip(np.split(history.values, ends[:-1]), history.levels.tolist(), strict=True):
            assert not (values % 2**level).any()
        if round_ in (6, 12, 19):
            assert all(np.array_equal(fleet.receive(d).counts, fleet.state.counts) for d in names)
    mean = fleet.receive(names[0]).counts
    assert all(np.array_equal(fleet.receive(d).counts, mean) for d in names)
    assert fleet.state.coarser > 0
    assert not fleet.lost


def test_the_last_delivery_counts_as_a_round_for_each_cohort_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "LEAST", 0.0)
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1.0), THREE, rounds=14)
    fleet.play(*"abc")
    fleet.play(*"abc")
    course, state = fleet.course, fleet.state

    def risen(cohorts: int, share: float) -> tuple[int, int]:
        """After round 2, where a device's bytes of a later round are this share of what a round may take."""
        now = replace(state, fleet=3 * cohorts)
        late = min(cohorts, 2)
        down = len(fleet.method.downlink(course, 3, now, Record(3 - late)).arrays[CHANGE])
        fresh = len(fleet.method.downlink(course, 3, now, Record(2)).arrays[CHANGE])
        method = Lattice(epochs=1, quantum=0.25, lr=0.1, budget=8 * D * share / (cohorts**0.5 * fresh), average=0.0)
        after = method.levelled(course, 2, replace(now, spent=-float(down)), Total(np.zeros(D), Mean(0), sizes=[0]))
        return after.level - MIDDLE, after.coarser

    for cohorts, due in ((1, (1, 0)), (3, (1, 0)), (5, (-1, 2))):
        fits = (14 + cohorts / 2) / (12 + cohorts)  # a delivery is half a round of federated averaging
        assert (risen(cohorts, 0.99 * fits), risen(cohorts, 1.01 * fits)) == ((0, 0), due)


def test_a_device_that_was_away_while_steps_were_doubled_and_halved_receives_one_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=6.0), THREE)
    fleet.play(*"abc", gain=-1.0)
    with monkeypatch.context() as patch:
        patch.setattr(settings_module, "LEAST", 0.0)
        for _ in range(4):
            fleet.play("a", "b", gain=-1.0)
    for _ in range(3):
        fleet.play("a", "b", gain=1.0)
    assert len({*fleet.state.history.levels.tolist(), fleet.state.level}) > 2
    assert fleet.state.level < fleet.state.history.levels.max()
    assert np.array_equal(fleet.receive("c").counts, fleet.receive("a").counts)
    assert np.array_equal(fleet.receive("c").counts, fleet.state.counts)
    assert not fleet.lost


def test_nothing_rises_while_rounds_are_bad() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=0.1, budget=1e9), THREE)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])

    def level(bad: int) -> int:
        after = fleet.method.levelled(fleet.course, 2, replace(fleet.state, bad=bad, spent=1e9), total)
        return after.level - MIDDLE

    assert [level(bad) for bad in (0, 1, 2, 5)] == [3, 0, 0, 0]


def test_steps_are_halved_after_bad_rounds_if_the_budget_allows_twice_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])

    def after(need: float) -> tuple[int, int]:
        """The level, less MIDDLE, and the bad rounds that count."""
        monkeypatch.setattr(Lattice, "need", lambda *_: need)
        now = fleet.method.levelled(fleet.course, 2, replace(fleet.state, bad=3), total)
        return now.level - MIDDLE, now.bad

    assert [after(need) for need in (0.1, 0.5, 0.51, 2.0)] == [(-1, 0), (-1, 0), (0, 3), (0, 3)]


def test_steps_are_halved_also_with_coarse_cells_and_in_the_rounds_of_the_mean() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE, rounds=20)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])
    for round_, coarser in ((2, 3), (19, 0)):
        state = replace(fleet.state, bad=2, level=MIDDLE - coarser, coarser=coarser)
        after = fleet.method.levelled(fleet.course, round_, state, total)
        assert (after.level, after.coarser, after.bad) == (state.level - 1, coarser, 0)


def test_the_guard_ends_at_level_0() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE, rounds=24)
    for _ in range(23):
        fleet.play(*"abc", gain=1.0)
    assert fleet.state.history.levels.tolist() == [max(0, MIDDLE - i // 2) for i in range(23)][-HISTORY:]


def test_halved_steps_wait_until_the_bytes_of_the_last_change_show() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), {d: samples(0, 40) for d in "abcdef"}, rounds=20)
    for round_ in range(11):
        fleet.play(*("ab", "cd", "ef")[round_ % 3], gain=-1.0 if round_ < 2 else 1.0)
    levels = [*fleet.state.history.levels.tolist(), fleet.state.level]
    # A device takes part every three rounds: two bad ones do not suffice for the second halving.
    assert [level - MIDDLE for level in levels] == [0, 0, 0, 0, -1, -1, -1, -2, -2, -2, -3, -3]


@pytest.mark.parametrize(("gains", "bad"), [((-1, 1, 1), 1), ((-1, -1, 1), 0), ((-5, 0, 9), 0), ((-9, 2, 1), 1)])
def test_a_round_is_bad_when_most_of_its_devices_say_so(gains: tuple[float, ...], bad: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc", gain=dict(zip("abc", gains, strict=True)))
    assert fleet.state.bad == bad


def test_of_an_even_number_of_devices_one_more_than_half_must_say_so() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play("a", "b", gain={"a": -1.0, "b": 1.0})
    assert fleet.state.bad == 0
