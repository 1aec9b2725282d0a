"""Channel groups: which entries of which tensors belong to one channel. The export finds them once.

A channel is what may be removed from a network as one: an output of a layer with its bias, its entry of every
batch-norm, and its entries in every layer that reads it; a unit of a recurrent layer in all gates; a head of an
attention. A group holds channels that lie side by side in the same tensors. It is flat data: no graph, no operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

LayerKind = Literal["linear", "conv", "lstm"]
Role = Literal["makes", "reads", "scales", "shifts", "holds"]
Entries = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """The entries of one axis of a tensor that belong to each channel of a group.

    Channel c has the entries ``start + c * step + r * stride`` for r < `repeat`, or, where they follow no such rule,
    ``entries[c * repeat + r]``.

    `makes`: the tensor is the weight of a layer whose outputs are the channels. `reads`: the weight of a layer whose
    inputs they are. `scales` and `shifts`: a value for each channel that multiplies it or is added to it. `holds`:
    anything else with an entry for each channel, such as the running statistics of a batch-norm.
    """

    tensor: str
    axis: int
    role: Role
    start: int = 0
    step: int = 1
    repeat: int = 1
    stride: int = 1
    entries: tuple[int, ...] = ()

    def of(self, size: int) -> Entries:
        """The entries of each of `size` channels, int64[size, repeat]."""
        if self.entries:
            return np.array(self.entries, np.int64).reshape(size, self.repeat)
        channels = np.arange(size, dtype=np.int64)[:, None]
        return self.start + channels * self.step + np.arange(self.repeat, dtype=np.int64) * self.stride


@dataclass(frozen=True)
class ChannelGroup:
    """`size` channels; each is kept or removed in all its `places` at once."""

    name: str
    size: int
    places: tuple[Place, ...]

    def at(self, *roles: Role) -> tuple[Place, ...]:
        """The places of these roles, in forward order."""
        return tuple(p for p in self.places if p.role in roles)


def place(tensor: str, axis: int, role: Role, entries: Entries) -> Place:
    """The place with the given entries, int64[size, repeat], by a rule if there is one."""
    size, repeat = entries.shape
    made = Place(
        tensor,
        axis,
        role,
        int(entries[0, 0]),
        int(entries[1, 0] - entries[0, 0]) if size > 1 else repeat,
        repeat,
        int(entries[0, 1] - entries[0, 0]) if repeat > 1 else 1,
    )
    if np.array_equal(made.of(size), entries):
        return made
    return Place(tensor, axis, role, 0, 1, repeat, 1, tuple(entries.reshape(-1).tolist()))


def by_channel(tensor: NDArray[Any], place: Place, size: int) -> NDArray[Any]:
    """The values of `tensor` at each channel's entries, [size, values]. A view where the entries lie side by side."""
    moved = np.moveaxis(tensor, place.axis, 0)
    if (place.start, place.step, place.stride, place.entries) == (0, place.repeat, 1, ()) and len(
        moved
    ) == size * place.repeat:
        return moved.reshape(size, -1)
    taken: NDArray[Any] = moved[place.of(size)].reshape(size, -1)
    return taken


def renumbered(group: ChannelGroup, kept: Entries, stays: dict[tuple[str, int], NDArray[np.bool_]]) -> ChannelGroup:
    """The group with the channels `kept`, where of each axis of each tensor the entries `stays` are left."""
    places = []
    for p in group.places:
        entries = p.of(group.size)[kept]
        if (p.tensor, p.axis) in stays:
            entries = np.cumsum(stays[p.tensor, p.axis])[entries] - 1
        places.append(place(p.tensor, p.axis, p.role, entries))
    return replace(group, size=len(kept), places=tuple(places))
