"""Coupled Bernoulli masks: the remaining information when both sides share the uniforms, and its coding.

Both sides know probabilities theta[d] and uniforms u[d]. The *reference* is the mask ``u < theta``. A device trains
theta to theta', and its mask is ``u < theta'``. The two differ (a *flip*) only where training moved theta across u.
Both sides can compute how far that is: ``x = odds(larger) / odds(smaller) - 1``, roughly the distance in logits. They
also know the *net* flips of the cohort's last round, which show how far the weights moved. A gradient is a sum of outer
products, so the product of the mean movement of a weight's row and of its column (its *activity*) predicts better than
the weight's own movement.

A set is coded in two steps. The encoder fits a logistic model over such terms and sends it as float16; the model sorts
the positions into bins of predicted log-odds. Codec `entropy` then codes each bin at its own rate. A bad model costs
bytes, never correctness. Both sides must compute the same bins. So terms use exact float64 operations only (no exp, no
log: `log2` is piecewise linear), element by element, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels import bits, codecs
from edge_kernels.codecs import CodecError
from edge_kernels.codecs.sets import Positions, positions_of

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
Bits = NDArray[np.bool_]
Where = slice | Positions
Terms = Callable[[Where], list[F64]]
"""The model's terms at some of the positions, the constant first; all float64 and equally long."""

TINY = 1e-9  # the smallest distance
REACH = 0.4  # flips are likely up to about this distance in logits: a few steps of Adam at 0.1
_TILE = 1 << 14  # positions whose terms are in memory at a time
_FIT = 1 << 15  # positions the model is fitted on
_BINS, _STEP, _LOWEST = 32, 0.5, -11.0  # bins of predicted log-odds
_WORTH = 64  # a set, or a complement, smaller than this is coded without a model
_ROUNDS = 12  # the most Newton steps
_CRC = 4  # bytes of the CRC-32 that guards a payload


@dataclass(frozen=True)
class History:
    """The cohort's last round, known to both sides: `net` int32[d] (ones less reference ones) and `activity`."""

    net: NDArray[np.int32]
    activity: F32


@dataclass(frozen=True)
class Cohort:
    """Sums over the devices of a round. Both sides add the devices one by one, in the same order.

    `reference` int64[d] counts reference ones. `down` and `up` float32[d] measure how many devices are close to losing
    their reference one, or to gaining one.
    """

    reference: NDArray[np.int64]
    down: F32
    up: F32

    @staticmethod
    def empty(d: int) -> Cohort:
        """The sums over no device."""
        return Cohort(np.zeros(d, np.int64), np.zeros(d, np.float32), np.zeros(d, np.float32))

    def add(self, theta: F64, uniforms: F64) -> None:
        """Add one device, in place."""
        for s in _tiles(len(theta)):
            reference, x = distance(theta[s], uniforms[s])
            near = (1 / (1 + (x / REACH) ** 2)).astype(np.float32)
            self.reference[s] += reference
            self.down[s] += near * reference
            self.up[s] += near * ~reference


def distance(theta: F64, uniforms: F64) -> tuple[Bits, F64]:
    """The reference ``u < theta``, and the odds ratio less one, at least TINY. Theta lies inside (0, 1)."""
    reference = uniforms < theta
    low, high = np.where(reference, uniforms, theta), np.where(reference, theta, uniforms)
    return reference, (high - low) / (np.maximum(low, TINY) * np.maximum(1 - high, TINY)) + TINY


def log2(x: F64) -> F64:
    """log2 of x > 0, exact at powers of two and linear between them."""
    mantissa, exponent = np.frexp(x)
    value: F64 = exponent + (2 * mantissa - 2)
    return value


def coupling_contexts(theta: NDArray[np.floating[Any]], uniforms: F64) -> NDArray[np.uint8]:
    """Contexts for codec `entropy` without a model: 42 bins of the distance times 4 bins of theta, uint8[d].

    The bins of the distance are thirds of an octave from 2**-8 to 2**6. A step in the score crosses the distance with
    a probability that hardly depends on theta. So theta takes the low two bits, which merging drops first.
    """
    out = np.empty(len(theta), np.uint8)
    for s in _tiles(len(theta)):
        t = theta[s].astype(np.float64)
        _, x = distance(t, uniforms[s])
        out[s] = np.clip(np.floor(3 * log2(x)) + 24, 0, 41) * 4 + np.clip(np.floor(t * 4), 0, 3)
    return out


def history(net: NDArray[np.int32], shapes: Sequence[tuple[int, ...]]) -> History:
    """The history of net flips int32[d] of tensors with these shapes, laid end to end. Rows are axis 0."""
    activity = np.empty(len(net), np.float32)
    low = 0
    for shape in shapes:
        size = int(np.prod(shape))
        moved = np.abs(net[low : low + size].astype(np.int32)).reshape(shape[0], -1)
        rows, columns = moved.sum(axis=1, dtype=np.int64), moved.sum(axis=0, dtype=np.int64)
        scale = log2(rows + 0.5)[:, None] + log2(columns + 0.5) - log2(np.array([moved.sum() + 1.0]))
        activity[low : low + size] = scale.reshape(-1)
        low += size
    return History(net, activity)


