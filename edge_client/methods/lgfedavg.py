"""LG-FedAvg: local representations below, a global head above.

Liang, Liu, Liu, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020. The paper's public code decides where text and code differ.

- Rounds 1..`global_rounds` are federated averaging of everything: `parameters` and `buffers` both ways.
- From then on only the last `num_layers` layers are averaged: `head` float32, both ways. Everything else, the body, is
  trained and kept on each device, batch-norm statistics included.
- With a codec as setting `up` the change of these values goes up instead, ``change.CODEC`` (`value_changes`). The
  residual of `feedback` is that of all parameters, from the second phase on that of the head.
- Every device starts the second phase from the averaged model: a device without a record of this phase receives `body`
  and `statistics` once, beside the head. So does one that lost what it kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from edge_client.blocks import Blocks, frozen, rest, tensors
from edge_client.bundle import F32, Model
from edge_client.errors import ConfigError, LostError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.fedavg import read_state
from edge_client.methods.shared.averaging import Total, Update, Weights, added, influence, limited
from edge_client.methods.shared.value_changes import Coded
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, allow_only, count, vector
from edge_client.task import Assignment, Course, Local, Personal, Task

NOTHING: F32 = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Record:
    """The last round that a device took part in."""

    round: int


@dataclass(frozen=True)
class Kept:
    """A device's own body and statistics, empty in the first phase; with feedback its residual."""

    body: F32
    buffers: F32
    residual: F32 | None = None


