"""ATen operators that move entries, make tensors or index them, as ONNX. See `onnx_writer`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch.fx import Node

from edge_export.onnx_writer import ALL, Handler, Writer

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def axis_of(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


def _same(w: Writer, a: Any, out: Any) -> str:
    return w.op("Identity", w.tensor(a.self))


def _to(w: Writer, a: Any, out: Any) -> str:
    return w.op("Identity", w.tensor(a.self if hasattr(a, "self") else a.a, out.dtype))


def _view(w: Writer, a: Any, out: Any) -> str:
    return w.reshape(w.tensor(a.self), out.shape)


def _permute(w: Writer, a: Any, out: Any) -> str:
    rank = out.ndim
    return w.op("Transpose", w.tensor(a.self), perm=[axis_of(d, rank) for d in a.dims])


def _unsqueeze(w: Writer, a: Any, out: Any) -> str:
    return w.op("Unsqueeze", w.tensor(a.self), w.ints([axis_of(a.dim, out.ndim)]))


def _squeeze(w: Writer, a: Any, out: Any) -> str:
    shape = w.meta(a.self).shape
    given = getattr(a, "dim", None)
    given = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    axes = [axis_of(d, len(shape)) for d in given if len(shape) and w.fixed(shape[axis_of(d, len(shape))]) == 1]
    return w.op("Squeeze", w.tensor(a.self), w.ints(axes)) if axes else w.op("Identity", w.tensor(a.self))


def _expand(w: Writer, a: Any, out: Any) -> str:
    return w.op("Expand", w.tensor(a.self), w.shape(out.shape))


def _cat(w: Writer, a: Any, out: Any) -> str:
    parts = [t for t in a.tensors if w.meta(t).ndim == out.ndim]  # PyTorch skips empty vectors
    return w.op("Concat", *(w.tensor(t, out.dtype) for t in parts), axis=axis_of(a.dim, out.ndim))


def _split_sizes(w: Writer, a: Any, out: Any) -> list[str]:
    axis = axis_of(a.dim, w.meta(a.self).ndim)
    sizes = [w.fixed(o.shape[axis]) for o in out]
    if None in sizes:
        raise w.refuse("splits the batch; split another axis")
    return w.ops("Split", len(out), w.tensor(a.self), w.ints([int(s or 0) for s in sizes]), axis=axis)


def _slice(w: Writer, a: Any, out: Any) -> str:
    axis = axis_of(a.dim, out.ndim)
    if tuple(w.meta(a.self).shape) == tuple(out.shape):
        return w.op("Identity", w.tensor(a.self))
    start, end = w.fixed(a.start or 0), w.fixed(ALL if a.end is None else a.end)
    if start is None or end is None:  # shape inference finds the size of a Gather, not of such a Slice
        return w.op("Gather", w.tensor(a.self), _counted(w, out.shape[axis], a.start or 0, a.step), axis=axis)
    return w.op("Slice", w.tensor(a.self), w.ints([start]), w.ints([end]), w.ints([axis]), w.ints([a.step]))


def _select(w: Writer, a: Any, out: Any) -> str:
    axis = axis_of(a.dim, out.ndim + 1)
    index = (
        w.op("Squeeze", w.size(a.index), w.ints([0])) if w.fixed(a.index) is None else w.tensor(a.index, torch.int64)
    )
    return w.op("Gather", w.tensor(a.self), index, axis=axis)


def _flip(w: Writer, a: Any, out: Any) -> str:
    axes = [axis_of(d, out.ndim) for d in a.dims]
    ones = [-1] * len(axes)
    return w.op("Slice", w.tensor(a.self), w.ints(ones), w.ints([-ALL] * len(axes)), w.ints(axes), w.ints(ones))


def _repeat(w: Writer, a: Any, out: Any) -> str:
    """By `Expand`, along a new axis before each one that has several entries. Shape inference finds every size."""
    x, extra = w.tensor(a.self), len(a.repeats) - w.meta(a.self).ndim
    sizes = [1] * extra + list(w.meta(a.self).shape)
    wide, new = [], list(range(extra))
    for size, times in zip(sizes, a.repeats, strict=True):
        if w.fixed(size) == 1 or w.fixed(times) == 1:
            wide.append(times if w.fixed(size) == 1 else size)
        else:
            new.append(len(wide))
            wide += [times, size]
    if new:
        x = w.op("Unsqueeze", x, w.ints(new))
    made = w.op("Expand", x, w.shape(wide))
    return made if len(wide) == out.ndim else w.reshape(made, out.shape)


def _pad(w: Writer, a: Any, out: Any) -> str:
    rest = [0] * (out.ndim - len(a.pad) // 2)
    before, after = [*rest, *a.pad[-2::-2]], [*rest, *a.pad[::-2]]  # PyTorch has the last axis first
    if any(w.fixed(width) is None for width in (*before, *after)):
        if any(_now(w.meta(width)) < 0 for width in (*before, *after)):
            raise w.refuse("has a width that depends on the batch, whose gradient has no form here; use torch.cat")
        return _grown(w, a, before, after)
    widths = w.shape([*before, *after])
    if out.dtype == torch.bool:
        made = w.op("Pad", w.tensor(a.self, torch.int32), widths, w.constant(int(a.value), torch.int32))
        return w.op("Cast", made, to=TensorProto.BOOL)
    return w.op("Pad", w.tensor(a.self), widths, w.constant(a.value, out.dtype))


def _now(size: Any) -> int:
    """A size in the batch that was traced."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _grown(w: Writer, a: Any, before: Sequence[Any], after: Sequence[Any]) -> str:
    """`constant_pad_nd` whose widths depend on the batch: shape inference finds the size of a Concat, not of a Pad."""
    x, made = w.meta(a.self), w.tensor(a.self)
    sizes, value = list(x.shape), w.constant(a.value, x.dtype)
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        parts = [
            made if width is None else w.op("Expand", value, w.shape([*sizes[:axis], width, *sizes[axis + 1 :]]))
            for width in (low, None, high)
            if width is None or w.fixed(width) != 0
        ]
        made = w.op("Concat", *parts, axis=axis) if len(parts) > 1 else made
        sizes[axis] = sizes[axis] + w.meta(low) + w.meta(high)
    return made


