"""BNN-FedAvg: binary weights by hand, clipped latents, majority and mean. What it shares with HideNseek is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import grouped, mlp, model
from sign_fleet import MASKED, M, SignFleet, first, fixed_task, signs_of

from edge_client.errors import ConfigError, PayloadError
from edge_client.methods import make_method
from edge_client.methods.bnn import BnnFedAvg
from edge_client.methods.shared import signs
from edge_client.methods.shared.network import network
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment
from edge_client.training.gates import ClippedSign

DOWNS = ("sign", "count")


def test_a_weight_is_a_sign_times_the_root_mean_square_of_its_tensor() -> None:
    # The RMS is sqrt(7). Latents start at the weights over the largest; one step: s -= g sqrt(7), clipped to [-1, 1].
    m = grouped(mlp(2, 2, 2, bias=False))
    method = BnnFedAvg(lr=1, momentum=0, epochs=1, batch=64, restart="latent")
    t = fixed_task(m, [0.4, 0.1, 0.2, -9, 0, 0, 0, 0], [4, 2, -2, -2, 7, 7, 7, 7])
    done = first(method, t)
    root = 7**0.5
    assert done.kept.latents.tolist() == pytest.approx([1 - 0.4 * root, 0.5 - 0.1 * root, -1, 1])
    assert done.trained.parameters[:4] == pytest.approx(root * np.array([-1, 1, -1, 1]))
    assert done.trained.parameters[4:].tolist() == [7, 7, 7, 7]


def test_a_tensor_of_zeros_begins_undecided_and_trains() -> None:
    m = grouped(mlp(2, 2, 2, bias=False))
    t = fixed_task(m, np.ones(8), [0, 0, 0, 0, 7, 7, 7, 7])
    assert BnnFedAvg().sureness(network(t.assignment.course, None)).tolist() == [0] * 4
    assert np.isfinite(first(BnnFedAvg(epochs=1, restart="latent"), t).kept.latents).all()


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20))
def test_the_gradient_passes_within_the_range_of_a_latent_alone(latents: list[float]) -> None:
    s = np.array(latents, np.float32)
    soft, slope = np.zeros((2, s.size), np.float32)
    ClippedSign().soft(s, soft)
    ClippedSign().slope(soft, slope)
    assert slope.tolist() == [float(abs(x) <= 1) for x in s.tolist()]
    assert ClippedSign().forward(s).tolist() == [1 if x >= 0 else -1 for x in s.tolist()]
    assert ClippedSign().forward(np.array([-np.inf], np.float32)).tolist() == [0]


@settings(max_examples=5, deadline=None)
@given(st.floats(0.01, 5))
def test_latents_stay_in_their_range_whatever_the_rate(lr: float) -> None:
    fleet = SignFleet(BnnFedAvg(lr=lr, epochs=1, restart="latent"))
    fleet.play("a")
    latents = fleet.kept["a"].latents
    assert np.abs(latents).max() <= 1


@pytest.mark.parametrize("down", DOWNS)
def test_every_weight_of_a_layer_has_one_magnitude_and_the_bundles_signs_at_first(down: Any) -> None:
    fleet = SignFleet(BnnFedAvg(epochs=1, down=down))
    before = fleet.personal("z").parameters
    own = model(M).parameters
    for name in ("0.w", "1.w"):
        w, b = before[M.tensors[name].span], own[M.tensors[name].span]
        assert np.abs(w) == pytest.approx(np.sqrt(np.mean(b.astype(np.float64) ** 2)))
        assert np.array_equal(np.sign(w), np.where(b >= 0, 1, -1))
    assert np.array_equal(before[M.tensors["2.w"].span], own[M.tensors["2.w"].span])


def test_the_next_latents_are_the_mean_of_the_signs() -> None:
    fleet = SignFleet(BnnFedAvg(down="count"), grouped(mlp(2, 2, 2, bias=False)))
    fleet.fold({"a": ([1, -1, 1, -1], 9.0), "b": ([-1, 1, 1, -1], 1.0)})
    received = fleet.method.receive(Assignment(fleet.course, 2, "z"), None, fleet.ask("z"))
    assert fleet.method.latents(received, None).tolist() == [0, 0, 1, -1]
    majority = SignFleet(BnnFedAvg(), grouped(mlp(2, 2, 2, bias=False)))
    majority.fold({"a": ([1, -1, 1, -1], 9.0), "b": ([-1, 1, 1, -1], 1.0)})
    received = majority.method.receive(Assignment(fleet.course, 2, "z"), None, majority.ask("z"))
    assert majority.method.latents(received, None).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("down", DOWNS)
def test_only_signs_travel_and_late_devices_need_no_history(down: Any) -> None:
    fleet = SignFleet(BnnFedAvg(epochs=1, down=down))
    for _ in range(3):
        fleet.play("a", "b")
        assert all(set(u.arrays) == {"changes.auto"} for u in fleet.up.values())
    del fleet.kept["b"]
    fleet.play("b", "z")
    assert fleet.took_part == ["b", "z"]
    assert fleet.method.exchanged(fleet.course) == MASKED
    assert fleet.method.paper_bytes(fleet.course) == (MASKED, MASKED)
    due = 2 * fleet.state.plus.astype(int) >= fleet.state.votes
    assert np.array_equal(signs_of(fleet.method, model(M), fleet.personal("new")) > 0, due)


def test_a_malformed_payload_is_refused_in_words() -> None:
    fleet = SignFleet(BnnFedAvg(epochs=1, down="count"))
    fleet.play("a")
    a, good = Assignment(fleet.course, 2, "a"), fleet.ask("a")
    units = np.full(2, 255, np.uint8)
    wrong: tuple[tuple[Any, Any], ...] = (
        ({"counts": np.zeros(1, np.uint8)}, {}),
        ({"more": np.zeros(1)}, {}),
        ({"units": units}, {}),
        ({}, {"votes": 0}),
    )
    for arrays, meta in wrong:
        with pytest.raises(PayloadError):
            fleet.method.receive(a, None, Payload({**good.arrays, **arrays}, {**good.meta, **meta}))


def test_settings_out_of_range_are_refused_and_a_lone_layer_cannot_be_binary() -> None:
    for name, value in {"radius": 2, "down": "float", "lr": 0}.items():
        with pytest.raises(ConfigError, match=name):
            make_method({"name": "bnn", name: value})
    with pytest.raises(ConfigError, match=r"not the last one, and bundle .* has no other"):
        SignFleet(BnnFedAvg(), mlp(6, 3))


@pytest.mark.parametrize("restart", ["radius", "latent"])
def test_a_device_keeps_its_latents_only_where_it_restarts_from_them(restart: Any) -> None:
    fleet = SignFleet(BnnFedAvg(epochs=1, restart=restart))
    fleet.play("a")
    assert (fleet.kept["a"].latents is not None) is (restart == "latent")


def test_what_tells_of_a_flip_is_the_votes_in_32_levels_and_the_tensor_in_128() -> None:
    part = BnnFedAvg().parts(model(M)).masked
    assert [b.size for b in part.blocks] == [48, 40]
    place = np.repeat([0, 1], [48, 40])
    few = np.arange(MASKED) % 5
    found = signs.State(few.astype(np.uint8), 4).contexts(part)
    assert found.tolist() == (128 * few + place).tolist()
    many = np.arange(MASKED) % 64
    found = signs.State(many.astype(np.uint8), 63).contexts(part)
    assert found.tolist() == (128 * (many // 2) + place).tolist()


def test_what_is_trained_beside_the_signs_has_the_momentum_it_is_given() -> None:
    """Two steps of slope 1 at a rate of .1: 1 and 1 + momentum of it."""
    m = grouped(mlp(2, 2, 2, bias=False))
    for momentum, due in ((0.0, 0.2), (0.5, 0.25)):
        t = fixed_task(m, [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 7, 7, 7, 7])
        done = first(BnnFedAvg(local_lr=0.1, momentum=momentum, epochs=2, batch=64), t)
        assert done.trained.parameters[4:] == pytest.approx(7 - due)
