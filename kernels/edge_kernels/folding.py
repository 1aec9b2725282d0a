"""Folding: sums of many packed masks without unpacking any, as bit-sliced carry-save counters.

Position i's count is spread over the planes: bit i of plane j has weight 2**j. Each level keeps a sum plane and at most
one plane that waits for a partner; a full adder (five operations on uint64 words, 64 positions at once) takes sum,
waiting and new plane to a sum and a carry for the level above. So adding a mask costs about five word operations,
whatever the number of masks, and memory is O(d log masks) bits. Masks are packed as by codec `bits`:
``np.packbits(mask, bitorder="little")``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = NDArray[np.uint8]
Words = NDArray[np.uint64]

_CHUNK = 1 << 15  # words added at a time: their streams stay in the second-level cache
_READ = 1 << 13  # words read out at a time: 64 counts each


class Tally:
    """Running weighted sum of masks of `d` positions. It is small state that grows by a plane per doubling.

    >>> tally = Tally(3)
    >>> tally.add(np.packbits([1, 0, 1], bitorder="little"))
    >>> tally.add(np.packbits([1, 0, 0], bitorder="little"), weight=3)
    >>> tally.counts().tolist()
    [4, 0, 1]
    """

    def __init__(self, d: int) -> None:
        self.d = d
        self.total = 0
        """Sum of the weights added: no count is above it."""
        self._words = (d + 63) // 64
        self._sums: list[Words] = []
        self._waiting: list[Words] = []
        self._waits: list[bool] = []
        self._scratch = np.empty(min(_CHUNK, self._words), np.uint64)

    def add(self, mask: Packed, weight: int = 1, where: Packed | None = None) -> None:
        """Add `weight` (a whole number, at least 0) at every set bit of `mask`, and of `where` if given.

        Float weights are the caller's to scale to integers: sample counts are integers already. Raises ValueError for
        a mask of another length.
        """
        if weight < 0:
            raise ValueError(f"a mask's weight is {weight}; weights are whole numbers from 0 on")
        words = _words(mask, self.d)
        if where is not None:
            words = words & _words(where, self.d)
        self.total += weight
        for level in range(weight.bit_length()):
            if weight >> level & 1:
                self._push(level, words)

    def merge(self, other: Tally) -> None:
        """Add all that `other` has counted, e.g. on another thread."""
        if other.d != self.d:
            raise ValueError(f"a tally of {other.d} positions cannot join one of {self.d}")
        self.total += other.total
        for level in range(len(other._sums)):
            self._push(level, other._sums[level])
            if other._waits[level]:
                self._push(level, other._waiting[level])

    def counts(self) -> NDArray[np.unsignedinteger[Any]]:
        """The counts, uint8[d] where the total allows it, else the next wider dtype."""
        dtype = np.dtype(np.min_scalar_type(self.total))
        out: NDArray[np.unsignedinteger[Any]] = np.empty(self._words * 64, dtype)
        by_byte = out.view(np.uint8).reshape(-1, dtype.itemsize)  # the bytes of a count are eight planes each
        if sys.byteorder == "big":
            by_byte = by_byte[:, ::-1]
        for low in range(0, self._words, _READ):
            planes = self._planes(low, _READ)
            for byte in range(dtype.itemsize):  # planes beyond the dtype are empty: no count is above `total`
                by_byte[low * 64 : (low + _READ) * 64, byte] = _transposed(
                    planes[8 * byte : 8 * byte + 8], min(_READ, self._words - low)
                )
        return out[: self.d]

    def at_least(self, threshold: int) -> Packed:
        """The packed mask of the positions whose count is at least `threshold`: a vote without unpacking."""
        if threshold <= 0:
            return np.packbits(np.ones(self.d, np.bool_), bitorder="little")
        out = np.zeros(self._words, np.uint64)
        for low in range(0, self._words, _CHUNK):
            planes = self._planes(low, _CHUNK)
            if (threshold - 1) >> len(planes):
                continue
            above = np.zeros_like(out[low : low + _CHUNK])  # count > threshold - 1, decided from the lowest plane up
            for level, plane in enumerate(planes):
                above = above & plane if (threshold - 1) >> level & 1 else above | plane
            out[low : low + _CHUNK] = above
        packed: Packed = out.astype("<u8", copy=False).view(np.uint8)[: (self.d + 7) // 8].copy()
        return packed

    def _push(self, level: int, new: Words) -> None:
        """Add plane `new`, which is not changed, at a level; carries climb."""
        while True:
            while level >= len(self._sums):
                self._sums.append(np.zeros(self._words, np.uint64))
                self._waiting.append(np.zeros(self._words, np.uint64))
                self._waits.append(False)
            waiting = self._waiting[level]
            if not self._waits[level]:
                self._waits[level] = True
                if level and new is self._waiting[level - 1]:  # a carry: it stays where it is, the buffers change hands
                    self._waiting[level - 1], self._waiting[level] = waiting, new
                else:
                    waiting[:] = new
                return
            total = self._sums[level]
            for low in range(0, self._words, _CHUNK):
                s, w, x = (plane[low : low + _CHUNK] for plane in (total, waiting, new))
                either = np.bitwise_xor(s, w, out=self._scratch[: len(s)])
                w &= s
                np.bitwise_xor(either, x, out=s)
                either &= x
                w |= either  # now the carry
            self._waits[level] = False
            new = waiting
            level += 1

    def _planes(self, low: int, count: int) -> list[Words]:
        """Words `low` .. `low + count - 1` of the counts' binary digits, least significant first, carries resolved."""
        out: list[Words] = []
        carry: Words | None = None
        for level, total in enumerate(self._sums):
            digits = [total[low : low + count]]
            if self._waits[level]:
                digits.append(self._waiting[level][low : low + count])
            if carry is not None:
                digits.append(carry)
            if len(digits) == 1:
                carry = None
            elif len(digits) == 2:
                carry, digits[0] = digits[0] & digits[1], digits[0] ^ digits[1]
            else:
                either = digits[0] ^ digits[1]
                carry, digits[0] = (digits[0] & digits[1]) | (either & digits[2]), either ^ digits[2]
            out.append(digits[0])
        return out if carry is None else [*out, carry]


