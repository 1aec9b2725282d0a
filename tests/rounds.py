"""A federation by hand, for any method: one round as the coordinator and the devices play it, without a network.

The halves are those of the product: `coord_server.aggregation` and `edge_client.device.local`. Whatever lasts for
longer than a round is stored and read again after it, and all that travels is bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from numpy_mlp import NumpyMlp, clusters, mlp, model, secret

from coord_server import aggregation, guard
from coord_server.aggregation import Contribution
from coord_server.guard import Limit
from edge_client.bundle import Manifest, Model
from edge_client.data import DeviceData
from edge_client.device import local
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Method
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.metrics import METRICS, split_metrics, with_metrics
from edge_client.protocol.payload import Arrays, Payload, decode, encode
from edge_client.task import Assignment, Course, Local, Personal, Task
from edge_client.training import Trainer

M = mlp(6, 16, 8, 3)


def stored(value: Any) -> Any:
    """A state, record or kept value after it was stored and read again."""
    return None if value is None else aggregation.unpack(type(value), aggregation.pack(value))


def size(payload: Payload) -> int:
    return sum(array.nbytes for array in payload.arrays.values())


def weighed(local: Local, samples: int) -> Local:
    """A local round whose update the server's half can read: with the samples that a device's metrics have."""
    update = replace(local.update, meta={**local.update.meta, "samples": samples})
    return replace(local, update=update)


def with_figures(update: Payload) -> Payload:
    """An update as it travels: one written by hand gets the figures of its `samples`, of one sample without them."""
    if METRICS in update.meta:
        return update
    samples: Any = update.meta.get("samples", 1)
    return with_metrics(update, DeviceMetrics(samples=samples, loss=0.0))


class Rounds:
    """The server's state and records, what each device kept, received and sent last.

    Without values the network begins at drawn ones. A device has what `data` and `trainers` name, otherwise 40 samples
    of its own and `trainer`.
    """

    def __init__(
        self,
        method: Method,
        m: Manifest | Model = M,
        rounds: int = 12,
        *,
        seed: int = 3,
        cohort: int = 3,
        data: Mapping[str, DeviceData] | None = None,
        trainer: Trainer | None = None,
        trainers: Mapping[str, Trainer] | None = None,
    ) -> None:
        start = m if isinstance(m, Model) else model(m)
        self.method, self.m, self.round = method, start.manifest, 0
        self.data, self.trainers = dict(data or {}), dict(trainers or {})
        self.trainer = trainer or NumpyMlp(self.m)
        self.course = Course(start, seed, rounds, cohort)
        self.state: Any = aggregation.unpack(method.state_type, aggregation.pack(method.start(self.course)))
        self.records: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.down: dict[str, Payload] = {}
        self.received: dict[str, Any] = {}
        self.local: dict[str, Local] = {}
        """By device its last round; the update is what the method's server half reads, `samples` included."""
        self.up: dict[str, Payload] = {}
        """By device its last update as it travelled, with the device's figures."""
        self.read: dict[str, Any] = {}
        """By device its last update as the server decoded it."""
        self.places: dict[str, int] = {}
        """By device its place in the last round that it trained in."""
        self.took_part: list[str] = []
        """The devices whose updates the last round counted."""
        self.seen = set(self.data)
        """The devices that have data here or took part."""

    def task(self, device: str, round_: int | None = None, place: int = 0) -> Task:
        """The device's part in a round, by default in the next one."""
        a = Assignment(self.course, self.round + 1 if round_ is None else round_, device, place)
        data = self.data[device] if device in self.data else clusters(self.m, ord(device[0]))
        return Task(a, self.trainers.get(device, self.trainer), data, secret(device))

    def audience(self, device: str) -> str:
        return self.method.audience(self.course, self.round + 1, self.records.get(device))

    def ask(self, device: str) -> Payload:
        """The device's next downlink; that of its audience."""
        assert self.audience(device)
        record = self.records.get(device)
        return decode(aggregation.downlink(self.method, self.course, self.round + 1, self.state, record).data)

    def receive(self, device: str) -> Any:
        """The device's next downlink, decoded by it."""
        a = self.task(device).assignment
        return local.read_downlink(self.method, a, to_arrays(self.kept.get(device)), self.ask(device))[1]

    def lose(self, device: str) -> None:
        """The server's part of a reported loss."""
        left = self.method.lost(self.records.pop(device)) if device in self.records else None
        if left is not None:
            self.records[device] = self.unpacked(left)

    def play(self, *devices: str, lost: Collection[str] = (), limits: Mapping[str, Limit] | None = None) -> None:
        """One round of these devices; their places are their order.

        Those in `lost` report that they lost what they kept, and sit the round out. Another loss is an error.
        """
        for d in lost:
            self.lose(d)
        updates, sent = {}, dict[str, bytes]()
        for place, d in enumerate(devices):
            if d in lost:
                continue
            self.down[d] = self.ask(d)
            down = encode(self.down[d])
            assert sent.setdefault(self.audience(d), down) == down
            updates[d] = self.train(d, place)
        self.close(updates, limits)

    def train(self, device: str, place: int) -> Payload:
        """The device's half of a round, from its downlink to its update."""

        def read(method: Method, a: Assignment, kept: Mapping[str, Any], downlink: Payload) -> tuple[Any, Any]:
            value, self.received[device] = local.read_downlink(method, a, kept, downlink)
            return value, self.received[device]

        self.places[device] = place
        task, kept = self.task(device, place=place), to_arrays(self.kept.get(device))
        done = local.run_round(self.method, task, kept, self.down[device], read=read)
        self.kept[device] = self.reopened(done.kept)
        self.up[device] = decode(encode(done.update))
        assert size(self.up[device]) <= self.method.update_limit(self.course)
        self.local[device] = Local(
            self.kept[device], split_metrics(self.up[device])[0], done.trained, done.metrics.loss
        )
        return self.up[device]

    def reopened(self, kept: Arrays) -> Any:
        """What a device kept, as it has it in its next round."""
        if not kept:
            return None
        assert self.method.kept_type is not None
        return from_arrays(self.method.kept_type, decode(encode(Payload(kept))).arrays)

    def close(self, updates: Mapping[str, Payload], limits: Mapping[str, Limit] | None = None) -> None:
        """The server's half of a round: these updates folded into the next state. Without any the state stays.

        `limits` are those of the guard, by device; it finds none of its own.
        """
        self.round += 1
        self.seen |= updates.keys()
        self.took_part = sorted(updates)
        if not updates:
            return
        contributions = []
        for d in self.took_part:
            a, record = Assignment(self.course, self.round, d, self.places.get(d, 0)), self.records.get(d)
            data = encode(with_figures(updates[d]))
            checked = aggregation.check_update(self.method, a, self.state, record, data)
            self.read[d] = checked.update
            contributions.append(Contribution(d, checked, record, {}, a.place))
        with patch.object(guard, "limits", return_value=limits or {}):
            closed = aggregation.close_round(
                self.method, self.course, self.round, self.state, contributions, {}, "none", len(self.seen)
            )
        self.state = aggregation.unpack(self.method.state_type, aggregation.pack(closed.state))
        self.records |= {d: self.unpacked(record) for d, record in closed.records.items()}

    def unpacked(self, record: Any) -> Any:
        """A record as the server has it in the next round."""
        assert self.method.record_type is not None
        return aggregation.unpack(self.method.record_type, aggregation.pack(record))

    def personal(self, device: str) -> Personal:
        kept = to_arrays(self.kept.get(device))
        return local.choose_model(self.method, self.task(device), kept, self.ask(device), "global").personal

    def score(self, *devices: str) -> float:
        """The mean score of the devices' models."""
        return sum(self.task(d).score(self.personal(d)) for d in devices) / len(devices)
