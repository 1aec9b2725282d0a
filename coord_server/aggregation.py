"""A method's server half, driven over bytes: downlinks out, updates checked, a round folded into the next state.

Pure functions over values, shared by the coordinator and the simulator, so both get the same bits. Updates are
folded one at a time in the order of their device names, never in the order of arrival and never all in memory.
What is stored where, and when a round closes, is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from edge_client.bundle import Model
from edge_client.errors import MaskfleetError, PayloadError, first_fault
from edge_client.methods import Assignment, Method, Total, origin
from edge_client.protocol import payload
from edge_client.protocol.messages import Accuracy, DeviceMetrics, Round, Traffic
from edge_client.protocol.payload import Arrays, Payload

HEADER = "header"  # the kind under which a payload's bytes outside its arrays are counted


@dataclass(frozen=True)
class Course:
    """What stays the same through a federation."""

    method: Method
    model: Model
    seed: int
    rounds: int

    def assignment(self, round_: int, device: str) -> Assignment:
        """One device's part in one round."""
        return Assignment(self.model, self.seed, self.rounds, round_, device)


@dataclass(frozen=True)
class Checked:
    """An update that is what it should be: decoded arrays, the device's figures, bytes by kind."""

    arrays: Arrays
    metrics: DeviceMetrics
    sizes: dict[str, int]


@dataclass(frozen=True)
class Contribution:
    """One acknowledged update on its way into the round.

    `data` is its bytes, or what `check_update` made of them when it arrived; `downlink` the bytes by kind that the
    device received; `record` what the server keeps of it, {} at first.
    """

    device: str
    data: bytes | Checked
    record: Arrays
    downlink: Mapping[str, int]


@dataclass(frozen=True)
class Closed:
    """A closed round: the next global state and the round's record."""

    state: Arrays
    record: Round


class UnusableUpdate(MaskfleetError):
    """An acknowledged update cannot be folded: `device` says whose, the message why. Close the round without it."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"the update of {device!r} cannot be folded: {reason}")
        self.device = device


def sizes(data: bytes, content: Payload) -> dict[str, int]:
    """Bytes of a payload by kind: each array, and "header" for the rest. They add up to ``len(data)``."""
    parts = {name: a.nbytes for name, a in sorted(content.arrays.items())}
    return {**parts, HEADER: len(data) - sum(parts.values())}


def sum_kinds(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of tables of bytes by kind, in the order of the kinds' names."""
    total: dict[str, int] = {}
    for table in tables:
        for kind, size in table.items():
            total[kind] = total.get(kind, 0) + size
    return dict(sorted(total.items()))


def downlink(course: Course, round_: int, device: str, state: Arrays, record: Arrays) -> tuple[bytes, dict[str, int]]:
    """The payload `device` receives in `round_` (``rounds + 1`` after the last), and its bytes by kind.

    When the method's downlink is shared it is the same for every device (and names none); ask once with any of them.
    """
    a = course.assignment(round_, device)
    content = course.method.downlink(a, state, record)
    labels = origin(course.method, a)
    if course.method.shared_downlink:
        del labels["device"]
    content = Payload(content.arrays, {**content.meta, **labels})
    data = payload.encode(content)
    return data, sizes(data, content)


def metrics(content: Payload) -> DeviceMetrics:
    """The figures in an update's metadata. Raises PayloadError."""
    said = {k: content.meta[k] for k in DeviceMetrics.model_fields if k in content.meta}
    try:
        return DeviceMetrics.model_validate(said)
    except ValidationError as error:
        raise PayloadError(f"the update's metadata, {first_fault(error)}; train the round again") from None


def check_update(course: Course, round_: int, device: str, state: Arrays, record: Arrays, data: bytes) -> Checked:
    """Decode an update and check everything that can be wrong with it. Raises PayloadError."""
    content = payload.decode(data)
    a = course.assignment(round_, device)
    for key, due in origin(course.method, a).items():
        said = content.meta.get(key)
        if said != due:
            raise PayloadError(
                f"the update's metadata says {key} {said!r}, due is {due!r}; send the one that was asked for"
            )
    figures = metrics(content)
    arrays = course.method.read_update(a, state, record, content)
    return Checked(arrays, figures, sizes(data, content))


