"""Transposes that are put off: a value is stored in one order of its axes and read in another.

ExecuTorch copies a tensor for every transpose, at seven times the cost of a product with it. A convolution computed
as one matrix product has its channels last, while the graph around it has them first. So a transpose only notes the
order, elementwise operators, slices, pads and sums work on what is stored, and a copy is made where a reader needs the
axes in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Laid:
    """The tensor ``base.permute(order)``, not computed before `tensor` asks for it."""

    def __init__(self, base: Tensor, order: Sequence[int]) -> None:
        self.base = base
        self.order = tuple(order)
        self._made: Tensor | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.order)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes in the order in which the value is read."""
        return tuple(self.base.shape[i] for i in self.order)

    def tensor(self) -> Tensor:
        """The value with its axes in order; computed once."""
        if self._made is None:
            self._made = permuted(self.base, self.order)
        return self._made

    def with_base(self, base: Tensor) -> Laid:
        """Another stored tensor, read in the same order."""
        return Laid(base, self.order)


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """``x.permute(order)``; a reshape, which costs nothing, when only axes of size 1 change places."""
    long = [i for i in order if not (isinstance(x.shape[i], int) and x.shape[i] == 1)]
    if long == sorted(long):
        return x if list(order) == sorted(order) else x.reshape([x.shape[i] for i in order])
    return x.permute(list(order))


def laid(x: Any) -> Laid:
    """`x` as a value with an order, the plain one for a tensor."""
    return x if isinstance(x, Laid) else Laid(x, range(x.ndim))


def settled(x: Laid) -> Any:
    """A tensor again when its axes are in order."""
    return x.base if x.order == tuple(range(x.ndim)) else x


def transposed(x: Any, perm: Sequence[int]) -> Any:
    """`x` with its axes in the order `perm`, put off."""
    x = laid(x)
    return settled(Laid(x.base, [x.order[p] for p in perm]))


def aligned(x: Any, order: tuple[int, ...]) -> Tensor:
    """What to store so that `x`, whose missing leading axes have size 1, is read in `order`."""
    if isinstance(x, Laid) and x.order == order:
        return x.base
    plain = x.tensor() if isinstance(x, Laid) else x
    plain = plain.reshape([1] * (len(order) - plain.ndim) + list(plain.shape)) if plain.ndim else plain
    back = [order.index(i) for i in range(len(order))]
    return permuted(plain, back) if plain.ndim else plain


def common(*values: Any) -> tuple[list[Any], tuple[int, ...] | None]:
    """The stored tensors of several operands in one order, which is that of the largest; None when all are plain."""
    orders = [v for v in values if isinstance(v, Laid)]
    if not orders:
        return list(values), None
    rank = max(v.ndim for v in values if hasattr(v, "ndim"))
    chosen = next((v.order for v in orders if v.ndim == rank), None)
    if chosen is None:
        return [v.tensor() if isinstance(v, Laid) else v for v in values], None
    return [aligned(v, chosen) if hasattr(v, "ndim") else v for v in values], chosen


def reduced(order: Sequence[int], axes: Sequence[int]) -> list[int]:
    """The order that remains when the read axes `axes` are gone."""
    left = [o for i, o in enumerate(order) if i not in axes]
    return [sorted(left).index(o) for o in left]


def unsqueezed(x: Any, axis: int) -> Any:
    """A new axis of size 1, stored right behind the one that it is read behind."""
    if not isinstance(x, Laid):
        return x.unsqueeze(axis)
    place = x.order[axis - 1] + 1 if axis else 0
    moved = [o + (o >= place) for o in x.order]
    return Laid(x.base.unsqueeze(place), [*moved[:axis], place, *moved[axis:]])


def merged(x: Laid, shape: Sequence[Any]) -> Any | None:
    """`x` reshaped to `shape`, put off still; None when that splits an axis, or joins some that are stored apart."""
    groups = _joined(x.shape, shape)
    stored = [[x.order[i] for i in group] for group in groups or ()]
    if groups is None or any(axes != list(range(axes[0], axes[0] + len(axes))) for axes in stored):
        return None
    by_place = sorted(range(len(stored)), key=lambda i: stored[i][0])
    base = x.base.reshape([shape[i] for i in by_place])
    return settled(Laid(base, [by_place.index(i) for i in range(len(stored))]))


def _joined(sizes: Sequence[Any], shape: Sequence[Any]) -> list[list[int]] | None:
    """Which of the axes of `sizes`, side by side, become each axis of `shape`; None when one is split.

    A size that depends on the batch, which no number is compared with, stays an axis of its own; -1 may stand for it.
    """
    groups: list[list[int]] = []
    at = 0
    for size in shape:
        if at == len(sizes):
            return None
        first, made = at, sizes[at]
        at += 1
        if not isinstance(made, int):
            if str(size) != str(made) and (groups or str(size) != "-1"):
                return None
        elif isinstance(size, int):
            while made < size and at < len(sizes) and isinstance(sizes[at], int):
                made *= sizes[at]
                at += 1
            if made != size:
                return None
        else:
            return None
        groups.append(list(range(first, at)))
    while groups and at < len(sizes) and sizes[at] == 1:
        groups[-1].append(at)
        at += 1
    return groups if at == len(sizes) else None
