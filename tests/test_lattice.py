"""Lattice: whole numbers that both sides share, unbiased, equal after any pattern of missed rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, counter, lattice
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lattice_fleet import NORMED, D, LatticeFleet, M, Pull, pull, samples
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, clusters, mlp, model

from coord_server import guard
from edge_client.bundle import F32, Manifest
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods.lattice import batch_norm
from edge_client.methods.lattice import grid as grid_module
from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice import settings as settings_module
from edge_client.methods.lattice.delivery import CHANGE
from edge_client.methods.lattice.grid import HISTORY, MIDDLE, closeness, dither, rms, spans, spread, steps, trainable
from edge_client.methods.lattice.levels import between, coarse, coarsest, lateness, raised, settled
from edge_client.methods.lattice.method import MOVES, Lattice
from edge_client.methods.lattice.train import Plan, train
from edge_client.methods.lattice.values import Record, Total
from edge_client.methods.lattice.wire import UpHead, up_head
from edge_client.methods.shared.averaging import Mean
from edge_client.methods.shared.network import network
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course

pytestmark = pytest.mark.usefixtures("no_network_is_small")


@pytest.fixture
def uncoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers travel as they are: for tests of many rounds that are not about the coder."""
    monkeypatch.setattr(method_module.lattice, "encode", lambda values, known: values.tobytes())
    monkeypatch.setattr(method_module.lattice, "decode", lambda data, known: np.frombuffer(data, np.int32))


NONE = np.zeros(0, np.float32)
THREE = {d: samples(i) for i, d in enumerate("abc")}


def test_two_devices_by_hand() -> None:
    """One weight vector of two tensors; every number follows from the docstring."""
    trainer = Pull(M, np.zeros((3, D), np.float32))
    trainer.directions[0, 0], trainer.directions[1, 1] = -2.0, 4.0
    method = Lattice(epochs=1, quantum=0.5, lr=1.0, momentum=0.0, server_momentum=0.0)
    fleet = LatticeFleet(method, {"a": samples(0, 8), "b": samples(1, 24)}, cohort=2, trainer=trainer)
    fleet.play("a", "b")
    # Round 1: "a" moves weight 0 by 2, "b" weight 1 by -4. The first tensor has 30 of the 53 parameters.
    own = {d: np.sqrt(np.array([c**2 / 30, 0, 0, 0], np.float64)).astype(np.float32) for d, c in (("a", 2), ("b", 4))}
    assert all(np.array_equal(fleet.local[d].update.arrays["rms"], own[d]) for d in own)
    middle = (own["a"].astype(np.float64) + own["b"]) / 2
    average = np.sqrt(30 * float(np.float32(middle[0])) ** 2 / D)
    share = average / float(np.float32(middle[0]))
    expected = np.float32([0.5 * 2 * average * share, *[0.5 * 2 * average] * 3])
    assert np.allclose(fleet.state.steps, expected, rtol=1e-6)
    assert fleet.state.samples == 16
    # Round 2: moves are the change * samples / 16 / step, rounded with the shared dither shifted by place / 2.
    before = fleet.state.counts.copy()
    fleet.play("a", "b")
    u = counter.uint64(counter.key(3, "dither", 2), D) >> np.uint64(32)
    for place, (d, c, n) in enumerate((("a", 2.0, 8), ("b", -4.0, 24))):
        shifted = (u + np.uint64(place << 31)) % np.uint64(1 << 32) / 2**32
        a = np.zeros(D)
        a[place] = c * n / 16 / fleet.state.steps[0].astype(np.float64)
        before = before + np.floor(a + shifted).astype(np.int32) * 2**MIDDLE
        head, _ = up_head(fleet.local[d].update.arrays[MOVES].tobytes())
        assert head.gain == 0
    assert np.array_equal(fleet.state.counts, before)


@pytest.mark.usefixtures("uncoded")
@pytest.mark.parametrize("cohort", [3, 5])
def test_the_model_is_the_weighted_mean_in_expectation_also_when_devices_do_not_report(cohort: int) -> None:
    data = {"a": samples(0, 4), "b": samples(1, 8), "c": samples(2, 12)}
    trainer, runs, total = pull(), 150, np.zeros(D)
    for seed in range(runs):
        fleet = LatticeFleet(
            Lattice(epochs=1, quantum=2, lr=0.1, server_momentum=0.0), data, seed=seed, cohort=cohort, trainer=trainer
        )
        fleet.play(*"abc")
        fleet.play(*"abc")
        total += fleet.due()
    due = -0.1 * 2 * np.average(trainer.directions, axis=0, weights=[4, 8, 12])
    noise = fleet.due() - due
    assert np.abs(noise).max() > 0.05  # one run is coarse
    error = (total / runs - due) / (np.abs(noise).mean() / runs**0.5)
    assert np.abs(error).max() < 8
    assert abs(error.mean()) < 0.5


