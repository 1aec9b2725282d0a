"""Networks pre-trained on ImageNet, for methods that mask a frozen backbone: MobileNetV2 and SqueezeNet 1.1.

Names of parameters are those of the stored weights (torchvision's). Both take 32x32 RGB images normalised as
`sources.read_cifar` does, double their sides, and convert colours to what their weights expect. Neither has
batch-norm: MobileNetV2's is folded into its convolutions. The classifier is a new linear layer on the mean of the last
features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.data.sources import CIFAR_DEVIATION, CIFAR_MEAN
from edge_bench.models.residual import CHANNELS, EXPANSIONS


def _colours(x: Tensor, order: Sequence[int], scale: float, shift: Sequence[float]) -> Tensor:
    """Normalised RGB [n, 3, h, w] back to 0..255, channels in `order`, then ``(value - shift) * scale``."""
    found = []
    for c, s in zip(order, shift, strict=True):
        mean, deviation = float(CIFAR_MEAN[c]), float(CIFAR_DEVIATION[c])
        found.append(x[:, c : c + 1] * (255 * deviation * scale) + (255 * mean - s) * scale)
    return torch.cat(found, 1)


class _Padded(nn.Conv2d):
    """A 3x3 convolution of stride 2 on an even size, padded at right and bottom only, as TensorFlow pads."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, out, h / 2, w / 2]."""
        return super().forward(functional.pad(x, (0, 1, 0, 1)))


def _spatial(inner: int, out: int, stride: int, groups: int = 1) -> nn.Conv2d:
    return _Padded(inner, out, 3, 2, groups=groups) if stride == 2 else nn.Conv2d(inner, out, 3, 1, 1, groups=groups)


class _Block(nn.Module):
    def __init__(self, inner: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        parts: list[nn.Module] = []
        if expansion > 1:
            parts.append(nn.Sequential(nn.Conv2d(inner, wide, 1), nn.ReLU6()))
        parts.append(nn.Sequential(_spatial(wide, wide, stride, wide), nn.ReLU6()))
        self.conv = nn.Sequential(*parts, nn.Conv2d(wide, out, 1))
        self.adds = stride == 1 and inner == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.adds else y


class MobileNetBackbone(nn.Module):
    """MobileNetV2 with folded batch-norm. 2,219,626 parameters for 10 classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        blocks, inner = [], 32
        for i, (expansion, out) in enumerate(zip(EXPANSIONS, CHANNELS, strict=True)):
            blocks.append(_Block(inner, out, 2 if i in (1, 3, 6, 13) else 1, expansion))
            inner = out
        first = nn.Sequential(_spatial(3, 32, 2), nn.ReLU6())
        last = nn.Sequential(nn.Conv2d(inner, 1280, 1), nn.ReLU6())
        self.features = nn.Sequential(first, *blocks, last)
        self.head = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, 32, 32]."""
        x = _colours(x, (0, 1, 2), 1 / 128, (128.0, 128.0, 128.0))
        y = self.features(_enlarged(x))
        logits: Tensor = self.head(y.mean(dim=(2, 3)))
        return logits


class _Fire(nn.Module):
    def __init__(self, inner: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inner, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.expand1x1(x)), torch.relu(self.expand3x3(x))], 1)


class SqueezeNetBackbone(nn.Module):
    """SqueezeNet 1.1 without its classifier. 727,626 parameters for 10 classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2)
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2),
            nn.ReLU(),
            pool,
            _Fire(64, 16, 64),
            _Fire(128, 16, 64),
            pool,
            _Fire(128, 32, 128),
            _Fire(256, 32, 128),
            pool,
            _Fire(256, 48, 192),
            _Fire(384, 48, 192),
            _Fire(384, 64, 256),
            _Fire(512, 64, 256),
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, 32, 32]."""
        x = _colours(x, (2, 1, 0), 1.0, (103.939, 116.779, 123.68))
        y = self.features(_enlarged(x))
        logits: Tensor = self.head(y.mean(dim=(2, 3)))
        return logits


def _enlarged(x: Tensor) -> Tensor:
    """Every pixel of [n, c, h, w] repeated in a 2x2 square."""
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)
