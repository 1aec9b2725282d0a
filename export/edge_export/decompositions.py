"""Backward operators that ONNX lacks, written as operators it has.

`train_graph` traces with this table, on fake tensors. All other operators decompose by PyTorch's own core table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.nn import functional

from edge_export.onnx_layers import overhang, per_axis, shares

aten = torch.ops.aten

CONCAT_LIMIT = 64  # up to so many weights per filter, one product over gathered columns beats one per kernel tap


@cache
def _core() -> dict[Any, Callable[..., Any]]:
    """PyTorch's table, which takes a tenth of a second to make."""
    spreads = {aten.var_mean.correction: aten.var.correction, aten.std_mean.correction: aten.std.correction}
    return {**core_aten_decompositions(), **{both: partial(_with_mean, spread) for both, spread in spreads.items()}}


def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of a training graph, by ATen operator."""
    found = dict(_core())
    del found[aten.threshold_backward.default]  # written as it is
    found[aten.convolution_backward.default] = _convolution_backward
    for pool in (aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default):
        found[pool] = _max_pool_backward
    for pool in (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default):
        found[pool] = _avg_pool_backward
    found[aten.slice_backward.default] = _slice_backward
    return found


_WHOLE = {"silu", "mish", "hardswish", "hardsigmoid", "leaky_relu", "softplus", "_prelu_kernel"}
"""Activations that an evaluation graph holds as one operator."""


def evaluation_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of an evaluation graph: layers and activations that ONNX has stay as they are."""
    return {op: f for op, f in _core().items() if str(op).split(".")[1] not in _WHOLE}


def _with_mean(
    spread: Any, x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """`torch.var_mean` or `torch.std_mean`, apart."""
    return spread(x, dim, correction=correction, keepdim=keepdim), torch.mean(x, dim, keepdim)


def _taps(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], size: Sequence[int], first: int
) -> list[Tensor]:
    """For each tap of the kernel in row-major order, the entries of padded `x` that it reads; axes from `first`."""
    found = []
    for tap in product(*(range(k) for k in kernel)):
        part = x
        for axis, (t, s, d, n) in enumerate(zip(tap, stride, dilation, size, strict=True)):
            low = t * d
            part = aten.slice.Tensor(part, first + axis, low, low + (n - 1) * s + 1, s)
        found.append(part)
    return found


def _pad(x: Tensor, padding: Sequence[int], extra: Sequence[int], value: float) -> Tensor:
    """`x` with `padding` on both sides of its last axes and `extra` more at the end of each."""
    if not any(padding) and not any(extra):
        return x
    widths = [w for p, e in reversed(list(zip(padding, extra, strict=True))) for w in (p, p + e)]
    return functional.pad(x, widths, value=value)


def _apart(x: Tensor, axis: int, step: int) -> Tensor:
    """`x` with step - 1 zeros after each of its entries along `axis`."""
    if step == 1:
        return x
    shape = [*x.shape[:axis], x.shape[axis] * step, *x.shape[axis + 1 :]]
    return torch.stack([x] + [torch.zeros_like(x)] * (step - 1), axis + 1).reshape(shape)