def _full(value: float | None) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        fill = value
        if fill is None:
            fill = next(getattr(a, name) for name in ("fill_value", "value", "s") if hasattr(a, name))
        scalar = w.tensor(fill, out.dtype)
        if out.ndim == 0:
            return w.op("Identity", scalar)
        if w.operator.endswith("_like"):  # a graph of fewer channels fits by itself
            return w.op("Expand", scalar, w.op("Shape", w.tensor(a.self)))
        return w.op("Expand", scalar, w.shape(out.shape))

    return made


def _arange(w: Writer, a: Any, out: Any) -> str:
    start, step = getattr(a, "start", 0) or 0, getattr(a, "step", 1) or 1
    size = w.fixed(out.shape[0])
    if size is not None:
        first, each = (float(w.meta(v)) for v in (start, step))
        values = torch.arange(size, dtype=torch.float64) * each + first
        return w.op("Identity", w.constant(values.to(out.dtype)))
    return _counted(w, out.shape[0], start, step, out.dtype)


def _counted(w: Writer, count: Any, start: Any = 0, step: Any = 1, dtype: torch.dtype = torch.int64) -> str:
    """`count` numbers from `start`, `step` apart, by a running sum: shape inference finds its size."""
    steps = w.op("Expand", w.constant(step, dtype), w.shape([count]))
    summed = w.op("CumSum", steps, w.constant(0, torch.int64), exclusive=1)
    return w.op("Add", summed, w.tensor(start, dtype))


def _copied(w: Writer, a: Any, out: Any) -> str:
    """`copy`: the source in the shape and dtype of the other."""
    return w.op("Expand", w.tensor(a.src, out.dtype), w.shape(out.shape))


def _slice_scatter(w: Writer, a: Any, out: Any) -> str:
    """A tensor with a slice replaced: what lies before, the source, what lies after."""
    axis, source = axis_of(a.dim, out.ndim), w.meta(a.src)
    size, count = w.fixed(out.shape[axis]), w.fixed(source.shape[axis])
    if size is None or count is None:
        if tuple(source.shape) == tuple(out.shape):
            return w.op("Identity", w.tensor(a.src, out.dtype))
        raise w.refuse("replaces a part of the batch; write it with where or cat")
    places = range(*slice(a.start, a.end, a.step).indices(size))
    line = [1] * out.ndim
    line[axis] = count
    index = w.op("Expand", w.op("Reshape", w.ints(places), w.ints(line)), w.shape(source.shape))
    return w.op("ScatterElements", w.tensor(a.self), index, w.tensor(a.src, out.dtype), axis=axis)


