"""Hermes: the gate, the pruning, training of the smaller network and the mean over the devices that hold a value."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from channel_groups import between
from edge_kernels import bits
from edge_kernels.pruning import add_lasso_slope, group_norms, keep_largest
from hypothesis import given
from hypothesis import strategies as st
from numpy_mlp import CountingSteps, clusters, course, grouped, mlp, model, task
from rounds import Rounds

from edge_client.bundle import F32, Init, Manifest, Tensor, views
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.methods.hermes import Hermes, Kept, Received, State, Structure, Total, Update
from edge_client.methods.shared.shrinking import counts, parameters_with, shrunk, strongest
from edge_client.methods.shared.units import UNITS, Units, whole
from edge_client.narrow import narrow
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Task

M = grouped(mlp(6, 10, 8, 3))
A = Assignment(course(M), 1, "a")
NONE = np.zeros(0, np.float32)


def units(*removed: int) -> Units:
    """All 18 units of M but these; the first 10 are those of layer "0"."""
    alive = np.ones(18, np.bool_)
    alive[list(removed)] = False
    return Units(M, alive)


def validated(device: str = "a", round_: int = 1) -> Task:
    """A task whose training samples also validate."""
    data = clusters(M, 1)
    return task(M, device, round_, replace(data, x_val=data.x, y_val=data.y))


def received(own: Units | None = None) -> Received:
    own = own or whole(M)
    applied = own.applied(model(M).parameters, NONE)
    return Received(own, applied.parameters, NONE, own.digest)


# --- the units to remove


def test_the_norm_of_a_unit_is_that_of_its_row_over_all_producers() -> None:
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), np.array([[0.0], [2.0]], np.float32)
    np.testing.assert_allclose(group_norms([a]), [5.0, 0.0])
    np.testing.assert_allclose(group_norms([a, b]), [5.0, 2.0])
    assert keep_largest(np.array([1.0, 3.0, 1.0, 1.0]), 3).tolist() == [True, True, True, False]


def test_the_slope_of_the_group_lasso_is_its_numerical_derivative() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 2, 2)).astype(np.float32)
    weight[1] = 0.0  # a group of zeros has no slope of its own

    def lasso(w: np.ndarray) -> float:
        w = w.astype(np.float64)
        return float(np.sqrt((w**2).sum(axis=(1, 2))).sum() + np.sqrt((w**2).sum(axis=(0, 2))).sum())

    found = np.ones_like(weight)
    add_lasso_slope(weight, 0.5, found)
    for at in np.ndindex(weight.shape):
        if at[0] == 1:
            assert found[at] == 1.0
            continue
        step = np.zeros(weight.shape)
        step[at] = 1e-5
        slope = (lasso(weight + step) - lasso(weight - step)) / 2e-5
        assert found[at] == pytest.approx(1 + 0.5 * slope, abs=1e-4)


def test_the_live_parameters_are_those_of_the_narrow_network() -> None:
    for structure in (units(), units(0, 3, 11), units(*range(9), *range(10, 17))):
        assert (
            parameters_with(M, counts(structure)) == structure.places.size == narrow(M, structure.channels).manifest.d
        )


def test_a_unit_that_the_next_layer_reads_in_several_columns_takes_them_all_along() -> None:
    m = mlp(6, 4, 3)  # "1.w" reads three values of each unit, as a linear layer does behind a flattened convolution
    first, bias, w, b = m.parameters
    rows = (first, bias, w.model_copy(update={"shape": (3, 12)}), b.model_copy(update={"offset": 64}))
    group = between(4, "0.w", "1.w", bias="0.b", repeat=3)
    m = m.model_copy(update={"parameters": rows, "groups": (group,)})
    for kept in ([2], [0, 3], [0, 1, 2, 3]):
        due = narrow(m, {group.name: np.array(kept)}).manifest.d
        assert parameters_with(m, [len(kept)]) == due == len(kept) * (6 + 1 + 9) + 3


@given(st.floats(0.01, 1.2), st.lists(st.integers(0, 17), max_size=8))
def test_a_step_removes_as_few_units_as_reach_the_size_and_the_same_share_of_each_layer(
    share: float, removed: list[int]
) -> None:
    start = units(*(i for i in removed if i not in (0, 10)))
    now, most = counts(start), share * M.d
    after = shrunk(start, most)
    if parameters_with(M, now) <= most:
        assert after == now
        return
    least = [1] * len(now)
    assert all(1 <= n <= before for n, before in zip(after, now, strict=True))
    assert parameters_with(M, after) <= most or after == least
    lost = [(before - n) / before for n, before in zip(after, now, strict=True)]
    for (n, before), mine in zip(zip(after, now, strict=True), lost, strict=True):
        assert n == 1 or mine + 1 / before >= max(lost) - 1e-9  # within one unit of the layer that lost most
    back = max(range(len(now)), key=lambda i: (lost[i], i))  # the last unit removed was needed
    assert parameters_with(M, [n + (i == back) for i, n in enumerate(after)]) > most


def test_a_size_that_is_met_exactly_is_small_enough() -> None:
    for left in ([10, 8], [9, 8], [9, 7]):
        assert shrunk(whole(M), parameters_with(M, left)) == left


def test_the_units_of_least_norm_go_and_removed_ones_stay_removed() -> None:
    parameters = np.zeros(M.d, np.float32)
    tensors = views(M.parameters, parameters)
    tensors["0.w"][:] = np.arange(10, 0, -1)[:, None]  # unit 0 is the strongest
    tensors["1.w"][:] = np.arange(8)[:, None]
    found = strongest(units(0, 17), parameters, [4, 3])
    assert np.flatnonzero(found.alive).tolist() == [1, 2, 3, 4, 14, 15, 16]


# --- a device's round


def test_a_device_ranks_its_units_by_the_weights_that_it_received_and_not_by_the_bundles() -> None:
    method, start = Hermes(threshold=-1, rate=0.5, epochs=1), received()
    parameters = start.parameters.copy()
    tensors = views(M.parameters, parameters)
    for name in ("0.w", "1.w"):  # the weakest unit of the bundle becomes the strongest
        norms = np.linalg.norm(tensors[name], axis=1, keepdims=True)
        tensors[name][:] /= norms**2
    kept = method.local_round(validated(), None, replace(start, parameters=parameters)).kept
    alive = bits.unpack(kept.units, 18)
    for name, mine in (("0.w", alive[:10]), ("1.w", alive[10:])):
        now, before = (
            np.argsort(-np.linalg.norm(views(M.parameters, v)[name], axis=1))[: np.count_nonzero(mine)]
            for v in (parameters, model(M).parameters)
        )
        assert set(np.flatnonzero(mine)) == set(now) != set(before)


def test_a_device_prunes_only_above_the_threshold_and_above_the_target() -> None:
    t, start = validated(), received()
    score = t.score(start.units.applied(start.parameters, NONE), "validation")
    assert 0 < score < 1
    for method, prunes in (
        (Hermes(threshold=score), False),  # not above it
        (Hermes(threshold=score - 0.01), True),
        (Hermes(threshold=-1, target=1), False),
    ):
        kept = method.local_round(t, None, start).kept
        assert (parameters_with(M, counts(Units(M, bits.unpack(kept.units, 18)))) < M.d) == prunes
    blind = task(M)  # no validation samples: the score is 0
    assert Hermes(threshold=0).local_round(blind, None, start).kept.units.tobytes() == start.units.packed.tobytes()
    assert "threshold = 0, and it is 0 without validation samples" in str(Hermes(threshold=0).unpruned())
    assert Hermes(target=1).unpruned() is None  # that is what it was set to


@pytest.mark.parametrize(("target", "rate"), [(0.4, 0.2), (0.7, 0.6), (0.55, 0.4)])
def test_pruning_lands_on_the_target_with_steps_of_the_rate_and_never_grows_again(target: float, rate: float) -> None:
    method, t = Hermes(threshold=-1, target=target, rate=rate, epochs=1), validated()
    now, ratios, sets = received(), [1.0], [np.ones(18, np.bool_)]
    for _ in range(8):
        local = method.local_round(t, None, now)
        own = Units(M, bits.unpack(local.kept.units, 18))
        ratios.append(parameters_with(M, counts(own)) / M.d)
        sets.append(own.alive)
        now = Received(own, local.trained.parameters, NONE, own.digest)
    one_unit = 18 / M.d  # the most parameters that a unit of M has: 6 + 1 inputs, 8 outputs; 10 + 1, 3
    for before, after in pairwise(ratios):
        due = max(target, (1 - rate) * before) if before > target else before
        assert due - one_unit < after <= due
    assert ratios[-1] == ratios[-2] > target - one_unit
    for before, after in pairwise(sets):
        assert not (after & ~before).any()


def test_each_step_removes_the_rate_of_what_is_left_and_not_of_the_whole_network() -> None:
    m = grouped(mlp(6, 60, 40, 3))
    data, method = clusters(m, 1), Hermes(threshold=-1, target=0.1, rate=0.2, epochs=1)
    t = task(m, data=replace(data, x_val=data.x, y_val=data.y))
    now, before = Received(whole(m), model(m).parameters, NONE, whole(m).digest), m.d
    for _ in range(4):
        local = method.local_round(t, None, now)
        own = Units(m, bits.unpack(local.kept.units, 100))
        after = parameters_with(m, counts(own))
        assert 0.8 * before - 64 < after <= 0.8 * before  # a unit has at most 60 inputs, a bias and 3 outputs
        now, before = Received(own, local.trained.parameters, NONE, own.digest), after


def steps(m: Manifest, n: int, **settings: float) -> list[list[int]]:
    """The units of each group after each of `n` steps with the gate open."""
    data, method = clusters(m, 1), Hermes(threshold=-1, epochs=1, **settings)
    t, left = task(m, data=replace(data, x_val=data.x, y_val=data.y)), []
    now = Received(whole(m), model(m).parameters, NONE, whole(m).digest)
    for _ in range(n):
        local = method.local_round(t, None, now)
        own = Units(m, bits.unpack(local.kept.units, sum(g.size for g in m.groups)))
        left.append(counts(own))
        now = Received(own, local.trained.parameters, NONE, own.digest)
    return left


def test_a_layer_does_not_pay_for_others_that_cannot_be_pruned() -> None:
    m = M.model_copy(update={"groups": M.groups[1:]})  # of 10 and 8 units only the 8 may go: never 80 % of the network
    assert steps(m, 6, target=0.3, rate=0.2) == [[6], [4], [3], [2], [2], [2]]


def test_a_narrow_layer_does_not_pay_for_a_wide_one() -> None:
    assert steps(grouped(mlp(20, 5, 200, 10)), 7, target=0.3, rate=0.2)[-1] == [4, 60]


def test_the_last_layer_is_whole_and_every_layer_keeps_a_unit_however_small_the_target() -> None:
    method, t = Hermes(threshold=-1, target=0.001, rate=0.99, epochs=1), validated()
    local = method.local_round(t, None, received())
    own = Units(M, bits.unpack(local.kept.units, 18))
    assert counts(own) == [1, 1]
    assert local.trained.mask is not None
    assert local.trained.mask[M.tensors["2.b"].span].all()


def test_training_is_sgd_with_group_lasso_on_the_live_weights_alone() -> None:
    method, own = Hermes(target=1, lasso=0.01, epochs=2, batch=16), units(1, 2, 11, 17)
    t = validated()
    local = method.local_round(t, None, received(own))
    # the same on the whole network, with all that is removed held at zero
    mask = own.applied(np.ones(M.d, np.float32), NONE).parameters
    values, velocity = model(M).parameters * mask, np.zeros(M.d, np.float32)
    for batch in t.batches(2, 16):
        g = t.gradient(values, NONE, batch).parameters.copy()
        for name in ("0.w", "1.w", "2.w"):
            w, slope = views(M.parameters, values)[name], views(M.parameters, g)[name]
            rows, columns = np.linalg.norm(w, axis=1, keepdims=True), np.linalg.norm(w, axis=0, keepdims=True)
            slope += np.float32(0.01) * (w / np.maximum(rows, 1e-20) + w / np.maximum(columns, 1e-20))
        velocity = np.float32(0.5) * velocity + g * mask
        values = values - np.float32(0.01) * velocity
    np.testing.assert_allclose(local.trained.parameters, values, rtol=1e-4, atol=1e-5)
    assert not local.trained.parameters[mask == 0].any()
    np.testing.assert_array_equal(local.update.arrays["parameters"], local.trained.parameters[own.places])


@pytest.mark.parametrize(("seed", "rate"), [(1, 0.01), (None, 0.003)])
def test_the_rate_is_careful_only_where_the_whole_bundle_was_trained(seed: int | None, rate: float) -> None:
    """The smaller network's values come from the whole one, so it has no seed of its own."""
    statistic = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.5))
    m = M.model_copy(update={"buffers": (statistic,), "seed": seed})
    data, sent = clusters(m, 1), []
    for lr in (None, rate):
        method, t = Hermes(threshold=-1, epochs=1, lr=lr), task(m, data=replace(data, x_val=data.x, y_val=data.y))
        down = method.downlink(t.assignment.course, 1, method.start(t.assignment.course), None)
        update = method.local_round(t, None, method.receive(t.assignment, None, down)).update
        assert UNITS in update.arrays
        sent.append(update.arrays["parameters"].tobytes())
    assert sent[0] == sent[1]


