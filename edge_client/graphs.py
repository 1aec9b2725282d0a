"""A check of an ONNX graph from the network, made once, before the file is kept and before a session opens it.

A device runs graphs that its coordinator sends. They may compute, and nothing else: no file of the device is read
through external data, no operator outside ONNX itself loads code, and no loop decides its own number of steps. What
`edge_export` writes passes: plain operators, and for recurrent layers `Scan`, whose steps are an axis of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from edge_client.errors import BundleError

GRAPH_MOST = 32 << 20  # bytes: weights are inputs of a graph, so a large file is not a graph of ours
DOMAINS = ("", "ai.onnx")


def check_graph(path: Path, name: str) -> None:
    """Raise BundleError unless the graph in `path`, part `name` of a bundle, is one that a device may run."""
    try:
        if path.stat().st_size > GRAPH_MOST:
            raise ValueError(f"it has more than {GRAPH_MOST} bytes")
        model = onnx.load(path, load_external_data=False)
        if model.functions:
            raise ValueError(f"it defines the function {model.functions[0].name!r}")
        _check(model.graph, scans=True)
    except ValueError as error:
        raise BundleError(
            f"{name} is refused: {error}; a device runs plain ONNX graphs as `maskfleet export` writes them"
        ) from None
    except Exception as error:  # protobuf's own error class depends on its version
        raise BundleError(f"{name} is not an ONNX graph ({error}); export the bundle again") from None


def _check(graph: GraphProto, scans: bool) -> None:
    """Raise ValueError for what no graph, or with `scans` False no body of a Scan, may hold."""
    for tensor in graph.initializer:
        _check_stored(tensor)
    for sparse in graph.sparse_initializer:
        _check_stored(sparse.values)
        _check_stored(sparse.indices)
    for node in graph.node:
        what = f"node {node.name or node.output[:1]!s:.60}"
        if node.domain not in DOMAINS:
            raise ValueError(f"{what} is {node.op_type!r} of domain {node.domain!r}")
        if node.op_type in ("Loop", "If"):
            raise ValueError(f"{what} is a {node.op_type}")
        for tensor in _tensors(node):
            _check_stored(tensor)
        for body in _bodies(node):
            if node.op_type != "Scan" or not scans:
                raise ValueError(f"{what} is {node.op_type!r} with a graph inside {'it' if scans else 'a Scan'}")
            _check(body, scans=False)


def _check_stored(tensor: TensorProto) -> None:
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise ValueError(f"tensor {tensor.name!r:.60} lies in another file")


def _tensors(node: NodeProto) -> Iterator[TensorProto]:
    for a in node.attribute:
        if a.type == AttributeProto.TENSOR:
            yield a.t
        elif a.type == AttributeProto.SPARSE_TENSOR:
            yield from (a.sparse_tensor.values, a.sparse_tensor.indices)
        yield from a.tensors
        for sparse in a.sparse_tensors:
            yield from (sparse.values, sparse.indices)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for a in node.attribute:
        if a.HasField("g"):
            yield a.g
        yield from a.graphs
