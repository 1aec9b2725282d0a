"""SGD with momentum on the scores of one masked layer, gate and group lasso included, block by block.

It computes what `SigmoidThreshold`, `group_lasso` and `Sgd` compute one after another (gates.py, sgd.py), to
rounding, in one pass over the layer: a block is still in the cache when its next effective weights are written.
Which layers there are and where they lie is the method's part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.training.gates import BLOCK, SigmoidThreshold, group_norms, norm_scales, sigmoid, sigmoid_slope

_SIGN = np.int32(31)


class MaskedSgd:
    """``v = momentum * v + dL/ds;  s -= lr * v`` with `v` zero at first, for the scores s behind the sigmoid gate.

    dL/ds is ``Psi(s) * (gradient * weights + dR/dsigmoid)``, with R = `lasso` times the group norms of FedMask eq. 9
    at these very scores. `weights` and `scores` are float32[n], `scores` is moved in place; `shape` is the layer's,
    [out, in, ...]. A score of -inf is dead and stays so: when there are any, only the live ones are worked on.
    """

    def __init__(
        self, weights: F32, scores: F32, shape: tuple[int, ...], lr: float, momentum: float, lasso: float = 0.0
    ) -> None:
        scores += np.float32(0)  # -0 becomes +0, so that from here on the sign bit alone says whether s >= 0
        self._weights, self._scores = weights, scores
        self._live: NDArray[np.int64] | None = None
        self._width, self._kernel = scores.size // shape[0], scores.size // (shape[0] * shape[1])
        self._shape = shape
        if np.isneginf(scores.min(initial=0)):
            self._live = np.flatnonzero(~np.isneginf(scores))
            self._row, self._column = self._live // self._width, self._live % self._width // self._kernel
        self._momentum, self._lasso = np.float32(momentum), lasso * lr
        # The velocity is held times lr, so that a step has one multiplication less.
        self._pull: F32 = self._of_live(weights) * np.float32(lr)
        self._velocity: F32 = np.zeros_like(self._pull)
        height = max(1, BLOCK // self._width)
        self._blocks = [slice(low, low + height * self._width) for low in range(0, weights.size, height * self._width)]
        self._scratch: F32 = np.empty((2, min(height * self._width, weights.size)), np.float32)
        self._soft: F32 = np.empty_like(self._pull if lasso else self._pull[:0])

    def _of_live(self, values: F32) -> F32:
        return values if self._live is None else values[self._live]

    def effective(self, out: F32) -> None:
        """Write the effective weights into `out`, float32[n]; `step` keeps them up to date."""
        SigmoidThreshold().effective(self._weights, self._scores, out)

    def step(self, gradient: F32, out: F32) -> None:
        """One step against `gradient`, with respect to the effective weights; the next ones are written into `out`."""
        if self._live is None:
            scales = self._scales() if self._lasso else None
            for s in self._blocks:
                self._step_block(s, gradient[s], out[s], scales)
        elif self._live.size:
            self._step_live(gradient, out)

    def _scales(self) -> tuple[F32, F32]:
        """Lasso over norm of every row, and of every column of the layer as a matrix; leaves the sigmoid in `_soft`."""
        rows, columns = (norm_scales(n, self._lasso) for n in group_norms(self._scores, self._shape, self._soft))
        return rows[:, None], columns.repeat(self._kernel)

    def _step_block(self, s: slice, gradient: F32, out: F32, scales: tuple[F32, F32] | None) -> None:
        scores, velocity = self._scores[s], self._velocity[s]
        slope, move = self._scratch[:, : scores.size]
        np.multiply(gradient, self._pull[s], out=move)
        if scales is not None:
            rows = scales[0][s.start // self._width :][: move.size // self._width]
            np.add(rows, scales[1], out=slope.reshape(len(rows), -1))
            slope *= self._soft[s]
            move += slope
        sigmoid_slope(scores, slope)
        move *= slope
        velocity *= self._momentum
        velocity += move
        scores -= velocity
        sign = move.view(np.int32)
        np.right_shift(scores.view(np.int32), _SIGN, out=sign)
        np.invert(sign, out=sign)
        np.bitwise_and(sign, self._weights[s].view(np.int32), out=out.view(np.int32))

    def _step_live(self, gradient: F32, out: F32) -> None:
        live, scores = self._live, self._of_live(self._scores)
        slope = np.empty_like(scores)
        sigmoid_slope(scores, slope)
        move = gradient[live] * self._pull
        if self._lasso:
            sigmoid(scores, self._soft)
            square = np.square(self._soft)
            rows, columns = (
                norm_scales(np.sqrt(np.bincount(i, square, n)).astype(np.float32), self._lasso)
                for i, n in zip((self._row, self._column), self._shape[:2], strict=True)
            )
            move += self._soft * (rows[self._row] + columns[self._column])
        move *= slope
        self._velocity *= self._momentum
        self._velocity += move
        scores -= self._velocity
        self._scores[live] = scores
        out[live] = self._of_live(self._weights) * (scores >= 0)
