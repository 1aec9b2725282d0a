"""FedMap: schedules, both halves in step and out of step, masks by hand, FedDR's variables, hostile payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import CountingSamples, NumpyMlp, clusters, counted, course, mlp
from rounds import Rounds

from edge_client.bundle import F32, Init, Manifest, Tensor
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import Method, make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.federated_pruning_lamp import FederatedPruningLamp
from edge_client.methods.fedmap import DouglasRachford, FedMap, Kept, Received, State
from edge_client.methods.shared.pruned import MASK, alive, fingerprint, prunable, unmasked, unpacked
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Task
from edge_client.training import Gradient, Trainer

M = mlp(6, 8, 5, 3)
DEVICES = "abc"
Present = Callable[[int, str], bool]


def everyone(round_: int, device: str) -> bool:
    return True


class Play(Rounds):
    """Rounds that remember the state before each."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.states: list[Any] = []

    def run(self, rounds: int, present: Present = everyone) -> Play:
        for _ in range(rounds):
            self.states.append(self.state)
            self.local.clear()
            self.play(*(d for d in DEVICES if present(self.round + 1, d)))
        return self


def play(
    method: Method,
    rounds: int = 12,
    m: Manifest = M,
    data: Mapping[str, DeviceData] | None = None,
    trainer: Trainer | None = None,
) -> Play:
    data = data or {d: clusters(m, i) for i, d in enumerate(DEVICES)}
    return Play(method, m, rounds, data=data, trainer=trainer)


def small(**settings: Any) -> FedMap:
    return FedMap(**{"every": 2, "prune": 0.4, "epochs": 1, "batch": 20, "lr": 0.05, **settings})


def served(state: State) -> bytes:
    """The model that devices receive, float32[d], zero where pruned."""
    return np.where(unmasked(M, unpacked(M, state.mask)), state.theta, np.float32(0)).tobytes()


# --- schedules


def test_the_step_schedule_prunes_every_s_rounds_to_a_floor_and_not_after_the_last() -> None:
    method, c = FedMap(every=4, prune=0.25, floor=0.1), course(M, 40)
    left = [method.remaining(c, t, 10_000) for t in range(1, 42)]
    assert left[:4] == [10_000] * 4
    assert left[4:8] == [7500] * 4
    assert left[8:12] == [5625] * 4
    assert left[31] == round(10_000 * 0.75**7)
    assert left[36:] == [1000] * 5
    assert FedMap(every=4, floor=0.01).remaining(c, 41, 10_000) == FedMap(every=4, floor=0.01).remaining(c, 40, 10_000)


def test_the_continuous_schedule_is_the_bezier_curve_of_the_steps() -> None:
    c, method, step = course(M, 40), FedMap(floor=0.01, schedule="continuous"), FedMap(floor=0.01)
    m = 9
    for t in range(1, 41):
        u = min(max((t - 2.5) / 36, 0), 1)
        curve = sum(comb(m, i) * u**i * (1 - u) ** (m - i) * 0.75**i for i in range(m + 1))
        assert method.remaining(c, t, 10**6) == pytest.approx(max(curve, 0.01) * 10**6, abs=1)
        assert method.remaining(c, t, 10**6) == pytest.approx(step.remaining(c, t, 10**6), rel=0.25)
    assert method.remaining(c, 1, 10**6) == 10**6
    assert method.remaining(c, 40, 10**6) == step.remaining(c, 40, 10**6)
    assert FedMap(every=50, schedule="continuous").remaining(c, 40, 100) == 100


@settings(max_examples=50)
@given(
    st.integers(1, 30), st.floats(0, 0.9), st.floats(0.01, 1), st.sampled_from(["step", "continuous"]),
    st.integers(1, 60), st.integers(1, 5000),
)  # fmt: skip
def test_a_schedule_never_grows_and_always_leaves_a_weight(
    every: int, prune: float, floor: float, schedule: Any, rounds: int, size: int
) -> None:
    method = FedMap(every=every, prune=prune, floor=floor, schedule=schedule)
    left = [method.remaining(course(M, rounds), t, size) for t in range(1, rounds + 2)]
    assert all(size >= a >= b >= 1 for a, b in pairwise(left))


