"""Coupled masks: what FedPM learns, at the price of what the other side cannot know already, exact both ways.

A Bernoulli mask on frozen weights (`bernoulli` says what is masked, trained and left alone) whose randomness is shared:
device k and the server draw the same uniforms u_k from the key (seed, "uniforms", round, device). The device trains
theta to theta_k and its mask is ``u_k < theta_k``, an exact draw, independent between devices.

- **Up** goes where that differs from the reference ``u_k < theta``, which only happens where training carried theta
  across u_k: the least two coupled masks can differ. The flips are coded at their entropy given all that both sides
  know (`edge_kernels.coupling`). Nothing is lost.
- **Down** goes theta, which is an integer count of ones over a number of masks. A device that took part in the round
  before holds the counts it started from and can draw every device's uniforms of that round: it is told the cohort's
  net flips against the sum of the references, so the sampling noise of the round costs nothing. Any other device is
  told the counts themselves, at most log2(masks + 1) bits each. Before the first masks nothing is sent.
- A probed head goes down once to each device.

Whether a device holds the last counts, its record says: the round of its last acknowledged update. An update names its
reference mask by a hash, and checksums of the mask and of the counts travel along, so two sides that differ find out
instead of averaging noise: in their reference by the hash; by the checksum in what else the flips are decoded with,
their distances and the last net flips, of which the same reference says nothing.

A device whose state is lost, or an old one, cannot read what builds on the last counts. It sits that round out: its
update is empty but for `resync`, the server forgets its record, and the next downlink is whole again. After the last
round there is no next one, so the last downlink is whole for every device.

With more than `references` devices in a round, drawing all their uniforms would cost a device more than the bytes are
worth; then the counts are coded against those of the round before alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from edge_kernels import bits, counter, coupling
from edge_kernels.codecs import CodecError, counts
from edge_kernels.coupling import Cohort, History
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Personal, Task, Total, bits_digest
from edge_client.methods.bernoulli import MOMENTS, BernoulliMasks, check_reference, count, logistic
from edge_client.protocol.payload import Arrays, Payload, coded, u8

# Coded arrays are named after what they hold and their codec.
FLIPS = "flips.coupled"
SHORT, LONG = "net_short.coupled-net", "net_long.coupled-net"
COUNTS, CHANGE = "counts.counts", "change.counts"


@dataclass(frozen=True)
class Known:
    """A downlink as the device understands it: the tally, the head, the last round's net flips."""

    tally: Arrays
    head: F32
    net: NDArray[np.int32] | None


class _Last:
    """The last counts decoded, under the digest of all they were made from.

    A device needs the same ones twice in a round, to evaluate the model it got and to train from it; a simulation needs
    them once for all its devices.
    """

    def __init__(self) -> None:
        self._held: tuple[bytes, tuple[NDArray[np.uint32], NDArray[np.int32]]] | None = None

    def get(
        self, made_from: list[bytes], make: Callable[[], tuple[NDArray[np.uint32], NDArray[np.int32]]]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """The counts made from these bytes, made now if they are not the last ones."""
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_from)).digest()
        held = self._held
        if held is None or held[0] != digest:
            held = digest, make()
            self._held = held
        return held[1]


_LAST = _Last()


class Lost(PayloadError):
    """The downlink builds on what the device kept from the round before, and it has kept less, or something else."""


