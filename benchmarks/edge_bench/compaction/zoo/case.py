"""One graph of the suite: how to make it, what it reads, and which layers no mask touches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5  # of the graphs written for the suite


@dataclass(frozen=True)
class Case:
    """`make` gives a fresh module; `shape` is one sample; `ids` bounds integer inputs, None for float ones.

    `whole` names the layers whose rows are the model's outputs: no mask touches them. `quick` marks the graphs that the
    test suite runs. `needs` describes in a few words what a graph tries that others do not.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    whole: tuple[str, ...]
    ids: int | None = None
    quick: bool = False
    needs: str = ""

    def batch(self, n: int, seed: int = 0) -> Tensor:
        """`n` random samples, the same for the same seed."""
        random = torch.Generator().manual_seed(seed)
        if self.ids is not None:
            return torch.randint(0, self.ids, (n, *self.shape), generator=random)
        return torch.randn((n, *self.shape), generator=random)


class Net(nn.Module):
    """Layers by name and a function that joins them, for graphs whose wiring is their whole point."""

    def __init__(self, wiring: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = (wiring,)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        """What the wiring makes of `x`."""
        made: Tensor = self.run[0](self, x)
        return made


def conv(inner: int, out: int, kernel: int = 3, bias: bool = True, **settings: int | str) -> nn.Conv2d:
    """A 2-d convolution; odd kernels keep the size unless `padding` is given."""
    settings.setdefault("padding", kernel // 2)
    return nn.Conv2d(inner, out, kernel, bias=bias, **settings)  # type: ignore[arg-type]


def normed(inner: int, out: int, kernel: int = 3, **settings: int | str) -> nn.Sequential:
    """Convolution without bias, batch-norm, ReLU."""
    return nn.Sequential(conv(inner, out, kernel, bias=False, **settings), nn.BatchNorm2d(out), nn.ReLU())


def pooled(channels: int, classes: int = CLASSES) -> nn.Sequential:
    """Mean over space, then a classifier, which is layer `2` of it."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
