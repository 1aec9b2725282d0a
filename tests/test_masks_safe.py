"""Mask methods on a pre-trained bundle begin at its accuracy and do not drift away from it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_fleet import DEVICES, M, MaskFleet, own_mask, steady
from numpy.typing import NDArray
from numpy_mlp import assignment, course, mlp, model, task

from edge_client.bundle import Model
from edge_client.errors import ConfigError
from edge_client.methods import make_method
from edge_client.methods.coupled import Coupled
from edge_client.methods.deltamask import DeltaMask
from edge_client.methods.fedpm import FedPM
from edge_client.methods.shared.bernoulli import BernoulliMasks
from edge_client.methods.shared.theta import Posterior, stepped, steps
from edge_client.task import Assignment

TRAINED = M.model_copy(update={"seed": None})
EVERY: list[type[BernoulliMasks]] = [FedPM, DeltaMask, Coupled]


def with_new_head() -> Model:
    """The pre-trained model with a head of zeros."""
    m = model(TRAINED)
    values = m.parameters.copy()
    for name in ("2.w", "2.b"):
        values[TRAINED.tensors[name].span] = 0
    return replace(m, parameters=values)


@pytest.mark.parametrize("make", EVERY)
def test_the_first_model_is_the_pre_trained_one(make: type[BernoulliMasks]) -> None:
    fleet = MaskFleet(make(), TRAINED)
    t = task(TRAINED, "a")
    personal = fleet.method.personal(t, None, fleet.receive("a"))
    np.testing.assert_allclose(personal.parameters, model(TRAINED).parameters, rtol=1e-6)
    fleet.play(*DEVICES)
    head = TRAINED.tensors["2.w"].span
    assert (fleet.local["a"].trained.parameters[head] == model(TRAINED).parameters[head]).all()  # kept, not probed


def test_a_head_of_zeros_is_new_and_probed_and_a_seed_means_random_weights() -> None:
    assert FedPM().head_of(model(TRAINED)) == "keep"
    assert FedPM().head_of(with_new_head()) == "probe"
    assert FedPM().head_of(model(M)) == "probe"
    assert FedPM(head="mask").head_of(model(TRAINED)) == "mask"


def test_convolutions_of_a_pre_trained_bundle_are_masked_only_when_named() -> None:
    first = TRAINED.layers[0].model_copy(update={"kind": "conv2d"})
    m = TRAINED.model_copy(update={"layers": (first, *TRAINED.layers[1:])})
    assert [b.name for b in FedPM().masked(model(m)).blocks] == ["1.w"]
    assert [b.name for b in FedPM(layers=("0",)).masked(model(m)).blocks] == ["0.w"]
    only = m.model_copy(update={"layers": (first, TRAINED.layers[2])})
    with pytest.raises(ConfigError, match=r"\[export\] seed = 1 .* only linear .* choose `layers` from \['0'\]"):
        FedPM().masked(model(only))
    with pytest.raises(ConfigError, match='is trained, and head = "keep" does not mask that'):
        FedPM().masked(model(m.model_copy(update={"layers": (TRAINED.layers[2],)})))


@pytest.mark.parametrize("make", [Coupled, DeltaMask])
def test_without_anything_to_learn_theta_stays_by_differences_and_drifts_by_the_posterior(make: Any) -> None:
    thetas: dict[str, Any] = {}
    for how in ("difference", "posterior"):
        fleet = MaskFleet(make(aggregate=how), TRAINED, trainer=steady(TRAINED))
        for _ in range(4):
            fleet.play(*DEVICES)
        thetas[how] = fleet.theta()
    assert (thetas["difference"] == 0.95).all()
    assert (thetas["posterior"] != 0.95).all()


@pytest.mark.parametrize(
    ("theta0", "how", "due"), [(0.95, "difference", 0.87), (0.95, "posterior", 0.80), (0.5, "difference", 0.5)]
)
def test_a_signal_without_a_direction_moves_theta_inwards_where_steps_outwards_are_cut_off(
    theta0: float, how: Any, due: float
) -> None:
    """The figures of docs/methods/deltamask.md."""
    method = DeltaMask(theta0=theta0, aggregate=how, layers=("0", "1"))
    rng, c = np.random.default_rng(0), replace(course(mlp(100, 100, 100, 3, bias=False)), cohort=10)
    n = method.exchanged(c)
    posterior = Posterior(np.zeros(n, np.uint32), 0)
    for round_ in range(1, 26):
        theta = method.theta(c, posterior)
        reference, net = np.zeros(n, np.int64), np.zeros(n, np.int64)
        for _ in range(10):
            u, room = rng.random(n), np.minimum(0.03, np.minimum(theta, 1 - theta))
            own = theta + room * rng.choice([-1, 1], n)
            reference += u < theta
            net += (u < own).astype(np.int64) - (u < theta)
        posterior = method.advanced(c, round_, posterior, reference, net, 10)
    assert method.theta(c, posterior).mean() == pytest.approx(due, abs=0.01)


def test_a_filter_by_differences_is_cautioned_against_and_is_the_default_elsewhere() -> None:
    trained, untrained = course(TRAINED), course(M)
    assert "false positives of codec 'fuse8'" in str(DeltaMask(codec="fuse8").caution(trained))
    assert DeltaMask(codec="fuse8").caution(untrained) is None
    assert DeltaMask().caution(trained) is None
    assert DeltaMask().codec_of(trained.model) == "entropy"
    assert (
        DeltaMask().codec_of(untrained.model) == DeltaMask(aggregate="posterior").codec_of(trained.model) == "fuse8-png"
    )


def test_theta_moves_by_the_mean_of_mask_less_reference() -> None:
    fleet = MaskFleet(Coupled(lr=0.5), TRAINED)
    fleet.play(*DEVICES)
    net = np.zeros(fleet.method.exchanged(fleet.course), np.int64)
    for d in DEVICES:
        a = assignment(TRAINED, d, 1)
        u = _uniforms(fleet, a)
        net += own_mask(fleet, d).astype(np.int64) - (u < 0.95)
    assert net.any()
    np.testing.assert_array_equal(fleet.theta(), np.clip(0.95 + net / 3, 0.01, 0.99))


@pytest.mark.parametrize("cohort", [1, 3, 7, 10, 20, 50, 100, 1000])
@pytest.mark.parametrize(("theta0", "clip"), [(0.95, 0.01), (0.95, 0.008), (0.5, 0.01), (0.5, 0.4), (0.3, 0.05)])
def test_the_steps_of_theta_reach_both_ends_and_each_step_inwards_moves_it(
    theta0: float, clip: float, cohort: int
) -> None:
    method, c = Coupled(theta0=theta0, clip=clip), replace(course(TRAINED), cohort=cohort)
    below, top = method.ends(c)
    theta = method.theta(c, Posterior(np.arange(top + 1, dtype=np.uint32), top))
    assert [theta[0], theta[below], theta[-1]] == pytest.approx([clip, theta0, 1 - clip])
    moved = np.diff(theta)
    assert (moved > 1e-6).all()
    np.testing.assert_allclose(moved[1:-1], 1 / cohort)


def _uniforms(fleet: MaskFleet, a: Assignment) -> NDArray[np.float64]:

    assert isinstance(fleet.method, Coupled)
    return counter.uniform(fleet.method.stream(a), fleet.method.exchanged(a.course))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sets(st.sampled_from(DEVICES), min_size=1), min_size=2, max_size=6), st.sampled_from([0, 64]))
def test_both_sides_hold_the_same_counts_whatever_rounds_a_device_missed(
    rounds: list[set[str]], references: int
) -> None:
    fleet = MaskFleet(Coupled(lr=0.5, references=references), TRAINED)
    for took_part in rounds:
        fleet.play(*sorted(took_part))
        for d in DEVICES:
            received = fleet.receive(d)
            assert (received.posterior.ones == fleet.state.posterior.ones).all()
            assert (received.theta == fleet.theta()).all()


def test_steps_end_at_the_lowest_and_at_the_highest_theta() -> None:
    """theta0 = .95 in steps of a tenth: ten below it and one above. Devices all down, all up, and in between."""
    none = Posterior(np.zeros(5, np.uint32), 0)
    ends = steps(0.95, 10, 0.01)
    assert ends == (10, 11)
    first = stepped(none, ends, 10, np.array([-10, -9, 0, 1, 10]), 10, 0)
    assert (first.ones.tolist(), first.masks) == ([0, 1, 10, 11, 11], 11)
    then = stepped(first, ends, 10, np.array([-1, 2, -10, -2, 0]), 10, 0)
    assert then.ones.tolist() == [0, 3, 0, 9, 11]


def test_a_partial_cohort_moves_theta_as_far_in_expectation() -> None:
    method, c = Coupled(aggregate="difference"), MaskFleet(Coupled(), TRAINED).course
    net = np.ones(20_000, np.int64)
    before = Posterior(np.zeros(net.size, np.uint32), method.ends(c)[1])
    after = method.advanced(c, 1, before, np.zeros(net.size, np.int64), net, 2)  # two of three devices, both up once
    assert abs(after.ones.mean() - 1.5) < 0.02


def test_differences_need_a_reference_and_one_first_theta() -> None:
    with pytest.raises(ValueError, match="needs a reference mask"):
        FedPM(aggregate="difference")
    for sampling in ("independent", "common"):
        with pytest.raises(ValueError, match="needs a reference mask"):
            DeltaMask(aggregate="difference", sampling=sampling)
    with pytest.raises(ValueError, match="set spread = 0"):
        Coupled(aggregate="difference", spread=1.0)


@pytest.mark.parametrize(("name", "named"), [("fedpm", True), ("deltamask", True), ("coupled", True), ("bnn", False)])
def test_a_network_of_which_masks_leave_out_most_is_named_before_round_1(name: str, named: bool) -> None:
    m = mlp(6, 5, 4, 3)  # 35, 24 and 15 parameters
    few = m.model_copy(update={"layers": m.layers[1:]})  # as if the first layer were a GRU: it can have no mask
    method, rest = make_method({"name": name}), "stay as the bundle has them" if named else "stay on the device"
    said = str(method.caution(course(few, 4)))
    assert re.search(rf"^only \d+ of 74 trainable parameters have masks: weights of .*; the others {rest}", said)
    assert method.caution(course(m, 4)) is None
    if named:  # the user chose what is masked
        assert make_method({"name": name, "layers": [few.layers[0].name]}).caution(course(few, 4)) is None
