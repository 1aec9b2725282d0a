"""Who owns which parameter under FedMask: what is masked, pruned, sent as float32, or kept on the device.

A division depends on a few settings and the model's tables alone; both sides make it, for every message, so the
last ones are remembered. What is done with the parts is the method's (fedmask.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import Layer, Tensor
from edge_client.errors import ConfigError

Bits = NDArray[np.bool_]
REMEMBERED = 4  # divisions; a coordinator needs one for each method and model that it serves


@dataclass(frozen=True)
class Block:
    """A masked matrix (of an LSTM, one gate's rows): its span among the parameters and among the mask elements."""

    span: slice
    at: slice
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Who owns which parameter. `real` and `local` are indices int64 into the flat parameter vector.

    `prunable` is bool[masked], True for elements of layers that the one-shot pruning thins. Each of `ranked` lists
    the spans of mask elements that are ranked against each other, and `kept` how many of them each device keeps.
    All arrays are read-only: a layout is shared.
    """

    blocks: tuple[Block, ...]
    prunable: Bits
    ranked: tuple[tuple[slice, ...], ...]
    kept: tuple[int, ...]
    real: NDArray[np.int64]
    local: NDArray[np.int64]

    @property
    def masked(self) -> int:
        """Number of mask elements."""
        return self.prunable.size

    @property
    def thinned(self) -> int:
        """Number of mask elements that a structure has a bit for."""
        return sum(s.stop - s.start for spans in self.ranked for s in spans)

    @property
    def live(self) -> int:
        """Number of mask elements in every device's structure."""
        return self.masked - self.thinned + sum(self.kept)

    def expand(self, structure: Bits) -> Bits:
        """bool[masked] of live elements from a structure, bool over the prunable ones."""
        live = np.ones(self.masked, np.bool_)
        live[self.prunable] = structure
        return live

    def counts(self, structure: Bits) -> tuple[int, ...]:
        """How many elements a structure keeps of each of `ranked`."""
        live = self.expand(structure)
        return tuple(sum(int(np.count_nonzero(live[s])) for s in spans) for spans in self.ranked)


@lru_cache(REMEMBERED)
def divide(
    parameters: tuple[Tensor, ...],
    layers: tuple[Layer, ...],
    prune_layers: int | tuple[str, ...],
    keep: float,
    together: bool,
    local_head: bool,
    local_biases: bool,
    real_gates: tuple[str, ...],
) -> Layout:
    """Divide a manifest's tables by FedMask's settings. Raises ConfigError when they name layers that are not there."""
    masked = layers[:-1] if local_head else layers
    names = [layer.name for layer in masked]
    pruned = set(names[len(names) - prune_layers :] if isinstance(prune_layers, int) else prune_layers)
    wanted = prune_layers if isinstance(prune_layers, int) else len(pruned & set(names))
    if not names or len(pruned) != wanted:
        raise ConfigError(f"prune_layers = {prune_layers!r}, but the masked layers are {names}; name some")
    tensors = {t.name: t for t in parameters}
    head = {*layers[-1].weights, *layers[-1].biases} if local_head else set()
    owner = np.zeros(sum(t.size for t in parameters), np.int8)  # 0 frozen, 1 masked, 2 real, 3 local
    for t in parameters:
        owner[t.span] = 3 if t.trainable and (t.name in head or local_biases) else 0
    blocks: list[Block] = []
    ranked: list[tuple[slice, ...]] = []
    for layer in masked:
        first = len(blocks)
        gates = layer.gates or ("",)
        for t in (tensors[weight] for weight in layer.weights):
            size, shape = t.size // len(gates), (t.shape[0] // len(gates), *t.shape[1:])
            for i, gate in enumerate(gates):
                span = slice(t.offset + i * size, t.offset + (i + 1) * size)
                owner[span] = 2 if gate in real_gates else 1
                if gate not in real_gates:
                    low = blocks[-1].at.stop if blocks else 0
                    blocks.append(Block(span, slice(low, low + size), shape))
        if layer.name in pruned and blocks[first:]:
            ranked.append(tuple(b.at for b in blocks[first:]))
    if together and ranked:
        ranked = [tuple(s for spans in ranked for s in spans)]
    prunable = np.zeros(blocks[-1].at.stop if blocks else 0, np.bool_)
    for s in (s for spans in ranked for s in spans):
        prunable[s] = True
    kept = tuple(max(1, round(keep * sum(s.stop - s.start for s in spans))) for spans in ranked)
    layout = Layout(
        tuple(blocks), prunable, tuple(ranked), kept, np.flatnonzero(owner == 2), np.flatnonzero(owner == 3)
    )
    for array in (layout.prunable, layout.real, layout.local):
        array.setflags(write=False)
    return layout
