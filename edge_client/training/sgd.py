"""Optimisers on flat float32 vectors, in place: SGD with momentum, and Adam.

They follow PyTorch's definitions exactly (`torch.optim.SGD` and `Adam`, without weight decay, Nesterov, dampening or
AMSGrad), so a run here and a run there agree to rounding. An optimiser holds the state of one vector: make one for
the scores and another for a head trained beside them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edge_client.bundle import F32
from edge_client.errors import ConfigError

_TILE = 1 << 16  # values moved at a time
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam, PyTorch's defaults


class Optimiser(Protocol):
    """One in-place step after another on vectors of one length."""

    def step(self, parameters: F32, gradient: F32) -> None:
        """Move float32[n] `parameters` (a view is fine) against `gradient`, which is left as it is."""
        ...


def _check(size: int, parameters: F32, gradient: F32) -> None:
    if parameters.shape != (size,) or gradient.shape != (size,):
        raise ValueError(f"the optimiser was made for {size} values, got {parameters.shape} and {gradient.shape}")


class Sgd:
    """``v = momentum * v + gradient;  p -= lr * v``, with `v` zero at first. `velocity` is float32[size]."""

    def __init__(self, size: int, lr: float, momentum: float = 0.0) -> None:
        if lr < 0 or not 0 <= momentum < 1:
            raise ConfigError(f"SGD needs lr >= 0 and 0 <= momentum < 1, got {lr}, {momentum}")
        self.size, self.lr, self.momentum = size, lr, momentum
        self.velocity: F32 = np.zeros(size, np.float32)

    def step(self, parameters: F32, gradient: F32) -> None:
        _check(self.size, parameters, gradient)
        for low in range(0, self.size, _TILE):
            s = slice(low, low + _TILE)
            velocity = self.velocity[s]
            velocity *= np.float32(self.momentum)
            velocity += gradient[s]
            parameters[s] -= velocity * np.float32(self.lr)


class Adam:
    """Adam (Kingma and Ba, 2015) with bias correction. `mean` and `square` are float32[size], `steps` counts steps."""

    def __init__(self, size: int, lr: float) -> None:
        if lr < 0:
            raise ConfigError(f"Adam needs lr >= 0, got {lr}")
        self.size, self.lr, self.steps = size, lr, 0
        self.mean: F32 = np.zeros(size, np.float32)
        self.square: F32 = np.zeros(size, np.float32)
        self._move: F32 = np.empty(size, np.float32)

    def step(self, parameters: F32, gradient: F32) -> None:
        _check(self.size, parameters, gradient)
        b1, c1, b2, c2, root, eps, rate = map(np.float32, self.advance())
        mean, square, move = self.mean, self.square, self._move
        mean *= b1
        np.multiply(gradient, c1, out=move)
        mean += move
        square *= b2
        np.square(gradient, out=move)
        move *= c2
        square += move
        np.sqrt(square, out=move)
        move *= root
        move += eps
        np.divide(mean, move, out=move)
        move *= rate
        parameters -= move

    def advance(self) -> tuple[float, ...]:
        """Count one step; its factors b1, 1 - b1, b2, 1 - b2, that of the root with bias corrected, eps, the rate."""
        self.steps += 1
        b1, b2 = BETAS
        root, rate = (1 - b2**self.steps) ** -0.5, self.lr / (1 - b1**self.steps)
        return b1, 1 - b1, b2, 1 - b2, root, EPS, rate
