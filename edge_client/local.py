"""One round on a device: decode the downlink, train, score before and after, add the figures to the update.

The HTTP client and the simulator call this same function. What travels between rounds is arrays here and typed
values inside the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from edge_client.errors import DivergedError, first_fault
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Method, origin
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Personal, Task


@dataclass(frozen=True)
class Outcome:
    """What a device keeps, uploads and reports after one round, and the model it trained."""

    kept: Arrays
    update: Payload
    metrics: DeviceMetrics
    trained: Personal


def understand(method: Method, a: Assignment, kept: Mapping[str, Any], downlink: Payload) -> tuple[Any, Any]:
    """The kept value, None for no arrays, and the downlink decoded. Raises LostError, PayloadError.

    Arrays that do not make a kept value (of another version, say) count as none.
    """
    value = None
    if method.kept_type is not None and kept:
        with suppress(ValueError):
            value = from_arrays(method.kept_type, kept)
    return value, method.receive(a, value, downlink)


def personal(method: Method, task: Task, kept: Mapping[str, Any], downlink: Payload) -> Personal:
    """The device's model as a downlink leaves it. Raises LostError, PayloadError."""
    return method.personal(task, *understand(method, task.assignment, kept, downlink))


def run_round(method: Method, task: Task, kept: Mapping[str, Any], downlink: Payload) -> Outcome:
    """Train one round and score the model before and after it on the device's own test samples.

    Raises LostError when the downlink builds on values the device no longer holds, DivergedError when training or its
    figures are not finite, PayloadError.
    """
    value, received = understand(method, task.assignment, kept, downlink)
    before = task.score(method.personal(task, value, received))
    local = method.local_round(task, value, received)
    try:
        metrics = DeviceMetrics(
            samples=task.samples,
            loss=_short(local.loss),
            score_before=_short(before),
            score_after=_short(task.score(local.trained)),
            test_samples=len(task.data.y_test),
        )
    except ValidationError as error:
        raise DivergedError(
            f"round {task.assignment.round} cannot be reported: {first_fault(error)}; if the training diverges, the "
            f"operator should lower the learning rate of {method.name!r}",
            at_start=False,
        ) from None
    a = task.assignment
    meta = {**local.update.meta, **origin(method, a.round), "device": a.device, **metrics.model_dump()}
    return Outcome(to_arrays(local.kept), replace(local.update, meta=meta), metrics, local.trained)


def _short(value: float) -> float:
    """A figure as it travels, to six significant digits."""
    return float(f"{value:.6g}")
