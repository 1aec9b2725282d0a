"""Builds the benchmarks' bundles: those of the demo, and those that `bundles.NAMES` lists.

    python -m edge_bench.pretrain digits benchmarks/edge_bench/bundles/digits   (also digits-wide, har: `make bundles`)
    python -m edge_bench.pretrain cnn-fashion build/bundles/cnn-fashion

Weights of networks that start from nothing are drawn by a seed and take no space. New heads are zero. The pre-trained
ones: `mlp-mnist04` is 784-300-100 trained here on MNIST's digits 0-4, `cnn-femnist-pretrained` a CNN trained here on
the FEMNIST writers that no federation of 57 devices holds, and the others have stored weights from beside the
checkout. Needs torch, downloads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from edge_export.tables import InitScheme
from edge_export.writer import export_bundle
from edge_kernels import counter
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from edge_bench import models
from edge_bench.command_line import run_module
from edge_bench.data import sources
from edge_bench.data.sources import CHARACTERS, WINDOW
from edge_client.bundle import Bundle
from edge_client.errors import ConfigError, DataError
from edge_client.targets import Classification, Sequence, Target

SEED, BATCH, LR = 2026, 64, 1e-3
MLP_EPOCHS, CNN_EPOCHS = 6, 8
KNOWN = 5  # the MLP is pre-trained on the digits below
FEDERATED_WRITERS = 57  # FEMNIST's writers from this one on pre-train the CNN


def _new_head(features: int, classes: int) -> nn.Linear:
    head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _write(
    net: nn.Module, example: Tensor, folder: Path, name: str, target: Target, prefixes: tuple[str, ...] = ()
) -> Bundle:
    """Export with the module's own weights; with `prefixes` only parameters whose names start so get gradients."""
    free = [n for n, _ in net.named_parameters() if n.startswith(prefixes)] if prefixes else None
    return export_bundle(net, example, folder, name=name, target=target, trainable=free, torch_part=False)


def _trained(net: nn.Module, xs: Tensor, ys: Tensor, epochs: int) -> float:
    """Train by Adam; the accuracy on the first tenth of the samples, which is held out.

    Sums of float32 differ between processors, and training makes the differences large. So the weights are drawn and
    trained in float64 and rounded to values of float16 at the end: each processor then has the same ones.
    """
    held, xs = len(ys) // 10, xs.double()
    for layer in net.double().modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
    optimiser = torch.optim.Adam(net.parameters(), LR)
    net.train()
    for epoch in range(epochs):
        shuffled = torch.from_numpy(counter.permutation(counter.key(SEED, "pretrain", epoch), len(ys) - held))
        for low in range(0, len(shuffled), BATCH):
            batch = held + shuffled[low : low + BATCH]
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(net(xs[batch]), ys[batch]))
            optimiser.step()
    net.half().float().eval()
    with torch.no_grad():
        return float((net(xs[:held].float()).argmax(1) == ys[:held]).float().mean())


