"""Channel groups: which slices of which tensors are one channel, found once at export.

A group's channels are made by `producers` (axis 0 of a weight, with its bias), pass through channel-wise `ops`
(batch-norm, activation, pooling, flatten) and are read by `consumers` (axis 1 of a weight). Removing channel `c`
removes its slice of every one of them. Plain data; the manifest stores it, compaction reads it.

A group is a small dataflow graph. Its values are numbered: producer `i` makes value `i`, and op `j` makes value
`len(producers) + j` from the values it names, so several consumers may read the channels at different points.
A residual sum is then one more op kind with two inputs and a group of several producers; a depthwise convolution is
an op with a weight of its own; a gated cell is a producer whose axis 0 holds several blocks of `size` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["batch_norm", "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "max_pool", "avg_pool", "flatten"]
LayerKind = Literal["linear", "conv", "lstm"]


@dataclass(frozen=True)
class Op:
    """A channel-wise operation on the values `inputs` of its group, all of them made before it.

    `tensors` are batch-norm's weight, bias, running mean, running variance. `value` is batch-norm's epsilon, a
    leaky ReLU's slope, the H*W entries a flatten gives each channel, or 1.0 for an average pool that counts zeros
    it pads with (a constant channel is not constant after it).
    """

    kind: OpKind
    inputs: tuple[int, ...] = (0,)
    tensors: tuple[str, ...] = ()
    value: float = 0.0


@dataclass(frozen=True)
class Producer:
    """A layer whose axis 0 makes the group's channels."""

    kind: LayerKind
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Consumer:
    """A layer whose axis 1 reads value `reads` of the group, `repeat` consecutive entries for each channel.

    `padded`: the layer pads its input with zeros, so a constant channel is not constant to it at the border.
    """

    kind: LayerKind
    weight: str
    bias: str | None = None
    reads: int = 0
    repeat: int = 1
    padded: bool = False


@dataclass(frozen=True)
class ChannelGroup:
    """`size` channels that live and die together across all their slices."""

    name: str
    size: int
    producers: tuple[Producer, ...]
    ops: tuple[Op, ...]
    consumers: tuple[Consumer, ...]
