"""Lattice's local training: SGD with momentum, and by how much the received model is worse than the bundle's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_client.bundle import F32, Model
from edge_client.task import EpochLoss, Task
from edge_client.training.sgd import Sgd

LOWEST_RATE = 0.05  # of the cosine schedule, relative to the first


@dataclass(frozen=True)
class Plan:
    """How a device trains. With `cosine` the rate falls to 5 % over the epochs."""

    epochs: int
    batch: int
    rate: float
    momentum: float
    cosine: bool = False


@dataclass(frozen=True)
class Trained:
    """What local training leaves. `gain`: the first model's loss less that of `rival`, on the first batch."""

    parameters: F32
    buffers: F32
    loss: float
    gain: float


def train(
    task: Task, parameters: F32, buffers: F32, plan: Plan, phase: str = "train", rival: Model | None = None
) -> Trained:
    """Train the model of these values on the device's samples."""
    parameters, buffers = parameters.copy(), buffers.copy()
    optimiser, loss, gain = Sgd(parameters.size, plan.rate, plan.momentum), EpochLoss(), 0.0
    last = plan.epochs * -(-task.samples // plan.batch)
    for batch in task.batches(plan.epochs, plan.batch, phase):
        compared = rival if batch.index == 0 else None
        if compared is not None:
            gain -= task.gradient(compared.parameters, compared.buffers, batch).loss
        g = task.gradient(parameters, buffers, batch)
        if compared is not None:
            gain += g.loss
        loss.add(batch, g)
        buffers[:] = g.buffers
        if plan.cosine:
            wave = (1 + math.cos(math.pi * batch.index / last)) / 2
            optimiser.lr = plan.rate * (LOWEST_RATE + (1 - LOWEST_RATE) * wave)
        optimiser.step(parameters, g.parameters)
    return Trained(parameters, buffers, loss.mean, gain)
