"""FedPM, DeltaMask and Coupled by hand: the server's half against the devices', without engine, network or disk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from edge_kernels import bits
from numpy.typing import NDArray
from numpy_mlp import assignment, clusters, mlp, model, task

from edge_client.bundle import F32, Manifest
from edge_client.local import accuracy
from edge_client.methods import Local, Task
from edge_client.methods.bernoulli import BernoulliMasks, Bits
from edge_client.protocol.payload import Arrays, Payload, decode, encode
from edge_client.training import Gradient

M = mlp(20, 16, 12, 3)
MASKED = 20 * 16 + 16 * 12
DEVICES = ("a", "b", "c")


def stored(arrays: Arrays) -> Arrays:
    """What a device or the server has kept, after a restart."""
    return dict(decode(encode(Payload(arrays))).arrays)


class Fleet:
    """A federation by hand: the server's state and records, what each device kept."""

    def __init__(self, method: BernoulliMasks, m: Manifest = M, rounds: int = 8) -> None:
        self.method, self.m, self.round, self.rounds = method, m, 0, rounds
        self.state = method.start(model(m), 3)
        self.records: dict[str, Arrays] = {}
        self.kept: dict[str, Arrays] = {}
        self.down: dict[str, Payload] = {}
        self.local: dict[str, Local] = {}
        self.masks: dict[str, Bits] = {}
        """By device, the mask that the server read last."""

    def task(self, device: str, round_: int) -> Task:
        t = task(self.m, device, round_, clusters(self.m, DEVICES.index(device)))
        return replace(t, assignment=replace(t.assignment, rounds=self.rounds))

    def ask(self, device: str) -> Payload:
        a = self.task(device, self.round + 1).assignment
        return decode(encode(self.method.downlink(a, self.state, self.records.get(device, {}))))

    def play(self, *devices: str) -> None:
        """One round of these devices."""
        for d in devices:
            self.down[d] = self.ask(d)
        self.round += 1
        total: Arrays = {}
        for d in sorted(devices):
            t = self.task(d, self.round)
            local = self.method.local_round(t, self.kept.get(d, {}), self.down[d])
            self.local[d], self.kept[d] = local, stored(local.kept)
            record = self.records.get(d, {})
            update = decode(
                encode(replace(local.update, meta={**local.update.meta, "samples": len(t.data.y) * local.took_part}))
            )
            limit = self.method.update_limit(t.assignment.model)
            assert sum(x.nbytes for x in update.arrays.values()) <= limit
            read = self.method.read_update(t.assignment, self.state, record, update)
            if "mask" in read:
                self.masks[d] = bits.unpack(read["mask"], self.method.exchanged(t.assignment.model))
            total, self.records[d] = self.method.fold(t.assignment, self.state, total, read, record)
            self.records[d] = stored(self.records[d])
        self.state = stored(self.method.finish(model(self.m), self.round, self.state, total))

    def theta(self) -> np.ndarray:
        return self.method.theta(model(self.m), 3, self.state)

    def personal_accuracy(self, device: str) -> float:
        t = self.task(device, self.round + 1)
        personal = self.method.personal(t, self.kept.get(device, {}), self.ask(device))
        return accuracy(t.trainer, personal, t.data.x, t.data.y)


def own_mask(fleet: Fleet, device: str) -> np.ndarray:
    """The mask of the model a device trained, over the masked parameters."""
    mask = fleet.local[device].trained.mask
    assert mask is not None
    return fleet.method.masked(fleet.m).gather(mask)


@dataclass
class Steady:
    """A trainer whose gradient is always the same vector; it notes the parameters it was asked about.

    Every call adds one to the statistics.
    """

    manifest: Manifest
    value: F32
    asked: list[F32] = field(default_factory=list)

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        self.asked.append(parameters.copy())
        return Gradient(1.0, self.value, buffers + np.float32(1))

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return np.zeros((len(x), self.manifest.classes), np.float32)


def steady(m: Manifest = M, value: float = 0.0) -> Steady:
    """A trainer that pulls at every parameter alike."""
    return Steady(m, np.full(m.d, value, np.float32))


def steady_task(trainer: Steady, device: str = "a", round_: int = 2) -> Task:
    """A round of 40 samples with that trainer."""
    a = assignment(trainer.manifest, device, round_)
    return Task(a, trainer, clusters(trainer.manifest, 1))
