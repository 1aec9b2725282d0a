"""Edits of an exported evaluation graph, whose parameters and statistics are graph inputs by name.

`freeze` puts their values in: what `preparation` reads. `widen` makes the same graph compute in float64: the reference
that a folded graph is compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_client.bundle import F32
from edge_client.compaction.net import inner_reads
from edge_client.errors import CompactionError

_WIDENED = frozenset({"BatchNormalization", "ReduceMean", "Gemm"})  # other norms begin with a mean
# The other operators that ONNX Runtime has in float64: they stay in float64 when their first input is.
_STAY_WIDE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Relu", "Clip", "Tanh", "Sigmoid", "MaxPool", "Flatten"}
)


def freeze(model: ModelProto, tensors: Mapping[str, F32]) -> ModelProto:
    """A copy of `model` with `tensors` as constants, those that it reads, and its data input alone.

    Recorded shapes of intermediate values and the exporter's notes are dropped. Raises CompactionError when the graph
    has other inputs.
    """
    frozen = ModelProto()
    frozen.CopyFrom(model)
    graph = frozen.graph
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
    used = {o.name for o in graph.output}.union(*({*node.input, *inner_reads(node)} for node in graph.node))
    kept = [t for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)  # before the tensors: a message keeps the memory of what it dropped
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items() if name in used)
    return frozen


def widen(model: ModelProto, kinds: Collection[str] = _WIDENED) -> ModelProto:
    """A copy of `model`, with the same inputs and outputs, that computes in float64 where rounding would be multiplied.

    `kinds` are the operators that run in float64 whatever is before them.

    A norm divides by sqrt(variance + epsilon): by 0.003 for a unit that never moved in training, or whose weights are
    all masked. In float32 it multiplies the rounding of its input, and of its own cancelling terms, by 300. Here
    norms, linear layers and the plain operations between them run on float64 copies of their inputs. ONNX Runtime has
    convolutions in float32 only: where a batch-norm alone reads one, its bias is left out and subtracted from the
    batch-norm's mean instead.

    Weights stay as they are: the folding of norms, by `preparation`, is compared with a graph that folds nothing.
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
        numbers = [read] if node.op_type == "ReduceMean" else [*node.input]  # its axes are integers
        for name in (*numbers, *([biases[read]] if read in biases else [])):
            if name and name not in wide:
                wide[name] = f"{name}:wide"
                nodes.append(_cast(name, wide[name], TensorProto.DOUBLE))
        node.input[: len(numbers)] = [wide.get(name, "") for name in numbers]
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
