"""One round on a device, whoever asked for it: train, evaluate before and after, put the figures in the update.

The HTTP client and the simulator call this same function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from edge_client.errors import ConfigError, first_fault
from edge_client.methods import Local, Method, Personal, Task, origin
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training import Trainer

EVAL_BATCH = 512  # samples per forward pass: bounds a device's memory, changes no result


@dataclass(frozen=True)
class Outcome:
    """What a device keeps, uploads and reports after one round."""

    kept: Arrays
    update: Payload
    metrics: DeviceMetrics


def correct(trainer: Trainer, personal: Personal, x: NDArray[Any], y: NDArray[np.int64]) -> int:
    """How many samples' largest logit is the label's."""
    right = 0
    for low in range(0, len(y), EVAL_BATCH):
        logits = trainer.logits(personal.parameters, personal.buffers, x[low : low + EVAL_BATCH])
        right += int((logits.argmax(axis=1) == y[low : low + EVAL_BATCH]).sum())
    return right


def accuracy(trainer: Trainer, personal: Personal, x: NDArray[Any], y: NDArray[np.int64]) -> float:
    """Fraction of samples whose largest logit is the label's; 0.0 when there are none."""
    return correct(trainer, personal, x, y) / max(1, len(y))


def run_round(method: Method, task: Task, kept: Arrays, downlink: Payload) -> Outcome:
    """Train one round and evaluate the model before and after it on the device's own test samples.

    A device that sat the round out reports no samples of either kind. Raises ConfigError when training has diverged:
    its loss is no figure that a coordinator takes.
    """
    local = method.local_round(task, kept, downlink)
    try:
        metrics = _figures(method, task, kept, downlink, local)
    except ValidationError as error:
        raise ConfigError(
            f"round {task.assignment.round} cannot be reported: {first_fault(error)}; if the training diverges, the "
            f"operator should lower the learning rate of {method.name!r}"
        ) from None
    meta = {**local.update.meta, **origin(method, task.assignment), **metrics.model_dump()}
    return Outcome(local.kept, replace(local.update, meta=meta), metrics)


def _figures(method: Method, task: Task, kept: Arrays, downlink: Payload, local: Local) -> DeviceMetrics:
    if not local.took_part:
        return DeviceMetrics(samples=0, loss=0.0, correct=[0, 0, 0])
    data = task.data
    models = method.personal(task, kept, downlink), local.trained
    right = [correct(task.trainer, m, data.x_test, data.y_test) for m in models]
    loss = float(f"{local.loss:.4g}")  # it travels as text
    return DeviceMetrics(samples=len(data.y), loss=loss, correct=[*right, len(data.y_test)])
