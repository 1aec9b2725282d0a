"""Training on this machine: one step (gradient and SGD), and one whole round of a method as in `maskfleet join`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.backends import DEFAULT_BACKEND, check_parts
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.device.local import run_round
from edge_client.methods import make_method
from edge_client.task import Assignment, Course, Task
from edge_client.training import open_trainer
from edge_client.training.sgd import Sgd

BATCH = 32
LR, MOMENTUM = 1e-4, 0.9  # small, so that thousands of steps on noise stay finite
SEED = 1


def made_data(bundle: Bundle, samples: int) -> DeviceData:
    """Noise with equal labels: speed does not depend on what the samples are."""
    m, rng = bundle.manifest, np.random.default_rng(0)
    shape = (samples, *m.input.shape)
    x: Any = np.zeros(shape, np.int64) if m.input.dtype == "int64" else rng.standard_normal(shape, np.float32)
    y = m.target.labels(samples)
    held = samples // 5
    return DeviceData(x[held:], y[held:], x[:0], y[:0], x[:held], y[:held])


@dataclass(frozen=True)
class Training:
    """Two calls without arguments, and what they do."""

    step: Callable[[], object]
    round: Callable[[], object]
    batch: int
    samples: int
    steps: int
    """Of one round."""
    method: dict[str, Any]
    backend: str


def training(bundle: Bundle, data: DeviceData, method: dict[str, Any], threads: int = 1) -> Training:
    """A step on one batch, and round 1 of `method`. Raises ConfigError, BundleError."""
    check_parts(DEFAULT_BACKEND, bundle.manifest)
    trainer, model = open_trainer(DEFAULT_BACKEND, bundle, threads), bundle.model()
    chosen = make_method(method)
    course = Course(model, SEED, 1, 1)
    a = Assignment(course, 1, "bench")
    downlink = chosen.downlink(course, 1, chosen.start(course), None)
    size = min(BATCH, len(data.y))
    values, buffers = model.parameters.copy(), model.buffers.copy()
    sgd, x, y = Sgd(bundle.manifest.d, LR, MOMENTUM), data.x[:size], data.y[:size]
    steps = 0

    def step() -> None:
        gradient = trainer.gradient(values, buffers, x, y)
        sgd.step(values, gradient.parameters)

    class Counting(Task):
        """Counts the steps of a round; a narrowed task counts on."""

        def gradient(self, *given: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().gradient(*given)

    run_round(chosen, Counting(a, trainer, data, SEED), {}, downlink)

    def whole() -> None:
        run_round(chosen, Task(a, trainer, data, SEED), {}, downlink)

    named = {"name": chosen.name, **chosen.model_dump(mode="json")}
    return Training(step, whole, size, len(data.y), steps, named, DEFAULT_BACKEND)
