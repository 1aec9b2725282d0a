"""The masked step with numba (extra `fast`): one pass over the vectors where numpy needs eight.

numpy computes the exponentials, which it vectorises and LLVM does not; a kernel does the rest. Nothing imports this
module unless numba is installed. A kernel compiles at its first call in every process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from edge_kernels import counter
from numba import njit

from edge_client.bundle import F32
from edge_client.training.gates import Bernoulli, Gate, SigmoidThreshold, SignTanh
from edge_client.training.sgd import Optimiser
from edge_client.training.steps import MaskedStep

_U, _F, _I = np.uint64, np.float32, np.int32
_ZERO, _ONE, _ULP = _F(0), _F(1), _F(2**-24)
_GAMMA, _MIX_A, _MIX_B = _U(counter.GAMMA), _U(counter.MIX_A), _U(counter.MIX_B)


class CompiledStep(MaskedStep):
    """What `MaskedStep` is, equal to rounding, for the gates of gates.py."""

    gate: SigmoidThreshold | SignTanh | Bernoulli

    def __init__(self, gate: Gate, weights: F32, scores: F32, optimiser: Optimiser) -> None:
        super().__init__(gate, weights, scores, optimiser)
        self._falloff: F32 = np.empty_like(scores)
        self._uniform: F32 = np.empty((scores.size + 1) // 2 * 2 if isinstance(gate, Bernoulli) else 0, np.float32)

    def effective(self, out: F32, stream: int | None = None) -> None:
        """See `MaskedStep.effective`."""
        if isinstance(self.gate, Bernoulli) and stream is not None:
            _draw(_U(stream), self._uniform)
            _apply(self._uniform, self.scores, self._exponentials(), self.weights, out)
        else:
            super().effective(out, stream)

    def gradient_of_scores(self, gradient: F32, pull: F32 | None = None) -> F32:
        """See `MaskedStep.gradient_of_scores`."""
        gain, ref = _F(self.gate.steepness**2), isinstance(self.gate, Bernoulli) and self.gate.ste == "ref"
        _gradient(gradient, self.weights, self.scores, self._exponentials(), gain, ref, pull, self._moved)
        return self._moved

    def _exponentials(self) -> F32:
        e = np.abs(self.scores, out=self._falloff)
        e *= _F(-self.gate.steepness)
        return np.exp(e, out=e)


@njit(error_model="numpy")
def _gradient(g: Any, w: Any, s: Any, e: Any, gain: Any, ref: Any, pull: Any, out: Any) -> None:
    for j in range(s.size):
        below = _ONE / (_ONE + e[j])
        slope = gain * e[j] * below * below
        if ref:
            slope *= below if s[j] >= _ZERO else e[j] * below
        out[j] = g[j] * w[j] * slope
        if pull is not None:
            out[j] += pull[j]


@njit(error_model="numpy")
def _draw(stream: Any, uniform: Any) -> None:
    """The uniforms of `gates.draw`, float32[2 n]."""
    for i in range(uniform.size // 2):
        z = stream + _U(i + 1) * _GAMMA
        z = (z ^ (z >> _U(30))) * _MIX_A
        z = (z ^ (z >> _U(27))) * _MIX_B
        z ^= z >> _U(31)
        uniform[2 * i] = _F(_I((z >> _U(8)) & _U(0xFFFFFF))) * _ULP
        uniform[2 * i + 1] = _F(_I(z >> _U(40))) * _ULP


@njit(error_model="numpy")
def _apply(uniform: Any, s: Any, e: Any, w: Any, out: Any) -> None:
    """The weights whose uniform is below the sigmoid of the score."""
    for j in range(s.size):
        share = _ONE if s[j] >= _ZERO else e[j]
        out[j] = w[j] if uniform[j] * (_ONE + e[j]) < share else _ZERO
