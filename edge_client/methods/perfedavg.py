"""Per-FedAvg: a global model from which one step on a device's data gives a good personal one.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020. A device minimises F(w) = f(w - alpha grad f(w)), with independent batches D, D', D'' a step:

    w'  = w - alpha grad f(w, D)                                          inner step
    FO:   w <- w - beta grad f(w', D')                                    outer step, from w and not from w'
    HF:   w <- w - beta (v - alpha (grad f(w + delta v, D'') - grad f(w - delta v, D'')) / (2 delta)),
          v = grad f(w', D')                                              Hessian times v by a finite difference

- The server averages w, weighted by samples; payloads and codecs are those of FedAvg.
- D' runs through the device's samples `epochs` times, so a round has as many outer steps as FedAvg has steps; D and D''
  are drawn in orders of their own. The paper's outer step has no momentum; the default is FedAvg's, to compare alike.
- The personal model is w after one step of rate alpha on one batch, or after `personal_epochs` epochs of such steps.
  Batch-norm statistics are those of the outer batches, averaged; the personal steps move the device's copy.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from edge_client.bundle import F32
from edge_client.methods import Range, Search
from edge_client.methods.fedavg import FedAvg, Kept, State
from edge_client.task import Batch, Course, EpochLoss, Local, Personal, Task
from edge_client.training.sgd import Sgd


class PerFedAvg(FedAvg):
    """FedAvg whose local steps are those of model-agnostic meta-learning."""

    name: ClassVar[str] = "perfedavg"
    search: ClassVar[Search] = {**FedAvg.search, "alpha": Range(0.001, 0.1, log=True)}

    variant: Literal["fo", "hf"] = "fo"
    """`fo` drops the Hessian; `hf` takes it from two further gradients."""
    alpha: Annotated[float, Field(gt=0, le=1000)] | None = None
    """The inner rate, also that of the personal steps; None: that of the local epochs, the paper's beta."""
    delta: Annotated[float, Field(ge=1e-6, le=1)] = 1e-3
    """HF: the finite difference's step. Much smaller ones drown in the rounding of float32."""
    personal_epochs: Annotated[int, Field(ge=0, le=1000)] = 0
    """Epochs that make the personal model; 0: one step on one batch."""

    def inner(self, task: Task) -> F32:
        """The inner rate, float32[]."""
        return np.asarray(self.alpha or self.learning_rate(task.assignment.model), np.float32)

    def local_round(self, task: Task, kept: Kept | None, received: State) -> Local:
        """Meta-steps from the global model."""
        w, buffers, loss = received.parameters.copy(), received.buffers.copy(), EpochLoss()
        optimiser = Sgd(w.size, self.learning_rate(task.assignment.model), self.momentum)
        inner, outer, third = (task.batches(self.epochs, self.batch, p) for p in ("inner", "train", "curvature"))
        for batch in outer:
            ahead = w - self.inner(task) * task.gradient(w, buffers, next(inner)).parameters
            g = task.gradient(ahead, buffers, batch)
            loss.add(batch, g)
            v, statistics = g.parameters.copy(), g.buffers.copy()
            if self.variant == "hf":
                v -= self.inner(task) * self.curvature(task, w, v, buffers, next(third))
            buffers = statistics
            optimiser.step(w, v)
        update, left = self.update(task, kept, received, State(w, buffers))
        return Local(left, update, self.adapted(task, w, buffers), loss.mean)

    def curvature(self, task: Task, w: F32, v: F32, buffers: F32, batch: Batch) -> F32:
        """The Hessian at w times v, by a central difference."""
        step = np.float32(self.delta) * v
        above = task.gradient(w + step, buffers, batch).parameters.copy()
        change: F32 = above - task.gradient(w - step, buffers, batch).parameters
        change /= np.float32(2 * self.delta)
        return change

    def adapted(self, task: Task, w: F32, buffers: F32) -> Personal:
        """The personal model: plain SGD from w on the device's own data."""
        w, buffers = w.copy(), buffers.copy()
        batches = task.batches(max(1, self.personal_epochs), self.batch, "personal")
        for batch in batches if self.personal_epochs else islice(batches, 1):
            g = task.gradient(w, buffers, batch)
            w -= self.inner(task) * g.parameters
            buffers = g.buffers.copy()
        return Personal(w, buffers)

    def of_device(self, course: Course, state: State, record: None, everyone: Personal) -> None:
        """Its personal steps are the device's own."""

    def personal(self, task: Task, kept: Kept | None, received: State) -> Personal:
        """The global model after the device's personal steps."""
        return self.adapted(task, received.parameters, received.buffers)
