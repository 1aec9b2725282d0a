"""A traced ATen graph written as ONNX, one small function for each operator.

`onnx_operators`, `onnx_moves` and `onnx_layers` hold the functions. Each takes the `Writer`, the operator's arguments
by the names of its schema, and the traced output, a tensor without storage that has the shape and dtype; it returns the
name of the ONNX value. Sizes are constants but for the batch, a symbol: an expression of it is computed by the graph.

An operator without a function, or a setting that its function does not know, raises :class:`Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from types import SimpleNamespace
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor
from torch.fx import GraphModule, Node

OPSET, IR_VERSION = 20, 10
ALL = np.iinfo(np.int64).max  # the end of a slice that takes the rest
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}

_OF_SIZES = {"FloorDiv": "Div", "CleanDiv": "Div", "Max": "Max", "Min": "Min", "Mod": "Mod", "PythonMod": "Mod"}
"""ONNX's operator for a function of sizes, which are not negative."""

Handler = Callable[["Writer", Any, Any], Any]


class Unsupported(Exception):
    """An ATen operator that no ONNX operator stands for: its name, and what is in the way."""

    def __init__(self, operator: str, why: str = "") -> None:
        super().__init__(operator, why)
        self.operator, self.why = operator, why


class Writer:
    """The ONNX graph while it is written. Values are names; `values` maps the traced nodes to them."""

    def __init__(self, endless: bool = False) -> None:
        self.endless = endless  # whether a gradient may be infinite where all values are finite
        self.graph = GraphProto(name="g")
        self.values: dict[Node, Any] = {}
        self.batch: dict[sympy.Symbol, str] = {}  # a symbol's value, int64[1]
        self.operator = ""
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._sizes: dict[sympy.Expr, str] = {}
        self._types: dict[str, torch.dtype] = {}
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def refuse(self, why: str) -> Unsupported:
        return Unsupported(self.operator, why)

    def op(self, kind: str, *inputs: str, **settings: Any) -> str:
        """One node of one output."""
        return self.ops(kind, 1, *inputs, **settings)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, domain: str = "", **settings: Any) -> list[str]:
        """One node of several outputs."""
        made = [self.fresh() for _ in range(outputs)]
        reads = list(inputs)
        while reads and not reads[-1]:
            reads.pop()
        given = {k: v for k, v in settings.items() if v is not None}
        self.graph.node.append(helper.make_node(kind, reads, made, domain=domain, **given))
        return made

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The name of a constant; python numbers need the dtype."""
        if isinstance(value, Tensor):
            tensor = value.detach().cpu()
            array: NDArray[Any] = (tensor if dtype is None else tensor.to(dtype)).contiguous().numpy()
        else:
            array = np.asarray(value, dtype=str(dtype or torch.int64).removeprefix("torch."))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self.fresh()
            self.graph.initializer.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> str:
        """A constant vector int64."""
        return self.constant(np.asarray(list(values), np.int64).reshape(-1), torch.int64)

    # --- what an argument of an operator is

    def tensor(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The value of a tensor or number argument, cast to `dtype` when given."""
        if isinstance(value, Node):
            found = value.meta["val"]
            if isinstance(found, Tensor):
                name: str = self.values[value]
                return self.cast(name, found.dtype, dtype)
            value = found
        if isinstance(value, torch.SymInt | torch.SymFloat):
            name = self.op("Squeeze", self.size(value), self.ints([0]))
            kind = torch.int64 if isinstance(value, torch.SymInt) else torch.float32
            return self.cast(name, kind, dtype)
        return self.constant(value, dtype)

    def cast(self, name: str, have: torch.dtype, want: torch.dtype | None) -> str:
        if want is None or have == want:
            return name
        if want not in TYPES:
            raise self.refuse(f"makes {want}; keep to float32, int64 and bool")
        return self.op("Cast", name, to=TYPES[want])

    # --- sizes

    @staticmethod
    def meta(value: Any) -> Any:
        """The traced value of an argument: a tensor without storage, a number, or a symbolic size."""
        return value.meta["val"] if isinstance(value, Node) else value

    def fixed(self, value: Any) -> int | None:
        """A size as a number; None when it depends on the batch."""
        found = self.meta(value)
        if isinstance(found, torch.SymInt):
            expr = found.node.expr
            return int(expr) if expr.is_number else None
        return int(found)

    def size(self, value: Any) -> str:
        """A size int64[1], or for a SymFloat float32[1], as the graph computes it."""
        found = self.meta(value)
        if isinstance(found, torch.SymInt | torch.SymFloat):
            return self._expression(found.node.expr)
        return self.ints([int(found)])

    def _expression(self, expr: sympy.Expr) -> str:
        if expr in self._sizes:
            return self._sizes[expr]
        kind = type(expr).__name__
        if expr in self.batch:
            return self.batch[expr]
        if expr.is_Symbol:
            raise self.refuse("takes a tensor's value as a Python number; keep it a tensor")
        if expr.is_Integer:
            return self.ints([int(expr)])
        if expr.is_number:
            return self.constant([float(expr)], torch.float32)
        if kind in ("Max", "Min"):  # shape inference follows sums and products only
            sign = 1 if kind == "Max" else -1
            ahead = [all((a - o).is_number and sign * (a - o) >= 0 for o in expr.args) for a in expr.args]
            if any(ahead):
                return self._expression(expr.args[ahead.index(True)])
        parts = [self._expression(a) for a in expr.args]
        if kind in ("Add", "Mul"):
            same = self._floats(expr.args, parts) if any(map(_is_float, expr.args)) else parts
            name = reduce(partial(self.op, kind), same)
        elif kind in _OF_SIZES:
            name = self.op(_OF_SIZES[kind], *parts)
        elif kind == "ToFloat":
            name = self.op("Cast", parts[0], to=TensorProto.FLOAT)
        elif kind in ("IntTrueDiv", "FloatTrueDiv"):
            name = self.op("Div", *self._floats(expr.args, parts))
        elif kind in ("Pow", "PowByNatural", "FloatPow") and expr.args[1].is_Integer and 1 <= int(expr.args[1]) <= 4:
            name = reduce(partial(self.op, "Mul"), [parts[0]] * int(expr.args[1]))
        elif kind == "Pow" and expr.args[1] == -1:
            name = self.op("Reciprocal", self.op("Cast", parts[0], to=TensorProto.FLOAT))
        else:
            raise self.refuse(f"has a size that is {expr} for a batch of n samples")
        self._sizes[expr] = name
        return name

    def _floats(self, args: Sequence[sympy.Expr], parts: Sequence[str]) -> list[str]:
        """The `parts`, which are the values of `args`, as floats."""
        cast = partial(self.op, "Cast", to=TensorProto.FLOAT)
        return [p if _is_float(a) else cast(p) for p, a in zip(parts, args, strict=True)]

    def shape(self, sizes: Sequence[Any]) -> str:
        """A shape as an int64 vector."""
        fixed = [self.fixed(s) for s in sizes]
        if all(s is not None for s in fixed):
            return self.ints([int(s) for s in fixed if s is not None])
        parts = [self.size(s) for s in sizes]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def reshape(self, name: str, sizes: Sequence[Any]) -> str:
        """`Reshape` to `sizes`; a single size that depends on the batch is left to the operator."""
        fixed = [self.fixed(s) for s in sizes]
        if fixed.count(None) <= 1 and 0 not in fixed:
            return self.op("Reshape", name, self.ints([-1 if s is None else s for s in fixed]))
        return self.op("Reshape", name, self.shape(sizes))


