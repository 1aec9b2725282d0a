"""The masked step in one go, by numpy and compiled: by hand, then against gate, lasso and SGD one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edge_kernels import counter
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.training import compiled
from edge_client.training.compiled import CompiledMaskedSgd
from edge_client.training.gates import SigmoidThreshold, group_lasso
from edge_client.training.masked_sgd import MaskedSgd, masked_sgd
from edge_client.training.sgd import Sgd

StepOf = type[MaskedSgd] | type[CompiledMaskedSgd]
STEPS = [MaskedSgd, CompiledMaskedSgd]
SHAPES = [(7, 5), (3, 4, 3, 3), (1, 6), (6, 1, 2), (40, 900), (2, 70_000), (150, 900)]


@pytest.mark.parametrize("step_of", STEPS)
def test_a_dead_score_stays_dead_and_nothing_else_does(step_of: StepOf) -> None:
    weights, gradient = np.array([2.0, 3.0, 5.0, -7.0], np.float32), np.array([1.0, 10.0, -1.0, 0.5], np.float32)
    scores = np.array([-np.inf, 1.0, -np.inf, 0.5], np.float32)
    out = np.ones(4, np.float32)
    sgd = step_of(weights, scores, out, (2, 2), 0.1, 0.9, lasso=1.0)
    for _ in range(3):
        sgd.step(gradient)
    assert out[0] == out[2] == 0
    assert scores[0] == scores[2] == -np.inf
    assert np.isfinite(scores[[1, 3]]).all()


@pytest.mark.parametrize("step_of", STEPS)
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([0.0, 1e-12, 0.01]),
    st.sampled_from([0.1, 0.5, 1.0, 5.0]),
    st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    st.integers(0, 1000),
)
def test_the_step_in_one_go_is_gate_lasso_and_sgd_one_after_another(
    step_of: StepOf, shape: tuple[int, ...], lasso: float, radius: float, dead: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape))
    weights = rng.standard_normal(n).astype(np.float32)
    scores = rng.uniform(-radius, radius, n).astype(np.float32)
    scores[rng.random(n) < dead] = -np.inf
    scores[: n // 4] = np.where(np.isneginf(scores[: n // 4]), -np.inf, np.float32(-0.0))  # -0 is not below zero
    gate, apart, sgd = SigmoidThreshold(), scores.copy(), Sgd(n, 0.1, 0.9)
    got, due, slope = np.empty((3, n), np.float32)
    one_go = step_of(weights, scores, got, shape, 0.1, 0.9, lasso)
    gate.effective(weights, apart, due)
    np.testing.assert_array_equal(got, due)
    for _ in range(3):
        gradient = rng.standard_normal(n).astype(np.float32)
        one_go.step(gradient)
        gate.score_gradient(weights, apart, gradient, slope)
        if lasso:
            group_lasso(apart, shape, lasso, slope)
        sgd.step(apart, slope)
        np.testing.assert_allclose(scores, apart, rtol=1e-5, atol=5e-5)  # the slope's polynomial
        gate.effective(weights, scores, due)
        np.testing.assert_array_equal(got, due)


@pytest.mark.parametrize("step_of", STEPS)
def test_a_vanishing_lasso_trains_like_none(step_of: StepOf) -> None:
    rng = np.random.default_rng(0)
    n = 300 * 40
    weights, gradient = rng.standard_normal((2, n)).astype(np.float32)
    ends = []
    for lasso in (0.0, 1e-30):
        scores, out = np.full(n, 0.1, np.float32), np.empty(n, np.float32)
        step = step_of(weights, scores, out, (300, 40), 10.0, 0.9, lasso)
        for _ in range(5):
            step.step(gradient)
        ends.append(scores)
    np.testing.assert_allclose(*ends, rtol=1e-4)  # the slope's polynomial


@pytest.mark.parametrize("step_of", STEPS)
def test_one_step_of_two_weights_by_hand(step_of: StepOf) -> None:
    # Psi(0) = 1/4, Psi(log 3) = 3/16: s -= 1/2 * (gradient 4 * weight 2) * 1/4, and 1/2 * (-1 * 3) * 3/16.
    scores, out = np.array([0.0, np.log(3.0)], np.float32), np.empty(2, np.float32)
    step = step_of(np.array([2, 3], np.float32), scores, out, (1, 2), 0.5, 0.5)
    assert out.tolist() == [2, 3]
    step.step(np.array([4, -1], np.float32))
    np.testing.assert_allclose(scores, [-1, np.log(3) + 9 / 32], rtol=3e-5)
    assert out.tolist() == [0, 3]
    step.step(np.zeros(2, np.float32))  # half of the last velocity
    np.testing.assert_allclose(scores, [-1.5, np.log(3) + 27 / 64], rtol=3e-5)


def test_far_scores_move_as_far_as_the_sigmoid_is_steep() -> None:
    step_of = STEPS[-1]
    scores = np.linspace(-80, 80, 4001).astype(np.float32)
    before, out, weights = scores.astype(float), np.empty(4001, np.float32), np.full(4001, 1e6, np.float32)
    step = step_of(weights, scores, out, (1, 4001), 1.0, 0.9)
    step.step(np.ones(4001, np.float32))
    e = np.exp(-np.abs(before))
    np.testing.assert_allclose(step._velocity.ravel(), 1e6 * e / (1 + e) ** 2, rtol=2e-6, atol=1e-30)


STEPS_IN_A_PROCESS = """
import hashlib
import numpy as np
from edge_client.training.compiled import CompiledMaskedSgd, CompiledSampledAdam
rng = np.random.default_rng(0)
w, g = rng.standard_normal((2, 5000)).astype(np.float32)
s, out = rng.normal(0, 0.4, 5000).astype(np.float32), np.empty(5000, np.float32)
masked, sampled = CompiledMaskedSgd(w, s.copy(), out, (50, 100), 1.0, 0.5, 0.1), CompiledSampledAdam(w, s, 0.1)
for i in range(3):
    masked.step(g)
    sampled.sample(i, out)
    sampled.step(g)
