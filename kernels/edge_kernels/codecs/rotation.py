"""Rotated values: DRIVE, DRIVE+ and EDEN, a few bits a value after a random rotation.

A vector is cut into blocks. A block of n values x, n a power of two, is rotated twice by random signs s and the
Hadamard matrix H: ``z = H s2 H s1 x / (|x| sqrt(n))`` has n coordinates near N(0, 1). Each is rounded to a centroid,
and one float32 factor restores the length: the decoded block is ``factor * s1 H s2 H c``.

- EDEN (Vargaftik et al., ICML 2022): the 2**bits Lloyd-Max centroids of N(0, 1), factor ``|x| / (sqrt(n) <c, z>)``, so
  that the decoded vector is unbiased under a uniform rotation and its inner product with x is exactly ``|x|**2``. Below
  one bit, k of the n coordinates, drawn at random, keep their centroid, the others become 0, and the factor is n / k
  times as large. It counts all coordinates: by those that travel alone it has no finite variance for k <= 2.
- DRIVE (Vargaftik et al., NeurIPS 2021): signs. The unbiased factor is EDEN's, ``|x| / (sqrt(n) |z|_1)``; the one of
  least error is ``|x| |z|_1 / n**2.5``.
- DRIVE+ (the same paper): the two centroids of least error for these z, 2-means in one dimension. Both travel, times
  ``|x| / n**1.5``, which is of least error, and for the unbiased form times ``n / |c|**2`` more.

The papers rotate once. Then few large values among small ones leave few different rotations, and the mean over them
is not x: off by half its length for two large values of 8192, by a tenth for cubed normals (n = 300). After a second
rotation the bias of both is below what 1500 runs resolve. Where one value is nearly all of a small block a bias stays:
.09 of the length for one large value of 64, .03 for one of 512 (3000 runs).

The papers rotate the whole vector, padded to a power of two, which may double the bits. Here blocks of 8192 values
come first, then the binary digits of the rest down to 64; only the last 63 values or fewer are padded. A block costs
four bytes for its factor, or eight for two centroids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import counter
from edge_kernels.codecs.sets import CodecError
from edge_kernels.codecs.streams import Reader, pack

F32 = NDArray[np.float32]
BLOCK, SMALLEST = 1 << 13, 1 << 6
_ROWS = 16  # blocks rotated at a time, so that they stay in the cache

CENTROIDS = {
    1: (0.7978845608028654,),
    2: (0.4527800398860679, 1.5104176087114887),
    3: (0.2450941749151622, 0.7560052489539643, 1.3439092613750225, 2.1519457045369874),
    4: (0.1283950206895950, 0.3880482994902510, 0.6567591185324634, 0.9423404564869651, 1.2562311973471498,
        1.6180464345283926, 2.0690172840480604, 2.7325896448320750),
}  # fmt: skip
"""The positive Lloyd-Max centroids of N(0, 1) by bits; the others mirror them."""


@dataclass(frozen=True)
class _Tiles:
    """Consecutive blocks of one length `n`: they begin at value `low`, coordinate `at` and factor `first`."""

    low: int
    at: int
    first: int
    rows: int
    n: int

    @property
    def coordinates(self) -> slice:
        return slice(self.at, self.at + self.rows * self.n)

    @property
    def blocks(self) -> slice:
        return slice(self.first, self.first + self.rows)


def lengths(d: int) -> list[tuple[int, int]]:
    """How many blocks of which length hold `d` values, in order."""
    out = [(d // BLOCK, BLOCK)] if d >= BLOCK else []
    rest = -(-(d % BLOCK) // SMALLEST) * SMALLEST
    return out + [(1, n) for n in (BLOCK >> j for j in range(BLOCK // SMALLEST)) if n >= SMALLEST and rest & n]


def encode(values: F32, stream: int, bits: float) -> bytes:
    """EDEN at `bits` a coordinate: 1, 2, 3, 4, or a share below 1."""
    width, out = _width(bits), _Out.of(len(values), bits, stream)
    for t, z, length in _rotated(values, stream):
        magnitude = np.searchsorted(_edges(width), np.abs(z)).astype(np.uint8)
        c = np.take(_table(width), magnitude)
        projection = np.multiply(c, np.abs(z), dtype=np.float64).sum(axis=1) * t.n**0.5 * (_sent(t.n, bits) / t.n)
        out.factors[t.blocks] = length / np.where(projection > 0, projection, np.inf)
        out.levels[t.coordinates] = (magnitude | (z < 0).astype(np.uint8) << (width - 1)).ravel()
    return out.pack(width)


def encode_drive(values: F32, stream: int, least_error: bool) -> bytes:
    """DRIVE: signs with the unbiased factor, or with the one of least error."""
    out = _Out.of(len(values), 1, stream)
    for t, z, length in _rotated(values, stream):
        total = np.abs(z).sum(axis=1, dtype=np.float64) * t.n**0.5
        out.factors[t.blocks] = length * total / t.n**3 if least_error else length / np.where(total > 0, total, np.inf)
        out.levels[t.coordinates] = (z < 0).ravel()
    return out.pack(1)


def encode_means(values: F32, stream: int, least_error: bool) -> bytes:
    """DRIVE+: a bit for the centroid of each coordinate, 1 for the lower one, and each block's two centroids."""
    out = _Out.of(len(values), 1, stream, centroids=2)
    for t, z, length in _rotated(values, stream):
        low, means = two_means(z)
        of_low = low.sum(axis=1)
        square = (np.square(means) * np.stack([t.n - of_low, of_low], axis=1)).sum(axis=1)  # |c|**2
        scale = 1.0 if least_error else t.n / np.where(square > 0, square, np.inf)
        out.factors[t.blocks] = means * (length * scale / t.n**1.5)[:, None]
        out.levels[t.coordinates] = low.ravel()
    return out.pack(1)