def _shuffled(x: NDArray[np.float32], y: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    order = counter.permutation(counter.key(SEED, "pretrain"), len(y))
    return torch.from_numpy(x[order]), torch.from_numpy(y[order])


def build_mlp(name: str, folder: Path) -> Bundle:
    """Pre-train 784-300-100 on the digits 0-4 and write it with a new head for five classes."""
    digits = sources.read_mnist(sources.find("mnist", None))
    kept = digits.y < KNOWN
    net = models.mlp(784, 300, 100, KNOWN)
    right = _trained(net, *_shuffled(digits.x[kept], digits.y[kept]), MLP_EPOCHS)
    print(f"digits 0-4, held out: {right:.2%}")
    net[-1] = _new_head(100, 5)
    return _write(net, torch.zeros(2, 784), folder, name, Classification(classes=5))


def build_femnist(name: str, folder: Path) -> Bundle:
    """Pre-train the CNN on all samples of the writers that a federation of `FEDERATED_WRITERS` leaves out."""
    written = sources.read_femnist(sources.find("femnist", None))
    assert written.owner is not None
    kept = written.owner >= FEDERATED_WRITERS
    net = models.image_cnn(62)
    right = _trained(net, *_shuffled(written.x[kept].reshape(-1, 1, 28, 28), written.y[kept]), CNN_EPOCHS)
    print(f"writers that are not in the federation, held out: {right:.2%}")
    return _write(net, torch.zeros(2, 1, 28, 28), folder, name, Classification(classes=62))


def stored_weights(file: str) -> dict[str, Tensor]:
    """Tensors from `weights` beside the data sets. Raises DataError when the file is not there."""
    path = sources.find("cifar100", None).parents[1] / "weights" / f"{file}.safetensors"
    if not path.is_file():
        raise DataError(f"the pre-trained weights are not at {path}")
    return {k.removeprefix("module."): v for k, v in load_file(path).items()}


def _filled(net: nn.Module, stored: Mapping[str, Tensor], but: tuple[str, ...] = ()) -> None:
    """Fill `net` with the stored tensors; only those starting with one of `but` may be missing on either side."""
    wanted = {k: v for k, v in stored.items() if not k.startswith(but)}
    missing, unexpected = net.load_state_dict(wanted, strict=False)
    missing = [k for k in missing if not k.endswith("num_batches_tracked") and not k.startswith(but)]
    if unexpected or missing:
        raise DataError(f"the stored weights do not fit the network: missing {missing}, unexpected {unexpected}")


def build_resnet20(name: str, folder: Path) -> Bundle:
    """Write the CIFAR-10 ResNet-20 with a new head for CIFAR-100. Raises DataError without the weights."""
    net = models.Resnet(20, 10)
    _filled(net, stored_weights("resnet20_cifar10"))
    net.linear = _new_head(64, 100)
    return _write(net, _image(3, 32), folder, name, Classification(classes=100), ("layer3.", "linear."))


_BACKBONES: Mapping[str, tuple[Callable[[int], nn.Module], str, tuple[int, ...]]] = {
    "mobilenetv2-imagenet": (models.MobileNetBackbone, "mobilenetv2_100_224_imagenet", (13, 14, 15, 16, 17)),
    "squeezenet-imagenet": (models.SqueezeNetBackbone, "squeezenet1_1_imagenet_features", (7, 9, 10, 11, 12)),
}  # network, weights, the places of its last five blocks


def build_backbone(name: str, folder: Path) -> Bundle:
    """Write an ImageNet backbone for CIFAR-10; its last five blocks and a new head get gradients."""
    make, file, blocks = _BACKBONES[name]
    net = make(10)
    _filled(net, stored_weights(file), ("head.", "classifier."))
    nn.init.zeros_(net.get_parameter("head.weight"))
    nn.init.zeros_(net.get_parameter("head.bias"))
    free = (*(f"features.{i}." for i in blocks), "head.")
    return _write(net, _image(3, 32), folder, name, Classification(classes=10), free)


class _Centred(nn.Module):
    """Values of 0 .. 1 as -1 .. 1."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - 1


def build_signs(name: str, folder: Path) -> Bundle:
    """Write an MLP for MNIST's ten digits with every weight and bias +-e / sqrt(fan_in), as FedPM's code draws them.

    It takes pixels to -1 .. 1 first, as that code does: a black background then adds the noise of all its weights.
    """
    net = nn.Sequential(_Centred(), *models.mlp(784, 300, 100, 10))
    for layer in net:
        if isinstance(layer, nn.Linear):
            for part, values in layer.named_parameters():
                stream = counter.key(SEED, "signs", layer.in_features, part)
                signs = np.where(counter.uint64(stream, values.numel()) >> np.uint64(63), -1.0, 1.0)
                scaled = torch.from_numpy(signs * (np.e / layer.in_features**0.5)).float()
                values.data = scaled.reshape(values.shape)
    return _write(net, torch.zeros(2, 784), folder, name, Classification(classes=10))


def _image(channels: int, side: int) -> Tensor:
    return torch.zeros(2, channels, side, side)


def _text() -> Tensor:
    return torch.zeros(2, WINDOW, dtype=torch.int64)


Recipe = tuple[Callable[[], nn.Module], Callable[[], Tensor], Target, InitScheme]

_TEN, _LETTERS = Classification(classes=10), Classification(classes=62)
_NEXT = Sequence(steps=WINDOW, classes=len(CHARACTERS))
# Networks drawn by a seed: module, example, target, rule. Networks whose masks are trained need the scale of `he`.
DRAWN: Mapping[str, Recipe] = {
    "digits": (partial(models.mlp, *models.DIGITS), lambda: torch.zeros(2, 64), _TEN, "he"),
    "digits-wide": (partial(models.mlp, *models.DIGITS_WIDE), lambda: torch.zeros(2, 64), _TEN, "he"),
    "har": (partial(models.mlp, *models.HAR), lambda: torch.zeros(2, 1152), Classification(classes=6), "he"),
    "mlp-har": (partial(models.mlp, *models.HAR), lambda: torch.zeros(2, 1152), Classification(classes=6), "he"),
    "mlp-har-binary": (
        partial(models.binary_mlp, *models.HAR),
        lambda: torch.zeros(2, 1152),
        Classification(classes=6),
        "he",
    ),
    "mlp-mnist": (partial(models.mlp, 784, 300, 100, 10), lambda: torch.zeros(2, 784), _TEN, "he"),
    "cnn-mnist": (models.mnist_cnn, partial(_image, 1, 28), _TEN, "torch"),
    "cnn-fashion": (partial(models.image_cnn, 10), partial(_image, 1, 28), _TEN, "torch"),
    "cnn-femnist": (partial(models.image_cnn, 62), partial(_image, 1, 28), _LETTERS, "torch"),
    "cnn-emnist": (models.emnist_cnn, partial(_image, 1, 28), _LETTERS, "torch"),
    "lenet-cifar10": (models.lenet, partial(_image, 3, 32), _TEN, "torch"),
    "lenet-cifar10-he": (models.lenet, partial(_image, 3, 32), _TEN, "he"),
    "vgg9-mnist": (partial(models.vgg9, 1, 10), partial(_image, 1, 32), _TEN, "he"),
    "vgg9-femnist": (partial(models.vgg9, 1, 62), partial(_image, 1, 32), _LETTERS, "he"),
    "vgg9-cifar10": (partial(models.vgg9, 3, 10), partial(_image, 3, 32), _TEN, "he"),
    "resnet20-cifar10": (partial(models.Resnet, 20, 10), partial(_image, 3, 32), _TEN, "he"),
    "resnet56-cifar10": (partial(models.Resnet, 56, 10), partial(_image, 3, 32), _TEN, "he"),
    "mobilenetv2-cifar10": (models.MobileNetV2, partial(_image, 3, 32), _TEN, "he"),
    "vit-cifar10": (partial(models.VisionTransformer, 10, 4), partial(_image, 3, 32), _TEN, "torch"),
    "lstm-shakespeare": (partial(models.NextCharacter, len(CHARACTERS)), _text, _NEXT, "torch"),
    "lstm-shakespeare-small": (partial(models.NextCharacter, len(CHARACTERS), hidden=128), _text, _NEXT, "torch"),
}
SCALES = {"digits": (0.0, 1.0), "digits-wide": (0.0, 1.0)}  # of those that strangers use with files of their own
TRAINED: Mapping[str, Callable[[str, Path], Bundle]] = {
    "mlp-mnist04": build_mlp,
    "mlp-signs": build_signs,
    "cnn-femnist-pretrained": build_femnist,
    "resnet20-cifar100": build_resnet20,
    "mobilenetv2-imagenet": build_backbone,
    "squeezenet-imagenet": build_backbone,
}


def build(name: str, folder: Path) -> Bundle:
    """Write the bundle `name` to `folder`, on one thread and from one seed, so that it repeats. Raises ConfigError."""
    if name not in DRAWN and name not in TRAINED:
        raise ConfigError(f"no bundle is named {name!r}; there are {', '.join((*DRAWN, *TRAINED))}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)  # also for bundles whose weights are a seed: the export is proved on the module's own
    try:
        if name in TRAINED:
            return TRAINED[name](name, folder)
        make, example, target, init = DRAWN[name]
        return export_bundle(
            make(), example(), folder, name=name, target=target, seed=SEED, init=init, torch_part=False,
            between=SCALES.get(name),
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def main(
    name: Annotated[str, typer.Argument(help="Which bundle: digits, har or a name of edge_bench.bundles.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
) -> None:
    """Build a bundle."""
    bundle = build(name, folder)
    print(f"{bundle.manifest.name}: {bundle.manifest.d:,} parameters in {folder}")


if __name__ == "__main__":
    run_module(main)
