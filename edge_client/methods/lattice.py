"""Lattice: federated averaging on a grid of whole numbers, exact both ways, at a small fraction of the bits. Our own.

The model is ``w0 + step / K * N``: the bundle's weights w0, an integer N for each trainable parameter, a step for each
tensor, the federation's cohort K. Whole numbers merge without error, so a device that missed rounds receives one sum.

- **Steps.** In round 1 a device's steps follow from the root mean square of its own local change (`rms`, a float for
  each tensor, travels once). From then on all use the steps of the cohort's median rms. `quantum` is step / K in units
  of the rms of all parameters.
- **Up.** With a = local change * (samples / mean samples) / step a device sends ``m = floor(a + u)``. The dither u has
  the key (seed, "dither", round) and is shifted by the device's place in the cohort, so that the cohort's numbers are
  stratified. m is unbiased, mostly 0, sometimes +-1, and cheap to code because both sides know where u is close to 0
  or 1. Nothing is left over on the device.
- **Server.** ``N += sum of m``; with S < K reports N += floor(K / S * sum + u'), u' with the key (seed, "rounding",
  round). In round 1 the sum is weighted by samples and in each device's own steps.
- **Down.** The change of N since the last one the device holds, coded given that one and how close the dither of the
  missed rounds came to 0 and 1. A device that holds none, or one of more than HISTORY rounds ago, receives N as a
  change from 0.
- **Guard.** An update says by how much the received model's loss on the device's first batch exceeds that of the
  bundle's model. When the cohort's median is above 0 in two successive rounds the steps are halved and N is doubled.
- **Statistics** of batch-norm travel as float16 differences, up from the received ones, down from the bundle's, and
  are averaged by samples; or they stay local.

With `residual` the server keeps what is left: R += K / S * sum of m; q = sign(R) floor(|R| / 2.5 + 0.3); R -= 2.5 q;
N += q, with a unit of 2.5 step / K. That sends fewer bits down, and is safe only when few devices of many take part.

Where METHODS leaves it open: the cohort's figures (rms, loss) enter by their median, so that no single device sets
them; the mean number of samples is that of all reports so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import coupling, lattice
from edge_kernels.codecs import CodecError
from edge_kernels.lattice_model import Known
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Influence, Method
from edge_client.methods.fedavg import Mean
from edge_client.methods.lattice_grid import (
    HISTORY,
    MOST,
    Counts,
    History,
    dither,
    grid,
    nearest,
    rms,
    rounded,
    spans,
    spread,
    steps,
)
from edge_client.methods.lattice_wire import (
    DownHead,
    UpHead,
    difference,
    down_head,
    fault,
    halved,
    packed,
    received_statistics,
    stale,
    up_head,
)
from edge_client.parts import Part
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload, allow_only, count, u8, vector
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.sgd import Sgd

MOST_MOVE = (1 << 15) - 1  # of a device's number
MOST_HALVINGS = 16
BAD_ROUNDS = 2  # in a row that halve the steps
FEW = 64  # moves below which updates are not told apart by their size
COARSER, UPWARD = 2.5, 0.3  # of the variant with a residual: its unit, and what is added before rounding down
LOWEST_RATE = 0.05  # of the cosine schedule, relative to the first
RATE, CAREFUL_RATE = 0.01, 0.003

MOVES, CHANGE = "moves", "change"


@dataclass(frozen=True)
class State:
    """The global model and what it takes to go on.

    `counts` int32[n] is N. `steps` float32[tensors] are as at first, to be divided by 2**halvings; zeros before round
    1 is over. `statistics` float32[buffers_d] are exact. `samples` is the mean over `reports` updates. `bad` counts
    the bad rounds in a row. `residual` float32[n], in units of step / K, only in that variant.
    """

    counts: Counts
    steps: F32
    statistics: F32
    history: History
    samples: float = 0.0
    reports: int = 0
    halvings: int = 0
    bad: int = 0
    residual: F32 | None = None


@dataclass(frozen=True)
class Record:
    """The last round in which an update of the device was counted: it holds N as at the start of that."""

    round: int


@dataclass(frozen=True)
class Kept:
    """What a device received at the start of its last round, and its own statistics when they stay local."""

    round: int
    counts: Counts
    steps: F32
    halvings: int
    statistics: F32


@dataclass(frozen=True)
class Received:
    """A downlink decoded: N, the steps as at first, and the model float32[d]. `samples` is 0 in round 1."""

    counts: Counts
    steps: F32
    halvings: int
    samples: float
    statistics: F32
    parameters: F32


@dataclass(frozen=True)
class Update:
    """A device's moves int32[n], to be multiplied by `scale`; in round 1 also its rms. `statistics` are changes."""

    moves: Counts
    rms: F32 | None
    statistics: F32
    samples: float
    gain: float
    scale: float = 1.0


