"""HideNseek: signs by hand, votes, late devices, the smaller network, and what never leaves a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import codec_readers
import numpy as np
import pytest
from edge_kernels import bits, counter, synflow
from edge_kernels.codecs import counts
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import NumpyMlp, Steady, course, grouped, mlp, model
from rounds import weighed
from sign_fleet import MASKED, M, SignFleet, first, fixed_task, signs_of

from edge_client.bundle import Init, Model, Tensor
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import make_method
from edge_client.methods.bnn import BnnFedAvg
from edge_client.methods.hidenseek import HideNseek
from edge_client.methods.shared import signs
from edge_client.methods.shared.network import network
from edge_client.methods.shared.units import UNITS, chosen, unpacked
from edge_client.narrow import narrow
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment

DOWNS = ("sign", "count")
ALL = {"keep": 1.0, "epochs": 1}


# --- one device by hand


def test_a_sign_flips_exactly_where_its_latent_falls_below_zero() -> None:
    # One step from latents of the weights' signs, .1 times the first uniform numbers: s -= g |W| (1 - tanh(s)^2).
    weights, gradient = [1, -1, 2, -0.5], [0.2, -0.2, 0.01, -0.3]
    m = grouped(mlp(2, 2, 2, bias=False))
    method = HideNseek(keep=1, radius=0.1, restart="latent", lr=1, momentum=0, epochs=1, batch=64)
    done = first(method, fixed_task(m, [*gradient, 0, 0, 0, 0], [*weights, 5, 5, 5, 5]))
    uniform = counter.uniform(counter.key(0, "hidenseek", "first latents"), 4)
    start = 0.1 * np.sign(weights) * uniform
    due = start - np.multiply(gradient, np.abs(weights)) * (1 - np.tanh(start) ** 2)
    assert done.kept.latents == pytest.approx(due, rel=1e-5)
    assert done.trained.parameters[:4] == pytest.approx(np.abs(weights) * np.sign(due))
    assert done.trained.parameters[4:].tolist() == [5, 5, 5, 5]


def test_the_magnitudes_stay_frozen_and_the_head_learns() -> None:
    fleet = SignFleet(HideNseek(**ALL))
    fleet.play("a")
    before, after = model(M).parameters, fleet.local["a"].trained.parameters
    masked = fleet.method.parts(model(M)).masked
    assert np.array_equal(np.abs(masked.gather(before)), np.abs(masked.gather(after)))
    assert not np.array_equal(masked.gather(before), masked.gather(after))
    head = M.tensors["2.w"].span
    assert not np.array_equal(before[head], after[head])


@pytest.mark.parametrize("down", DOWNS)
def test_latents_start_at_the_radius_times_the_mean_of_the_signs(down: Any) -> None:
    method = HideNseek(keep=1, down=down, radius=0.5)
    received = signs.State(np.array([0, 1, 2, 3, 4, 4], np.uint8), 4)
    assert method.latents(received, None).tolist() == [-0.5, -0.25, 0, 0.25, 0.5, 0.5]
    own = np.array([-3, 2, 1, -1, 0.1, 0], np.float32)
    kept = signs.Kept(np.zeros(0, np.float32), np.zeros(0, np.float32), own)
    assert method.latents(received, kept).tolist() == pytest.approx([-3, -0.25, 1, 0.25, 0.1, 0])


@pytest.mark.parametrize("down", DOWNS)
def test_latents_are_random_in_round_1_alone_and_a_latent_of_zero_is_a_plus(down: Any) -> None:
    """Nothing is learned, so the latents after round 2 are those before it: 1, -1, and at the tie 0 of the counts."""
    m = grouped(mlp(2, 2, 2, bias=False))
    fleet = SignFleet(HideNseek(keep=1, down=down, restart="latent", epochs=1), m)
    fleet.trainer = Steady(m, np.zeros(m.d, np.float32))
    fleet.fold({"a": ([1, -1, 1, -1], 1.0), "b": ([1, -1, -1, 1], 1.0)})
    fleet.play("z")
    tie = 0 if down == "count" else 1
    assert fleet.kept["z"].latents.tolist() == [1, -1, tie, tie]
    assert signs_of(fleet.method, model(m), fleet.local["z"].trained).tolist() == [1, -1, 1, 1]
    assert bits.unpack(fleet.read["z"].signs, 4).tolist() == [True, False, True, True]


def test_the_sign_of_a_weight_of_zero_is_a_plus() -> None:
    m = grouped(mlp(2, 2, 2, bias=False))
    weights = np.array([0, -0.0, 1, -1, 0, 0, 0, 0], np.float32)
    assert HideNseek(keep=1).own_signs(Model(m, weights, weights[:0])).tolist() == [True, True, True, False]


def test_biases_are_trained_or_as_drawn() -> None:
    for biases, moves in (("local", True), ("frozen", False)):
        fleet = SignFleet(HideNseek(**ALL, biases=biases))
        fleet.play("a")
        assert bool(fleet.local["a"].trained.parameters[M.tensors["0.b"].span].any()) is moves


# --- votes


def test_the_majority_counts_samples_and_a_tie_is_plus_one() -> None:
    fleet = SignFleet(HideNseek(keep=1), grouped(mlp(2, 2, 2, bias=False)))
    fleet.fold({"a": ([1, -1, 1, -1], 3.0), "b": ([-1, 1, 1, -1], 2.0), "c": ([-1, 1, -1, -1], 1.0)})
    assert fleet.state.plus.tolist() == [1, 1, 1, 0]  # 3:3, 3:3, 5:1, 0:6
    fleet.fold({"a": ([1, -1, 1, -1], 1.0), "b": ([-1, 1, 1, -1], 5.0)})
    assert fleet.state.plus.tolist() == [0, 1, 1, 0]


def test_counts_count_every_device_once() -> None:
    fleet = SignFleet(HideNseek(keep=1, down="count"), grouped(mlp(2, 2, 2, bias=False)))
    fleet.fold({"a": ([1, -1, 1, -1], 300.0), "b": ([-1, 1, 1, -1], 2.0), "c": ([-1, 1, 1, -1], 1.0)})
    assert (fleet.state.plus.tolist(), fleet.state.votes) == ([1, 2, 3, 0], 3)
    received = fleet.method.receive(Assignment(fleet.course, 2, "z"), None, fleet.ask("z"))
    assert received.plus.tolist() == [1, 2, 3, 0]
    assert received.signs.tolist() == [False, True, True, False]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_any_votes_arrive_as_they_are(votes: int, seed: int) -> None:
    method, c = HideNseek(keep=1, down="count"), course(M)
    plus = np.random.default_rng(seed).integers(0, votes + 1, MASKED).astype(counts.dtype_for(votes))
    state = replace(method.start(c), plus=plus, votes=votes)
    found = method.receive(Assignment(c, 2, "a"), None, method.downlink(c, 2, state, None))
    assert np.array_equal(found.plus, plus)
    assert found.votes == votes
    assert np.array_equal(found.signs, plus >= votes / 2)
    assert found.mean == pytest.approx(2 * plus.astype(float) / votes - 1, abs=1e-6)


@pytest.mark.parametrize("down", DOWNS)
def test_the_order_of_the_devices_changes_nothing(down: Any) -> None:
    rng = np.random.default_rng(0)
    votes = {d: (rng.choice([-1, 1], MASKED).tolist(), float(n)) for d, n in (("a", 40), ("b", 7), ("c", 33))}
    states = []
    for order in ("abc", "cba", "bca"):
        fleet = SignFleet(HideNseek(keep=1, down=down))
        fleet.fold({d: votes[d] for d in order})
        states.append(fleet.state.plus.tolist())
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("down", DOWNS)
def test_a_federation_of_one_device_has_its_signs(down: Any) -> None:
    fleet = SignFleet(HideNseek(**ALL, down=down))
    fleet.play("a")
    assert np.array_equal(fleet.personal("a").parameters, fleet.local["a"].trained.parameters)


def test_a_claim_of_many_samples_is_clipped() -> None:
    fleet = SignFleet(HideNseek(**ALL))
    a = Assignment(fleet.course, 1, "a")
    update = signs.Update(bits.pack(np.ones(MASKED, np.bool_)), 1e6)
    found = fleet.method.influence(a, fleet.state, update)
    assert found is not None
    assert found.weight == 1e6
    assert fleet.method.limited(a, fleet.state, update, 1.0, 400.0).samples == 400
    assert SignFleet(HideNseek(**ALL, down="count")).method.influence(a, fleet.state, update) is None


# --- what travels


@pytest.mark.parametrize("down", DOWNS)
def test_head_biases_and_statistics_never_leave_the_device(down: Any) -> None:
    fleet = SignFleet(HideNseek(epochs=1, down=down))
    for _ in range(2):
        fleet.play("a", "b")
    assert all(set(u.arrays) == {"changes.auto"} for u in fleet.up.values())
    assert set(fleet.down["a"].arrays) == {"changes.auto" if down == "sign" else "counts"}
    heads = [fleet.local[d].trained.parameters[M.tensors["2.w"].span] for d in "ab"]
    assert not np.array_equal(*heads)


@pytest.mark.parametrize("down", DOWNS)
def test_a_reader_that_has_the_page_alone_finds_the_signs_of_an_update(down: Any) -> None:
    fleet = SignFleet(HideNseek(keep=1, lr=1000, down=down, codec="entropy"), grouped(mlp(40, 60, 30, 3)))
    fleet.play("a", "b", "c")
    state: signs.State = fleet.state
    fleet.play("a")
    count, n, tensor = state.plus.astype(int), state.votes, np.repeat([0, 1], [40 * 60, 60 * 30])
    contexts = 128 * (count * 32 // max(32, n + 1)) + tensor * 128 // max(128, 2)
    data = fleet.up["a"].arrays["changes.entropy"].tobytes()
    assert data[0] != 15  # which would leave the contexts out
    sent = 2 * count >= n
    sent[codec_readers.entropy(data, count.size, contexts.tolist())] ^= True
    assert np.array_equal(bits.pack(sent), fleet.read["a"].signs)


def test_bits_take_one_bit_a_sign_both_ways() -> None:
    fleet = SignFleet(HideNseek(**ALL, codec="bits"))
    fleet.play("a")
    assert fleet.up["a"].arrays["changes.bits"].nbytes == bits.size(MASKED)
    assert fleet.ask("a").arrays["changes.bits"].nbytes == bits.size(MASKED)
    assert fleet.method.exchanged(fleet.course) == MASKED
    assert fleet.method.paper_bytes(fleet.course) == (MASKED, MASKED)


@pytest.mark.parametrize("down", DOWNS)
@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_a_late_device_needs_no_history(down: Any, keep: float) -> None:
    fleet = SignFleet(HideNseek(epochs=1, down=down, keep=keep))
    for _ in range(3):
        fleet.play("a", "b")
    late = fleet.personal("z")
    small, n = network(fleet.course, fleet.state.units), unpacked(M, fleet.state.units).small
    due = 2 * fleet.state.plus.astype(int) >= fleet.state.votes
    own = replace(late, parameters=late.parameters[n.parameters])
    assert np.array_equal(signs_of(fleet.method, small.model, own) > 0, due)
    fleet.play("a", "z")
    assert fleet.took_part == ["a", "z"]


@pytest.mark.parametrize("down", DOWNS)
def test_signs_of_a_fleet_that_learns_get_better(down: Any) -> None:
    fleet = SignFleet(HideNseek(epochs=2, down=down, keep=0.8, lr=1.0, radius=0.1), grouped(mlp(6, 24, 16, 3)))
    for _ in range(5):
        fleet.play("a", "b", "c")
    assert min(fleet.score(d) for d in "abc") > 0.6


def test_two_fleets_of_one_seed_send_the_same_bytes() -> None:
    fleets = [SignFleet(HideNseek(epochs=1, keep=0.6, down="count")) for _ in range(2)]
    for fleet in fleets:
        fleet.play("a", "b")
        fleet.play("b", "c")
    for d in "abc":
        one, other = (f.up[d].arrays["changes.auto"] for f in fleets)
        assert one.tobytes() == other.tobytes()


# --- the smaller network


def test_the_units_travel_once_and_again_when_they_were_lost() -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6))
    fleet.play("a", "b")
    assert UNITS in fleet.down["a"].arrays
    assert fleet.down["a"].arrays[UNITS].nbytes == 2  # 8 + 5 channels
    fleet.play("a")
    assert UNITS not in fleet.down["a"].arrays
    del fleet.kept["b"]
    with pytest.raises(LostError):
        fleet.receive("b")
    fleet.play("b", lost="b")
    assert fleet.took_part == []
    fleet.play("b")
    assert fleet.took_part == ["b"]
    assert UNITS in fleet.down["b"].arrays
    assert HideNseek.one_time_down == {UNITS}


def test_units_that_do_not_fit_are_lost_and_the_next_downlink_has_them() -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6))
    fleet.play("a", "b")
    fleet.kept["b"] = replace(fleet.kept["b"], units=np.zeros(2, np.uint8))
    with pytest.raises(LostError, match="damaged"):
        fleet.receive("b")
    fleet.play("b", lost="b")
    fleet.play("b")
    assert UNITS in fleet.down["b"].arrays


def test_what_was_pruned_is_zero_and_no_sign_of_it_travels() -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6, codec="bits"))
    fleet.play("a")
    fleet.play("a")
    kept = unpacked(M, fleet.state.units).channels
    size = {name: len(left) for name, left in kept.items()}
    assert sum(size.values()) == round(0.6 * 13)
    due = 6 * size["0"] + size["0"] * size["1"]
    assert fleet.up["a"].arrays["changes.bits"].nbytes == bits.size(due)
    assert fleet.method.exchanged(fleet.course) == due
    for made in (fleet.local["a"].trained, fleet.personal("a")):
        rows = made.parameters[M.tensors["0.w"].span].reshape(8, 6)
        assert np.flatnonzero(rows.any(axis=1)).tolist() == kept["0"].tolist()
        assert made.mask is not None
        assert np.array_equal(made.mask[M.tensors["0.w"].span].reshape(8, 6).any(axis=1), rows.any(axis=1))
        assert not made.parameters[~made.mask].any()


def test_a_model_of_the_smaller_network_keeps_its_statistics_and_what_fits_other_units_is_not_used() -> None:
    statistic = Tensor(name="mean", shape=(3,), offset=0, init=Init(kind="constant", scale=0))
    m = M.model_copy(update={"buffers": (statistic,)})
    kept = {"0": np.array([1, 4])}
    n, units = narrow(m, kept), chosen(m, kept)
    values, statistics = np.arange(1, n.manifest.d + 1, dtype=np.float32), np.array([1, 2, 3], np.float32)
    whole = network(course(m), units.packed).personal(values, statistics)
    assert whole.buffers.tolist() == [1, 2, 3]
    assert whole.parameters[n.parameters].tolist() == values.tolist()
    assert np.count_nonzero(whole.parameters) == n.manifest.d
    own = signs.Kept(np.zeros(2, np.float32), statistics, units=units.packed)
    assert signs.of_units(own, units.packed) is own
    assert signs.of_units(own, chosen(m, {}).packed) is None
    assert signs.of_units(None, units.packed) is None
    assert signs.of_units(replace(own, units=None), units.packed) is None
    assert signs.of_units(replace(own, units=None), None) is not None


def test_training_the_smaller_network_is_training_the_whole_one_with_zeros() -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6))
    t = fleet.task("a")
    units = unpacked(M, fleet.state.units)
    small, n = t.narrow(units.channels), units.small
    wide = np.zeros(M.d, np.float32)
    wide[n.parameters] = small.assignment.model.parameters
    batch = next(iter(t.batches(1, 8)))
    buffers = np.zeros(0, np.float32)
    whole = NumpyMlp(M).gradient(wide, buffers, batch.x, batch.y)
    found = small.gradient(small.assignment.model.parameters, buffers, batch)
    assert found.loss == pytest.approx(whole.loss)
    assert np.allclose(found.parameters, whole.parameters[n.parameters])


@pytest.mark.parametrize("seed", [3, 4])
def test_synflow_sees_the_weights_times_their_first_latents_and_a_unit_that_stays_keeps_its_own(seed: int) -> None:
    """Two layers of eight and five units; all numbers are drawn before the pruning, as in the paper."""
    c, method = replace(course(M), seed=seed), HideNseek(keep=0.6)
    uniform = counter.uniform(counter.key(seed, "hidenseek", "first latents"), MASKED)
    values = {name: np.abs(model(M).parameters[t.span].reshape(t.shape)) for name, t in M.tensors.items()}
    first, second = uniform[:48].reshape(8, 6), uniform[48:].reshape(5, 8)
    seen = {**values, "0.w": values["0.w"] * first, "1.w": values["1.w"] * second}
    due = synflow.prune(seen, ["0.w", "1.w", "2.w"], M.groups, {"0", "1"}, 0.6)
    units = method.prune(c)
    assert {k: v.tolist() for k, v in units.channels.items()} == {k: v.tolist() for k, v in due.items()}
    assert {k: v.tolist() for k, v in due.items()} != {
        k: v.tolist() for k, v in synflow.prune(values, ["0.w", "1.w", "2.w"], M.groups, {"0", "1"}, 0.6).items()
    }
    left = [first[due["0"]].ravel(), second[np.ix_(due["1"], due["0"])].ravel()]
    assert method.sureness(network(c, units.packed)) == pytest.approx(np.concatenate(left), rel=1e-6)


def test_the_first_latents_are_those_of_the_federations_seed() -> None:
    c, method = course(M), HideNseek()
    uniform = counter.uniform(counter.key(9, "hidenseek", "first latents"), MASKED)
    assert method.sureness(network(replace(c, seed=9), None)) == pytest.approx(uniform, rel=1e-6)
    assert not np.array_equal(method.sureness(network(replace(c, seed=9), None)), method.sureness(network(c, None)))


@pytest.mark.parametrize("method", [HideNseek(keep=1, epochs=1, batch=64), BnnFedAvg(epochs=1, batch=64)])
def test_batch_norm_statistics_follow_the_training_and_stay_on_the_device(method: signs.SignMasks) -> None:
    """Each gradient adds 1. A round has one step."""
    statistic = Tensor(name="n", shape=(1,), offset=0, init=Init(kind="constant", scale=0))
    m = M.model_copy(update={"buffers": (statistic,)})
    fleet = SignFleet(method, m)
    fleet.trainer = Steady(m, np.zeros(m.d, np.float32))
    for devices in ("a", "ab"):
        fleet.play(*devices)
    assert not {"buffers", "statistics"} & set(fleet.up["a"].arrays)
    assert [fleet.personal(d).buffers.tolist() for d in "abc"] == [[2], [1], [0]]


def test_only_the_layers_named_are_pruned_by_name_or_beginning() -> None:
    m = M.model_copy(update={"groups": tuple(replace(g, name=f"{g.name}.units") for g in M.groups)})
    for name in ("1.units", "1."):
        found = HideNseek(keep=0.5, prune_layers=(name,)).prune(course(m))
        assert {k: len(v) for k, v in found.channels.items()} == {"0.units": 8, "1.units": 2}
    assert HideNseek(keep=1).prune(course(M)).alive.all()
    with pytest.raises(ConfigError, match=r"none of the channel groups \['0', '1'\]"):
        HideNseek(prune_layers=("conv",)).start(course(M))
    with pytest.raises(ConfigError, match=r"has no channel groups, so no unit can be pruned; set keep = 1"):
        HideNseek().start(course(mlp(6, 5, 3)))
    for keep in (0.8, 1):
        with pytest.raises(
            ConfigError, match=r"not the last one, and bundle '\w+' has no other; choose another method"
        ):
            HideNseek(keep=keep).start(course(grouped(mlp(6, 3))))
    said = (
        r"in one row, and those of bundle '\w+' are not; set keep = 1 to prune nothing, or choose another method "
        r"\(there are 1 channel groups for 3 layers, and a chain has one between each layer and the next\)"
    )
    with pytest.raises(ConfigError, match=said):
        HideNseek().start(course(M.model_copy(update={"groups": M.groups[:1]})))
    HideNseek(keep=1).start(course(mlp(6, 5, 3)))


def test_the_pruning_runs_once_a_federation_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[float] = []
    prune = synflow.prune

    def counted(*given: Any) -> Any:
        runs.append(given[4])
        return prune(*given)

    monkeypatch.setattr(synflow, "prune", counted)
    c = course(M)
    for keep in (0.6, 0.6, 0.5):
        method = HideNseek(keep=keep)
        assert method.paper_bytes(c) == (method.exchanged(c),) * 2
    assert runs == [0.6, 0.5]
    assert np.array_equal(HideNseek(keep=0.6).prune(course(M)).alive, HideNseek(keep=0.6).prune(c).alive)
    assert runs == [0.6, 0.5, 0.6]  # another course of the same values


def test_where_every_unit_stays_the_whole_network_is_trained_and_the_units_still_travel() -> None:
    fleet = SignFleet(HideNseek(keep=1, epochs=1))
    fleet.play("a")
    assert network(fleet.course, fleet.state.units).model is fleet.course.model
    assert unpacked(M, fleet.down["a"].arrays[UNITS]).alive.all()
    assert fleet.local["a"].trained.mask is None


def test_channels_go_in_as_many_steps_as_iterations_says() -> None:
    """Of seven units three stay. Unit 0 of layer "1" reads unit 0 of layer "0", its unit 1 the four others.

    The weights here are those times the first latents.

    At first the flows are 4; 1, .9, .8, .7 in layer "0" and 4; 3.4 in layer "1". In one step the largest three stay,
    and unit 1 of layer "1" has no input left. In steps of one unit at most its inputs go first, and its flow with them.
    """
    m = grouped(mlp(1, 5, 2, 2, bias=False))
    weights = [4, 1, 0.9, 0.8, 0.7, *(1, 0, 0, 0, 0), *(0, 1, 1, 1, 1), *(1, 1), *(0, 0)]
    uniform = counter.uniform(counter.key(3, "hidenseek", "first latents"), 5 + 10)
    net = Model(m, (weights / np.append(uniform, np.ones(4))).astype(np.float32), np.zeros(0, np.float32))
    c = replace(course(m), model=net)

    def stay(iterations: int) -> dict[str, list[int]]:
        return {k: v.tolist() for k, v in HideNseek(keep=3 / 7, iterations=iterations).prune(c).channels.items()}

    assert stay(1) == {"0": [0], "1": [0, 1]}
    assert stay(20) == {"0": [0, 1], "1": [0]}


def test_settings_out_of_range_are_refused_by_name() -> None:
    for name, value in {"keep": 0.0, "down": "float", "radius": 0, "lr": -1, "iterations": 0, "codec": "fuse8"}.items():
        with pytest.raises(ConfigError, match=name):
            make_method({"name": "hidenseek", name: value})


# --- hostile payloads


@pytest.mark.parametrize("down", DOWNS)
def test_a_malformed_update_is_refused_in_words(down: Any) -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6, down=down))
    fleet.play("a", "b")
    good = fleet_update(fleet)

    def read(payload: Payload) -> None:
        fleet.method.read_update(Assignment(fleet.course, 2, "a"), fleet.state, fleet.records.get("a"), payload)

    read(good)
    data = good.arrays["changes.auto"]
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"changes.auto": data[:1]}, {}),
        ({}, {"samples": 0}),
        ({}, {"reference": "0" * 16}),
    ]
    for arrays, meta in wrong:
        with pytest.raises((PayloadError, LostError)):
            read(Payload({**good.arrays, **arrays}, {**good.meta, **meta}))


def fleet_update(fleet: SignFleet) -> Payload:
    """An update that is due in the fleet's next round."""
    t = fleet.task("a")
    received = fleet.method.receive(t.assignment, None, fleet.ask("new"))
    return weighed(fleet.method.local_round(t, None, received), t.samples).update


