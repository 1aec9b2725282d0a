"""Which parameters a mask method masks, trains or leaves alone, and which mask elements a device keeps.

Pruning happens once. A structure is packed bits over the prunable elements, in the order of the groups: 1 for an
element that stays. An element is live when it stays or is not prunable. The method decides how elements are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from edge_kernels import bits as bitset
from numpy.typing import NDArray

from edge_client.blocks import Blocks
from edge_client.bundle import F32, Bits, Model, Packed
from edge_client.task import Personal


@dataclass(frozen=True)
class Division:
    """Parts of the model: masked; trained and sent as float32 (`real`); trained and kept on the device (`local`).

    Of the mask elements, those of each of `groups` (indices int64) are ranked against each other, and every device
    keeps `kept` of a group.
    """

    masked: Blocks
    real: Blocks
    local: Blocks
    groups: tuple[NDArray[np.int64], ...]
    kept: tuple[int, ...]

    @property
    def prunable(self) -> NDArray[np.int64]:
        """The elements that a structure has a bit for, in the order of its bits."""
        return np.concatenate(self.groups) if self.groups else np.zeros(0, np.int64)

    @property
    def pruned(self) -> int:
        """The number of prunable elements."""
        return sum(g.size for g in self.groups)

    @property
    def live(self) -> int:
        """The number of live elements under every structure."""
        return self.masked.size - self.pruned + sum(self.kept)

    def expand(self, structure: Packed) -> Bits:
        """The live elements, bool[masked]. Raises ValueError for bits that are no structure."""
        live = np.ones(self.masked.size, np.bool_)
        live[self.prunable] = bitset.unpack(structure, self.pruned)
        if (counts := tuple(int(np.count_nonzero(live[g])) for g in self.groups)) != self.kept:
            raise ValueError(f"the structure keeps {list(counts)} elements; it must keep {list(self.kept)}")
        return live

    def choose(self, rank: F32) -> Packed:
        """The structure of the largest `rank`, float32[masked]; ties go to the lower index."""
        live = np.zeros(self.masked.size, np.bool_)
        for group, count in zip(self.groups, self.kept, strict=True):
            live[group[np.argsort(-rank[group], kind="stable")[:count]]] = True
        return bitset.pack(live[self.prunable])

    def under(self, model: Model, values: F32, gates: NDArray[Any], buffers: F32) -> Personal:
        """The model of `values` with the frozen weights times `gates`: [masked] in {0, 1}, or signs and 0 for dead."""
        values, alive = values.copy(), np.ones(values.size, np.bool_)
        self.masked.scatter(self.masked.gather(model.parameters) * gates, values)
        self.masked.scatter(gates != 0, alive)
        return Personal(values, buffers, alive)
