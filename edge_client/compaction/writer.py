"""Writes a graph again on fewer elements: its nodes, adapters between pieces of values, constants and sizes.

A `Piece` (`pieces`) maps each place of a smaller tensor to an element of the whole value. A channel that went
is in none. Where an operator needs a channel that its input lacks, because another input has it or because it mixes
channels, an adapter puts it in: a `Gather`, behind a `Pad` by one entry where a channel is missing, and an `Add` when a
missing channel is a constant other than zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper

from edge_client.compaction.net import needed
from edge_client.compaction.operators import Array
from edge_client.compaction.pieces import Ids, Lists, Piece, Ragged, by_axis, grid
from edge_client.compaction.study import Study
from edge_client.errors import CompactionError
from edge_client.graph.axes import POINTWISE
from edge_client.graph.nodes import settings


@dataclass(frozen=True)
class Costs:
    """What moving an element costs, in multiply-adds: along the last axis, one by one, and along others, in blocks.

    A convolution takes as long for any number of outputs that fill as many blocks of `block`. Zeros fill up the
    channels of a sum of images to a multiple of `multiple`.
    """

    moved: float = 4.0
    last: float = 4.0
    block: int = 1
    multiple: int = 1


FEWEST = Costs()
"""Nearly the fewest multiply-adds."""
FASTEST = Costs(8.0, 256.0, 16, 4)
"""What ONNX Runtime's operators take: a gather along the last axis costs 200 to 300 multiply-adds an element."""


def _key(constant: Array) -> tuple[Any, ...]:
    return "constant", constant.dtype.str, constant.shape, sha256(constant.data).digest()


