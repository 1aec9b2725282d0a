"""Sparse ternary compression both ways: the largest changes of a round, as signs with one magnitude.

Sattler, Wiedemann, Mueller, Samek, "Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE
TNNLS 31(9), 2020. STC_p keeps the share p of a vector's entries that are largest and replaces each by its sign
times their mean magnitude. What it drops is not lost: both sides keep a residual.

- A device trains from the global model w to w_k. Up: ``STC(A_k + w_k - w)``; it keeps the rest as A_k.
- The server's round is ``STC(A + mean of the updates)``, added to w; the rest stays in A. The mean is weighted by
  samples, as FedAvg's, where the paper's is plain.
- Down: the server's ternary updates of the rounds that a device missed, one after another, which give it w exactly. A
  new device holds the bundle's weights. The server keeps the updates of the last `history` rounds. A device that missed
  more receives every parameter that differs from the bundle's, as float32, and so does one for which that is smaller.

Positions cost more than signs. The paper codes them as Golomb gaps. Here both sides know w, so they are coded by
`entropy` given the tensor and how far the parameter has moved from the bundle's value: what moved before moves again.
Summing missed updates, as the paper proposes, gains nothing measurable: sums of different magnitudes hold as much
information, and one after another each is coded given those before it.

Batch-norm statistics travel as float16 differences to those that both sides hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log, log2, sqrt
from typing import Annotated, ClassVar

import numpy as np
from edge_kernels.codecs import CodecError, Contexts, sparse, values
from edge_kernels.codecs.sparse import Ternary
from edge_kernels.codecs.streams import Reader, framed
from numpy.typing import NDArray
from pydantic import Field

from edge_client.blocks import frozen
from edge_client.bundle import F32, Manifest, Model
from edge_client.errors import LostError, PayloadError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.shared.averaging import Mean, Total, Weights
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.methods.shared.value_changes import tensor_ends
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, coded, count, decoding, u8
from edge_client.task import Assignment, Course, Local, Personal, Task

UPDATE, UPDATES, MODEL = "update", "updates", "model"
MOST = 1e30  # of a change, so that no sum of a few is infinite in float32
LEVELS = 8  # contexts of a tensor: not moved, or one of seven powers of two of the distance
TENSORS = 512  # tensors with contexts of their own
HALF = 65504.0  # the largest float16


@dataclass(frozen=True)
class State:
    """The global model, after `version` rounds; the server's residual A.

    `log` uint8 holds the coded updates of the last rounds end to end, each of `lengths` int64 bytes.
    """

    model: Weights
    version: int
    residual: F32
    log: NDArray[np.uint8]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """The version of the model that a device held in the last round in which it took part."""

    version: int


@dataclass(frozen=True)
class Kept:
    """The model a device received last, and its residual A_k."""

    model: Weights
    version: int
    residual: F32


@dataclass(frozen=True)
class Received:
    """The global model and its version."""

    model: Weights
    version: int


@dataclass(frozen=True)
class Update:
    """A change of the parameters and of the statistics, and the samples behind it."""

    change: Ternary
    statistics: F32
    samples: float


class STC(LocalSgd):
    """Ternary changes up and down, with a residual on either side."""

    name: ClassVar[str] = "stc"
    search: ClassVar[Search] = {"lr": Range(0.001, 0.3, log=True), "keep": Range(0.001, 0.1, log=True)}
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept

    keep: Annotated[float, Field(ge=1e-6, le=1)] = 0.01
    """The share p of the changes that travels (the paper: 1/25, 1/100, 1/400)."""
    per_tensor: bool = False
    """Take the share, and a magnitude, of every tensor (the published code) and not of all parameters together."""
    history: Annotated[int, Field(ge=0, le=1000)] = 50
    """Rounds whose updates the server keeps for late devices."""

    # --- what both sides know

    def ends(self, m: Manifest) -> tuple[int, ...]:
        """Where each group of parameters with a magnitude of its own ends."""
        return tensor_ends(m, self.per_tensor)

    def write(self, model: Model, held: Weights, change: Ternary, statistics: F32) -> bytes:
        """A change of the model that both sides hold: statistics float16, then the parameters."""
        where, leaning = contexts(model, held.parameters)
        return halves(held.buffers, statistics).tobytes() + sparse.write(change, model.manifest.d, where, leaning)

    def read(self, model: Model, held: Weights, data: bytes) -> tuple[Ternary, F32]:
        """What `write` wrote. Raises CodecError."""
        m = model.manifest
        statistics = values.decode("float16", data[: 2 * m.buffers_d], m.buffers_d, 0)
        where, leaning = contexts(model, held.parameters)
        return sparse.read(data[2 * m.buffers_d :], m.d, self.keep, self.ends(m), where, leaning), statistics

    def after(self, model: Model, held: Weights, data: bytes) -> Weights:
        """The model after a coded change; the same on every machine. Raises CodecError."""
        change, statistics = self.read(model, held, data)
        parameters = held.parameters.copy()
        with np.errstate(over="ignore"):
            parameters[change.positions] += change.values
            buffers = held.buffers + statistics
        if not (np.isfinite(parameters[change.positions]).all() and np.isfinite(buffers).all()):
            raise CodecError("the change makes a value infinite; lower the learning rate")
        return Weights(parameters, buffers)

    # --- server half

    def start(self, course: Course) -> State:
        model = bundled(course.model)
        nothing = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        return State(model, 0, np.zeros(model.parameters.size, np.float32), *nothing)

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        """The version that the device holds."""
        return str(0 if record is None else record.version)

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """The updates since the version that the audience holds, or what differs from the bundle if that is smaller."""
        since = 0 if record is None else record.version
        missed = state.version - since
        if not missed:
            return Payload({}, {"since": since})
        check, model = checksum(state.model), whole(course.model, state.model)
        size = int(state.lengths[-missed:].sum())
        if missed > len(state.lengths) or len(model) < size:
            return Payload({MODEL: u8(check + model)}, {"version": state.version})
        return Payload({UPDATES: u8(check + state.log[len(state.log) - size :].tobytes())}, {"since": since})

    def exchanged(self, course: Course) -> int:
        return course.model.manifest.d

    def paper_bytes(self, course: Course) -> tuple[int, int]:
        """Golomb positions of independent entries, a sign each, one magnitude."""
        d, p = course.model.manifest.d, min(self.keep, 0.5)
        b = 1 + max(0, floor(log2(log((sqrt(5) - 1) / 2) / log(1 - p))))
        bits = b + 1 / (1 - (1 - p) ** (2**b))
        size = 4 + int(sparse.kept(d, p) * (bits + 1) / 8)
        return size, size

    def update_limit(self, course: Course) -> int:
        """Little more than a bit a parameter for the positions, a bit for the signs, two bytes a statistic."""
        m = course.model.manifest
        return 2 * m.buffers_d + m.d // 2 + 4 * len(m.parameters) + (1 << 17)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        with decoding(f"the update of device {a.device!r} in round {a.round}"):
            change, statistics = self.read(a.model, state.model, coded(payload, UPDATE))
        trained = ~frozen(a.model.manifest)[change.positions]  # what a faulty device sends for other values is dropped
        change = replace(change, positions=change.positions[trained], negative=change.negative[trained])
        if np.abs(change.magnitudes).max(initial=0) > MOST:
            raise PayloadError(f"a change of device {a.device!r} is beyond {MOST:g}; lower the learning rate")
        return Update(change, statistics, count(payload, "samples", MAX_SAMPLES))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        change, statistics = (v.astype(np.float64) for v in (update.change.values, update.statistics))
        return Influence(float(np.linalg.norm(change)), update.samples, float(np.linalg.norm(statistics)))

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """Magnitudes and statistics times `scale`."""
        by = np.float32(scale)
        change = replace(update.change, magnitudes=update.change.magnitudes * by)
        return Update(change, update.statistics * by, weight)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        """Add n_k times the change, and n_k."""
        total = total or Total(Mean(state.residual.size), Mean(state.model.buffers.size))
        total.parameters.sum[update.change.positions] += update.samples * update.change.values.astype(np.float64)
        total.parameters.weight += update.samples
        total.buffers.add(update.samples, update.statistics)
        return total, Record(state.version)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        """The model after the round's ternary update, which joins the log; what it drops is the residual."""
        due = state.residual + total.parameters.value
        change = sparse.ternary(due, self.keep, self.ends(course.model.manifest))
        data = self.write(course.model, state.model, change, total.buffers.value)
        model = self.after(course.model, state.model, data)
        due[change.positions] -= change.values
        entry = framed(data)
        lengths = np.append(state.lengths, len(entry))
        lengths = lengths[max(0, len(lengths) - self.history) :]
        log_ = np.concatenate([state.log, u8(entry)])
        return State(model, state.version + 1, due, log_[len(log_) - int(lengths.sum()) :], lengths), {}

    def of_device(self, course: Course, state: State, record: Record | None, everyone: Personal) -> Personal | None:
        return everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """The global model, from the one the device holds. Raises LostError, PayloadError."""
        since = downlink.meta.get("since", 0)
        if type(since) is not int or since < 0:
            raise PayloadError(f"metadata since = {since!r}; it must be a version of the model")
        try:
            if MODEL in downlink.arrays:
                data = coded(downlink, MODEL)
                return Received(checked(read_whole(a.model, data[4:]), data[:4]), count(downlink, "version", 2**40))
            return self.caught_up(a, held(a, kept, since), since, downlink)
        except CodecError as error:
            kind = LostError if since else PayloadError
            raise kind(f"the downlink of round {a.round} does not fit the model of this device: {error}") from None

    def caught_up(self, a: Assignment, held: Received, since: int, downlink: Payload) -> Received:
        """The model after the updates that the device missed. Raises CodecError."""
        if not downlink.arrays:
            return held
        data, model = coded(downlink, UPDATES), held.model
        missed = list(self.updates(data[4:]))[held.version - since :]
        for update in missed:
            model = self.after(a.model, model, update)
        return Received(checked(model, data[:4]), held.version + len(missed))

    def updates(self, data: bytes) -> Iterator[bytes]:
        """The coded updates of a downlink. Raises CodecError."""
        reader = Reader(data)
        for _ in range(self.history):
            if reader.left:
                yield reader.framed()
        reader.end()

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """SGD from the global model, then the largest of what changed since and was left before."""
        start, a = received.model, task.assignment
        parameters, buffers, loss = self.descend(task, start)
        due = parameters - start.parameters
        if kept is not None and kept.residual.size == due.size:
            due += kept.residual
        change = sparse.ternary(due, self.keep, self.ends(a.model.manifest))
        update = self.write(a.model, start, change, buffers - start.buffers)
        due[change.positions] -= change.values
        payload = Payload({UPDATE: u8(update)})
        return Local(Kept(start, received.version, due), payload, Personal(parameters, buffers), loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model as it is."""
        return Personal(received.model.parameters, received.model.buffers)


def bundled(model: Model) -> Weights:
    """The bundle's weights: version 0."""
    return Weights(model.parameters, model.buffers)


def held(a: Assignment, kept: Kept | None, since: int) -> Received:
    """The model that updates since a version are applied to: the bundle's, or what the device kept. Raises LostError.

    A device whose last update did not count holds a later version than the server assumes. Updates since version 0 need
    nothing that a device kept, so that they mend one whose values are not those of the server.
    """
    if not since:
        return Received(bundled(a.model), 0)
    if kept is None or kept.model.parameters.size != a.model.manifest.d or kept.version < since:
        raise LostError(f"the downlink of round {a.round} changes version {since}, which this device does not hold")
    return Received(kept.model, kept.version)


def contexts(model: Model, held: F32) -> tuple[Contexts, Contexts]:
    """What both sides know of where a change is, uint16[d], and of its sign, uint8[d].

    The tensor, and the exponent of the distance from the bundle's value below that of the largest; the distance's sign.
    """
    moved = held - model.parameters
    exponents = np.frexp(moved)[1]
    top = int(exponents[moved != 0].max(initial=-200))
    where = np.where(moved != 0, np.clip(exponents - top + LEVELS - 1, 1, LEVELS - 1), 0).astype(np.uint16)
    for i, tensor in enumerate(model.manifest.parameters):
        where[tensor.span] += np.uint16(LEVELS * min(i, TENSORS - 1))
    return where, (np.sign(moved).astype(np.int8) % 3).astype(np.uint8)


def halves(held: F32, change: F32) -> NDArray[np.float16]:
    """Differences to the statistics `held` as they travel; what is beyond float16 is left for the next round.

    One whose rounding would make a statistic negative is rounded towards 0: a variance may not be negative.
    """
    rounded: NDArray[np.float16] = np.clip(change, -HALF, HALF).astype("<f2")
    negative = (held + rounded < 0) & (held + change >= 0)
    np.nextafter(rounded, np.float16(0), out=rounded, where=negative)
    return rounded


def whole(model: Model, held: Weights) -> bytes:
    """The statistics float32, the parameters that differ from the bundle's, and their values float32."""
    differs = held.parameters.view(np.uint32) != model.parameters.view(np.uint32)  # 0 and -0 too, for the checksum
    positions = np.flatnonzero(differs).astype(np.uint32)
    values_ = held.parameters[positions].astype("<f4").tobytes()
    return held.buffers.astype("<f4").tobytes() + sparse.write_positions(positions, held.parameters.size) + values_


def read_whole(model: Model, data: bytes) -> Weights:
    """What `whole` wrote. Raises CodecError."""
    reader, m = Reader(data), model.manifest
    buffers = reader.floats(m.buffers_d)
    positions = sparse.read_positions(reader, m.d, m.d)
    parameters = model.parameters.copy()
    parameters[positions] = reader.floats(len(positions))
    reader.end()
    if not (np.isfinite(parameters).all() and np.isfinite(buffers).all()):
        raise CodecError("a value of the model is not finite")
    return Weights(parameters, buffers)


def checksum(model: Weights) -> bytes:
    """CRC-32 of the statistics and the parameters, float32, little endian."""
    crc = zlib.crc32(model.parameters.astype("<f4").tobytes(), zlib.crc32(model.buffers.astype("<f4").tobytes()))
    return crc.to_bytes(4, "little")


def checked(model: Weights, check: bytes) -> Weights:
    """The model, whose checksum is these bytes. Raises CodecError."""
    if check != checksum(model):
        raise CodecError("the model does not match its checksum")
    return model