# --- in step


@pytest.mark.parametrize("schedule", ["step", "continuous"])
def test_masks_shrink_within_each_other_to_the_scheduled_count_and_pruned_stays_pruned(schedule: str) -> None:
    method = small(schedule=schedule)
    p = play(method).run(12)
    part = prunable(M)
    before = np.ones(part.size, np.bool_)
    for round_, state in enumerate(p.states, 1):
        mask = unpacked(M, state.mask)
        assert not (mask & ~before).any()
        assert mask.sum() == method.remaining(p.course, round_, part.size)
        assert not part.gather(state.theta)[~unpacked(M, state.final())].any()
        before = mask
    assert before.sum() < 0.2 * part.size
    for local in p.local.values():
        assert local.trained.mask is not None
        assert not local.trained.parameters[~local.trained.mask].any()
        assert local.trained.parameters[local.trained.mask].all()


def test_the_mask_is_that_of_the_papers_score_in_each_layer_under_one_threshold() -> None:
    p = play(small()).run(9)
    part = prunable(M)
    for before, after in pairwise(p.states):
        theta = before.theta.copy()
        theta[alive(M, unpacked(M, before.mask))] += after.change
        mask, w = unpacked(M, before.mask), part.gather(theta).astype(np.float64) ** 2
        scores = np.full(part.size, -1.0)
        for place in part.places:
            for i in np.flatnonzero(mask[place]) + place.start:
                scores[i] = w[i] / sum(v for v, on in zip(w[place], mask[place], strict=True) if on and v >= w[i])
        keep = int(unpacked(M, after.mask).sum())
        assert set(np.flatnonzero(unpacked(M, after.mask))) == set(np.argsort(-scores, kind="stable")[:keep])


@pytest.mark.parametrize("kind", [FedMap, FederatedPruningLamp])
@pytest.mark.parametrize("schedule", ["step", "continuous"])
def test_every_layer_keeps_its_largest_weight_however_few_the_schedule_leaves(
    kind: type[FedMap], schedule: Any
) -> None:
    """LAMP scores it 1, more than any other weight of the layer; the schedule would leave one weight of all layers."""
    method = kind(every=1, prune=0.8, floor=0.001, schedule=schedule, epochs=1, batch=20, lr=0.05)
    p = play(method).run(8)
    part, state = prunable(M), p.state
    assert method.remaining(p.course, 9, part.size) == 1
    mask = unpacked(M, state.mask)
    assert [mask[place].sum() for place in part.places] == [1, 1, 1]
    for device in DEVICES:
        assert np.array_equal(p.receive(device).mask, mask)
    assert kind is FederatedPruningLamp or set(p.ask("a").arrays) == {"change"}


def test_a_kept_weight_of_value_zero_is_not_mistaken_for_a_pruned_one() -> None:
    m = mlp(3, 2, bias=False)
    theta, mask = np.array([0, 0, 0, 1, 2, 3], np.float32), np.array([False, True, True, True, True, True])
    left = FedMap(every=1, prune=0.3, floor=0.01).pruned(course(m, 9), 2, theta, mask)
    assert left.tolist() == [False, True, False, True, True, True]


def test_only_values_travel_as_many_as_remain_and_nothing_in_the_first_round() -> None:
    p = play(small())
    assert dict(p.ask("a").arrays) == {}
    p.run(11)
    live = int(alive(M, unpacked(M, p.states[-1].mask)).sum())
    assert {n: a.shape for n, a in p.ask("a").arrays.items()} == {"change": (live,)}
    assert {n: a.shape for n, a in p.local["a"].update.arrays.items()} == {"change": (live,)}
    assert live < M.d / 2


def test_without_pruning_and_decay_it_is_federated_averaging() -> None:
    same = {"epochs": 2, "batch": 20, "lr": 0.05}
    ours = play(FedMap(prune=0, weight_decay=0, weights="samples", **same)).run(5)
    theirs = play(FedAvg(**same)).run(5)
    assert ours.state.theta == pytest.approx(theirs.state.parameters, abs=1e-5)
    assert unpacked(M, ours.state.mask).all()