class Coupled(BernoulliMasks):
    """Bernoulli masks drawn from uniforms that both sides know."""

    name: ClassVar[str] = "coupled"
    one_time: ClassVar[frozenset[str]] = frozenset({"head"})
    one_time_down: ClassVar[frozenset[str]] = frozenset({"head"})
    shared_downlink: ClassVar[bool] = False

    references: Annotated[int, Field(ge=0, le=250)] = 64
    """The largest cohort whose reference masks a device draws to understand a downlink."""

    @model_validator(mode="after")
    def _counts_say_all(self) -> Coupled:
        self.require_counts_to_say_all()
        return self

    # --- what both sides know

    def stream(self, a: Assignment, device: str) -> int:
        """The key of a device's uniforms in a round."""
        return counter.key(a.seed, "uniforms", a.round, device)

    def past(self, model: Model, net: NDArray[np.int32]) -> History:
        """What the last round's net flips say about the next."""
        starts = {s.start for s in self.masked(model.manifest).tensors}
        return coupling.history(net, [t.shape for t in model.manifest.parameters if t.offset in starts])

    # --- server half

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """The net flips for who took part in the last round, the counts for others; each was coded in `finish`.

        The downlink after the last round is for whoever asks, as if the server knew no device.
        """
        arrays: Arrays = {}
        last = 0 if a.round > a.rounds else _last_round(record)
        if self.head == "probe" and a.round > 1 and last <= self.probing:
            arrays["head"] = state["head"]
        if not state["masks"][0]:
            return Payload(arrays)
        if last == a.round - 1 and "net" in state:
            kind = LONG if record["knew"][0] else SHORT
            return Payload({**arrays, kind: state[kind], "streams": state["streams"]})
        meta = {"masks": int(state["masks"][0])}
        if last == a.round - 1 and CHANGE in state:
            return Payload({**arrays, CHANGE: state[CHANGE]}, {**meta, "crc": coupling.checksum([state["ones"]])})
        return Payload({**arrays, COUNTS: state[COUNTS]}, meta)

    def update_limit(self, model: Model) -> int:
        """A head, or flips at a little over one bit a parameter, which a hopeless model can come to."""
        return max(4 * self.probed(model.manifest).size, self.exchanged(model) // 7 + 4096)

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """A head, the mask `mask`, packed bool[masked], that the flips make of the reference, or nothing."""
        if a.round <= self.probing:
            return self.read_head(a, update)
        if not update.arrays and update.meta.get("resync") == 1:
            figures = update.meta.get("samples", 0), update.meta.get("correct", [0, 0, 0])
            if figures != (0, [0, 0, 0]):
                raise PayloadError(f"a device that sits a round out reports no samples, not {figures}; send zeros")
            return {}
        theta = self.theta(a.model, a.seed, state)
        u = counter.uniform(self.stream(a, a.device), theta.size)
        reference = u < theta
        check_reference(a, update, reference)
        past = self.past(a.model, state["net"]) if _knows_net(a, state, record) else None
        try:
            flips = coupling.decode_flips(coded(update, FLIPS), theta, u, past)
        except CodecError as error:
            raise PayloadError(f"the flips of device {a.device!r} in round {a.round}: {error}") from None
        return {"mask": bits.pack(reference ^ flips)}

    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Add the mask to the counts, and the device's uniforms to what devices will know of the round."""
        if not update:
            return total, {}
        knew = _knows_net(a, state, record)
        total, _ = super().fold(a, state, total, update, record)
        if "mask" in update:
            if "streams" not in total:
                empty = Cohort.empty(self.exchanged(a.model))
                total |= {"reference": empty.reference, "down": empty.down, "up": empty.up}
                total |= {"seed": np.array([a.seed], np.int64), "streams": np.zeros(0, np.uint64)}
            stream = self.stream(a, a.device)
            if len(total["streams"]) < self.references:
                theta = self.theta(a.model, a.seed, state)
                Cohort(total["reference"], total["down"], total["up"]).add(theta, counter.uniform(stream, theta.size))
            total["streams"] = np.append(total["streams"], np.array([stream], np.uint64))
        return total, {"round": np.array([a.round], np.int64), "knew": np.array([knew])}

    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """The new counts, coded once for every kind of device there may be in the next round."""
        if "streams" not in total:
            return super().finish(model, round_, state, total)
        ones = total["masks"].counts()
        tally = self.tallied(round_, state, ones, total["masks"].total)
        top = int(tally["masks"][0])
        after = {"head": state["head"], **tally, COUNTS: u8(counts.encode(tally["ones"], top))}
        if len(total["streams"]) > self.references:
            if state["masks"][0]:
                after[CHANGE] = u8(counts.encode(tally["ones"], top, scaled(state, top)))
            return after
        net = (ones.astype(np.int64) - total["reference"]).astype(np.int32)
        theta = self.theta(model, int(total["seed"][0]), state)
        cohort = Cohort(total["reference"], total["down"], total["up"])
        after |= {"net": net, "streams": total["streams"]}
        after[SHORT] = u8(coupling.encode_net(net, theta, cohort, None))
        if "net" in state:
            after[LONG] = u8(coupling.encode_net(net, theta, cohort, self.past(model, state["net"])))
        return after

    # --- client half

    def understand(self, a: Assignment, kept: Arrays, downlink: Payload) -> Known:
        """What the downlink says, with what the device kept. Raises PayloadError."""
        arrays, part = downlink.arrays, self.masked(a.model.manifest)
        bundled = self.probed(a.model.manifest).gather(a.model.parameters)
        if self.head == "probe" and a.round > 1 and "head" not in arrays:
            self._require(a, kept, {"head"})
        head = arrays.get("head", kept.get("head", bundled))
        if head.dtype != np.float32 or head.shape != bundled.shape or not np.isfinite(head).all():
            raise PayloadError(f"the head is {head.dtype}{list(head.shape)}; finite float32[{bundled.size}] was due")
        size = part.size
        try:
            if LONG in arrays or SHORT in arrays:
                return self._advance(a, kept, downlink, head)
            if COUNTS in arrays or CHANGE in arrays:
                return Known(self._recount(a, kept, downlink, size), head, None)
        except CodecError as error:
            raise PayloadError(f"the downlink of round {a.round}: {error}") from None
        if set(arrays) - {"head"}:
            raise PayloadError(f"the payload holds arrays {sorted(arrays)}, none of which this method sends")
        return Known(self.tally_of(np.zeros(size, np.uint32), 0), head, None)

    def _recount(self, a: Assignment, kept: Arrays, downlink: Payload, size: int) -> Arrays:
        """The counts as they are, or against the last round's."""
        top = count(downlink, "masks")
        if CHANGE not in downlink.arrays:
            return self.tally_of(counts.decode(coded(downlink, COUNTS, others=("head",)), size, top), top)
        self._require(a, kept, {"ones", "masks"})
        data = coded(downlink, CHANGE, others=("head",))
        try:
            ones = counts.decode(data, size, top, scaled(kept, top))
        except CodecError as error:
            raise _stale(a, str(error)) from None
        if coupling.checksum([ones]) != downlink.meta.get("crc"):
            raise _stale(a, "the counts do not match their checksum")
        return self.tally_of(ones, top)

    def _require(self, a: Assignment, kept: Arrays, names: set[str]) -> None:
        missing = sorted(names - kept.keys())
        if missing:
            raise _stale(a, f"it lacks {missing}")

    def _advance(self, a: Assignment, kept: Arrays, downlink: Payload, head: F32) -> Known:
        """The next counts from those kept, every reference of the last round, and the net flips."""
        long = LONG in downlink.arrays
        names = ("ones", "masks", "net") if long else ("ones", "masks")
        self._require(a, kept, set(names))
        data = coded(downlink, LONG if long else SHORT, others=("head", "streams"))
        streams = downlink.arrays.get("streams", np.zeros(0))
        if streams.dtype != np.uint64 or streams.ndim != 1 or not 0 < len(streams) <= self.references:
            raise PayloadError(f"streams is {streams.dtype}{list(streams.shape)}; 1..{self.references} uint64 were due")
        before = [kept[name].tobytes() for name in names]
        made_from = [str(a.seed).encode(), self.model_dump_json().encode(), data, streams.tobytes(), *before]
        try:
            ones, net = _LAST.get(made_from, lambda: self._counted(a, kept, data, streams, long))
        except CodecError as error:
            raise _stale(a, str(error)) from None
        return Known(self.tallied(a.round - 1, kept, ones, len(streams)), head, net)

    def _counted(
        self, a: Assignment, kept: Arrays, data: bytes, streams: NDArray[np.uint64], long: bool
    ) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """The last round's ones and net flips. Raises CodecError."""
        theta = self.theta(a.model, a.seed, kept)
        cohort = Cohort.empty(theta.size)
        for stream in streams:
            cohort.add(theta, counter.uniform(int(stream), theta.size))
        past = self.past(a.model, kept["net"]) if long else None
        net = coupling.decode_net(data, theta, cohort, past, len(streams))
        ones = cohort.reference + net
        if int(ones.min(initial=0)) < 0 or int(ones.max(initial=0)) > len(streams):
            raise CodecError(f"counts leave 0..{len(streams)}; the payload is damaged")
        return ones.astype(np.uint32), net

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Probe, or train and upload the flips; sit a round out to get the whole counts again."""
        a = task.assignment
        try:
            known = self.understand(a, kept, downlink)
        except Lost:
            own = {name: kept[name] for name in ("buffers", *MOMENTS) if name in kept}
            untrained = Personal(a.model.parameters, self.statistics(a, kept))
            return Local(own, Payload({}, {"resync": 1}), untrained, 0.0, took_part=False)
        if a.round <= self.probing:
            return self.probe(task, kept, known.head)
        theta, buffers = self.theta(a.model, a.seed, known.tally), self.statistics(a, kept)
        scores, loss, moments = self.train_scores(task, kept, theta, known.head, buffers)
        u = counter.uniform(self.stream(a, a.device), theta.size)
        reference, mask = u < theta, u < logistic(scores)
        past = None if known.net is None else self.past(a.model, known.net)
        flips = u8(coupling.encode_flips(mask ^ reference, theta, u, past))
        keep = {**known.tally, "head": known.head, "buffers": buffers, **moments}
        if known.net is not None:
            keep["net"] = known.net
        update = Payload({FLIPS: flips}, {"reference": bits_digest(bits.pack(reference))})
        return Local(keep, update, self.masked_model(a, known.head, mask, buffers), loss)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The global model, with the device's own batch-norm statistics. Raises Lost in a round it must sit out."""
        a = task.assignment
        known = self.understand(a, kept, downlink)
        return self.global_model(task, kept, self.theta(a.model, a.seed, known.tally), known.head)


def _stale(a: Assignment, why: str) -> Lost:
    return Lost(
        f"the downlink of round {a.round} builds on the round before, and what this device kept is not of it: {why}; "
        "it sits the round out and receives everything with the next one"
    )


def _last_round(record: Arrays) -> int:
    """The last round that the device took part in, 0 for none."""
    return int(record["round"][0]) if record else 0


def scaled(tally: Arrays, top: int) -> NDArray[np.uint32]:
    """The counts that `top` masks would have at the rates of `tally`."""
    masks = max(int(tally["masks"][0]), 1)
    return ((tally["ones"].astype(np.uint64) * top + masks // 2) // masks).astype(np.uint32)


def _knows_net(a: Assignment, state: Arrays, record: Arrays) -> bool:
    """Whether the device was told the last round's net flips at the start of this one."""
    return "net" in state and _last_round(record) == a.round - 1
