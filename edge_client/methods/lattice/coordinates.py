"""Lattice's grid on the network that the rounds train: the whole one, and after the pruning the smaller one.

After the pruning the course's model is the smaller network (`network.Network`), so grid, dither and statistics have no
coordinate of a removed unit. Here is where its values lie in the whole network.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_client.blocks import Blocks
from edge_client.bundle import F32
from edge_client.methods.lattice import grid
from edge_client.methods.lattice.grid import U32, Counts, History, add, trainable
from edge_client.methods.shared.network import Network


def on_grid(net: Network) -> Blocks:
    """The network's trainable parameters."""
    return trainable(net.model.manifest)


def whole_size(net: Network) -> int:
    """How many counts the whole network has."""
    return trainable(net.origin.model.manifest).size


def live(net: Network) -> NDArray[np.int64]:
    """Where a smaller network's counts lie among those of the whole one, int64[n]."""
    assert net.units is not None
    part = trainable(net.origin.model.manifest)
    place = np.zeros(net.origin.model.manifest.d, np.int64)
    part.scatter(np.arange(part.size), place)
    return on_grid(net).gather(place[net.units.places])


def weights(net: Network, unit: F32, counts: Counts) -> F32:
    """The parameters of these counts, float32[d]; they may be infinite. `unit` is float32[tensors]."""
    parameters: F32 = net.model.parameters.copy()
    add(on_grid(net), unit, counts, parameters)
    return parameters


def closeness(net: Network, base: int, round_: int, pruned: int) -> tuple[U32, U32]:
    """How near the dither of the rounds base .. round_ - 1 came to 0 and 1; the whole network's until `pruned`."""
    size = on_grid(net).size
    if net.units is None or base > pruned:
        return grid.closeness(net.course, range(base, round_), size)
    before = grid.closeness(net.origin, range(base, pruned + 1), whole_size(net))
    after, stays = grid.closeness(net.course, range(pruned + 1, round_), size), live(net)
    return np.minimum(before[0][stays], after[0]), np.minimum(before[1][stays], after[1])


def cut_history(net: Network, history: History) -> History:
    """The changes of the whole network's counts as this one's."""
    place, stay = np.full(whole_size(net), -1, np.int64), live(net)
    place[stay] = np.arange(stay.size)
    moved = place[history.places]
    stays = moved >= 0
    rounds = np.repeat(np.arange(len(history.lengths)), history.lengths)[stays]
    lengths = np.bincount(rounds, minlength=len(history.lengths)).astype(np.int64)
    return History(lengths, moved[stays].astype(np.uint32), history.values[stays], history.levels)
