"""Dropout that repeats: which entries are dropped follows from a batch's key, a call's number and an entry's place.

`torch.nn.Dropout` and its kin draw from a generator of their own, which no other engine repeats. Here an entry is kept
when a hash of (key, number of the call, index of the sample, index within the sample) is at least `p`, all in integer
arithmetic below 2**63. So every engine that runs the exported graph drops the same entries, and so does a second run.

The hash is a bijection of the integers modulo the prime 2**31 - 1, ``x -> x**5`` after an addition; 5 does not divide
the prime less one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.rewriting import attention

PRIME = 2**31 - 1
_ATTENTION = functional.scaled_dot_product_attention  # which may be replaced while a module runs
_A, _B = 1_103_515_245, 742_938_285


def _mixed(x: Tensor) -> Tensor:
    """`x`, an int64 tensor of values from 0, through the bijection modulo `PRIME`."""
    x = x % PRIME
    square = x * x % PRIME
    return square * square % PRIME * x % PRIME


def kept(shape: Any, p: float, key: Tensor, number: int) -> Tensor:
    """bool of `shape`: True with probability 1 - p. `key` int64[1] is below `PRIME`; `number` tells calls apart."""
    rows = torch.arange(shape[0])
    start = _mixed(key * _A + (number + 1) * _B)
    rows = _mixed(_mixed(rows * _A + start) * _B + start)
    rows = rows.reshape(-1, *[1] * (len(shape) - 1))
    places = torch.zeros((1,) * len(shape), dtype=torch.int64)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        at = torch.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - 1 - axis))
        places = places + at * stride
        stride = stride * shape[axis]
    drawn = _mixed(rows + _mixed(places * _B + number + 1))
    return drawn >= math.ceil(p * PRIME)


class Drops:
    """Replacements of PyTorch's dropout functions; each call takes the next number."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.calls = key, 0

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Entries are dropped and the others scaled, as by `functional.dropout`."""
        return self._dropped(x, p, training, inplace, x.shape)

    def channels(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Whole channels are dropped, as by `functional.dropout2d` and its kin."""
        return self._dropped(x, p, training, inplace, (*x.shape[:2], *[1] * (x.ndim - 2)))

    def alpha(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """As `functional.alpha_dropout`: mean and variance of SELU's outputs stay."""
        return self._alpha(x, p, training, inplace, x.shape)

    def alpha_channels(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """As `functional.feature_alpha_dropout`."""
        return self._alpha(x, p, training, inplace, (*x.shape[:2], *[1] * (x.ndim - 2)))

    def bernoulli(self, x: Tensor, p: Any = 0.5, **rest: Any) -> Tensor:
        """Ones with probability `p` in `x`, as by `Tensor.bernoulli_`, which stochastic depth is written with."""
        if isinstance(p, Tensor) or rest:
            return x.bernoulli_(p, **rest)
        return x.copy_(self._draw(x.shape, 1 - p).to(x.dtype))

    def _dropped(self, x: Tensor, p: float, training: bool, inplace: bool, shape: Any) -> Tensor:
        if not training or p == 0:
            return x
        factor = self._draw(shape, p).to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))
        return x.mul_(factor) if inplace else x * factor

    def _alpha(self, x: Tensor, p: float, training: bool, inplace: bool, shape: Any) -> Tensor:
        if not training or p == 0:
            return x
        low = -1.7580993408473766
        a = (1 - p + p * (1 - p) * low**2) ** -0.5 if p < 1 else 0.0
        stay = self._draw(shape, p).to(x.dtype)
        made = x * (stay * a) + ((1 - stay) * (a * low) + a * p * -low)
        return x.copy_(made) if inplace else made

    def _draw(self, shape: Any, p: float) -> Tensor:
        self.calls += 1
        if not shape:  # one draw for the whole batch
            return kept((1,), p, self.key, self.calls)[0]
        return kept(shape, p, self.key, self.calls)

    def table(self) -> dict[Any, Callable[..., Any]]:
        """The replacement of each function."""
        f = functional
        return {
            f.dropout: self.dropout, torch.dropout: self.dropout,
            f.dropout1d: self.channels, f.dropout2d: self.channels, f.dropout3d: self.channels,
            torch.feature_dropout: self.channels,
            f.alpha_dropout: self.alpha, torch.alpha_dropout: self.alpha,
            Tensor.bernoulli_: self.bernoulli,
            f.feature_alpha_dropout: self.alpha_channels, torch.feature_alpha_dropout: self.alpha_channels,
        }  # fmt: skip


def repeatable(drops: Drops) -> dict[Any, Callable[..., Any]]:
    """Replacements for all of PyTorch that drops entries; calls without dropout stay PyTorch's own."""

    def attended(*args: Any, **kwargs: Any) -> Tensor:
        dropped = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if dropped:
            return attention(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            made: Tensor = _ATTENTION(*args, **kwargs)
        return made

    def layered(run: Callable[..., Any]) -> Callable[..., Any]:
        def whole(x: Tensor, start: Any, weights: Any, *rest: Any) -> Any:
            if not isinstance(weights, list | tuple) or not (rest[2] and rest[3]):
                with torch._C.DisableTorchFunction():
                    return run(x, start, weights, *rest)
            biased, layers, dropout, training, bidirectional, batch_first = rest
            each = len(weights) // layers
            ways = 2 if bidirectional else 1
            ends: list[Any] = []
            for layer in range(layers):
                if layer:  # as in the graph: time first
                    x = (
                        drops.dropout(x.transpose(0, 1), dropout).transpose(0, 1)
                        if batch_first
                        else drops.dropout(x, dropout)
                    )
                at = slice(layer * ways, (layer + 1) * ways)
                own = tuple(s[at] for s in start) if isinstance(start, tuple | list) else start[at]
                flat = weights[layer * each : (layer + 1) * each]
                with torch._C.DisableTorchFunction():
                    x, *last = run(x, own, flat, biased, 1, 0.0, training, bidirectional, batch_first)
                ends.append(last)
            return x, *(torch.cat(list(e)) for e in zip(*ends, strict=True))

        return whole

    recurrent = {f: layered(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)}
    return {**drops.table(), **recurrent, _ATTENTION: attended}
