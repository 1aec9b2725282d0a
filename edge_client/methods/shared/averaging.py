"""The arithmetic of averaging: weighted means, distances and the momentum of a server, on vectors of any size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.methods import Influence

LARGEST = float(np.finfo(np.float32).max)
BLOCK = 1 << 14  # values handled at a time, so that they stay in the cache


@dataclass(frozen=True)
class Weights:
    """A model: `parameters` float32[d], `buffers` float32[buffers_d]."""

    parameters: F32
    buffers: F32


@dataclass(frozen=True)
class Update(Weights):
    """A device's model and the number of samples behind it."""

    samples: float


class Mean:
    """A weighted mean of float32[size] vectors: the sum of weight * values in float64, and of the weights."""

    def __init__(self, size: int) -> None:
        self.sum, self.weight = np.zeros(size), 0.0

    def add(self, weight: float, values: F32) -> None:
        """Add one vector."""
        add_weighted(self.sum, weight, values)
        self.weight += weight

    @property
    def value(self) -> F32:
        """The mean, float32[size]."""
        return (self.sum / self.weight).astype(np.float32)


class Total(NamedTuple):
    """The means of parameters and of statistics."""

    parameters: Mean
    buffers: Mean


def added(total: Total | None, weight: float, parameters: F32, buffers: F32) -> Total:
    """The means with one more device's values in them."""
    means = total or Total(Mean(parameters.size), Mean(buffers.size))
    means.parameters.add(weight, parameters)
    means.buffers.add(weight, buffers)
    return means


def distance(a: F32, b: F32) -> float:
    """The Euclidean norm of ``a - b``, in float64 so that no finite difference overflows."""
    square = 0.0
    for low in range(0, len(a), BLOCK):
        change = np.subtract(a[low : low + BLOCK], b[low : low + BLOCK], dtype=np.float64)
        square += float(np.dot(change, change))
    return math.sqrt(square)


def window(average: float, rounds: int) -> int:
    """The number of last rounds whose mean is the final model: a share `average` of all, at least one."""
    return max(1, round(average * rounds))


def toward(start: F32, end: F32, scale: float) -> F32:
    """``start + scale * (end - start)`` for a scale in 0..1, computed in float64."""
    return (start + scale * np.subtract(end, start, dtype=np.float64)).astype(np.float32)


def add_weighted(total: NDArray[np.float64], weight: float, values: F32) -> None:
    """``total += weight * values`` in float64, a block that stays in the cache at a time."""
    for low in range(0, len(values), BLOCK):
        s = slice(low, low + BLOCK)
        total[s] += np.multiply(values[s], weight, dtype=np.float64)


def accelerated(
    change: NDArray[np.float64], velocity: F32, most: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What a round moves the model by Nesterov's momentum, and the velocity v after it; all are vectors of one size.

    The momentum is the cosine of the angle between `change` and v, at least 0 and no more than `most`: rounds that
    agree add up, and noise does not. ``v <- momentum * v + change``; the model moves by ``change + momentum * v``.
    """
    before = velocity.astype(np.float64)
    norms = math.sqrt(dot(change, change)) * math.sqrt(dot(before, before))
    if not 0 < norms < math.inf:
        return change, change
    momentum = min(most, max(0.0, dot(change, before) / norms))
    then = change + momentum * before
    return change + momentum * then, then


def dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The inner product, inf where it overflows; without BLAS, whose last bits depend on the number of threads."""
    with np.errstate(over="ignore"):
        return float(np.multiply(a, b).sum())


def float32(values: NDArray[np.float64], most: float = LARGEST) -> F32:
    """The values as float32, cut off at the magnitude `most`."""
    return np.clip(values, -most, most).astype(np.float32)


def influence(start: Weights, update: Update) -> Influence:
    """The distance of an update from the values that it was trained from, and its samples."""
    moved, statistics = distance(update.parameters, start.parameters), distance(update.buffers, start.buffers)
    return Influence(moved, update.samples, statistics)


def limited(start: Weights, update: Update, scale: float, weight: float) -> Update:
    """The update with its changes of parameters and statistics times `scale`."""
    parameters = toward(start.parameters, update.parameters, scale)
    return Update(parameters, toward(start.buffers, update.buffers, scale), weight)