def encode_flips(flips: Bits, theta: F64, uniforms: F64, past: History | None) -> bytes:
    """One device's flips bool[d] as bytes."""
    return _guard(_mask_tiles(flips, theta, uniforms)) + _encode(flips, _flip_terms(theta, uniforms, past))


def decode_flips(data: bytes, theta: F64, uniforms: F64, past: History | None) -> Bits:
    """The flips of :func:`encode_flips` with the same theta, uniforms and past. Raises CodecError."""
    flips = _decode(data[_CRC:], len(theta), _flip_terms(theta, uniforms, past))
    if _guard(_mask_tiles(flips, theta, uniforms)) != data[:_CRC]:
        raise CodecError("the mask does not match its checksum: probabilities or uniforms differ between the two sides")
    return flips


def encode_net(net: NDArray[np.int32], theta: F64, cohort: Cohort, past: History | None) -> bytes:
    """A cohort's net flips int32[d] as bytes: where they are not 0, their signs, then their sizes beyond 1."""
    parts: list[bytes] = []
    size = np.abs(net)
    sparse = positions_of(net != 0)
    parts.append(_encode(net != 0, _moved_terms(theta, cohort, past)))
    parts.append(_encode(net[sparse] > 0, _subset(_way_terms(theta, cohort, past), sparse)))
    while len(sparse):
        level = len(parts)
        more = size[sparse] >= level
        parts.append(_encode(more, _subset(_moved_terms(theta, cohort, past), sparse)))
        sparse = sparse[more]
    lengths = np.array([len(p) for p in parts], "<u4").tobytes()
    return _guard(_count_tiles(cohort, net)) + bytes([len(parts)]) + lengths + b"".join(parts)


def decode_net(data: bytes, theta: F64, cohort: Cohort, past: History | None, masks: int) -> NDArray[np.int32]:
    """The net flips of :func:`encode_net`, each within -masks .. masks. Raises CodecError."""
    d = len(cohort.reference)
    count = data[_CRC] if len(data) > _CRC else 0
    low = _CRC + 1 + 4 * count
    if not 2 <= count <= masks + 3 or len(data) < low:
        raise CodecError(f"net flips of {masks} masks have 2 .. {masks + 3} parts, not {count}; the payload is damaged")
    ends = low + np.cumsum(np.frombuffer(data, "<u4", count, _CRC + 1).astype(np.int64))
    if int(ends[-1]) != len(data):
        raise CodecError(f"the parts of the net flips end at byte {ends[-1]} of {len(data)}; the payload is damaged")
    parts = [data[a:b] for a, b in zip([low, *ends[:-1]], ends, strict=True)]
    sparse = positions_of(_decode(parts[0], d, _moved_terms(theta, cohort, past)))
    upward = _decode(parts[1], len(sparse), _subset(_way_terms(theta, cohort, past), sparse))
    net = np.zeros(d, np.int32)
    for s in _tiles(len(sparse)):  # in tiles: numpy copies an index to int64
        net[sparse[s]] = np.where(upward[s], 1, -1)
    for part in parts[2:]:
        sparse = sparse[_decode(part, len(sparse), _subset(_moved_terms(theta, cohort, past), sparse))]
        for s in _tiles(len(sparse)):
            net[sparse[s]] += np.sign(net[sparse[s]])
    if len(sparse) or _guard(_count_tiles(cohort, net)) != data[:_CRC]:
        raise CodecError("the counts do not match their checksum: the states of the two sides differ")
    return net


# --- the model's terms: what both sides know of each position


def _flip_terms(theta: F64, uniforms: F64, past: History | None) -> Terms:
    def terms(s: Where) -> list[F64]:
        reference, x = distance(theta[s], uniforms[s])
        far, side = np.clip(log2(x), -14.0, 6.0), np.where(reference, -1.0, 1.0)
        plain = [np.ones(len(far)), far, far * far, side, side * (theta[s] - 0.5)]
        if past is None:
            return plain
        ahead, active = side * np.sign(past.net[s]), past.activity[s].astype(np.float64)
        return [*plain, active, active * far, ahead, ahead * far, np.abs(ahead)]

    return terms


