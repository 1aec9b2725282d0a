"""FedPM, DeltaMask and Coupled: both halves against each other, without engine, network or disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import codecs, counter
from numpy_mlp import NumpyMlp, assignment, clusters, mlp, model, task

from edge_client.bundle import Manifest
from edge_client.errors import ConfigError, PayloadError
from edge_client.local import accuracy
from edge_client.methods import Local, Task, make_method
from edge_client.methods.bernoulli import BernoulliMasks, draw, posterior_theta
from edge_client.methods.coupled import Coupled
from edge_client.methods.deltamask import DeltaMask, most_telling
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.payload import Arrays, Payload, decode, encode

M = mlp(20, 16, 12, 3)
MASKED = 20 * 16 + 16 * 12
DEVICES = ("a", "b", "c")


def stored(arrays: Arrays) -> Arrays:
    """What a device or the server has kept, after a restart."""
    return dict(decode(encode(Payload(arrays))).arrays)


class Fleet:
    """A federation by hand: the server's state and records, what each device kept."""

    def __init__(self, method: BernoulliMasks, m: Manifest = M) -> None:
        self.method, self.m, self.round = method, m, 0
        self.state = method.start(model(m), 3)
        self.records: dict[str, Arrays] = {}
        self.kept: dict[str, Arrays] = {}
        self.down: dict[str, Payload] = {}
        self.local: dict[str, Local] = {}
        self.read: dict[str, Arrays] = {}

    def task(self, device: str, round_: int) -> Task:
        t = task(self.m, device, round_, clusters(self.m, DEVICES.index(device)))
        return replace(t, assignment=replace(t.assignment, rounds=8))

    def ask(self, device: str) -> Payload:
        a = self.task(device, self.round + 1).assignment
        return decode(encode(self.method.downlink(a, self.state, self.records.get(device, {}))))

    def play(self, *devices: str) -> None:
        """One round of these devices."""
        for d in devices:
            self.down[d] = self.ask(d)
        self.round += 1
        total: Arrays = {}
        for d in sorted(devices):
            t = self.task(d, self.round)
            local = self.method.local_round(t, self.kept.get(d, {}), self.down[d])
            self.local[d], self.kept[d] = local, stored(local.kept)
            record = self.records.get(d, {})
            update = decode(encode(replace(local.update, meta={**local.update.meta, "samples": len(t.data.y)})))
            limit = self.method.update_limit(t.assignment.model)
            assert sum(x.nbytes for x in update.arrays.values()) <= limit
            self.read[d] = self.method.read_update(t.assignment, self.state, record, update)
            total, self.records[d] = self.method.fold(t.assignment, self.state, total, self.read[d], record)
            self.records[d] = stored(self.records[d])
        self.state = stored(self.method.finish(model(self.m), self.round, self.state, total))

    def theta(self) -> np.ndarray:
        return self.method.theta(model(self.m), 3, self.state)

    def personal_accuracy(self, device: str) -> float:
        t = self.task(device, self.round + 1)
        personal = self.method.personal(t, self.kept.get(device, {}), self.ask(device))
        return accuracy(t.trainer, personal, t.data.x, t.data.y)


def own_mask(fleet: Fleet, device: str) -> np.ndarray:
    """The mask of the model a device trained, over the masked parameters."""
    mask = fleet.local[device].trained.mask
    assert mask is not None
    return fleet.method.masked(fleet.m).gather(mask)


# --- what they share


def test_all_but_the_head_is_masked_and_layers_choose_by_prefix() -> None:
    assert FedPM().exchanged(model(M)) == MASKED
    assert FedPM(biases=True).exchanged(model(M)) == MASKED + 16 + 12
    assert FedPM(head="mask").exchanged(model(M)) == MASKED + 12 * 3
    assert FedPM(layers=("1",)).exchanged(model(M)) == 16 * 12
    assert FedPM().probed(M).size == 12 * 3 + 3


@pytest.mark.parametrize("layers", [("9",), ("2",), ("0", "nothing")])
def test_a_layer_that_is_not_there_to_mask_is_refused(layers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="the layers to mask are"):
        FedPM(layers=layers).exchanged(model(M))


def test_the_posterior_by_hand() -> None:
    ones = np.array([0, 3, 4], np.uint32)
    clip = 0.01
    assert posterior_theta(ones, 4, 1, 1.0, "mode", "sum", clip).tolist() == [0.01, 0.75, 0.99]
    assert posterior_theta(ones, 4, 1, 1.0, "mean", "sum", clip).tolist() == pytest.approx([1 / 6, 4 / 6, 5 / 6])
    # Algorithm 2 to the letter adds the share of ones, 3/4, so theta cannot pass 2 / (K + 2).
    assert posterior_theta(ones, 4, 1, 1.0, "mean", "mean", clip).tolist() == pytest.approx([1 / 6, 1.75 / 6, 2 / 6])


