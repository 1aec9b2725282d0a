"""Folding: the sum of many packed masks, without unpacking each, as bit-sliced carry-save counters.

The counts lie in planes: bit i of a plane of level j stands for 2**j in the count of position i. A full adder, five
operations on uint64 words, replaces three planes of one level by a sum at that level and a carry at the next. Each
level keeps one sum plane and at most one further plane. Adding a mask takes two full adders on average, however many
masks there are, and d positions take about ``d * log2(masks) / 4`` bytes. Masks are packed as by codec `bits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits

Packed = NDArray[np.uint8]
Words = NDArray[np.uint64]

_WORD = np.dtype("<u8")  # a mask's bytes are the words' bytes on every machine
_TILE = 1 << 13  # words handled at a time: the operands of a full adder stay in the cache


class Tally:
    """How many of the masks added so far have each of `d` positions set.

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
        self._words = -(-d // 64)
        self._sums: list[Words] = []
        self._waiting: dict[int, Words] = {}  # by level, the second plane

    def add(self, mask: Packed) -> None:
        """Add a packed mask. Raises ValueError when it does not have `d` positions."""
        bits.check(mask, self.d)
        self.total += 1
        plane = np.zeros(self._words, _WORD)
        plane.view(np.uint8)[: len(mask)] = mask
        level = 0
        while level in self._waiting:
            carry = self._waiting.pop(level)
            for low in range(0, self._words, _TILE):
                part = slice(low, low + _TILE)
                _full_add(self._sums[level][part], carry[part], plane[part])
            plane = carry
            level += 1
        if level == len(self._sums):
            self._sums.append(np.zeros(self._words, _WORD))
        self._waiting[level] = plane

    def counts(self) -> NDArray[np.unsignedinteger[Any]]:
        """The counts[d], in the smallest unsigned dtype that holds `total`."""
        dtype = np.dtype(np.min_scalar_type(self.total))
        out: NDArray[np.unsignedinteger[Any]] = np.zeros(self.d, dtype)
        for low in range(0, self._words, _TILE):
            part = out[64 * low : 64 * (low + _TILE)]
            for level, digit in enumerate(self._digits(slice(low, low + _TILE))):
                ones = np.unpackbits(digit.view(np.uint8), count=len(part), bitorder="little")
                part |= ones.astype(dtype, copy=False) << dtype.type(level)
        return out

    def _digits(self, part: slice) -> Iterator[Words]:
        """The binary digits of the counts of some words, least significant first."""
        carry = np.zeros(len(range(self._words)[part]), _WORD)
        for level in range(self.total.bit_length()):
            digit = self._sums[level][part].copy() if level < len(self._sums) else np.zeros_like(carry)
            if level in self._waiting:
                _full_add(digit, carry, self._waiting[level][part])
            else:
                digit, carry = digit ^ carry, digit & carry
            yield digit


def _full_add(total: Words, carry: Words, plane: Words) -> None:
    """Add `carry` and `plane` to `total`, in place; `carry` becomes the carry to the next level."""
    both = total ^ carry
    carry &= total
    np.bitwise_xor(both, plane, out=total)
    both &= plane
    carry |= both
