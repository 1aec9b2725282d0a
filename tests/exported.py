"""Exported networks that several test files share: an export takes seconds."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from edge_bench import models
from edge_export import export_bundle
from torch import nn

from edge_client.bundle import Bundle
from edge_client.targets import Classification


@dataclass(frozen=True)
class Network:
    """A network of two hidden layers: how to make it of any sizes, and its own."""

    of_size: Callable[[int, int], nn.Sequential]
    sizes: tuple[int, int]
    sample: tuple[int, ...]
    classes: int

    def make(self) -> nn.Sequential:
        return self.of_size(*self.sizes)


@dataclass(frozen=True)
class Exported:
    """A module with its own weights, and the bundle of both."""

    module: nn.Module
    bundle: Bundle


def _max_pool_cnn(a: int, b: int) -> nn.Sequential:
    """Tiling and overlapping max-pools, a convolution with and one without bias, a flatten of 9 entries a channel."""
    return nn.Sequential(
        nn.Conv2d(1, a, 3, padding=1, bias=False),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1),
        nn.BatchNorm2d(b, momentum=0.3),
        nn.ReLU(),
        nn.MaxPool2d((2, 3), stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(b * 9, 5),
    )


def _normed_mlp(a: int, b: int) -> nn.Sequential:
    """Of 8x8 images in a row."""
    return nn.Sequential(nn.Linear(64, a), nn.BatchNorm1d(a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 10))


SHARED = {
    "mlp": Network(lambda a, b: models.mlp(40, a, b, 6), (24, 16), (40,), 6),
    "max-pool cnn": Network(_max_pool_cnn, (9, 9), (1, 10, 10), 5),  # as many channels as a channel has entries
    "batch-norm mlp": Network(_normed_mlp, (32, 16), (64,), 10),
}


@cache
def exported(name: str) -> Exported:
    """The network of this name, exported once for all tests."""
    network, folder = SHARED[name], Path(tempfile.mkdtemp(prefix="exported-"))
    atexit.register(shutil.rmtree, folder)
    torch.manual_seed(5)
    module, x = network.make(), torch.zeros(2, *network.sample)
    spread(module)
    target = Classification(classes=network.classes)
    return Exported(module, export_bundle(module, x, folder, name="c", target=target))


def spread(module: nn.Module) -> None:
    """Move the statistics and factors of batch-norms away from their trivial start."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.5, 0.5)
            nn.init.uniform_(part.running_mean, -0.2, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
