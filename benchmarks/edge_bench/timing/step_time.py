"""Time of a training step: ``python -m edge_bench.timing.step_time --json FILE`` (needs torch; about two minutes).

For each model, on one thread and one batch of noise: a PyTorch eager step (forward, backward), and per backend the
gradient, the plain step (gradient and SGD with momentum), FedMask's step at its default settings (gate, gradient,
gate's backward, SGD on the scores) without and with group lasso, the plain step with Adam, and the Bernoulli methods'
step (draw, gradient, gate's backward, Adam on the scores). Masked steps are compiled (extra `fast`), or by numpy alone
(`_numpy`). The variants take turns in bursts. A burst of the MLP has 45 steps from fresh scores, as many as a HAR
device makes in a round. The first step of a burst is not counted: in training too, a step finds the state of the
previous one in the cache. The clock is the process's CPU time, so another process's share is not counted. Figures are
medians, and what counts are the ratios:

    onnxruntime_over_eager   gradient by ONNX Runtime / PyTorch eager step
    mask_over_plain          masked step / plain step of the same backend, and the same with lasso
    sampled_over_plain_adam  Bernoulli step / plain step with Adam
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from edge_export import export_bundle
from torch import nn

from edge_bench import models, provenance
from edge_bench.command_line import check_writable, known_names, run_module, write_json
from edge_client.bundle import Bundle, Tensor
from edge_client.methods.fedmask.method import FedMask
from edge_client.targets import Classification
from edge_client.training import open_trainer
from edge_client.training.gates import Bernoulli, GroupLasso, SigmoidThreshold
from edge_client.training.sgd import Adam, Sgd
from edge_client.training.steps import MaskedStep, masked_step

FEDMASK, SETTINGS = FedMask(), FedMask.drawn
MASKED = {"mask": 0.0, "mask_lasso": SETTINGS.group_lasso}  # strength of the lasso
WAYS = {"": True, "_numpy": False}  # compiled or not
BACKENDS = ("onnxruntime", "torch")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int, int]] = {
    # name: module, one sample, classes, batch, steps of a burst, bursts measured
    "mlp 1152-300-100-6": (partial(models.mlp, *models.HAR), (1152,), 6, 32, 45, 8),
    "small cnn": (models.small_cnn, (1, 28, 28), 10, 32, 8, 6),
    "vgg9": (models.vgg9, (1, 32, 32), 10, 32, 4, 2),
}


def steps(bundle: Bundle, backend: str, x: Any, y: Any, burst: int) -> dict[str, Callable[[], object]]:
    """The variants of one backend, each a call that does one whole step."""
    trainer, model = open_trainer(backend, bundle), bundle.model()
    m, frozen = bundle.manifest, model.parameters
    layers = [m.tensors[w] for layer in m.layers for w in layer.weights]

    def plain_step(optimiser: Sgd | Adam) -> Callable[[], object]:
        moved = frozen.copy()
        return lambda: optimiser.step(moved, trainer.gradient(moved, model.buffers, x, y).parameters)

    def mask_step(lasso: float, compiled: bool) -> Callable[[], object]:
        def layer(t: Tensor) -> MaskedStep:
            scores, sgd = np.full(t.size, FEDMASK.radius, np.float32), Sgd(t.size, SETTINGS.lr, FEDMASK.momentum)
            penalty = GroupLasso(t.shape, lasso) if lasso else None
            return masked_step(SigmoidThreshold(), frozen[t.span], scores, sgd, penalty, compiled)

        return masked(lambda: [(t.span, layer(t)) for t in layers], draws=False)

    def sampled_step(compiled: bool) -> Callable[[], object]:
        span = slice(layers[0].span.start, layers[-1].span.stop)

        def whole() -> MaskedStep:
            scores = np.random.default_rng(0).standard_normal(span.stop - span.start).astype(np.float32)
            return masked_step(Bernoulli(), frozen[span], scores, Adam(scores.size, 0.1), compiled=compiled)

        return masked(lambda: [(span, whole())], draws=True)

    def masked(fresh: Callable[[], list[tuple[slice, MaskedStep]]], draws: bool) -> Callable[[], object]:
        values, current, done = frozen.copy(), fresh(), 0

        def step() -> None:
            nonlocal current, done
            if done % burst == 0:
                current = fresh()
            for span, layer in current:
                if draws or done % burst == 0:
                    layer.effective(values[span], done)
            done += 1
            gradient = trainer.gradient(values, model.buffers, x, y).parameters
            for span, layer in current:
                layer.step(gradient[span], None if draws else values[span])

        return step

    return {
        "gradient": lambda: trainer.gradient(frozen, model.buffers, x, y),
        "plain": plain_step(Sgd(m.d, 0.01, 0.9)),
        "plain_adam": plain_step(Adam(m.d, 0.001)),
        **{kind + way: mask_step(lasso, fast) for kind, lasso in MASKED.items() for way, fast in WAYS.items()},
        **{"sampled" + way: sampled_step(fast) for way, fast in WAYS.items()},
    }


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Medians in milliseconds and ratios of one model."""
    make, sample, classes, size, burst, bursts = MODELS[name]
    module = make().train()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *sample)).astype(np.float32)
    y = rng.integers(0, classes, size)
    batch, labels = torch.from_numpy(x), torch.from_numpy(y)
    bundle = export_bundle(module, batch, folder, name=name, target=Classification(classes=classes), seed=0)

    def eager() -> None:
        module.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(batch), labels))

    variants: dict[str, Callable[[], object]] = {"eager": eager}
    for backend in BACKENDS:
        variants |= {f"{backend}.{k}": f for k, f in steps(bundle, backend, x, y, burst).items()}
    taken: dict[str, list[float]] = {k: [] for k in variants}
    for i in range(bursts + 1):
        for key, step in variants.items():
            for j in range(burst):
                start = time.process_time()
                step()
                if i and j:  # the first round opens sessions, the first step of a burst fetches its own state
                    taken[key].append(time.process_time() - start)
    ms = {k: 1e3 * median(v) for k, v in taken.items()}
    ratios = {"onnxruntime_over_eager": ms["onnxruntime.gradient"] / ms["eager"]}
    for b in BACKENDS:
        for way in WAYS:
            for kind in MASKED:
                ratios[f"{b}.{kind}{way}_over_plain"] = ms[f"{b}.{kind}{way}"] / ms[f"{b}.plain"]
            ratios[f"{b}.sampled{way}_over_plain_adam"] = ms[f"{b}.sampled{way}"] / ms[f"{b}.plain_adam"]
    return {
        "parameters": bundle.manifest.d,
        "batch": size,
        "bursts": bursts,
        "milliseconds": {k: round(v, 4) for k, v in ms.items()},
        "ratios": {k: round(v, 3) for k, v in ratios.items()},
    }


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Write the figures here.")],
    only: Annotated[str | None, typer.Option(help="Only these models, comma-separated.")] = None,
) -> None:
    """Measure, print the ratios, write the JSON."""
    torch.set_num_threads(1)
    check_writable(json_file)
    origin = provenance.origin()
    chosen = known_names(only, "--only", MODELS, "there is no model")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for i, name in enumerate(chosen):
            found[name] = measure(name, Path(scratch) / str(i))
            print(name, json.dumps(found[name]["ratios"]), flush=True)
    write_json(json_file, {**origin, "threads": 1, "clock": "CPU time of the process", "models": found})


if __name__ == "__main__":
    run_module(main)
