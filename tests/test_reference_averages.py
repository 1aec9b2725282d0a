"""Random federations beside plain second implementations, written from the methods' pages alone.

Cohorts, samples, settings and the rounds in which a device loses its state are drawn. After every round the server's
model and each device's trained model are compared; then the reference goes on from the server's own values, so that
rounding errors do not add up to another mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_mlp import clusters, mlp
from references import Descent
from rounds import Rounds

from edge_client.errors import LostError
from edge_client.methods import make_method
from edge_client.methods.feddr import FedDR
from edge_client.methods.federated_pruning_lamp import FederatedPruningLamp
from edge_client.methods.fedmap import FedMap
from edge_client.task import Task

M = mlp(4, 5, 3)
LAYERS = [np.arange(M.d)[M.tensors[name].span] for name in ("0.w", "1.w")]
WEIGHTS = np.concatenate(LAYERS)
Rng = np.random.Generator


def sgd(task: Task, method: Any, start: Any, pull: float = 0.0, decay: float = 0.0, live: Any = 1.0) -> Any:
    """Local SGD with momentum on the loss plus the proximal term around `start` and the decay, where `live` is 1."""
    w, buffers = Descent(start, method.learning_rate(task.assignment.model), method.momentum), np.zeros(0, np.float32)
    for batch in task.batches(method.epochs, method.batch):
        g = task.trainer.gradient(w.at.astype(np.float32), buffers, batch.x, batch.y).parameters
        w.step(live * (g + pull * (w.at - start) + decay * w.at))
    return w.at


def lamp(theta: Any, among: Any, keep: int) -> Any:
    """The mask of the `keep` largest LAMP scores among the weights of a mask, by the definition: a sum for each."""
    scores = np.full(M.d, -1.0)
    for layer in LAYERS:
        square = {i: float(theta[i]) ** 2 for i in layer if among[i]}
        for i, own in square.items():
            scores[i] = own / sum(s for j, s in square.items() if (s, -j) >= (own, -i))
    mask = np.ones(M.d, np.bool_)
    mask[WEIGHTS] = False
    mask[WEIGHTS[np.argsort(-scores[WEIGHTS], kind="stable")[:keep]]] = True
    return mask


class Splitting:
    """FedDR on devices and server: y, x and the last reflection of each, in the mean until another replaces it."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    def train(self, task: Task, method: Any, theta: Any, eta: float, alpha: float, **more: Any) -> tuple[Any, Any]:
        """The trained model x and the reflection."""
        device, live = task.assignment.device, more.get("live", 1.0)
        x, y = self.held.get(device, (theta, theta))
        y = live * (y + alpha * (theta - x))
        x = sgd(task, method, y, pull=1 / eta, **more)
        self.held[device] = x, y
        return x, 2 * x - y

    def mean(self, counted: dict[str, Any], weight: Callable[[str], float]) -> Any:
        self.last |= counted
        return sum(weight(d) * r for d, r in self.last.items()) / sum(weight(d) for d in self.last)


