"""Sets of positions out of d: what every set codec takes and gives, and the one error they raise.

A set is a sorted uint32 array of distinct positions below d, or a bool[d] mask. This module converts and checks
them and holds `CodecError`; the codecs themselves live one per file beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.uint32]
Contexts = NDArray[np.unsignedinteger[Any]]

MAX_D = 2**32 - 1  # a position is a uint32
_CHUNK = 1 << 16  # positions handled at a time, so that temporaries stay small beside the result


class CodecError(ValueError):
    """Bytes that no encoder wrote for this d, or values that a codec cannot carry; the text says which and why."""


def check_size(d: int) -> None:
    """Raise CodecError unless `d` is a length the codecs handle."""
    if not 0 <= d <= MAX_D:
        raise CodecError(f"d = {d} is outside 0 .. {MAX_D}; split the vector")


def as_positions(what: NDArray[Any], d: int) -> Positions:
    """The set as sorted uint32 positions. `what` is bool[d], or integer positions, sorted and distinct, below d."""
    check_size(d)
    if what.ndim != 1:
        raise CodecError(f"a set is a flat array, not one of shape {what.shape}; ravel it")
    if what.dtype == np.bool_:
        if len(what) != d:
            raise CodecError(f"the mask has {len(what)} entries and d is {d}; they must be equal")
        return positions_of(what)
    if what.dtype.kind not in "ui":
        raise CodecError(f"positions are integers or a bool mask, not {what.dtype}")
    if len(what) == 0:
        return np.zeros(0, np.uint32)
    if int(what[0]) < 0 or int(what[-1]) >= d or not bool((what[1:] > what[:-1]).all()):
        raise CodecError(f"positions must be sorted, distinct and within 0 .. {d - 1}; use np.unique")
    return np.ascontiguousarray(what, np.uint32)


def positions_of(mask: NDArray[np.bool_], out: Positions | None = None) -> Positions:
    """Where bool[d] is true, as uint32, in chunks: no int64 copy of the whole answer is ever made."""
    if out is None:
        out = np.empty(int(np.count_nonzero(mask)), np.uint32)
    end = 0
    for low in range(0, len(mask), _CHUNK):
        found = np.flatnonzero(mask[low : low + _CHUNK])
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
    """The positions below `d` that are not in the set, in `out` where that is given."""
    mask = np.ones(d, np.bool_)
    _assign(mask, positions, False)
    return positions_of(mask, out)


def _assign(mask: NDArray[np.bool_], positions: Positions, value: bool) -> None:
    """Set the positions of a mask, in chunks: numpy indexes with an int64 copy."""
    for low in range(0, len(positions), _CHUNK):
        mask[positions[low : low + _CHUNK]] = value


def popcount(packed: NDArray[np.uint8]) -> int:
    """Number of one bits in uint8[...]."""
    return (
        int(_ONES[packed].sum(dtype=np.int64))
        if len(packed) < _CHUNK
        else sum(int(_ONES[packed[low : low + _CHUNK]].sum(dtype=np.int64)) for low in range(0, len(packed), _CHUNK))
    )


_ONES: NDArray[np.uint8] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
