"""Whether two models have equal outputs: one proof, for a compact model beside its masked one and for artifacts of it.

Two models are equal when no two of their outputs differ by more than `TOLERANCE` times their scale. Probes are random
inputs, the samples given, and extreme inputs: zeros, ones, large values of both signs, single spikes. A model of ids
is probed on the samples given and on ids drawn from the rows of its table. The scale of an ordinary probe is each
output's own, as outputs may have units of their own: the larger of its standard deviation over the samples and its
distance from their mean. Outputs far from zero, such as years, count with `FAR` of their size: float32 holds them no
better. The scale of an extreme probe is the largest of 1, the sample's largest output and the probe's largest input.

Float32 rounds in proportion to what passes through the network, even where the outputs then cancel. Where the reference
itself moves when its values are rounded to other floats, the two may differ by a few times that, up to `MOST`: by what
that output moves or, as a single one may stay by chance, the median one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import CompactionError

TOLERANCE = 1e-5
ROUNDINGS = 4.0  # times what one rounding of the values does, for all the roundings on the way
MOST = 0.1  # of all outputs' scale: an error that no rounding excuses
SAMPLES = 16  # of each kind of probe
FEW = 8  # samples below which one output's standard deviation means little
FAR = 0.05  # of an output's size: `TOLERANCE` of it is four roundings of the output to float32
LARGE = 100.0  # magnitude of the extreme inputs; models are trained on values of about 1


@dataclass(frozen=True)
class Probe:
    """A batch x [n, ...] to compare two models on."""

    name: str
    ordinary: bool
    x: NDArray[Any]


Outputs = Callable[[Probe], NDArray[Any]]
"""What a model gives for a probe, [n, ...]."""


@dataclass(frozen=True)
class Sides:
    """How a sentence names the two models, and what to do when they differ or the reference gives NaN."""

    found: str
    reference: str
    advice: str
    nan: str


def probes(
    shape: tuple[int, ...],
    dtype: str,
    ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    samples: NDArray[Any] | None = None,
) -> Iterator[Probe]:
    """Every probe of a model that takes [n, *shape]; the same ones each time.

    `ids` are the least integers and their end, of each value of a sample; without a bound for all, none are drawn.
    """
    many = (SAMPLES, *shape)
    if samples is not None and len(samples):
        yield Probe("the given samples", True, np.ascontiguousarray(samples[: 4 * SAMPLES], dtype))
    random = np.random.default_rng(0)
    if dtype != "float32":
        if ids is not None and (ids[1] < np.iinfo(np.int64).max).all():
            yield Probe("ids of its table", True, random.integers(*ids, many, dtype))
        return
    normal = random.standard_normal(many, np.float32)
    spikes = np.zeros((SAMPLES, int(np.prod(shape))), np.float32)
    spikes[np.arange(SAMPLES), random.integers(0, spikes.shape[1], SAMPLES)] = random.choice([-LARGE, LARGE], SAMPLES)
    yield Probe("normal inputs", True, normal)
    yield Probe("uniform inputs", True, random.random(many, np.float32))
    yield Probe("zeros", False, np.zeros((1, *shape), np.float32))
    yield Probe("ones", False, np.ones((1, *shape), np.float32))
    yield Probe("large inputs", False, np.float32(LARGE) * normal)
    yield Probe("large signs", False, np.where(normal < 0, np.float32(-LARGE), np.float32(LARGE)))
    yield Probe("single spikes", False, spikes.reshape(many))


def prove(
    on: Iterable[Probe], reference: Outputs, found: Outputs, rounded: Outputs, sides: Sides
) -> tuple[float, float]:
    """Largest absolute difference on ordinary probes, largest scaled difference on all (above `TOLERANCE` where the
    reference's own rounding excuses it).

    `rounded` is the reference with its values one rounding away. Raises CompactionError when the two are not equal.
    """
    largest = worst = 0.0
    for probe in on:
        expected, made = _rows(reference(probe)), _rows(found(probe))
        if np.isnan(expected).any() and np.isfinite(probe.x).all():
            raise CompactionError(f"{sides.reference} itself gives NaN on {probe.name}, {sides.nan}")
        if made.shape != expected.shape:
            raise CompactionError(
                f"on {probe.name} {sides.found}'s outputs are {list(made.shape)}, {sides.reference}'s "
                f"{list(expected.shape)}; {sides.advice}"
            )
        difference = np.abs(made - expected)
        scaled, equal = _compared(probe, expected, difference, rounded)
        if not equal:
            raise CompactionError(
                f"on {probe.name} {sides.found}'s outputs differ from {sides.reference}'s by {difference.max():.3g} "
                f"({scaled:.3g} of their scale, {TOLERANCE:g} allowed); {sides.advice}"
            )
        worst = max(worst, scaled)
        if probe.ordinary:
            largest = max(largest, float(difference.max()))
    return largest, worst


def _compared(
    probe: Probe, expected: NDArray[np.float64], difference: NDArray[np.float64], rounded: Outputs
) -> tuple[float, bool]:
    """The largest of the differences [n, k] from `expected` in units of its scale, and whether all are allowed."""
    floor = float(expected.std()) if probe.ordinary else max(1.0, float(np.abs(probe.x).max()))
    size = np.abs(expected)
    common = np.maximum(floor, size.max(axis=1, keepdims=True))
    apart = np.maximum(spread(expected), np.abs(expected - expected.mean(axis=0)))
    scale = np.maximum(apart, FAR * size) if probe.ordinary else common
    columns = _largest(difference, scale)
    right = columns <= TOLERANCE
    if not right.all():
        own = _largest(np.abs(_rows(rounded(probe)) - expected), scale)
        excused = columns <= ROUNDINGS * np.maximum(own, np.median(own))
        right |= excused & np.isfinite(columns) & (_largest(difference, common) <= MOST)
    return float(columns.max()), bool(right.all())


def nudged(probe: Probe, *tensors: NDArray[Any]) -> list[NDArray[Any]]:
    """The probe's x and a model's `tensors`, one rounding away: each element up or down at random.

    Of an extreme probe with large values only x moves, upwards. The zeros of another move as ones do: a norm of
    constants multiplies what a sum of them rounds. Integers stay.
    """
    x = probe.x
    if not probe.ordinary and np.abs(x).max() > 1:
        return [np.nextafter(x, np.float32(np.inf)), *tensors]
    random, step = np.random.default_rng(0), np.finfo(np.float32).eps
    sizes = (x if probe.ordinary else np.ones_like(x), *tensors)
    return [
        t + size * step * random.choice(np.array([-1, 1], np.float32), t.shape) if t.dtype == np.float32 else t
        for t, size in zip((x, *tensors), sizes, strict=True)
    ]


def _rows(outputs: NDArray[Any]) -> NDArray[np.float64]:
    """One row a sample: a sequence's steps lie side by side."""
    return np.asarray(outputs, np.float64).reshape(len(outputs), -1)


def spread(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard deviation of each column of outputs [n, k], float64[k]; that of all where n is too small to tell."""
    return outputs.std(axis=0) if len(outputs) >= FEW else np.full(outputs.shape[1], outputs.std())


def _largest(difference: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each column's largest difference in units of its scale; where the scale is 0, any difference is infinite."""
    start = np.where(difference == 0, 0.0, np.inf)
    scaled: NDArray[np.float64] = np.divide(difference, scale, out=start, where=scale > 0).max(axis=0)
    return scaled
