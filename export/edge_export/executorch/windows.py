"""Windows over space, pools and norms. See `operators`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.executorch.layout import Laid, transposed
from edge_export.executorch.values import Node, Operator, Value, pad, tensor, text


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], axis0: int
) -> list[Tensor]:
    """What each place of a window reads of a padded `x`, whose spatial axes start at `axis0`: slices of equal shape."""
    spatial = x.shape[axis0 : axis0 + len(kernel)]
    sizes = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]
    made = []
    for place in product(*map(range, kernel)):
        tap = x
        for axis, (i, s, d, n) in enumerate(zip(place, stride, dilation, sizes, strict=True), axis0):
            tap = tap[(slice(None),) * axis + (slice(i * d, i * d + (n - 1) * s + 1, s),)]
        made.append(tap)
    return made


def pads(node: Node, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Zeros before and after each spatial axis: [top, left, ..., bottom, right, ...]."""
    rank, auto = len(kernel), text(node.get("auto_pad", "NOTSET"))
    if auto == "VALID":
        return [0] * (2 * rank)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for size, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True):
            whole = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            small, large = whole // 2, whole - whole // 2
            before.append(small if auto == "SAME_UPPER" else large)
            after.append(large if auto == "SAME_UPPER" else small)
        return [*before, *after]
    return list(node.get("pads", [0] * (2 * rank)))


def channels_last(x: Value) -> Tensor:
    """`x` [n, c, ...] stored with its channels last."""
    return tensor(transposed(x if isinstance(x, Laid) else tensor(x), [0, *range(2, x.ndim), 1]))


def channels_first(x: Tensor) -> Laid:
    """A tensor stored with its channels last, read as [n, c, ...]."""
    return Laid(x, [0, x.ndim - 1, *range(1, x.ndim - 1)])


def _pool_shape(node: Node, x: Value) -> tuple[list[int], list[int], list[int], list[int]]:
    kernel = list(node.get("kernel_shape"))
    stride, dilation = node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))
    widths = pads(node, x, kernel, stride, dilation)
    if node.get("ceil_mode", 0):
        rank = len(kernel)
        for i, (n, k, s, d) in enumerate(zip(x.shape[2:], kernel, stride, dilation, strict=True)):
            room = n + widths[i] + widths[rank + i] - (k - 1) * d - 1
            whole = -(-room // s)
            if whole * s >= n + widths[i]:  # the last window must start inside the input or the left pad
                whole -= 1
            widths[rank + i] += max(whole * s - room, 0)
    return kernel, list(stride), list(dilation), widths


def max_pool(node: Node, x: Value) -> Value:
    if node.outputs > 1:
        raise node.refuse("the indices of its maxima as an output")
    kernel, stride, dilation, widths = _pool_shape(node, x)
    rank, symmetric = len(kernel), widths[: len(kernel)] == widths[len(kernel) :]
    small = all(2 * w <= k for w, k in zip(widths[:rank], kernel, strict=True))
    if not isinstance(x, Laid) and rank == 2 and symmetric and small:
        return functional.max_pool2d(x, kernel, stride, widths[:2], dilation)
    field = pad(channels_last(x), [*widths[:rank], 0, *widths[rank:], 0], float("-inf"))
    taps = windows(field, kernel, stride, dilation, 1)
    made = taps[0]
    for tap in taps[1:]:
        made = torch.maximum(made, tap)
    return channels_first(made)


def average_pool(node: Node, x: Value) -> Tensor:
    x = tensor(x)
    kernel, stride, dilation, widths = _pool_shape(node, x)
    counted = bool(node.get("count_include_pad", 0))
    if len(kernel) == 2 and not any(widths) and dilation == [1, 1]:
        return functional.avg_pool2d(x, kernel, stride)
    taps = windows(pad(x, widths), kernel, stride, dilation, 2)
    total = sum(taps[1:], taps[0])
    if counted and not node.get("ceil_mode", 0):
        return total * (1.0 / prod(kernel))
    ones = torch.ones(1, 1, *x.shape[2:])
    if counted:
        ones = pad(ones, node.get("pads", [0] * len(widths)), 1.0)
        widths = [w - v for w, v in zip(widths, node.get("pads", [0] * len(widths)), strict=True)]
    share = windows(pad(ones, widths), kernel, stride, dilation, 2)
    return total * (1.0 / sum(share[1:], share[0]))


def over_space(function: Callable[..., Tensor]) -> Operator:
    return lambda _, x: function(tensor(x), dim=list(range(2, tensor(x).ndim)), keepdim=True)


def across(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


def batch_norm(node: Node, x: Value, scale: Value, bias: Value, mean: Value, var: Value) -> Tensor:
    if node.get("training_mode", 0) or node.outputs > 1:
        raise node.refuse("training_mode=1")
    if all(node.fixed[1:]):  # which XNNPACK folds into the convolution before it
        m, v, w, b = (tensor(t) for t in (mean, var, scale, bias))
        return functional.batch_norm(tensor(x), m, v, w, b, False, 0.0, node.get("epsilon", 1e-5))
    inverse = tensor(scale) * torch.rsqrt(tensor(var) + node.get("epsilon", 1e-5))
    shift = tensor(bias) - tensor(mean) * inverse
    return tensor(x) * across(inverse, x) + across(shift, x)


def layer_norm(node: Node, x: Value, scale: Value, bias: Value = None) -> Value:
    x, axis = tensor(x), node.get("axis", -1)
    axes, eps = list(range(axis % x.ndim, x.ndim)), node.get("epsilon", 1e-5)
    if node.outputs == 1 and all(node.fixed[1:]):
        shape = x.shape[axes[0] :]
        return functional.layer_norm(x, shape, tensor(scale), None if bias is None else tensor(bias), eps)
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    made = centred * inverse * tensor(scale)
    return [made if bias is None else made + tensor(bias), mean, inverse]


def group_norm(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    x, groups = tensor(x), node.get("num_groups", tensor(scale).shape[0])
    rows = x.reshape(x.shape[0], groups, -1)
    mean = rows.mean(2, keepdim=True)
    centred = rows - mean
    made = centred * torch.rsqrt((centred * centred).mean(2, keepdim=True) + node.get("epsilon", 1e-5))
    return made.reshape(x.shape) * across(tensor(scale), x) + across(tensor(bias), x)
