"""Lattice's pruning and personal models: both sides go on with the same smaller network after any missed rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from channel_groups import between
from edge_kernels.channels import ChannelGroup, LayerKind, Place
from hypothesis import given, settings
from hypothesis import strategies as st
from lattice_fleet import LatticeFleet, pull, samples
from numpy_mlp import NumpyMlp, clusters, grouped, mlp, model

from edge_client.bundle import F32, Init, Layer, Manifest, Tensor, views
from edge_client.errors import ConfigError, DivergedError, LostError, PayloadError
from edge_client.methods import make_method
from edge_client.methods.lattice import grid as grid_module
from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice.coordinates import live, on_grid
from edge_client.methods.lattice.delivery import CHANGE
from edge_client.methods.lattice.grid import MIDDLE
from edge_client.methods.lattice.method import MOVES, Lattice, Received
from edge_client.methods.lattice.prune import choose, score, share
from edge_client.methods.lattice.train import LOWEST_RATE
from edge_client.methods.shared.network import network
from edge_client.methods.shared.units import unpacked
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Batch, Course, Personal, Task
from edge_client.training import Gradient

pytestmark = pytest.mark.usefixtures("no_network_is_small")

M = grouped(mlp(6, 8, 5, 3))
FOUR = {d: samples(i % 3) for i, d in enumerate("abcd")}
THREE = {d: FOUR[d] for d in "abc"}


def normed() -> Manifest:
    """M with a batch-norm behind its first layer."""
    m = M
    names = ("bn.w", "bn.b", "bn.mean", "bn.var")
    one = Init(kind="constant", scale=1.0)
    rows = [Tensor(name=n, shape=(8,), offset=M.d + 8 * i, init=one) for i, n in enumerate(names[:2])]
    statistics = [Tensor(name=n, shape=(8,), offset=8 * i, init=one) for i, n in enumerate(names[2:])]
    first = between(8, "0.w", "1.w", bias="0.b", norm=names, name="0")
    made = {name: getattr(m, name) for name in Manifest.model_fields}
    made |= {"parameters": (*m.parameters, *rows), "buffers": tuple(statistics), "groups": (first, m.groups[1])}
    return Manifest(**made)


def pruning(**more: Any) -> Lattice:
    """With ``prune=None`` the same method without its pruning."""
    table = {"quantum": 1, "lr": 0.1, "prune": 0.5, "prune_after": 2, "epochs": 1, **more}
    pruned = table["prune"] is not None
    return Lattice(**{name: value for name, value in table.items() if pruned or not name.startswith("prune")})


def channels(fleet: LatticeFleet) -> dict[str, list[int]]:
    """The units that are left, as the server has them."""
    assert fleet.state.units is not None
    return {name: list(kept) for name, kept in unpacked(fleet.m, fleet.state.units).channels.items()}


def whole_weights(fleet: LatticeFleet) -> F32:
    """The server's model as a vector of the whole network, zero where a unit is gone; by the definition of N."""
    unit = np.asarray(fleet.state.steps, np.float64) / 2**MIDDLE / fleet.course.cohort
    tensors = dict(views(fleet.m.parameters, fleet.course.model.parameters.copy()))
    left, at = channels(fleet), 0
    out = np.zeros(fleet.m.d, np.float32)
    for u, t in zip(unit, fleet.m.parameters, strict=True):
        mask = np.ones(t.shape, np.bool_)
        for g in fleet.m.groups:
            gone = np.setdiff1d(np.arange(g.size), left[g.name])
            if t.name in {p.tensor for p in g.places if p.axis == 0}:
                mask[gone] = False
            if t.name in {p.tensor for p in g.at("reads")}:
                mask[:, gone] = False
        values = tensors[t.name].astype(np.float64)
        count = int(mask.sum())
        values[mask] += u * fleet.state.counts[at : at + count]
        out[t.offset : t.offset + t.size] = np.where(mask, values, 0).ravel()
        at += count
    assert at == fleet.state.counts.size
    return out


# --- which units stay


def test_a_unit_s_score_is_the_norm_of_its_incoming_times_that_of_its_outgoing_weights() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal(M.d).astype(np.float32)
    t = views(M.parameters, w)
    due = [np.linalg.norm(t["0.w"][i]) * np.linalg.norm(t["1.w"][:, i]) for i in range(8)]
    assert np.allclose(score(M.groups[0], t), due)
    units = unpacked(M, choose(M, w, 0.5, {"1": 0.2})).channels
    assert set(units["0"]) == set(np.argsort(due)[-4:])
    assert len(units["1"]) == 1


