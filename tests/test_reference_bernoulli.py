"""FedPM, DeltaMask and Coupled against the formulas of their pages: whole federations with random settings.

The reference below is written from docs/methods alone. It trains in float64 and follows the masks that the server
read, since a rounding may turn a draw; what it says of each draw, of theta, the head and the final model is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, counter
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, clusters, mlp, secret
from references import Descent
from rounds import Rounds

from edge_client.bundle import Bits, Model, generate
from edge_client.methods import make_method

Values = NDArray[np.float64]
M = mlp(6, 9, 7, 3)
ENDS = np.cumsum([0, *(t.size for t in M.parameters)])
WEIGHTS, BIASES = ([np.arange(ENDS[i], ENDS[i + 1]) for i in range(first, 6, 2)] for first in (0, 1))
HEAD = np.arange(ENDS[4], ENDS[6])
CLOSE = 1e-3  # draws nearer than this to their probability may fall on either side


class Reference:
    """The server's values and what a device makes of them."""

    def __init__(self, settings: Mapping[str, Any], start: Model, seed: int, rounds: int, cohort: int) -> None:
        self.s, self.seed, self.rounds, self.cohort = settings, seed, rounds, cohort
        self.name, self.bundle = settings["name"], start.parameters.astype(np.float64)
        trained = start.manifest.seed is None
        how = settings["head"] if settings["head"] != "auto" else "keep" if trained else "probe"
        layers = range(3 if how == "mask" else 2)
        kinds = (WEIGHTS, BIASES) if settings["biases"] else (WEIGHTS,)
        self.at = np.concatenate([kind[i] for i in layers for kind in kinds])
        self.probing = settings["probe_rounds"] if how == "probe" else 0
        self.head = self.bundle[HEAD]
        self.weights = self.bundle[self.at] / (settings["theta0"] if trained and settings["rescale"] else 1)
        plain = {"spread": 0, "prior": 1, "posterior": "mode", "reset_every": 1}
        shared = self.name == "coupled" or settings.get("sampling") in ("device", "stratified")
        self.difference = trained and shared and plain.items() <= settings.items()
        self.evaluate = {"auto": "expected" if trained else "sample"}.get(settings["evaluate"], settings["evaluate"])
        self.ones, self.masks = np.zeros(len(self.at)), 0
        self.places: dict[str, int] = {}
        theta0, clip = settings["theta0"], settings["clip"]
        self.below, self.above = (math.ceil(x * cohort - 1e-9) for x in (theta0 - clip, 1 - clip - theta0))
        if self.difference:
            self.ones += self.below

    def draws(self, *words: int | str) -> Values:
        return counter.uniform(counter.key(*words), len(self.at))

    def theta(self) -> Values:
        """The server's theta as a device holds it."""
        s, theta0, clip = self.s, self.s["theta0"], self.s["clip"]
        if self.difference:
            theta = theta0 + (self.ones - self.below) / self.cohort
        elif not self.masks:
            z = sum((self.draws(self.seed, "first scores", i) for i in range(12)), np.full(len(self.at), -6.0))
            drawn = np.rint(4096 / (1 + np.exp(-s["spread"] * z) * (1 - theta0) / theta0)) / 4096
            theta = drawn if s["spread"] else np.full(len(self.at), theta0)
        elif s["posterior"] == "mode":
            theta = (self.ones + s["prior"] - 1) / (self.masks + 2 * s["prior"] - 2)
        else:
            theta = (self.ones + s["prior"]) / (self.masks + 2 * s["prior"])
        theta = np.clip(theta, clip, 1 - clip)
        return theta if self.name == "coupled" or s.get("down") == "counts" else theta.astype(np.float32).astype(float)

    def uniforms(self, round_: int, device: str) -> Values:
        own = self.name == "coupled" or self.s["sampling"] == "device"
        u = self.draws(self.seed, "uniforms", round_, *[device] * own)
        shifted = self.s.get("sampling") == "stratified"
        return (u + (self.places[device] + 1 / 2) / self.cohort) % 1 if shifted else u

    # --- a device

    def batches(self, fleet: Rounds, device: str, round_: int, epochs: int, phase: str) -> Any:
        """(step, x, y) of each batch."""
        data, size, step = fleet.task(device).data, self.s["batch"], 0
        for epoch in range(epochs):
            order = counter.permutation(counter.key(self.seed, "batches", phase, device, round_, epoch), len(data.y))
            for low in range(0, len(order), size):
                yield step, data.x[order[low : low + size]], data.y[order[low : low + size]]
                step += 1

    def gradient(self, values: Values, x: Any, y: Any) -> Values:
        return NumpyMlp(M).gradient(values.astype(np.float32), np.zeros(0, np.float32), x, y).parameters.astype(float)

    def probe(self, fleet: Rounds, device: str, round_: int) -> Values:
        values, head = self.bundle.copy(), Descent(self.head, self.s["probe_lr"], self.s["probe_momentum"])
        for _, x, y in self.batches(fleet, device, round_, self.s["probe_epochs"], "probe"):
            values[HEAD] = head.at
            head.step(self.gradient(values, x, y)[HEAD])
        return head.at

    def train(self, fleet: Rounds, device: str, round_: int, adam: Any) -> Values:
        """theta_k."""
        theta, values = self.theta(), self.bundle.copy()
        scores, values[HEAD] = np.log(theta / (1 - theta)), self.head
        mean, square, steps = adam or (np.zeros(len(self.at)), np.zeros(len(self.at)), 0)
        for step, x, y in self.batches(fleet, device, round_, self.s["epochs"], "train"):
            p = 1 / (1 + np.exp(-scores))
            numbers = counter.uint64(counter.key(secret(device), "training masks", round_, step), len(p))
            halves = np.stack([numbers & np.uint64(2**32 - 1), numbers >> np.uint64(32)], axis=1).ravel()
            values[self.at] = self.weights * ((halves[: len(p)] >> np.uint64(8)) * 2.0**-24 < p)
            g = self.gradient(values, x, y)[self.at] * self.weights * p * (1 - p) * (p if self.s["ste"] == "ref" else 1)
            steps, mean, square = steps + 1, 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
            move = mean / (1 - 0.9**steps) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-8)
            scores = scores - self.s["lr"] * move
        theta_k: Values = 1 / (1 + np.exp(-scores))
        return theta_k

    def check_mask(self, read: Bits, theta_k: Values, round_: int, device: str) -> None:
        """The mask that the server read is that of the device's draw."""
        secretly = self.name == "fedpm" or self.s.get("sampling") == "independent"
        key = (secret(device), "uploaded mask", round_) if secretly else None
        u = self.draws(*key) if key else self.uniforms(round_, device)
        wrong, unsure = read != (u < theta_k), np.abs(u - theta_k) < CLOSE
        if self.name != "deltamask":
            assert not (wrong & ~unsure).any()
            return
        theta, reference = self.theta(), self.uniforms(round_, device) < self.theta()
        along = (round_ - self.probing - 1) / max(self.rounds - self.probing - 1, 1)
        end = self.s["kappa_end"] or self.s["kappa"]
        kappa = end + (self.s["kappa"] - end) * (1 + math.cos(math.pi * along)) / 2
        flips, sent = (u < theta_k) != reference, read != reference
        assert not (sent & ~flips & ~unsure).any()
        assert abs(sent.sum() - kappa * flips.sum()) <= 0.5 + (unsure.sum() if wrong.any() else 0)
        divergence = theta_k * np.log(theta_k / theta) + (1 - theta_k) * np.log((1 - theta_k) / (1 - theta))
        least, most = divergence[sent].min(initial=np.inf), divergence[flips & ~sent & ~unsure].max(initial=0)
        assert least > most * 0.99 - 1e-5

    # --- the server

    def fold(self, round_: int, masks: Mapping[str, Bits]) -> None:
        count, ones = len(masks), np.sum([*masks.values()], axis=0).astype(float)
        if self.difference:
            net = ones - np.sum([self.uniforms(round_, d) < self.theta() for d in masks], axis=0)
            if count != self.cohort:
                net = np.floor(net * self.cohort / count + self.draws(self.seed, "partial cohort", round_))
            self.ones = np.clip(self.ones + net, 0, self.below + self.above)
            return
        if (round_ - self.probing) % self.s["reset_every"] == 0:
            self.ones, self.masks = np.zeros(len(self.at)), 0
        self.ones = self.ones + (ones / count if self.s.get("tally") == "mean" else ones)
        self.masks += count

    def model(self, round_: int) -> Values:
        """The global model before a round."""
        values, theta = self.bundle.copy(), self.theta()
        values[HEAD] = self.head
        if self.probing and round_ <= self.probing + 1:
            return values
        drawn = self.draws(self.seed, "evaluated mask", round_) < theta
        values[self.at] = self.weights * {"expected": theta, "threshold": theta >= 0.5, "sample": drawn}[self.evaluate]
        return values