@pytest.mark.parametrize("down", DOWNS)
def test_a_malformed_downlink_is_refused_in_words(down: Any) -> None:
    fleet = SignFleet(HideNseek(epochs=1, keep=0.6, down=down))
    fleet.play("a", "b", "c")
    good, a = fleet.ask("z"), Assignment(fleet.course, 2, "z")
    name = "changes.auto" if down == "sign" else "counts"
    wrong: list[dict[str, Any]] = [
        {UNITS: np.zeros(2, np.uint8)},
        {UNITS: np.full(2, 255, np.uint8)},
        {UNITS: np.zeros(5, np.uint8)},
        {UNITS: np.zeros(2, np.float32)},
        {name: good.arrays[name][:2]},
        {name: good.arrays[name].astype(np.int32)},
        {"parameters": np.zeros(3, np.float32)},
    ]
    for arrays in wrong:
        with pytest.raises((PayloadError, LostError)):
            fleet.method.receive(a, None, Payload({**good.arrays, **arrays}, good.meta))
    for votes in (0, -1, 2**40, "3", 1.5) if down == "count" else ():
        with pytest.raises(PayloadError):
            fleet.method.receive(a, None, Payload(good.arrays, {**good.meta, "votes": votes}))


def test_the_units_are_bits_over_all_groups_in_order() -> None:
    kept = {"0": np.array([0, 7]), "1": np.array([2])}
    packed = chosen(M, kept).packed
    assert packed.tolist() == [0b10000001, 0b00100]
    assert {k: v.tolist() for k, v in unpacked(M, packed).channels.items()} == {"0": [0, 7], "1": [2]}
    assert chosen(M, {"1": kept["1"]}).packed.tolist() == [0b11111111, 0b00100]
    assert chosen(M, {}).alive.all()


