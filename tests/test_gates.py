"""Gates, group lasso and optimisers: by hand first, then against PyTorch's autograd and optimisers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import ConfigError
from edge_client.training.gates import Bernoulli, Gate, GroupLasso, SigmoidThreshold, SignTanh, draw, sigmoid
from edge_client.training.sgd import Adam, Sgd

S = np.array([0.0, -0.5, 2.0, -0.0, -np.inf], np.float32)
GATES: list[Gate] = [SigmoidThreshold(), SignTanh(), Bernoulli(), Bernoulli("ref")]


def slope(gate: Gate, scores: np.ndarray) -> np.ndarray:
    soft, out = np.empty((2, scores.size), np.float32)
    gate.soft(scores, soft)
    gate.slope(soft, out)
    return out


def test_the_sigmoid_gate_is_on_where_the_score_is_zero_or_more() -> None:
    assert SigmoidThreshold().forward(S).tolist() == [True, False, True, True, False]


def test_the_slope_of_the_sigmoid_gate_is_that_of_the_sigmoid() -> None:
    p = 1 / (1 + np.exp(-S.astype(float)))
    np.testing.assert_allclose(slope(SigmoidThreshold(), S), p * (1 - p), rtol=1e-5)
    assert slope(SigmoidThreshold(), S)[0] == 0.25


def test_the_sign_gate_takes_the_sign_of_zero_as_plus() -> None:
    assert SignTanh().forward(S).tolist() == [1, -1, 1, 1, 0]
    np.testing.assert_allclose(slope(SignTanh(), S), 1 - np.tanh(S.astype(float)) ** 2, rtol=1e-5)


def test_the_bernoulli_gate_draws_from_its_stream_and_has_two_slopes() -> None:
    p = 1 / (1 + np.exp(-S.astype(float)))
    assert Bernoulli().forward(S, 9).tolist() == draw(9, sigmoid(S)).tolist()
    np.testing.assert_allclose(slope(Bernoulli(), S), p * (1 - p), rtol=1e-5)
    np.testing.assert_allclose(slope(Bernoulli("ref"), S), p * p * (1 - p), rtol=1e-5)
    with pytest.raises(ValueError, match="stream"):
        Bernoulli().forward(S, None)


def test_a_draw_is_the_uniforms_of_the_stream_below_the_probabilities() -> None:
    # Number 0 of stream 0 is SplitMix64's first for seed 0: two 32-bit halves, low first, 24 bits of each.
    first = 0xE220A8397B1DCDAF
    low, high = (first & 0xFFFFFFFF) >> 8, first >> 40
    just_above = np.array([(low + 1) * 2**-24, (high + 1) * 2**-24], np.float32)
    assert draw(0, just_above).tolist() == [True, True]
    assert draw(0, np.array([low * 2**-24, high * 2**-24], np.float32)).tolist() == [False, False]
    assert draw(0, just_above[:1]).tolist() == [True]


@pytest.mark.parametrize("gate", GATES)
def test_a_dead_score_has_no_value_and_no_slope(gate: Gate) -> None:
    dead = np.full(1000, -np.inf, np.float32)
    assert not gate.forward(dead, 1).any()
    assert not slope(gate, dead).any()


@given(st.floats(-200, 200, width=32), st.sampled_from(GATES))
def test_any_score_gives_a_slope_between_0_and_1_without_warnings(score: float, gate: Gate) -> None:
    with np.errstate(all="raise", under="ignore"):
        found = slope(gate, np.full(4, score, np.float32))
    assert ((found >= 0) & (found <= 1)).all()


def test_the_sigmoid_is_exact_to_rounding() -> None:
    scores = np.linspace(-80, 80, 10_001).astype(np.float32)
    np.testing.assert_allclose(sigmoid(scores), 1 / (1 + np.exp(-scores.astype(float))), rtol=2e-6)
    assert sigmoid(np.array([-np.inf, -200, 200], np.float32)).tolist() == [0, 0, 1]


def test_group_lasso_of_a_two_by_two_layer_by_hand() -> None:
    # Rows and columns have one live entry each, of 3/4 and 1/2; d norm / d entry is 1, once in a row, once in a column.
    soft, out = np.array([0.75, 0, 0, 0.5], np.float32), np.empty(4, np.float32)
    GroupLasso((2, 2), 2.0).gradient(soft, out)
    np.testing.assert_allclose(out, [4, 0, 0, 4], rtol=1e-6)


def test_a_group_that_is_dead_as_a_whole_has_no_gradient() -> None:
    soft, out = np.array([0, 0.6, 0, 0.8], np.float32), np.empty(4, np.float32)
    GroupLasso((2, 2), 1.0).gradient(soft, out)
    np.testing.assert_allclose(out, [0, 1.6, 0, 1.8], rtol=1e-6)


SHAPES = [(7, 5), (3, 4, 3, 3), (1, 6), (6, 1, 2), (40, 900), (2, 70_000), (150, 900)]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.floats(0, 1), st.integers(0, 1000))
def test_lasso_equals_autograd(shape: tuple[int, ...], strength: float, seed: int) -> None:
    torch = pytest.importorskip("torch")
    soft = np.random.default_rng(seed).uniform(0.01, 1, int(np.prod(shape))).astype(np.float32)
    leaf = torch.tensor(soft, requires_grad=True)
    m = leaf.reshape(shape[0], shape[1], -1)
    penalty = strength * (m.square().sum((1, 2)).sqrt().sum() + m.square().sum((0, 2)).sqrt().sum())
    penalty.backward()
    out = np.empty_like(soft)
    GroupLasso(shape, strength).gradient(soft, out)
    np.testing.assert_allclose(out, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_pytorchs_sgd(momentum: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    p = rng.standard_normal(1000).astype(np.float32)
    leaf = torch.tensor(p, requires_grad=True)
    ours, theirs = Sgd(len(p), 0.1, momentum), torch.optim.SGD([leaf], 0.1, momentum=momentum)
    for _ in range(4):
        g = rng.standard_normal(len(p)).astype(np.float32)
        kept = g.copy()
        ours.step(p, g)
        np.testing.assert_array_equal(g, kept)
        leaf.grad = torch.tensor(g)
        theirs.step()
    np.testing.assert_allclose(p, leaf.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_adam_is_pytorchs_adam() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    p = rng.standard_normal(1000).astype(np.float32)
    leaf = torch.tensor(p, requires_grad=True)
    ours, theirs = Adam(len(p), 0.1), torch.optim.Adam([leaf], 0.1)
    for _ in range(4):
        g = rng.standard_normal(len(p)).astype(np.float32)
        ours.step(p, g)
        leaf.grad = torch.tensor(g)
        theirs.step()
    np.testing.assert_allclose(p, leaf.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        Sgd(3, 0.1, 1.0)
    with pytest.raises(ConfigError, match="lr"):
        Adam(3, -0.1)
    with pytest.raises(ValueError, match="made for 3"):
        Sgd(3, 0.1).step(np.zeros(4, np.float32), np.zeros(4, np.float32))