def test_batch_norm_statistics_follow_the_training_and_stay_on_the_device() -> None:
    """A round has six steps: two epochs of 40 samples in batches of 16."""
    statistics = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.5))
    m = M.model_copy(update={"buffers": (statistics,)})
    method, kept = Hermes(target=1, epochs=2, batch=16), None
    state = method.start(course(m))
    for round_, due in ((1, 6.5), (2, 12.5)):
        t = replace(task(m, round_=round_), trainer=CountingSteps(m))
        got = method.receive(t.assignment, kept, method.downlink(course(m), round_, state, None))
        local = method.local_round(t, kept, got)
        kept = local.kept
        assert kept.buffers.tolist() == local.trained.buffers.tolist() == [due] * 2
        assert set(local.update.arrays) == {"parameters"}
    got = method.receive(t.assignment, kept, method.downlink(course(m), 3, state, None))
    assert method.personal(t, kept, got).buffers.tolist() == [12.5] * 2


class Guessing(CountingSteps):
    """Right about class 0 alone; about every class where the statistics are 1."""

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        known = clusters(self.manifest, 1)
        right = np.array([known.y[(known.x == sample).all(axis=1)][0] for sample in x])
        return np.eye(3, dtype=np.float32)[right * int(buffers.all())]


def test_a_device_is_scored_with_its_own_statistics_and_no_one_else_knows_its_model() -> None:
    """A third of the samples are of class 0."""
    statistics = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0))
    m = M.model_copy(update={"buffers": (statistics,)})
    data = replace(clusters(m, 1), x_val=clusters(m, 1).x, y_val=clusters(m, 1).y)
    there = Rounds(Hermes(epochs=1, batch=40), m, data={"a": data}, trainer=Guessing(m))
    pruned = []
    for _ in range(2):
        there.play("a")
        pruned.append("structure" in there.ask("a").meta)
    assert pruned == [False, True]
    assert there.method.of_device(there.course, there.state, there.records["a"], there.personal("a")) is None


