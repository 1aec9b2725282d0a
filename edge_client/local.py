"""One round on a device, whoever asked for it: train, evaluate before and after, put the figures in the update.

The HTTP client and the simulator call this same function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.methods import Method, Personal, Task
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


def accuracy(trainer: Trainer, personal: Personal, x: NDArray[Any], y: NDArray[np.int64]) -> float:
    """Fraction of samples whose largest logit is the label's; 0.0 when there are none."""
    right = 0
    for low in range(0, len(y), EVAL_BATCH):
        logits = trainer.logits(personal.parameters, personal.buffers, x[low : low + EVAL_BATCH])
        right += int((logits.argmax(axis=1) == y[low : low + EVAL_BATCH]).sum())
    return right / len(y) if len(y) else 0.0


def run_round(method: Method, task: Task, kept: Arrays, downlink: Payload) -> Outcome:
    """Train one round and evaluate the model before and after it on the device's own test samples."""
    data = task.data
    before = accuracy(task.trainer, method.personal(task, kept, downlink), data.x_test, data.y_test)
    local = method.local_round(task, kept, downlink)
    metrics = DeviceMetrics(
        samples=len(data.y),
        test_samples=len(data.y_test),
        loss=local.loss,
        accuracy_before=before,
        accuracy_after=accuracy(task.trainer, local.trained, data.x_test, data.y_test),
    )
    meta = {**local.update.meta, **metrics.model_dump()}
    return Outcome(local.kept, replace(local.update, meta=meta), metrics)
