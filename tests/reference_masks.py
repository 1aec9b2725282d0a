"""FedMask and Signed, written from docs/methods/fedmask.md and signed.md alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray
from references import F64, Descent, Places, places, tensors
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32
from edge_client.task import Personal, Task


class Masks:
    """FedMask, or Signed with `signed`. All settings of `method` are given."""

    def __init__(self, fleet: Rounds, method: Any, signed: bool = False) -> None:
        self.fleet, self.c, self.signed = fleet, method, signed
        m, self.model = fleet.m, fleet.course.model
        layers = m.layers[:-1] if method.head == "local" else m.layers
        masked: list[Places] = []
        real: list[Places] = []
        self.shapes: list[tuple[int, int]] = []
        self.layers: dict[str, Places] = {}
        for layer in layers:
            begin = sum(len(p) for p in masked)
            (name,) = layer.weights
            rows = np.split(places(m, name), len(layer.gates) or 1)
            for gate, part in zip(layer.gates or ("",), rows, strict=True):
                if gate in method.real_gates:
                    real.append(part)
                    continue
                masked.append(part)
                self.shapes.append((-1, m.tensors[name].shape[1]))
            self.layers[layer.name] = np.arange(begin, sum(len(p) for p in masked))
        self.masked, self.ends = np.concatenate(masked), np.cumsum([len(p) for p in masked])
        self.real = np.concatenate([np.zeros(0, np.int64), *real])
        rest = [t.name for t in m.parameters if t.name not in {n for layer in layers for n in layer.weights}]
        own = [t for t in rest if method.biases == "local" or (method.head == "local" and t in tensors(m.layers[-1]))]
        self.local = places(m, *own)
        n, key = len(self.masked), counter.key(fleet.course.seed, "fedmask", "first mask")
        coins = counter.uint64(key, n) >= 2**63
        self.first = coins if method.initial_mask == "random" else np.ones(n, np.bool_)
        self.share, self.averaged, self.levels = self.first.astype(float), np.zeros(n), 1
        self.gates = self.model.parameters[self.real].astype(float)
        self.devices: dict[str, dict[str, Any]] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.sent: dict[str, dict[str, Any]] = {}

    def due(self, device: str) -> F64 | None:
        """The shares of ones that the device receives; None when it is lost."""
        record, kept = self.records.get(device), self.devices.get(device)
        if record is None:
            return self.rounded(self.first.astype(float) if self.c.state == "client" else self.share)
        if kept is None or any((kept[k] != record[k]).any() for k in ("live", "bits")):
            return None
        if self.c.state == "client":
            return np.asarray(record["own"], float)
        return self.rounded(np.where(self.averaged >= record["round"], self.share, record["bits"]))

    def rounded(self, share: F64) -> F64:
        steps = self.levels if self.c.down == "count" else 1
        return np.floor(share * steps + 0.5) / steps

    def train(self, device: str, round_: int) -> Personal | None:
        if (share := self.due(device)) is None:
            return None
        kept, task = self.devices.get(device), self.fleet.task(device)
        live = np.ones(len(self.masked), np.bool_)
        start = self.c.radius * (2 * share - 1)
        state = self.start(kept)
        if kept is not None:
            live = kept["live"]
        elif self.c.keep < 1:
            before = start.copy()
            after, *state = self.descend(task, before, live, *state, 1, "prune")
            live = self.prune(np.abs(self.model.parameters[self.masked] * (after - before)))
        if kept is not None and self.c.restart == "latent":
            start = np.where((kept["scores"] >= 0) == (share >= 0.5), kept["scores"], start)
        scores, real, local, buffers = self.descend(task, start, live, *state, self.c.epochs, "train")
        bits = (scores >= 0) & live
        self.devices[device] = {"live": live, "bits": bits, "scores": scores, "local": local, "buffers": buffers}
        self.sent[device] = {"live": live, "bits": bits, "real": real, "round": round_}
        return self.made(bits, live, real, local, buffers)

    def start(self, kept: dict[str, Any] | None) -> list[Any]:
        """The float32 parameters, those of the gates first, and the statistics that a device begins with."""
        if kept is None:
            return [self.gates, self.model.parameters[self.local], self.model.buffers]
        return [self.gates, kept["local"], kept["buffers"]]

    def prune(self, rank: F64) -> NDArray[np.bool_]:
        """The largest of each pruned layer."""
        live = np.ones(len(rank), np.bool_)
        count = self.c.prune_layers
        for name in [*self.layers][-count:] if isinstance(count, int) else count:
            mine = self.layers[name]
            stay = sorted(mine, key=lambda i: -rank[i])[: max(1, round(self.c.keep * len(mine)))]
            live[mine] = np.isin(mine, stay)
        return live

    def descend(
        self, task: Task, scores: F64, live: Any, real: Any, local: Any, buffers: Any, epochs: int, phase: str
    ) -> tuple[F64, F64, F64, F32]:
        c, frozen = self.c, self.model.parameters[self.masked].astype(float)
        s, r, w = (Descent(v, lr, c.momentum) for v, lr in ((scores, c.lr), (real, c.local_lr), (local, c.local_lr)))
        for batch in task.batches(epochs, c.batch, phase):
            made = self.made(s.at >= 0, live, r.at, w.at, buffers)
            found = task.gradient(made.parameters, buffers, batch)
            g, buffers = found.parameters.astype(float), found.buffers.copy()
            if self.signed:
                slope = (1 - np.tanh(s.at) ** 2) * g[self.masked] * frozen
            else:
                soft = 1 / (1 + np.exp(-s.at))
                slope = soft * (1 - soft) * (g[self.masked] * frozen + c.group_lasso * self.lasso(soft * live))
            s.step(slope * live)
            r.step(g[self.real])
            w.step(g[self.local])
        return s.at, r.at, w.at, buffers

    def lasso(self, soft: F64) -> F64:
        """The gradient of the sum of the norms of the rows and columns of every tensor, a gate being one."""
        out = []
        for part, shape in zip(np.split(soft, self.ends[:-1]), self.shapes, strict=True):
            matrix = part.reshape(shape)
            norms = (np.linalg.norm(matrix, axis=axis, keepdims=True) for axis in (0, 1))
            out.append(sum(np.where(norm > 0, matrix / np.maximum(norm, 1e-30), 0) for norm in norms).ravel())
        return np.concatenate(out)

    def made(self, bits: Any, live: Any, real: Any, local: Any, buffers: Any) -> Personal:
        """The weights under a mask; for Signed a live weight whose bit is 0 is negated."""
        values, mask = self.model.parameters.astype(float), np.ones(self.fleet.m.d, np.bool_)
        gate = (np.where(bits, 1, -1) if self.signed else bits) * live
        values[self.masked] *= gate
        values[self.real], values[self.local], mask[self.masked] = real, local, gate != 0
        return Personal(values.astype(np.float32), np.asarray(buffers, np.float32), mask)

    def personal(self, device: str, round_: int) -> Personal | None:
        if (share := self.due(device)) is None:
            return None
        kept = self.devices.get(device)
        live = np.ones(len(self.masked), np.bool_) if kept is None else kept["live"]
        return self.made(share >= 0.5, live, *self.start(kept))

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        self.records |= {d: {**self.sent[d], "own": self.sent[d]["bits"]} for d in devices}
        counted = {d: self.sent[d] for d in devices if d not in limits or not limits[d].drop}
        if not counted:
            return
        holders, ones = (np.sum([s[k] for s in counted.values()], axis=0) for k in ("live", "bits"))
        shared, mean = holders >= 2, ones / np.maximum(holders, 1)
        self.share, self.averaged = np.where(shared, mean, self.share), np.where(shared, round_, self.averaged)
        self.levels = max(self.levels, len(counted))
        scales = [limits[d].scale if d in limits else 1 for d in counted]
        moves = [scale * (s["real"] - self.gates) for scale, s in zip(scales, counted.values(), strict=True)]
        self.gates = self.gates + np.mean(moves, axis=0)
        for d, s in counted.items():
            self.records[d]["own"] = np.where(shared, mean >= 0.5, s["bits"]) & s["live"]

    def forget(self, device: str) -> None:
        self.devices.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.pop(device, None)
