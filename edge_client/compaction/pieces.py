"""Which elements of a whole value a tensor of the smaller graph holds, and when they are whole rows of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import CompactionError

Ids = NDArray[np.int64]
Lists = list[Ids]


class Ragged(CompactionError):
    """The layout of `value` is not one that an operator can take."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(why)
        self.value = value


@dataclass(frozen=True)
class Piece:
    """A tensor of the smaller graph. `ids`, int64 in its shape for one sample, are the flat places of its elements in
    the whole value; -1 for an element of no meaning, -2 for a zero of no meaning."""

    name: str
    ids: Ids


def grid(shape: Sequence[int], lists: Sequence[Ids]) -> Ids:
    """The flat places of the elements at the entries `lists` of each axis of `shape`; -1
    where an entry is -1, -2 where one is -2."""
    made = np.zeros([1] * len(shape), np.int64)
    bad, zero = np.zeros([1] * len(shape), np.bool_), np.zeros([1] * len(shape), np.bool_)
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        own = lists[axis].reshape(-1, *(1,) * (len(shape) - 1 - axis))
        made = made + step * np.maximum(own, 0)
        bad, zero = bad | (own == -1), zero | (own == -2)
        step *= shape[axis]
    return np.where(bad, -1, np.where(zero, -2, made))


def by_axis(ids: Ids, shape: Sequence[int]) -> Lists | None:
    """The entries of each axis, -1 for one of no meaning, -2 for a zero, when `ids` is their product; else None."""
    if len(shape) != ids.ndim:
        return None
    if not ids.ndim:
        return []
    valid = ids >= 0
    places = np.unravel_index(np.where(valid, ids, 0), tuple(shape))
    found = [
        np.where(valid, place, -1).max(axis=tuple(k for k in range(ids.ndim) if k != axis), initial=-1)
        for axis, place in enumerate(places)
    ]
    for axis, own in enumerate(found):
        zero = (ids == -2).all(axis=tuple(k for k in range(ids.ndim) if k != axis))
        own[(own < 0) & zero] = -2
    made = np.maximum(grid(shape, found), -1)
    return found if np.array_equal(made, np.where(valid, ids, -1)) else None


def whole_along(ids: Ids, shape: Sequence[int], axis: int) -> bool:
    """Whether every entry of `axis` is there, each element of meaning at its own."""
    own = np.unravel_index(np.maximum(ids, 0), tuple(shape))[axis]
    here = np.arange(ids.shape[axis]).reshape(-1, *(1,) * (ids.ndim - 1 - axis))
    return ids.shape[axis] == shape[axis] and bool((own == here)[ids >= 0].all())
