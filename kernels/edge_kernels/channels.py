"""Channel groups: which slices of which tensors belong to one channel. The export finds them once.

`producers` compute a group's channels (axis 0 of a weight, and its bias). Channel-wise `ops` transform them
(batch-norm, activation, pooling, flatten). `consumers` read them (axis 1 of a weight). Removing a channel removes its
slice from all of these. The manifest stores the groups; compaction reads them.

A group is a small dataflow graph with numbered values. Producer `i` computes value `i`. Op `j` computes value
`len(producers) + j` from its inputs. So consumers may read the channels at different points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["batch_norm", "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "max_pool", "avg_pool", "flatten"]
LayerKind = Literal["linear", "conv", "lstm"]


@dataclass(frozen=True)
class Op:
    """A channel-wise operation on `inputs`, earlier values of its group.

    `tensors` are a batch-norm's weight, bias, running mean and running variance. `value` is a batch-norm's epsilon, a
    leaky ReLU's slope, the H*W entries of a channel after a flatten, or 1.0 for an average pool that counts its padding
    zeros (so a constant channel is not constant after it).
    """

    kind: OpKind
    inputs: tuple[int, ...] = (0,)
    tensors: tuple[str, ...] = ()
    value: float = 0.0


@dataclass(frozen=True)
class Producer:
    """A layer whose outputs, axis 0 of its weight, are the group's channels."""

    kind: LayerKind
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Consumer:
    """A layer whose inputs, axis 1 of its weight, are value `reads` of the group, `repeat` entries per channel.

    `padded`: the layer pads its input with zeros, so its input from a constant channel differs at the border.
    """

    kind: LayerKind
    weight: str
    bias: str | None = None
    reads: int = 0
    repeat: int = 1
    padded: bool = False


@dataclass(frozen=True)
class ChannelGroup:
    """`size` channels; each is kept or removed in all tensors at once."""

    name: str
    size: int
    producers: tuple[Producer, ...]
    ops: tuple[Op, ...]
    consumers: tuple[Consumer, ...]
