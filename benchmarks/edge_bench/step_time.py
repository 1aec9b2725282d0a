"""Time of a training step: ``python -m edge_bench.step_time --json FILE`` (needs torch; about two minutes).

For each model, on one thread and one batch of noise: a PyTorch eager step (forward, backward), and per backend the
gradient, the plain step (gradient and SGD with momentum) and FedMask's step at its default settings (gate, gradient,
gate's backward, SGD on the scores) without and with group lasso, all weights live or the last two layers pruned. The
scores start anew every 45 steps, as many as a HAR device makes in a round: at the radius, or `grown`, as they are after
ten rounds of a device that keeps its own (`restart = "latent"`, lr 30). Then a plain step with Adam and that of the
Bernoulli methods (draw, gradient, gate's backward, Adam on the scores). Masked steps are compiled (extra `fast`), or
by numpy alone (`_numpy`). All variants are interleaved in bursts of a few steps, the first of which is not counted (in
training too a step finds the state of the one before in the cache); the clock is the process's CPU time, so that
another process's share is not counted; figures are medians, and what counts are the ratios:

    onnxruntime_over_eager   gradient by ONNX Runtime / PyTorch eager step
    mask_over_plain          mask step / plain step of the same backend, and the same with lasso, pruned, grown
    sampled_over_plain_adam  Bernoulli step / plain step with Adam
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from edge_export import export_bundle
from torch import nn

from edge_bench import models, provenance
from edge_client.bundle import Bundle, Tensor
from edge_client.methods.fedmask import FedMask
from edge_client.training import open_trainer
from edge_client.training.compiled import CompiledMaskedSgd, CompiledSampledAdam
from edge_client.training.masked_sgd import MaskedSgd
from edge_client.training.sampled_adam import SampledAdam
from edge_client.training.sgd import Adam, Sgd

BURST = 4  # steps of one variant in a row, as in training: the state of all of them together overflows the cache
ROUND = 45  # steps between two fresh starts of the scores
FEDMASK = FedMask()
KINDS = (  # name, group lasso, what is kept of the last two layers, standard deviation of the first scores
    ("mask", 0.0, 1.0, 0.0),
    ("mask_grown", 0.0, 1.0, 1.0),
    ("mask_lasso", FEDMASK.group_lasso, 1.0, 0.0),
    ("mask_lasso_pruned", FEDMASK.group_lasso, FEDMASK.keep, 0.0),
    ("mask_lasso_grown", FEDMASK.group_lasso, 1.0, 1.0),
)
StepOf = type[MaskedSgd] | type[CompiledMaskedSgd]
BACKENDS = ("onnxruntime", "torch")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    # name: module, one sample, classes, batch, bursts measured
    "mlp 1152-300-100-6": (models.har_mlp, (1152,), 6, 32, 80),
    "mlp 1152-300-100-6, batch 128": (models.har_mlp, (1152,), 6, 128, 40),
    "small cnn": (models.small_cnn, (1, 28, 28), 10, 32, 12),
    "vgg9": (models.vgg9, (1, 32, 32), 10, 32, 2),
}


def steps(bundle: Bundle, backend: str, x: Any, y: Any) -> dict[str, Callable[[], object]]:
    """The variants of one backend, each a call that does one whole step."""
    trainer, model = open_trainer(backend, bundle), bundle.model()
    m, d = bundle.manifest, bundle.manifest.d
    layers = [m.tensors[w] for layer in m.layers for w in layer.weights]
    plain, frozen = model.parameters.copy(), model.parameters
    plain_sgd = Sgd(d, 0.01, 0.9)

    def plain_step() -> None:
        plain_sgd.step(plain, trainer.gradient(plain, model.buffers, x, y).parameters)

    def mask_step(step_of: StepOf, lasso: float, keep: float, spread: float) -> Callable[[], object]:
        effective, done = frozen.copy(), 0

        def fresh(i: int, t: Tensor) -> tuple[slice, MaskedSgd | CompiledMaskedSgd]:
            rng = np.random.default_rng(i)
            scores = np.full(t.size, FEDMASK.radius, np.float32)
            if spread:
                scores[:] = rng.normal(0, spread, t.size)
            if i >= len(layers) - 2:
                scores[rng.random(t.size) >= keep] = -np.inf
            own = effective[t.span]
            return t.span, step_of(frozen[t.span], scores, own, t.shape, FEDMASK.lr, FEDMASK.momentum, lasso)

        masked: list[tuple[slice, MaskedSgd | CompiledMaskedSgd]] = []

        def step() -> None:
            nonlocal done
            if done % ROUND == 0:
                masked[:] = [fresh(i, t) for i, t in enumerate(layers)]
            done += 1
            gradient = trainer.gradient(effective, model.buffers, x, y).parameters
            for span, layer in masked:
                layer.step(gradient[span])

        return step

    adam, moved = Adam(d, 0.001), frozen.copy()

    def adam_step() -> None:
        adam.step(moved, trainer.gradient(moved, model.buffers, x, y).parameters)

    def sampled_step(steps_of: type[SampledAdam] | type[CompiledSampledAdam]) -> Callable[[], object]:
        effective, span = frozen.copy(), slice(layers[0].span.start, layers[-1].span.stop)
        scores = np.random.default_rng(0).standard_normal(span.stop - span.start).astype(np.float32)
        sampled = steps_of(frozen[span], scores, 0.1)
        own, done = effective[span], 0

        def step() -> None:
            nonlocal done
            done += 1
            sampled.sample(done, own)
            sampled.step(trainer.gradient(effective, model.buffers, x, y).parameters[span].copy())

        return step

    return {
        "plain_adam": adam_step,
        "sampled": sampled_step(CompiledSampledAdam),
        "sampled_numpy": sampled_step(SampledAdam),
        "gradient": lambda: trainer.gradient(model.parameters, model.buffers, x, y),
        "plain": plain_step,
        **{
            kind + suffix: mask_step(step_of, lasso, keep, spread)
            for kind, lasso, keep, spread in KINDS
            for suffix, step_of in (("", CompiledMaskedSgd), ("_numpy", MaskedSgd))
        },
    }


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Medians in milliseconds and ratios of one model."""
    make, sample, classes, size, bursts = MODELS[name]
    module = make().train()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *sample)).astype(np.float32)
    y = rng.integers(0, classes, size)
    batch, labels = torch.from_numpy(x), torch.from_numpy(y)
    bundle = export_bundle(module, batch, folder, name=name, classes=classes, seed=0)

    def eager() -> None:
        module.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(batch), labels))

    variants: dict[str, Callable[[], object]] = {"eager": eager}
    for backend in BACKENDS:
        variants |= {f"{backend}.{k}": f for k, f in steps(bundle, backend, x, y).items()}
    taken: dict[str, list[float]] = {k: [] for k in variants}
    for i in range(bursts + 1):
        for key, step in variants.items():
            for j in range(BURST):
                start = time.process_time()
                step()
                if i and j:  # the first round opens sessions, the first step of a burst fetches its own state
                    taken[key].append(time.process_time() - start)
    ms = {k: 1e3 * median(v) for k, v in taken.items()}
    ratios = {"onnxruntime_over_eager": ms["onnxruntime.gradient"] / ms["eager"]}
    for b in BACKENDS:
        for kind in (kind + suffix for kind, *_ in KINDS for suffix in ("", "_numpy")):
            ratios[f"{b}.{kind}_over_plain"] = ms[f"{b}.{kind}"] / ms[f"{b}.plain"]
        for kind in ("sampled", "sampled_numpy"):
            ratios[f"{b}.{kind}_over_plain_adam"] = ms[f"{b}.{kind}"] / ms[f"{b}.plain_adam"]
    return {
        "parameters": bundle.manifest.d,
        "batch": size,
        "bursts": bursts,
        "milliseconds": {k: round(v, 4) for k, v in ms.items()},
        "ratios": {k: round(v, 3) for k, v in ratios.items()},
    }


def main() -> None:
    """Measure, print the ratios, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m edge_bench.step_time", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **provenance.origin(" ".join(["python -m edge_bench.step_time", *sys.argv[1:]])),
        "threads": 1,
        "clock": "CPU time of the process",
        "models": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for i, name in enumerate(arguments.models):
            result["models"][name] = measure(name, Path(scratch) / str(i))
            print(name, json.dumps(result["models"][name]["ratios"]), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
