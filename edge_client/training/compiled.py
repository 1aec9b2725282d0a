"""The steps of masked_sgd.py and sampled_adam.py compiled by numba (extra `fast`): one or two passes instead of ten.

A row of a layer, or a block, is taken at a time, so that what one loop leaves for the next is in the first-level cache.
Loops have no branch and sum nothing up, because those are what LLVM turns into vector instructions. Nothing here is
imported unless numba is installed.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from edge_kernels import counter
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numpy.typing import NDArray

from edge_client.bundle import F32
from edge_client.training.gates import SigmoidThreshold
from edge_client.training.sgd import Adam

log = logging.getLogger("maskfleet")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_F, _I = np.float32, np.int32
_ZERO, _HALF, _ONE = _F(0), _F(0.5), _F(1)
# (sigmoid(s) - 1/2) / s = P(s^2) / Q(s^2) for |s| <= 5: the sigmoid to 1.4e-7, its slope to a relative 1.8e-5.
_TOP0, _TOP1, _TOP2 = map(_F, (190277.19, 5697.913, 22.470604))
_LOW0, _LOW1, _LOW2 = map(_F, (761108.8, 86217.32, 932.1149))
_NEAR_BITS = int(_F(5).view(_I))
_DEAD_BITS, _ABS_BITS = int(_F(-np.inf).view(_I)), 0x7FFFFFFF
# exp(x) = 2**n * p(r), n = round(x / log 2), r = x - n * log 2 with log 2 in two parts; relative error 3e-7. Adding and
# taking away 1.5 * 2**23 rounds to an integer, which then stands in the lowest bits.
_ROUND, _LOG2E = _F(12582912.0), _F(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = _F(0.693145751953125), _F(1.4286068e-6)
_P0, _P1, _P2, _P3, _P4 = map(_F, (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1))
_EXP_MIN = _F(-87)
_U = np.uint64
_GAMMA, _MIX_A, _MIX_B = _U(counter.GAMMA), _U(counter.MIX_A), _U(counter.MIX_B)
_CONSTANTS = (counter.GAMMA, counter.MIX_A, counter.MIX_B)  # compiled in, from another file
_ADAM = 1 << 11
_WORDS = 1 << 11  # draws made at a time, two of a number of the stream


class _CheckedFile(IndexDataCacheFile):
    """numba's file of machine code, behind its SHA-256: damaged code would not raise but crash."""

    def _save_data(self, name: str, data: Any) -> None:
        body = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(body).digest() + body)

    def _load_data(self, name: str) -> Any:
        whole = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(whole[32:]).digest() != whole[:32]:
            raise ValueError(f"{name} is damaged")
        return pickle.loads(whole[32:])


