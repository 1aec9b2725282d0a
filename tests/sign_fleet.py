"""Sign methods by hand: the server's half against the devices' over bytes, without engine, network or disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from edge_kernels import bits
from numpy.typing import NDArray
from numpy_mlp import Steady, clusters, grouped, mlp, secret
from rounds import Rounds, stored

from edge_client.bundle import Manifest, Model
from edge_client.methods import Method
from edge_client.methods.shared.signs import SignMasks, Update
from edge_client.protocol.payload import decode, encode
from edge_client.task import Assignment, Course, Personal, Task

M = grouped(mlp(6, 8, 5, 3))
MASKED = 6 * 8 + 8 * 5


def fixed_task(m: Manifest, gradient: Any, weights: Any = None, device: str = "a") -> Task:
    """Round 1 with that gradient and those weights, by default ones; an epoch is one batch of 64."""
    weights = np.ones(m.d) if weights is None else weights
    model = Model(m, np.array(weights, np.float32), np.zeros(m.buffers_d, np.float32))
    a = Assignment(Course(model, seed=0, rounds=1, cohort=1), 1, device)
    return Task(a, Steady(m, np.array(gradient, np.float32)), clusters(m, 1), secret(device))


def first(method: SignMasks, t: Task) -> Any:
    """The first round of a device."""
    a = t.assignment
    down = decode(encode(method.downlink(a.course, 1, method.start(a.course), None)))
    return method.local_round(t, None, method.receive(a, None, down))


class SignFleet(Rounds):
    """A federation of the sign methods' own network, and votes written by hand."""

    def __init__(self, method: Method, m: Manifest = M, rounds: int = 8) -> None:
        super().__init__(method, m, rounds)

    def fold(self, votes: dict[str, tuple[list[int], float]]) -> None:
        """Close a round with these signs (-1 or +1) and samples by device, in the order given."""
        total: Any = None
        self.round += 1
        for d, (signs, samples) in votes.items():
            update = Update(bits.pack(np.array(signs) > 0), samples)
            a = Assignment(self.course, self.round, d)
            total, self.records[d] = self.method.fold(a, self.state, total, update, self.records.get(d))
        state, _ = self.method.finish(self.course, self.round, sorted(votes), self.state, total)
        self.state = stored(state)


def signs_of(method: SignMasks, model: Model, own: Personal) -> NDArray[Any]:
    """The signs of the masked weights of a trained model."""
    return np.sign(method.parts(model).masked.gather(own.parameters))
