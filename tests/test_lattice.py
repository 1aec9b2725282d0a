"""Lattice: whole numbers that both sides share, unbiased, equal after any pattern of missed rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edge_kernels import counter, lattice
from hypothesis import given, settings
from hypothesis import strategies as st
from lattice_fleet import NORMED, THREE, D, LatticeFleet, M, Pull, pull, samples
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, clusters, mlp, model

from edge_client.bundle import F32, Manifest
from edge_client.errors import ConfigError
from edge_client.methods.lattice import grid as grid_module
from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice import settings as settings_module
from edge_client.methods.lattice.delivery import CHANGE
from edge_client.methods.lattice.grid import MIDDLE, closeness, dither, rms, spans, spread, steps, trainable
from edge_client.methods.lattice.method import LEAST, MOVES, Lattice
from edge_client.methods.lattice.train import Plan, train
from edge_client.methods.lattice.wire import up_head
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course

pytestmark = pytest.mark.usefixtures("no_network_is_small")


@pytest.fixture
def uncoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers travel as they are: for tests of many rounds that are not about the coder."""
    monkeypatch.setattr(method_module.lattice, "encode", lambda values, known: values.tobytes())
    monkeypatch.setattr(method_module.lattice, "decode", lambda data, known: np.frombuffer(data, np.int32))


NONE = np.zeros(0, np.float32)


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
def test_a_round_of_devices_far_below_the_mean_samples_moves_less_and_does_not_multiply_their_noise() -> None:
    trainer = pull()
    change = -0.1 * trainer.directions[0]

    def moved(small: int, large: int) -> tuple[float, float]:
        """The mean change and its noise in rounds that two small devices report, in changes of theirs."""
        data = {"a": samples(0, small), "b": samples(1, large), "c": samples(2, large), "d": samples(0, small)}
        runs = []
        for seed in range(150):
            method = Lattice(epochs=1, quantum=1, lr=0.1, batch=8192, server_momentum=0.0)
            fleet = LatticeFleet(method, data, seed=seed, trainer=trainer)
            fleet.play(*"abc")
            before = fleet.due()
            fleet.play("a", "d")
            runs.append(fleet.due() - before)
        mean = np.mean(runs, axis=0)
        noise = np.linalg.norm(runs - mean, axis=1).mean()
        return float(mean @ change / (change @ change)), float(noise / np.linalg.norm(change))

    (equal, usual), (few, _), (least, noise) = moved(8, 8), moved(8, 100), moved(8, 8000)
    assert equal == pytest.approx(1, abs=0.1)
    assert few == pytest.approx(1, abs=0.2)  # a ninth of the mean: so small are most devices beside one large one
    assert least == pytest.approx(8 / (5336 * LEAST), abs=0.01)
    assert noise < usual


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
        most = run_ = 0
        for round_ in sorted(set(range(1, rounds)) & set(range(1, len(pattern) + 1)) - dropped):
            run_ = run_ + 1 if round_ in bad else 0
            if run_ == 2:
                most, run_ = most + 1, 0
        assert fleet.state.level >= MIDDLE - most


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


def test_few_rounds_of_a_small_network_begin_with_both_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "SMALL", 2 * D)
    fleet = LatticeFleet(Lattice(lr=0.1), THREE, rounds=3)
    assert fleet.method.first_quantum(fleet.course) == pytest.approx(5 * 0.5**2 * 0.6**2)


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
    a, local = fleet.task("c", fleet.round, 2).assignment, fleet.local["c"]
    update = fleet.method.read_update(a, before, None, local.update)
    change = trainable(M).gather(local.trained.parameters) - trainable(M).gather(received.parameters)
    exact = change * 100.0 / spread(trainable(M), before.steps)
    assert update.scale == 2.0**3
    assert np.abs(update.moves * update.scale - exact).max() < update.scale
    assert np.abs(update.moves).max() > 1  # they are not cut to nothing
    of_moves = fleet.method.influence(a, before, update).norm
    assert of_moves == 8 * fleet.method.influence(a, before, replace(update, scale=1.0)).norm
    assert fleet.method.limited(a, before, update, 0.5, 400.0).scale == 0.5 * 2.0**3 * 400 / 800


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
    coarse, *_ = method_module.applied(replace(state, coarser=2), np.full(D, 10.0 * sign), 0.0)
    assert set(coarse.tolist()) == {sign * 2**30}


def test_the_mean_of_n_at_both_ends_is_in_the_middle() -> None:
    """Its change from one to the other is 2**31, which int32 holds as -2**31."""
    none = np.zeros(0, np.int64)
    history = grid_module.History(none, none.astype(np.uint32), none.astype(np.int32), none)
    change, ends = np.full(2, -(2**31), np.int32), np.array([-(2**30), 2**30], np.int32)
    assert history.then(change, MIDDLE).mean(ends, 2).tolist() == [0, 0]


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


def test_moves_are_computed_in_float64_whatever_the_version_of_numpy() -> None:
    """u is next to 1: only a change above 0 makes the sum 1. In float32 u itself is 1."""
    part = trainable(M)
    change = np.resize(np.float32([-2e-9, -1e-11, 0.0, 1e-9]), D)
    due = np.resize([0, 0, 0, 1], D)
    found = grid_module.moves(part, change, np.ones(4), np.full(D, 0xFFFFFFFF, np.uint32), 9)
    assert found.tolist() == due.tolist()


def test_the_dither_of_a_full_cohort_is_stratified_and_its_ends_are_known_from_one_draw() -> None:
    course = Course(model(M), 3, 5, 7)
    all_ = np.stack([dither(Assignment(course, 2, "x", place), 1000) for place in range(7)])
    assert np.ptp(np.diff(np.sort(all_.astype(np.int64), axis=0), axis=0)) <= 2
    fall, rise = closeness(course, [2], 1000)
    assert np.abs(fall.astype(np.int64) - all_.min(axis=0)).max() <= 8
    assert np.abs(rise.astype(np.int64) - (~all_).min(axis=0)).max() <= 8


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


def test_a_huge_sum_of_moves_stays_a_whole_number() -> None:
    change, *_ = method_module.applied(LatticeFleet(Lattice(), THREE).state, np.full(D, 1e12), 0.3)
    assert (change > 0).all()
    assert (change < 2**31).all()
    _, left, velocity = method_module.applied(LatticeFleet(Lattice(), THREE).state, np.full(D, 1e60), 0.3)
    assert np.isfinite(left).all()
    assert np.isfinite(velocity).all()
