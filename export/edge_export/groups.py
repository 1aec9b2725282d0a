"""The channel groups that a bundle's manifest offers: found in `eval.onnx`, and tried on every graph.

A method may remove any channels of any group and train what is left, so each graph must be cut by them without help.
Groups that a graph cannot be cut by are left out, with a line that names the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from edge_kernels.channels import ChannelGroup

from edge_client.bundle import Manifest
from edge_client.compaction.groups import find_groups
from edge_client.errors import CompactionError, ConfigError, ModelError
from edge_client.narrow import cuts
from edge_client.training.cut import cut


def with_groups(manifest: Manifest, graphs: Mapping[str, onnx.ModelProto]) -> Manifest:
    """`manifest` with the groups of `graphs["eval.onnx"]` that all `graphs` can be cut by. Raises ModelError."""
    tensors = {t.name: t.shape for t in (*manifest.parameters, *manifest.buffers)}
    try:
        found = find_groups(graphs["eval.onnx"], tensors, manifest.input.shape, manifest.input.dtype)
    except Exception as error:  # also of a graph unlike all that were tried
        why = error if isinstance(error, CompactionError) else f"{type(error).__name__}: {error}; report the module"
        raise ModelError(f"the model's channels cannot be followed through its graph: {why}") from error
    whole = manifest.model_copy(update={"groups": found.groups})
    stopped = list(found.stopped)
    kept = found.groups
    for graph in graphs.values():
        kept = _cuttable(whole, graph, kept, stopped)
    return manifest.model_copy(update={"groups": kept, "stopped": tuple(stopped)})


def _cuttable(
    manifest: Manifest, graph: onnx.ModelProto, groups: Sequence[ChannelGroup], stopped: list[str]
) -> tuple[ChannelGroup, ...]:
    """The groups of which a channel can be cut out of `graph`; for the others a line joins `stopped`."""

    def fault(tried: Sequence[ChannelGroup]) -> str:
        try:
            random = np.random.default_rng(0)  # two groups that a graph joins must not pass for one
            left = {g.name: np.sort(random.permutation(g.size)[: (g.size + 1) // 2]) for g in tried}
            cut(graph, manifest.input.shape, cuts(manifest, left))
        except ConfigError as error:
            return str(error)
        return ""

    if not groups or not fault(groups):
        return tuple(groups)
    kept = []
    for group in groups:
        why = fault([group])
        if why:
            stopped.append(f"{group.name}: {why}")
        else:
            kept.append(group)
    return tuple(kept)
