"""A batch-norm as a part of the layer before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def folded(weight: F64, bias: F64 | None, norm: Sequence[F64], epsilon: float, axis: int) -> tuple[F64, F64]:
    """Weight and bias of a layer with the batch-norm in it: ``norm(layer(x))`` for every x.

    `norm` is the scale, shift, mean and variance of each output; the outputs lie along `axis` of the weight.
    """
    gamma, beta, mean, variance = norm
    scale = gamma / np.sqrt(variance + epsilon)
    others = tuple(k for k in range(weight.ndim) if k != axis)
    return weight * np.expand_dims(scale, others), ((0.0 if bias is None else bias) - mean) * scale + beta