def test_a_device_whose_last_units_did_not_count_ends_with_them_and_the_server_does_not_name_a_model_its() -> None:
    there = Rounds(Hermes(threshold=-1), M, 3, data={d: clusters(M, i) for i, d in enumerate("ab")})
    there.play("a", "b")
    there.down["a"] = there.ask("a")
    there.train("a", 0)
    there.close({})  # the guard leaves the update out
    with pytest.raises(LostError):
        there.personal("a")
    there.lose("a")
    everyone = global_model(there.method, there.course, there.state, there.round)
    own = there.personal("a")
    assert not np.array_equal(own.parameters, everyone.parameters)
    assert there.method.of_device(there.course, there.state, there.records.get("a"), everyone) is None
    held = there.method.of_device(there.course, there.state, there.records["b"], everyone)
    assert held is not None
    assert np.array_equal(held.parameters, there.personal("b").parameters)


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -float("inf")])
def test_a_threshold_that_no_score_can_be_compared_with_is_refused(threshold: float) -> None:
    """No score is at or below NaN: every device would prune in every round."""
    with pytest.raises(ConfigError, match="threshold"):
        make_method({"name": "hermes", "threshold": threshold})


def test_units_travel_only_when_they_changed() -> None:
    t = validated()
    same = Hermes(target=1).local_round(t, None, received()).update
    assert set(same.arrays) == {"parameters"}
    assert same.arrays["parameters"].nbytes == 4 * M.d
    pruned = Hermes(threshold=-1).local_round(t, None, received()).update
    assert pruned.arrays["units"].nbytes == 3  # 18 bits
    assert pruned.arrays["parameters"].nbytes <= 0.8 * 4 * M.d


