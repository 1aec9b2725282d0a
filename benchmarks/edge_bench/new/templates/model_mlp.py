"""Your model: `build` returns a PyTorch module that takes a batch of samples as `data.py` gives them."""

from torch import nn


def build() -> nn.Module:
    """8x8 grey images [n, 1, 8, 8] to ten classes [n, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
