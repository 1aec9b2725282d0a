"""Channel groups tried by numbers: a graph cut by them beside the whole one with zeros in what is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from edge_kernels.channels import ChannelGroup
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from edge_client.bundle import Input, Manifest
from edge_client.errors import ModelError
from edge_client.narrow import Axes, Channels, cuts
from edge_client.runtimes.onnx import open_onnx
from edge_client.training.cut import PROBE, cut

DRAWS = (1.0, 1.0, 1.0, 1.0, 100.0, 100.0)
"""How large the samples of each draw are; some make no finite numbers.

Operators such as `relu(x - 6)` add nothing to dead channels until samples are large.
"""
SAME = {"logits": 1e-4, "loss": 1e-4, "new": 1e-4, "grad": 1e-2}
"""Of the largest number of a kind. Rounding is far below. A gradient jumps where it turns an activation on or off: by
more in one of a deep network's draws, so only a second one counts."""
COUNTED = "a sum over its channels counts what they emit at zero"
ROWS = 1000  # of a table of which only one end is known
Arrays = dict[str, NDArray[Any]]


def halves(groups: Sequence[ChannelGroup]) -> Channels:
    """Half of each group's channels, drawn: two groups that a graph joins must not pass for one."""
    random = np.random.default_rng(0)
    return {g.name: np.sort(random.permutation(g.size)[: (g.size + 1) // 2]) for g in groups}


def opened(graph: onnx.ModelProto) -> InferenceSession:
    """`graph` as it is."""
    return open_onnx(graph.SerializeToString(), what="the graph", refused=ModelError, rewrite=False)


def unlike(manifest: Manifest, graph: onnx.ModelProto, whole: InferenceSession, groups: Sequence[ChannelGroup]) -> str:
    """Why the cut graph's numbers are not those of the `whole` one with zeros in what is cut; empty if they are.

    A sum over channels counts what they emit at zero, which is not zero after a sigmoid, say.
    """
    axes, finite, jumps = cuts(manifest, halves(groups)), 0, 0
    small = opened(cut(graph, manifest.input.shape, axes))
    for draw, size in enumerate(DRAWS):
        given, fewer = _drawn(manifest, axes, draw, size)
        due = {name: _kept(name, value, axes) for name, value in _run(whole, given).items()}
        try:
            made = _run(small, fewer)
        except Exception:  # ONNX Runtime raises a class of its own for every status
            return "an operator merges them with the samples of a batch"
        if all(np.isfinite(value).all() for value in due.values()):
            finite, wrong = finite + 1, _unlike(due, made)
            jumps += "grad" in wrong
            if wrong - {"grad"} or jumps > 1:
                return COUNTED
    if not finite:
        return "the network has no finite outputs for drawn values"
    return COUNTED if jumps == finite else ""


def _drawn(manifest: Manifest, axes: Mapping[str, Axes], draw: int, size: float) -> tuple[Arrays, Arrays]:
    """What both graphs are given: zeros where tensors are cut, and the same tensors cut.

    Vectors, such as a norm's scale, are 0.5 .. 1.5; in every other draw those that train are -0.5 .. 0.5.
    """
    random = np.random.default_rng(draw)
    n = PROBE + 1  # another batch than the cut was inferred for
    whole: Arrays = {
        "x": samples(manifest.input, n, random, size),
        "y": manifest.target.labels(n),
        "key": np.zeros(1, np.int64),
    }
    small, trained = dict(whole), {t.name for t in manifest.parameters}
    for t in (*manifest.parameters, *manifest.buffers):
        least = -0.5 if draw % 2 and t.name in trained else 0.5
        scale = (3 / max(1, t.size // t.shape[0])) ** 0.5 if len(t.shape) > 1 else 0.0
        values = random.uniform(-scale, scale, t.shape) if scale else random.uniform(least, least + 1, t.shape)
        values = np.asarray(values, np.float32)
        whole[t.name] = np.zeros(t.shape, np.float32)
        kept = _places(t.shape, axes.get(t.name))
        whole[t.name][kept] = values[kept]
        small[t.name] = np.asarray(whole[t.name][kept])
    return whole, small


def samples(taken: Input, n: int, random: np.random.Generator, size: float) -> NDArray[Any]:
    """Samples of normal numbers of that size, or of ids that have rows."""
    bounds = taken.bounds()
    if bounds is None:
        drawn = random.standard_normal((n, *taken.shape)) if taken.dtype == "float32" else np.zeros((n, *taken.shape))
        return (size * drawn).astype(taken.dtype)
    low, end = bounds
    low, end = np.maximum(low, np.minimum(0, end - ROWS)), np.minimum(end, np.maximum(0, low) + ROWS)
    return random.integers(low, end, (n, *taken.shape)).astype(taken.dtype)


def _places(shape: Sequence[int], stays: Axes | None) -> tuple[NDArray[Any], ...]:
    """The index of what stays of a tensor."""
    known = (None,) * len(shape) if stays is None else stays
    return np.ix_(*(np.ones(n, np.bool_) if s is None else s for n, s in zip(shape, known, strict=True)))


def _kept(name: str, value: NDArray[Any], axes: Mapping[str, Axes]) -> NDArray[Any]:
    """Of a tensor's gradient or new value what stays; any other output whole."""
    tensor = name.partition(":")[2]
    return value[_places(value.shape, axes[tensor])] if tensor in axes else value


def _run(session: InferenceSession, given: Arrays) -> Arrays:
    outputs = [o.name for o in session.get_outputs()]
    read = {i.name: given[i.name] for i in session.get_inputs()}
    return {k: np.asarray(v) for k, v in zip(outputs, session.run(outputs, read), strict=True)}


def _unlike(due: Arrays, made: Arrays) -> set[str]:
    """The kinds of which an output is not that which is due, up to `SAME` of the largest of its kind."""
    most = dict.fromkeys(SAME, 0.0)
    for name, value in due.items():
        most[_kind(name)] = max(most[_kind(name)], float(np.abs(value).max(initial=0)))
    atol = {kind: same * most[kind] for kind, same in SAME.items()}
    return {
        _kind(name) for name, value in due.items() if not np.allclose(made[name], value, rtol=0, atol=atol[_kind(name)])
    }


def _kind(name: str) -> str:
    """`grad` of the output `grad:0.weight`."""
    return name.partition(":")[0]