# --- the server


def _sent(method: Hermes, state: State, structure: Units, values: Any, record: Structure | None = None) -> Update:
    arrays = {"parameters": np.asarray(values, np.float32), "units": structure.packed}
    return method.read_update(A, state, record, decode(encode(Payload(arrays))))


def test_a_parameter_becomes_the_mean_over_its_holders_and_stays_where_there_is_none() -> None:
    method = Hermes()
    state = State(np.full(M.d, -7.0, np.float32))
    first, second = units(0, 1), units(1, 12)
    total: Any = None
    for structure, value in ((first, 2.0), (second, 6.0)):
        update = _sent(method, state, structure, np.full(structure.places.size, value))
        total, record = method.fold(A, state, total, update, None)
        assert record.units.tobytes() == structure.packed.tobytes()
    after, _ = method.finish(A.course, 1, ["a", "b"], state, total)
    holds = [s.applied(np.ones(M.d, np.float32), NONE).parameters for s in (first, second)]
    expected = np.where(holds[0] + holds[1] == 2, 4.0, np.where(holds[0] == 1, 2.0, np.where(holds[1] == 1, 6.0, -7.0)))
    assert set(expected) == {4.0, 2.0, 6.0, -7.0}
    np.testing.assert_array_equal(after.parameters, expected)


