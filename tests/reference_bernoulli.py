"""FedPM, DeltaMask and Coupled, written from their pages in docs/methods alone.

The reference trains in float64 and follows the masks of the devices, since a rounding may turn a draw; what it says of
each draw, of theta, the head and the final model is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import codec_readers
import numpy as np
from edge_kernels import bits, counter
from numpy_mlp import secret
from references import F64, Descent, places, tensors
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import Bits
from edge_client.task import Batch, Personal, Task

CLOSE = 1e-3  # draws nearer than this to their probability may fall on either side
NO_STATISTICS = np.zeros(0, np.float32)


class Bernoulli:
    """One of them, by the name in `settings`, which has all of them."""

    def __init__(self, fleet: Rounds, settings: Mapping[str, Any]) -> None:
        self.fleet, self.s, start, m = fleet, settings, fleet.course.model, fleet.m
        self.seed, self.rounds, self.cohort = fleet.course.seed, fleet.course.rounds, fleet.course.cohort
        self.name, self.bundle = settings["name"], start.parameters.astype(np.float64)
        trained = m.seed is None
        how = settings["head"] if settings["head"] != "auto" else "keep" if trained else "probe"
        masked = m.layers if how == "mask" else m.layers[:-1]
        self.at = places(m, *(n for x in masked for n in (*x.weights, *(x.biases if settings["biases"] else ()))))
        self.probing = settings["probe_rounds"] if how == "probe" else 0
        self.top = places(m, *tensors(m.layers[-1]))
        self.head = self.bundle[self.top]
        self.weights = self.bundle[self.at] / (settings["theta0"] if trained and settings["rescale"] else 1)
        plain = {"spread": 0, "prior": 1, "posterior": "mode", "reset_every": 1}
        shared = self.name == "coupled" or settings.get("sampling") in ("device", "stratified")
        self.difference = trained and shared and plain.items() <= settings.items()
        self.evaluate = {"auto": "expected" if trained else "sample"}.get(settings["evaluate"], settings["evaluate"])
        self.ones, self.masks = np.zeros(len(self.at)), 0
        theta0, clip = settings["theta0"], settings["clip"]
        self.below, self.above = (math.ceil(x * self.cohort - 1e-9) for x in (theta0 - clip, 1 - clip - theta0))
        if self.difference:
            self.ones += self.below
        self.held: dict[str, Any] = {}  # Adam's moments and steps, or None
        self.sent: dict[str, Any] = {}
        self.records: dict[str, int] = {}
        self.masked = self.whole = False  # masks were folded; the last of them go down whole

    def draws(self, *words: int | str) -> F64:
        return counter.uniform(counter.key(*words), len(self.at))

    def theta(self) -> F64:
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

    def uniforms(self, round_: int, device: str) -> F64:
        own = self.name == "coupled" or self.s["sampling"] == "device"
        u = self.draws(self.seed, "uniforms", round_, *[device] * own)
        shifted = self.s.get("sampling") == "stratified"
        return (u + (self.fleet.places[device] + 1 / 2) / self.cohort) % 1 if shifted else u

    # --- a device

    def is_lost(self, device: str, round_: int) -> bool:
        """Whether Coupled sends it a change of what it held, or no head."""
        last = self.records.get(device)
        if self.name != "coupled" or last is None or device in self.held or round_ > self.rounds:
            return False
        return last > self.probing and ((last == round_ - 1 and not self.whole) or self.probing > 0)

    def train(self, device: str, round_: int) -> Personal | None:
        if self.is_lost(device, round_):
            return None
        received, local = self.fleet.received[device], self.fleet.local[device]
        np.testing.assert_allclose(received.head, self.head if self.probing else [], rtol=0, atol=1e-6)
        if round_ <= self.probing:
            assert set(self.fleet.down[device].arrays) <= {"head"}
            self.held[device] = None
            self.sent[device] = self.probe(device)
            values = self.bundle.copy()
            values[self.top] = self.sent[device]
            return Personal(values.astype(np.float32), NO_STATISTICS)
        assert (received.theta == self.theta()).all()
        theta_k = self.trained(device, round_)
        if self.s["persistent"]:
            adam = self.fleet.kept[device].adam
            self.held[device] = adam.mean.astype(float), adam.square.astype(float), adam.steps
        else:
            self.held[device] = None
        assert local.trained.mask is not None
        mask = self.sent[device] = local.trained.mask[self.at]
        self.check_mask(mask, theta_k, round_, device)
        return self.under(mask)

    def probe(self, device: str) -> F64:
        values, head, task = (
            self.bundle.copy(),
            Descent(self.head, self.s["probe_lr"], self.s["probe_momentum"]),
            self.fleet.task(device),
        )
        for batch in task.batches(self.s["probe_epochs"], self.s["batch"], "probe"):
            values[self.top] = head.at
            head.step(self.slope(task, values, batch)[self.top])
        return head.at

    def trained(self, device: str, round_: int) -> F64:
        """theta_k."""
        theta, values, task = self.theta(), self.bundle.copy(), self.fleet.task(device)
        scores, values[self.top] = np.log(theta / (1 - theta)), self.head
        held = self.held.get(device) if self.s["persistent"] else None
        mean, square, steps = held or (np.zeros(len(self.at)), np.zeros(len(self.at)), 0)
        for step, batch in enumerate(task.batches(self.s["epochs"], self.s["batch"])):
            p = 1 / (1 + np.exp(-scores))
            numbers = counter.uint64(counter.key(secret(device), "training masks", round_, step), len(p))
            halves = np.stack([numbers & np.uint64(2**32 - 1), numbers >> np.uint64(32)], axis=1).ravel()
            values[self.at] = self.weights * ((halves[: len(p)] >> np.uint64(8)) * 2.0**-24 < p)
            g = self.slope(task, values, batch)[self.at] * self.weights * p * (1 - p)
            g = g * p if self.s["ste"] == "ref" else g
            steps, mean, square = steps + 1, 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
            move = mean / (1 - 0.9**steps) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-8)
            scores = scores - self.s["lr"] * move
        return np.asarray(1 / (1 + np.exp(-scores)))

    def slope(self, task: Task, values: F64, batch: Batch) -> F64:
        return task.gradient(values.astype(np.float32), NO_STATISTICS, batch).parameters.astype(float)

    def check_mask(self, mask: Bits, theta_k: F64, round_: int, device: str) -> None:
        """The mask is that of the device's draw."""
        if self.s.get("codec") == "klms":
            self.check_sample(mask, theta_k, round_, device)
            return
        secretly = self.name == "fedpm" or self.s.get("sampling") == "independent"
        key = (secret(device), "uploaded mask", round_) if secretly else None
        u = self.draws(*key) if key else self.uniforms(round_, device)
        wrong, unsure = mask != (u < theta_k), np.abs(u - theta_k) < CLOSE
        if self.name != "deltamask":
            assert not (wrong & ~unsure).any()
            return
        theta, reference = self.theta(), self.uniforms(round_, device) < self.theta()
        along = (round_ - self.probing - 1) / max(self.rounds - self.probing - 1, 1)
        end = self.s["kappa_end"] or self.s["kappa"]
        kappa = end + (self.s["kappa"] - end) * (1 + math.cos(math.pi * along)) / 2
        flips, sent = (u < theta_k) != reference, mask != reference
        assert not (sent & ~flips & ~unsure).any()
        assert abs(sent.sum() - kappa * flips.sum()) <= 0.5 + (unsure.sum() if wrong.any() else 0)
        divergence = theta_k * np.log(theta_k / theta) + (1 - theta_k) * np.log((1 - theta_k) / (1 - theta))
        least, most = divergence[sent].min(initial=np.inf), divergence[flips & ~sent & ~unsure].max(initial=0)
        assert least > most * 0.99 - 1e-5

    def check_sample(self, mask: Bits, theta_k: F64, round_: int, device: str) -> None:
        """The mask is what the bytes say, and each byte names the candidate that the device's draw falls on."""
        data = self.fleet.local[device].update.arrays["mask.klms"]
        prior, d, blocks = self.theta().astype(np.float32).astype(float), len(mask), len(data)
        stream = counter.key(self.seed, "candidates", round_, device)
        assert mask.tolist() == codec_readers.klms(data.tobytes(), prior.tolist(), stream)
        p, q = (np.clip(x, 2.0**-16, 1 - 2.0**-16) for x in (np.floor(prior * 65536 + 0.5) / 65536, theta_k))
        one, zero = np.log2(q / p), np.log2((1 - q) / (1 - p))
        assert abs(blocks - np.clip((q * one + (1 - q) * zero).sum() / 4 + 0.5, 1, -(-d // 8))) <= 0.6
        numbers = counter.uint64(stream, d + -(-d // blocks) * 64)
        uniforms = (numbers[d:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)).reshape(-1, 256)
        order = np.argsort(numbers[:d])
        own = counter.uniform(counter.key(secret(device), "uploaded mask", round_), blocks)
        for block, chosen in enumerate(data.tolist()):
            at = order[block::blocks]
            ones = uniforms[: len(at)] < p[at, None] * 65536
            logs = np.where(ones, one[at, None], zero[at, None]).sum(axis=0)
            ends = np.cumsum(np.exp2(logs - logs.max()))
            ends = np.append(0, ends / ends[-1])
            assert ends[chosen] - 0.02 <= own[block] <= ends[chosen + 1] + 0.02

    # --- the server

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        if not devices:
            return
        self.records |= dict.fromkeys(devices, round_)
        read, sent = ({d: each[d] for d in devices} for each in (self.fleet.read, self.sent))
        if round_ <= self.probing:
            for d in devices:
                np.testing.assert_allclose(read[d].head, sent[d], rtol=0, atol=1e-5)
            heads = [read[d].head for d in devices]
            mean = np.average(heads, axis=0, weights=[len(self.fleet.data[d].y) for d in devices])
            np.testing.assert_allclose(self.fleet.state.head, mean, rtol=0, atol=1e-6)
            self.head = self.fleet.state.head.astype(float)
            return
        for d in devices:
            assert (bits.unpack(read[d], len(self.at)) == sent[d]).all()
        self.whole = not self.masked and len(devices) > self.s.get("references", 0)
        self.masked = True
        self.fold(round_, sent)

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

    # --- models

    def under(self, mask: Bits) -> Personal:
        """The model under a mask."""
        values, kept = self.bundle.copy(), np.ones(self.fleet.m.d, np.bool_)
        values[self.top] = self.head
        values[self.at], kept[self.at] = self.weights * mask, mask
        return Personal(values.astype(np.float32), NO_STATISTICS, kept)

    def personal(self, device: str, round_: int) -> Personal | None:
        """The global model before a round."""
        if self.is_lost(device, round_):
            return None
        values, theta = self.bundle.copy(), self.theta()
        values[self.top] = self.head
        if self.probing and round_ <= self.probing + 1:
            return Personal(values.astype(np.float32), NO_STATISTICS)
        if self.evaluate == "expected":
            values[self.at] = self.weights * theta
            return Personal(values.astype(np.float32), NO_STATISTICS)
        return self.under(
            theta >= 0.5 if self.evaluate == "threshold" else self.draws(self.seed, "evaluated mask", round_) < theta
        )

    def forget(self, device: str) -> None:
        self.held.pop(device, None)

    def lost(self, device: str) -> None:
        self.records.pop(device, None)
