"""Sets of positions out of d: the input and output of every set codec, and the error that all codecs raise.

A set is a sorted uint32 array of distinct positions below d, or a bool[d] mask. This module converts and checks both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.uint32]
Contexts = NDArray[np.unsignedinteger[Any]]

MAX_D = 2**32 - 1  # a position is a uint32
_TILE = 1 << 16  # positions handled at a time, so that temporaries stay small beside the result


class CodecError(ValueError):
    """Bytes that are not a payload for this d, or values that a codec cannot carry; the message has the reason."""


def check_size(d: int) -> None:
    """Raise CodecError unless `d` is a length that the codecs handle."""
    if not 0 <= d <= MAX_D:
        raise CodecError(f"d = {d} is outside 0 .. {MAX_D}; split the vector")


def as_positions(what: NDArray[Any], d: int) -> Positions:
    """The set as sorted uint32 positions. `what` is bool[d], or sorted distinct integer positions below d."""
    check_size(d)
    if what.ndim != 1:
        raise CodecError(f"a set is a flat array, not an array of shape {what.shape}; ravel it")
    if what.dtype == np.bool_:
        if len(what) != d:
            raise CodecError(f"the mask has {len(what)} entries, but d is {d}; they must be equal")
        return positions_of(what)
    if what.dtype.kind not in "ui":
        raise CodecError(f"positions are integers or a bool mask, not {what.dtype}")
    if len(what) == 0:
        return np.zeros(0, np.uint32)
    if int(what[0]) < 0 or int(what[-1]) >= d or not bool((what[1:] > what[:-1]).all()):
        raise CodecError(f"positions must be sorted, distinct and within 0 .. {d - 1}; use np.unique")
    return np.ascontiguousarray(what, np.uint32)


def positions_of(mask: NDArray[np.bool_], out: Positions | None = None) -> Positions:
    """The positions where bool[d] is true, as uint32, in `out` if given. In tiles, since numpy returns int64."""
    if out is None:
        out = np.empty(int(np.count_nonzero(mask)), np.uint32)
    end = 0
    for low in range(0, len(mask), _TILE):
        found = np.flatnonzero(mask[low : low + _TILE])
        found += low
        out[end : end + len(found)] = found
        end += len(found)
    return out


def mask_of(positions: Positions, d: int) -> NDArray[np.bool_]:
    """The set as bool[d]."""
    mask = np.zeros(d, np.bool_)
    _assign(mask, positions, True)
    return mask


def complement(positions: Positions, d: int, out: Positions | None = None) -> Positions:
    """The positions below `d` that are not in the set, in `out` if given."""
    mask = np.ones(d, np.bool_)
    _assign(mask, positions, False)
    return positions_of(mask, out)


def _assign(mask: NDArray[np.bool_], positions: Positions, value: bool) -> None:
    """Set the positions of a mask, in tiles: numpy copies an index to int64."""
    for low in range(0, len(positions), _TILE):
        mask[positions[low : low + _TILE]] = value


def popcount(packed: NDArray[np.uint8]) -> int:
    """The number of one bits in uint8[n]."""
    return int(_ONES.take(packed).sum(dtype=np.int64))


_ONES: NDArray[np.uint8] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
