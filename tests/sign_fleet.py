"""Sign methods by hand: the server's half against the devices' over bytes, without engine, network or disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from channel_groups import between
from edge_kernels import bits
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, clusters, course, mlp, secret

from coord_server import aggregation
from coord_server.aggregation import Contribution
from edge_client import local
from edge_client.bundle import F32, Manifest, Model, generate
from edge_client.errors import LostError
from edge_client.methods.shared.signs import SignMasks, Update
from edge_client.narrow import Channels
from edge_client.protocol.metrics import METRICS, apart
from edge_client.protocol.payload import Arrays, Payload, decode, encode
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import Gradient, Trainer
from edge_client.training.narrowed import Embedded


def grouped(m: Manifest) -> Manifest:
    """The multilayer perceptron with the channel groups between its layers."""
    groups = []
    for a, b in zip(m.layers, m.layers[1:], strict=False):
        size = m.tensors[a.weights[0]].shape[0]
        groups.append(between(size, a.weights[0], b.weights[0], bias=a.biases[0] if a.biases else None, name=a.name))
    return m.model_copy(update={"groups": tuple(groups)})


M = grouped(mlp(6, 8, 5, 3))
MASKED = 6 * 8 + 8 * 5


@dataclass
class Fixed:
    """A trainer whose gradient is always the same vector; every call adds one to the statistics."""

    manifest: Manifest
    value: F32

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        return Gradient(1.0, self.value, buffers + np.float32(1))

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        return np.zeros((len(x), 2), np.float32)

    def narrow(self, kept: Channels) -> Trainer:
        return Embedded(self, kept)


def fixed_task(m: Manifest, gradient: Any, weights: Any = None, device: str = "a") -> Task:
    """Round 1 with that gradient and those weights, by default ones; an epoch is one batch of 64."""
    weights = np.ones(m.d) if weights is None else weights
    model = Model(m, np.array(weights, np.float32), np.zeros(m.buffers_d, np.float32))
    a = Assignment(Course(model, seed=0, rounds=1, cohort=1), 1, device)
    return Task(a, Fixed(m, np.array(gradient, np.float32)), clusters(m, 1), secret(device))


def first(method: SignMasks, t: Task) -> Any:
    """The first round of a device."""
    a = t.assignment
    down = decode(encode(method.downlink(a.course, 1, method.start(a.course), None)))
    return method.local_round(t, None, method.receive(a, None, down))


class Fleet:
    """A federation over bytes: devices that lost what a downlink builds on sit the round out."""

    def __init__(self, method: SignMasks, m: Manifest = M, rounds: int = 8) -> None:
        self.method, self.m, self.round = method, m, 0
        self.course: Course = course(m, rounds)
        self.state: Any = method.start(self.course)
        self.records: dict[str, Any] = {}
        self.kept: dict[str, Arrays] = {}
        self.lost: list[str] = []
        self.downs: dict[str, Payload] = {}
        self.updates: dict[str, Payload] = {}
        self.trained: dict[str, Personal] = {}

    def down(self, device: str) -> Payload:
        """The device's next downlink; that of another device of the same audience is the same."""
        made = aggregation.downlink(self.method, self.course, self.round + 1, self.state, self.records.get(device))
        return decode(made.data)

    def task(self, device: str) -> Task:
        a = Assignment(self.course, self.round + 1, device)
        return Task(a, NumpyMlp(self.m), clusters(self.m, ord(device[0])), secret(device))

    def read(self, device: str, payload: Payload) -> Any:
        """The server's reading of an update of the round that is being played."""
        a = Assignment(self.course, self.round + 1, device)
        payload = apart(payload)[0] if METRICS in payload.meta else payload
        return self.method.read_update(a, self.state, self.records.get(device), payload)

    def play(self, *devices: str, guard: Any = "none") -> None:
        """One round of these devices."""
        self.lost, contributions, influences = [], [], {}
        for d in sorted(devices):
            self.downs[d] = self.down(d)
            try:
                done = local.run_round(self.method, self.task(d), self.kept.get(d, {}), self.downs[d])
            except LostError:
                self.lost.append(d)
                self.records.pop(d, None)
                continue
            assert sum(x.nbytes for x in done.update.arrays.values()) <= self.method.update_limit(self.course.model)
            self.kept[d], self.trained[d] = done.kept, done.trained
            self.updates[d] = decode(encode(done.update))
            contributions.append(Contribution(d, encode(done.update), self.records.get(d), {}))
            a = Assignment(self.course, self.round + 1, d)
            found = self.method.influence(a, self.state, self.read(d, self.updates[d]))
            if found is not None:
                influences[d] = found
        self.round += 1
        if contributions:
            closed = aggregation.close_round(
                self.method, self.course, self.round, self.state, contributions, influences, guard, len(contributions)
            )
            self.state = aggregation.unpack(self.method.state_type, aggregation.pack(closed.state))
            kind = self.method.record_type
            for d, record in closed.records.items():
                self.records[d] = record if kind is None else aggregation.unpack(kind, aggregation.pack(record))

    def personal(self, device: str) -> Personal:
        kept, task = self.kept.get(device, {}), self.task(device)
        return local.personal(self.method, task, kept, self.down(device), "global").personal

    def fold(self, votes: dict[str, tuple[list[int], float]]) -> None:
        """Close a round with these signs (-1 or +1) and samples by device."""
        total: Any = None
        self.round += 1
        for d, (signs, samples) in votes.items():
            update = Update(bits.pack(np.array(signs) > 0), samples)
            a = Assignment(self.course, self.round, d)
            total, self.records[d] = self.method.fold(a, self.state, total, update, self.records.get(d))
        self.state, _ = self.method.finish(self.course, self.round, sorted(votes), self.state, total)


def signs_of(method: SignMasks, model: Model, own: Personal) -> NDArray[Any]:
    """The signs of the masked weights of a trained model."""
    return np.sign(method.parts(model).masked.gather(own.parameters))


def first_model(m: Manifest) -> Model:
    """The bundle's values as `course` has them."""
    return Model(m, generate(m.parameters, 1), generate(m.buffers, 1))
