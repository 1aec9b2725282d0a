"""The sampled step in one go, by numpy and compiled: against the Bernoulli gate and Adam one after another."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.training.compiled import CompiledSampledAdam
from edge_client.training.gates import BernoulliSigmoid
from edge_client.training.sampled_adam import BLOCK, SampledAdam, draw, sampled_adam
from edge_client.training.sgd import Adam

StepsOf = type[SampledAdam] | type[CompiledSampledAdam]
STEPS = [SampledAdam, CompiledSampledAdam]


def test_a_draw_is_the_streams_uniforms_below_the_probabilities() -> None:
    # Number 0 of stream 0 is SplitMix64's first for seed 0: two 32-bit halves, low first, 24 bits of each.
    first = 0xE220A8397B1DCDAF
    low, high = (first & 0xFFFFFFFF) >> 8, first >> 40
    just_above = np.array([(low + 1) * 2**-24, (high + 1) * 2**-24], np.float32)
    assert draw(0, just_above).tolist() == [True, True]
    assert draw(0, np.array([low * 2**-24, high * 2**-24], np.float32)).tolist() == [False, False]


def test_a_draw_may_be_made_piece_by_piece() -> None:
    p = np.random.default_rng(0).random(1001).astype(np.float32)
    assert np.array_equal(np.concatenate([draw(9, p[:600]), draw(9, p[600:], 600)]), draw(9, p))


@pytest.mark.parametrize("steps_of", STEPS)
def test_one_step_of_one_weight_by_hand(steps_of: StepsOf) -> None:
    # Whatever its size, Adam's first step is lr against the gradient's sign; theta = 1/2 for a score of 0.
    scores, out = np.zeros(1, np.float32), np.empty(1, np.float32)
    steps = steps_of(np.array([-3], np.float32), scores, 0.25)
    drawn = []
    for stream in range(200):
        steps.sample(stream, out)
        drawn.append(float(out[0]))
    assert set(drawn) == {0.0, -3.0}
    assert 70 < drawn.count(-3.0) < 130
    steps.step(np.array([2], np.float32))  # the gradient of the score is 2 * -3 / 4
    assert scores[0] == pytest.approx(0.25, rel=1e-6)
    assert steps.adam.mean[0] == pytest.approx(0.1 * -1.5, rel=1e-6)
    assert steps.adam.square[0] == pytest.approx(0.001 * 2.25, rel=1e-6)
    assert steps.adam.steps == 1


@pytest.mark.parametrize("steps_of", STEPS)
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 2047, 2049, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 5]),
    st.sampled_from(["identity", "ref"]),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.integers(0, 2**64 - 1),
)
def test_the_steps_are_gate_and_adam_one_after_another(
    steps_of: StepsOf, n: int, ste: str, radius: float, stream: int
) -> None:
    rng = np.random.default_rng(n)
    weights = rng.standard_normal(n).astype(np.float32)
    scores = rng.uniform(-radius, radius, n).astype(np.float32)
    apart, adam, steps = scores.copy(), Adam(n, 0.1), steps_of(weights, scores, 0.1, ste)
    out, due = np.empty((2, n), np.float32)
    for _ in range(3):
        gradient = rng.standard_normal(n).astype(np.float32)
        probability = (1 / (1 + np.exp(-apart.astype(float)))).astype(np.float32)
        gate = BernoulliSigmoid(draw(stream, probability), ste)
        gate.effective(weights, apart, due)
        steps.sample(stream, out)
        assert np.count_nonzero(out != due) <= 2  # a uniform that two roundings of a probability fall around
        gate.score_gradient(weights, apart, gradient, due)
        adam.step(apart, due)
        steps.step(gradient)
        clear = np.abs(due) > 1e-6  # Adam divides what is left of a vanishing gradient by its own size
        np.testing.assert_allclose(scores[clear], apart[clear], rtol=1e-4, atol=1e-4)
        scores[:] = apart


@pytest.mark.parametrize("steps_of", STEPS)
def test_scores_far_out_stay_finite_and_never_warn(steps_of: StepsOf) -> None:
    scores = np.array([-200, -88, 88, 200, 0], np.float32)
    steps, out = steps_of(np.ones(5, np.float32), scores, 0.1), np.empty(5, np.float32)
    with np.errstate(all="raise", under="ignore"):
        for stream in range(5):
            steps.sample(stream, out)
            assert out[:4].tolist() == [0, 0, 1, 1]
            steps.step(np.ones(5, np.float32))
    assert np.isfinite(scores).all()


def test_without_numba_the_steps_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    given = np.ones(4, np.float32), np.ones(4, np.float32), 0.1
    assert type(sampled_adam(*given)) is CompiledSampledAdam
    monkeypatch.setitem(sys.modules, "edge_client.training.compiled", None)
    assert type(sampled_adam(*given)) is SampledAdam
