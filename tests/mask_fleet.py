"""FedPM, DeltaMask and Coupled by hand: the server's half against the devices', without engine, network or disk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from edge_kernels import bits
from numpy.typing import NDArray
from numpy_mlp import clusters, course, mlp, model, secret, task
from rounds import stored

from edge_client.bundle import F32, Bits, Manifest
from edge_client.methods.shared.bernoulli import BernoulliMasks, HeadUpdate
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Course, Local, Task
from edge_client.training import Gradient

M = mlp(20, 16, 12, 3)
MASKED = 20 * 16 + 16 * 12
DEVICES = ("a", "b", "c")


class Fleet:
    """A federation by hand: the server's state and records, what each device kept."""

    def __init__(self, method: BernoulliMasks, m: Manifest = M, rounds: int = 8) -> None:
        self.method, self.m, self.round = method, m, 0
        self.course: Course = course(m, rounds)
        self.state = stored(method.start(self.course))
        self.records: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.down: dict[str, Payload] = {}
        self.local: dict[str, Local] = {}
        self.masks: dict[str, Bits] = {}
        """By device, the mask that the server read last."""

    def task(self, device: str, round_: int) -> Task:
        t = task(self.m, device, round_, clusters(self.m, DEVICES.index(device)))
        return replace(t, assignment=Assignment(self.course, round_, device))

    def ask(self, device: str) -> Payload:
        """The device's next downlink."""
        return decode(encode(self.method.downlink(self.course, self.round + 1, self.state, self.records.get(device))))

    def audience(self, device: str) -> str:
        return self.method.audience(self.course, self.round + 1, self.records.get(device))

    def receive(self, device: str) -> Any:
        """The device's next downlink, decoded by it."""
        a = Assignment(self.course, self.round + 1, device)
        return self.method.receive(a, self.kept.get(device), self.ask(device))

    def lose(self, device: str) -> None:
        """The server's part of a reported loss: the record is dropped."""
        self.records.pop(device, None)

    def play(self, *devices: str) -> None:
        """One round of these devices."""
        received = {}
        for d in devices:
            self.down[d], received[d] = self.ask(d), self.receive(d)
        self.round += 1
        total: Any = None
        for d in sorted(devices):
            t = self.task(d, self.round)
            local = self.method.local_round(t, self.kept.get(d), received[d])
            self.local[d], self.kept[d] = local, stored(local.kept)
            record = self.records.get(d)
            update = decode(encode(local.update))
            limit = self.method.update_limit(t.assignment.model)
            assert sum(x.nbytes for x in update.arrays.values()) <= limit
            read = self.method.read_update(t.assignment, self.state, record, update)
            if not isinstance(read, HeadUpdate):
                self.masks[d] = bits.unpack(read, self.method.exchanged(t.assignment.model))
            total, self.records[d] = self.method.fold(t.assignment, self.state, total, read, record)
        self.state, changed = self.method.finish(self.course, self.round, sorted(devices), self.state, total)
        self.state = stored(self.state)
        self.records = {d: stored(r) for d, r in {**self.records, **changed}.items()}

    def theta(self) -> NDArray[np.float64]:
        return self.method.theta(self.course, self.state.posterior)

    def personal_score(self, device: str) -> float:
        t = self.task(device, self.round + 1)
        return t.score(self.method.personal(t, self.kept.get(device), self.receive(device)))


def own_mask(fleet: Fleet, device: str) -> NDArray[np.bool_]:
    """The mask of the model a device trained, over the masked parameters."""
    mask = fleet.local[device].trained.mask
    assert mask is not None
    return fleet.method.masked(model(fleet.m)).gather(mask)


def local_round(method: BernoulliMasks, t: Task, kept: Any, downlink: Payload) -> Local:
    """A device's round from its downlink."""
    return method.local_round(t, kept, method.receive(t.assignment, kept, downlink))


@dataclass
class Steady:
    """A trainer whose gradient is always the same vector; it notes the parameters it was asked about.

    Every call adds one to the statistics.
    """

    manifest: Manifest
    value: F32
    asked: list[F32] = field(default_factory=list)

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any]) -> Gradient:
        self.asked.append(parameters.copy())
        return Gradient(1.0, self.value, buffers + np.float32(1))

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return np.zeros((len(x), 3), np.float32)


def steady(m: Manifest = M, value: float = 0.0) -> Steady:
    """A trainer that pulls at every parameter alike."""
    return Steady(m, np.full(m.d, value, np.float32))


def steady_task(trainer: Steady, device: str = "a", round_: int = 2) -> Task:
    """A round of 40 samples with that trainer."""
    a = Assignment(course(trainer.manifest), round_, device)
    return Task(a, trainer, clusters(trainer.manifest, 1), secret(device))


__all__ = ["DEVICES", "MASKED", "Fleet", "M", "local_round", "model", "own_mask", "steady", "steady_task"]