@dataclass
class Total:
    """Sums over the devices of a round: moves float64[n], statistics; each device's samples, gain and rms."""

    moves: NDArray[np.float64]
    statistics: Mean
    samples: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    rms: list[F32] = field(default_factory=list)


class Lattice(Method):
    """Averaging on a grid of whole numbers."""

    name: ClassVar[str] = "lattice"
    hint: ClassVar[str] = "lr, then a smaller quantum"
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept
    one_time: ClassVar[frozenset[str]] = frozenset({"rms"})
    one_time_down: ClassVar[frozenset[str]] = frozenset({"steps"})

    quantum: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """Step / cohort in units of the first round's rms: coarser costs fewer bits. 25 is thrifty."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=1000)] | None = None
    """None: 0.003 for a bundle with trained weights and batch-norm statistics, else 0.01."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    cosine: bool = False
    """The rate falls within each round, by a cosine to 5 %."""
    statistics: Literal["mean", "local"] = "mean"
    guard: bool = True
    residual: bool = False

    def unit(self, course: Course, each: F32, halvings: int) -> F32:
        """What one count moves a weight of each tensor, float32[tensors]."""
        share = (COARSER if self.residual else 1.0) * 0.5**halvings / course.cohort
        return (each.astype(np.float64) * share).astype(np.float32)

    def buffers(self, model: Model) -> int:
        """Number of statistics that travel."""
        return model.manifest.buffers_d if self.statistics == "mean" else 0

    # --- server half

    def start(self, course: Course) -> State:
        part = grid(course.model.manifest)
        none = History(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.int32))
        return State(
            counts=np.zeros(part.size, np.int32),
            steps=np.zeros(len(part.blocks), np.float32),
            statistics=course.model.buffers[: self.buffers(course.model)].copy(),
            history=none,
            residual=np.zeros(part.size, np.float32) if self.residual else None,
        )

    def base(self, round_: int, record: Record | None) -> int:
        """The round at whose start the device received the N that the downlink builds on; 1 for N = 0."""
        return record.round if record is not None and round_ - record.round <= HISTORY else 1

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return f"from-{self.base(round_, record)}"

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """Nothing in round 1; then how N changed, and the steps for a device that never received them."""
        if round_ == 1:
            return Payload()
        part, base = grid(course.model.manifest), self.base(round_, record)
        held = np.zeros_like(state.counts) if base == 1 else state.history.before(state.counts, round_ - base)
        missed = 0 if base == 1 else round_ - base
        head = DownHead(coupling.checksum([state.counts]), missed, state.halvings, state.samples)
        coded = lattice.encode(state.counts - held, self.known_down(course, part, base, round_, held))
        arrays: Arrays = {CHANGE: u8(head.pack() + coded)}
        if base == 1:
            arrays["steps"] = state.steps
        if len(state.statistics):
            arrays["statistics"] = halved(state.statistics - course.model.buffers)
        return Payload(arrays)

    def known_down(self, course: Course, part: Part, base: int, round_: int, held: Counts) -> Known:
        """What both sides know of the change of N from the start of round `base` to that of `round_`."""
        if round_ - base > HISTORY:
            return lattice.whole(spans(part))
        return lattice.down(*nearest(course, range(base, round_), part.size), spans(part), held)

    def exchanged(self, model: Model) -> int:
        return grid(model.manifest).size

    def update_limit(self, model: Model) -> int:
        """A byte a parameter, which a quantum of a hundredth of an rms would take; 4 a statistic and a tensor."""
        part = grid(model.manifest)
        return part.size + 1024 + 4 * self.buffers(model) + 4 * len(part.blocks)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        """The moves decoded with the device's dither. Raises PayloadError."""
        part = grid(a.model.manifest)
        first = ("rms",) if a.round == 1 else ()
        allow_only(payload, MOVES, "statistics", *first)
        head, data = up_head(packed(payload, MOVES))
        try:
            moves = lattice.decode(data, lattice.up(dither(a, part.size), spans(part), state.counts))
        except CodecError as error:
            raise PayloadError(f"the moves of {a.device!r} in round {a.round} cannot be decoded: {error}") from None
        if coupling.checksum([moves]) != head.crc:
            raise PayloadError(
                f"the moves of {a.device!r} in round {a.round} do not match their checksum: they were coded against "
                "another model or place; restart the client to repeat the round"
            )
        if int(moves.max(initial=0)) > MOST_MOVE or int(moves.min(initial=0)) < -MOST_MOVE:
            raise PayloadError(f"a move of {a.device!r} leaves +-{MOST_MOVE}; lower the learning rate")
        each = vector(payload, "rms", len(part.blocks)) if first else None
        if each is not None:
            with np.errstate(over="ignore"):
                step = steps(part, each, self.quantum, a.course.cohort)
            if not ((each >= 0).all() and np.isfinite(step).all()):
                raise PayloadError(f"the rms of {a.device!r} are {each.min()} .. {each.max()}; lower the learning rate")
        statistics = difference(payload, "statistics", self.buffers(a.model))
        with np.errstate(over="ignore"):
            if not np.isfinite(state.statistics + statistics).all():
                raise PayloadError(f"the change of {a.device!r} makes a statistic infinite; lower the learning rate")
        return Update(moves, each, statistics, count(payload, "samples", MAX_SAMPLES), head.gain)

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        """The moves count with the samples that they are weighted by, so their sum is norm times weight."""
        size = float(np.abs(self.moved(a, update)).sum())
        statistics = float(np.sqrt(np.square(update.statistics, dtype=np.float64).sum()))
        if update.rms is not None:
            return Influence(size, update.samples, statistics)
        return Influence(max(size, FEW) / update.samples, update.samples, statistics)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """Moves times `scale`, and in the new weight's proportion where they are weighted already."""
        share = scale if update.rms is not None else scale * weight / update.samples
        return replace(
            update, scale=share, samples=weight, statistics=(update.statistics * np.float32(scale)).astype(np.float32)
        )

    def moved(self, a: Assignment, update: Update) -> NDArray[np.float64]:
        """The moves as numbers, in round 1 in units of the weights."""
        moves: NDArray[np.float64] = update.moves * np.float64(update.scale)
        if update.rms is not None:
            part = grid(a.model.manifest)
            moves *= spread(part, steps(part, update.rms, self.quantum, a.course.cohort))
        return moves

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        """Add the moves; in round 1 times the samples."""
        if total is None:
            total = Total(np.zeros(state.counts.size), Mean(state.statistics.size))
        total.moves += self.moved(a, update) * (1.0 if update.rms is None else update.samples)
        total.statistics.add(update.samples, update.statistics)
        total.samples.append(update.samples)
        total.gains.append(update.gain)
        if update.rms is not None:
            total.rms.append(update.rms)
        return total, Record(a.round)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        """N with the round's moves in it; finer steps after bad rounds."""
        reports, weight, each = len(total.samples), math.fsum(total.samples), state.steps
        if round_ == 1:
            part = grid(course.model.manifest)
            middle = np.median(np.stack(total.rms).astype(np.float64), axis=0).astype(np.float32)
            each = steps(part, middle, self.quantum, course.cohort)
            moved = total.moves * (course.cohort / weight) / spread(part, each)
        else:
            moved = total.moves * (course.cohort / reports)
        change, residual = self.rounded(course, round_, state, moved)
        counts = np.clip(state.counts.astype(np.int64) + change, -MOST, MOST).astype(np.int32)
        history = state.history.then(counts - state.counts)
        bad = state.bad + 1 if self.guard and median_low(total.gains) > 0 else 0
        finer = bad >= BAD_ROUNDS and state.halvings < MOST_HALVINGS
        if finer:
            counts = np.clip(2 * counts.astype(np.int64), -MOST, MOST).astype(np.int32)
            history = replace(history, values=2 * history.values)
            residual = None if residual is None else 2 * residual
        seen = state.reports + reports
        statistics = state.statistics
        if len(statistics):
            received = received_statistics(course.model, halved(statistics - course.model.buffers))
            statistics = received + total.statistics.value
        return State(
            counts=counts,
            steps=each,
            statistics=statistics,
            history=history,
            samples=(state.samples * state.reports + weight) / seen,
            reports=seen,
            halvings=state.halvings + finer,
            bad=0 if finer else bad,
            residual=residual,
        ), {}

    def rounded(
        self, course: Course, round_: int, state: State, moved: NDArray[np.float64]
    ) -> tuple[Counts, F32 | None]:
        """The change of N by a sum of moves, and what is left of it in the variant that keeps that."""
        if state.residual is None:
            return rounded(course, round_, moved), None
        left = state.residual + moved
        change = np.sign(left) * np.floor(np.abs(left) / COARSER + UPWARD)
        return change.astype(np.int32), (left - COARSER * change).astype(np.float32)

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """N, from what the device kept and how it changed. Raises LostError, PayloadError."""
        allow_only(downlink, CHANGE, "steps", "statistics")
        part, model = grid(a.model.manifest), a.model
        own = model.buffers if kept is None or kept.statistics.size != model.buffers.size else kept.statistics
        if a.round == 1:
            allow_only(downlink)
            zeros = np.zeros(part.size, np.int32)
            return Received(zeros, np.zeros(len(part.blocks), np.float32), 0, 0.0, own, model.parameters)
        head, data = down_head(packed(downlink, CHANGE))
        base = a.round - head.missed if head.missed else 1
        if not head.missed:
            each, held = vector(downlink, "steps", len(part.blocks)), np.zeros(part.size, np.int32)
            if not (each > 0).all():
                raise PayloadError("a step of the downlink is not above 0")
        else:
            each, held = self.held(a, kept, base, head.halvings, part)
        try:
            change = lattice.decode(data, self.known_down(a.course, part, base, a.round, held))
        except CodecError as error:
            raise fault(a, base, str(error)) from None
        counts = (held.astype(np.int64) + change).astype(np.int32)
        if coupling.checksum([counts]) != head.crc:
            raise fault(a, base, "the counts do not match their checksum")
        if self.statistics == "mean":
            own = received_statistics(model, difference(downlink, "statistics", self.buffers(model)))
        parameters, unit = model.parameters.copy(), self.unit(a.course, each, head.halvings)
        with np.errstate(over="ignore"):
            part.scatter(part.gather(parameters) + spread(part, unit) * counts, parameters)
        if not np.isfinite(parameters).all():
            raise PayloadError(f"the downlink of round {a.round} makes a parameter infinite")
        return Received(counts, each, head.halvings, head.samples, own, parameters)

    def held(self, a: Assignment, kept: Kept | None, base: int, halvings: int, part: Part) -> tuple[F32, Counts]:
        """The steps and the N of the start of round `base`, in today's units. Raises LostError."""
        if kept is None:
            raise stale(a, "it holds no counts")
        if base < 2:
            raise PayloadError(f"the downlink of round {a.round} builds on round {base}; fetch it again")
        if kept.round != base or kept.counts.size != part.size or kept.halvings > halvings:
            raise stale(a, f"it holds {kept.counts.size} counts of round {kept.round}, and round {base} was due")
        return kept.steps, (kept.counts.astype(np.int64) << (halvings - kept.halvings)).astype(np.int32)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """SGD from the global model; the change as whole numbers."""
        a, part = task.assignment, grid(task.assignment.model.manifest)
        own = self.train(task, received)
        change = part.gather(own.parameters) - part.gather(received.parameters)
        arrays: Arrays = {}
        if a.round == 1:
            arrays["rms"] = each = rms(part, change)
            step, share = steps(part, each, self.quantum, a.course.cohort), 1.0
        else:
            step, share = received.steps, task.samples / received.samples * 2.0**received.halvings
        u = dither(a, part.size)
        moves = np.floor(change * (share / spread(part, step).astype(np.float64)) + u * 2.0**-32)
        moves = np.clip(moves, -MOST_MOVE, MOST_MOVE).astype(np.int32)
        head = UpHead(coupling.checksum([moves]), own.gain)
        arrays[MOVES] = u8(head.pack() + lattice.encode(moves, lattice.up(u, spans(part), received.counts)))
        if self.buffers(a.model):
            arrays["statistics"] = halved(own.buffers - received.statistics)
        local = own.buffers if self.statistics == "local" else own.buffers[:0]
        keep = Kept(a.round, received.counts, received.steps, received.halvings, local)
        return Local(keep, Payload(arrays, {"samples": task.samples}), Personal(own.parameters, own.buffers), own.loss)

    def train(self, task: Task, received: Received) -> Trained:
        """A few epochs of SGD with momentum, and the gain on the first batch."""
        a = task.assignment
        parameters, buffers = received.parameters.copy(), received.statistics.copy()
        rate = self.rate(a.model)
        optimiser, loss, gain = Sgd(parameters.size, rate, self.momentum), EpochLoss(), 0.0
        last = self.epochs * -(-task.samples // self.batch)
        for batch in task.batches(self.epochs, self.batch):
            if self.guard and batch.index == 0 and a.round > 1:
                gain -= task.gradient(a.model.parameters, a.model.buffers, batch).loss
            g = task.gradient(parameters, buffers, batch)
            if self.guard and batch.index == 0 and a.round > 1:
                gain += g.loss
            loss.add(batch, g)
            buffers[:] = g.buffers
            if self.cosine:
                wave = (1 + math.cos(math.pi * batch.index / last)) / 2
                optimiser.lr = rate * (LOWEST_RATE + (1 - LOWEST_RATE) * wave)
            optimiser.step(parameters, g.parameters)
        return Trained(parameters, buffers, loss.mean, gain)

    def rate(self, model: Model) -> float:
        """The learning rate; that of the default depends on the bundle."""
        if self.lr is not None:
            return self.lr
        return CAREFUL_RATE if model.manifest.seed is None and model.manifest.buffers_d else RATE

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model."""
        return Personal(received.parameters, received.statistics)


@dataclass(frozen=True)
class Trained:
    """What local training leaves."""

    parameters: F32
    buffers: F32
    loss: float
    gain: float
