"""Exact removal of channels: from effective parameters and channel groups to the tensors of a smaller model.

Three rules remove channels. Each may enable the others upstream or downstream, so they repeat until nothing changes.

* A channel is unread: its slice of every consumer is zero. Then its producer's row may be zeroed too.
* A channel is constant: its producer's row is zero, so only its bias passes through batch-norm and activation, or
  batch-norm scales it by zero. If the consumer does not pad, the constant is folded into the consumer's bias.
* A channel is constant, but the consumer pads with zeros, so the channel differs at the border. Several such channels
  have the same shape there, up to a factor. They are merged into the one with the largest constant, which stays.

Folding and merging zero the consumer's slice, which makes the channel unread. A weight is zero if its value is zero, so
the parameters must have the mask applied. `edge_client.compaction` turns the tensors into an ONNX file and proves it
equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_kernels.channels import ChannelGroup, Consumer, Op, Producer

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
# Op kinds that do not change a constant channel, whatever its value.
_TRANSPARENT = frozenset({"max_pool", "flatten"})


@dataclass(frozen=True)
class Compact:
    """A compact model: `tensors` by name, and the new `biases` of layers without one, by the name of their weight.

    The biases of the groups' layers are float64, constants included. A batch-norm behind them would multiply a rounding
    error, so they are rounded only after it is folded. `kept` lists the remaining channels of each group by name, in
    ascending order; it is never empty.
    """

    tensors: dict[str, F32 | F64]
    biases: dict[str, F64]
    kept: dict[str, NDArray[np.intp]]

    @property
    def parameters(self) -> int:
        """The number of values in all tensors, new biases included."""
        return sum(t.size for t in (*self.tensors.values(), *self.biases.values()))


@dataclass
class _State:
    """The model during compaction: float32 weights with zeroed slices, float64 biases, channels not yet removed."""

    tensors: dict[str, F32]
    biases: dict[str, F64] = field(default_factory=dict)
    alive: dict[str, NDArray[np.bool_]] = field(default_factory=dict)


def compact(tensors: Mapping[str, F32], groups: Sequence[ChannelGroup]) -> Compact:
    """The smallest equal model that the three rules reach.

    `tensors` holds every effective parameter and batch-norm statistic by name; other tensors are not changed. A weight
    is `[out, in, *kernel]`. If all channels of a group are removable, the first is kept, so no layer is empty.
    Constants are computed in float64. Raises ValueError when a group does not fit the tensors.
    """
    for group in groups:
        _check(group, tensors)
    state = _State(dict(tensors))
    for group in groups:
        state.alive[group.name] = np.ones(group.size, bool)
        for layer in _layers(group):
            state.tensors[layer.weight] = tensors[layer.weight].copy()
            size = tensors[layer.weight].shape[0]
            state.biases[layer.weight] = (
                tensors[layer.bias].astype(np.float64) if layer.bias is not None else np.zeros(size)
            )
    changed = True
    while changed:
        changed = False
        for group in groups:  # forward: a folded constant may make the next layer's channels constant
            changed |= _fold_constants(group, state)
        for group in reversed(groups):  # backward: an unread channel may leave its own inputs unread
            changed |= _drop_unread(group, state)
    return _slice(state, groups)


def constants(group: ChannelGroup, values: Sequence[F64], tensors: Mapping[str, F32]) -> list[F64]:
    """Every value of a group, float64[size] each: a channel's constant there, NaN where it is not constant.

    `values` are the outputs of the producers, in the same form.
    """
    found = list(values)
    for op in group.ops:
        found.append(_apply(op, [found[i] for i in op.inputs], tensors))
    return found


def _apply(op: Op, inputs: Sequence[F64], tensors: Mapping[str, F32]) -> F64:
    """`op` applied to constants. NaN stays NaN, except where the op makes it constant."""
    k = inputs[0]
    if op.kind == "batch_norm":
        weight, bias, mean, variance = (tensors[name].astype(np.float64) for name in op.tensors)
        return np.where(weight == 0.0, bias, (k - mean) / np.sqrt(variance + op.value) * weight + bias)
    if op.kind == "relu":
        return np.maximum(k, 0.0)
    if op.kind == "relu6":
        return np.clip(k, 0.0, 6.0)
    if op.kind == "leaky_relu":
        return np.where(k < 0.0, op.value * k, k)
    if op.kind == "tanh":
        return np.tanh(k)
    if op.kind == "sigmoid":
        return 0.5 * (1.0 + np.tanh(0.5 * k))  # never overflows
    if op.kind == "avg_pool":
        return np.where(k == 0.0, k, np.nan) if op.value else k
    if op.kind in _TRANSPARENT:
        return k
    raise ValueError(f"compaction does not support op kind {op.kind!r}; export the bundle with this version")


def _fold_constants(group: ChannelGroup, state: _State) -> bool:
    """Fold constant channels into the biases of the consumers, or merge them. True when a slice became zero."""
    alive = state.alive[group.name]
    produced = []
    for producer in group.producers:
        weight = state.tensors[producer.weight]
        moves = weight.reshape(group.size, -1).any(axis=1)
        produced.append(np.where(moves, np.nan, state.biases[producer.weight]))
    values = constants(group, produced, state.tensors)
    changed = False
    for consumer in group.consumers:
        constant = values[consumer.reads]
        weight = _by_channel(state.tensors[consumer.weight], group.size)
        ready = weight.any(axis=(0, 2)) & np.isfinite(constant) & alive
        merge = np.isfinite(constant) & alive & (constant != 0.0) if consumer.padded else np.zeros(group.size, bool)
        if merge.any():
            # The channel that stays need not be read yet, so all consumers of a value choose the same one.
            keep = int(np.argmax(np.where(merge, np.abs(constant), -1.0)))
            others = ready & merge
            others[keep] = False
            ratios = constant[others] / constant[keep]
            weight[:, keep] += np.einsum("ocr,c->or", weight[:, others].astype(np.float64), ratios).astype(np.float32)
            ready[keep] = False
        else:
            state.biases[consumer.weight] += weight[:, ready].sum(axis=2, dtype=np.float64) @ constant[ready]
        weight[:, ready] = 0.0
        changed |= bool(ready.any())
    settled = np.all([np.isfinite(values[consumer.reads]) for consumer in group.consumers], axis=0)
    for producer in group.producers:  # a channel that batch-norm makes constant needs no inputs
        weight = state.tensors[producer.weight].reshape(group.size, -1)
        changed |= bool(weight[settled].any())
        weight[settled] = 0.0
    return changed


def _drop_unread(group: ChannelGroup, state: _State) -> bool:
    """Remove the channels whose slice of every consumer is zero. True when there were any."""
    alive = state.alive[group.name]
    read = np.zeros(group.size, bool)
    for consumer in group.consumers:
        read |= _by_channel(state.tensors[consumer.weight], group.size).any(axis=(0, 2))
    dead = alive & ~read
    for producer in group.producers:
        state.tensors[producer.weight][dead] = 0.0
        state.biases[producer.weight][dead] = 0.0
    alive &= read
    return bool(dead.any())


def _slice(state: _State, groups: Sequence[ChannelGroup]) -> Compact:
    """Cut the removed channels out of all tensors of their groups."""
    tensors, biases, kept = state.tensors, state.biases, {}
    for group in groups:
        keep = np.flatnonzero(state.alive[group.name])
        keep = keep if keep.size else np.zeros(1, np.intp)
        kept[group.name] = keep
        for producer in group.producers:
            tensors[producer.weight] = tensors[producer.weight][keep]
            biases[producer.weight] = biases[producer.weight][keep]
        for name in {name for op in group.ops for name in op.tensors}:
            tensors[name] = tensors[name][keep]
        for consumer in group.consumers:
            tensors[consumer.weight] = _cut_inputs(tensors[consumer.weight], group.size, keep)
    named = {layer.weight: layer.bias for g in groups for layer in _layers(g)}
    own = {name: biases[weight] for weight, name in named.items() if name is not None}
    created = {weight: biases[weight] for weight, name in named.items() if name is None and biases[weight].any()}
    return Compact({**tensors, **own}, created, kept)


def _cut_inputs(weight: F32, size: int, keep: NDArray[np.intp]) -> F32:
    """The slices of `weight` [out, size * repeat, *kernel] that read the channels `keep`."""
    by_channel = _by_channel(weight, size)[:, keep]
    return by_channel.reshape(weight.shape[0], -1, *weight.shape[2:])


def _layers(group: ChannelGroup) -> tuple[Producer | Consumer, ...]:
    return (*group.producers, *group.consumers)


def _by_channel(weight: F32, size: int) -> F32:
    """`[out, size * repeat, *kernel]` as `[out, size, repeat * prod(kernel)]`, a view."""
    return weight.reshape(weight.shape[0], size, -1)


def _check(group: ChannelGroup, tensors: Mapping[str, F32]) -> None:
    """Raise ValueError unless all tensors of `group` exist with the right shapes and all indices are valid."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise ValueError(f"channel group {group.name!r} names tensor {name!r}, which the model does not have")
        return tensors[name].shape

    def expect(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"channel group {group.name!r} of size {group.size}: {what}; export the bundle again")

    expect(bool(group.producers) and bool(group.consumers), "it has no producer or no consumer")
    for layer in _layers(group):
        expect(layer.kind in ("linear", "conv"), f"a layer of kind {layer.kind!r} cannot be compacted")
        expect(len(shape(layer.weight)) >= 2, f"weight {layer.weight!r} is not a matrix")
        if layer.bias is not None:
            expect(shape(layer.bias) == shape(layer.weight)[:1], f"bias {layer.bias!r} has shape {shape(layer.bias)}")
    for producer in group.producers:
        expect(shape(producer.weight)[0] == group.size, f"{producer.weight!r} has shape {shape(producer.weight)}")
    for index, op in enumerate(group.ops, start=len(group.producers)):
        expect(bool(op.inputs) and all(0 <= i < index for i in op.inputs), f"op {index} reads values {op.inputs}")
        expect(len(op.tensors) == (4 if op.kind == "batch_norm" else 0), f"op {index} has tensors {op.tensors}")
        expect(all(shape(name) == (group.size,) for name in op.tensors), f"a tensor of op {index} has another size")
    for consumer in group.consumers:
        inputs = shape(consumer.weight)[1]
        expect(inputs == group.size * consumer.repeat, f"{consumer.weight!r} reads {inputs} entries")
        expect(0 <= consumer.reads < len(group.producers) + len(group.ops), f"value {consumer.reads} does not exist")
