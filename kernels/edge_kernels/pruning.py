"""Which weights a pruning keeps: scores of single weights, and one threshold over all layers.

Every function gives the same result on every machine: products are exact in float64, sums run in one fixed order, and
equal values are ordered by their index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_INDEX = np.uint64(0xFFFFFFFF)


def lamp_scores(values: NDArray[np.float32], spans: Sequence[slice]) -> NDArray[np.float64]:
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


def largest_first(values: NDArray[np.float32]) -> NDArray[np.int64]:
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


def keep_global(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` largest of float64[n] scores, bool[n]; of equal scores the lower index is kept. No score is NaN."""
    if count >= len(scores):
        return np.ones(len(scores), np.bool_)
    if count <= 0:
        return np.zeros(len(scores), np.bool_)
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    keep: NDArray[np.bool_] = scores > threshold
    ties = np.flatnonzero(scores == threshold)
    keep[ties[: count - int(np.count_nonzero(keep))]] = True
    return keep
