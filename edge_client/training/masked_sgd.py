"""SGD with momentum on the scores of one masked layer, gate and group lasso included, block by block.

It computes what `SigmoidThreshold`, `group_lasso` and `Sgd` compute one after another (gates.py, sgd.py), to the
precision of the slope's polynomial, in fewer passes over the layer. Which layers there are and where they lie is the
method's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.training.gates import (
    SigmoidThreshold,
    group_norms,
    norm_scales,
    scaled_slope,
    sigmoid,
    sigmoid_slope,
)

if TYPE_CHECKING:
    from edge_client.training.compiled import CompiledMaskedSgd

BLOCK = 1 << 19  # values per pass: the calls of a shorter one cost more than the cache gives back
_FEW = 64  # when fewer than one in so many groups of eight weights changed, only those groups are written
_EIGHT = np.arange(8)


@dataclass
class _Block:
    """Views of some of the layer's rows. `pull` is weights * lr * `scale`; `on`, padded, is which scores are >= 0."""

    span: slice
    scores: F32
    weights: F32
    velocity: F32
    pull: F32
    out: F32
    on: NDArray[np.bool_]
    scale: float


class MaskedSgd:
    """``v = momentum * v + dL/ds;  s -= lr * v`` with `v` zero at first, for the scores s behind the sigmoid gate.

    dL/ds is ``Psi(s) * (gradient * weights + dR/dsigmoid)``, with R = `lasso` times the group norms of FedMask eq. 9
    at these very scores. `weights` and `scores` are float32[n], `scores` is moved in place; `shape` is the layer's,
    [out, in, ...]. `effective` float32[n] gets the effective weights, at once and after each step; nobody else may
    write there. A score of -inf is dead and stays so: when there are any, only the live ones are worked on.
    """

    def __init__(
        self,
        weights: F32,
        scores: F32,
        effective: F32,
        shape: tuple[int, ...],
        lr: float,
        momentum: float,
        lasso: float = 0.0,
    ) -> None:
        SigmoidThreshold().effective(weights, scores, effective)
        self._weights, self._scores, self._effective = weights, scores, effective
        self._shape, self._lr, self._momentum, self._lasso = shape, lr, np.float32(momentum), lasso * lr
        self._width, self._kernel = scores.size // shape[0], scores.size // (shape[0] * shape[1])
        self._live: NDArray[np.int64] | None = None
        if np.isneginf(scores.min(initial=0)):
            self._live = np.flatnonzero(~np.isneginf(scores))
            self._row, self._column = self._live // self._width, self._live % self._width // self._kernel
        # The velocity is held times lr, so that a step has one multiplication less.
        self._pull: F32 = self._of_live(weights) * np.float32(lr)
        self._velocity: F32 = np.zeros_like(self._pull)
        self._soft: F32 = np.empty_like(self._pull if lasso else self._pull[:0])
        self._blocks = [] if self._live is not None else self._cut(max(1, BLOCK // self._width) * self._width)

    def _of_live(self, values: F32) -> F32:
        return values if self._live is None else values[self._live]

    def _cut(self, size: int) -> list[_Block]:
        """Blocks of whole rows, `size` values each."""
        n = self._weights.size
        self._scratch: F32 = np.empty((2, min(size, n)), np.float32)
        self._bits: NDArray[np.bool_] = np.zeros(_padded(self._scratch.shape[1]), np.bool_)
        scores, weights, velocity, pull, out = self._scores, self._weights, self._velocity, self._pull, self._effective
        blocks = []
        for s in (slice(low, min(low + size, n)) for low in range(0, n, size)):
            on = np.zeros(_padded(s.stop - s.start), np.bool_)
            np.greater_equal(scores[s], 0, out=on[: s.stop - s.start])
            blocks.append(_Block(s, scores[s], weights[s], velocity[s], pull[s], out[s], on, 1.0))
        return blocks

    def step(self, gradient: F32) -> None:
        """One step against `gradient`, float32[n], with respect to the effective weights."""
        if self._live is None:
            scales = self._scales() if self._lasso else None
            for block in self._blocks:
                self._step_block(block, gradient[block.span], scales)
        elif self._live.size:
            self._step_live(gradient)

    def _scales(self) -> tuple[F32, F32]:
        """Lasso over norm of every row, and of every column of the layer as a matrix; leaves the sigmoid in `_soft`."""
        rows, columns = (norm_scales(n, self._lasso) for n in group_norms(self._scores, self._shape, self._soft))
        return rows[:, None], columns.repeat(self._kernel)

    def _step_block(self, b: _Block, gradient: F32, scales: tuple[F32, F32] | None) -> None:
        move = self._move(b, gradient) if scales is None else self._move_with_lasso(b, gradient, *scales)
        b.velocity *= self._momentum
        b.velocity += move
        b.scores -= b.velocity
        self._turn(b)

    def _move(self, b: _Block, gradient: F32) -> F32:
        """lr * dL/ds without the lasso."""
        move: F32 = self._scratch[0, : b.scores.size]
        scale = scaled_slope(b.scores, move, self._scratch[1, : b.scores.size])
        if scale != b.scale:
            np.multiply(b.weights, np.float32(self._lr * scale), out=b.pull)
            b.scale = scale
        move *= b.pull
        move *= gradient
        return move

    def _move_with_lasso(self, b: _Block, gradient: F32, rows: F32, columns: F32) -> F32:
        slope, lasso = self._scratch[:, : b.scores.size]
        soft, first = self._soft[b.span], b.span.start // self._width
        np.subtract(1, soft, out=slope)
        slope *= soft
        np.add(rows[first : first + soft.size // self._width], columns, out=lasso.reshape(-1, self._width))
        lasso *= soft
        move = soft
        np.multiply(gradient, b.pull, out=move)
        move += lasso
        move *= slope
        return move

    def _turn(self, b: _Block) -> None:
        """Write the effective weights that turned on or off, found eight at a time."""
        n = b.scores.size
        on = self._bits[: b.on.size]
        np.greater_equal(b.scores, 0, out=on[:n])
        eights = np.flatnonzero(on.view(np.uint64) != b.on.view(np.uint64))
        if len(eights) * 8 * _FEW < n:
            near = np.minimum(8 * eights[:, None] + _EIGHT, n - 1)
            b.out[near] = b.weights[near] * on[near]
        else:
            np.multiply(b.weights, on[:n], out=b.out)
        b.on[:] = on

    def _step_live(self, gradient: F32) -> None:
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
        self._effective[live] = self._of_live(self._weights) * (scores >= 0)


def masked_sgd(
    weights: F32,
    scores: F32,
    effective: F32,
    shape: tuple[int, ...],
    lr: float,
    momentum: float,
    lasso: float = 0.0,
) -> MaskedSgd | CompiledMaskedSgd:
    """The step of one layer, compiled where numba is installed: equal to rounding, a third of the time."""
    try:
        from edge_client.training.compiled import CompiledMaskedSgd as Step
    except (ImportError, OSError):  # the base install, or a numba that does not fit what is installed
        return MaskedSgd(weights, scores, effective, shape, lr, momentum, lasso)
    return Step(weights, scores, effective, shape, lr, momentum, lasso)


def _padded(n: int) -> int:
    return -(-n // 8) * 8
