"""One round on a device: decode the downlink, train, score before and after, add the figures to the update; or why not.

The HTTP client and the simulator call this same function. What travels between rounds is arrays here and typed
values inside the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from edge_client.errors import DataError, DivergedError, LostError, MaskfleetError, PayloadError, first_fault
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Method
from edge_client.protocol.messages import DeviceMetrics, Failure, FailureKind
from edge_client.protocol.metrics import short, with_metrics
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Personal, Task

REASON_MOST = 1000  # characters of `Failure.reason`
OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "failed to allocate", "out of memory")  # in the engines' own words


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
    loss, before, after = short(local.loss, before, task.score(local.trained))
    try:
        metrics = DeviceMetrics(
            samples=task.samples,
            loss=loss,
            score_before=before,
            score_after=after,
            test_samples=len(task.data.y_test),
        )
    except ValidationError as error:
        raise DivergedError(
            f"round {task.assignment.round} cannot be reported: {first_fault(error)}; if the training diverges, the "
            f"operator should lower the learning rate of {method.name!r}",
            at_start=False,
        ) from None
    return Outcome(to_arrays(local.kept), with_metrics(local.update, metrics), metrics, local.trained)


def failure_of(error: Exception, other: FailureKind | None = None) -> Failure | None:
    """The failure behind an exception of a round.

    `other` is the kind of one that is not the round's (a full disk, a bad setting); None for such a one without it.
    """
    kind = _kind(error) or other
    if kind is None:
        return None
    reason = str(error) if isinstance(error, MaskfleetError) else f"{type(error).__name__}: {error}"
    return Failure(kind=kind, reason=reason.encode(errors="replace").decode()[:REASON_MOST])


def _kind(error: Exception) -> FailureKind | None:
    if isinstance(error, LostError):
        return "lost"
    if isinstance(error, DivergedError):
        return "downlink" if error.at_start else "diverged"
    if isinstance(error, PayloadError):
        return "downlink"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, MaskfleetError):
        return None
    words = str(error).lower()
    if isinstance(error, MemoryError) or any(phrase in words for phrase in OUT_OF_MEMORY):
        return "out-of-memory"
    return "backend"
