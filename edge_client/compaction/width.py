"""Which pruned channels come back, so that layers have widths that run fast.

ONNX Runtime's blocked convolutions need multiples of 4 channels and cost the same within blocks of 16; off them a
convolution takes 1.1 to 1.9 times as long, a depthwise one 5 to 7 times. A pruned channel that stays changes nothing in
the result: its rows are as masked, and its readers read the constant that it emits.

Values whose channels are the same one by one form a stream: a layer's output through activations, norms, pools,
depthwise convolutions and sums. Within a stream the layers may keep different channels. `forced` names those that come
back: either as many as make every width that a layer reads a multiple (what a layer writes is padded to a block
anyway), and first those that the stream has elsewhere, or all that any layer of the stream has (`joined`), which needs
no gather and no padding where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from edge_client.compaction import convolutions, maps, products
from edge_client.compaction.rules import rule
from edge_client.compaction.study import Bools, Rule, Study, entries
from edge_client.graph.nodes import settings

Forced = Mapping[str, Bools]
"""The channels that come back, bool[channels], by the layer's output."""
Axis = tuple[str, int]
"""A value and its axis of channels."""


@dataclass(frozen=True)
class Stream:
    """Values with the same `size` channels. `layers` make them, `depthwise` keep them apart.

    `readers` are the layers that contract them.
    """

    size: int
    values: tuple[Axis, ...]
    layers: tuple[NodeProto, ...]
    depthwise: tuple[NodeProto, ...]
    readers: tuple[NodeProto, ...]

    @property
    def convolved(self) -> bool:
        """Whether a convolution makes or reads the channels."""
        return any(n.op_type == "Conv" for n in (*self.layers, *self.readers))


def streams(s: Study) -> list[Stream]:
    """The streams that layers make, without the model's input and output."""
    found = _linked(s)
    every = (_stream(s, found, top, values) for top, values in found.members().items())
    return [stream for stream in every if stream is not None]


@dataclass
class _Links:
    """Axes whose channels are the same one by one, and the axes that layers make, keep apart and read."""

    made: list[tuple[NodeProto, Axis]] = field(default_factory=list)
    depthwise: list[tuple[NodeProto, Axis]] = field(default_factory=list)
    read: list[tuple[NodeProto, Axis]] = field(default_factory=list)
    parent: dict[Axis, Axis] = field(default_factory=dict)

    def root(self, at: Axis) -> Axis:
        """One axis for all that are linked with `at`."""
        self.parent.setdefault(at, at)
        while self.parent[at] != at:
            at = self.parent[at]
        return at

    def link(self, a: Axis, b: Axis) -> None:
        """The channels of `a` are those of `b`."""
        top = self.root(b)
        self.parent[self.root(a)] = top

    def members(self) -> dict[Axis, list[Axis]]:
        """The axes by their root."""
        found: dict[Axis, list[Axis]] = {}
        for at in list(self.parent):
            found.setdefault(self.root(at), []).append(at)
        return found


def _linked(s: Study) -> _Links:
    """What each node of the graph links."""
    net, found = s.net, _Links()
    for node in net.nodes:
        out = node.output[0]
        if out not in s.varies or not s.varies[out].any():
            continue
        shape = s.shape(out)
        if convolutions.is_convolution(s, node):
            if is_depthwise(s, node):
                found.link((node.input[0], 1), (out, 1))
                found.depthwise.append((node, (out, 1)))
            elif settings(node).get("group", 1) == 1:
                found.made.append((node, (out, 1)))
                found.read.append((node, (node.input[0], 1)))
        elif products.is_product(s, node):
            if net.data(node) == [0] and len(s.shape(node.input[1])) == 2:
                found.made.append((node, (out, len(shape) - 1)))
                found.read.append((node, (node.input[0], len(s.shape(node.input[0])) - 1)))
        elif (behaviour := maps.behaviour(s, node)) is not None:
            for k in net.data(node):
                size = s.shape(node.input[k])
                for axis, n in enumerate(size):
                    same = axis + len(shape) - len(size)
                    if n > 1 and behaviour.apart[same] and n == shape[same]:
                        found.link((node.input[k], axis), (out, same))
    for _, at in (*found.made, *found.depthwise):
        found.root(at)  # also of an axis that is linked with no other
    return found


