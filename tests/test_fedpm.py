"""FedPM: the mask up, theta or counts down."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels import bits, codecs, counter
from mask_fleet import DEVICES, MASKED, Fleet, M, own_mask, steady, steady_task
from numpy_mlp import assignment, mlp, model

from edge_client.errors import PayloadError
from edge_client.methods.bernoulli import logistic
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.payload import Payload


def test_fedpm_sends_the_mask_it_drew_at_its_entropy() -> None:
    big = mlp(300, 100, 3)
    fleet = Fleet(FedPM(theta0=0.9), big)
    fleet.play(*DEVICES)
    fleet.play(*DEVICES)
    for d in DEVICES:
        mask = own_mask(fleet, d)
        assert (fleet.masks[d] == mask).all()
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


def test_devices_and_rounds_draw_their_uploads_apart() -> None:
    method, theta = FedPM(), np.full(MASKED, 0.7, np.float32)
    down = Payload({"theta": theta, "head": np.zeros(39, np.float32)})
    scores = np.log(theta.astype(np.float64) / (1 - theta.astype(np.float64))).astype(np.float32)
    masks = {}
    for device, round_ in (("a", 2), ("b", 2), ("a", 3)):
        t = steady_task(steady(), device, round_)  # no gradient: the device's theta is the one it got
        update = method.local_round(t, {}, down).update
        mask = bits.unpack(method.read_update(t.assignment, {}, {}, update)["mask"], MASKED)
        u = counter.uniform(counter.key(3, "uploaded mask", round_, device), MASKED)
        assert (mask == (u < logistic(scores))).all()
        masks[device, round_] = mask.tobytes()
    assert len(set(masks.values())) == 3


def test_an_array_coded_otherwise_than_the_settings_say_is_refused() -> None:
    method, state = FedPM(), FedPM().start(model(M), 3)
    mask = np.ones(MASKED, np.bool_)
    for name in ("mask", "mask.bits", "mask.rice"):
        update = Payload({name: np.frombuffer(codecs.encode("entropy", mask, MASKED), np.uint8)})
        with pytest.raises(PayloadError, match=r"'mask.entropy' was due"):
            method.read_update(assignment(M, round_=2), state, {}, update)
    coded_mask = np.frombuffer(codecs.encode("entropy", mask, MASKED), np.uint8)
    method.read_update(assignment(M, round_=2), state, {}, Payload({"mask.entropy": coded_mask}))
    both = Payload({"mask.entropy": coded_mask, "extra": coded_mask})
    with pytest.raises(PayloadError, match="extra"):
        method.read_update(assignment(M, round_=2), state, {}, both)
