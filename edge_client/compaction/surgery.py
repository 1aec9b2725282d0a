"""Edits of an exported evaluation graph.

`freeze` puts values in, folds batch-norm and removes leftovers. `widen` makes the same graph compute in
float64: the reference that a folded graph is compared with.

Both work on the form that `edge_export` writes: parameters and statistics are graph inputs by name.
`edge_client.compaction.smaller` removes channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_client.bundle import F32
from edge_client.compaction.batch_norm import F64, folded
from edge_client.errors import CompactionError

_WIDENED = frozenset({"BatchNormalization", "Gemm"})
# The other operators that ONNX Runtime has in float64: they stay in float64 when their input is.
_STAY_WIDE = frozenset({"Relu", "Clip", "Tanh", "Sigmoid", "MaxPool", "Flatten"})


def freeze(model: ModelProto, tensors: Mapping[str, F32 | F64], *, fold: bool = True) -> ModelProto:
    """A copy of `model` with `tensors` as float32 constants and its data input alone.

    With `fold`, a batch-norm behind a linear or convolution layer becomes part of that layer; float64 values are
    rounded afterwards. Recorded shapes of intermediate values and the exporter's notes are dropped. Raises
    CompactionError when the graph has other inputs.
    """
    frozen = ModelProto()
    frozen.CopyFrom(model)
    graph = frozen.graph
    for name, value in tensors.items():
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
    inputs = [i for i in graph.input if i.name not in tensors]
    if len(inputs) != 1:
        raise CompactionError(
            f"beside the bundle's tensors eval.onnx has inputs {[i.name for i in inputs]}, it must have one; "
            "export the bundle again"
        )
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    if fold:
        _fold_batch_norms(graph)
    own = set(tensors)
    for tensor in graph.initializer:
        if tensor.name in own and tensor.data_type == TensorProto.DOUBLE:
            _store(tensor, _read(tensor))
    _drop_unused(graph)
    return frozen


def widen(model: ModelProto, kinds: Collection[str] = _WIDENED) -> ModelProto:
    """A copy of `model`, with the same inputs and outputs, that computes in float64 where rounding would be multiplied.

    `kinds` are the operators that run in float64 whatever is before them.

    Batch-norm divides by sqrt(variance + epsilon): by 0.003 for a unit that never moved in training. In float32 it
    multiplies the rounding of its input, and of its own cancelling terms, by 300. Here batch-norms, linear layers and
    the plain operations between them run on float64 copies of their inputs. ONNX Runtime has convolutions in float32
    only: where a batch-norm alone reads one, its bias is left out and subtracted from the batch-norm's mean instead.
    Weights are not touched, so nothing is shared with the folding done by `freeze`.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(output.name for output in graph.output)
    norms = (n for n in graph.node if n.op_type == "BatchNormalization" and len(n.output) == 1)
    alone = {n.input[0] for n in norms if uses[n.input[0]] == 1}
    biases: dict[str, str] = {}  # the bias left out of each convolution, by its output
    wide: dict[str, str] = {}  # a value's float64 name
    nodes: list[NodeProto] = []
    for node in graph.node:
        out, read = node.output[0], node.input[0] if node.input else ""
        if node.op_type == "Conv" and out in alone and len(node.input) > 2:
            biases[out] = node.input[2]
            del node.input[2:]
        if not (node.op_type in kinds or (node.op_type in _STAY_WIDE and read in wide)) or len(node.output) > 1:
            nodes.append(node)
            continue
        for name in (*node.input, *([biases[read]] if read in biases else [])):
            if name and name not in wide:
                wide[name] = f"{name}:wide"
                nodes.append(_cast(name, wide[name], TensorProto.DOUBLE))
        node.input[:] = [wide.get(name, "") for name in node.input]
        if read in biases:
            nodes.append(helper.make_node("Sub", [node.input[3], wide[biases[read]]], [f"{out}:mean"]))
            node.input[3] = f"{out}:mean"
        wide[out] = node.output[0] = f"{out}:wide"
        nodes += [node, _cast(wide[out], out, TensorProto.FLOAT)]
    del graph.value_info[:], graph.node[:]
    graph.node.extend(nodes)
    return made


def _cast(name: str, to: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [name], [to], to=kind)


def _bias_name(weight: str) -> str:
    return f"{weight}.bias"


def _add_bias(graph: GraphProto, weight: str, bias: F32 | F64) -> None:
    """Give a bias to the layer of `weight`. Raises CompactionError unless there is such a layer without one."""
    node = next((n for n in graph.node if len(n.input) > 1 and n.input[1] == weight), None)
    if node is None or not _is_layer(node) or (len(node.input) > 2 and node.input[2]):
        raise CompactionError(
            f"eval.onnx has no Conv or Gemm(transB=1) without bias on weight {weight!r}; export the bundle again"
        )
    name = _bias_name(weight)
    del node.input[2:]
    node.input.append(name)
    graph.initializer.append(numpy_helper.from_array(bias, name))


def _is_layer(node: NodeProto) -> bool:
    """Whether axis 0 of input 1 is the output channels of `node` and input 2 their bias."""
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
    """Fold every batch-norm that is the only reader of a layer into that layer's weights, in float64."""
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
        before = [_read(values[name]) for name in own]
        epsilon = attributes["epsilon"].f if "epsilon" in attributes else 1e-5
        of_norm = [_read(values[name]) for name in norm.input[1:]]
        weight, bias = folded(before[0], before[1] if len(own) > 1 else None, of_norm, epsilon, 0)
        _store(values[own[0]], weight)
        if len(own) > 1:
            _store(values[own[1]], bias)
        else:
            _add_bias(graph, layer.input[1], bias.astype(np.float32))
        layer.output[0] = norm.output[0]
        graph.node.remove(norm)


def _read(tensor: TensorProto) -> F64:
    return numpy_helper.to_array(tensor).astype(np.float64)


def _store(tensor: TensorProto, value: F64) -> None:
    tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))


def _drop_unused(graph: GraphProto) -> None:
    """Remove constants that no node reads, subgraphs included."""
    used = {output.name for output in graph.output}
    pending = [graph]
    while pending:
        for node in pending.pop().node:
            used.update(node.input)
            pending.extend(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    kept = [t for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
