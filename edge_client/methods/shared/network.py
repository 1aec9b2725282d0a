"""The network that a round trains: the bundle's own, or what a structure of units leaves of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from edge_client.bundle import F32, Model, Packed
from edge_client.methods.shared.units import ByIdentity, Units, read_units, unpacked
from edge_client.task import Course, Personal, Task


@dataclass(frozen=True)
class Network:
    """What the rounds train: the whole network when `units` is None, else the one of these units, cut in memory.

    It is the model of `course`; the whole network is that of `origin`.
    """

    origin: Course
    course: Course
    units: Units | None = None

    @property
    def model(self) -> Model:
        """The bundle's values of this network."""
        return self.course.model

    def task(self, task: Task) -> Task:
        """The task with this network as its model."""
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
    return _network(ByIdentity(course), packed.tobytes())


@lru_cache(maxsize=4)
def _network(same: ByIdentity, data: bytes) -> Network:
    """As `network`. A coordinator needs a round's network for each of its devices."""
    course: Course = same.value
    units = unpacked(course.model.manifest, np.frombuffer(data, np.uint8))
    if units.alive.all():
        return Network(course, course)
    return Network(course, replace(course, model=units.small.model(course.model)), units)
