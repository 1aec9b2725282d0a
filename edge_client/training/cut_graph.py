"""A graph while channels are cut out of it: what stays of each value, and the nodes written so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, helper, numpy_helper

from edge_client.errors import ConfigError
from edge_client.graph.axes import Shape
from edge_client.narrow import Axes, taken

UNLIKE = "joins values of which different channels stay"


class Cut:
    """`axes` has what stays of each value that loses something, `lengths` that of the value whose shape a vector is.

    `source` is the graph that is followed or, within a Scan, its body, and `nodes` are those written so far. Nodes that
    make a value of `done` are written already, as a part of an earlier one. `parameters`, moved or not, are zero in
    what they lose. Where `lenient`, a sum may run over entries that one factor has lost.
    """

    def __init__(self, graph: GraphProto, shapes: dict[str, Shape | None], tensors: Mapping[str, Axes]) -> None:
        self.graph, self.source, self.shapes = graph, graph, shapes
        self.constants = {t.name: t for t in graph.initializer}
        self.parameters = {v.name for v in graph.input}
        self.axes: dict[str, Axes] = {v.name: tensors[v.name] for v in graph.input if v.name in tensors}
        self.lengths: dict[str, Axes] = {}
        self.nodes: list[NodeProto] = []
        self.done: set[str] = set()
        self.lenient = False
        self._made: dict[tuple[Any, ...], str] = {}
        self._count = 0

    def put(self, name: str, axes: Axes) -> None:
        """Of the value `name` stays `axes`."""
        self.axes.pop(name, None)
        axes = tuple(None if stays is None or stays.all() else stays for stays in axes)
        if any(stays is not None for stays in axes):
            self.axes[name] = axes

    def shape(self, name: str) -> Shape:
        """The shape in the whole graph, for the batch that `cut` infers shapes of; () for an input that is left out."""
        found = self.shapes[name] if name else ()
        if found is None:
            raise ConfigError("the shape of a value does not follow from the graph")
        return found

    def stays(self, name: str) -> Axes:
        """What stays of a value."""
        return self.axes.get(name) or (None,) * len(self.shape(name))

    def values(self, node: NodeProto, index: int) -> list[int]:
        """Input `index` of `node`, which must be a constant of integers."""
        if len(node.input) <= index or node.input[index] not in self.constants:
            raise refusal(node, "takes no constant sizes")
        found: list[int] = numpy_helper.to_array(self.constants[node.input[index]]).ravel().tolist()
        return found

    def fit(self, node: NodeProto, index: int, due: Axes) -> None:
        """Let `node` read of input `index` only `due`, entries that stay of it."""
        name, own = node.input[index], self.stays(node.input[index])
        if name in self.constants and any(stays is not None for stays in due):
            node.input[index] = self.constant(taken(numpy_helper.to_array(self.constants[name]), due))
            return
        for axis, (mine, stays) in enumerate(zip(own, due, strict=True)):
            if stays is not None and not equal((mine,), (stays,)):
                if mine is not None and not mine[stays].all():
                    raise refusal(node, UNLIKE)
                kept = self.constant(np.flatnonzero(stays if mine is None else stays[mine]))
                node.input[index] = self.emit("Gather", [node.input[index], kept], axis=axis)
                self.shapes[node.input[index]] = self.shapes[name]
                own = (*own[:axis], stays, *own[axis + 1 :])
                self.put(node.input[index], own)

    def sized(self, name: str, axes: Axes) -> str:
        """The vector `name`, the sizes of the last of `axes`, with the sizes of what stays."""
        due = axes[len(axes) - self.shape(name)[0] :]
        sizes = np.array([0 if stays is None else stays.sum() for stays in due], np.int64)
        if not sizes.any():
            return name
        if name in self.constants:
            before = numpy_helper.to_array(self.constants[name])
            return self.constant(np.where((sizes > 0) & (before > 1), sizes, before))
        return self.emit("Where", [self.constant(sizes > 0), self.constant(sizes), name])

    def emit(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        made = self.fresh()
        self.nodes.append(helper.make_node(op, inputs, [made], **attributes))
        return made

    def fresh(self) -> str:
        """A name that no value has."""
        while (name := f"n{self._count}") in self.shapes:
            self._count += 1
        self.shapes[name] = None
        return name

    def constant(self, value: NDArray[Any]) -> str:
        """The name of a new constant, one for all that are equal."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            made = numpy_helper.from_array(value, self.fresh())
            self._made[key], self.constants[made.name], self.shapes[made.name] = made.name, made, value.shape
            self.graph.initializer.append(made)
        return self._made[key]


def refusal(node: NodeProto, why: str) -> ConfigError:
    """The error of a node that does not allow the cut."""
    return ConfigError(f"{node.op_type} {why}")


def equal(a: Axes, b: Axes) -> bool:
    """Whether the same entries stay."""
    return len(a) == len(b) and all(
        x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in zip(a, b, strict=True)
    )
