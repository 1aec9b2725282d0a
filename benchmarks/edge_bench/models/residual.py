"""Residual networks for 32x32 RGB images: ResNet of depth 6n + 2 and MobileNetV2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class Resnet(nn.Module):
    """He et al. 2016 for 32x32 images: three stages of (depth - 2) / 6 blocks with 16, 32, 64 channels.

    For 10 classes: 269,722 parameters at depth 20, 853,018 at depth 56.
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, 32, 32]."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        logits: Tensor = self.linear(y.mean(dim=(2, 3)))
        return logits


def _stage(inner: int, out: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inner, out, stride), *(BasicBlock(out, out, 1) for _ in range(blocks - 1)))


EXPANSIONS = (1, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6)
CHANNELS = (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)
"""MobileNetV2's seventeen blocks: how much each widens inside, and its output channels."""


class InvertedResidual(nn.Module):
    """1x1 convolution to more channels, 3x3 depthwise, 1x1 back; the input is added where shapes agree."""

    def __init__(self, inner: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        parts: list[nn.Module] = []
        if expansion > 1:
            parts += [nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        parts += [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        parts += [nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.parts = nn.Sequential(*parts)
        self.adds = stride == 1 and inner == out

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, out, h / stride, w / stride]."""
        y: Tensor = self.parts(x)
        return x + y if self.adds else y


class MobileNetV2(nn.Module):
    """Sandler et al. 2018 for 32x32 images: the first convolution and the second stage keep the resolution.

    2,236,682 parameters for 10 classes.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        halve = {3, 6, 13}  # 32 -> 16 -> 8 -> 4
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
        inner, blocks = 32, []
        for i, (expansion, out) in enumerate(zip(EXPANSIONS, CHANNELS, strict=True)):
            blocks.append(InvertedResidual(inner, out, 2 if i in halve else 1, expansion))
            inner = out
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.Conv2d(inner, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6())
        self.linear = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, 32, 32]."""
        y = self.last(self.blocks(self.stem(x)))
        logits: Tensor = self.linear(y.mean(dim=(2, 3)))
        return logits
