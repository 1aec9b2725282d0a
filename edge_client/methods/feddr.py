"""FedDR: federated averaging by Douglas-Rachford splitting, without a regulariser (g = 0).

Tran-Dinh, Pham, Phan, Nguyen, "FedDR: Randomized Douglas-Rachford Splitting Algorithms for Nonconvex Federated
Composite Optimization", NeurIPS 2021, as its public code runs it. Round t on device k, with x and y of its last round:

    y = y + alpha (theta - x)                       theta itself in its first round
    x = argmin f_k + |x - y|^2 / (2 eta)            a few epochs of SGD from y
    send the reflection xhat = 2 x - y

The server averages the reflections. A fixed point has theta = x_k on every device and sum_k grad f_k(theta) = 0, also
where the devices' own optima differ.

- Down: the global model; up: the reflection; payloads and codecs are those of FedAvg. x and y stay on the device.
- FedMap without pruning and with `dr` is the same algorithm with the mean change as its downlink; this file is the one
  whose devices may miss rounds without a whole downlink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from edge_client.bundle import F32
from edge_client.methods.fedavg import FedAvg, State, Update, train
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Local, Personal, Task


@dataclass(frozen=True)
class Kept:
    """A device's trained model x and the point y that its proximal step started from, float32[d]."""

    x: F32
    y: F32


class FedDR(FedAvg):
    """FedAvg with a proximal step around y and its reflection in the place of the trained model."""

    name: ClassVar[str] = "feddr"
    kept_type: ClassVar[type[Kept] | None] = Kept

    feedback: Literal[False] = False
    """The reflection is no change that a residual could be added to."""
    eta: Annotated[float, Field(gt=0, le=1e9)] = 1000.0
    """The larger, the less the proximal term holds x near y."""
    alpha: Annotated[float, Field(gt=0, lt=10)] = 0.95
    weights: Literal["uniform", "samples"] = "uniform"
    """`samples`: a device counts as its training samples."""

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> Update:
        """As in FedAvg; every device weighs the same unless the samples count."""
        u = super().read_update(a, state, record, payload)
        return u if self.weights == "samples" else Update(u.parameters, u.buffers, 1.0)

    def local_round(self, task: Task, kept: Any, received: State) -> Local:
        """The splitting step: y, then x by SGD on the loss with the proximal term, then the reflection."""
        y = received.parameters
        if kept is not None and kept.x.shape == kept.y.shape == y.shape:
            y = kept.y + np.float32(self.alpha) * (y - kept.x)
        start = State(y, received.buffers)
        x, buffers, loss = train(task, start, self.lr, self.momentum, self.epochs, self.batch, pull=1 / self.eta)
        update, _ = self.update(task, None, received, State(2 * x - y, buffers))
        return Local(Kept(x, y), update, Personal(x, buffers), loss)
