"""Small passes over an exported ONNX graph: fewer nodes, canonical names, no metadata.

    identities -> common subexpressions -> transposes folded into Gemm -> keepdims folded -> dead nodes
    -> names and order -> recurrences as scans -> flattens (evaluation graphs)

Each pass is a function over :class:`onnx.GraphProto`, in place. Same graph in, same bytes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper, shape_inference

from edge_client.compaction.net import needed
from edge_client.graph.nodes import set_attribute, settings
from edge_export.recurrence_onnx import to_scans

# Names of a graph's inputs and outputs beside the module's tensors, and of the values in between that `_canonical` and
# `to_scans` make. No tensor of a module may have one.
OWN_NAMES = re.compile(r"(x|y|key|loss|logits|[cnrtv]\d.*|grad:.*|new:.*)$")


def tidy(model: ModelProto, inputs: list[str], outputs: list[str]) -> ModelProto:
    """`model`, reduced, with its inputs and outputs renamed in order."""
    graph = model.graph
    if len(graph.input) != len(inputs) or len(graph.output) != len(outputs):
        raise ValueError(f"the graph has {len(graph.input)} inputs and {len(graph.output)} outputs")
    ranks = _ranks(graph)
    while _fold_identities(graph) + _fold_common(graph) + _fold_transposes(graph, ranks) + _fold_keepdims(graph, ranks):
        _drop_dead(graph)
    _drop_dead(graph)
    return _canonical(model, inputs, outputs)


def _ranks(graph: GraphProto) -> dict[str, int]:
    ranks = {t.name: len(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


def _set(field: Any, values: Iterable[Any]) -> None:
    """Replace the entries of a repeated field; `values` may come from it."""
    kept = list(values)
    del field[:]
    field.extend(kept)


def _set_attributes(node: NodeProto, given: dict[str, Any]) -> None:
    _set(node.attribute, [helper.make_attribute(k, v) for k, v in sorted(given.items())])


def _replace(graph: GraphProto, names: dict[str, str]) -> int:
    """Read value `names[old]` wherever `old` was read. Values that are graph outputs must not be among the old."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            while name in names:
                name = names[name]
            node.input[i] = name
    return len(names)


def _fold_identities(graph: GraphProto) -> int:
    outputs = {o.name for o in graph.output}
    same = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity" and n.output[0] not in outputs}
    _set(graph.node, [n for n in graph.node if n.op_type != "Identity" or n.output[0] in outputs])
    return _replace(graph, same)


def _fold_common(graph: GraphProto) -> int:
    """Nodes that compute the same thing become one."""
    outputs = {o.name for o in graph.output}
    same: dict[str, str] = {}
    seen: dict[tuple[object, ...], NodeProto] = {}
    for node in graph.node:
        reads = tuple(same.get(name, name) for name in node.input)
        fields = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        first_node = seen.setdefault((node.op_type, reads, *fields), node)
        if first_node is not node and not outputs & set(node.output) and len(node.output) == len(first_node.output):
            same |= dict(zip(node.output, first_node.output, strict=True))
    _set(graph.node, [n for n in graph.node if n.output[0] not in same])
    return _replace(graph, same)


def _fold_transposes(graph: GraphProto, ranks: dict[str, int]) -> int:
    """A two-dimensional product of transposed operands becomes a `Gemm` with `transA`, `transB`."""
    makers = {name: n for n in graph.node for name in n.output}
    folded = 0
    for node in graph.node:
        if node.op_type == "MatMul" and [ranks.get(name) for name in node.input] == [2, 2]:
            node.op_type = "Gemm"
            folded += 1
        if node.op_type == "Transpose":
            inner = makers.get(node.input[0])
            if inner is not None and inner.op_type == "Transpose" and _swaps(node) and _swaps(inner):
                node.op_type = "Identity"
                node.input[0] = inner.input[0]
                del node.attribute[:]
                folded += 1
        if node.op_type != "Gemm":
            continue
        given = settings(node)
        for side, name in enumerate(("transA", "transB")):
            made = makers.get(node.input[side])
            if made is not None and made.op_type == "Transpose" and _swaps(made):
                node.input[side] = made.input[0]
                given[name] = 1 - given.get(name, 0)
                folded += 1
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
        _set_attributes(node, {k: v for k, v in given.items() if v != plain[k]})
    return folded


def _swaps(node: NodeProto) -> bool:
    return settings(node).get("perm") == [1, 0]