class LGFedAvg(Coded):
    """Federated averaging first; then the last layers are averaged and the others stay on the device."""

    name: ClassVar[str] = "lgfedavg"
    search: ClassVar[Search] = {"lr": Range(0.003, 0.5, log=True), "num_layers": Range(1, 3)}
    state_type: ClassVar[type[Weights]] = Weights
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept
    usual_lr: ClassVar[float] = 0.1
    one_time_down: ClassVar[frozenset[str]] = frozenset({"body", "statistics"})

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 2
    """How many of the last maskable layers are global."""
    global_rounds: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Rounds of federated averaging of the whole model before."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=65536)] = 50
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def head(self, model: Model) -> Blocks:
        """The weights and biases that stay global. Raises ConfigError when no layer would be local."""
        layers = model.manifest.layers
        if self.num_layers >= len(layers):
            raise ConfigError(
                f"num_layers = {self.num_layers}, but the model has {len(layers)} layers, and one at least stays local"
            )
        names = {n for layer in layers[-self.num_layers :] for n in (*layer.weights, *layer.biases)}
        return tensors(model.manifest, names)

    def body(self, model: Model) -> Blocks:
        """Every other trained tensor."""
        return rest(model.manifest, self.head(model))

    def whole(self, round_: int) -> bool:
        """Everything travels in this round."""
        return round_ <= self.global_rounds

    # --- server half

    def start(self, course: Course) -> Weights:
        self.head(course.model)
        return Weights(course.model.parameters.copy(), course.model.buffers.copy())

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        if self.whole(round_):
            return "global"
        return "head" if record is not None and not self.whole(record.round) else "head and body"

    def downlink(self, course: Course, round_: int, state: Weights, record: Record | None) -> Payload:
        audience, model = self.audience(course, round_, record), course.model
        if audience == "global":
            return Payload({"parameters": state.parameters, "buffers": state.buffers})
        head = {"head": self.head(model).gather(state.parameters)}
        if audience == "head":
            return Payload(head)
        return Payload({**head, "body": self.body(model).gather(state.parameters), "statistics": state.buffers})

    def stays(self, course: Course) -> str | None:
        return None if self.whole(course.rounds) else "only the last layers are shared, the rest stays on the devices"

    def caution(self, course: Course) -> str | None:
        if not self.whole(course.rounds):
            return None
        return (
            f"global_rounds = {self.global_rounds} covers all {course.rounds} rounds, so everything is federated "
            f"averaging; set global_rounds below {course.rounds}"
        )

    def exchanged(self, course: Course) -> int:
        return course.model.manifest.d if self.global_rounds else self.head(course.model).size

    def update_limit(self, course: Course) -> int:
        """The whole model while `global_rounds` last."""
        statistics = 4 * course.model.manifest.buffers_d if self.global_rounds else 0
        return self.uplink.limit(self.exchanged(course)) + statistics

    def read_update(self, a: Assignment, state: Weights, record: Record | None, payload: Payload) -> Update:
        """The whole model, or a head without statistics."""
        samples, own = count(payload, "samples", MAX_SAMPLES), self.received_part(a, state).parameters
        fixed = frozen(a.model.manifest)
        if self.whole(a.round):
            parameters = self.uplink.read(a, "parameters", payload, own, fixed, "buffers")
            return Update(parameters, vector(payload, "buffers", a.model.manifest.buffers_d), samples)
        return Update(self.uplink.read(a, "head", payload, own, self.head(a.model).gather(fixed)), NOTHING, samples)

    def received_part(self, a: Assignment, state: Weights) -> Weights:
        """What this round's updates replace."""
        return state if self.whole(a.round) else Weights(self.head(a.model).gather(state.parameters), NOTHING)

    def influence(self, a: Assignment, state: Weights, update: Update) -> Influence:
        return influence(self.received_part(a, state), update)

    def limited(self, a: Assignment, state: Weights, update: Update, scale: float, weight: float) -> Update:
        """The changes of parameters and statistics times `scale`."""
        return limited(self.received_part(a, state), update, scale, weight)

    def fold(
        self, a: Assignment, state: Weights, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        """Add n_k w_k and n_k, of the whole model or of the head."""
        return added(total, update.samples, update.parameters, update.buffers), Record(a.round)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: Weights, total: Total
    ) -> tuple[Weights, Mapping[str, Record]]:
        """The mean model; in the second phase the mean head beside the body of the first."""
        parameters, buffers = total
        if self.whole(round_):
            return Weights(parameters.value, buffers.value), {}
        mean = state.parameters.copy()
        self.head(course.model).scatter(parameters.value, mean)
        return Weights(mean, state.buffers), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Weights:
        """The device's model of the round: as received, with its own body in the second phase."""
        if self.whole(a.round):
            return read_state(a.model, downlink)
        head, body = self.head(a.model), self.body(a.model)
        allow_only(downlink, "head", "body", "statistics")
        if kept is not None and (kept.body.size != body.size or kept.buffers.shape != a.model.buffers.shape):
            kept = None
        if "body" in downlink.arrays:
            buffers = vector(downlink, "statistics", a.model.manifest.buffers_d)
            sent = Kept(vector(downlink, "body", body.size), buffers)
            kept = kept or sent  # a device that was left out after its first update with a head keeps its body
        if kept is None:
            raise LostError("a head without a body was received, and this device holds no body of this model")
        parameters = a.model.parameters.copy()
        head.scatter(vector(downlink, "head", head.size), parameters)
        body.scatter(kept.body, parameters)
        return Weights(parameters, kept.buffers)

    def local_round(self, task: Task, kept: Kept | None, received: Weights) -> Local:
        """A few epochs of SGD on all layers, whichever of them travel."""
        a, model = task.assignment, task.assignment.model
        parameters, buffers, loss = self.descend(task, received)
        trained = Personal(parameters, buffers)
        residual, fixed = None if kept is None else kept.residual, frozen(model.manifest)
        if self.whole(a.round):
            sent, left = self.uplink.send(a, "parameters", parameters, received.parameters, fixed, residual)
            own = None if left is None else Kept(NOTHING, NOTHING, left)
            return Local(own, Payload({**sent, "buffers": buffers}), trained, loss)
        head = self.head(model)
        if residual is not None and residual.size == model.manifest.d:  # of the first phase
            residual = head.gather(residual)
        after, before = head.gather(parameters), head.gather(received.parameters)
        sent, left = self.uplink.send(a, "head", after, before, head.gather(fixed), residual)
        return Local(Kept(self.body(model).gather(parameters), buffers, left), Payload(sent), trained, loss)

    def personal(self, task: Task, kept: Kept | None, received: Weights) -> Personal:
        """The device's body under the global head."""
        return Personal(received.parameters, received.buffers)