def _flat_places(w: Writer, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> str:
    """Where `as_strided` reads in the flat tensor, int64 of shape `size`."""
    total = w.constant(int(offset or 0), torch.int64)
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        line = [1] * len(size)
        line[axis] = -1
        fixed = w.fixed(n)
        at = _counted(w, n) if fixed is None else w.ints(range(fixed))
        total = w.op("Add", total, w.op("Reshape", w.op("Mul", at, w.size(step)), w.ints(line)))
    return total


def _is_whole(w: Writer, a: Any) -> bool:
    """Whether `as_strided` reads every entry of the tensor in its order, as a change in place of a reshape does."""

    def expression(value: Any) -> Any:
        found = w.meta(value)
        return found.node.expr if isinstance(found, torch.SymInt) else found

    step: Any = 1
    for n, stride in zip(reversed(a.size), reversed(a.stride), strict=True):
        if w.fixed(n) != 1 and expression(stride) != step:
            return False
        step = step * expression(n)
    return not a.storage_offset and step == prod(map(expression, w.meta(a.self).shape))


def _as_strided(w: Writer, a: Any, out: Any) -> str:
    if _is_whole(w, a):
        return w.reshape(w.tensor(a.self), out.shape)
    flat = w.op("Reshape", w.tensor(a.self), w.ints([-1]))
    return w.op("Gather", flat, _flat_places(w, a.size, a.stride, a.storage_offset), axis=0)


def _as_strided_scatter(w: Writer, a: Any, out: Any) -> str:
    if _is_whole(w, a):
        return w.reshape(w.tensor(a.src, out.dtype), out.shape)
    flat, places = w.op("Reshape", w.tensor(a.self), w.ints([-1])), _flat_places(w, a.size, a.stride, a.storage_offset)
    index, source = (w.op("Reshape", v, w.ints([-1])) for v in (places, w.tensor(a.src, out.dtype)))
    return w.reshape(w.op("ScatterElements", flat, index, source, axis=0), out.shape)


# --- indexing


def _index_select(w: Writer, a: Any, out: Any) -> str:
    return w.op("Gather", w.tensor(a.self), w.tensor(a.index, torch.int64), axis=axis_of(a.dim, out.ndim))


def _embedding(w: Writer, a: Any, out: Any) -> str:
    return w.op("Gather", w.tensor(a.weight), w.tensor(a.indices, torch.int64), axis=0)


def _gather(w: Writer, a: Any, out: Any) -> str:
    x, axis = w.meta(a.self), axis_of(a.dim, out.ndim)
    name, index = w.tensor(a.self), w.tensor(a.index, torch.int64)
    for d, (size, read) in enumerate(zip(x.shape, w.meta(a.index).shape, strict=True)):
        if d != axis and w.fixed(size) != w.fixed(read):  # PyTorch lets the index be shorter on other axes
            name = w.op("Slice", name, w.ints([0]), w.size(read), w.ints([d]))
    return w.op("GatherElements", name, index, axis=axis)


def _scatter(w: Writer, a: Any, out: Any) -> str:
    axis, add = axis_of(a.dim, out.ndim), "add" in w.operator
    index = w.tensor(a.index, torch.int64)
    reduce = getattr(a, "reduce", None)
    if reduce not in (None, "add", "sum"):
        raise w.refuse(f"reduces by {reduce!r}; only sums are exported")
    if hasattr(a, "src"):
        source = w.tensor(a.src, out.dtype)
        for d, (size, read) in enumerate(zip(w.meta(a.src).shape, w.meta(a.index).shape, strict=True)):
            if w.fixed(size) != w.fixed(read):
                source = w.op("Slice", source, w.ints([0]), w.size(read), w.ints([d]))
    else:
        source = w.op("Expand", w.tensor(a.value, out.dtype), w.op("Shape", index))
    mode = "add" if add or reduce else None
    if out.dtype == torch.bool:
        made = w.op("ScatterElements", w.tensor(a.self, torch.int32),
                    index, w.op("Cast", source, to=TensorProto.INT32), axis=axis)  # fmt: skip
        return w.op("Cast", made, to=TensorProto.BOOL)
    return w.op("ScatterElements", w.tensor(a.self), index, source, axis=axis, reduction=mode)


def _places(w: Writer, x: Any, indices: Sequence[Any]) -> tuple[list[int], list[int], Sequence[Any]]:
    """Axes that an `index` names, the other axes, and its index tensors' common shape."""
    named = [k for k, index in enumerate(indices) if index is not None]
    metas = [w.meta(indices[k]) for k in named]
    if any(m.dtype in (torch.bool, torch.uint8) for m in metas):
        raise w.refuse(
            "picks entries by a mask, so that a size depends on the data; use where or masked_fill, or index by numbers"
        )
    if named != list(range(named[0], named[-1] + 1)):
        raise w.refuse("indexes axes that are not neighbours; index them one after the other")
    return named, [d for d in range(x.ndim) if d not in named], torch.broadcast_shapes(*(m.shape for m in metas))  # type: ignore[no-untyped-call]


def _joined(w: Writer, indices: Sequence[Any], named: Sequence[int], common: Sequence[Any]) -> str:
    """The index tensors as one of `GatherND`: [*common, axes]."""
    rank, parts = len(common), []
    for k in named:
        name = w.tensor(indices[k], torch.int64)
        if tuple(w.meta(indices[k]).shape) != tuple(common):
            name = w.op("Expand", name, w.shape(common))
        parts.append(w.op("Unsqueeze", name, w.ints([rank])))
    return parts[0] if len(parts) == 1 else w.op("Concat", *parts, axis=rank)


def _counts_samples(w: Writer, x: Any, index: Node, common: Sequence[Any]) -> bool:
    """Whether `index` is ``torch.arange(n)``, along the first axis of `x` and of the index tensors' `common` shape."""
    shape = w.meta(index).shape
    if len(shape) != len(common) or w.fixed(shape[0]) is not None or any(w.fixed(size) != 1 for size in shape[1:]):
        return False
    aten = torch.ops.aten
    while index.target in (aten.unsqueeze.default, aten.view.default, aten.slice.Tensor):
        index = index.args[0]  # type: ignore[assignment]
    # A part of a longer one that is as long as `x`, and lies in `x`, counts all of `x` too.
    counts = index.target is aten.arange.start_step and index.args[0] == 0 and index.args[2:] in ((), (1,))
    return bool(counts and shape[0] == x.shape[0])


def _index(w: Writer, a: Any, out: Any) -> str:
    x = w.meta(a.self)
    named, rest, common = _places(w, x, a.indices)
    if named[0] == 0 and len(named) > 1 and _counts_samples(w, x, a.indices[0], common):
        # Each sample's own entries: as a place in the batch the number of a sample would tie samples together.
        return w.op("GatherND", w.tensor(a.self), _joined(w, a.indices, named[1:], common), batch_dims=1)
    if len(named) == 1:
        return w.op("Gather", w.tensor(a.self), w.tensor(a.indices[named[0]], torch.int64), axis=named[0])
    name, first = w.tensor(a.self), named[0]
    if first:
        name = w.op("Transpose", name, perm=[*named, *rest])
    made = w.op("GatherND", name, _joined(w, a.indices, named, common))
    if first:
        c = len(common)
        made = w.op("Transpose", made, perm=[*range(c, c + first), *range(c), *range(c + first, out.ndim)])
    return made


def _index_put(w: Writer, a: Any, out: Any) -> str:
    mask, one = a.indices[0], all(w.fixed(size) == 1 for size in w.meta(a.values).shape)
    masked = len(a.indices) == 1 and w.meta(mask).dtype == torch.bool
    if masked and one and not a.accumulate and out.dtype != torch.bool:  # as in y[y < 0] = 0
        axes = range(w.meta(mask).ndim, out.ndim)
        name = w.op("Unsqueeze", w.tensor(mask), w.ints(axes)) if axes else w.tensor(mask)
        return w.op("Where", name, w.tensor(a.values, out.dtype), w.tensor(a.self))
    named, rest, common = _places(w, out, a.indices)
    first, c = named[0], len(common)
    values_shape = [*out.shape[:first], *common, *out.shape[first + len(named) :]]
    values = w.tensor(a.values, out.dtype)
    if tuple(w.meta(a.values).shape) != tuple(values_shape):
        values = w.op("Expand", values, w.shape(values_shape))
    name = w.tensor(a.self)
    if first:
        name = w.op("Transpose", name, perm=[*named, *rest])
        rank = len(values_shape)
        values = w.op("Transpose", values, perm=[*range(first, first + c), *range(first), *range(first + c, rank)])
    kind = torch.int32 if out.dtype == torch.bool else None
    if kind:
        name, values = (w.op("Cast", v, to=TensorProto.INT32) for v in (name, values))
    reduction = "add" if a.accumulate else None
    made = w.op("ScatterND", name, _joined(w, a.indices, named, common), values, reduction=reduction)
    if kind:
        made = w.op("Cast", made, to=TensorProto.BOOL)
    if first:
        back = np.argsort([*named, *rest]).tolist()
        made = w.op("Transpose", made, perm=back)
    return made


def moves() -> dict[str, Handler]:
    """The table of this module, by ATen name."""
    found: dict[str, Handler] = {}
    found |= dict.fromkeys(("alias", "clone", "lift_fresh"), _same)
    found |= dict.fromkeys(("full", "full_like", "scalar_tensor"), _full(None))
    found |= dict.fromkeys(("empty", "empty_permuted", "empty_strided", "new_empty_strided"), _full(0))
    found |= dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter)
    found |= {
        "_to_copy": _to, "view": _view, "permute": _permute, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
        "expand": _expand, "cat": _cat, "split_with_sizes": _split_sizes, "slice": _slice, "select": _select,
        "flip": _flip, "repeat": _repeat, "constant_pad_nd": _pad, "arange": _arange, "index": _index,
        "index_put": _index_put, "index_select": _index_select, "embedding": _embedding, "gather": _gather,
        "copy": _copied, "slice_scatter": _slice_scatter, "as_strided": _as_strided,
        "as_strided_scatter": _as_strided_scatter,
    }  # fmt: skip
    return found
