"""An ONNX graph as a PyTorch module: each operator runs as its function of `operators`, so `torch.export` can trace it.

The module's inputs are the graph's, by position. Stored floats become buffers; stored integers stay numpy arrays,
because they are shapes, axes and places, which tracing turns into constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, GraphProto, NodeProto, helper, numpy_helper
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op

from edge_client.errors import ModelError
from edge_export.executorch.layout import Laid
from edge_export.executorch.operators import TABLE
from edge_export.executorch.values import Node, Value, reversed_along, tensor

KNOWN = ("Resize", "OneHot", "Clip", "Pad", "Range")
"""Operators whose inputs after the first are numbers that must be known while tracing."""


class Graph(nn.Module):
    """`model` as a module from tensors by position to a tuple of tensors.

    `inputs` and `outputs` give their names in order; None: the graph's own. Raises ModelError for an unknown operator.
    """

    def __init__(
        self, model: onnx.ModelProto, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.onnx = model.graph
        _check(self.onnx)
        stored = {t.name: numpy_helper.to_array(t) for t in self.onnx.initializer}
        own = [i.name for i in self.onnx.input if i.name not in stored]
        self.inputs = own if inputs is None else list(inputs)
        self.outputs = [o.name for o in self.onnx.output] if outputs is None else list(outputs)
        if unknown := set(own) - set(self.inputs):
            raise ModelError(f"the graph reads {sorted(unknown)}, which are not given; export the bundle again")
        known = {name for n in self.onnx.node if n.op_type in KNOWN for name in n.input[1:]}
        self._fixed = {k: v for k, v in stored.items() if v.dtype.kind != "f" or v.ndim == 0 or k in known}
        self._names = {}
        for i, (name, value) in enumerate(stored.items()):
            if name not in self._fixed:
                self._names[name] = f"c{i}"
                self.register_buffer(f"c{i}", torch.from_numpy(np.array(value)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs of its inputs."""
        values: dict[str, Value] = dict(zip(self.inputs, inputs, strict=True))
        values |= self._fixed | {name: getattr(self, own) for name, own in self._names.items()}
        constants = {*self._fixed, *self._names}
        run(self.onnx.node, values, constants)
        return tuple(tensor(values[name]) for name in self.outputs)


def _check(graph: GraphProto) -> None:
    missing = sorted({n.op_type for n in graph.node} - TABLE.keys() - _RECURRENT.keys() - {"Constant"})
    if missing:
        raise ModelError(
            f"operator {', '.join(missing)} has no ExecuTorch form here; write the layer with other operators, or use "
            "the ONNX model"
        )
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _check(attribute.g)


def run(nodes: Sequence[NodeProto], values: dict[str, Value], constants: set[str], looped: bool = False) -> None:
    """Compute `nodes` in order; `values` gets what each gives. `constants` are the names of stored tensors.

    `looped` says that the nodes are a loop's body.
    """
    for node in nodes:
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            values[node.output[0]] = _constant(settings)
            constants.add(node.output[0])
            continue
        fixed = tuple(name in constants for name in node.input)
        made_node = Node(node.op_type, settings, sum(1 for o in node.output if o), fixed, looped)
        reads = [values[name] if name else None for name in node.input]
        try:
            if node.op_type in _RECURRENT:
                made = _RECURRENT[node.op_type](made_node, reads, values)
            else:
                made = TABLE[node.op_type](made_node, *reads)
        except ModelError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise ModelError(f"operator {node.op_type} cannot be lowered to ExecuTorch: {error}") from error
        for name, value in zip(node.output, made if isinstance(made, list) else [made], strict=False):
            if name:
                values[name] = value


def _whole(node: NodeProto) -> dict[str, int]:
    return {a.name: a.i for a in node.attribute}


def _constant(settings: Mapping[str, Any]) -> Value:
    if "value" in settings:
        return numpy_helper.to_array(settings["value"])
    (name, value), *_ = settings.items()
    return np.asarray(value, np.float32 if name.startswith("value_float") else np.int64)


