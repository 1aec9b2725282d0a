"""Convolutions, plain, grouped and transposed, with only their live inputs and outputs.

What a removed input emits is constant; its part of the output is computed once, in float64. Where it is the same at
all places it goes into the bias. Elsewhere (zero padding gives a constant a border) it is a map that is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_client.compaction.layouts import FILL, preferred, worth
from edge_client.compaction.operators import F64, conv, conv_transpose
from edge_client.compaction.pieces import Ids
from edge_client.compaction.study import Rule, Study, entries, some
from edge_client.compaction.writer import Writer
from edge_client.graph.nodes import settings

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class _Conv:
    """A convolution's weight as [groups, out, in, *kernel]."""

    weight: F64
    bias: F64
    transposed: bool

    @property
    def groups(self) -> int:
        return len(self.weight)

    @property
    def linked(self) -> NDArray[np.bool_]:
        """Which output reads which input, bool[groups, out, in]."""
        return some(self.weight != 0, tuple(range(3, self.weight.ndim)))


def is_convolution(s: Study, node: NodeProto) -> bool:
    """Whether `node` convolves data with constants in a form that is written here."""
    if node.op_type not in ("Conv", "ConvTranspose") or s.net.data(node) != [0]:
        return False
    given = settings(node)
    return node.op_type == "Conv" or (given.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in given)


