"""A method and a trainer that only move bytes: what `round_overhead` and `light_devices` run instead of training.

They are installed for those benchmarks' processes only, through the entry points that any third party uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32, Bundle, Model
from edge_client.errors import PayloadError
from edge_client.methods import Method
from edge_client.methods.shared.averaging import add_weighted
from edge_client.narrow import Channels
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Personal, Task
from edge_client.training import Gradient, Trainer
from edge_client.training.narrowed import Embedded

Values = NDArray[Any]  # float32[d], or d bits packed into uint8
DTYPES = {"float32": np.float32, "mask": np.uint8}


@dataclass(frozen=True)
class State:
    """The global values."""

    values: Values


@dataclass
class Total:
    """The sum over `count` devices: float64[d], or uint16[d] counts of the bits."""

    sum: NDArray[Any]
    count: int = 0


class Idle(Method):
    """Each device sends back what it received: float32[d], averaged, or d bits, of which the majority wins."""

    name: ClassVar[str] = "idle"
    state_type: ClassVar[type[State]] = State
    kind: Literal["float32", "mask"]

    def _size(self, model: Model) -> int:
        return model.manifest.d if self.kind == "float32" else -(-model.manifest.d // 8)

    def start(self, course: Course) -> State:
        """Random values, which no link compresses."""
        random, size = np.random.default_rng(course.seed), self._size(course.model)
        if self.kind == "float32":
            return State(random.standard_normal(size, np.float32))
        return State(random.integers(0, 256, size, dtype=np.uint8))

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """The global values."""
        return Payload({"values": state.values})

    def exchanged(self, course: Course) -> int:
        """All parameters."""
        return course.model.manifest.d

    def update_limit(self, course: Course) -> int:
        """The values' bytes."""
        return self._size(course.model) * np.dtype(DTYPES[self.kind]).itemsize

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> Values:
        """The values, checked as a real method checks them."""
        values = payload.arrays.get("values")
        if values is None or values.dtype != DTYPES[self.kind] or values.shape != state.values.shape:
            raise PayloadError(f"the update is not {self.kind}[{len(state.values)}]")
        if not np.isfinite(values).all():
            raise PayloadError("the update holds NaN or infinity")
        return values

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Values, record: None
    ) -> tuple[Total, None]:
        """Add the values, or the bits."""
        if self.kind == "float32":
            total = total or Total(np.zeros(len(update)))
            add_weighted(total.sum, 1.0, update)
        else:
            total = total or Total(np.zeros(8 * len(update), np.uint16))
            total.sum += np.unpackbits(update)
        total.count += 1
        return total, None

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Any]]:
        """Mean or majority."""
        if self.kind == "float32":
            return State(np.divide(total.sum, total.count, out=total.sum).astype(np.float32)), {}
        return State(np.packbits(2 * total.sum >= total.count)), {}

    def receive(self, a: Assignment, kept: None, downlink: Payload) -> Payload:
        """The values."""
        return downlink

    def local_round(self, task: Task, kept: None, received: Payload) -> Local:
        """Send them back."""
        return Local(None, Payload(dict(received.arrays)), self.personal(task, kept, received), 0.0)

    def personal(self, task: Task, kept: None, received: Payload) -> Personal:
        """The bundle's own values."""
        return Personal(task.assignment.model.parameters, task.assignment.model.buffers)


class IdleTrainer:
    """Answers at once: no loss, no gradient, outputs of 0."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.manifest = bundle.manifest

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        """Zero."""
        return Gradient(0.0, np.zeros_like(parameters), buffers)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        """Zero."""
        return np.zeros((len(x), *self.manifest.target.output), np.float32)

    def rest(self) -> None:
        """It holds nothing."""

    def narrow(self, kept: Channels) -> Trainer:
        """The same answers for fewer values."""
        return Embedded(self, kept)
