"""Adam on the scores of Bernoulli masks: a fresh draw for every batch, its gradient straight through to the scores.

It computes what `BernoulliSigmoid` (gates.py) and `Adam` (sgd.py) compute one after another, with one exponential for
the probability and its slope. Which weights are masked, and where they lie, is the method's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.training.sgd import Adam

if TYPE_CHECKING:
    from edge_client.training.compiled import CompiledSampledAdam

_EXP_MAX = np.float32(40)  # past it the sigmoid is 0 to float32, and far enough from an overflow
BLOCK = 1 << 14  # values per pass, an even number: their five vectors stay in the second-level cache


class SampledAdam:
    """A draw m ~ Bern(sigmoid(s)), a gradient with respect to the weights under it, Adam's step on s; and again.

    dL/ds is ``gradient * weights * Psi(s)``, times ``sigmoid(s)`` for ``ste="ref"``. `weights` and `scores` are
    float32[n], `scores` is moved in place. `adam` has the moments.
    """

    def __init__(self, weights: F32, scores: F32, lr: float, ste: Literal["identity", "ref"] = "identity") -> None:
        self.adam = Adam(scores.size, lr)
        self._weights, self._scores, self._ref = weights, scores, ste == "ref"
        self._pull = np.empty_like(scores)  # the gradient of an effective weight, times this, is that of its score
        self._scratch: F32 = np.empty((2, min(scores.size, BLOCK)), np.float32)

    def sample(self, stream: int, out: F32) -> None:
        """Write the weights under the draw that the stream makes into `out`, float32[n]."""
        for low in range(0, self._scores.size, BLOCK):
            block = slice(low, low + BLOCK)
            s, w, pull = self._scores[block], self._weights[block], self._pull[block]
            soft, e = self._scratch[:, : s.size]
            np.negative(s, out=e)
            np.minimum(e, _EXP_MAX, out=e)
            np.exp(e, out=e)
            np.add(e, 1, out=soft)
            np.reciprocal(soft, out=soft)
            np.multiply(e, soft, out=pull)  # Psi = e / (1 + e)^2
            pull *= soft
            if self._ref:
                pull *= soft
            pull *= w
            np.multiply(w, draw(stream, soft, low), out=out[block])

    def step(self, gradient: F32) -> None:
        """One step against `gradient`, float32[n], with respect to the weights of the last draw; it is overwritten."""
        gradient *= self._pull
        self.adam.step(self._scores, gradient)


def sampled_adam(
    weights: F32, scores: F32, lr: float, ste: Literal["identity", "ref"] = "identity"
) -> SampledAdam | CompiledSampledAdam:
    """The steps, compiled where numba is installed: equal to rounding, a third of the time."""
    try:
        from edge_client.training.compiled import CompiledSampledAdam as Steps
    except (ImportError, OSError):  # the base install, or a numba that does not fit what is installed
        return SampledAdam(weights, scores, lr, ste)
    return Steps(weights, scores, lr, ste)


def draw(stream: int, probability: F32, start: int = 0) -> NDArray[np.bool_]:
    """Independent bits, one with the probability of each, from 24-bit uniforms: two to a number of the stream.

    They are the bits from `start`, an even number, on.
    """
    n = probability.size
    words = counter.uint64(stream, (n + 1) // 2, start // 2).astype("<u8", copy=False).view("<u4")[:n]
    words >>= np.uint32(8)
    uniform = words.view("<i4").astype(np.float32)  # signed integers are converted faster
    uniform *= np.float32(2**-24)
    bits: NDArray[np.bool_] = uniform < probability
    return bits
