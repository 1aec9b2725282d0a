"""A method's server half, driven over bytes: downlinks out, updates checked, a round folded into the next state.

Pure functions over values, shared by the coordinator and the simulator, so both get the same bits. Updates are
folded one at a time in the order of their device names, never in the order of arrival and never all in memory.
What is stored where, and when a round closes, is not decided here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from coord_server import guard
from edge_client.errors import MaskfleetError, PayloadError, StorageDamagedError
from edge_client.flat import from_arrays, to_arrays
from edge_client.methods import Influence, Method
from edge_client.protocol import payload
from edge_client.protocol.messages import DeviceMetrics, Round, Scores, Traffic
from edge_client.protocol.metrics import split_metrics
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course

HEADER = "header"  # the kind under which a payload's bytes outside its arrays are counted
T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """A downlink as it travels, and its bytes by kind."""

    data: bytes
    sizes: dict[str, int]


@dataclass(frozen=True)
class Checked:
    """An update that is what it should be: decoded by its method, the device's figures, bytes by kind."""

    update: Any
    metrics: DeviceMetrics
    sizes: dict[str, int]
    influence: Influence | None


@dataclass(frozen=True)
class Contribution:
    """One acknowledged update on its way into the round.

    `data` is its bytes, or what `check_update` made of them; `record` what the server keeps of the device, None at
    first; `downlink` the bytes by kind that the device received; `place` its place in the round's cohort.
    """

    device: str
    data: bytes | Checked
    record: Any
    downlink: Mapping[str, int]
    place: int = 0


@dataclass(frozen=True)
class Closed:
    """A closed round: the next global state, the devices' new records, the round's own record."""

    state: Any
    records: dict[str, Any]
    round: Round


class UnusableUpdate(MaskfleetError):
    """An acknowledged update of `device` cannot be folded; the message has the reason. Close the round without it."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"the update of {device!r} cannot be folded: {reason}")
        self.device = device


# --- values as bytes for the store


def pack(value: object) -> bytes:
    """A state or record as one safetensors file; equal values give equal bytes, None gives an empty file."""
    return payload.encode(Payload(to_arrays(value)), payload.FILE_HEADER_BYTES)


def unpack(kind: type[T], data: bytes) -> T:
    """The value that `pack` wrote. Raises StorageDamagedError."""
    try:
        return from_arrays(kind, payload.decode(data, payload.FILE_HEADER_BYTES).arrays)
    except (PayloadError, ValueError) as error:
        raise StorageDamagedError(f"a stored {kind.__name__} is damaged: {error}; restore the data folder") from None


# --- downlinks and updates


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


def downlink(method: Method, course: Course, round_: int, state: Any, record: Any) -> Encoded:
    """The payload of one audience in `round_` (``rounds + 1`` after the last); `record` is that of any member."""
    content = method.downlink(course, round_, state, record)
    data = payload.encode(content)
    return Encoded(data, sizes(data, content))


def check_update(method: Method, a: Assignment, state: Any, record: Any, data: bytes) -> Checked:
    """Decode an update and check everything that can be wrong with it. Raises PayloadError."""
    content = payload.decode(data)
    own, figures = split_metrics(content)
    update = method.read_update(a, state, record, own)
    return Checked(update, figures, sizes(data, content), method.influence(a, state, update))


def update_limit(method: Method, course: Course) -> int:
    """The most bytes a whole update may have, header included."""
    return method.update_limit(course) + payload.HEADER_BYTES


# --- a round


def scores(values: Sequence[float], weights: Sequence[int]) -> Scores | None:
    """Statistics over the devices that have test samples; the mean is weighted by them. None when none has."""
    plain, mean = [v for v, w in zip(values, weights, strict=True) if w > 0], _mean(values, weights)
    if mean is None:
        return None
    return Scores(mean=mean, worst=min(plain), p10=float(np.percentile(plain, 10)), best=max(plain))


def _mean(values: Sequence[float], samples: Sequence[int]) -> float | None:
    """The mean weighted by `samples`, of which no device's claim outweighs all others; None without any."""
    values, weights = [v for v, n in zip(values, samples, strict=True) if n], guard.capped([n for n in samples if n])
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights) if weights else None