def test_an_update_whose_weight_the_guard_lowered_counts_with_that_weight_in_the_mean() -> None:
    """(2 * 1 + 6 * 1/4) / (1 + 1/4) = 2.8 where both hold a value."""
    method, state = Hermes(), State(np.zeros(M.d, np.float32))
    first, second = (_sent(method, state, units(), np.full(M.d, value)) for value in (2.0, 6.0))
    total: Any = None
    for update in (first, method.limited(A, state, second, 1.0, 0.25)):
        total, _ = method.fold(A, state, total, update, None)
    after, _ = method.finish(A.course, 1, ["a", "b"], state, total)
    assert after.parameters == pytest.approx(2.8)


def test_a_device_alone_gets_back_what_it_sent_in_bytes_for_its_units() -> None:
    fleet = Rounds(Hermes(threshold=-1), M, data={"a": validated().data})
    for _ in range(4):
        fleet.play("a")
        own, down = Units(M, bits.unpack(fleet.kept["a"].units, 18)), fleet.ask("a")
        assert down.arrays["parameters"].nbytes == 4 * own.places.size < 4 * M.d
        assert fleet.audience("a") == own.digest == down.meta["structure"]
        personal = fleet.personal("a")
        np.testing.assert_array_equal(personal.parameters, fleet.local["a"].trained.parameters)
        assert personal.mask is not None
        assert not personal.parameters[~personal.mask].any()


