"""Gates: how a real-valued score decides what becomes of a frozen weight, and the slope that moves the score.

A gate has a forward value g(s), which multiplies the weight, a soft value in place of it, and the slope of that::

    effective weight = weight * g(s)        dL/ds = (dL/d(effective weight) * weight + dR/dsoft) * slope

where R is a penalty on the soft values (`GroupLasso`), if any. All functions here are elementwise over whole float32[n]
vectors, whatever the layers, optimiser and loss. A score of -inf is dead under every gate: its forward value and its
slope are 0, so a pruned weight stays pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32


class Gate(Protocol):
    """What every gate gives."""

    def forward(self, scores: F32, stream: int | None) -> NDArray[np.bool_] | NDArray[np.int8]:
        """g(s), [n] in {0, 1} or {-1, 0, 1}. A gate that samples draws from the counter stream `stream`."""
        ...

    def soft(self, scores: F32, out: F32) -> None:
        """Write the differentiable stand-in for g(s) to `out`."""
        ...

    def slope(self, soft: F32, out: F32) -> None:
        """Write the derivative of the stand-in, from its value, to `out`, which may not be `soft`."""
        ...


def sigmoid(scores: F32, out: F32 | None = None) -> F32:
    """``1 / (1 + exp(-s))``, float32[n]; 0 at -inf."""
    out = np.negative(scores, out=out)
    with np.errstate(over="ignore"):  # 1 / inf is the right result
        np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


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
    """FedMask eq. 3-8: forward ``1[sigmoid(s) >= 1/2] = 1[s >= 0]``, slope ``sigmoid(s) * (1 - sigmoid(s))``."""

    def forward(self, scores: F32, stream: int | None = None) -> NDArray[np.bool_]:
        on: NDArray[np.bool_] = scores >= 0
        return on

    def soft(self, scores: F32, out: F32) -> None:
        sigmoid(scores, out)

    def slope(self, soft: F32, out: F32) -> None:
        np.subtract(1, soft, out=out)
        out *= soft


@dataclass(frozen=True)
class SignTanh:
    """HideNseek: forward sign(s) with sign(0) = +1, slope ``1 - tanh(s)^2``."""

    def forward(self, scores: F32, stream: int | None = None) -> NDArray[np.int8]:
        """+1 where s >= 0, -1 below, 0 at -inf."""
        sign: NDArray[np.int8] = 2 * (scores >= 0).view(np.int8) - (scores > -np.inf)
        return sign

    def soft(self, scores: F32, out: F32) -> None:
        np.tanh(scores, out=out)

    def slope(self, soft: F32, out: F32) -> None:
        np.square(soft, out=out)
        np.subtract(1, out, out=out)


@dataclass(frozen=True)
class ClippedSign:
    """Binarized networks: forward sign(s) with sign(0) = +1, slope 1 where -1 <= s <= 1 and 0 outside."""

    def forward(self, scores: F32, stream: int | None = None) -> NDArray[np.int8]:
        """+1 where s >= 0, -1 below, 0 at -inf."""
        return SignTanh().forward(scores)

    def soft(self, scores: F32, out: F32) -> None:
        np.copyto(out, scores)

    def slope(self, soft: F32, out: F32) -> None:
        np.less_equal(np.abs(soft, out=out), 1, out=out)


@dataclass(frozen=True)
class Bernoulli:
    """FedPM and DeltaMask: forward a draw of Bernoulli(sigmoid(s)), backward straight through the draw.

    `ste` is "identity" (the gradient of the draw passes to the probability p unchanged) or "ref" (multiplied by p, as
    in the published FedPM code). Both then multiply by the slope of the sigmoid.
    """

    ste: Literal["identity", "ref"] = "identity"

    def forward(self, scores: F32, stream: int | None) -> NDArray[np.bool_]:
        """One draw for each score. Raises ValueError without a stream."""
        if stream is None:
            raise ValueError("a Bernoulli gate draws its bits; name the stream of the draw")
        return draw(stream, sigmoid(scores))

    def soft(self, scores: F32, out: F32) -> None:
        sigmoid(scores, out)

    def slope(self, soft: F32, out: F32) -> None:
        """``soft * (1 - soft)``, times `soft` for ``ste="ref"``."""
        np.subtract(1, soft, out=out)
        out *= soft
        if self.ste == "ref":
            out *= soft


@dataclass(frozen=True)
class GroupLasso:
    """``strength * R_g`` of FedMask eq. 9: the sum of the norms of a layer's rows and columns of soft gate values.

    `shape` is the layer's: rows and columns of [out, in], filters and channels of [out, in, height, width].
    """

    shape: tuple[int, ...]
    strength: float

    def gradient(self, soft: F32, out: F32) -> None:
        """Write the gradient with respect to `soft`, float32[n], to `out`. Dead groups have none."""
        matrix = soft.reshape(self.shape[0], -1)  # [out, in * kernel]
        square = np.square(matrix, out=out.reshape(matrix.shape))
        ones = np.ones(max(square.shape), np.float32)  # BLAS sums faster than a reduction does
        columns = (ones[: self.shape[0]] @ square).reshape(self.shape[1], -1)
        norms = np.sqrt(square @ ones[: square.shape[1]]), np.sqrt(columns.sum(axis=1))
        row, column = (np.divide(np.float32(self.strength), n, out=np.zeros_like(n), where=n > 0) for n in norms)
        np.add(row[:, None], column.repeat(columns.shape[1]), out=square)
        square *= matrix
