"""One masked step: a gate on frozen weights, the gradient of its scores, and an optimiser that moves them.

    step = masked_step(SigmoidThreshold(), weights, scores, Sgd(scores.size, lr, momentum))
    step.effective(out)     # out = weights * g(scores), for the trainer
    step.step(gradient)     # scores move against (gradient * weights + dR/dsoft) * slope
    step.step(gradient, out)  # and the next effective weights in the same pass

With numba installed (extra `fast`) the same step runs compiled, equal to rounding.
"""

from __future__ import annotations

import numpy as np
from edge_kernels.compiled import loops

from edge_client.bundle import F32
from edge_client.training.gates import Bernoulli, Gate, GroupLasso, SigmoidThreshold, SignTanh
from edge_client.training.sgd import Optimiser


class MaskedStep:
    """The step by numpy. `weights` and `scores` are contiguous float32[n]; `scores` is moved in place."""

    def __init__(self, gate: Gate, weights: F32, scores: F32, optimiser: Optimiser, lasso: GroupLasso | None) -> None:
        if weights.shape != scores.shape or not (weights.flags.c_contiguous and scores.flags.c_contiguous):
            raise ValueError(
                f"a masked step needs contiguous vectors of one length, not {weights.shape}, {scores.shape}"
            )
        if lasso and isinstance(gate, SignTanh):
            raise ValueError("the group lasso pulls soft values to 0, where the sign gate has no dead weights")
        self.gate, self.weights, self.scores, self.optimiser, self.lasso = gate, weights, scores, optimiser, lasso
        self._soft, self._scratch, self._moved = np.zeros((3, scores.size), np.float32)

    def effective(self, out: F32, stream: int | None = None) -> None:
        """Write ``weights * g(scores)`` to `out`, float32[n]. A Bernoulli gate draws from the counter key `stream`."""
        np.multiply(self.weights, self.gate.forward(self.scores, stream), out=out)

    def gradient_of_scores(self, gradient: F32) -> F32:
        """dL/ds, float32[n], from `gradient` with respect to the effective weights; valid until the next call."""
        out, soft, scratch = self._moved, self._soft, self._scratch
        np.multiply(gradient, self.weights, out=out)
        self.gate.soft(self.scores, soft)
        if self.lasso:
            self.lasso.gradient(soft, scratch)
            out += scratch
        self.gate.slope(soft, scratch)
        out *= scratch
        return out

    def step(self, gradient: F32, out: F32 | None = None) -> None:
        """Move the scores against dL/ds. A gate that does not sample then writes the effective weights to `out`."""
        self.optimiser.step(self.scores, self.gradient_of_scores(gradient))
        if out is not None:
            self.effective(out)


def masked_step(
    gate: Gate,
    weights: F32,
    scores: F32,
    optimiser: Optimiser,
    lasso: GroupLasso | None = None,
    compiled: bool = True,
) -> MaskedStep:
    """The step of a gate with an optimiser; with `compiled` the compiled one where numba is installed.

    A gate of another package runs by numpy.
    """
    if compiled and isinstance(gate, SigmoidThreshold | SignTanh | Bernoulli):
        module = loops(__name__)
        if module is not None:
            step: MaskedStep = module.CompiledStep(gate, weights, scores, optimiser, lasso)
            return step
    return MaskedStep(gate, weights, scores, optimiser, lasso)