parts = masked._scores, masked._velocity, s, sampled.adam.mean, sampled.adam.square
print(hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
"""


def steps_in_a_process(**environment: str) -> bytes:
    clean = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    words = [sys.executable, "-c", STEPS_IN_A_PROCESS]
    return subprocess.run(words, env=clean | environment, check=True, stdout=subprocess.PIPE).stdout


def test_whoever_compiles_gets_the_same_bits_as_whoever_loads_and_a_damaged_cache_is_begun_anew(
    tmp_path: Path,
) -> None:
    fresh = steps_in_a_process(NUMBA_CACHE_DIR=str(tmp_path))
    assert steps_in_a_process(NUMBA_CACHE_DIR=str(tmp_path)) == fresh
    kept = sorted(path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc"))
    assert kept
    whole = {path: path.read_bytes() for path in kept}
    for i, path in enumerate(kept):  # code with a hole would not raise, it would crash
        hole = whole[path][:400] + bytes(400) + whole[path][800:]
        path.write_bytes(hole if path.suffix == ".nbc" else b"" if i % 2 else whole[path][:20])
    assert steps_in_a_process(NUMBA_CACHE_DIR=str(tmp_path)) == fresh
    assert all(len(path.read_bytes()) > 20 for path in kept)
    again = {path: path.read_bytes() for path in kept}
    assert steps_in_a_process(NUMBA_CACHE_DIR=str(tmp_path)) == fresh
    assert {path: path.read_bytes() for path in kept} == again  # what is whole is used


def test_it_compiles_where_no_cache_can_be_written() -> None:
    nowhere = steps_in_a_process(NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator")
    assert steps_in_a_process(NUMBA_CACHE_DIR="/dev/full/of/nothing") == nowhere


def test_a_hole_in_machine_code_is_seen(tmp_path: Path) -> None:
    file = compiled._CheckedFile(str(tmp_path), "step", 1)
    file.save("key", bytes(1000))
    assert file.load("key") == bytes(1000)
    code = next(tmp_path.glob("*.nbc"))
    code.write_bytes(code.read_bytes()[:500] + b"?" + code.read_bytes()[501:])
    with pytest.raises(ValueError, match="damaged"):
        file.load("key")


def test_a_change_of_what_is_compiled_in_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counter.GAMMA in compiled._CONSTANTS
    step, keys = compiled._step, []
    for constants in (compiled._CONSTANTS, (1,)):
        monkeypatch.setattr(compiled, "_CONSTANTS", constants)
        keys.append(step._cache._index_key((), step.targetctx.codegen()))
    assert keys[0] != keys[1]


def test_vectors_that_would_have_to_be_copied_are_refused() -> None:
    wide = np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        CompiledMaskedSgd(wide[:, 0], wide[:, 1].copy(), np.ones(4, np.float32), (2, 2), 0.1, 0.9)


def test_without_numba_the_step_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    given = np.ones(4, np.float32), np.ones(4, np.float32), np.empty(4, np.float32), (2, 2), 0.1, 0.9
    assert type(masked_sgd(*given)) is STEPS[-1]
    monkeypatch.setitem(sys.modules, "edge_client.training.compiled", None)
    assert type(masked_sgd(*given)) is MaskedSgd
