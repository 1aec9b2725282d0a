"""ONNX operators as PyTorch functions: one table, from an operator's name to what computes it.

A function is given the node's settings and its inputs. Inputs are tensors, or numpy arrays for what is known while
tracing: constants and sizes, a size that depends on the batch being a `torch.SymInt` in an array of objects. `host`
and `tensor` turn one into the other. What the table lacks is refused by name; it has what this project's exporter
writes into `eval.onnx` and `train.onnx` and what PyTorch's exporter writes for common networks.

The forms are those that ExecuTorch computes fast and right: a product is `linear`, which its XNNPACK delegate takes
with weights that are inputs, and a pad never has a negative width, on which its kernel fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional

from edge_client.errors import ModelError
from edge_export.executorch.layout import (
    Laid,
    common,
    laid,
    merged,
    permuted,
    reduced,
    settled,
    transposed,
    unsqueezed,
)

Host = NDArray[Any]
Value = Any  # Tensor | Laid | Host | None for an input that is left out

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.BOOL: torch.bool,
}


@dataclass(frozen=True)
class Node:
    """One operator: its type, its settings by name, how many outputs are read, and which inputs are constants."""

    kind: str
    settings: dict[str, Any]
    outputs: int
    fixed: tuple[bool, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or `default` where the file leaves it out."""
        return self.settings.get(name, default)

    def refuse(self, what: str) -> ModelError:
        """The error for a form of this operator that is not supported."""
        return ModelError(f"operator {self.kind} with {what} cannot be lowered to ExecuTorch; write the layer otherwise")


Operator = Callable[..., Value]


def host(value: Value) -> list[Any]:
    """The numbers of an input that must be known while tracing."""
    if isinstance(value, Tensor | Laid):
        raise ModelError("a shape or an axis depends on the values of the input, so it has no ExecuTorch form")
    return list(np.asarray(value).reshape(-1).tolist())


def tensor(value: Value) -> Tensor:
    """`value` as a tensor; an array of sizes becomes int64."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Laid):
        return value.tensor()
    array = np.asarray(value)
    if array.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(array))
    flat = [torch.scalar_tensor(v, dtype=torch.int64) for v in array.reshape(-1)]
    return torch.stack(flat).reshape(array.shape)


def operand(value: Value) -> Any:
    """`value` as an operand of arithmetic: one float becomes a Python number, which costs no tensor."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype != object:
        return value.item()
    return value if isinstance(value, Laid) else tensor(value)


# --- arithmetic


def binary(function: Callable[[Any, Any], Any]) -> Operator:
    """An elementwise operator of two inputs, on the host when both are known."""

    def run(_: Node, a: Value, b: Value) -> Value:
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return np.asarray(function(a, b))
        operands = [operand(a), operand(b)]
        if not isinstance(operands[0], Tensor | Laid):
            operands[0] = tensor(a)
        (left, right), order = common(*operands)
        made = function(left, right)
        return made if order is None else Laid(made, order)

    return run


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return a // b if a.dtype.kind in "iO" else a / b
    whole = not a.is_floating_point()
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def unary(function: Callable[[Tensor], Tensor]) -> Operator:
    """An elementwise operator of one input."""
    return lambda _, x: over(x, function)


def over(x: Value, function: Callable[[Tensor], Tensor]) -> Value:
    """An elementwise function of one tensor, whatever the order of its axes."""
    return x.with_base(function(x.base)) if isinstance(x, Laid) else function(tensor(x))


