"""FedProx: federated averaging whose local training is pulled back to the model it started from.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. A device minimises its loss plus
``mu / 2 * |w - w_global|**2``, so the gradient of a step gains ``mu * (w - w_global)``. Everything else, what travels
included, is FedAvg's. The paper's devices may also do fewer epochs; here all do `epochs`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from edge_client.methods import Range, Search
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.shared.averaging import Weights
from edge_client.task import Task


class FedProx(FedAvg):
    """Local SGD with a proximal term, then FedAvg's mean. With ``mu = 0`` it is FedAvg."""

    name: ClassVar[str] = "fedprox"
    search: ClassVar[Search] = {**FedAvg.search, "mu": Range(0.0001, 1.0, log=True)}

    mu: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    """The weight of the proximal term."""

    def train(self, task: Task, start: Weights) -> tuple[Weights, float]:
        """Epochs of SGD on the loss and the proximal term. The loss that is reported is without the term."""
        parameters, buffers, loss = self.descend(task, start, pull=self.mu)
        return Weights(parameters, buffers), loss
