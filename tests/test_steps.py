"""The masked step, by numpy and compiled: by hand, then against gate, lasso and optimiser one after another."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from edge_kernels.compiled import loops
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.bundle import F32
from edge_client.training import steps
from edge_client.training.gates import Bernoulli, Gate, GroupLasso, SigmoidThreshold, SignTanh
from edge_client.training.sgd import Adam, Sgd
from edge_client.training.steps import MaskedStep, masked_step
from edge_client.training.steps_compiled import CompiledStep

WAYS = pytest.mark.parametrize("compiled", [False, True])
SHAPES = [(1, 1), (7, 5), (3, 4, 3, 3), (1, 6), (6, 1, 2), (40, 900), (2, 7_000)]
GATES: list[Gate] = [SigmoidThreshold(), SignTanh(), Bernoulli(), Bernoulli("ref")]
Make = Callable[[int], Sgd | Adam]


def sgd(n: int) -> Sgd:
    return Sgd(n, 0.1, 0.9)


def adam(n: int) -> Adam:
    return Adam(n, 0.1)


@WAYS
def test_one_step_of_two_weights_by_hand(compiled: bool) -> None:
    # The slopes are 1/4 and 3/16: s -= 1/2 * (gradient 4 * weight 2) * 1/4, and 1/2 * (-1 * 3) * 3/16.
    scores, out = np.array([0.0, np.log(3.0)], np.float32), np.empty(2, np.float32)
    step = masked_step(SigmoidThreshold(), np.array([2, 3], np.float32), scores, Sgd(2, 0.5, 0.5), compiled=compiled)
    step.effective(out)
    assert out.tolist() == [2, 3]
    step.step(np.array([4, -1], np.float32))
    np.testing.assert_allclose(scores, [-1, np.log(3) + 9 / 32], rtol=1e-6)
    step.effective(out)
    assert out.tolist() == [0, 3]
    out[:] = np.nan
    step.step(np.zeros(2, np.float32), out)  # half of the last velocity
    np.testing.assert_allclose(scores, [-1.5, np.log(3) + 27 / 64], rtol=1e-6)
    assert out.tolist() == [0, 3]


@WAYS
def test_one_sampled_step_of_one_weight_by_hand(compiled: bool) -> None:
    # Adam's first step is lr against the sign of the gradient, whatever its size; p = 1/2 for a score of 0.
    scores, out, adam = np.zeros(1, np.float32), np.empty(1, np.float32), Adam(1, 0.25)
    step = masked_step(Bernoulli(), np.array([-3], np.float32), scores, adam, compiled=compiled)
    drawn = []
    for stream in range(200):
        step.effective(out, stream)
        drawn.append(float(out[0]))
    assert set(drawn) == {0.0, -3.0}
    assert 70 < drawn.count(-3.0) < 130
    step.step(np.array([2], np.float32))  # the gradient of the score is 2 * -3 / 4
    assert scores[0] == pytest.approx(0.25, rel=1e-6)
    assert adam.mean[0] == pytest.approx(0.1 * -1.5, rel=1e-6)
    assert adam.square[0] == pytest.approx(0.001 * 2.25, rel=1e-6)
    assert adam.steps == 1


@WAYS
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_dead_score_stays_dead_and_nothing_else_does(compiled: bool, gate: Gate, make: Make) -> None:
    weights, gradient = np.array([2.0, 3.0, 5.0, -7.0], np.float32), np.array([1.0, 10.0, -1.0, 0.5], np.float32)
    scores, out = np.array([-np.inf, 1.0, -np.inf, 0.5], np.float32), np.ones(4, np.float32)
    lasso = None if isinstance(gate, SignTanh) else GroupLasso((2, 2), 1.0)
    step = masked_step(gate, weights, scores, make(4), lasso, compiled)
    for stream in range(3):
        step.step(gradient)
        step.effective(out, stream)
        assert out[0] == out[2] == 0
    assert scores[0] == scores[2] == -np.inf
    assert np.isfinite(scores[[1, 3]]).all()
    assert not np.isin(scores, [1.0, 0.5]).any()


def by_hand(gate: Gate, weights: F32, scores: F32, gradient: F32, lasso: GroupLasso | None) -> np.ndarray:
    """dL/ds in float64, as gates.py states it."""
    s = scores.astype(float)
    with np.errstate(over="ignore"):
        p = 1 / (1 + np.exp(-s))
    soft, slope = (np.tanh(s), 1 - np.tanh(s) ** 2) if isinstance(gate, SignTanh) else (p, p * (1 - p))
    if gate == Bernoulli("ref"):
        slope = slope * p
    pull = np.zeros(len(s))
    if lasso:
        m = soft.reshape(lasso.shape[0], lasso.shape[1], -1)
        for axes in ((1, 2), (0, 2)):
            norm = np.sqrt(np.square(m).sum(axes, keepdims=True))
            pull += (lasso.strength * np.divide(m, norm, out=np.zeros_like(m), where=norm > 0)).reshape(-1)
    due: np.ndarray = (gradient.astype(float) * weights + pull) * slope
    return due


@WAYS
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(GATES),
    st.sampled_from(SHAPES),
    st.sampled_from([0.0, 1e-12, 0.01]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([sgd, adam]),
    st.integers(0, 2**64 - 1),
)
def test_the_step_is_gate_lasso_and_optimiser_one_after_another(
    compiled: bool,
    gate: Gate,
    shape: tuple[int, ...],
    strength: float,
    radius: float,
    dead: float,
    make: Make,
    stream: int,
) -> None:
    rng, n = np.random.default_rng(stream), int(np.prod(shape))
    weights = rng.standard_normal(n).astype(np.float32)
    scores = rng.uniform(-radius, radius, n).astype(np.float32)
    scores[rng.random(n) < dead] = -np.inf
    scores[: n // 4] = np.where(np.isneginf(scores[: n // 4]), -np.inf, np.float32(-0.0))  # -0 is not below zero
    lasso = GroupLasso(shape, strength) if strength and not isinstance(gate, SignTanh) else None
    apart, optimiser = scores.copy(), make(n)
    step, out = masked_step(gate, weights, scores, make(n), lasso, compiled), np.empty(n, np.float32)
    for _ in range(3):
        step.effective(out, stream)
        due = weights * gate.forward(scores, stream)
        assert np.count_nonzero(out != due) <= (2 if isinstance(gate, Bernoulli) else 0)  # a probability's rounding
        gradient = rng.standard_normal(n).astype(np.float32)
        pulled = by_hand(gate, weights, scores, gradient, lasso)
        np.testing.assert_allclose(step.gradient_of_scores(gradient), pulled, rtol=1e-4, atol=1e-6)
        samples = isinstance(gate, Bernoulli)
        step.step(gradient, None if samples else out)
        if not samples:
            np.testing.assert_array_equal(out, weights * gate.forward(scores, None))
        optimiser.step(apart, pulled.astype(np.float32))
        clear = np.abs(pulled) > 1e-3  # Adam divides what is left of a vanishing gradient by its own size
        np.testing.assert_allclose(scores[clear], apart[clear], rtol=1e-4, atol=1e-4)
        apart[:] = scores


@WAYS
def test_a_vanishing_lasso_trains_like_none(compiled: bool) -> None:
    rng, n, ends = np.random.default_rng(0), 300 * 40, []
    weights, gradient = rng.standard_normal((2, n)).astype(np.float32)
    for lasso in (None, GroupLasso((300, 40), 1e-30)):
        scores = np.full(n, 0.1, np.float32)
        step = masked_step(SigmoidThreshold(), weights, scores, Sgd(n, 10.0, 0.9), lasso, compiled)
        for _ in range(5):
            step.step(gradient)
        ends.append(scores)
    np.testing.assert_allclose(*ends, rtol=1e-5)


@WAYS
@pytest.mark.parametrize("gate", GATES)
def test_scores_far_out_stay_finite_and_never_warn(compiled: bool, gate: Gate) -> None:
    scores, out = np.array([-200, -88, 88, 200, 0], np.float32), np.empty(5, np.float32)
    step = masked_step(gate, np.ones(5, np.float32), scores, Adam(5, 0.1), compiled=compiled)
    with np.errstate(all="raise", under="ignore"):
        for stream in range(5):
            step.effective(out, stream)
            assert out[:4].tolist() == ([-1, -1, 1, 1] if isinstance(gate, SignTanh) else [0, 0, 1, 1])
            step.step(np.ones(5, np.float32))
    assert np.isfinite(scores).all()


@WAYS
def test_a_gradient_that_is_read_only_or_a_view_is_left_as_it_is(compiled: bool) -> None:
    gradient = np.arange(20, dtype=np.float32)
    gradient.setflags(write=False)
    scores = np.ones(10, np.float32)
    step = masked_step(SigmoidThreshold(), np.ones(10, np.float32), scores, Sgd(10, 0.1), compiled=compiled)
    step.step(gradient[5:15])
    np.testing.assert_allclose(scores, 1 - 0.1 * gradient[5:15] * 0.19661193, rtol=1e-5)


STEPS_IN_A_PROCESS = """
import hashlib
import numpy as np
from edge_client.training.gates import Bernoulli, GroupLasso, SigmoidThreshold
from edge_client.training.sgd import Adam, Sgd
from edge_client.training.steps import masked_step
rng = np.random.default_rng(0)
w, g = rng.standard_normal((2, 5000)).astype(np.float32)
s, out = rng.normal(0, 0.4, 5000).astype(np.float32), np.empty(5000, np.float32)
parts = [s, s.copy()]
sgd = masked_step(SigmoidThreshold(), w, parts[0], Sgd(5000, 1.0, 0.5), GroupLasso((50, 100), 0.1))
adam = masked_step(Bernoulli(), w, parts[1], Adam(5000, 0.1))
for i in range(3):
    sgd.step(g)
    adam.effective(out, i)
    adam.step(g)
