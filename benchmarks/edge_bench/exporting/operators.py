"""Every operator that export supports: ``python -m edge_bench.exporting.operators --json FILE`` (needs torch).

Each case of `cases` and each model of `MODELS` is exported; the export itself runs both graphs against the
module in float64 on batches of 16, 5 and 1. A row has the seconds of the process's CPU time and the largest errors of
a gradient, of a loss or statistic, and of an output. An error is the largest difference over the tensor's largest
entry. A row that failed has the sentence instead.

The cases take about two minutes on one core, the models about four.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from edge_export.writer import Graphs, proved_graphs
from torch import nn

from edge_bench import models, provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.exporting.cases import CASES, Case, Sequences
from edge_client.errors import ConfigError, ModelError
from edge_client.graph.check import check_file

MODELS = {
    "resnet20": Case(partial(models.Resnet, 20, 10), (3, 32, 32)),
    "vit-tiny": Case(models.VisionTransformer, (3, 32, 32)),
    "vgg9": Case(models.vgg9, (1, 32, 32)),
    "mobilenetv2": Case(models.MobileNetV2, (3, 32, 32)),
    "gru": Case(lambda: Sequences(nn.GRU(5, 64, 2, batch_first=True), 64), (40,), 11),
    "lstm": Case(partial(models.NextCharacter, 80), (80,), 80),
    "resnet56": Case(partial(models.Resnet, 56, 10), (3, 32, 32)),
}


def certify(module: nn.Module, example: torch.Tensor) -> tuple[Graphs, float]:
    """The proved graphs of `module` and the CPU seconds that they took. Raises ModelError."""
    with torch.no_grad():
        steps = module(example).ndim == 3  # a label for each step
    start = time.process_time()
    made = proved_graphs(module, example, {"kind": "sequence" if steps else "classification"})
    return made, time.process_time() - start


def row(module: nn.Module, example: torch.Tensor) -> dict[str, Any]:
    """One row of the results."""
    try:
        made, seconds = certify(module, example)
        with tempfile.TemporaryDirectory() as scratch:
            for part in ("train", "evaluation"):
                file = Path(scratch) / part
                file.write_bytes(getattr(made, part).SerializeToString())
                check_file(file, tuple(example.shape[1:]))
    except (ModelError, ValueError) as error:
        return {"refused": str(error)}
    return {
        "seconds": round(seconds, 2),
        "gradient": float(f"{made.shown.gradient:.1e}"),
        "statistic": float(f"{made.shown.statistic:.1e}"),
        "output": float(f"{made.shown.output:.1e}"),
        "train_nodes": len(made.train.graph.node),
        "eval_nodes": len(made.evaluation.graph.node),
    }


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Write the figures here.")],
    only: Annotated[list[str] | None, typer.Option(help="Only this case or model; may be given again.")] = None,
) -> None:
    """Export everything, print a line each, write the JSON."""
    check_writable(json_file)
    if unknown := sorted(set(only or ()) - MODELS.keys() - CASES.keys()):
        raise ConfigError(f"--only names {unknown}, which are neither models nor cases; leave it out to run them all")
    torch.set_num_threads(1)
    origin = provenance.origin()
    found: dict[str, dict[str, Any]] = {"models": {}, "cases": {}}
    for kind, cases in {"models": MODELS, "cases": CASES}.items():
        for name, case in cases.items():
            if not only or name in only:
                torch.manual_seed(0)
                found[kind][name] = row(case.make(), case.example())
                print(name, found[kind][name], flush=True)
                write_json(json_file, {**origin, "threads": 1, "clock": "CPU time of the process", **found})


if __name__ == "__main__":
    run_module(main)
