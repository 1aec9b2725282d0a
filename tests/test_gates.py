"""Gates, group lasso and optimisers: by hand first, then against PyTorch's autograd and optimisers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import ConfigError
from edge_client.training.gates import (
    BLOCK,
    BernoulliSigmoid,
    Gate,
    NoGate,
    SigmoidThreshold,
    SignTanh,
    group_lasso,
    sigmoid,
    sigmoid_slope,
)
from edge_client.training.sgd import Adam, Sgd

W = np.array([2.0, 3.0, 5.0, -7.0], np.float32)
S = np.array([0.0, -0.5, 2.0, -0.0], np.float32)
G = np.array([1.0, 10.0, -1.0, 0.5], np.float32)


def _effective(gate: Gate, scores: np.ndarray = S) -> list[float]:
    out = np.full(4, np.nan, np.float32)
    gate.effective(W, scores, out)
    return out.tolist()


def _gradient(gate: Gate, scores: np.ndarray = S) -> np.ndarray:
    out = np.full(4, np.nan, np.float32)
    gate.score_gradient(W, scores, G, out)
    return out


def test_the_sigmoid_gate_keeps_weights_whose_score_is_zero_or_more() -> None:
    assert _effective(SigmoidThreshold()) == [2.0, 0.0, 5.0, -7.0]


def test_the_sigmoid_gate_passes_the_gradient_through_the_sigmoids_slope() -> None:
    p = 1 / (1 + np.exp(-S.astype(float)))
    np.testing.assert_allclose(_gradient(SigmoidThreshold()), G * W * p * (1 - p), rtol=1e-5)
    assert _gradient(SigmoidThreshold())[0] == pytest.approx(0.5, rel=1e-5)  # 1 * 2 * 1/4


def test_the_sign_gate_flips_weights_and_takes_the_sign_of_zero_as_plus() -> None:
    assert _effective(SignTanh()) == [2.0, -3.0, 5.0, -7.0]
    np.testing.assert_allclose(_gradient(SignTanh()), G * W * (1 - np.tanh(S.astype(float)) ** 2), rtol=1e-5)


def test_the_bernoulli_gate_keeps_its_sample_and_has_two_backward_rules() -> None:
    sample = np.array([False, True, True, False])
    assert _effective(BernoulliSigmoid(sample)) == [0.0, 3.0, 5.0, -0.0]
    p = 1 / (1 + np.exp(-S.astype(float)))
    np.testing.assert_allclose(_gradient(BernoulliSigmoid(sample)), G * W * p * (1 - p), rtol=1e-5)
    np.testing.assert_allclose(_gradient(BernoulliSigmoid(sample, "ref")), G * W * p * p * (1 - p), rtol=1e-5)


def test_no_gate_is_plain_training() -> None:
    assert _effective(NoGate()) == S.tolist()
    np.testing.assert_array_equal(_gradient(NoGate()), G)


def test_a_dead_score_stays_dead_and_pulls_nothing() -> None:
    scores = np.array([-np.inf, 1.0, -np.inf, 0.5], np.float32)
    assert _effective(SigmoidThreshold(), scores) == [0.0, 3.0, 0.0, -7.0]
    gradient = _gradient(SigmoidThreshold(), scores)
    assert gradient[0] == gradient[2] == 0
    alone = np.zeros(4, np.float32)
    value = group_lasso(scores, (2, 2), 1.0, alone)
    a, b = 1 / (1 + np.e**-1), 1 / (1 + np.e**-0.5)
    assert value == pytest.approx(a + b + np.hypot(a, b))  # two rows, and the one live column
    assert alone[0] == alone[2] == 0


@given(st.floats(-200, 200, width=32), st.sampled_from([SigmoidThreshold(), SignTanh()]))
def test_any_score_gives_a_finite_gradient_without_warnings(score: float, gate: Gate) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(_gradient(gate, np.full(4, score, np.float32))).all()


@pytest.mark.parametrize("gate", [NoGate(), SigmoidThreshold(), SignTanh()])
def test_vectors_longer_than_a_block_and_outputs_in_place_change_nothing(gate: Gate) -> None:
    rng = np.random.default_rng(0)
    n = 2 * BLOCK + 17
    w, s, g = rng.standard_normal((3, n)).astype(np.float32)
    out = np.empty(n, np.float32)
    gate.score_gradient(w, s, g, out)
    parts = np.concatenate([_block(gate, w, s, g, i) for i in range(0, n, 1000)])
    np.testing.assert_allclose(out, parts, rtol=1e-5)
    gate.score_gradient(w, s, g, g)
    np.testing.assert_array_equal(out, g)


def _block(gate: Gate, w: np.ndarray, s: np.ndarray, g: np.ndarray, low: int) -> np.ndarray:
    part = slice(low, min(low + 1000, len(w)))
    out = np.empty(part.stop - low, np.float32)
    gate.score_gradient(w[part], s[part], g[part], out)
    return out


@pytest.mark.parametrize("radius", [0.1, 0.25, 0.26, 0.7, 0.71, 1.2, 1.21, 30.0])
def test_sigmoid_and_slope_are_exact_to_rounding_at_every_radius(radius: float) -> None:
    scores = np.linspace(-radius, radius, 10_001).astype(np.float32)
    out = np.empty_like(scores)
    sigmoid_slope(scores, out)
    e = np.exp(-np.abs(scores.astype(float)))
    np.testing.assert_allclose(out, e / (1 + e) ** 2, rtol=2.5e-5)
    sigmoid(scores, out)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-scores.astype(float))), rtol=2e-6)


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        SigmoidThreshold().effective(W, S[:3], np.empty(4, np.float32))


def test_group_lasso_of_a_two_by_two_layer_by_hand() -> None:
    # sigmoid(log 3) = 3/4, sigmoid(0) = 1/2: rows (3/4, 0...) have norms from 3/4 and 1/2 alone.
    scores = np.array([np.log(3.0), -np.inf, -np.inf, 0.0], np.float32)
    out = np.zeros(4, np.float32)
    assert group_lasso(scores, (2, 2), 2.0, out) == pytest.approx(2.0 * (0.75 + 0.5 + 0.75 + 0.5))
    # d/ds of 2 * (norm of row + norm of column) = 2 * (1 + 1) * sigmoid' for the only live entry of each.
    np.testing.assert_allclose(out, [4 * 0.75 * 0.25, 0, 0, 4 * 0.25], rtol=1e-5)


SHAPES = [(7, 5), (3, 4, 3, 3), (1, 6), (6, 1, 2), (40, 900), (2, 70_000), (150, 900)]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.floats(0, 1), st.sampled_from([0.1, 0.5, 1.0, 5.0]), st.integers(0, 1000))
def test_lasso_equals_autograd(shape: tuple[int, ...], strength: float, radius: float, seed: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    s = rng.uniform(-radius, radius, int(np.prod(shape))).astype(np.float32)
    leaf = torch.tensor(s, requires_grad=True)
    m = torch.sigmoid(leaf).reshape(shape[0], shape[1], -1)
    penalty = strength * (m.square().sum((1, 2)).sqrt().sum() + m.square().sum((0, 2)).sqrt().sum())
    penalty.backward()
    out = np.zeros_like(s)
    assert group_lasso(s, shape, strength, out) == pytest.approx(float(penalty.detach()), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(out, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01), (0.0, 0.1)])
def test_sgd_is_pytorchs_sgd(momentum: float, decay: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    p = rng.standard_normal(BLOCK + 5).astype(np.float32)
    leaf = torch.tensor(p, requires_grad=True)
    ours = Sgd(len(p), 0.1, momentum, decay)
    theirs = torch.optim.SGD([leaf], 0.1, momentum=momentum, weight_decay=decay)
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
    p = rng.standard_normal(BLOCK + 5).astype(np.float32)
    leaf = torch.tensor(p, requires_grad=True)
    ours, theirs = Adam(len(p), 0.1, weight_decay=0.01), torch.optim.Adam([leaf], 0.1, weight_decay=0.01)
    for _ in range(4):
        g = rng.standard_normal(len(p)).astype(np.float32)
        ours.step(p, g)
        leaf.grad = torch.tensor(g)
        theirs.step()
    np.testing.assert_allclose(p, leaf.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        Sgd(3, 0.1, 1.0)
    with pytest.raises(ConfigError, match="betas"):
        Adam(3, 0.1, betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="made for 3"):
        Sgd(3, 0.1).step(np.zeros(4, np.float32), np.zeros(4, np.float32))