def test_behind_a_batch_norm_the_scale_counts_and_not_the_incoming_weights() -> None:
    m = normed()
    t = dict(views(m.parameters, np.random.default_rng(1).standard_normal(m.d).astype(np.float32)))
    due = [abs(t["bn.w"][i]) * np.linalg.norm(t["1.w"][:, i]) for i in range(8)]
    assert np.allclose(score(m.groups[0], t), due)


def test_a_channel_that_no_layer_reads_counts_by_its_incoming_weights() -> None:
    t = {name: np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32) for name in "qk"}
    group = ChannelGroup("q", 4, (Place("q", 0, "makes"), Place("k", 0, "makes")))
    assert np.allclose(score(group, t), [np.hypot(*(np.linalg.norm(t[name][i]) for name in "qk")) for i in range(4)])


def test_the_entries_of_a_flattened_channel_count_together_and_convolutions_keep_more() -> None:
    rng = np.random.default_rng(1)
    t = {"c": rng.standard_normal((3, 2, 3, 3)), "l": rng.standard_normal((4, 12))}
    group = between(3, "c", "l", repeat=4)

    def kinds(made: LayerKind, read: LayerKind) -> Manifest:
        layers = (Layer(name="c", kind=made, weights=("c",)), Layer(name="l", kind=read, weights=("l",)))
        return M.model_copy(update={"layers": layers})

    due = [np.linalg.norm(t["c"][i]) * np.linalg.norm(t["l"][:, 4 * i : 4 * i + 4]) for i in range(3)]
    assert np.allclose(score(group, {k: v.astype(np.float32) for k, v in t.items()}), due)
    assert share(kinds("conv", "linear"), group, 0.4) == pytest.approx(0.4**0.5)
    assert share(M, M.groups[0], 0.4) == 0.4
    assert share(kinds("linear", "lstm"), group, 0.4) == 1.0
    without = M.model_copy(update={"layers": (Layer(name="c", kind="linear", weights=("c",)),)})
    assert share(without, group, 0.4) == 1.0  # "l" is a GRU's weight, say


def test_equal_scores_keep_the_units_of_lower_index() -> None:
    kept = unpacked(M, choose(M, np.ones(M.d, np.float32), 0.25, {})).channels
    assert {name: list(c) for name, c in kept.items()} == {"0": [0, 1], "1": [0]}


# --- the smaller network on both sides


@given(
    pattern=st.lists(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=3, max_size=8),
    losses=st.dictionaries(st.integers(2, 8), st.sampled_from("abcd"), max_size=3),
    bad=st.sets(st.integers(1, 8), max_size=6),
    after=st.integers(1, 4),
    coarser=st.sampled_from([0, 2]),
    history=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=15, deadline=None)
def test_both_sides_hold_the_same_units_and_numbers_after_any_pattern_of_missed_rounds(
    pattern: list[set[str]], losses: dict[int, str], bad: set[int], after: int, coarser: int, history: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid_module, "HISTORY", history)
        fleet = LatticeFleet(pruning(prune_after=after), FOUR, m=M)
        fleet.state = replace(fleet.state, coarser=coarser)
        for round_, devices in enumerate(pattern, 1):
            if losses.get(round_) in fleet.kept:
                del fleet.kept[losses[round_]]
            fleet.play(*sorted(devices), gain=1.0 if round_ in bad else -1.0)
            assert (fleet.state.units is not None) == (round_ >= after)
        for device in "abcd":  # one of them may never have taken part
            received = fleet.receive(device)
            assert np.array_equal(received.counts, fleet.state.counts)
            if len(pattern) >= after:
                assert received.net.units is not None
                assert np.array_equal(received.net.units.packed, fleet.state.units)
                model_ = fleet.method.personal(fleet.task(device), fleet.kept.get(device), received)
                assert np.allclose(model_.parameters, whole_weights(fleet), atol=1e-5, rtol=1e-5)


def test_what_the_server_keeps_of_the_parameters_that_stay_is_the_same_after_the_pruning() -> None:
    fleet = LatticeFleet(pruning(prune=None), THREE, m=M)
    for _ in range(3):
        fleet.play(*"abc", gain=1.0)
    before, method = fleet.state, pruning(prune_after=3)
    after = method.current(fleet.course, 4, before)
    stay = live(network(fleet.course, after.units))
    for name in ("counts", "residual", "velocity"):
        assert getattr(before, name).any()
        assert np.array_equal(getattr(after, name), getattr(before, name)[stay])
    assert method.current(fleet.course, 4, replace(before, bad=1)).bad == 0


