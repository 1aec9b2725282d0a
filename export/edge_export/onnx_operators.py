"""Elementwise and reducing ATen operators as ONNX. See `onnx_writer`."""

from __future__ import annotations

import math
from typing import Any

import torch
from onnx import TensorProto

from edge_export.onnx_moves import INTEGERS, axis_of
from edge_export.onnx_writer import Handler, Writer

UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor",
    "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round", "sigmoid": "Sigmoid",
    "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
    "isnan": "IsNaN", "isinf": "IsInf", "logical_not": "Not", "bitwise_not": "Not",
}  # fmt: skip
BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
COMPARE = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}
LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
BITWISE = {"bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor"}


def _unary(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        have = w.meta(a.self).dtype
        if kind == "Not":
            if have != torch.bool and w.operator == "bitwise_not":
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


def _remainder(w: Writer, a: Any, out: Any) -> str:
    x, y = w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype)
    if not out.dtype.is_floating_point:
        return w.op("Mod", x, y)
    return w.op("Sub", x, w.op("Mul", w.op("Floor", w.op("Div", x, y)), y))


def _fmod(w: Writer, a: Any, out: Any) -> str:
    return w.op("Mod", w.tensor(a.self, out.dtype), w.tensor(a.other, out.dtype), fmod=1)


def _compare(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        common = torch.result_type(w.meta(a.self), w.meta(a.other))
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


def _log_of(scale: float) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        return w.op("Mul", w.op("Log", w.tensor(a.self, out.dtype)), w.constant(scale, out.dtype))

    return made


def _log1p(w: Writer, a: Any, out: Any) -> str:
    """``log(1 + x)`` with what ``1 + x`` rounds off, ``r``: ``log(u + r) = log(u) + r / u``, to float32's precision."""
    x, one = w.tensor(a.self, out.dtype), w.constant(1.0, out.dtype)
    u = w.op("Add", x, one)
    kept = w.op("Sub", u, one)
    lost = w.op("Div", w.op("Sub", x, kept), u)
    exact = w.op("Equal", kept, x)  # at -1 and infinity too, where `lost` is no number
    return w.op("Add", w.op("Log", u), w.op("Where", exact, w.constant(0.0, out.dtype), lost))


def _expm1(w: Writer, a: Any, out: Any) -> str:
    """``exp(x) - 1`` without the cancellation near zero, finite wherever it is: ``tanh(x / 2) (exp(x) + 1)``."""
    x = w.tensor(a.self, out.dtype)
    half = w.op("Mul", x, w.constant(0.5, out.dtype))
    return w.op("Mul", w.op("Tanh", half), w.op("Add", w.op("Exp", x), w.constant(1.0, out.dtype)))


def _exp2(w: Writer, a: Any, out: Any) -> str:
    return w.op("Exp", w.op("Mul", w.tensor(a.self, out.dtype), w.constant(math.log(2.0), out.dtype)))


def _trunc(w: Writer, a: Any, out: Any) -> str:
    x = w.tensor(a.self, out.dtype)
    return w.op("Mul", w.op("Sign", x), w.op("Floor", w.op("Abs", x)))


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


def _var(w: Writer, a: Any, out: Any) -> str:
    x, axes, keep = w.tensor(a.self), _axes(w, a), int(bool(a.keepdim))
    centred = w.op("Sub", x, w.op("ReduceMean", x, w.ints(axes), keepdims=1))
    total = w.op("ReduceSum", w.op("Mul", centred, centred), w.ints(axes), keepdims=keep)
    count: Any = 1
    for axis in axes:
        count = count * w.meta(a.self).shape[axis]
    correction = 1.0 if a.correction is None else float(a.correction)
    divisor = w.op("Sub", w.tensor(count, torch.float32), w.constant(correction, torch.float32))
    return w.op("Div", total, w.op("Max", divisor, w.constant(0.0, torch.float32)))


def _softmax(kind: str) -> Handler:
    def made(w: Writer, a: Any, out: Any) -> str:
        return w.op(kind, w.tensor(a.self, out.dtype), axis=axis_of(a.dim, max(out.ndim, 1)))

    return made


def _hardtanh(w: Writer, a: Any, out: Any) -> str:
    low, high = w.constant(a.min_val, out.dtype), w.constant(a.max_val, out.dtype)
    return w.op("Min", w.op("Max", w.tensor(a.self, out.dtype), low), high)


def _norm(w: Writer, a: Any, out: Any) -> str:
    axes, keep, x = _axes(w, a), int(bool(a.keepdim)), w.tensor(a.self, out.dtype)
    if a.ord == 2:
        return w.op("Sqrt", w.op("ReduceSum", w.op("Mul", x, x), w.ints(axes), keepdims=keep))
    if a.ord == 1:
        return w.op("ReduceSum", w.op("Abs", x), w.ints(axes), keepdims=keep)
    if a.ord == math.inf:
        return w.op("ReduceMax", w.op("Abs", x), w.ints(axes), keepdims=keep)
    if a.ord <= 0:
        raise w.refuse(f"has order {a.ord}; use a positive order")
    powers = w.op("ReduceSum", w.op("Pow", w.op("Abs", x), w.constant(a.ord, out.dtype)), w.ints(axes), keepdims=keep)
    return w.op("Pow", powers, w.constant(1 / a.ord, out.dtype))


def operators() -> dict[str, Handler]:
    """The table of this module, by ATen name."""
    found: dict[str, Handler] = {name: _unary(kind) for name, kind in UNARY.items()}
    found |= {name: _binary(kind) for name, kind in BINARY.items()}
    found |= {name: _compare(kind) for name, kind in COMPARE.items()}
    found |= {name: _logic(kind) for name, kind in (LOGIC | BITWISE).items()}
    found |= {
        "ne": _ne, "clamp": _clamp, "div": _div, "remainder": _remainder, "fmod": _fmod,
        "where": _where, "rsqrt": _rsqrt, "log2": _log_of(1 / math.log(2)), "log10": _log_of(1 / math.log(10)),
        "log1p": _log1p, "expm1": _expm1, "exp2": _exp2, "trunc": _trunc, "hardtanh": _hardtanh,
        "sum": _reduce("ReduceSum"), "mean": _reduce("ReduceMean"), "amax": _reduce("ReduceMax"),
        "amin": _reduce("ReduceMin"), "max": _reduce("ReduceMax"), "min": _reduce("ReduceMin"),
        "prod": _reduce("ReduceProd"), "any": _any_all("ReduceMax"), "all": _any_all("ReduceMin"),
        "max.dim": _extreme("Max"), "min.dim": _extreme("Min"), "argmax": _arg("ArgMax"), "argmin": _arg("ArgMin"),
        "cumsum": _cumsum, "var": _var, "linalg_vector_norm": _norm,
        "_softmax": _softmax("Softmax"), "_log_softmax": _softmax("LogSoftmax"),
    }  # fmt: skip
    return found
