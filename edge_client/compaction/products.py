"""Operators that contract: convolutions, matrix products, and embeddings.

Each is written with only its live inputs and live outputs. What its removed inputs emit is constant; their part of the
output is computed once, in float64. Where it is the same at all places it goes into the bias. Elsewhere (zero padding
gives a constant a border) it is a map that is added to the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_client.compaction.operators import F64, conv, conv_transpose, settings
from edge_client.compaction.study import Bools, Rule, Study, mixed
from edge_client.compaction.writer import Ids, Lists, Ragged, Writer, by_axis, grid
from edge_client.compaction.layouts import preferred, worth
from edge_client.errors import CompactionError


@dataclass(frozen=True)
class _Conv:
    """A convolution's weight as [groups, out, in, *kernel]."""

    weight: F64
    bias: F64
    transposed: bool

    @property
    def groups(self) -> int:
        return len(self.weight)


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
        c = np.flatnonzero(part.any(axis=(0, *range(2, x.ndim))))
        if r.size and c.size:
            w = weight[np.ix_(r, c)]
            done = conv_transpose(part[:, c], w, given, shape[2:]) if layer.transposed else conv(part[:, c], w, given)
            made[:, g * outs + r] = done
    return made


def _column(values: NDArray[np.generic], rank: int) -> NDArray[np.generic]:
    return values.reshape(1, -1, *(1,) * (rank - 2))


def _conv_forward(s: Study, node: NodeProto) -> None:
    layer = _of(s, node)
    value, varies, _ = s.facts(node.input[0])
    shape = s.shape(node.output[0])
    spatial = (0, *range(2, varies.ndim))
    moves = varies.any(axis=spatial).reshape(layer.groups, 1, -1)
    linked = (layer.weight != 0).reshape(*layer.weight.shape[:3], -1).any(axis=-1)
    out = (linked & moves).any(axis=2).reshape(-1)
    made = _apply(s, node, layer, value, ~out) + _column(layer.bias, len(shape))
    s.learn(node.output[0], made, _column(out, len(shape)), _column(np.arange(out.size), len(shape)))


def _conv_backward(s: Study, node: NodeProto) -> None:
    layer = _of(s, node)
    live = s.live(node.output[0])
    rows = live.any(axis=(0, *range(2, live.ndim))).reshape(layer.groups, -1, 1)
    linked = (layer.weight != 0).reshape(*layer.weight.shape[:3], -1).any(axis=-1)
    read = (linked & rows).any(axis=1).reshape(-1)
    shape = s.shape(node.input[0])
    s.mark(node.input[0], np.broadcast_to(_column(read, len(shape)), shape))