def _transposed(planes: list[Words], words: int) -> Packed:
    """Bytes whose bit j is the bit of plane j (at most eight planes): 64 * words of them.

    Byte k of the planes, laid side by side, is an 8 x 8 bit matrix in one word, transposed by three exchanges.
    """
    matrix = np.zeros((words * 8, 8), np.uint8)
    for j, plane in enumerate(planes):
        matrix[:, j] = plane.astype("<u8", copy=False).view(np.uint8)
    x = matrix.view("<u8")[:, 0].astype(np.uint64, copy=False)
    swap = np.empty_like(x)
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        np.right_shift(x, np.uint64(shift), out=swap)
        swap ^= x
        swap &= np.uint64(mask)
        x ^= swap
        swap <<= np.uint64(shift)
        x ^= swap
    return x.astype("<u8", copy=False).view(np.uint8)


def overlap(a: Packed, b: Packed) -> int:
    """The number of positions set in both packed masks, which have the same length."""
    if a.shape != b.shape:
        raise ValueError(f"masks of {len(a)} and {len(b)} bytes do not overlap position by position")
    return sum(popcount(a[low : low + 8 * _CHUNK] & b[low : low + 8 * _CHUNK]) for low in range(0, len(a), 8 * _CHUNK))


def popcount(mask: Packed) -> int:
    """The number of set bits of a packed mask."""
    return int(_ONES[mask].sum(dtype=np.int64))


_ONES: Packed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


def _words(mask: Packed, d: int) -> Words:
    """A packed mask as uint64 words, zeros after its end; without copying where its length allows."""
    if mask.dtype != np.uint8 or mask.shape != ((d + 7) // 8,):
        raise ValueError(f"a packed mask of {d} positions is uint8[{(d + 7) // 8}], not {mask.dtype}{mask.shape}")
    if d % 8 and mask[-1] >> (d % 8):
        raise ValueError(
            f"bits beyond position {d - 1} are set; the mask was packed for a larger d or in big bit order"
        )
    if len(mask) % 8 == 0 and mask.flags.c_contiguous and mask.ctypes.data % 8 == 0:
        return mask.view("<u8").astype(np.uint64, copy=False)
    padded = np.zeros(((d + 63) // 64) * 8, np.uint8)
    padded[: len(mask)] = mask
    return padded.view("<u8").astype(np.uint64, copy=False)
