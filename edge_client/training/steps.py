"""One masked step: a gate on frozen weights, the gradient of its scores, and an optimiser that moves them.

    step = masked_step(SigmoidThreshold(), weights, scores, Sgd(scores.size, lr, momentum))
    step.effective(out)             # out = weights * g(scores), for the trainer
    step.step(gradient, pull)       # dL/ds = gradient * weights * slope(scores) + pull, then the optimiser

With numba installed (extra `fast`) the same step runs compiled, equal to rounding.
"""

from __future__ import annotations

import numpy as np

from edge_client.bundle import F32
from edge_client.training.gates import Bernoulli, Gate, SigmoidThreshold, SignTanh
from edge_client.training.sgd import Optimiser


class MaskedStep:
    """The step by numpy. `weights` and `scores` are contiguous float32[n]; `scores` is moved in place."""

    def __init__(self, gate: Gate, weights: F32, scores: F32, optimiser: Optimiser) -> None:
        if weights.shape != scores.shape or not (weights.flags.c_contiguous and scores.flags.c_contiguous):
            raise ValueError(
                f"a masked step needs contiguous vectors of one length, got {weights.shape}, {scores.shape}"
            )
        self.gate, self.weights, self.scores, self.optimiser = gate, weights, scores, optimiser
        self._moved: F32 = np.empty_like(scores)

    def effective(self, out: F32, stream: int | None = None) -> None:
        """Write ``weights * g(scores)`` to `out`, float32[n]. A Bernoulli gate draws from the counter key `stream`."""
        np.multiply(self.weights, self.gate.forward(self.scores, stream), out=out)

    def gradient_of_scores(self, gradient: F32, pull: F32 | None = None) -> F32:
        """dL/ds, float32[n], from `gradient` with respect to the effective weights; valid until the next call.

        `pull` is a further gradient with respect to the scores, such as that of the group lasso.
        """
        out = np.multiply(gradient, self.weights, out=self._moved)
        out *= self.gate.slope(self.scores)
        if pull is not None:
            out += pull
        return out

    def step(self, gradient: F32, pull: F32 | None = None) -> None:
        """Move the scores against dL/ds."""
        self.optimiser.step(self.scores, self.gradient_of_scores(gradient, pull))


def masked_step(
    gate: Gate, weights: F32, scores: F32, optimiser: Optimiser, compiled: bool | None = None
) -> MaskedStep:
    """The step of a gate with an optimiser; `compiled` None means compiled where numba is installed.

    A gate of another package runs by numpy. Raises ImportError for ``compiled=True`` without numba.
    """
    if compiled is not False and isinstance(gate, SigmoidThreshold | SignTanh | Bernoulli):
        try:
            from edge_client.training.compiled import CompiledStep
        except (ImportError, OSError):  # not installed, or a numba that does not fit what is installed
            if compiled:
                raise
        else:
            return CompiledStep(gate, weights, scores, optimiser)
    return MaskedStep(gate, weights, scores, optimiser)
