"""One round on a device: decode the downlink, train, score before and after, add the figures to the update.

A round that fails becomes a `Failure`. The end: which model the device keeps. The HTTP client and the simulator call
these same functions. What travels between rounds is arrays here and typed values inside the method.

A device that keeps the best of its models stores the one it trained last beside what its method keeps, under names that
begin with `TRAINED`. Both are stored in one write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from edge_client.errors import DataError, DivergedError, LostError, MaskfleetError, PayloadError
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Method
from edge_client.protocol.messages import REASON_MOST, DeviceMetrics, Failure, FailureKind, Personalise, Source
from edge_client.protocol.metrics import short, with_metrics
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Personal, Task

TRAINED = "trained/"  # no method's: the name of a dataclass's field has no slash
OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "failed to allocate", "out of memory")  # in the engines' own words


@dataclass(frozen=True)
class Outcome:
    """What a device keeps, uploads and reports after one round, and the model it trained."""

    kept: Arrays
    update: Payload
    metrics: DeviceMetrics
    trained: Personal


@dataclass(frozen=True)
class Chosen:
    """The model a device ends with, where it is from, and why; `why` completes "keeping the X model: ...".

    `local` is the model after the epochs of one more round, when that was trained.
    """

    personal: Personal
    source: Source
    why: str
    local: Personal | None = None


def read_downlink(method: Method, a: Assignment, kept: Mapping[str, Any], downlink: Payload) -> tuple[Any, Any]:
    """The kept value, None for no arrays, and the downlink decoded. Raises LostError, PayloadError.

    Arrays that do not make a kept value (such as those of another version) count as none.
    """
    value, own = None, of_method(kept)
    if method.kept_type is not None and own:
        with suppress(ValueError):
            value = from_arrays(method.kept_type, own)
    return value, method.receive(a, value, downlink)


def of_method(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What the method keeps, without the model that was trained last."""
    return {name: array for name, array in kept.items() if not name.startswith(TRAINED)}


Reader = Callable[[Method, Assignment, Mapping[str, Any], Payload], tuple[Any, Any]]
"""`read_downlink`, or a function with the same results."""


def choose_model(
    method: Method,
    task: Task,
    kept: Mapping[str, Any],
    downlink: Payload,
    how: Personalise = "best",
    read: Reader = read_downlink,
) -> Chosen:
    """The model that the device ends with. Raises LostError, PayloadError.

    "global" is the method's personal model as the downlink leaves it, "local" the same after the epochs of one more
    round, "last" what the device trained in its last round. The best of them has the highest score on the device's
    validation samples. Four to thirty samples often score all alike; then `local` counts before `last`, and `last`
    before `global`, as they score on average (docs/devices.md). Without such samples it is the global one.
    """
    value, received = read(method, task.assignment, kept, downlink)
    whole = method.personal(task, value, received)
    if how == "global":
        return Chosen(whole, "global", "as the federation asks")
    samples = len(task.data.y_val)
    if how == "best" and not samples:
        return Chosen(whole, "global", "there are no validation samples to compare it on")
    local, failed = None, ""
    try:
        local = method.local_round(task, value, received).trained
    except DivergedError as error:
        failed = f"the last local epochs failed: {error}"
    if how == "local":
        asked = "as the federation asks"
        return Chosen(whole, "global", failed) if local is None else Chosen(local, "local", asked, local)
    last = _last_trained(kept, whole)
    found: list[tuple[Source, Personal | None]] = [("local", local), ("last", last), ("global", whole)]
    models = {source: model for source, model in found if model is not None}
    scores = {source: task.score(model, "validation") for source, model in models.items()}
    best = max(scores, key=lambda source: scores[source])
    figures = ", ".join(f"{source} {score:.3f}" for source, score in scores.items())
    why = "; ".join(filter(None, (f"on {samples} validation samples: {figures}", failed)))
    return Chosen(models[best], best, why, local)


def _last_trained(kept: Mapping[str, Any], like: Personal) -> Personal | None:
    """The model trained last, if it is held and fits the network."""
    found = {name.removeprefix(TRAINED): array for name, array in kept.items() if name.startswith(TRAINED)}
    try:
        model = from_arrays(Personal, found)
    except ValueError:
        return None
    fits = model.parameters.shape == like.parameters.shape and model.buffers.shape == like.buffers.shape
    return model if fits else None


def run_round(
    method: Method,
    task: Task,
    kept: Mapping[str, Any],
    downlink: Payload,
    how: Personalise = "global",
    read: Reader = read_downlink,
) -> Outcome:
    """Train one round and score the model before and after it on the device's own test samples.

    `how` is what `choose_model` will be called with: where it will compare models, the trained one is kept too.
    Raises LostError when the downlink builds on values the device no longer holds, DivergedError when training or its
    figures are not finite, PayloadError.
    """
    value, received = read(method, task.assignment, kept, downlink)
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
        fault = error.errors()[0]
        raise DivergedError(
            f"the training of {method.name!r} diverged in round {task.assignment.round}: {fault['loc'][0]} = "
            f"{fault['input']:.4g}; lower `lr`, or look for outliers in the device's data",
            at_start=False,
        ) from None
    compared = local.trained if how == "best" and len(task.data.y_val) else None
    trained = {TRAINED + name: array for name, array in to_arrays(compared).items()}
    return Outcome(to_arrays(local.kept) | trained, with_metrics(local.update, metrics), metrics, local.trained)


def failure_of(error: Exception, other: FailureKind | None = None) -> Failure | None:
    """The failure to report for an exception of a round.

    An exception that the round did not cause (a full disk, a bad setting) is a failure of the kind `other`; without
    `other` it is none.
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
