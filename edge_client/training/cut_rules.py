"""What of an operator's outputs stays when its inputs are cut: a rule for each kind, which also makes the node fit.

What an operator does with its axes is said in `edge_client.graph.axes`; the rules here are for operators that move
entries from one axis to others, and for recurrent layers. `follow` walks the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, helper

from edge_client.graph.axes import Names, axes_of
from edge_client.graph.nodes import GATES, REARRANGING, set_attribute, settings
from edge_client.narrow import Axes
from edge_client.training.cut_graph import UNLIKE, Cut, equal, refusal

Mask = NDArray[np.bool_] | None
"""The entries of an axis that stay; None: all."""


def named(g: Cut, node: NodeProto) -> list[Axes]:
    """An operator that keeps axes together: what one input lost of an axis is taken out of the others.

    Not of an axis that a product sums over: there all must have lost the same, or the others what a parameter lost. A
    plain sum leaves out what was lost; the export's trial shows whether that was zero.
    """
    listed = None
    if node.op_type.startswith("Reduce"):
        listed = g.values(node, 1) if len(node.input) > 1 else settings(node).get("axes")
    known = axes_of(node, [g.shape(v) for v in node.input], g.shape(node.output[0]), listed)
    if known is None:
        raise refusal(node, "is not an operator whose channels can be cut")
    left: dict[Any, NDArray[np.bool_]] = {}
    for name, names in zip(node.input, known.inputs, strict=False):
        for key, stays in zip(names, g.stays(name), strict=True):
            if stays is not None:
                left[key] = left.get(key, stays) & stays
    if (known.whole | {None}) & left.keys() and node.op_type != "ReduceSum":
        raise refusal(node, "works along the axis of the channels")
    summed = left.keys() - set(known.output) - _lost_by_parameters(g, node, known.inputs, left)
    for k, names in enumerate(known.inputs):
        due = tuple(
            own if key in summed else left.get(key) for key, own in zip(names, g.stays(node.input[k]), strict=True)
        )
        if not g.lenient and not equal(due, tuple(left.get(key) for key in names)):
            raise refusal(node, UNLIKE)
        g.fit(node, k, due)
    return [tuple(left.get(key) for key in known.output)] * len(node.output)


def _lost_by_parameters(
    g: Cut, node: NodeProto, inputs: Sequence[Names], left: Mapping[Any, NDArray[np.bool_]]
) -> set[Any]:
    """The axes of which a parameter has no more than what is `left`: it is zero elsewhere, whatever the others are."""
    found = set()
    for name, names in zip(node.input, inputs, strict=False):
        if name in g.parameters:
            found |= {k for k, stays in zip(names, g.stays(name), strict=True) if equal((left.get(k),), (stays,))}
    return found


def _conv(g: Cut, node: NodeProto) -> list[Axes]:
    """Whole groups leave a grouped convolution."""
    groups = settings(node).get("group", 1)
    if groups == 1:
        return named(g, node)
    x, weight = g.stays(node.input[0]), g.stays(node.input[1])
    if x[1] is None or weight[0] is None or sum(stays is not None for stays in (*x, *weight)) > 2:
        raise refusal(node, "is a grouped convolution")
    parts = np.concatenate([x[1].reshape(groups, -1), weight[0].reshape(groups, -1)], axis=1)
    if (parts != parts[:, :1]).any():
        raise refusal(node, "loses a part of a group")
    made = np.repeat(parts[:, 0], g.shape(node.output[0])[1] // groups)
    if len(node.input) > 2:
        g.fit(node, 2, (made,))
    set_attribute(node, "group", int(parts[:, 0].sum()))
    return [(None, made, *x[2:])]


def _reshape(g: Cut, node: NodeProto) -> list[Axes]:
    """What stays is marked in a whole tensor, which is reshaped; the marks must again be those of whole axes."""
    marks = np.ones(g.shape(node.input[0]), np.bool_)
    for i, stays in enumerate(g.stays(node.input[0])):
        if stays is not None:
            marks &= stays.reshape(-1, *[1] * (marks.ndim - 1 - i))
    moved = marks.reshape(g.shape(node.output[0]))
    others = [tuple(j for j in range(moved.ndim) if j != i) for i in range(moved.ndim)]
    found = [np.asarray(moved.any(axis=rest)) for rest in others]
    if np.count_nonzero(moved) != prod(int(stays.sum()) for stays in found):
        return _shuffle(g, node)
    if node.op_type == "Squeeze" and len(node.input) < 2:  # it would also remove a last channel
        raise refusal(node, "takes no constant sizes")
    if node.op_type == "Reshape":
        node.input[1] = g.sized(node.input[1], tuple(None if stays.all() else stays for stays in found))
    return [tuple(found)]


def _shuffle(g: Cut, node: NodeProto) -> list[Axes]:
    """A reshape, a transpose and a reshape that put the entries of one axis into another order become one Gather."""
    refused = refusal(node, "spreads the channels over several axes")
    chain, x = [node], node.input[0]
    for kind in ("Transpose", "Reshape"):
        users = [n for n in g.source.node if chain[-1].output[0] in n.input]
        if node.op_type != "Reshape" or len(users) != 1 or users[0].op_type != kind:
            raise refused
        chain += users
    shape, out, every = g.shape(x), chain[-1].output[0], g.stays(x)
    (axis, *more) = (i for i, stays in enumerate(every) if stays is not None)
    if more or g.shape(out) != shape:
        raise refused
    place = np.arange(prod(shape)).reshape(shape)
    moved = place.reshape(g.shape(node.output[0])).transpose(settings(chain[1])["perm"]).reshape(shape)
    order = np.unravel_index(np.moveaxis(moved, axis, 0).reshape(shape[axis], -1)[:, 0], shape)[axis]
    if not np.array_equal(np.take(place, order, axis), moved):
        raise refused
    g.done.update(n.output[0] for n in chain[1:])
    stays = np.asarray(every[axis])
    kept = g.constant((np.cumsum(stays) - 1)[order[stays[order]]])
    node.CopyFrom(helper.make_node("Gather", [x, kept], [out], axis=axis))
    return [tuple(stays[order] if i == axis else None for i in range(len(shape)))]


def _concat(g: Cut, node: NodeProto) -> list[Axes]:
    before = list(node.input)
    every = [g.stays(name) for name in before]
    axis = settings(node)["axis"] % len(every[0])
    axes: list[Mask] = [next((x[i] for x in every if x[i] is not None), None) for i in range(len(every[0]))]
    for k, own in enumerate(every):
        g.fit(node, k, (*axes[:axis], own[axis], *axes[axis + 1 :]))
    parts = [np.ones(g.shape(name)[axis], np.bool_) for name in before]
    for part, own in zip(parts, every, strict=True):
        part &= True if own[axis] is None else own[axis]
    axes[axis] = np.concatenate(parts)
    return [tuple(axes)]


def _split(g: Cut, node: NodeProto) -> list[Axes]:
    x = g.stays(node.input[0])
    axis = settings(node).get("axis", 0) % len(x)
    stays = x[axis]
    if stays is None:
        return [x] * len(node.output)
    parts = np.split(stays, np.cumsum([g.shape(name)[axis] for name in node.output])[:-1])
    sizes = np.array([part.sum() for part in parts])
    if not sizes.all():
        raise refusal(node, "loses all its channels")
    if len(node.input) > 1 or (sizes != sizes[0]).any():
        node.CopyFrom(helper.make_node("Split", [node.input[0], g.constant(sizes)], node.output, axis=axis))
    return [(*x[:axis], part, *x[axis + 1 :]) for part in parts]


def _slice(g: Cut, node: NodeProto) -> list[Axes]:
    """Along an axis that loses entries, the bounds move by what is gone before them."""
    made = list(g.stays(node.input[0]))
    if len(node.input) > 3 and all(made[i] is None for i in g.values(node, 3)):
        return [tuple(made)]
    starts, ends = g.values(node, 1), g.values(node, 2)
    axes = g.values(node, 3) if len(node.input) > 3 else list(range(len(starts)))
    steps = g.values(node, 4) if len(node.input) > 4 else [1] * len(axes)
    for k, i in enumerate(axes):
        stays = made[i]
        if stays is None:
            continue
        if steps[k] != 1:
            raise refusal(node, "works along the axis of the channels")
        low, high, _ = slice(starts[k], ends[k]).indices(len(stays))
        made[i] = stays[low:high]
        starts[k], ends[k] = int(stays[:low].sum()), int(stays[:high].sum())
        if starts[k] == ends[k]:
            raise refusal(node, "loses all its channels")
    node.input[1], node.input[2] = g.constant(np.array(starts)), g.constant(np.array(ends))
    return [tuple(made)]


def _pad(g: Cut, node: NodeProto) -> list[Axes]:
    """What is added to an axis stays; where a negative width takes entries away, it takes those that stay."""
    made, widths = list(g.stays(node.input[0])), g.values(node, 1)
    axes = [i % len(made) for i in g.values(node, 3)] if len(node.input) > 3 and node.input[3] else range(len(made))
    for k, i in enumerate(axes):
        stays, low, high = made[i], widths[k], widths[k + len(axes)]
        if stays is None or not (low or high):
            continue
        if settings(node).get("mode", b"constant") != b"constant":
            raise refusal(node, "works along the axis of the channels")
        gone = stays[: max(0, -low)], stays[len(stays) - max(0, -high) :]
        widths[k], widths[k + len(axes)] = (max(n, 0) - int(x.sum()) for n, x in zip((low, high), gone, strict=True))
        inner = stays[len(gone[0]) : len(stays) - len(gone[1])]
        made[i] = np.pad(inner, (max(low, 0), max(high, 0)), constant_values=True)
    node.input[1] = g.constant(np.array(widths))
    return [tuple(made)]


def _shape(g: Cut, node: NodeProto) -> list[Axes]:
    given, x = settings(node), g.stays(node.input[0])
    lengths = x[given.get("start", 0) : given.get("end", len(x))]
    if any(stays is not None for stays in lengths):
        g.lengths[node.output[0]] = lengths
    return [(None,)]


def _expand(g: Cut, node: NodeProto) -> list[Axes]:
    """An axis gets its channels from the value, or all of them from the shape of a cut value."""
    if node.input[1] not in g.lengths:
        (axes,) = named(g, node)
        node.input[1] = g.sized(node.input[1], axes)
        return [axes]
    if prod(g.shape(node.input[0])) > 1:
        raise refusal(node, "computes with the number of channels")
    return [g.lengths[node.input[1]]]


def _recurrent(g: Cut, node: NodeProto) -> list[Axes]:
    """Units leave with their rows of all gates, alike in both directions."""
    names = [*node.input, *[""] * 5]
    if names[7] or settings(node).get("layout", 0):
        raise refusal(node, "is not an operator whose channels can be cut")
    read, unit = g.stays(names[0])[2], g.stays(names[2])[2]
    gates, both = (None if unit is None else np.tile(unit, k * GATES[node.op_type]) for k in (1, 2))
    weights: list[Axes] = [(None, None, read), (None, gates, read), (None, gates, unit), (None, both), (None,)]
    start: Axes = (None, None, unit)
    for k, (name, axes) in enumerate(zip(node.input, [*weights, start, start], strict=False)):
        if k > 4 and name:
            g.fit(node, k, axes)
        elif name and not equal(g.stays(name), axes):
            raise refusal(node, UNLIKE)
    if unit is not None:
        set_attribute(node, "hidden_size", int(unit.sum()))
    return [(None, None, None, unit), start, start][: len(node.output)]


def _scan(g: Cut, node: NodeProto) -> list[Axes]:
    """The body is cut as a graph is. Of a state stays what stays at the end of a step, found in a trial before."""
    given = settings(node)
    body = next(a.g for a in node.attribute if a.name == "body")
    count = len(node.input) - given["num_scan_inputs"]
    scanned = [g.stays(name) for name in node.input[count:]]
    others = (*given.get("scan_input_axes", ()), *given.get("scan_output_axes", ()))
    if any(others) or any(x[0] is not None for x in scanned):
        raise refusal(node, "works along the axis of the channels")
    starts = [g.stays(name) for name in node.input[:count]]
    for g.lenient in (True, False):
        step = GraphProto()
        step.CopyFrom(body)
        for value, axes in zip(body.input, [*starts, *(x[1:] for x in scanned)], strict=True):
            g.put(value.name, axes)
        follow(g, step)
        found = [g.stays(value.name) for value in step.output]
        if not g.lenient and not all(map(equal, starts, found)):
            raise refusal(node, "carries channels from step to step of which different ones stay")
        starts = found[:count]
    body.CopyFrom(step)
    for k, axes in enumerate(starts):
        g.fit(node, k, axes)
    return [*starts, *((None, *axes) for axes in found[count:])]


RULES: dict[str, Callable[[Cut, NodeProto], list[Axes]]] = {
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Expand": _expand,
    "Flatten": _reshape,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "Pad": _pad,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Scan": _scan,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
}


def follow(g: Cut, graph: GraphProto) -> None:
    """Write the nodes of `graph` on what stays, in place."""
    outside = g.source, g.nodes, g.done
    g.source, g.nodes, g.done = graph, [], set()
    for node in graph.node:
        if node.output[0] in g.done:
            continue
        if node.op_type == "Scan" or any(v in g.axes or v in g.lengths for v in node.input):
            if node.op_type != "Expand" and any(v in g.lengths for v in node.input):
                raise refusal(node, "computes with the number of channels")
            left = RULES.get(node.op_type, named)(g, node)
            for name, axes in zip(list(node.output), left, strict=True):
                g.put(name, axes)
            if node.op_type in REARRANGING and node.input[0] in g.parameters:
                g.parameters.update(node.output)  # zero in what they lost, too
        g.nodes.append(node)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(g.nodes)
    g.source, g.nodes, g.done = outside