def test_the_final_mean_is_over_rounds_of_the_smaller_network_only() -> None:
    fleet = LatticeFleet(pruning(prune_after=3, average=1.0), THREE, rounds=5, m=M)
    after = []
    for _ in range(5):
        fleet.play(*"abc")
        after.append(fleet.state.counts.astype(np.float64))
    mean = (after[3] + after[4]) / 2  # whole in quarters of a cell
    assert np.array_equal(fleet.receive("a").counts, mean)
    assert not np.array_equal(after[3], after[4])


def test_a_pruning_that_would_remove_no_unit_is_refused() -> None:
    everything = pruning(prune_keep={g.name: 1.0 for g in M.groups})
    with pytest.raises(ConfigError, match="removes no unit"):
        everything.start(Course(model(M), 1, 9, 3))


@pytest.mark.parametrize("left_out", [{2}, {1, 2}, {1, 2, 3}, {3}])
def test_a_pruning_whose_round_counted_no_update_is_done_before_the_next(left_out: set[int]) -> None:
    fleet = LatticeFleet(pruning(), THREE, m=M, trainer=pull(M))
    for round_ in range(1, 7):
        fleet.play(*"abc", dropped=round_ in left_out)
    assert fleet.state.units is not None
    assert fleet.state.counts.any()
    for device in (*"abc", "new"):
        received = fleet.receive(device)
        assert np.array_equal(received.counts, fleet.state.counts)
        assert received.net.units.packed.tobytes() == fleet.state.units.tobytes()


def test_the_pruning_leaves_every_other_weight_as_it_is() -> None:
    dense, pruned = (LatticeFleet(pruning(prune=p), THREE, m=M) for p in (None, 0.5))
    for fleet in (dense, pruned):
        fleet.play(*"abc")
        fleet.play(*"ab")
    before = dense.receive("a").parameters
    assert channels(pruned) == {
        name: list(c) for name, c in unpacked(M, choose(M, before, 0.5, {})).channels.items()
    }  # fmt: skip
    after = whole_weights(pruned)
    assert np.allclose(after[after != 0], before[after != 0])
    assert pruned.state.counts.size < dense.state.counts.size
    stays = live(network(pruned.course, pruned.state.units))
    assert np.array_equal(pruned.state.velocity, dense.state.velocity[stays])
    assert np.array_equal(pruned.state.residual, dense.state.residual[stays])
    assert np.linalg.norm(pruned.state.velocity) > 2 * np.linalg.norm(pruned.state.residual) > 0


def test_pruned_stays_pruned_and_every_personal_model_is_compacted_to_the_units_that_are_left() -> None:
    fleet = LatticeFleet(pruning(lr=0.05), {d: clusters(M, i) for i, d in enumerate("abc")}, m=M, trainer=NumpyMlp(M))
    for _ in range(2):
        fleet.play(*"abc")
    left = channels(fleet)
    assert {name: len(c) for name, c in left.items()} == {"0": 4, "1": 2}
    for _ in range(3):
        fleet.play(*"abc")
        assert channels(fleet) == left
    trained = fleet.local["a"].trained
    final = fleet.method.personal(fleet.task("a"), fleet.kept["a"], fleet.receive("a"))
    for personal in (trained, final):
        assert personal.mask is not None
        assert not personal.parameters[~personal.mask].any()
        assert int(personal.mask.sum()) == fleet.state.counts.size
        rows = views(M.parameters, personal.parameters)
        assert {g.name: np.flatnonzero(rows[f"{g.name}.w"].any(axis=1)).tolist() for g in M.groups} == left


