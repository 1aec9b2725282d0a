"""Wall and CPU time of calls on this machine, taken in turns, and their percentiles.

Calls to be compared are timed in turns, so that a busy moment or a change of clock affects all of them: their ratio is
then far steadier than either figure.
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
SECONDS = 20.0  # that `latency` takes, if these hold the fewest runs
WARM_SHARE = 0.25  # of the seconds, that the warm-up may take
PERCENTILES = (50, 90, 99)
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

    The warm-up is part of `seconds` and ends with a quarter of them, after one turn at least. Each turn has an order of
    its own. In a turn each of several calls is made twice, and the second is timed: the call before it was another
    model's, whose weights are then in the cache, and a small model would lose more by that than a large one.
    """
    if runs < 1 or warm_up < 0 or not calls:
        raise ConfigError(f"runs = {runs}, warm_up = {warm_up}, {len(calls)} calls: need 1, 0 and 1 at least")
    begin, order = time.perf_counter(), np.random.default_rng(0)
    for turn in range(warm_up):
        if turn and time.perf_counter() - begin > WARM_SHARE * seconds:
            break
        for call in calls:
            call()
    found: list[F64] = []
    while len(found) < min(fewest, runs) or (len(found) < runs and time.perf_counter() - begin <= seconds):
        taken = np.empty((len(calls), 2))
        for index in order.permutation(len(calls)):
            if len(calls) > 1:
                calls[index]()
            taken[index] = _timed(calls[index])
        found.append(taken)
    wall, cpu = np.array(found).transpose(2, 1, 0) / 1e6
    return Times(wall, cpu)


def _timed(call: Callable[[], object]) -> tuple[int, int]:
    """Nanoseconds of a call: wall clock, and processor time of all threads."""
    cpu = time.process_time_ns()
    wall = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - wall, time.process_time_ns() - cpu


@dataclass(frozen=True)
class Summary:
    """A series of times in numbers, milliseconds.

    Each interval holds the true percentile of independent runs with probability `SURE`; None where they are too few.
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
    """Percentiles, each with an interval between two of the sorted times, which holds for any distribution."""
    n, rising = len(times), np.sort(times)

    def interval(percent: int) -> tuple[float, float] | None:
        places = ranks(n, percent / 100)
        return None if places is None else (float(rising[places[0]]), float(rising[places[1]]))

    p50, p90, p99 = (float(v) for v in np.percentile(rising, PERCENTILES))
    i50, i90, i99 = map(interval, PERCENTILES)
    mean = float(times.mean())
    return Summary(p50, p90, p99, i50, i90, i99, mean, float(times.std() / mean) if mean else 0.0, n)


def ranks(n: int, share: float) -> tuple[int, int] | None:
    """The places in `n` sorted values between which the quantile `share` lies with probability `SURE`.

    None where the values are too few. The number of values below the quantile is binomial.
    """
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    below = np.cumsum(np.exp(logs[n] - logs[k] - logs[n - k] + k * np.log(share) + (n - k) * np.log(1 - share)))
    tail = (1 - SURE) / 2
    low, high = int(np.sum(below <= tail)) - 1, int(np.sum(below < 1 - tail))
    return (low, high) if low >= 0 and high < n else None


def latency(models: Sequence[Path | bytes], x: NDArray[Any], threads: int = 1) -> tuple[float, ...]:
    """The median milliseconds of each model in ONNX Runtime on the batch `x`, timed in turns.

    `models` are files or serialised models of one input. Raises ConfigError when one does not open or take `x`.
    """
    calls = [onnx_call(model, x, threads) for model in models]
    wall = in_turns(calls, seconds=SECONDS).wall
    return tuple(float(np.median(t)) for t in wall)