@dataclass
class _Tally:
    """What a round's record adds up, one device at a time."""

    traffic: Traffic = field(default_factory=Traffic)
    figures: list[DeviceMetrics] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    guarded: dict[str, str] = field(default_factory=dict)

    def book(self, method: Method, device: str, checked: Checked, down: Mapping[str, int]) -> None:
        """Add a device whose update was folded, with its bytes by kind, both ways."""
        t = self.traffic
        for sent, once, rounds, one_time in (
            (checked.sizes, t.one_time_up, t.up, method.one_time),
            (down, t.one_time_down, t.down, method.one_time_down),
        ):
            for kind, count in sent.items():
                side = once if kind in one_time else rounds
                side[kind] = side.get(kind, 0) + count
        self.figures.append(checked.metrics)
        self.devices.append(device)


def close_round(
    method: Method,
    course: Course,
    round_: int,
    state: Any,
    contributions: Iterable[Contribution],
    influences: Mapping[str, Influence],
    how: Literal["clip", "drop", "none"],
    fleet: int,
    skipped: Sequence[str] = (),
) -> Closed:
    """Fold the round's updates, sorted by device name, into the next state.

    `contributions` is read one at a time, so it may load each from disk. `influences` are those of the round's updates
    that have one: updates far beyond the others are clipped or dropped by `how` (`guard`). A dropped one changes its
    device's record at most. `fleet` is that of `Method.sized`. Traffic, loss and scores are of the devices that were
    folded; `skipped` are those left out before, for the record. The round's seconds are the caller's to fill in. When
    every update was dropped the state stays. Raises UnusableUpdate for the first that cannot be folded (a method folds
    in place, so the caller begins again without it), ValueError when the devices are not in order or there is none.
    """
    tally, records, total, last = _Tally(), dict[str, Any](), None, ""
    limits = guard.limits(influences, how)
    for c in contributions:
        if c.device <= last:
            raise ValueError(f"device {c.device!r} comes after {last!r}; sort contributions by device name")
        last, limit = c.device, limits.get(c.device)
        total, record, checked = _fold(method, Assignment(course, round_, c.device, c.place), state, total, c, limit)
        if record is not None:
            records[c.device] = record
        if limit is not None:
            tally.guarded[c.device] = limit.reason
        if limit is None or not limit.drop:
            tally.book(method, c.device, checked, c.downlink)
    if not last:
        raise ValueError(f"round {round_} has no update to aggregate")
    if tally.devices:
        state = method.sized(state, fleet)
        state, changed = method.finish(course, round_, tally.devices, state, total)
        records |= changed
    return Closed(state, records, _round(method, course, round_, tally, skipped))


def _fold(
    method: Method, a: Assignment, state: Any, total: Any, c: Contribution, limit: guard.Limit | None
) -> tuple[Any, Any, Checked]:
    """The total with one more update, the new record of its device, the update as checked. Raises UnusableUpdate."""
    try:
        checked = c.data if isinstance(c.data, Checked) else check_update(method, a, state, c.record, c.data)
        update = checked.update
        if limit is not None and limit.drop:
            return total, method.dropped(a, update, c.record), checked
        if limit is not None:
            update = method.limited(a, state, update, limit.scale, limit.weight)
        total, record = method.fold(a, state, total, update, c.record)
    except (MaskfleetError, ArithmeticError, LookupError, ValueError) as error:
        raise UnusableUpdate(c.device, f"{type(error).__name__}: {error}") from error
    return total, record, checked


def _round(method: Method, course: Course, round_: int, tally: _Tally, skipped: Sequence[str]) -> Round:
    figures, exchanged = tally.figures, method.exchanged(course) * len(tally.devices)
    weights, samples = [f.test_samples for f in figures], [f.samples for f in figures]
    return Round(
        round=round_,
        devices=tally.devices,
        traffic=tally.traffic,
        bits_per_parameter_up=8 * sum(tally.traffic.up.values()) / exchanged if exchanged else 0.0,
        bits_per_parameter_down=8 * sum(tally.traffic.down.values()) / exchanged if exchanged else 0.0,
        loss=_mean([f.loss for f in figures], samples),
        score_before=scores([f.score_before for f in figures], weights),
        score_after=scores([f.score_after for f in figures], weights),
        seconds=0.0,
        skipped=sorted(skipped),
        guarded=tally.guarded,
    )
