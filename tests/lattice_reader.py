"""A reader of Lattice's payloads, written from docs/codecs.md alone, without numpy.

The tests compare `edge_kernels.lattice` with it. A port to another language can start from it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

PASSES = [(0, 1), (1, 3), (3, 9), (9, 25), (25, 61)]
ONE = 1 << 24
BELOW = [0]
rest = 1 << 56
for _ in range(16):
    rest = rest * 3344923893 >> 32
    BELOW.append(ONE - (rest >> 32))


def clip(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def log2(x: float) -> int:
    mantissa, exponent = math.frexp(x)
    return math.floor(32 * (exponent + (2 * mantissa - 2)) + 0.5)


def log_distance(distance: int) -> int:
    v = max(distance >> 8, 1)
    top = v.bit_length() - 1
    return 32 * top + ((v << 5 >> top) & 31)


def chance(t: int) -> int:
    k, part = t >> 18, t & 0x3FFFF
    return BELOW[k] + (part * (BELOW[k + 1] - BELOW[k]) >> 18) if k < 16 else BELOW[16]


def hazard(p: int) -> int:
    k = min(bisect_right(BELOW, p) - 1, 15)
    return clip((k << 18) + ((p - BELOW[k]) << 18) // (BELOW[k + 1] - BELOW[k]), 4, 4 << 20)


class Lanes:
    """The interleaved coders."""

    def __init__(self, data: bytes, lanes: int) -> None:
        at = -(-lanes // 4)
        self.x = []
        for i in range(lanes):
            width = 4 + (data[i // 4] >> (i % 4 * 2) & 3)
            self.x.append(int.from_bytes(data[at : at + width], "little"))
            at += width
        self.words = [int.from_bytes(data[i : i + 3], "little") for i in range(at, len(data), 3)]

    def members(self, hazards: Sequence[int]) -> list[int]:
        """The members of a list of elements with these hazards."""
        before = [0, *accumulate(hazards)]
        lanes, n = len(self.x), len(hazards)
        cuts = [bisect_left(before, i * (before[n] // lanes)) for i in range(lanes)] + [n]
        at, found = cuts[:-1], []
        while any(a < end for a, end in zip(at, cuts[1:], strict=True)):
            for i in range(lanes):
                if at[i] < cuts[i + 1]:
                    member = self.symbol(i, before, at[i], cuts[i + 1])
                    at[i] = member if member >= 0 else -member
                    if member >= 0:
                        found.append(member)
                        at[i] += 1
            for i in range(lanes):
                if self.x[i] < ONE:
                    self.x[i] = self.x[i] * ONE + self.words.pop(0)
        return sorted(found)

    def symbol(self, i: int, before: Sequence[int], a: int, end: int) -> int:
        """The next member from element a, or minus the element at which the window ends."""
        slot = self.x[i] % ONE
        window = min(bisect_right(before, before[a] + (4 << 20)) - 1, end)
        low, high = 0, window - a  # the first j with chance(hazard up to and with a + j) > slot
        while low < high:
            middle = (low + high) // 2
            if chance(before[a + middle + 1] - before[a]) > slot:
                high = middle
            else:
                low = middle + 1
        j = a + low
        start = chance(before[j] - before[a])
        stop = chance(before[j + 1] - before[a]) if j < window else ONE
        self.x[i] = (stop - start) * (self.x[i] // ONE) + slot - start
        return j if j < window else -j


class Factors:
    """The factors of one tensor, as logarithms in 1/32 octaves, each with a weight."""

    def __init__(self, low: int, rows: int, columns: int, held: Sequence[int] | None, factor: int) -> None:
        self.low, self.rows, self.columns, self.size = low, rows, columns, rows * columns
        self.factor, self.weight = factor, 1.5
        row, column = [0] * rows, [0] * columns
        if held is not None and columns > 1:
            for i in range(self.size):
                row[i // columns] += abs(held[low + i])
                column[i % columns] += abs(held[low + i])
        self.row, self.row_weight = self.first(row)
        self.column, self.column_weight = self.first(column)

    @staticmethod
    def first(sums: Sequence[int]) -> tuple[list[int], list[float]]:
        mean = sum(sums) / max(len(sums), 1)
        return [clip(log2((s + 2.0) / (mean + 2.0)), -128, 128) for s in sums], [
            min(max(float(s), 2.0), 8.0) for s in sums
        ]

    def scale(self, i: int) -> int:
        return self.factor + self.row[i // self.columns] + self.column[i % self.columns]

    def learn(self, members: Sequence[int], expected: dict[int, int]) -> None:
        """Correct the factors; `expected` are the chances of the tensor's elements of the pass, in 2**-20."""
        ratio = (len(members) + self.weight) / (sum(expected.values()) * 2.0**-20 + self.weight)
        self.factor = clip(self.factor + log2(ratio), 64, 960)
        self.weight += len(members)
        if self.columns > 1:
            for place, factors, weights in (
                ([i // self.columns for i in range(self.size)], self.row, self.row_weight),
                ([i % self.columns for i in range(self.size)], self.column, self.column_weight),
            ):
                seen, due = [0] * len(factors), [0] * len(factors)
                for i in members:
                    seen[place[i]] += 1
                for i, chances in expected.items():
                    due[place[i]] += chances
                for k in range(len(factors)):
                    w = weights[k]
                    factors[k] = clip(factors[k] + log2((seen[k] + w) / (due[k] * 2.0**-20 * ratio + w)), -128, 128)
                    weights[k] = w + seen[k]


def first_curve(dithered: bool) -> list[float]:
    out = []
    for step in range(-384, 192):
        x = math.ldexp(1 + step % 32 / 32, step // 32)
        c = 1 / (1 + x / 64)
        for _ in range(6):
            c = c * c
        out.append(c / (2 - 0.557 * c) if dithered else 1 / x)
    return out


def values(
    data: bytes,
    shapes: Sequence[tuple[int, int]],
    fall: Sequence[int] | None = None,
    rise: Sequence[int] | None = None,
    held: Sequence[int] | None = None,
) -> list[int]:
    """The values of a payload. The tensors have these rows and columns, one after the other."""
    d = sum(rows * columns for rows, columns in shapes)
    out = [0] * d
    if not data:
        return out
    rest, plane = data[0] >> 4, -(-d // 8)
    lanes = Lanes(data[2 + rest * plane :], 1 << (data[0] & 15))
    tensors: list[Factors] = []
    owner: list[Factors] = []
    for rows, columns in shapes:
        tensors.append(Factors(len(owner), rows, columns, held, 64 + 8 * data[1]))
        owner += [tensors[-1]] * (rows * columns)
    dithered = fall is not None and rise is not None
    near = [768] * d
    if fall is not None and rise is not None:
        near = [log_distance(min(f, r)) for f, r in zip(fall, rise, strict=True)]
    group = [0] * d if held is None else [min(abs(n), 3) for n in held]
    curve, bin_weight = first_curve(dithered), [8.0] * 36
    own, own_weight = [0] * 4, [8.0] * 4
    places: list[int] = []
    for low, high in PASSES:
        elements = [i for i in range(d) if low <= i % 61 < high]
        steps = [clip(near[i] - owner[i].scale(i - owner[i].low) - own[group[i]] + 384, 0, 575) for i in elements]
        hazards = [clip(math.floor(min(curve[s], 5.0) * 2**20), 4, 4 << 20) for s in steps]
        members = lanes.members(hazards)
        places += [elements[m] for m in members]
        if high == 61:  # what the last pass would correct is not used
            break
        chances = [chance(h) >> 4 for h in hazards]
        for tensor in tensors:
            ahead, behind = tensor.low, tensor.low + tensor.size
            tensor.learn(
                [elements[m] - ahead for m in members if ahead <= elements[m] < behind],
                {i - ahead: c for i, c in zip(elements, chances, strict=True) if ahead <= i < behind},
            )
        total = (len(members) + 4.0) / (sum(chances) * 2.0**-20 + 4.0)
        seen, due = [0] * 36, [0] * 36
        own_seen, own_due = [0] * 4, [0] * 4
        for m in members:
            seen[steps[m] // 16] += 1
            own_seen[group[elements[m]]] += 1
        for i, s, c in zip(elements, steps, chances, strict=True):
            due[s // 16] += c
            own_due[group[i]] += c
        for b in range(36):
            ratio = (seen[b] + bin_weight[b]) / (due[b] * 2.0**-20 * total + bin_weight[b])
            for s in range(16 * b, 16 * b + 16):
                curve[s] = curve[s] * ratio
            bin_weight[b] += seen[b]
        for k in range(4):
            ratio = (own_seen[k] + own_weight[k]) / (own_due[k] * 2.0**-20 * total + own_weight[k])
            own[k] = clip(own[k] + log2(ratio), -128, 128)
            own_weight[k] += own_seen[k]
    places.sort()
    scales = [owner[i].scale(i - owner[i].low) for i in places]
    signs = [1] * len(places)
    classes, start = [0] * len(places), 0.5
    if fall is not None and rise is not None:
        signs = [1 if rise[i] <= fall[i] else -1 for i in places]
        lead = [log_distance(abs(fall[i] - rise[i])) for i in places]
        classes, start = [clip((a - s + 192) // 32, 0, 9) for a, s in zip(lead, scales, strict=True)], 0.25
    for i, wrong in enumerate(flags(lanes, classes, start)):
        signs[i] = -signs[i] if wrong else signs[i]
    sizes = [1] * len(places)
    classes = [clip((s - 384) // 32, 0, 15) for s in scales]
    left = list(range(len(places)))
    for level in range(1, 16):
        more = flags(lanes, [classes[i] for i in left], 0.1 if level == 1 else 0.3)
        left = [i for i, flag in zip(left, more, strict=True) if flag]
        for i in left:
            sizes[i] += 1
    widths, growing = dict.fromkeys(left, 0), left
    while growing:
        more = flags(lanes, [0] * len(growing), 0.3)
        growing = [i for i, flag in zip(growing, more, strict=True) if flag]
        for i in growing:
            widths[i] += 1
    numbers = {i: 1 << widths[i] for i in left}
    for j in range(max(widths.values(), default=0) - 1, -1, -1):
        has = [i for i in left if widths[i] > j]
        for i, flag in zip(has, flags(lanes, [0] * len(has), 0.5), strict=True):
            numbers[i] += flag << j
    for i in left:
        sizes[i] += numbers[i] - 1
    assert not lanes.words
    assert all(x == ONE for x in lanes.x)
    for i, sign, size in zip(places, signs, sizes, strict=True):
        out[i] = sign * size
    if rest:
        for i in range(d):
            bits = [data[2 + j * plane + i // 8] >> (i % 8) & 1 for j in range(rest)]
            out[i] = out[i] * 2**rest + sum(bit << j for j, bit in enumerate(bits)) - 2 ** (rest - 1)
    return out


def flags(lanes: Lanes, classes: Sequence[int], start: float) -> list[bool]:
    """Flags with adaptive rates: blocks end at 32, 160, 800, ..."""
    out: list[bool] = []
    ones, count = [2 * start] * 16, [2.0] * 16
    high = 32
    while len(out) < len(classes):
        here = classes[len(out) : high]
        rate = [hazard(math.floor(a / b * 2.0**24)) for a, b in zip(ones, count, strict=True)]
        members = set(lanes.members([rate[c] for c in here]))
        for i, c in enumerate(here):
            ones[c] += i in members
            count[c] += 1
        out += [i in members for i in range(len(here))]
        high *= 5
    return out
