"""Federated averaging: every device sends all its parameters, the server takes their mean.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017:
w <- sum_k (n_k / n) w_k. The full state travels, batch-norm statistics included, as float32 both ways.
It is the yardstick that every other method's bytes and accuracy are read against.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Method, Personal, Task, Total
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training.loop import train_parameters

BLOCK = 1 << 14  # values folded at a time


def read_state(model: Model, payload: Payload) -> Arrays:
    """`parameters` float32[d] and `buffers` float32[buffers_d], all finite, and nothing else. Raises PayloadError."""
    due = {"parameters": model.manifest.d, "buffers": model.manifest.buffers_d}
    if set(payload.arrays) != set(due):
        raise PayloadError(f"the payload holds arrays {sorted(payload.arrays)}; FedAvg sends {sorted(due)}")
    for name, size in due.items():
        a = payload.arrays[name]
        if a.dtype != np.float32 or a.shape != (size,):
            raise PayloadError(f"array {name!r} is {a.dtype}{list(a.shape)}; the model has float32[{size}]")
        if not np.isfinite(a).all():
            raise PayloadError(f"array {name!r} holds NaN or infinity; lower the learning rate")
    return dict(payload.arrays)


def read_samples(payload: Payload) -> int:
    """The samples a device says it trained on. Raises PayloadError when it is not a count."""
    samples = payload.meta.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 0 < samples <= MAX_SAMPLES:
        raise PayloadError(f"samples = {samples!r}; send how many samples were trained on, 1..{MAX_SAMPLES}")
    return samples


def add_weighted(total: NDArray[np.float64], weight: float, values: NDArray[np.float32]) -> None:
    """``total += weight * values`` in float64, a block that stays in the cache at a time."""
    product = np.empty(min(BLOCK, len(values)), np.float64)
    for low in range(0, len(values), BLOCK):
        block = values[low : low + BLOCK]
        part = np.multiply(block, weight, out=product[: len(block)], dtype=np.float64)
        total[low : low + BLOCK] += part


class FedAvg(Method):
    """Local SGD with momentum, then the mean over devices weighted by their samples."""

    name: ClassVar[str] = "fedavg"

    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    # --- server half

    def start(self, model: Model, seed: int) -> Arrays:
        """The bundle's initial values."""
        return {"parameters": model.parameters.copy(), "buffers": model.buffers.copy()}

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """The global state, the same for all."""
        return Payload(state)

    def exchanged(self, model: Model) -> int:
        """All parameters."""
        return model.manifest.d

    def update_limit(self, model: Model) -> int:
        """Four bytes a parameter and a statistic."""
        return 4 * (model.manifest.d + model.manifest.buffers_d)

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """The device's state and its number of samples."""
        return {**read_state(a.model, update), "samples": np.array([read_samples(update)], np.int64)}

    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Add n_k w_k and n_k, in float64: with the fixed order of devices the mean is the same everywhere."""
        samples = update["samples"]
        total.setdefault("samples", np.zeros(1, np.int64))
        total["samples"] += samples
        for name in state:
            mean = total.setdefault(name, np.zeros(update[name].shape, np.float64))
            add_weighted(mean, float(samples[0]), update[name])
        return total, record

    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """The weighted mean; the state stays when nobody reported."""
        if not total:
            return state
        return {name: (total[name] / total["samples"][0]).astype(np.float32) for name in state}

    # --- client half

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """A few epochs of SGD from the global state."""
        pulled = self.personal(task, kept, downlink)
        parameters, buffers = pulled.parameters.copy(), pulled.buffers.copy()
        loss = train_parameters(task, parameters, buffers, self.lr, self.momentum, self.epochs, self.batch)
        update = Payload({"parameters": parameters, "buffers": buffers}, {"samples": len(task.data.y)})
        return Local({}, update, Personal(parameters, buffers), loss)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The global model as it is."""
        state = read_state(task.assignment.model, downlink)
        return Personal(state["parameters"], state["buffers"])
