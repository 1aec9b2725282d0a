"""Time of a training step by ExecuTorch: ``python -m edge_bench.timing.executorch_step --json FILE`` (extra `author`).

For each model, on one thread and one batch of noise, the gradient by each training backend. The backends take turns,
one step each, so that a busy moment or a change of clock affects all of them. The clock is the process's CPU time.
Figures are medians, and what counts is the ratio `executorch_over_torch`. Beside it the largest relative distance of
ExecuTorch's gradient from PyTorch's, on the batch and least of four batches of 5, and what the programs cost to make:
seconds of CPU and bytes.

Lowering takes minutes: `--bundles FOLDER` keeps the exported bundles for the next run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from edge_export import export_bundle
from edge_export.executorch.lowering import check_installed
from edge_export.executorch.parts import add_parts
from torch import nn

from edge_bench import models, provenance
from edge_bench.command_line import check_writable, known_names, run_module, write_json
from edge_bench.testing.trainers import samples
from edge_client.bundle import Bundle
from edge_client.measure.latency import in_turns
from edge_client.targets import Classification, Sequence, Target
from edge_client.training import Trainer, open_trainer

BACKENDS = ("torch", "onnxruntime", "executorch")
BATCH = 32
FEW = 5  # samples, so that in one of four draws no activation of a deep network lies at a ReLU's edge
CHARACTERS, LENGTH = 73, 80
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Target, int, float]] = {
    # name: module, one sample, target, steps measured, the ratio to PyTorch that is aimed at
    "mlp": (partial(models.mlp, *models.HAR), (1152,), Classification(classes=6), 60, 2.0),
    "smallcnn": (models.small_cnn, (1, 28, 28), Classification(classes=10), 15, 5.0),
    "emnist": (models.emnist_cnn, (1, 28, 28), Classification(classes=62), 15, 5.0),
    "lstm": (
        partial(models.NextCharacter, CHARACTERS, 8, 64, 1),
        (LENGTH,),
        Sequence(steps=LENGTH, classes=CHARACTERS),
        10,
        4.5,
    ),
    "resnet20": (partial(models.Resnet, 20, 10), (3, 32, 32), Classification(classes=10), 6, 5.0),
    "vit1": (partial(models.VisionTransformer, depth=1), (3, 32, 32), Classification(classes=10), 6, 3.6),
}


def bundle_of(name: str, folder: Path) -> tuple[Bundle, float | None]:
    """The bundle of model `name` in `folder` with its programs, and the CPU seconds that lowering took if it did."""
    make, sample, target, _, _ = MODELS[name]
    if not (folder / "manifest.json").is_file():
        torch.manual_seed(0)
        example = torch.zeros((2, *sample), dtype=torch.int64 if isinstance(target, Sequence) else torch.float32)
        export_bundle(make(), example, folder, name=name, target=target)
    bundle = Bundle.open(folder)
    if "train.pte" in bundle.manifest.parts:
        return bundle, None
    start = time.process_time()
    return add_parts(bundle, progress=typer.echo), time.process_time() - start


def distances(bundle: Bundle, trainers: dict[str, Trainer], n: int, draw: int = 0) -> dict[str, float]:
    """How far each backend's gradient is from PyTorch's on a batch of `n`, over its length."""
    model, (x, y) = bundle.model(), samples(bundle.manifest, n, draw, CHARACTERS)
    made = {k: t.gradient(model.parameters, model.buffers, x, y).parameters.copy() for k, t in trainers.items()}
    truth = made["torch"]
    return {k: float(np.linalg.norm(g - truth) / np.linalg.norm(truth)) for k, g in made.items()}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """One row of the result."""
    _, _, _, steps, aim = MODELS[name]
    bundle, lowering = bundle_of(name, folder)
    model, (x, y) = bundle.model(), samples(bundle.manifest, BATCH, 0, CHARACTERS)
    trainers = {backend: open_trainer(backend, bundle) for backend in BACKENDS}
    calls = [partial(t.gradient, model.parameters, model.buffers, x, y) for t in trainers.values()]
    taken = in_turns(calls, steps, warm_up=2).cpu  # the first turns open the programs
    errors = distances(bundle, trainers, BATCH)
    ms = dict(zip(trainers, np.median(taken, axis=1).tolist(), strict=True))
    ratio = ms["executorch"] / ms["torch"]
    return {
        "model": name,
        "parameters": bundle.manifest.d,
        "batch": BATCH,
        "steps": steps,
        "milliseconds": {k: round(v, 3) for k, v in ms.items()},
        "executorch_over_torch": round(ratio, 3),
        "aim": aim,
        "reached": ratio <= aim,
        "gradient_error": errors["executorch"],
        "gradient_error_onnxruntime": errors["onnxruntime"],
        "gradient_error_few": min(distances(bundle, trainers, FEW, draw)["executorch"] for draw in range(4)),
        "bytes": {part: bundle.manifest.parts[part].size for part in ("train.pte", "eval.pte")},
        "lowering_cpu_seconds": None if lowering is None else round(lowering, 1),
    }


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    only: Annotated[str | None, typer.Option(help="Only these models, comma-separated.")] = None,
    bundles: Annotated[Path | None, typer.Option(help="Folder that keeps the exported bundles.")] = None,
) -> None:
    """Measure a training step by ExecuTorch beside PyTorch's and ONNX Runtime's."""
    check_writable(json_file)
    check_installed()
    torch.set_num_threads(1)
    origin = provenance.origin()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in known_names(only, "--only", MODELS, "there is no model"):
            rows.append(measure(name, (bundles or Path(folder)) / name))
            r = rows[-1]
            typer.echo(f"{name}: {r['milliseconds']} ms, ExecuTorch over PyTorch {r['executorch_over_torch']}")
    write_json(json_file, {**origin, "threads": 1, "clock": "CPU time of the process", "rows": rows})


if __name__ == "__main__":
    run_module(main)
