"""Lattice's payloads: the fixed bytes before the coded numbers, and the errors of damaged ones."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from edge_kernels import bits, lattice
from edge_kernels.codecs import CodecError
from edge_kernels.lattice_model import Known

from edge_client.errors import LostError, PayloadError
from edge_client.methods.lattice.grid import HIGHEST, Counts
from edge_client.protocol.payload import decoding
from edge_client.task import Assignment

MOST_MOVE = (1 << 15) - 1  # of a device's number

_UP, _DOWN = struct.Struct("<If"), struct.Struct("<IBBBf")


@dataclass(frozen=True)
class UpHead:
    """`crc` of the moves; `gain`: the received model's loss less the bundle's, on the device's first batch."""

    crc: int
    gain: float

    def pack(self) -> bytes:
        return _UP.pack(self.crc, self.gain)


@dataclass(frozen=True)
class DownHead:
    """`crc` of counts and statistics; `missed` rounds since those that the change builds on, 0 for none.

    `level` is that of the next moves; the change is coded in units of 2**`low`; `samples` is the mean number behind an
    update.
    """

    crc: int
    missed: int
    level: int
    low: int
    samples: float

    def pack(self) -> bytes:
        return _DOWN.pack(self.crc, self.missed, self.level, self.low, self.samples)


def up_head(data: bytes) -> tuple[UpHead, bytes]:
    """The head of an update and what follows it. Raises PayloadError."""
    crc, gain = _fields(_UP, data)
    if not math.isfinite(gain):
        raise PayloadError(f"the update's gain is {gain}; it must be a finite number")
    return UpHead(crc, gain), data[_UP.size :]


def down_head(data: bytes) -> tuple[DownHead, bytes]:
    """The head of a downlink and what follows it. Raises PayloadError."""
    crc, missed, level, low, samples = _fields(_DOWN, data)
    if not (max(level, low) <= HIGHEST and 0 < samples < math.inf):
        raise PayloadError(f"the downlink says levels {level} and {low}, {samples} samples; it is damaged")
    return DownHead(crc, missed, level, low, samples), data[_DOWN.size :]


def _fields(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise PayloadError(f"a head takes {form.size} bytes, but the array has {len(data)}; the payload is damaged")
    return form.unpack_from(data)


# --- whole numbers


def read_moves(a: Assignment, data: bytes, known: Known) -> tuple[float, Counts]:
    """The gain and the moves of an update. Raises PayloadError."""
    head, coded = up_head(data)
    with decoding(f"the moves of {a.device!r} in round {a.round}"):
        moves = lattice.decode(coded, known)
    if bits.checksum([moves]) != head.crc:
        raise PayloadError(
            f"the moves of {a.device!r} in round {a.round} do not match their checksum: they were coded against "
            "another model or place; the device trains again"
        )
    if int(moves.max(initial=0)) > MOST_MOVE or int(moves.min(initial=0)) < -MOST_MOVE:
        raise PayloadError(f"a move of {a.device!r} leaves +-{MOST_MOVE}; lower the learning rate or raise quantum")
    return head.gain, moves


def read_counts(
    a: Assignment, base: int, head: DownHead, coded: bytes, held: Counts, statistics: Counts, known: Known
) -> Counts:
    """The counts of a downlink, which changed from those `held` since round `base`. Raises LostError, PayloadError."""
    try:
        change = lattice.decode(coded, known)
    except CodecError as error:
        raise fault(a, base, str(error)) from None
    counts: Counts = held + (change << head.low)  # 32 bits that overflow do not match the checksum
    if bits.checksum([counts, statistics]) != head.crc:
        raise fault(a, base, "counts and statistics do not match their checksum")
    return counts


def stale(a: Assignment, why: str) -> LostError:
    """The error of a downlink that does not fit what the device kept."""
    return LostError(
        f"the downlink of round {a.round} builds on counts that this device does not hold: {why}; the coordinator "
        "sends everything with the next downlink"
    )


def fault(a: Assignment, base: int, why: str) -> LostError | PayloadError:
    """The error of a change that cannot be read: the device lost what it builds on, unless it builds on nothing."""
    return PayloadError(f"the downlink of round {a.round}: {why}; fetch it again") if base == 1 else stale(a, why)
