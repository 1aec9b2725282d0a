"""Structures of units: which channels of the manifest's groups a device has, as bits, channels and parameters.

The bits of a structure are those of all groups in the manifest's order, 1 for a unit that stays. Every group keeps at
least one. Layers whose channels form no group, such as the last one, stay whole. `edge_client.narrow` makes the
network; `Network` is a course and its tasks on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels.channels import by_channel
from edge_kernels.pruning import group_norms, keep_largest
from numpy.typing import NDArray

from edge_client.bundle import F32, Bits, Manifest, Model, Packed, views
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import bits_digest
from edge_client.narrow import Channels, Narrow, narrow
from edge_client.task import Assignment, Course, Personal, Task

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
        parts = _split(self.manifest, self.alive)
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


def whole(manifest: Manifest) -> Units:
    """Every unit. Raises ConfigError for a model without channel groups."""
    if not manifest.groups:
        raise ConfigError(
            f"model {manifest.name!r} has no channel groups, so no unit can be pruned; choose a model for which "
            "`maskfleet bundle inspect` lists groups, or another method"
        )
    return chosen(manifest, {})


def chosen(manifest: Manifest, kept: Channels) -> Units:
    """The structure of the channels `kept`, by group; a group that it does not name is whole."""
    parts = [np.isin(every := np.arange(g.size), kept.get(g.name, every)) for g in manifest.groups]
    return Units(manifest, np.concatenate([*parts, np.zeros(0, np.bool_)]))


def unpacked(manifest: Manifest, packed: Packed) -> Units:
    """The structure in `packed`. Raises ValueError for bits that are none."""
    bitset.check(packed, sum(g.size for g in manifest.groups))
    return _unpacked(Same(manifest), packed.tobytes())


class Same:
    """A value as a key of `lru_cache`, by identity: to compare two manifests would take too long."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


@lru_cache(maxsize=16)
def _unpacked(same: Same, data: bytes) -> Units:
    """As `unpacked`. Every update of a round names a structure, most of them the same one."""
    manifest, packed = same.value, np.frombuffer(data, np.uint8)
    alive = bitset.unpack(packed, sum(g.size for g in manifest.groups))
    empty = [g.name for g, part in zip(manifest.groups, _split(manifest, alive), strict=True) if not part.any()]
    if empty:
        raise ValueError(f"the groups {empty} keep no unit")
    return Units(manifest, alive)


def held(manifest: Manifest, packed: Packed) -> Units:
    """The structure that a device kept. Raises LostError when it is none of this model's."""
    try:
        return unpacked(manifest, packed)
    except ValueError as error:
        raise LostError(f"the structure that the device kept is damaged: {error}") from None


def read_units(manifest: Manifest, packed: Packed) -> Units:
    """The structure in a payload's array `units`. Raises PayloadError."""
    try:
        return unpacked(manifest, packed)
    except ValueError as error:
        raise PayloadError(f"array 'units': {error}") from None


@dataclass(frozen=True)
class Network:
    """What the rounds train: the whole network when `units` is None, else the one of these units, cut in memory.

    `course` has it as its model, `origin` the whole one.
    """

    origin: Course
    course: Course
    units: Units | None = None

    @property
    def model(self) -> Model:
        """The bundle's values of this network."""
        return self.course.model

    def assignment(self, a: Assignment) -> Assignment:
        """The same one, of this network."""
        return replace(a, course=self.course)

    def task(self, task: Task) -> Task:
        """The same one, of this network."""
        return task if self.units is None else task.narrow(self.units.channels)

    def buffers(self, whole: F32) -> F32:
        """Statistics of the whole network as this one's."""
        return whole if self.units is None else whole[self.units.small.buffers]

    def personal(self, parameters: F32, buffers: F32) -> Personal:
        """This network's values as a model of the bundle, zero and masked where a unit is gone."""
        if self.units is None:
            return Personal(parameters, buffers)
        return self.units.placed(parameters, buffers, self.origin.model.buffers)


def network(course: Course, packed: Packed | None) -> Network:
    """The network of the units that a state or a downlink names; the whole one for None, or when every unit stays.

    Raises PayloadError.
    """
    if packed is None:
        return Network(course, course)
    read_units(course.model.manifest, packed)
    return _network(Same(course), packed.tobytes())


@lru_cache(maxsize=4)
def _network(same: Same, data: bytes) -> Network:
    """As `network`. A coordinator needs a round's network for each of its devices."""
    course: Course = same.value
    units = unpacked(course.model.manifest, np.frombuffer(data, np.uint8))
    if units.alive.all():
        return Network(course, course)
    return Network(course, replace(course, model=units.small.model(course.model)), units)


def carried(values: F32 | None, packed: Packed, now: Units) -> F32 | None:
    """Values that a device kept of the structure `packed`, for that of now: 0 for parameters that are new in it.

    Raises LostError.
    """
    if values is None:
        return None
    every = np.zeros(now.manifest.d, np.float32)
    every[held(now.manifest, packed).places] = values
    return every[now.places]


def strongest(units: Units, parameters: F32, counts: Sequence[int]) -> Units:
    """Of each group's live units, the `counts` whose rows in `parameters`, float32[d], have the largest norms."""
    tensors, alive = views(units.manifest.parameters, parameters), units.alive.copy()
    for group, part, count in zip(units.manifest.groups, _split(units.manifest, alive), counts, strict=True):
        norms = group_norms(by_channel(tensors[p.tensor], p, group.size) for p in group.at("makes"))
        part &= keep_largest(np.where(part, norms, -1.0), count)
    return Units(units.manifest, alive)


def counts(units: Units) -> list[int]:
    """The live units of each group."""
    return [int(np.count_nonzero(part)) for part in _split(units.manifest, units.alive)]


def live(manifest: Manifest, counts: Sequence[int]) -> int:
    """The number of parameters of a network with `counts[i]` units in group i."""
    shapes = {t.name: list(t.shape) for t in manifest.parameters}
    for group, n in zip(manifest.groups, counts, strict=True):
        for p in (p for p in group.places if p.tensor in shapes):
            shapes[p.tensor][p.axis] -= (group.size - n) * p.repeat
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def shrunk(units: Units, most: float) -> list[int]:
    """The units of each group after the fewest removals that leave at most `most` parameters.

    Groups lose the same share of their live units, to within a unit; each keeps one. Without enough units to remove,
    one a group is left.
    """
    now = counts(units)
    order = np.argsort(np.concatenate([np.arange(1, n) / n for n in now]), kind="stable")
    owner = np.repeat(np.arange(len(now)), [n - 1 for n in now])[order]  # the group of each removal

    def after(removals: int) -> list[int]:
        removed = np.bincount(owner[:removals], minlength=len(now))
        return [n - int(r) for n, r in zip(now, removed, strict=True)]

    return after(bisect_left(range(len(owner)), True, key=lambda n: live(units.manifest, after(n)) <= most))


def _split(manifest: Manifest, alive: Bits) -> list[Bits]:
    """Each group's bits, views."""
    ends = list(accumulate(g.size for g in manifest.groups))
    return [alive[end - g.size : end] for g, end in zip(manifest.groups, ends, strict=True)]