def _is_float(expr: sympy.Expr) -> bool:
    return (
        type(expr).__name__ in ("ToFloat", "IntTrueDiv", "FloatTrueDiv")
        or any(map(_is_float, expr.args))
        or (bool(expr.is_number) and not expr.is_Integer)
    )


def to_onnx(traced: GraphModule, operators: Mapping[str, Handler]) -> ModelProto:
    """`traced` as an ONNX model whose inputs and outputs have the order of its placeholders and results."""
    w = Writer(any(_is_endless(node) for node in traced.graph.nodes))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            _input(w, node)
        elif node.op == "get_attr":
            value: Any = traced
            for step in str(node.target).split("."):
                value = getattr(value, step)
            node.meta.setdefault("val", value)
            w.values[node] = w.constant(value)
        elif node.op == "call_function":
            _call(w, node, operators)
        elif node.op == "output":
            _outputs(w, node.args[0])
    _trim(w.graph)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("maskfleet", 1)]
    return helper.make_model(w.graph, opset_imports=opsets, ir_version=IR_VERSION)


_ENDLESS = {  # operators whose derivative is infinite where the argument of this number is 0
    **dict.fromkeys((f"{name}.default" for name in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10")), 0),
    "div.Tensor": 1,
    "pow.Tensor_Scalar": 0,
}


def _is_endless(node: Node) -> bool:
    """Whether the derivative at 0 is infinite: a root, a logarithm, a divisor without a positive number added."""
    place = _ENDLESS.get(str(node.target).removeprefix("aten."))
    if place is None or (node.target is torch.ops.aten.pow.Tensor_Scalar and not 0 != float(node.args[1]) < 1):  # type: ignore[arg-type]
        return False
    at = node.args[place]
    if not isinstance(at, Node) or not isinstance(at.meta.get("val"), Tensor) or not at.meta["val"].ndim:
        return False
    shift = at.args[1] if str(at.target).startswith("aten.add.") else 0
    return not (isinstance(shift, int | float) and shift > 0)


def _trim(graph: GraphProto) -> None:
    """Drop what a node gives last and no node reads."""
    read = {name for node in graph.node for name in node.input} | {v.name for v in graph.output}
    for node in graph.node:
        while len(node.output) > 1 and node.output[-1] not in read and node.domain == "" and node.op_type != "Split":
            del node.output[-1]


def _input(w: Writer, node: Node) -> None:
    value = node.meta["val"]
    name = w.fresh()
    sizes = [w.fixed(s) for s in value.shape]
    w.graph.input.append(
        helper.make_tensor_value_info(
            name, TYPES[value.dtype], [f"n{i}" if s is None else s for i, s in enumerate(sizes)]
        )
    )
    w.values[node] = name
    for axis, size in enumerate(value.shape):
        if sizes[axis] is None and size.node.expr.is_Symbol and size.node.expr not in w.batch:
            w.batch[size.node.expr] = w.op("Shape", name, start=axis, end=axis + 1)


def _call(w: Writer, node: Node, operators: Mapping[str, Handler]) -> None:
    if node.target is getitem:
        source, index = node.args
        made = w.values[source]  # type: ignore[index]
        w.values[node] = made[index]
        if made[index] is None:
            raise Unsupported(w.operator, "has an output that ONNX's operator does not give")
        return
    if not isinstance(node.meta.get("val"), Tensor | tuple | list):
        return  # arithmetic on sizes: `Writer.size` computes what is used
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported(str(target))
    w.operator = str(target).removeprefix("aten.").rpartition(".")[0]
    w.operator = w.operator.removesuffix("_copy") if w.operator != "_to_copy" else w.operator
    handler = operators.get(str(target).removeprefix("aten.")) or operators.get(w.operator)
    if handler is None:
        raise Unsupported(w.operator)
    made = handler(w, _arguments(target, node), node.meta["val"])
    w.values[node] = made
    if isinstance(made, str) and isinstance(node.meta["val"], Tensor):
        info = helper.make_tensor_value_info(
            made, TYPES.get(node.meta["val"].dtype, TensorProto.FLOAT), ["?"] * node.meta["val"].ndim
        )
        w.graph.value_info.append(info)


def _arguments(target: Any, node: Node) -> SimpleNamespace:
    given = dict(node.kwargs)
    found = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(node.args):
            found[argument.name] = node.args[i]
        elif argument.name in given:
            found[argument.name] = given[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return SimpleNamespace(**found)


def _outputs(w: Writer, results: Any) -> None:
    inputs = {v.name for v in w.graph.input}
    constants = {t.name for t in w.graph.initializer}
    used: set[str] = set()
    for result in results if isinstance(results, list | tuple) else [results]:
        value, name = result.meta["val"], w.values[result]
        if name in inputs or name in constants or name in used:  # an output has a node and a name of its own
            name = w.op("Identity", name)
        used.add(name)
        sizes = [w.fixed(s) for s in value.shape]
        dims = [f"n{i}" if s is None else s for i, s in enumerate(sizes)]
        w.graph.output.append(helper.make_tensor_value_info(name, TYPES[value.dtype], dims))
