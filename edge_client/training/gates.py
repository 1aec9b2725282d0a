"""Gates: how a real-valued score decides what becomes of a frozen weight, and the gradient that moves the score.

A gate has two kernels on equally long, contiguous float32[n] vectors (a whole model, a span, or one layer):

    effective(weights, scores, out)                   out = weights * gate(scores)
    score_gradient(weights, scores, gradient, out)    out = gradient * weights * (backward rule of the gate)

`gradient` is the loss gradient with respect to the EFFECTIVE weights, as a trainer gives it; `out` may be `gradient`
(or `weights`) itself. Which layers are gated, optimisers and the loss are not known here.

A score of -inf is DEAD under the sigmoid gates: gate 0, gradient 0, no part in the group lasso, and SGD without
weight decay leaves it where it is. That is how a pruned structure stays frozen at no cost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32

BLOCK = 1 << 16  # values per pass: shorter ones pay more for calls than they win from the cache
_ONE, _HALF = np.float32(1), np.float32(0.5)
# Psi(s) as a polynomial in s^2 by the largest |s|: (radius, scale, h, ...). With t = s^2 + h it is scale * t, or
# scale * (t^2 + b), or scale * (t * (t^2 + b) + d). Relative error under 2.1e-5.
_SLOPE = (
    (0.25, -0.061853424, -4.0417318),
    (0.7, 0.009400753, -3.3143955, 15.607856),
    (1.2, -0.0010306032, -3.2471546, 28.907505, -114.46635),
)
# Likewise (sigmoid(s) - 1/2) / s, relative error of the sigmoid under 6e-7.
_SIGMOID = (
    (0.25, -0.02067319, -12.092839),
    (0.7, 0.0019164284, -5.4253115, 101.01584),
    (1.2, -0.00015561831, -4.3473033, 77.050411, -1189.361),
)


class _Scratch(threading.local):
    """Memory that is touched once per thread and not once per call: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.rows: F32 = np.empty((3, BLOCK), np.float32)
        self.bits: NDArray[np.bool_] = np.empty(BLOCK, np.bool_)
        self._layer: F32 = np.empty(0, np.float32)

    def layer(self, size: int) -> F32:
        """float32[size], kept at the largest size asked for."""
        if self._layer.size < size:
            self._layer = np.empty(size, np.float32)
        return self._layer[:size]


_scratch = _Scratch()


class Gate(Protocol):
    """What every gate gives."""

    def effective(self, weights: F32, scores: F32, out: F32) -> None:
        """Write the effective weights into `out`."""
        ...

    def score_gradient(self, weights: F32, scores: F32, gradient: F32, out: F32) -> None:
        """Write the gradient with respect to the scores into `out`."""
        ...


def _blocks(*vectors: F32) -> Iterator[slice]:
    size = vectors[0].size
    if any(v.shape != (size,) for v in vectors):
        raise ValueError(f"a gate needs vectors of one length, got {[v.shape for v in vectors]}")
    for low in range(0, size, BLOCK):
        yield slice(low, min(low + BLOCK, size))


def sigmoid(scores: F32, out: F32) -> None:
    """``out = 1 / (1 + exp(-scores))``, float32, without overflow warnings; 0 at -inf. See `scaled_slope`."""
    for low in range(0, scores.size, BLOCK):
        s, o = scores[low : low + BLOCK], out[low : low + BLOCK]
        if scale := _polynomial(_SIGMOID, s, o, _scratch.rows[0, : s.size]):
            o *= s
            o *= np.float32(scale)
            o += _HALF
        else:
            with np.errstate(over="ignore"):
                np.negative(s, out=o)
                np.exp(o, out=o)
                o += _ONE
                np.divide(_ONE, o, out=o)


def sigmoid_slope(scores: F32, out: F32) -> None:
    """Psi of FedMask eq. 8, ``out = sigmoid(s) * (1 - sigmoid(s))``, float32; 0 at +-inf."""
    for low in range(0, scores.size, BLOCK):
        s, o = scores[low : low + BLOCK], out[low : low + BLOCK]
        o *= np.float32(scaled_slope(s, o, _scratch.rows[0, : s.size]))


