"""Folding: sums of many packed masks without unpacking any, as bit-sliced carry-save counters.

Position i's count is spread over planes: bit i of a plane of level j has weight 2**j. A full adder (five operations on
uint64 words, 64 positions at once) takes a level's sum and two more planes of it to a sum and a carry for the level
above. Masks are taken sixteen at a time through a tree of fifteen full adders, a stretch that fits the cache after the
other, so that the upper planes are touched once for sixteen masks (Harley and Seal's population count). Adding a mask
costs five word operations, whatever the number of masks, and memory is O(d log masks) bits. Masks are packed as by
codec `bits`: ``np.packbits(mask, bitorder="little")``.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = NDArray[np.uint8]
Words = NDArray[np.uint64]

_TREE = 4  # levels of the tree: 2**4 masks
_CHUNK = 1 << 14  # words added at a time: the streams of a full adder stay in the cache
_READ = 1 << 13  # words read out at a time: 64 counts each
_SLAB = 4  # planes allocated at a time, as one array, which the system may back with large pages


class Tally:
    """Running weighted sum of masks of `d` positions. It is small state that grows by two planes per doubling.

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
        self._words = d // 64
        self._tail = np.zeros(d % 64, np.uint64)  # the counts of the positions after the last whole word
        self._batch: list[Words] = []  # masks of level 0 that wait for others: read only
        self._copies: list[Words] = []  # planes that hold those of them that did not lie on words
        self._free: list[Words] = []  # planes not in use
        self._sums: list[Words] = []
        self._waiting: dict[int, Words] = {}  # by level, a second plane that waits for a third
        self._scratch = np.empty((1 + _TREE, min(_CHUNK, self._words)), np.uint64)

    def add(self, mask: Packed, weight: int = 1, where: Packed | None = None) -> None:
        """Add `weight` (a whole number, at least 0) at every set bit of `mask`, and of `where` if given.

        Float weights are the caller's to scale to integers: sample counts are integers already. `mask` is kept, not
        copied, until sixteen have come or the counts are read: whoever adds it may not change it any more. Raises
        ValueError for a mask of another length, TypeError for a weight that is no integer.
        """
        weight = operator.index(weight)
        if weight < 0:
            raise ValueError(f"a mask's weight is {weight}; weights are whole numbers from 0 on")
        _check(mask, self.d)
        if where is not None:
            _check(where, self.d)
            mask = mask & where
        body, tail = np.split(mask, [8 * self._words])
        self._tail += np.unpackbits(tail, count=self._tail.size, bitorder="little") * np.uint64(weight)
        if sys.byteorder == "little" and body.flags.c_contiguous and body.ctypes.data % 8 == 0:
            words = body.view(np.uint64)
        else:
            words = self._plane()
            self._copies.append(words)
            words.view(np.uint8)[:] = body
            if sys.byteorder == "big":
                words.byteswap(inplace=True)
        self.total += weight
        for level in range(1, weight.bit_length()):
            if weight >> level & 1:
                self._push(level, words)
        if weight & 1:
            self._batch.append(words)
            if len(self._batch) == 1 << _TREE:
                self._fold()
        elif self._copies and self._copies[-1] is words:
            self._free.append(self._copies.pop())

    def counts(self) -> NDArray[np.unsignedinteger[Any]]:
        """The counts, uint8[d] where the total allows it, else the next wider dtype."""
        self._settle()
        dtype = np.dtype(np.min_scalar_type(self.total))
        out: NDArray[np.unsignedinteger[Any]] = np.empty(self.d, dtype)
        out[64 * self._words :] = self._tail
        whole = out[: 64 * self._words]
        by_byte = whole.view(np.uint8).reshape(-1, 8, dtype.itemsize)  # the bytes of a count are eight planes each
        if sys.byteorder == "big":
            by_byte = by_byte[:, :, ::-1]
        rows = np.zeros((8 * dtype.itemsize, min(_READ, self._words)), np.uint64)
        for low in range(0, self._words, _READ):
            digits = self._digits(slice(low, low + _READ), rows)
            for byte in range(dtype.itemsize):
                turned = _transposed(digits[8 * byte : 8 * byte + 8])
                for k in range(8):
                    by_byte[low * 8 : (low + _READ) * 8, k, byte] = turned[k]
        return out

    def at_least(self, threshold: int) -> Packed:
        """The packed mask of the positions whose count is at least `threshold`: a vote without unpacking."""
        if threshold <= 0:
            return np.packbits(np.ones(self.d, np.bool_), bitorder="little")
        self._settle()
        out = np.zeros(self._words, np.uint64)
        rows = np.empty((self.total.bit_length(), min(_READ, self._words)), np.uint64)
        for low in range(0, self._words, _READ):
            above = out[low : low + _READ]  # count > threshold - 1, decided from the lowest plane up
            if threshold <= self.total:
                for level, plane in enumerate(self._digits(slice(low, low + _READ), rows)):
                    above[:] = above & plane if (threshold - 1) >> level & 1 else above | plane
        tail = np.packbits(self._tail >= threshold, bitorder="little")
        return np.concatenate([out.astype("<u8", copy=False).view(np.uint8), tail])

    def _fold(self) -> None:
        """Take a full batch through the tree; its last carry goes to level `_TREE`."""
        top = self._open(_TREE)
        for low in range(0, self._words, _CHUNK):
            stretch = slice(low, low + _CHUNK)
            rows = [mask[stretch] for mask in self._batch]
            self._climb(_TREE, top, stretch, self._tree(_TREE - 1, rows, stretch, self._scratch[1:, : len(rows[0])]))
        self._close(_TREE, top)
        self._drop_batch()

    def _tree(self, level: int, rows: list[Words], stretch: slice, spares: Words) -> Words:
        """Add a stretch of ``2**(level + 1)`` planes of level 0 to the sums up to `level`; returns the last carry."""
        first, second = rows[0], rows[-1]
        if level:
            first = self._tree(level - 1, rows[: 1 << level], stretch, spares)
            second = self._tree(level - 1, rows[1 << level :], stretch, spares[1:])
        return _full_add(self._sums[level][stretch], first, second, spares[0], self._scratch[0, : len(first)])

    def _settle(self) -> None:
        """Add the masks that still wait for a full batch."""
        for mask in self._batch:
            self._push(0, mask)
        self._drop_batch()

    def _drop_batch(self) -> None:
        self._free += self._copies
        self._batch, self._copies = [], []

    def _push(self, level: int, new: Words) -> None:
        """Add plane `new`, which is not changed, at a level; carries climb."""
        top = self._open(level)
        for low in range(0, self._words, _CHUNK):
            self._climb(level, top, slice(low, low + _CHUNK), new[low : low + _CHUNK])
        self._close(level, top)

    def _open(self, level: int) -> int:
        """The first level from `level` on where no plane waits: a carry from `level` ends there, in a new plane."""
        while level in self._waiting:
            level += 1
        while level >= len(self._sums):
            self._sums.append(self._plane())
            self._sums[-1][:] = 0
        self._waiting[level] = self._plane()
        return level

    def _climb(self, level: int, top: int, stretch: slice, row: Words) -> None:
        """Add a stretch of a plane at `level`, where planes wait up to below level `top`."""
        for at in range(level, top):
            waiting = self._waiting[at][stretch]
            row = _full_add(self._sums[at][stretch], waiting, row, waiting, self._scratch[0, : len(row)])
        self._waiting[top][stretch] = row

    def _close(self, level: int, top: int) -> None:
        """Free the planes that waited at levels `level` .. `top - 1`: they have been added."""
        self._free += [self._waiting.pop(at) for at in range(level, top)]

    def _plane(self) -> Words:
        """A plane to be overwritten."""
        if not self._free:
            self._free = list(np.empty((_SLAB, self._words), np.uint64))
        return self._free.pop()

    def _digits(self, stretch: slice, rows: Words) -> Words:
        """A stretch of the counts' binary digits in `rows`, the lowest first, carries resolved; other rows are 0."""
        out = rows[:, : len(range(self._words)[stretch])]
        out[len(self._sums) :] = 0  # no count is above `total`, so that the last carry is 0
        carry: Words | None = None
        for level, (total, digit) in enumerate(zip(self._sums, out, strict=False)):
            digit[:] = total[stretch]
            more = [self._waiting[level][stretch]] if level in self._waiting else []
            more += [carry] if carry is not None else []
            carry = None
            if len(more) == 2:
                carry = _full_add(digit, more[0], more[1], np.empty_like(digit), np.empty_like(digit))
            elif more:
                carry = digit & more[0]
                digit ^= more[0]
        if carry is not None and len(out) > len(self._sums):
            out[len(self._sums)] = carry
        return out


