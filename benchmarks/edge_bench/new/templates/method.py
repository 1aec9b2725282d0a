"""Mine: federated averaging whose devices send only the larger half of their change.

A method is one class: its fields are the settings, its functions the two halves. This one changes what a device sends;
the server's half is FedAvg's. docs/extending.md of maskfleet describes every function.
"""

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from edge_client.methods.fedavg import FedAvg
from edge_client.methods.shared.averaging import Weights
from edge_client.task import Task


class Mine(FedAvg):
    """FedAvg with small changes dropped."""

    name: ClassVar[str] = "mine"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of parameters whose change is sent."""

    def train(self, task: Task, start: Weights) -> tuple[Weights, float]:
        """Train as FedAvg does, then undo the smaller changes."""
        trained, loss = super().train(task, start)
        change = trained.parameters - start.parameters
        least = np.quantile(np.abs(change), 1 - self.share)
        kept = np.where(np.abs(change) >= least, change, np.float32(0))
        return Weights(start.parameters + kept, trained.buffers), loss
