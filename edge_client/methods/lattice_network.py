"""The network that Lattice's rounds train: the whole one, and after the pruning the smaller one, cut in memory.

After the pruning the course's model is the smaller network, so grid, dither and statistics have no coordinate of a
removed unit. `Network` also says where its values lie in the whole network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32, Model, Packed
from edge_client.errors import PayloadError
from edge_client.methods.lattice_grid import U32, Counts, History, added, grid, nearest
from edge_client.methods.units import Same, Units, unpacked
from edge_client.parts import Part
from edge_client.task import Assignment, Course, Personal, Task


@dataclass(frozen=True)
class Network:
    """What the rounds train: the whole network when `units` is None, else the one of these units.

    `course` has it as its model, `origin` the whole one.
    """

    origin: Course
    course: Course
    units: Units | None = None

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
        if self.units is None:
            return np.arange(part.size)
        place = np.zeros(self.origin.model.manifest.d, np.int64)
        part.scatter(np.arange(part.size), place)
        return self.part.gather(place[self.units.places])

    def weights(self, unit: F32, counts: Counts) -> F32:
        """The parameters of these counts, float32[d]; they may be infinite. `unit` is float32[tensors]."""
        parameters: F32 = self.model.parameters.copy()
        self.part.scatter(added(self.part, self.part.gather(parameters), unit, counts), parameters)
        return parameters

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
        return History(lengths, moved[stays].astype(np.uint32), history.values[stays], history.levels)


def network(course: Course, packed: Packed | None) -> Network:
    """The network of the units that a state or a downlink names; the whole one for None. Raises PayloadError."""
    try:
        if packed is not None:
            unpacked(course.model.manifest, packed)
        return _network(Same(course), None if packed is None else packed.tobytes())
    except ValueError as error:
        raise PayloadError(f"array 'units': {error}") from None


@lru_cache(maxsize=4)
def _network(same: Same, data: bytes | None) -> Network:
    """Kept, because a coordinator needs a round's network for each of its devices. Raises ValueError."""
    course: Course = same.value
    if data is None:
        return Network(course, course)
    units = unpacked(course.model.manifest, np.frombuffer(data, np.uint8))
    return Network(course, replace(course, model=units.small.model(course.model)), units)
