"""Finds the channel groups of a PyTorch module in its exported graph.

Supported: linear and convolution layers (1-d, 2-d, 3-d; stride, dilation, zero padding), batch-norm, element-wise
activations, max and average pooling, flatten, dropout. A layer forms no group when its channels reach anything else
(the output, a residual sum, a grouped convolution, a recurrent cell, attention) or when a weight is used twice.

What a device does with the groups is in `edge_kernels.compaction`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from edge_kernels.channels import ChannelGroup, Consumer, LayerKind, Op, OpKind, Producer
from torch import nn
from torch.fx import Node

from edge_export.modes import evaluating

_CONV = frozenset({"conv1d", "conv2d", "conv3d"})
_ACTIVATIONS: dict[str, OpKind] = {"relu": "relu", "relu6": "relu6", "tanh": "tanh", "sigmoid": "sigmoid"}
_MAX_POOLS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})
_AVG_POOLS = frozenset({"avg_pool1d", "avg_pool2d", "avg_pool3d"})
_GLOBAL_POOLS = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"})
_FLATTENS = frozenset({"flatten", "view", "reshape", "squeeze", "_unsafe_view"})
_IDENTITIES = frozenset({"dropout", "feature_dropout", "alias", "clone", "contiguous", "detach"})
# These may return their input's own memory: an in-place op after one also changes the value before it.
_ALIASES = _FLATTENS | _IDENTITIES


@dataclass(frozen=True)
class _Layer:
    """A linear or convolution node that may make or read channels."""

    kind: LayerKind
    weight: str
    bias: str | None
    padded: bool


class _Unknown(Exception):
    """Channels reach an unsupported node; their layer forms no group."""


def find_groups(module: nn.Module, example: torch.Tensor) -> tuple[ChannelGroup, ...]:
    """Channel groups of `module` in evaluation mode, in forward order.

    `example` is one input batch `[n, *input]` on the module's device; only its shape and dtype matter. Tensors are
    named as in the module's `state_dict`. The module's training mode is left as it was.
    """
    with evaluating(module):
        program = torch.export.export(module, (example,))
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    shared = _shared_names(module)
    tensors = {
        node: names[node.name] for node in program.graph.nodes if node.name in names and names[node.name] not in shared
    }
    groups = []
    for node in program.graph.nodes:
        layer = _layer(node, tensors)
        if layer is not None:
            try:
                groups.append(_grow(node, layer, tensors))
            except _Unknown:
                continue
    return tuple(groups)


def _shared_names(module: nn.Module) -> set[str]:
    """Names of parameters that are one tensor under several names."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {name for names in by_tensor.values() if len(names) > 1 for name in names}


def _grow(root: Node, layer: _Layer, tensors: dict[Node, str]) -> ChannelGroup:
    """The group whose channels `root` makes, followed forward to every layer that reads them. Raises _Unknown."""
    size = int(_shape(root)[1])
    if layer.kind == "linear" and len(_shape(root)) != 2:
        raise _Unknown  # a sequence: its channels lie on the last axis
    values: dict[Node, int] = {root: 0}
    repeats: dict[Node, int] = {root: 1}
    ops: list[Op] = []
    consumers: list[Consumer] = []
    pending = [root]
    while pending:
        value = pending.pop(0)
        for user in value.users:
            if not user.args or user.args[0] is not value:
                raise _Unknown  # the output, or an argument that is not the input
            if _name(user) in _IDENTITIES and not _drops(user):
                values[user], repeats[user] = values[value], repeats[value]
                pending.append(user)
                continue
            reader = _layer(user, tensors)
            if reader is not None:
                if (reader.kind == "linear") != (len(_shape(value)) == 2):
                    raise _Unknown
                repeat = repeats[value]
                consumers.append(
                    Consumer(reader.kind, reader.weight, reader.bias, values[value], repeat, reader.padded)
                )
                continue
            op, repeat = _op(user, value, tensors, values[value], size, repeats[value])
            if _name(user).endswith("_") and not _owns(value):
                raise _Unknown
            ops.append(op)
            values[user], repeats[user] = len(ops), repeat
            pending.append(user)
    if not consumers:
        raise _Unknown
    producer = Producer(layer.kind, layer.weight, layer.bias)
    return ChannelGroup(
        layer.weight.rpartition(".")[0] or layer.weight, size, (producer,), tuple(ops), tuple(consumers)
    )


