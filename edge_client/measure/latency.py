"""Latency of ONNX models in ONNX Runtime on this machine, one sample at a time.

Models to be compared are timed in turns, one call each, so that a busy moment or a change of clock affects all of them:
their ratio is then far steadier than either figure. Energy meters are other modules of this package.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_client.errors import ConfigError

WARM_UP = 20
RUNS = 200


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call: median and 90th percentile over `runs` calls."""

    p50_ms: float
    p90_ms: float
    runs: int


def latency(
    models: Sequence[Path | bytes],
    x: NDArray[Any],
    runs: int = RUNS,
    warm_up: int = WARM_UP,
    threads: int = 1,
) -> tuple[Latency, ...]:
    """Latency of each model on the batch `x`, timed in turns. Every model has one input.

    `models` are files or serialised models. Raises ConfigError when a model does not open or does not take `x`.
    """
    if runs < 1 or warm_up < 0 or threads < 1:
        raise ConfigError(f"runs = {runs}, warm_up = {warm_up}, threads = {threads}: need runs >= 1, 0 and 1 at least")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    sessions = []
    for index, model in enumerate(models):
        what = str(model) if isinstance(model, Path) else f"model {index}"
        try:
            session = ort.InferenceSession(
                model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
            )
            (name,) = (i.name for i in session.get_inputs())
            session.run(None, {name: x})
        except Exception as error:  # onnxruntime raises a class of its own for every status
            raise ConfigError(f"{what} does not run on {x.dtype}{list(x.shape)}: {error}") from None
        sessions.append((session, {name: x}))
    times = np.empty((len(sessions), runs))
    for run in range(-warm_up, runs):
        # Alternate who goes first: the first call after a switch finds a colder cache.
        for index in range(len(sessions)) if run % 2 else reversed(range(len(sessions))):
            session, feed = sessions[index]
            start = time.perf_counter_ns()
            session.run(None, feed)
            if run >= 0:
                times[index, run] = (time.perf_counter_ns() - start) / 1e6
    return tuple(Latency(float(np.median(t)), float(np.percentile(t, 90)), runs) for t in times)
