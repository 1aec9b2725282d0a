"""Channel groups: which slices of which tensors are one channel, found once at export.

A group's channels are made by `producers` (axis 0 of a weight, with its bias), pass through channel-wise `ops`
(batch-norm, activation, pooling, flatten) and are read by `consumers` (axis 1 of a weight). Removing channel `c`
removes its slice of every one of them. Plain data; the manifest stores it, compaction reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["batch_norm", "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "max_pool", "avg_pool", "flatten"]
LayerKind = Literal["linear", "conv", "lstm"]


@dataclass(frozen=True)
class Op:
    """A channel-wise operation between producer and consumer, in the order it is applied.

    `tensors` are batch-norm's weight, bias, running mean, running variance; `value` is its epsilon, a leaky
    ReLU's slope, or the H*W entries a flatten gives each channel.
    """

    kind: OpKind
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
    """A layer whose axis 1 reads the group's channels, `repeat` consecutive entries for each.

    `padded`: the layer pads its input with zeros, so a constant channel is not constant to it at the border.
    """

    kind: LayerKind
    weight: str
    bias: str | None = None
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