def test_a_device_trains_the_smaller_network_for_more_epochs_with_a_falling_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    gradient = NumpyMlp.gradient

    def watched(self: NumpyMlp, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        seen.append((len(parameters), len(self.manifest.parameters)))
        return gradient(self, parameters, buffers, x, y)

    monkeypatch.setattr(NumpyMlp, "gradient", watched)
    fleet = LatticeFleet(
        pruning(prune_after=1, prune_epochs=3, guard=True), {"a": clusters(M, 1)}, m=M, trainer=NumpyMlp(M)
    )
    fleet.play("a")
    assert seen == [(M.d, 6)] * 2
    seen.clear()
    fleet.play("a")
    assert seen == [(fleet.state.counts.size, 6)] * 6  # no step is spent on a guard
    assert fleet.method.plan(fleet.receive("a").net).cosine


def test_the_smaller_network_has_twice_the_epochs_so_that_its_falling_rate_adds_up_to_as_much() -> None:
    course = Course(model(M), seed=3, rounds=5, cohort=3)
    whole = network(course, None)
    small = network(course, choose(M, course.model.parameters, 0.5, {}))

    def epochs(**given: int) -> list[int]:
        method = Lattice(prune=0.5, personal_epochs=7, **given)
        plans = [method.plan(whole), method.plan(small), method.personal_plan(whole), method.personal_plan(small)]
        return [plan.epochs for plan in plans]

    assert epochs() == [5, 10, 7, 7]
    assert epochs(epochs=1) == [1, 2, 7, 7]
    assert epochs(epochs=3, prune_epochs=1) == [3, 1, 7, 7]
    plans = [Lattice(prune=0.5).plan(net) for net in (whole, small)]
    assert [plan.cosine for plan in plans] == [False, True]
    mean = (1 + LOWEST_RATE) / 2  # of the cosine
    assert 1 <= plans[1].rate * mean * plans[1].epochs / (plans[0].rate * plans[0].epochs) < 1.1


def test_rounds_of_the_smaller_network_have_the_budget_of_its_size() -> None:
    m = grouped(mlp(300, 400, 10))
    course = Course(model(m), seed=3, rounds=20, cohort=3)
    method = Lattice(prune=0.5, prune_after=6)
    whole, small = network(course, None), network(course, choose(m, course.model.parameters, 0.5, {}))
    assert on_grid(small).size < 0.6 * on_grid(whole).size
    assert method.allowed(whole, 4.0) == pytest.approx(22 * 8 * on_grid(whole).size / 110)
    least = 6144  # what a small network may always take
    assert method.allowed(small, 4.0) == pytest.approx(6 * 8 * on_grid(whole).size / 110 + 16 * least)
    assert method.model_copy(update={"budget": 20.0}).allowed(small, 4.0) == pytest.approx(
        (6 * on_grid(whole).size + 16 * on_grid(small).size) * 8 / 20
    )


def test_the_guard_ends_at_the_pruning() -> None:
    fleet = LatticeFleet(pruning(prune_after=2), THREE, m=M)
    for _ in range(5):
        fleet.play(*"abc", gain=1.0)
    assert fleet.state.level == MIDDLE - 1  # after rounds 1 and 2


def test_a_careful_bundle_trains_its_smaller_network_at_the_usual_rate_and_personal_models_carefully() -> None:
    m = normed().model_copy(update={"seed": None})
    course = Course(model(m), seed=3, rounds=5, cohort=3)
    whole = network(course, None)
    small = network(course, choose(m, course.model.parameters, 0.5, {}))
    default = Lattice(prune=0.5, personal_epochs=3)
    assert [default.plan(net).rate for net in (whole, small)] == [0.003, 0.01]
    assert [default.personal_plan(net).rate for net in (whole, small)] == pytest.approx([0.001, 0.001])
    given = Lattice(prune=0.5, personal_epochs=3, lr=0.06)
    assert [given.plan(net).rate for net in (whole, small)] == [0.06, 0.06]
    own = Lattice(prune=0.5, personal_epochs=3, lr=0.06, prune_lr=0.2)
    assert (own.plan(small).rate, own.personal_plan(small).rate) == (0.2, pytest.approx(0.02))


def test_statistics_and_batch_norm_rows_go_with_their_channel() -> None:
    m = normed()
    for statistics in ("mean", "local"):
        fleet = LatticeFleet(pruning(statistics=statistics), THREE, m=m, trainer=pull(m))
        for _ in range(2):
            fleet.play(*"abc")
        for _ in range(2):
            fleet.play(*"ab")
        own = fleet.receive("a").statistics
        assert own.shape == (8,)  # mean and variance of four channels
        assert np.allclose(own, 2.5, rtol=0.03)  # Pull adds a quarter in every step: one a round, then two
        late = fleet.receive("c").statistics
        assert np.allclose(late, 2.5 if statistics == "mean" else 1.5, rtol=0.03)
        personal = fleet.method.personal(fleet.task("a"), fleet.kept["a"], fleet.receive("a"))
        assert personal.buffers.shape == (16,)
        assert int(np.isclose(personal.buffers, 2.5, rtol=0.03).sum()) == 8


# --- what travels


def test_units_travel_once_to_each_device_and_count_as_one_time() -> None:
    fleet = LatticeFleet(pruning(), FOUR, m=M)
    fleet.play(*"abc")
    fleet.play(*"ab")

    def sent(device: str) -> Payload:
        return fleet.method.downlink(fleet.course, fleet.round + 1, fleet.state, fleet.records.get(device))

    assert set(sent("a").arrays) == set(sent("c").arrays) - {"steps"} == {CHANGE, "units"}
    assert sent("a").arrays["units"].nbytes == 2  # 13 units
    assert set(sent("d").arrays) == {CHANGE, "units", "steps"}
    assert {"units", "steps"} <= Lattice.one_time_down
    fleet.play(*"ab")
    assert set(sent("a").arrays) == {CHANGE}
    assert "units" in sent("c").arrays
    assert np.array_equal(fleet.receive("c").counts, fleet.state.counts)


def test_the_same_training_costs_fewer_bytes_after_the_pruning() -> None:
    m = grouped(mlp(20, 64, 32, 3))
    sizes = []
    for prune in (None, 0.4):
        fleet = LatticeFleet(pruning(prune=prune, prune_epochs=1, budget=1.0), THREE, m=m, trainer=pull(m))
        for _ in range(4):
            fleet.play(*"abc")
        down = fleet.method.downlink(fleet.course, 5, fleet.state, fleet.records["a"])
        sizes.append((len(fleet.local["a"].update.arrays[MOVES]), len(down.arrays[CHANGE])))
    live = fleet.state.counts.size / m.d
    assert live < 0.4
    assert all(small < 1.15 * live * whole for whole, small in zip(*sizes, strict=True))


# --- what goes wrong


def test_a_device_that_should_know_the_units_and_does_not_is_lost() -> None:
    fleet = LatticeFleet(pruning(), THREE, m=M)
    for _ in range(3):
        fleet.play(*"abc")
    assert not fleet.lost
    older = replace(fleet.kept["a"], units=None)
    damaged = replace(fleet.kept["b"], units=np.zeros(2, np.uint8))
    fleet.kept |= {"a": older, "b": damaged}
    del fleet.kept["c"]
    for device in "abc":
        assert np.array_equal(fleet.receive(device).counts, fleet.state.counts)
    assert fleet.lost == [(4, "a"), (4, "b"), (4, "c")]


@pytest.mark.parametrize("units", [np.zeros(2, np.uint8), np.full(3, 255, np.uint8), np.full(2, 1.0)])
def test_units_of_a_damaged_downlink_are_refused(units: Any) -> None:
    fleet = LatticeFleet(pruning(), THREE, m=M)
    for _ in range(2):
        fleet.play(*"abc")
    sent = fleet.method.downlink(fleet.course, 3, fleet.state, None)
    with pytest.raises(PayloadError):
        fleet.method.receive(
            Assignment(fleet.course, 3, "new"), None, replace(sent, arrays={**sent.arrays, "units": units})
        )
    bare = {name: a for name, a in sent.arrays.items() if name != "units"}
    with pytest.raises(LostError):
        fleet.method.receive(Assignment(fleet.course, 3, "new"), None, Payload(bare))


def test_moves_of_the_whole_network_are_refused_after_the_pruning() -> None:
    dense, pruned = (LatticeFleet(pruning(prune=p, prune_after=2), THREE, m=M) for p in (None, 0.5))
    for fleet in (dense, pruned):
        fleet.play(*"abc")
        fleet.play(*"abc")
    dense.play(*"abc")
    with pytest.raises(PayloadError):
        pruned.method.read_update(
            Assignment(pruned.course, 3, "a"), pruned.state, None, dense.local["a"].update
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("prune_after", 2), ("prune_keep", {"0": 0.5}), ("prune_epochs", 3), ("prune_lr", 0.1)]
)
def test_settings_of_a_pruning_that_does_not_come_are_refused(name: str, value: Any) -> None:
    course = Course(model(M), 1, 9, 3)
    idle = make_method({"name": "lattice", name: value})  # one that a coordinator has stored is still read
    with pytest.raises(
        ConfigError,
        match=rf"{name} = .* changes nothing while prune is not set; set .* prune = 0\.5, or leave {name} out",
    ):
        idle.start(course)
    pruned = make_method({"name": "lattice", name: value, "prune": 0.5})
    assert getattr(pruned, name) == value
    pruned.start(course)
    Lattice(**Lattice().model_dump(mode="json")).start(course)  # as a coordinator stores it, with every default


