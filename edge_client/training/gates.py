"""Gates: how a real-valued score decides what becomes of a frozen weight, and the slope that moves the score.

A gate has a forward value g(s), which multiplies the weight, and a slope, which stands in for the derivative of g::

    effective weight = weight * g(s)        dL/ds = dL/d(effective weight) * weight * slope(s)

All functions here are elementwise over float32[n] vectors. Which layers are gated, the optimiser and the loss are not
known here. A score of -inf is dead under every gate: its forward value and its slope are 0, so a pruned weight stays
pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32


class Gate(Protocol):
    """What every gate gives."""

    def forward(self, scores: F32, stream: int | None) -> NDArray[np.bool_] | NDArray[np.int8]:
        """g(scores), [n] in {0, 1} or {-1, 0, 1}. A gate that samples draws from the counter stream `stream`."""
        ...

    def slope(self, scores: F32) -> F32:
        """What replaces the derivative of g at `scores`, float32[n]."""
        ...


def falloff(scores: F32, steepness: float = 1.0) -> F32:
    """``exp(-steepness * |s|)``, float32[n] in 0..1: sigmoid, tanh and their slopes follow from it without overflow."""
    out: F32 = np.abs(scores)
    out *= np.float32(-steepness)
    return np.exp(out, out=out)


def sigmoid(scores: F32) -> F32:
    """``1 / (1 + exp(-s))``, float32[n]; 0 at -inf."""
    out: F32 = np.negative(scores)
    with np.errstate(over="ignore"):  # 1 / inf is the right result
        np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


def sigmoid_slope(scores: F32, steepness: float = 1.0) -> F32:
    """``k^2 * Psi(k * s)`` with k = `steepness` and Psi(s) = sigmoid(s) * (1 - sigmoid(s)), float32[n]; 0 at +-inf.

    k = 1 is Psi of FedMask eq. 8, k = 2 is ``1 - tanh(s)^2``.
    """
    out = falloff(scores, steepness)
    below = out + 1
    out /= below
    out /= below
    if steepness != 1.0:
        out *= np.float32(steepness**2)
    return out


def draw(stream: int, probability: F32) -> NDArray[np.bool_]:
    """Independent bits bool[n], one with the probability of each: uniforms of 24 bits, two from a number of the stream.

    Bit 2 i comes from the low half of number i, bit 2 i + 1 from the high half; the low 8 bits of a half are not used.
    """
    n = probability.size
    halves = counter.uint64(stream, (n + 1) // 2).astype("<u8", copy=False).view("<u4")[:n]
    halves >>= np.uint32(8)
    uniform = halves.view("<i4").astype(np.float32)
    uniform *= np.float32(2**-24)
    bits: NDArray[np.bool_] = uniform < probability
    return bits


@dataclass(frozen=True)
class SigmoidThreshold:
    """FedMask eq. 3-8: forward ``1[sigmoid(s) >= 1/2] = 1[s >= 0]``, slope Psi(s)."""

    steepness: ClassVar[float] = 1.0

    def forward(self, scores: F32, stream: int | None = None) -> NDArray[np.bool_]:
        """``s >= 0``."""
        on: NDArray[np.bool_] = scores >= 0
        return on

    def slope(self, scores: F32) -> F32:
        """Psi(s)."""
        return sigmoid_slope(scores)


@dataclass(frozen=True)
class SignTanh:
    """HideNseek: forward sign(s) with sign(0) = +1, slope ``1 - tanh(s)^2``."""

    steepness: ClassVar[float] = 2.0

    def forward(self, scores: F32, stream: int | None = None) -> NDArray[np.int8]:
        """+1 where s >= 0, -1 below, 0 at -inf."""
        sign: NDArray[np.int8] = 2 * (scores >= 0).view(np.int8) - (scores > -np.inf)
        return sign

    def slope(self, scores: F32) -> F32:
        """``1 - tanh(s)^2``."""
        return sigmoid_slope(scores, 2.0)


@dataclass(frozen=True)
class Bernoulli:
    """FedPM and DeltaMask: forward a draw of Bernoulli(sigmoid(s)), backward straight through the draw.

    `ste` is "identity" (the gradient of the draw passes to the probability p unchanged) or "ref" (multiplied by p, as
    in the published FedPM code). Both then multiply by the slope of the sigmoid.
    """

    ste: Literal["identity", "ref"] = "identity"
    steepness: ClassVar[float] = 1.0

    def forward(self, scores: F32, stream: int | None) -> NDArray[np.bool_]:
        """One draw for each score. Raises ValueError without a stream."""
        if stream is None:
            raise ValueError("a Bernoulli gate draws its bits; name the stream of the draw")
        return draw(stream, sigmoid(scores))

    def slope(self, scores: F32) -> F32:
        """Psi(s), times sigmoid(s) for ``ste="ref"``."""
        slope = sigmoid_slope(scores)
        if self.ste == "ref":
            slope *= sigmoid(scores)
        return slope


def group_lasso(scores: F32, shape: tuple[int, ...], strength: float, out: F32) -> float:
    """Write the gradient of ``strength * R_g`` with respect to the scores to `out`, float32[n]; returns strength * R_g.

    R_g (FedMask eq. 9) is the sum of Euclidean norms of ``sigmoid(scores)`` over the layer's rows and columns (`shape`
    = [out, in]) or filters and channels (`shape` = [out, in, height, width]). `scores` is the layer's float32[n].
    A group of dead scores has no gradient.
    """
    soft = sigmoid(scores).reshape(shape[0], -1)  # [out, in * kernel]
    square = np.square(soft)
    ones = np.ones(max(square.shape), np.float32)
    row_norms = np.sqrt(square @ ones[: square.shape[1]])
    column_norms = np.sqrt((ones[: shape[0]] @ square).reshape(shape[1], -1).sum(axis=1))
    rows, columns = (
        np.divide(np.float32(strength), n, out=np.zeros_like(n), where=n > 0) for n in (row_norms, column_norms)
    )
    pull = np.add(rows[:, None], columns.repeat(square.shape[1] // shape[1]), out=out.reshape(soft.shape))
    pull *= soft
    pull *= sigmoid_slope(scores).reshape(soft.shape)
    return strength * float(row_norms.sum() + column_norms.sum())