def two_by_hand(method: FedMap) -> State:
    """theta = [4, -1, 2, 3] of one layer [2, 2]; devices change it by [-3, 0, 1, 0] and [-1, 0, 0, 2]."""
    p = Rounds(method, mlp(2, 2, bias=False), rounds=4)
    p.state = replace(p.state, theta=np.array([4, -1, 2, 3], np.float32))
    meta = {"fingerprint": fingerprint(p.state.mask, p.state.theta)}
    changes = (("a", [-3, 0, 1, 0], 1), ("b", [-1, 0, 0, 2], 3))
    p.close({d: Payload({"change": np.array(change, np.float32)}, {**meta, "samples": n}) for d, change, n in changes})
    assert isinstance(p.state, State)
    return p.state


def test_two_devices_by_hand_move_theta_by_the_mean_and_then_lamp_prunes_it() -> None:
    state = two_by_hand(FedMap(every=1, prune=0.5))
    assert state.change.tolist() == [-2, 0, 0.5, 1]
    assert state.theta.tolist() == [2, -1, 2.5, 4]
    assert bitset.unpack(state.mask, 4).tolist() == [False, False, True, True]


def test_devices_may_count_as_their_samples() -> None:
    state = two_by_hand(FedMap(every=1, prune=0.5, weights="samples"))
    assert state.change.tolist() == [-1.5, 0, 0.25, 1.5]


def test_kept_weights_whose_change_is_zero_make_removal_by_value_fail_and_removal_by_mask_work() -> None:
    """The paper's RWZ drops what is zero: behind a blank pixel kept weights do not change, and RFM loses its places."""
    data = {d: clusters(M, i) for i, d in enumerate(DEVICES)}
    blank = {d: replace(s, x=s.x * (np.arange(6) != 2), x_test=s.x_test) for d, s in data.items()}
    blank = {d: replace(s, x=s.x.astype(np.float32)) for d, s in blank.items()}
    p = play(small(weight_decay=0, every=3), data=blank).run(4)
    received, trained = p.received["a"], p.local["a"].trained.parameters
    live = alive(M, received.mask)
    change = trained - received.theta
    kept_but_still = live & (change == 0)
    assert kept_but_still.any()
    by_value = change[change != 0]
    assert by_value.size < live.sum()  # it cannot be put back: the receiver expects as many values as remain
    recovered = np.zeros(M.d, np.float32)
    recovered[np.flatnonzero(live)[: by_value.size]] = by_value
    assert not np.array_equal(recovered, change)
    by_mask = np.zeros(M.d, np.float32)
    by_mask[live] = p.local["a"].update.arrays["change"]
    assert np.array_equal(by_mask, change)


def test_momentum_and_decay_leave_pruned_weights_at_zero_and_shrink_kept_ones() -> None:
    still = np.zeros(M.d, np.float32)

    @dataclass
    class Still(NumpyMlp):
        def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
            return Gradient(1.0, still + 0.0, buffers)

    p = play(small(weight_decay=0.5, momentum=0.0, lr=0.1, batch=40), rounds=6)
    p.trainer = Still(M)
    p.run(4)
    received, trained = p.received["a"], p.local["a"].trained.parameters
    assert trained == pytest.approx(received.theta * 0.95, rel=1e-6)


# --- out of step


@given(st.lists(st.sets(st.sampled_from(DEVICES), min_size=1), min_size=8, max_size=8))
@settings(max_examples=15, deadline=None)
def test_after_any_pattern_of_missed_rounds_every_device_holds_the_servers_model_bit_for_bit(
    cohorts: list[set[str]],
) -> None:
    p = play(small(), rounds=8)
    for cohort in cohorts:
        p.run(1, lambda round_, device, cohort=cohort: device in cohort)  # type: ignore[misc]
        for device in cohort:
            assert p.received[device].theta.tobytes() == served(p.states[-1])
    for device in DEVICES:
        received = p.receive(device)
        assert received.theta.tobytes() == served(p.state)
        assert np.array_equal(received.mask, unpacked(M, p.state.mask))


