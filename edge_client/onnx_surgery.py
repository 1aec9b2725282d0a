"""Edits of an exported evaluation graph: values put in, biases created, batch-norm folded, leftovers removed.

Works on the canonical form that `edge_export` writes: parameters and statistics are graph inputs by name, a linear
layer is `Gemm(transB=1)`, a convolution `Conv`, batch-norm `BatchNormalization`, a flatten takes no fixed sizes.
What values to put in is decided in `edge_client.personal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from edge_client.bundle import F32
from edge_client.errors import CompactionError


def freeze(model: ModelProto, tensors: Mapping[str, F32], biases: Mapping[str, F32]) -> ModelProto:
    """A copy of `model` with `tensors` as constants and only its data input left.

    `biases` adds a bias to the layer of each weight named. Batch-norm behind a linear or convolution layer becomes
    part of it. Shapes recorded for intermediate values and notes of the exporter are dropped.
    Raises CompactionError when the graph is not in the canonical form.
    """
    frozen = ModelProto()
    frozen.CopyFrom(model)
    graph = frozen.graph
    for name, value in tensors.items():
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
    for weight, bias in biases.items():
        _add_bias(graph, weight, bias)
    inputs = [i for i in graph.input if i.name not in tensors]
    if len(inputs) != 1:
        raise CompactionError(
            f"eval.onnx has inputs {[i.name for i in inputs]} beside the bundle's tensors, it should have one; "
            "export the bundle again"
        )
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    _fold_batch_norms(graph)
    _drop_unused(graph)
    return frozen


def _add_bias(graph: GraphProto, weight: str, bias: F32) -> None:
    """Give the layer of `weight`, which has none, a bias."""
    node = next((n for n in graph.node if len(n.input) > 1 and n.input[1] == weight), None)
    if node is None or not _is_layer(node) or (len(node.input) > 2 and node.input[2]):
        raise CompactionError(
            f"eval.onnx has no Conv or Gemm(transB=1) without bias on weight {weight!r}; export the bundle again"
        )
    name = f"{weight}.bias"
    del node.input[2:]
    node.input.append(name)
    graph.initializer.append(numpy_helper.from_array(bias, name))


def _is_layer(node: NodeProto) -> bool:
    """Whether axis 0 of input 1 makes `node`'s channels and input 2 is added to them."""
    if node.op_type == "Conv":
        return True
    attributes = {a.name: a for a in node.attribute}
    return (
        node.op_type == "Gemm"
        and "transB" in attributes
        and attributes["transB"].i == 1
        and not ("transA" in attributes and attributes["transA"].i)
        and all(attributes[a].f == 1.0 for a in ("alpha", "beta") if a in attributes)
    )


def _fold_batch_norms(graph: GraphProto) -> None:
    """Scale the weights of every layer whose only reader is a batch-norm, in float64, and remove the batch-norm."""
    values = {t.name: t for t in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(output.name for output in graph.output)
    makers = {name: node for node in graph.node for name in node.output}
    for norm in [n for n in graph.node if n.op_type == "BatchNormalization"]:
        layer = makers.get(norm.input[0])
        attributes = {a.name: a for a in norm.attribute}
        training = "training_mode" in attributes and attributes["training_mode"].i
        if layer is None or not _is_layer(layer) or training or uses[norm.input[0]] != 1:
            continue
        own = [name for name in layer.input[1:] if name]
        if any(name not in values for name in (*own, *norm.input[1:])) or any(uses[name] != 1 for name in own):
            continue
        weight = _read(values[layer.input[1]])
        bias = _read(values[own[1]]) if len(own) > 1 else np.zeros(len(weight))
        gamma, beta, mean, variance = (_read(values[name]) for name in norm.input[1:])
        epsilon = attributes["epsilon"].f if "epsilon" in attributes else 1e-5
        scale = gamma / np.sqrt(variance + epsilon)
        _store(values[layer.input[1]], weight * scale.reshape(-1, *[1] * (weight.ndim - 1)))
        if len(own) > 1:
            _store(values[own[1]], (bias - mean) * scale + beta)
        else:
            _add_bias(graph, layer.input[1], ((bias - mean) * scale + beta).astype(np.float32))
        layer.output[0] = norm.output[0]
        graph.node.remove(norm)


def _read(tensor: TensorProto) -> NDArray[np.float64]:
    return numpy_helper.to_array(tensor).astype(np.float64)


def _store(tensor: TensorProto, value: NDArray[np.float64]) -> None:
    tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))


def _drop_unused(graph: GraphProto) -> None:
    """Remove constants that no node reads (subgraphs included)."""
    used = {output.name for output in graph.output}
    pending = [graph]
    while pending:
        for node in pending.pop().node:
            used.update(node.input)
            pending.extend(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    kept = [t for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
