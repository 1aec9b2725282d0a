"""What float32 can do to a step: the step in float64, with every result rounded to float32 at random.

Each draw is one float32 engine's result: other kernels, other orders of sums. So the largest movement over a few draws
measures how well a float32 engine can know a tensor (Monte Carlo arithmetic). What float32 holds exactly, such as
zeros, copies and maxima, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

EPS = float(torch.finfo(torch.float32).eps)
_OF_ONE = ("aten::sigmoid", "aten::sigmoid_")  # ONNX Runtime's is exact to roundings of one, not of its value
_OF_SUMS = ("aten::mean", "aten::var_mean")  # an engine rounds the sum of equal values, whose mean is exact
_LANES = 64  # sums that ONNX Runtime adds side by side; within one, equal values are all rounded the same way


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    mean = x.mean(dim, True)
    count = x.numel() / max(mean.numel(), 1) - (1 if correction is None else correction)
    return (x - mean).square().sum(dim, keepdim) / max(count, 0)


def _std(x: Tensor, dim: Any = None, **settings: Any) -> Tensor:
    return _var(x, dim, **settings).sqrt()


_APART: dict[Any, Callable[..., Any]] = {
    **get_decompositions([torch.ops.aten.native_batch_norm, torch.ops.aten.native_group_norm]),
    torch.ops.aten.var.correction: _var,
    torch.ops.aten.std.correction: _std,
}
"""Operators taken apart, because their means are results too: of a constant a norm leaves only their rounding."""


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, each float64 result of an operator is moved up or down by a float32 rounding, a mean by several."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _APART:
            with self:
                return _APART[func](*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        plain = made if isinstance(made, tuple | list) else (made,)
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return made  # a view
        name = func._schema.name
        terms = args[0].numel() / max(plain[0].numel(), 1) if name in _OF_SUMS else 0.0
        rounded = [self._rounded(t, name in _OF_ONE, terms) for t in plain]
        for t, r in zip(plain, rounded, strict=True):
            if r is not t:
                t.copy_(r)
        return made

    def _rounded(self, value: Any, of_one: bool, terms: float) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        exact = value == 0 if terms else value.float().double() == value
        signs = 2 * torch.randint(0, 2, value.shape, generator=self.random) - 1
        moved = value + signs * max(1.0, terms / _LANES) * EPS * (1.0 if of_one else value.abs())
        return torch.where(exact | ~value.isfinite(), value, moved.float().double())
