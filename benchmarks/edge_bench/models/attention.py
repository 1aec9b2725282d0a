"""A small vision transformer whose attention is written as matrix products and a softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a layer-norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] to the same shape."""
        tokens, width = x.shape[1:]
        y = self.read(self.norm1(x)).reshape(-1, tokens, 3, self.heads, width // self.heads)
        query, key, value = y.permute(2, 0, 3, 1, 4).unbind(0)  # [n, heads, tokens, width / heads]
        weights = torch.softmax(query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(-1, tokens, width))
        made: Tensor = self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return x + made


class VisionTransformer(nn.Module):
    """ViT-tiny (width 192, three heads) on patches of 32x32 RGB images; the mean of all tokens is classified.

    For 10 classes and 4x4 patches: 5,362,378 parameters with the full depth of 12, 1,803,466 with 4.
    """

    def __init__(
        self, classes: int = 10, depth: int = 12, width: int = 192, heads: int = 3, patch: int = 4, size: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, 3, size, size]."""
        y = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(y)).mean(1))
        return logits
