"""A federation of Lattice played by hand, and a trainer whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from numpy_mlp import mlp, model, secret
from rounds import stored, weighed

from edge_client.bundle import F32, Init, Manifest, Tensor
from edge_client.data import DeviceData
from edge_client.errors import LostError
from edge_client.methods.lattice.grid import spread, trainable
from edge_client.methods.lattice.method import MOVES, Lattice
from edge_client.narrow import Channels, narrow
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Course, Local, Task
from edge_client.training import Gradient

M = mlp(6, 5, 3)
D = M.d
NORMED = M.model_copy(
    update={"buffers": (Tensor(name="mean", shape=(4,), offset=0, init=Init(kind="constant", scale=0.5)),)}
)


@dataclass
class Pull:
    """A trainer whose gradient is the first sample's label times a fixed vector: local changes are known."""

    manifest: Manifest
    directions: F32  # [classes, d]

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any]) -> Gradient:
        return Gradient(1.0, self.directions[int(y[0])], buffers + np.float32(0.25))

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return np.zeros((len(x), 3), np.float32)

    def narrow(self, kept: Channels) -> Pull:
        small = narrow(self.manifest, kept)
        return Pull(small.manifest, self.directions[:, small.parameters])


def pull(m: Manifest = M, seed: int = 0) -> Pull:
    return Pull(m, np.random.default_rng(seed).standard_normal((3, m.d)).astype(np.float32))


def samples(label: int, n: int = 8) -> DeviceData:
    """One batch of one label."""
    x, y = np.zeros((n, 6), np.float32), np.full(n, label)
    return DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])


THREE = {d: samples(i) for i, d in enumerate("abc")}


@dataclass
class LatticeFleet:
    """A federation by hand. Every value is stored and read again between the rounds."""

    method: Lattice
    data: Mapping[str, DeviceData]
    seed: int = 3
    cohort: int = 3
    rounds: int = 60
    m: Manifest = M
    trainer: Any = None
    change: Callable[[str, Payload], Payload] = lambda device, update: update
    round: int = 0
    records: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Local] = field(default_factory=dict)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.course = Course(model(self.m), self.seed, self.rounds, self.cohort)
        self.state = stored(self.method.start(self.course))
        self.trainer = self.trainer or pull(self.m)

    def task(self, device: str, place: int = 0) -> Task:
        a = Assignment(self.course, self.round, device, place)
        return Task(a, self.trainer, self.data[device], secret(device))

    def receive(self, device: str) -> Any:
        """The next downlink as the device decodes it; after a loss the whole one."""
        a = Assignment(self.course, self.round + 1, device)
        for _ in range(2):
            record = self.records.get(device)
            sent = decode(encode(self.method.downlink(self.course, a.round, self.state, record)))
            try:
                return self.method.receive(a, self.kept.get(device), sent)
            except LostError:
                self.lost.append((a.round, device))
                self.records[device] = self.method.lost(record)
        raise AssertionError("lost twice")

    def play(self, *devices: str, gain: float | Mapping[str, float] | None = None, dropped: bool = False) -> None:
        """One round of these devices; their place is their order. When it is dropped, no update is counted."""
        received = {d: self.receive(d) for d in devices}
        self.round += 1
        total: Any = None
        for place, d in enumerate(devices):
            t = self.task(d, place)
            self.local[d] = weighed(self.method.local_round(t, self.kept.get(d), received[d]), t.samples)
            self.kept[d] = stored(self.local[d].kept)
            sent = decode(encode(self.change(d, self.local[d].update)))
            if len(sent.arrays.get(MOVES, sent.arrays)) < 4 * self.m.d:
                assert sum(x.nbytes for x in sent.arrays.values()) <= self.method.update_limit(t.assignment.course)
            update = self.method.read_update(t.assignment, self.state, self.records.get(d), sent)
            if gain is not None:
                update = replace(update, gain=gain[d] if isinstance(gain, Mapping) else gain)
            if dropped:
                self.method.influence(t.assignment, self.state, update)
                continue
            record = self.records.get(d)
            total, self.records[d] = self.method.fold(t.assignment, self.state, total, update, record)
        if dropped:
            return
        self.state = self.method.sized(self.state, len(self.data))
        self.state, changed = self.method.finish(self.course, self.round, sorted(devices), self.state, total)
        self.state = stored(self.state)
        self.records = {d: stored(record) for d, record in {**self.records, **changed}.items()}

    def moved(self) -> NDArray[np.float64]:
        """How far the model is from the bundle's."""
        return self.scaled(self.state.counts)

    def due(self) -> NDArray[np.float64]:
        """How far it would be with what the server has not applied."""
        return self.scaled(self.state.counts + self.state.residual.astype(np.float64))

    def scaled(self, counts: NDArray[Any]) -> NDArray[np.float64]:
        """Counts as a change of the weights."""
        return spread(trainable(self.m), self.method.unit(self.course, self.state.steps)).astype(np.float64) * counts
