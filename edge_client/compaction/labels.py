"""Which entries of which tensors belong together, found by running `eval.onnx` on labels.

Every entry of every axis of every tensor of the bundle is an atom. A layer labels its outputs with the atoms of its
weight's rows. Moves carry labels along. Where an operator without a mixed axis meets several labels, they are joined;
where a layer reads labels, they are joined with the atoms of its weight's columns. Atoms that are joined leave together
or not at all. An operator that mixes channels fixes them, and so does the output.

Whether a group can leave, a trial shows (`edge_export.group_trial`). What is fixed here saves one, and says why.

Weights themselves may be moved before they are used (the gates of an LSTM, a fused projection): the numbers of their
elements are moved with them, so that it is known which entry of which tensor a row is. Of weights that are computed
(standardised filters, prototypes of length 1) it follows from the axes that each operator keeps together.
"""

from __future__ import annotations

from math import prod

import numpy as np
from edge_kernels.channels import Role
from onnx import NodeProto

from edge_client.compaction import convolutions, maps, moves, products, recurrent
from edge_client.compaction.atoms import ANY, NONE, Atoms, Labels
from edge_client.compaction.net import Net, Shape
from edge_client.compaction.rules import rule
from edge_client.compaction.study import OPAQUE, Study, thin
from edge_client.graph.axes import axes_of
from edge_client.graph.nodes import GATES, settings