def test_a_late_device_receives_values_and_a_coded_mask_and_holds_the_same_as_one_in_step() -> None:
    p = play(small()).run(7, lambda round_, device: device != "c" or round_ == 1)
    arrays = p.ask("c").arrays
    assert set(arrays) == {"values", MASK}
    assert arrays["values"].size == alive(M, unpacked(M, p.state.mask)).sum()
    late, in_step = p.receive("c"), p.receive("a")
    assert late.theta.tobytes() == in_step.theta.tobytes() == served(p.state)
    assert np.array_equal(late.mask, in_step.mask)
    assert p.method.audience(p.course, 8, p.records["c"]) == p.method.audience(p.course, 8, None) == "whole"


def lost_cases() -> dict[str, Callable[[Kept], Kept | None]]:
    def bump(k: Kept) -> Kept:
        values = k.values.copy()
        values[0] = np.nextafter(values[0], np.float32(9))
        return replace(k, values=values)

    def other_mask(k: Kept) -> Kept:
        mask = bitset.unpack(k.mask, prunable(M).size)
        on, off = np.flatnonzero(mask)[0], np.flatnonzero(~mask)[0]
        mask[[on, off]] = False, True
        return replace(k, mask=bitset.pack(mask))

    return {
        "nothing kept": lambda k: None,
        "an older round": lambda k: replace(k, round=k.round - 1),
        "one value differs in its last bit": bump,
        "another mask": other_mask,
    }


@pytest.mark.parametrize("case", list(lost_cases()))
def test_a_device_that_does_not_hold_the_model_is_lost_and_then_receives_everything(case: str) -> None:
    p = play(small()).run(5)
    p.kept["a"] = lost_cases()[case](p.kept["a"])
    with pytest.raises(LostError):
        p.receive("a")
    p.lose("a")  # what the server does then
    assert p.receive("a").theta.tobytes() == served(p.state)


@pytest.mark.parametrize("kind", [FedMap, FederatedPruningLamp])
def test_statistics_are_averaged_or_stay_on_the_device(kind: type[FedMap]) -> None:
    m = counted(M)
    for how, due in (("mean", 60.0), ("local", 0.0)):
        data = {d: clusters(m, i, count=n) for i, (d, n) in enumerate(zip(DEVICES, (30, 60, 90), strict=True))}
        p = play(kind(epochs=1, batch=20, statistics=how), m=m, data=data, trainer=CountingSamples(m)).run(1)
        assert p.state.buffers.tolist() == [due, due]
        p.run(2, lambda round_, device: device != "c")
        assert ("buffers" in p.local["a"].update.arrays) == ("buffers" in p.ask("c").arrays) == (how == "mean")
        assert p.receive("a").buffers.tolist() == ([60 + 90.0] * 2 if how == "mean" else [90.0] * 2)
        assert p.receive("c").buffers.tolist() == ([60 + 90.0] * 2 if how == "mean" else [90.0] * 2)
        model, a, before = p.personal("a"), Assignment(p.course, p.round, "a"), p.states[-1]
        assert p.method.of_device(p.course, p.state, p.records["a"], model) is (model if how == "mean" else None)
        update = p.method.read_update(a, before, p.records["a"], p.local["a"].update)
        moved = p.method.influence(a, before, update).statistics
        assert moved == pytest.approx(30 * 2**0.5 if how == "mean" else 0)  # a batch of 20 and one of 10


@pytest.mark.parametrize(("rounds", "changed", "played"), [(4, 8, 4), (8, 12, 2), (8, 5, 3)])
@pytest.mark.parametrize("schedule", ["step", "continuous"])
def test_devices_stay_in_step_when_the_operator_changes_the_number_of_rounds(
    schedule: Any, rounds: int, changed: int, played: int
) -> None:
    p = play(small(every=2, schedule=schedule), rounds=rounds).run(played)
    p.course = replace(p.course, rounds=changed)
    for _ in range(changed - played):
        p.run(1)
        assert p.took_part == list(DEVICES)
        assert p.receive("a").theta.tobytes() == served(p.state)
    assert set(p.ask("a").arrays) == {"change"}


