"""What an operator does with the axes of its inputs, by name, as in ``Gemm: [m, k], [k, n], [n] -> [m, n]``.

Axes of one name go together, entry by entry; the name of an axis of the output is its number. A name that the output
lacks is summed over. Along an axis that is `whole`, what the operator computes depends on every entry: a softmax, the
window of a pool. Operators that move entries from one axis to others (reshapes, slices, concatenations) are not here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from onnx import NodeProto

from edge_client.graph.nodes import settings

Shape = tuple[int, ...]
Names = tuple[int | str | None, ...]
"""None: an axis that is like no other, such as one of a single entry, which is broadcast."""

# Every element of the output is computed of one element of each input, which are broadcast.
POINTWISE = re.compile(
    "Abs|Acos|Acosh|Add|And|Asin|Asinh|Atan|Atanh|Cast|Ceil|Celu|Clip|Cos|Cosh|Div|Elu|Equal|Erf|Exp|Floor|Gelu|"
    "Greater|GreaterOrEqual|HardSigmoid|HardSwish|Identity|IsInf|IsNaN|LeakyRelu|Less|LessOrEqual|Log|Max|Mean|Min|"
    "Mish|Mod|Mul|Neg|Not|Or|PRelu|Pow|Reciprocal|Relu|Round|Selu|Shrink|Sigmoid|Sign|Sin|Sinh|Softplus|Softsign|Sqrt|"
    "Sub|Sum|Tan|Tanh|ThresholdedRelu|Where|Xor"
)


@dataclass(frozen=True)
class Axes:
    """The names of the axes of each input and of the outputs, and those that are whole."""

    inputs: tuple[Names, ...]
    output: Names
    whole: frozenset[int | str] = frozenset()


def axes_of(node: NodeProto, shapes: Sequence[Shape], out: Shape, listed: Sequence[int] | None = None) -> Axes | None:
    """The axes of `node`; None for an operator that is not here.

    `shapes` are those of its inputs, () for one left out, `out` that of its first output. `listed` are the axes that a
    reduction names.
    """
    kind, given = node.op_type, settings(node)
    own, made = tuple(range(len(shapes[0]))), tuple(range(len(out)))
    if POINTWISE.fullmatch(kind):
        return _alike(shapes, out)
    if kind == "Expand":
        return _alike(shapes[:1], out)
    if kind in ("Softmax", "LogSoftmax", "GatherElements", "ScatterElements"):
        return _alike(shapes, out, [given.get("axis", -1 if kind.endswith("max") else 0) % len(out)])
    if kind == "LayerNormalization":
        return _alike(shapes, out, made[given.get("axis", -1) :])
    if kind == "BatchNormalization":
        whole = frozenset(set(own) - {1} if given.get("training_mode") else ())
        return Axes((own, *[(1,)] * (len(shapes) - 1)), own, whole)
    if kind.endswith("Pool"):
        return Axes((own,), own, frozenset(own[2:]))
    if kind.startswith("Arg"):
        return _reduced(node, own, made, [given.get("axis", 0)])
    if kind.startswith("Reduce"):
        return _reduced(node, own, made, listed)
    if kind == "Transpose":
        order = given.get("perm", own[::-1])
        return Axes((tuple(order.index(i) for i in own),), made)
    if kind == "Gather":
        axis, more = given.get("axis", 0) % len(own), len(shapes[1]) - 1
        data: Names = tuple("taken" if i == axis else i + more * (i > axis) for i in own)
        return Axes((data, made[axis : axis + more + 1]), made, frozenset({"taken"}))
    if kind == "ScatterND":
        rows = tuple(f"row {i}" for i in range(len(shapes[1]) - 1))
        taken, rest = made[: shapes[1][-1]], made[shapes[1][-1] :]
        return Axes((made, (*rows, "place"), (*rows, *rest)), made, frozenset({*taken, *rows, "place"}))
    return _summed(node, shapes, out)


def _summed(node: NodeProto, shapes: Sequence[Shape], out: Shape) -> Axes | None:
    """The axes of a product of matrices or a convolution."""
    kind, given, made = node.op_type, settings(node), tuple(range(len(out)))
    if kind == "Gemm":
        a: Names = ("sum", 0) if given.get("transA") else (0, "sum")
        b: Names = (1, "sum") if given.get("transB") else ("sum", 1)
        return Axes((a, b, *(_broadcast(s, out) for s in shapes[2:])), made)
    if kind == "MatMul" and min(map(len, shapes)) > 1:
        lead = [_broadcast((*s[:-2], 1, 1), out)[:-2] for s in shapes]
        first: Names = (*lead[0], made[-2], "sum")
        second: Names = (*lead[1], "sum", made[-1])
        return Axes((first, second), made)
    if kind in ("Conv", "ConvTranspose") and given.get("group", 1) == 1:
        space = made[2:]
        window = tuple(f"window {i}" for i in space)
        weight: Names = (1, "sum", *window) if kind == "Conv" else ("sum", 1, *window)
        inputs: tuple[Names, ...] = ((0, "sum", *space), weight, (1,))
        return Axes(inputs[: len(shapes)], made, frozenset({*space, *window}))
    return None


def _reduced(node: NodeProto, own: tuple[int, ...], made: tuple[int, ...], listed: Sequence[int] | None) -> Axes:
    given = settings(node)
    every = () if given.get("noop_with_empty_axes") else own
    gone = {i % len(own) for i in listed or every}
    kept = [i for i in own if i not in gone or given.get("keepdims", 1)]
    names: Names = tuple(f"reduced {i}" if i in gone else kept.index(i) for i in own)
    return Axes((names,), made, frozenset(n for n in names if isinstance(n, str)))


def _broadcast(shape: Shape, out: Shape) -> Names:
    first = len(out) - len(shape)
    return tuple(i if n == out[i] > 1 else None for i, n in enumerate(shape, first))


def _alike(shapes: Sequence[Shape], out: Shape, whole: Sequence[int] = ()) -> Axes:
    return Axes(tuple(_broadcast(s, out) for s in shapes), tuple(range(len(out))), frozenset(whole))
