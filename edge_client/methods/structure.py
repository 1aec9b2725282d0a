"""Which parameters a mask method masks, trains or leaves alone, and which mask elements a device keeps.

Pruning happens once. A structure is packed bits over the prunable elements, in the order of the groups: 1 for an
element that stays. An element is live when it stays or is not prunable. The method decides how elements are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from edge_kernels import bits as bitset
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.errors import ConfigError
from edge_client.methods import Method
from edge_client.parts import Part, rest, weights
from edge_client.task import Personal

Bits = NDArray[np.bool_]
Packed = NDArray[np.uint8]


@dataclass(frozen=True)
class Division:
    """Parts of the model: masked; trained and sent as float32 (`real`); trained and kept on the device (`local`).

    Of the mask elements, those of each of `groups` (indices int64) are ranked against each other, and every device
    keeps as many of a group as `kept` says.
    """

    masked: Part
    real: Part
    local: Part
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
            raise ValueError(f"the structure keeps {list(counts)} elements, {list(self.kept)} are due")
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


class PrunedMasks(Method):
    """Base of methods that mask layers and prune once: the settings that divide a model."""

    keep: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the pruned layers' weights that a device keeps (the paper's p_r)."""
    prune_layers: Annotated[int, Field(ge=0)] | tuple[str, ...] = 2
    """The last so many masked layers, or layers by name."""
    head: Literal["masked", "local"] = "masked"
    """`local`: the last layer is float32, trained and kept on the device."""
    biases: Literal["frozen", "local"] = "local"
    """Biases, batch-norm scale and shift, and tensors of no maskable layer: as drawn, or trained on the device."""
    real_gates: tuple[Literal["i", "f", "g", "o"], ...] = ("o",)
    """LSTM gates that are trained and sent as float32 instead of masked."""

    def division(self, model: Model) -> Division:
        """How this configuration divides the model. Raises ConfigError when it names layers that do not exist."""
        m, count = model.manifest, self.prune_layers
        layers = m.layers[:-1] if self.head == "local" else m.layers
        names = tuple(layer.name for layer in layers)
        pruned = names[max(0, len(names) - count) :] if isinstance(count, int) else count
        if not names or not set(pruned) <= set(names) or count not in (len(pruned), pruned):
            raise ConfigError(f"prune_layers = {count!r}, but the masked layers are {list(names)}; name some")
        every, masked = weights(m, layers), weights(m, layers, self.real_gates)
        groups = [masked.places_of(layer.weights) for layer in layers if layer.name in pruned]
        groups = [g for g in groups if g.size]
        head = {*m.layers[-1].weights, *m.layers[-1].biases} if self.head == "local" else set()
        local = Part(tuple(b for b in rest(m, every).blocks if self.biases == "local" or b.name in head))
        kept = tuple(max(1, round(self.keep * g.size)) for g in groups)
        return Division(masked, every.without(masked), local, tuple(groups), kept)

    def exchanged(self, model: Model) -> int:
        division = self.division(model)
        return division.masked.size + division.real.size

    def paper_bytes(self, model: Model) -> tuple[int, int]:
        """One bit for every mask element, pruned or not."""
        division = self.division(model)
        dense = bitset.size(division.masked.size) + 4 * division.real.size
        return dense, dense
