"""Samples in the form that a model takes: standardised, in its shape, and what raw samples went through on the way."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_bench.data.table import DataConfig
from edge_client.bundle import Normalisation

Scale = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean and deviation of each feature."""
LONGEST = 50_000  # values of a mean that are written: a manifest has at most 4 MB


def scale_of(train: NDArray[Any]) -> Scale:
    """Mean and deviation of each feature; 1 for a constant one, whose deviation is rounding alone."""
    wide = train.astype(np.float64)
    mean, deviation = wide.mean(axis=0), wide.std(axis=0)
    return mean, np.where(deviation <= 1e-9 * np.abs(mean), 1.0, deviation)


def scaled(x: NDArray[Any], scale: Scale | None) -> NDArray[Any]:
    """`x` standardised, or as it is without a scale."""
    return x if scale is None else (x - scale[0]) / scale[1]


def shaped(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`x` as samples of `shape`, when one of both is flat or they differ in axes of length 1; else `x` as it is.

    28x28 images get a margin of two pixels where the model takes 32x32.
    """
    if prod(x.shape[1:]) == 28 * 28 and shape == (1, 32, 32):
        return np.pad(x.reshape(-1, 1, 28, 28), ((0, 0), (0, 0), (2, 2), (2, 2)))
    if prod(x.shape[1:]) != prod(shape):
        return x
    given, taken = ([n for n in s if n != 1] for s in (x.shape[1:], shape))
    # [32, 32, 3] as [3, 32, 32] would mix the channels.
    return x.reshape(-1, *shape) if given == taken or min(len(given), len(taken)) < 2 else x


def normalisation(
    config: DataConfig, scale: Scale | None, sample: tuple[int, ...], shape: tuple[int, ...]
) -> Normalisation | None:
    """What the table does to raw samples (images in 0..1), for a model that takes samples of `shape`.

    In the shortest form: one value, one for each feature, or one for each value. None when it is too long to write.
    """
    mean, deviation = (
        np.broadcast_to(np.array(values or (default,)).reshape(-1, *(1,) * (len(sample) - 1)), sample)
        for values, default in ((config.mean, 0.0), (config.deviation, 1.0))
    )
    if scale is not None:
        mean, deviation = mean + deviation * scale[0], deviation * scale[1]
    mean, deviation = shaped(mean[None], shape)[0], shaped(deviation[None], shape)[0]
    deviation = np.where(deviation == 0, 1.0, deviation)  # the margin around an image
    both = np.stack([mean.ravel(), deviation.ravel()])
    rows = both.reshape(2, shape[0] if shape else 1, -1)
    if (both == both[:, :1]).all():
        both = both[:, :1]
    elif (rows == rows[:, :, :1]).all():
        both = rows[:, :, 0]
    if both.shape[1] > LONGEST:
        return None
    return Normalisation(mean=tuple(both[0].tolist()), std=tuple(both[1].tolist()))