def _stream(s: Study, found: _Links, top: Axis, values: list[Axis]) -> Stream | None:
    """The stream of the linked axes `values`, whose root is `top`; None where no layer makes it, or not all of it."""
    layers = tuple(n for n, at in found.made if found.root(at) == top)
    names = {name for name, _ in values}
    sizes = {s.shape(name)[axis] for name, axis in values}
    if not layers or len(sizes) != 1 or s.net.output in names or s.net.input in names:
        return None
    depthwise = tuple(n for n, at in found.depthwise if found.root(at) == top)
    within = frozenset(values)
    readers = tuple(n for n, at in found.read if at in within)
    return Stream(sizes.pop(), tuple(values), layers, depthwise, readers)


def is_depthwise(s: Study, node: NodeProto) -> bool:
    """Whether `node` convolves every channel by itself, with one output for each."""
    groups = settings(node).get("group", 1)
    return node.op_type == "Conv" and groups > 1 and groups == s.shape(node.input[0])[1] == s.shape(node.output[0])[1]


def live_channels(s: Study, name: str, axis: int) -> Bools:
    """bool[channels]: which have an element that varies and is read."""
    return entries(s.live(name), axis)


def everywhere(s: Study, stream: Stream) -> Bools:
    """bool[channels]: which are live in any value of the stream."""
    return np.asarray(np.array([live_channels(s, name, axis) for name, axis in stream.values]).any(axis=0))


def rounded(kept: Bools, multiple: int, first: Bools) -> Bools:
    """`kept` with as many more channels as make a multiple, those of `first` before the others.

    Unchanged when there are not enough channels.
    """
    count = int(kept.sum())
    more = -count % multiple
    if not count or not more or count + more > kept.size:
        return kept
    order = np.concatenate([np.flatnonzero(first & ~kept), np.flatnonzero(~first & ~kept)])
    found: Bools = kept.copy()
    found[order[:more]] = True
    return found


def forced(s: Study, multiple: Callable[[Stream, int], int], joined: bool) -> dict[str, Bools]:
    """The channels that come back so that every stream is read in multiples.

    `multiple` gives one for a stream and the number of its channels that are live.
    """
    found: dict[str, Bools] = {}
    for stream in streams(s):
        axes = dict(stream.values)
        nodes = (*stream.layers, *stream.depthwise)
        live = {n.output[0]: live_channels(s, n.output[0], axes[n.output[0]]) for n in nodes}
        live = {name: kept for name, kept in live.items() if kept.any()}
        if not live:
            continue
        union = everywhere(s, stream)
        if joined or stream.depthwise:
            due = rounded(union, multiple(stream, int(union.sum())), union)
            found |= {name: due & ~kept for name, kept in live.items()}
            continue
        more = {name: np.zeros_like(kept) for name, kept in live.items()}
        for value in dict.fromkeys(n.input[0] for n in stream.readers):
            above = s.above(value)
            makers = [name for name in live if name in above]
            if len(makers) == 1:  # a sum of several is filled up with zeros, see `writer.Costs`
                own = live[makers[0]]
                more[makers[0]] = rounded(own, multiple(stream, int(own.sum())), union) & ~own
        found |= more
    return {name: mask for name, mask in found.items() if mask.any()}


def widened(extra: Forced) -> Callable[[Study, NodeProto], Rule]:
    """The rules under which the channels of `extra` count as varying, so that they are written as they are."""

    def chosen(s: Study, node: NodeProto) -> Rule:
        own = rule(s, node)
        mask = extra.get(node.output[0])
        if mask is None:
            return own
        out = node.output[0]
        shape = s.shape(out)
        axis = 1 if convolutions.is_convolution(s, node) else len(shape) - 1
        spread = np.broadcast_to(mask.reshape(-1, *(1,) * (len(shape) - 1 - axis)), shape)

        def forward(s: Study, node: NodeProto) -> None:
            own.forward(s, node)
            value, varies, label = s.facts(out)
            s.store(out, value, varies | spread, label)

        def backward(s: Study, node: NodeProto) -> None:
            own.backward(s, node)
            if is_depthwise(s, node):  # its row may be zero, and still it reads its channel, so that none is gathered
                given = s.shape(node.input[0])
                due = mask & live_channels(s, out, axis)
                s.mark(node.input[0], np.broadcast_to(due.reshape(1, -1, *(1,) * (len(given) - 2)), given))

        return Rule(forward, backward)

    return chosen