@pytest.mark.parametrize("schedule", ["step", "continuous"])
def test_a_run_too_short_for_the_first_pruning_is_cautioned_against(schedule: Any) -> None:
    method, prunable_ = FedMap(every=4, schedule=schedule), prunable(M).size
    for rounds in (4, 5):
        c = course(M, rounds)
        whole = method.remaining(c, rounds, prunable_) == prunable_
        said = "every = 4, but rounds = 4: nothing is pruned; raise rounds above every" if whole else None
        assert whole is (rounds == 4)
        assert method.caution(c) == said


# --- FedDR


def test_momentum_beside_the_splitting_is_cautioned_against() -> None:
    c, dr = course(M), DouglasRachford()
    assert "momentum = 0.9 carries a device's model beyond its optimum" in str(FedMap(dr=dr).caution(c))
    assert FedMap(dr=dr, momentum=0).caution(c) is None
    assert FedMap().caution(c) is None


def test_the_splitting_is_the_papers_three_steps() -> None:
    """y = M y + alpha (theta - M x); x by two proximal gradient steps; the update is 2 x - y less theta, at M."""
    eta, alpha, lr = 0.5, 1.2, 0.05
    p = play(small(dr=DouglasRachford(eta=eta, alpha=alpha), momentum=0, weight_decay=0, batch=40, epochs=2))
    x = {d: p.state.theta.astype(np.float64) for d in DEVICES}
    y = {d: p.state.theta.astype(np.float64) for d in DEVICES}
    for _ in range(6):
        p.run(1)
        for d in DEVICES:
            live, theta = alive(M, p.received[d].mask), p.received[d].theta.astype(np.float64)
            y[d] = live * y[d] + alpha * (theta - live * x[d])
            a, x[d] = Assignment(p.course, len(p.states), d), y[d]
            for batch in Task(a, p.trainer, p.data[d], 0).batches(2, 40):
                g = p.trainer.gradient(x[d].astype(np.float32), p.state.buffers, batch.x, batch.y).parameters
                x[d] = x[d] - lr * live * (g + (x[d] - y[d]) / eta)
            assert p.local[d].update.arrays["change"] == pytest.approx((2 * x[d] - y[d] - theta)[live], abs=1e-5)
            assert p.local[d].trained.parameters == pytest.approx(x[d], abs=1e-5)
    assert (~live).any()


def test_the_proximal_term_pulls_towards_y() -> None:
    free, held = (
        play(small(dr=DouglasRachford(eta=eta), momentum=0, every=9, epochs=5)).run(1).local["a"].trained.parameters
        for eta in (1e9, 0.1)
    )
    start = course(M).model.parameters
    assert np.linalg.norm(held - start) < 0.6 * np.linalg.norm(free - start)


@pytest.mark.parametrize("present", [everyone, lambda round_, d: round_ == 1 or d != "abc"[round_ % 3]])
def test_theta_is_the_mean_of_all_last_reflections_at_the_mask(present: Present) -> None:
    p, last = play(small(dr=DouglasRachford(), weights="samples")), dict[str, F32]()
    for _ in range(8):
        p.run(1, present)
        for d, local in p.local.items():
            last[d] = p.received[d].theta.copy()
            last[d][alive(M, p.received[d].mask)] += local.update.arrays["change"]
        weights = [len(p.data[d].y) for d in last]
        due = np.average(list(last.values()), axis=0, weights=weights)
        live = alive(M, unpacked(M, p.state.mask))
        assert p.state.theta[live] == pytest.approx(due[live], abs=1e-5)
    assert (~live).any()


def test_a_device_that_lost_its_model_takes_its_reflection_out_of_the_mean_with_its_next_update() -> None:
    p = play(small(dr=DouglasRachford())).run(3)
    del p.kept["a"]
    with pytest.raises(LostError):
        p.receive("a")
    p.lose("a")
    assert set(p.ask("a").arrays) >= {"values", MASK}
    p.run(3)
    assert p.state.weight == 3
    due = np.mean([p.records[d].last.values for d in "abc"], axis=0)
    live = alive(M, unpacked(M, p.state.mask))
    assert p.state.theta[live] == pytest.approx(due[live], abs=1e-5)
    assert small().lost(replace(p.records["a"], last=None)) is None


