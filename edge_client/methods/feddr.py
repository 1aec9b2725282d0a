"""FedDR: federated averaging by Douglas-Rachford splitting, without a regulariser (g = 0).

Tran-Dinh, Pham, Phan, Nguyen, "FedDR: Randomized Douglas-Rachford Splitting Algorithms for Nonconvex Federated
Composite Optimization", NeurIPS 2021. Round t on device k, with x and y of its last round:

    y = y + alpha (theta - x)                       theta itself in its first round
    x = argmin f_k + |x - y|^2 / (2 eta)            a few epochs of SGD from y
    send the reflection xhat = 2 x - y

theta is the mean of every device's last reflection, also of those that sit a round out: so a randomly drawn cohort has
the same fixed point, theta = x_k on every device and sum_k grad f_k(theta) = 0, also where the devices' own optima
differ. The paper starts with a reflection theta_0 of every device; here one counts from its first round on.

The authors' code (github.com/unc-optimization/FedDR, client_dr.py and pgd.py) has y only as the centre of the proximal
term: SGD goes on from the device's own last x, and the global model reaches a device through that term alone. Near a
minimum of the subproblem the start does not matter; after a few epochs with a large eta it does, since a weak term
brings no devices together that each go on from their own x. So here SGD starts at y, which has moved towards theta. In
that code reflections also weigh by samples, y starts at zero, and a device that has not trained counts as zero.

- Down: the global model; up: the reflection; payloads and codecs are those of FedAvg. x and y stay on the device. The
  server keeps each device's last reflection. That of a device that lost its state stays in the mean until the next one
  replaces it. That of a device that was removed stays for good; docs/methods/feddr.md has the effect.
- FedMap with `dr` takes these steps on the weights that remain, with the mean change as its downlink; here devices may
  miss rounds without a whole downlink.
- Local steps have no momentum, as in that code: x must end between y and the device's optimum, and momentum carries it
  beyond, which the reflection doubles. eta is 1; the larger, the less y can hold x back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32
from edge_client.methods.fedavg import FedAvg, State
from edge_client.methods.shared.averaging import Total, Update, added
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Personal, Task


@dataclass(frozen=True)
class Averaged(State):
    """The mean of the devices' last reflections. With weights `total` is their weighted sum, float64[d].

    Both are 0 before round 1. The sum is exact enough that a far reflection leaves nothing when it is replaced.
    """

    total: NDArray[np.float64] = field(kw_only=True)
    weight: float = 0.0


@dataclass(frozen=True)
class Reflection:
    """A device's last reflection, float32[d], and its weight in the mean."""

    values: F32
    weight: float


@dataclass(frozen=True)
class Kept:
    """A device's trained model x and the point y that its proximal step started from, float32[d]."""

    x: F32
    y: F32


def without(total: Total, last: Reflection | None, seen: Callable[[F32], F32] = lambda values: values) -> Total:
    """A sum of reflections without a device's last one, which another replaces; `seen` is what the sum has of it."""
    if last is not None:
        total.parameters.add(-last.weight, seen(last.values))
    return total


def following(kept: Kept, theta: F32, alpha: float) -> F32:
    """y of the next round: ``y + alpha * (theta - x)``."""
    moved: F32 = kept.y + np.float32(alpha) * (theta - kept.x)
    return moved


def reflected(x: F32, y: F32) -> F32:
    """The reflection of y at x, ``2 x - y``."""
    return 2 * x - y


class FedDR(FedAvg):
    """FedAvg with a proximal step around y and its reflection in the place of the trained model."""

    name: ClassVar[str] = "feddr"
    revision: ClassVar[int] = 2
    state_type: ClassVar[type[State]] = Averaged
    record_type: ClassVar[type[Reflection]] = Reflection
    kept_type: ClassVar[type[Kept] | None] = Kept
    usual_lr: ClassVar[float] = 0.05

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    feedback: Literal[False] = False
    """The reflection is no change that a residual could be added to."""
    eta: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """The larger, the less the proximal term holds x near y."""
    alpha: Annotated[float, Field(gt=0, le=2)] = 0.95
    """Relaxation of y: how far it moves towards the global model."""
    weights: Literal["uniform", "samples"] = "uniform"
    """`samples`: a device counts as its training samples."""

    def start(self, course: Course) -> Averaged:
        parameters = course.model.parameters.copy()
        return Averaged(parameters, course.model.buffers.copy(), total=np.zeros(parameters.size))

    def read_update(self, a: Assignment, state: State, record: Reflection | None, payload: Payload) -> Update:
        """As in FedAvg; every device weighs the same unless the samples count."""
        u = super().read_update(a, state, None, payload)
        return u if self.weights == "samples" else Update(u.parameters, u.buffers, 1.0)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Reflection | None
    ) -> tuple[Total, Reflection]:
        """Add a reflection; it replaces the device's last one in the mean."""
        total = added(total, update.samples, update.parameters, update.buffers)
        return without(total, record), Reflection(update.parameters, float(update.samples))

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[Averaged, Mapping[str, Reflection]]:
        """The mean of all devices' last reflections, of which `state` has those before the round."""
        assert isinstance(state, Averaged)
        mean = total.parameters  # of the round, then of all devices
        mean.sum += state.total
        mean.weight += state.weight
        now, _ = super().finish(course, round_, took_part, state, total)
        return Averaged(now.parameters, now.buffers, now.recent, now.velocity, mean.weight, total=mean.sum), {}

    def lost(self, record: Reflection) -> Reflection:
        """All of it: the reflection is still in the mean, and no downlink builds on it."""
        return record

    def local_round(self, task: Task, kept: Any, received: State) -> Local:
        """The splitting step: y, then x by SGD on the loss with the proximal term, then the reflection."""
        y = received.parameters
        if kept is not None and kept.x.shape == kept.y.shape == y.shape:
            y = following(kept, y, self.alpha)
        start = State(y, received.buffers)
        x, buffers, loss = self.descend(task, start, pull=1 / self.eta)
        update, _ = self.update(task, None, received, State(reflected(x, y), buffers))
        return Local(Kept(x, y), update, Personal(x, buffers), loss)