def two_means(z: F32) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """2-means of every row of float32[rows, n]: which values are of the lower cluster, and the upper and lower mean.

    In sorted order the clusters are neighbours, and the best cut is where the sum of both ``(sum of a
    cluster)**2 / size`` is largest. A row of equal values has an empty lower cluster, and the same mean twice.
    """
    n = z.shape[1]
    ranked = np.sort(z, axis=1)
    below = np.cumsum(ranked, axis=1, dtype=np.float64)
    total, sizes = below[:, -1:], np.arange(1, n)
    gain = np.square(below[:, :-1]) / sizes + np.square(total - below[:, :-1]) / (n - sizes)
    cut = gain.argmax(axis=1)[:, None] + 1  # the rank of the first value of the upper cluster
    low = z < np.take_along_axis(ranked, cut, axis=1)
    size = low.sum(axis=1, keepdims=True)
    lower = np.where(low, z, 0).sum(axis=1, keepdims=True, dtype=np.float64)
    upper = (total - lower) / (n - size)
    return low, np.concatenate([upper, np.where(size > 0, lower / np.maximum(size, 1), upper)], axis=1)


def decode(data: bytes, d: int, stream: int, bits: float, unit: bool = False) -> F32:
    """What `encode` wrote, or with `unit`, whose centroids are +-1, `encode_drive`. Raises CodecError."""
    width, out = _width(bits), _Out.of(d, bits, stream)
    out.read(data, width)
    table = np.ones(1, np.float32) if unit else _table(width)
    table = np.concatenate([table, -table])

    def rounded(t: _Tiles) -> F32:
        c: F32 = np.take(table, out.levels[t.coordinates]).reshape(t.rows, t.n)
        if out.chosen is not None:
            c *= out.chosen[t.coordinates].reshape(t.rows, t.n)
        return c

    return _restored(d, stream, rounded, out.factors)


def decode_means(data: bytes, d: int, stream: int) -> F32:
    """What `encode_means` wrote. Raises CodecError."""
    out = _Out.of(d, 1, stream, centroids=2)
    out.read(data, 1)

    def rounded(t: _Tiles) -> F32:
        means = out.factors[t.blocks]
        return np.where(out.levels[t.coordinates].reshape(t.rows, t.n), means[:, 1:], means[:, :1])

    return _restored(d, stream, rounded, None)


def _restored(d: int, stream: int, rounded: Callable[[_Tiles], F32], factors: NDArray[Any] | None) -> F32:
    """The values whose rotated blocks are `rounded`, times their factors."""
    values: F32 = np.empty(d, np.float32)
    coordinates = sum(count * n for count, n in lengths(d))
    first, second = (_signs(coordinates, stream, i) for i in (0, 1))
    for t in _tiles(d):
        with np.errstate(over="ignore", invalid="ignore"):  # a factor may be anything finite; the caller checks
            x = _flipped(hadamard(_flipped(hadamard(rounded(t)), second, t)), first, t)
            if factors is not None:
                x *= factors[t.blocks, None]
        values[t.low : t.low + x.size] = x.ravel()[: d - t.low]
    return values


