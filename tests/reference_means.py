"""Standalone, LG-FedAvg and Per-FedAvg, written from their pages in docs/methods alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edge_kernels.codecs import values
from references import F64, Descent, places, tensors
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32
from edge_client.task import Batch, Personal, Task


class Means:
    """Standalone, LG-FedAvg or Per-FedAvg, by the name of `method`. A value codec is the product's own."""

    def __init__(self, fleet: Rounds, method: Any) -> None:
        self.fleet, self.c = fleet, method
        model = fleet.course.model
        self.w, self.buffers, m = model.parameters.astype(float), model.buffers.astype(float), fleet.m
        names = [n for layer in m.layers[-getattr(method, "num_layers", 1) :] for n in tensors(layer)]
        self.head = places(m, *names)
        self.body = np.setdiff1d(np.arange(m.d), self.head)
        self.devices: dict[str, dict[str, Any]] = {}
        self.records: set[str] = set()
        self.sent: dict[str, tuple[F64, F64]] = {}

    def divided(self, round_: int) -> bool:
        """Whether only the head travels."""
        return bool(self.c.name == "lgfedavg" and round_ > self.c.global_rounds)

    def start(self, device: str, round_: int) -> tuple[Any, Any] | None:
        """The model that a device begins with; None when it is lost."""
        kept = self.devices.get(device, {})
        if self.c.name == "standalone":
            return kept.get("w", self.w), kept.get("buffers", self.buffers)
        if not self.divided(round_):
            return self.w, self.buffers
        if "body" not in kept:
            return None if device in self.records else (self.w, self.buffers)
        w = self.w.copy()
        w[self.body] = kept["body"]
        return w, kept["buffers"]

    def train(self, device: str, round_: int) -> Personal | None:
        if (begin := self.start(device, round_)) is None:
            return None
        c, task, (start, buffers) = self.c, self.fleet.task(device), begin
        w = Descent(start, c.lr, c.momentum)
        orders = {phase: task.batches(c.epochs, c.batch, phase) for phase in ("inner", "curvature")}
        for batch in task.batches(c.epochs, c.batch):
            if c.name == "perfedavg":
                step, buffers = self.meta(task, w.at, buffers, batch, *map(next, orders.values()))
            else:
                step, buffers = slope(task, w.at, buffers, batch)
            w.step(step)
        self.keep(device, round_, w.at, start, buffers)
        return personal(self.adapted(task, w.at, buffers))

    def meta(self, task: Task, w: F64, buffers: Any, outer: Batch, inner: Batch, third: Batch) -> tuple[F64, Any]:
        """The gradient of f(w - alpha grad f(w)), without the Hessian or with it."""
        c = self.c
        v, statistics = slope(task, w - c.alpha * slope(task, w, buffers, inner)[0], buffers, outer)
        if c.variant == "hf":
            above, below = (slope(task, w + sign * c.delta * v, buffers, third)[0] for sign in (1, -1))
            v = v - c.alpha * (above - below) / (2 * c.delta)
        return v, statistics

    def adapted(self, task: Task, w: F64, buffers: Any) -> tuple[F64, Any]:
        """Per-FedAvg's personal model: plain steps, one on one batch or whole epochs."""
        c = self.c
        if c.name == "perfedavg":
            for batch in task.batches(max(c.personal_epochs, 1), c.batch, "personal"):
                step, statistics = slope(task, w, buffers, batch)
                w, buffers = w - c.alpha * step, statistics
                if not c.personal_epochs:
                    break
        return w, buffers

    def keep(self, device: str, round_: int, w: F64, start: Any, buffers: Any) -> None:
        """What the device sends, and what it keeps for its next round."""
        c, kept = self.c, self.devices.get(device, {})
        mine = self.head if self.divided(round_) else np.arange(len(w))
        sent, left = w[mine], {}
        if c.name != "standalone" and c.up != "float32":
            change, old = w[mine] - start[mine], kept.get("residual")
            if old is not None:
                change = change + (old if len(old) == len(mine) else old[mine])
            decoded = values.decode(c.up, values.encode(c.up, change, 0), len(mine), 0)
            sent = start[mine] + decoded
            left = {"residual": change - decoded} if c.feedback else {}
        if c.name == "standalone":
            left = {"w": w, "buffers": buffers}
        elif self.divided(round_):
            left |= {"body": w[self.body], "buffers": buffers}
        self.devices[device], self.sent[device] = left, (sent, buffers)

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        counted = [d for d in devices if d not in limits or not limits[d].drop]
        if self.c.name == "standalone" or not counted:
            return
        weights = [limits[d].weight if d in limits else len(self.fleet.task(d).data.y) for d in counted]
        scales = [limits[d].scale if d in limits else 1 for d in counted]

        def moved(now: Any, which: int) -> F64:
            moves = [scale * (self.sent[d][which] - now) for scale, d in zip(scales, counted, strict=True)]
            return np.asarray(now + np.average(moves, axis=0, weights=weights))

        if self.divided(round_):
            self.w[self.head] = moved(self.w[self.head], 0)
            self.records |= set(counted)
        else:
            self.w, self.buffers = moved(self.w, 0), moved(self.buffers, 1)

    def personal(self, device: str, round_: int) -> Personal | None:
        begin = self.start(device, round_)
        return None if begin is None else personal(self.adapted(self.fleet.task(device), *begin))

    def forget(self, device: str) -> None:
        self.devices.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.discard(device)


def slope(task: Task, w: F64, buffers: Any, batch: Batch) -> tuple[F64, F32]:
    found = task.gradient(w.astype(np.float32), np.asarray(buffers, np.float32), batch)
    return found.parameters.astype(float), found.buffers.copy()


def personal(model: tuple[F64, Any]) -> Personal:
    return Personal(model[0].astype(np.float32), np.asarray(model[1], np.float32))
