"""Matrix products and embeddings, with only their live inputs and outputs.

The constant part of a product is folded as that of a convolution is (see `convolutions`). A product of two varying
factors keeps the entries of the contracted axis that both need, in each head its own where the layouts allow it.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import NodeProto

from edge_client.compaction.convolutions import biased
from edge_client.compaction.layouts import preferred, worth
from edge_client.compaction.moves import is_move, sources
from edge_client.compaction.operators import F64
from edge_client.compaction.pieces import Ids, Lists, by_axis
from edge_client.compaction.study import Bools, Facts, Rule, Study, entries, mixed, narrowed, some
from edge_client.compaction.writer import Writer
from edge_client.graph.nodes import settings


def operands(node: NodeProto) -> tuple[str, str, bool, str]:
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


def _factor(s: Study, name: str, transposed: bool) -> Facts:
    found = s.facts(name)
    return Facts(*(array.T for array in found)) if transposed else found


def _shift_free(s: Study, node: NodeProto) -> bool:
    """Whether a term that is equal for all columns of the product changes nothing: a softmax over columns follows."""
    key = ("shift", node.output[0])
    if key not in s.notes:
        shape = s.shape(node.output[0])
        s.notes[key] = _cancels(s, node.output[0], np.arange(prod(shape)).reshape(shape) // max(1, shape[-1]))
    return bool(s.notes[key])


def _cancels(s: Study, value: str, rows: Ids) -> bool:
    """Whether what is common to the elements of one of `rows` cancels in a softmax, through moves, sums and factors."""
    if value == s.net.output:
        return False
    for user in s.users.get(value, []):
        rest = [v for v in user.input if v != value]
        out = user.output[0]
        if user.op_type == "Softmax":
            if (rows != np.take(rows, [0], settings(user).get("axis", -1))).any():
                return False
            continue
        scalar = user.op_type in ("Mul", "Div") and user.input[0] == value and len(rest) == 1
        if is_move(s.net, user) and s.net.data(user) == [0]:
            source = sources(s, user)
            found = rows.reshape(-1)[source] if (source >= 0).all() else None
        elif (user.op_type == "Add" and len(rest) == 1 and len(s.shape(out)) == rows.ndim) or (
            scalar and rest[0] in s.net.constants and s.net.constants[rest[0]].size == 1
        ):
            found = np.broadcast_to(rows, s.shape(out))
        else:
            return False
        if found is None or not _cancels(s, out, found):
            return False
    return bool(s.users.get(value))


def _second(s: Study, node: NodeProto) -> Facts:
    """The second factor. Before a softmax, entries that are equal for all columns count as zero."""
    _, name, transposed, _ = operands(node)
    value, varies, label = _factor(s, name, transposed)
    if node.op_type == "MatMul" and name in s.varies and _shift_free(s, node):
        flat = ~varies.any(axis=-1, keepdims=True) & (value == value[..., :1]).all(axis=-1, keepdims=True)
        value = np.where(flat, 0.0, value)
    return Facts(value, varies, label)


def _averages(s: Study, name: str) -> bool:
    """Whether every row of a value sums to one: it is a row of a softmax, perhaps moved."""
    chain, makers = list[NodeProto](), s.makers
    while name in makers and makers[name].op_type != "Softmax":
        chain.append(makers[name])
        if not is_move(s.net, chain[-1]) or s.net.data(chain[-1]) != [0]:
            return False
        name = chain[-1].input[0]
    if name not in makers:
        return False
    shape = s.shape(name)
    axis = settings(makers[name]).get("axis", -1) % len(shape)
    entry = np.broadcast_to(np.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - 1 - axis)), shape)
    row = np.broadcast_to(np.take(np.arange(prod(shape)).reshape(shape), [0], axis), shape)
    for node in chain[::-1]:
        source = sources(s, node)
        if (source < 0).any():
            return False
        entry, row = entry.reshape(-1)[source], row.reshape(-1)[source]
    whole = entry.shape[-1] == shape[axis] and bool((np.sort(entry) == np.arange(shape[axis])).all())
    return whole and bool((row == row[..., :1]).all())


def _any(a: Bools, b: Bools) -> Bools:
    """The product of marks: whether any pair of them meets."""
    return np.asarray(np.matmul(a.astype(np.float32), b.astype(np.float32)) > 0)


def _product_forward(s: Study, node: NodeProto) -> None:
    first, second, _, bias = operands(node)
    a, a_varies, a_label = _factor(s, first, False)
    b, b_varies, b_label = _second(s, node)
    varies = _any(a_varies, b_varies | (b != 0)) | _any(a_varies | (a != 0), b_varies)
    value = np.matmul(a, b)
    if second in s.varies and _averages(s, first):  # the average of one constant is that constant
        same = ~b_varies.any(axis=-2, keepdims=True) & (b == b[..., :1, :]).all(axis=-2, keepdims=True)
        varies, value = varies & ~same, np.where(same, b[..., :1, :], value)
    if bias:
        value = value + s.net.constants[bias]
    shape = s.shape(node.output[0])
    rows, columns = a_label[..., :1], b_label[..., :1, :]
    if first in s.net.constants and a.ndim == 2:  # a layer: each of its outputs has a label of its own
        rows = np.arange(shape[-2])[:, None] * np.ones_like(rows)
    if second in s.net.constants and b.ndim == 2:
        columns = np.arange(shape[-1])
    s.store(node.output[0], value, varies, mixed(np.broadcast_to(columns, shape), np.broadcast_to(rows, shape)))


def _product_backward(s: Study, node: NodeProto) -> None:
    first, second, transposed, _ = operands(node)
    live = s.live(node.output[0])
    a, b = _factor(s, first, False), _second(s, node)
    some = [x.varies | (x.value != 0) for x in (a, b)]
    read = _any(live, some[1].swapaxes(-1, -2))
    s.mark(first, narrowed(read, s.shape(first)))
    back = _any(some[0].swapaxes(-1, -2), live)
    shape = s.shape(second)
    s.mark(second, narrowed(back, shape[::-1] if transposed else shape).T if transposed else narrowed(back, shape))
    if first in s.read and second in s.read:
        s.need(first, s.read[first] & (a[0] != 0))
        s.need(second, s.read[second] & ((b[0].T if transposed else b[0]) != 0))


def rewrite_product(w: Writer, node: NodeProto) -> None:
    """The product with the rows, columns and summed entries that are left."""
    s = w.study
    first, second, transposed, third = operands(node)
    if second in s.net.constants and len(s.shape(second)) == 2 and first in w.pieces:
        _linear(w, node, first, second, transposed, third)
    elif node.op_type == "Gemm":
        w.copy_whole(node)
    elif first not in w.pieces or second not in w.pieces or not _ragged(w, node, first, second):
        _general(w, node, first, second)


def _linear(w: Writer, node: NodeProto, first: str, second: str, transposed: bool, third: str) -> None:
    """Data times a constant matrix, with a bias."""
    s, out = w.study, node.output[0]
    weight = s.net.constants[second].T if transposed else s.net.constants[second]
    *others, own = w.lists(first)
    live = entries(s.live(first), len(others))
    order = preferred(w, out, int(live.sum()))
    rows = s.wanted(out)[-1] if order is None else order
    due = np.flatnonzero(live & (weight[:, rows[rows >= 0]] != 0).any(axis=1))
    columns = worth(w, own, due, len(rows), last=True)
    given = w.adapted(first, [*others, columns])
    bias = s.net.constants[third] if third else np.zeros(1)
    bias = np.broadcast_to(bias, (*np.broadcast_shapes(bias.shape, (1,) * (len(others) + 1))[:-1], weight.shape[1]))
    for axis, kept in enumerate(others):
        bias = np.take(bias, np.maximum(kept, 0), axis) if bias.shape[axis] > 1 else bias
    part = weight[:, np.maximum(rows, 0)] * (rows >= 0)
    constant = _gone(s, first, [*others, columns], part) + bias[..., np.maximum(rows, 0)] * (rows >= 0)
    fixed, rest = biased(constant, constant.ndim - 1)
    small = part[np.maximum(columns, 0)] * (columns >= 0)[:, None]
    if node.op_type == "Gemm":
        factor, tied = w.matrix(small.T)
        inputs = [given, factor, *([w.constant(fixed)] if fixed.any() else [])]
        made = w.emit("Gemm", inputs, **({} if tied else {"transB": 1}))
    else:
        factor, tied = w.matrix(small)
        made = w.emit("MatMul", [given, w.emit("Transpose", [factor], perm=[1, 0]) if tied else factor])
        if fixed.any():
            made = w.emit("Add", [made, w.constant(fixed)])
    if rest is not None:
        made = w.emit("Add", [made, w.mapped(rest)])
    ids = w.grid(out, [*others, rows])
    w.put(out, made, np.where((ids < 0) & (rows == -2), -2, ids))


def _gone(s: Study, first: str, lists: Lists, weight: F64) -> F64:
    """What the inputs of a layer that are in none of `lists` add to its outputs: they are constant."""
    value = np.array(s.facts(first).value)
    *others, columns = lists
    value[..., columns[columns >= 0]] = 0
    for axis, kept in enumerate(others):
        value = np.take(value, np.maximum(kept, 0), axis)
    used = np.flatnonzero(entries(value != 0, value.ndim - 1))
    made: F64 = value[..., used] @ weight[used]
    return made


def _needed(s: Study, node: NodeProto, first: str) -> Bools:
    """Per batch entry, the contracted entries that must be in both factors, bool[..., k]."""
    a, b = s.facts(first), _second(s, node)
    live = s.live(node.output[0])
    rows, columns = some(live, -1, keepdims=True), some(live, -2)[..., None, :]

    def of(marks: Bools, others: Bools, axis: int) -> Bools:
        return some(marks & others, axis)

    varying = of(a.varies, rows, -2) & of(b.varies | (b.value != 0), columns, -1)
    return varying | (of(a.varies | (a.value != 0), rows, -2) & of(b.varies, columns, -1))


def _general(w: Writer, node: NodeProto, first: str, second: str) -> None:
    """A product of which both factors may vary: the same entries of the contracted axis in both."""
    s, out = w.study, node.output[0]
    shape, target = s.shape(out), s.wanted(out)
    need = _needed(s, node, first)
    due = np.flatnonzero(need.any(axis=tuple(range(need.ndim - 1))))
    if w.net.moving[first][-1]:
        due = np.arange(s.shape(first)[-1])
    due = due if due.size else np.zeros(1, np.int64)

    def factor(name: str, summed: int) -> str:
        size = s.shape(name)
        lead = len(shape) - len(size)
        own = [target[lead + a] if n == shape[lead + a] else np.arange(n) for a, n in enumerate(size)]
        own[summed] = due
        return w.adapted(name, own)

    lead = [own if n > 1 else np.zeros(1, np.int64) for own, n in zip(target[:-2], need.shape[:-1], strict=True)]
    least = int(need.sum(axis=-1)[np.ix_(*lead)].min())  # of the matrices that are written
    if need.ndim > 1 and least < len(due) and not w.net.moving[first][-1]:
        cut = first if first in w.pieces else second
        w.stays(cut, f"sums over {len(due)} entries in every matrix; one needs {least}")
    made = w.emit("MatMul", [factor(first, -1), factor(second, -2)])
    gone = np.setdiff1d(np.arange(s.shape(first)[-1]), due)
    a, b = s.facts(first).value[..., gone], _second(s, node).value[..., gone, :]
    if gone.size and a.any() and b.any():
        rest = np.broadcast_to(np.matmul(a, b), shape)
        for axis, kept in enumerate(target):
            rest = np.take(rest, kept, axis)
        made = w.emit("Add", [made, w.mapped(rest)])
    w.put(out, made, w.grid(out, target))


def _ragged(w: Writer, node: NodeProto, first: str, second: str) -> bool:
    """The product of pieces whose entries differ from head to head, if both have the same ones. False otherwise."""
    s, out = w.study, node.output[0]
    a, b = w.pieces[first].ids, w.pieces[second].ids
    whole = np.arange(int(np.prod(s.shape(out)))).reshape(s.shape(out))
    if by_axis(a, s.shape(first)) is not None and by_axis(b, s.shape(second)) is not None:
        return False
    if a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or list(a.shape[:-1]) != list(whole.shape[:-1]):
        return False
    summed, other = _entry(a, s.shape(first), -1), _entry(b, s.shape(second), -2)
    columns = _entry(b, s.shape(second), -1)
    if summed is None or other is None or columns is None or not np.array_equal(summed, other):
        return False
    width = s.shape(out)[-1]
    if np.size(b, -1) == width:  # a head without entries has its constant at every column
        columns = np.where(some(other >= 0, -1, keepdims=True), columns, np.arange(width))
    if ((a == -1).any() or (b == -1).any()) and not (_zero(a, -1, summed) and _zero(b, -2, summed)):
        return False
    need = _needed(s, node, first)
    lead, k = need.shape[:-1], need.shape[-1]
    held = np.zeros((*lead, k + 1), np.bool_)
    np.put_along_axis(held, np.broadcast_to(np.where(summed >= 0, summed, k), (*lead, summed.shape[-1])), True, -1)
    gone = ~held[..., :-1]
    at = np.broadcast_to(np.maximum(columns, 0)[..., None, :], (*whole.shape[:-1], columns.shape[-1]))
    ids = np.where(columns[..., None, :] >= 0, np.take_along_axis(whole, at, -1), -2)
    if (need & gone).any() or (s.live(out) & ~np.isin(whole, ids)).any():
        return False
    made = w.emit("MatMul", [w.pieces[first].name, w.pieces[second].name])
    rest = np.matmul(s.facts(first).value * gone[..., None, :], _second(s, node).value * gone[..., :, None])
    if rest.any():
        held_rest = np.take_along_axis(np.broadcast_to(rest, whole.shape), at, -1) * (ids >= 0)
        made = w.emit("Add", [made, w.mapped(held_rest)])
    w.put(out, made, ids)
    return True


def _entry(ids: Ids, shape: tuple[int, ...], axis: int) -> Ids | None:
    """The entry of `axis` at each of its places, per batch entry, -1: none; None if it differs along the other axis."""
    other = -3 - axis
    valid = ids >= 0
    place = np.where(valid, np.unravel_index(np.where(valid, ids, 0), shape)[axis], -1)
    found = place.max(axis=other)
    wide = np.expand_dims(found, other)
    return found if (np.where(valid, place, wide) == wide).all() else None


def _zero(ids: Ids, axis: int, entry: Ids) -> bool:
    """Whether every place without an entry holds zeros."""
    moved = np.moveaxis(ids, axis, -1)
    return bool((moved[np.broadcast_to(np.expand_dims(entry < 0, -2), moved.shape)] == -2).all())


PRODUCT = Rule(_product_forward, _product_backward)


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
    s.store(out, np.where(moves, 0.0, table[0]), moves, np.arange(table.shape[1]))


def _embedding_backward(s: Study, node: NodeProto) -> None:
    live = s.live(node.output[0])
    if live.any():
        s.mark(node.input[1], np.ones(s.shape(node.input[1]), np.bool_))


def rewrite_embedding(w: Writer, node: NodeProto) -> None:
    """The rows of a table with the columns that are left."""
    s, out = w.study, node.output[0]
    kept = s.wanted(out)[-1]
    table = w.constant(s.net.constants[node.input[0]][:, kept])
    index = w.adapted(node.input[1], [np.arange(n) for n in s.shape(node.input[1])])
    made = w.emit("Gather", [table, index], axis=0)
    w.put(out, made, w.grid(out, [*(np.arange(n) for n in s.shape(out)[:-1]), kept]))


EMBEDDING = Rule(_embedding_forward, _embedding_backward)