def test_the_posterior_is_reset_every_so_many_mask_rounds() -> None:
    fleet = Fleet(FedPM(reset_every=2))
    seen = []
    for _ in range(5):
        fleet.play(*DEVICES)
        seen.append(int(fleet.state["masks"][0]))
    assert seen == [0, 3, 6, 3, 6]  # the first round probes


def test_draws_have_their_probabilities() -> None:
    p = np.repeat(np.array([0.0, 0.1, 0.9, 1.0], np.float32), 20_000)
    assert draw(5, p).reshape(4, -1).mean(axis=1).tolist() == pytest.approx([0, 0.1, 0.9, 1], abs=0.01)
    assert draw(5, p[:7]).shape == (7,)


def test_probing_is_federated_averaging_of_the_head_alone() -> None:
    fleet = Fleet(FedPM(probe_lr=0.3))
    fleet.play(*DEVICES)
    heads = [np.asarray(fleet.local[d].update.arrays["head"]) for d in DEVICES]
    assert fleet.state["head"].tolist() == pytest.approx(np.mean(heads, axis=0).tolist(), abs=1e-6)
    trained = fleet.local["a"].trained.parameters
    assert (trained[:MASKED] == model(M).parameters[:MASKED]).all()
    assert int(fleet.state["masks"][0]) == 0
    # The head is now frozen: no later round changes it, on either side.
    head = fleet.state["head"].copy()
    fleet.play(*DEVICES)
    part = fleet.method.probed(M)
    assert (fleet.state["head"] == head).all()
    assert (part.gather(fleet.local["b"].trained.parameters) == head).all()


def test_several_probing_rounds_go_on_from_each_other() -> None:
    fleet = Fleet(Coupled(probe_rounds=2))
    fleet.play(*DEVICES)
    first = fleet.state["head"].copy()
    assert (fleet.ask("a").arrays["head"] == first).all()
    fleet.play(*DEVICES)
    assert (fleet.state["head"] != first).any()


def test_a_trained_model_is_the_frozen_one_under_a_mask() -> None:
    fleet = Fleet(FedPM())
    fleet.play(*DEVICES)
    fleet.play(*DEVICES)
    part, trained = fleet.method.masked(M), fleet.local["a"].trained
    frozen = part.gather(model(M).parameters)
    assert (part.gather(trained.parameters) == frozen * own_mask(fleet, "a")).all()