def scaled_slope(scores: F32, out: F32, spare: F32) -> float:
    """Write Psi(scores) over a scale into `out`, float32[n], and return the scale; `spare` float32[n] is scratch.

    Psi is e / (1 + e)^2 with e = exp(-|s|). Where the scores all lie in [-1.2, 1.2], as scores that start at a small
    radius do, a polynomial of relative error under 2.1e-5 takes the place of the exponential, the dearest operation of
    a mask step; the closer to zero, the shorter. Whoever multiplies anyway gets its leading coefficient for nothing.
    """
    if scale := _polynomial(_SLOPE, scores, out, spare):
        return scale
    np.abs(scores, out=spare)
    np.negative(spare, out=spare)
    np.exp(spare, out=spare)
    np.add(spare, _ONE, out=out)
    np.multiply(out, out, out=out)
    np.divide(spare, out, out=out)
    return 1.0


def _polynomial(table: tuple[tuple[float, ...], ...], s: F32, out: F32, spare: F32) -> float:
    """Write the shortest polynomial that reaches the largest `s`, over its scale; return that, 0.0 if none does."""
    np.multiply(s, s, out=out)
    reach = float(out.max()) if s.size else 0.0
    for radius, scale, h, *more in table:
        if reach <= radius * radius:
            out += np.float32(h)
            if len(more) == 1:
                out *= out
            elif more:
                np.multiply(out, out, out=spare)
                spare += np.float32(more[0])
                out *= spare
            if more:
                out += np.float32(more[-1])
            return scale
    return 0.0


@dataclass(frozen=True)
class NoGate:
    """The scores are the parameters: plain training. `weights` is not read."""

    def effective(self, weights: F32, scores: F32, out: F32) -> None:
        """``out = scores``."""
        out[:] = scores

    def score_gradient(self, weights: F32, scores: F32, gradient: F32, out: F32) -> None:
        """``out = gradient``."""
        if out is not gradient:
            out[:] = gradient


@dataclass(frozen=True)
class SigmoidThreshold:
    """FedMask eq. 3-8: forward ``1[sigmoid(s) >= 1/2] = 1[s >= 0]``, backward Psi(s)."""

    def effective(self, weights: F32, scores: F32, out: F32) -> None:
        """``out = weights where scores >= 0, else 0``."""
        for s in _blocks(weights, scores, out):
            b = _scratch.bits[: s.stop - s.start]
            np.greater_equal(scores[s], 0, out=b)
            np.multiply(weights[s], b, out=out[s])

    def score_gradient(self, weights: F32, scores: F32, gradient: F32, out: F32) -> None:
        """``out = gradient * weights * Psi(scores)``."""
        for s in _blocks(weights, scores, gradient, out):
            psi = _scratch.rows[1, : s.stop - s.start]
            sigmoid_slope(scores[s], psi)
            psi *= weights[s]
            np.multiply(psi, gradient[s], out=out[s])


@dataclass(frozen=True)
class SignTanh:
    """HideNseek: forward sign(s) with sign(0) = +1, backward ``1 - tanh(s)^2``."""

    def effective(self, weights: F32, scores: F32, out: F32) -> None:
        """``out = weights where scores >= 0, else -weights``."""
        for s in _blocks(weights, scores, out):
            sign = _scratch.rows[0, : s.stop - s.start]
            b = _scratch.bits[: s.stop - s.start]
            np.greater_equal(scores[s], 0, out=b)
            np.add(b, b, out=sign, dtype=np.float32)
            sign -= _ONE
            np.multiply(weights[s], sign, out=out[s])

    def score_gradient(self, weights: F32, scores: F32, gradient: F32, out: F32) -> None:
        """``out = gradient * weights * (1 - tanh(scores)^2)``, where 1 - tanh(s)^2 = 4 Psi(2 s)."""
        for s in _blocks(weights, scores, gradient, out):
            twice, slope = _scratch.rows[1:, : s.stop - s.start]
            np.add(scores[s], scores[s], out=twice)
            sigmoid_slope(twice, slope)
            slope *= np.float32(4)
            slope *= weights[s]
            np.multiply(slope, gradient[s], out=out[s])


