"""Batch-norm statistics as they travel in Lattice: whole numbers, so that a change of them takes a few bits.

A number is nearly a logarithm: 32 for each octave of a value above `LEAST`, linear in between and below. So large and
small variances have the same relative error, and a mean may cross 0. Everything is exact in float32.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from edge_kernels import counter, lattice
from edge_kernels.lattice_model import Known
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.errors import PayloadError
from edge_client.methods.lattice.grid import Counts
from edge_client.protocol.payload import Payload, bytes_of, decoding, u8
from edge_client.task import Assignment

Share: TypeAlias = "float | NDArray[np.float64]"

NAME = "statistics"  # the array in a payload
LEAST = np.float32(2.0**-10)
DROPPED = 18  # of the 23 bits of a float32's fraction
ZERO = int(LEAST.view(np.int32))
MOST = (int(np.float32(np.finfo(np.float32).max).view(np.int32)) - ZERO) >> DROPPED


def numbers(values: F32, up: Share = 0.5) -> Counts:
    """The whole numbers of statistics, rounded down after adding `up`: 0.5 for the nearest ones."""
    bits = (np.abs(values) + LEAST).astype(np.float32).view(np.int32)
    exact = np.sign(values) * (bits - ZERO) / 2.0**DROPPED
    whole: Counts = np.clip(np.floor(exact + up), -MOST, MOST).astype(np.int32)
    return whole


def values(whole: Counts) -> F32:
    """The statistics of whole numbers within +-MOST."""
    bits = (np.abs(whole) << DROPPED) + np.int32(ZERO)
    statistics: F32 = (np.sign(whole) * (bits.view(np.float32) - LEAST)).astype(np.float32)
    return statistics


def as_sent(statistics: F32) -> F32:
    """The statistics that arrive when these are sent."""
    return values(numbers(statistics))


def dither(a: Assignment, size: int) -> NDArray[np.float64]:
    """A device's uniform numbers of a round, in [0, 1): those of a cohort are stratified."""
    own: NDArray[np.float64] = counter.uniform(counter.key(a.course.seed, NAME, a.round), size)
    return (own + a.place / a.course.cohort) % 1.0


def change(now: Counts, before: Counts) -> NDArray[np.uint8]:
    """How whole numbers changed, coded."""
    return u8(lattice.encode(now - before, _known(now.size)))


def read(payload: Payload, before: Counts) -> Counts:
    """The whole numbers that changed from `before` by :func:`change`; none travel when there are none.

    Raises PayloadError.
    """
    if not before.size and NAME not in payload.arrays:
        return before
    with decoding("the statistics"):
        moved = lattice.decode(bytes_of(payload, NAME), _known(before.size))
    now = before + moved.astype(np.int64)
    if np.abs(now).max(initial=0) > MOST:
        raise PayloadError("a statistic is beyond float32; lower the learning rate")
    return now.astype(np.int32)


def _known(size: int) -> Known:
    return lattice.whole([(slice(0, size), size, 1)] if size else [])
