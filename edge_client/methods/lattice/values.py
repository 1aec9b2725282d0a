"""Lattice's values: what the server and the devices keep between rounds, and what they pass on within one.

Vectors of n, tensors and buffers_d values are those of the network that the rounds train: after the pruning the smaller
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32, Packed
from edge_client.methods.lattice.coordinates import live, whole_size
from edge_client.methods.lattice.grid import HIGHEST, MIDDLE, Counts, History
from edge_client.methods.shared.averaging import Mean
from edge_client.methods.shared.network import Network


@dataclass(frozen=True)
class State:
    """The global model and what it takes to go on. A counted round has an update that was counted."""

    counts: Counts
    """N, int32[n]."""
    steps: F32
    """Of level MIDDLE, float32[tensors]; zeros before the first counted round."""
    statistics: F32
    """Batch-norm statistics, float32[buffers_d], not rounded."""
    history: History
    """The changes of N in the last rounds."""
    recent: F32
    """The statistics at the end of the last rounds, float32[rounds, buffers_d]."""
    residual: F32
    """R, what N lacks, float32[n]."""
    velocity: F32
    """V, of which a round adds a share, float32[n]."""
    first: int = 0
    """The first counted round; 0 before it."""
    round: int = 0
    """The last counted round."""
    samples: float = 0.0
    """The mean samples of all updates."""
    reports: int = 0
    """The number of all updates."""
    level: int = MIDDLE
    """The level of the next moves."""
    coarser: int = 0
    """How many levels a change of N is above the moves."""
    lowest: int = HIGHEST
    """N is a multiple of 2^`lowest`."""
    spent: float = 0.0
    """Estimated bytes of a device in all rounds."""
    bad: int = 0
    """Bad rounds in a row (`method.BAD_ROUNDS`)."""
    fleet: int = 0
    """The number of devices (`Method.sized`)."""
    units: Packed | None = None
    """The units that are left, packed bits; None before the pruning."""

    @property
    def cell(self) -> int:
        """The level of the next change of N."""
        return min(HIGHEST, self.level + self.coarser)


@dataclass(frozen=True)
class Record:
    """The last round in which an update of the device was counted.

    The device holds N as it was at the start of that round.
    """

    round: int


@dataclass(frozen=True)
class Kept:
    """What a device received at the start of its last round. Local statistics are those at the end of that round.

    `units` are those of the network of that round, packed bits; None for the whole network.
    """

    round: int
    counts: Counts
    steps: F32
    statistics: F32
    units: Packed | None = None


@dataclass(frozen=True)
class Received:
    """A downlink decoded: the network, N, the steps of level MIDDLE, the level of the moves, the model float32[d].

    `samples` is 0 while no update has been counted. After the last round `counts` is the mean of N over several rounds.
    """

    net: Network
    counts: Counts
    steps: F32
    level: int
    samples: float
    statistics: F32
    parameters: F32


@dataclass(frozen=True)
class Update:
    """A device's moves int32[n], to be multiplied by `scale`; at first also its rms. `statistics` are changes.

    `size` is how many bytes moves and statistics took.
    """

    moves: Counts
    rms: F32 | None
    statistics: F32
    samples: float
    gain: float
    size: int = 0
    scale: float = 1.0


@dataclass
class Total:
    """Sums over the devices of a round: moves float64[n], statistics; each device's samples, gain, rms, size."""

    moves: NDArray[np.float64]
    statistics: Mean
    samples: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    rms: list[F32] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def cut(kept: Kept | None, net: Network) -> Kept | None:
    """What a device kept of the whole network, as that of the smaller one."""
    if kept is None or net.units is None or kept.units is not None or kept.counts.size != whole_size(net):
        return kept
    own = kept.statistics
    return replace(
        kept,
        counts=kept.counts[live(net)],
        statistics=net.buffers(own) if own.size == net.origin.model.buffers.size else own,
        units=net.units.packed,
    )