def some(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Settings, each of which is the default half of the time."""

    def one(default: Any, *others: Any) -> Any:
        return default if rng.random() < 0.5 else others[rng.integers(len(others))]

    s = {
        "name": name, "head": one("auto", "probe", "keep", "mask"), "biases": one(False, True),
        "probe_rounds": one(1, 2), "probe_epochs": one(1, 2), "probe_lr": one(0.1, 0.02),
        "probe_momentum": one(0.9, 0.5), "epochs": one(1, 2), "batch": one(64, 16, 7), "lr": one(0.1, 0.5),
        "ste": one("identity", "ref"), "persistent": one(False, True), "theta0": one(0.95, 0.5, 0.8),
        "clip": one(0.01, 0.04), "rescale": one(True, False),
        "evaluate": one("auto", "sample", "threshold", "expected"),
        "spread": 0.0, "prior": 1.0, "posterior": "mode", "reset_every": 1,
    }  # fmt: skip
    if rng.random() < 0.5:  # with these as they are, masks on trained weights are aggregated by differences
        s |= {"spread": one(0.0, 1.0), "prior": one(1.0, 2.5), "posterior": one("mean", "mode")}
        s |= {"reset_every": one(3, 1)}
    if name == "fedpm":
        s["down"] = one("float32", "counts")
    if name == "deltamask":
        s |= {"sampling": one("device", "independent", "common", "stratified"), "codec": "entropy"}
        s |= {"kappa": one(0.8, 1.0, 0.3), "kappa_end": one(None, 1.0, 0.4)}
        s["tally"] = one("mean", "sum") if s["posterior"] == "mean" else "sum"
    if name == "coupled":
        s["references"] = one(64, 0, 2)
    return s


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["fedpm", "deltamask", "coupled"])
def test_a_federation_of_masks_follows_its_page(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(name)])
    settings, cohort, rounds = some(rng, name), int(rng.choice([2, 3, 3, 25])), 6
    devices = [f"{i:02}" for i in range(cohort + 2)]
    m = M.model_copy(update={"seed": None if seed % 3 else 1})  # random weights, or trained ones
    start = Model(m, generate(m.parameters, 1), np.zeros(0, np.float32))
    data = {d: clusters(M, i, int(rng.integers(5, 50))) for i, d in enumerate(devices)}
    fleet = Rounds(make_method(settings), start, rounds, seed=seed, cohort=cohort, data=data)
    due, adam = Reference(settings, start, seed, rounds, cohort), dict[str, Any]()
    for round_ in range(1, rounds + 1):
        count = cohort if rng.random() < 0.6 else int(rng.integers(1, cohort + 1))
        asked = sorted(rng.choice(devices, count, replace=False).tolist())
        fleet.play(*asked)
        due.places = {d: place for place, d in enumerate(asked)}
        for d in asked:
            np.testing.assert_allclose(fleet.received[d].head, due.head if due.probing else [], atol=1e-6)
            if round_ <= due.probing:
                assert set(fleet.down[d].arrays) <= {"head"}
                np.testing.assert_allclose(fleet.read[d].head, due.probe(fleet, d, round_), atol=1e-5)
                continue
            assert (fleet.received[d].theta == due.theta()).all()
            theta_k = due.train(fleet, d, round_, adam.get(d))
            due.check_mask(bits.unpack(fleet.read[d], len(due.at)), theta_k, round_, d)
            if settings["persistent"]:
                held = fleet.kept[d].adam
                adam[d] = (held.mean.astype(float), held.square.astype(float), held.steps)
        if round_ <= due.probing:
            heads = [fleet.read[d].head for d in asked]
            due.head = np.average(heads, axis=0, weights=[len(data[d].y) for d in asked])
            np.testing.assert_allclose(fleet.state.head, due.head, atol=1e-6)
            due.head = fleet.state.head.astype(float)
        else:
            due.fold(round_, {d: bits.unpack(fleet.read[d], len(due.at)) for d in asked})
    for d in devices:
        np.testing.assert_allclose(fleet.personal(d).parameters, due.model(rounds + 1), atol=1e-5)
