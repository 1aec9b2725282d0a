"""Torch-Pruning at the same kept share, with and without `round_to`, as ONNX models to be timed beside ours.

Torch-Pruning chooses which channels go: all layers that meet in a sum lose the same ones, so no mask that conflicts
can be given to it, and its outputs are not the masked model's. What is compared is speed at an equal kept share.
It is no dependency: ``pip install torch-pruning``.
"""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from edge_export.graphs import eval_graph
from torch import nn

from edge_bench.compaction.zoo import Case
from edge_bench.models.attention import TransformerBlock
from edge_client.compaction.preparation import dense
from edge_client.compaction.surgery import freeze

ROUND_TO = 16


def installed() -> bool:
    """Whether Torch-Pruning can be imported."""
    return find_spec("torch_pruning") is not None


def pruned(module: nn.Module, case: Case, kept: float, round_to: int | None, path: Path) -> None:
    """Write `module` with the share `kept` of its channels, chosen by Torch-Pruning, to `path`.

    Raises whatever Torch-Pruning or the export raises for a module that it cannot follow.
    """
    torch_pruning = import_module("torch_pruning")

    made = copy.deepcopy(module).eval().requires_grad_(True)
    example = case.batch(3)
    named = dict(made.named_modules())
    pruner = torch_pruning.pruner.BasePruner(
        made,
        example,
        importance=torch_pruning.importance.RandomImportance(),
        pruning_ratio=1 - kept,
        ignored_layers=[named[name] for name in case.whole],
        round_to=round_to,
        num_heads={block.read: block.heads for block in made.modules() if isinstance(block, TransformerBlock)},
    )
    pruner.step()
    parameters, buffers = dict(made.named_parameters()), dict(made.named_buffers())
    statistics = {k: b for k, b in buffers.items() if b.is_floating_point()}
    graph = eval_graph(made, example, list(parameters), list(statistics))
    values = {k: t.detach().numpy() for k, t in (*parameters.items(), *statistics.items())}
    model = dense(freeze(graph, values))
    path.write_bytes(model.SerializeToString())