def update_limit(course: Course) -> int:
    """The most bytes a whole update may have, header included."""
    return course.method.update_limit(course.model) + payload.HEADER_BYTES


def pack(arrays: Arrays) -> bytes:
    """A state or record as bytes for the store; equal arrays give equal bytes."""
    return payload.encode(Payload(arrays), payload.FILE_HEADER_BYTES)


def unpack(data: bytes) -> Arrays:
    """The arrays that `pack` wrote."""
    return dict(payload.decode(data, payload.FILE_HEADER_BYTES).arrays)


def _book(traffic: Traffic, method: Method, up: Mapping[str, int], down: Mapping[str, int]) -> None:
    """Add one device's bytes by kind."""
    for kind, count in up.items():
        side = traffic.one_time_up if kind in method.one_time else traffic.up
        side[kind] = side.get(kind, 0) + count
    for kind, count in down.items():
        side = traffic.one_time_down if kind in method.one_time_down else traffic.down
        side[kind] = side.get(kind, 0) + count


def accuracy(values: list[float], weights: list[int]) -> Accuracy | None:
    """Statistics over the devices that have test samples; the mean is weighted by them. None when none has."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if w > 0]
    if not pairs:
        return None
    mean = math.fsum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    plain = [v for v, _ in pairs]
    return Accuracy(mean=mean, worst=min(plain), p10=float(np.percentile(plain, 10)), best=max(plain))


def close_round(
    course: Course,
    round_: int,
    state: Arrays,
    contributions: Iterable[Contribution],
    keep: Callable[[str, Arrays], None],
    seconds: float,
    skipped: Sequence[str] = (),
) -> Closed:
    """Fold the round's updates, sorted by device name, into the next state.

    `contributions` is read one at a time, so it may load each from disk; `keep` receives each device's new record
    when it has one (or had one). Traffic, loss and accuracies are of the devices that contributed; `skipped` are those
    left out before, for the record. Raises UnusableUpdate for the first that cannot be folded (a method folds in place,
    so the caller begins again without it), ValueError when the devices are not in order or there is none.
    """
    method, traffic, figures, devices = course.method, Traffic(), [], list[str]()
    total: Total = {}
    for c in contributions:
        if devices and c.device <= devices[-1]:
            raise ValueError(f"device {c.device!r} comes after {devices[-1]!r}; sort contributions by device name")
        try:
            if isinstance(c.data, Checked):
                checked = c.data
            else:
                checked = check_update(course, round_, c.device, state, c.record, c.data)
            total, record = method.fold(course.assignment(round_, c.device), state, total, checked.arrays, c.record)
        except (MaskfleetError, ArithmeticError, LookupError, ValueError) as error:
            raise UnusableUpdate(c.device, f"{type(error).__name__}: {error}") from error
        if record or c.record:
            keep(c.device, record)
        _book(traffic, method, checked.sizes, c.downlink)
        figures.append(checked.metrics)
        devices.append(c.device)
    if not devices:
        raise ValueError(f"round {round_} has no update to aggregate")
    exchanged = method.exchanged(course.model) * len(devices)
    weights = [f.test_samples for f in figures]
    samples = sum(f.samples for f in figures)
    return Closed(
        state=method.finish(course.model, round_, state, total),
        record=Round(
            round=round_,
            devices=devices,
            traffic=traffic,
            bits_per_parameter_up=8 * sum(traffic.up.values()) / exchanged if exchanged else 0.0,
            bits_per_parameter_down=8 * sum(traffic.down.values()) / exchanged if exchanged else 0.0,
            loss=math.fsum(f.loss * f.samples for f in figures) / samples if samples else None,
            accuracy_before=accuracy([f.accuracy_before for f in figures], weights),
            accuracy_after=accuracy([f.accuracy_after for f in figures], weights),
            seconds=seconds,
            skipped=sorted(skipped),
        ),
    )
