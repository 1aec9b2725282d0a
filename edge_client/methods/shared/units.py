"""Structures of units: which channels of the manifest's groups a device has, as bits, channels and parameters.

The bits of a structure are those of all groups in the manifest's order, 1 for a unit that stays. Every group keeps at
least one. Layers whose channels form no group, such as the last one, stay whole. `network` makes a network of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from edge_kernels import bits as bitset
from numpy.typing import NDArray

from edge_client.bundle import F32, Bits, Manifest, Packed
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import bits_digest
from edge_client.narrow import Channels, Narrow, narrow
from edge_client.task import Personal

UNITS = "units"  # the array of a structure in a payload


@dataclass(frozen=True)
class Units:
    """A structure. `alive` is bool[units of all groups]."""

    manifest: Manifest
    alive: Bits

    @cached_property
    def packed(self) -> Packed:
        """As it travels and is stored."""
        return bitset.pack(self.alive)

    @cached_property
    def digest(self) -> str:
        """The structure's 64-bit name."""
        return bits_digest(self.packed)

    @cached_property
    def channels(self) -> Channels:
        """The units that stay, by group."""
        parts = by_group(self.manifest, self.alive)
        return {g.name: np.flatnonzero(part) for g, part in zip(self.manifest.groups, parts, strict=True)}

    @cached_property
    def small(self) -> Narrow:
        """The network of the units that stay."""
        return narrow(self.manifest, self.channels)

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the live parameters lie in the flat vector."""
        return self.small.parameters

    def applied(self, parameters: F32, buffers: F32) -> Personal:
        """The model with all parameters of removed units zero, and its mask."""
        return self.placed(parameters[self.places], buffers[self.small.buffers], buffers)

    def placed(self, parameters: F32, buffers: F32, others: F32) -> Personal:
        """The smaller network's values, float32[d'] and float32[buffers_d'], as a model of the whole one's size.

        Parameters of removed units are zero and masked; their statistics are those of `others`, float32[buffers_d].
        """
        values, statistics = np.zeros(self.manifest.d, np.float32), others.copy()
        mask = np.zeros(self.manifest.d, np.bool_)
        values[self.places], mask[self.places], statistics[self.small.buffers] = parameters, True, buffers
        return Personal(values, statistics, mask)


def require_groups(manifest: Manifest) -> None:
    """Raise ConfigError for a model without channel groups."""
    if not manifest.groups:
        raise ConfigError(
            f"model {manifest.name!r} has no channel groups, so no unit can be pruned; choose a model for which "
            "`maskfleet bundle inspect` lists groups, or another method"
        )


def whole(manifest: Manifest) -> Units:
    """Every unit. Raises ConfigError for a model without channel groups."""
    require_groups(manifest)
    return chosen(manifest, {})


def chosen(manifest: Manifest, kept: Channels) -> Units:
    """The structure of the channels `kept`, by group; a group that it does not name is whole."""
    channels = {g.name: np.arange(g.size) for g in manifest.groups}
    parts = [np.isin(every, kept.get(name, every)) for name, every in channels.items()]
    return Units(manifest, np.concatenate([*parts, np.zeros(0, np.bool_)]))


def unpacked(manifest: Manifest, packed: Packed) -> Units:
    """The structure in `packed`. Raises ValueError for bits that are none."""
    bitset.check(packed, sum(g.size for g in manifest.groups))
    return _unpacked(ByIdentity(manifest), packed.tobytes())


class ByIdentity:
    """A value as a key of `lru_cache`, by identity: to compare two manifests would take too long."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value


@lru_cache(maxsize=16)
def _unpacked(same: ByIdentity, data: bytes) -> Units:
    """As `unpacked`. Every update of a round names a structure, most of them the same one."""
    manifest, packed = same.value, np.frombuffer(data, np.uint8)
    alive = bitset.unpack(packed, sum(g.size for g in manifest.groups))
    empty = [g.name for g, part in zip(manifest.groups, by_group(manifest, alive), strict=True) if not part.any()]
    if empty:
        raise ValueError(f"the groups {empty} keep no unit")
    return Units(manifest, alive)


def held(manifest: Manifest, packed: Packed) -> Units:
    """The structure that a device kept. Raises LostError when it is none of this model's."""
    try:
        return unpacked(manifest, packed)
    except ValueError as error:
        raise LostError(
            f"the structure that the device kept is damaged: {error}; the coordinator sends everything again"
        ) from None


def read_units(manifest: Manifest, packed: Packed) -> Units:
    """The structure in a payload's array `units`. Raises PayloadError."""
    try:
        return unpacked(manifest, packed)
    except ValueError as error:
        raise PayloadError(f"array 'units': {error}") from None


def carried(values: F32 | None, packed: Packed, now: Units) -> F32 | None:
    """Values that a device kept of the structure `packed`, for that of now: 0 for parameters that are new in it.

    Raises LostError.
    """
    if values is None:
        return None
    places, every = held(now.manifest, packed).places, np.zeros(now.manifest.d, np.float32)
    if values.size != places.size:
        raise LostError(
            f"the device kept {values.size} values, and its structure has {places.size} parameters; "
            "the coordinator sends everything again"
        )
    every[places] = values
    return every[now.places]


def by_group(manifest: Manifest, alive: Bits) -> list[Bits]:
    """Each group's bits, views."""
    ends = list(accumulate(g.size for g in manifest.groups))
    return [alive[end - g.size : end] for g, end in zip(manifest.groups, ends, strict=True)]
