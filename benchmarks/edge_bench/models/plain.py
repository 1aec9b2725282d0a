"""Multilayer perceptrons and convolutional networks whose layers follow one another."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

HAR = 1152, 300, 100, 6
"""The HAR network of HideNseek: 376,606 parameters."""
DIGITS = 64, 64, 32, 10
"""For scikit-learn's 8x8 digits."""
DIGITS_WIDE = 64, 640, 320, 10
"""The same, large enough for a pruned model to be measurably faster: 249,930 parameters."""


def mlp(*sizes: int) -> nn.Sequential:
    """A multilayer perceptron with ReLU between its layers, e.g. ``mlp(1152, 300, 100, 6)``."""
    parts: list[nn.Module] = []
    for i, (inner, out) in enumerate(pairwise(sizes)):
        parts += [nn.Linear(inner, out), nn.ReLU()] if i < len(sizes) - 2 else [nn.Linear(inner, out)]
    return nn.Sequential(*parts)


class Sign(nn.Module):
    """The sign of x. Its gradient passes unchanged where |x| <= 1 and is zero elsewhere (Courbariaux et al., 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        straight = nn.functional.hardtanh(x)
        return straight + (torch.sign(x) - straight).detach()


def binary_mlp(*sizes: int) -> nn.Sequential:
    """`mlp` with batch-norm and signs in place of each ReLU: a binarized network once its weights are signs too."""
    parts: list[nn.Module] = []
    for inner, out in pairwise(sizes):
        parts += [nn.Linear(inner, out), nn.BatchNorm1d(out), Sign()]
    return nn.Sequential(*parts[:-2])


def small_cnn() -> nn.Sequential:
    """Two convolutions with batch-norm and max-pooling on 28x28 images, then one linear layer for ten classes."""
    return nn.Sequential(*_normed_convolutions(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def image_cnn(classes: int) -> nn.Sequential:
    """`small_cnn` with a hidden layer of 128 units, for 28x28 images.

    213,678 parameters for FEMNIST's 62 classes, 206,970 for ten classes, and 96 batch-norm statistics.
    """
    hidden = [nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*_normed_convolutions(), *hidden)


def _normed_convolutions() -> list[nn.Module]:
    """Two 3x3 convolutions without bias, 16 and 32 channels, each with batch-norm, ReLU and a 2x2 max-pool."""
    parts: list[nn.Module] = []
    for inner, out in ((1, 16), (16, 32)):
        convolution = nn.Conv2d(inner, out, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return parts


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU and max-pools on 32x32 RGB images, as Hermes' Table 4 has it: 62,006 parameters."""
    return nn.Sequential(
        *_convolutions((3, 6), (6, 16), padding=0),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def emnist_cnn(classes: int = 62) -> nn.Sequential:
    """Hermes' EMNIST network on 28x28 images: 10 and 20 channels, 512 hidden units. 539,358 parameters."""
    return nn.Sequential(
        *_convolutions((1, 10), (10, 20), padding=2),
        nn.Flatten(),
        nn.Linear(980, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def mnist_cnn(classes: int = 10) -> nn.Sequential:
    """16 and 32 channels of unpadded 5x5 convolutions on 28x28 images, 128 hidden units. 80,202 parameters."""
    return nn.Sequential(
        *_convolutions((1, 16), (16, 32), padding=0),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def _convolutions(*channels: tuple[int, int], padding: int) -> list[nn.Module]:
    """5x5 convolutions with bias, each with ReLU and a 2x2 max-pool."""
    parts: list[nn.Module] = []
    for inner, out in channels:
        parts += [nn.Conv2d(inner, out, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    return parts


def vgg9(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """HideNseek's VGG9 on images padded to 32x32.

    Six 3x3 convolutions without bias, 1,124,640 weights on one input channel, batch-norm after each, four max-pools
    (32 -> 2), 1024 features and one classifier: 4.33 MiB for 10 classes, 4.53 for 62, as the paper prints. With the
    batch-norms' weights 1,136,618 parameters on one input channel and 1,137,194 on three, for 10 classes.
    """
    parts: list[nn.Module] = []
    inner = channels
    for out, pool in ((32, False), (64, True), (128, False), (128, True), (256, True), (256, True)):
        parts += [nn.Conv2d(inner, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        if pool:
            parts.append(nn.MaxPool2d(2))
        inner = out
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, classes))
