"""What FedMask sends, checked, and what each side keeps for it: shares of ones down, bits up, both of live elements.

Bits travel as changes to bits that both sides hold (changes.py). Shares in steps of one over a cohort travel as bit
planes. Either side names the structure and the known bits, so values of another round are found before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from edge_kernels import bits as bitset

from edge_client.bundle import F32, Bits, Packed
from edge_client.errors import LostError, PayloadError
from edge_client.methods import bits_digest
from edge_client.methods.shared import changes
from edge_client.methods.shared.division import Division
from edge_client.protocol.payload import Arrays, Meta, Payload, allow_only, count, vector

STRUCTURE, PLANES, REAL = "structure.bits", "mask.planes", "real"
MOST_LEVELS = 2**20 - 1  # devices of a cohort


@dataclass(frozen=True)
class Held:
    """A structure and bits of its live elements, packed, that both sides should hold."""

    structure: Packed
    bits: Packed


@dataclass(frozen=True)
class Record:
    """A device's last update and its round; `own` with ``state="client"``: the bits of live elements that it is due."""

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


@dataclass(frozen=True)
class Wire:
    """The payloads of one configuration and model: the set codec, whether counts travel down, the parts."""

    codec: str
    counts: bool
    division: Division

    def update_limit(self) -> int:
        """The most bytes of an update: live bits, the structure, the real values."""
        return changes.limit(self.division.live) + bitset.size(self.division.pruned) + 4 * self.division.real.size

    def downlink(self, share: F32, known: Bits, levels: int, structure: Packed | None, real: F32) -> Payload:
        """Shares, multiples of one over `levels`, of the elements that have `known` bits: live ones, or all."""
        meta: dict[str, Meta] = {"structure": "" if structure is None else bits_digest(structure)}
        arrays: Arrays = {REAL: real} if self.division.real.size else {}
        if not self.counts:
            sent = changes.encode(self.codec, share >= 0.5, known)
            return Payload({**arrays, **sent.arrays}, {**meta, **sent.meta})
        steps = np.rint(share.astype(np.float64) * levels).astype(np.uint32)
        arrays[PLANES] = bitset.pack_planes(steps, levels.bit_length())
        return Payload(arrays, {**meta, **changes.named(known), "levels": levels})

    def receive(self, payload: Payload, own: Held | None, first: Bits) -> Received:
        """A downlink for a device that has `own`, or nothing and the first mask. Raises LostError, PayloadError."""
        said, share = payload.meta.get("structure"), np.zeros(first.size, np.float32)
        if not said:
            return Received(self._shares(payload, first), self._real(payload), False)
        if own is None or said != bits_digest(own.structure):
            raise LostError(f"the downlink is for structure {said!r}, which this device does not hold")
        share[self.division.expand(own.structure)] = self._shares(payload, bitset.unpack(own.bits, self.division.live))
        return Received(share, self._real(payload), True)

    def _shares(self, payload: Payload, known: Bits) -> F32:
        """float32[n] in 0..1 for n known bits."""
        what, others = "the downlink", (REAL,) if self.division.real.size else ()
        if not self.counts:
            return changes.decode(self.codec, payload, known, what, others).astype(np.float32)
        changes.check(payload, known, what)
        allow_only(payload, PLANES, *others)
        levels, planes = count(payload, "levels", MOST_LEVELS), payload.arrays.get(PLANES)
        if planes is None:
            raise PayloadError(f"{what} has no array {PLANES!r}; fetch it again")
        try:
            steps = bitset.unpack_planes(planes, levels.bit_length(), known.size)
        except ValueError as error:
            raise PayloadError(f"the mask of {what} is malformed: {error}; fetch it again") from None
        shares: F32 = np.minimum(steps / np.float32(levels), np.float32(1)).astype(np.float32)
        return shares

    def update(self, bits: Bits, received: Received, structure: Packed, real: F32) -> Payload:
        """A device's bits of its live elements; with the structure when the downlink names none."""
        known = received.share[self.division.expand(structure)] >= 0.5
        sent = changes.encode(self.codec, bits, known)
        arrays: Arrays = {REAL: real} if self.division.real.size else {}
        if not received.structured:
            arrays[STRUCTURE] = structure
        return Payload({**sent.arrays, **arrays}, {**sent.meta, "structure": bits_digest(structure)})

    def read_update(self, payload: Payload, due: Packed | None, sent: Bits, what: str) -> Update:
        """An update of a device with structure `due`, None if it has to send one, that received the bits `sent`.

        `sent` are those of live elements, or of all; `what` names the update in errors. Raises PayloadError.
        """
        structure = payload.arrays.get(STRUCTURE) if due is None else due
        if structure is None:
            raise PayloadError(f"the server has no structure of this device yet; send `{STRUCTURE}` with the update")
        try:
            live = self.division.expand(structure)
        except ValueError as error:
            raise PayloadError(f"{what} has no usable structure: {error}") from None
        if payload.meta.get("structure") != bits_digest(structure):
            raise PayloadError(
                f"{what} is for structure {payload.meta.get('structure')!r}, not {bits_digest(structure)!r}; "
                "the device trains again"
            )
        others = ((STRUCTURE,) if due is None else ()) + ((REAL,) if self.division.real.size else ())
        bits = changes.decode(self.codec, payload, sent[live] if due is None else sent, what, others)
        return Update(Held(structure, bitset.pack(bits)), self._real(payload))

    def _real(self, payload: Payload) -> F32:
        size = self.division.real.size
        return vector(payload, REAL, size) if size else np.zeros(0, np.float32)
