"""The header of codec `entropy`: which contexts share a rate, and the flip counts that give the rates.

Each context that occurs is a class of its own, or the contexts share at most `MAX_CLASSES` classes. A shared class is
coded, per context in ascending order, as the step from the previous context's class. The flip count of a class is
coded as the difference from a prediction extrapolated from the rates of the two previous classes.

:func:`best` weighs these bits against the entropy of the flips at the rates of the classes. It sorts the contexts by
rate and cuts them into stretches of least total cost. With the rates of these stretches, the cheapest path through the
contexts in ascending order then assigns the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError
from edge_kernels.codecs.streams import Bits, read_unary, unary

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

MAX_CLASSES = 64
UNCODED = 15  # `mode` of a payload without contexts; otherwise the low bits are the shift that merges contexts
SHIFTS = range(12)
MAPPED = 16  # bit of `mode`: the classes of the contexts are listed
_SEARCHED = 512  # the most contexts that are searched; more are merged first
_CLASS_BITS = (4.0, 12.0)  # prices of a class that are tried, on top of half the logarithm of its flip count
_OFFSETS = range(4)
_LANES = 1.003  # coded bytes per byte of entropy, lanes included


@dataclass(frozen=True)
class Plan:
    """`classes` uint16[G] of the contexts that occur after the shift of `mode`, and the estimated payload bytes."""

    mode: int
    classes: NDArray[np.uint16]
    bytes: float


def best(sizes: I64, flips: I64) -> Plan:
    """The cheapest plan for contexts 0, 1, ... of `sizes` positions with `flips` flips."""
    d, n = sizes.sum(keepdims=True), flips.sum(keepdims=True)
    plan = Plan(UNCODED, np.zeros(0, np.uint16), _bytes(UNCODED, np.zeros(0, np.uint16), d[d > 0], n[d > 0]))
    if not 0 < int(n[0]) < int(d[0]):
        return plan
    for shift in SHIFTS:
        used = sizes > 0
        if np.count_nonzero(used) == 1:
            break
        if np.count_nonzero(used) <= _SEARCHED:
            for mode in (shift, shift | MAPPED):
                plan = min(plan, _at_mode(mode, sizes[used], flips[used]), key=lambda p: p.bytes)
        sizes, flips = merged(sizes, 1), merged(flips, 1)
    return plan


def merged(counts: I64, shift: int) -> I64:
    """The sums over contexts that are equal after ``>> shift``."""
    group = 1 << shift
    sums: I64 = np.append(counts, np.zeros(-len(counts) % group, np.int64)).reshape(-1, group).sum(axis=1)
    return sums


def header(mode: int, classes: NDArray[np.uint16], sizes: I64, flips: I64) -> Bits:
    """The classes if `mode` lists them, then their flip counts.

    A class is the step from the previous one, the first from 0: zigzag (0, 1, -1, 2, ... as 0, 1, 2, 3, ...) in unary.
    """
    listed = unary(_zigzag(np.diff(classes.astype(np.int64), prepend=0))) if mode & MAPPED else np.zeros(0, np.bool_)
    return np.concatenate([listed, _count_bits(flips, sizes)])


def read_classes(bits: Bits, count: int) -> tuple[NDArray[np.uint16], int]:
    """The listed classes of `count` contexts, and the number of bits they took. Raises CodecError."""
    zigzag, used = read_unary(bits, count)
    numbers = np.cumsum(np.where(zigzag % 2 == 1, (zigzag + 1) // 2, -(zigzag // 2)))
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= min(MAX_CLASSES, max(count, 1)):
        raise CodecError(f"a class is not below {MAX_CLASSES} and the number of contexts; the payload is damaged")
    return numbers.astype(np.uint16), used


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


def _count_bits(flips: I64, sizes: I64) -> Bits:
    """Flip counts: an offset in two bits, then per class the zigzag difference from its prediction.

    The difference is in exponential Golomb code, of the order that :func:`_expected` returns with the offset. The
    offset with the fewest bits is used.
    """
    if not len(sizes):
        return np.zeros(0, np.bool_)
    distances = np.array([flips[i] - _expected(flips, sizes, i, 0)[0] for i in range(len(sizes))])
    zigzag = _zigzag(distances).tolist()
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


def _zigzag(steps: NDArray[Any]) -> NDArray[np.uint32]:
    zigzag: NDArray[np.uint32] = np.where(steps > 0, 2 * steps - 1, -2 * steps).astype(np.uint32)
    return zigzag


def _at_mode(mode: int, sizes: I64, flips: I64) -> Plan:
    """The cheapest plan found in this mode; every context has positions."""
    if not mode & MAPPED:
        own = np.arange(len(sizes), dtype=np.uint16)
        return Plan(mode, own, _bytes(mode, own, sizes, flips))
    plans = []
    cuts = [_cut(sizes, flips, price) for price in _CLASS_BITS]
    for rates in [*cuts, *(rates[::-1] for rates in cuts)]:  # the first step starts from class 0, so order matters
        path = _path(rates, sizes, flips)
        classes = np.unique(path, return_inverse=True)[1].astype(np.uint16)  # numbered without holes
        all_, ones = (np.bincount(classes, x).astype(np.int64) for x in (sizes, flips))
        plans.append(Plan(mode, classes, _bytes(mode, classes, all_, ones)))
    return min(plans, key=lambda p: p.bytes)


def _cut(sizes: I64, flips: I64, price: float) -> F64:
    """The ascending rates of the best cut of the contexts, sorted by rate, into at most MAX_CLASSES stretches."""
    order = np.argsort((flips + 0.5) / (sizes + 1), kind="stable")
    size, flip = (np.append(0, np.cumsum(a[order])).astype(np.float64) for a in (sizes, flips))
    least = np.zeros(len(size))
    start = np.zeros(len(size), np.int64)
    for end in range(1, len(size)):
        n, ones = size[end] - size[:end], flip[end] - flip[:end]
        through = least[:end] + _entropy(n, ones) + np.log2(ones + 1) / 2 + price
        start[end] = through.argmin()
        least[end] = through[start[end]]
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(int(start[cuts[-1]]))
    ends = np.array(cuts[::-1])
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, MAX_CLASSES + 1).astype(np.int64))]
    rates: F64 = (np.diff(flip[ends]) + 0.5) / (np.diff(size[ends]) + 1)
    return rates


def _path(rates: F64, sizes: I64, flips: I64) -> I64:
    """The index into `rates` of every context on the cheapest path, int64[G]."""
    step = np.arange(len(rates))[:, None] - np.arange(len(rates))  # from the column to the row
    toll = 1.0 + np.where(step > 0, 2 * step - 1, -2 * step)
    own = -(flips[:, None] * np.log2(rates) + (sizes - flips)[:, None] * np.log2(1 - rates))
    cost = toll[:, 0] + own[0]
    back = np.zeros((len(sizes), len(rates)), np.int64)
    each = np.arange(len(rates))
    for i in range(1, len(sizes)):
        through = toll + cost
        back[i] = through.argmin(axis=1)
        cost = through[each, back[i]] + own[i]
    path = np.empty(len(sizes), np.int64)
    path[-1] = cost.argmin()
    for i in range(len(sizes) - 1, 0, -1):
        path[i - 1] = back[i, path[i]]
    return path


def _bytes(mode: int, classes: NDArray[np.uint16], sizes: I64, flips: I64) -> float:
    """An estimate of the payload's bytes: header, lanes and the entropy of the classes."""
    bits = float(_entropy(sizes.astype(np.float64), flips.astype(np.float64)).sum())
    return 2 + (len(header(mode, classes, sizes, flips)) + bits * _LANES) / 8 + 1


def _entropy(sizes: F64, flips: F64) -> F64:
    """The bits of each group of independent flips, at the group's own rate."""
    rate = flips / np.maximum(sizes, 1)
    part = np.clip(rate, 1e-300, 1 - 1e-16)
    bits: F64 = -sizes * (rate * np.log2(part) + (1 - rate) * np.log2(1 - part))
    return bits
