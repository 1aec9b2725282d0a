"""Optimisers on flat float32 vectors, in place: SGD with momentum and weight decay, and Adam.

They follow PyTorch's definitions to the letter (`torch.optim.SGD` and `Adam`, without Nesterov, dampening or
AMSGrad), so a run here and a run there agree to rounding. An optimiser holds the state of one span: make one for
the scores and another for a head trained beside them. What the gradient is, and of what, is not known here.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edge_client.bundle import F32
from edge_client.errors import ConfigError

BLOCK = 1 << 15  # values per pass: parameters, gradient and state of a block stay in the second-level cache


class Optimiser(Protocol):
    """One in-place step after another on vectors of one length."""

    def step(self, parameters: F32, gradient: F32) -> None:
        """Move float32[n] `parameters` (a contiguous view is fine) against `gradient`, which is left as it is."""
        ...


def _check(size: int, parameters: F32, gradient: F32) -> None:
    if parameters.shape != (size,) or gradient.shape != (size,):
        raise ValueError(f"the optimiser was made for {size} values, got {parameters.shape} and {gradient.shape}")


class Sgd:
    """``v = momentum * v + gradient + weight_decay * p;  p -= lr * v``, with `v` zero at first.

    `lr` may be changed between steps (a schedule). `velocity` is float32[size], or empty without momentum.
    """

    def __init__(self, size: int, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0:
            raise ConfigError(
                f"SGD needs lr >= 0, 0 <= momentum < 1 and weight_decay >= 0, got {lr}, {momentum}, {weight_decay}"
            )
        self.size, self.lr, self.momentum, self.weight_decay = size, lr, momentum, weight_decay
        self.velocity: F32 = np.zeros(size if momentum else 0, np.float32)
        self._scratch: F32 = np.empty(min(size, BLOCK), np.float32)

    def step(self, parameters: F32, gradient: F32) -> None:
        """One step in place; see :class:`Optimiser`."""
        _check(self.size, parameters, gradient)
        lr, momentum, decay = np.float32(self.lr), np.float32(self.momentum), np.float32(self.weight_decay)
        for low in range(0, self.size, BLOCK):
            p, g = parameters[low : low + BLOCK], gradient[low : low + BLOCK]
            move = self._scratch[: len(p)]
            if decay:
                np.multiply(p, decay, out=move)
                move += g
                g = move
            if momentum:
                v = self.velocity[low : low + BLOCK]
                v *= momentum
                v += g
                g = v
            np.multiply(g, lr, out=move)
            p -= move


class Adam:
    """Adam (Kingma and Ba, 2015) with bias correction; `weight_decay` is added to the gradient (L2), as in PyTorch."""

    def __init__(
        self,
        size: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ConfigError(
                f"Adam needs lr, eps, weight_decay >= 0 and betas in [0, 1), got {lr}, {eps}, {weight_decay}, {betas}"
            )
        self.size, self.lr, self.betas, self.eps, self.weight_decay = size, lr, betas, eps, weight_decay
        self.steps = 0
        self.mean: F32 = np.zeros(size, np.float32)
        self.square: F32 = np.zeros(size, np.float32)
        self._scratch: F32 = np.empty((2, min(size, BLOCK)), np.float32)

    def step(self, parameters: F32, gradient: F32) -> None:
        """One step in place; see :class:`Optimiser`."""
        _check(self.size, parameters, gradient)
        self.steps += 1
        b1, b2 = self.betas
        rate = np.float32(self.lr / (1 - b1**self.steps))
        root = np.float32((1 - b2**self.steps) ** -0.5)
        for low in range(0, self.size, BLOCK):
            p, g = parameters[low : low + BLOCK], gradient[low : low + BLOCK]
            m, v = self.mean[low : low + BLOCK], self.square[low : low + BLOCK]
            a, b = self._scratch[:, : len(p)]
            if self.weight_decay:
                np.multiply(p, np.float32(self.weight_decay), out=b)
                b += g
                g = b
            m *= np.float32(b1)
            np.multiply(g, np.float32(1 - b1), out=a)
            m += a
            v *= np.float32(b2)
            np.multiply(g, g, out=a)
            a *= np.float32(1 - b2)
            v += a
            np.sqrt(v, out=a)
            a *= root
            a += np.float32(self.eps)
            np.divide(m, a, out=a)
            a *= rate
            p -= a
