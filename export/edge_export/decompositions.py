"""Backward operators that ONNX lacks, written as operators it has.

`train_graph` traces with this table, on fake tensors. It also holds batch-norm's training form, with PyTorch's
statistics. All other operators decompose by PyTorch's own core table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.nn import functional

from edge_client.errors import ModelError

aten = torch.ops.aten

CONCAT_LIMIT = 64  # up to so many weights per filter, one product over gathered columns beats one per kernel tap


def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of a training graph, by ATen operator."""
    found: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    for op in (aten.addmm.default, aten.mm.default, aten.t.default):
        found.pop(op, None)
    found[aten.convolution_backward.default] = _convolution_backward
    found[aten.max_pool2d_with_indices_backward.default] = _max_pool2d_backward
    found[aten.avg_pool2d_backward.default] = _avg_pool2d_backward
    found[aten._adaptive_avg_pool2d_backward.default] = _adaptive_avg_pool2d_backward
    found[aten._native_batch_norm_legit.default] = _batch_norm
    found[aten.native_batch_norm.default] = _batch_norm
    found[aten.native_batch_norm_backward.default] = _batch_norm_backward
    found[aten.threshold_backward.default] = _threshold_backward
    found[aten.slice_backward.default] = _slice_backward
    return found


def _threshold_backward(grad: Tensor, self: Tensor, threshold: float) -> Tensor:
    return grad * (self > threshold).to(grad.dtype)


def _pair(values: Sequence[int], dims: int) -> list[int]:
    """An operator's per-axis setting, which PyTorch may give as one number or leave empty."""
    return [int(values[i if len(values) > 1 else 0]) for i in range(dims)]


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
    if transposed:
        raise ModelError("a transposed convolution cannot be trained in ONNX; use an upsampling and a convolution")
    dims = x.ndim - 2
    stride, padding, dilation = _pair(stride, dims), _pair(padding, dims), _pair(dilation, dims)
    kernel, size_in, size_out = weight.shape[2:], x.shape[2:], grad.shape[2:]
    reach = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(size_out, stride, dilation, kernel, strict=True)]
    rest = [
        n + 2 * p - r for n, p, r in zip(size_in, padding, reach, strict=True)
    ]  # inputs that the last tap never reads
    grad_x = grad_weight = None
    if mask[0]:
        grad_x = aten.convolution.default(grad, weight, None, stride, padding, dilation, True, rest, groups)
    if mask[1]:
        grad_weight = _weight_gradient(grad, _pad(x, padding, [0] * dims, 0.0), weight, stride, dilation, groups)
    grad_bias = grad.sum([0, *range(2, x.ndim)]) if mask[2] else None
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