def _conv_rewrite(w: Writer, node: NodeProto) -> None:
    s, name, out = w.study, node.input[0], node.output[0]
    layer = _of(s, node)
    groups, outs, ins = layer.weight.shape[:3]
    rank = len(s.shape(name))
    rows = s.wanted(out)[1]
    linked = (layer.weight != 0).reshape(groups, outs, ins, -1).any(axis=-1)
    live_in = s.live(name).any(axis=(0, *range(2, rank)))
    # of each group its live outputs and the live inputs that these read
    r = [rows[(rows >= g * outs) & (rows < (g + 1) * outs)] for g in range(groups)]
    c = [
        g * ins + np.flatnonzero(linked[g, own - g * outs].any(axis=0) & live_in[g * ins : (g + 1) * ins])
        for g, own in enumerate(r)
    ]
    if groups > 1:  # a row of zeros reads a channel that is there rather than none
        c = [own if own.size else g * ins + np.flatnonzero(live_in[g * ins :][:ins])[:1] for g, own in enumerate(c)]
    lists = w.lists(name)
    full = [np.arange(n) for n in s.shape(name)]
    if groups == 1:
        order = preferred(w, out)
        r = [order] if order is not None else r
        columns = worth(lists[1], c[0], len(r[0]) * int(np.prod(layer.weight.shape[3:])))
    else:
        held = [g for g in range(groups) if r[g].size]
        r, c = [r[g] for g in held], [c[g] for g in held]
        width, depth = max(map(len, r)), max(map(len, c))
        r = [np.pad(own, (0, width - len(own)), constant_values=-1) for own in r]
        c = [np.pad(own, (0, depth - len(own)), constant_values=-1) for own in c]
        columns = np.concatenate(c)
    kept = np.concatenate(r)
    given = w.adapted(name, [columns if a == 1 else full[a] for a in range(rank)])
    # the constant part: what the inputs that are gone emit
    value = np.array(s.facts(name)[0])
    value[:, columns[columns >= 0]] = 0
    need = np.zeros(groups * outs, np.bool_)
    need[kept[kept >= 0]] = True
    constant = (_apply(s, node, layer, value, need) + _column(layer.bias, rank))[:, np.maximum(kept, 0)]
    constant[:, kept < 0] = 0
    count = len(r)
    blocks = columns.reshape(count, -1)
    weight = np.zeros((count, len(kept) // count, blocks.shape[1], *layer.weight.shape[3:]))
    for k, (own, used) in enumerate(zip(r, blocks, strict=True)):
        g = int(max(own.max(initial=0), 0)) // outs
        part = layer.weight[g][np.maximum(own - g * outs, 0)][:, np.maximum(used - g * ins, 0)]
        part = part * np.multiply.outer(own >= 0, used >= 0).reshape(len(own), len(used), *(1,) * (rank - 2))
        weight[k] = part
    if layer.transposed:
        stored = weight.swapaxes(1, 2).reshape(-1, *weight.shape[1:2], *weight.shape[3:])
    else:
        stored = weight.reshape(-1, *weight.shape[2:])
    bias, rest = _bias(constant, 1)
    attributes = {**settings(node), **({"group": count} if "group" in settings(node) or count > 1 else {})}
    inputs = [given, w.constant(stored), *([w.constant(bias)] if bias.any() else [])]
    made = w.emit(node.op_type, inputs, **attributes)
    if rest is not None:
        made = w.emit("Add", [made, w.mapped(rest)])
    ids = w.grid(out, [kept if a == 1 else np.arange(n) for a, n in enumerate(s.shape(out))])
    w.put(out, made, np.where(ids < 0, np.where(_column(kept, rank) == -2, -2, -1), ids))


def _bias(constant: F64, axis: int) -> tuple[F64, F64 | None]:
    """A map of constants as a bias along `axis` and, where it differs from place to place, the rest."""
    places = tuple(n // 2 if a != axis else slice(None) for a, n in enumerate(constant.shape))
    bias: F64 = constant[places]
    rest = constant - bias.reshape(-1, *(1,) * (constant.ndim - 1 - axis))
    scale = np.abs(constant).max(initial=1e-30)
    return bias, rest if np.abs(rest).max(initial=0.0) > 1e-12 * scale else None


CONVOLUTION = Rule(_conv_forward, _conv_backward, _conv_rewrite)


# --- matrix products


def _operands(s: Study, node: NodeProto) -> tuple[str, str, bool, str]:
    """Both factors of a `MatMul` or `Gemm`, whether the second is transposed, and the bias."""
    if node.op_type == "MatMul":
        return node.input[0], node.input[1], False, ""
    third = node.input[2] if len(node.input) > 2 else ""
    return node.input[0], node.input[1], bool(settings(node).get("transB", 0)), third


def is_product(s: Study, node: NodeProto) -> bool:
    """Whether `node` is a product of matrices in a form that is written here."""
    if node.op_type == "MatMul":
        return all(len(s.shape(v)) >= 2 for v in node.input)
    given = settings(node)
    if node.op_type != "Gemm" or given.get("transA", 0) or any(given.get(a, 1.0) != 1.0 for a in ("alpha", "beta")):
        return False
    return len(node.input) < 3 or not node.input[2] or node.input[2] in s.net.constants


def _factor(s: Study, name: str, transposed: bool) -> tuple[F64, Bools, NDArray[np.int64]]:
    value, varies, label = s.facts(name)
    return (value.T, varies.T, label.T) if transposed else (value, varies, label)


def _any(a: Bools, b: Bools) -> Bools:
    """The product of marks: whether any pair of them meets."""
    return np.matmul(a.astype(np.float32), b.astype(np.float32)) > 0


def _product_forward(s: Study, node: NodeProto) -> None:
    first, second, transposed, third = _operands(s, node)
    a, b = _factor(s, first, False), _factor(s, second, transposed)
    varies = _any(a[1], b[1] | (b[0] != 0)) | _any(a[1] | (a[0] != 0), b[1])
    value = np.matmul(a[0], b[0])
    if third:
        value = value + s.net.constants[third]
    out = node.output[0]
    shape = s.shape(out)
    if second in s.net.constants and b[0].ndim == 2:
        label: NDArray[np.int64] = np.broadcast_to(np.arange(shape[-1]), shape)
        rows = a[2][..., :1]
    else:
        label = np.broadcast_to(b[2][..., :1, :], shape)
        rows = a[2][..., :1]
    if first in s.net.constants and a[0].ndim == 2:
        rows = np.arange(shape[-2])[:, None] * np.ones_like(rows)
    s.learn(out, value, varies, mixed(label, np.broadcast_to(rows, shape)))


def _product_backward(s: Study, node: NodeProto) -> None:
    first, second, transposed, _ = _operands(s, node)
    live = s.live(node.output[0])
    a, b = _factor(s, first, False), _factor(s, second, transposed)
    some = [x[1] | (x[0] != 0) for x in (a, b)]
    read = _any(live, some[1].swapaxes(-1, -2))
    s.mark(first, _reduced(read, s.shape(first)))
    back = _any(some[0].swapaxes(-1, -2), live)
    shape = s.shape(second)
    s.mark(second, _reduced(back, shape[::-1] if transposed else shape).T if transposed else _reduced(back, shape))


def _reduced(mask: Bools, shape: tuple[int, ...]) -> Bools:
    """A mask over the axes that broadcasting added or widened."""
    lead = mask.ndim - len(shape)
    mask = mask.any(axis=tuple(range(lead))) if lead else mask
    once = tuple(k for k, n in enumerate(shape) if n == 1 and mask.shape[k] > 1)
    return mask.any(axis=once, keepdims=True) if once else mask


def _product_rewrite(w: Writer, node: NodeProto) -> None:
    s = w.study
    first, second, transposed, third = _operands(s, node)
    if second in s.net.constants and len(s.shape(second)) == 2 and first in w.pieces:
        return _linear(w, node, first, second, transposed, third)
    if node.op_type == "Gemm":
        return w.copy_whole(node)
    if first in w.pieces and second in w.pieces and _ragged(w, node, first, second):
        return
    _general(w, node, first, second)


def _linear(w: Writer, node: NodeProto, first: str, second: str, transposed: bool, third: str) -> None:
    """Data times a constant matrix, with a bias."""
    s, out = w.study, node.output[0]
    weight = s.net.constants[second].T if transposed else s.net.constants[second]
    shape = s.shape(first)
    bias = s.net.constants[third] if third else np.zeros(1)
    rows = s.wanted(out)[-1]
    order = preferred(w, out)
    rows = rows if order is None else order
    live = s.live(first).reshape(-1, shape[-1]).any(axis=0)
    due = np.flatnonzero(live & (weight[:, rows[rows >= 0]] != 0).any(axis=1))
    lists = w.lists(first)
    columns = worth(lists[-1], due, len(rows))
    others = lists[:-1]
    given = w.adapted(first, [*others, columns])
    value = np.array(s.facts(first)[0])
    value[..., columns[columns >= 0]] = 0
    for axis, own in enumerate(others):
        value = np.take(value, np.maximum(own, 0), axis)
    used = np.flatnonzero(value.reshape(-1, shape[-1]).any(axis=0))
    part = weight[:, np.maximum(rows, 0)] * (rows >= 0)
    constant = value[..., used] @ part[used] + np.broadcast_to(bias, s.shape(out))[tuple(slice(0, 1) if bias.ndim < 2 or bias.shape[0] == 1 else slice(None) for _ in shape[:-1])][..., np.maximum(rows, 0)] * (rows >= 0)
    fixed, rest = _bias(constant, constant.ndim - 1)
    small = part[np.maximum(columns, 0)] * (columns >= 0)[:, None]
    if node.op_type == "Gemm":
        inputs = [given, w.constant(np.ascontiguousarray(small.T)), *([w.constant(fixed)] if fixed.any() else [])]
        made = w.emit("Gemm", inputs, transB=1)
    else:
        made = w.emit("MatMul", [given, w.constant(small)])
        if fixed.any():
            made = w.emit("Add", [made, w.constant(fixed)])
    if rest is not None:
        made = w.emit("Add", [made, w.mapped(rest)])
    ids = w.grid(out, [*others, rows])
    w.put(out, made, np.where((ids < 0) & (rows == -2), -2, ids))


def _needed(s: Study, node: NodeProto, first: str, second: str) -> Bools:
    """Per batch entry, the contracted entries that must be in both factors, bool[..., k]."""
    a, b = s.facts(first), s.facts(second)
    live = s.live(node.output[0])
    some = [x[1] | (x[0] != 0) for x in (a, b)]
    rows = (a[1] & live.any(axis=-1, keepdims=True)).any(axis=-2)
    others = (some[0] & live.any(axis=-1, keepdims=True)).any(axis=-2)
    cols = (b[1] & live.any(axis=-2)[..., None, :]).any(axis=-1)
    back = (some[1] & live.any(axis=-2)[..., None, :]).any(axis=-1)
    return (rows & back) | (others & cols)


def _general(w: Writer, node: NodeProto, first: str, second: str) -> None:
    """A product of which both factors may vary: the same entries of the contracted axis in both."""
    s, out = w.study, node.output[0]
    shape = s.shape(out)
    wanted = s.wanted(out)
    need = _needed(s, node, first, second)
    due = np.flatnonzero(need.any(axis=tuple(range(need.ndim - 1))))
    if w.net.moving[first][-1]:
        due = np.arange(s.shape(first)[-1])
    due = due if due.size else np.zeros(1, np.int64)
    target = list(wanted)

    def lists(name: str, at: int, kept: Ids) -> Lists:
        size = s.shape(name)
        lead = len(shape) - len(size)
        own = [target[lead + a] if n == shape[lead + a] else np.arange(n) for a, n in enumerate(size)]
        own[at] = due
        own[-3 - at] = kept if True else own[-3 - at]
        return own

    inputs = [w.adapted(first, lists(first, -1, target[-2])), w.adapted(second, lists(second, -2, target[-1]))]
    made = w.emit("MatMul", inputs)
    gone = np.setdiff1d(np.arange(s.shape(first)[-1]), due)
    a, b = s.facts(first)[0][..., gone], s.facts(second)[0][..., gone, :]
    if gone.size and a.any() and b.any():
        rest = np.broadcast_to(np.matmul(a, b), shape)
        for axis, own in enumerate(target):
            rest = np.take(rest, own, axis)
        made = w.emit("Add", [made, w.mapped(rest)])
    w.put(out, made, w.grid(out, target))


def _ragged(w: Writer, node: NodeProto, first: str, second: str) -> bool:
    """The product of pieces whose entries differ from head to head, if both have the same ones. False otherwise."""
    s, out = w.study, node.output[0]
    a, b = w.pieces[first].ids, w.pieces[second].ids
    if by_axis(a, s.shape(first)) is not None and by_axis(b, s.shape(second)) is not None:
        return False
    if len(s.shape(first)) != len(s.shape(second)) or a.shape[:-2] != b.shape[:-2] or a.shape[:-2] != s.shape(out)[:-2]:
        return False
    ka, free_a = _entry(a, s.shape(first), -1)
    kb, free_b = _entry(b, s.shape(second), -2)
    if ka is None or kb is None or not np.array_equal(ka, kb):
        return False
    zeros = (np.where(a == -2, 0, a) == -1).any() or (np.where(b == -2, 0, b) == -1).any()
    if zeros and not (_zero(a, -1, ka) and _zero(b, -2, kb)):
        return False
    need = _needed(s, node, first, second)
    held = np.zeros((*need.shape[:-1], need.shape[-1] + 1), np.bool_)
    np.put_along_axis(held, np.broadcast_to(np.where(ka >= 0, ka, need.shape[-1]), (*need.shape[:-1], ka.shape[-1])), True, -1)
    if (need & ~held[..., :-1]).any():
        return False
    gone = ~held[..., :-1]
    rest = np.matmul(s.facts(first)[0] * gone[..., None, :], s.facts(second)[0] * gone[..., :, None])
    rows = np.arange(s.shape(out)[-2]) if free_a is None else free_a
    made = w.emit("MatMul", [w.pieces[first].name, w.pieces[second].name])
    # each element of the output, by the batch entry, the row of `a` and the column of `b`
    del rows
    if a.shape[-2] != s.shape(out)[-2]:
        return False
    kc, _ = _entry(b, s.shape(second), -1)
    if kc is None:
        return False
    whole = np.arange(int(np.prod(s.shape(out)))).reshape(s.shape(out))
    at = np.broadcast_to(np.maximum(kc, 0)[..., None, :], (*whole.shape[:-1], kc.shape[-1]))
    ids = np.where(np.broadcast_to(kc[..., None, :] >= 0, at.shape), np.take_along_axis(whole, at, -1), -2)
    if (s.live(out) & ~np.isin(whole, ids)).any():
        return False
    if rest.any():
        made = w.emit("Add", [made, w.mapped(np.take_along_axis(np.broadcast_to(rest, whole.shape), at, -1) * (ids >= 0))])
    w.put(out, made, ids)
    return True


def _entry(ids: Ids, shape: tuple[int, ...], axis: int) -> tuple[Ids | None, Ids | None]:
    """The entry of `axis` at each of its places, per batch entry and the same along the other matrix axis; -1: none."""
    other = -3 - axis
    valid = ids >= 0
    place = np.unravel_index(np.where(valid, ids, 0), shape)[axis]
    kept = np.where(valid, place, -1)
    found = kept.max(axis=other)
    same = np.where(valid, kept, np.expand_dims(found, other)) == np.expand_dims(found, other)
    return (found, None) if same.all() else (None, None)


def _zero(ids: Ids, axis: int, entry: Ids) -> bool:
    """Whether every place without an entry holds zeros."""
    moved = np.moveaxis(ids, axis, -1)
    return bool((moved[np.broadcast_to(np.expand_dims(entry < 0, -2), moved.shape)] == -2).all())


PRODUCT = Rule(_product_forward, _product_backward, _product_rewrite)


# --- embeddings


def is_embedding(s: Study, node: NodeProto) -> bool:
    """Whether `node` takes rows of a constant by indices that vary."""
    return (
        node.op_type == "Gather"
        and node.input[0] in s.net.constants
        and s.net.data(node) == [1]
        and settings(node).get("axis", 0) == 0
        and len(s.shape(node.input[0])) == 2
    )


def _embedding_forward(s: Study, node: NodeProto) -> None:
    table = s.net.constants[node.input[0]]
    out = node.output[0]
    moves = (table != table[:1]).any(axis=0)
    s.learn(out, np.where(moves, 0.0, table[0]), moves, np.arange(table.shape[1]))


def _embedding_backward(s: Study, node: NodeProto) -> None:
    live = s.live(node.output[0])
    if live.any():
        s.mark(node.input[1], np.ones(s.shape(node.input[1]), np.bool_))


def _embedding_rewrite(w: Writer, node: NodeProto) -> None:
    s, out = w.study, node.output[0]
    kept = s.wanted(out)[-1]
    table = w.constant(s.net.constants[node.input[0]][:, kept])
    index = w.adapted(node.input[1], [np.arange(n) for n in s.shape(node.input[1])])
    made = w.emit("Gather", [table, index], axis=0)
    w.put(out, made, w.grid(out, [*(np.arange(n) for n in s.shape(out)[:-1]), kept]))


EMBEDDING = Rule(_embedding_forward, _embedding_backward, _embedding_rewrite)
__all__ = ["CONVOLUTION", "EMBEDDING", "PRODUCT", "CompactionError", "Ragged", "grid", "is_convolution", "is_embedding", "is_product"]
