"""Functions of PyTorch in the form that an exported graph takes them, while a module runs or is traced.

A table names for each function its replacement. What a graph cannot hold as it is becomes matrix products, moves and
elementwise operators here, before autograd sees it: attention, padding, resizing, adaptive pools, norms of the batch.
`Rewriting` replaces the calls of a module's own code and those inside `multi_head_attention_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edge_client.errors import ModelError
from edge_export import recurrence, whole_layers
from edge_export.batch_norm import instance_normalised

Table = Mapping[Any, Callable[..., Any]]
_NESTED = ("linear", "scaled_dot_product_attention", "dropout", "pad")  # what functional.py itself calls by name


class Rewriting(TorchFunctionMode):
    """While active, functions of `table` are replaced."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = self.table.get(func)
        if own is not None:
            with self:  # a replacement may call functions that are replaced too
                return own(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:
            with ExitStack() as stack:
                for name in _NESTED:
                    if (nested := self.table.get(getattr(functional, name))) is not None:
                        stack.enter_context(mock.patch.object(functional, name, nested))
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def shared_table() -> dict[Any, Callable[..., Any]]:
    """What training and evaluation graphs have in common."""
    f = functional
    return {
        f.scaled_dot_product_attention: attention,
        f.bilinear: bilinear,
        f.pad: pad,
        f.interpolate: interpolate,
        f.adaptive_avg_pool1d: adaptive_avg_pool,
        f.adaptive_avg_pool2d: adaptive_avg_pool,
        f.adaptive_avg_pool3d: adaptive_avg_pool,
        f.adaptive_max_pool1d: adaptive_max_pool,
        f.adaptive_max_pool2d: adaptive_max_pool,
        f.adaptive_max_pool3d: adaptive_max_pool,
        torch.adaptive_avg_pool1d: adaptive_avg_pool,
        torch.adaptive_max_pool1d: adaptive_max_pool,
        f.group_norm: group_norm,
        torch.lstm_cell: recurrence.lstm_cell,
        torch.gru_cell: recurrence.gru_cell,
        Tensor.unfold: unfold,
        f.embedding_bag: embedding_bag,
        torch.cdist: distances,
        torch._weight_norm: weight_norm,
        f.grid_sample: _sampled("grid_sample"),
        f.affine_grid: _sampled("affine_grid"),
        torch._VF._pack_padded_sequence: recurrence.packed,
    }


def _sampled(operator: str) -> Callable[..., Any]:
    """A replacement that refuses; tracing would fail with a text of PyTorch's own."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ModelError(f"operator {operator!r} has no ONNX form; use interpolate, padding and slices")

    return refuse


def training_table() -> dict[Any, Callable[..., Any]]:
    """The forms of a training graph."""
    return {
        **shared_table(),
        functional.linear: recurrence.linear,
        torch.lstm: recurrence.lstm,
        torch.gru: recurrence.gru,
        torch.rnn_tanh: recurrence.rnn_tanh,
        torch.rnn_relu: recurrence.rnn_relu,
    }


def evaluation_table() -> dict[Any, Callable[..., Any]]:
    """The forms of an evaluation graph: layers stay whole where ONNX has them."""
    return {**shared_table(), functional.instance_norm: instance_norm, **whole_layers.table()}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`functional.scaled_dot_product_attention` as product, softmax, product. [..., t, f] each."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.tensor(np.tri(int(query.shape[-2]), int(key.shape[-2]), dtype=bool))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # a query that sees no key gets zeros
        weights = weights.masked_fill(attn_mask.any(-1, keepdim=True).logical_not(), 0.0)
    return functional.dropout(weights, dropout_p) @ value if dropout_p else weights @ value


def bilinear(one: Tensor, two: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.bilinear`: [..., i], [..., j] and weight [o, i, j] to [..., o]."""
    made = torch.einsum("...i,oij,...j->...o", one, weight, two)
    return made if bias is None else made + bias


def embedding_bag(
    ids: Tensor,
    table: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`functional.embedding_bag` of ids [n, t]: the sum, mean or maximum of their rows, but of padding."""
    if offsets is not None or ids.ndim != 2 or scale_grad_by_freq:
        raise ModelError("an EmbeddingBag takes offsets or scales gradients; give it whole rows of ids [n, t]")
    rows = functional.embedding(ids, table)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    some = (torch.zeros_like(ids) == 0 if padding_idx is None else ids != padding_idx % table.shape[0]).unsqueeze(-1)
    if mode == "max":
        return torch.where(some.any(1), rows.masked_fill(~some, float("-inf")).max(1).values, 0.0)
    total = (rows * some).sum(1)
    return total if mode == "sum" else total / some.sum(1).clamp(min=1)


def distances(one: Tensor, two: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """`torch.cdist`: [..., a, f] and [..., b, f] to [..., a, b]."""
    made: Tensor = torch.linalg.vector_norm(one.unsqueeze(-2) - two.unsqueeze(-3), p, -1)
    return made


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`torch._weight_norm`, where `dim` -1 is one norm of all; a row of zeros, as of a pruned channel, makes no NaN."""
    square = (v * v).sum([i for i in range(v.ndim) if dim == -1 or i != dim % v.ndim], keepdim=True)
    return v * (g / torch.where(square == 0, 1.0, square).sqrt())


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """`functional.pad`; what a border repeats is gathered."""
    if mode == "constant":
        return torch.constant_pad_nd(x, list(pad), 0.0 if value is None else value)
    for i in range(len(pad) // 2):
        axis, low, high = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if low or high:
            x = x.index_select(axis, _border(int(x.shape[axis]), low, high, mode))
    return x


def _border(size: int, low: int, high: int, mode: str) -> Tensor:
    places = np.arange(-low, size + high)
    if mode == "replicate":
        places = places.clip(0, size - 1)
    elif mode == "circular":
        places = places % size
    elif max(low, high) < size:
        places = (size - 1) - abs((size - 1) - abs(places))
    else:
        raise ModelError(f"reflection padding of {low} and {high} needs a longer axis; this one has {size} entries")
    return torch.tensor(places.tolist())


def _along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """`x` with `axis` multiplied by `matrix` [made, size]."""
    matrix = matrix.to(x.dtype)
    if axis in (-1, x.ndim - 1):
        return functional.linear(x, matrix)
    return functional.linear(x.transpose(axis, -1), matrix).transpose(axis, -1)


def interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`functional.interpolate`: each axis is a linear map, which PyTorch's own function on one-hot lines gives."""
    if antialias:
        raise ModelError("interpolate with antialias=True is not exported; use antialias=False")

    def of(value: Any, k: int) -> Any:
        return value[k] if isinstance(value, list | tuple) else value

    sizes = [int(n) for n in x.shape[2:]]
    with _plain():
        maps = [
            _resized(n, of(size, k), of(scale_factor, k), mode, align_corners, recompute_scale_factor)
            for k, n in enumerate(sizes)
        ]
        times = [len(m) // n for m, n in zip(maps, sizes, strict=True)]
        repeats = [_is_repeat(m, t) for m, t in zip(maps, times, strict=True)]
    if mode.startswith("nearest") and all(repeats):
        return nearest(x, times)
    for k, matrix in enumerate(maps):
        if times[k] != 1 or not repeats[k]:
            x = _along(x, k + 2, matrix)
    return x


def _resized(
    n: int, size: Any, factor: Any, mode: str, align_corners: bool | None, recompute_scale_factor: bool | None
) -> Tensor:
    """What `functional.interpolate` makes of an axis of `n` entries, as a matrix [m, n]."""
    eye = torch.eye(n, dtype=torch.float32).unsqueeze(1)  # [n, 1, n]
    if mode == "bicubic":  # has no form of one axis
        wide = eye.unsqueeze(2).expand(n, 1, 1, n)
        given = None if size is None else (1, size), None if factor is None else (1.0, factor)
        lines = functional.interpolate(wide, *given, mode, align_corners, recompute_scale_factor).squeeze(2)
    else:
        one = "linear" if mode in ("bilinear", "trilinear") else mode
        corners = align_corners if one == "linear" else None
        lines = functional.interpolate(eye, size, factor, one, corners, recompute_scale_factor)
    return lines.squeeze(1).t().contiguous()


def _is_repeat(matrix: Tensor, times: int) -> bool:
    """Whether a matrix [m, n] repeats every entry so many times."""
    n = matrix.shape[1]
    return len(matrix) == times * n and bool((matrix == torch.eye(n).repeat_interleave(times, 0)).all())


def _plain() -> Any:
    """Tensors of numbers even while fake ones are traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(disable_proxy_modes_tracing())
    stack.enter_context(unset_fake_temporarily())
    return stack


def nearest(x: Tensor, times: Sequence[int]) -> Tensor:
    """Every entry repeated `times` along each axis after the channels."""
    for k, t in enumerate(times):
        if t > 1:
            axis = k + 2
            wide = x.unsqueeze(axis + 1).expand(*x.shape[: axis + 1], t, *x.shape[axis + 1 :])
            x = wide.reshape(*x.shape[:axis], x.shape[axis] * t, *x.shape[axis + 1 :])
    return x


def _pool_sizes(x: Tensor, output_size: Any) -> tuple[list[int], list[int]]:
    """Of each axis that an adaptive pool reduces: its size behind the pool, and its size now."""
    given = output_size if isinstance(output_size, list | tuple) else [output_size] * (x.ndim - 2)
    size = [int(n) for n in x.shape[-len(given) :]]
    return [n if m is None else int(m) for n, m in zip(size, given, strict=True)], size


def _windows(size: int, made: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the windows of an adaptive pool start and end."""
    at = np.arange(made)
    return at * size // made, -((at + 1) * size // -made)


def adaptive_avg_pool(x: Tensor, output_size: Any) -> Tensor:
    """Windows of equal size are an average pool, others a matrix product along each axis."""
    made, size = _pool_sizes(x, output_size)
    dims = len(made)
    if made == [1] * dims and dims > 1:
        return x.mean(list(range(-dims, 0)), keepdim=True)
    if not any(n % m for n, m in zip(size, made, strict=True)):
        kernel = [n // m for n, m in zip(size, made, strict=True)]
        pool = {1: torch.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}[dims]
        pooled: Tensor = pool(x, kernel, kernel)
        return pooled
    for k in range(dims):
        n, m = size[k], made[k]
        if n != m:
            low, high = _windows(n, m)
            inside = (np.arange(n) >= low[:, None]) & (np.arange(n) < high[:, None])
            matrix = torch.tensor((inside / (high - low)[:, None]).tolist(), dtype=x.dtype)
            x = _along(x, x.ndim - dims + k, matrix)
    return x


def adaptive_max_pool(x: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
    """Windows of equal size are a max-pool; of others each is gathered and its first maximum taken."""
    if return_indices:
        raise ModelError("adaptive max-pooling with return_indices=True is not exported; use the values alone")
    made, size = _pool_sizes(x, output_size)
    dims = len(made)
    if not any(n % m for n, m in zip(size, made, strict=True)):
        kernel = [n // m for n, m in zip(size, made, strict=True)]
        pool = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}[dims]
        pooled: Tensor = pool(x, kernel, kernel)
        return pooled
    lead = x.ndim - dims
    for k in range(dims):
        n, m = size[k], made[k]
        low, high = _windows(n, m)
        widest = int((high - low).max())
        places = np.minimum(low[:, None] + np.arange(widest), high[:, None] - 1)
        axis = lead + 2 * k
        x = x.index_select(axis, torch.tensor(places.ravel().tolist()))
        x = x.reshape(*x.shape[:axis], m, widest, *x.shape[axis + 1 :])
    order = [*range(lead), *range(lead, lead + 2 * dims, 2), *range(lead + 1, lead + 2 * dims, 2)]
    windows = x.permute(order).flatten(lead + dims)
    return windows.max(-1).values


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`functional.instance_norm` outside training."""
    if use_input_stats:
        return instance_normalised(x, weight, bias, eps)[0]
    return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`functional.group_norm`, written out."""
    channels, rest = int(x.shape[1]), x.shape[2:]
    flat = x.reshape(-1, num_groups, (x.shape[1:].numel()) // num_groups)
    centred = flat - flat.mean(2, keepdim=True)
    made = centred * torch.rsqrt((centred * centred).mean(2, keepdim=True) + eps)
    made = made.reshape(-1, channels, *rest)
    column = [1, channels, *[1] * len(rest)]
    if weight is not None:
        made = made * weight.reshape(column)
    return made if bias is None else made + bias.reshape(column)


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """`Tensor.unfold`: windows of one axis, gathered; their entries go last."""
    axis = dimension % x.ndim
    count = (int(x.shape[axis]) - size) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(size)
    made = x.index_select(axis, torch.tensor(places.ravel().tolist()))
    made = made.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return made.movedim(axis + 1, -1)