print(hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
"""


def test_the_same_steps_give_the_same_bits_in_every_process() -> None:
    words = [sys.executable, "-c", STEPS_IN_A_PROCESS]
    first, second = (subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout for _ in range(2))
    assert first == second
    assert len(first) == 2 * hashlib.sha256().digest_size + 1


@WAYS
def test_vectors_that_would_have_to_be_copied_are_refused(compiled: bool) -> None:
    wide = np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        masked_step(SigmoidThreshold(), wide[:, 0], wide[:, 1].copy(), Sgd(4, 0.1), compiled=compiled)
    with pytest.raises(ValueError, match="one length"):
        masked_step(SigmoidThreshold(), np.ones(3, np.float32), np.ones(4, np.float32), Sgd(4, 0.1), compiled=compiled)


@WAYS
def test_a_lasso_on_a_gate_that_never_masks_is_refused(compiled: bool) -> None:
    ones = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="lasso"):
        masked_step(SignTanh(), ones, ones.copy(), Sgd(4, 0.1), GroupLasso((2, 2), 1.0), compiled)


@dataclass(frozen=True)
class Half:
    """Another package's gate."""

    def forward(self, scores: F32, stream: int | None) -> np.ndarray:
        return np.ones(scores.size, np.int8)

    def soft(self, scores: F32, out: F32) -> None:
        out[:] = scores

    def slope(self, soft: F32, out: F32) -> None:
        out[:] = 0.5


def test_without_numba_or_with_another_packages_gate_the_step_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, scores = np.ones(4, np.float32), np.ones(4, np.float32)
    assert type(masked_step(SigmoidThreshold(), weights, scores, Sgd(4, 0.1))) is CompiledStep
    other = masked_step(Half(), weights, scores, Sgd(4, 0.1))
    assert type(other) is MaskedStep
    other.step(np.ones(4, np.float32))
    assert scores.tolist() == pytest.approx([0.95] * 4)
    monkeypatch.setitem(sys.modules, "edge_client.training.steps_compiled", None)
    monkeypatch.setattr(steps, "loops", loops.__wrapped__)  # it remembers what it found
    assert type(masked_step(SigmoidThreshold(), weights, scores, Sgd(4, 0.1))) is MaskedStep
