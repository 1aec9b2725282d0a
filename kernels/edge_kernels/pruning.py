"""What a pruning keeps: scores of weights and of units, and the largest of them. Weights are [out, in, ...].

LAMP scores and choices are the same on every machine: products are exact in float64, sums run in one fixed order, and
equal values are ordered by their index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_INDEX = np.uint64(0xFFFFFFFF)


def group_norms(weights: Iterable[F32]) -> F64:
    """The Euclidean norm of each unit over all `weights`, whose axis 0 is the units."""
    square: F64 | None = None
    for weight in weights:
        own = np.square(weight.reshape(len(weight), -1), dtype=np.float64).sum(axis=1)
        square = own if square is None else square + own
    if square is None:
        raise ValueError("a norm needs at least one weight")
    return np.sqrt(square)


def lamp_scores(values: F32, spans: Sequence[slice]) -> F64:
    """Layer-adaptive magnitude (LAMP) scores of float32[n], float64[n] in 0..1; `spans` are the layers.

    Lee, Park, Mo, Ahn, Shin, "Layer-adaptive Sparsity for the Magnitude-based Pruning", ICLR 2021: w^2 over the sum of
    the squares of the weights of its layer that are not smaller. Of equal weights the one of lower index counts as the
    larger. The largest weight of every layer scores 1, also in a layer of zeros. Values outside all spans score 0.
    """
    scores = np.zeros(len(values))
    for span in spans:
        order = largest_first(values[span])
        squares = np.square(values[span][order], dtype=np.float64)
        sums = np.cumsum(squares)  # one addition after the other, unlike np.sum
        np.divide(squares, sums, out=squares, where=sums > 0)
        squares[:1] = 1.0
        scores[span][order] = squares
    return scores


def largest_first(values: F32) -> NDArray[np.int64]:
    """The indices of float32[n] from the largest magnitude to the smallest; of equal ones the lower index is first.

    One sort of 64-bit integers, magnitude above index: several times faster than a stable argsort.
    """
    magnitude = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    keys = (np.uint32(0x7FFFFFFF) - magnitude).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    keys &= _INDEX
    order: NDArray[np.int64] = keys.view(np.int64)
    return order


def keep_largest(scores: F32 | F64, count: int) -> NDArray[np.bool_]:
    """The `count` largest of [n] scores, bool[n]; of equal scores the lower index is kept. No score is NaN."""
    if count >= len(scores):
        return np.ones(len(scores), np.bool_)
    if count <= 0:
        return np.zeros(len(scores), np.bool_)
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    keep: NDArray[np.bool_] = scores > threshold
    ties = np.flatnonzero(scores == threshold)
    keep[ties[: count - int(np.count_nonzero(keep))]] = True
    return keep


def add_lasso_slope(weight: F32, strength: float, into: F32) -> None:
    """Add the slope of ``strength * (sum of the norms of rows + sum of the norms of columns)`` to a gradient.

    A row is a filter's weights, a column the weights of one input. A group of zeros has slope 0.
    """
    square = np.square(weight).reshape(*weight.shape[:2], -1).sum(axis=2)
    rows, columns = (np.sqrt(square.sum(axis=axis)) for axis in (1, 0))
    inverse = [np.divide(strength, n, out=np.zeros_like(n), where=n > 0) for n in (rows, columns)]
    into += weight * (inverse[0][:, None] + inverse[1]).reshape(*square.shape, *[1] * (weight.ndim - 2))
