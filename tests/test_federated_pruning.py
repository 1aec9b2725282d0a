"""FederatedPruning: the server's choice of units, the round trip, what waits on the server and comes back."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels import bits
from numpy_mlp import course, grouped, mlp, model, task
from rounds import Rounds

from edge_client.bundle import Init, Tensor, views
from edge_client.errors import LostError, PayloadError
from edge_client.methods.fedavg import FedAvg, Update
from edge_client.methods.federated_pruning import FederatedPruning, Holds, State
from edge_client.methods.shared.shrinking import counts, parameters_with
from edge_client.methods.shared.units import Units, whole
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment

M = grouped(mlp(6, 10, 8, 3))
C = course(M, rounds=6)
A = Assignment(C, 1, "a")
NONE = np.zeros(0, np.float32)


def chosen(state: State) -> Units:
    return Units(M, bits.unpack(state.units, 18))


def test_the_server_keeps_the_share_of_each_layer_with_the_largest_norms() -> None:
    state = FederatedPruning(keep=0.5).start(C)
    norms = [np.linalg.norm(views(M.parameters, model(M).parameters)[name], axis=1) for name in ("0.w", "1.w")]
    expected = [np.sort(np.argsort(-n)[: len(n) // 2]) for n in norms]
    alive = chosen(state).alive
    np.testing.assert_array_equal(np.flatnonzero(alive[:10]), expected[0])
    np.testing.assert_array_equal(np.flatnonzero(alive[10:]), expected[1])
    for keep, kept in ((0.38, [4, 3]), (0.32, [3, 3]), (0.01, [1, 1])):  # of 10 and 8, the nearest whole number
        assert counts(chosen(FederatedPruning(keep=keep).start(C))) == kept


def filled(fleet: Rounds, value: float, samples: int = 1) -> Payload:
    """An update of one value everywhere."""
    size = chosen(fleet.state).places.size
    return Payload({"parameters": np.full(size, value, np.float32), "buffers": NONE}, {"samples": samples})


def test_live_values_become_the_weighted_mean_and_pruned_ones_wait() -> None:
    fleet = Rounds(FederatedPruning(every=10), M)
    before, places = fleet.state, chosen(fleet.state).places
    fleet.close({"a": filled(fleet, 2.0, 1), "b": filled(fleet, 6.0, 3)})
    expected = before.parameters.copy()
    expected[places] = 5.0
    np.testing.assert_array_equal(fleet.state.parameters, expected)
    assert fleet.state.units.tobytes() == before.units.tobytes()


def test_statistics_are_averaged_by_samples() -> None:
    statistic = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.5))
    fleet = Rounds(FederatedPruning(), M.model_copy(update={"buffers": (statistic,)}))
    sent = {}
    for d, samples, mean in (("a", 1, 2.0), ("b", 3, 6.0)):
        arrays = {**filled(fleet, 0.0).arrays, "buffers": np.full(2, mean, np.float32)}
        sent[d] = Payload(arrays, {"samples": samples})
    fleet.close(sent)
    assert fleet.state.buffers.tolist() == [5, 5]
    assert fleet.ask("c").arrays["buffers"].tolist() == [5, 5]


def test_a_pruned_unit_returns_with_its_old_values_when_others_shrink() -> None:
    fleet = Rounds(FederatedPruning(every=2), M)
    before = chosen(fleet.state)
    for round_ in (1, 2):
        fleet.close({"a": filled(fleet, 1e-6)})
        assert (chosen(fleet.state).digest == before.digest) == (round_ == 1)
    after = chosen(fleet.state)
    assert not (after.alive & before.alive).any()  # the waiting units are the stronger ones now
    fresh = np.setdiff1d(after.places, before.places)
    np.testing.assert_array_equal(fleet.state.parameters[fresh], model(M).parameters[fresh])


def test_a_choice_due_in_a_round_without_an_update_follows_the_next_that_counts_one() -> None:
    fleet = Rounds(FederatedPruning(every=2), M, rounds=6)
    for round_, chooses in enumerate((False, False, True, True, False), 1):
        before = chosen(fleet.state)
        fleet.close({"a": filled(fleet, 1e-6 / round_)} if round_ != 2 else {})
        assert (chosen(fleet.state).digest != before.digest) == chooses


@pytest.mark.parametrize("gone", [1, 2])
def test_the_final_model_has_the_units_trained_last_when_the_last_rounds_count_no_update(gone: int) -> None:
    fleet = Rounds(FederatedPruning(every=1), M, rounds=3 + gone)
    for round_ in (1, 2, 3):
        fleet.close({"a": filled(fleet, 1e-6 / round_)})
        trained = fleet.read["a"]
    units = Units(M, bits.unpack(fleet.state.trained, 18))
    for _ in range(gone):
        assert fleet.receive("new").units.digest == chosen(fleet.state).digest != units.digest
        fleet.close({})
    final = fleet.receive("new")
    assert final.units.digest == units.digest
    assert np.array_equal(final.parameters, trained.parameters)


def test_no_choice_follows_the_last_round() -> None:
    method = FederatedPruning(every=6)
    state = method.start(C)
    size = chosen(state).places.size
    update = Update(np.full(size, 1e-6, np.float32), NONE, 1.0)
    total, _ = method.fold(A, state, None, update, None)
    assert method.finish(C, 6, ["a"], state, total)[0].units.tobytes() == state.units.tobytes()


def test_units_travel_once_for_each_choice_and_the_rest_is_live_float32() -> None:
    method = FederatedPruning(every=2, epochs=1)
    fleet = Rounds(method, M, rounds=6)
    for round_ in (1, 2, 3, 4):
        record = fleet.records.get("a")
        known = record is not None and record.units.tobytes() == fleet.state.units.tobytes()
        down = fleet.ask("a")
        assert ("units" not in down.arrays) == known
        assert down.arrays["parameters"].nbytes == 4 * chosen(fleet.state).places.size == 4 * parameters_with(M, [5, 4])
        assert fleet.audience("a") == ("new" if round_ == 1 else chosen_of(record).digest)
        fleet.play("a", "b")
    up, down_bytes = method.paper_bytes(C)
    share = parameters_with(M, [5, 4]) / M.d
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert up == down_bytes == 4 * parameters_with(M, [5, 4]) + np.ceil(M.d * entropy / 16)


def chosen_of(record: Holds) -> Units:
    return Units(M, bits.unpack(record.units, 18))


def test_with_all_units_it_is_fedavg() -> None:
    fleets = [Rounds(method, M, rounds=6) for method in (FederatedPruning(keep=1), FedAvg())]
    for fleet in fleets:
        fleet.play("a", "b")
    np.testing.assert_array_equal(fleets[0].state.parameters, fleets[1].state.parameters)


def test_the_personal_model_is_the_chosen_network_alone_and_it_learns() -> None:
    fleet = Rounds(FederatedPruning(lr=0.05, every=2), M, rounds=6)
    for _ in range(6):
        fleet.play("a", "b", "c")
    personal = fleet.personal("a")
    assert personal.mask is not None
    assert np.count_nonzero(personal.mask) == parameters_with(M, [5, 4])
    assert not personal.parameters[~personal.mask].any()
    assert fleet.score("a") > 0.8


def test_a_device_without_the_units_says_so() -> None:
    method = FederatedPruning()
    state = method.start(C)
    down = method.downlink(C, 2, state, Holds(state.units))
    for kept in (None, Holds(whole(M).packed), Holds(np.zeros(3, np.uint8))):
        with pytest.raises(LostError):
            method.receive(A, kept, down)


def test_an_update_without_its_samples_is_refused() -> None:
    method = FederatedPruning()
    arrays = {"parameters": np.zeros(parameters_with(M, [5, 4]), np.float32), "buffers": NONE}
    with pytest.raises(PayloadError, match="samples"):
        method.read_update(A, method.start(C), None, Payload(arrays))


def test_influence_is_the_change_of_the_live_values_and_limited_scales_it() -> None:
    method = FederatedPruning()
    state = method.start(C)
    live_values = state.parameters[chosen(state).places]
    update = Update(live_values + np.float32(2), NONE, 9.0)
    influence = method.influence(A, state, update)
    assert (influence.norm, influence.weight) == (pytest.approx(2 * live_values.size**0.5, rel=1e-5), 9.0)
    less = method.limited(A, state, update, 0.5, 2.0)
    np.testing.assert_allclose(less.parameters, live_values + 1, rtol=1e-6, atol=1e-6)
    assert less.samples == 2.0


@pytest.mark.parametrize(("seed", "rate"), [(1, 0.01), (None, 0.003)])
def test_the_rate_is_careful_only_where_the_whole_bundle_was_trained(seed: int | None, rate: float) -> None:
    """The smaller network's values come from the whole one, so it has no seed of its own."""
    statistic = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.5))
    m = M.model_copy(update={"buffers": (statistic,), "seed": seed})
    sent = []
    for lr in (None, rate):
        method, t = FederatedPruning(keep=0.5, epochs=1, lr=lr), task(m)
        down = method.downlink(t.assignment.course, 1, method.start(t.assignment.course), None)
        update = method.local_round(t, None, method.receive(t.assignment, None, down)).update
        sent.append(update.arrays["parameters"].tobytes())
    assert sent[0] == sent[1]
