"""Wall and CPU time of calls on this machine, taken in turns, and what is said of them.

Calls to be compared are timed in turns, one each, so that a busy moment or a change of clock affects all of them: their
ratio is then far steadier than either figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError
from edge_client.measure.engines import onnx_call

F64 = NDArray[np.float64]
WARM_UP = 20
RUNS = 200
FEWEST = 20  # runs that are made however long they take
WARM_SHARE = 0.25  # of the seconds, that the warm-up may take
PERCENTILES = (50, 90, 99)
RESAMPLES = 1000
SURE = 0.95  # of an interval


@dataclass(frozen=True)
class Times:
    """Milliseconds of each call, float64[calls, runs]: wall clock, and processor time of all threads."""

    wall: F64
    cpu: F64


def in_turns(
    calls: Sequence[Callable[[], object]],
    runs: int = RUNS,
    warm_up: int = WARM_UP,
    seconds: float = np.inf,
    fewest: int = FEWEST,
) -> Times:
    """Time `calls` in turns, after `warm_up` turns: `runs` turns, or as many as fit in `seconds`, at least `fewest`.

    The warm-up is part of `seconds` and ends with a quarter of them, after one turn at least.
    Each turn has an order of its own: the first call after another finds a colder cache.
    """
    if runs < 1 or warm_up < 0 or not calls:
        raise ConfigError(f"runs = {runs}, warm_up = {warm_up}, {len(calls)} calls: need 1, 0 and 1 at least")
    order = np.random.default_rng(0)
    found = np.empty((2, len(calls), runs))
    begin, done = time.perf_counter(), 0
    for run in range(-warm_up, runs):
        gone = time.perf_counter() - begin
        if -warm_up < run < 0 and gone > WARM_SHARE * seconds:
            continue
        if run >= min(fewest, runs) and gone > seconds:
            break
        for index in order.permutation(len(calls)):
            call = calls[index]
            cpu = time.process_time_ns()
            wall = time.perf_counter_ns()
            call()
            taken = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
            if run >= 0:
                found[:, index, run] = taken
        done = run + 1
    found = found[:, :, :done] / 1e6
    return Times(found[0], found[1])


@dataclass(frozen=True)
class Summary:
    """What is said of a series of times in ms.

    Intervals hold the true percentile with probability `SURE`, of independent runs; None where the runs are too few.
    """

    p50: float
    p90: float
    p99: float
    p50_interval: tuple[float, float] | None
    p90_interval: tuple[float, float] | None
    p99_interval: tuple[float, float] | None
    mean: float
    cv: float
    """Coefficient of variation: standard deviation over mean."""
    runs: int

    def to_json(self) -> dict[str, Any]:
        """For a report: four digits."""
        return {k: _digits(v) for k, v in asdict(self).items()}


def _digits(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_digits(v) for v in value]
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def summary(times: F64) -> Summary:
    """Percentiles with intervals, each the wider of two at either end.

    One lies between two of the sorted times, and holds for any distribution. The other is by a bootstrap over blocks
    of neighbours, as a busy moment lasts for several runs: alone it is too short where few runs lie beyond.
    """
    n, rising = len(times), np.sort(times)
    block = max(1, round(n ** (1 / 3)))
    starts = np.random.default_rng(0).integers(0, n, (RESAMPLES, -(-n // block)))
    chosen = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    again = np.percentile(times[chosen], PERCENTILES, axis=1)
    ends = np.percentile(again, [50 * (1 - SURE), 50 * (1 + SURE)], axis=1)
    p50, p90, p99 = (float(v) for v in np.percentile(times, PERCENTILES))

    def interval(percent: int, low: float, high: float) -> tuple[float, float] | None:
        places = ranks(n, percent / 100)
        return None if places is None else (float(min(low, rising[places[0]])), float(max(high, rising[places[1]])))

    i50, i90, i99 = (interval(percent, *both) for percent, both in zip(PERCENTILES, ends.T, strict=True))
    mean = float(times.mean())
    return Summary(p50, p90, p99, i50, i90, i99, mean, float(times.std() / mean) if mean else 0.0, n)


def ranks(n: int, share: float) -> tuple[int, int] | None:
    """Places among `n` sorted values between which the quantile `share` lies with probability `SURE`; None for few.

    How many of the values lie below it is binomial.
    """
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    below = np.cumsum(np.exp(logs[n] - logs[k] - logs[n - k] + k * np.log(share) + (n - k) * np.log(1 - share)))
    tail = (1 - SURE) / 2
    low, high = int(np.sum(below <= tail)) - 1, int(np.sum(below < 1 - tail))
    return (low, high) if low >= 0 and high < n else None


def latency(models: Sequence[Path | bytes], x: NDArray[Any], threads: int = 1) -> tuple[float, ...]:
    """The median milliseconds of each model in ONNX Runtime on the batch `x`, timed in turns. Each has one input.

    `models` are files or serialised models. Raises ConfigError when a model does not open or does not take `x`.
    """
    calls = [onnx_call(model, x, threads) for model in models]
    wall = in_turns(calls).wall
    return tuple(float(np.median(t)) for t in wall)
