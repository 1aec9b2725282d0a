"""Federated averaging: every device sends all its parameters, the server takes their mean.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017:
w <- sum_k (n_k / n) w_k. The full state travels, batch-norm statistics included, as float32 both ways.
It is the yardstick that every other method's bytes and scores are read against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Influence, Method
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.sgd import Sgd

BLOCK = 1 << 14  # values folded at a time, so that they stay in the cache


@dataclass(frozen=True)
class State:
    """The global model: `parameters` float32[d], `buffers` float32[buffers_d]."""

    parameters: F32
    buffers: F32


@dataclass(frozen=True)
class Update:
    """A device's model and the number of samples behind it."""

    parameters: F32
    buffers: F32
    samples: float


@dataclass
class Total:
    """Sums of n_k w_k in float64, and of n_k."""

    parameters: NDArray[np.float64]
    buffers: NDArray[np.float64]
    samples: float = 0.0


class FedAvg(Method):
    """Local SGD with momentum, then the mean over devices weighted by their samples."""

    name: ClassVar[str] = "fedavg"
    state_type: ClassVar[type[State]] = State

    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    # --- server half

    def start(self, course: Course) -> State:
        """The bundle's initial values."""
        return State(course.model.parameters.copy(), course.model.buffers.copy())

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """The global model, the same for all."""
        return Payload({"parameters": state.parameters, "buffers": state.buffers})

    def exchanged(self, model: Model) -> int:
        """All parameters."""
        return model.manifest.d

    def update_limit(self, model: Model) -> int:
        """Four bytes a parameter and a statistic."""
        return 4 * (model.manifest.d + model.manifest.buffers_d)

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> Update:
        """The device's model and its number of samples."""
        model = read_state(a.model, payload)
        return Update(model.parameters, model.buffers, read_samples(payload))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        """The norm of the change of the parameters, and the samples."""
        return Influence(float(np.linalg.norm(update.parameters - state.parameters)), update.samples)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """The change of parameters and statistics times `scale`."""
        factor = np.float32(scale)
        return Update(
            state.parameters + factor * (update.parameters - state.parameters),
            state.buffers + factor * (update.buffers - state.buffers),
            weight,
        )

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: None
    ) -> tuple[Total, None]:
        """Add n_k w_k and n_k, in float64: with the fixed order of devices the mean is the same everywhere."""
        if total is None:
            total = Total(np.zeros(state.parameters.size), np.zeros(state.buffers.size))
        add_weighted(total.parameters, update.samples, update.parameters)
        add_weighted(total.buffers, update.samples, update.buffers)
        return replace(total, samples=total.samples + update.samples), None

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, None]]:
        """The weighted mean."""
        means = (total.parameters / total.samples, total.buffers / total.samples)
        return State(*(m.astype(np.float32) for m in means)), {}

    # --- client half

    def receive(self, a: Assignment, kept: None, downlink: Payload) -> State:
        """The global model."""
        return read_state(a.model, downlink)

    def local_round(self, task: Task, kept: None, received: State) -> Local:
        """A few epochs of SGD from the global model."""
        parameters, buffers, loss = train(task, received, self.lr, self.momentum, self.epochs, self.batch)
        update = Payload({"parameters": parameters, "buffers": buffers}, {"samples": task.samples})
        return Local(None, update, Personal(parameters, buffers), loss)

    def personal(self, task: Task, kept: None, received: State) -> Personal:
        """The global model as it is."""
        return Personal(received.parameters, received.buffers)


def train(task: Task, start: State, lr: float, momentum: float, epochs: int, batch: int) -> tuple[F32, F32, float]:
    """SGD with momentum on all parameters: those after it, the statistics, and the last epoch's mean loss."""
    parameters, buffers = start.parameters.copy(), start.buffers.copy()
    optimiser, loss = Sgd(parameters.size, lr, momentum), EpochLoss()
    for step in task.batches(epochs, batch):
        g = task.gradient(parameters, buffers, step)
        loss.add(step, g)
        buffers[:] = g.buffers
        optimiser.step(parameters, g.parameters)
    return parameters, buffers, loss.mean


def read_state(model: Model, payload: Payload) -> State:
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
    return State(payload.arrays["parameters"], payload.arrays["buffers"])


def read_samples(payload: Payload) -> int:
    """The samples a device says it trained on. Raises PayloadError when it is not a count."""
    samples = payload.meta.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 0 < samples <= MAX_SAMPLES:
        raise PayloadError(f"samples = {samples!r}; send how many samples were trained on, 1..{MAX_SAMPLES}")
    return samples


def add_weighted(total: NDArray[np.float64], weight: float, values: F32) -> None:
    """``total += weight * values`` in float64, a block that stays in the cache at a time."""
    product = np.empty(min(BLOCK, len(values)), np.float64)
    for low in range(0, len(values), BLOCK):
        block = values[low : low + BLOCK]
        part = np.multiply(block, weight, out=product[: len(block)], dtype=np.float64)
        total[low : low + BLOCK] += part