@pytest.mark.usefixtures("uncoded")
@pytest.mark.parametrize(("first", "cohort", "large"), [("abc", "ac", 40), ("abc", "ab", 40), ("ab", "abc", 160)])
def test_a_round_of_large_or_of_small_devices_is_their_weighted_mean_and_no_more(
    first: str, cohort: str, large: int
) -> None:
    """Of the last case's 40 times the mean samples, a device's moves are four times as coarse."""
    data = {"a": samples(0, 4), "b": samples(1, 4), "c": samples(2, large)}
    trainer, runs, total = pull(), 150, np.zeros(D)
    for seed in range(runs):
        method = Lattice(epochs=1, quantum=2, lr=0.1, batch=512, server_momentum=0.0)
        fleet = LatticeFleet(method, data, seed=seed, trainer=trainer)
        fleet.play(*first)
        before = fleet.due()
        fleet.play(*cohort)
        total += fleet.due() - before
    due = -0.1 * np.average(trainer.directions[["abc".index(d) for d in cohort]], axis=0,
                            weights=[len(data[d].y) for d in cohort])  # fmt: skip
    assert total @ due / runs / (due @ due) == pytest.approx(1, abs=0.1)


@pytest.mark.usefixtures("uncoded")
def test_a_federation_of_one_device_equals_local_training_in_expectation() -> None:
    data = {"a": clusters(M, 1)}
    total, runs = np.zeros(D), 200
    for seed in range(runs):
        fleet = LatticeFleet(Lattice(epochs=1, quantum=3, batch=40), data, seed=seed, cohort=1, trainer=NumpyMlp(M))
        fleet.play("a")
        trained = fleet.local["a"].trained.parameters - fleet.course.model.parameters
        total += fleet.due() - trained
    step = float(fleet.state.steps.max())
    assert np.abs(total / runs).max() < 4 * step / runs**0.5


def test_permuting_the_devices_changes_nothing_given_their_places() -> None:
    data = {"a": samples(0, 8), "b": samples(1, 24), "c": samples(2, 16)}
    renamed = {"x": data["c"], "y": data["a"], "z": data["b"]}
    one, two = LatticeFleet(Lattice(epochs=1, lr=0.1), data), LatticeFleet(Lattice(epochs=1, lr=0.1), renamed)
    for _ in range(4):
        one.play("a", "b", "c")
        two.play("y", "z", "x")
    assert np.array_equal(one.state.counts, two.state.counts)
    assert one.state.counts.any()


