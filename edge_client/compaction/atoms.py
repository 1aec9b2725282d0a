"""Atoms: the entries of every axis of every tensor of a bundle, and which of them leave together.

`labels` runs the graph and joins them; `groups` reads what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from edge_kernels.channels import Role
from numpy.typing import NDArray

from edge_client.compaction.net import Shape

Labels = NDArray[np.int64]
NONE = -1  # a channel that cannot leave, such as one of the input
ANY = -2  # a constant of the graph: it goes with whatever it meets


@dataclass
class Atoms:
    """All atoms: `first` is the number of entry 0 of an axis of a tensor, `root` the least atom joined with each."""

    tensors: dict[str, Shape]
    root: Labels = field(init=False)
    first: dict[tuple[str, int], int] = field(init=False)
    elements: dict[str, int] = field(init=False)
    """The number of a tensor's first element among those of all tensors."""
    roles: dict[tuple[str, int], Role] = field(default_factory=dict)
    fixed: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count, size = 0, 0
        self.first, self.elements = {}, {}
        for name, shape in self.tensors.items():
            self.elements[name] = size
            size += int(np.prod(shape))
            for axis, n in enumerate(shape):
                self.first[name, axis] = count
                count += n
        self.root = np.arange(count)
        self._starts = np.array([*self.elements.values(), size])
        self._names = list(self.elements)

    def join(self, a: Labels, b: Labels) -> bool:
        """Join atoms pair by pair; others than atoms are passed over. Whether any were apart."""
        a, b = np.broadcast_arrays(a, b)
        both, joined = (a >= 0) & (b >= 0), False
        a, b = a[both], b[both]
        while True:
            x, y = self.root[a], self.root[b]
            apart = x != y
            if not apart.any():
                return joined
            joined = True
            np.minimum.at(self.root, np.maximum(x, y)[apart], np.minimum(x, y)[apart])
            while not np.array_equal(self.root, self.root[self.root]):
                self.root = self.root[self.root]

    def fix(self, labels: Labels, why: str) -> None:
        """These atoms stay, because of `why`."""
        for root in np.unique(self.root[labels[labels >= 0]]):
            self.fixed.setdefault(int(root), why)

    def roots(self, labels: Labels) -> Labels:
        """The least atom joined with each; others than atoms as they are."""
        return np.where(labels >= 0, self.root[np.maximum(labels, 0)], labels)

    def along(self, ids: Labels | None, axis: int, role: Role) -> Labels:
        """The atom of every entry of `axis` of a weight, whose elements have the numbers `ids`; NONE if it has none."""
        if ids is None:
            return np.full(1, NONE)
        lines = np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)
        found = np.full(len(lines), NONE)
        owner = np.searchsorted(self._starts, lines, "right") - 1
        if (lines < 0).any() or (owner != owner[:, :1]).any():
            return found
        for k in np.unique(owner[:, 0]):
            name, rows = self._names[int(k)], np.flatnonzero(owner[:, 0] == k)
            shape = self.tensors[name]
            at = np.stack(np.unravel_index(lines[rows] - self.elements[name], shape)) if shape else np.zeros((0, 0))
            one = [(c == c[:, :1]).all() for c in at]
            moves = [(len(rows) == 1 and shape[j] == 1) or (c[:, 0] != c[0, 0]).any() for j, c in enumerate(at)]
            axes = [j for j in range(len(shape)) if one[j] and moves[j]]
            if axes:
                found[rows] = self.first[name, axes[0]] + at[axes[0]][:, 0]
                if self.roles.get((name, axes[0])) not in ("makes", "reads"):
                    self.roles[name, axes[0]] = role
        return found
