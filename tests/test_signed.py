"""Signed: what differs from FedMask, whose tests hold for everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edge_kernels import bits
from numpy_mlp import mlp, model
from sign_fleet import SignFleet, fixed_task

from edge_client.errors import ConfigError
from edge_client.methods import make_method
from edge_client.methods.fedmask.method import Choice
from edge_client.methods.signed import Signed

M = mlp(6, 8, 5, 3)
LIVE = round(0.8 * 48) + round(0.8 * 40)


def fleet(**settings: Any) -> Any:
    """A federation over bytes; the fleet of the sign methods serves every method."""
    made: Any = Signed(**{"epochs": 1, **settings})
    return SignFleet(made, M)


def test_a_live_weight_is_minus_or_plus_itself_and_a_pruned_one_is_zero() -> None:
    # Latents start at .1. |g| W^2 (1 - tanh(.1)^2) ranks 4, 1, 16, .01: the first three stay. Then one step of lr 1
    # from .1: s -= g W (1 - tanh(.1)^2).
    m = mlp(2, 2, 2, bias=False)
    method = Signed(keep=0.75, prune_layers=1, lr=1, momentum=0, epochs=1, batch=64, radius=0.1, restart="latent")
    t = fixed_task(m, [1, 1, -1, 1, 0, 0, 0, 0], [2, -1, -4, 0.1, 5, 5, 5, 5])
    a = t.assignment
    down = method.downlink(a.course, 1, method.start(a.course), None)
    done = method.local_round(t, None, method.receive(a, None, down))
    slope = 1 - np.tanh(0.1) ** 2
    assert done.kept.scores[:3] == pytest.approx([0.1 - 2 * slope, 0.1 + slope, 0.1 - 4 * slope])
    assert done.kept.scores[3] == -np.inf
    assert done.trained.parameters.tolist() == [-2, -1, 4, 0, 5, 5, 5, 5]
    assert done.trained.mask is not None
    assert done.trained.mask.tolist() == [True, True, True, False, True, True, True, True]


def test_one_bit_a_live_element_both_ways_and_the_head_stays() -> None:
    f = fleet(codec="bits")
    f.play("a", "b")
    f.play("a", "b")
    assert set(f.up["a"].arrays) == {"changes.bits"}
    assert f.up["a"].arrays["changes.bits"].nbytes == bits.size(LIVE)
    assert f.ask("a").arrays["changes.bits"].nbytes == bits.size(LIVE)
    assert f.method.paper_bytes(f.course) == (LIVE, 88)  # a byte a sign


def test_a_personal_model_has_the_averaged_signs_inside_the_devices_structure() -> None:
    f = fleet()
    f.play("a", "b", "c")
    mine, own = f.personal("a"), f.course.model.parameters
    masked = f.method.division(f.course.model).masked
    live = f.method.division(f.course.model).expand(f.kept["a"].held.structure)
    found, drawn = masked.gather(mine.parameters), masked.gather(own)
    assert np.array_equal(np.abs(found), np.abs(drawn) * live)
    plus = np.where(f.state.averaged == 1, f.state.share >= 0.5, found == drawn)
    assert np.array_equal((found == drawn)[live], plus[live])
    assert not masked.gather(f.personal("new").parameters == 0).any()


def test_the_defaults_are_the_tables_for_drawn_weights_and_careful_for_trained_ones() -> None:
    trained = model(M.model_copy(update={"seed": None}))
    assert Signed().chosen(model(M)) == Choice(keep=0.8, head="local", group_lasso=0, restart="radius", lr=10)
    assert Signed().chosen(trained) == Choice(keep=1, head="masked", group_lasso=0, restart="latent", lr=0.1)
    assert Signed().radius == 1


def test_the_sign_gate_has_no_lasso() -> None:
    assert Signed().drawn.group_lasso == Signed().trained.group_lasso == 0
    with pytest.raises(ConfigError, match="group_lasso"):
        make_method({"name": "signed", "group_lasso": 1e-4})