def test_a_federation_that_cannot_be_pruned_is_refused() -> None:
    def start(method: Lattice, m: Manifest = M, rounds: int = 9) -> Any:
        return method.start(Course(model(m), 1, rounds, 3))

    with pytest.raises(ConfigError, match="no channel groups"):
        start(pruning(), mlp(6, 5, 3))
    with pytest.raises(
        ConfigError, match=r"^prune = 0.4 .* after 4 rounds .* give rounds = 5 or more, give prune_after = 2"
    ):
        start(Lattice(prune=0.4), rounds=4)
    with pytest.raises(ConfigError, match="give rounds = 10 or more, give prune_after = 4, or leave prune out"):
        start(pruning(prune_after=9))
    with pytest.raises(ConfigError, match=r"by default 4.* give rounds = 5 or more, or leave prune out"):
        start(Lattice(prune=0.4), rounds=1)
    assert Lattice().prune_after == 4  # as the sentence says
    with pytest.raises(ConfigError, match="prune_keep names conv9, but the groups are "):
        start(pruning(prune_keep={"conv9": 0.5}))
    start(Lattice(), mlp(6, 5, 3))

    def recurrent(name: str) -> Manifest:
        layers = (x.model_copy(update={"kind": "lstm"}) if x.name == name else x for x in M.layers)
        return M.model_copy(update={"layers": tuple(layers)})

    start(pruning(), recurrent("2"))  # the units that a recurrent layer reads stay
    with pytest.raises(ConfigError, match=r"removes no unit .* such as a recurrent or a weight-normalised one; name a"):
        start(pruning(), recurrent("1"))


