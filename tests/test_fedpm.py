"""FedPM: the mask up, theta or counts down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, codecs, counter
from mask_fleet import DEVICES, MASKED, M, MaskFleet, local_round, own_mask, steady, steady_task
from numpy_mlp import assignment, course, mlp, secret

from edge_client.errors import ConfigError, PayloadError
from edge_client.methods import make_method
from edge_client.methods.fedpm import FedPM
from edge_client.methods.shared.bernoulli import HeadUpdate
from edge_client.protocol.payload import Payload
from edge_client.training.gates import sigmoid


def test_fedpm_sends_the_mask_it_drew_at_its_entropy() -> None:
    big = mlp(300, 100, 3)
    fleet = MaskFleet(FedPM(theta0=0.9), big)
    fleet.play(*DEVICES)
    fleet.play(*DEVICES)
    for d in DEVICES:
        mask = own_mask(fleet, d)
        assert (fleet.masks[d] == mask).all()
        p = mask.mean()
        bits = -mask.size * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
        assert 8 * fleet.local[d].update.arrays["mask.entropy"].nbytes < 1.02 * bits + 200


def test_fedpms_counts_say_the_same_as_its_floats_in_fewer_bytes() -> None:
    fleets = MaskFleet(FedPM()), MaskFleet(FedPM(down="counts"))
    for fleet in fleets:
        for _ in range(4):
            fleet.play(*DEVICES)
    assert (fleets[0].state.posterior.ones == fleets[1].state.posterior.ones).all()
    assert fleets[1].ask("a").arrays["counts.counts"].nbytes < fleets[0].ask("a").arrays["theta"].nbytes / 12


def test_before_the_first_masks_counts_cost_nothing() -> None:
    assert dict(MaskFleet(FedPM(down="counts", head="mask", theta0=0.5, spread=1.0)).ask("a").arrays) == {}


def test_devices_and_rounds_draw_their_uploads_from_the_devices_own_secret() -> None:
    method, theta = FedPM(), np.full(MASKED, 0.7, np.float32)
    down = Payload({"theta": theta, "head": np.zeros(39, np.float32)})
    scores = np.log(theta.astype(np.float64) / (1 - theta.astype(np.float64))).astype(np.float32)
    masks = {}
    for device, round_ in (("a", 2), ("b", 2), ("a", 3)):
        t = steady_task(steady(), device, round_)  # no gradient: the device's theta is the one it received
        read = method.read_update(
            t.assignment, method.start(course(M)), None, local_round(method, t, None, down).update
        )
        assert not isinstance(read, HeadUpdate)
        mask = bits.unpack(read, MASKED)
        u = counter.uniform(counter.key(secret(device), "uploaded mask", round_), MASKED)
        assert (mask == (u < sigmoid(scores))).all()
        masks[device, round_] = mask.tobytes()
    assert len(set(masks.values())) == 3


def test_the_federation_seed_does_not_reproduce_an_upload() -> None:
    method, down = FedPM(), Payload({"theta": np.full(MASKED, 0.7, np.float32), "head": np.zeros(39, np.float32)})
    t = steady_task(steady())
    updates = [local_round(method, replace(t, secret=s), None, down).update.arrays["mask.entropy"] for s in (1, 2)]
    assert updates[0].tobytes() != updates[1].tobytes()


@pytest.mark.parametrize("codec", ["bits", "rice", "auto"])
def test_a_mask_travels_by_the_codec_that_the_settings_name(codec: str) -> None:
    fleet = MaskFleet(FedPM(codec=codec))
    for _ in range(2):
        fleet.play(*DEVICES)
    assert set(fleet.local["a"].update.arrays) == {f"mask.{codec}"}
    assert (fleet.masks["a"] == own_mask(fleet, "a")).all()


@pytest.mark.parametrize("down", ["float32", "counts"])
def test_by_klms_the_server_has_the_very_mask_that_the_device_drew_at_a_tenth_of_the_bits(down: Any) -> None:
    big = mlp(300, 100, 3)
    fleet = MaskFleet(FedPM(codec="klms", down=down, theta0=0.9), big)
    for _ in range(3):
        fleet.play(*DEVICES)
    for d in DEVICES:
        mask = own_mask(fleet, d)
        assert (fleet.masks[d] == mask).all()
        (name, sent), *others = fleet.local[d].update.arrays.items()
        assert (name, others) == ("mask.klms", [])
        assert sent.nbytes < len(codecs.encode("entropy", mask, mask.size)) / 10


def test_by_klms_a_device_chooses_with_its_own_secret_among_candidates_of_its_own() -> None:
    down = Payload({"theta": np.full(MASKED, 0.7, np.float32), "head": np.zeros(39, np.float32)})
    method = FedPM(codec="klms")
    sent = {}
    for device, round_, own in (("a", 2, 1), ("a", 2, 2), ("b", 2, 1), ("a", 3, 1)):
        local = local_round(method, replace(steady_task(steady(), device, round_), secret=own), None, down)
        assert local.trained.mask is not None
        sent[device, round_, own] = local.trained.mask.tobytes()
    assert len(set(sent.values())) == 4


def test_an_update_of_more_blocks_than_its_parameters_have_is_refused() -> None:
    method, state = FedPM(codec="klms"), FedPM().start(course(M))
    assert method.update_limit(course(M)) > MASKED / 8
    for size in (0, MASKED // 8 + 1):
        with pytest.raises(PayloadError, match=f"{size} bytes are not a byte for each of 1 to {MASKED // 8} blocks"):
            method.read_update(assignment(M, round_=2), state, None, Payload({"mask.klms": np.zeros(size, np.uint8)}))


def test_a_codec_that_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"codec = 'zip'.*choose one of bits, rice, entropy, auto, fuse8.*, or klms"):
        make_method({"name": "fedpm", "codec": "zip"})


def test_an_array_coded_otherwise_than_the_settings_say_is_refused() -> None:
    method, state = FedPM(), FedPM().start(course(M))
    mask = np.ones(MASKED, np.bool_)
    for name in ("mask", "mask.bits", "mask.rice"):
        update = Payload({name: np.frombuffer(codecs.encode("entropy", mask, MASKED), np.uint8)})
        with pytest.raises(PayloadError, match=r"only \['mask.entropy'\] are used here"):
            method.read_update(assignment(M, round_=2), state, None, update)
    coded_mask = np.frombuffer(codecs.encode("entropy", mask, MASKED), np.uint8)
    method.read_update(assignment(M, round_=2), state, None, Payload({"mask.entropy": coded_mask}))
    both = Payload({"mask.entropy": coded_mask, "extra": coded_mask})
    with pytest.raises(PayloadError, match="extra"):
        method.read_update(assignment(M, round_=2), state, None, both)
