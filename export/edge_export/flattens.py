"""Writes every flatten of an evaluation graph as a `Flatten` node.

PyTorch's exporter writes `Reshape` to `[-1, features]`, which fixes the number of features in the graph. A model that
lost channels would no longer fit.
"""

from __future__ import annotations

from math import prod

from onnx import ModelProto, NodeProto, helper, numpy_helper, shape_inference


def free_flattens(model: ModelProto) -> ModelProto:
    """Replace, in place, each `Reshape` that joins all axes except the batch.

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
            _become_flatten(node)
    used = {name for node in graph.node for name in node.input}
    kept = [t for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def _become_flatten(node: NodeProto) -> None:
    node.op_type = "Flatten"
    del node.input[1:]
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", 1))