class _Cache(FunctionCache):
    """numba's cache of one function on disk, of which no fault is worth more than compiling again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _CheckedFile(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            log.debug("a damaged cache of compiled code is begun anew: %s", self.cache_path, exc_info=True)
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            log.debug("compiled code is not kept: %s", self.cache_path, exc_info=True)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _CONSTANTS)


def _compiler(*freedoms: str) -> Callable[[_Function], _Function]:
    """A decorator that compiles. Division is numpy's, as Python's checks every divisor."""

    def compiled(function: _Function) -> _Function:
        made: Any = njit(error_model="numpy", fastmath=set(freedoms))(function)
        with suppress(RuntimeError):  # nowhere to write a cache: compile anew in every process
            made._cache = _Cache(function)
        return cast(_Function, made)

    return compiled


# Every compilation on a machine gives the same bits. A product and a sum may be one operation only where no other
# product could be taken into that sum instead.
_compiled, _fused = _compiler(), _compiler("contract")


class CompiledMaskedSgd:
    """What `MaskedSgd` is, with the same arguments; dead scores cost as much as others."""

    def __init__(
        self,
        weights: F32,
        scores: F32,
        effective: F32,
        shape: tuple[int, ...],
        lr: float,
        momentum: float,
        lasso: float = 0.0,
    ) -> None:
        if not all(v.flags.c_contiguous for v in (weights, scores, effective)):
            raise ValueError("weights, scores and effective weights are worked on where they lie: contiguous vectors")
        SigmoidThreshold().effective(weights, scores, effective)
        rows = (shape[0], scores.size // shape[0])
        self._weights, self._scores, self._effective = (v.reshape(rows) for v in (weights, scores, effective))
        self._velocity: F32 = np.zeros(rows, np.float32)
        self._lr, self._momentum, self._lasso = _F(lr), _F(momentum), _F(lasso * lr)
        self._row_scale: F32 = np.zeros(rows[0], np.float32)
        self._column_scale: F32 = np.zeros((shape[1], rows[1] // shape[1]), np.float32)
        self._squares: F32 = np.empty(rows[1], np.float32)
        self._near: NDArray[np.bool_] = np.empty(rows[0], np.bool_)

    def step(self, gradient: F32) -> None:
        """One step against `gradient`, float32[n], with respect to the effective weights."""
        _step(
            self._weights, self._scores, self._velocity, self._effective, gradient.reshape(self._scores.shape),
            self._squares, self._near, self._lr, self._momentum, self._lasso, self._row_scale, self._column_scale,
        )  # fmt: skip


class CompiledSampledAdam:
    """What `SampledAdam` is, with the same arguments."""

    def __init__(self, weights: F32, scores: F32, lr: float, ste: Literal["identity", "ref"] = "identity") -> None:
        self.adam = Adam(scores.size, lr)
        self._weights, self._scores, self._ref = weights, scores, ste == "ref"
        self._pull: F32 = np.empty_like(scores)
        self._words: NDArray[np.uint32] = np.empty(_WORDS, np.uint32)

    def sample(self, stream: int, out: F32) -> None:
        """Write the weights under the draw that the stream makes into `out`, float32[n]."""
        _sample(_U(stream), self._words, self._scores, self._weights, out, self._pull, self._ref)

    def step(self, gradient: F32) -> None:
        """One step against `gradient`, float32[n], with respect to the weights of the last draw."""
        adam = self.adam
        adam.steps += 1
        b1, b2 = adam.betas
        keep = np.array([b1, 1 - b1, b2, 1 - b2], np.float32)
        rate, root = _F(adam.lr / (1 - b1**adam.steps)), _F((1 - b2**adam.steps) ** -0.5)
        _adam(self._scores, gradient, self._pull, adam.mean, adam.square, keep, rate, root, _F(adam.eps))


@_compiled
def _square(value: Any) -> Any:
    return value * value


@_fused
def _sigmoid(score: Any, far: Any) -> Any:
    """The sigmoid of one score and its slope, both 0 at -inf.

    With `far` None, |score| <= 5: which it is, is known when this is compiled.
    """
    if far is None:
        t = _square(score)
        soft = _HALF + score * (((_TOP2 * t + _TOP1) * t + _TOP0) / (((t + _LOW2) * t + _LOW1) * t + _LOW0))
        slope = soft * (_ONE - soft)
    else:
        x = max(-abs(score), _EXP_MIN)
        scaled = x * _LOG2E + _ROUND
        n = scaled - _ROUND
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = (((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _HALF) * r * r + r + _ONE
        e = p * _I((_F(scaled).view(_I) << _I(23)) + _I(0x3F800000)).view(_F)
        part = _ONE / (_ONE + e)
        soft = part if score >= _ZERO else e * part
        slope = e * part * part
    return (soft, slope) if score != -np.inf else (_ZERO, _ZERO)


@_compiled
def _is_near(scores: Any) -> Any:
    """Whether every live score lies in [-5, 5]; bits of positive floats are ordered as the floats are."""
    bits, most = scores.view(np.int32), _I(0)
    for j in range(bits.size):
        most = max(most, _I(bits[j] & _ABS_BITS) if bits[j] != _DEAD_BITS else _I(0))
    return most <= _NEAR_BITS


@_fused
def _add_squares(scores: Any, squares: Any, columns: Any, far: Any) -> None:
    for j in range(scores.size):
        o, _ = _sigmoid(scores[j], far)
        square = o * o
        squares[j] = square
        columns[j] += square


@_compiled
def _add(to: Any, a: Any, b: Any, c: Any) -> None:
    for j in range(to.size):
        to[j] = (to[j] + a[j]) + (b[j] + c[j])


@_compiled
def _sum(values: Any) -> Any:
    """The sum, four quarters upon each other, so that its order does not depend on the processor; overwrites them."""
    n, total = values.size, _ZERO
    while n >= 32:
        q = n // 4
        _add(values[:q], values[q : 2 * q], values[2 * q : 3 * q], values[3 * q : 4 * q])
        for j in range(4 * q, n):
            total += values[j]
        n = q
    for j in range(n):
        total += values[j]
    return total


@_compiled
def _scale(square: Any, lasso: Any) -> Any:
    return lasso / np.sqrt(square) if square > _ZERO else _ZERO


@_compiled
def _write_scales(scores: Any, squares: Any, near: Any, lasso: Any, rows: Any, columns: Any) -> None:
    """Lasso over the norm of every row, float32[rows], and column, float32[columns, kernel]; 0 where all is dead.

    Also which rows are near, bool[rows].
    """
    places = columns.reshape(-1)
    places[:] = 0
    for i in range(scores.shape[0]):
        near[i] = _is_near(scores[i])
        if near[i]:
            _add_squares(scores[i], squares, places, None)
        else:
            _add_squares(scores[i], squares, places, True)
        rows[i] = _scale(_sum(squares), lasso)
    for i in range(columns.shape[0]):
        columns[i] = _scale(columns[i].sum(), lasso)


@_fused
def _carry(velocity: Any, momentum: Any, move: Any) -> Any:
    return velocity * momentum + move


@_compiled
def _step_row(
    w: Any, s: Any, v: Any, out: Any, g: Any, lr: Any, momentum: Any, row: Any, columns: Any, far: Any
) -> None:
    for j in range(s.size):
        soft, slope = _sigmoid(s[j], far)
        velocity = _carry(v[j], momentum, (lr * g[j] * w[j] + soft * (row + columns[j])) * slope)
        v[j] = velocity
        score = s[j] - velocity
        s[j] = score
        out[j] = w[j] if score >= _ZERO else _ZERO


@_compiled
def _step(
    w: Any,
    s: Any,
    v: Any,
    out: Any,
    g: Any,
    squares: Any,
    near: Any,
    lr: Any,
    momentum: Any,
    lasso: Any,
    row_scale: Any,
    column_scale: Any,
) -> None:
    """Arrays float32[rows, width] but `squares` [width], `near` and `row_scale` [rows], `column_scale` see above."""
    if lasso > _ZERO:
        _write_scales(s, squares, near, lasso, row_scale, column_scale)
    else:
        for i in range(s.shape[0]):
            near[i] = _is_near(s[i])
    columns = column_scale.reshape(-1)
    for i in range(s.shape[0]):
        if near[i]:
            _step_row(w[i], s[i], v[i], out[i], g[i], lr, momentum, row_scale[i], columns, None)
        else:
            _step_row(w[i], s[i], v[i], out[i], g[i], lr, momentum, row_scale[i], columns, True)


@_compiled
def _fill(words: Any, start: Any) -> None:
    """Halves of numbers, the low one first, of the stream whose key is `start` less one step; see counter.py."""
    for i in range(words.size // 2):
        z = start + _U(i) * _GAMMA
        z = (z ^ (z >> _U(30))) * _MIX_A
        z = (z ^ (z >> _U(27))) * _MIX_B
        z ^= z >> _U(31)
        words[2 * i] = np.uint32(z)
        words[2 * i + 1] = np.uint32(z >> _U(32))


@_compiled
def _draw(words: Any, s: Any, w: Any, out: Any, pull: Any) -> None:
    for j in range(s.size):
        soft, slope = _sigmoid(s[j], True)
        uniform = _F(_I(words[j] >> np.uint32(8))) * _F(2**-24)
        out[j] = w[j] if uniform < soft else _ZERO
        pull[j] = w[j] * slope


@_compiled
def _times_sigmoid(s: Any, pull: Any) -> None:
    for j in range(s.size):
        soft, _ = _sigmoid(s[j], True)
        pull[j] *= soft


@_compiled
def _sample(stream: Any, words: Any, s: Any, w: Any, out: Any, pull: Any, ref: Any) -> None:
    for low in range(0, s.size, words.size):
        high = min(low + words.size, s.size)
        _fill(words, stream + _U(low // 2 + 1) * _GAMMA)
        _draw(words[: high - low], s[low:high], w[low:high], out[low:high], pull[low:high])
        if ref:
            _times_sigmoid(s[low:high], pull[low:high])


@_compiled
def _adam(s: Any, g: Any, pull: Any, mean: Any, square: Any, keep: Any, rate: Any, root: Any, eps: Any) -> None:
    for low in range(0, s.size, _ADAM):
        block = slice(low, min(low + _ADAM, s.size))
        _move_moments(g[block], pull[block], mean[block], square[block], keep[0], keep[1], keep[2], keep[3])
        _apply_moments(s[block], mean[block], square[block], rate, root, eps)


@_compiled
def _move_moments(g: Any, pull: Any, mean: Any, square: Any, b1: Any, c1: Any, b2: Any, c2: Any) -> None:
    for j in range(g.size):
        gradient = g[j] * pull[j]
        mean[j] = b1 * mean[j] + c1 * gradient
        square[j] = b2 * square[j] + c2 * gradient * gradient


@_compiled
def _apply_moments(s: Any, mean: Any, square: Any, rate: Any, root: Any, eps: Any) -> None:
    for j in range(s.size):
        s[j] -= rate * mean[j] / (np.sqrt(square[j]) * root + eps)