def _full_add(total: Words, first: Words, second: Words, carry: Words, spare: Words) -> Words:
    """Add two planes to `total` in place; the carry is written to `carry`, which may be `first`, and returned."""
    np.bitwise_xor(total, first, spare)
    np.bitwise_and(total, first, carry)
    np.bitwise_xor(spare, second, total)
    np.bitwise_and(spare, second, spare)
    return np.bitwise_or(carry, spare, carry)


def _transposed(rows: Words) -> Packed:
    """uint8[8, 8 * n] of planes uint64[8, n], which are overwritten: bit j of [k, i] is bit 8 * i + k of plane j.

    Bytes i of the eight planes are an 8 x 8 bit matrix. It is transposed by exchanging the two off-diagonal quarters,
    then those of each quarter, and once more.
    """
    for shift, mask in ((4, 0x0F0F0F0F0F0F0F0F), (2, 0x3333333333333333), (1, 0x5555555555555555)):
        for i in range(8):
            if not i & shift:
                swap = rows[i] >> np.uint64(shift)
                swap ^= rows[i + shift]
                swap &= np.uint64(mask)
                rows[i + shift] ^= swap
                swap <<= np.uint64(shift)
                rows[i] ^= swap
    return rows.astype("<u8", copy=False).view(np.uint8)


def overlap(a: Packed, b: Packed) -> int:
    """The number of positions set in both packed masks, which have the same length."""
    if a.shape != b.shape:
        raise ValueError(f"masks of {len(a)} and {len(b)} bytes do not overlap position by position")
    return sum(popcount(a[low : low + 8 * _CHUNK] & b[low : low + 8 * _CHUNK]) for low in range(0, len(a), 8 * _CHUNK))


def popcount(mask: Packed) -> int:
    """The number of set bits of a packed mask."""
    return int(_ONES[mask].sum(dtype=np.int64))


_ONES: Packed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


def _check(mask: Packed, d: int) -> None:
    """Raise ValueError unless `mask` is a packed mask of `d` positions."""
    if mask.dtype != np.uint8 or mask.shape != ((d + 7) // 8,):
        raise ValueError(f"a packed mask of {d} positions is uint8[{(d + 7) // 8}], not {mask.dtype}{mask.shape}")
    if d % 8 and mask[-1] >> (d % 8):
        raise ValueError(
            f"bits beyond position {d - 1} are set; the mask was packed for a larger d or in big bit order"
        )
