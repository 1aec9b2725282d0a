"""An evaluation graph with its values put in: the data structure that the analysis and the surgery work on.

`preparation` makes it. Constants are float64. Layers may share one; a layer that is written anew gets one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_client.compaction.operators import Array, Operators

Shape = tuple[int, ...]


@dataclass
class Net:
    """A graph with one input and one output. Shapes and values are those for one sample.

    `model` has its name, its input and output, and the version of its operators, but no values. `constants` are
    float64, or of their own type when they are no floats. `moving` marks the axes that hold the batch, alone or merged
    with others. `sizes` are the values computed from shapes alone.
    """

    model: ModelProto
    nodes: list[NodeProto]
    constants: dict[str, Array]
    input: str
    output: str
    operators: Operators
    shapes: dict[str, Shape] = field(default_factory=dict)
    moving: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    kinds: dict[str, np.dtype[Any]] = field(default_factory=dict)
    sizes: dict[str, Array] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """The bundle's tensor that a constant is made of, the first one."""
    ids: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For a constant that is made of the bundle's tensors by moves alone, the numbers of their elements."""
    computed: dict[str, NodeProto] = field(default_factory=dict)
    """For a constant that is computed of the bundle's tensors, the node that made it."""
    growing: set[str] = field(default_factory=set)
    """The sizes that depend on the number of samples."""
    repeated: set[str] = field(default_factory=set)
    """The sizes that consist of one equal block for each sample along one axis."""

    def add_constant(self, name: str, value: Array, of: str = "") -> str:
        """Enter a constant; `of` is the one that it is made of, empty for none. Returns `name`."""
        self.constants[name], self.shapes[name], self.kinds[name] = value, value.shape, value.dtype
        self.moving[name] = (False,) * value.ndim
        if of in self.origins:
            self.origins[name] = self.origins[of]
        return name

    def move_constant(self, old: str, name: str, move: Callable[[NDArray[Any]], NDArray[Any]]) -> str:
        """Enter what `move` makes of the constant `old`, its elements and their numbers alike. Returns `name`."""
        if old in self.ids:
            self.ids[name] = move(self.ids[old])
        return self.add_constant(name, np.ascontiguousarray(move(self.constants[old])), old)

    def declare(self, name: str, like: str, shape: Sequence[int] | None = None, batch: int = 0) -> str:
        """Enter a value like another, or of its type and of `shape` with its batch along `batch`. Returns `name`."""
        self.shapes[name], self.kinds[name], self.moving[name] = self.shapes[like], self.kinds[like], self.moving[like]
        if shape is not None:
            self.shapes[name], self.moving[name] = tuple(shape), tuple(a == batch for a in range(len(shape)))
        return name

    def is_float(self, name: str) -> bool:
        """Whether a value holds floats."""
        return self.kinds[name].kind == "f"

    def is_plain(self, name: str) -> bool:
        """Whether a value holds floats or truth values."""
        return self.kinds[name].kind in "fb"

    def layer(self, node: NodeProto) -> str:
        """The name of the weight of a layer; empty for a node that has none."""
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"):
            return ""
        weights = [v for v in node.input[:2] if v in self.constants and self.constants[v].ndim > 1]
        return self.origins.get(weights[0], "") if weights else ""

    def data_nodes(self) -> list[NodeProto]:
        """The nodes that compute with data, in order: all but those of sizes."""
        return [n for n in self.nodes if n.output[0] not in self.sizes]

    def data(self, node: NodeProto) -> list[int]:
        """The inputs of `node` that carry data: neither constants nor sizes."""
        return [k for k, v in enumerate(node.input) if v and v not in self.constants and v not in self.sizes]

    def known(self, name: str) -> Array:
        """A constant, or a size for one sample. Raises KeyError for a value that carries data."""
        return self.constants[name] if name in self.constants else self.sizes[name]

    def tensors(self, name: str) -> list[str]:
        """`name`, or of a computed constant those of its sources whose elements have numbers."""
        if name not in self.computed:
            return [name] if name in self.ids else []
        return list(dict.fromkeys(t for v in self.computed[name].input for t in self.tensors(v)))

    def users(self) -> dict[str, list[NodeProto]]:
        """The nodes that read each value."""
        found: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                found.setdefault(name, []).append(node)
        return found


def build(
    net: Net,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, Array],
    outputs: Sequence[Any],
    given: Mapping[str, Array] = {},
) -> ModelProto:
    """The ONNX model of `nodes` with `constants` in float32; its inputs are the data's and the float32 ones `given`."""
    inputs = [*net.model.graph.input]
    inputs += [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in given.items()]
    graph = helper.make_graph(
        list(nodes),
        net.model.graph.name or "model",
        inputs,
        list(outputs),
        [numpy_helper.from_array(narrow(v), k) for k, v in constants.items()],
    )
    return helper.make_model(
        graph,
        opset_imports=net.model.opset_import,
        ir_version=net.model.ir_version,
        producer_name=net.model.producer_name,
    )


def drop_unused(net: Net) -> None:
    """Remove nodes and constants that the output does not depend on."""
    net.nodes, live = needed(net.nodes, {net.output})
    for name, node in reversed(net.computed.items()):
        live |= set(node.input) if name in live else set()
    net.constants = {k: v for k, v in net.constants.items() if k in live}


def needed(nodes: Sequence[NodeProto], outputs: set[str]) -> tuple[list[NodeProto], set[str]]:
    """The nodes that `outputs` depend on, in order; and `outputs` with all values that these read."""
    live, kept = set(outputs), []
    for node in reversed(nodes):
        if live.intersection(filter(None, node.output)):
            live |= {*node.input, *inner_reads(node)}
            kept.append(node)
    return kept[::-1], live


def narrow(value: Array) -> Array:
    """Floats as float32, others as they are."""
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def subgraphs(node: NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def inner_reads(node: NodeProto) -> set[str]:
    """Names that the subgraphs of a node read."""
    return {v for g in subgraphs(node) for v in _outer(g)}


def _outer(graph: onnx.GraphProto) -> set[str]:
    """Names that a subgraph reads, its own ones among them."""
    found = {v for n in graph.node for v in n.input} | {o.name for o in graph.output}
    return found.union(*(_outer(g) for n in graph.node for g in subgraphs(n)))
