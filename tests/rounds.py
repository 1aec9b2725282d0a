"""A federation by hand, for any method: the server's half against the devices', all values stored between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy_mlp import clusters, course, mlp, task

from edge_client.bundle import Manifest
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Method
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Course, Local, Personal, Task

M = mlp(6, 16, 8, 3)


def stored(value: Any) -> Any:
    """A state, record or kept value after it was stored and read again."""
    if value is None:
        return None
    return from_arrays(type(value), decode(encode(Payload(to_arrays(value)))).arrays)


def size(payload: Payload) -> int:
    return sum(array.nbytes for array in payload.arrays.values())


class Rounds:
    """The server's state and records, what each device kept, received and sent last.

    A device has 40 samples, or as many as `samples` says.
    """

    def __init__(
        self, method: Method, m: Manifest = M, rounds: int = 12, samples: Mapping[str, int] | None = None
    ) -> None:
        self.method, self.m, self.round, self.samples = method, m, 0, samples or {}
        self.course: Course = course(m, rounds)
        self.state = stored(method.start(self.course))
        self.records: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.down: dict[str, Payload] = {}
        self.received: dict[str, Any] = {}
        self.local: dict[str, Local] = {}

    def task(self, device: str, round_: int) -> Task:
        data = clusters(self.m, ord(device[0]), self.samples.get(device, 40))
        return replace(task(self.m, device, round_, data), assignment=Assignment(self.course, round_, device))

    def ask(self, device: str) -> Payload:
        """The device's next downlink; that of its audience."""
        record = self.records.get(device)
        assert self.method.audience(self.course, self.round + 1, record)
        return decode(encode(self.method.downlink(self.course, self.round + 1, self.state, record)))

    def receive(self, device: str) -> Any:
        """The device's next downlink, decoded by it."""
        a = Assignment(self.course, self.round + 1, device)
        return self.method.receive(a, self.kept.get(device), self.ask(device))

    def play(self, *devices: str) -> None:
        """One round of these devices."""
        for d in devices:
            self.down[d], self.received[d] = self.ask(d), self.receive(d)
        self.round += 1
        total: Any = None
        for d in sorted(devices):
            t = self.task(d, self.round)
            self.local[d] = self.method.local_round(t, self.kept.get(d), self.received[d])
            self.kept[d] = stored(self.local[d].kept)
            update = decode(encode(self.local[d].update))
            assert size(update) <= self.method.update_limit(self.course.model)
            record = self.records.get(d)
            read = self.method.read_update(t.assignment, self.state, record, update)
            total, self.records[d] = self.method.fold(t.assignment, self.state, total, read, record)
        self.state, changed = self.method.finish(self.course, self.round, sorted(devices), self.state, total)
        self.state = stored(self.state)
        self.records = {d: stored(r) for d, r in {**self.records, **changed}.items()}

    def personal(self, device: str) -> Personal:
        return self.method.personal(self.task(device, self.round + 1), self.kept.get(device), self.receive(device))

    def score(self, *devices: str) -> float:
        """The mean score of the devices' models."""
        return float(np.mean([self.task(d, self.round + 1).score(self.personal(d)) for d in devices]))