def test_adams_moments_are_kept_only_when_asked() -> None:
    for persistent in (False, True):
        fleet = Fleet(FedPM(persistent=persistent, head="mask"))
        fleet.play("a")
        steps = -(-40 // 64)
        assert ("adam_mean" in fleet.kept["a"]) == persistent
        fleet.play("a")
        if persistent:
            assert fleet.kept["a"]["adam_steps"].tolist() == [2 * steps]


def test_the_published_straight_through_rule_is_another_one() -> None:
    masks = []
    for ste in ("identity", "ref"):
        fleet = Fleet(FedPM(ste=ste, head="mask", epochs=20, theta0=0.4, spread=2.0))  # type: ignore[arg-type]
        fleet.play("a")
        masks.append(own_mask(fleet, "a"))
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("evaluate", ["sample", "threshold", "expected"])
def test_the_global_model_may_be_a_draw_a_threshold_or_an_expectation(evaluate: Any) -> None:
    fleet = Fleet(FedPM(evaluate=evaluate, head="mask", theta0=0.7))
    t = fleet.task("a", 1)
    personal = fleet.method.personal(t, {}, fleet.ask("a"))
    part = fleet.method.masked(M)
    share = part.gather(personal.parameters) / part.gather(model(M).parameters)
    if evaluate == "expected":
        assert personal.mask is None
        assert share.tolist() == pytest.approx([0.7] * share.size, rel=1e-5)
    else:
        assert share.mean() == (1.0 if evaluate == "threshold" else pytest.approx(0.7, abs=0.08))


def test_literal_algorithm_2_needs_its_own_mean() -> None:
    with pytest.raises(ConfigError, match="posterior"):
        make_method({"name": "deltamask", "tally": "mean"})


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
    fleet = Fleet(method)
    first = fleet.personal_accuracy("a")
    for _ in range(8):
        fleet.play(*DEVICES)
    assert fleet.personal_accuracy("a") > max(0.75, first)


@pytest.mark.parametrize("method", [FedPM(), DeltaMask(), Coupled()], ids=["fedpm", "deltamask", "coupled"])
def test_the_same_seed_gives_the_same_bytes(method: BernoulliMasks) -> None:
    twins = Fleet(method), Fleet(method)
    for _ in range(3):
        for fleet in twins:
            fleet.play(*DEVICES)
        for d in DEVICES:
            assert encode(twins[0].local[d].update) == encode(twins[1].local[d].update)
            assert encode(twins[0].ask(d)) == encode(twins[1].ask(d))


@pytest.mark.parametrize("method", [FedPM(), DeltaMask(), Coupled()], ids=["fedpm", "deltamask", "coupled"])
@pytest.mark.parametrize("damage", ["name", "dtype", "shape", "bytes", "empty"])
def test_a_malformed_update_is_refused(method: BernoulliMasks, damage: str) -> None:
    fleet = Fleet(method)
    fleet.play(*DEVICES)
    good = fleet.local["a"].update
    a = fleet.task("a", 1).assignment
    for samples in (0, -1, True, "many", 2**40):
        with pytest.raises(PayloadError, match="samples"):
            method.read_update(a, fleet.state, {}, Payload(good.arrays, {"samples": samples}))
    with pytest.raises(PayloadError, match="NaN"):
        method.read_update(a, fleet.state, {}, Payload({"head": good.arrays["head"] * np.nan}, good.meta))
    fleet.play(*DEVICES)
    ((name, data),) = fleet.local["a"].update.arrays.items()
    bad = {
        "name": {"other": data},
        "dtype": {name: data.view(np.int8)},
        "shape": {name: data[None]},
        "bytes": {name: np.full(40, 255, np.uint8)},
        "empty": {name: data[:0]},
    }[damage]
    with pytest.raises(PayloadError):
        method.read_update(fleet.task("a", 3).assignment, fleet.state, fleet.records["a"], Payload(bad))


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
    fleet = Fleet(method)
    for _ in range(3):
        fleet.play(*DEVICES)
    t, down = fleet.task("a", 4), fleet.ask("a")
    sent = method.local_round(t, fleet.kept["a"], down).update

    def server(update: Payload) -> None:
        method.read_update(t.assignment, fleet.state, fleet.records["a"], update)

    def device(downlink: Payload) -> None:
        method.personal(t, fleet.kept["a"], downlink)

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
            method.local_round(task(M, round_=2), {}, nothing)
    with pytest.raises(PayloadError, match="head"):
        FedPM().local_round(task(M, round_=1), {}, Payload({"head": np.zeros(3, np.float32)}))
    junk = {"junk": np.zeros(3, np.uint8), "head": np.zeros(39, np.float32)}
    with pytest.raises(PayloadError, match="arrays"):
        Coupled().local_round(task(M, round_=2), {}, Payload(junk))


# --- FedPM


def test_fedpm_sends_the_mask_it_drew_at_its_entropy() -> None:
    big = mlp(300, 100, 3)
    fleet = Fleet(FedPM(theta0=0.9), big)
    fleet.play(*DEVICES)
    fleet.play(*DEVICES)
    for d in DEVICES:
        mask = own_mask(fleet, d)
        assert (fleet.read[d]["mask"] == mask).all()
        p = mask.mean()
        bits = -mask.size * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
        assert 8 * fleet.local[d].update.arrays["mask.entropy"].nbytes < 1.02 * bits + 200


def test_fedpms_counts_say_the_same_as_its_floats_in_fewer_bytes() -> None:
    fleets = Fleet(FedPM()), Fleet(FedPM(down="counts"))
    for fleet in fleets:
        for _ in range(4):
            fleet.play(*DEVICES)
    assert (fleets[0].state["ones"] == fleets[1].state["ones"]).all()
    assert fleets[1].ask("a").arrays["counts.counts"].nbytes < fleets[0].ask("a").arrays["theta"].nbytes / 12


def test_before_the_first_masks_counts_cost_nothing() -> None:
    assert dict(Fleet(FedPM(down="counts", head="mask", theta0=0.5, spread=1.0)).ask("a").arrays) == {}


def test_first_probabilities_spread_like_the_sigmoid_of_a_normal() -> None:
    theta = FedPM(theta0=0.5, spread=1.0).first_theta(model(mlp(300, 100, 3)), 7)
    logits = np.log(theta / (1 - theta))
    assert (logits.mean(), logits.std()) == pytest.approx((0, 1), abs=0.02)


# --- DeltaMask


def test_the_changes_kept_are_those_with_the_largest_divergence() -> None:
    flips = np.array([True, True, False, True, True])
    own, theta = np.array([0.9, 0.5, 0.9, 0.6, 0.1]), np.array([0.1, 0.5, 0.1, 0.5, 0.5])
    assert most_telling(flips, own, theta, 0.5).tolist() == [True, False, False, False, True]
    assert most_telling(flips, own, theta, 1.0).tolist() == flips.tolist()


def test_kappa_goes_along_half_a_cosine() -> None:
    method = DeltaMask(kappa=0.8, kappa_end=1.0)
    shares = [method.kappa_at(assignment(M, round_=r, rounds=6)) for r in (2, 4, 6)]
    assert shares == pytest.approx([0.8, 0.9, 1.0])
    assert DeltaMask().kappa_at(assignment(M, round_=5)) == 0.8


@pytest.mark.parametrize("sampling", ["independent", "common", "device"])
@pytest.mark.parametrize("codec", ["bits", "rice", "entropy", "auto"])
def test_an_exact_codec_gives_the_server_the_very_mask(sampling: Any, codec: Any) -> None:
    fleet = Fleet(DeltaMask(sampling=sampling, codec=codec, kappa=1.0))
    for _ in range(3):
        fleet.play(*DEVICES)
    for d in DEVICES:
        assert (fleet.read[d]["mask"] == own_mask(fleet, d)).all()


@pytest.mark.parametrize("codec", ["fuse8", "fuse8-png"])
def test_a_filters_false_positives_are_flipped_too(codec: Any) -> None:
    big = mlp(300, 100, 3)
    fleet = Fleet(DeltaMask(codec=codec), big)
    fleet.play("a")
    fleet.play("a")
    wrong = fleet.read["a"]["mask"] != own_mask(fleet, "a")
    assert 0.4 / 256 < wrong.mean() < 2.5 / 256
    positions = codecs.decode(codec, fleet.local["a"].update.arrays[f"changes.{codec}"].tobytes(), 30_000)
    u = counter.uniform(counter.key(3, "uniforms", 2), 30_000)
    reference = u < np.float64(np.float32(0.95))
    assert (np.flatnonzero(fleet.read["a"]["mask"] ^ reference) == positions).all()


def test_shared_uniforms_leave_fewer_changes_to_send() -> None:
    sent = {}
    for sampling in ("independent", "device"):
        fleet = Fleet(DeltaMask(sampling=sampling, codec="rice"))  # type: ignore[arg-type]
        fleet.play(*DEVICES)
        fleet.play(*DEVICES)
        sent[sampling] = fleet.local["a"].update.arrays["changes.rice"].nbytes
    assert sent["device"] < sent["independent"]


def test_common_uniforms_are_the_same_for_all_and_others_are_not() -> None:
    for sampling, same in (("common", True), ("device", False)):
        method = DeltaMask(sampling=sampling)  # type: ignore[arg-type]
        u = [method.uniforms(assignment(M, d), 50) for d in "ab"]
        assert (u[0] == u[1]).all() == same


# --- Coupled


def agrees(fleet: Fleet, device: str) -> None:
    """What the device makes of its next downlink is what the server has."""
    assert isinstance(fleet.method, Coupled)
    a = fleet.task(device, fleet.round + 1).assignment
    known = fleet.method.understand(a, fleet.kept.get(device, {}), fleet.ask(device))
    for name in ("ones", "masks", "rounds"):
        assert (known.tally[name] == fleet.state[name]).all(), name
    assert (known.head == fleet.state["head"]).all()


def test_the_server_gets_the_very_mask_and_the_device_the_very_counts() -> None:
    fleet = Fleet(Coupled(lr=0.3))
    for _ in range(6):
        fleet.play(*DEVICES)
        for d in DEVICES:
            agrees(fleet, d)
            if fleet.round > 1:
                assert (fleet.read[d]["mask"] == own_mask(fleet, d)).all()


def test_a_device_is_told_what_it_lacks_and_no_more() -> None:
    fleet = Fleet(Coupled())
    assert set(fleet.ask("a").arrays) == set()  # it has the bundle's head
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"head"}  # the averaged head; theta is still theta0
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"net_short.coupled-net", "streams"}
    assert set(fleet.ask("c").arrays) == {"head", "counts.counts"}
    fleet.play("a", "c")
    assert set(fleet.ask("a").arrays) == {"net_long.coupled-net", "streams"}
    assert set(fleet.ask("c").arrays) == {"net_short.coupled-net", "streams"}
    assert set(fleet.ask("b").arrays) == {"counts.counts"}  # it missed a round; the head it has
    for d in DEVICES:
        agrees(fleet, d)
    fleet.play(*DEVICES)
    for d in DEVICES:
        agrees(fleet, d)
        assert (fleet.read[d]["mask"] == own_mask(fleet, d)).all()


