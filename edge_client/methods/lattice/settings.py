"""Lattice's settings, and what follows from them for a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.errors import ConfigError
from edge_client.methods import MORE_EPOCHS
from edge_client.methods.lattice import grid
from edge_client.methods.lattice.grid import MIDDLE, trainable
from edge_client.methods.lattice.train import Plan
from edge_client.methods.shared.averaging import window
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.methods.shared.network import Network
from edge_client.task import Course

PERSONAL_RATE = 1 / 3  # of the rounds' rate
PRUNED_EPOCHS = 2  # times `epochs`: the rate of the smaller network falls, so that its epochs do half as much
OF_PRUNING = ("prune_after", "prune_keep", "prune_epochs", "prune_lr")
TOP = 10.0  # the quantum up to which the budget makes steps coarser; beyond it scores can fall by tens of points
QUANTUM = 0.25  # the least: with much finer ones updates exceed `update_limit`, and moves 16 bits
FEW_ROUNDS = 5  # a shorter run has finer steps, since what the rounding leaves over has no round to follow in
SMALL = 5000  # parameters: a smaller network has finer steps, since headers are most of its bytes in any case
LEAST = 6144.0  # coded bytes of a device and round that the budget always allows: small networks need fine steps


class Settings(LocalSgd):
    """How fine the grid is, how devices train, what is pruned."""

    quantum: Annotated[float, Field(ge=QUANTUM, le=10_000)] = 5.0
    """Step / cohort in units of the first round's rms. A larger one costs fewer bits; 15, with `budget = 400`, is
    thrifty. A run of fewer than five rounds has quantum * (rounds / 5)^2, a network of fewer than 5,000 parameters
    quantum * (parameters / 5,000)^2, at least 0.25."""
    statistics: Literal["mean", "local"] = "mean"
    """Batch-norm statistics are averaged, or stay on the device."""
    budget: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 110.0
    """FedAvg's bytes divided by this, or 6 kB a round if that is more, may go to moves, changes, statistics and the
    last delivery. Where a run would take more, steps become coarser, up to a quantum of ten, or cells. 1: never."""
    average: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The share of the rounds whose mean model is the final one, at most 16 rounds; 0: the last round's model."""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """The most that the server's momentum may be, by which N moves further where rounds agree; 0: none."""
    guard: bool = True
    """Halve the steps after two rounds in which the model was worse than the bundle's, if the budget allows it."""
    prune: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the units of linear layers that stay; of convolutions its square root stays. None: nothing is pruned."""
    prune_after: Annotated[int, Field(ge=1)] = 4
    """Rounds of the whole network."""
    prune_keep: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """The share that stays of a channel group, by its name, in place of the rule's."""
    prune_epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Epochs of the smaller network in a round; None: twice `epochs`."""
    prune_lr: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Its learning rate; None: `lr`, else 0.01 also where the whole network needs a careful one."""
    personal_epochs: Annotated[int, Field(ge=0, le=1000)] = 0
    """Epochs that make the personal model after the last round, at a third of the whole network's rate."""

    def refuse_idle(self) -> None:
        """Raise ConfigError when a setting of the pruning is given without `prune`."""
        default = type(self)()  # defaults are written into a federation's settings too
        for name in OF_PRUNING if self.prune is None else ():
            if (value := getattr(self, name)) != getattr(default, name):
                raise ConfigError(
                    f"{name} = {value!r} changes nothing while prune is not set; set the share of units that stays, "
                    f"such as prune = 0.5, or leave {name} out"
                )

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        whole = ("a larger prune",) if self.prune is not None else ()
        begins = self.quantum * (1.0 if model is None else smallness(model) ** 2)
        finer = ("a smaller quantum",) if begins > QUANTUM else ()
        binding = self.budget > 1 and (model is None or self.round_budget(model) > LEAST)
        return ("lr", MORE_EPOCHS, *whole, *finer, *(("budget = 1, for more bytes",) if binding else ()))

    def unit(self, course: Course, each: F32) -> F32:
        """What one count moves a weight of each tensor, float32[tensors]."""
        share = 0.5**MIDDLE / course.cohort
        return (each.astype(np.float64) * share).astype(np.float32)

    def first_quantum(self, course: Course) -> float:
        """The quantum that a run begins with: `quantum`, or a part of it in a short run or of a small network."""
        share = min(1.0, course.rounds / FEW_ROUNDS) * smallness(course.model)
        return max(QUANTUM, self.quantum * share**2)

    @property
    def top(self) -> int:
        """The highest level to which the budget raises moves. Not by `rounds`, which an operator may change."""
        return MIDDLE + max(0, math.floor(math.log2(TOP / self.quantum)))

    def window(self, course: Course) -> int:
        """The number of rounds whose mean is the final model."""
        return min(grid.HISTORY, window(self.average, course.rounds))

    def round_budget(self, model: Model) -> float:
        """FedAvg's bytes of a device and round, divided by `budget`."""
        return 8 * (trainable(model.manifest).size + self.buffers(model)) / self.budget

    def allowed(self, net: Network, deliveries: float) -> float:
        """Coded bytes that a device may send and receive in all rounds, plus `deliveries` downlinks after the last one.

        A downlink counts as half a round. A smaller network has the budget of its own size, from the first round that
        trained it.
        """
        whole, now = (max(self.round_budget(model), LEAST) for model in (net.origin.model, net.model))
        return self.prune_after * whole + (net.course.rounds - self.prune_after + deliveries / 2) * now

    def guarded(self, net: Network) -> bool:
        """Whether devices compare this network with the bundle's."""
        return self.guard and net.units is None

    def buffers(self, model: Model) -> int:
        """Number of statistics that travel."""
        return model.manifest.buffers_d if self.statistics == "mean" else 0

    def plan(self, net: Network) -> Plan:
        """How a device trains this network in a round."""
        if net.units is None:
            return Plan(self.epochs, self.batch, self.learning_rate(net.model), self.momentum)
        epochs = self.prune_epochs or PRUNED_EPOCHS * self.epochs
        rate = self.prune_lr or self.lr or self.usual_lr
        return Plan(epochs, self.batch, rate, self.momentum, cosine=True)

    def personal_plan(self, net: Network) -> Plan:
        """How a device makes its personal model."""
        rate = self.learning_rate(net.origin.model) * PERSONAL_RATE
        return replace(self.plan(net), epochs=self.personal_epochs, rate=rate)


def smallness(model: Model) -> float:
    """The model's trainable parameters over `SMALL`, at most 1."""
    return min(1.0, trainable(model.manifest).size / SMALL)
