"""Hermes, written from docs/methods/hermes.md alone. For networks of linear layers, with float32 values up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from references import F64, Descent, places
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32
from edge_client.task import Personal, Task

Units = list[NDArray[np.bool_]]
"""The live units of each layer but the last."""


class Subnetworks:
    """Hermes. All settings of `method` are given."""

    def __init__(self, fleet: Rounds, method: Any) -> None:
        self.fleet, self.c, m = fleet, method, fleet.m
        self.w = fleet.course.model.parameters.astype(float)
        layers = [(layer.weights[0], layer.biases[0]) for layer in m.layers]
        self.weights = [places(m, w).reshape(m.tensors[w].shape) for w, _ in layers]
        self.biases = [places(m, b) for _, b in layers]
        self.whole: Units = [np.ones(len(b), np.bool_) for b in self.biases[:-1]]
        self.devices: dict[str, dict[str, Any]] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.sent: dict[str, dict[str, Any]] = {}

    def live(self, units: Units) -> NDArray[np.bool_]:
        """bool[d]: the parameters that no removed unit makes or reads."""
        live = np.ones(len(self.w), np.bool_)
        for weight, bias, after, alive in zip(self.weights, self.biases, self.weights[1:], units, strict=False):
            for gone in (weight[~alive], bias[~alive], after[:, ~alive]):
                live[gone.ravel()] = False
        return live

    def held(self, device: str) -> F64:
        """The server's values for a device, float64[d]."""
        own: F64 = self.records[device]["own"] if device in self.records and self.c.state == "client" else self.w
        return own

    def due(self, device: str) -> tuple[F64, Units] | None:
        """What a device receives, cut to its units; None when it is lost."""
        kept, record = self.devices.get(device), self.records.get(device)
        units = self.whole if kept is None else kept["units"]
        if record is not None and not same(record["units"], self.whole) and not same(record["units"], units):
            return None
        return self.held(device) * self.live(units), units

    def statistics(self, device: str) -> F32:
        own: F32 = self.devices[device]["buffers"] if device in self.devices else self.fleet.course.model.buffers
        return own

    def train(self, device: str, round_: int) -> Personal | None:
        if (begin := self.due(device)) is None:
            return None
        (start, units), buffers, task, c = begin, self.statistics(device), self.fleet.task(device), self.c
        units = self.pruned(task, start, units, buffers)
        live = self.live(units)
        w = Descent(start * live, c.lr, c.momentum)
        for batch in task.batches(c.epochs, c.batch):
            found = task.gradient(w.at.astype(np.float32), buffers, batch)
            g, buffers = found.parameters.astype(float), found.buffers.copy()
            for weight in self.weights:
                matrix = w.at[weight]
                for axis in (0, 1):
                    norm = np.linalg.norm(matrix, axis=axis, keepdims=True)
                    g[weight] += c.lasso * matrix / np.maximum(norm, 1e-30)
            w.step(g * live)
        self.devices[device] = {"units": units, "buffers": buffers}
        self.sent[device] = {"units": units, "w": w.at}
        return self.made(w.at, units, buffers)

    def pruned(self, task: Task, w: F64, units: Units, buffers: F32) -> Units:
        """One step of the device's pruning, where its score allows it and the target asks for it."""
        fixed = self.live([np.zeros_like(u) for u in units]).sum()  # in no group
        size, goal = self.live(units).sum() - fixed, self.c.target * (len(w) - fixed)
        if size <= goal or task.score(self.made(w, units, buffers), "validation") <= self.c.threshold:
            return units
        most, left = max(goal, (1 - self.c.rate) * size), [u.copy() for u in units]
        while self.live(left).sum() - fixed > most:
            lost = [1 - (u.sum() - 1) / old.sum() for u, old in zip(left, units, strict=True)]
            lost = [np.inf if u.sum() == 1 else share for u, share in zip(left, lost, strict=True)]
            if min(lost) == np.inf:
                break
            layer = int(np.argmin(np.round(lost, 9)))
            norms = np.linalg.norm(w[self.weights[layer]], axis=1)
            left[layer][np.argmin(np.where(left[layer], norms, np.inf))] = False
        return left

    def made(self, w: F64, units: Units, buffers: F32) -> Personal:
        live = self.live(units)
        return Personal((w * live).astype(np.float32), buffers, live)

    def personal(self, device: str, round_: int) -> Personal | None:
        begin = self.due(device)
        return None if begin is None else self.made(*begin, self.statistics(device))

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        total, weight = np.zeros(len(self.w)), np.zeros(len(self.w))
        for d in devices:
            limit = limits.get(d, Limit(1.0, 1.0, False, ""))
            if not limit.drop:
                live, own = self.live(self.sent[d]["units"]), self.held(d)
                total += limit.weight * live * (own + limit.scale * (self.sent[d]["w"] - own))
                weight += limit.weight * live
        mean = np.where(weight > 0, total / np.maximum(weight, 1e-30), self.w)
        for d in devices:
            own = self.held(d) if d in limits and limits[d].drop else mean
            self.records[d] = {"units": self.sent[d]["units"], "own": own}
        if self.c.state == "global":
            self.w = mean

    def forget(self, device: str) -> None:
        self.devices.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.pop(device, None)


def same(one: Units, other: Units) -> bool:
    return all(map(np.array_equal, one, other))
