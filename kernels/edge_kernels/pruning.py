"""Which units to keep: their norms, and the largest scores. Weights are [out, in, ...]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def group_norms(weights: Iterable[F32], axis: int = 0) -> F64:
    """The Euclidean norm of each unit over all `weights`: of its entries along `axis` (0 filters or rows, 1 inputs)."""
    square: F64 | None = None
    for weight in weights:
        own = np.square(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1), dtype=np.float64).sum(axis=1)
        square = own if square is None else square + own
    if square is None:
        raise ValueError("a norm needs at least one weight")
    return np.sqrt(square)


def keep_largest(scores: NDArray[Any], count: int) -> NDArray[np.bool_]:
    """bool[n], true for the `count` largest scores; of equal ones the first."""
    kept = np.zeros(len(scores), np.bool_)
    kept[np.argsort(-scores, kind="stable")[:count]] = True
    return kept


def add_lasso_slope(weight: F32, strength: float, into: F32) -> None:
    """Add the slope of ``strength * (sum of the norms of rows + sum of the norms of columns)`` to a gradient.

    A row is a filter's weights, a column the weights of one input. A group of zeros has slope 0.
    """
    square = np.square(weight).reshape(*weight.shape[:2], -1).sum(axis=2)
    rows, columns = (np.sqrt(square.sum(axis=axis)) for axis in (1, 0))
    inverse = [np.divide(strength, n, out=np.zeros_like(n), where=n > 0) for n in (rows, columns)]
    into += weight * (inverse[0][:, None] + inverse[1]).reshape(*square.shape, *[1] * (weight.ndim - 2))