def _op(node: Node, value: Node, tensors: dict[Node, str], index: int, size: int, repeat: int) -> tuple[Op, int]:
    """`node` as an op on value number `index`, and how many entries a channel has after it. Raises _Unknown."""
    name, inputs = _name(node).removesuffix("_"), (index,)
    before, after = _shape(value), _shape(node)
    if name in _ACTIVATIONS:
        return Op(_ACTIVATIONS[name], inputs), repeat
    if name == "hardtanh" and tuple(_arguments(node, ("min_val", "max_val"))) == (0.0, 6.0):
        return Op("relu6", inputs), repeat
    if name == "leaky_relu":
        return Op("leaky_relu", inputs, value=float(_arguments(node, ("negative_slope",))[0])), repeat
    if name == "batch_norm" and repeat == 1:
        weight, bias, mean, variance, training, epsilon = _arguments(
            node, ("weight", "bias", "running_mean", "running_var", "training", "eps")
        )
        rows = [tensors.get(t, "") if isinstance(t, Node) and _once(t) else "" for t in (weight, bias, mean, variance)]
        if all(rows) and not training:
            return Op("batch_norm", inputs, tuple(rows), float(epsilon)), repeat
    if name in _MAX_POOLS and after[1] == size and len(after) == len(before):
        return Op("max_pool", inputs), repeat
    if name in _AVG_POOLS:
        padding, ceil, counts = _arguments(node, ("padding", "ceil_mode", "count_include_pad"))
        divisor = _arguments(node, ("divisor_override",))[0] if name != "avg_pool1d" else None
        if divisor is None:
            return Op("avg_pool", inputs, value=float(bool(counts) and (ceil or any(_flat(padding))))), repeat
    if name in _GLOBAL_POOLS:
        return Op("avg_pool", inputs), repeat
    if name == "mean" and len(before) > 2:
        axes = {int(a) % len(before) for a in _flat(_arguments(node, ("dim",))[0])}
        if axes == set(range(2, len(before))):
            return Op("avg_pool", inputs), repeat
    if name in _FLATTENS and before[0] == after[0] and prod(before) == prod(after):
        if after == before:
            return Op("flatten", inputs, value=1.0), repeat
        if len(after) == 2 and before[1] == size:
            return Op("flatten", inputs, value=float(prod(before[2:]))), repeat * prod(before[2:])
    raise _Unknown


def _layer(node: Node, tensors: dict[Node, str]) -> _Layer | None:
    """`node` as a layer whose weight and bias are parameters used only here; None when it is not one."""
    name = _name(node)
    if name != "linear" and name not in _CONV:
        return None
    weight, bias = _arguments(node, ("weight", "bias"))
    own = [t for t in (weight, bias) if isinstance(t, Node)]
    if not isinstance(weight, Node) or any(t not in tensors or not _once(t) for t in own):
        return None
    bias_name = tensors[bias] if isinstance(bias, Node) else None
    if name == "linear":
        return _Layer("linear", tensors[weight], bias_name, False)
    padding, groups = _arguments(node, ("padding", "groups"))
    kernel = _shape(weight)[2:]
    padded = any(k > 1 for k in kernel) if padding == "same" else padding != "valid" and any(_flat(padding))
    return None if groups != 1 else _Layer("conv", tensors[weight], bias_name, padded)


def _arguments(node: Node, names: Sequence[str]) -> list[Any]:
    """The arguments of an ATen call by their schema's names, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return [given.get(n, defaults.get(n)) for n in names]


def _name(node: Node) -> str:
    """`conv2d` for a call of `aten.conv2d.default`, with the trailing `_` of an in-place op; else ''."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ""
    return str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2]


def _drops(node: Node) -> bool:
    """Whether a dropout is in training mode."""
    return "dropout" in _name(node) and bool(_arguments(node, ("train",))[0])


def _owns(value: Node) -> bool:
    """Whether no other value shares `value`'s memory, so that an in-place change affects only what follows."""
    while len(value.users) == 1:
        if _name(value) not in _ALIASES or not isinstance(value.args[0], Node):
            return True
        value = value.args[0]
    return False


def _once(tensor: Node) -> bool:
    return len(tensor.users) == 1


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _flat(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
