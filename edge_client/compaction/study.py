"""What is known of every element of every value of a graph, for one sample.

    forward:  which elements vary with the input; what the others are, float64; which entries of an axis are channels
    backward: which elements an output depends on

A forward pass and then a backward pass reach the fixed point: constants do not depend on who reads them, and an element
that is constant reads nothing. Each kind of operator has one `Rule` (see `rules`). An operator without one is opaque:
its outputs vary when any input varies, and it reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_client.compaction.net import Net, Shape
from edge_client.compaction.operators import Array

Bools = NDArray[np.bool_]
Labels = NDArray[np.int64]
_Any = TypeVar("_Any", bound=np.generic)
_MIX = np.int64(1_000_003)


class Facts(NamedTuple):
    """What is known of a value; arrays of its shape for one sample, as in `Study`."""

    value: Array
    varies: Bools
    label: Labels


@dataclass
class Study:
    """Facts by value. Arrays have the shape of the value for one sample; they are views, stored by what differs.

    `value` is 0 where an element varies. `label` is equal for elements of one channel: an axis along which it differs
    is an axis of channels. `read` marks what the output depends on. `due` marks the elements that a product
    of two varying factors needs although they are constant.
    """

    net: Net
    value: dict[str, Array] = field(default_factory=dict)
    varies: dict[str, Bools] = field(default_factory=dict)
    label: dict[str, Labels] = field(default_factory=dict)
    read: dict[str, Bools] = field(default_factory=dict)
    due: dict[str, Bools] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)
    """What a rule keeps from one pass for the next."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Values of which nothing goes, and why: all their elements count as varying and read."""
    again: Callable[[Mapping[str, str]], Study] = field(init=False)
    """The same study with other values whole."""

    @cached_property
    def users(self) -> dict[str, list[NodeProto]]:
        """The nodes that read each value."""
        return self.net.users()

    @cached_property
    def makers(self) -> dict[str, NodeProto]:
        """The node that makes each value."""
        return {o: n for n in self.net.nodes for o in n.output if o}

    def maker(self, name: str) -> str:
        """The weight of the last layer that `name` comes from, or `name` itself."""
        at = name
        while at in self.makers:
            node = self.makers[at]
            if found := self.net.layer(node):
                return found
            data = self.net.data(node)
            if not data:
                break
            at = node.input[data[-1]]
        return name

    def above(self, name: str) -> set[str]:
        """`name` and the values it is made of, up to the layers that make their channels."""
        found, pending = {name}, [name]
        while pending:
            node = self.makers.get(pending.pop())
            if node is not None and not self.net.layer(node):
                more = {node.input[k] for k in self.net.data(node)} - found
                found |= more
                pending += more
        return found

    def shape(self, name: str) -> Shape:
        """The shape for one sample."""
        return self.net.shapes[name]

    def facts(self, name: str) -> Facts:
        """Those of any value, constants and sizes too."""
        if name in self.varies:
            return Facts(self.value[name], self.varies[name], self.label[name])
        known = self.net.known(name)
        return Facts(known, np.broadcast_to(np.False_, known.shape), np.broadcast_to(np.int64(0), known.shape))

    def store(self, name: str, value: Array, varies: Bools | np.bool_, label: Labels | np.int64) -> None:
        """Store the facts of a value; it keeps 0 where it varies."""
        shape = self.shape(name)
        kept = name in self.whole and bool(np.any(varies))
        varies = np.broadcast_to(varies | np.bool_(kept), shape)
        value = np.broadcast_to(value, shape)
        for axis in self.merged(name):  # one sample's places are no axis of a batch's
            varies = varies | some(varies | (value != np.take(value, [0], axis)), axis, keepdims=True)
        self.value[name] = thin(np.where(varies, np.zeros(1, value.dtype), value))
        self.varies[name] = thin(varies)
        self.label[name] = thin(np.broadcast_to(np.asarray(label, np.int64), shape))
        self.read[name] = thin(np.broadcast_to(np.bool_(kept), shape))
        self.due[name] = thin(np.broadcast_to(np.False_, shape))

    def merged(self, name: str) -> list[int]:
        """The axes that hold the batch and something else."""
        axes = zip(self.shape(name), self.net.moving[name], strict=True)
        return [a for a, (n, moves) in enumerate(axes) if moves and n > 1]

    def mark(self, name: str, mask: Bools) -> None:
        """The elements `mask` of an input are read; nothing happens for a constant."""
        if name in self.read:
            self.read[name] = thin(self.read[name] | mask)

    def need(self, name: str, mask: Bools) -> None:
        """The elements `mask` of an input are due; nothing happens for a constant."""
        if name in self.due:
            self.due[name] = thin(self.due[name] | mask)

    def live(self, name: str) -> Bools:
        """The elements that vary and are read."""
        return self.varies[name] & self.read[name]

    def channels(self, name: str) -> tuple[bool, ...]:
        """The axes whose entries are channels, which may be removed."""
        label = self.label[name]
        found = []
        for axis, moving in enumerate(self.net.moving[name]):
            first = np.take(label, [0], axis)
            found.append(not moving and bool((label != first).any()))
        return tuple(found)

    def wanted(self, name: str) -> list[NDArray[np.int64]]:
        """Of each axis the entries that must stay: the channels with a live element, every entry of other axes."""
        live, free = self.live(name), self.channels(name)
        return [np.flatnonzero(entries(live, a)) if free[a] else np.arange(n) for a, n in enumerate(live.shape)]


