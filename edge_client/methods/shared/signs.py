"""Signs on fixed magnitudes: one bit per weight is learned. What HideNseek and BNN-FedAvg share.

Both sides have the weights of all layers but the last, the *masked* ones, from the bundle. Their magnitudes are fixed;
a weight is its magnitude times a sign, and before round 1 the sign is the weight's own. The last layer, the *head*, is
float32 and stays on the device, like batch-norm statistics. A method may prune the network before round 1: then all
vectors here are the smaller network's (`network.Network`), and its units travel once.

- Down, ``down = "sign"``: the devices' majority, each counted by its samples; a tie is +1. It travels as its changes to
  the weights' own signs. ``down = "count"``: how many of the last round's devices voted +1, each counted once, coded
  given the weights' own signs. Either needs nothing that a device could have missed, but for the units.
- Up: the device's signs as changes to the majority that it received, coded in contexts of the counts.
- A device makes real *latents* from what it received: `radius` times the mean of the signs, -1..1; in round 1 times
  values in 0..1 as well, the same for all, since latents begin as real random numbers. Their signs times the magnitudes
  are the weights. It trains them by SGD through the gate, whose slope stands for the derivative of sign.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels.codecs import counts
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field

from edge_client.blocks import Blocks, head, rest, weights
from edge_client.bundle import F32, Bits, Manifest, Model, Packed
from edge_client.errors import ConfigError, LostError
from edge_client.methods import ALL, Influence, Method, Range, Search, few_masked
from edge_client.methods.shared import changes
from edge_client.methods.shared.averaging import Mean
from edge_client.methods.shared.changes import ExactCodecName
from edge_client.methods.shared.network import Network, network
from edge_client.methods.shared.units import UNITS, Units, held
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, coded, count, decoding, u8
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.gates import Gate
from edge_client.training.sgd import Sgd
from edge_client.training.steps import masked_step

COUNTS = "counts"
MOST_VOTES = 2**20 - 1
_LEVELS, _PLACES = 32, 128  # contexts of the uplink; their product is the most that a codec takes

Votes = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class State:
    """How many of `votes` votes for each sign were +1, [masked], as the server has it and as a device receives it.

    The majority alone is one vote. `units` are the packed bits of the pruned network, None when the method prunes
    nothing.
    """

    plus: Votes
    votes: int
    units: Packed | None = None

    @property
    def mean(self) -> F32:
        """The mean of the signs, float32[masked] in -1..1, exactly 0 at a tie."""
        return ((2 * self.plus.astype(np.int64) - self.votes) / self.votes).astype(np.float32)

    @property
    def signs(self) -> Bits:
        """Where the majority is +1, bool[masked]."""
        majority: Bits = 2 * self.plus.astype(np.int64) >= self.votes
        return majority

    def contexts(self, masked: Blocks) -> NDArray[np.uint16]:
        """The contexts of a flip: the votes, in at most 32 levels, and where the weight lies, in 128."""
        votes = self.plus.astype(np.uint64) * _LEVELS // max(_LEVELS, self.votes + 1)
        blocks = np.arange(len(masked.blocks)) * _PLACES // max(_PLACES, len(masked.blocks))
        places = np.repeat(blocks, [b.size for b in masked.blocks]).astype(np.uint16)
        contexts: NDArray[np.uint16] = votes.astype(np.uint16) * np.uint16(_PLACES) + places
        return contexts


@dataclass(frozen=True)
class Record:
    """The last round in which a device reported. It holds the units since."""

    round: int


@dataclass(frozen=True)
class Kept:
    """What a device keeps: its own float32 parameters and statistics, and with ``restart = "latent"`` its latents.

    They are of the network of `units`, as in `State`.
    """

    local: F32
    buffers: F32
    latents: F32 | None = None
    units: Packed | None = None


@dataclass(frozen=True)
class Update:
    """A device's signs, packed, and the number of samples behind them."""

    signs: Packed
    samples: float


@dataclass(frozen=True)
class Parts:
    """Parts of the model: signs are learned of `masked`; `local` is trained as float32 on the device."""

    masked: Blocks
    local: Blocks


def with_signs(manifest: Manifest) -> Blocks:
    """The weights that have signs: those of all trained layers but the last."""
    return weights(manifest, manifest.layers[:-1])