class Writer:
    """The smaller graph while it is written, in the order of the whole one.

    `levels`: how freely a reshape that splits channels may cut them, by its output (see `reshapes.slots`). `split`: the
    outputs of those that cut. `node`: the one that is written. `why`: the operator that raised a level last.
    """

    def __init__(self, study: Study, levels: Mapping[str, int], costs: Costs = FEWEST, why: str = "") -> None:
        self.study, self.net, self.levels, self.costs, self.why = study, study.net, levels, costs, why
        self.split: set[str] = set()
        self.pieces: dict[str, Piece] = {}
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.stopped: list[str] = list(dict.fromkeys(study.whole.values()))
        self.node: NodeProto | None = None
        self._lists: dict[str, Lists | None] = {}
        self._made: dict[tuple[Any, ...], str] = {}
        self._explained: set[tuple[str, str]] = set()
        self._count = 0

    def run(self, rewrite: Callable[[Study, NodeProto], Rewrite]) -> None:
        """Write every node whose outputs are needed, by the function that `rewrite` gives for it."""
        net, s = self.net, self.study
        self.put(net.input, net.input, np.arange(int(np.prod(s.shape(net.input)))).reshape(s.shape(net.input)))
        nodes = net.data_nodes()
        ends = {v: node for node in nodes for v in node.input if v != net.output}
        for node in nodes:
            if any(s.live(o).any() for o in node.output if o):
                self.node = node
                rewrite(s, node)(self, node)
            for v in node.input:
                if ends.get(v) is node:  # nothing reads it any more
                    self.pieces.pop(v, None)
        whole = [np.arange(n) for n in s.shape(net.output)]
        self.node = None
        last = self.adapted(net.output, whole, batch=True)
        if not any(last in node.output for node in self.nodes):
            self.nodes.append(helper.make_node("Identity", [last], [net.output]))
        self.nodes, read = needed(self.nodes, {last})
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [net.output if v == last else v for v in names]
        self.constants = {k: v for k, v in self.constants.items() if k in read}

    def stays(self, value: str, line: str) -> None:
        """A line of what stays: the layer that `value` comes from, the operator at hand, and `line`."""
        assert self.node is not None
        maker = self.study.maker(value)
        self._explained.add((self.node.output[0], maker))
        line = f"{maker}: {self.node.op_type} {line}"
        if line not in self.stopped:
            self.stopped.append(line)

    def _returned(self, value: str, axis: int, count: int) -> None:
        """A line where the operator at hand reads dead channels, unless one has the reason already.

        A join has none: its other sides have the channels.
        """
        if self.node is None or POINTWISE.fullmatch(self.node.op_type) or self.node.op_type in ("Concat", "Pad"):
            return
        explained = (self.node.output[0], self.study.maker(value)) in self._explained
        if count and not explained and self.study.channels(value)[axis]:
            self.stays(value, f"reads dead channels ({count} of {self.study.shape(value)[axis]})")

    # --- pieces

    def put(self, value: str, name: str, ids: Ids) -> None:
        """`name` holds the elements `ids` of a value."""
        self.pieces[value] = Piece(name, ids)

    def lists(self, value: str) -> Lists:
        """The entries of each axis that the piece of `value` holds. Raises Ragged."""
        if value not in self._lists:
            self._lists[value] = by_axis(self.pieces[value].ids, self.study.shape(value))
        found = self._lists[value]
        if found is None:
            raise Ragged(value, "they are cut differently from entry to entry")
        return found

    def grid(self, value: str, lists: Sequence[Ids]) -> Ids:
        """The elements of `value` at the entries `lists`."""
        return grid(self.study.shape(value), lists)

    # --- nodes and constants

    def emit(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        return self.emit_many(op, inputs, 1, **attributes)[0]

    def emit_many(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Append a node of several outputs; a node equal to an earlier one is that one."""
        trimmed = list(inputs)
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        node = helper.make_node(op, trimmed, [], **attributes)
        key = ("node", count, node.SerializeToString(deterministic=True))
        if key not in self._made:
            names = [self.fresh() for _ in range(count)]
            node.output.extend(names)
            self.nodes.append(node)
            self._made[key] = " ".join(names)
        return self._made[key].split(" ")

    def fresh(self) -> str:
        """A name of its own."""
        self._count += 1
        return f"p{self._count}"

    def constant(self, value: Array) -> str:
        """The name of a constant; equal ones are one."""
        value = np.ascontiguousarray(value) if value.ndim else value
        key = _key(value)
        if key not in self._made:
            self._made[key] = f"k{len(self.constants)}"
            self.constants[self._made[key]] = value
        return self._made[key]

    def matrix(self, value: Array) -> tuple[str, bool]:
        """The name of a constant matrix; of its transpose, and True, where that alone is stored: a tied weight."""
        stored, turned = (_key(np.ascontiguousarray(v)) in self._made for v in (value, value.T))
        tied = turned and not stored
        return self.constant(value.T if tied else value), tied

    def integers(self, *values: int) -> str:
        """A constant vector of sizes or places."""
        return self.constant(np.array(values, np.int64))

    def whole(self, name: str) -> str:
        """All of a value, whatever it is: a constant, a size, one the study found constant, or data. Raises Ragged."""
        net = self.net
        if not name:
            return ""
        if name in net.constants:
            return self.constant(net.constants[name])
        if name in net.sizes:
            return self._size(name) if name in net.growing else self.constant(net.sizes[name])
        return self.adapted(name, [np.arange(n) for n in self.study.shape(name)], batch=True)

    def _size(self, name: str) -> str:
        """A size that the batch enters: of whole values, whose pieces here may be smaller."""
        node = self.study.makers[name]
        if node.op_type in ("Shape", "Size") and node.input[0] not in self.net.sizes:
            return self._extent(node)
        made = self.emit_many(node.op_type, [self.whole(v) for v in node.input], len(node.output), **settings(node))
        return made[list(node.output).index(name)]

    def _extent(self, node: NodeProto) -> str:
        """The `Shape` or `Size` of a whole value: the batch is a factor of the axes that hold it."""
        given = settings(node)
        own = slice(given.get("start", 0), given.get("end"))
        shape, moving = self.study.shape(node.input[0])[own], self.net.moving[node.input[0]][own]
        if [n for n, moves in zip(shape, moving, strict=True) if moves] == [1]:
            made = self.batch_shape(shape, moving.index(True))
        else:
            batch = self.emit("Where", [self.constant(np.array(moving)), self.batch_shape([1], 0), self.integers(1)])
            made = self.emit("Mul", [self.integers(*shape), batch])
        return self.emit("ReduceProd", [made], keepdims=0) if node.op_type == "Size" else made

    def sized(self, name: str, lengths: Sequence[int], value: str) -> str:
        """The vector `name` of the sizes of `value`, with `lengths` for the axes without the batch."""
        before = self.net.known(name)
        lead = len(lengths) - len(before)
        moving = np.array(self.net.moving[value][lead:])
        fixed = np.array(lengths[lead:], np.int64)
        fixed = np.where(before == 1, 1, fixed) if lead >= 0 else fixed
        if name not in self.net.growing:
            return self.constant(np.where(moving, before, fixed))
        if moving.sum() == 1 and before[moving][0] == 1 == self.study.shape(value)[int(np.argmax(moving)) + lead]:
            return self.batch_shape([int(n) for n in fixed], int(np.argmax(moving)))
        return self.emit("Where", [self.constant(moving), self._size(name), self.constant(fixed)])

    def reshaped(self, name: str, lengths: Sequence[int], value: str, before: str) -> str:
        """`name`, a piece of `before`, in the shape `lengths`; the batch in the axis of `value` that holds it.

        Raises CompactionError when the batch is in several.
        """
        moving, alone = self.net.moving[value], self.study.shape(before)[:1] == (1,)
        if (
            alone
            and lengths[0] == 1
            and moving == (True, False)
            and [i for i, m in enumerate(self.net.moving[before]) if m] == [0]
        ):
            return self.emit("Flatten", [name], axis=1)
        if sum(moving) > 1:
            raise CompactionError(f"two axes of value {value!r} depend on the batch")
        return self.emit(
            "Reshape", [name, self.integers(*(-1 if m else n for m, n in zip(moving, lengths, strict=True)))]
        )

    # --- adapters

    def adapted(self, value: str, target: Sequence[Ids], batch: bool = False, pooled: bool = False) -> str:
        """A tensor with the entries `target` of each axis of `value`; -1: any content, -2: zero. Raises Ragged.

        A value that does not vary becomes a constant, of one sample unless `batch`. For a pool no `Pad` comes last:
        ONNX Runtime makes it the pool's own padding, which must be smaller than the window.
        """
        shape = self.study.shape(value)
        wanted = grid(shape, target)
        flat = self.study.facts(value).value.reshape(-1)
        if value not in self.pieces:
            held = np.where(wanted >= 0, flat[np.maximum(wanted, 0)], 0).astype(flat.dtype)
            return self.batched(value, held) if batch else self.constant(self._broadcast(value, held))
        piece = self.pieces[value]
        if np.array_equal(piece.ids, wanted):
            return piece.name
        name, put_in = piece.name, np.zeros(wanted.shape, np.bool_)
        for axis, (own, due) in enumerate(zip(self.lists(value), target, strict=True)):
            where = np.full(shape[axis] + 1, -1)
            where[own[own >= 0]] = np.flatnonzero(own >= 0)
            zero = int(np.argmax(own == -2)) if (own == -2).any() else -1
            places, length = np.where(due >= 0, where[due], np.where(due == -2, zero, 0)), len(own)
            if self.net.moving[value][axis] and not np.array_equal(places, np.arange(length)):
                raise Ragged(value, "the batch lies in an axis that lost channels")
            absent = places < 0
            if absent.any():
                if not self.net.is_plain(value):
                    raise Ragged(value, "some of them are gone")
                self._returned(value, axis, int(np.count_nonzero(absent & (due >= 0))))
                name, places, length = self.padded(name, axis, len(shape), length, places, absent, not pooled)
                put_in |= absent.reshape(-1, *(1,) * (len(shape) - 1 - axis))
            name = self.picked(name, axis, places, length)
        return self._filled(value, name, np.where(put_in, wanted, -1)) if put_in.any() else name

    def _filled(self, value: str, name: str, ids: Ids) -> str:
        """`name`, which has zeros at the elements `ids` of `value`, with the constants that these are; -1: none."""
        at = np.maximum(ids, 0)
        if ((ids >= 0) & self.study.live(value).reshape(-1)[at]).any():
            raise Ragged(value, "one that varies is gone")
        flat = self.study.facts(value).value.reshape(-1)
        fill = np.where(ids >= 0, flat[at], np.zeros(1, flat.dtype))
        fill = self._broadcast(value, fill)
        if not fill.any():
            return name
        return self.emit("Add" if self.net.is_float(value) else "Or", [name, self.mapped(fill)])

    def _broadcast(self, value: str, held: Array) -> Array:
        """Constants `held` of `value` once for all places and samples of a merged axis, of which a batch has more."""
        for axis in self.study.merged(value):
            held = np.take(held, [0], axis)
        return held

    def padded(
        self, name: str, axis: int, rank: int, length: int, places: Ids, absent: NDArray[np.bool_], whole: bool
    ) -> tuple[str, Ids, int]:
        """`name` with zeros along an axis, where the wanted entries then lie, and the axis's length."""
        held = places[~absent]
        first = int(np.argmin(absent)) if held.size else 0
        block = (
            whole
            and bool(held.size == length)
            and np.array_equal(held, np.arange(length))
            and not absent[first : first + length].any()
        )
        before, after = (first, len(places) - first - length) if block else (0, 1)
        pads = np.zeros(2 * rank, np.int64)
        pads[axis], pads[rank + axis] = before, after
        name = self.emit("Pad", [name, self.constant(pads)], mode="constant")
        return name, np.arange(len(places)) if block else np.where(absent, length, places), before + length + after

    def picked(self, name: str, axis: int, places: Ids, length: int) -> str:
        """The entries `places` of an axis that has `length`."""
        if np.array_equal(places, np.arange(length)):
            return name
        if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            bounds = (self.integers(int(places[0])), self.integers(int(places[0]) + len(places)), self.integers(axis))
            return self.emit("Slice", [name, *bounds])
        if len(places) > 1 and (step := int(places[1] - places[0])) > 1 and (np.diff(places) == step).all():
            bounds = (self.integers(int(places[0])), self.integers(int(places[-1]) + 1), self.integers(axis))
            return self.emit("Slice", [name, *bounds, self.integers(step)])
        if len(places) == length == 1:
            return name
        return self.emit("Gather", [name, self.constant(places.astype(np.int64))], axis=axis)

    def mapped(self, value: Array) -> str:
        """A constant, stored by its distinct slices along each axis: most of a map of constants is its interior."""
        small, places = value, []
        for axis in range(value.ndim):
            if small.shape[axis] > 4:
                rows = np.moveaxis(small, axis, 0).reshape(small.shape[axis], -1)
                _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
                if 2 * len(first) <= len(rows):
                    small = np.take(small, first, axis)
                    places.append((axis, inverse.reshape(-1)))
        name = self.constant(small)
        for axis, inverse in places:
            if small.shape[axis] == 1:
                continue  # it broadcasts
            name = self.emit("Gather", [name, self.constant(inverse.astype(np.int64))], axis=axis)
        return name

    def batched(self, value: str, held: Array) -> str:
        """The constant `held` for every sample of the batch."""
        moving = self.net.moving[value]
        if not any(moving):
            return self.constant(held)
        axis = moving.index(True)
        if sum(moving) > 1:
            raise CompactionError(f"the constant value {value!r} has the batch in two axes")
        return self.emit("Expand", [self.constant(np.take(held, [0], axis)), self.batch_shape(held.shape, axis)])

    def batch_shape(self, lengths: Sequence[int], axis: int) -> str:
        """The vector `lengths`, which is that for one sample, with the batch in `axis`."""
        n = self.emit("Shape", [self.net.input], start=0, end=1)
        if lengths[axis] != 1:
            n = self.emit("Mul", [n, self.integers(lengths[axis])])
        before = [self.integers(*lengths[:axis])] if axis else []
        after = [self.integers(*lengths[axis + 1 :])] if axis + 1 < len(lengths) else []
        parts = [*before, n, *after]
        return self.emit("Concat", parts, axis=0) if len(parts) > 1 else n

    def copy_whole(self, node: NodeProto) -> None:
        """The node as it is, on whole inputs."""
        outs = self.emit_many(node.op_type, [self.whole(v) for v in node.input], len(node.output), **settings(node))
        for value, name in zip(node.output, outs, strict=True):
            if value:
                shape = self.study.shape(value)
                self.put(value, name, np.arange(int(np.prod(shape))).reshape(shape))


Rewrite = Callable[[Writer, NodeProto], None]
"""Writes one node on fewer elements."""
