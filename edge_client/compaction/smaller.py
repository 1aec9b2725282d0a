"""A frozen evaluation graph becomes a smaller one that computes the same.

    prepare (`net`) -> what varies, what is read (`study`) -> the graph on the elements that are left (`writer`)

The operators' own rules are in `maps`, `moves`, `products` and `recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto

from edge_client.compaction.moves import join_moves
from edge_client.compaction.net import Net, build, prepare
from edge_client.compaction.operators import Array
from edge_client.compaction.rules import rule
from edge_client.compaction.study import Rule, Study, study
from edge_client.compaction.writer import Ragged, Writer


@dataclass(frozen=True)
class Smaller:
    """A graph without what is constant or unread.

    `parameters` counts the float constants. `layers` gives for each weight of the bundle how many outputs its layer had
    and how many are left. `kept` has a line for each operator that reads channels although they are dead.
    """

    model: ModelProto
    parameters: int
    layers: Mapping[str, tuple[int, int]]
    kept: tuple[str, ...]


def smaller(
    model: ModelProto, probe: Array, widen: Callable[[Study], Callable[[Study, NodeProto], Rule]] | None = None
) -> Smaller:
    """`model`, all its tensors constants, without the channels that are dead. `probe` is a batch of two samples.
    `widen` makes of the analysis the rules of another one, in which some dead channels stay (`width.widened`).

    Raises CompactionError when the graph does not run or cannot be written on fewer channels.
    """
    net = prepare(model, probe)
    join_moves(net)
    found = study(net, rule)
    if widen is not None:
        found = study(net, widen(found))
    writer = Writer(found)
    try:
        writer.run()
    except Ragged:
        writer = Writer(found, strict=True)
        writer.run()
    made = build(net, writer.nodes, writer.constants, [model.graph.output[0]])
    return Smaller(
        made,
        sum(v.size for v in writer.constants.values() if v.dtype.kind == "f"),
        _layers(net, found),
        tuple(writer.kept),
    )


def _layers(net: Net, found: Study) -> dict[str, tuple[int, int]]:
    """By the name of its first weight, each layer's outputs and those that are left."""
    made: dict[str, tuple[int, int]] = {}
    for node in net.nodes:
        name, weight = node.output[0], net.layer(node)
        if weight and name in found.varies:
            channels = found.channels(name)
            live = found.live(name)
            if any(channels):
                axis = channels.index(True)
                others = tuple(k for k in range(live.ndim) if k != axis)
                made.setdefault(weight, (live.shape[axis], int(np.count_nonzero(live.any(axis=others)))))
    return made
