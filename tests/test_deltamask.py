"""DeltaMask: which changes travel, against which reference mask, and what the server makes of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, codecs, counter
from edge_kernels.coupling import coupling_contexts
from edge_kernels.folding import Tally
from mask_fleet import DEVICES, MASKED, M, MaskFleet, local_round, own_mask, steady, steady_task
from numpy_mlp import assignment, course, mlp, secret
from rounds import stored

from edge_client.errors import ConfigError, PayloadError
from edge_client.methods import make_method
from edge_client.methods.deltamask import DeltaMask, most_telling
from edge_client.methods.shared.bernoulli import Votes
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment
from edge_client.training.gates import sigmoid


def test_the_changes_kept_are_those_with_the_largest_divergence() -> None:
    flips = np.array([True, True, False, True, True])
    own, theta = np.array([0.9, 0.5, 0.9, 0.6, 0.1]), np.array([0.1, 0.5, 0.1, 0.5, 0.5])
    assert most_telling(flips, own, theta, 0.5).tolist() == [True, False, False, False, True]
    assert most_telling(flips, own, theta, 1.0).tolist() == flips.tolist()
    # .8 of four changes is 3.2, .7 of them 2.8: the nearest whole number is sent.
    assert [int(most_telling(flips, own, theta, kappa).sum()) for kappa in (0.8, 0.7, 0.1)] == [3, 3, 0]


def test_divergence_is_of_the_device_from_the_server_and_not_back() -> None:
    # KL(.5 || .01) = 1.61 and KL(.9 || .4) = .55; the other way round they are .64 and .75.
    own, theta = np.array([0.5, 0.9]), np.array([0.01, 0.4])
    assert most_telling(np.ones(2, np.bool_), own, theta, 0.5).tolist() == [True, False]


def test_kappa_goes_along_half_a_cosine() -> None:
    method = DeltaMask(kappa=0.8, kappa_end=1.0)
    shares = [method.kappa_at(assignment(M, round_=r, rounds=6)) for r in (2, 4, 6)]
    assert shares == pytest.approx([0.8, 0.9, 1.0])
    # A quarter of the way the cosine is at 1 - .2 (1 + cos 45 degrees) / 2.
    assert method.kappa_at(assignment(M, round_=3, rounds=6)) == pytest.approx(1 - 0.2 * (1 + 0.5**0.5) / 2)
    assert DeltaMask().kappa_at(assignment(M, round_=5)) == 0.8


def masks(*bit: int) -> Votes:
    """Masks that are all ones or all zeros."""
    found = Tally(MASKED)
    for b in bit:
        found.add(bits.pack(np.full(MASKED, b)))
    return Votes(found, np.zeros(MASKED, np.int64))


def test_an_update_has_the_share_of_changes_of_its_round() -> None:
    """Independent draws at theta = .7 differ in .42 of the elements, the same ones whatever kappa is."""

    def changes(round_: int, **kappa: float) -> int:
        data = one_update(DeltaMask(sampling="independent", codec="bits", **kappa), "a", round_).arrays["changes.bits"]
        return int(codecs.decode_mask("bits", data.tobytes(), MASKED).sum())

    for round_, share in ((2, 0.4), (5, 1.0)):
        assert changes(round_, kappa=0.4, kappa_end=1.0) == round(share * changes(round_, kappa=1.0)) > 0


def test_algorithm_2_to_the_letter_weighs_each_round_by_its_own_cohort() -> None:
    # A round of three masks, all ones, then one of a single one: alpha = 1 + 3/3 + 1/1, beta = 1 + (3 - 1) + (1 - 1).
    method = DeltaMask(
        tally="mean", posterior="mean", reset_every=3
    )  # round 1 probes, so round 4 is the third of masks
    state = method.start(course(M))

    def after(round_: int, *bit: int) -> set[float]:
        nonlocal state
        state = stored(method.finish(course(M), round_, DEVICES[: len(bit)], state, masks(*bit))[0])
        return set(method.theta(course(M), state.posterior))

    assert after(2, 1, 1, 1) == {2 / 5}
    assert after(3, 1) == {3 / 6}
    # Thirds do not add up to whole numbers in counts of ones: 1/3 + 1/2, of five masks.
    after(4, 1, 0, 0)
    assert after(5, 0, 1).pop() == pytest.approx((1 + 1 / 3 + 1 / 2) / 7, rel=1e-15)


def test_algorithm_2_to_the_letter_is_the_same_on_both_sides_and_bounds_theta() -> None:
    fleet = MaskFleet(DeltaMask(tally="mean", posterior="mean"))
    for _ in range(3):
        fleet.play(*DEVICES)
    theta = fleet.theta().astype(np.float32)
    assert (fleet.receive("a").theta.astype(np.float32) == theta).all()
    assert 1 / 5 - 1e-6 < theta.min() < theta.max() < 2 / 5 + 1e-6


def test_literal_algorithm_2_needs_its_own_mean() -> None:
    with pytest.raises(ConfigError, match="posterior"):
        make_method({"name": "deltamask", "tally": "mean"})
    make_method({"name": "deltamask", "tally": "mean", "prior": 2})


@pytest.mark.parametrize("sampling", ["independent", "common", "device", "stratified"])
@pytest.mark.parametrize("codec", ["bits", "rice", "entropy", "auto"])
def test_an_exact_codec_gives_the_server_the_very_mask(sampling: Any, codec: Any) -> None:
    fleet = MaskFleet(DeltaMask(sampling=sampling, codec=codec, kappa=1.0))
    for _ in range(3):
        fleet.play(*DEVICES)
    for d in DEVICES:
        assert (fleet.masks[d] == own_mask(fleet, d)).all()


@pytest.mark.parametrize("codec", ["fuse8", "fuse8-png"])
def test_a_filters_false_positives_are_flipped_too(codec: Any) -> None:
    big = mlp(300, 100, 3)
    fleet = MaskFleet(DeltaMask(codec=codec, sampling="independent"), big)
    fleet.play("a")
    fleet.play("a")
    wrong = fleet.masks["a"] != own_mask(fleet, "a")
    assert 0.4 / 256 < wrong.mean() < 2.5 / 256
    positions = codecs.decode(codec, fleet.local["a"].update.arrays[f"changes.{codec}"].tobytes(), 30_000)
    u = counter.uniform(counter.key(3, "uniforms", 2), 30_000)
    reference = u < np.float64(np.float32(0.95))
    assert (np.flatnonzero(fleet.masks["a"] ^ reference) == positions).all()


def test_shared_uniforms_leave_fewer_changes_to_send() -> None:
    sent = {}
    for sampling in ("independent", "device"):
        fleet = MaskFleet(DeltaMask(sampling=sampling, codec="rice"))
        fleet.play(*DEVICES)
        fleet.play(*DEVICES)
        sent[sampling] = fleet.local["a"].update.arrays["changes.rice"].nbytes
    assert sent["device"] < sent["independent"]


def test_common_uniforms_are_the_same_for_all_and_others_are_not() -> None:
    for sampling, same in (("common", True), ("device", False)):
        method = DeltaMask(sampling=sampling)  # type: ignore[arg-type]
        u = [method.uniforms(assignment(M, d), 50) for d in "ab"]
        assert (u[0] == u[1]).all() == same


def test_stratified_uniforms_of_a_cohort_are_those_of_the_round_a_share_of_the_cohort_apart() -> None:
    c = course(M)
    u = [DeltaMask(sampling="stratified").uniforms(Assignment(c, 1, "a", place), 50) for place in range(c.cohort)]
    shared = DeltaMask(sampling="common").uniforms(Assignment(c, 1, "b"), 50)
    due = [(shared + (place + 0.5) / c.cohort) % 1 for place in range(c.cohort)]
    assert np.array_equal(u, due)
    assert np.diff(np.sort(u, axis=0), axis=0) == pytest.approx(1 / c.cohort)  # one of each in every 1 / cohort


def one_update(method: DeltaMask, device: str, round_: int = 2) -> Payload:
    """The update of a device whose training changes nothing: theta is .7 everywhere."""
    down = Payload({"theta": np.full(MASKED, 0.7, np.float32), "head": np.zeros(39, np.float32)})
    return local_round(method, steady_task(steady(), device, round_), None, down).update


def test_independent_devices_draw_with_their_secret_randomness() -> None:
    method = DeltaMask(sampling="independent", codec="bits", kappa=1.0)
    theta = np.full(MASKED, np.float32(0.7), np.float64)
    reference = counter.uniform(counter.key(3, "uniforms", 2), MASKED) < theta
    own = sigmoid(np.log(theta / (1 - theta)).astype(np.float32))
    sent = []
    for device in "ab":
        data = one_update(method, device).arrays["changes.bits"].tobytes()
        flips = codecs.decode_mask("bits", data, MASKED)
        drawn = counter.uniform(counter.key(secret(device), "uploaded mask", 2), MASKED) < own
        assert (flips == (drawn ^ reference)).all()
        sent.append(data)
    assert sent[0] != sent[1]


@pytest.mark.parametrize("sampling", ["common", "device", "stratified"])
def test_with_uniforms_that_the_server_knows_a_device_that_learns_nothing_sends_the_reference(sampling: Any) -> None:
    """Whichever of the two theta are rounded: the uniforms are the reference's, so hardly an element changes."""
    method = DeltaMask(sampling=sampling, codec="bits", kappa=1.0)
    flips = codecs.decode_mask("bits", one_update(method, "a").arrays["changes.bits"].tobytes(), MASKED)
    assert flips.sum() <= 1


