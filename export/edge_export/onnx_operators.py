"""Elementwise, shape, indexing and reducing ATen operators as ONNX. See `onnx_writer`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from edge_export.onnx_writer import ALL, Handler, Writer

UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor",
    "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round", "sigmoid": "Sigmoid",
    "sign": "Sign", "sgn": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
    "isnan": "IsNaN", "isinf": "IsInf", "logical_not": "Not", "bitwise_not": "Not",
}  # fmt: skip
BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
COMPARE = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}
LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
BITWISE = {"bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def axis_of(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


def _unary(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        have = w.meta(a.self).dtype
        if kind == "Not":
            if have != torch.bool:
                if w.operator == "bitwise_not":
                    raise w.refuse("inverts the bits of integers; use a bool tensor")
            return w.op("Not", w.tensor(a.self, torch.bool))
        if kind in ("IsNaN", "IsInf"):
            return w.op(kind, w.tensor(a.self, torch.float32))
        if kind in ("Floor", "Ceil", "Round") and have in INTEGERS:
            return w.tensor(a.self)
        if getattr(a, "decimals", 0):
            raise w.refuse("rounds to decimals; multiply, round and divide")
        return w.op(kind, w.tensor(a.self, out.dtype))

    return made


def _binary(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        left, right = (a.self, getattr(a, "other", getattr(a, "exponent", None)))
        if kind in ("Max", "Min", "Add", "Mul") and out.dtype == torch.bool:
            either = "Or" if kind in ("Max", "Add") else "And"
            return w.op(either, w.tensor(left, torch.bool), w.tensor(right, torch.bool))
        x, y = w.tensor(left, out.dtype), w.tensor(right, out.dtype)
        alpha = getattr(a, "alpha", 1)
        if alpha not in (1, None):
            y = w.op("Mul", y, w.tensor(alpha, out.dtype))
        if kind == "Pow" and right == 2:
            return w.op("Mul", x, x)
        return w.op(kind, x, y)

    return made


def _rsub(w: Writer, a: Any, out: Any) -> str:
    y = w.tensor(a.self, out.dtype)
    if a.alpha != 1:
        y = w.op("Mul", y, w.tensor(a.alpha, out.dtype))
    return w.op("Sub", w.tensor(a.other, out.dtype), y)


def _div(w: Writer, a: Any, out: Any) -> str:
    mode = getattr(a, "rounding_mode", None)
    if mode is None:
        return w.op("Div", w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype))
    if out.dtype.is_floating_point:
        made = w.op("Div", w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype))
        if mode == "floor":
            return w.op("Floor", made)
        return w.op("Mul", w.op("Sign", made), w.op("Floor", w.op("Abs", made)))
    x, y = w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype)
    if mode == "trunc":
        return w.op("Div", x, y)
    rest = w.op("Mod", x, y)  # has the divisor's sign
    return w.op("Div", w.op("Sub", x, rest), y)


def _floor_divide(w: Writer, a: Any, out: Any) -> str:
    a.rounding_mode = "floor"
    return _div(w, a, out)


def _remainder(w: Writer, a: Any, out: Any) -> str:
    x, y = w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype)
    if not out.dtype.is_floating_point:
        return w.op("Mod", x, y)
    return w.op("Sub", x, w.op("Mul", w.op("Floor", w.op("Div", x, y)), y))


def _fmod(w: Writer, a: Any, out: Any) -> str:
    return w.op("Mod", w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype), fmod=1)


def _compare(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        common = w.dtype(a.self, a.other)
        if common == torch.bool and kind != "Equal":
            common = torch.int32
        return w.op(kind, w.tensor(a.self, common), w.tensor(a.other, common))

    return made


def _ne(w: Writer, a: Any, out: Any) -> str:
    return w.op("Not", _compare("Equal")(w, a, out))


def _logic(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        if w.operator.startswith("bitwise") and out.dtype != torch.bool:
            raise w.refuse("works on the bits of integers; use arithmetic")
        return w.op(kind, w.tensor(a.self, torch.bool), w.tensor(a.other, torch.bool))

    return made


def _where(w: Writer, a: Any, out: Any) -> str:
    condition = w.tensor(a.condition, torch.bool)
    if out.dtype == torch.bool:  # ONNX Runtime selects among numbers only
        x, y = w.tensor(a.self, torch.int32), w.tensor(a.other, torch.int32)
        return w.op("Cast", w.op("Where", condition, x, y), to=TensorProto.BOOL)
    return w.op("Where", condition, w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype))


def _clamp(w: Writer, a: Any, out: Any) -> str:
    x = w.tensor(a.self, out.dtype)
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    if low is not None:
        x = w.op("Max", x, w.tensor(low, out.dtype))
    return x if high is None else w.op("Min", x, w.tensor(high, out.dtype))


def _rsqrt(w: Writer, a: Any, out: Any) -> str:
    return w.op("Reciprocal", w.op("Sqrt", w.tensor(a.self, out.dtype)))


def _log_of(shift: float, scale: float) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        x = w.tensor(a.self, out.dtype)
        if shift:
            x = w.op("Add", x, w.constant(shift, out.dtype))
        x = w.op("Log", x)
        return x if scale == 1 else w.op("Mul", x, w.constant(scale, out.dtype))

    return made


def _expm1(w: Writer, a: Any, out: Any) -> str:
    """``exp(x) - 1`` without the cancellation near zero: ``2 sinh(x / 2) exp(x / 2)``."""
    half = w.op("Mul", w.tensor(a.self, out.dtype), w.constant(0.5, out.dtype))
    return w.op("Mul", w.op("Mul", w.op("Sinh", half), w.op("Exp", half)), w.constant(2.0, out.dtype))


def _exp2(w: Writer, a: Any, out: Any) -> str:
    return w.op("Exp", w.op("Mul", w.tensor(a.self, out.dtype), w.constant(math.log(2.0), out.dtype)))


def _trunc(w: Writer, a: Any, out: Any) -> str:
    x = w.tensor(a.self, out.dtype)
    return w.op("Mul", w.op("Sign", x), w.op("Floor", w.op("Abs", x)))


# --- shapes


def _same(w: Writer, a: Any, out: Any) -> str:
    return w.op("Identity", w.tensor(getattr(a, "self", None) if hasattr(a, "self") else a.a))


def _to(w: Writer, a: Any, out: Any) -> str:
    return w.op("Identity", w.tensor(getattr(a, "self", None) if hasattr(a, "self") else a.a, out.dtype))


def _view(w: Writer, a: Any, out: Any) -> str:
    return w.reshape(w.tensor(a.self), out.shape)


def _permute(w: Writer, a: Any, out: Any) -> str:
    rank = out.ndim
    return w.op("Transpose", w.tensor(a.self), perm=[axis_of(d, rank) for d in a.dims])


def _transpose(w: Writer, a: Any, out: Any) -> str:
    perm = list(range(out.ndim))
    i, j = (0, 1) if w.operator == "t" else (axis_of(a.dim0, out.ndim), axis_of(a.dim1, out.ndim))
    if out.ndim < 2:
        return w.op("Identity", w.tensor(a.self))
    perm[i], perm[j] = perm[j], perm[i]
    return w.op("Transpose", w.tensor(a.self), perm=perm)


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


def _stack(w: Writer, a: Any, out: Any) -> str:
    axis = axis_of(a.dim, out.ndim)
    parts = [w.op("Unsqueeze", w.tensor(t, out.dtype), w.ints([axis])) for t in a.tensors]
    return w.op("Concat", *parts, axis=axis)


def _split_sizes(w: Writer, a: Any, out: Any) -> list[str]:
    axis = axis_of(a.dim, w.meta(a.self).ndim)
    sizes = [w.fixed(o.shape[axis]) for o in out]
    if None in sizes:
        raise w.refuse("splits the batch; split another axis")
    return w.ops("Split", len(out), w.tensor(a.self), w.ints([int(s or 0) for s in sizes]), axis=axis)


def _unbind(w: Writer, a: Any, out: Any) -> list[str]:
    axis = axis_of(a.dim, w.meta(a.self).ndim)
    x = w.tensor(a.self)
    return [w.op("Gather", x, w.constant(i, torch.int64), axis=axis) for i in range(len(out))]


def _slice(w: Writer, a: Any, out: Any) -> str:
    rank = out.ndim
    start, end = (0 if a.start is None else a.start), (ALL if a.end is None else a.end)
    if start == 0 and end == ALL and a.step == 1:
        return w.op("Identity", w.tensor(a.self))
    return w.op(
        "Slice", w.tensor(a.self), w.size(start), w.size(end), w.ints([axis_of(a.dim, rank)]), w.ints([a.step])
    )


def _select(w: Writer, a: Any, out: Any) -> str:
    axis = axis_of(a.dim, out.ndim + 1)
    index = w.op("Squeeze", w.size(a.index), w.ints([0])) if w.fixed(a.index) is None else w.tensor(a.index, torch.int64)
    return w.op("Gather", w.tensor(a.self), index, axis=axis)


def _flip(w: Writer, a: Any, out: Any) -> str:
    axes = [axis_of(d, out.ndim) for d in a.dims]
    ones = [-1] * len(axes)
    return w.op("Slice", w.tensor(a.self), w.ints(ones), w.ints([-ALL] * len(axes)), w.ints(axes), w.ints(ones))


def _repeat(w: Writer, a: Any, out: Any) -> str:
    x, extra = w.tensor(a.self), len(a.repeats) - w.meta(a.self).ndim
    if extra:
        x = w.op("Unsqueeze", x, w.ints(range(extra)))
    return w.op("Tile", x, w.shape(a.repeats))


def _pad(w: Writer, a: Any, out: Any) -> str:
    widths, rank = [int(p) for p in a.pad], out.ndim
    low, high = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = widths[2 * i], widths[2 * i + 1]
    if out.dtype == torch.bool:
        made = w.op("Pad", w.tensor(a.self, torch.int32), w.ints(low + high), w.constant(int(a.value), torch.int32))
        return w.op("Cast", made, to=TensorProto.BOOL)
    return w.op("Pad", w.tensor(a.self), w.ints(low + high), w.constant(a.value, out.dtype))


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
        fixed = [w.fixed(v) if out.dtype in INTEGERS else w.meta(v) for v in (start, step)]
        values = torch.arange(size, dtype=torch.float64) * float(fixed[1]) + float(fixed[0])
        return w.op("Identity", w.constant(values.to(out.dtype)))
    # Counted by a running sum, whose size shape inference knows.
    ones = w.op("Expand", w.constant(step, out.dtype), w.shape(out.shape))
    counted = w.op("CumSum", ones, w.constant(0, torch.int64), exclusive=1)
    return w.op("Add", counted, w.tensor(start, out.dtype))


def _hardtanh(w: Writer, a: Any, out: Any) -> str:
    low, high = w.constant(a.min_val, out.dtype), w.constant(a.max_val, out.dtype)
    return w.op("Min", w.op("Max", w.tensor(a.self, out.dtype), low), high)


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
    start = min(max(w.fixed(a.start or 0) or 0, -size) % size if (a.start or 0) < 0 else a.start or 0, size)
    places = [start + i * a.step for i in range(count)]
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
        if w.fixed(n) is not None:
            at = w.ints(range(int(w.fixed(n) or 0)))
        else:
            ones = w.op("Expand", w.ints([1]), w.size(n))
            at = w.op("CumSum", ones, w.constant(0, torch.int64), exclusive=1)
        total = w.op("Add", total, w.op("Reshape", w.op("Mul", at, w.size(step)), w.ints(line)))
    return total


def _as_strided(w: Writer, a: Any, out: Any) -> str:
    flat = w.op("Reshape", w.tensor(a.self), w.ints([-1]))
    return w.op("Gather", flat, _flat_places(w, a.size, a.stride, a.storage_offset), axis=0)


def _as_strided_scatter(w: Writer, a: Any, out: Any) -> str:
    flat, places = w.op("Reshape", w.tensor(a.self), w.ints([-1])), _flat_places(w, a.size, a.stride, a.storage_offset)
    index, source = (w.op("Reshape", v, w.ints([-1])) for v in (places, w.tensor(a.src, out.dtype)))
    return w.reshape(w.op("ScatterElements", flat, index, source, axis=0), out.shape)


def _norm(w: Writer, a: Any, out: Any) -> str:
    axes, keep, x = _axes(w, a), int(bool(a.keepdim)), w.tensor(a.self, out.dtype)
    if a.ord == 2:
        return w.op("Sqrt", w.op("ReduceSum", w.op("Mul", x, x), w.ints(axes), keepdims=keep))
    if a.ord == 1:
        return w.op("ReduceSum", w.op("Abs", x), w.ints(axes), keepdims=keep)
    if a.ord == math.inf:
        return w.op("ReduceMax", w.op("Abs", x), w.ints(axes), keepdims=keep)
    raise w.refuse(f"has order {a.ord}; norms of order 1, 2 and infinity are exported")


def _tri(upper: bool) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        if out.dtype == torch.bool:
            x = w.op("Trilu", w.tensor(a.self, torch.int64), w.constant(a.diagonal, torch.int64), upper=int(upper))
            return w.op("Cast", x, to=TensorProto.BOOL)
        return w.op("Trilu", w.tensor(a.self), w.constant(a.diagonal, torch.int64), upper=int(upper))

    return made


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
        raise w.refuse("picks entries by a mask, so that a size depends on the data; use where or masked_fill")
    if named != list(range(named[0], named[-1] + 1)):
        raise w.refuse("indexes axes that are not neighbours; index them one after the other")
    return named, [d for d in range(x.ndim) if d not in named], torch.broadcast_shapes(*(m.shape for m in metas))


def _joined(w: Writer, indices: Sequence[Any], named: Sequence[int], common: Sequence[Any]) -> str:
    """The index tensors as one of `GatherND`: [*common, axes]."""
    rank, parts = len(common), []
    for k in named:
        name = w.tensor(indices[k], torch.int64)
        if tuple(w.meta(indices[k]).shape) != tuple(common):
            name = w.op("Expand", name, w.shape(common))
        parts.append(w.op("Unsqueeze", name, w.ints([rank])))
    return parts[0] if len(parts) == 1 else w.op("Concat", *parts, axis=rank)


def _index(w: Writer, a: Any, out: Any) -> str:
    x = w.meta(a.self)
    named, rest, common = _places(w, x, a.indices)
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


# --- reductions


def _axes(w: Writer, a: Any) -> list[int]:
    rank, given = w.meta(a.self).ndim, getattr(a, "dim", None)
    if given is None or (not isinstance(given, int) and len(given) == 0):
        return list(range(rank))
    return [axis_of(d, rank) for d in ([given] if isinstance(given, int) else given)]


def _reduce(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        axes, keep = _axes(w, a), int(bool(getattr(a, "keepdim", False)))
        dtype = out.dtype
        if not axes:
            return w.op("Identity", w.tensor(a.self, dtype))
        return w.op(kind, w.tensor(a.self, dtype), w.ints(axes), keepdims=keep)

    return made


def _any_all(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        axes, keep = _axes(w, a), int(bool(getattr(a, "keepdim", False)))
        bits = w.tensor(a.self, torch.bool)
        if not axes:
            return w.op("Identity", bits)
        made = w.op(kind, w.op("Cast", bits, to=TensorProto.INT32), w.ints(axes), keepdims=keep)
        return w.op("Cast", made, to=TensorProto.BOOL)

    return made


def _extreme(kind: str) -> Handler:
    """`max.dim`: the values and the first place of each, as PyTorch on a processor."""

    def made(w: Writer, a: Any, out: Any) -> list[str]:
        axis, keep, x = axis_of(a.dim, w.meta(a.self).ndim), int(a.keepdim), w.tensor(a.self)
        values = w.op(f"Reduce{kind}", x, w.ints([axis]), keepdims=keep)
        return [values, w.op(f"Arg{kind}", x, axis=axis, keepdims=keep)]

    return made


def _arg(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        x = w.tensor(a.self)
        if a.dim is None:
            x = w.op("Reshape", x, w.ints([-1]))
            return w.op(kind, x, axis=0, keepdims=0)
        return w.op(kind, x, axis=axis_of(a.dim, w.meta(a.self).ndim), keepdims=int(a.keepdim))

    return made


def _cumsum(w: Writer, a: Any, out: Any) -> str:
    return w.op("CumSum", w.tensor(a.self, out.dtype), w.constant(axis_of(a.dim, out.ndim), torch.int64))


def _var(root: bool) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        x, axes, keep = w.tensor(a.self), _axes(w, a), int(bool(a.keepdim))
        centred = w.op("Sub", x, w.op("ReduceMean", x, w.ints(axes), keepdims=1))
        total = w.op("ReduceSum", w.op("Mul", centred, centred), w.ints(axes), keepdims=keep)
        count: Any = 1
        for axis in axes:
            count = count * w.meta(a.self).shape[axis]
        correction = 1.0 if a.correction is None else float(a.correction)
        divisor = w.op("Sub", w.tensor(count, torch.float32), w.constant(correction, torch.float32))
        divisor = w.op("Max", divisor, w.constant(0.0, torch.float32))
        found = w.op("Div", total, divisor)
        return w.op("Sqrt", found) if root else found

    return made


def _softmax(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        return w.op(kind, w.tensor(a.self, out.dtype), axis=axis_of(a.dim, max(out.ndim, 1)))

    return made


def operators() -> dict[str, Handler]:
    """The table of this module, by ATen name."""
    found: dict[str, Handler] = {name: _unary(kind) for name, kind in UNARY.items()}
    found |= {name: _binary(kind) for name, kind in BINARY.items()}
    found |= {name: _compare(kind) for name, kind in COMPARE.items()}
    found |= {name: _logic(kind) for name, kind in (LOGIC | BITWISE).items()}
    found |= dict.fromkeys(("alias", "clone", "detach", "lift_fresh_copy", "contiguous", "lift_fresh"), _same)
    found |= dict.fromkeys(("_to_copy", "to", "convert_element_type", "prims.convert_element_type"), _to)
    found |= dict.fromkeys(("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy"), _view)
    found |= dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor", "fill"), _full(None))
    found |= dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _full(0))
    empty = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided", "new_empty_strided")
    found |= dict.fromkeys(empty, _full(0))
    found |= dict.fromkeys(("ones", "ones_like", "new_ones"), _full(1))
    found |= dict.fromkeys(("split_with_sizes", "split"), _split_sizes)
    found |= dict.fromkeys(("clamp", "clamp_min", "clamp_max", "clip"), _clamp)
    found |= dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter)
    found |= dict.fromkeys(("index", "_unsafe_index"), _index)
    found |= dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put)
    found |= {
        "ne": _ne, "rsub": _rsub, "div": _div, "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod,
        "where": _where, "rsqrt": _rsqrt, "log2": _log_of(0, 1 / math.log(2)), "log10": _log_of(0, 1 / math.log(10)),
        "log1p": _log_of(1, 1), "expm1": _expm1, "exp2": _exp2, "trunc": _trunc,
        "permute": _permute, "transpose": _transpose, "t": _transpose, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
        "expand": _expand, "cat": _cat, "stack": _stack, "unbind": _unbind, "slice": _slice, "select": _select,
        "flip": _flip, "repeat": _repeat, "constant_pad_nd": _pad, "arange": _arange, "tril": _tri(False),
        "triu": _tri(True), "index_select": _index_select, "embedding": _embedding, "gather": _gather,
        "sum": _reduce("ReduceSum"), "mean": _reduce("ReduceMean"), "amax": _reduce("ReduceMax"),
        "amin": _reduce("ReduceMin"), "max": _reduce("ReduceMax"), "min": _reduce("ReduceMin"),
        "prod": _reduce("ReduceProd"), "any": _any_all("ReduceMax"), "all": _any_all("ReduceMin"),
        "max.dim": _extreme("Max"), "min.dim": _extreme("Min"), "argmax": _arg("ArgMax"), "argmin": _arg("ArgMin"),
        "cumsum": _cumsum, "var": _var(False), "std": _var(True),
        "hardtanh": _hardtanh, "copy": _copied, "slice_scatter": _slice_scatter, "as_strided": _as_strided,
        "as_strided_scatter": _as_strided_scatter, "linalg_vector_norm": _norm, "_softmax": _softmax("Softmax"), "_log_softmax": _softmax("LogSoftmax"),
    }  # fmt: skip
    return found