class Reference:
    """FedDR, FedMap with and without `dr`, or FederatedPruning by LAMP, as `method` says."""

    def __init__(self, p: Rounds) -> None:
        self.p = p
        self.method: Any = p.method
        self.theta, self.mask = p.course.model.parameters.astype(np.float64), np.ones(M.d, np.bool_)
        self.splitting = Splitting()
        self.prunes = isinstance(p.method, FedMap)
        self.waits = isinstance(p.method, FederatedPruningLamp)  # pruned values stay on the server

    def weight(self, device: str) -> float:
        return len(self.p.data[device].y) if self.method.weights == "samples" else 1

    def remaining(self, round_: int) -> int:
        m, rounds = self.method, self.p.course.rounds
        steps = (round_ - 1) // m.every
        share = (1 - m.prune) ** steps
        if m.schedule == "continuous" and (steps := (rounds - 1) // m.every):
            u = (round_ - 1 - (m.every - 1) / 2) / (steps * m.every)  # 0 and 1 in the middle of the first and last step
            share = (1 - m.prune * min(max(u, 0), 1)) ** steps
        return max(round(max(share, m.floor) * WEIGHTS.size), len(LAYERS))

    def due(self, round_: int) -> bool:
        """Whether another mask follows the round. FederatedPruning takes one in every period, also at the floor."""
        if self.waits:
            return bool(self.method.schedule == "continuous" or round_ % self.method.every == 0)
        return bool(self.remaining(round_ + 1) < self.mask[WEIGHTS].sum())

    def splits(self, round_: int) -> tuple[float, float] | None:
        if isinstance(self.method, FedDR):
            return self.method.eta, self.method.alpha
        if (dr := self.method.dr) is None or (round_ - 1) // self.method.every < dr.switch:
            return None if dr is None else (dr.eta, dr.alpha)
        return None if dr.later == "fedavg" else (dr.later_eta or dr.eta, dr.later_alpha or dr.alpha)

    def round(self, round_: int, devices: list[str]) -> None:
        """A round that `self.p` has played; the devices' changes are at the mask of the round."""
        start, live, splits = self.theta * self.mask, self.mask, self.splits(round_)
        decay, ends = getattr(self.method, "weight_decay", 0.0), {}
        for place, d in enumerate(devices):
            task = self.p.task(d, round_, place)
            if splits:
                x, ends[d] = self.splitting.train(task, self.method, start, *splits, live=live, decay=decay)
            else:
                x = ends[d] = sgd(task, self.method, start, live=live, decay=decay)
            assert self.p.local[d].trained.parameters == pytest.approx(x, abs=1e-4)
        if splits:
            mean = live * self.splitting.mean(ends, self.weight)
        else:
            self.splitting = Splitting()
            mean = sum(self.weight(d) * end for d, end in ends.items()) / sum(map(self.weight, devices))
        self.theta = np.where(live, mean, self.theta)
        if self.prunes and round_ < self.p.course.rounds and self.due(round_):
            self.mask = lamp(self.theta, np.ones(M.d) if self.waits else self.mask, self.remaining(round_ + 1))
        found = self.p.state.theta if self.prunes else self.p.state.parameters
        shown = np.ones(M.d) if self.waits else self.mask  # what a pruning takes is not compared again
        assert found * shown == pytest.approx(self.theta * shown, abs=1e-4)
        self.theta = found * shown.astype(np.float64)


def drawn(rng: Rng, kind: str) -> Any:
    """A method with drawn settings."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    local = {"epochs": 1, "batch": one(5, 10, 20), "lr": 0.05, "weights": one("uniform", "samples")}
    if kind == "feddr":
        return make_method({"name": "feddr", "eta": one(0.5, 10), "alpha": one(0.9, 1.5), **local})
    local |= {"every": one(1, 2, 3), "prune": one(0.1, 0.3, 0.6), "floor": one(0.01, 0.3), "weight_decay": 0.05}
    local["schedule"] = one("step", "continuous")
    if kind == "fedmap with dr":
        later = one({}, {"later": "fedavg"}, {"later_eta": 3, "later_alpha": 1.75})
        local |= {"momentum": 0, "dr": {"eta": one(0.5, 10), "alpha": one(0.9, 1.5), "switch": 2, **later}}
    return make_method({"name": kind.removesuffix(" with dr"), **local})


@pytest.mark.parametrize("kind", ["feddr", "fedmap", "fedmap with dr", "federated_pruning_lamp"])
@pytest.mark.parametrize("seed", range(6))
def test_a_federation_is_that_of_the_page(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = {d: clusters(M, i, int(rng.integers(6, 40))) for i, d in enumerate("abcd")}
    p = Rounds(drawn(rng, kind), M, int(rng.integers(4, 9)), data=data)
    reference = Reference(p)
    for round_ in range(1, p.course.rounds + 1):
        devices = sorted(rng.permutation(list(data))[: rng.integers(2, 5)])
        lost = []
        if rng.random() < 0.4 and (unlucky := devices[0]) in p.kept:
            del p.kept[unlucky]
            reference.splitting.held.pop(unlucky, None)
            try:
                p.receive(unlucky)
            except LostError:
                lost = [unlucky]
        p.play(*devices, lost=lost)
        reference.round(round_, [d for d in devices if d not in lost])
    for d in data:
        mask = p.personal(d).mask
        assert p.personal(d).parameters == pytest.approx(reference.theta * reference.mask, abs=1e-6)
        assert mask is None or (mask == reference.mask).all()
