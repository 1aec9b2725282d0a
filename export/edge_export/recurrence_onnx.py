"""The operators of `recurrence` as ONNX: a `Scan` over time, forward for the states, backward for their gradients.

`onnx_layers` writes them as nodes of the domain `DOMAIN`; `to_scans` then replaces each. The recurrent
weight is read from the outer graph, so no step copies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx import GraphProto, NodeProto, TensorProto, helper

from edge_export.recurrence_single import DOMAIN


def to_scans(graph: GraphProto) -> None:
    """Replace every recurrence of `graph`, in place. Names of the bodies start with a prefix that no other name has."""
    taken = {v.name for v in (*graph.input, *graph.output)}
    nodes: list[NodeProto] = []
    for at, node in enumerate(graph.node):
        made = _SCANS.get(node.op_type) if node.domain == DOMAIN else None
        key = f"r{at}"
        while any(name.startswith(key) for name in taken):
            key += "_"
        nodes += [node] if made is None else made(node, key)
    del graph.node[:]
    graph.node.extend(nodes)


def _lstm(node: NodeProto, key: str) -> list[NodeProto]:
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


def _lstm_backward(node: NodeProto, key: str) -> list[NodeProto]:
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


def _gru(node: NodeProto, key: str) -> list[NodeProto]:
    gates, weight, bias, hidden = node.input
    states, acts = node.output
    make = helper.make_node
    body = [
        make("Gemm", ["h", weight, bias], ["own"], transB=1),
        make("Split", ["own"], ["hr", "hz", "hn"], axis=1, num_outputs=3),
        make("Split", ["share"], ["xr", "xz", "xn"], axis=1, num_outputs=3),
        make("Add", ["xr", "hr"], ["sr"]),
        make("Add", ["xz", "hz"], ["sz"]),
        make("Sigmoid", ["sr"], ["r"]),
        make("Sigmoid", ["sz"], ["z"]),
        make("Mul", ["r", "hn"], ["gated"]),
        make("Add", ["xn", "gated"], ["sn"]),
        make("Tanh", ["sn"], ["n"]),
        make("Sub", ["h", "n"], ["over"]),
        make("Mul", ["z", "over"], ["carried"]),
        make("Add", ["n", "carried"], ["h1"]),
        make("Concat", ["r", "z", "n", "hn"], ["acts"], axis=1),
        make("Identity", ["h1"], ["hs"]),
    ]
    graph = _body(key, body, ["h", "share"], ["h1", "hs", "acts"])
    return [make("Scan", [hidden, gates], [f"{key}e", states, acts], body=graph, num_scan_inputs=1)]


def _gru_backward(node: NodeProto, key: str) -> list[NodeProto]:
    grad, through, slopes, weight, hidden = node.input
    totals, gates, start = node.output
    make = helper.make_node
    body = [
        make("Add", ["dy", "dh"], ["total"]),
        make("Concat", ["total", "total", "total"], ["all"], axis=1),
        make("Mul", ["s", "all"], ["dz"]),
        make("MatMul", ["dz", weight], ["by_gates"]),
        make("Mul", ["total", "t"], ["past"]),
        make("Add", ["past", "by_gates"], ["dh1"]),
        make("Identity", ["total"], ["totals"]),
    ]
    graph = _body(key, body, ["dh", "dy", "t", "s"], ["dh1", "totals", "dz"])
    return _backwards(key, graph, hidden, [grad, through, slopes], [start, totals, gates])


def _rnn(node: NodeProto, key: str) -> list[NodeProto]:
    share, weight, hidden = node.input
    relu = any(a.name == "relu" and a.i for a in node.attribute)
    make = helper.make_node
    body = [
        make("Gemm", ["h", weight, "share"], ["z"], transB=1),
        make("Relu" if relu else "Tanh", ["z"], ["h1"]),
        make("Identity", ["h1"], ["hs"]),
    ]
    graph = _body(key, body, ["h", "share"], ["h1", "hs"])
    return [make("Scan", [hidden, share], [f"{key}e", node.output[0]], body=graph, num_scan_inputs=1)]


def _rnn_backward(node: NodeProto, key: str) -> list[NodeProto]:
    grad, slopes, weight, hidden = node.input
    make = helper.make_node
    body = [
        make("Add", ["dy", "dh"], ["total"]),
        make("Mul", ["s", "total"], ["dz"]),
        make("MatMul", ["dz", weight], ["dh1"]),
    ]
    graph = _body(key, body, ["dh", "dy", "s"], ["dh1", "dz"])
    return _backwards(key, graph, hidden, [grad, slopes], [node.output[1], node.output[0]])


def _backwards(key: str, body: GraphProto, start: str, scanned: list[str], outputs: list[str]) -> list[NodeProto]:
    """A scan from the last step to the first, whose state starts at zeros of the shape of `start`."""
    make, count = helper.make_node, len(scanned)
    settings: dict[str, Any] = {
        "scan_input_directions": [1] * count,
        "scan_output_directions": [1] * (len(outputs) - 1),
    }
    return [
        make("Sub", [start, start], [f"{key}z"]),
        make("Scan", [f"{key}z", *scanned], outputs, body=body, num_scan_inputs=count, **settings),
    ]


def _body(key: str, nodes: list[NodeProto], inputs: list[str], outputs: list[str]) -> GraphProto:
    """A `Scan` body whose own names start with `key`; names of the outer graph stay as they are."""
    own = {*inputs, *(name for n in nodes for name in n.output)}
    for node in nodes:
        for values in (node.input, node.output):
            values[:] = [key + name if name in own else name for name in values]
    infos = [[helper.make_tensor_value_info(key + v, TensorProto.FLOAT, None) for v in vs] for vs in (inputs, outputs)]
    return helper.make_graph(nodes, "step", infos[0], infos[1])


_SCANS: dict[str, Callable[[NodeProto, str], list[NodeProto]]] = {
    "Lstm": _lstm,
    "LstmBackward": _lstm_backward,
    "Gru": _gru,
    "GruBackward": _gru_backward,
    "Rnn": _rnn,
    "RnnBackward": _rnn_backward,
}