def _of(s: Study, node: NodeProto) -> _Conv:
    weight = s.net.constants[node.input[1]]
    groups = settings(node).get("group", 1)
    transposed = node.op_type == "ConvTranspose"
    if transposed:  # [in, out / groups, *kernel]
        split = weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    else:
        split = weight.reshape(groups, -1, *weight.shape[1:])
    out = split.shape[0] * split.shape[1]
    bias = s.net.constants[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros(out)
    return _Conv(split, bias, transposed)


def _apply(s: Study, node: NodeProto, layer: _Conv, x: F64, rows: NDArray[np.bool_]) -> F64:
    """The layer without bias on `x` [1, in, ...], for the outputs `rows`; 0 for the others."""
    shape = s.shape(node.output[0])
    made = np.zeros((1, *shape[1:]))
    given = settings(node)
    outs, ins = layer.weight.shape[1:3]
    for g, weight in enumerate(layer.weight):
        r = np.flatnonzero(rows[g * outs : (g + 1) * outs])
        part = x[:, g * ins : (g + 1) * ins]
        c = np.flatnonzero(entries(part != 0, 1))
        if r.size and c.size:
            w = weight[np.ix_(r, c)]
            done = conv_transpose(part[:, c], w, given, shape[2:]) if layer.transposed else conv(part[:, c], w, given)
            made[:, g * outs + r] = done
    return made


def _column(values: NDArray[_Value], rank: int) -> NDArray[_Value]:
    return values.reshape(1, -1, *(1,) * (rank - 2))


def _conv_forward(s: Study, node: NodeProto) -> None:
    layer = _of(s, node)
    value, varies, _ = s.facts(node.input[0])
    shape = s.shape(node.output[0])
    moves = entries(varies, 1).reshape(layer.groups, 1, -1)
    out = (layer.linked & moves).any(axis=2).reshape(-1)
    made = _apply(s, node, layer, value, ~out) + _column(layer.bias, len(shape))
    s.store(node.output[0], made, _column(out, len(shape)), _column(np.arange(out.size), len(shape)))


def _conv_backward(s: Study, node: NodeProto) -> None:
    layer = _of(s, node)
    rows = entries(s.live(node.output[0]), 1).reshape(layer.groups, -1, 1)
    read = (layer.linked & rows).any(axis=1).reshape(-1)
    shape = s.shape(node.input[0])
    s.mark(node.input[0], np.broadcast_to(_column(read, len(shape)), shape))


def _live_groups(s: Study, node: NodeProto, layer: _Conv) -> tuple[list[Ids], list[Ids]]:
    """Of each group its live outputs, and the live inputs that these read."""
    name, wanted, linked = node.input[0], s.wanted(node.output[0])[1], layer.linked
    groups, outs, ins = linked.shape
    live_in = entries(s.live(name), 1)
    r = [wanted[(wanted >= g * outs) & (wanted < (g + 1) * outs)] for g in range(groups)]
    c = [
        g * ins + np.flatnonzero(linked[g, own - g * outs].any(axis=0) & live_in[g * ins : (g + 1) * ins])
        for g, own in enumerate(r)
    ]
    if groups > 1:  # a row of zeros reads a channel that is there rather than none
        c = [own if own.size else g * ins + np.flatnonzero(live_in[g * ins :][:ins])[:1] for g, own in enumerate(c)]
    return r, c


def _weight(layer: _Conv, members: list[int], rows: Ids, columns: Ids) -> F64:
    """The groups `members` on `rows` and `columns`, int64[member, channel], as ONNX stores a weight; zeros for a -1."""
    outs, ins, *kernel = layer.weight.shape[1:]
    made = np.zeros((*rows.shape, columns.shape[1], *kernel))
    for k, (g, own, used) in enumerate(zip(members, rows, columns, strict=True)):
        part = layer.weight[g][np.maximum(own - g * outs, 0)][:, np.maximum(used - g * ins, 0)]
        made[k] = part * np.multiply.outer(own >= 0, used >= 0).reshape(*part.shape[:2], *(1,) * len(kernel))
    stored = made.swapaxes(1, 2) if layer.transposed else made
    return stored.reshape(-1, *stored.shape[2:])


def rewrite(w: Writer, node: NodeProto) -> None:
    """The convolution of the channels that are left, and a map of what the others emit."""
    s, name, out = w.study, node.input[0], node.output[0]
    layer = _of(s, node)
    groups, outs = layer.weight.shape[:2]
    rank = len(s.shape(name))
    r, c, classes = _channels(w, node, layer)
    full = [np.arange(n) for n in s.shape(name)]
    attributes = settings(node)
    if groups > 1:
        attributes["group"] = groups
    value = np.array(s.facts(name).value)
    value[:, np.concatenate(c)[np.concatenate(c) >= 0]] = 0
    need = np.zeros(groups * outs, np.bool_)
    need[np.concatenate(r)[np.concatenate(r) >= 0]] = True
    # the constant part: what the inputs that are gone emit
    constant = _apply(s, node, layer, value, need) + _column(layer.bias, rank)
    made, kept = [], []
    for members in classes:
        rows, columns = _squared([r[g] for g in members]), _squared([c[g] for g in members])
        given = w.adapted(name, [columns.reshape(-1) if a == 1 else full[a] for a in range(rank)])
        flat = rows.reshape(-1)
        bias, rest = biased(constant[:, np.maximum(flat, 0)] * _column(flat >= 0, rank), 1)
        weight = w.constant(_weight(layer, members, rows, columns))
        inputs = [given, weight, *([w.constant(bias)] if bias.any() else [])]
        if len(members) > 1 or "group" in attributes:
            attributes["group"] = len(members)
        made.append(w.emit(node.op_type, inputs, **attributes))
        made[-1] = w.emit("Add", [made[-1], w.mapped(rest)]) if rest is not None else made[-1]
        kept.append(flat)
    order = np.concatenate(kept)
    joined = w.emit("Concat", made, axis=1) if len(made) > 1 else made[0]
    w.put(out, joined, w.grid(out, [order if a == 1 else np.arange(n) for a, n in enumerate(s.shape(out))]))


def _channels(w: Writer, node: NodeProto, layer: _Conv) -> tuple[list[Ids], list[Ids], list[list[int]]]:
    """Of each group the outputs and inputs that are written, and the groups that one convolution computes."""
    r, c = _live_groups(w.study, node, layer)
    lists = w.lists(node.input[0])
    if layer.groups > 1:
        return r, c, _classes([g for g in range(layer.groups) if r[g].size], r, c)
    taps = int(np.prod(layer.weight.shape[3:]))
    order = preferred(w, node.output[0], len(c[0]) * taps)
    r = [order] if order is not None else r
    return r, [worth(w, lists[1], c[0], len(r[0]) * taps)], [[0]]


def _squared(lists: list[Ids]) -> Ids:
    """Lists as rows of one array, -1 behind their ends; at least one entry, because a convolution reads a channel."""
    width = max(1, *map(len, lists))
    return np.stack([np.pad(own, (0, width - len(own)), constant_values=-1) for own in lists])


def _classes(held: list[int], r: list[Ids], c: list[Ids]) -> list[list[int]]:
    """Groups that one convolution computes: all, or where that wastes too much those of equal size."""
    exact = sum(len(r[g]) * len(c[g]) for g in held)
    if len(held) * max(len(r[g]) for g in held) * max(len(c[g]) for g in held) <= FILL * exact:
        return [held]
    found: dict[tuple[int, int], list[int]] = {}
    for g in held:
        found.setdefault((len(r[g]), len(c[g])), []).append(g)
    return list(found.values())


def biased(constant: F64, axis: int) -> tuple[F64, F64 | None]:
    """A map of constants as a bias along `axis` and, where it differs from place to place, the rest."""
    places = tuple(n // 2 if a != axis else slice(None) for a, n in enumerate(constant.shape))
    bias: F64 = constant[places]
    rest = constant - bias.reshape(-1, *(1,) * (constant.ndim - 1 - axis))
    scale = np.abs(constant).max(initial=1e-30)
    return bias, rest if np.abs(rest).max(initial=0.0) > 1e-12 * scale else None


CONVOLUTION = Rule(_conv_forward, _conv_backward)