class SignMasks(Method):
    """Base of methods that learn signs on fixed magnitudes."""

    state_type: ClassVar[type[State]] = State
    kept_type: ClassVar[type[Kept]] = Kept
    search: ClassVar[Search] = {
        "lr": Range(0.1, 100.0, log=True),
        "local_lr": Range(0.001, 0.1, log=True),
        "restart": ("radius", "latent"),
    }
    gate: ClassVar[Gate]
    prunes: ClassVar[bool] = False
    """Whether `prune` names units, which then travel once to each device."""

    down: Literal["sign", "count"] = "sign"
    """What travels down: the majority of the signs, one bit each, or how many devices voted +1."""
    restart: Literal["radius", "latent"] = "radius"
    """`latent`: a device keeps its own latent where the majority has the sign it had."""
    radius: Annotated[float, Field(ge=1e-6, le=100)] = 1.0
    """A received mean m of signs becomes the latent radius * m."""
    biases: Literal["frozen", "local"] = "local"
    """Biases, batch-norm scale and shift, and tensors of no maskable layer: as drawn, or trained on the device."""
    codec: ExactCodecName = "auto"
    """The set codec of changed signs; `bits` takes one bit a sign, like the papers."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """Learning rate of the latents."""
    local_lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    """Learning rate of everything trained as float32."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    # --- what both sides know

    @abstractmethod
    def magnitudes(self, model: Model) -> F32:
        """The fixed size of every weight, float32[masked], at least 0."""
        ...

    @abstractmethod
    def sureness(self, net: Network) -> F32:
        """How far from 0 the latents of round 1 are, float32[masked] in 0..1; all devices begin with the same."""
        ...

    def prune(self, course: Course) -> Units | None:
        """The units that stay, chosen before round 1; None: the method prunes nothing."""
        return None

    def parts(self, model: Model) -> Parts:
        """The parts by this configuration. Raises ConfigError without a layer before the head."""
        m = model.manifest
        masked = with_signs(m)
        if not masked.blocks:
            raise ConfigError(
                f"method {self.name!r} masks trained linear, convolution and LSTM layers, not the last one, and bundle "
                f"{m.name!r} has no other; choose another method"
            )
        return Parts(masked, rest(m, masked) if self.biases == "local" else head(m))

    def own_signs(self, model: Model) -> Bits:
        """The signs of the bundle's weights, bool[masked]; 0 counts as +."""
        own: Bits = self.parts(model).masked.gather(model.parameters) >= 0
        return own

    def stays(self, course: Course) -> str:
        return "the last layer is each device's own"

    def caution(self, course: Course) -> str | None:
        masked, kinds = self.parts(course.model).masked.size, "all linear, convolution and LSTM layers but the last"
        return few_masked(course.model, masked, kinds, self.biases == "local")

    def exchanged(self, course: Course) -> int:
        """The signs of the network that stays."""
        units = self.prune(course)
        return self.parts(course.model if units is None else units.small.model(course.model)).masked.size

    def paper_bytes(self, course: Course) -> tuple[int, int]:
        """One byte a sign both ways, "the smallest element" of the paper's framework."""
        size = self.exchanged(course)
        return size, size

    # --- server half

    def start(self, course: Course) -> State:
        pruned = self.prune(course)
        units = None if pruned is None else pruned.packed
        return State(self.own_signs(network(course, units).model).astype(np.uint8), 1, units)

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return "new" if self.prunes and record is None else ALL

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """The signs; the units as well for a device that may not hold them."""
        own = self.own_signs(network(course, state.units).model)
        once = {UNITS: state.units} if state.units is not None and record is None else {}
        if self.down == "sign":
            sent = changes.encode(self.codec, state.plus > 0, own)
            return Payload({**sent.arrays, **once}, sent.meta)
        guess = own * state.plus.dtype.type(state.votes)
        votes = u8(counts.encode(state.plus, state.votes, guess))
        return Payload({COUNTS: votes, **once}, {"votes": state.votes})

    def update_limit(self, course: Course) -> int:
        return changes.limit(weights(course.model.manifest, course.model.manifest.layers).size)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        what = f"the update of {a.device!r} in round {a.round}"
        contexts = state.contexts(self.parts(network(a.course, state.units).model).masked)
        signs = changes.decode(self.codec, payload, state.signs, what, contexts=contexts)
        return Update(bitset.pack(signs), count(payload, "samples", MAX_SAMPLES))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence | None:
        """The claimed weight; None where every device counts once."""
        return Influence(1.0, update.samples) if self.down == "sign" else None

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        return replace(update, samples=weight)

    def fold(
        self, a: Assignment, state: State, total: Tally | Mean | None, update: Update, record: Record | None
    ) -> tuple[Tally | Mean, Record | None]:
        """Count the +1, or add n_k times the signs -1 and +1, whose sum over n is the paper's mean mask."""
        record = Record(a.round) if self.prunes else None
        if self.down == "count":
            tally = total if isinstance(total, Tally) else Tally(state.plus.size)
            tally.add(update.signs)
            return tally, record
        mean = total if isinstance(total, Mean) else Mean(state.plus.size)
        signs = 2 * bitset.unpack(update.signs, state.plus.size).astype(np.float32) - 1
        mean.add(update.samples, signs)
        return mean, record

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Tally | Mean
    ) -> tuple[State, Mapping[str, Record]]:
        if isinstance(total, Tally):
            return State(total.counts(), total.total, state.units), {}
        return State((total.sum >= 0).astype(np.uint8), 1, state.units), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> State:
        what, units, once = f"the downlink of round {a.round}", None, (UNITS,) if self.prunes else ()
        if self.prunes:
            units = downlink.arrays.get(UNITS)
            if units is None:
                if kept is None or kept.units is None:
                    raise LostError(f"{what} builds on units that this device does not hold; the next one has them")
                units = held(a.model.manifest, kept.units).packed
        own = self.own_signs(network(a.course, units).model)
        if self.down == "sign":
            majority = changes.decode(self.codec, downlink, own, what, once)
            return State(majority.astype(np.uint8), 1, units)
        votes = count(downlink, "votes", MOST_VOTES)
        guess = own * counts.dtype_for(votes).type(votes)
        with decoding(what):
            plus = counts.decode(coded(downlink, COUNTS, once), own.size, votes, guess)
        return State(plus, votes, units)

    def local_round(self, task: Task, kept: Kept | None, received: State) -> Local:
        """A few epochs of SGD on the latents and on the device's own float32 parameters."""
        net = network(task.assignment.course, received.units)
        task, kept = net.task(task), of_units(kept, received.units)
        model, parts = task.assignment.model, self.parts(task.assignment.model)
        values, buffers = self.own_values(model, kept)
        latents = self.latents(received, kept)
        if task.assignment.round == 1:
            latents *= self.sureness(net)
        loss = self.train(task, values, buffers, latents)
        signs = latents >= 0
        sent = changes.encode(self.codec, signs, received.signs, received.contexts(parts.masked))
        left = latents if self.restart == "latent" else None
        own = Kept(parts.local.gather(values), buffers, left, received.units)
        return Local(own, sent, net.personal(values, buffers), loss)

    def personal(self, task: Task, kept: Kept | None, received: State) -> Personal:
        """The majority's signs under the device's own head; an untrained head for a device that never took part."""
        net = network(task.assignment.course, received.units)
        model = net.model
        values, buffers = self.own_values(model, of_units(kept, received.units))
        signs = np.where(received.signs, np.float32(1), np.float32(-1))
        self.parts(model).masked.scatter(self.magnitudes(model) * signs, values)
        return net.personal(values, buffers)

    def own_values(self, model: Model, kept: Kept | None) -> tuple[F32, F32]:
        """Copies of parameters and statistics: the bundle's, with the device's own in their places."""
        values, buffers = model.parameters.copy(), (kept.buffers if kept else model.buffers).copy()
        if kept:
            self.parts(model).local.scatter(kept.local, values)
        return values, buffers

    def latents(self, received: State, kept: Kept | None) -> F32:
        """Latents from the received mean, or the device's own where the sign came back."""
        latents: F32 = np.float32(self.radius) * received.mean
        if kept and kept.latents is not None:
            latents = np.where((kept.latents >= 0) == received.signs, kept.latents, latents)
        return latents

    def train(self, task: Task, values: F32, buffers: F32, latents: F32) -> float:
        """SGD on `latents` and on the float32 parameters in `values`, in place; `values` ends with the signs' weights.

        Latents are clipped by `bound` after each step.
        """
        parts = self.parts(task.assignment.model)
        fixed, layers = self.magnitudes(task.assignment.model), []
        for b, place in zip(parts.masked.blocks, parts.masked.places, strict=True):
            sgd = Sgd(b.size, self.lr, self.momentum)
            layers.append((b.span, masked_step(self.gate, fixed[place], latents[place], sgd)))
        own = parts.local.gather(values)
        sgd, loss = Sgd(own.size, self.local_lr, self.momentum), EpochLoss()
        for span, layer in layers:
            layer.effective(values[span])
        for batch in task.batches(self.epochs, self.batch):
            g = task.gradient(values, buffers, batch)
            loss.add(batch, g)
            buffers[:] = g.buffers
            for span, layer in layers:
                layer.step(g.parameters[span])
                self.bound(layer.scores)
                layer.effective(values[span])
            sgd.step(own, parts.local.gather(g.parameters))
            parts.local.scatter(own, values)
        return loss.mean

    def bound(self, latents: F32) -> None:
        """Bring latents back into their range, in place, after a step; they have none unless a method sets one."""


def of_units(kept: Kept | None, units: Packed | None) -> Kept | None:
    """What a device kept, if that is of the network of these units."""
    if kept is None or units is None:
        return kept
    return kept if kept.units is not None and np.array_equal(kept.units, units) else None
