"""What FedPM, DeltaMask and Coupled have in common: who is masked, probing, training, aggregation, evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, counter
from edge_kernels.folding import Tally
from mask_fleet import DEVICES, MASKED, M, MaskFleet, local_round, own_mask, steady, steady_task
from numpy_mlp import NumpyMlp, assignment, course, mlp, model, secret, task
from pydantic import ValidationError
from rounds import stored

from edge_client.bundle import Init, Tensor
from edge_client.errors import ConfigError, PayloadError
from edge_client.methods.coupled import Coupled
from edge_client.methods.deltamask import DeltaMask
from edge_client.methods.fedpm import FedPM
from edge_client.methods.shared.bernoulli import BernoulliMasks, HeadUpdate
from edge_client.methods.shared.theta import Posterior
from edge_client.protocol.payload import Arrays, Payload, encode
from edge_client.training.gates import draw, sigmoid


def test_all_but_the_head_is_masked_and_layers_choose_by_prefix() -> None:
    assert FedPM().exchanged(course(M)) == MASKED
    assert FedPM(biases=True).exchanged(course(M)) == MASKED + 16 + 12
    assert FedPM(head="mask").exchanged(course(M)) == MASKED + 12 * 3
    assert FedPM(layers=("1",)).exchanged(course(M)) == 16 * 12
    assert FedPM().probed(model(M)).size == 12 * 3 + 3


@pytest.mark.parametrize("layers", [("9",), ("2",), ("0", "nothing")])
def test_a_layer_that_is_not_there_to_mask_is_refused(layers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="the layers that can be masked are"):
        FedPM(layers=layers).exchanged(course(M))


@pytest.mark.parametrize("kind", [FedPM, DeltaMask, Coupled])
def test_rounds_that_all_probe_the_head_are_cautioned_against(kind: type[BernoulliMasks]) -> None:
    said = "probe_rounds = 3, but rounds = 3: only the head is trained and no mask is sent; make rounds larger"
    assert str(kind(probe_rounds=3).caution(course(M, 3))).startswith(said)
    assert kind(probe_rounds=3).caution(course(M, 4)) is None
    assert kind(probe_rounds=3, head="mask").caution(course(M, 1)) is None  # every round sends masks


def test_a_model_without_layers_is_refused() -> None:
    bare = M.model_copy(update={"layers": ()})
    with pytest.raises(ConfigError, match="has no layer to mask"):
        FedPM().start(course(bare))


def test_theta_by_hand() -> None:
    p = Posterior(np.array([0, 3, 4], np.uint32), 4)
    assert FedPM().theta(course(M), p).tolist() == [0.01, 0.75, 0.99]
    assert FedPM(theta0=0.5, clip=0.2).theta(course(M), p).tolist() == [0.2, 0.75, 0.8]
    assert FedPM(posterior="mean").theta(course(M), p).tolist() == pytest.approx([1 / 6, 4 / 6, 5 / 6])
    # A prior of Beta(3, 3) is two ones and two zeros more under the mode, three of each under the mean.
    assert FedPM(prior=3.0).theta(course(M), p).tolist() == [2 / 8, 5 / 8, 6 / 8]
    assert FedPM(prior=3.0, posterior="mean").theta(course(M), p).tolist() == [3 / 10, 6 / 10, 7 / 10]


@pytest.mark.parametrize("kind", [FedPM, DeltaMask, Coupled])
@pytest.mark.parametrize("seed", [1, None])
def test_a_first_theta_too_near_to_0_or_1_for_float32_is_refused_and_others_travel(
    kind: type[BernoulliMasks], seed: int | None
) -> None:
    for theta0 in (0.0, 1e-40, 1e-30, 1 - 1e-9, 1.0):
        with pytest.raises(ValidationError):
            kind(theta0=theta0)
    for theta0 in (1e-6, 1 - 1e-6):
        fleet = MaskFleet(kind(theta0=theta0, clip=1e-6, head="mask"), M.model_copy(update={"seed": seed}))
        for _ in range(2):
            fleet.play("a", "b")
        assert np.isfinite(fleet.personal("a").parameters).all()


@pytest.mark.parametrize("kind", [FedPM, DeltaMask, Coupled])
def test_a_first_theta_that_the_first_round_would_clip_is_refused(kind: type[BernoulliMasks]) -> None:
    with pytest.raises(ValidationError, match=r"theta0 = 0.999 lies outside 0.01 .. 0.99, .* lower clip"):
        kind(theta0=0.999)
    with pytest.raises(ValidationError, match=r"theta0 = 0.002 lies outside 0.01 .. 0.99"):
        kind(theta0=0.002)
    assert (kind(theta0=0.99).theta0, kind(theta0=0.01).theta0) == (0.99, 0.01)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p.astype(np.float64) / (1 - p.astype(np.float64)))


def tally(*masks: int) -> Tally:
    """Masks that are all ones or all zeros."""
    found = Tally(MASKED)
    for bit in masks:
        found.add(bits.pack(np.full(MASKED, bit)))
    return found


def test_the_posterior_is_reset_every_so_many_mask_rounds() -> None:
    fleet = MaskFleet(FedPM(reset_every=2))
    seen = []
    for _ in range(5):
        fleet.play(*DEVICES)
        seen.append(fleet.state.posterior.masks)
    assert seen == [0, 3, 3, 6, 3]  # the first round probes; the second of those with masks is reset


def test_draws_have_their_probabilities() -> None:
    p = np.repeat(np.array([0.0, 0.1, 0.9, 1.0], np.float32), 20_000)
    assert draw(5, p).reshape(4, -1).mean(axis=1).tolist() == pytest.approx([0, 0.1, 0.9, 1], abs=0.01)
    assert draw(5, p[:7]).shape == (7,)


def test_probing_is_federated_averaging_of_the_head_alone() -> None:
    fleet = MaskFleet(FedPM(probe_lr=0.3))
    fleet.play(*DEVICES)
    heads = [np.asarray(fleet.local[d].update.arrays["head"]) for d in DEVICES]
    assert fleet.state.head.tolist() == pytest.approx(np.mean(heads, axis=0).tolist(), abs=1e-6)
    trained = fleet.local["a"].trained.parameters
    assert (trained[:MASKED] == model(M).parameters[:MASKED]).all()
    assert fleet.state.posterior.masks == 0
    # The head is now frozen: no later round changes it, on either side.
    head = fleet.state.head.copy()
    fleet.play(*DEVICES)
    part = fleet.method.probed(model(M))
    assert (fleet.state.head == head).all()
    assert (part.gather(fleet.local["b"].trained.parameters) == head).all()


@pytest.mark.parametrize("kind", [FedPM, DeltaMask, Coupled])
def test_the_global_model_is_dense_until_the_first_masks(kind: type[BernoulliMasks]) -> None:
    fleet, part = MaskFleet(kind(theta0=0.7)), kind().masked(model(M))
    for _ in range(2):  # before and after the probing round
        personal = fleet.personal("a")
        assert personal.mask is None
        assert np.array_equal(part.gather(personal.parameters), part.gather(model(M).parameters))
        assert np.array_equal(kind().probed(model(M)).gather(personal.parameters), fleet.state.head)
        fleet.play(*DEVICES)
    assert fleet.personal("a").mask is not None


def test_several_probing_rounds_go_on_from_each_other() -> None:
    fleet = MaskFleet(Coupled(probe_rounds=2))
    fleet.play(*DEVICES)
    first = fleet.state.head.copy()
    assert (fleet.ask("a").arrays["head"] == first).all()
    fleet.play(*DEVICES)
    assert (fleet.state.head != first).any()


def test_a_trained_model_is_the_frozen_one_under_a_mask() -> None:
    fleet = MaskFleet(FedPM())
    fleet.play(*DEVICES)
    fleet.play(*DEVICES)
    part, trained = fleet.method.masked(model(M)), fleet.local["a"].trained
    frozen = part.gather(model(M).parameters)
    assert (part.gather(trained.parameters) == frozen * own_mask(fleet, "a")).all()


def test_a_head_counts_by_its_samples() -> None:
    fleet = MaskFleet(FedPM())
    heads = (("a", 1.0, 1), ("b", 5.0, 3))
    fleet.close({d: Payload({"head": np.full(39, value, np.float32)}, {"samples": n}) for d, value, n in heads})
    assert set(fleet.state.head.tolist()) == {4.0}


def test_a_head_has_an_influence_and_can_be_limited_and_a_mask_has_none() -> None:
    method = FedPM()
    state, a = method.start(course(M)), assignment(M)
    update = HeadUpdate(state.head + np.float32(2), 7.0)
    influence = method.influence(a, state, update)
    assert influence is not None
    assert (influence.norm, influence.weight) == (pytest.approx(2 * 39**0.5, rel=1e-6), 7.0)
    limited = method.limited(a, state, update, 0.25, 3.0)
    assert np.allclose(limited.head, state.head + 0.5, atol=1e-6)
    assert limited.samples == 3.0
    assert method.influence(a, state, np.zeros(1, np.uint8)) is None


def test_probing_takes_its_own_epochs_rate_and_momentum() -> None:
    # Four steps (two epochs of 40 samples in batches of 20) along a gradient of 1: v = 1, 1.5, 1.75, 1.875.
    method = FedPM(probe_epochs=2, batch=20, probe_lr=0.1, probe_momentum=0.5, epochs=7, lr=3.0)
    trainer = steady(value=1.0)
    head = np.zeros(39, np.float32)
    local = local_round(method, steady_task(trainer, round_=1), None, Payload({"head": head}))
    assert len(trainer.asked) == 4
    assert local.update.arrays["head"].tolist() == pytest.approx([-0.6125] * 39, rel=1e-5)


def test_every_batch_draws_a_mask_of_its_own_device_round_and_turn() -> None:
    method, theta = FedPM(batch=20, epochs=2), np.full(MASKED, 0.7)
    trainer = steady()  # no gradient: the scores stay
    method.train(steady_task(trainer, "b", 5), None, theta, np.zeros(39, np.float32))
    part = method.masked(model(M))
    weights = part.gather(model(M).parameters)
    p = sigmoid(np.log(theta / (1 - theta)).astype(np.float32))
    for turn, parameters in enumerate(trainer.asked):
        mask = draw(counter.key(secret("b"), "training masks", 5, turn), p)
        assert (part.gather(parameters) == weights * mask).all()
    assert len(trainer.asked) == 4


def test_adams_moments_are_kept_only_when_asked() -> None:
    for persistent in (False, True):
        fleet = MaskFleet(FedPM(persistent=persistent, head="mask"))
        fleet.play("a")
        steps = -(-40 // 64)
        assert (fleet.kept["a"].adam is not None) == persistent
        fleet.play("a")
        if persistent:
            assert fleet.kept["a"].adam.steps == 2 * steps


@pytest.mark.parametrize("persistent", [False, True])
def test_adam_goes_on_where_it_stopped_when_it_is_persistent(persistent: bool) -> None:
    # theta = 1/2 gives every score the gradient g W / 4, so only its sign and the ratio of the two rounds' g count.
    method, theta = FedPM(persistent=persistent, lr=0.1), np.full(MASKED, 0.5)
    head = np.zeros(39, np.float32)
    way = np.sign(method.masked(model(M)).gather(model(M).parameters))
    first, kept, _ = method.train(steady_task(steady(value=1.0)), None, theta, head)
    assert np.allclose(logit(first), -0.1 * way, rtol=1e-4)
    second, left, _ = method.train(steady_task(steady(value=3.0)), stored(kept), theta, head)
    # m = (.9 * .1 + .1 * 3) g, v = (.999 * .001 + .001 * 9) g^2, each over one less the decay to the second power.
    step = 0.39 / (1 - 0.9**2) / ((0.000999 + 0.009) / (1 - 0.999**2)) ** 0.5 if persistent else 1.0
    assert np.allclose(logit(second), -0.1 * step * way, rtol=1e-4)
    assert (left.adam is not None) == persistent


@pytest.mark.parametrize("method", [FedPM(), DeltaMask(), Coupled()], ids=["fedpm", "deltamask", "coupled"])
def test_batch_norm_statistics_go_on_on_the_device(method: BernoulliMasks) -> None:
    table = Tensor(name="bn", shape=(2,), offset=0, init=Init(kind="constant", scale=0.0))
    m = M.model_copy(update={"buffers": (table,)})
    trainer, state, kept = steady(m), method.start(course(m)), None
    for round_ in (1, 2, 3):
        t = steady_task(trainer, round_=round_)
        received = method.receive(t.assignment, kept, method.downlink(course(m), round_, state, None))
        assert method.personal(t, kept, received).buffers.tolist() == [round_ - 1] * 2
        local = method.local_round(t, kept, received)
        kept = stored(local.kept)
        assert local.trained.buffers.tolist() == kept.buffers.tolist() == [round_] * 2
    assert method.of_device(course(m), state, None, local.trained) is None  # the server does not have them
    assert method.of_device(course(M), state, None, local.trained) is local.trained


def test_the_published_straight_through_rule_is_another_one() -> None:
    masks = []
    for ste in ("identity", "ref"):
        fleet = MaskFleet(FedPM(ste=ste, head="mask", epochs=20, theta0=0.4, spread=2.0))
        fleet.play("a")
        masks.append(own_mask(fleet, "a"))
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("evaluate", ["sample", "threshold", "expected"])
def test_the_global_model_may_be_a_draw_a_threshold_or_an_expectation(evaluate: Any) -> None:
    fleet = MaskFleet(FedPM(evaluate=evaluate, head="mask", theta0=0.7))
    t = fleet.task("a", 1)
    personal = fleet.method.personal(t, None, fleet.receive("a"))
    part = fleet.method.masked(model(M))
    share = part.gather(personal.parameters) / part.gather(model(M).parameters)
    if evaluate == "expected":
        assert personal.mask is None
        assert share.tolist() == pytest.approx([0.7] * share.size, rel=1e-5)
    else:
        assert share.mean() == (1.0 if evaluate == "threshold" else pytest.approx(0.7, abs=0.08))


def test_a_threshold_keeps_what_is_as_likely_on_as_off() -> None:
    method, theta = FedPM(evaluate="threshold", head="mask", theta0=0.5), np.full(MASKED + 36, 0.5)
    theta[:2] = 0.499, 0.501
    found = method.global_model(assignment(M, round_=3), None, theta, np.zeros(0, np.float32))
    assert found.mask is not None
    assert method.masked(model(M)).gather(found.mask)[:4].tolist() == [False, True, True, True]


def test_the_evaluated_mask_is_another_one_in_every_round() -> None:
    method, theta, head = FedPM(), np.full(MASKED, 0.7), np.zeros(39, np.float32)
    masks = []
    for round_ in (3, 4):
        mask = method.global_model(assignment(M, round_=round_), None, theta, head).mask
        assert mask is not None
        masks.append(method.masked(model(M)).gather(mask))
        assert (masks[-1] == (counter.uniform(counter.key(3, "evaluated mask", round_), MASKED) < 0.7)).all()
    assert (masks[0] != masks[1]).any()


def test_first_scores_are_spread_as_set_around_the_first_theta() -> None:
    m = mlp(300, 100, 3)
    for spread, theta0 in ((0.25, 0.5), (1.0, 0.5), (0.5, 0.8)):
        theta = FedPM(theta0=theta0, spread=spread, clip=1e-3).first_theta(replace(course(m), seed=7))
        logits = np.log(theta / (1 - theta))
        assert (logits.mean(), logits.std()) == pytest.approx((np.log(theta0 / (1 - theta0)), spread), abs=0.02)
        assert (theta * 4096 == np.round(theta * 4096)).all()
        assert (theta * 4096 % 2 == 1).any()  # no coarser grid
    z = sum(float(counter.uniform(counter.key(7, "first scores", i), 6)[5]) for i in range(12)) - 6
    assert theta[5] == round(4096 / (1 + math.exp(-0.5 * z) * 0.25)) / 4096


@pytest.mark.parametrize(
    "method",
    [
        FedPM(lr=0.3, epochs=4),
        DeltaMask(lr=0.3, epochs=4, codec="fuse16", kappa=1.0),
        Coupled(lr=0.3, epochs=4),
        Coupled(lr=0.3, epochs=8, head="mask", theta0=0.5, spread=1.0),
    ],
    ids=["fedpm", "deltamask", "coupled", "coupled from random"],
)
def test_they_learn(method: BernoulliMasks) -> None:
    fleet = MaskFleet(method)
    first = fleet.score("a")
    for _ in range(8):
        fleet.play(*DEVICES)
    assert fleet.score("a") > max(0.75, first)


@pytest.mark.parametrize("method", [FedPM(), DeltaMask(), Coupled()], ids=["fedpm", "deltamask", "coupled"])
def test_the_same_seed_gives_the_same_bytes(method: BernoulliMasks) -> None:
    twins = MaskFleet(method), MaskFleet(method)
    for _ in range(3):
        for fleet in twins:
            fleet.play(*DEVICES)
        for d in DEVICES:
            assert encode(twins[0].local[d].update) == encode(twins[1].local[d].update)
            assert encode(twins[0].ask(d)) == encode(twins[1].ask(d))


def test_a_head_of_no_samples_is_refused() -> None:
    fleet = MaskFleet(FedPM())
    fleet.play(*DEVICES)
    update = Payload(fleet.local["a"].update.arrays, {"samples": 0})
    with pytest.raises(PayloadError, match="samples"):
        fleet.method.read_update(fleet.task("a", 1).assignment, fleet.state, None, update)


@pytest.mark.parametrize(
    "method",
    [
        FedPM(down="counts"),
        DeltaMask(),
        DeltaMask(codec="auto"),
        DeltaMask(codec="fuse16"),
        Coupled(),
        Coupled(references=0),
    ],
    ids=["fedpm", "deltamask png", "deltamask auto", "deltamask fuse16", "coupled", "coupled by counts"],
)
def test_damaged_codec_bytes_are_a_payload_error_on_both_sides(method: BernoulliMasks) -> None:
    fleet = MaskFleet(method)
    for _ in range(3):
        fleet.play(*DEVICES)
    t, down = fleet.task("a", 4), fleet.ask("a")
    sent = local_round(method, t, fleet.kept["a"], down).update

    def server(update: Payload) -> None:
        method.read_update(t.assignment, fleet.state, fleet.records.get("a"), update)

    def device(downlink: Payload) -> None:
        method.receive(t.assignment, fleet.kept["a"], downlink)

    rng = np.random.default_rng(1)
    for read, good in ((server, sent), (device, down)):
        read(good)
        coded_arrays = [name for name, data in good.arrays.items() if data.dtype == np.uint8]
        assert coded_arrays or method.name == "deltamask"  # its downlink has floats only
        for name in coded_arrays:
            refused = 0
            for i in range(60):
                data = good.arrays[name].copy()
                data = data[: rng.integers(len(data))] if i % 3 == 0 else data
                if i % 3:
                    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
                arrays: Arrays = {**good.arrays, name: data}
                try:
                    read(Payload(arrays, good.meta))  # CodecError would end the test
                except PayloadError:
                    refused += 1
            assert refused >= 20  # what was cut off at least


def test_an_impossible_downlink_is_refused_by_the_device() -> None:
    nothing = Payload({"theta": np.zeros(MASKED, np.float32), "head": np.zeros(39, np.float32)})
    for method in (FedPM(), DeltaMask()):
        with pytest.raises(PayloadError, match="theta"):
            method.receive(assignment(M, round_=2), None, nothing)
    with pytest.raises(PayloadError, match="head"):
        FedPM().receive(assignment(M), None, Payload({"head": np.zeros(3, np.float32)}))
    junk: Arrays = {"junk": np.zeros(3, np.uint8), "head": np.zeros(39, np.float32)}
    with pytest.raises(PayloadError, match="arrays"):
        Coupled().receive(assignment(M, round_=2), None, Payload(junk))


def test_the_trainer_is_asked_once_a_batch() -> None:
    engine = NumpyMlp(M)
    t = replace(task(M, round_=2), trainer=engine)
    local_round(Coupled(batch=16, epochs=2), t, None, Payload({"head": np.zeros(39, np.float32)}))
    assert engine.calls == 2 * 3


def test_theta_moves_by_differences_for_a_trained_bundle_unless_the_posterior_is_set() -> None:
    drawn, trained = (replace(model(M), manifest=M.model_copy(update={"seed": seed})) for seed in (1, None))
    assert Coupled().by_difference(trained)
    assert not Coupled().by_difference(drawn)
    assert not FedPM().by_difference(trained)
    posterior: list[dict[str, Any]] = [{"posterior": "mean"}, {"prior": 2.0}, {"reset_every": 3}]
    for other in ({"spread": 1.0}, {"aggregate": "posterior"}, *posterior):
        assert not Coupled(**other).by_difference(trained)
    assert not DeltaMask(tally="mean", prior=2.0).by_difference(trained)
    assert Coupled(aggregate="difference").by_difference(drawn)
    for other in (*posterior, {"tally": "mean"}, {"tally": "mean", "prior": 2.0}):
        with pytest.raises(ValueError, match=f"no posterior, so {', '.join(sorted(other))} change nothing"):
            DeltaMask(aggregate="difference", **other)
