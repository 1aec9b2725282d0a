"""Sparse values: only the largest magnitudes travel, as a set of positions and what is at each.

- Top-k (Aji and Heafield, EMNLP 2017): the positions by set codec `auto`, the values as float32.
- Sparse ternary (Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID Data", 2019): the
  positions, a sign each, and one magnitude, the mean of those kept. The paper codes positions with Golomb numbers;
  `auto` takes the smallest of that (`rice`), `entropy` and `bits`.

Both are biased: without error feedback a small value never travels. Zeros never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import auto
from edge_kernels.codecs.quantised import read_magnitude, read_signs
from edge_kernels.codecs.sets import CodecError, Contexts, Positions
from edge_kernels.codecs.streams import Reader, varint

F32 = NDArray[np.float32]


def kept(d: int, fraction: float) -> int:
    """How many of `d` values a fraction keeps: rounded, at least one."""
    return min(d, max(1, round(fraction * d)))


def largest(values: F32, count: int) -> Positions:
    """Sorted positions of the `count` largest magnitudes, fewer if some are 0; ties go to the lower position."""
    magnitudes = np.abs(values)
    if not 0 < count < len(values):
        return np.flatnonzero(magnitudes[: len(values) if count else 0]).astype(np.uint32)
    least = np.partition(magnitudes, len(values) - count)[len(values) - count]
    chosen = magnitudes > least
    if least > 0:
        chosen[np.flatnonzero(magnitudes == least)[: count - int(np.count_nonzero(chosen))]] = True
    return np.flatnonzero(chosen).astype(np.uint32)


def encode_top(values: F32, stream: int, fraction: float) -> bytes:
    """The positions, with their length, and the values there, float32."""
    positions = largest(values, kept(len(values), fraction))
    return _positions(positions, len(values), None) + values[positions].astype("<f4").tobytes()


def decode_top(data: bytes, d: int, stream: int, fraction: float) -> F32:
    """The values that `encode_top` wrote, 0 elsewhere. Raises CodecError."""
    reader = Reader(data)
    positions = _read_positions(reader, d, kept(d, fraction), None)
    values = np.zeros(d, np.float32)
    values[positions] = reader.bytes(4 * len(positions)).view("<f4")
    reader.end()
    return values


def encode_ternary(values: F32, stream: int, fraction: float) -> bytes:
    """The largest values as signs with one magnitude."""
    return write(ternary(values, kept(len(values), fraction)), len(values))


def decode_ternary(data: bytes, d: int, stream: int, fraction: float) -> F32:
    """The values that `encode_ternary` wrote, 0 elsewhere. Raises CodecError."""
    found, values = read(data, d, kept(d, fraction)), np.zeros(d, np.float32)
    values[found.positions] = found.values
    return values


@dataclass(frozen=True)
class Ternary:
    """A vector of -magnitude, 0 and magnitude: sorted positions of what is not 0, and which are negative."""

    positions: Positions
    negative: NDArray[np.bool_]
    magnitude: np.float32

    @property
    def values(self) -> F32:
        """What is at the positions."""
        return np.where(self.negative, -self.magnitude, self.magnitude).astype(np.float32)


def ternary(values: F32, count: int) -> Ternary:
    """The `count` largest values, each replaced by its sign times the mean of their magnitudes."""
    positions = largest(values, count)
    chosen = values[positions]
    mean = np.abs(chosen).mean(dtype=np.float64) if len(chosen) else 0.0
    return Ternary(positions, chosen < 0, np.float32(mean))


def write(t: Ternary, d: int, contexts: Contexts | None = None, leaning: Contexts | None = None) -> bytes:
    """The magnitude, the positions and the signs.

    `contexts` [d] are what both sides know of where values are; `leaning` [d] of their signs, which without it take a
    bit each.
    """
    head = t.magnitude.astype("<f4").tobytes() + _positions(t.positions, d, contexts)
    if leaning is None:
        return head + np.packbits(t.negative, bitorder="little").tobytes()
    signs = np.flatnonzero(t.negative).astype(np.uint32)
    return head + auto.encode(signs, len(t.positions), leaning[t.positions])


def read(data: bytes, d: int, most: int, contexts: Contexts | None = None, leaning: Contexts | None = None) -> Ternary:
    """What `write` wrote, with at most `most` positions. Raises CodecError."""
    reader = Reader(data)
    magnitude = read_magnitude(reader)
    positions = _read_positions(reader, d, most, contexts)
    if leaning is None:
        negative = read_signs(reader, len(positions))
        reader.end()
        return Ternary(positions, negative, magnitude)
    negative = np.zeros(len(positions), np.bool_)
    negative[auto.decode(reader.bytes(reader.left).tobytes(), len(positions), leaning[positions])] = True
    return Ternary(positions, negative, magnitude)


def _positions(positions: Positions, d: int, contexts: Contexts | None) -> bytes:
    body = auto.encode(positions, d, contexts)
    return varint(len(body)) + body


def _read_positions(reader: Reader, d: int, most: int, contexts: Contexts | None) -> Positions:
    positions = auto.decode(reader.bytes(reader.varint()).tobytes(), d, contexts)
    if len(positions) > most:
        raise CodecError(f"{len(positions)} values are sent where at most {most} are due; the payload is damaged")
    return positions
