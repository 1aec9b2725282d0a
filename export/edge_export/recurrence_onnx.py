"""The operators of `recurrence` as ONNX: a `Scan` over time, forward for the states, backward for their gradients.

PyTorch's exporter writes them as nodes of the domain `recurrence.DOMAIN`; `to_scans` then replaces each. The recurrent
weight is read from the outer graph, so no step copies it.
"""

from __future__ import annotations

from typing import Any

import onnxscript
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper
from onnx.defs import OpSchema

from edge_export.recurrence import DOMAIN

_OPS = onnxscript.values.Opset(DOMAIN, 1)


def translations() -> dict[Any, Any]:
    """What `torch.onnx.export` writes for each operator of `recurrence`."""
    forward, backward = _operator("Lstm", 4), _operator("LstmBackward", 6)

    def lstm(gates: Any, weight: Any, hidden: Any, cell: Any) -> Any:
        return forward(gates, weight, hidden, cell)

    def lstm_backward(grad: Any, grad_cell: Any, through: Any, slopes: Any, forget: Any, weight: Any) -> Any:
        return backward(grad, grad_cell, through, slopes, forget, weight)

    ops = torch.ops.maskfleet
    return {ops.lstm.default: lstm, ops.lstm_backward.default: lstm_backward}


def _operator(name: str, inputs: int) -> Any:
    """An operator of float32 tensors with three outputs."""
    parameters = [OpSchema.FormalParameter(f"i{k}", "T") for k in range(inputs)]
    outputs = [OpSchema.FormalParameter(f"o{k}", "T") for k in range(3)]
    floats = [("T", ["tensor(float)"], "float32")]
    schema = OpSchema(name, DOMAIN, 1, inputs=parameters, outputs=outputs, type_constraints=floats)
    return onnxscript.values.Op(_OPS, name, schema)


def to_scans(graph: GraphProto) -> None:
    """Replace every recurrence of `graph`, in place."""
    nodes: list[NodeProto] = []
    for at, node in enumerate(graph.node):
        made = {"Lstm": _forward, "LstmBackward": _backward}.get(node.op_type) if node.domain == DOMAIN else None
        nodes += [node] if made is None else made(node, f"r{at}")
    del graph.node[:]
    graph.node.extend(nodes)


def _forward(node: NodeProto, key: str) -> list[NodeProto]:
    gates, weight, hidden, cell = node.input
    states, cells, acts = node.output
    make = helper.make_node
    body = [
        make("Gemm", ["h", weight, "share"], ["z"], transB=1),
        make("Split", ["z"], ["zi", "zf", "zg", "zo"], axis=1, num_outputs=4),
        make("Sigmoid", ["zi"], ["i"]),
        make("Sigmoid", ["zf"], ["f"]),
        make("Tanh", ["zg"], ["g"]),
        make("Sigmoid", ["zo"], ["o"]),
        make("Mul", ["f", "c"], ["kept"]),
        make("Mul", ["i", "g"], ["added"]),
        make("Add", ["kept", "added"], ["c1"]),
        make("Tanh", ["c1"], ["squashed"]),
        make("Mul", ["o", "squashed"], ["h1"]),
        make("Concat", ["i", "f", "g", "o"], ["acts"], axis=1),
        make("Identity", ["h1"], ["hs"]),
        make("Identity", ["c1"], ["cs"]),
    ]
    graph = _body(key, body, ["h", "c", "share"], ["h1", "c1", "hs", "cs", "acts"])
    ends = [f"{key}h", f"{key}c"]
    return [make("Scan", [hidden, cell, gates], [*ends, states, cells, acts], body=graph, num_scan_inputs=1)]


def _backward(node: NodeProto, key: str) -> list[NodeProto]:
    grad, grad_cell, through, slopes, forget, weight = node.input
    gates, grad_hidden, grad_start = node.output
    make = helper.make_node
    body = [
        make("Add", ["dy", "dh"], ["total"]),
        make("Mul", ["total", "t"], ["from_state"]),
        make("Add", ["dc", "from_state"], ["of_cell"]),
        make("Concat", ["of_cell", "of_cell", "of_cell", "total"], ["all"], axis=1),
        make("Mul", ["s", "all"], ["dz"]),
        make("MatMul", ["dz", weight], ["dh1"]),
        make("Mul", ["of_cell", "f"], ["dc1"]),
    ]
    graph = _body(key, body, ["dh", "dc", "dy", "t", "s", "f"], ["dh1", "dc1", "dz"])
    zero = make("Sub", [grad_cell, grad_cell], [f"{key}z"])
    inputs = [f"{key}z", grad_cell, grad, through, slopes, forget]
    return [
        zero,
        make(
            "Scan",
            inputs,
            [grad_hidden, grad_start, gates],
            body=graph,
            num_scan_inputs=4,
            scan_input_directions=[1] * 4,
            scan_output_directions=[1],
        ),
    ]


def _body(key: str, nodes: list[NodeProto], inputs: list[str], outputs: list[str]) -> GraphProto:
    """A `Scan` body whose own names start with `key`; names of the outer graph stay as they are."""
    own = {*inputs, *(name for n in nodes for name in n.output)}
    for node in nodes:
        for values in (node.input, node.output):
            values[:] = [key + name if name in own else name for name in values]
    infos = [[helper.make_tensor_value_info(key + v, TensorProto.FLOAT, None) for v in vs] for vs in (inputs, outputs)]
    return helper.make_graph(nodes, "step", infos[0], infos[1])
