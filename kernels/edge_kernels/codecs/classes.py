"""The mode byte of codec `entropy`, and the flip counts that give the rates of its classes.

The mode is the shift that merges neighbouring contexts. Each context that occurs after it is a *class*, with a rate of
its own. The flip count of a class is coded as the difference from a prediction extrapolated from the rates of the two
previous classes.

:func:`best` chooses the shift: it weighs the bits of the counts against the entropy of the flips at these rates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError
from edge_kernels.codecs.streams import Bits, Reader

I64 = NDArray[np.int64]

UNCODED = 15  # the mode of a payload without contexts; any other is a shift
SHIFTS = range(12)
_MOST = 512  # classes: contexts are merged at least until no more are left
_OFFSETS = range(4)
_LANES = 1.003  # coded bits per bit of entropy, lanes included


def best(sizes: I64, flips: I64) -> int:
    """The mode with the smallest payload, estimated, for contexts 0, 1, ... of `sizes` positions with `flips` flips."""
    d, n = sizes.sum(keepdims=True), flips.sum(keepdims=True)
    if not 0 < int(n[0]) < int(d[0]):
        return UNCODED
    costs = {UNCODED: _cost(d, n)}
    for shift in SHIFTS:
        used = sizes > 0
        if np.count_nonzero(used) == 1:
            break
        if np.count_nonzero(used) <= _MOST:
            costs[shift] = _cost(sizes[used], flips[used])
        sizes, flips = merged(sizes, 1), merged(flips, 1)
    return min(costs, key=costs.__getitem__)


def read_mode(reader: Reader) -> int:
    """The mode of a payload. Raises CodecError."""
    mode = reader.byte()
    if mode != UNCODED and mode not in SHIFTS:
        raise CodecError(
            f"{mode} is not the first byte of an entropy payload; was another codec or an older version used?"
        )
    return mode


def merged(counts: I64, shift: int) -> I64:
    """The sums over contexts that are equal after ``>> shift``."""
    group = 1 << shift
    sums: I64 = np.append(counts, np.zeros(-len(counts) % group, np.int64)).reshape(-1, group).sum(axis=1)
    return sums


def count_bits(sizes: I64, flips: I64) -> Bits:
    """Flip counts: an offset in two bits, then per class the zigzag difference from its prediction.

    The difference is in exponential Golomb code, of the order that :func:`_expected` returns with the offset. The
    offset with the fewest bits is used.
    """
    if not len(sizes):
        return np.zeros(0, np.bool_)
    distances = np.array([flips[i] - _expected(flips, sizes, i, 0)[0] for i in range(len(sizes))])
    zigzag = np.where(distances > 0, 2 * distances - 1, -2 * distances).tolist()
    found: list[list[int]] = []
    for offset in _OFFSETS:
        out = [offset & 1, offset >> 1]
        for i, value in enumerate(zigzag):
            order = _expected(flips, sizes, i, offset)[1]
            value += 1 << order
            width = value.bit_length() - 1
            out += [0] * (width - order) + [1] + [value >> j & 1 for j in range(width)]
        found.append(out)
    return np.array(min(found, key=len), np.bool_)


def read_counts(bits: Bits, sizes: I64) -> tuple[I64, int]:
    """The flip counts of classes of `sizes` positions, and the number of bits they took. Raises CodecError."""
    flips = np.zeros(len(sizes), np.int64)
    if not len(sizes):
        return flips, 0
    ones = np.flatnonzero(bits[2:]) + 2  # each unary part ends at one of these
    at = 2
    for i, size in enumerate(sizes.tolist()):
        expected, width = _expected(flips, sizes, i, int(bits[:2] @ (1, 2)) if len(bits) >= 2 else 0)
        which = int(np.searchsorted(ones, at))
        end = int(ones[which]) if which < len(ones) else len(bits)
        width += end - at
        low = bits[end + 1 : end + 1 + width]
        if width > 34 or len(low) < width or end >= len(bits):
            raise CodecError("the payload ends within its flip counts, or a count is too large; it is damaged")
        start = width - (end - at)
        zigzag = (1 << width) - (1 << start) + sum(1 << j for j in np.flatnonzero(low).tolist())
        flips[i] = expected + ((zigzag + 1) // 2 if zigzag % 2 else -(zigzag // 2))
        if not 0 <= flips[i] <= size:
            raise CodecError("a class has more flips than positions; the payload is damaged or d is wrong")
        at = end + 1 + width
    return flips, at


def _expected(flips: I64, sizes: I64, i: int, offset: int) -> tuple[int, int]:
    """The predicted flips of class `i`, from the classes before it, and the order of the code of the difference.

    The rate (2 n + 1) / (2 N + 2) is extrapolated by the ratio of the last two rates, clipped to 1/4 .. 4.
    """
    size = int(sizes[i])
    if i == 0:
        expected = size >> 5
    else:
        up, down = 2 * int(flips[i - 1]) + 1, 2 * int(sizes[i - 1]) + 2
        if i > 1:
            ahead, behind = up * (2 * int(sizes[i - 2]) + 2), down * (2 * int(flips[i - 2]) + 1)
            if ahead > 4 * behind:
                ahead, behind = 4, 1
            elif behind > 4 * ahead:
                ahead, behind = 1, 4
            up, down = up * ahead, down * behind
        expected = min(size * up // down, size)
    spread = min(expected, size - expected)
    return expected, max(3 * spread.bit_length() // 4 + offset - 2, 0)


def _cost(sizes: I64, flips: I64) -> float:
    """An estimate of the bits of classes that have positions: their counts, their entropy and the lanes."""
    rate = flips / sizes
    part = np.clip(rate, 1e-300, 1 - 1e-16)
    entropy = -sizes * (rate * np.log2(part) + (1 - rate) * np.log2(1 - part))
    return len(count_bits(sizes, flips)) + _LANES * float(entropy.sum())
