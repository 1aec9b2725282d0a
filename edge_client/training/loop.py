"""The local epochs that methods share: the order of the batches and the loop over them.

What a step does to which vector is the method's part; how a step is computed is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.errors import DataError
from edge_client.methods import Task
from edge_client.training.sgd import Sgd


def batches(task: Task, batch: int, epoch: int, phase: str) -> Iterator[NDArray[np.int64]]:
    """Indices of each batch of one epoch; the last batch is smaller.

    The order is drawn from ``key(seed, "batches", phase, device, round, epoch)``.
    """
    a = task.assignment
    count = len(task.data.y)
    order = counter.permutation(counter.key(a.seed, "batches", phase, a.device, a.round, epoch), count)
    for low in range(0, count, batch):
        yield order[low : low + batch]


def train(
    task: Task,
    buffers: F32,
    effective: Callable[[], F32],
    step: Callable[[F32], None],
    epochs: int,
    batch: int,
    phase: str = "train",
) -> float:
    """Run `epochs` passes over the device's samples; return the mean loss of the last one, weighted by samples.

    For each batch `effective()` gives the parameters float32[d] to differentiate at and `step(gradient)` moves
    whatever they are made of. `buffers` follows the batch-norm statistics in place. Raises DataError when the
    loss or a statistic stops being finite, so that no NaN is ever uploaded.
    """
    mean = 0.0
    for epoch in range(epochs):
        total = 0.0
        for chosen in batches(task, batch, epoch, phase):
            g = task.trainer.gradient(effective(), buffers, task.data.x[chosen], task.data.y[chosen])
            total += g.loss * len(chosen)
            # The dot product is finite only if every entry is; a NaN in a score would show in no later loss.
            with np.errstate(over="ignore"):
                finite = np.isfinite(np.dot(g.parameters, g.parameters)), np.isfinite(g.buffers).all()
            if not np.isfinite(g.loss) or not all(finite):
                what = "the gradient overflowed" if not finite[0] else "a batch-norm statistic overflowed"
                what = what if np.isfinite(g.loss) else f"the loss became {g.loss}"
                raise DataError(
                    f"{what} in epoch {epoch + 1} of round {task.assignment.round}; "
                    "use a smaller learning rate, or look for outliers in the device's data"
                )
            buffers[:] = g.buffers
            step(g.parameters)
        mean = total / len(task.data.y)
    return mean


def train_parameters(
    task: Task, parameters: F32, buffers: F32, lr: float, momentum: float, epochs: int, batch: int
) -> float:
    """Plain SGD with momentum on all parameters, in place; returns the mean loss of the last epoch."""
    optimiser = Sgd(parameters.size, lr, momentum)
    return train(task, buffers, lambda: parameters, lambda g: optimiser.step(parameters, g), epochs, batch)
