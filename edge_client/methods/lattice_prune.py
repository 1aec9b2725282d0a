"""Lattice's pruning: which units the server keeps, and the smaller network that both sides go on with.

After the pruning a federation is one of the smaller network: its course has that network as its model, so grid, dither
and statistics have no coordinate of a removed unit. `Network` also says where its values lie in the whole network.

A unit's score is ||incoming weights|| * ||outgoing weights|| in the server's own model, so no device sends anything
for it. Where a batch-norm follows, its scale stands for the incoming weights, whose norm it cancels. Linear layers keep
the share `prune` of their units. Convolutions keep the square root of that share: they have few of the parameters,
and the same share for all cost 10 points in a prototype on FEMNIST. Units of recurrent layers stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from edge_kernels.channels import ChannelGroup, Role, by_channel
from edge_kernels.pruning import group_norms, keep_largest
from numpy.typing import NDArray

from edge_client.bundle import F32, Manifest, Model, views
from edge_client.errors import ConfigError, PayloadError
from edge_client.methods.lattice_grid import U32, Counts, History, grid, nearest, spread
from edge_client.methods.units import Packed, Units, unpacked, whole
from edge_client.narrow import Kept, Narrow, narrow
from edge_client.parts import Part
from edge_client.task import Assignment, Course, Personal, Task


@dataclass(frozen=True)
class Network:
    """What the rounds train: the whole network when `units` is None, else the one of these units.

    `course` has it as its model, `origin` the whole one. `small` says where its values lie in that.
    """

    origin: Course
    course: Course
    units: Units | None = None
    small: Narrow | None = None

    @property
    def model(self) -> Model:
        """The bundle's values of this network."""
        return self.course.model

    @cached_property
    def part(self) -> Part:
        """Its parameters on the grid."""
        return grid(self.model.manifest)

    @property
    def whole_size(self) -> int:
        """How many counts the whole network has."""
        return grid(self.origin.model.manifest).size

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Where its counts lie among those of the whole network."""
        part = grid(self.origin.model.manifest)
        if self.small is None:
            return np.arange(part.size)
        place = np.zeros(self.origin.model.manifest.d, np.int64)
        part.scatter(np.arange(part.size), place)
        return self.part.gather(place[self.small.parameters])

    def weights(self, unit: F32, counts: Counts) -> F32:
        """The parameters of these counts, float32[d]; they may be infinite. `unit` is float32[tensors]."""
        parameters: F32 = self.model.parameters.copy()
        with np.errstate(over="ignore"):
            moved = self.part.gather(parameters) + spread(self.part, unit) * counts
            self.part.scatter(moved.astype(np.float32), parameters)
        return parameters

    def assignment(self, a: Assignment) -> Assignment:
        """The same one, of this network."""
        return replace(a, course=self.course)

    def task(self, task: Task) -> Task:
        """The same one, of this network."""
        return task if self.units is None else task.narrow(_fewer(self.units))

    def buffers(self, whole: F32) -> F32:
        """Statistics of the whole network as this one's."""
        return whole if self.small is None else whole[self.small.buffers]

    def personal(self, parameters: F32, buffers: F32) -> Personal:
        """This network's values as a model of the bundle, zero and masked where a unit is gone."""
        if self.units is None or self.small is None:
            return Personal(parameters, buffers)
        values, statistics = np.zeros(self.units.manifest.d, np.float32), self.origin.model.buffers.copy()
        values[self.small.parameters], statistics[self.small.buffers] = parameters, buffers
        mask = np.zeros(values.size, np.bool_)
        mask[self.small.parameters] = True
        return Personal(values, statistics, mask)

    def nearest(self, base: int, round_: int, pruned: int | None) -> tuple[U32, U32]:
        """How near the dither of the rounds base .. round_ - 1 came to 0 and 1; the whole network's until `pruned`."""
        if self.units is None or pruned is None or base > pruned:
            return nearest(self.course, range(base, round_), self.part.size)
        before = nearest(self.origin, range(base, pruned + 1), self.whole_size)
        after = nearest(self.course, range(pruned + 1, round_), self.part.size)
        return np.minimum(before[0][self.live], after[0]), np.minimum(before[1][self.live], after[1])

    def history(self, history: History) -> History:
        """The changes of the whole network's counts as this one's."""
        place = np.full(self.whole_size, -1, np.int64)
        place[self.live] = np.arange(self.live.size)
        moved = place[history.places]
        stays = moved >= 0
        rounds = np.repeat(np.arange(len(history.lengths)), history.lengths)[stays]
        lengths = np.bincount(rounds, minlength=len(history.lengths)).astype(np.int64)
        return History(lengths, moved[stays].astype(np.uint32), history.values[stays])


def network(course: Course, packed: Packed | None) -> Network:
    """The network of the units that a state or a downlink names; the whole one for None. Raises PayloadError."""
    if packed is None:
        return Network(course, course)
    try:
        units = unpacked(course.model.manifest, packed)
    except ValueError as error:
        raise PayloadError(f"array 'units': {error}") from None
    small = narrow(units.manifest, _fewer(units))
    return Network(course, replace(course, model=small.model(course.model)), units, small)


def _fewer(units: Units) -> Kept:
    """The channels of the groups that lose some."""
    sizes = {g.name: g.size for g in units.manifest.groups}
    return {name: kept for name, kept in units.channels.items() if len(kept) < sizes[name]}


def check(course: Course, prune: float, prune_after: int, prune_keep: Mapping[str, float]) -> None:
    """Raise ConfigError for a federation that cannot be pruned like this."""
    m = course.model.manifest
    whole(m)
    if unknown := set(prune_keep) - {g.name for g in m.groups}:
        raise ConfigError(f"prune_keep names {sorted(unknown)}, but the groups are {[g.name for g in m.groups]}")
    if prune_after >= course.rounds:
        raise ConfigError(
            f"prune_after = {prune_after}, but the federation has {course.rounds} rounds; the smaller network needs at "
            "least one of its own"
        )
    network(course, choose(m, course.model.parameters, prune, prune_keep))


def choose(manifest: Manifest, parameters: F32, prune: float, prune_keep: Mapping[str, float]) -> Packed:
    """The units that stay, packed bits: of each group those of the highest score, of equal ones the lower index."""
    tensors = views(manifest.parameters, parameters)
    alive = [
        keep_largest(score(g, tensors), max(1, round(g.size * prune_keep.get(g.name, share(manifest, g, prune)))))
        for g in manifest.groups
    ]
    return Units(manifest, np.concatenate(alive)).packed


def share(manifest: Manifest, group: ChannelGroup, prune: float) -> float:
    """The share of its units that a group keeps."""
    kinds = {weight: layer.kind for layer in manifest.layers for weight in layer.weights}
    if "lstm" in {kinds.get(p.tensor) for p in group.at("makes", "reads")}:
        return 1.0
    return float(np.sqrt(prune)) if any(kinds.get(p.tensor) == "conv" for p in group.at("makes")) else prune


def score(group: ChannelGroup, tensors: Mapping[str, F32]) -> NDArray[np.float64]:
    """||incoming|| * ||outgoing|| of each unit, float64[size]."""

    def norms(*roles: Role) -> NDArray[np.float64]:
        return group_norms(by_channel(tensors[p.tensor], p, group.size) for p in group.at(*roles))

    return norms("scales" if group.at("scales") else "makes") * norms("reads")
