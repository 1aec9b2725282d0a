"""What float32 can do to a step: the step in float64, with every result rounded to float32 at random.

Each draw is one float32 engine's result: other kernels, other orders of sums. So the largest movement over a few draws
measures how well a float32 engine can know a tensor (Monte Carlo arithmetic). What float32 holds exactly, such as
zeros, copies and maxima, stays. A sum has the roundings of its partial sums, which are as large as its terms together
and not as what is left of them.
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
_TERMS = {"aten::sum": 16, "aten::mean": 64, "aten::var_mean": 64}
"""Sums, and for how many terms each moves by one rounding, because an engine rounds partial sums too.

ONNX Runtime sums over samples and places one by one: n equal terms are off by n / 6 roundings at most, which the
proof's factor covers. It adds 64 sums side by side for a mean.
"""


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
    """While active, each float64 result of an operator is moved up or down by a float32 rounding, a sum by several."""

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
        rounds = args[0].numel() / max(plain[0].numel(), 1) / _TERMS[name] if name in _TERMS else 0.0
        for value in plain:
            if isinstance(value, Tensor) and value.dtype == torch.float64 and value.numel():
                size = func(args[0].abs(), *args[1:], **(kwargs or {})) if name == "aten::sum" else value.abs()
                self._move(value, torch.ones_like(value) if name in _OF_ONE else size, rounds)
        return made

    def _move(self, value: Tensor, size: Tensor, rounds: float) -> None:
        """Move `value` by a rounding of `size`; a sum by as many as `rounds`, which is 0 for what is no sum."""
        exact = value == 0 if rounds else value.float().double() == value
        signs = 2 * torch.randint(0, 2, value.shape, generator=self.random) - 1
        moved = value + signs * max(1.0, rounds) * EPS * size
        value.copy_(torch.where(exact | ~value.isfinite(), value, moved.float().double()))