@pytest.mark.parametrize(
    "settings",
    [{"reset_every": 3}, {"head": "mask", "theta0": 0.5, "spread": 1.0}, {"posterior": "mean"}, {"biases": True}],
)
def test_every_setting_keeps_both_sides_equal(settings: dict[str, Any]) -> None:
    fleet = Fleet(Coupled(**settings))
    for r in range(6):
        fleet.play(*(DEVICES if r % 3 else DEVICES[:2]))
        for d in DEVICES:
            agrees(fleet, d)


def test_a_cohort_larger_than_the_references_gets_counts_against_counts() -> None:
    fleet = Fleet(Coupled(references=2))
    for _ in range(4):
        fleet.play(*DEVICES)
        for d in DEVICES:
            agrees(fleet, d)
    assert set(fleet.ask("a").arrays) == {"change.counts"}
    fleet.play("a", "b")
    assert set(fleet.ask("a").arrays) == {"net_short.coupled-net", "streams"}
    agrees(fleet, "a")


def test_net_flips_and_flips_are_far_below_what_fedpm_pays() -> None:
    big = mlp(300, 100, 3)
    fleets = Fleet(Coupled(), big), Fleet(FedPM(down="counts"), big)
    for fleet in fleets:
        for _ in range(4):
            fleet.play(*DEVICES)
    sizes = [sum(x.nbytes for x in f.local["a"].update.arrays.values()) for f in fleets]
    assert sizes[0] < sizes[1] / 2
    assert (
        fleets[0].ask("a").arrays["net_long.coupled-net"].nbytes < fleets[1].ask("a").arrays["counts.counts"].nbytes / 2
    )