def _spread(parts: Sequence[Tensor], kernel: Sequence[int], stride: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Gradient of the input of a pool from the gradient of each tap [n, c, h, w]; the inverse of `_taps`, summed.

    Windows that tile the input are interleaved; others are placed on a zero field and added. `shape` is the padded
    input's (h, w).
    """
    (kh, kw), (sh, sw) = kernel, stride
    n, c, h, w = parts[0].shape
    if (kh, kw) == (sh, sw):
        lines = [torch.stack(list(parts[i * kw : (i + 1) * kw]), -1).reshape(n, c, h, w * kw) for i in range(kh)]
        field = torch.stack(lines, 3).reshape(n, c, h * kh, w * kw)
        return functional.pad(field, [0, shape[1] - w * kw, 0, shape[0] - h * kh])
    total = None
    for (i, j), part in zip(product(range(kh), range(kw)), parts, strict=True):
        part = _apart(_apart(part, 3, sw), 2, sh)
        wide = [j, shape[1] - j - part.shape[3], i, shape[0] - i - part.shape[2]]  # a negative width crops zeros only
        placed = functional.pad(part, wide)
        total = placed if total is None else total + placed
    assert total is not None
    return total


def _max_pool2d_backward(
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
    kernel, padding, dilation = _pair(kernel, 2), _pair(padding, 2), _pair(dilation, 2)
    stride = _pair(stride, 2) if len(stride) else kernel
    if ceil_mode or dilation != [1, 1]:
        raise ModelError("a max-pool with ceil_mode or dilation cannot be trained in ONNX; pad the input instead")
    best = aten.max_pool2d_with_indices.default(x, kernel, stride, padding)[0]
    field = _pad(x, padding, [0, 0], float("-inf"))
    free, parts = None, []
    for tap in _taps(field, kernel, stride, dilation, grad.shape[2:], 2):
        hit = tap == best
        if free is None:
            free = torch.logical_not(hit)
        else:
            hit, free = torch.logical_and(hit, free), torch.logical_and(free, torch.logical_not(hit))
        parts.append(grad * hit.to(grad.dtype))
    spread = _spread(parts, kernel, stride, field.shape[2:])
    (ph, pw), (h, w) = padding, x.shape[2:]
    return spread[:, :, ph : ph + h, pw : pw + w] if ph or pw else spread


def _avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    kernel, padding = _pair(kernel, 2), _pair(padding, 2)
    stride = _pair(stride, 2) if len(stride) else kernel
    if ceil_mode or (any(padding) and not count_include_pad):
        raise ModelError("an average pool with ceil_mode or count_include_pad=False cannot be trained in ONNX")
    share = grad / float(divisor_override or kernel[0] * kernel[1])
    (ph, pw), (h, w) = padding, x.shape[2:]
    spread = _spread([share] * (kernel[0] * kernel[1]), kernel, stride, (h + 2 * ph, w + 2 * pw))
    return spread[:, :, ph : ph + h, pw : pw + w] if ph or pw else spread


def _adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    size, made = [int(n) for n in x.shape[2:]], [int(n) for n in grad.shape[2:]]
    if any(n % k for n, k in zip(size, made, strict=True)):
        raise ModelError(
            f"adaptive average pooling of {size} to {made} has windows of unequal size and cannot be trained in ONNX; "
            "choose an output size that divides the input's"
        )
    kernel = [n // k for n, k in zip(size, made, strict=True)]
    return _spread([grad / float(kernel[0] * kernel[1])] * (kernel[0] * kernel[1]), kernel, kernel, size)


def _across(values: Tensor, like: Tensor) -> Tensor:
    """Per-channel `values` [c] shaped to broadcast over `like` [n, c, ...]."""
    return values.reshape([1, -1, *[1] * (like.ndim - 2)])


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch statistics (biased variance) normalise; the running variance takes the unbiased one, as in PyTorch.

    One value per channel has no unbiased variance: the running variance then stays as it is.
    """
    if not training or running_mean is None:
        raise ModelError("batch-norm must train with running statistics; set track_running_stats=True")
    axes = [0, *range(2, x.ndim)]
    mean = x.mean(axes)
    centred = x - _across(mean, x)
    var = (centred * centred).mean(axes)
    inverse = torch.rsqrt(var + eps)
    count = x.numel() / x.shape[1]
    running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
    more: Any = torch.sym_max(x.numel() // x.shape[1] - 1, 1)  # type: ignore[no-untyped-call]  # 1 for one value
    blend = momentum * (count - 1) / more  # momentum; 0 for a single value
    running_var.copy_(running_var * (1 - blend) + var * (blend * count / more))
    out = centred * _across(inverse if weight is None else inverse * weight, x)
    return (out if bias is None else out + _across(bias, x)), mean, inverse


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    axes = [0, *range(2, x.ndim)]
    centred = x - _across(mean, x)
    grad_sum = grad.sum(axes)
    moment = (grad * centred).sum(axes)
    count = x.numel() / x.shape[1]
    scale = inverse if weight is None else inverse * weight
    slope = moment * inverse * inverse / count
    grad_x = (grad - _across(grad_sum / count, x) - centred * _across(slope, x)) * _across(scale, x)
    return grad_x, moment * inverse if mask[1] else None, grad_sum if mask[2] else None
