"""Sparse values: only the largest magnitudes travel, as a set of positions and what is at each.

- Top-k (Aji and Heafield, EMNLP 2017): the positions by set codec `auto`, the values as float32.
- Sparse ternary (Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE TNNLS
  31(9), 2020): the positions, a sign each, and one magnitude, the mean of those kept. The paper codes positions with
  Golomb numbers; `auto` takes the smallest of that (`rice`), `entropy` and `bits`.

Both are biased: without error feedback a small value never travels. Zeros never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import auto
from edge_kernels.codecs.quantised import read_scales
from edge_kernels.codecs.sets import CodecError, Contexts, Positions, positions_of
from edge_kernels.codecs.streams import Reader, framed, pack
from edge_kernels.pruning import keep_largest

F32 = NDArray[np.float32]


def kept(d: int, fraction: float) -> int:
    """How many of `d` values a fraction keeps: rounded, at least one."""
    return min(d, max(1, round(fraction * d)))


def largest(values: F32, count: int) -> Positions:
    """Sorted positions of the `count` largest magnitudes, fewer if some are 0; ties go to the lower position."""
    return positions_of(keep_largest(np.abs(values), count) & (values != 0))


def encode_top(values: F32, stream: int, fraction: float) -> bytes:
    """The positions, with their length, and the values there, float32."""
    positions = largest(values, kept(len(values), fraction))
    return write_positions(positions, len(values)) + values[positions].astype("<f4").tobytes()


def decode_top(data: bytes, d: int, stream: int, fraction: float) -> F32:
    """The values that `encode_top` wrote, 0 elsewhere. Raises CodecError."""
    reader = Reader(data)
    positions = read_positions(reader, d, kept(d, fraction))
    values = np.zeros(d, np.float32)
    values[positions] = reader.floats(len(positions))
    reader.end()
    return values


def encode_ternary(values: F32, stream: int, fraction: float) -> bytes:
    """The largest values as signs with one magnitude."""
    return write(ternary(values, fraction, (len(values),)), len(values))


def decode_ternary(data: bytes, d: int, stream: int, fraction: float) -> F32:
    """The values that `encode_ternary` wrote, 0 elsewhere. Raises CodecError."""
    return read(data, d, fraction, (d,)).dense(d)


@dataclass(frozen=True)
class Ternary:
    """A vector of -m, 0 and m: sorted positions of what is not 0, and which are negative.

    The vector is cut into groups, which end at `ends`; each has a magnitude m of its own, float32[groups].
    """

    positions: Positions
    negative: NDArray[np.bool_]
    magnitudes: F32
    ends: tuple[int, ...]

    @property
    def values(self) -> F32:
        """What is at the positions."""
        each = np.diff(np.searchsorted(self.positions, np.array(self.ends)), prepend=0)
        values: F32 = np.repeat(self.magnitudes, each)
        return np.negative(values, out=values, where=self.negative)

    def dense(self, d: int) -> F32:
        """The whole vector, float32[d]."""
        out = np.zeros(d, np.float32)
        out[self.positions] = self.values
        return out


def ternary(values: F32, fraction: float, ends: tuple[int, ...]) -> Ternary:
    """The largest values of each group, replaced by their signs times the mean of their magnitudes."""
    positions, magnitudes, low = [np.zeros(0, np.uint32)], [], 0
    for end in ends:
        found = largest(values[low:end], kept(end - low, fraction)) + np.uint32(low)
        magnitudes.append(np.abs(values[found]).mean(dtype=np.float64) if len(found) else 0.0)
        positions.append(found)
        low = end
    all_ = np.concatenate(positions)
    return Ternary(all_, values[all_] < 0, np.array(magnitudes, np.float32), ends)


def write(t: Ternary, d: int, contexts: Contexts | None = None, leaning: Contexts | None = None) -> bytes:
    """The magnitudes, the positions and the signs.

    `contexts` [d] are what both sides know of where values are; `leaning` [d] of their signs, which without it take a
    bit each.
    """
    head = t.magnitudes.astype("<f4").tobytes() + write_positions(t.positions, d, contexts)
    if leaning is None:
        return head + pack(t.negative)
    signs = np.flatnonzero(t.negative).astype(np.uint32)
    return head + auto.encode(signs, len(t.positions), leaning[t.positions])


def read(data: bytes, d: int, fraction: float, ends: tuple[int, ...], contexts: Contexts | None = None,
         leaning: Contexts | None = None) -> Ternary:  # fmt: skip
    """What `write` wrote of a `ternary` of this fraction. Raises CodecError."""
    reader = Reader(data)
    magnitudes = read_scales(reader, len(ends))
    most = sum(kept(end - low, fraction) for low, end in zip((0, *ends), ends, strict=False))
    positions = read_positions(reader, d, most, contexts)
    if leaning is None:
        negative = reader.bits(len(positions))
    else:
        negative = np.zeros(len(positions), np.bool_)
        rest = reader.bytes(reader.left).tobytes()
        negative[auto.decode(rest, len(positions), leaning[positions])] = True
    reader.end()
    return Ternary(positions, negative, magnitudes, ends)


def write_positions(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """The length of an `auto` payload as a varint, and the payload."""
    return framed(auto.encode(positions, d, contexts))


def read_positions(reader: Reader, d: int, most: int, contexts: Contexts | None = None) -> Positions:
    """What `write_positions` wrote, at most `most` positions. Raises CodecError."""
    positions = auto.decode(reader.framed(), d, contexts)
    if len(positions) > most:
        raise CodecError(f"{len(positions)} values are sent, at most {most} are allowed; the payload is damaged")
    return positions
