"""What a method is given and what it gives back: Course, Assignment, Task, Local, Personal.

A task is everything that a method sees of its device: batches in an order that both sides could repeat, gradients,
scores, and randomness that no other party has. The loop over the batches is the method's own::

    loss = EpochLoss()
    for batch in task.batches(self.epochs, self.batch):
        g = task.gradient(values, buffers, batch)
        loss.add(batch, g)
        buffers[:] = g.buffers
        ...                                   # move what `values` is made of

The trainer computes gradients; the target defines scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32, Model
from edge_client.data import DataPart, DeviceData
from edge_client.errors import DivergedError
from edge_client.narrow import Channels, narrow
from edge_client.protocol.payload import Payload
from edge_client.training import Gradient, Trainer

SCORE_BATCH = 64  # samples per forward pass: bounds a device's memory, changes no result


@dataclass(frozen=True)
class Course:
    """What stays the same through a federation, as both sides know it.

    `cohort` is the number of devices that a round draws.
    """

    model: Model
    seed: int
    rounds: int
    cohort: int


@dataclass(frozen=True)
class Assignment:
    """One device's part in one round. All shared randomness is keyed by these fields. Rounds count from 1.

    `place` is the device's place in the round's cohort, 0 .. cohort - 1; 0 after the last round. The devices of the
    round's first attempt have the places in the order of their names. Those that a later attempt adds have the places
    of devices that have not reported.
    """

    course: Course
    round: int
    device: str
    place: int = 0

    @property
    def model(self) -> Model:
        """The bundle's manifest and initial values."""
        return self.course.model

    @property
    def seed(self) -> int:
        return self.course.seed

    @property
    def rounds(self) -> int:
        return self.course.rounds


@dataclass(frozen=True)
class Batch:
    """Samples of one step: `x` [n, *input.shape] and `y` as the target has it. `index` counts steps from 0.

    What dropout drops in this step follows from `key`, 0 .. 2**31 - 2; every gradient of one batch drops the same.
    """

    index: int
    epoch: int
    x: NDArray[Any]
    y: NDArray[Any]
    key: int = 0

    def __len__(self) -> int:
        return len(self.y)


class EpochLoss:
    """The mean loss of the last epoch, weighted by samples."""

    def __init__(self) -> None:
        self._epoch, self._sum, self._samples = -1, 0.0, 0

    def add(self, batch: Batch, gradient: Gradient) -> None:
        """Count one step."""
        if batch.epoch != self._epoch:
            self._epoch, self._sum, self._samples = batch.epoch, 0.0, 0
        self._sum += gradient.loss * len(batch)
        self._samples += len(batch)

    @property
    def mean(self) -> float:
        """The mean so far; 0.0 before the first step."""
        return self._sum / max(1, self._samples)


@dataclass(frozen=True)
class Progress:
    """How far a pass over the training samples is: `step` of `steps`, in `epoch` of `epochs`, all counted from 1.

    `loss` is the mean over the epoch's samples so far. `phase` is the method's name for what it trains.
    """

    phase: str
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Personal:
    """A device's own model: effective parameters float32[d] (mask applied), statistics float32[buffers_d].

    `mask` is bool[d], False where a parameter was masked away; None for a dense model.
    """

    parameters: F32
    buffers: F32
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Local:
    """What one local round leaves: `kept` (the method's dataclass or None), the update, the trained model, its loss."""

    kept: Any
    update: Payload
    trained: Personal
    loss: float


