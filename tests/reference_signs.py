"""HideNseek after its pruning and BNN-FedAvg, written from docs/methods/hidenseek.md and bnn.md alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edge_kernels import counter
from references import F64, Descent, places, tensors
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32
from edge_client.narrow import Channels, narrow
from edge_client.task import Personal


class Signs:
    """HideNseek with `units`, the channels that stay by group, or BNN-FedAvg without."""

    def __init__(self, fleet: Rounds, method: Any, units: Channels | None) -> None:
        self.fleet, self.c, self.units = fleet, method, units
        cut = narrow(fleet.m, units or {})
        self.m, self.inside, self.statistics = cut.manifest, cut.parameters, cut.buffers
        whole = fleet.course.model
        self.weights, self.buffers = whole.parameters[self.inside], whole.buffers[self.statistics]
        parts = [
            part
            for layer in self.m.layers[:-1]
            for name in layer.weights
            for part in np.split(places(self.m, name), len(layer.gates) or 1)
        ]
        self.masked = np.concatenate(parts)
        sizes = [np.abs(self.weights[part].astype(float)) for part in parts]
        if units is None:
            self.size = np.concatenate([np.full(len(s), np.sqrt((s**2).mean())) for s in sizes])
            self.sure = np.concatenate([s / s.max() for s in sizes])
        else:
            key = counter.key(fleet.course.seed, "hidenseek", "first latents")
            every = [places(fleet.m, n) for layer in fleet.m.layers[:-1] for n in layer.weights]
            drawn = np.zeros(fleet.m.d)
            drawn[np.concatenate(every)] = counter.uniform(key, sum(map(len, every)))
            self.size, self.sure = np.concatenate(sizes), drawn[self.inside][self.masked]
        hidden = {n for layer in self.m.layers[:-1] for n in layer.weights}
        rest = [t.name for t in self.m.parameters if t.name not in hidden]
        own = rest if method.biases == "local" else tensors(self.m.layers[-1])
        self.local = places(self.m, *own)
        self.mean = np.where(self.weights[self.masked] >= 0, 1.0, -1.0)
        self.devices: dict[str, dict[str, Any]] = {}
        self.records: set[str] = set()
        self.sent: dict[str, F64] = {}

    def is_lost(self, device: str) -> bool:
        """Whether the device has to know the units, which travel once."""
        return self.units is not None and device in self.records and device not in self.devices

    def train(self, device: str, round_: int) -> Personal | None:
        if self.is_lost(device):
            return None
        c, kept, binary = self.c, self.devices.get(device), self.units is None
        start = c.radius * self.mean
        if kept is not None and c.restart == "latent":
            start = np.where((kept["latents"] >= 0) == (self.mean >= 0), kept["latents"], start)
        if round_ == 1:
            start = start * self.sure
        local, buffers = self.start(kept)
        latents, w = Descent(start, c.lr, c.momentum), Descent(local, c.local_lr, c.momentum)
        task = self.fleet.task(device)
        task = task if self.units is None else task.narrow(self.units)
        for batch in task.batches(c.epochs, c.batch):
            found = task.gradient(self.values(latents.at, w.at), buffers, batch)
            g, buffers = found.parameters.astype(float), found.buffers.copy()
            slope = np.abs(latents.at) <= 1 if binary else 1 - np.tanh(latents.at) ** 2
            latents.step(g[self.masked] * self.size * slope)
            if binary:
                latents.at = latents.at.clip(-1, 1)
            w.step(g[self.local])
        self.devices[device] = {"latents": latents.at, "local": w.at, "buffers": buffers}
        self.sent[device] = np.where(latents.at >= 0, 1.0, -1.0)
        return self.made(latents.at, w.at, buffers)

    def start(self, kept: dict[str, Any] | None) -> tuple[Any, Any]:
        return (self.weights[self.local], self.buffers) if kept is None else (kept["local"], kept["buffers"])

    def values(self, signs: F64, local: Any) -> F32:
        """The smaller network's parameters; signs are those of these numbers, that of 0 is +."""
        values = self.weights.astype(float)
        values[self.masked], values[self.local] = np.where(signs >= 0, self.size, -self.size), local
        return values.astype(np.float32)

    def made(self, signs: F64, local: Any, buffers: Any) -> Personal:
        """The whole network, 0 outside the smaller one."""
        parameters, all_buffers = np.zeros(self.fleet.m.d, np.float32), np.zeros(self.fleet.m.buffers_d, np.float32)
        parameters[self.inside], all_buffers[self.statistics] = self.values(signs, local), buffers
        mask = np.zeros(self.fleet.m.d, np.bool_)
        mask[self.inside] = True
        return Personal(parameters, all_buffers, None if mask.all() else mask)

    def personal(self, device: str, round_: int) -> Personal | None:
        return None if self.is_lost(device) else self.made(self.mean, *self.start(self.devices.get(device)))

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        counted = [d for d in devices if d not in limits or not limits[d].drop]
        if not counted:
            return
        samples = [limits[d].weight if d in limits else len(self.fleet.task(d).data.y) for d in counted]
        weights = [1] * len(counted) if self.c.down == "count" else samples
        mean = np.average([self.sent[d] for d in counted], axis=0, weights=weights)
        self.mean = mean if self.c.down == "count" else np.where(mean >= 0, 1.0, -1.0)
        self.records |= set(counted)

    def forget(self, device: str) -> None:
        self.devices.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.discard(device)