# --- personal models


def personal(fleet: LatticeFleet, device: str, received: Received) -> tuple[Task, Personal]:
    task = fleet.task(device)
    return task, fleet.method.personal(task, fleet.kept.get(device), received)


@pytest.mark.parametrize("prune", [None, 0.5])
def test_a_personal_model_is_trained_after_the_last_round_only(prune: float | None) -> None:
    data = {d: clusters(M, i) for i, d in enumerate("abc")}
    method = pruning(prune=prune, lr=0.05, personal_epochs=5)
    fleet = LatticeFleet(method, data, m=M, trainer=NumpyMlp(M), rounds=4)
    for _ in range(4):
        received = fleet.receive("a")
        _, model_ = personal(fleet, "a", received)
        as_received = received.net.personal(received.parameters, received.statistics)
        assert np.array_equal(model_.parameters, as_received.parameters)
        fleet.play(*"abc")
    received = fleet.receive("a")
    task, own = personal(fleet, "a", received)
    whole = received.net.personal(received.parameters, received.statistics)
    x, y = data["a"].x, data["a"].y

    def loss(p: Personal) -> float:
        return task.gradient(p.parameters, p.buffers, Batch(0, 0, x, y)).loss

    assert loss(own) < 0.9 * loss(whole)
    if prune is not None:
        assert own.mask is not None
        assert whole.mask is not None
        assert np.array_equal(own.mask, whole.mask)


def test_personal_training_that_diverges_leaves_the_global_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LatticeFleet(pruning(personal_epochs=2), {"a": clusters(M, 1)}, m=M, trainer=NumpyMlp(M), rounds=3)
    for _ in range(3):
        fleet.play("a")
    received = fleet.receive("a")

    def diverge(*_: Any, **__: Any) -> Any:
        raise DivergedError("too far", at_start=False)

    monkeypatch.setattr(method_module, "train", diverge)
    assert np.allclose(personal(fleet, "a", received)[1].parameters, whole_weights(fleet), atol=1e-5)


def test_first_moves_after_the_pruning_are_in_the_steps_of_the_whole_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.methods.lattice.settings.SMALL", M.d)  # so the smaller network has finer steps
    fleet = LatticeFleet(pruning(quantum=20, server_momentum=0.0), THREE, m=M, trainer=pull(M))
    for _ in range(2):
        fleet.play(*"abc", dropped=True)
    fleet.play(*"abc")
    net = network(fleet.course, fleet.state.units)
    assert net.units is not None
    part, each = on_grid(net), fleet.method.unit(fleet.course, fleet.state.steps)
    moved = np.repeat(each, [b.size for b in part.blocks]) * (fleet.state.counts + fleet.state.residual)
    changes = [fleet.local[d].trained.parameters - fleet.course.model.parameters for d in "abc"]
    due = np.mean(changes, axis=0)[live(net)]
    assert moved @ due / (due @ due) == pytest.approx(1, abs=0.3)