@dataclass(frozen=True)
class Task:
    """An assignment on the device that has it. `secret` is 64 random bits that never leave the device."""

    assignment: Assignment
    trainer: Trainer
    data: DeviceData
    secret: int
    watch: Callable[[Progress], None] | None = field(default=None, repr=False, compare=False)
    """Called after every step."""
    frugal: bool = field(default=False, repr=False, compare=False)
    """Whether the trainer rests after each pass: its memory is then free for what follows."""
    _mean: EpochLoss = field(default_factory=EpochLoss, init=False, repr=False, compare=False)
    _steps: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)

    @property
    def samples(self) -> int:
        return len(self.data.y)

    def batches(self, epochs: int, size: int, phase: str = "train") -> Iterator[Batch]:
        """The batches of `epochs` passes over the training samples; the last batch of an epoch may be smaller.

        Epoch e is ordered by the stream of ``key(seed, "batches", phase, device, round, e)``.
        """
        a, data, index = self.assignment, self.data, 0
        steps = epochs * -(-self.samples // size)
        try:
            for epoch in range(epochs):
                key = counter.key(a.seed, "batches", phase, a.device, a.round, epoch)
                order = counter.permutation(key, self.samples)
                for low in range(0, self.samples, size):
                    chosen = order[low : low + size]
                    drops = counter.key(key, "drops", low) % (2**31 - 1)
                    yield Batch(index, epoch, data.x[chosen], data.y[chosen], drops)
                    index += 1
                    if self.watch is not None:
                        self.watch(Progress(phase, epoch + 1, epochs, index, steps, self._mean.mean))
        finally:  # also of a pass that diverged
            if self.frugal:
                self.trainer.rest()

    def gradient(self, values: F32, buffers: F32, batch: Batch) -> Gradient:
        """Loss, gradient and new statistics of one batch. `values` is float32[d], `buffers` float32[buffers_d].

        The result's arrays are valid until the next call. Raises DivergedError when the loss, the gradient or a
        statistic is not finite, so that no NaN reaches an update.
        """
        step = next(self._steps)  # of all phases, which each count their batches from 0
        drawn = {"key": batch.key} if self.trainer.manifest.draws else {}
        g = self.trainer.gradient(values, buffers, batch.x, batch.y, **drawn)
        if self.watch is not None:
            self._mean.add(batch, g)
        # The dot product is finite only if every entry is; a NaN in a score would show in no later loss.
        with np.errstate(over="ignore"):
            checks = {
                "loss": np.isfinite(g.loss),
                "gradient": np.isfinite(np.dot(g.parameters, g.parameters)),
                "batch-norm statistics": np.isfinite(g.buffers).all(),
            }
        wrong = [name for name, finite in checks.items() if not finite]
        if wrong:
            raise DivergedError(
                f"the {wrong[0]} overflowed in step {batch.index + 1} of round {self.assignment.round}; use a smaller "
                "learning rate, or look for outliers in the device's data",
                at_start=step == 0,
            )
        return g

    def score(self, model: Personal, part: DataPart = "test") -> float:
        """The target's score of a model on one part of the device's data, higher is better; 0.0 without samples."""
        x, y = self.data.part(part)
        if not len(y):
            return 0.0
        chunks = range(0, len(y), SCORE_BATCH)
        outputs = [self.trainer.logits(model.parameters, model.buffers, x[low : low + SCORE_BATCH]) for low in chunks]
        return self.trainer.manifest.target.score(np.concatenate(outputs), y)

    def score_start(self) -> float:
        """The score of the bundle's own values on the device's test samples: what any method has to beat."""
        model = self.assignment.model
        return self.score(Personal(model.parameters, model.buffers))

    def narrow(self, kept: Channels) -> Task:
        """The same device, data and streams with the smaller network of the channels `kept`.

        Its manifest and initial values are those of `edge_client.narrow`, also as `assignment.model`.
        Raises ConfigError when the channels cannot be cut.
        """
        a, trainer = self.assignment, self.trainer.narrow(kept)
        course = replace(a.course, model=narrow(a.model.manifest, kept).model(a.model))
        made = replace(self, assignment=replace(a, course=course), trainer=trainer)
        for shared in ("_steps", "_mean"):  # one count for all of a round's steps
            object.__setattr__(made, shared, getattr(self, shared))
        return made
