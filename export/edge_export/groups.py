"""The channel groups that a bundle's manifest offers: found in `eval.onnx`, and tried on every graph.

A method may remove any channels of any group and train what is left. So each graph must be cut by them without help,
and the outputs must stay those of the whole network with zeros in what is cut. Other groups are left out, with a line
that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
from edge_kernels.channels import ChannelGroup
from numpy.typing import NDArray

from edge_client.bundle import Manifest
from edge_client.compaction.groups import find_groups
from edge_client.errors import CompactionError, ConfigError, ModelError
from edge_client.narrow import Channels, cuts
from edge_client.runtimes.onnx import open_onnx
from edge_client.training.cut import PROBE, cut

SAME = 1e-2  # of the largest output: rounding is far below, and what a sum counts of lost channels far above
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
    faults.append(partial(_unlike, whole, graphs["eval.onnx"]))
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


def _halves(groups: Sequence[ChannelGroup]) -> Channels:
    """Half of each group's channels, drawn: two groups that a graph joins must not pass for one."""
    random = np.random.default_rng(0)
    return {g.name: np.sort(random.permutation(g.size)[: (g.size + 1) // 2]) for g in groups}


def _choices(groups: Sequence[ChannelGroup]) -> Iterator[Channels]:
    """Channels to keep that find what a graph cannot do: half, and as few as possible from either end."""
    yield _halves(groups)
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


def _unlike(manifest: Manifest, graph: onnx.ModelProto, groups: Sequence[ChannelGroup]) -> str:
    """Why the cut network's outputs are not the whole one's with zeros in what is cut; empty if they are.

    A sum over channels counts what they emit at zero, which is not zero after a sigmoid, say.
    """
    axes, random = cuts(manifest, _halves(groups)), np.random.default_rng(0)
    whole, small = dict[str, NDArray[np.float32]](), dict[str, NDArray[np.float32]]()
    for t in (*manifest.parameters, *manifest.buffers):
        scale = (3 / max(1, t.size // t.shape[0])) ** 0.5 if len(t.shape) > 1 else 0.0
        values = random.uniform(-scale, scale, t.shape) if scale else random.uniform(0.5, 1.5, t.shape)
        stays = axes.get(t.name, (None,) * len(t.shape))
        kept = np.ix_(*(np.ones(n, np.bool_) if s is None else s for n, s in zip(t.shape, stays, strict=True)))
        whole[t.name] = np.zeros(t.shape, np.float32)
        whole[t.name][kept] = values[kept]
        small[t.name] = whole[t.name][kept]
    sample = (PROBE + 1, *manifest.input.shape)  # another batch than the cut was inferred for
    x = random.standard_normal(sample) if manifest.input.dtype == "float32" else np.zeros(sample)
    x = x.astype(manifest.input.dtype)
    due, cut_graph = _outputs(graph, whole, x), cut(graph, manifest.input.shape, axes)
    try:
        made = _outputs(cut_graph, small, x)
    except Exception:  # ONNX Runtime raises a class of its own for every status
        return "an operator merges them with the samples of a batch"
    most = np.abs(due[np.isfinite(due)]).max(initial=0)
    same = np.allclose(made, due, rtol=0, atol=SAME * most, equal_nan=True)
    return "" if same else "a sum over its channels counts what they emit at zero"


def _outputs(
    graph: onnx.ModelProto, tensors: Mapping[str, NDArray[np.float32]], x: NDArray[np.generic]
) -> NDArray[np.float32]:
    session = open_onnx(graph.SerializeToString(), what="eval.onnx", refused=ModelError, rewrite=False)
    read = {i.name for i in session.get_inputs()}
    return np.asarray(session.run(["logits"], {k: v for k, v in {**tensors, "x": x}.items() if k in read})[0])
