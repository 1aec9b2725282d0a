"""FedDR, FedMap with and without `dr`, and FederatedPruning by LAMP, written from their pages in docs/methods alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from references import F64, Descent, places
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import Bits
from edge_client.methods.feddr import FedDR
from edge_client.methods.federated_pruning_lamp import FederatedPruningLamp
from edge_client.methods.fedmap import FedMap
from edge_client.task import Personal

NO_STATISTICS = np.zeros(0, np.float32)


class Averages:
    """One of them, as the fleet's method says. The mask is over all parameters; a bias stays in it."""

    def __init__(self, fleet: Rounds) -> None:
        self.fleet, m = fleet, fleet.m
        self.c: Any = fleet.method
        self.layers = [places(m, *layer.weights) for layer in m.layers]
        self.weights = np.concatenate(self.layers)
        self.theta, self.mask = fleet.course.model.parameters.astype(np.float64), np.ones(m.d, np.bool_)
        self.trained = self.mask  # of the last round that counted an update
        self.prunes = isinstance(self.c, FedMap)
        self.waits = isinstance(self.c, FederatedPruningLamp)  # pruned values stay on the server
        self.kept: dict[str, tuple[F64, F64] | None] = {}  # x and y
        self.sent: dict[str, F64] = {}
        self.last: dict[str, tuple[float, F64]] = {}  # with `dr` until the next one, also of devices that are away
        self.records: dict[str, int] = {}

    # --- the schedule

    def remaining(self, round_: int) -> int:
        m, rounds = self.c, self.fleet.course.rounds
        steps = (round_ - 1) // m.every
        share = (1 - m.prune) ** steps
        if m.schedule == "continuous" and (steps := (rounds - 1) // m.every):
            u = (round_ - 1 - (m.every - 1) / 2) / (steps * m.every)  # 0 and 1 in the middle of the first and last step
            share = (1 - m.prune * min(max(u, 0), 1)) ** steps
        return max(round(max(share, m.floor) * self.weights.size), len(self.layers))

    def period(self, round_: int) -> int:
        """FederatedPruning takes another mask in every period, also at the floor."""
        round_ = min(round_, self.fleet.course.rounds)
        return round_ if self.c.schedule == "continuous" else (round_ - 1) // self.c.every

    def due(self, round_: int) -> bool:
        """Whether another mask follows the round."""
        if self.waits:
            return self.period(round_ + 1) != self.period(round_)
        return bool(self.remaining(round_ + 1) < self.mask[self.weights].sum())

    def lamp(self, among: Any, keep: int) -> Any:
        """The mask of the `keep` largest LAMP scores among the weights of a mask, by the definition: a sum for each."""
        scores = np.full(len(among), -1.0)
        for layer in self.layers:
            square = {i: float(self.theta[i]) ** 2 for i in layer if among[i]}
            for i, own in square.items():
                scores[i] = own / sum(s for j, s in square.items() if (s, -j) >= (own, -i))
        mask = np.ones(len(among), np.bool_)
        mask[self.weights] = False
        mask[self.weights[np.argsort(-scores[self.weights], kind="stable")[:keep]]] = True
        return mask

    def splits(self, round_: int) -> tuple[float, float] | None:
        if isinstance(self.c, FedDR):
            return self.c.eta, self.c.alpha
        if (dr := self.c.dr) is None or (round_ - 1) // self.c.every < dr.switch:
            return None if dr is None else (dr.eta, dr.alpha)
        return None if dr.later == "fedavg" else (dr.later_eta or dr.eta, dr.later_alpha or dr.alpha)

    # --- a device

    def is_lost(self, device: str, round_: int) -> bool:
        """Whether it has to know the last round's model, or of FederatedPruning the period's mask."""
        last = self.records.get(device)
        if not self.prunes or last is None or device in self.kept:
            return False
        return self.period(last) == self.period(round_) if self.waits else last == round_ - 1

    def train(self, device: str, round_: int) -> Personal | None:
        if self.is_lost(device, round_):
            return None
        start, splits = self.theta * self.mask, self.splits(round_)
        if splits:
            eta, alpha = splits
            x, y = self.kept.get(device) or (start, start)
            y = self.mask * (y + alpha * (start - x))
            x = self.descend(device, y, 1 / eta)
            self.kept[device], self.sent[device] = (x, y), 2 * x - y
        else:
            x = self.sent[device] = self.descend(device, start, 0)
            self.kept[device] = None
        return self.model(x, self.mask)

    def descend(self, device: str, start: F64, pull: float) -> F64:
        """Local SGD on the loss plus the proximal term around `start` and the decay."""
        c, task = self.c, self.fleet.task(device)
        w, decay = Descent(start, c.learning_rate(task.assignment.model), c.momentum), getattr(c, "weight_decay", 0.0)
        for batch in task.batches(c.epochs, c.batch):
            g = task.gradient(w.at.astype(np.float32), NO_STATISTICS, batch).parameters
            w.step(self.mask * (g + pull * (w.at - start) + decay * w.at))
        return w.at

    def model(self, values: F64, mask: Bits) -> Personal:
        return Personal((values * mask).astype(np.float32), NO_STATISTICS, mask if self.prunes else None)

    def personal(self, device: str, round_: int) -> Personal | None:
        """The model of a round; after the last one that which was trained last."""
        over = round_ > self.fleet.course.rounds
        return None if self.is_lost(device, round_) else self.model(self.theta, self.trained if over else self.mask)

    def forget(self, device: str) -> None:
        self.kept.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.pop(device, None)

    # --- the server

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        counted = [d for d in devices if d not in limits or not limits[d].drop]
        if counted:
            start, ends = self.theta * self.mask, dict[str, tuple[float, F64]]()
            for d in counted:
                own = len(self.fleet.data[d].y) if self.c.weights == "samples" else 1
                weight, scale = (limits[d].weight, limits[d].scale) if d in limits else (own, 1)
                ends[d] = weight, start + scale * (self.sent[d] - start)
            self.last = {**self.last, **ends} if self.splits(round_) else ends
            weights, values = zip(*self.last.values(), strict=True)
            rest = self.theta if self.waits else np.zeros_like(self.theta)
            self.theta, self.trained = np.where(self.mask, np.average(values, axis=0, weights=weights), rest), self.mask
            self.records |= dict.fromkeys(counted, round_)
        if self.prunes and round_ < self.fleet.course.rounds and self.due(round_) and (counted or self.waits):
            self.mask = self.lamp(np.ones_like(self.mask) if self.waits else self.mask, self.remaining(round_ + 1))
        found = self.fleet.state.theta if self.prunes else self.fleet.state.parameters
        np.testing.assert_allclose(found, self.theta, rtol=0, atol=1e-4)
        self.theta = found.astype(np.float64)