def _fold_keepdims(graph: GraphProto, ranks: dict[str, int]) -> int:
    """``Reshape(Reduce(x, axes, keepdims=1))`` that only drops the reduced axes becomes ``keepdims=0``."""
    makers = {name: n for n in graph.node for name in n.output}
    constants = {t.name: t for t in graph.initializer}
    readers: dict[str, int] = {o.name: 1 for o in graph.output}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    folded = 0
    for node in graph.node:
        made = makers.get(node.input[0]) if node.op_type in ("Reshape", "Squeeze") else None
        if made is None or made.op_type not in ("ReduceSum", "ReduceMean") or readers[made.output[0]] != 1:
            continue
        given = settings(made)
        axes = constants.get(made.input[1]) if len(made.input) > 1 else None
        rank = ranks.get(made.input[0])
        if given.get("keepdims", 1) != 1 or axes is None or rank is None or ranks.get(node.output[0]) is None:
            continue
        # One axis left: any reshape to one dimension is that axis.
        if rank - numpy_helper.to_array(axes).size == 1 == ranks[node.output[0]]:
            set_attribute(made, "keepdims", 0)
            made.output[0] = node.output[0]
            node.op_type = "Dead"
            folded += 1
    _set(graph.node, [n for n in graph.node if n.op_type != "Dead"])
    return folded


def _drop_dead(graph: GraphProto) -> None:
    """Remove nodes and constants that no output depends on."""
    kept, live = needed(graph.node, {o.name for o in graph.output})
    _set(graph.node, kept)
    _set(graph.initializer, [t for t in graph.initializer if t.name in live])


def _canonical(model: ModelProto, inputs: list[str], outputs: list[str]) -> ModelProto:
    """The same graph under canonical names, with no names of nodes, doc strings, metadata or shapes in between."""
    old = model.graph
    names = {"": ""}
    names |= {v.name: new for v, new in zip(old.input, inputs, strict=True)}
    names |= {v.name: new for v, new in zip(old.output, outputs, strict=True)}
    graph = GraphProto(name="step" if "loss" in outputs else "model")
    for values, made in ((old.input, graph.input), (old.output, graph.output)):
        for value in values:
            new = made.add()
            new.name = names[value.name]
            new.type.CopyFrom(value.type)
            for axis, dim in enumerate(new.type.tensor_type.shape.dim):
                if dim.dim_param:
                    dim.dim_param = "n" if axis == 0 else f"n{axis}"
    for i, tensor in enumerate(old.initializer):
        names[tensor.name] = f"c{i}"
        graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(tensor), f"c{i}"))
    for node in old.node:
        for name in node.output:
            names.setdefault(name, f"v{len(names)}")
        made_node = graph.node.add()
        made_node.op_type, made_node.domain = node.op_type, node.domain
        made_node.input.extend(names[name] for name in node.input)
        made_node.output.extend(names[name] for name in node.output)
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            made_attribute = made_node.attribute.add()
            made_attribute.CopyFrom(attribute)
            made_attribute.doc_string = ""
    to_scans(graph)
    domains = sorted({n.domain for n in graph.node} | {""})
    imports = [o for o in model.opset_import if o.domain in domains]
    tidy_model = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version, producer_name="maskfleet")
    onnx.checker.check_model(tidy_model)
    return tidy_model


def free_flattens(model: ModelProto) -> ModelProto:
    """Write each `Reshape` that joins all axes except the batch as a `Flatten`, in place.

    PyTorch's exporter writes `[-1, features]`, which a model that lost channels would no longer fit.

    Such a reshape has two axes, and the second is as large as all the input's axes after the first together. A reshape
    that mixes samples into another axis, as `[n, t, f]` to `[n * t, f]`, differs in that.
    """
    graph = model.graph
    inferred = shape_inference.infer_shapes(model).graph
    sizes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]  # 0 where it is symbolic
        for value in (*inferred.input, *inferred.value_info)
    }
    targets = {t.name: numpy_helper.to_array(t).tolist() for t in graph.initializer if t.data_type == t.INT64}
    for node in graph.node:
        target = targets.get(node.input[1]) if node.op_type == "Reshape" else None
        features = sizes.get(node.input[0], [])[1:] if target is not None else []
        if target is not None and len(target) == 2 and features and all(features) and target[1] == prod(features):
            node.op_type = "Flatten"
            del node.input[1:]
            _set_attributes(node, {"axis": 1})
    _drop_dead(graph)
    return model
