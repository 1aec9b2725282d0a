"""SynFlow: which channels of a chain of layers carry the least of its flow. No data, no gradients, no framework.

Tanaka, Kunin, Yamins, Ganguli, "Pruning neural networks without any data by iteratively conserving synaptic flow",
NeurIPS 2020: R = 1^T |W_L| ... |W_1| 1, the output of the network on an all-ones input with the absolute values of its
weights, without biases, every activation, pooling and batch-norm an identity. A weight's score is dR/dw * w. The sum
over the weights of one output channel is the flow through that channel: what reaches it from the input times what it
passes on to the outputs. So the scores of all channels take one pass forward and one backward over the layers.

A convolution sums its kernel, and a linear layer behind a flatten the entries of each channel, since on a constant
image all places are alike. That is exact for an image without a border; zero padding, which a border sees, is left out.

Channels go in many small steps, because what one channel carries depends on which others are left (Algorithm 1 there,
with the exponential schedule).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_kernels.channels import ChannelGroup
from edge_kernels.pruning import keep_largest

F64 = NDArray[np.float64]


def prune(
    tensors: Mapping[str, NDArray[np.float32]],
    layers: Sequence[str],
    groups: Sequence[ChannelGroup],
    prunable: Collection[str],
    keep: float,
    steps: int = 100,
) -> dict[str, NDArray[np.intp]]:
    """The channels that stay, ascending, of each group named in `prunable`: together the share `keep` of them.

    `layers` are the names of all layers' weights in forward order, `groups` the channels between them. All prunable
    channels are ranked together by `scores`; ties go to the earlier one. Every group keeps at least one channel, so
    that the total may be a little above its share. Raises ValueError when the layers form no chain.
    """
    matrices = chain(tensors, layers, groups)
    alive = [np.ones(g.size, np.bool_) for g in groups]
    ranked = [i for i, g in enumerate(groups) if g.name in prunable]
    total = sum(groups[i].size for i in ranked)
    for step in range(1, steps + 1):
        flow = scores(matrices, alive)
        rank = np.concatenate([np.where(alive[i], flow[i], -1.0) for i in ranked])
        stay = keep_largest(rank, round(total * keep ** (step / steps)))
        ends = np.cumsum([groups[i].size for i in ranked])[:-1]
        for i, mine, own in zip(ranked, np.split(stay, ends), np.split(rank, ends), strict=True):
            mine[np.argmax(own)] = True
            alive[i] = mine
    return {groups[i].name: np.flatnonzero(alive[i]) for i in ranked}


def scores(matrices: Sequence[F64], alive: Sequence[NDArray[np.bool_]]) -> list[F64]:
    """The flow through every channel of every group, 0 where it is not `alive`; each group's sum is R."""
    reach = [matrices[0].sum(axis=1) * alive[0]]
    for matrix, on in zip(matrices[1:-1], alive[1:], strict=True):
        reach.append((matrix @ reach[-1]) * on)
    passed = [matrices[-1].sum(axis=0)]
    for matrix, on in zip(matrices[-2:0:-1], alive[:0:-1], strict=True):
        passed.append((passed[-1] * on) @ matrix)
    return [a * b for a, b in zip(reach, reversed(passed), strict=True)]


def chain(
    tensors: Mapping[str, NDArray[np.float32]], layers: Sequence[str], groups: Sequence[ChannelGroup]
) -> list[F64]:
    """Of each layer the absolute weight between every input channel and every output channel, float64[out, in].

    Raises ValueError unless every layer but the last makes the channels of one group that the next layer alone reads.
    """
    if len(layers) < 2 or len(groups) != len(layers) - 1:
        raise ValueError(
            f"there are {len(groups)} channel groups for {len(layers)} layers, and a chain has one between each layer "
            "and the next"
        )
    for group, layer, after in zip(groups, layers, layers[1:], strict=False):
        made, read = [p.tensor for p in group.at("makes")], [p.tensor for p in group.at("reads")]
        if made != [layer] or read != [after]:
            raise ValueError(f"the channels {group.name!r} go from {made} to {read}, not from {layer!r} to {after!r}")
    inputs = [tensors[layers[0]].shape[1], *(g.size for g in groups)]
    sizes = [np.abs(tensors[name]).astype(np.float64) for name in layers]
    return [w.reshape(len(w), n, -1).sum(axis=2) for w, n in zip(sizes, inputs, strict=True)]
