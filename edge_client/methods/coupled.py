"""Coupled masks: FedPM's learning for far fewer bytes, exact both ways.

Bernoulli masks on frozen weights (`bernoulli` defines what is masked, trained and left alone) with shared randomness:
device k and the server draw the same uniforms u_k from the key (seed, "uniforms", round, device). The device trains
theta to theta_k and its mask is ``u_k < theta_k``, an exact draw, independent between devices.

- **Up** travel the flips: where the mask differs from the reference ``u_k < theta``. That only happens where training
  carried theta across u_k, the least that two coupled masks can differ. The flips are coded at their entropy given all
  that both sides know (`edge_kernels.coupling`), without loss.
- **Down** travels theta, which an integer count of ones over a number of masks determines. A device that took part in
  the last round holds the counts from before it and can draw every device's uniforms of that round. It receives the
  cohort's *net flips* against the sum of the references, so the sampling noise of the round costs nothing. Any other
  device receives the counts themselves, at most log2(masks + 1) bits each. Before the first masks nothing is sent.
- A probed head goes down once to each device.

There is one downlink for each audience: "short" (net flips), "long" (net flips coded with those of the round before,
for a device that received them), "change" (counts coded against the last counts, when the cohort was larger than
`references`, so that drawing all its uniforms would cost more than it saves), "whole" (counts); each with or without
the head. A device's record has the round in which it last took part, and its audience in the round after.

An update names its reference mask by a hash, and checksums of the mask and of the counts travel along, so that a
difference between the two sides is detected before noise is averaged. A device whose kept values are lost or old raises
`LostError`; the server then drops the record, and the next downlink is whole. After the last round it is whole for
every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from edge_kernels import bits, counter, coupling
from edge_kernels.codecs import CodecError, counts
from edge_kernels.coupling import Cohort, History
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Bits, Model, Packed
from edge_client.errors import LostError, PayloadError
from edge_client.methods.shared import bernoulli, changes
from edge_client.methods.shared.averaging import Mean
from edge_client.methods.shared.bernoulli import MOST_MASKS, BernoulliMasks, HeadUpdate
from edge_client.methods.shared.theta import F64, Ints, Posterior
from edge_client.protocol.payload import Arrays, Payload, coded, count, decoding, u8
from edge_client.task import Assignment, Course, Local, Task

# A coded array is named after what it holds and its codec.
FLIPS = "flips.coupled"
SHORT, LONG = "net_short.coupled-net", "net_long.coupled-net"
COUNTS, CHANGE = "counts.counts", "change.counts"

Flips = NDArray[np.int32]


@dataclass(frozen=True)
class Net:
    """The net flips int32[masked] of a round, and what they are coded with.

    `earlier` are those of the round before; `streams` uint64[K] the keys of the devices' uniforms; `reference` uint8,
    `down` and `up` the sums of `coupling.Cohort`.
    """

    flips: Flips
    earlier: Flips | None
    streams: NDArray[np.uint64]
    reference: NDArray[np.uint8]
    down: F32
    up: F32


@dataclass(frozen=True)
class Step:
    """The last round of masks: the posterior before it, and its net flips unless the cohort was too large."""

    before: Posterior
    net: Net | None


@dataclass(frozen=True)
class State(bernoulli.State):
    """The server's global values; `step` is None before any mask."""

    step: Step | None = None


@dataclass(frozen=True)
class Record:
    """A device's last round, and its audience in the next one: "short", "long", "change" or "whole"."""

    round: int
    next: str


@dataclass(frozen=True)
class Held:
    """What a device received at the start of its last round of masks; the next downlink may build on it."""

    posterior: Posterior
    head: F32
    net: Flips | None


@dataclass(frozen=True)
class Kept(bernoulli.Kept):
    """What every such device keeps, and what it received last."""

    held: Held | None = None


@dataclass(frozen=True)
class Received(bernoulli.Received):
    """A downlink decoded: theta and the head, the posterior, the last round's net flips."""

    posterior: Posterior
    net: Flips | None


@dataclass
class Total:
    """The counts of ones and of references; for the first `references` devices the other sums of `coupling.Cohort`."""

    theta: F64
    masks: Tally
    cohort: Cohort
    streams: list[int] = field(default_factory=list)


