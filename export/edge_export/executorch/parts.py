"""The parts `train.pte` and `eval.pte` of a bundle: its ONNX graphs as ExecuTorch programs.

`train.onnx` already is one training step as an ordinary graph, with every gradient written out and checked. So its
ExecuTorch form needs no derivative of ExecuTorch's own, no state that a step changes and no optimiser: parameters,
statistics, `x` and `y` go in, the loss, the gradients and the new statistics come out, in the manifest's order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import torch
from torch import Tensor

from edge_client.bundle import MANIFEST, Bundle, Manifest, Part, digest, views
from edge_client.errors import ModelError
from edge_client.files import write_whole
from edge_export.executorch.graph import Graph
from edge_export.executorch.lowering import TRACED, lower

MOST = 64
"""Samples of the largest batch by default: a program reserves the memory of its largest batch."""


def train_names(manifest: Manifest) -> tuple[list[str], list[str]]:
    """The names of the inputs and of the outputs of `train.pte`, in order."""
    statistics = [t.name for t in manifest.buffers]
    free = [t.name for t in manifest.parameters if t.trainable]
    inputs = [*(t.name for t in manifest.parameters), *statistics, "x", "y"]
    return inputs, ["loss", *(f"grad:{k}" for k in free), *(f"new:{k}" for k in statistics)]


def eval_names(manifest: Manifest) -> tuple[list[str], list[str]]:
    """The names of the inputs and of the outputs of `eval.pte`, in order."""
    return [*(t.name for t in manifest.parameters), *(t.name for t in manifest.buffers), "x"], ["logits"]


def add_parts(bundle: Bundle, *, most: int = MOST, progress: Callable[[str], None] = lambda _: None) -> Bundle:
    """Write `train.pte` and `eval.pte` into `bundle` and open it again; its digest changes.

    `most` is the largest batch they run, `progress` gets a line before each part. Raises ModelError, naming the
    operator, when a graph has no ExecuTorch form; the bundle then stays as it was.
    """
    manifest, made = bundle.manifest, {}
    for part, names in (("train", train_names(manifest)), ("eval", eval_names(manifest))):
        progress(f"{part}.pte: lowering, which takes seconds for a small model and minutes for a deep one")
        model = onnx.load(bundle.part(f"{part}.onnx"))
        nodes = len(model.graph.node)
        program = Graph(model, *names)
        data = lower(
            program,
            _example(bundle, names[0]),
            [i for i, name in enumerate(names[0]) if name in ("x", "y")],
            most=most,
            delegate="products",
        )
        progress(f"{part}.pte: {len(data):,} bytes from {nodes} operators")
        made[f"{part}.pte"] = data
    for part, data in made.items():
        write_whole(bundle.folder / part, data, mode=0o644, elsewhere="choose another folder for the bundle")
    entries = {k: Part(sha256=digest(v), size=len(v)) for k, v in made.items()}
    changed = manifest.model_copy(update={"parts": dict(sorted({**manifest.parts, **entries}.items()))})
    write_whole(bundle.folder / MANIFEST, changed.to_bytes(), mode=0o644, elsewhere="choose another folder")
    return Bundle.open(bundle.folder)


def _example(bundle: Bundle, names: list[str]) -> tuple[Tensor, ...]:
    """Inputs of the right shapes to trace with."""
    m, model = bundle.manifest, bundle.model()
    known = {**views(m.parameters, model.parameters), **views(m.buffers, model.buffers)}
    known["x"] = np.zeros((TRACED, *m.input.shape), m.input.dtype)
    known["y"] = m.target.labels(TRACED)
    missing = [name for name in names if name not in known]
    if missing:
        raise ModelError(f"the graph reads {missing}, which the bundle does not have; export the bundle again")
    return tuple(torch.from_numpy(np.array(known[name])) for name in names)