@dataclass(frozen=True)
class BernoulliSigmoid:
    """FedPM and DeltaMask: forward the given draw of Bernoulli(sigmoid(s)), backward straight through the draw.

    `sample` is bool[n], drawn by the caller (from the stream both sides share) and as long as the vectors given to
    the kernels; make a new gate for each draw. `ste` is "identity" (the gradient of the draw goes to the probability
    p as it is) or "ref" (times p, as the published FedPM code has it); both then multiply by the sigmoid's slope.
    """

    sample: NDArray[np.bool_]
    ste: Literal["identity", "ref"] = "identity"

    def effective(self, weights: F32, scores: F32, out: F32) -> None:
        """``out = weights where sample, else 0``. `scores` is not read: the sample is their draw."""
        for s in _blocks(weights, scores, out):
            np.multiply(weights[s], self.sample[s], out=out[s])

    def score_gradient(self, weights: F32, scores: F32, gradient: F32, out: F32) -> None:
        """``out = gradient * weights * Psi(scores)``, times ``sigmoid(scores)`` for ``ste="ref"``."""
        for s in _blocks(weights, scores, gradient, out):
            psi, p = _scratch.rows[1:, : s.stop - s.start]
            sigmoid_slope(scores[s], psi)
            if self.ste == "ref":
                sigmoid(scores[s], p)
                psi *= p
            psi *= weights[s]
            np.multiply(psi, gradient[s], out=out[s])


def group_lasso(scores: F32, shape: tuple[int, ...], strength: float, out: F32) -> float:
    """Add the gradient of ``strength * R_g`` to `out` (float32[n], with respect to the scores); returns strength * R_g.

    R_g (FedMask eq. 9) is the sum of Euclidean norms of ``sigmoid(scores)`` over the layer's rows and columns (`shape`
    = [out, in]) or filters and channels (`shape` = [out, in, height, width]). `scores` is the layer's float32[n] span.
    """
    soft = _scratch.layer(scores.size)
    row_norm, column_norm = group_norms(scores, shape, soft)
    rows, kernel = shape[0], scores.size // (shape[0] * shape[1])
    row_scale, column_scale = norm_scales(row_norm, strength), norm_scales(column_norm, strength).repeat(kernel)
    height = max(1, BLOCK // (scores.size // rows))
    for low in range(0, rows, height):
        m = soft.reshape(rows, -1)[low : low + height]
        pull = np.add(row_scale[low : low + height, None], column_scale)
        pull *= m
        sigmoid_slope(scores[low * len(column_scale) :][: m.size], m.reshape(-1))
        pull *= m
        out.reshape(rows, -1)[low : low + height] += pull
    return strength * float(row_norm.sum() + column_norm.sum())


def group_norms(scores: F32, shape: tuple[int, ...], soft: F32) -> tuple[F32, F32]:
    """Write ``sigmoid(scores)`` into `soft`; Euclidean norms of its rows float32[shape[0]] and columns [shape[1]]."""
    rows, columns = shape[:2]
    width = scores.size // rows
    row_square, column_square = np.empty(rows, np.float32), np.zeros(width, np.float32)
    height, ones = max(1, BLOCK // width), np.ones(width, np.float32)
    for low in range(0, rows, height):
        high = min(low + height, rows)
        m = soft[low * width : high * width]
        sigmoid(scores[low * width : high * width], m)
        square = np.multiply(m, m, out=_room(m)).reshape(-1, width)
        np.matmul(square, ones, out=row_square[low:high])  # BLAS sums faster than a reduction does
        column_square += ones[: high - low] @ square if high - low <= width else square.sum(axis=0)
    return np.sqrt(row_square), np.sqrt(column_square.reshape(columns, -1).sum(axis=1))


def norm_scales(norms: F32, strength: float) -> F32:
    """``strength / norm``, and 0 for a group that is wholly dead."""
    scales = np.zeros_like(norms)
    np.divide(np.float32(strength), norms, out=scales, where=norms > 0)
    return scales


def _room(like: F32) -> F32:
    """Scratch of the size of `like`; its own memory when one row of a layer is longer than a block."""
    return np.empty_like(like) if like.size > BLOCK else _scratch.rows[0, : like.size]
