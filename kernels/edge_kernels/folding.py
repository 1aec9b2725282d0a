"""Folding: the sum of many packed masks. Masks are packed as by codec `bits`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits

Packed = NDArray[np.uint8]

_TILE = 1 << 16  # bytes of a mask unpacked at a time


class Tally:
    """How many of the masks added so far have each of `d` positions set; a byte a position up to 255 masks.

    >>> tally = Tally(3)
    >>> tally.add(np.packbits([1, 0, 1], bitorder="little"))
    >>> tally.add(np.packbits([1, 0, 0], bitorder="little"))
    >>> tally.counts().tolist()
    [2, 0, 1]
    """

    def __init__(self, d: int) -> None:
        self.d = d
        self.total = 0
        """The number of masks added; no count exceeds it."""
        self._counts: NDArray[np.unsignedinteger[Any]] = np.zeros(d, np.uint8)

    def add(self, mask: Packed) -> None:
        """Add a packed mask. Raises ValueError when it does not have `d` positions."""
        bits.check(mask, self.d)
        self.total += 1
        self._counts = self._counts.astype(np.min_scalar_type(self.total), copy=False)
        for low in range(0, len(mask), _TILE):
            part = self._counts[8 * low : 8 * (low + _TILE)]
            part += np.unpackbits(mask[low : low + _TILE], count=len(part), bitorder="little")

    def counts(self) -> NDArray[np.unsignedinteger[Any]]:
        """The counts[d], in the smallest unsigned dtype that holds `total`."""
        counts: NDArray[np.unsignedinteger[Any]] = self._counts.copy()
        return counts