class Coupled(BernoulliMasks):
    """Bernoulli masks drawn from uniforms that both sides know."""

    name: ClassVar[str] = "coupled"
    one_time_down: ClassVar[frozenset[str]] = frozenset({"head"})
    state_type: ClassVar[type[Any]] = State
    record_type: ClassVar[type[Any]] = Record
    kept_type: ClassVar[type[Any]] = Kept

    references: Annotated[int, Field(ge=0, le=250)] = 64
    """The largest cohort whose reference masks a device draws to decode a downlink."""

    # --- what both sides know

    @property
    def referenced(self) -> bool:
        return True

    def stream(self, a: Assignment) -> int:
        """The key of a device's uniforms in a round."""
        return counter.key(a.seed, "uniforms", a.round, a.device)

    def history(self, model: Model, net: Flips | None) -> History | None:
        """What the last round's net flips predict of the next."""
        if net is None:
            return None
        return coupling.history(net, [b.shape for b in self.masked(model).blocks])

    # --- server half

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        """What a device lacks: "short", "long", "change" or "whole", and "head" for one that never received it."""
        if record is None or round_ > course.rounds:
            record = Record(0, "whole")
        content = record.next if record.round == round_ - 1 else "whole"
        lacks_head = round_ > 1 and record.round <= self.probing(course.model) > 0
        return f"{content}+head" if lacks_head else content

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """What the audience lacks, coded against what it holds."""
        content, _, head = self.audience(course, round_, record).partition("+")
        arrays: Arrays = {"head": state.head} if head else {}
        posterior, step = state.posterior, state.step
        if step is None:
            return Payload(arrays)
        if step.net is not None and content in ("short", "long"):
            name, earlier = (LONG, step.net.earlier) if content == "long" else (SHORT, None)
            cohort = Cohort(step.net.reference.astype(np.int64), step.net.down, step.net.up)
            theta, past = self.theta(course, step.before), self.history(course.model, earlier)
            data = u8(coupling.encode_net(step.net.flips, theta, cohort, past))
            return Payload({**arrays, name: data, "streams": step.net.streams})
        meta = {"masks": posterior.masks}
        if content == "change":
            data = u8(counts.encode(posterior.ones, posterior.masks, scaled(step.before, posterior.masks)))
            return Payload({**arrays, CHANGE: data}, {**meta, "crc": bits.checksum([posterior.ones])})
        return Payload({**arrays, COUNTS: u8(counts.encode(posterior.ones, posterior.masks))}, meta)

    def mask_limit(self, n: int) -> int:
        """Flips at a little over one bit a parameter, the cost under a useless prediction."""
        return n // 7

    def read_mask(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Bits:
        """The reference with the flips applied. Raises PayloadError."""
        theta = self.theta(a.course, state.posterior)
        u = counter.uniform(self.stream(a), theta.size)
        reference = u < theta
        what = f"the update of device {a.device!r} in round {a.round}"
        changes.check(payload, reference, what)
        net = state.step.net if state.step is not None and holds_net(a, record) else None
        past = self.history(a.model, None if net is None else net.flips)
        with decoding(what):
            return reference ^ coupling.decode_flips(coded(payload, FLIPS), theta, u, past)

    def fold(
        self, a: Assignment, state: State, total: Any, update: HeadUpdate | Packed, record: Record | None
    ) -> tuple[Any, Record]:
        """Add a head; or a mask to the counts, and the device's uniforms to the sums that devices repeat."""
        if isinstance(update, HeadUpdate):
            return super().fold(a, state, total, update, record)[0], Record(a.round, "whole")
        if total is None:
            theta = self.theta(a.course, state.posterior)
            total = Total(theta, Tally(theta.size), Cohort.empty(theta.size))
        stream = self.stream(a)
        u = counter.uniform(stream, total.theta.size)
        if len(total.streams) < self.references:
            total.cohort.add(total.theta, u)
        else:  # no device draws so many
            total.cohort.reference[:] += u < total.theta
        total.streams.append(stream)
        total.masks.add(update)
        return total, Record(a.round, "long" if holds_net(a, record) else "short")

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Any
    ) -> tuple[State, Mapping[str, Record]]:
        """The averaged head, or the new counts with what the round's devices need to follow them."""
        if isinstance(total, Mean):
            return super().finish(course, round_, took_part, state, total)
        reference, masks = total.cohort.reference, total.masks.total
        net = total.masks.counts().astype(np.int64) - reference
        posterior, flips = self.advanced(course, round_, state.posterior, reference, net, masks), net.astype(np.int32)
        if len(total.streams) > self.references:
            record = Record(round_, "change" if state.posterior.masks else "whole")
            return State(posterior, state.head, Step(state.posterior, None)), dict.fromkeys(took_part, record)
        earlier = state.step.net.flips if state.step is not None and state.step.net is not None else None
        streams, sums = np.array(total.streams, np.uint64), total.cohort
        net = Net(flips, earlier, streams, reference.astype(np.uint8), sums.down, sums.up)
        return State(posterior, state.head, Step(state.posterior, net)), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """The downlink, with what the device kept. Raises LostError, PayloadError."""
        arrays, held = downlink.arrays, None if kept is None else kept.held
        head = self._head(a, held, downlink)
        size = self.exchanged(a.course)
        with decoding(f"the downlink of round {a.round}"):
            if LONG in arrays or SHORT in arrays:
                known = required(a, held, size)
                reference, net = self._net(a, known, downlink)
                masks = len(arrays["streams"])
                wide = net.astype(np.int64)
                posterior = self.advanced(a.course, a.round - 1, known.posterior, reference, wide, masks)
                return Received(self.theta(a.course, posterior), head, posterior, net)
            if CHANGE in arrays:
                posterior = self._changed(a, required(a, held, size).posterior, downlink)
            elif COUNTS in arrays:
                masks = count(downlink, "masks", MOST_MASKS)
                ones = counts.decode(coded(downlink, COUNTS, ("head",)), size, masks)
                posterior = Posterior(ones.astype(np.uint32), masks)
            elif set(arrays) - {"head"}:
                raise PayloadError(f"the payload holds arrays {sorted(arrays)}, none of which this method sends")
            else:
                posterior = Posterior(np.zeros(size, np.uint32), 0)
        return Received(self.theta(a.course, posterior), head, posterior, None)

    def _head(self, a: Assignment, held: Held | None, downlink: Payload) -> F32:
        """The head: sent, held, or in round 1 the bundle's."""
        if "head" in downlink.arrays or not self.probing(a.model):
            return self.sent_head(a, downlink)
        if a.round == 1:
            return self.probed(a.model).gather(a.model.parameters)
        if held is None:
            raise stale(a, "it holds no head")
        return held.head

    def _net(self, a: Assignment, held: Held, downlink: Payload) -> tuple[Ints, Flips]:
        """The sum of the last round's references, and the net flips against it."""
        long = LONG in downlink.arrays
        data = coded(downlink, LONG if long else SHORT, ("head", "streams"))
        streams = downlink.arrays.get("streams", np.zeros(0))
        if streams.dtype != np.uint64 or streams.ndim != 1 or not 0 < len(streams) <= self.references:
            said = f"streams is {streams.dtype}{list(streams.shape)}"
            raise PayloadError(f"{said}; it must be 1..{self.references} uint64 values")
        theta = self.theta(a.course, held.posterior)
        cohort = Cohort.empty(theta.size)
        for stream in streams:
            cohort.add(theta, counter.uniform(int(stream), theta.size))
        try:
            past = self.history(a.model, held.net if long else None)
            net = coupling.decode_net(data, theta, cohort, past, len(streams))
        except CodecError as error:
            raise stale(a, str(error)) from None
        ones = cohort.reference + net
        if int(ones.min(initial=0)) < 0 or int(ones.max(initial=0)) > len(streams):
            raise stale(a, f"counts leave 0..{len(streams)}")
        return cohort.reference, net

    def _changed(self, a: Assignment, before: Posterior, downlink: Payload) -> Posterior:
        """The counts, coded against the last round's."""
        masks = count(downlink, "masks", MOST_MASKS)
        try:
            ones = counts.decode(coded(downlink, CHANGE, ("head",)), before.ones.size, masks, scaled(before, masks))
        except CodecError as error:
            raise stale(a, str(error)) from None
        if bits.checksum([ones]) != downlink.meta.get("crc"):
            raise stale(a, "the counts do not match their checksum")
        return Posterior(ones.astype(np.uint32), masks)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """As every such device; after a round of masks it also keeps what it received."""
        local = super().local_round(task, kept, received)
        if task.assignment.round <= self.probing(task.assignment.model):
            return local
        held = Held(received.posterior, received.head, received.net)
        return replace(local, kept=replace(local.kept, held=held))

    def upload(self, task: Task, received: Received, theta: F32) -> tuple[Bits, Payload]:
        """The mask ``u < theta``, sent as the flips of the reference."""
        a, before = task.assignment, received.theta
        u = counter.uniform(self.stream(a), theta.size)
        reference, mask = u < before, u < theta
        flips = coupling.encode_flips(mask ^ reference, before, u, self.history(a.model, received.net))
        return mask, Payload({FLIPS: u8(flips)}, changes.named(reference))


def required(a: Assignment, held: Held | None, size: int) -> Held:
    """What the device holds. Raises LostError when it holds nothing, or another model's values."""
    if held is None:
        raise stale(a, "it holds no counts")
    if held.posterior.ones.size != size or (held.net is not None and held.net.size != size):
        raise stale(a, f"it holds {held.posterior.ones.size} counts of {size}")
    return held


def stale(a: Assignment, why: str) -> LostError:
    """The error of a downlink that does not fit what the device kept."""
    return LostError(
        f"the downlink of round {a.round} builds on the round before, and what this device kept is not of it: {why}; "
        "the coordinator sends everything with the next downlink"
    )


def holds_net(a: Assignment, record: Record | None) -> bool:
    """Whether the device received the last round's net flips at the start of this one."""
    return record is not None and record.round == a.round - 1 and record.next in ("short", "long")


def scaled(tally: Posterior, masks: int) -> NDArray[np.uint32]:
    """The counts that `masks` masks would have at the rates of `tally`."""
    of = max(tally.masks, 1)
    ones = tally.ones.astype(np.uint64) * np.uint64(masks)
    rounded: NDArray[np.uint32] = ((ones + np.uint64(of // 2)) // np.uint64(of)).astype(np.uint32)
    return rounded