@dataclass(frozen=True)
class Rule:
    """One kind of operator: facts of its outputs, and what it reads of its inputs."""

    forward: Callable[[Study, NodeProto], None]
    backward: Callable[[Study, NodeProto], None]


def study(net: Net, rule: Callable[[Study, NodeProto], Rule], whole: Mapping[str, str] | None = None) -> Study:
    """The facts of `net`; `rule` gives the rule of each node. Nothing of the values `whole` goes (see `Study`)."""
    found = Study(net, whole=whole or {})
    shape = net.shapes[net.input]
    found.store(net.input, np.zeros(shape, net.kinds[net.input]), np.True_, np.int64(0))
    backward = []
    with np.errstate(all="ignore"):
        for node in net.data_nodes():
            if any(found.facts(v).varies.any() for v in node.input if v):
                chosen = rule(found, node)
                chosen.forward(found, node)
                backward.append((node, chosen.backward))
            else:
                constant_outputs(found, node)
        found.mark(net.output, np.ones(net.shapes[net.output], np.bool_))
        for node, read in reversed(backward):
            read(found, node)
    found.again = lambda more: study(net, rule, more)
    return found


def some(mask: Bools, axis: int | tuple[int, ...], keepdims: bool = False) -> Bools:
    """Whether any element along the axes is marked, always an array."""
    return np.asarray(mask.any(axis=axis, keepdims=keepdims))


def entries(mask: Bools, axis: int) -> Bools:
    """Which entries of an axis have a marked element, bool[n]."""
    return some(mask, tuple(a for a in range(mask.ndim) if a != axis))


def narrowed(mask: Bools, shape: Shape) -> Bools:
    """A mask of what a value of `shape` was broadcast to, over the axes that this added or widened."""
    lead = mask.ndim - len(shape)
    mask = some(mask, tuple(range(lead))) if lead else mask
    once = tuple(k for k, n in enumerate(shape) if n == 1 and mask.shape[k] > 1)
    return some(mask, once, keepdims=True) if once else mask


def thin(values: NDArray[_Any]) -> NDArray[_Any]:
    """`values` as a view that cannot be written, of memory for what differs alone: most facts hold for a channel."""
    small = values[tuple(slice(None if step else 1) for step in values.strides)]
    for axis, n in enumerate(small.shape):
        first = np.take(small, [0], axis) if n > 1 else small
        if n > 1 and (small == first).all():
            small = first
    return np.broadcast_to(small.copy(), values.shape)


def mixed(a: Labels, b: Labels) -> Labels:
    """Labels of elements made of two: equal where both are."""
    with np.errstate(over="ignore"):
        return np.asarray(a * (_MIX if np.any(b) else np.int64(1)) + b, np.int64)


def constant_outputs(s: Study, node: NodeProto) -> None:
    """Facts of a node whose inputs are all constant."""
    made = s.net.operators.run(node, [s.facts(v).value if v else None for v in node.input])
    for name, value in zip([o for o in node.output if o], made, strict=True):
        s.store(name, value, np.False_, np.int64(0))


def opaque_forward(s: Study, node: NodeProto) -> None:
    """Every output varies."""
    for name in [o for o in node.output if o]:
        s.store(name, np.zeros(s.shape(name), s.net.kinds[name]), np.True_, np.int64(0))


def opaque_backward(s: Study, node: NodeProto) -> None:
    """Every input is read as a whole, if any output is."""
    if any(s.live(o).any() for o in node.output if o):
        for k in s.net.data(node):
            s.mark(node.input[k], np.ones(s.shape(node.input[k]), np.bool_))


OPAQUE = Rule(opaque_forward, opaque_backward)
