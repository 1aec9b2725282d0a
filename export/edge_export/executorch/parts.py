"""The parts `train.pte` and `eval.pte` of a bundle: its ONNX graphs as ExecuTorch programs.

`train.onnx` already is one training step as an ordinary graph, with every gradient written out and checked. So its
ExecuTorch form needs no derivative of ExecuTorch's own, no state that a step changes and no optimiser: parameters,
statistics, `x` and `y` go in, the loss, the gradients and the new statistics come out, in the manifest's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.bundle import MANIFEST, Bundle, Manifest, Part, digest, views
from edge_client.equality import Probe, nudged
from edge_client.errors import ModelError
from edge_client.files import write_whole
from edge_client.runtimes.onnx import open_onnx
from edge_export.draws import labels
from edge_export.executorch.graph import Graph
from edge_export.executorch.lowering import TRACED, lower
from edge_export.group_trial import samples

MOST = 64
"""Samples of the largest batch by default: a program reserves the memory of its largest batch."""
TOLERANCE = 1e-4
"""Largest difference of a value from the ONNX graph's, over the largest value of its tensor."""
LEAST = 1e-2
"""A tensor whose largest value is smaller is compared as if it were this one."""
LEAST_GRADIENT = 0.05
"""The same for gradients, in units of the step's largest: of a bias before a batch-norm only rounding is left.

So an entry may be 42 float32 roundings of the largest away; 4 were seen.
"""
DRAWS = 4
"""Batches of a size, of which one must agree: of a million activations a few lie so close to zero that a ReLU falls
the other way. In large batches some always do: there the distance may be `FACTOR` times that by which the graph's own
results move when its inputs are rounded otherwise, at most `FLIPPED`. So the small batches show the most."""
FACTOR = 4.0
FLIPPED = 0.02


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

    `most` is the largest batch they run, `progress` gets a line before each part. Both are run beside the ONNX graphs
    first. Raises ModelError, naming the operator, when a graph has no ExecuTorch form, and when a program's results are
    not the graph's; the bundle then stays as it was.
    """
    manifest, made = bundle.manifest, {}
    if manifest.draws:
        raise ModelError("a program of ExecuTorch cannot draw what dropout drops; leave out --executorch, or dropout")
    for part, names in (("train", train_names(manifest)), ("eval", eval_names(manifest))):
        progress(f"{part}.pte: lowering, which takes seconds for a small model and minutes for a deep one")
        model = onnx.load(bundle.part(f"{part}.onnx"))
        nodes = len(model.graph.node)
        program = Graph(model, *names)
        data = lower(
            program,
            _example(bundle, names[0], min(TRACED, most)),
            [i for i, name in enumerate(names[0]) if name in ("x", "y")],
            most=most,
            delegate="products",
        )
        progress(f"{part}.pte: {len(data):,} bytes from {nodes} operators")
        _prove(bundle, part, data, *names, most)
        progress(f"{part}.pte: gives what {part}.onnx gives")
        made[f"{part}.pte"] = data
    for part, data in made.items():
        write_whole(bundle.folder / part, data, mode=0o644, elsewhere="choose another folder for the bundle")
    entries = {k: Part(sha256=digest(v), size=len(v)) for k, v in made.items()}
    changed = manifest.model_copy(update={"parts": dict(sorted({**manifest.parts, **entries}.items()))})
    write_whole(bundle.folder / MANIFEST, changed.to_bytes(), mode=0o644, elsewhere="choose another folder")
    return Bundle.open(bundle.folder)


def _example(bundle: Bundle, names: list[str], n: int) -> tuple[Tensor, ...]:
    """Inputs of the right shapes to trace with, for `n` samples."""
    known = _feed(bundle, n)
    missing = [name for name in names if name not in known]
    if missing:
        raise ModelError(f"the graph reads {missing}, which the bundle does not have; export the bundle again")
    return tuple(torch.from_numpy(np.array(known[name])) for name in names)


def _feed(bundle: Bundle, n: int, draw: int = 0) -> dict[str, NDArray[Any]]:
    """Every input by name: the bundle's own values, and `n` random samples with their labels."""
    m, model = bundle.manifest, bundle.model()
    known: dict[str, NDArray[Any]] = {**views(m.parameters, model.parameters), **views(m.buffers, model.buffers)}
    known["x"] = samples(m.input, n, np.random.default_rng((n, draw)), 1.0)
    known["y"] = labels(m.target, n, torch.Generator().manual_seed(DRAWS * n + draw)).numpy()
    return known


def _prove(bundle: Bundle, part: str, data: bytes, inputs: list[str], outputs: list[str], most: int) -> None:
    """Run the program `data` beside the ONNX graph at several batches. Raises ModelError when they differ."""
    from edge_client.runtimes.executorch import open_pte

    program = open_pte(data, what=f"{part}.pte", refused=ModelError)
    session = open_onnx(bundle.part(f"{part}.onnx"), refused=ModelError)
    read, state = {i.name for i in session.get_inputs()}, [k for k in inputs if k not in ("x", "y")]

    def graph(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return dict(zip(outputs, session.run(outputs, {k: v for k, v in feed.items() if k in read}), strict=True))

    for n in sorted({most, min(5, most), 1}, reverse=True):
        least, levels = dict.fromkeys(outputs, np.inf), dict.fromkeys(outputs, 0.0)
        for draw in range(DRAWS):
            feed = _feed(bundle, n, draw)
            try:
                found = program(*(feed[name] for name in inputs))
            except RuntimeError as error:
                raise ModelError(f"{part}.pte does not run on {n} samples: {error}; use the ONNX graphs") from None
            due = graph(feed)
            off = _distances(dict(zip(outputs, found, strict=True)), due)
            least = {k: min(least[k], off[k]) for k in outputs}
            if max(least.values()) <= TOLERANCE:
                break
            x, *values = nudged(Probe(part, True, feed["x"]), *(feed[k] for k in state))
            moved = graph({**feed, **dict(zip(state, values, strict=True)), "x": x})
            levels = {k: max(levels[k], v) for k, v in _distances(moved, due).items()}
        for name, gap in least.items():
            if not gap <= max(TOLERANCE, min(FACTOR * levels[name], FLIPPED)):  # so that NaN fails too
                raise ModelError(
                    f"{part}.pte gives another {name} than {part}.onnx for {n} samples, {gap:.3g} of its largest value "
                    f"away and {TOLERANCE:g} allowed; use the ONNX graphs, and report the model"
                )


def _distances(found: Mapping[str, NDArray[Any]], due: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The distance of each tensor by name."""
    least = LEAST_GRADIENT * max((_largest(v) for k, v in due.items() if k.startswith("grad:")), default=0.0)
    return {k: _distance(found[k], v, least if k.startswith("grad:") else LEAST) for k, v in due.items()}


def _distance(found: NDArray[Any], due: NDArray[Any], least: float) -> float:
    """The largest difference over the largest value, which counts as `least` at least; infinite for other shapes."""
    if found.shape != due.shape:
        return float("inf")
    return _largest(found - due) / max(_largest(due), least, 1e-30)


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values).max(initial=0))
