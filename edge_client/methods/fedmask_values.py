"""What FedMask stores and exchanges: small values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from edge_kernels.folding import Tally
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.methods.structure import Packed


@dataclass(frozen=True)
class Held:
    """A structure and bits of its live elements, packed, that both sides should hold."""

    structure: Packed
    bits: Packed


@dataclass(frozen=True)
class State:
    """The averages: `share` float32[masked] in 0..1, `averaged` uint32[masked] the round an element last got one.

    `levels` is the largest cohort so far: every share is a multiple of one over a cohort. `real` is the mean of the
    float32 parameters that are sent.
    """

    share: F32
    averaged: NDArray[np.uint32]
    levels: int
    real: F32


@dataclass(frozen=True)
class Record:
    """A device's last update and its round. `own`: the bits of live elements due next, with ``state="client"``."""

    held: Held
    round: int
    own: Packed | None = None


@dataclass(frozen=True)
class Kept:
    """What a device keeps: its last update, its own float32 parameters and statistics, latent scores."""

    held: Held
    local: F32
    buffers: F32
    scores: F32 | None = None


@dataclass
class Total:
    """Ones and holders of every element, the sum of `real`, and the new records by device."""

    ones: Tally
    holders: Tally
    real: NDArray[np.float64]
    records: dict[str, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A downlink: `share` float32[masked], 0 at elements that it leaves out; `real`; whether it names a structure."""

    share: F32
    real: F32
    structured: bool


@dataclass(frozen=True)
class Update:
    """A device's structure, the bits of its live elements, and its `real` float32 parameters."""

    held: Held
    real: F32