def test_the_variants_switch_at_their_pruning() -> None:
    c1 = DouglasRachford(later="fedavg")
    assert c1.after(0) is c1
    assert c1.after(1) is None
    c2 = DouglasRachford(eta=10, alpha=1.2, later_alpha=1.75, switch=2)
    assert c2.after(1) is c2
    after = c2.after(2)
    assert after is not None
    assert (after.eta, after.alpha) == (10, 1.75)
    looser = DouglasRachford(eta=10, alpha=1.2, later_eta=1000).after(1)
    assert looser is not None
    assert (looser.eta, looser.alpha) == (1000, 1.2)
    switched = play(small(dr=c1, every=2)).run(3)
    assert switched.kept["a"].splitting is None
    first = play(small(dr=c1, every=2)).run(2)
    assert first.kept["a"].splitting is not None
    method = make_method({"name": "fedmap", "dr": {"eta": 10, "later_alpha": 1.75}, "weights": "samples"})
    assert make_method({"name": "fedmap", **method.model_dump(mode="json")}) == method
    with pytest.raises(ConfigError, match="eta"):
        make_method({"name": "fedmap", "dr": {"eta": 0}})


# --- hostile


def changed(update: Payload, arrays: Arrays | None = None, **meta: Any) -> Payload:
    return Payload({**update.arrays, **(arrays or {})}, {**update.meta, **meta})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"samples": 0}, "samples"),
        ({"fingerprint": "0123456789abcdef"}, "0123456789abcdef"),
        ({"fingerprint": None}, "None"),
    ],
)
def test_an_update_of_no_samples_or_for_another_model_is_refused(change: dict[str, Any], word: str) -> None:
    p = play(small()).run(1)
    a, state = Assignment(p.course, 1, "a"), p.states[0]
    update = p.local["a"].update
    p.method.read_update(a, state, None, update)
    with pytest.raises(PayloadError, match=word):
        p.method.read_update(a, state, None, changed(update, **change))


def test_a_change_that_overflows_a_parameter_is_refused() -> None:
    p = play(small()).run(1)
    top = np.float32(np.finfo(np.float32).max)
    state = replace(p.states[0], theta=np.full(M.d, top, np.float32))
    meta = {"samples": 1, "fingerprint": fingerprint(state.mask, state.theta)}
    with pytest.raises(PayloadError, match="infinite"):
        p.method.read_update(Assignment(p.course, 1, "a"), state, None, Payload({"change": state.theta}, meta))


@pytest.mark.parametrize(
    "arrays",
    [
        {MASK: np.zeros(3, np.uint8)},
        {MASK: np.full(9, 255, np.uint8)},
        {MASK: np.zeros((2, 2), np.uint8)},
        {MASK: np.zeros(3, np.float32)},
        {"values": np.zeros(3, np.float32)},
        {"change": np.zeros(3, np.float32)},
    ],
)
def test_a_malformed_whole_downlink_is_refused(arrays: Arrays) -> None:
    p = play(small()).run(5)
    down = changed(p.method.downlink(p.course, 6, p.state, None), arrays)
    with pytest.raises(PayloadError):
        p.method.receive(Assignment(p.course, 6, "a"), None, down)


def test_a_whole_downlink_that_is_not_what_it_says_is_damaged_and_not_lost() -> None:
    p = play(small()).run(5)
    down = p.method.downlink(p.course, 6, p.state, None)
    with pytest.raises(PayloadError, match="pruned model") as error:
        p.method.receive(
            Assignment(p.course, 6, "a"), None, changed(down, {"values": down.arrays["values"] + np.float32(1)})
        )
    assert not isinstance(error.value, LostError)


def test_a_downlink_of_nothing_is_refused_after_the_first_round() -> None:
    p = play(small()).run(2)
    with pytest.raises(PayloadError):
        p.method.receive(Assignment(p.course, 3, "a"), p.kept["a"], Payload({}, p.ask("a").meta))


