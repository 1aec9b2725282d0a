"""Parts of the flat parameter vector: the one way in which methods name what they mask, train, send or keep.

A part is a `Blocks`: an ordered list of blocks, each a contiguous span with a matrix shape, such as a whole tensor or
the rows of one gate of an LSTM weight. `gather` copies a part out of a flat vector, `scatter` writes it back, `places`
gives where each block lies within the gathered vector. Which part is used for what is the method's decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import Layer, Manifest

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Block:
    """A contiguous piece of the flat vector: `span` is where it lies, `shape` what it is ([out, in, ...])."""

    name: str
    span: slice
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True)
class Blocks:
    """Blocks of the flat vector in order."""

    blocks: tuple[Block, ...]

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return sum(b.size for b in self.blocks)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where each block lies within the gathered vector."""
        ends = list(accumulate(b.size for b in self.blocks))
        return tuple(slice(end - b.size, end) for b, end in zip(self.blocks, ends, strict=True))

    def without(self, other: Blocks) -> Blocks:
        """The blocks that the other part does not have."""
        return Blocks(tuple(b for b in self.blocks if b not in other.blocks))

    def places_of(self, names: Collection[str]) -> NDArray[np.int64]:
        """The indices, within the gathered vector, of the blocks of the tensors called `names`."""
        found = [np.arange(p.start, p.stop) for b, p in zip(self.blocks, self.places, strict=True) if b.name in names]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def gather(self, flat: NDArray[_Value]) -> NDArray[_Value]:
        """The part as one contiguous vector of length `size`, a copy."""
        return np.concatenate([flat[b.span] for b in self.blocks]) if self.blocks else flat[:0].copy()

    def scatter(self, values: NDArray[_Value], flat: NDArray[_Value]) -> None:
        """Write `values`, a vector of length `size`, into the flat vector."""
        for block, place in zip(self.blocks, self.places, strict=True):
            flat[block.span] = values[place]


def tensors(manifest: Manifest, names: Collection[str]) -> Blocks:
    """The whole tensors called `names`, in the order of the parameter table."""
    return Blocks(tuple(Block(t.name, t.span, t.shape) for t in manifest.parameters if t.name in names))


def trained_layers(manifest: Manifest, layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers of which devices train a weight; those of a frozen backbone are not among them."""
    return tuple(x for x in layers if any(manifest.tensors[name].trainable for name in x.weights))


def head(manifest: Manifest) -> Blocks:
    """The trained weights and biases of the last layer."""
    names = (*manifest.layers[-1].weights, *manifest.layers[-1].biases)
    return tensors(manifest, {name for name in names if manifest.tensors[name].trainable})


def weights(manifest: Manifest, layers: Iterable[Layer], without_gates: Collection[str] = ()) -> Blocks:
    """The trained weights of layers, a block a tensor; of a recurrent layer a block a gate, without the gates named."""
    blocks: list[Block] = []
    for layer in layers:
        gates = layer.gates or ("",)
        for tensor in (t for name in layer.weights if (t := manifest.tensors[name]).trainable):
            size, shape = tensor.size // len(gates), (tensor.shape[0] // len(gates), *tensor.shape[1:])
            for i, gate in enumerate(gates):
                if gate not in without_gates or not gate:
                    low = tensor.offset + i * size
                    blocks.append(Block(tensor.name, slice(low, low + size), shape))
    return Blocks(tuple(blocks))


def frozen(manifest: Manifest) -> NDArray[np.bool_]:
    """The parameters that no device trains, bool[d]."""
    bits = np.zeros(manifest.d, np.bool_)
    for t in manifest.parameters:
        bits[t.span] = not t.trainable
    return bits


def rest(manifest: Manifest, *others: Blocks) -> Blocks:
    """The trainable tensors of which no other part has any value."""
    taken = np.zeros(manifest.d, np.bool_)
    for part in others:
        part.scatter(np.ones(part.size, np.bool_), taken)
    free = [t for t in manifest.parameters if t.trainable and not taken[t.span].any()]
    return Blocks(tuple(Block(t.name, t.span, t.shape) for t in free))