def test_the_residual_of_parameters_that_stay_live_goes_on_through_a_pruning() -> None:
    method = Hermes(threshold=-1, target=0.5, up="topk:0.1", feedback=True, epochs=1)
    fleet, left, live = Rounds(method, M, data={"a": validated().data}), np.zeros(M.d, np.float32), M.d
    for _ in range(3):
        fleet.play("a")
        kept, places = fleet.kept["a"], fleet.read["a"].units.places
        start = fleet.received["a"].parameters[places]
        change = fleet.local["a"].trained.parameters[places] - start + left[places]
        lost = change - (fleet.read["a"].parameters - start)
        np.testing.assert_allclose(kept.residual, lost, atol=1e-6)
        assert np.count_nonzero(lost) > np.count_nonzero(change) / 2  # topk sends a tenth
        assert places.size < live
        live, left = places.size, np.zeros(M.d, np.float32)
        left[places] = kept.residual


def test_a_device_whose_record_is_gone_receives_the_whole_model_and_keeps_its_units() -> None:
    method, own = Hermes(target=1), units(2, 13)
    state = method.start(A.course)
    kept = Kept(own.packed, NONE)
    got = method.receive(A, kept, method.downlink(A.course, 2, state, None))
    np.testing.assert_array_equal(got.parameters, own.applied(state.parameters, NONE).parameters)
    local = method.local_round(validated(), kept, got)
    assert local.update.arrays["units"].tobytes() == own.packed.tobytes()
    assert method.read_update(A, state, None, local.update).parameters.size == own.places.size


def test_a_device_that_lost_or_damaged_its_units_says_so() -> None:
    method = Hermes()
    state = method.start(A.course)
    down = method.downlink(A.course, 2, state, Structure(units(2).packed))
    damaged = Kept(np.zeros(3, np.uint8), NONE)
    for kept in (None, Kept(units(3).packed, NONE), damaged):
        with pytest.raises(LostError):
            method.receive(A, kept, down)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"units": np.zeros(3, np.uint8), "parameters": NONE}, "keep no unit"),
        ({"units": np.full(3, 255, np.uint8), "parameters": NONE}, "unused bits"),
        ({"units": np.zeros(9, np.uint8), "parameters": NONE}, "18 bits"),
        ({"units": units().packed, "parameters": np.zeros(M.d, np.float32)}, "do not come back"),
    ],
)
def test_a_hostile_update_is_refused(arrays: dict[str, Any], why: str) -> None:
    method = Hermes()
    with pytest.raises(PayloadError, match=why):
        method.read_update(A, method.start(A.course), Structure(units(5).packed), Payload(arrays))


def test_an_update_s_influence_is_bounded_by_its_live_change_and_scaled() -> None:
    method, own = Hermes(), units(5)
    state = State(np.zeros(M.d, np.float32))  # not what the device was sent, as with state = "client"
    ones = np.ones(own.places.size, np.float32)
    update = Update(own, ones, 3 * ones)
    assert method.influence(A, state, update).norm == pytest.approx(2 * own.places.size**0.5)
    less = method.limited(A, state, update, 0.5, 0.25)
    assert (set(less.parameters), less.weight, less.units) == ({2.0}, 0.25, own)


def test_a_round_s_records_take_little_more_memory_than_their_values() -> None:
    """The places of a network are int64: those of all devices at once would take twice the records' memory."""
    m = grouped(mlp(100, 200, 100, 3))
    method, c, ones = Hermes(state="client"), course(m), np.ones(m.d)
    alive = [np.arange(300) != removed for removed in range(100)]
    total = Total(ones, ones, {f"d{i:02}": Units(m, a).packed for i, a in enumerate(alive)})
    state = method.start(c)
    tracemalloc.start()
    try:
        _, records = method.finish(c, 1, sorted(total.units), state, total)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2 * sum(r.own.nbytes for r in records.values() if r.own is not None)


def test_a_model_without_groups_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no channel groups"):
        Hermes().start(course(mlp(4, 3, 2)))