def test_influence_is_the_norm_of_the_change_and_limited_scales_it() -> None:
    p = play(small()).run(1)
    a = Assignment(p.course, 1, "a")
    update = p.method.read_update(a, p.states[0], None, p.local["a"].update)
    influence = p.method.influence(a, p.states[0], update)
    assert (influence.norm, influence.weight) == (pytest.approx(float(np.linalg.norm(update.change)), rel=1e-6), 1.0)
    half = p.method.limited(a, p.states[0], update, 0.5, 0.25)
    assert half.change.tolist() == (update.change / 2).tolist()
    assert half.weight == 0.25


def test_the_personal_model_is_the_pruned_global_one() -> None:
    p = play(small()).run(5)
    received: Received = p.receive("b")
    task = Task(Assignment(p.course, 6, "b"), p.trainer, p.data["b"], 0)
    personal = p.method.personal(task, p.kept["b"], received)
    assert personal.parameters.tobytes() == p.state.theta.tobytes()
    assert personal.mask is not None
    assert (~personal.mask).sum() == (~received.mask).sum() > 0


# --- FederatedPruning by LAMP: what it does otherwise


def lin(**settings: Any) -> FederatedPruningLamp:
    return FederatedPruningLamp(**{"every": 2, "prune": 0.4, "epochs": 1, "batch": 20, "lr": 0.05, **settings})


def test_federated_pruning_keeps_pruned_values_and_takes_weights_up_again() -> None:
    p = play(lin(floor=0.6, weight_decay=1.0)).run(12)  # kept weights shrink, pruned ones do not
    part, back = prunable(M), 0
    for before, after in pairwise(p.states):
        gone = ~unpacked(M, before.mask)
        assert np.array_equal(part.gather(after.theta)[gone], part.gather(before.theta)[gone])
        back += int((unpacked(M, after.mask) & gone).sum())
    assert back > 0
    for round_, state in enumerate(p.states, 1):
        mask = unpacked(M, state.mask)
        assert mask.sum() == p.method.remaining(p.course, round_, part.size)
        assert (round_ % 2 == 1) or np.array_equal(mask, unpacked(M, p.states[round_ - 2].mask))


def test_federated_pruning_keeps_the_largest_lamp_scores_of_the_whole_model_and_not_the_largest_weights() -> None:
    p = play(lin()).run(9)
    part, chosen = prunable(M), []
    for state in p.states[2::2]:  # at the start of a period, the model is the one that the mask was picked from
        w = part.gather(state.theta).astype(np.float64) ** 2
        scores = np.concatenate([[v / w[place][w[place] >= v].sum() for v in w[place]] for place in part.places])
        mask = unpacked(M, state.mask)
        lamp, magnitude = (set(np.argsort(-s, kind="stable")[: mask.sum()]) for s in (scores, w))
        assert set(np.flatnonzero(mask)) == lamp
        chosen.append(lamp != magnitude)
    assert chosen == [True] * 4


def test_federated_pruning_sends_the_mask_to_devices_that_do_not_hold_it() -> None:
    def without_c(round_: int, device: str) -> bool:
        return device != "c" or round_ < 3

    p = play(lin()).run(3, without_c)
    assert set(p.ask("a").arrays) == {"values"}
    assert set(p.ask("c").arrays) == {"values", MASK}
    p.run(1, without_c)
    assert set(p.ask("a").arrays) == {"values", MASK}
    for device in "ac":
        received = p.receive(device)
        mask = unpacked(M, p.state.mask)
        assert np.array_equal(received.mask, mask)
        assert received.theta.tobytes() == served(p.state)


@pytest.mark.parametrize("schedule", ["step", "continuous"])
def test_the_last_model_of_federated_pruning_has_the_mask_that_it_was_trained_under(schedule: str) -> None:
    p = play(lin(schedule=schedule), rounds=8).run(8)
    trained = p.received["a"].mask
    assert np.array_equal(p.receive("a").mask, trained)
    assert not np.array_equal(p.method.chosen(p.course, 8, p.state.theta), trained)  # another pick would differ