def _moved_terms(theta: F64, cohort: Cohort, past: History | None) -> Terms:
    def terms(s: Where) -> list[F64]:
        down, up = cohort.down[s].astype(np.float64), cohort.up[s].astype(np.float64)
        near, lean = log2(down + up + 1e-6), log2(up + 1e-6) - log2(down + 1e-6)
        middle = theta[s] - 0.5
        plain = [np.ones(len(near)), near, near * near, np.abs(lean), middle * lean, middle * middle]
        if past is None:
            return plain
        way, active = np.sign(past.net[s]).astype(np.float64), past.activity[s].astype(np.float64)
        return [*plain, active, active * near, np.abs(way), np.abs(way) * near, way * lean]

    return terms


def _way_terms(theta: F64, cohort: Cohort, past: History | None) -> Terms:
    def terms(s: Where) -> list[F64]:
        down, up = cohort.down[s].astype(np.float64), cohort.up[s].astype(np.float64)
        lean = log2(up + 1e-6) - log2(down + 1e-6)
        plain = [np.ones(len(lean)), lean, lean * lean * lean / 64, theta[s] - 0.5]
        if past is None:
            return plain
        way = np.sign(past.net[s]).astype(np.float64)
        return [*plain, way, way * lean]

    return terms


def _subset(terms: Terms, positions: Positions) -> Terms:
    """The terms of some positions, renumbered from 0."""
    return lambda s: terms(positions[s])


# --- a set, coded under a model


def _encode(members: Bits, terms: Terms) -> bytes:
    """A set bool[n]: its model in float16, or none, then codec `entropy`."""
    n, ones = len(members), int(np.count_nonzero(members))
    if min(ones, n - ones) < _WORTH:
        return b"\0" + codecs.encode("entropy", members, n)
    model = _fit(members, terms)
    return b"\1" + model.astype("<f2").tobytes() + codecs.encode("entropy", members, n, _bins(model, terms, n))


def _decode(data: bytes, n: int, terms: Terms) -> Bits:
    if not data or data[0] > 1:
        raise CodecError("the first byte of a set is 0 (no model) or 1; the payload is damaged")
    if data[0] == 0:
        return codecs.decode_mask("entropy", data[1:], n)
    head = 1 + 2 * len(terms(slice(0, 0)))
    if len(data) < head:
        raise CodecError(f"a model takes {head} bytes, but the payload ends after {len(data)}")
    model = np.frombuffer(data[1:head], "<f2").astype(np.float64)
    if not np.isfinite(model).all():
        raise CodecError("the model of a set holds NaN or infinity; the payload is damaged")
    return codecs.decode_mask("entropy", data[head:], n, _bins(model, terms, n))


def _bins(model: F64, terms: Terms, n: int) -> NDArray[np.uint8]:
    """The bin of predicted log-odds of each position, uint8[n]."""
    out = np.empty(n, np.uint8)
    for s in _tiles(n):
        odds = np.zeros(s.stop - s.start)
        for weight, term in zip(model, terms(s), strict=True):
            odds += weight * term
        out[s] = np.clip(np.floor((odds - _LOWEST) / _STEP), 0, _BINS - 1)
    return out


def _fit(members: Bits, terms: Terms) -> F64:
    """Logistic regression by Newton's method, on an evenly spaced sample of the positions, rounded to float16."""
    stride = -(-len(members) // _FIT)
    design = np.stack([np.concatenate(t) for t in zip(*(_strided(terms, s, stride) for s in _tiles(len(members))),
                                                      strict=True)])  # fmt: skip
    truth = members[::stride].astype(np.float64)
    model = np.zeros(len(design))
    for _ in range(_ROUNDS):
        p = 1 / (1 + np.exp(-np.clip(model @ design, -30, 30)))
        curvature = (design * (p * (1 - p))) @ design.T + 1e-2 * np.eye(len(design))
        step = np.linalg.solve(curvature, design @ (truth - p) - 1e-2 * model)
        model += np.clip(step, -8, 8)
        if float(np.abs(step).max()) < 1e-3:
            break
    rounded: F64 = np.clip(np.nan_to_num(model), -60000, 60000).astype(np.float16).astype(np.float64)
    return rounded


def _strided(terms: Terms, s: slice, stride: int) -> list[F64]:
    first = -(-s.start // stride) * stride
    return [t[first - s.start :: stride] for t in terms(s)]


def _tiles(n: int) -> Iterator[slice]:
    return (slice(low, min(low + _TILE, n)) for low in range(0, n, _TILE))


def _guard(tiles: Iterable[NDArray[np.bool_] | NDArray[np.integer]]) -> bytes:
    return bits.checksum(tiles).to_bytes(_CRC, "little")


def _mask_tiles(flips: Bits, theta: F64, uniforms: F64) -> Iterator[Bits]:
    """The reference with the flips applied."""
    return (flips[s] ^ (uniforms[s] < theta[s]) for s in _tiles(len(flips)))


def _count_tiles(cohort: Cohort, net: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """The reference's counts with the net flips applied."""
    return (cohort.reference[s] + net[s] for s in _tiles(len(net)))