class Labelled:
    """The labels of every value, by running the graph on them."""

    def __init__(self, net: Net, tensors: dict[str, Shape]) -> None:
        self.net, self.atoms = net, Atoms(tensors)
        self.study = Study(net)
        self.labels: dict[str, Labels] = {net.input: np.full(net.shapes[net.input], NONE)}
        self.repeats: dict[str, str] = {}
        """The input of each Expand, by its output: the same value for all channels."""
        self.made: dict[tuple[str, int, Role], Labels] = {}
        """What `_along` gives for a computed constant."""
        self.maps: list[NodeProto] = []
        """The maps that read parameters."""

    def run(self) -> None:
        """Label every value and join what belongs together."""
        for node in self.net.data_nodes():
            self._node(node)
        self.atoms.fix(self.labels[self.net.output], "they are the model's outputs")
        changed = True
        while changed:  # what differs along two axes cannot leave by either
            for node in self.maps:
                self._parameters(node)
            changed = sum(self._one_axis(value) for value in self.labels.values()) > 0

    def _node(self, node: NodeProto) -> None:
        if node.op_type == "Expand" and node.input[0] in self.labels:
            self.repeats[node.output[0]] = node.input[0]
        if any(0 in self.net.shapes[node.input[k]] for k in self.net.data(node)):
            self._opaque(node)
            return
        labelled = {
            convolutions.CONVOLUTION: self._convolution,
            products.PRODUCT: self._product,
            products.EMBEDDING: self._embedding,
            recurrent.RECURRENT: self._recurrent,
            moves.MOVE: self._move,
            maps.MAP: self._map,
            OPAQUE: self._opaque,
        }
        labelled[rule(self.study, node)](node)

    def _embedding(self, node: NodeProto) -> None:
        self.atoms.fix(self._along(node.input[0], 0, "holds"), "samples name them by number")
        self._put(node.output[0], self._along(node.input[0], 1, "makes"))

    def _opaque(self, node: NodeProto) -> None:
        """Of an operator that mixes channels, or reads a value without elements."""
        for k in self.net.data(node):
            self.atoms.fix(self.labels[node.input[k]], _mixes(node))
        for out in [o for o in node.output if o]:
            self._put(out, np.full(1, NONE))

    def _put(self, name: str, labels: Labels) -> None:
        self.labels[name] = thin(np.broadcast_to(labels, self.net.shapes[name]))

    def _one_axis(self, labels: Labels) -> bool:
        """Join labels along all axes but one: the one with the most different entries. Whether anything was joined."""
        roots, axes = self.atoms.roots(labels), self._axes(labels)
        if len(axes) < 2:
            return False
        kinds = [len(np.unique(np.moveaxis(roots, a, 0).reshape(roots.shape[a], -1), axis=0)) for a in axes]
        kept = axes[int(np.argmax(kinds))]
        others = tuple(a for a in range(roots.ndim) if a != kept)
        return self.atoms.join(roots, roots.max(axis=others, keepdims=True))

    def _axes(self, labels: Labels) -> list[int]:
        """The axes along which labels differ."""
        roots = self.atoms.roots(labels)
        return [a for a in range(roots.ndim) if _differ(roots, a)]

    def _join_lines(self, labels: Labels, axis: int) -> bool:
        """Join the labels of each line along `axis`, as a group norm does; False if that leaves one channel."""
        roots = self.atoms.roots(labels)
        line = roots.max(axis=axis, keepdims=True)
        if not any(_differ(line, a) for a in range(line.ndim)):
            return False
        self.atoms.join(roots, line)
        return True

    def _lines(self, labels: Labels, axis: int, node: NodeProto) -> Labels:
        """The label of every entry of `axis`.

        Labels that differ within an entry are joined. If that leaves one channel, they are fixed, and have none.
        """
        roots = np.moveaxis(self.atoms.roots(labels), axis, 0).reshape(labels.shape[axis], -1)
        known = np.where(roots == ANY, roots.max(axis=1, keepdims=True), roots)
        one = (known == known[:, :1]).all(axis=1)
        if not one.all() and (known >= 0).all() and (known.max(axis=1) != known.max()).any():
            self.atoms.join(known, known.max(axis=1, keepdims=True))
            return self.atoms.roots(known[:, 0])
        self.atoms.fix(roots[~one], _mixes(node))
        return np.where(one, known[:, 0], NONE)

    def _along(self, name: str, axis: int, role: Role) -> Labels:
        """The atom of every entry of `axis` of a constant; of one that is computed, those of what it is made of.

        An operator may mix the entries of an axis there, as the mean of a filter does. They are not fixed for it: a
        trial of the group shows whether they can leave.
        """
        node, shapes = self.net.computed.get(name), self.net.shapes
        if node is None:
            return self.atoms.along(self.net.ids.get(name), axis, role)
        if (name, axis, role) not in self.made:
            listed = self.net.known(node.input[1]).tolist() if _reduces(node) else None
            known = axes_of(node, [shapes.get(v, ()) for v in node.input], shapes[name], listed)
            found, parts = np.full(shapes[name][axis], NONE), [v for v in node.input if self.net.tensors(v)]
            main = max(parts, key=lambda v: prod(shapes[v]))
            for v, names in zip(node.input, known.inputs if known else (), strict=False):
                for own in [a for a, key in enumerate(names) if key == axis and v in parts]:
                    atoms = self._along(v, own, role if v == main else "holds")
                    self.atoms.join(found, atoms)
                    found = np.where(found == NONE, atoms, found)
            self.made[name, axis, role] = found
        return self.made[name, axis, role]

    def _read(self, labels: Labels, columns: Labels) -> None:
        """A layer reads `labels` by the columns of its weight: what has none fixes the other."""
        labels, columns = np.broadcast_arrays(labels, columns)
        self.atoms.fix(columns[labels == NONE], "what they read must stay, such as the model's inputs")
        self.atoms.fix(labels[columns == NONE], "a layer reads them by a weight that no parameter holds")
        self.atoms.join(labels, columns)

    def _meet(self, a: Labels, b: Labels, why: str) -> None:
        """Join labels that leave together; one that meets an entry which must stay is fixed."""
        a, b = np.broadcast_arrays(a, b)
        self.atoms.fix(a[b == NONE], why)
        self.atoms.fix(b[a == NONE], why)
        self.atoms.join(a, b)

    def _convolution(self, node: NodeProto) -> None:
        net, weight, groups = self.net, node.input[1], settings(node).get("group", 1)
        turned = node.op_type == "ConvTranspose"
        x = self._lines(self.labels[node.input[0]], 1, node)
        if groups == 1:
            self._read(x, self._along(weight, 0 if turned else 1, "reads"))
            rows = self._along(weight, 1 if turned else 0, "makes")
        else:
            rows = self._groups(node, x, self._along(weight, 0, "reads" if turned else "makes"), groups)
        if len(node.input) > 2 and node.input[2]:
            self.atoms.join(rows, self._along(node.input[2], 0, "shifts"))
        self._put(node.output[0], rows.reshape(-1, *(1,) * (len(net.shapes[node.output[0]]) - 2)))

    def _groups(self, node: NodeProto, x: Labels, own: Labels, groups: int) -> Labels:
        """Labels of a grouped convolution's outputs: what one group reads and makes leaves together."""
        own = np.broadcast_to(own, max(groups, len(own)))  # a weight of no parameter has one label
        both = np.concatenate([x.reshape(groups, -1), own.reshape(groups, -1)], axis=1)
        loose, one = (both == NONE).any(axis=1), both.max(axis=1)
        self.atoms.fix(both[loose], _joins(node))
        self.atoms.join(both, one[:, None])
        return np.repeat(np.where(loose, NONE, one), self.net.shapes[node.output[0]][1] // groups)

    def _product(self, node: NodeProto) -> None:
        net, atoms = self.net, self.atoms
        first, second, transposed, third = products.operands(node)
        if second in net.constants and len(net.shapes[second]) == 2:
            x = self._given(first)
            if any(_differ(atoms.roots(x), axis) for axis in range(x.ndim - 1)) and self._join_lines(x, x.ndim - 1):
                self._put(node.output[0], x.max(axis=-1, keepdims=True))  # its rows are channels
                return
            self._read(self._lines(x, x.ndim - 1, node), self._along(second, int(transposed), "reads"))
            rows = self._along(second, 1 - int(transposed), "makes")
            if third and net.shapes[third]:
                atoms.join(rows, self._along(third, len(net.shapes[third]) - 1, "shifts"))
            self._put(node.output[0], rows)
        elif transposed or (third and any(v not in self.labels for v in (first, second))):
            for v in (first, second):
                atoms.fix(self.labels.get(v, np.full(1, NONE)), _mixes(node))
            self._put(node.output[0], np.full(1, NONE))
        else:
            a, b = (np.array(atoms.roots(self.labels.get(v, np.full(net.shapes[v], NONE)))) for v in (first, second))
            stacked = any(_differ(x, axis) for x in (a, b) for axis in range(x.ndim - 2))
            self._put(node.output[0], self._heads(node, a, b) if stacked else self._matrices(node, a, b))

    def _given(self, first: str) -> Labels:
        """The labels of what a layer reads: data, a tensor of the bundle such as learned queries, or a constant."""
        shape = self.net.shapes[first]
        if first in self.labels:
            return self.labels[first]
        known = bool(self.net.tensors(first))
        return np.broadcast_to(self._along(first, len(shape) - 1, "holds") if known else ANY, shape)

    def _heads(self, node: NodeProto, a: Labels, b: Labels) -> Labels:
        """Labels of a product of stacks of matrices: each matrix is one channel, a head."""
        shape = self.net.shapes[node.output[0]][:-2]
        one = []
        for labels in (a, b):
            flat = np.broadcast_to(labels, (*shape, *labels.shape[-2:])).reshape(*shape, -1)
            one.append(flat.max(axis=-1))
            self.atoms.join(flat, one[-1][..., None])
        self.atoms.join(*one)
        return np.asarray(np.where(one[0] >= 0, *one)[..., None, None])

    def _matrices(self, node: NodeProto, a: Labels, b: Labels) -> Labels:
        """Labels of a product of two values: what is summed leaves both, and rows and columns keep their labels."""
        summed = self._summed(a, a.ndim - 1, a.ndim - 2, node), self._summed(b, b.ndim - 2, b.ndim - 1, node)
        differ = [bool((k != k[:1]).any()) for k in summed]
        if any(differ):
            self._meet(*summed, _mixes(node))
        columns = np.full(1, NONE) if differ[1] else self._lines(b, b.ndim - 1, node)
        rows = np.full(1, NONE) if differ[0] else self._lines(a, a.ndim - 2, node)
        if (columns != columns[:1]).any():
            if (rows != rows[:1]).any():
                self.atoms.fix(rows, _mixes(node))
            return columns
        return rows[:, None] if (rows != rows[:1]).any() else np.full(1, NONE)

    def _summed(self, labels: Labels, axis: int, other: int, node: NodeProto) -> Labels:
        """The label of every entry of `axis`, over which a product sums; none if labels differ along `other` alone."""
        if _differ(labels, other) and not _differ(labels, axis):
            return np.full(labels.shape[axis], NONE)
        return self._lines(labels, axis, node)

    def _recurrent(self, node: NodeProto) -> None:
        net, atoms = self.net, self.atoms
        gates = GATES[node.op_type]
        weight, units = net.ids.get(node.input[1]), net.ids.get(node.input[2])
        x = self._lines(self.labels[node.input[0]], 2, node)
        ways, h = net.shapes[node.input[2]][0], net.shapes[node.input[2]][2]
        made = []
        for way in range(ways):
            w, r = (None if v is None else v[way] for v in (weight, units))
            self._read(x, atoms.along(w, 1, "reads"))
            rows = [np.broadcast_to(atoms.along(v, 0, "makes"), gates * h).reshape(gates, h) for v in (w, r)]
            if len(node.input) > 3 and node.input[3]:
                ids = net.ids.get(node.input[3])
                both = np.broadcast_to(atoms.along(None if ids is None else ids[way], 0, "shifts"), 2 * gates * h)
                rows += list(both.reshape(2, gates, h))
            unit = rows[0][0]
            for own in rows:
                self._read(unit, own)
            self._read(unit, atoms.along(r, 1, "reads"))
            made.append(unit)
        label = np.stack(made)[:, None]
        for name in [v for v in list(node.input)[5:7] if v in self.labels]:
            self._read(self.labels[name], label)
        for name in [o for o in node.output if o]:
            self._put(name, label)

    def _move(self, node: NodeProto) -> None:
        source = moves.sources(self.study, node)
        kept = [self.labels[node.input[k]].reshape(-1) for k in self.net.data(node)]
        at = np.maximum(source, 0)
        labels = np.where(source >= 0, np.concatenate(kept)[at], ANY)
        if node.op_type == "Concat":
            labels = self._with_tensors(node, labels)
        self._put(node.output[0], labels)
        parts = [self.labels.get(v, np.full(1, NONE)) for v in node.input]
        if node.op_type == "Concat" and any(len(self._axes(part)) < 2 for part in parts):
            self._one_axis(self.labels[node.output[0]])

    def _with_tensors(self, node: NodeProto, labels: Labels) -> Labels:
        """Labels of a concatenation with a tensor of the bundle in it, such as a class token."""
        axis = settings(node)["axis"] % labels.ndim
        low = 0
        for v in node.input:
            high = low + self.net.shapes[v][axis]
            ids = self.net.ids.get(v)
            if ids is not None and v not in self.labels:
                for b in [b for b in range(labels.ndim) if b != axis and labels.shape[b] > 1]:
                    atoms = self.atoms.along(ids, b, "holds")
                    place = (slice(None),) * axis + (slice(low, high),)
                    if (atoms >= 0).all() and (labels >= 0).any():
                        labels[place] = atoms.reshape(-1, *(1,) * (labels.ndim - 1 - b))
            low = high
        return labels

    def _map(self, node: NodeProto) -> None:
        net, found = self.net, maps.behaviour(self.study, node)
        assert found is not None
        read = [node.input[k] for k in net.data(node)]
        inputs = [self._mixed(node, self.labels[self.repeats.get(v, v)], found.apart) for v in read]
        joined = np.full((1,) * len(found.apart), ANY)
        for own in sorted(inputs, key=lambda v: -v.size):
            if self._is_one_for_all(joined, own):
                continue
            self._meet(joined, own, _joins(node))
            joined = np.where(joined == ANY, own, np.where(own == NONE, NONE, joined))
        self._put(node.output[0], joined)
        if found.parameters:
            self.maps.append(node)
            self._parameters(node)

    def _parameters(self, node: NodeProto) -> None:
        """A map reads the labels of its output by its parameters, where they differ along one axis."""
        net, labels, found = self.net, self.labels[node.output[0]], maps.behaviour(self.study, node)
        assert found is not None
        for k, owners in found.parameters.items():
            for axis, at in enumerate(owners):
                if at is None or not net.tensors(node.input[k]):
                    continue
                roots = np.moveaxis(self.atoms.roots(labels), at, 0).reshape(labels.shape[at], -1)
                if (roots == roots[:, :1]).all() and (roots >= 0).any():
                    self._read(roots[:, 0], self._along(node.input[k], axis, _role(node, k)))

    def _mixed(self, node: NodeProto, labels: Labels, apart: tuple[bool, ...]) -> Labels:
        """Labels of an input, one along each axis that `node` mixes."""
        rank = len(apart)
        labels = labels.reshape((1,) * (rank - labels.ndim) + labels.shape)
        for axis in [a for a in range(rank) if not apart[a] and labels.shape[a] > 1]:
            if _differ(self.atoms.roots(labels), axis) and not self._join_lines(labels, axis):
                if not self._sums_products(node):  # of zeros, what is gone adds nothing
                    self.atoms.fix(labels, _mixes(node))
                return np.full((1,) * rank, NONE)
            labels = labels.max(axis=axis, keepdims=True)
        return labels

    def _sums_products(self, node: NodeProto) -> bool:
        """Whether `node` sums what a `Mul` makes, such as squares."""
        made = self.study.makers.get(node.input[0])
        return node.op_type == "ReduceSum" and made is not None and made.op_type == "Mul"

    def _is_one_for_all(self, joined: Labels, own: Labels) -> bool:
        """Whether `own` is one value for all channels of `joined`, such as a gate, a mask or a slope.

        If it differs along another axis of `joined`, such as the heads of an attention, the lines there are joined.
        """
        axes = self._axes(joined)
        wide = [a for a in axes if own.shape[a] > 1]
        single = len(wide) < len(axes) and (not wide or bool((own == NONE).all()))
        return single and all(self._join_lines(joined, a) for a in wide)


def _differ(roots: Labels, axis: int) -> bool:
    """Whether labels differ along an axis, constants of the graph left out."""
    most = roots.max(axis=axis, keepdims=True, initial=ANY)
    return bool(((roots != most) & (roots != ANY)).any())


def _mixes(node: NodeProto) -> str:
    return f"{node.op_type} mixes them"


def _joins(node: NodeProto) -> str:
    return f"{node.op_type} joins them with entries that must stay"


def _reduces(node: NodeProto) -> bool:
    return node.op_type.startswith("Reduce") and len(node.input) > 1


def _role(node: NodeProto, k: int) -> Role:
    if node.op_type == "BatchNormalization":
        return ("holds", "scales", "shifts", "holds", "holds")[k]
    roles: dict[str, Role] = {"Mul": "scales", "Add": "shifts"}
    return roles.get(node.op_type, "holds")
