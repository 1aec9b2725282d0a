"""Multiply-adds of an ONNX model, by shape inference: numpy and onnx only, nothing runs.

Counted are the contractions: convolutions (transposed, integer and quantised ones too), Gemm, MatMul, Einsum, LSTM, GRU
and RNN; a Scan's body counts once a step. A multiply-add is one multiplication with its addition. Biases, batch-norms,
activations and pools are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_shapes

from edge_client.errors import ConfigError
from edge_client.graph.nodes import GATES, settings

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shape of every value by name; None where an axis is unknown."""
SIZES = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
MOST = 64  # entries of a tensor that counts as one of sizes
DATA = ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data")  # of a tensor
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "FusedConv": 1, "NhwcFusedConv": 1, "QLinearConv": 3}  # weight's place
_PRODUCTS = {"MatMul": 1, "MatMulInteger": 1, "FusedMatMul": 1, "QLinearMatMul": 3}  # second operand's place
OWN = ("", "ai.onnx")  # names of the domain of ONNX's own operators
_UNKNOWN = ("Attention", "DeformConv")


def macs(model: ModelProto | bytes | Path) -> int:
    """Multiply-adds of `model`. An unknown first axis of an input counts as 1.

    Raises ConfigError for any other unknown axis, and for an operator whose work is not known here.
    """
    return _count(_with_shapes(model).graph, {}, 1)


def _with_shapes(model: ModelProto | bytes | Path) -> ModelProto:
    """A copy of `model` with the shape of every value as inferred for one sample."""
    made = ModelProto()
    if isinstance(model, ModelProto):
        made.CopyFrom(model)
    elif isinstance(model, bytes):
        made.ParseFromString(model)
    else:
        made = onnx.load(model)
    for tensor in made.graph.initializer:
        if prod(tensor.dims) >= MOST:  # inference needs their shapes alone, and copies a model several times
            for values in DATA:
                tensor.ClearField(values)
    made = ModelProto.FromString(made.SerializeToString())  # a message keeps the memory of what was cleared
    if made.functions:
        made = inline_local_functions(made)
    stored = {t.name for t in made.graph.initializer}
    for value in made.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in stored and len(dims) and not dims[0].HasField("dim_value"):
            dims[0].dim_value = 1
    for value in made.graph.output:  # declared by the writer, for any batch
        value.type.tensor_type.ClearField("shape")
    inferred = made
    while True:
        del inferred.graph.value_info[:]
        inferred = infer_shapes(inferred, data_prop=True)
        if not _settle_sizes(inferred.graph):
            return inferred


def _settle_sizes(graph: GraphProto) -> bool:
    """Put values in place of the nodes that compute sizes from known shapes, which inference follows only in part.

    Whether there were any.
    """
    known = _shapes(graph)
    sizes = {
        t.name: numpy_helper.to_array(t) for t in graph.initializer if t.data_type in SIZES and prod(t.dims) < MOST
    }
    before = len(sizes)
    left = []
    for node in graph.node:
        made = _sizes(node, known, sizes)
        if made is None:
            left.append(node)
        else:
            sizes[node.output[0]] = made
            graph.initializer.append(numpy_helper.from_array(made, node.output[0]))
    del graph.node[:]
    graph.node.extend(left)
    return len(sizes) > before


def _shapes(graph: GraphProto, outer: Shapes | None = None) -> dict[str, tuple[int, ...] | None]:
    """The recorded shape of every value of `graph`, and of those of `outer` graphs that it reads."""
    known = {**(outer or {}), **{t.name: tuple(t.dims) for t in graph.initializer}}
    known |= {n.output[0]: _constant_shape(n) for n in graph.node if n.op_type == "Constant"}
    declared = (*graph.input, *graph.value_info, *graph.output)
    return {**known, **{v.name: _shape(v) for v in declared if v.name not in known or known[v.name] is None}}


