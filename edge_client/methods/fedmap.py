"""FedMap: federated averaging of a network that all devices prune alike, so that no mask ever travels.

Herzog, Southam, Mavromatis, Khan, "FedMap: Iterative Magnitude-Based Pruning for Communication-Efficient Federated
Learning", 2024. Algorithm 2, round t on a device:

    theta_t = theta_(t-1) + change       the last round's mean change, expanded by the mask M_(t-1)
    M_t = the K_t largest LAMP scores    within M_(t-1): what is pruned stays pruned
    train theta_t with masked gradients  L epochs
    send the change at M_t               32 K_t bits, no indices

- Every device and the server derive M_t from theta_t: `edge_kernels.pruning` is exact on every machine. Both ways a
  64-bit `fingerprint` of M_t and theta_t travels; a device whose own differs raises LostError and receives everything.
- Values are dropped by the mask, never by being zero: kept weights whose change is exactly zero are common.
- Down: nothing in round 1 (the bundle is theta_1). To a device that took part in the round before: `change`. To any
  other, and to all when a new number of rounds changed the schedule after M_t was made: `values` of theta_t at M_t, and
  ``mask.entropy``, M_t in codec `entropy` with the layer as context.
- Only weights of maskable layers are pruned. Biases, batch-norm scale and shift and other trained tensors are dense.
  Statistics travel as `buffers`, or stay on the device. A change is new less old, and its mean is added. The paper's is
  old less new: Algorithm 2 subtracts its mean, and equation 2 adds it, which moves away from the devices' models.
- With a codec as setting `up` the change goes up as ``change.CODEC`` (`value_changes`). The residual of `feedback` is
  that of the weights that remain: what is left of a weight's change is dropped when the weight is pruned.
- `dr` adds FedDR (section III-B): y = M y + alpha (theta - M x), x = argmin f + |x - y|^2 / (2 eta), and the reflection
  2 x - y in the place of the trained model. theta is the mean of every device's last reflection at M, as in `feddr`.
  The paper sends the difference from the device's last reflection; here a device sends the difference from theta, and
  the server, which keeps the last reflections, takes the other. The paper leaves open what absent devices count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels.pruning import keep_largest, lamp_scores
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edge_client.bundle import F32, Bits, Manifest, Model, Packed
from edge_client.errors import LostError, PayloadError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.feddr import Kept as Splitting
from edge_client.methods.feddr import Reflection, following, reflected, without
from edge_client.methods.shared.averaging import Total, Weights, added, distance, toward
from edge_client.methods.shared.pruned import (
    MASK,
    alive,
    check_fingerprint,
    decoded_mask,
    encoded_mask,
    expanded,
    fingerprint,
    prunable,
    unmasked,
    unpacked,
)
from edge_client.methods.shared.value_changes import Coded, applied
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload, allow_only, count, vector
from edge_client.task import Assignment, Course, Local, Personal, Task

NOTHING: F32 = np.zeros(0, np.float32)


@dataclass(frozen=True)
class State:
    """The model of the next round: theta float32[d], of which its mask M, packed, leaves what counts, and statistics.

    `change` is the mean that led to it, at the mask before M; empty before round 1. With `dr` theta is the mean of the
    devices' last reflections, and `weight` the sum of their weights. `trained` is the mask that theta was trained
    under, None where that is M: the final model has it, also when no update was counted since the pruning to M.
    """

    theta: F32
    mask: Packed
    buffers: F32
    change: F32
    weight: float
    trained: Packed | None = None

    def final(self) -> Packed:
        """The mask of the final model."""
        return self.mask if self.trained is None else self.trained


@dataclass(frozen=True)
class Record:
    """The last round that a device took part in, 0 once it lost its model; with `dr` its last reflection."""

    round: int
    last: Reflection | None = None


@dataclass(frozen=True)
class Kept:
    """What a device received in its last round: the values that the mask leaves; its own statistics and splitting.

    With feedback also its residual at these values.
    """

    round: int
    mask: Packed
    values: F32
    buffers: F32
    splitting: Splitting | None = None
    """FedDR's x and y at these values."""
    residual: F32 | None = None


@dataclass(frozen=True)
class Received:
    """The model of the round: theta float32[d], its mask bool[prunable], statistics."""

    theta: F32
    mask: Bits
    buffers: F32


@dataclass(frozen=True)
class Update:
    """A device's change of the values that the mask leaves, its statistics and its weight in the mean."""

    change: F32
    buffers: F32
    weight: float