# --- all sign methods in the simulator, with the real engine


def test_a_simulation_gives_the_same_bits_twice_and_bills_the_units_apart() -> None:
    pytest.importorskip("sklearn")
    from edge_bench.data import datasets
    from edge_bench.data.table import DataConfig
    from edge_bench.simulation.comparison import run_all
    from edge_bench.simulation.file import find_bundle, read_config

    data = DataConfig(name="digits", devices=4, samples=400)
    methods = {
        "hidenseek": {"epochs": 1},
        "counted": {"name": "hidenseek", "down": "count", "keep": 0.5, "epochs": 1},
        "signed": {"epochs": 1},
        "bnn": {"epochs": 1},
    }
    table = {
        "bundle": "digits", "data": data.model_dump(exclude_unset=True), "methods": methods, "rounds": 2, "cohort": 3,
        "seed": 5,
    }  # fmt: skip
    bundle = find_bundle("digits")
    devices = datasets.load(data, 5, bundle.manifest)
    one, two = (run_all(read_config({**table, "final_epochs": False}), bundle, devices) for _ in range(2))
    for label, first_run in one.items():
        again = two[label]
        assert (first_run.state_sha256, first_run.personal_sha256) == (again.state_sha256, again.personal_sha256)
        for a, b in zip(first_run.rows, again.rows, strict=True):
            assert a.record.model_dump(exclude={"seconds"}) == b.record.model_dump(exclude={"seconds"})
    for label in ("hidenseek", "counted"):
        made = one[label].personal[min(devices)]
        assert made.mask is not None
        assert not made.mask.all()
