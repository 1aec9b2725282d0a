"""FedPM, DeltaMask and Coupled by hand: the server's half against the devices', without engine, network or disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from edge_kernels import bits
from numpy.typing import NDArray
from numpy_mlp import Steady, clusters, course, mlp, model, secret
from rounds import Rounds

from edge_client.bundle import Bits, Manifest
from edge_client.methods.shared.bernoulli import BernoulliMasks, HeadUpdate
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Local, Task
from edge_client.training import Trainer

M = mlp(20, 16, 12, 3)
MASKED = 20 * 16 + 16 * 12
DEVICES = ("a", "b", "c")


class MaskFleet(Rounds):
    """A federation of three devices with unlike data, and what these methods have beside other ones."""

    method: BernoulliMasks

    def __init__(
        self, method: BernoulliMasks, m: Manifest = M, rounds: int = 8, trainer: Trainer | None = None
    ) -> None:
        data = {d: clusters(m, i) for i, d in enumerate(DEVICES)}
        super().__init__(method, m, rounds, data=data, trainer=trainer)

    @property
    def masks(self) -> dict[str, Bits]:
        """By device, the mask that the server read last."""
        size = self.method.exchanged(self.course)
        return {d: bits.unpack(read, size) for d, read in self.read.items() if not isinstance(read, HeadUpdate)}

    def theta(self) -> NDArray[np.float64]:
        return self.method.theta(self.course, self.state.posterior)


def own_mask(fleet: MaskFleet, device: str) -> NDArray[np.bool_]:
    """The mask of the model a device trained, over the masked parameters."""
    mask = fleet.local[device].trained.mask
    assert mask is not None
    return fleet.method.masked(model(fleet.m)).gather(mask)


def local_round(method: BernoulliMasks, t: Task, kept: Any, downlink: Payload) -> Local:
    """A device's round from its downlink."""
    return method.local_round(t, kept, method.receive(t.assignment, kept, downlink))


def steady(m: Manifest = M, value: float = 0.0) -> Steady:
    """A trainer that pulls at every parameter alike."""
    return Steady(m, np.full(m.d, value, np.float32))


def steady_task(trainer: Steady, device: str = "a", round_: int = 2) -> Task:
    """A round of 40 samples with that trainer."""
    a = Assignment(course(trainer.manifest), round_, device)
    return Task(a, trainer, clusters(trainer.manifest, 1), secret(device))
