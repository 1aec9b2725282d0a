"""Local SGD with momentum, the local epochs of every method that moves a bundle's own weights.

A rate for random weights destroys a trained network with batch-norm statistics before the federation has learned
anything. So the rate's default depends on the bundle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.blocks import Blocks
from edge_client.bundle import F32, Model
from edge_client.methods import Method, Range, Search, pretrained
from edge_client.methods.shared.averaging import Weights
from edge_client.task import Batch, EpochLoss, Task
from edge_client.training.sgd import Sgd

CAREFUL = 0.3  # of a method's usual rate


class LocalSgd(Method):
    """Base of these methods: how their devices train."""

    usual_lr: ClassVar[float] = 0.01
    search: ClassVar[Search] = {"lr": Range(0.001, 0.3, log=True), "epochs": Range(1, 10)}

    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=1000)] | None = None
    """None: the method's usual rate; 0.3 of it for a bundle with trained weights and batch-norm statistics."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def learning_rate(self, model: Model) -> float:
        """The rate of the local epochs."""
        if self.lr is not None:
            return self.lr
        return self.usual_lr * (CAREFUL if pretrained(model) and model.manifest.buffers_d else 1)

    def descend(
        self,
        task: Task,
        start: Weights,
        *,
        pull: float = 0.0,
        decay: float = 0.0,
        live: NDArray[np.bool_] | None = None,
        whole: Model | None = None,
    ) -> tuple[F32, F32, float]:
        """The local epochs from `start`: the parameters after them, the statistics, and the last epoch's mean loss.

        They lower the loss plus ``pull / 2 * |w - start|**2 + decay / 2 * |w|**2``, where `live` bool[d] is True; the
        loss that is returned is without these terms. `whole` is the federation's model where the task's is a part.
        """
        w, buffers, loss = start.parameters.copy(), start.buffers.copy(), EpochLoss()
        optimiser = Sgd(w.size, self.learning_rate(whole or task.assignment.model), self.momentum)
        changed = bool(pull or decay or live is not None)
        made = np.empty_like(w) if changed else w
        for batch in task.batches(self.epochs, self.batch):
            g = task.gradient(w, buffers, batch)
            loss.add(batch, g)
            buffers[:] = g.buffers
            slope = g.parameters
            if changed:
                slope = np.multiply(w, np.float32(decay), out=made)
                slope += g.parameters
                if pull:
                    slope += (w - start.parameters) * np.float32(pull)
                if live is not None:
                    slope *= live
            optimiser.step(w, slope)
        return w, buffers, loss.mean


def descend_on(
    part: Blocks, task: Task, batches: Iterable[Batch], values: F32, buffers: F32, optimiser: Sgd
) -> tuple[F32, float]:
    """SGD on `part` alone, in place: the rest of `values` float32[d] stays, the statistics `buffers` follow.

    Returns the part's values and the last epoch's mean loss.
    """
    own, loss = part.gather(values), EpochLoss()
    for batch in batches:
        g = task.gradient(values, buffers, batch)
        loss.add(batch, g)
        buffers[:] = g.buffers
        optimiser.step(own, part.gather(g.parameters))
        part.scatter(own, values)
    return own, loss.mean
