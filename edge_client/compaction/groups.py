"""Channel groups of a bundle: from the labels of `eval.onnx` to flat data for the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from edge_kernels.channels import ChannelGroup, Place, Role, place
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from edge_client.compaction.atoms import Atoms
from edge_client.compaction.chains import straighten
from edge_client.compaction.labels import Labelled
from edge_client.compaction.net import Shape
from edge_client.compaction.preparation import prepare


@dataclass(frozen=True)
class Found:
    """The groups, and a line for each layer whose channels cannot be removed: which operator stops it."""

    groups: tuple[ChannelGroup, ...]
    stopped: tuple[str, ...]


def find_groups(model: ModelProto, tensors: Mapping[str, Shape], sample: Shape, dtype: str = "float32") -> Found:
    """The channel groups of an evaluation graph, in forward order.

    `tensors` are the shapes of the bundle's parameters and statistics, inputs of the graph by name. `sample` is the
    shape of one sample. Raises CompactionError when the graph does not run.
    """
    random = np.random.default_rng(0)
    made = ModelProto()
    made.CopyFrom(model)
    values = {k: random.uniform(0.5, 1.5, shape).astype(np.float32) for k, shape in tensors.items()}
    made.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in values.items())
    net = prepare(made, np.zeros((2, *sample), dtype), tensors)
    straighten(net)
    found = Labelled(net, dict(tensors))
    found.run()
    return _collected(found)


@dataclass(frozen=True)
class _Located:
    """Where atoms lie: atom a at `entry[a]` of `axes[axis[a]]`; `axis` is -1 where no layer makes or reads it."""

    axes: list[tuple[str, int]]
    axis: NDArray[np.int64]
    entry: NDArray[np.int64]


Family = tuple[tuple[int, int], ...]
"""What channels of one group have in common: of each axis, by number, how many of its entries leave with a channel."""


def _collected(found: Labelled) -> Found:
    """Channels of one family are a group, unless there is only one."""
    atoms, forward, located = found.atoms, _forward(found), _located(found.atoms)
    families, stopped = _families(atoms, located)
    groups = []
    for family, channels in families.items():
        if len(channels) < 2:
            for k, _ in family:
                name, axis = located.axes[k]
                if atoms.roles[name, axis] == "makes" and atoms.tensors[name][axis] > 1:
                    stopped.setdefault(name, "all its channels hang together")
            continue
        groups.append(_group(atoms, located, family, channels, forward))
    groups.sort(key=lambda g: min((forward.get(p.tensor, len(forward)), p.of(g.size).min()) for p in g.at("makes")))
    weights = {name for (name, _), role in atoms.roles.items() if role == "makes"}
    last = max(weights, key=lambda name: forward.get(name, -1), default="")
    names = sorted((n for n in stopped if _layer(n) != _layer(last)), key=lambda n: forward.get(n, len(forward)))
    return Found(_named(groups), tuple(dict.fromkeys(f"{_layer(n)}: {stopped[n]}" for n in names)))


def _located(atoms: Atoms) -> _Located:
    axes = [key for key in atoms.first if key in atoms.roles]
    axis, entry = np.full(len(atoms.root), -1), np.zeros(len(atoms.root), np.int64)
    for k, (name, at) in enumerate(axes):
        low, n = atoms.first[name, at], atoms.tensors[name][at]
        axis[low : low + n] = k
        entry[low : low + n] = np.arange(n)
    return _Located(axes, axis, entry)


def _families(atoms: Atoms, located: _Located) -> tuple[dict[Family, list[NDArray[np.int64]]], dict[str, str]]:
    """The channels of each family, a channel as its atoms; and by weight why its channels cannot leave."""
    used = np.flatnonzero(located.axis >= 0)
    fixed = {int(atoms.root[a]): why for a, why in reversed(atoms.fixed.items())}  # the first cause counts
    by_root: dict[int, list[int]] = {}
    for atom in used[np.argsort(atoms.root[used], kind="stable")]:
        by_root.setdefault(int(atoms.root[atom]), []).append(int(atom))
    families: dict[Family, list[NDArray[np.int64]]] = {}
    stopped: dict[str, str] = {}
    for root, members in by_root.items():
        own = np.array(members)
        kinds, counts = np.unique(located.axis[own], return_counts=True)
        makers = [located.axes[k][0] for k in kinds if atoms.roles[located.axes[k]] == "makes"]
        if not makers:
            continue
        if root in fixed:
            for name in makers:
                stopped.setdefault(name, fixed[root])
            continue
        families.setdefault(tuple(zip(kinds.tolist(), counts.tolist(), strict=True)), []).append(own)
    return families, stopped


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


def _forward(found: Labelled) -> dict[str, int]:
    """The order in which layers run, by their weights."""
    made: dict[str, int] = {}
    for node in found.net.nodes:
        for tensor in (t for v in node.input for t in found.net.tensors(v)):
            ids, starts = found.net.ids[tensor], found.atoms.elements
            names = [
                n
                for n in starts
                if starts[n] <= int(ids.max()) and starts[n] + int(np.prod(found.atoms.tensors[n])) > int(ids.min())
            ]
            for name in names:
                made.setdefault(name, len(made))
    return made


def _group(
    atoms: Atoms, located: _Located, family: Family, channels: list[NDArray[np.int64]], forward: Mapping[str, int]
) -> ChannelGroup:
    """The group of a family's channels, in the order of their entries in the first layer that makes them."""
    table = np.stack(channels)  # [channels, places of one]
    kinds, most = located.axis[table], np.iinfo(np.int64).max
    first = min(
        (k for k, _ in family if atoms.roles[located.axes[k]] == "makes"),
        key=lambda k: forward.get(located.axes[k][0], len(forward)),
    )
    own = np.where(kinds == first, located.entry[table], most).min(axis=1)
    table, kinds = table[np.argsort(own)], kinds[np.argsort(own)]
    places: list[Place] = []
    for k, count in family:
        entries = np.sort(np.where(kinds == k, located.entry[table], most), axis=1)[:, :count]
        name, axis = located.axes[k]
        places += _places(name, axis, atoms.roles[name, axis], entries)
    places.sort(key=lambda p: (forward.get(p.tensor, len(forward)), p.axis))
    return ChannelGroup(_layer(located.axes[first][0]), len(table), tuple(places))


def _places(tensor: str, axis: int, role: Role, entries: NDArray[np.int64]) -> list[Place]:
    """The fewest places by rule that hold the entries; one that lists them if there is no rule."""
    repeat = entries.shape[1]
    for parts in range(1, min(repeat, 8) + 1):
        if repeat % parts == 0:
            made = [place(tensor, axis, role, part) for part in np.split(entries, parts, axis=1)]
            if not any(p.entries for p in made):
                return made
    return [place(tensor, axis, role, entries)]


def _named(groups: list[ChannelGroup]) -> tuple[ChannelGroup, ...]:
    """Groups of one layer get names that differ: the weight that makes them, with the first entry, with the axis."""
    made = []
    for g in groups:
        same = [_names(other) for other in groups if other.name == g.name]
        shortest = next(k for k, column in enumerate(zip(*same, strict=True)) if len(set(column)) == len(same))
        made.append(replace(g, name=_names(g)[shortest]))
    return tuple(made)


def _names(g: ChannelGroup) -> tuple[str, ...]:
    """The names that a group may have, the shortest first."""
    first = g.at("makes")[0]
    entry = first.of(g.size).min()
    return g.name, first.tensor, f"{first.tensor}:{entry}", f"{first.tensor}.{first.axis}:{entry}"