def _extreme(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(_: Node, *values: Value) -> Value:
        operands, order = common(*(v if isinstance(v, Laid) else tensor(v) for v in values))
        made = operands[0]
        for other in operands[1:]:
            made = function(made, other)
        return made if order is None else Laid(made, order)

    return run


def _clip(_: Node, x: Value, low: Value = None, high: Value = None) -> Value:
    bounds = [None if v is None else host(v)[0] for v in (low, high)]
    return over(x, lambda t: torch.clamp(t, bounds[0], bounds[1]))


def _cast(node: Node, x: Value) -> Value:
    dtype = DTYPES.get(node.get("to"))
    if dtype is None:
        raise node.refuse(f"to={node.get('to')}")
    if isinstance(x, np.ndarray):
        if x.dtype == object:
            return x if dtype in (torch.int64, torch.int32) else tensor(x).to(dtype)
        return x.astype(torch.empty(0, dtype=dtype).numpy().dtype)
    return over(x, lambda t: t.to(dtype))


def _where(_: Node, condition: Value, a: Value, b: Value) -> Value:
    operands, order = common(*(v if isinstance(v, Laid) else tensor(v) for v in (condition, a, b)))
    made = torch.where(*operands)
    return made if order is None else Laid(made, order)


def _gelu(node: Node, x: Value) -> Tensor:
    return functional.gelu(tensor(x), approximate=_text(node.get("approximate", "none")))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _prelu(_: Node, x: Value, slope: Value) -> Tensor:
    x = tensor(x)
    return torch.clamp(x, min=0.0) + tensor(slope) * torch.clamp(x, max=0.0)


def _hard_sigmoid(node: Node, x: Value) -> Tensor:
    return torch.clamp(tensor(x) * node.get("alpha", 0.2) + node.get("beta", 0.5), 0.0, 1.0)


def _selu(node: Node, x: Value) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return gamma * functional.elu(tensor(x), alpha)


def _softplus(_: Node, x: Value) -> Tensor:
    x = tensor(x)
    return torch.relu(x) + torch.log1p(torch.exp(-torch.abs(x)))


# --- products


def product_of(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] as a batch of one: the form that is delegated without a transpose of `b`."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).reshape(a.shape[0], b.shape[1])


def _gemm(node: Node, a: Value, b: Value, c: Value = None) -> Tensor:
    a, b, c = tensor(a), tensor(b), None if c is None else tensor(c)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = permuted(a, (1, 0)) if node.get("transA", 0) else a
    c = c if c is None or beta == 1.0 else c * beta
    fits = c is not None and c.ndim == 1 and alpha == 1.0
    if node.get("transB", 0):
        made = functional.linear(a, b, c if fits else None)
    elif node.fixed[1:2] == (True,):
        made = functional.linear(a, b.t(), c if fits else None)
    else:
        made, fits = product_of(a, b), False
    made = made if alpha == 1.0 else made * alpha
    return made if fits or c is None else made + c


def _matmul(node: Node, a: Value, b: Value) -> Tensor:
    a, b = tensor(a), tensor(b)
    if b.ndim == 2 and a.ndim >= 2:
        if node.fixed[1:2] == (True,):
            return functional.linear(a, b.t())
        return product_of(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    if min(a.ndim, b.ndim) < 2:
        return torch.matmul(a, b)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    return torch.bmm(left, right).reshape(*lead, a.shape[-2], b.shape[-1])


def _pads(node: Node, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Zeros before and after each spatial axis: [top, left, ..., bottom, right, ...]."""
    rank, auto = len(kernel), _text(node.get("auto_pad", "NOTSET"))
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


def pad(x: Tensor, widths: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` with `widths` [before..., after...] of its last axes; a negative width cuts off."""
    rank = len(widths) // 2
    for i in range(rank):
        before, after = widths[i], widths[rank + i]
        axis = x.ndim - rank + i
        if before < 0 or after < 0:
            x = x.narrow(axis, max(-before, 0), x.shape[axis] - max(-before, 0) - max(-after, 0))
    flat = [max(w, 0) for i in reversed(range(rank)) for w in (widths[i], widths[rank + i])]
    return functional.pad(x, flat, value=value) if any(flat) else x


def _last(x: Value) -> Tensor:
    """`x` [n, c, ...] stored with its channels last."""
    return tensor(transposed(x if isinstance(x, Laid) else tensor(x), [0, *range(2, x.ndim), 1]))


def _first(x: Tensor) -> Laid:
    """A tensor stored with its channels last, read as [n, c, ...]."""
    return Laid(x, [0, x.ndim - 1, *range(1, x.ndim - 1)])


def _product_conv(
    x: Value, weight: Tensor, stride: Sequence[int], widths: Sequence[int], dilation: Sequence[int], groups: int
) -> Laid:
    """A convolution whose weights [out, inner, ...] are inputs: windows side by side, then one product."""
    field = pad(_last(x), [*widths[: len(stride)], 0, *widths[len(stride) :], 0])
    out, inner = weight.shape[:2]
    taps = _windows(field, weight.shape[2:], stride, dilation, 1)
    if inner == 1 and groups == out:  # depthwise: no sum over channels
        factors = weight.reshape(out, len(taps)).t()
        made = taps[0] * factors[0]
        for i, tap in enumerate(taps[1:], 1):
            made = made + tap * factors[i]
        return _first(made)
    rows = permuted(weight, [0, *range(2, weight.ndim), 1]).reshape(out, -1)
    each = out // groups
    parts = []
    for g in range(groups):
        own = taps if groups == 1 else [t[..., g * inner : (g + 1) * inner] for t in taps]
        columns = torch.cat(own, -1) if len(own) > 1 else own[0]
        parts.append(functional.linear(columns, rows[g * each : (g + 1) * each] if groups > 1 else rows))
    return _first(torch.cat(parts, -1) if groups > 1 else parts[0])


def _shifted(made: Value, bias: Value) -> Value:
    if bias is None:
        return made
    if isinstance(made, Laid):  # channels last, as `_first` has them
        return made.with_base(made.base + tensor(bias))
    return made + tensor(bias).reshape(-1, *[1] * (made.ndim - 2))


def _conv(node: Node, x: Value, weight: Value, bias: Value = None) -> Value:
    if node.fixed[1:2] != (True,):
        kernel = tensor(weight).shape[2:]
        stride, dilation = node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))
        widths = _pads(node, x, kernel, stride, dilation)
        return _shifted(_product_conv(x, tensor(weight), stride, widths, dilation, node.get("group", 1)), bias)
    x, weight = tensor(x), tensor(weight)
    rank = x.ndim - 2
    stride, dilation = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    widths = _pads(node, x, weight.shape[2:], stride, dilation)
    if widths[:rank] != widths[rank:]:
        x, widths = pad(x, widths), [0] * (2 * rank)
    run = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return run(x, weight, None if bias is None else tensor(bias), stride, widths[:rank], dilation, node.get("group", 1))


def _apart(x: Tensor, axis: int, step: int) -> Tensor:
    """`x` with ``step - 1`` zeros between its entries along `axis`."""
    if step == 1:
        return x
    wide = functional.pad(x.unsqueeze(axis + 1), [0, 0] * (x.ndim - axis - 1) + [0, step - 1])
    n = x.shape[axis]
    return wide.reshape(*x.shape[:axis], n * step, *x.shape[axis + 1 :]).narrow(axis, 0, (n - 1) * step + 1)


def _conv_transpose(node: Node, x: Value, weight: Value, bias: Value = None) -> Value:
    weight = tensor(weight)
    rank = weight.ndim - 2
    stride, dilation = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    if _text(node.get("auto_pad", "NOTSET")) != "NOTSET" or node.get("output_shape") is not None:
        raise node.refuse("output_shape or auto_pad")
    widths, extra = node.get("pads", [0] * (2 * rank)), node.get("output_padding", [0] * rank)
    if node.fixed[1:2] != (True,):
        field, groups = _last(x), node.get("group", 1)
        for axis, step in enumerate(stride, 1):
            field = _apart(field, axis, step)
        inner, out = weight.shape[0] // groups, weight.shape[1]
        turned = weight.flip(list(range(2, weight.ndim)))
        turned = turned.reshape(groups, inner, out, *weight.shape[2:]).transpose(1, 2)
        turned = turned.reshape(groups * out, inner, *weight.shape[2:])
        reach = [(k - 1) * d for k, d in zip(weight.shape[2:], dilation, strict=True)]
        before = [r - w for r, w in zip(reach, widths[:rank], strict=True)]
        after = [r - w + e for r, w, e in zip(reach, widths[rank:], extra, strict=True)]
        return _shifted(_product_conv(_first(field), turned, [1] * rank, [*before, *after], dilation, groups), bias)
    x = tensor(x)
    run = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    made = run(x, weight, None, stride, 0, 0, node.get("group", 1), dilation)
    wide = [-w for w in widths[:rank]] + [e - w for e, w in zip(extra, widths[rank:], strict=True)]
    made = pad(made, wide)
    return made if bias is None else made + tensor(bias).reshape(-1, *[1] * rank)


# --- pools and norms


def _windows(
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


def _pool_shape(node: Node, x: Value) -> tuple[list[int], list[int], list[int], list[int]]:
    kernel = list(node.get("kernel_shape"))
    stride, dilation = node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))
    widths = _pads(node, x, kernel, stride, dilation)
    if node.get("ceil_mode", 0):
        rank = len(kernel)
        for i, (n, k, s, d) in enumerate(zip(x.shape[2:], kernel, stride, dilation, strict=True)):
            room = n + widths[i] + widths[rank + i] - (k - 1) * d - 1
            whole = -(-room // s)
            if whole * s >= n + widths[i]:  # the last window must start inside the input or the left pad
                whole -= 1
            widths[rank + i] += max(whole * s - room, 0)
    return kernel, list(stride), list(dilation), widths


def _max_pool(node: Node, x: Value) -> Value:
    if node.outputs > 1:
        raise node.refuse("the indices of its maxima as an output")
    kernel, stride, dilation, widths = _pool_shape(node, x)
    rank, symmetric = len(kernel), widths[: len(kernel)] == widths[len(kernel) :]
    small = all(2 * w <= k for w, k in zip(widths[:rank], kernel, strict=True))
    if not isinstance(x, Laid) and rank == 2 and symmetric and small:
        return functional.max_pool2d(x, kernel, stride, widths[:2], dilation)
    field = pad(_last(x), [*widths[:rank], 0, *widths[rank:], 0], float("-inf"))
    taps = _windows(field, kernel, stride, dilation, 1)
    made = taps[0]
    for tap in taps[1:]:
        made = torch.maximum(made, tap)
    return _first(made)


def _average_pool(node: Node, x: Value) -> Tensor:
    x = tensor(x)
    kernel, stride, dilation, widths = _pool_shape(node, x)
    counted = bool(node.get("count_include_pad", 0))
    if len(kernel) == 2 and not any(widths) and dilation == [1, 1]:
        return functional.avg_pool2d(x, kernel, stride)
    taps = _windows(pad(x, widths), kernel, stride, dilation, 2)
    total = sum(taps[1:], taps[0])
    if counted and not node.get("ceil_mode", 0):
        return total * (1.0 / prod(kernel))
    ones = torch.ones(1, 1, *x.shape[2:])
    if counted:
        ones = pad(ones, node.get("pads", [0] * len(widths)), 1.0)
        widths = [w - v for w, v in zip(widths, node.get("pads", [0] * len(widths)), strict=True)]
    share = _windows(pad(ones, widths), kernel, stride, dilation, 2)
    return total * (1.0 / sum(share[1:], share[0]))


def _global(function: Callable[..., Tensor]) -> Operator:
    return lambda _, x: function(tensor(x), dim=list(range(2, tensor(x).ndim)), keepdim=True)


def _across(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


def _batch_norm(node: Node, x: Value, scale: Value, bias: Value, mean: Value, var: Value) -> Tensor:
    if node.get("training_mode", 0) or node.outputs > 1:
        raise node.refuse("training_mode=1")
    if all(node.fixed[1:]):  # which XNNPACK folds into the convolution before it
        norm = [tensor(v) for v in (mean, var, scale, bias)]
        return functional.batch_norm(tensor(x), *norm, False, 0.0, node.get("epsilon", 1e-5))
    inverse = tensor(scale) * torch.rsqrt(tensor(var) + node.get("epsilon", 1e-5))
    shift = tensor(bias) - tensor(mean) * inverse
    return tensor(x) * _across(inverse, x) + _across(shift, x)


def _layer_norm(node: Node, x: Value, scale: Value, bias: Value = None) -> Value:
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


def _group_norm(node: Node, x: Value, scale: Value, bias: Value) -> Tensor:
    x, groups = tensor(x), node.get("num_groups", tensor(scale).shape[0])
    rows = x.reshape(x.shape[0], groups, -1)
    mean = rows.mean(2, keepdim=True)
    centred = rows - mean
    made = centred * torch.rsqrt((centred * centred).mean(2, keepdim=True) + node.get("epsilon", 1e-5))
    return made.reshape(x.shape) * _across(tensor(scale), x) + _across(tensor(bias), x)


def _softmax(function: Callable[..., Tensor]) -> Operator:
    return lambda node, x: function(tensor(x), dim=node.get("axis", -1))


def _reduce(function: Callable[..., Any]) -> Operator:
    def run(node: Node, x: Value, axes: Value = None) -> Value:
        named = node.get("axes") if axes is None else host(axes)
        keep = bool(node.get("keepdims", 1))
        if isinstance(x, np.ndarray) and function is torch.prod:
            return np.asarray(np.prod(x), dtype=x.dtype).reshape([1] * x.ndim if keep else [])
        if not named and node.get("noop_with_empty_axes", 0):
            return x
        x = x if isinstance(x, Laid) else tensor(x)
        over_axes = [a % x.ndim for a in named or range(x.ndim)]
        if not isinstance(x, Laid):
            return function(x, dim=sorted(over_axes), keepdim=keep)
        made = function(x.base, dim=sorted(x.order[a] for a in over_axes), keepdim=keep)
        return x.with_base(made) if keep else settled(Laid(made, reduced(x.order, over_axes)))

    return run


def _sum_square(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x * x, dim=dim, keepdim=keepdim)


def _l2(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.sqrt(_sum_square(x, dim, keepdim))


# --- movements


def _reshape(node: Node, x: Value, shape: Value) -> Value:
    wanted = host(shape)
    if isinstance(x, np.ndarray):
        return x.reshape([int(n) for n in wanted])
    if not node.get("allowzero", 0):
        wanted = [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(wanted)]
    if isinstance(x, Laid):
        made = merged(x, wanted)
        if made is not None:
            return made
    return tensor(x).reshape(wanted)


def _flatten(node: Node, x: Value) -> Tensor:
    x = tensor(x)
    axis = node.get("axis", 1) % (x.ndim + 1)
    if axis == 1:
        return x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def _transpose(node: Node, x: Value) -> Value:
    perm = node.get("perm", list(reversed(range(x.ndim))))
    return x.transpose(perm) if isinstance(x, np.ndarray) else transposed(x, perm)


def _squeeze(node: Node, x: Value, axes: Value = None) -> Value:
    named = node.get("axes") if axes is None else host(axes)
    if isinstance(x, np.ndarray):
        return np.squeeze(x, None if named is None else tuple(named))
    x = tensor(x)
    gone = [a % x.ndim for a in named] if named else [a for a, n in enumerate(x.shape) if n == 1]
    return x.reshape([n for a, n in enumerate(x.shape) if a not in gone])


def _unsqueeze(node: Node, x: Value, axes: Value = None) -> Value:
    named = node.get("axes") if axes is None else host(axes)
    if isinstance(x, np.ndarray):
        return np.expand_dims(x, tuple(named))
    rank = x.ndim + len(named)
    for axis in sorted(a % rank for a in named):
        x = unsqueezed(x, axis)
    return x


def _concat(node: Node, *parts: Value) -> Value:
    axis = node.get("axis", 0)
    if all(isinstance(p, np.ndarray) for p in parts):
        return np.concatenate(parts, axis)
    if len(parts) == 1:
        return parts[0]
    first = laid(parts[0] if isinstance(parts[0], Laid) else tensor(parts[0]))
    if all(isinstance(p, Laid) and p.order == first.order for p in parts):
        return first.with_base(torch.cat([p.base for p in parts], first.order[axis]))
    return torch.cat([tensor(p) for p in parts], axis)


def _split(node: Node, x: Value, sizes: Value = None) -> list[Value]:
    axis = node.get("axis", 0)
    length = x.shape[axis]
    if sizes is not None:
        lengths = host(sizes)
    elif node.get("split") is not None:
        lengths = list(node.get("split"))
    else:
        count = node.get("num_outputs", node.outputs)
        each = -(-length // count)
        lengths = [each] * (count - 1) + [length - each * (count - 1)]
    if isinstance(x, np.ndarray):
        return list(np.split(x, np.cumsum(lengths)[:-1], axis))
    starts, x = np.cumsum([0, *lengths]), tensor(x)
    return [x.narrow(axis, int(a), int(n)) for a, n in zip(starts, lengths, strict=False)]


def _slice(node: Node, x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    low, high = host(starts), host(ends)
    named = list(range(len(low))) if axes is None else host(axes)
    by = [1] * len(low) if steps is None else host(steps)
    if isinstance(x, np.ndarray):
        cut = [slice(None)] * x.ndim
        for axis, a, b, s in zip(named, low, high, by, strict=True):
            cut[axis] = slice(a, b, s)
        return x[tuple(cut)]
    x = laid(x)
    base = x.base
    for axis, a, b, s in zip(named, low, high, by, strict=True):
        at = x.order[axis % x.ndim]
        if isinstance(s, int) and s < 0:
            if s != -1 or not (a == -1 or a >= base.shape[at] - 1) or b > -base.shape[at] - 1:
                raise node.refuse(f"step {s}")
            base = base.flip([at])
        else:
            base = base[(slice(None),) * at + (slice(a, b, s),)]
    return settled(x.with_base(base))


def _gather(node: Node, x: Value, index: Value) -> Value:
    axis = node.get("axis", 0)
    if isinstance(x, np.ndarray) and isinstance(index, np.ndarray):
        return np.asarray(np.take(x, index.astype(np.int64), axis))
    x = tensor(x)
    axis %= x.ndim
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, int(index))
    places = tensor(index).to(torch.int64)
    if isinstance(index, np.ndarray):
        places = torch.from_numpy(np.where(index < 0, index + x.shape[axis], index).astype(np.int64))
    if axis == 0 and x.ndim == 2:
        return functional.embedding(places, x)
    made = torch.index_select(x, axis, places.reshape(-1))
    return made.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _gather_elements(node: Node, x: Value, index: Value) -> Tensor:
    return torch.gather(tensor(x), node.get("axis", 0), tensor(index).to(torch.int64))


def _scatter_elements(node: Node, x: Value, index: Value, updates: Value) -> Tensor:
    how, axis = _text(node.get("reduction", "none")), node.get("axis", 0)
    if how not in ("none", "add"):
        raise node.refuse(f"reduction={how}")
    x, places, values = tensor(x), tensor(index).to(torch.int64), tensor(updates)
    return x.scatter_add(axis, places, values) if how == "add" else x.scatter(axis, places, values)


def _scatter_nd(node: Node, x: Value, index: Value, updates: Value) -> Tensor:
    x, places, values = tensor(x), tensor(index).to(torch.int64), tensor(updates)
    if _text(node.get("reduction", "none")) != "add" or (isinstance(places.shape[-1], int) and places.shape[-1] != 1):
        raise node.refuse("another reduction than the sum of rows")
    rows = values.reshape(-1, *x.shape[1:])
    spread = places.reshape(-1, *[1] * (x.ndim - 1)).expand_as(rows)
    return x.scatter_add(0, spread, rows)


def _expand(_: Node, x: Value, shape: Value) -> Tensor:
    wanted, x = host(shape), tensor(x)
    missing = len(wanted) - x.ndim
    sizes = [
        x.shape[i - missing] if i >= missing and isinstance(n, int) and n == 1 else n for i, n in enumerate(wanted)
    ]
    return x.expand([*x.shape[: max(-missing, 0)], *sizes])


def _tile(_: Node, x: Value, repeats: Value) -> Tensor:
    return tensor(x).repeat(host(repeats))


def _pad(node: Node, x: Value, widths: Value, value: Value = None, axes: Value = None) -> Tensor:
    mode, given = _text(node.get("mode", "constant")), host(widths)
    named = list(range(x.ndim)) if axes is None else [a % x.ndim for a in host(axes)]
    half = len(given) // 2
    pairs = {a: (given[i], given[half + i]) for i, a in enumerate(named)}
    if mode == "constant":
        x = laid(x)
        both = [pairs.get(x.order.index(a), (0, 0)) for a in range(x.ndim)]
        fill = 0.0 if value is None else float(host(value)[0])
        return settled(x.with_base(pad(x.base, [b for b, _ in both] + [a for _, a in both], fill)))
    x = tensor(x)
    for axis, (before, after) in pairs.items():
        n = x.shape[axis]
        if before < 0 or after < 0:
            raise node.refuse("a negative width")
        if before or after:
            if mode == "edge":
                first, last = x.narrow(axis, 0, 1), x.narrow(axis, n - 1, 1)
                left, right = [first] * before, [last] * after
            elif mode == "reflect":
                left = [x.narrow(axis, i, 1) for i in range(before, 0, -1)]
                right = [x.narrow(axis, n - 2 - i, 1) for i in range(after)]
            elif mode == "wrap":
                left = [x.narrow(axis, n - before, before)] if before else []
                right = [x.narrow(axis, 0, after)] if after else []
            else:
                raise node.refuse(f"mode={mode}")
            x = torch.cat([*left, x, *right], axis)
    return x


def _resize(node: Node, x: Value, _: Value = None, scales: Value = None, sizes: Value = None) -> Tensor:
    x, mode = tensor(x), _text(node.get("mode", "nearest"))
    rank = x.ndim - 2
    factors = host(scales) if scales is not None and np.asarray(scales).size else None
    wanted = [int(f * n) for f, n in zip(factors[2:], x.shape[2:], strict=True)] if factors else host(sizes)[2:]
    how = _text(node.get("coordinate_transformation_mode", "half_pixel"))
    if mode == "nearest":
        if any(w % n for w, n in zip(wanted, x.shape[2:], strict=True)):
            raise node.refuse(f"nearest from {list(x.shape[2:])} to {wanted}")
        for axis, (w, n) in enumerate(zip(wanted, list(x.shape[2:]), strict=True), 2):
            x = x.repeat_interleave(w // n, axis) if w != n else x
        return x
    if mode == "linear" and rank == 2 and how in ("align_corners", "half_pixel", "pytorch_half_pixel"):
        return functional.interpolate(x, size=wanted, mode="bilinear", align_corners=how == "align_corners")
    raise node.refuse(f"mode={mode}, {how} on {rank} axes")


def _depth_to_space(node: Node, x: Value) -> Tensor:
    x, by = tensor(x), node.get("blocksize")
    n, c, h, w = x.shape
    if _text(node.get("mode", "DCR")) == "CRD":
        return x.reshape(n, c // by**2, by, by, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // by**2, h * by, w * by)
    return x.reshape(n, by, by, c // by**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // by**2, h * by, w * by)


def _space_to_depth(node: Node, x: Value) -> Tensor:
    x, by = tensor(x), node.get("blocksize")
    n, c, h, w = x.shape
    return x.reshape(n, c, h // by, by, w // by, by).permute(0, 3, 5, 1, 2, 4).reshape(n, c * by**2, h // by, w // by)


def _shape(node: Node, x: Value) -> Host:
    sizes = list(x.shape)[node.get("start", 0) : node.get("end")]
    return np.array(sizes, dtype=np.int64 if all(isinstance(n, int) for n in sizes) else object)


def _constant_of_shape(node: Node, shape: Value) -> Tensor:
    from onnx import numpy_helper

    stored = node.get("value")
    fill = numpy_helper.to_array(stored).reshape(-1) if stored is not None else np.zeros(1, np.float32)
    return torch.full(host(shape), fill[0].item(), dtype=torch.from_numpy(fill).dtype)


def _range(_: Node, start: Value, end: Value, step: Value) -> Value:
    (a,), (b,), (s,) = host(start), host(end), host(step)
    if all(isinstance(v, int | float) for v in (a, b, s)):
        return np.arange(a, b, s)
    return torch.arange(a, b, s)


def _one_hot(node: Node, index: Value, depth: Value, values: Value) -> Tensor:
    (size,), (off, on) = host(depth), host(values)
    axis = node.get("axis", -1)
    places = tensor(index).unsqueeze(axis)
    shape = [1] * places.ndim
    shape[axis] = size
    hit = places == torch.arange(size).reshape(shape)
    return torch.where(hit, torch.scalar_tensor(on), torch.scalar_tensor(off))


def _trilu(node: Node, x: Value, k: Value = None) -> Tensor:
    shift = 0 if k is None else host(k)[0]
    return torch.triu(tensor(x), shift) if node.get("upper", 1) else torch.tril(tensor(x), shift)


def _identity(_: Node, x: Value) -> Value:
    return x


def _not(_: Node, x: Value) -> Value:
    return over(x, torch.logical_not)


TABLE: dict[str, Operator] = {
    "Abs": unary(torch.abs),
    "Add": binary(lambda a, b: a + b),
    "And": binary(lambda a, b: a & b),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Ceil": unary(torch.ceil),
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cos": unary(torch.cos),
    "DepthToSpace": _depth_to_space,
    "Div": binary(_divide),
    "Elu": lambda node, x: functional.elu(tensor(x), node.get("alpha", 1.0)),
    "Equal": binary(lambda a, b: a == b),
    "Erf": unary(torch.erf),
    "Exp": unary(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": unary(torch.floor),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "Greater": binary(lambda a, b: a > b),
    "GreaterOrEqual": binary(lambda a, b: a >= b),
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": unary(lambda x: x * torch.clamp(x * (1.0 / 6.0) + 0.5, 0.0, 1.0)),
    "Identity": _identity,
    "InstanceNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda node, x: over(x, lambda t: functional.leaky_relu(t, node.get("alpha", 0.01))),
    "Less": binary(lambda a, b: a < b),
    "LessOrEqual": binary(lambda a, b: a <= b),
    "Log": unary(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _matmul,
    "Max": _extreme(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _extreme(torch.minimum),
    "Mul": binary(lambda a, b: a * b),
    "Neg": unary(torch.neg),
    "Not": _not,
    "OneHot": _one_hot,
    "Or": binary(lambda a, b: a | b),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": binary(lambda a, b: a**b),
    "Range": _range,
    "Reciprocal": unary(torch.reciprocal),
    "ReduceL2": _reduce(_l2),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceProd": _reduce(torch.prod),
    "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(_sum_square),
    "Relu": unary(torch.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Selu": _selu,
    "Shape": _shape,
    "Sigmoid": unary(torch.sigmoid),
    "Sign": unary(torch.sign),
    "Sin": unary(torch.sin),
    "Slice": _slice,
    "Softmax": _softmax(torch.softmax),
    "Softplus": _softplus,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Sqrt": unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": binary(lambda a, b: a - b),
    "Tanh": unary(torch.tanh),
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
    "Xor": binary(lambda a, b: a ^ b),
}
"""What computes each operator. `graph` adds those that hold a graph of their own or a state: Scan, LSTM, GRU."""
