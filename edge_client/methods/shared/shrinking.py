"""How many units of each group a smaller network has, and which: those with the largest norms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from edge_kernels.channels import by_channel
from edge_kernels.pruning import group_norms, keep_largest

from edge_client.bundle import F32, Manifest, views
from edge_client.methods.shared.units import Units, by_group


def strongest(units: Units, parameters: F32, counts: Sequence[int]) -> Units:
    """Of each group's live units, the `counts` whose rows in `parameters`, float32[d], have the largest norms."""
    tensors, alive = views(units.manifest.parameters, parameters), units.alive.copy()
    for group, part, count in zip(units.manifest.groups, by_group(units.manifest, alive), counts, strict=True):
        norms = group_norms(by_channel(tensors[p.tensor], p, group.size) for p in group.at("makes"))
        part &= keep_largest(np.where(part, norms, -1.0), count)
    return Units(units.manifest, alive)


def counts(units: Units) -> list[int]:
    """The live units of each group."""
    return [int(np.count_nonzero(part)) for part in by_group(units.manifest, units.alive)]


def parameters_with(manifest: Manifest, counts: Sequence[int]) -> int:
    """The number of parameters of a network with `counts[i]` units in group i."""
    shapes = {t.name: list(t.shape) for t in manifest.parameters}
    for group, n in zip(manifest.groups, counts, strict=True):
        for p in group.places:
            if p.tensor in shapes:
                shapes[p.tensor][p.axis] -= (group.size - n) * p.repeat
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def shrunk(units: Units, most: float) -> list[int]:
    """The units of each group after the fewest removals that leave at most `most` parameters.

    Groups lose the same share of their live units, to within a unit; each keeps one. Without enough units to remove,
    one a group is left.
    """
    now = counts(units)
    order = np.argsort(np.concatenate([np.arange(1, n) / n for n in now]), kind="stable")
    owner = np.repeat(np.arange(len(now)), [n - 1 for n in now])[order]  # the group of each removal

    def after(removals: int) -> list[int]:
        removed = np.bincount(owner[:removals], minlength=len(now))
        return [n - int(r) for n, r in zip(now, removed, strict=True)]

    return after(bisect_left(range(len(owner)), True, key=lambda n: parameters_with(units.manifest, after(n)) <= most))
