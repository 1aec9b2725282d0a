"""How a device reads Lattice's payloads, written from docs/methods/lattice.md alone; `lattice_reader` is the coder.

The tests compare both halves of the method with it. A client in another language can start from it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lattice_reader
import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

HISTORY = 16  # rounds


@dataclass(frozen=True)
class Numbers:
    """N and the whole numbers of the statistics, as they were at the start of a round."""

    counts: list[int]
    statistics: list[int]
    round: int


@dataclass(frozen=True)
class Device:
    """What a device knows of the federation and of the network that is trained.

    `average` is the number of rounds whose mean is the final model. After the pruning `live` has the places of the
    network's parameters among the `whole` network's, and `pruned` is the last round of the whole network.
    """

    seed: int
    cohort: int
    rounds: int
    average: int
    shapes: Sequence[tuple[int, ...]]
    start: Sequence[int]  # the whole numbers of the bundle's statistics
    live: Sequence[int] = ()
    whole: int = 0
    pruned: int = 0

    @property
    def tensors(self) -> list[tuple[int, int]]:
        """Rows and columns."""
        return [(s[0], int(np.prod(s[1:], dtype=int))) for s in self.shapes]

    @property
    def size(self) -> int:
        return sum(rows * columns for rows, columns in self.tensors)

    def stream(self, round_: int) -> list[int]:
        """The numbers of a round that all devices share, in units of 2^-32."""
        key = counter.key(self.seed, "dither", round_)
        if round_ <= self.pruned:
            numbers = counter.uint64(key, self.whole).tolist()
            return [numbers[i] >> 32 for i in self.live]
        return [n >> 32 for n in counter.uint64(key, self.size).tolist()]

    def ends(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """`fall` and `rise` of a change in these rounds."""
        folded = [[n * self.cohort % 2**32 for n in self.stream(r)] for r in range(first, last + 1)]
        least, greatest = ([pick(each) for each in zip(*folded, strict=True)] for pick in (min, max))
        return [n // self.cohort for n in least], [(2**32 - 1 - n) // self.cohort for n in greatest]

    def received(self, round_: int, change: bytes, statistics: bytes, held: Numbers | None) -> Numbers:
        """The numbers of a downlink; `held` are those that the device has."""
        crc, since, _, level, _ = struct.unpack_from("<IBBBf", change)
        before = Numbers([0] * self.size, list(self.start), 1)
        if since:
            assert held is not None
            assert held.round == round_ - since
            before = held
        known: Any = None, None, None
        if round_ - before.round <= HISTORY:
            first = before.round
            if round_ > self.rounds:
                first = max(1, min(first, round_ - (self.average - 1)))
            known = (*self.ends(first, round_ - 1), [abs(n) >> level for n in before.counts])
        moved = lattice_reader.values(change[11:], self.tensors, *known)
        counts = [n + (m << level) for n, m in zip(before.counts, moved, strict=True)]
        now = self.changed(before.statistics, statistics)
        assert crc == zlib.crc32(np.array(counts + now, "<i4").tobytes())
        return Numbers(counts, now, round_)

    def moves(self, round_: int, place: int, level: int, sent: bytes, counts: Sequence[int]) -> list[int]:
        """The moves of an update. `level` is the device's own, `counts` are N at the start of the round."""
        fall = [(n + place * 2**32 // self.cohort) % 2**32 for n in self.stream(round_)]
        rise = [2**32 - 1 - n for n in fall]
        moves: list[int] = lattice_reader.values(sent[8:], self.tensors, fall, rise, [abs(n) >> level for n in counts])
        assert struct.unpack_from("<I", sent)[0] == zlib.crc32(np.array(moves, "<i4").tobytes())
        return moves

    def dithered(self, round_: int, place: int, statistics: NDArray[np.float32]) -> list[int]:
        """The whole numbers of trained statistics."""
        key, exact = counter.key(self.seed, "statistics", round_), whole(statistics)
        u = (counter.uniform(key, len(exact)) + place / self.cohort) % 1.0
        return [int(n) for n in np.floor(exact + u)]

    def changed(self, before: Sequence[int], sent: bytes) -> list[int]:
        """The whole numbers of statistics that changed from those `before`."""
        if not before:
            return []
        return [a + b for a, b in zip(before, lattice_reader.values(sent, [(len(before), 1)]), strict=True)]


def whole(statistics: NDArray[np.float32]) -> NDArray[np.float64]:
    """The number of a statistic before it is rounded, float64."""
    least = np.float32(2.0**-10)
    bits = (np.abs(statistics) + least).view(np.int32).astype(np.float64) - int(least.view(np.int32))
    numbers: NDArray[np.float64] = np.sign(statistics) * bits / 2.0**18
    return numbers
