"""The channel groups that a bundle's manifest offers: found in `eval.onnx`, and tried on every graph.

A method may remove any channels of any group and train what is left. So each graph must be cut by them without help,
and its numbers must stay those of the whole network with zeros in what is cut (`group_trial`). Other groups are left
out, with a line that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
from edge_kernels.channels import ChannelGroup

from edge_client.bundle import Manifest
from edge_client.compaction.groups import find_groups
from edge_client.errors import CompactionError, ConfigError, ModelError
from edge_client.narrow import Channels, cuts
from edge_client.training.cut import cut
from edge_export.group_trial import halves, opened, unlike

Fault = Callable[[Sequence[ChannelGroup]], str]


def with_groups(manifest: Manifest, graphs: Mapping[str, onnx.ModelProto]) -> Manifest:
    """`manifest` with the groups of `graphs["eval.onnx"]` that all `graphs` can be cut by. Raises ModelError."""
    tensors = {t.name: t.shape for t in (*manifest.parameters, *manifest.buffers)}
    try:
        found = find_groups(graphs["eval.onnx"], tensors, manifest.input.shape, manifest.input.dtype)
    except Exception as error:  # also of a graph unlike all that were tried
        why = error if isinstance(error, CompactionError) else f"{type(error).__name__}: {error}; report the module"
        raise ModelError(f"the model's channels cannot be followed through its graph: {why}") from error
    whole = manifest.model_copy(update={"groups": found.groups})
    faults: list[Fault] = [partial(_uncuttable, whole, graph) for graph in graphs.values()]
    faults += [partial(unlike, whole, graph, opened(graph)) for graph in graphs.values()]
    kept, stopped = found.groups, list(found.stopped)
    for fault in faults:
        kept = _without(fault, kept, stopped)
    return manifest.model_copy(update={"groups": kept, "stopped": tuple(stopped)})


def _without(fault: Fault, groups: tuple[ChannelGroup, ...], stopped: list[str]) -> tuple[ChannelGroup, ...]:
    """The groups that have no `fault`, alone and together with those before; for the others a line joins `stopped`."""
    if not groups or not fault(groups):
        return groups
    kept: list[ChannelGroup] = []
    for group in groups:
        if why := fault([*kept, group]):
            stopped.append(f"{group.name}: {why}")
        else:
            kept.append(group)
    return tuple(kept)


def _choices(groups: Sequence[ChannelGroup]) -> Iterator[Channels]:
    """Channels to keep that find what a graph cannot do: half, and as few as possible from either end."""
    yield halves(groups)
    yield {g.name: np.array([0]) for g in groups}
    yield {g.name: np.array([g.size - 1]) for g in groups}


def _uncuttable(manifest: Manifest, graph: onnx.ModelProto, groups: Sequence[ChannelGroup]) -> str:
    """Why a choice of channels cannot be cut out of `graph`; empty if each can."""
    try:
        for kept in _choices(groups):
            cut(graph, manifest.input.shape, cuts(manifest, kept))
    except ConfigError as error:
        return str(error)
    return ""