def _sizes(node: NodeProto, known: Shapes, sizes: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """The sizes that `node` computes, when it does and they are known."""
    if node.domain not in OWN or len(node.output) != 1 or any(a.HasField("g") for a in node.attribute):
        return None
    given = {name: sizes[name] for name in node.input if name in sizes}
    if node.op_type in ("Shape", "Size"):
        shape = known.get(node.input[0])
        if shape is None:
            return None
        given = {node.input[0]: np.broadcast_to(np.int64(0), shape)}
    elif any(name and name not in sizes for name in node.input) or prod(known.get(node.output[0]) or (MOST,)) >= MOST:
        return None
    outputs: Any = ReferenceEvaluator(node).run(None, given)
    made = np.asarray(outputs[0])
    return made if made.dtype.kind in "ib" else None


def _count(graph: GraphProto, outer: Shapes, times: int) -> int:
    """Multiply-adds of a graph that runs so many `times`."""
    known, total = _shapes(graph, outer), 0
    for node in graph.node:
        what = node.name or (node.output[0] if node.output else "")
        if node.op_type == "Scan":
            given = settings(node)
            steps = _need(known, node, node.input[-given["num_scan_inputs"]])
            total += _count(given["body"], known, times * steps[given.get("scan_input_axes", [0])[0]])
        elif node.op_type in ("If", "Loop"):
            raise ConfigError(f"node {what!r} is a {node.op_type}: its work depends on the data and cannot be counted")
        else:
            total += times * _macs(node, known)
    return total


def _macs(node: NodeProto, known: Shapes) -> int:
    """Multiply-adds of one node, 0 for one that contracts nothing."""
    kind = node.op_type
    if kind in _CONVOLUTIONS:  # weight [out, in / groups, *kernel]
        weight = _need(known, node, node.input[_CONVOLUTIONS[kind]])
        return prod(_need(known, node, node.output[0])) * prod(weight[1:])
    if kind == "ConvTranspose":  # weight [in, out / groups, *kernel]
        return prod(_need(known, node, node.input[0])) * prod(_need(known, node, node.input[1])[1:])
    if kind == "Gemm":
        a = _need(known, node, node.input[0])
        return prod(_need(known, node, node.output[0])) * a[0 if settings(node).get("transA") else 1]
    if kind in _PRODUCTS:
        a, b = (_need(known, node, node.input[i]) for i in (0, _PRODUCTS[kind]))
        return prod(np.broadcast_shapes(a[:-2], b[:-2])) * prod(a[-2:]) * (b[-1] if len(b) > 1 else 1)
    if kind == "Einsum":
        return _einsum(node, [_need(known, node, name) for name in node.input])
    if kind in GATES:  # x [steps, n, in], recurrent weight [directions, gates * hidden, hidden]
        x, recurrent = _need(known, node, node.input[0]), _need(known, node, node.input[2])
        return x[0] * x[1] * recurrent[0] * recurrent[1] * (x[2] + recurrent[2])
    if kind in _UNKNOWN or node.domain not in OWN:
        what = f"{node.domain}'s {kind}" if node.domain else kind
        raise ConfigError(
            f"node {node.name or node.output[0]!r} is {what}, whose multiply-adds are not known; count the model as it "
            "was before an engine rewrote it"
        )
    return 0


def _einsum(node: NodeProto, operands: Sequence[tuple[int, ...]]) -> int:
    equation = settings(node)["equation"].decode().replace(" ", "")
    if len(operands) < 2:
        return 0
    if "..." in equation:
        raise ConfigError(
            f"node {node.name or node.output[0]!r} is an Einsum {equation!r}: name every axis to count it"
        )
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.partition("->")[0].split(","), operands, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return prod(sizes.values())


def _need(known: Shapes, node: NodeProto, name: str) -> tuple[int, ...]:
    shape = known.get(name)
    if shape is None:
        raise ConfigError(
            f"the shape of {name!r} at node {node.name or node.output[0]!r} ({node.op_type}) cannot be inferred, "
            "so its multiply-adds cannot be counted; give every input of the model fixed axes but the first"
        )
    return shape


def _constant_shape(node: NodeProto) -> tuple[int, ...] | None:
    given = settings(node)
    if "value" in given:
        return tuple(given["value"].dims)
    values = list(given.values())
    return (len(values[0]),) if values and isinstance(values[0], (list, tuple)) else ()


def _shape(value: ValueInfoProto) -> tuple[int, ...] | None:
    kind = value.type.tensor_type
    if kind.elem_type == TensorProto.UNDEFINED or not kind.HasField("shape"):
        return None
    sizes = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return None if -1 in sizes else sizes