def test_a_mask_is_coded_given_the_layer() -> None:
    p = play(small()).run(4)
    mask, sizes = unpacked(M, p.state.mask), [b.size for b in prunable(M).blocks]
    layers = np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes)
    data = p.ask("new").arrays[MASK].tobytes()
    assert data == codecs.encode("entropy", mask, mask.size, layers)
    assert data != codecs.encode("entropy", mask, mask.size, np.zeros_like(layers))


def test_a_device_of_federated_pruning_may_keep_its_statistics() -> None:
    m = M.model_copy(update={"buffers": (Tensor(name="n", shape=(1,), offset=0, init=Init(kind="constant", scale=7)),)})
    p = play(lin(statistics="local"), m=m).run(2)
    p.kept["a"] = replace(p.kept["a"], buffers=np.ones(1, np.float32))
    assert [p.receive(d).buffers.tolist() for d in "ad"] == [[1], [7]]


def test_a_device_of_federated_pruning_without_the_mask_is_lost() -> None:
    p = play(lin()).run(3)
    held = p.kept["a"]
    mask = unpacked(M, held.mask)
    for kept in (None, replace(held, mask=bitset.pack(~mask)), replace(held, mask=bitset.pack(mask[::-1]))):
        p.kept["a"] = kept
        with pytest.raises(LostError):
            p.receive("a")


@pytest.mark.parametrize("method", [small(), lin(), lin(schedule="continuous")])
def test_a_pruning_that_falls_to_a_round_without_an_update_is_made_up_for(method: FedMap) -> None:
    p = play(method, rounds=6).run(6, lambda round_, device: round_ not in (2, 3) and (device != "c" or round_ == 1))
    counts = [int(unpacked(M, state.mask).sum()) for state in p.states]
    due = [method.remaining(p.course, round_, prunable(M).size) for round_ in range(1, 7)]
    assert counts[4:] == due[4:]
    for device in "abc":
        assert p.receive(device).mask.sum() == due[5]


@pytest.mark.parametrize("method", [small(schedule="continuous"), lin(schedule="continuous")])
def test_the_final_model_has_the_mask_that_it_was_trained_under_when_the_operator_ends_early(method: FedMap) -> None:
    p = play(method, rounds=12).run(5)
    p.course = replace(p.course, rounds=6)  # the new schedule would leave fewer weights by now
    p.run(1)
    trained = p.received["a"].mask
    assert method.keep_count(p.course, 6) < trained.sum()
    for device in DEVICES:
        assert (p.receive(device).mask == trained).all()


@pytest.mark.parametrize("gone", [1, 3])
@pytest.mark.parametrize("schedule", ["step", "continuous"])
@pytest.mark.parametrize("kind", [small, lin])
def test_the_final_model_is_the_one_trained_last_also_when_the_last_rounds_count_no_update(
    kind: Callable[..., FedMap], schedule: str, gone: int
) -> None:
    p = play(kind(every=1, prune=0.2, schedule=schedule), rounds=8).run(8 - gone)
    shorter = play(p.method, rounds=8).run(7 - gone)
    shorter.course = replace(p.course, rounds=8 - gone)  # after the next round none follows, so nothing is pruned
    shorter.run(1)
    pruned = p.receive("a").mask
    p.run(gone, lambda round_, device: False)
    for device in "abd":
        final = p.personal(device)
        assert final.parameters.tobytes() == shorter.personal(device).parameters.tobytes()
        assert final.mask is not None
        assert prunable(M).gather(final.mask).sum() > pruned.sum()


def test_in_a_new_period_without_an_update_since_the_old_devices_get_its_mask_at_once() -> None:
    p, seen = play(lin()).run(1), []
    for _ in range(2):
        seen.append(int(p.receive("a").mask.sum()))
        p.run(1, lambda round_, device: round_ != 2)
    assert seen == [prunable(M).size, lin().remaining(p.course, 3, prunable(M).size)]
    assert set(p.ask("a").arrays) == {"values"}  # the mask of round 3 still stands


def test_federated_pruning_has_no_splitting() -> None:
    with pytest.raises(ConfigError, match="dr"):
        make_method({"name": "federated_pruning_lamp", "dr": {"eta": 1}})
