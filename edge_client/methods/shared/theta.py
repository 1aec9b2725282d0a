"""theta, the probabilities of Bernoulli masks, as the whole numbers that determine it.

The arithmetic is exact IEEE double, the same on every machine. `bernoulli` chooses which of these a method uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Posterior:
    """The masks counted since the last reset: `masks` of them, of which `ones` uint32[masked] have this entry set.

    `ones` is float64 where a round does not count whole masks (DeltaMask with ``tally="mean"``). By differences `ones`
    are steps above the lowest theta and `masks` is the highest step.
    """

    ones: NDArray[Any]
    masks: int


def drawn(seed: int, n: int, theta0: float, spread: float, clip: float) -> F64:
    """The first theta, float64[n]: scores around logit(theta0) with a standard deviation of `spread`.

    Twelve uniforms make a normal number (Irwin-Hall) without a logarithm. Machines may round the exponential
    differently, so its result is put on a grid.
    """
    if not spread:
        return np.full(n, theta0)
    z = np.full(n, -6.0)
    for i in range(12):
        z += counter.uniform(counter.key(seed, "first scores", i), n)
    theta = 1 / (1 + np.exp(-spread * z) * ((1 - theta0) / theta0))
    on_grid: F64 = np.clip(np.round(theta * 4096) / 4096, clip, 1 - clip)
    return on_grid


def steps(theta0: float, cohort: int, clip: float) -> tuple[int, int]:
    """By differences: how many steps of 1 / cohort theta0 lies above the lowest theta, and the highest step.

    The outermost steps are the first that reach `clip` and ``1 - clip``, so that every step inwards moves theta.
    """
    least = 1e-9  # (0.99 - 0.95) * 100 is above 4
    below, above = (math.ceil(room * cohort - least) for room in (theta0 - clip, 1 - clip - theta0))
    return below, below + above


def stepped(before: Posterior, ends: tuple[int, int], cohort: int, net: Ints, masks: int, stream: int) -> Posterior:
    """The posterior after theta moved by ``net / masks``, `net` the sum over `masks` devices of mask less reference.

    `ends` are those of `steps`. A round with fewer masks than the cohort moves theta as far in expectation: it rounds
    with uniforms of `stream`.
    """
    below, top = ends
    step = net
    if masks != cohort:
        step = (net * cohort + np.floor(counter.uniform(stream, net.size) * masks).astype(np.int64)) // masks
    start = before.ones.astype(np.int64) if before.masks else below
    return Posterior(np.clip(start + step, 0, top).astype(np.uint32), top)