class DouglasRachford(BaseModel):
    """FedDR's settings; the `later` ones replace the others from the pruning number `switch` on (C1, C2)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    eta: Annotated[float, Field(gt=0, le=1e9)] = 10.0
    """The larger, the less the proximal term holds x near y."""
    alpha: Annotated[float, Field(gt=0, le=2)] = 1.2
    switch: Annotated[int, Field(ge=1)] = 1
    later: Literal["feddr", "fedavg"] = "feddr"
    """`fedavg`: without splitting after the switch (C1)."""
    later_eta: Annotated[float, Field(gt=0, le=1e9)] | None = None
    later_alpha: Annotated[float, Field(gt=0, le=2)] | None = None
    """1.75 in the paper's C2 on FEMNIST."""

    @model_validator(mode="after")
    def _used(self) -> DouglasRachford:
        if self.later == "fedavg" and (self.later_eta or self.later_alpha):
            raise ValueError(
                "later = 'fedavg' is plain averaging, so later_eta and later_alpha change nothing; remove them"
            )
        return self

    def after(self, prunings: int) -> DouglasRachford | None:
        """The settings after so many prunings; None for plain averaging."""
        if prunings < self.switch:
            return self
        if self.later == "fedavg":
            return None
        eta, alpha = self.later_eta or self.eta, self.later_alpha or self.alpha
        return self.model_copy(update={"eta": eta, "alpha": alpha})