@given(
    pattern=st.lists(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=2, max_size=9),
    losses=st.dictionaries(st.integers(2, 9), st.sampled_from("abcd"), max_size=3),
    bad=st.sets(st.integers(1, 9), max_size=6),
    dropped=st.sets(st.integers(1, 9), max_size=3),
    m=st.sampled_from([M, NORMED]),
    coarser=st.sampled_from([0, 2]),
    quantum=st.sampled_from([0.5, 5.0]),
    budget=st.sampled_from([1.0, 20.0, 1e9]),
    average=st.sampled_from([0.0, 0.5, 1.0]),
    done=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_both_sides_hold_the_same_numbers_after_any_pattern_of_missed_rounds(
    pattern: list[set[str]],
    losses: dict[int, str],
    bad: set[int],
    dropped: set[int],
    m: Manifest,
    coarser: int,
    quantum: float,
    budget: float,
    average: float,
    done: bool,
) -> None:
    """Steps are doubled and halved meanwhile; after the last round all receive the mean of the same last rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid_module, "HISTORY", 3)
        patch.setattr(settings_module, "LEAST", 0.0)
        method = Lattice(epochs=1, quantum=quantum, lr=0.1, budget=budget, average=average)
        rounds = len(pattern) + (not done)
        fleet = LatticeFleet(method, {d: samples(ord(d) % 3) for d in "abcd"}, rounds=rounds, m=m)
        fleet.state = replace(fleet.state, coarser=coarser)
        after: list[NDArray[np.float64]] = []
        statistics: list[F32] = []
        levels, cells, seen = [MIDDLE], [fleet.state.cell], 0
        for round_, devices in enumerate(pattern, 1):
            if losses.get(round_) in fleet.kept:
                del fleet.kept[losses[round_]]
            fleet.play(*sorted(devices), gain=1.0 if round_ in bad else -1.0, dropped=round_ in dropped)
            if round_ in dropped:
                continue
            skipped = round_ - 1 - seen if after else 0
            after += [*after[-1:] * skipped, fleet.moved()]
            statistics += [*statistics[-1:] * skipped, fleet.state.statistics]
            levels.append(fleet.state.level)
            cells.append(fleet.state.cell)
            seen = round_
        if not dropped:
            assert {device for _, device in fleet.lost} <= set(losses.values())
        covered = min(3, max(1, round(average * rounds)), len(after))
        mean = after[-covered:] if done else after[-1:]
        due = np.mean(mean, axis=0) if mean else np.zeros(m.d)
        middle = np.mean(statistics[-len(mean) :], axis=0) if mean else fleet.course.model.buffers
        unit = fleet.method.unit(fleet.course, fleet.state.steps).max() * 2.0 ** (max([2, *cells][-1 - covered :]) - 2)
        everyone = [fleet.receive(device) for device in "abcd"]  # one of them may never have taken part
        for received in everyone:
            assert received.level == fleet.state.level
            assert np.array_equal(received.counts, everyone[0].counts)
            assert np.array_equal(received.statistics, everyone[0].statistics)
            assert np.allclose(received.statistics, middle, rtol=0.03)
            moved = received.parameters - fleet.course.model.parameters
            assert np.abs(moved - due).max() <= (0.5 * unit if len(mean) > 1 else 0) + 1e-4 * (1 + np.abs(due).max())
        if not bad:
            assert levels == sorted(levels)
        if budget == 1:
            expected = run_ = 0
            for round_ in sorted(set(range(1, rounds)) & set(range(1, len(pattern) + 1)) - dropped):
                run_ = run_ + 1 if round_ in bad else 0
                if run_ == 2:
                    expected, run_ = expected + 1, 0
            assert fleet.state.level == MIDDLE - expected


def test_only_a_device_that_lost_its_state_is_lost_and_its_next_downlink_holds_everything() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    for _ in range(3):
        fleet.play(*"abc")
    assert not fleet.lost
    del fleet.kept["b"]
    older = fleet.kept["c"]
    fleet.play(*"abc")
    assert fleet.lost == [(4, "b")]
    fleet.kept["c"] = older  # a restored backup
    fleet.play(*"abc")
    assert fleet.lost == [(4, "b"), (5, "c")]
    wrong = replace(fleet.kept["a"], counts=fleet.kept["a"].counts + np.int32(1))
    fleet.kept["a"] = wrong
    assert np.array_equal(fleet.receive("a").counts, fleet.state.counts)
    assert fleet.lost[-1] == (6, "a")


def test_a_late_device_receives_one_merged_change_and_steps_travel_once() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc")
    fleet.play(*"abc")
    for _ in range(4):
        fleet.play("a", "b")

    def sent(device: str) -> Payload:
        return fleet.method.downlink(fleet.course, fleet.round + 1, fleet.state, fleet.records.get(device))

    assert set(sent("c").arrays) == set(sent("a").arrays) == {CHANGE}
    assert set(sent("new").arrays) == {CHANGE, "steps"}
    assert fleet.method.audience(fleet.course, 7, fleet.records["c"]) == "from-2"
    assert np.array_equal(fleet.receive("c").counts, fleet.state.counts)


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
    assert raised(high, 1e9, fleet.method.top) == high


@pytest.mark.parametrize(("times", "due"), [(0.5, 5.0), (1, 5.0), (2, 1.25), (100, 0.25)])
def test_a_small_network_begins_with_finer_steps(times: float, due: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    monkeypatch.setattr("edge_client.methods.lattice.settings.SMALL", times * fleet.course.model.manifest.d)
    assert fleet.method.first_quantum(fleet.course) == pytest.approx(due)
    assert ("a smaller quantum" in fleet.method.hints(fleet.course.model)) is (due > 0.25)


@pytest.mark.parametrize(("rounds", "due"), [(1, 0.25), (2, 0.8), (3, 1.8), (4, 3.2), (5, 5.0), (60, 5.0)])
def test_a_run_of_few_rounds_begins_with_finer_steps(rounds: int, due: float) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE, rounds=rounds)
    assert fleet.method.first_quantum(fleet.course) == pytest.approx(due)
    like = LatticeFleet(Lattice(epochs=1, lr=0.1, quantum=due), THREE)
    for each in (fleet, like):
        each.play(*"abc")
    assert np.allclose(fleet.state.steps, like.state.steps)
    assert np.array_equal(fleet.state.counts, like.state.counts)


def test_one_round_alone_applies_what_a_longer_run_leaves_for_the_next_rounds() -> None:
    def missing(rounds: int) -> float:
        fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE, rounds=rounds)
        fleet.play(*"abc")
        due = -0.1 * fleet.trainer.directions.mean(axis=0)
        return float(np.linalg.norm(fleet.moved() - due) / np.linalg.norm(due))

    assert missing(1) < 0.25 < missing(5)


@pytest.mark.parametrize(
    ("samples", "mean", "due"), [(1, 100.0, 0), (15, 1.0, 0), (16, 1.0, 1), (31, 1.0, 1), (32, 1.0, 2), (4500, 12.0, 5)]
)
def test_moves_are_a_level_higher_from_16_times_the_mean_samples_on(samples: int, mean: float, due: int) -> None:
    assert grid_module.extra_levels(samples, mean) == due
    assert grid_module.extra_levels(samples, float(np.float32(mean))) == due
    nearly = np.nextafter(mean, 2 * mean)  # the server's mean, which travels as `mean`
    assert grid_module.extra_levels(samples, float(nearly)) == due


def test_the_moves_of_a_device_of_very_many_samples_are_coarse_and_mean_what_they_should() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, batch=4096, lr=0.1, quantum=2.5), {**THREE, "c": samples(2, 8 * 100)})
    fleet.play("a", "b")
    received, before = fleet.receive("c"), fleet.state
    fleet.play("a", "b", "c")
    a, local = fleet.task("c", 2).assignment, fleet.local["c"]
    update = fleet.method.read_update(a, before, None, local.update)
    change = trainable(M).gather(local.trained.parameters) - trainable(M).gather(received.parameters)
    exact = change * 100.0 / spread(trainable(M), before.steps)
    assert update.scale == 2.0**3
    assert np.abs(update.moves * update.scale - exact).max() < update.scale
    assert np.abs(update.moves).max() > 1  # they are not cut to nothing
    of_moves = fleet.method.influence(a, before, update).norm
    assert of_moves == 8 * fleet.method.influence(a, before, replace(update, scale=1.0)).norm
    assert fleet.method.limited(a, before, update, 0.5, 400.0).scale == 0.5 * 2.0**3 * 400 / 800


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
    fleet.state = replace(fleet.state, level=MIDDLE + 1)
    assert not settled(fleet.state, 1)
    fleet.play(*"abc")
    assert (settled(fleet.state, 1), settled(fleet.state, 2)) == (True, False)
    fleet.play(*"abc", dropped=True)
    fleet.play(*"abc")
    assert (settled(fleet.state, 3), settled(fleet.state, 4)) == (True, False)


def test_cells_are_coarse_where_devices_are_many_rounds_apart_and_the_run_is_long_enough() -> None:
    start = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE).state
    assert [coarsest(start, n, 60) for n in (1.0, 2.0, 3.9, 4.0, 50.0)] == [0, 0, 0, 2, 2]
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

    assert [levels(devices) for devices in (3, 11, 12, 40)] == [(3, 0), (3, 0), (-1, 3), (-1, 3)]
    assert levels(40, level=-1, coarser=3) == levels(3, level=-1, coarser=3) == (-1, 3)  # coarse cells stay


@pytest.mark.parametrize("sign", [-1, 1])
def test_near_the_end_of_32_bits_n_changes_by_whole_cells_or_not_at_all(sign: int) -> None:
    near = sign * (2**30 - 192)  # whole in units of 64, as after two steps of the guard
    state = replace(LatticeFleet(Lattice(), THREE).state, counts=np.full(D, near, np.int32), lowest=MIDDLE - 2)
    out, residual, _ = method_module.applied(state, np.full(D, 10.0 * sign), 0.0)
    assert set(out.tolist()) == {near}
    assert set(residual.tolist()) == {sign * 10.0 * 2**MIDDLE}
    inward, residual, _ = method_module.applied(state, np.full(D, -10.0 * sign), 0.0)
    assert set(inward.tolist()) == {near - sign * 10 * 2**MIDDLE}
    assert not residual.any()


def test_nothing_rises_from_the_first_round_of_the_mean_on_and_the_guard_ends_at_level_0() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=1000.0, average=0.5), THREE, rounds=12)
    fleet.play(*"abc")
    fleet.play(*"abc")
    total = Total(np.zeros(D), Mean(0), sizes=[1])

    def level(round_: int, **now: float) -> int:
        state = replace(fleet.state, **{"spent": 1e9, **now})
        return fleet.method.levelled(fleet.course, round_, state, total).level

    assert [level(round_) for round_ in (4, 5, 6, 7)] == [MIDDLE + 3, MIDDLE + 3, MIDDLE, MIDDLE]  # 7 to 12: the mean
    assert [level(4, bad=2, level=low) for low in (2, 1, 0)] == [1, 0, 0]


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
    monkeypatch.setattr(settings_module, "LEAST", 0.0)
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.25, lr=0.1, budget=6.0), THREE)
    fleet.play(*"abc", gain=-1.0)
    for round_ in range(2, 9):
        fleet.play("a", "b", gain=1.0 if round_ > 6 else -1.0)
    assert len({*fleet.state.history.levels.tolist(), fleet.state.level}) > 2
    assert fleet.state.level < fleet.state.history.levels.max()
    assert np.array_equal(fleet.receive("c").counts, fleet.receive("a").counts)
    assert np.array_equal(fleet.receive("c").counts, fleet.state.counts)
    assert not fleet.lost


def test_a_model_with_more_parameters_than_the_coder_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_module, "MOST_PARAMETERS", D)
    LatticeFleet(Lattice(), THREE)
    monkeypatch.setattr(method_module, "MOST_PARAMETERS", D - 1)
    with pytest.raises(ConfigError, match=f"{D} trainable parameters and Lattice codes {D - 1} at most"):
        LatticeFleet(Lattice(), THREE)


def test_the_mean_samples_are_those_of_all_updates_so_far() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), {"a": samples(0, 4), "b": samples(1, 8), "c": samples(0, 12)})
    for cohort, mean in (("ab", 6.0), ("c", 8.0), ("abc", 8.0), ("c", 60 / 7)):
        fleet.play(*cohort)
        assert fleet.state.samples == pytest.approx(mean)


@pytest.mark.parametrize("covered", [3, 4, 5])  # the mean of four is whole in quarters of a move
def test_after_the_last_round_every_device_receives_the_mean_of_the_last_rounds_in_quarters_of_a_move(
    covered: int,
) -> None:
    fleet, after = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=0.1, average=covered / 8), THREE, rounds=8), []
    for round_ in range(8):
        fleet.play(*("abc" if round_ < 5 else "ab"))
        after.append(fleet.moved())
    due = np.mean(after[-covered:], axis=0)
    unit = spread(trainable(M), fleet.method.unit(fleet.course, fleet.state.steps)).astype(np.float64)
    quarter = unit * 2 ** (MIDDLE - 2)
    for device in "abcx":
        moved = fleet.receive(device).parameters - fleet.course.model.parameters
        assert np.allclose(np.round(due / quarter) * quarter, moved, atol=1e-4)
    assert not np.allclose(due, after[-1], atol=1e-2)
    assert not fleet.lost


def test_the_budget_raises_nothing_while_rounds_are_bad_and_goes_on_after_good_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "LEAST", 0.0)
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=0.1, budget=1e9), THREE)
    for due in (MIDDLE, MIDDLE - 1, MIDDLE - 1, MIDDLE - 2):
        fleet.play(*"abc", gain=1.0)
        assert (fleet.state.level, fleet.state.cell) == (due, due)
    fleet.play(*"abc", gain=-1.0)
    assert (fleet.state.level, fleet.state.cell) == (MIDDLE + 1, MIDDLE + 1)


@pytest.mark.parametrize(("gains", "bad"), [((-1, 1, 1), 1), ((-1, -1, 1), 0), ((-5, 0, 9), 0), ((-9, 2, 1), 1)])
def test_a_round_is_bad_when_most_of_its_devices_say_so(gains: tuple[float, ...], bad: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc", gain=dict(zip("abc", gains, strict=True)))
    assert fleet.state.bad == bad


def test_of_an_even_number_of_devices_one_more_than_half_must_say_so() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play("a", "b", gain={"a": -1.0, "b": 1.0})
    assert fleet.state.bad == 0


def test_a_federation_whose_first_rounds_were_left_out_begins_with_the_next() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    fleet.play(*"abc", dropped=True)
    fleet.play(*"abc", dropped=True)
    assert not fleet.state.steps.any()
    fleet.play("a", "b")
    assert (fleet.state.steps > 0).all()
    assert all("rms" in fleet.local[d].update.arrays for d in "ab")
    assert np.array_equal(fleet.receive("a").steps, fleet.state.steps)
    fleet.play("a", "c", dropped=True)
    assert not fleet.lost
    fleet.play(*"abc")
    assert not fleet.lost
    fleet.play(*"abc")
    assert "rms" not in fleet.local["c"].update.arrays
    fleet.play("b", dropped=True)
    fleet.play("a")
    fleet.receive("c")  # from before the round that was left out
    assert not fleet.lost
    assert np.array_equal(fleet.receive("c").counts, fleet.state.counts)


@pytest.mark.parametrize("coarser", [0, 2])
def test_what_the_server_does_not_apply_stays_in_the_residual(coarser: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1, server_momentum=0.0), THREE)
    fleet.state = replace(fleet.state, coarser=coarser)
    fleet.play(*"abc")
    cell = 2 ** (MIDDLE + coarser)
    assert fleet.state.cell == MIDDLE + coarser
    before = fleet.state.counts + fleet.state.residual
    fleet.play(*"abc")
    moves = sum(_moves(fleet, d, place) for place, d in enumerate("abc"))
    assert np.allclose(fleet.state.counts + fleet.state.residual, before + moves * 2.0**MIDDLE, atol=1e-2)
    assert not (fleet.state.counts % cell).any()
    assert fleet.state.counts.any()
    assert np.abs(fleet.state.residual).max() <= 0.7 * cell + 1e-2


@pytest.mark.parametrize("most", [0.0, 0.5, 0.9])
def test_the_server_moves_further_where_rounds_agree(most: float) -> None:
    """N and the residual together move by the sum of moves and b times the velocity, b the cosine of the two.

    In the third round one of the cohort of three is missing, a round later the level is another.
    """
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1, server_momentum=most), THREE)
    fleet.play(*"abc")
    due = fleet.state.counts + fleet.state.residual.astype(np.float64)
    assert np.allclose(fleet.state.velocity, due, rtol=1e-5)  # no round came before
    velocity, found = due, []
    for level, cohort in ((MIDDLE, "abc"), (MIDDLE, "ab"), (MIDDLE - 2, "abc"), (MIDDLE + 1, "cab")):
        fleet.state = before = replace(fleet.state, level=level)
        fleet.play(*cohort)
        moves = np.zeros(D)
        for place, d in enumerate(cohort):
            a = Assignment(fleet.course, fleet.round, d, place)
            moves += fleet.method.read_update(a, before, None, fleet.local[d].update).moves * 2.0**level
        moves *= 3 / len(cohort)
        cosine = moves @ velocity / np.sqrt((moves @ moves) * (velocity @ velocity))
        found.append(min(most, max(0.0, cosine)))
        velocity = found[-1] * velocity + moves
        due = due + moves + found[-1] * velocity
        assert np.allclose(fleet.state.velocity, velocity, rtol=1e-5, atol=1e-2)
        assert np.allclose(fleet.state.counts + fleet.state.residual, due, rtol=1e-5, atol=1e-2)
    assert min(found) >= min(most, 0.4)  # the same gradients every round


def test_whole_sums_of_moves_leave_nothing_when_the_cell_is_the_level() -> None:
    zero = {"counts": np.zeros(5, np.int32), "residual": np.zeros(5, np.float32), "velocity": np.zeros(5, np.float32)}
    state = replace(LatticeFleet(Lattice(), THREE).state, **zero)
    sums = np.array([-3.0, -1.0, 0.0, 1.0, 700.0])
    change, left, _ = method_module.applied(state, sums, 0.0)
    assert np.array_equal(change, sums * 2**MIDDLE)
    assert not left.any()
    change, left, _ = method_module.applied(replace(state, coarser=1), sums, 0.0)
    assert change.tolist() == [-512, 0, 0, 0, 512 * 350]
    assert left.tolist() == [-256, -256, 0, 256, 0]
    state = replace(state, coarser=1, residual=left)
    _, left, _ = method_module.applied(state, np.array([-1.0, 1.0, 0.0, 1.0, 0.0]), 0.0)
    assert left.tolist() == [0, 0, 0, 0, 0]


def test_a_sum_is_rounded_away_from_0_only_from_seven_tenths_of_a_cell() -> None:
    """From half a cell, as one rounds else, N would move to and fro with the noise of sums about half a cell."""
    left = np.array([0.5, 0.6, 0.69, 0.71, 1.69, 1.71, -0.5, -0.69, -0.71, -1.71]) * 2**MIDDLE
    zero = {"counts": np.zeros(10, np.int32), "velocity": np.zeros(10, np.float32)}
    state = replace(LatticeFleet(Lattice(), THREE).state, residual=left.astype(np.float32), **zero)
    change, after, _ = method_module.applied(state, np.zeros(10), 0.0)
    assert (change / 2**MIDDLE).tolist() == [0, 0, 0, 1, 1, 2, 0, 0, -1, -2]
    assert after == pytest.approx(left - change, abs=1e-4)


def _moves(fleet: LatticeFleet, device: str, place: int) -> NDArray[np.int32]:
    """The numbers that a device sent in the last round; the model before it is what the device kept."""
    a = Assignment(fleet.course, fleet.round, device, place)
    known = lattice.up(dither(a, D), spans(trainable(M)), np.abs(fleet.kept[device].counts) >> MIDDLE)
    return lattice.decode(up_head(fleet.local[device].update.arrays[MOVES].tobytes())[1], known)


def test_the_moves_of_the_first_round_are_in_steps_of_a_quarter_of_the_quantum() -> None:
    """ "a" moves one of 30 weights, of 53 in all, by 2: its step is 1/4 q K sqrt(30) / 53 * 2, its move 2 steps."""
    trainer = Pull(M, np.zeros((3, D), np.float32))
    trainer.directions[0, 0] = -2.0
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=1.0, momentum=0.0), THREE, trainer=trainer)
    fleet.play(*"abc")
    own = 2 / (0.25 * 0.5 * 3 * 30**0.5 / 53 * 2)
    assert own == pytest.approx(25.8, abs=0.1)
    assert _moves(fleet, "a", 0)[0] in (25, 26)


def test_the_server_s_statistics_are_the_mean_of_what_the_devices_sent_weighted_by_samples() -> None:
    """What they sent is a change of the rounded statistics that they hold, not of the server's own.

    One, two and three steps add a quarter each, so the three send different statistics.
    """
    data = {"a": samples(0, 4), "b": samples(1, 8), "c": samples(2, 12)}
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1, batch=4), data, m=NORMED, trainer=pull(NORMED))
    before = fleet.state.statistics
    held = batch_norm.numbers(before)
    assert (before != batch_norm.values(held)).all()
    fleet.play(*"abc")
    sent = [batch_norm.values(batch_norm.read(fleet.local[d].update, held)) for d in "abc"]
    assert fleet.state.statistics == pytest.approx(np.average(sent, axis=0, weights=[4, 8, 12]), rel=1e-5)


def test_statistics_are_averaged_and_travel_as_changes_or_stay_local() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE, m=NORMED, trainer=pull(NORMED))
    fleet.play(*"abc")
    fleet.play(*"abc")
    fleet.play("a", "b")
    assert np.allclose(fleet.state.statistics, 1.25, rtol=0.03)  # a quarter more in every step
    for device in ("a", "c", "new"):  # one of them missed a round, one has nothing
        assert np.array_equal(fleet.receive(device).statistics, batch_norm.as_sent(fleet.state.statistics))
    assert not fleet.lost
    own = LatticeFleet(Lattice(epochs=1, lr=0.1, statistics="local"), THREE, m=NORMED, trainer=pull(NORMED))
    own.play(*"abc")
    own.play("a", "b")
    assert set(own.local["a"].update.arrays) == {MOVES}
    assert own.receive("a").statistics[0] == 1.0
    assert own.receive("c").statistics[0] == 0.75


@given(
    hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-(2.0**127), 2.0**127, width=32)), st.integers(0, 9)
)
def test_statistics_as_whole_numbers_keep_their_digits(values: F32, seed: int) -> None:
    whole = batch_norm.numbers(values)
    back = batch_norm.values(whole)
    assert (np.abs(back - values) <= (np.abs(values) + 2.0**-10) / 60).all()
    assert np.array_equal(batch_norm.numbers(back), whole)
    order = np.argsort(values)
    assert (np.diff(whole[order]) >= 0).all()
    other = np.random.default_rng(seed).permutation(whole)
    sent = Payload({"statistics": batch_norm.change(whole, other)} if len(whole) else {})
    assert np.array_equal(batch_norm.read(sent, other), whole)


def test_rounding_of_statistics_at_random_is_right_on_average() -> None:
    values = np.float32([0.003, 0.7, -2.5, 40.0])
    rounds, course = 400, Course(model(M), 3, 400, 2)
    drawn = [batch_norm.dither(Assignment(course, r, "a", r % 2), 4) for r in range(1, rounds + 1)]
    sent = [batch_norm.values(batch_norm.numbers(values, up)) for up in drawn]
    assert np.allclose(np.mean(sent, axis=0), values, rtol=0.004)
    assert len({x[1] for x in sent}) == 2
    both = [batch_norm.dither(Assignment(course, 1, "a", place), 4) for place in (0, 1)]
    assert np.allclose((both[1] - both[0]) % 1, 0.5)


def test_a_statistic_that_an_update_makes_infinite_is_refused() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), {"a": samples(0)}, m=NORMED, trainer=pull(NORMED), cohort=1)
    fleet.play("a")
    far = np.full(4, 3e38, np.float32)
    fleet.state = replace(fleet.state, statistics=-far)
    sent = batch_norm.change(batch_norm.numbers(far), batch_norm.numbers(-far))
    fleet.change = lambda device, p: replace(p, arrays={**p.arrays, "statistics": sent})
    with pytest.raises(PayloadError, match="infinite"):
        fleet.play("a")


def test_damaged_statistics_are_refused() -> None:
    held = np.zeros(4, np.int32)
    good = batch_norm.change(np.int32([5, -3, 0, 1]), held)
    far = batch_norm.change(np.int32([batch_norm.MOST + 1, 0, 0, 0]), held)
    for arrays in ({}, {"statistics": good.astype(np.float16)}, {"statistics": good[:-1]}, {"statistics": far}):
        with pytest.raises(PayloadError):
            batch_norm.read(Payload(arrays), held)


def test_a_tensor_that_moves_more_has_a_finer_step() -> None:
    part = trainable(M)
    change = np.ones(D, np.float32)
    change[part.places[0]] = 4.0
    each = rms(part, change)
    average = float(np.sqrt((16 * 30 + 23) / 53))
    assert np.allclose(each, [4, 1, 1, 1])
    assert np.allclose(steps(part, each, 10, 7), 70 * average * np.array([average / 4, 1, 1, 1]), rtol=1e-6)
    assert (steps(part, np.zeros(4, np.float32), 10, 7) > 0).all()


def test_the_step_of_a_tensor_that_moves_alone_is_a_fiftieth_of_the_others_at_the_least() -> None:
    """The last bias has 2 of 10,302 parameters, so by the rule its step would be sqrt(2 / 10302) = .014 of theirs."""
    part = trainable(mlp(100, 100, 2))
    assert [p.stop - p.start for p in part.places] == [10_000, 100, 200, 2]
    found = steps(part, np.array([0, 0, 0, 1], np.float32), 10, 7)
    assert found / found[0] == pytest.approx([1, 1, 1, 0.02])
    assert found[0] == pytest.approx(70 * (2 / 10_302) ** 0.5)


def test_the_dither_of_a_full_cohort_is_stratified_and_its_ends_are_known_from_one_draw() -> None:
    course = Course(model(M), 3, 5, 7)
    all_ = np.stack([dither(Assignment(course, 2, "x", place), 1000) for place in range(7)])
    assert np.ptp(np.diff(np.sort(all_.astype(np.int64), axis=0), axis=0)) <= 2
    fall, rise = closeness(course, [2], 1000)
    assert np.abs(fall.astype(np.int64) - all_.min(axis=0)).max() <= 8
    assert np.abs(rise.astype(np.int64) - (~all_).min(axis=0)).max() <= 8


def test_one_hostile_update_moves_the_model_no_further_than_the_limit() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    for _ in range(2):
        fleet.play(*"abc")
    a = Assignment(fleet.course, 3, "a")
    update = method_module.Update(np.full(D, 30_000, np.int32), None, np.zeros(0, np.float32), 1e9, -1.0)
    honest = replace(update, moves=np.full(D, 1, np.int32), samples=8.0)
    claimed, usual = (fleet.method.influence(a, fleet.state, u) for u in (update, honest))
    assert claimed is not None
    assert usual is not None
    assert claimed.norm * claimed.weight == pytest.approx(30_000 * D)
    assert usual.norm * usual.weight == pytest.approx(max(D, 64))
    limited = fleet.method.limited(a, fleet.state, update, 1e-3, 80.0)
    assert np.abs(fleet.method.moved(a, trainable(M), limited)).sum() == pytest.approx(30_000 * D * 1e-3 * 80 / 1e9)
    assert limited.samples == 80


@pytest.mark.parametrize("first", [True, False])
def test_an_update_s_statistics_are_limited_with_its_moves(first: bool) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE, m=NORMED, trainer=pull(NORMED))
    fleet.play(*"abc")
    each = np.ones(len(trainable(NORMED).blocks), np.float32) if first else None
    change = np.array([8.0, -4.0, 0.0, 2.0], np.float32)
    update = method_module.Update(np.full(D, 8, np.int32), each, change, 40.0, -1.0)
    limited = fleet.method.limited(Assignment(fleet.course, 2, "a"), fleet.state, update, 0.25, 20.0)
    assert limited.statistics.tolist() == [2.0, -1.0, 0.0, 0.5]  # whatever their weight
    assert limited.scale == (0.25 if first else 0.125)


def _with_gain(moves: NDArray[Any], gain: float) -> NDArray[Any]:
    """Coded moves with another gain; all else is right."""
    head, coded = up_head(moves.tobytes())
    return np.frombuffer(replace(head, gain=gain).pack() + coded, np.uint8)


def _bad_updates() -> dict[str, Callable[[Payload], Payload]]:
    def array(name: str, value: NDArray[Any]) -> Callable[[Payload], Payload]:
        return lambda p: replace(p, arrays={**p.arrays, name: value})

    return {
        "unknown array": array("more", np.zeros(1)),
        "no moves": lambda p: replace(p, arrays={"rms": p.arrays["rms"]} if "rms" in p.arrays else {}),
        "moves of another kind": array(MOVES, np.zeros(60)),
        "too short": array(MOVES, np.zeros(5, np.uint8)),
        "nothing coded": lambda p: array(MOVES, p.arrays[MOVES][:8])(p),
        "a wrong checksum": lambda p: array(MOVES, np.append(p.arrays[MOVES][:1] ^ np.uint8(1), p.arrays[MOVES][1:]))(
            p
        ),
        "gain is NaN": lambda p: array(MOVES, _with_gain(p.arrays[MOVES], float("nan")))(p),
        "statistics": array("statistics", np.zeros(3, np.float16)),
        "no samples": lambda p: replace(p, meta={}),
    }


@pytest.mark.parametrize("kind", sorted(_bad_updates()))
@pytest.mark.parametrize("round_", [1, 3])
def test_a_hostile_update_is_refused(kind: str, round_: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=0.1), THREE)
    for _ in range(round_ - 1):
        fleet.play(*"abc")
    fleet.change = lambda device, update: _bad_updates()[kind](update) if device == "b" else update
    with pytest.raises(PayloadError):
        fleet.play(*"abc")


@pytest.mark.parametrize("each", [[-1, 1, 1, 1], [3e38, 1, 1, 1], [np.nan, 1, 1, 1], [1, 1]])
def test_a_hostile_rms_is_refused(each: list[float]) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    fleet.change = lambda device, p: replace(p, arrays={**p.arrays, "rms": np.array(each, np.float32)})
    with pytest.raises(PayloadError):
        fleet.play(*"abc")


def test_numbers_beyond_the_limit_are_refused() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    fleet.play(*"abc")
    a = Assignment(fleet.course, 2, "b", 1)
    moves = np.full(D, 40_000, np.int32)
    coded = lattice.encode(moves, lattice.up(dither(a, D), spans(trainable(M)), np.abs(fleet.state.counts) >> MIDDLE))
    head = UpHead(bits.checksum([moves]), 0.0).pack()
    with pytest.raises(PayloadError, match="leaves"):
        fleet.method.read_update(
            a, fleet.state, None, Payload({MOVES: np.frombuffer(head + coded, np.uint8)}, {"samples": 8})
        )


@pytest.mark.parametrize("base", ["zero", "held"])
def test_a_damaged_downlink_is_refused_or_reported_as_lost(base: str) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    for _ in range(3):
        fleet.play(*"abc")
    device = "a" if base == "held" else "new"
    a, kept = Assignment(fleet.course, 4, device), fleet.kept.get(device)
    whole = fleet.method.downlink(fleet.course, 4, fleet.state, fleet.records.get(device))
    data = whole.arrays[CHANGE]
    error: type[Exception] = LostError if base == "held" else PayloadError
    flipped = data.copy()
    flipped[0] ^= 1
    for bad in (flipped, data[:-1], data[:12]):
        with pytest.raises(error):
            fleet.method.receive(a, kept, replace(whole, arrays={**whole.arrays, CHANGE: bad}))
    for arrays in ({}, {**whole.arrays, "x": data}, {**whole.arrays, CHANGE: data[:9]}):
        with pytest.raises(PayloadError):
            fleet.method.receive(a, kept, Payload(arrays))
    with pytest.raises(PayloadError):
        fleet.method.receive(Assignment(fleet.course, 1, device), kept, whole)


@pytest.mark.parametrize(("epochs", "due"), [(1, [1.0]), (2, [1.0, 0.525]), (3, [1.0, 0.7625, 0.2875])])
def test_with_cosine_the_rate_falls_to_a_twentieth(epochs: int, due: list[float]) -> None:
    """Step i of n has the rate .05 + .95 (1 + cos(pi i / n)) / 2; half-way .05 + .95 / 2. The slope is 1."""
    trainer = Pull(M, np.ones((3, D), np.float32))
    t = replace(LatticeFleet(Lattice(), THREE).task("a"), trainer=trainer)
    plan = Plan(epochs, 8, 1.0, momentum=0.0, cosine=True)
    assert -train(t, np.zeros(D, np.float32), NONE, plan).parameters == pytest.approx(sum(due))
    constant = train(t, np.zeros(D, np.float32), NONE, replace(plan, cosine=False))
    assert -constant.parameters == pytest.approx(epochs)


def test_training_lowers_the_loss_at_a_small_part_of_the_bytes() -> None:
    data = {d: clusters(M, i) for i, d in enumerate("abc")}
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.05), data, trainer=NumpyMlp(M))
    losses = []
    for _ in range(30):
        fleet.play(*"abc")
        losses.append(float(np.mean([fleet.local[d].loss for d in "abc"])))
    assert losses[-1] < 0.4 * losses[0]
    assert sum(len(fleet.local[d].update.arrays[MOVES]) for d in "abc") < 3 * D


@pytest.mark.parametrize("few", [4, 10, 20])
def test_an_honest_device_of_few_samples_is_not_limited_for_the_noise_of_few_moves(few: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=2), {d: samples(i, 8) for i, d in enumerate("abc")})
    fleet.play(*"abc")
    state = replace(fleet.state, samples=100.0)
    a, moves = fleet.task("a").assignment, np.zeros(D, np.int32)
    each = {}
    for name, n in {"few": few, "b": 100, "c": 100, "d": 110}.items():
        own = moves.copy()
        own[: n // 10] = 1  # far fewer than `FEW`
        update = method_module.Update(own, None, state.statistics, float(n), 0.0)
        each[name] = fleet.method.influence(a, state, update)
    assert guard.limits(each, "clip") == {}


def test_a_huge_sum_of_moves_stays_a_whole_number() -> None:
    change, *_ = method_module.applied(LatticeFleet(Lattice(), THREE).state, np.full(D, 1e12), 0.3)
    assert (change > 0).all()
    assert (change < 2**31).all()
    _, left, velocity = method_module.applied(LatticeFleet(Lattice(), THREE).state, np.full(D, 1e60), 0.3)
    assert np.isfinite(left).all()
    assert np.isfinite(velocity).all()
