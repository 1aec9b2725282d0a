"""A smaller network: some channels of each group of the manifest, all others gone.

A dropped channel takes with it all its places: rows of weights and biases, its row of a batch-norm (scale, bias,
statistics) and its entries in the weights that read it. Its output counts as zero: nothing is folded into the biases
that stay. So the smaller network computes what the whole one does when all those values are zero, and its gradients are
the whole one's there. `edge_client.training` trains it; `edge_client.compaction` removes channels of a trained model,
constants folded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from edge_kernels.channels import renumbered
from numpy.typing import NDArray

from edge_client.bundle import Manifest, Model, Tensor
from edge_client.errors import ConfigError

Channels = Mapping[str, NDArray[np.intp]]
"""The channels that stay, ascending, by the name of their group; a group that is not named stays whole."""
Axes = tuple[NDArray[np.bool_] | None, ...]
"""Of a tensor, the entries of each axis that stay; None: all of them."""
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Narrow:
    """A smaller network: its manifest, and where its values lie in the whole network's flat vectors.

    Its parameters are ``flat[parameters]``, int64[d'], its statistics ``flat[buffers]``, int64[buffers_d']. The
    manifest has no parts and no seed: the values come from the whole network.
    """

    manifest: Manifest
    parameters: NDArray[np.int64]
    buffers: NDArray[np.int64]

    def model(self, whole: Model) -> Model:
        """The smaller network with the values of the whole one."""
        return Model(self.manifest, whole.parameters[self.parameters], whole.buffers[self.buffers])


def narrow(manifest: Manifest, kept: Channels) -> Narrow:
    """The tables of the network with the channels `kept`. Raises ConfigError when they cannot be cut."""
    found = cuts(manifest, kept)
    parameters, places = _table(manifest.parameters, found)
    buffers, statistics = _table(manifest.buffers, found)
    left = {(n, k): stays for n, axes in found.items() for k, stays in enumerate(axes) if stays is not None}
    groups = tuple(renumbered(g, np.asarray(kept.get(g.name, np.arange(g.size))), left) for g in manifest.groups)
    made: dict[str, Any] = {name: getattr(manifest, name) for name in Manifest.model_fields}
    made |= {"parameters": parameters, "buffers": buffers, "groups": groups, "seed": None, "parts": {}}
    return Narrow(Manifest(**made), places, statistics)


def cuts(manifest: Manifest, kept: Channels) -> dict[str, Axes]:
    """What stays of each tensor that loses something, by name. Raises ConfigError when the channels cannot be cut."""
    groups = {g.name: g for g in manifest.groups}
    found: dict[str, list[NDArray[np.bool_] | None]] = {}
    for name, channels in kept.items():
        if name not in groups:
            raise ConfigError(f"the model has no channel group {name!r}; it has {sorted(groups)}")
        group, stays = groups[name], np.zeros(groups[name].size, np.bool_)
        if not len(channels) or channels[0] < 0 or channels[-1] >= group.size or (np.diff(channels) <= 0).any():
            raise ConfigError(
                f"group {name!r} keeps at least one of its {group.size} channels, in ascending order, "
                f"not {np.array2string(np.asarray(channels), threshold=10)}"
            )
        stays[channels] = True
        if stays.all():
            continue
        for p in group.places:
            shape = manifest.tensors[p.tensor].shape if p.tensor in manifest.tensors else ()
            entries = p.of(group.size)
            if p.axis not in range(len(shape)) or entries.min() < 0 or entries.max() >= shape[p.axis]:
                raise ConfigError(
                    f"the channels of group {name!r} cannot be cut: tensor {p.tensor!r} with shape {shape} has no such "
                    f"entries of axis {p.axis}; export the bundle again"
                )
            axes = found.setdefault(p.tensor, [None] * len(shape))
            left = axes[p.axis]
            axes[p.axis] = left = np.ones(shape[p.axis], np.bool_) if left is None else left
            left[entries[~stays]] = False
    for tensor, axes in found.items():
        if any(left is not None and not left.any() for left in axes):
            raise ConfigError(f"the channels left would leave nothing of tensor {tensor!r}; keep more")
    return {name: tuple(axes) for name, axes in found.items()}


def taken(array: NDArray[_Value], axes: Axes) -> NDArray[_Value]:
    """The entries of `array` that stay, a contiguous copy."""
    for i, stays in enumerate(axes):
        if stays is not None:
            array = np.compress(stays, array, axis=i)
    return np.ascontiguousarray(array)


def content(kept: Channels) -> bytes:
    """A key for the channels `kept`: equal for equal channels."""
    made = hashlib.sha256()
    for name in sorted(kept):
        channels = np.ascontiguousarray(kept[name], np.int64)
        made.update(f"{name!r} {len(channels)} ".encode() + channels.tobytes())
    return made.digest()


def _table(table: tuple[Tensor, ...], found: Mapping[str, Axes]) -> tuple[tuple[Tensor, ...], NDArray[np.int64]]:
    """The rows of the smaller network, and the place of each of its values."""
    rows, places, end = [], [np.zeros(0, np.int64)], 0
    for row in table:
        axes = found.get(row.name, ())
        here = taken(np.arange(row.offset, row.offset + row.size).reshape(row.shape), axes)
        rows.append(row.model_copy(update={"shape": here.shape, "offset": end}))
        places.append(here.ravel())
        end += here.size
    return tuple(rows), np.concatenate(places)
