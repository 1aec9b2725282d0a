"""Federated averaging: every device sends all its parameters, the server takes their mean.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017:
w <- sum_k (n_k / n) w_k. Every other method's bytes and scores are compared with it.

- Down: the global model, `parameters`; with a codec other than float32 as setting `down`, ``parameters.CODEC``. The
  codec's stream is (seed, "downlink values", round). Frozen values count as 0 there, and are the bundle's on a device.
- Up: the trained model, `parameters`. With a codec in either direction the trained model less the received one instead,
  `change`, with a codec as setting `up` as ``change.CODEC`` (`value_changes`). With `per_tensor` it codes every tensor
  by itself. The server keeps the exact model and adds the changes, so rounding errors of the downlinks do not
  accumulate.
- Batch-norm statistics travel both ways as `buffers` float32.
- With `server_momentum` the server's model moves beyond the mean where rounds agree (`accelerated`). A fixed momentum
  is FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
  Classification", 2019.
- With `average` the server sums the models of the last rounds, and the downlink after the last round is their mean.
  Rounds without a counted update are left out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from edge_kernels import counter
from edge_kernels.codecs import sparse, values
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.blocks import frozen
from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Influence, ValueCodecName
from edge_client.methods.shared.averaging import (
    Total,
    Update,
    Weights,
    accelerated,
    added,
    float32,
    influence,
    limited,
    window,
)
from edge_client.methods.shared.value_changes import PLAIN, Coded, Uplink, packed, tensor_ends, unpacked
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, count, vector
from edge_client.task import Assignment, Course, Local, Personal, Task


@dataclass(frozen=True)
class Sum:
    """The sum of `rounds` global models: `parameters` float64[d], `buffers` float64[buffers_d]."""

    parameters: NDArray[np.float64]
    buffers: NDArray[np.float64]
    rounds: int

    def then(self, model: Weights) -> Sum:
        """The sum with one more model in it."""
        return Sum(self.parameters + model.parameters, self.buffers + model.buffers, self.rounds + 1)

    @property
    def mean(self) -> State:
        """The mean of the models."""
        mean = (self.parameters / self.rounds).astype(np.float32)
        return State(mean, (self.buffers / self.rounds).astype(np.float32))


@dataclass(frozen=True)
class State(Weights):
    """The global model; from the first round of those whose mean is the final model, also their sum.

    With a momentum of the server `velocity` float32[d] is what it carries over from earlier rounds.
    """

    recent: Sum | None = None
    velocity: F32 | None = None


@dataclass(frozen=True)
class Kept:
    """What the codec `up` lost so far, float32[d], added to the next change."""

    residual: F32


class FedAvg(Coded):
    """Local SGD with momentum, then the mean over devices weighted by their samples."""

    name: ClassVar[str] = "fedavg"
    state_type: ClassVar[type[State]] = State
    kept_type: ClassVar[type[Any] | None] = Kept

    down: ValueCodecName = PLAIN
    """The value codec of what the server sends; one that loses much is refused."""
    per_tensor: bool = False
    """The codec `up` codes every tensor by itself and not all parameters together."""
    average: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the rounds whose mean model is the final one; 0: the last round's model."""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The most that the server's momentum may be; 0: the model moves to the mean of the devices' models."""

    @model_validator(mode="after")
    def _fit(self) -> FedAvg:
        if values.codec(self.down).coarse:
            raise ValueError(f"down = {self.down!r} loses too much of a model; it is for changes, as setting up")
        if self.up == PLAIN and self.per_tensor:
            raise ValueError("per_tensor is for codecs; name one in up")
        for name in ("average", "server_momentum"):
            if (value := getattr(self, name)) and not issubclass(self.state_type, State):
                raise ValueError(f"{name} = {value}: method {self.name} has a state of its own and no such step")
        return self

    @property
    def uplink(self) -> Uplink:
        """How the parameters travel up."""
        return Uplink(self.up, self.feedback, self.down == PLAIN, self.per_tensor)

    @property
    def largest(self) -> float:
        """The largest magnitude of a global parameter that the downlink can carry."""
        return values.codec(self.down).most

    # --- server half

    def start(self, course: Course) -> State:
        return State(course.model.parameters.copy(), course.model.buffers.copy())

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """The global model; after the last round the mean of those that `average` covers."""
        model: Weights = state
        if self.average and round_ > course.rounds and state.recent is not None:
            model = state.recent.mean
        stream, parameters = counter.key(course.seed, "downlink values", round_), model.parameters
        if self.down != PLAIN:
            parameters = np.where(frozen(course.model.manifest), np.float32(0), parameters)
        return Payload({**packed("parameters", self.down, parameters, stream), "buffers": model.buffers})

    def exchanged(self, course: Course) -> int:
        return course.model.manifest.d

    def paper_bytes(self, course: Course) -> tuple[int, int] | None:
        """Papers count Top-k's values without their places, and as many down."""
        name, _, fraction = self.up.partition(":")
        if name != "topk":
            return None
        share = float(fraction or 0.01)  # the codec's default
        ends = tensor_ends(course.model.manifest, self.per_tensor)
        size = 4 * sum(sparse.kept(int(n), share) for n in np.diff(ends, prepend=0))
        return size, size

    def update_limit(self, course: Course) -> int:
        """Four bytes a parameter and a statistic; the slack of a codec."""
        m = course.model.manifest
        return 4 * m.buffers_d + self.uplink.limit(m.d, len(self.uplink.ends(m)) or 1)

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> Update:
        """The device's model. Raises PayloadError, also for values that the codec of the downlink could not write."""
        m, fixed = a.model.manifest, frozen(a.model.manifest)
        parameters = self.uplink.read(a, "parameters", payload, state.parameters, fixed, "buffers")
        if self.down != PLAIN and float(np.abs(parameters[~fixed]).max(initial=0.0)) > self.largest:
            raise PayloadError(f"a parameter of {a.device!r} is beyond {self.down}'s range; lower the learning rate")
        return Update(parameters, vector(payload, "buffers", m.buffers_d), count(payload, "samples", MAX_SAMPLES))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        return influence(state, update)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """The changes of parameters and statistics times `scale`."""
        return limited(state, update, scale, weight)

    def fold(self, a: Assignment, state: State, total: Total | None, update: Update, record: Any) -> tuple[Total, Any]:
        """Add n_k w_k and n_k, in float64: with the fixed order of devices the mean is the same everywhere."""
        return added(total, update.samples, update.parameters, update.buffers), None

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Any]]:
        parameters, buffers = total
        now = State(parameters.value, buffers.value)
        if self.server_momentum:
            change = np.subtract(now.parameters, state.parameters, dtype=np.float64)
            old = np.zeros(change.size, np.float32) if state.velocity is None else state.velocity
            step, velocity = accelerated(change, old, self.server_momentum)
            now = State(float32(state.parameters + step, self.largest), now.buffers, velocity=float32(velocity))
        covered = window(self.average, course.rounds)
        if covered == 1 or round_ <= course.rounds - covered:
            return now, {}
        before = state.recent or Sum(np.zeros(now.parameters.size), np.zeros(now.buffers.size), 0)
        return replace(now, recent=before.then(now)), {}

    def of_device(self, course: Course, state: State, record: None, everyone: Personal) -> Personal | None:
        return everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> State:
        stream = counter.key(a.seed, "downlink values", a.round)
        return read_state(a.model, downlink, self.down, stream)

    def local_round(self, task: Task, kept: Kept | None, received: State) -> Local:
        """A few epochs of SGD from the global model."""
        trained, loss = self.train(task, received)
        update, left = self.update(task, kept, received, trained)
        return Local(left, update, Personal(trained.parameters, trained.buffers), loss)

    def update(self, task: Task, kept: Kept | None, received: Weights, trained: Weights) -> tuple[Payload, Kept | None]:
        """The trained model, or what it differs from the received one; what the device keeps."""
        a, residual = task.assignment, None if kept is None else kept.residual
        m = a.model.manifest
        sent, left = self.uplink.send(a, "parameters", trained.parameters, received.parameters, frozen(m), residual)
        return Payload({**sent, "buffers": trained.buffers}), None if left is None else Kept(left)

    def train(self, task: Task, start: Weights) -> tuple[Weights, float]:
        """The local epochs: the model after them and the last one's mean loss."""
        parameters, buffers, loss = self.descend(task, start)
        return Weights(parameters, buffers), loss

    def personal(self, task: Task, kept: Kept | None, received: State) -> Personal:
        """The global model as it is."""
        return Personal(received.parameters, received.buffers)


def read_state(model: Model, payload: Payload, codec: str = PLAIN, stream: int = 0) -> State:
    """`parameters` float32[d], or what `packed` wrote of them, and `buffers`, nothing else. Raises PayloadError."""
    parameters = unpacked(payload, "parameters", codec, model.manifest.d, stream, ("buffers",))
    if codec != PLAIN:
        parameters = np.where(frozen(model.manifest), model.parameters, parameters)
    return State(parameters, vector(payload, "buffers", model.manifest.buffers_d))