class FedMap(Coded):
    """Iterative magnitude pruning of the global model, derived alike by all devices."""

    name: ClassVar[str] = "fedmap"
    search: ClassVar[Search] = {"lr": Range(0.001, 0.3, log=True), "batch": (16, 32, 64, 128)}
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept

    every: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Rounds from one pruning to the next (the paper's s, 25 to 135 there)."""
    prune: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """The share of the remaining weights that each pruning removes (p)."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of weights at which pruning ends (0.01 in the paper's experiment A); every layer keeps at least one."""
    schedule: Literal["step", "continuous"] = "step"
    """`continuous`: a Bezier curve through the steps, some weights every round."""
    weights: Literal["uniform", "samples"] = "uniform"
    """`samples`: a device counts as its training samples (C3)."""
    statistics: Literal["mean", "local"] = "mean"
    dr: DouglasRachford | None = None
    """FedDR's splitting; None: plain averaging. With it set momentum = 0, as FedDR has it; the default stays 0.9."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 4
    batch: Annotated[int, Field(ge=1, le=65536)] = 128
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 5e-4

    @model_validator(mode="after")
    def _fit(self) -> FedMap:
        if self.dr and self.feedback:
            raise ValueError("feedback is for changes; with dr a device sends a reflection, to which none is added")
        return self

    # --- what both sides know

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("lr", "a larger every") if self.prune and self.floor < 1 else ("lr",)

    def caution(self, course: Course) -> str | None:
        """That no pruning comes; that momentum and FedDR's reflection do not go together."""
        said = []
        if self.prune and self.floor < 1 and not self.prunings(course, course.rounds):
            said = [f"every = {self.every}, but rounds = {course.rounds}: nothing is pruned; raise rounds above every"]
        if self.dr is not None and self.momentum:
            said.append(
                f"with dr, momentum = {self.momentum:g} carries a device's model beyond its optimum, and the "
                "reflection doubles that; FedDR itself has momentum = 0"
            )
        return "; ".join(said) or None

    def prunings(self, course: Course, round_: int) -> int:
        """How often the step schedule has pruned when a round trains. The last round's model is not pruned again."""
        return (min(round_, course.rounds) - 1) // self.every

    def splits(self, course: Course, round_: int) -> DouglasRachford | None:
        """The settings of a round's splitting; None for plain averaging."""
        return self.dr.after(self.prunings(course, round_)) if self.dr else None

    def remaining(self, course: Course, round_: int, size: int) -> int:
        """K_t of `size` prunable weights. Products in a fixed order, because pow differs between machines.

        The Bezier curve whose control points are the levels (1 - p)^i, i = 0..m, at equal distances is (1 - p u)^m.
        Each control point lies in the middle of its step.
        """
        steps, factor = self.prunings(course, round_), 1 - self.prune
        if self.schedule == "continuous":
            steps = self.prunings(course, course.rounds)
            ahead = min(round_, course.rounds) - (self.every + 1) / 2
            factor = 1 - self.prune * min(max(ahead / (steps * self.every), 0.0), 1.0) if steps else 1.0
        share = 1.0
        for _ in range(steps):
            share *= factor
        return max(1, round(max(share, self.floor) * size))

    def keep_count(self, course: Course, round_: int) -> int:
        """The weights that stay in a round: K_t, and one a layer where there are more layers.

        LAMP leaves every layer its largest weight, whose score is 1; fewer weights than layers would cut the network.
        """
        part = prunable(course.model.manifest)
        return max(self.remaining(course, round_, part.size), len(part.blocks))

    def pruned(self, course: Course, round_: int, theta: F32, mask: Bits) -> Bits:
        """M_t within M_(t-1), by LAMP; `theta`, zero outside M_(t-1), becomes zero outside M_t, in place."""
        part, keep = prunable(course.model.manifest), self.keep_count(course, round_)
        if keep >= np.count_nonzero(mask):
            return mask
        values = part.gather(theta)
        left = keep_largest(np.where(mask, lamp_scores(values, part.places), -1.0), keep)
        part.scatter(np.where(left, values, np.float32(0)), theta)
        return left

    # --- server half

    def start(self, course: Course) -> State:
        m = course.model
        mask = np.ones(prunable(m.manifest).size, np.bool_)
        return State(m.parameters.copy(), bitset.pack(mask), m.buffers.copy(), NOTHING, 0.0)

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        """Devices in step receive the change, all others the whole model."""
        if round_ == 1:
            return "first"
        return "in step" if record is not None and record.round == round_ - 1 else "whole"

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        manifest, audience = course.model.manifest, self.audience(course, round_, record)
        packed = state.mask if round_ <= course.rounds else state.final()
        mask = unpacked(manifest, packed)
        sent = state.theta[alive(manifest, mask)]
        meta = {"fingerprint": fingerprint(packed, sent)}
        if audience == "first":
            return Payload({}, meta)
        arrays: Arrays = {"buffers": state.buffers} if self.sent_buffers(manifest) else {}
        if audience == "in step" and self.follows(course, round_, state.change.size - sent.size, mask):
            return Payload({"change": state.change, **arrays}, meta)
        return Payload({"values": sent, MASK: encoded_mask(manifest, mask), **arrays}, meta)

    def follows(self, course: Course, round_: int, pruned: int, mask: Bits) -> bool:
        """Whether devices derive this mask themselves; `pruned` weights left it in the last pruning.

        They do not when the operator has changed the number of rounds, and with it the schedule, since it was made.
        """
        live = int(np.count_nonzero(mask))
        return live == min(live + pruned, self.keep_count(course, round_))

    def exchanged(self, course: Course) -> int:
        """All parameters: bits per parameter then fall with the weights that remain."""
        return course.model.manifest.d

    def sent_buffers(self, manifest: Manifest) -> int:
        """The number of statistics that travel."""
        return manifest.buffers_d if self.statistics == "mean" else 0

    def update_limit(self, course: Course) -> int:
        """Four bytes a parameter and a statistic, before the first pruning; the slack of a codec."""
        return self.uplink.limit(course.model.manifest.d) + 4 * self.sent_buffers(course.model.manifest)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        manifest = a.model.manifest
        values = state.theta[alive(manifest, unpacked(manifest, state.mask))]
        check_fingerprint(payload, fingerprint(state.mask, values), PayloadError)
        change = self.uplink.read_change(a, payload, np.zeros(values.size, np.bool_), "buffers")
        applied(values, change)  # refused when it makes one infinite
        samples = count(payload, "samples", MAX_SAMPLES)
        return Update(change, self.buffers(payload, manifest), samples if self.weights == "samples" else 1.0)

    def buffers(self, payload: Payload, manifest: Manifest) -> F32:
        """The statistics of a payload, empty when none travel. Raises PayloadError."""
        size = self.sent_buffers(manifest)
        return vector(payload, "buffers", size) if size or "buffers" in payload.arrays else NOTHING

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        before = state.buffers if update.buffers.size else NOTHING
        change = distance(update.change, np.zeros_like(update.change))
        return Influence(change, update.weight, distance(update.buffers, before))

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """The changes of parameters and statistics times `scale`."""
        before = state.buffers if update.buffers.size else NOTHING
        return Update(np.float32(scale) * update.change, toward(before, update.buffers, scale), weight)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        total = added(total, update.weight, update.change, update.buffers)
        if self.splits(a.course, a.round) is None:
            return total, Record(a.round)
        live = alive(a.model.manifest, unpacked(a.model.manifest, state.mask))
        values, last = state.theta[live], None if record is None else record.last
        reflection = expanded(a.model, live, values + update.change)
        total = without(total, last, lambda reflection: reflection[live] - values)
        return total, Record(a.round, Reflection(reflection, float(update.weight)))

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        """Move theta by the mean change, then find the mask of the next round; there is none after the last."""
        manifest, (change, buffers) = course.model.manifest, total
        if splits := self.splits(course, round_) is not None:
            change.weight += state.weight  # of the reflections that theta is the mean of: they change by nothing
        before = unpacked(manifest, state.mask)
        live = alive(manifest, before)
        theta = expanded(course.model, live, state.theta[live] + change.value)
        mask = self.pruned(course, round_ + 1, theta.copy(), before) if round_ < course.rounds else before
        trained = None if mask is before else state.mask
        statistics = buffers.value if self.sent_buffers(manifest) else state.buffers
        weight = change.weight if splits else 0.0
        return State(theta, bitset.pack(mask), statistics, change.value, weight, trained), {}

    def lost(self, record: Record) -> Record | None:
        """The reflection, which is still in the mean; without one nothing."""
        return None if record.last is None else replace(record, round=0)

    def of_device(self, course: Course, state: State, record: Record | None, everyone: Personal) -> Personal | None:
        return None if self.statistics == "local" else everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """theta_t and M_t, whole or from what the device kept. Raises LostError, PayloadError."""
        model, manifest, arrays = a.model, a.model.manifest, downlink.arrays
        allow_only(downlink, *(("values", MASK) if "values" in arrays else ("change",)), "buffers")
        if not arrays and a.round == 1:
            theta, mask = model.parameters, np.ones(prunable(manifest).size, np.bool_)
        elif "values" in arrays:
            mask = decoded_mask(manifest, downlink)
            live = alive(manifest, mask)
            theta = expanded(model, live, vector(downlink, "values", int(np.count_nonzero(live))))
        else:
            theta, mask = self.followed(a, kept, downlink)
        found = fingerprint(bitset.pack(mask), theta[alive(manifest, mask)])
        check_fingerprint(downlink, found, LostError if "change" in arrays else PayloadError)
        own = model.buffers if kept is None else kept.buffers
        sent = bool(arrays) and self.sent_buffers(manifest)
        return Received(theta, mask, self.buffers(downlink, manifest) if sent else own)

    def followed(self, a: Assignment, kept: Kept | None, downlink: Payload) -> tuple[F32, Bits]:
        """theta_t and M_t from those of the round before and the change. Raises LostError, PayloadError."""
        manifest = a.model.manifest
        if kept is None or kept.round != a.round - 1:
            held = "nothing" if kept is None else f"the model of round {kept.round}"
            raise LostError(f"the change of round {a.round - 1} was received, but {held} is held here")
        before = unpacked(manifest, kept.mask)
        change = vector(downlink, "change", kept.values.size)
        theta = expanded(a.model, alive(manifest, before), kept.values + change)
        mask = self.pruned(a.course, a.round, theta, before)  # theta becomes zero outside it
        return theta, mask

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """A few epochs of SGD on the weights that remain, from theta_t; with `dr` from y, held near it."""
        a, manifest = task.assignment, task.assignment.model.manifest
        live = alive(manifest, received.mask)
        dr = self.splits(a.course, a.round)
        y = self.intermediate(a.model, dr.alpha, kept, received, live) if dr else received.theta
        start, pull = Weights(y, received.buffers), 1 / dr.eta if dr else 0.0
        x, buffers, loss = self.descend(task, start, pull=pull, decay=self.weight_decay, live=live)
        end = reflected(x, y) if dr else x
        values, packed = received.theta[live], bitset.pack(received.mask)
        change, fixed = end[live] - values, np.zeros(values.size, np.bool_)  # what is frozen is not live
        residual = None if kept is None or kept.residual is None else carried(a.model, kept, kept.residual, live)
        arrays, left = self.uplink.send_change(a, change, fixed, residual)
        if self.sent_buffers(manifest):
            arrays["buffers"] = buffers
        update = Payload(arrays, {"fingerprint": fingerprint(packed, values)})
        own = Kept(a.round, packed, values, buffers, Splitting(x[live], y[live]) if dr else None, left)
        return Local(own, update, Personal(x, buffers, unmasked(manifest, received.mask)), loss)

    def intermediate(self, model: Model, alpha: float, kept: Kept | None, received: Received, live: Bits) -> F32:
        """y = M y + alpha (theta - M x) with the device's last y and x; theta itself in its first round."""
        y: F32 = received.theta.copy()
        if kept is not None and kept.splitting is not None:
            x, last = (carried(model, kept, v, live) for v in (kept.splitting.x, kept.splitting.y))
            y[live] = following(Splitting(x, last), y[live], alpha)
        return y

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model as it is."""
        mask = unmasked(task.assignment.model.manifest, received.mask)
        return Personal(received.theta, received.buffers, mask)


def carried(model: Model, kept: Kept, values: F32, live: Bits) -> F32:
    """What a device kept for each weight of its last mask, at the weights of this round: 0 where one has come back."""
    return expanded(model, alive(model.manifest, unpacked(model.manifest, kept.mask)), values)[live]
