"""Which parameters a mask method masks, trains or leaves alone, and which mask elements a device keeps.

Pruning happens once. A structure is packed bits over the prunable elements, in the order of the groups: 1 for an
element that stays. An element is live when it stays or is not prunable. The method decides how elements are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from edge_kernels import bits as bitset
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Bits, Model, Packed
from edge_client.errors import ConfigError
from edge_client.methods import Method, pretrained
from edge_client.parts import Part, rest, tensors, weights
from edge_client.task import Personal


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


Head = Literal["masked", "local"]
Restart = Literal["radius", "latent"]


@dataclass(frozen=True)
class Choice:
    """The settings whose defaults depend on the bundle; `PrunedMasks` says what each is."""

    keep: float
    head: Head
    group_lasso: float
    restart: Restart
    lr: float


class PrunedMasks(Method):
    """Base of methods that mask layers and prune once: the settings that divide a model, and those that `chosen` fills.

    A random network has to be searched for a subnetwork. A trained one is good as it is: a mask that prunes it before
    training, or starts anew each round, only ruins it.
    """

    drawn: ClassVar[Choice]
    """The defaults for weights that a seed draws."""
    trained: ClassVar[Choice]
    """The defaults for weights from a file; a head of zeros is `local`, since no mask changes it."""

    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the pruned layers' weights that a device keeps (the paper's p_r); 1 prunes nothing."""
    prune_layers: Annotated[int, Field(ge=0)] | tuple[str, ...] = 2
    """The last masked layers, at most so many, or layers by name."""
    head: Head | None = None
    """`local`: the last layer is float32, trained and kept on the device."""
    group_lasso: Annotated[float, Field(ge=0, le=100)] | None = None
    """Strength of the lasso on rows and columns; 0 turns it off."""
    restart: Restart | None = None
    """`radius`: every score starts anew; `latent`: a device keeps its own score where its bit came back."""
    lr: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Learning rate of the scores: their gradients carry a factor W / 4, hence the size."""
    biases: Literal["frozen", "local"] = "local"
    """Biases, batch-norm scale and shift, and tensors of no maskable layer: as drawn, or trained on the device."""
    real_gates: tuple[Literal["i", "f", "g", "o"], ...] = ("o",)
    """LSTM gates that are trained and sent as float32 instead of masked."""

    def chosen(self, model: Model) -> Choice:
        """The settings for this model: those that were given, else its defaults."""
        choice = self.drawn
        if pretrained(model):
            last = tensors(model.manifest, model.manifest.layers[-1].weights).gather(model.parameters)
            choice = self.trained if last.any() else replace(self.trained, head="local")
        given = {f.name: getattr(self, f.name) for f in fields(Choice)}
        return replace(choice, **{name: value for name, value in given.items() if value is not None})

    def division(self, model: Model) -> Division:
        """How this configuration divides the model. Raises ConfigError when it names layers that do not exist."""
        m, count, choice = model.manifest, self.prune_layers, self.chosen(model)
        layers = m.layers[:-1] if choice.head == "local" else m.layers
        names = tuple(layer.name for layer in layers)
        pruned = names[max(0, len(names) - count) :] if isinstance(count, int) else count
        if not names:
            raise ConfigError(
                f"the model has one layer, {m.layers[-1].name!r}, and head = {choice.head!r} leaves it unmasked; "
                'set head = "masked", or take a method that averages weights'
            )
        if not set(pruned) <= set(names):
            raise ConfigError(f"prune_layers = {count!r}, but the masked layers are {list(names)}; name some of these")
        every, masked = weights(m, layers), weights(m, layers, self.real_gates)
        groups = [masked.places_of(layer.weights) for layer in layers if layer.name in pruned and choice.keep < 1]
        groups = [g for g in groups if g.size]
        head = {*m.layers[-1].weights, *m.layers[-1].biases} if choice.head == "local" else set()
        local = Part(tuple(b for b in rest(m, every).blocks if self.biases == "local" or b.name in head))
        kept = tuple(max(1, round(choice.keep * g.size)) for g in groups)
        return Division(masked, every.without(masked), local, tuple(groups), kept)

    def exchanged(self, model: Model) -> int:
        division = self.division(model)
        return division.masked.size + division.real.size

    def paper_bytes(self, model: Model) -> tuple[int, int]:
        """One bit for every mask element, pruned or not."""
        division = self.division(model)
        dense = bitset.size(division.masked.size) + 4 * division.real.size
        return dense, dense
