"""The benchmarks' own bundles: those of the demo, and those whose weights methods mask (pre-trained, signed constants).

    python -m edge_bench.pretrain digits   benchmarks/edge_bench/bundles/digits   (and har: `make bundles`)
    python -m edge_bench.pretrain mlp      build/bundles/mlp-mnist04
    python -m edge_bench.pretrain resnet20 build/bundles/resnet20-cifar100
    python -m edge_bench.pretrain signs    build/bundles/mlp-signs

`mlp` is 784-300-100 trained here on MNIST's digits 0-4, with a new head for five other classes. `resnet20` is the
CIFAR-10 ResNet-20 from the weights beside the checkout, with a new head for the 100 classes of CIFAR-100; only its last
stage (`layer3`) and the head get gradients. New heads are zero. `signs` is 784-300-100-10 with every weight and bias
+-e / sqrt(fan_in), as FedPM's published code draws them. `digits` and `har` are the demo's, package data: a seed
replaces the weights and `model.pt2` is left out, so they take a few kilobytes. Needs torch, downloads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from edge_export.writer import export_bundle
from edge_kernels import counter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.datasets import DataConfig, find, read
from edge_bench.models import DIGITS, HAR, mlp
from edge_client.bundle import Bundle
from edge_client.errors import DataError
from edge_client.targets import Classification

SEED, EPOCHS, BATCH, LR = 2026, 6, 64, 1e-3
KNOWN = (0, 1, 2, 3, 4)  # the digits the MLP is pre-trained on


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second pixel, new channels zero (option A)."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.margin = stride, (out - inner) // 2

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, out, h / stride, w / stride]."""
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.margin:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.margin, self.margin))
        return torch.relu(x + y)


class Resnet20(nn.Module):
    """He et al. 2016 for 32x32 images: three stages of three blocks, 16, 32, 64 channels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1), BasicBlock(32, 32, 1))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2), BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, 32, 32]."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        logits: Tensor = self.linear(y.mean(dim=(2, 3)))
        return logits


def _new_head(features: int, classes: int) -> nn.Linear:
    head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def pretrained_mlp(samples: int | None = None, epochs: int = EPOCHS) -> tuple[nn.Sequential, float]:
    """The MLP after `epochs` of Adam on digits 0-4, and its accuracy on a tenth of the samples, held out."""
    torch.manual_seed(SEED)
    x, y = read(DataConfig(name="mnist", labels=KNOWN))
    order = counter.permutation(counter.key(SEED, "pretrain"), len(y))[:samples]
    xs, ys = torch.from_numpy(x[order]), torch.from_numpy(y[order])
    held = len(ys) // 10
    net = mlp(784, 300, 100, len(KNOWN))
    optimiser = torch.optim.Adam(net.parameters(), LR)
    for epoch in range(epochs):
        shuffled = torch.from_numpy(counter.permutation(counter.key(SEED, "pretrain", epoch), len(ys) - held))
        for low in range(0, len(shuffled), BATCH):
            batch = held + shuffled[low : low + BATCH]
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(net(xs[batch]), ys[batch]))
            optimiser.step()
    with torch.no_grad():
        right = (net(xs[:held]).argmax(1) == ys[:held]).float().mean()
    return net, float(right)


def build_mlp(folder: Path) -> Bundle:
    """Pre-train the MLP and write it with a new head for five classes."""
    net, right = pretrained_mlp()
    print(f"digits 0-4, held out: {right:.2%}")
    net[-1] = _new_head(100, 5)
    return export_bundle(
        net, torch.zeros(2, 784), folder, name="mlp-mnist04", target=Classification(classes=5), torch_part=False
    )


def build_resnet20(folder: Path) -> Bundle:
    """Write the CIFAR-10 ResNet-20 with a new head for CIFAR-100. Raises DataError without the weights."""
    path = find("cifar100", None).parents[1] / "weights" / "resnet20_cifar10.safetensors"
    if not path.is_file():
        raise DataError(f"the pre-trained weights are not at {path}")
    net = Resnet20(10)
    stored = {k.removeprefix("module."): v for k, v in load_file(path).items()}
    missing, unexpected = net.load_state_dict(stored, strict=False)
    if unexpected or not all(k.endswith("num_batches_tracked") for k in missing):
        raise DataError(f"{path} does not fit a ResNet-20: missing {missing}, unexpected {unexpected}")
    net.linear = _new_head(64, 100)
    free = [n for n, _ in net.named_parameters() if n.startswith(("layer3.", "linear."))]
    example = torch.from_numpy(np.zeros((2, 3, 32, 32), np.float32))
    target = Classification(classes=100)
    return export_bundle(
        net, example, folder, name="resnet20-cifar100", target=target, trainable=free, torch_part=False
    )


def build_signs(folder: Path) -> Bundle:
    """Write an MLP of signed constants for MNIST's ten digits."""
    net = mlp(784, 300, 100, 10)
    for layer in net:
        if isinstance(layer, nn.Linear):
            for name, values in layer.named_parameters():
                stream = counter.key(SEED, "signs", layer.in_features, name)
                signs = np.where(counter.uint64(stream, values.numel()) >> np.uint64(63), -1.0, 1.0)
                scaled = torch.from_numpy(signs * (np.e / layer.in_features**0.5)).float()
                values.data = scaled.reshape(values.shape)
    return export_bundle(
        net, torch.zeros(2, 784), folder, name="mlp-signs", target=Classification(classes=10), torch_part=False
    )


def build_demo(name: str, sizes: tuple[int, ...], folder: Path) -> Bundle:
    """Write a bundle of the demo: an MLP whose weights a seed draws."""
    example, target = torch.zeros(2, sizes[0]), Classification(classes=sizes[-1])
    return export_bundle(mlp(*sizes), example, folder, name=name, target=target, seed=SEED, torch_part=False)


BUILDERS: dict[str, Callable[[Path], Bundle]] = {
    "mlp": build_mlp,
    "resnet20": build_resnet20,
    "signs": build_signs,
    "digits": partial(build_demo, "digits", DIGITS),
    "har": partial(build_demo, "har", HAR),
}


def main(
    what: Annotated[Literal["mlp", "resnet20", "signs", "digits", "har"], typer.Argument(help="Which bundle.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
) -> None:
    """Build a bundle."""
    torch.set_num_threads(1)
    bundle = BUILDERS[what](folder)
    print(f"{bundle.manifest.name}: {bundle.manifest.d:,} parameters in {folder}")


if __name__ == "__main__":
    typer.run(main)