def _slice_backward(grad: Tensor, sizes: Sequence[int], axis: int, start: int, end: int, step: int) -> Tensor:
    """`grad` on a zero field of shape `sizes`, at the places that the slice read."""
    axis %= len(sizes)
    size, field = sizes[axis], _apart(grad, axis, step)
    low = min(start + size if start < 0 else start, size)
    after = size - low - field.shape[axis]  # a negative width crops zeros only
    return functional.pad(field, [0, 0] * (grad.ndim - axis - 1) + [low, after])


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = x.ndim - 2
    stride, padding, dilation = per_axis(stride, dims), per_axis(padding, dims), per_axis(dilation, dims)
    grad_bias = grad.sum([0, *range(2, x.ndim)]) if mask[2] else None
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    if transposed:  # a convolution backwards: `x` and `grad` change places
        grad_x = aten.convolution.default(grad, weight, None, stride, padding, dilation, False, [0] * dims, groups)
        field = _pad(grad, padding, [0] * dims, 0.0)
        grad_weight = _weight_gradient(x, field, weight, stride, dilation, groups)
        return grad_x if mask[0] else None, grad_weight if mask[1] else None, grad_bias
    kernel, size_in, size_out = weight.shape[2:], x.shape[2:], grad.shape[2:]
    reach = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(size_out, stride, dilation, kernel, strict=True)]
    rest = [
        n + 2 * p - r for n, p, r in zip(size_in, padding, reach, strict=True)
    ]  # inputs that the last tap never reads
    if mask[0]:
        grad_x = aten.convolution.default(grad, weight, None, stride, padding, dilation, True, rest, groups)
    if mask[1]:
        grad_weight = _weight_gradient(grad, _pad(x, padding, [0] * dims, 0.0), weight, stride, dilation, groups)
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Sum over samples and positions of output gradient times input, one matrix product per kernel tap.

    `x` is padded. Channels go last, so a tap's input is a copy of long runs and the product sums over all samples
    and positions at once.
    """
    out, inner, *kernel = weight.shape
    size, channels = grad.shape[2:], x.shape[1]
    last = [0, *range(2, x.ndim), 1]
    if inner == 1 and groups == channels and out == channels:  # depthwise: no sum over channels
        axes = [0, *range(2, x.ndim)]
        parts = [(grad * t).sum(axes) for t in _taps(x, kernel, stride, dilation, size, 2)]
        return torch.stack(parts, -1).reshape(weight.shape)
    taps = _taps(x.permute(last), kernel, stride, dilation, size, 1)
    rows = grad.permute(last).reshape(-1, out)
    if groups > 1:
        by_group = rows.reshape(-1, groups, out // groups).permute(1, 2, 0)
        parts = [torch.bmm(by_group, t.reshape(-1, groups, inner).transpose(0, 1)) for t in taps]
        return torch.stack(parts, -1).reshape(weight.shape)
    if inner * len(taps) <= CONCAT_LIMIT:
        columns = torch.cat([t.reshape(-1, inner) for t in taps], 1)
        product_ = torch.mm(rows.t(), columns)
        return product_.reshape(out, len(taps), inner).transpose(1, 2).reshape(weight.shape)
    parts = [torch.mm(rows.t(), t.reshape(-1, inner)) for t in taps]
    return torch.stack(parts, -1).reshape(weight.shape)


def _spread(
    parts: Sequence[Tensor], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Gradient of the input of a pool from the gradient of each tap [n, c, ...]; the inverse of `_taps`, summed.

    Windows that tile the input are interleaved; others are placed on a zero field and added. `shape` is the padded
    input's, without samples and channels.
    """
    dims, made = len(kernel), parts[0].shape[2:]
    if list(kernel) == list(stride) and all(d == 1 or k == 1 for d, k in zip(dilation, kernel, strict=True)):
        for axis in range(dims - 1, -1, -1):  # join the taps of the last axis, then of the one before
            k, at = kernel[axis], axis + 2
            rows = [torch.stack(list(parts[i * k : (i + 1) * k]), at + 1) for i in range(len(parts) // k)]
            parts = [r.reshape(*r.shape[:at], r.shape[at] * k, *r.shape[at + 2 :]) for r in rows]
        rest = [n - m * k for n, m, k in zip(shape, made, kernel, strict=True)]
        return functional.pad(parts[0], [w for r in reversed(rest) for w in (0, r)])
    total = None
    for tap, part in zip(product(*(range(k) for k in kernel)), parts, strict=True):
        for axis, s in enumerate(stride):
            part = _apart(part, axis + 2, s)
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        ends = [n - low - m for n, low, m in zip(shape, starts, part.shape[2:], strict=True)]
        wide = [w for low, high in reversed(list(zip(starts, ends, strict=True))) for w in (low, high)]
        placed = functional.pad(part, wide)  # a negative width crops zeros only
        total = placed if total is None else total + placed
    assert total is not None
    return total


def _inner(field: Tensor, padding: Sequence[int], size: Sequence[int]) -> Tensor:
    """`field` without its padding."""
    for axis, (p, n) in enumerate(zip(padding, size, strict=True)):
        if field.shape[axis + 2] != n:
            field = aten.slice.Tensor(field, axis + 2, p, p + n)
    return field


def _max_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each window's gradient goes to its first maximum in row-major order, as in PyTorch."""
    dims, size, made = len(kernel), [int(n) for n in x.shape[2:]], [int(n) for n in grad.shape[2:]]
    kernel, padding, dilation = per_axis(kernel, dims), per_axis(padding, dims), per_axis(dilation, dims)
    stride = per_axis(stride, dims) if len(stride) else kernel
    pool = aten.max_pool2d_with_indices.default if dims == 2 else aten.max_pool3d_with_indices.default
    best = pool(x, kernel, stride, padding, dilation, ceil_mode)[0]
    extra = overhang(size, made, kernel, stride, padding, dilation)
    field = _pad(x, padding, extra, float("-inf"))
    free, parts = None, []
    for tap in _taps(field, kernel, stride, dilation, made, 2):
        hit = tap == best
        if free is None:
            free = torch.logical_not(hit)
        else:
            hit, free = torch.logical_and(hit, free), torch.logical_and(free, torch.logical_not(hit))
        parts.append(grad * hit.to(grad.dtype))
    return _inner(_spread(parts, kernel, stride, dilation, field.shape[2:]), padding, size)


def _avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    dims, size, made = len(kernel), [int(n) for n in x.shape[2:]], [int(n) for n in grad.shape[2:]]
    kernel, padding, ones = per_axis(kernel, dims), per_axis(padding, dims), [1] * dims
    stride = per_axis(stride, dims) if len(stride) else kernel
    counts = shares(size, made, kernel, stride, padding, count_include_pad, divisor_override)
    even = bool((counts == counts.flat[0]).all())
    share = grad / float(counts.flat[0]) if even else grad * torch.tensor((1 / counts).tolist(), dtype=grad.dtype)
    extra = overhang(size, made, kernel, stride, padding, ones)
    whole = [n + 2 * p + e for n, p, e in zip(size, padding, extra, strict=True)]
    return _inner(_spread([share] * prod(kernel), kernel, stride, ones, whole), padding, size)
