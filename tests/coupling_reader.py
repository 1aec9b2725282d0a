"""A reader of coupled flips and net flips, written from docs/methods/coupled.md alone, without numpy.

The tests compare `edge_kernels.coupling` with it. A port to another language can start from it.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import codec_readers


def float32(x: float) -> float:
    value: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return value


def log2(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return exponent + (2 * mantissa - 2)


def sign(x: float) -> float:
    return float((x > 0) - (x < 0))


def odds_ratio_less_one(theta: float, u: float) -> float:
    low, high = min(theta, u), max(theta, u)
    return (high - low) / (max(low, 1e-9) * max(1 - high, 1e-9)) + 1e-9


@dataclass(frozen=True)
class Past:
    """Net flips of the last round, and their activity."""

    net: Sequence[int]
    activity: Sequence[float]


def past(net: Sequence[int], shapes: Sequence[Sequence[int]]) -> Past:
    activity: list[float] = []
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        at = len(activity)
        moved = [[abs(net[at + i * columns + j]) for j in range(columns)] for i in range(rows)]
        of_row = [log2(sum(row) + 0.5) for row in moved]
        of_column = [log2(sum(row[j] for row in moved) + 0.5) for j in range(columns)]
        whole = log2(sum(map(sum, moved)) + 1.0)
        activity += [float32(a + b - whole) for a in of_row for b in of_column]
    return Past(net, activity)


def flip_terms(theta: float, u: float, i: int, known: Past | None) -> list[float]:
    side = -1.0 if u < theta else 1.0
    far = min(max(log2(odds_ratio_less_one(theta, u)), -14.0), 6.0)
    terms = [1.0, far, far * far, side, side * (theta - 0.5)]
    if known is not None:
        active, ahead = known.activity[i], side * sign(known.net[i])
        terms += [active, active * far, ahead, ahead * far, abs(ahead)]
    return terms


def moved_terms(theta: float, down: float, up: float, i: int, known: Past | None) -> list[float]:
    near, lean, middle = log2(down + up + 1e-6), log2(up + 1e-6) - log2(down + 1e-6), theta - 0.5
    terms = [1.0, near, near * near, abs(lean), middle * lean, middle * middle]
    if known is not None:
        active, way = known.activity[i], sign(known.net[i])
        terms += [active, active * near, abs(way), abs(way) * near, way * lean]
    return terms


def way_terms(theta: float, down: float, up: float, i: int, known: Past | None) -> list[float]:
    lean = log2(up + 1e-6) - log2(down + 1e-6)
    terms = [1.0, lean, lean * lean * lean / 64, theta - 0.5]
    if known is not None:
        way = sign(known.net[i])
        terms += [way, way * lean]
    return terms


def members(data: bytes, terms: Sequence[Sequence[float]]) -> list[int]:
    """A set out of ``len(terms)`` positions."""
    if data[0] == 0:
        return codec_readers.entropy(data[1:], len(terms))
    count = len(terms[0])
    model = struct.unpack(f"<{count}e", data[1 : 1 + 2 * count])
    contexts = []
    for row in terms:
        odds = 0.0
        for weight, term in zip(model, row, strict=True):
            odds += weight * term
        contexts.append(min(max(math.floor((odds + 11) * 2), 0), 31))
    return codec_readers.entropy(data[1 + 2 * count :], len(terms), contexts)


def reference_name(theta: Sequence[float], u: Sequence[float]) -> str:
    """The name by which an update refers to the reference mask of its flips."""
    mask = [x < t for t, x in zip(theta, u, strict=True)]
    packed = bytes(sum(bit << j for j, bit in enumerate(mask[low : low + 8])) for low in range(0, len(mask), 8))
    return hashlib.sha256(packed).hexdigest()[:16]


def flips(data: bytes, theta: Sequence[float], u: Sequence[float], known: Past | None) -> list[int]:
    """Positions of the flips; the checksum is verified."""
    found = members(data[4:], [flip_terms(t, x, i, known) for i, (t, x) in enumerate(zip(theta, u, strict=True))])
    mask = [x < t for t, x in zip(theta, u, strict=True)]
    for i in found:
        mask[i] = not mask[i]
    packed = bytes(sum(bit << j for j, bit in enumerate(mask[low : low + 8])) for low in range(0, len(mask), 8))
    assert zlib.crc32(packed) == int.from_bytes(data[:4], "little")
    return found


def net_flips(data: bytes, theta: Sequence[float], devices: Sequence[Sequence[float]], known: Past | None) -> list[int]:
    """Net flips of a cohort with these uniforms; the checksum is verified."""
    d = len(theta)
    reference, down, up = [0] * d, [0.0] * d, [0.0] * d
    for u in devices:
        for i, (t, x) in enumerate(zip(theta, u, strict=True)):
            near = float32(1 / (1 + (odds_ratio_less_one(t, x) / 0.4) ** 2))
            side = down if x < t else up
            side[i] = float32(side[i] + near)
            reference[i] += x < t
    count = data[4]
    lengths = struct.unpack(f"<{count}I", data[5 : 5 + 4 * count])
    at, parts = 5 + 4 * count, []
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    assert at == len(data)
    where = members(parts[0], [moved_terms(theta[i], down[i], up[i], i, known) for i in range(d)])
    upward = set(members(parts[1], [way_terms(theta[i], down[i], up[i], i, known) for i in where]))
    net = [0] * d
    for place, i in enumerate(where):
        net[i] = 1 if place in upward else -1
    for part in parts[2:]:
        more = members(part, [moved_terms(theta[i], down[i], up[i], i, known) for i in where])
        where = [where[place] for place in more]
        for i in where:
            net[i] += 1 if net[i] > 0 else -1
    assert not where
    counts = [a + b for a, b in zip(reference, net, strict=True)]
    assert zlib.crc32(struct.pack(f"<{d}i", *counts)) == int.from_bytes(data[:4], "little")
    return net