def hadamard(x: F32) -> F32:
    """``H x`` of every row of float32[rows, n], n a power of two; H has entries +-1, in Sylvester's order."""
    rows, n = x.shape
    inner = 1 << (n.bit_length() - 1) // 2
    out = _butterflies(x.reshape(rows, n // inner, inner))  # H_n is the Kronecker product of two smaller ones
    out = _butterflies(np.ascontiguousarray(out.transpose(0, 2, 1)))
    return np.ascontiguousarray(out.transpose(0, 2, 1)).reshape(rows, n)


def _butterflies(x: F32) -> F32:
    """``H`` along axis 1 of float32[rows, m, inner]."""
    rows, m, inner = x.shape
    half = 1
    while half < m:
        pairs = x.reshape(rows, m // (2 * half), 2, half, inner)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return x.reshape(rows, m, inner)


def _tiles(d: int) -> Iterator[_Tiles]:
    at = first = 0
    for count, n in lengths(d):
        for low in range(0, count, _ROWS):
            rows = min(_ROWS, count - low)
            yield _Tiles(at, at, first, rows, n)
            at, first = at + rows * n, first + rows


def _rotated(values: F32, stream: int) -> Iterator[tuple[_Tiles, F32, NDArray[np.float64]]]:
    """The rotated blocks, of unit variance, and their lengths |x|, float64[rows]."""
    d = len(values)
    coordinates = sum(count * n for count, n in lengths(d))
    first, second = (_signs(coordinates, stream, i) for i in (0, 1))
    for t in _tiles(d):
        padded = np.zeros(t.rows * t.n, np.float32)
        part = values[t.low : t.low + padded.size]
        padded[: len(part)] = part
        x = padded.reshape(t.rows, t.n)
        length = np.sqrt(np.square(x, dtype=np.float64).sum(axis=1))
        x = (x / np.where(length > 0, length * t.n**0.5, 1.0)[:, None]).astype(np.float32)
        yield t, hadamard(_flipped(hadamard(_flipped(x, first, t)), second, t)), length


def _flipped(x: F32, signs: NDArray[np.bool_], t: _Tiles) -> F32:
    """`x` with these signs, in place."""
    return np.negative(x, out=x, where=signs[t.coordinates].reshape(x.shape))


def _signs(count: int, stream: int, rotation: int) -> NDArray[np.bool_]:
    """Where rotation 0 or 1 flips a value: bit i % 64 of number i // 64 of the stream (stream, "signs", rotation)."""
    words = counter.uint64(counter.key(stream, "signs", rotation), -(-count // 64)).astype("<u8")
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def _chosen(d: int, share: float, stream: int) -> NDArray[np.bool_]:
    """The coordinates that are sent below one bit: of each block the share with the least numbers of a stream."""
    parts = [np.zeros(0, np.bool_)]
    key = counter.key(stream, "subsample")
    for t in _tiles(d):
        numbers = counter.uint64(key, t.rows * t.n, t.at).reshape(t.rows, t.n)
        order = np.argsort(numbers, axis=1, kind="stable")[:, : _sent(t.n, share)]
        chosen = np.zeros((t.rows, t.n), np.bool_)
        np.put_along_axis(chosen, order, True, axis=1)
        parts.append(chosen.ravel())
    return np.concatenate(parts)


def _sent(n: int, bits: float) -> int:
    """How many of a block's n coordinates travel."""
    return max(1, round(min(bits, 1) * n))


def _width(bits: float) -> int:
    return max(1, int(bits))


def _table(width: int) -> F32:
    return np.array(CENTROIDS[width], np.float32)


def _edges(width: int) -> F32:
    """The thresholds between centroids, half-way."""
    table = np.array(CENTROIDS[width])
    edges: F32 = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    return edges


@dataclass(frozen=True)
class _Out:
    """What travels: a factor for each block, a level for each coordinate that is sent (`chosen`; None: all are).

    `factors` are float32[blocks], or the centroids themselves, float32[blocks, 2], the upper one first.
    """

    factors: NDArray[Any]
    levels: NDArray[np.uint8]
    chosen: NDArray[np.bool_] | None

    @staticmethod
    def of(d: int, bits: float, stream: int, centroids: int = 0) -> _Out:
        blocks, coordinates = sum(count for count, _ in lengths(d)), sum(count * n for count, n in lengths(d))
        chosen = _chosen(d, bits, stream) if bits < 1 else None
        shape = (blocks, centroids) if centroids else blocks
        return _Out(np.zeros(shape, np.float32), np.zeros(coordinates, np.uint8), chosen)

    def pack(self, width: int) -> bytes:
        """The factors, then bit 0 of all levels, bit 1, and so on, as one bit sequence."""
        levels = self.levels if self.chosen is None else self.levels[self.chosen]
        planes = [levels >> np.uint8(j) & np.uint8(1) != 0 for j in range(width)]
        return self.factors.astype("<f4").tobytes() + pack(np.concatenate(planes))

    def read(self, data: bytes, width: int) -> None:
        """Fill both arrays. Raises CodecError."""
        count = len(self.levels) if self.chosen is None else int(np.count_nonzero(self.chosen))
        head, due = self.factors.nbytes, self.factors.nbytes + -(-count * width // 8)
        if len(data) != due:
            raise CodecError(f"these values take {due} bytes, not {len(data)}; is d right?")
        self.factors[:] = np.frombuffer(data, "<f4", self.factors.size).reshape(self.factors.shape)
        least = self.factors[:, 1:] if self.factors.ndim == 2 else 0
        if not bool((np.isfinite(self.factors) & (self.factors >= least)).all()):
            raise CodecError("a factor is negative or not finite, or out of order; the payload is damaged")
        bits = Reader(data[head:]).bits(count * width).view(np.uint8)
        levels = np.zeros(count, np.uint8)
        for j in range(width):
            levels |= bits[j * count : (j + 1) * count] << np.uint8(j)
        self.levels[slice(None) if self.chosen is None else self.chosen] = levels
