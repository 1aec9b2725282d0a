"""A frozen evaluation graph becomes a smaller one that computes the same.

    prepare (`preparation`) -> what varies, what is read (`study`) -> the graph on the elements that are left (`writer`)

The operators' own rules are in `convolutions`, `products`, `recurrent`, `moves` and `maps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from edge_client.compaction.chains import straighten
from edge_client.compaction.net import Net, build
from edge_client.compaction.operators import Array
from edge_client.compaction.pieces import Ragged
from edge_client.compaction.preparation import prepare
from edge_client.compaction.rules import rewrite, rule
from edge_client.compaction.study import Study, entries, study
from edge_client.compaction.writer import FEWEST, Costs, Writer
from edge_client.errors import CompactionError, MaskfleetError

REPORT = "keep the dense model and report the bundle"


@dataclass(frozen=True)
class Smaller:
    """A graph without what is constant or unread.

    `parameters` counts the float constants. `layers` gives for each weight of the bundle how many outputs its layer had
    and how many are left. `stopped` has a line for each operator that reads dead channels.
    """

    model: ModelProto
    parameters: int
    layers: Mapping[str, tuple[int, int]]
    stopped: tuple[str, ...]


@contextmanager
def refused() -> Iterator[None]:
    """A fault of compaction is a CompactionError: the device then keeps its dense model."""
    try:
        yield
    except MaskfleetError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CompactionError(f"compaction does not handle this graph ({cause}); {REPORT}") from error


def analysed(model: ModelProto, probe: Array) -> Study:
    """What varies in `model`, all its tensors constants, and what is read. `probe` is a batch of two samples.

    Raises CompactionError when the graph does not run.
    """
    net = prepare(model, probe)
    straighten(net)
    return study(net, rule)


@refused()
def cut(found: Study, costs: Costs = FEWEST) -> Smaller:
    """The graph on what is live. `costs` weighs the multiply-adds saved against channels that must be moved for it.

    Raises CompactionError when it cannot be written so.
    """
    writer = written(found, costs)
    found, net = writer.study, found.net
    made = build(net, writer.nodes, writer.constants, [net.model.graph.output[0]])
    return Smaller(
        made,
        sum(v.size for v in writer.constants.values() if v.dtype.kind == "f"),
        _layers(net, found),
        tuple(writer.stopped),
    )


def whole(found: Study, why: str) -> Smaller:
    """The graph with all its channels, and `why` they stay."""
    net = found.net
    made = build(net, net.nodes, net.constants, [net.model.graph.output[0]])
    count = sum(v.size for v in net.constants.values() if v.dtype.kind == "f")
    return Smaller(made, count, {name: (n, n) for name, (n, _) in _layers(net, found).items()}, (why,))


def written(found: Study, costs: Costs = FEWEST) -> Writer:
    """The smaller graph. Where a layout meets an operator that cannot take it, the reshapes before it cut less freely.

    Where that does not help, and where an operator cannot be written on fewer elements at all, what it reads stays
    whole, from the layers that make it. Raises CompactionError when the graph cannot be written even so.
    """
    levels: dict[str, int] = {}
    why = ""
    while True:
        writer = Writer(found, levels, costs, why)
        try:
            writer.run(rewrite)
            return writer
        except Exception as error:
            freer = set()
            if isinstance(error, Ragged):
                above = found.above(error.value) & writer.split
                freer = {v for v in above or writer.split if levels.get(v, 0) < 2}
            for value in freer:
                levels[value] = levels.get(value, 0) + 1
            if freer and writer.node is not None:
                why = writer.node.op_type
            else:
                found = found.again({**found.whole, **_kept(found, writer.node, error)})


def _kept(found: Study, node: NodeProto | None, error: Exception) -> dict[str, str]:
    """The values that stay whole because `node` raised `error`, with a line. Raises CompactionError if all do."""
    net = found.net
    reads = [] if node is None else [node.input[k] for k in net.data(node)]
    values = {error.value} if isinstance(error, Ragged) else {*reads, *([] if node is None else node.output)}
    values = set().union(*(found.above(v) for v in values if v)) - found.whole.keys()
    values = {v for v in values if v in found.varies and found.varies[v].any()}
    if node is None or not values:
        if not isinstance(error, Ragged):
            raise error
        raise CompactionError(
            f"{found.maker(error.value)}: what reads its channels cannot take those that the mask leaves ({error}); "
            f"{REPORT}"
        ) from None
    why = str(error) if isinstance(error, MaskfleetError) else f"{type(error).__name__}: {error}"
    makers = list(dict.fromkeys(found.maker(v) for v in reads))
    return dict.fromkeys(values, f"{', '.join(makers)}: {node.op_type} cannot be written on fewer channels ({why})")


def _layers(net: Net, found: Study) -> dict[str, tuple[int, int]]:
    """By the name of its first weight, each layer's outputs and those that are left."""
    made: dict[str, tuple[int, int]] = {}
    for node in net.nodes:
        name, weight = node.output[0], net.layer(node)
        if weight and name in found.varies:
            channels = found.channels(name)
            if any(channels):
                live = entries(found.live(name), channels.index(True))
                made.setdefault(weight, (live.size, int(live.sum())))
    return made
