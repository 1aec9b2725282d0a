"""A small residual CNN for scikit-learn's digits, as a user would bring it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions with batch-norm; the input is added, through a 1x1 convolution where channels differ."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        same = inner == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, out, h / stride, w / stride]."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def build() -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
