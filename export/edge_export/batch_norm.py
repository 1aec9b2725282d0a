"""Batch-norm and instance-norm in training, with PyTorch's statistics and a backward pass of few operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.errors import ModelError


def _across(values: Tensor, like: Tensor) -> Tensor:
    """Per-channel `values` [c] shaped to broadcast over `like` [n, c, ...]."""
    return values.reshape([1, -1, *[1] * (like.ndim - 2)])


class _Normalised(torch.autograd.Function):
    """`x` less its mean, over its deviation, times the weight [c]; with the mean and the biased variance, [c] both."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        axes = [0, *range(2, x.ndim)]
        mean = x.mean(axes)
        centred = x - _across(mean, x)
        var = (centred * centred).mean(axes)
        inverse = torch.rsqrt(var + eps)
        out = centred * _across(inverse if weight is None else inverse * weight, x)
        return (out if bias is None else out + _across(bias, x)), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.eps = inputs
        _, mean, var = output
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, mean, var)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad, (x, weight, mean, var) = gradients[0], ctx.saved_tensors
        axes = [0, *range(2, x.ndim)]
        inverse = torch.rsqrt(var + ctx.eps)
        centred = x - _across(mean, x)
        grad_sum = grad.sum(axes)
        moment = (grad * centred).sum(axes)
        count = x.numel() / x.shape[1]
        scale = inverse if weight is None else inverse * weight
        slope = moment * inverse * inverse / count
        grad_x = (grad - _across(grad_sum / count, x) - centred * _across(slope, x)) * _across(scale, x)
        return grad_x, None if weight is None else moment * inverse, grad_sum if ctx.biased else None, None


class Statistics:
    """Norms with running statistics. A step's new statistics are kept beside the old, so that no tensor is changed."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, with the old one, so that it stays alive

    def newest(self, old: Tensor) -> Tensor:
        """What `old` has become."""
        return self._new.get(id(old), (old, old))[1]

    def _move(self, old: Tensor, new: Tensor) -> None:
        self._new[id(old)] = (old, new)

    def table(self) -> dict[Any, Callable[..., Any]]:
        """The function that stands for each of PyTorch's."""
        return {
            functional.batch_norm: self.batch_norm,
            functional.instance_norm: self.instance_norm,
        }

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`functional.batch_norm`. The running variance takes the unbiased one of the batch, as in PyTorch.

        One value per channel has no unbiased variance: the running variance then stays as it is.
        """
        x = input
        if not training:
            if running_mean is None or running_var is None:
                raise ModelError("batch-norm outside training needs running statistics; set track_running_stats=True")
            scale = torch.rsqrt(self.newest(running_var) + eps)
            scale = scale if weight is None else scale * weight
            out = (x - _across(self.newest(running_mean), x)) * _across(scale, x)
            return out if bias is None else out + _across(bias, x)
        made: tuple[Tensor, ...] = _Normalised.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
        out, mean, var = made
        if running_mean is not None and running_var is not None:
            count = x.numel() / x.shape[1]
            more: Any = torch.sym_max(x.numel() // x.shape[1] - 1, 1)  # type: ignore[no-untyped-call]  # 1 for one value
            blend = momentum * (count - 1) / more  # momentum; 0 for a single value
            old_mean, old_var = self.newest(running_mean), self.newest(running_var)
            self._move(running_mean, old_mean * (1 - momentum) + mean.detach() * momentum)
            self._move(running_var, old_var * (1 - blend) + var.detach() * (blend * count / more))
        return out

    def instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`functional.instance_norm`: each sample's channel by itself."""
        x = input
        if not use_input_stats:
            return self.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        axes = list(range(2, x.ndim))
        out, mean, var = instance_normalised(x, weight, bias, eps)
        if running_mean is not None and running_var is not None:
            count = int(x.shape[2:].numel())
            each = var.detach().mean([0, *axes]) * (count / max(count - 1, 1))
            self._move(running_mean, self.newest(running_mean) * (1 - momentum) + mean.detach().mean([0, *axes]) * momentum)
            self._move(running_var, self.newest(running_var) * (1 - momentum) + each * momentum)
        return out


def instance_normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`x` [n, c, ...] with each sample's channel at mean 0 and variance 1; its mean and variance [n, c, 1, ...]."""
    axes = list(range(2, x.ndim))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    var = (centred * centred).mean(axes, keepdim=True)
    out = centred * torch.rsqrt(var + eps)
    out = out if weight is None else out * _across(weight, x)
    return out if bias is None else out + _across(bias, x), mean, var