def test_contexts_are_what_both_sides_know_of_a_change() -> None:
    theta, u = np.array([0.5, 0.5, 0.99, 0.03]), np.array([0.2, 0.9, 0.2, 0.5])
    # The sixteenth of theta twice, and one more where the reference bit is one: which way the change would go.
    assert DeltaMask(sampling="independent").contexts(theta, u).tolist() == [17, 16, 31, 0]
    for sampling in ("common", "device", "stratified"):
        method = DeltaMask(sampling=sampling)
        assert (method.contexts(theta, u) == coupling_contexts(theta, u)).all()


@pytest.mark.parametrize("sampling", ["independent", "common", "device", "stratified"])
def test_an_update_names_the_reference_mask_it_changes(sampling: Any) -> None:
    method = DeltaMask(sampling=sampling, theta0=0.7)
    state, a = method.start(course(M)), assignment(M, "a", 2)
    update = one_update(method, "a")
    packed = np.packbits(method.uniforms(a, MASKED) < np.float32(0.7), bitorder="little").tobytes()
    assert update.meta["reference"] == hashlib.sha256(packed).hexdigest()[:16]
    method.read_update(a, state, None, update)
    for other in ("0" * 16, None):
        meta = {"reference": other} if other else {}
        with pytest.raises(PayloadError, match="trains again"):
            method.read_update(a, state, None, Payload(update.arrays, meta))


def test_a_device_with_another_theta_is_detected_and_recovers_with_a_fresh_downlink() -> None:
    fleet = MaskFleet(DeltaMask())
    for _ in range(2):
        fleet.play(*DEVICES)
    t, down = fleet.task("a", 3), fleet.ask("a")
    stale = Payload({**down.arrays, "theta": np.full(MASKED, 0.5, np.float32)}, down.meta)
    wrong = local_round(fleet.method, t, fleet.kept["a"], stale).update
    with pytest.raises(PayloadError, match="reference mask"):
        fleet.method.read_update(t.assignment, fleet.state, None, wrong)
    fleet.play(*DEVICES)
    assert fleet.state.posterior.masks == 3


def test_changes_in_another_codec_than_the_settings_name_are_refused() -> None:
    update = one_update(DeltaMask(codec="rice"), "a")
    method = DeltaMask(theta0=0.7)
    with pytest.raises(PayloadError, match=r"only \['changes.fuse8-png'\] are used here"):
        method.read_update(assignment(M, "a", 2), method.start(course(M)), None, update)