def test_a_device_that_lost_what_it_kept_sits_a_round_out_and_is_well_again() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play(*DEVICES)
    fleet.kept["a"] = {}
    assert fleet.personal_accuracy("a") >= 0
    fleet.play(*DEVICES)
    assert dict(fleet.local["a"].update.arrays) == {}
    assert int(fleet.state["masks"][0]) == 2
    assert set(fleet.ask("a").arrays) == {"head", "counts.counts"}
    for _ in range(2):
        for d in DEVICES:
            agrees(fleet, d)
        fleet.play(*DEVICES)
    assert int(fleet.state["masks"][0]) == 3


def test_a_device_that_missed_a_round_and_lost_its_head_does_not_take_the_bundles() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play(*DEVICES)
    fleet.play("b", "c")
    fleet.kept["a"] = {}
    assert set(fleet.ask("a").arrays) == {"counts.counts"}
    fleet.play(*DEVICES)
    assert dict(fleet.local["a"].update.arrays) == {}
    agrees(fleet, "a")


def test_a_round_that_everybody_sits_out_changes_nothing() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play("a", "b")
    ones = fleet.state["ones"].copy()
    fleet.kept = {}
    fleet.play("a", "b")
    assert (fleet.state["ones"] == ones).all()
    for d in DEVICES:
        agrees(fleet, d)
        assert "counts.counts" in fleet.ask(d).arrays


def test_after_the_last_round_a_device_that_lost_what_it_kept_says_so() -> None:
    fleet = Fleet(Coupled())
    for _ in range(8):
        fleet.play(*DEVICES)
    fleet.kept["a"] = {}
    with pytest.raises(PayloadError, match="lost"):
        fleet.personal_accuracy("a")


def test_a_device_whose_counts_differ_notices() -> None:
    fleet = Fleet(Coupled())
    for _ in range(3):
        fleet.play(*DEVICES)
    fleet.kept["a"] = {**fleet.kept["a"], "ones": 3 - fleet.kept["a"]["ones"]}
    with pytest.raises(PayloadError):
        fleet.personal_accuracy("a")


def test_the_trainer_is_asked_once_a_batch() -> None:
    engine = NumpyMlp(M)
    t = replace(task(M, round_=2), trainer=engine)
    Coupled(batch=16, epochs=2).local_round(t, {}, Payload({"head": np.zeros(39, np.float32)}))
    assert engine.calls == 2 * 3
