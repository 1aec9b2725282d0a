"""The masked step with numba (extra `fast`): one pass over the vectors where numpy needs several.

numpy computes tanh, which it vectorises and LLVM does not; kernels do the rest, with sigmoid(s) = (1 + tanh(s/2)) / 2.
Only `steps` imports this module. numba keeps compiled kernels on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from edge_kernels import counter
from numba import njit

from edge_client.bundle import F32
from edge_client.training.gates import Bernoulli, Gate, GroupLasso, SigmoidThreshold, SignTanh
from edge_client.training.sgd import Adam, Optimiser, Sgd
from edge_client.training.steps import MaskedStep

_U, _F, _I = np.uint64, np.float32, np.int32
_ZERO, _HALF, _ONE, _ULP = _F(0), _F(0.5), _F(1), _F(2**-24)
_24 = _U(0xFFFFFF)
_GAMMA, _MIX_A, _MIX_B = _U(counter.GAMMA), _U(counter.MIX_A), _U(counter.MIX_B)


class CompiledStep(MaskedStep):
    """What `MaskedStep` is, equal to rounding, for the gates of gates.py."""

    def __init__(self, gate: Gate, weights: F32, scores: F32, optimiser: Optimiser, lasso: GroupLasso | None) -> None:
        super().__init__(gate, weights, scores, optimiser, lasso)
        self._inner = _F(1.0 if isinstance(gate, SignTanh) else 0.5)  # the slope is inner^2 * (1 - tanh(inner * s)^2)
        self._ref = isinstance(gate, Bernoulli) and gate.ste == "ref"

    def effective(self, out: F32, stream: int | None = None) -> None:
        if isinstance(self.gate, SigmoidThreshold):
            _threshold(self.weights, self.scores, out)
        elif isinstance(self.gate, Bernoulli) and stream is not None:
            _draw(_U(stream), self._tanh(), self.weights, out)
        else:
            super().effective(out, stream)

    def gradient_of_scores(self, gradient: F32) -> F32:
        self._accumulate(gradient, self._moved)
        return self._moved

    def step(self, gradient: F32, out: F32 | None = None) -> None:
        o = self.optimiser
        if isinstance(o, Sgd) and (out is None or isinstance(self.gate, SigmoidThreshold)):
            self._accumulate(gradient, o.velocity, _F(o.momentum), _F(o.lr), self.scores, out)
            return
        if isinstance(o, Adam):
            _adam(self.scores, self.gradient_of_scores(gradient), o.mean, o.square, *map(_F, o.advance()))
        else:
            o.step(self.scores, self.gradient_of_scores(gradient))
        if out is not None:
            self.effective(out)

    def _accumulate(
        self, gradient: F32, v: F32, carry: Any = _ZERO, lr: Any = _ZERO, s: F32 | None = None, out: F32 | None = None
    ) -> None:
        """``v = carry * v + dL/ds``, then ``s -= lr * v``, then the effective weights under `s` to `out`."""
        rows = columns = None
        tanh = self._tanh()
        if self.lasso:
            rows, columns = _scales(tanh.reshape(self.lasso.shape[0], -1), self.lasso.shape[1], _F(self.lasso.strength))
        _gradient(gradient, self.weights, tanh, self._inner**2, self._ref, rows, columns, carry, v, lr, s, out)

    def _tanh(self) -> F32:
        np.multiply(self.scores, self._inner, out=self._soft)
        np.tanh(self._soft, out=self._soft)
        return self._soft


@njit(cache=True, error_model="numpy")
def _threshold(w: Any, s: Any, out: Any) -> None:
    for j in range(s.size):
        out[j] = w[j] if s[j] >= _ZERO else _ZERO


@njit(cache=True, error_model="numpy")
def _draw(stream: Any, tanh: Any, w: Any, out: Any) -> None:
    """The weights whose uniform, of `gates.draw`, is below the probability."""
    for i in range(out.size // 2):
        number = _number(stream, i)
        out[2 * i], out[2 * i + 1] = _F(_I(number >> _U(8) & _24)) * _ULP, _F(_I(number >> _U(40))) * _ULP
    if out.size % 2:
        out[-1] = _F(_I(_number(stream, out.size // 2) >> _U(8) & _24)) * _ULP
    for j in range(out.size):
        out[j] = w[j] if out[j] < _HALF + _HALF * tanh[j] else _ZERO


@njit(cache=True, error_model="numpy")
def _number(stream: Any, i: Any) -> Any:
    """Number i of a stream; see counter.py."""
    z = stream + _U(i + 1) * _GAMMA
    z = (z ^ (z >> _U(30))) * _MIX_A
    z = (z ^ (z >> _U(27))) * _MIX_B
    return z ^ (z >> _U(31))


@njit(cache=True, error_model="numpy", fastmath={"reassoc"})
def _scales(tanh: Any, channels: Any, strength: Any) -> Any:
    """`strength` over the norm of the sigmoids of each row, and of each channel of columns; 0 where all are dead."""
    rows, columns = np.zeros(tanh.shape[0], np.float32), np.zeros(tanh.shape[1], np.float32)
    for i in range(tanh.shape[0]):
        row, total = tanh[i], _ZERO
        for j in range(row.size):
            soft = _HALF + _HALF * row[j]
            columns[j] += soft * soft
            total += soft * soft
        rows[i] = strength / np.sqrt(total) if total > _ZERO else _ZERO
    for channel in columns.reshape(channels, -1):
        total = channel.sum()
        channel[:] = strength / np.sqrt(total) if total > _ZERO else _ZERO
    return rows, columns


@njit(cache=True, error_model="numpy")
def _gradient(
    g: Any,
    w: Any,
    tanh: Any,
    gain: Any,
    ref: Any,
    rows: Any,
    columns: Any,
    carry: Any,
    v: Any,
    lr: Any,
    s: Any,
    out: Any,
) -> None:
    if columns is None:
        _gradient_of_row(g, w, tanh, gain, ref, None, None, carry, v, lr, s, out)
    else:
        n = columns.size
        for i in range(rows.size):
            own = slice(i * n, (i + 1) * n)
            moved = None if s is None else s[own]
            written = None if out is None else out[own]
            _gradient_of_row(g[own], w[own], tanh[own], gain, ref, rows[i], columns, carry, v[own], lr, moved, written)


@njit(cache=True, error_model="numpy")
def _gradient_of_row(
    g: Any,
    w: Any,
    tanh: Any,
    gain: Any,
    ref: Any,
    row: Any,
    columns: Any,
    carry: Any,
    v: Any,
    lr: Any,
    s: Any,
    out: Any,
) -> None:
    for j in range(tanh.size):
        soft, pull = _HALF + _HALF * tanh[j], g[j] * w[j]
        if row is not None:
            pull += soft * (row + columns[j])
        slope = gain * (_ONE - tanh[j] * tanh[j])
        v[j] = carry * v[j] + pull * slope * (soft if ref else _ONE)
        if s is not None:
            s[j] -= lr * v[j]
        if out is not None:
            out[j] = w[j] if s[j] >= _ZERO else _ZERO


@njit(cache=True, error_model="numpy")
def _adam(
    s: Any, g: Any, mean: Any, square: Any, b1: Any, c1: Any, b2: Any, c2: Any, root: Any, eps: Any, rate: Any
) -> None:
    for j in range(s.size):
        mean[j] = b1 * mean[j] + c1 * g[j]
        square[j] = b2 * square[j] + c2 * g[j] * g[j]
    for j in range(s.size):
        s[j] -= rate * mean[j] / (np.sqrt(square[j]) * root + eps)
