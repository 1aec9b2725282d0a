"""Linear probing: the backbone stays as the bundle has it, federated averaging trains the head alone.

The lower baseline of methods that start from a pre-trained network (DeltaMask, arXiv 2311.17299, table 2). The head is
the bundle's last layer, its weights and biases.

- Down and up: `head` float32. With a codec as setting `up` the head's change goes up,
  ``change.CODEC`` (`value_changes`).
- Batch-norm statistics follow a device's own training and stay there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from edge_client.blocks import head
from edge_client.bundle import F32, Model
from edge_client.errors import ConfigError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.shared.averaging import Mean, distance, toward
from edge_client.methods.shared.local_sgd import descend_on
from edge_client.methods.shared.value_changes import Coded
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, allow_only, count, vector
from edge_client.task import Assignment, Course, Local, Personal, Task
from edge_client.training.sgd import Sgd


@dataclass(frozen=True)
class State:
    """The global head, float32, in the order of the parameter table."""

    head: F32


@dataclass(frozen=True)
class Kept:
    """A device's own batch-norm statistics; with feedback its residual."""

    buffers: F32
    residual: F32 | None = None


@dataclass(frozen=True)
class Update:
    """A trained head and the number of samples behind it."""

    head: F32
    samples: float


class LinearProbing(Coded):
    """Local SGD with momentum on the head, then the mean over devices weighted by their samples."""

    name: ClassVar[str] = "linear_probing"
    search: ClassVar[Search] = {"lr": Range(0.003, 1.0, log=True)}
    state_type: ClassVar[type[State]] = State
    kept_type: ClassVar[type[Kept]] = Kept
    usual_lr: ClassVar[float] = 0.1

    epochs: Annotated[int, Field(ge=1, le=1000)] = 1

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("lattice or another method that trains every layer",)

    def exchanged(self, course: Course) -> int:
        return head(course.model.manifest).size

    # --- server half

    def start(self, course: Course) -> State:
        m = course.model.manifest
        if not m.layers or not head(m).blocks:
            raise ConfigError(f"bundle {m.name!r} has no trained layer to probe; choose another method")
        return State(head(m).gather(course.model.parameters))

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        return Payload({"head": state.head})

    def update_limit(self, course: Course) -> int:
        return self.uplink.limit(self.exchanged(course))

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> Update:
        trained = self.uplink.read(a, "head", payload, state.head, np.zeros(state.head.size, np.bool_))
        return Update(trained, count(payload, "samples", MAX_SAMPLES))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        return Influence(distance(update.head, state.head), update.samples)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """The head's change times `scale`."""
        return Update(toward(state.head, update.head, scale), weight)

    def fold(self, a: Assignment, state: State, total: Mean | None, update: Update, record: None) -> tuple[Mean, None]:
        total = total or Mean(state.head.size)
        total.add(update.samples, update.head)
        return total, None

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Mean
    ) -> tuple[State, Mapping[str, None]]:
        return State(total.value), {}

    def of_device(self, course: Course, state: State, record: None, everyone: Personal) -> Personal | None:
        return None if course.model.manifest.buffers else everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> State:
        allow_only(downlink, "head")
        return State(vector(downlink, "head", self.exchanged(a.course)))

    def local_round(self, task: Task, kept: Kept | None, received: State) -> Local:
        """Epochs of SGD on the head behind the frozen backbone."""
        m = task.assignment.model.manifest
        start, part = self.personal(task, kept, received), head(m)
        values, buffers = start.parameters, start.buffers.copy()
        optimiser = Sgd(part.size, self.learning_rate(task.assignment.model), self.momentum)
        batches = task.batches(self.epochs, self.batch)
        own, loss = descend_on(part, task, batches, values, buffers, optimiser)
        residual = None if kept is None else kept.residual
        fixed = np.zeros(part.size, np.bool_)  # what is frozen of the layer does not travel
        sent, left = self.uplink.send(task.assignment, "head", own, received.head, fixed, residual)
        return Local(Kept(buffers, left), Payload(sent), Personal(values, buffers), loss)

    def personal(self, task: Task, kept: Kept | None, received: State) -> Personal:
        """The bundle's backbone with the global head and the device's own statistics."""
        model = task.assignment.model
        values = model.parameters.copy()
        head(model.manifest).scatter(received.head, values)
        return Personal(values, model.buffers if kept is None else kept.buffers)