# --- recurrences: a loop over time that ExecuTorch runs, instead of a graph as long as the sequence


Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


def _loop(
    step: Step, carried: list[Tensor], read: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """`step(carried, slices, fixed)` -> (carried, made) for each place of axis 0 of `read`; the made are stacked."""
    first, count = len(carried), len(carried) + len(read)
    n = carried[0].shape[0]
    # One more than the largest batch, so that no batch is the special case of all rows.
    most = n if isinstance(n, int) else int(n.node.shape_env.bound_sympy(n.node.expr).upper) + 1

    def whole(t: Tensor) -> Tensor:
        """`t` [n, ...] as `most` rows: ExecuTorch's loop keeps states and results of one size only."""
        padded = nn.functional.pad(t, [0, 0] * (t.ndim - 1) + [0, most - t.shape[0]])
        return padded if most is not n else t.clone()  # no output may be another, or an input

    def flat(*values: Tensor) -> list[Tensor]:
        slices = list(values[first:count])
        states = [t.narrow(0, 0, slices[0].shape[0]) for t in values[:first]] if most is not n else values[:first]
        made = step(list(states), slices, list(values[count:]))
        return [whole(t) for t in (*made[0], *made[1])]

    starts = [whole(t.contiguous() + 0.0) for t in carried]  # not a broadcast view, which no step gives
    # The operator itself: the function around it would compile `step` with Dynamo.
    made = scan_op(flat, starts, [t.contiguous() for t in read], tuple(fixed))
    if most is not n:
        made = [t.narrow(int(i >= first), 0, n) for i, t in enumerate(made)]
    return list(made[:first]), list(made[first:])


def _scan(node: Node, reads: list[Value], values: Mapping[str, Value]) -> list[Value]:
    body: GraphProto = node.get("body")
    count = node.get("num_scan_inputs")
    carried, read = [tensor(v) for v in reads[:-count]], [tensor(v) for v in reads[-count:]]
    for name in ("scan_input_axes", "scan_output_axes"):
        if any(node.get(name, [])):
            raise node.refuse(name)
    backward = node.get("scan_input_directions", [0] * count)
    read = [reversed_along(t, 0) if way else t for t, way in zip(read, backward, strict=True)]
    names = [i.name for i in body.input]
    stored = {t.name: numpy_helper.to_array(t) for t in body.initializer}
    own = {*names, *stored, *(o for n in body.node for o in n.output), ""}
    outer = sorted({i for n in body.node for i in n.input} - own)  # of the graph around the loop
    known = {k: values[k] for k in outer if isinstance(values[k], np.ndarray)}
    fixed = [k for k in outer if k not in known]
    states = len(carried)

    def step(carry: list[Tensor], slices: list[Tensor], others: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        inner = {**known, **stored, **dict(zip([*names, *fixed], [*carry, *slices, *others], strict=True))}
        inner |= {k: Laid(inner[k], (1, 0)) for k in turned}
        run(body.node, inner, {*stored, *known}, looped=True)
        made = [tensor(inner[o.name]) for o in body.output]
        return made[:states], made[states:]

    # Weights that a step reads transposed are turned once, before the loop.
    turned = {n.input[1] for n in body.node if n.op_type == "Gemm" and {"transB": 1}.items() <= _whole(n).items()}
    turned &= set(fixed)
    others = [tensor(values[k]).t().contiguous() if k in turned else tensor(values[k]) for k in fixed]
    last, made = _loop(step, carried, read, others)
    outward = node.get("scan_output_directions", [0] * len(made))
    return [*last, *(reversed_along(t, 0) if way else t for t, way in zip(made, outward, strict=True))]


def _ways(node: Node, hidden: Sequence[Value], n: Any) -> list[tuple[bool, list[Tensor]]]:
    """For each direction whether it is backward, and its first states [n, h]."""
    size, kind = node.get("hidden_size"), node.get("direction", b"forward")
    ways = {b"forward": [False], b"reverse": [True], b"bidirectional": [False, True]}[kind]
    starts = [[torch.zeros(n, size) if h is None else tensor(h)[i] for h in hidden] for i in range(len(ways))]
    return list(zip(ways, starts, strict=True))


def _plain(node: Node, lengths: Value, activations: int) -> None:
    if lengths is not None:
        raise node.refuse("sequence lengths")
    if node.get("layout", 0) or node.get("clip") is not None or node.get("activations") not in (None, []):
        usual = [b"Sigmoid", b"Tanh", b"Tanh"][:activations]
        if (
            node.get("layout", 0)
            or node.get("clip") is not None
            or list(node.get("activations"))[:activations] != usual
        ):
            raise node.refuse("layout, clip or activations of its own")


def _lstm(node: Node, reads: list[Value], _: Mapping[str, Value]) -> list[Value]:
    x, w, r, b, lengths, h0, c0, peep = (*reads, *(None,) * 8)[:8]
    _plain(node, lengths, 3)
    if peep is not None or node.get("input_forget", 0):
        raise node.refuse("peepholes or input_forget")
    x, states, hs, cs = tensor(x), [], [], []
    for i, (back, (h, c)) in enumerate(_ways(node, [h0, c0], x.shape[1])):
        size = h.shape[1]
        recurrent = tensor(r)[i]
        bias = None if b is None else tensor(b)[i][: 4 * size] + tensor(b)[i][4 * size :]
        gates = nn.functional.linear(x, tensor(w)[i], bias)

        def step(carry: list[Tensor], share: list[Tensor], fixed: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            h, c = carry
            z = torch.mm(h, fixed[0]) + share[0]
            i, o, f, g = z.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return [h, c], [h]

        (h, c), (made,) = _loop(
            step, [h, c], [reversed_along(gates, 0) if back else gates], [recurrent.t().contiguous()]
        )
        states.append(reversed_along(made, 0) if back else made)
        hs.append(h)
        cs.append(c)
    return [torch.stack(states, 1), torch.stack(hs), torch.stack(cs)]


def _gru(node: Node, reads: list[Value], _: Mapping[str, Value]) -> list[Value]:
    x, w, r, b, lengths, h0 = (*reads, *(None,) * 6)[:6]
    _plain(node, lengths, 2)
    x, states, hs = tensor(x), [], []
    after = bool(node.get("linear_before_reset", 0))
    for i, (back, (h,)) in enumerate(_ways(node, [h0], x.shape[1])):
        size = h.shape[1]
        recurrent = tensor(r)[i]
        both = torch.zeros(6 * size) if b is None else tensor(b)[i]
        gates = nn.functional.linear(x, tensor(w)[i], both[: 3 * size])

        def step(carry: list[Tensor], share: list[Tensor], fixed: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            (h,), (recurrent, own) = carry, fixed
            size = h.shape[1]
            xz, xr, xn = share[0].chunk(3, 1)
            both = torch.mm(h, recurrent[:, : 2 * size]) + own[: 2 * size]
            z, reset = both.chunk(2, 1)
            z, reset = (z + xz).sigmoid(), (reset + xr).sigmoid()
            inner, bias = recurrent[:, 2 * size :], own[2 * size :]
            if after:
                fresh = (xn + reset * (torch.mm(h, inner) + bias)).tanh()
            else:
                fresh = (xn + torch.mm(reset * h, inner) + bias).tanh()
            h = (1.0 - z) * fresh + z * h
            return [h], [h]

        read, fixed = (
            reversed_along(gates, 0) if back else gates,
            [recurrent.t().contiguous(), both[3 * size :].clone()],
        )
        (h,), (made,) = _loop(step, [h], [read], fixed)
        states.append(reversed_along(made, 0) if back else made)
        hs.append(h)
    return [torch.stack(states, 1), torch.stack(hs)]


_RECURRENT = {"Scan": _scan, "LSTM": _lstm, "GRU": _gru}
