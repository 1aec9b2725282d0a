"""Matrix products and convolutions, in the forms that XNNPACK takes with weights that are inputs. See `operators`.

A convolution with such weights is one product of its windows, stored with the channels last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.executorch.layout import Laid, permuted, transposed
from edge_export.executorch.values import Node, Value, pad, tensor, text
from edge_export.executorch.windows import channels_first, channels_last, pads, windows


def product_of(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] as a batch of one: the form that is delegated without a transpose of `b`."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).reshape(a.shape[0], b.shape[1])


def gemm(node: Node, a: Value, b: Value, c: Value = None) -> Value:
    if node.looped:
        b = tensor(transposed(b, (1, 0)) if node.get("transB", 0) else b)
        made = torch.mm(tensor(transposed(a, (1, 0)) if node.get("transA", 0) else a), b) * node.get("alpha", 1.0)
        return made if c is None else made + tensor(c) * node.get("beta", 1.0)
    a, b, c = tensor(a), tensor(b), None if c is None else tensor(c)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = permuted(a, (1, 0)) if node.get("transA", 0) else a
    c = c if c is None or beta == 1.0 else c * beta
    fits = c is not None and c.ndim == 1 and alpha == 1.0
    if node.get("transB", 0):
        made = functional.linear(a, b, c if fits else None)
    else:
        made, fits = product_of(a, b), False
    made = made if alpha == 1.0 else made * alpha
    return made if fits or c is None else made + c


def matmul(node: Node, a: Value, b: Value) -> Tensor:
    a, b = tensor(a), tensor(b)
    if node.looped:
        return torch.matmul(a, b)
    if b.ndim == 2 and a.ndim >= 2:
        return product_of(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    if min(a.ndim, b.ndim) < 2:
        return torch.matmul(a, b)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    left, right = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    return torch.bmm(left, right).reshape(*lead, a.shape[-2], b.shape[-1])


def _product_conv(
    x: Value, weight: Tensor, stride: Sequence[int], widths: Sequence[int], dilation: Sequence[int], groups: int
) -> Laid:
    """A convolution whose weights [out, inner, ...] are inputs: windows side by side, then one product."""
    field = pad(channels_last(x), [*widths[: len(stride)], 0, *widths[len(stride) :], 0])
    out, inner = weight.shape[:2]
    taps = windows(field, weight.shape[2:], stride, dilation, 1)
    if inner == 1 and groups == out:  # depthwise: no sum over channels
        factors = weight.reshape(out, len(taps)).t()
        made = taps[0] * factors[0]
        for i, tap in enumerate(taps[1:], 1):
            made = made + tap * factors[i]
        return channels_first(made)
    rows = permuted(weight, [0, *range(2, weight.ndim), 1]).reshape(out, -1)
    each = out // groups
    parts = []
    for g in range(groups):
        own = taps if groups == 1 else [t[..., g * inner : (g + 1) * inner] for t in taps]
        columns = torch.cat(own, -1) if len(own) > 1 else own[0]
        parts.append(functional.linear(columns, rows[g * each : (g + 1) * each] if groups > 1 else rows))
    return channels_first(torch.cat(parts, -1) if groups > 1 else parts[0])


def _shifted(made: Value, bias: Value) -> Value:
    if bias is None:
        return made
    if isinstance(made, Laid):  # channels last, as `channels_first` has them
        return made.with_base(made.base + tensor(bias))
    return made + tensor(bias).reshape(-1, *[1] * (made.ndim - 2))


def _as_product(node: Node, weight: Value) -> bool:
    """Whether a convolution is one product: its weights are inputs, or it has depth, for which there is no kernel."""
    return node.fixed[1:2] != (True,) or weight.ndim > 4


def conv(node: Node, x: Value, weight: Value, bias: Value = None) -> Value:
    if _as_product(node, weight):
        kernel = tensor(weight).shape[2:]
        stride, dilation = node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))
        widths = pads(node, x, kernel, stride, dilation)
        return _shifted(_product_conv(x, tensor(weight), stride, widths, dilation, node.get("group", 1)), bias)
    x, weight = tensor(x), tensor(weight)
    rank = x.ndim - 2
    stride, dilation = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    widths = pads(node, x, weight.shape[2:], stride, dilation)
    if widths[:rank] != widths[rank:]:
        x, widths = pad(x, widths), [0] * (2 * rank)
    run = (functional.conv1d, functional.conv2d)[rank - 1]
    return run(x, weight, None if bias is None else tensor(bias), stride, widths[:rank], dilation, node.get("group", 1))


def _apart(x: Tensor, axis: int, step: int) -> Tensor:
    """`x` with ``step - 1`` zeros between its entries along `axis`."""
    if step == 1:
        return x
    wide = functional.pad(x.unsqueeze(axis + 1), [0, 0] * (x.ndim - axis - 1) + [0, step - 1])
    n = x.shape[axis]
    return wide.reshape(*x.shape[:axis], n * step, *x.shape[axis + 1 :]).narrow(axis, 0, (n - 1) * step + 1)


def conv_transpose(node: Node, x: Value, weight: Value, bias: Value = None) -> Value:
    weight = tensor(weight)
    rank = weight.ndim - 2
    stride, dilation = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    if text(node.get("auto_pad", "NOTSET")) != "NOTSET" or node.get("output_shape") is not None:
        raise node.refuse("output_shape or auto_pad")
    widths, extra = node.get("pads", [0] * (2 * rank)), node.get("output_padding", [0] * rank)
    if _as_product(node, weight):
        field, groups = channels_last(x), node.get("group", 1)
        for axis, step in enumerate(stride, 1):
            field = _apart(field, axis, step)
        inner, out = weight.shape[0] // groups, weight.shape[1]
        turned = weight.flip(list(range(2, weight.ndim)))
        turned = turned.reshape(groups, inner, out, *weight.shape[2:]).transpose(1, 2)
        turned = turned.reshape(groups * out, inner, *weight.shape[2:])
        reach = [(k - 1) * d for k, d in zip(weight.shape[2:], dilation, strict=True)]
        before = [r - w for r, w in zip(reach, widths[:rank], strict=True)]
        after = [r - w + e for r, w, e in zip(reach, widths[rank:], extra, strict=True)]
        return _shifted(
            _product_conv(channels_first(field), turned, [1] * rank, [*before, *after], dilation, groups), bias
        )
    x = tensor(x)
    run = (functional.conv_transpose1d, functional.conv_transpose2d)[rank - 1]
    made = run(x, weight, None, stride, 0, 0, node.get("group", 1), dilation)
    wide = [-w for w in widths[:rank]] + [e - w for e, w in zip(extra, widths[rank:], strict=True)]
    made = pad(made, wide)
    return made if bias is None else made + tensor(bias).reshape(-1, *[1] * rank)
