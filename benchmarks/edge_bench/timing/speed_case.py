"""What `speed`, `speed_flower` and `lattice_speed` run: networks, samples, PyTorch's local round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from edge_export.writer import export_bundle
from edge_kernels import counter
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edge_bench.models import DIGITS, HAR, mlp, small_cnn
from edge_client.bundle import Bundle
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import FederationConfig
from edge_client.targets import Classification

SEED, LR, MOMENTUM = 3, 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """What all simulators run: a network and how much of it."""

    name: str
    shape: tuple[int, ...]
    classes: int
    devices: int
    cohort: int
    samples: int
    epochs: int
    batch: int
    rounds: int

    def network(self) -> nn.Module:
        """The network, freshly initialised from a fixed seed."""
        torch.manual_seed(SEED)
        sizes = {"digits-mlp": DIGITS, "har-mlp": HAR}.get(self.name)
        return small_cnn() if sizes is None else mlp(*sizes)

    @property
    def method(self) -> FedAvg:
        return FedAvg(epochs=self.epochs, batch=self.batch, lr=LR, momentum=MOMENTUM)

    def config(self) -> FederationConfig:
        return FederationConfig(
            name=self.name, bundle="0" * 64, method={"name": "fedavg", **self.method.model_dump()},
            rounds=self.rounds, cohort=self.cohort, min_devices=self.devices, seed=SEED, guard="none",
        )  # fmt: skip


CASES = (
    Case("digits-mlp", (64,), 10, devices=1000, cohort=100, samples=40, epochs=5, batch=20, rounds=6),
    Case("har-mlp", (1152,), 6, devices=60, cohort=10, samples=300, epochs=5, batch=32, rounds=5),
    Case("small-cnn", (1, 28, 28), 10, devices=100, cohort=20, samples=100, epochs=2, batch=20, rounds=5),
)


@lru_cache(4096)
def samples(case: Case, device: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """One device's training samples: noise around a centre for each class."""
    rng = np.random.default_rng((SEED, device))
    centres = np.random.default_rng(SEED).standard_normal((case.classes, *case.shape), np.float32)
    y = rng.integers(case.classes, size=case.samples)
    return centres[y] + rng.standard_normal((case.samples, *case.shape), np.float32), y


def name_of(case: Case, device: int) -> str:
    return f"device-{device:0{len(str(case.devices - 1))}d}"


def train(net: nn.Module, case: Case, device: int, round_: int) -> None:
    """A device's local round in PyTorch, in place."""
    x, y = (torch.from_numpy(a) for a in samples(case, device))
    optimiser = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    net.train()
    for epoch in range(case.epochs):
        stream = counter.key(SEED, "batches", "train", name_of(case, device), round_, epoch)
        order = torch.from_numpy(counter.permutation(stream, case.samples))
        for low in range(0, case.samples, case.batch):
            chosen = order[low : low + case.batch]
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(net(x[chosen]), y[chosen]))
            optimiser.step()


def export(case: Case, folder: Path) -> Bundle:
    """The case's network as a bundle."""
    target = Classification(classes=case.classes)
    return export_bundle(
        case.network(), torch.zeros(2, *case.shape), folder, name=case.name, target=target, torch_part=False
    )
