"""FedMask: frozen random weights, a personal binary mask, at most one bit per element both ways.

Li, Sun, Zeng, Zhang, Li, Chen, "FedMask: Joint Computation and Communication-Efficient Personalized Federated
Learning via Heterogeneous Masks", SenSys 2021. docs/methods/fedmask.md argues for the readings chosen here.

- The weights W never change; both sides have them from the bundle. A device learns one bit per weight,
  ``1[sigmoid(s) >= 1/2]`` of a real score s (eq. 3-8). The group lasso pulls whole rows and columns to zero (eq. 9).
- In its first round a device prunes once: after one epoch of score SGD it keeps, of the last layers, the share `keep`
  with the largest ``|W * (s_after - s_before)|``. The result is its STRUCTURE (`shared.division`), which is sent once.
  From then on only live elements travel (`wire`): up, as changes to the bits received; down, as changes to the device's
  last update. A device without a record receives all elements, as changes to the first mask.
- The server averages an element over the devices of the round that have it in their structure, if there are two or
  more. Every other element stays as each device has it.
- An LSTM's output gate is trained and sent as float32 (`real_gates`). Batch-norm statistics stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels import counter
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.blocks import Blocks, head, rest, trained_layers, weights
from edge_client.bundle import F32, Bits, Model, Packed, digest
from edge_client.errors import ConfigError
from edge_client.flat import to_arrays
from edge_client.methods import Influence, Method, Range, Search, few_masked, pretrained, trained_head
from edge_client.methods.fedmask.wire import STRUCTURE, Held, Kept, Received, Record, Update, Wire
from edge_client.methods.shared.averaging import Mean, distance, toward
from edge_client.methods.shared.changes import ExactCodecName
from edge_client.methods.shared.division import Division
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.gates import Gate, GroupLasso, SigmoidThreshold
from edge_client.training.sgd import Sgd
from edge_client.training.steps import masked_step


@dataclass(frozen=True)
class State:
    """The averages: `share` float32[masked] in 0..1, `averaged` uint32[masked] the round an element last got one.

    A share is a multiple of one over the element's holders. `levels` is the largest cohort so far; a downlink of counts
    rounds shares to multiples of one over it. `real` is the mean of the float32 parameters that are sent.
    """

    share: F32
    averaged: NDArray[np.uint32]
    levels: int
    real: F32


@dataclass(frozen=True)
class Total:
    """How many devices have a 1 at each element, and how many hold it; the mean of the `real` values.

    With ``state="client"`` also every device's update.
    """

    ones: Tally
    holders: Tally
    real: Mean
    updates: dict[str, Held]


Head = Literal["masked", "local"]
Restart = Literal["radius", "latent"]


@dataclass(frozen=True)
class Choice:
    """The settings whose defaults depend on the bundle; `FedMask` describes each."""

    keep: float
    head: Head
    group_lasso: float
    restart: Restart
    lr: float


class FedMask(Method):
    """Personal binary masks on frozen weights.

    A random network has to be searched for a subnetwork. A trained one is good as it is: a mask that prunes it before
    training, or starts anew each round, only ruins it. So some defaults depend on the bundle: `drawn` has the paper's,
    and with `trained` the masks stay close to the first one, all ones.
    """

    name: ClassVar[str] = "fedmask"
    search: ClassVar[Search] = {
        "lr": Range(0.01, 100.0, log=True),
        "keep": (0.5, 0.8, 1.0),
        "restart": ("radius", "latent"),
        "head": ("masked", "local"),
    }
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept
    one_time: ClassVar[frozenset[str]] = frozenset({STRUCTURE})
    gate: ClassVar[Gate] = SigmoidThreshold()

    drawn: ClassVar[Choice] = Choice(keep=0.2, head="masked", group_lasso=2e-4, restart="radius", lr=10.0)
    """The defaults for weights that a seed draws."""
    trained: ClassVar[Choice] = Choice(keep=1.0, head="masked", group_lasso=0.0, restart="latent", lr=0.03)
    """The defaults for weights from a file; a head of zeros is `local`, since no mask changes it."""

    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the pruned layers' weights that a device keeps (the paper's p_r); 1 prunes nothing."""
    prune_layers: Annotated[int, Field(ge=0)] | tuple[str, ...] = 2
    """How many of the last masked layers are pruned at most, or their names."""
    head: Head | None = None
    """`local`: the last layer is float32, trained and kept on the device."""
    group_lasso: Annotated[float, Field(ge=0, le=100)] | None = None
    """Strength of the lasso on rows and columns; 0 turns it off."""
    restart: Restart | None = None
    """`radius`: every score starts anew; `latent`: a device keeps its own score where its bit came back."""
    lr: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Learning rate of the scores: their gradients carry a factor W / 4, hence the size."""
    biases: Literal["frozen", "local"] = "local"
    """Biases, batch-norm scale and shift, and tensors of no maskable layer: as drawn, or trained on the device."""
    real_gates: tuple[Literal["i", "f", "g", "o"], ...] = ("o",)
    """LSTM gates that are trained and sent as float32 instead of masked."""
    radius: Annotated[float, Field(ge=1e-6, le=100)] = 0.1
    """A received bit becomes the score +radius or -radius; a share p becomes radius * (2 p - 1)."""
    initial_mask: Literal["ones", "random"] = "ones"
    """The first mask; `random`: drawn from the federation's seed."""
    codec: ExactCodecName = "auto"
    """The set codec of changed bits; `bits` takes one bit an element, like the paper."""
    down: Literal["bit", "count"] = "bit"
    """What travels down: the re-binarised average (a tie is 1), or the average to the nearest step of 1 / cohort."""
    state: Literal["global", "client"] = "global"
    """`client`: a device receives only the averages of rounds that it took part in."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    local_lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    """Learning rate of everything trained as float32."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @model_validator(mode="after")
    def _client_state_is_bits(self) -> FedMask:
        if self.state == "client" and self.down == "count":
            raise ValueError('state="client" keeps one bit per element and device; use down="bit"')
        return self

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        choice = self.drawn if model is None else self.chosen(model)
        rate = "lr" if model is None else f"lr (here {choice.lr:g})"
        return ("keep = 0.8", rate) if (self.keep or choice.keep) < 0.8 else (rate, "more rounds")

    def chosen(self, model: Model) -> Choice:
        """The settings for this model: those that were given, else its defaults."""
        choice = self.drawn
        if pretrained(model):
            choice = self.trained if trained_head(model) else replace(self.trained, head="local")
        given = {f.name: getattr(self, f.name) for f in fields(Choice)}
        return replace(choice, **{name: value for name, value in given.items() if value is not None})

    def division(self, model: Model) -> Division:
        """How this configuration divides the model. Raises ConfigError when it names layers that do not exist."""
        m, count, choice = model.manifest, self.prune_layers, self.chosen(model)
        layers = trained_layers(m, m.layers[:-1] if choice.head == "local" else m.layers)
        names = tuple(layer.name for layer in layers)
        pruned = names[max(0, len(names) - count) :] if isinstance(count, int) else count
        if not names:
            mend = 'set head = "masked", or ' if choice.head == "local" else ""
            raise ConfigError(
                f"bundle {m.name!r} has no trained layer that head = {choice.head!r} leaves to mask; "
                f"{mend}take a method that averages weights"
            )
        if not set(pruned) <= set(names):
            known = ", ".join(names)
            raise ConfigError(f"prune_layers = {count!r}, but the masked layers are {known}; name some of these")
        every, masked = weights(m, layers), weights(m, layers, self.real_gates)
        groups = [masked.places_of(layer.weights) for layer in layers if layer.name in pruned and choice.keep < 1]
        groups = [g for g in groups if g.size]
        own = head(m).blocks if choice.head == "local" else ()
        local = Blocks(tuple(b for b in rest(m, every).blocks if self.biases == "local" or b in own))
        kept = tuple(max(1, round(choice.keep * g.size)) for g in groups)
        return Division(masked, every.without(masked), local, tuple(groups), kept)

    def wire(self, model: Model) -> Wire:
        return Wire(self.codec, self.down == "count", self.division(model))

    def first_mask(self, course: Course) -> Bits:
        """The bits of all mask elements before round 1, bool[masked]; random ones are the top bits of a stream."""
        n, key = self.division(course.model).masked.size, counter.key(course.seed, "fedmask", "first mask")
        return np.ones(n, np.bool_) if self.initial_mask == "ones" else counter.uint64(key, n) >= 2**63

    # --- server half

    def stays(self, course: Course) -> str | None:
        if self.state == "client":
            return 'every device has averages of its own (state = "client")'
        head = self.chosen(course.model).head
        return 'the last layer stays on the devices (head = "local")' if head == "local" else None

    def caution(self, course: Course) -> str | None:
        """A warning when fewer than half of the trainable parameters have masks."""
        masked = self.division(course.model).masked.size
        return few_masked(course.model, masked, "linear, convolution and LSTM layers", self.biases == "local")

    def start(self, course: Course) -> State:
        share = self.first_mask(course).astype(np.float32)
        real = self.division(course.model).real.gather(course.model.parameters)
        return State(share, np.zeros(share.size, np.uint32), 1, real)

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return "new" if record is None else digest(b"".join(a.tobytes() for a in to_arrays(record).values()))

    def due(self, course: Course, state: State, record: Record | None) -> tuple[F32, Bits]:
        """The shares that a device receives, rounded to what travels, and the bits it holds: of live elements, or of
        all without a record."""
        if record is None:
            share, known = state.share, self.first_mask(course)
        else:
            division = self.division(course.model)
            known, live = bitset.unpack(record.held.bits, division.live), division.expand(record.held.structure)
            if record.own is not None:
                share = bitset.unpack(record.own, division.live).astype(np.float32)
            else:  # an element without a mean since the device's last round stays as the device has it
                share = np.where(state.averaged[live] >= record.round, state.share[live], np.float32(known))
        levels = state.levels if self.down == "count" else 1
        return (np.floor(share.astype(np.float64) * levels + 0.5) / levels).astype(np.float32), known

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        structure = record.held.structure if record else None
        return self.wire(course.model).downlink(*self.due(course, state, record), state.levels, structure, state.real)

    def exchanged(self, course: Course) -> int:
        division = self.division(course.model)
        return division.masked.size + division.real.size

    def paper_bytes(self, course: Course) -> tuple[int, int]:
        """One bit for every mask element, pruned or not."""
        division = self.division(course.model)
        dense = bitset.size(division.masked.size) + 4 * division.real.size
        return dense, dense

    def update_limit(self, course: Course) -> int:
        return self.wire(course.model).update_limit()

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        share, _ = self.due(a.course, state, record)
        what, structure = f"the update of {a.device!r} in round {a.round}", record.held.structure if record else None
        return self.wire(a.model).read_update(payload, structure, share >= 0.5, what)

    def influence(self, a: Assignment, state: State, update: Update) -> Influence | None:
        """The norm of the real gates' change. None for a mask: it adds 0 or 1 to each count."""
        return Influence(distance(update.real, state.real), 1.0) if state.real.size else None

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        return replace(update, real=toward(state.real, update.real, scale))

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        division = self.division(a.model)
        live = division.expand(update.held.structure)
        ones = np.zeros(live.size, np.bool_)
        ones[live] = bitset.unpack(update.held.bits, division.live)
        if total is None:
            total = Total(Tally(live.size), Tally(live.size), Mean(state.real.size), {})
        total.ones.add(bitset.pack(ones))
        total.holders.add(bitset.pack(live))
        total.real.add(1.0, update.real)
        if self.state == "client":
            total.updates[a.device] = update.held
        return total, Record(update.held, a.round)

    def dropped(self, a: Assignment, update: Update, record: Record | None) -> Record:
        return Record(update.held, a.round)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        ones, holders, real = total.ones.counts(), total.holders.counts(), total.real.value
        shared, mean = holders >= 2, ones / np.maximum(holders, 1)
        if self.state == "client":  # the mean of one holder is its own bit
            expand, on = self.division(course.model).expand, mean >= 0.5
            records = {d: Record(h, round_, bitset.pack(on[expand(h.structure)])) for d, h in total.updates.items()}
            return replace(state, real=real), records
        share = np.where(shared, mean, state.share).astype(np.float32)
        averaged = np.where(shared, round_, state.averaged).astype(np.uint32)
        return State(share, averaged, max(state.levels, len(took_part)), real), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        return self.wire(a.model).receive(downlink, kept.held if kept else None, self.first_mask(a.course))

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Prune if the device has no structure yet, then a few epochs of score SGD from the received bits."""
        model, wire = task.assignment.model, self.wire(task.assignment.model)
        values, buffers = self.own_values(model, kept, received)
        structure = kept.held.structure if kept else self.prune(task, values, buffers, received.share)
        live = wire.division.expand(structure)
        scores = self.scores(received.share, live, kept.scores if kept else None)
        loss = self.train(task, values, buffers, scores, self.epochs, "train")
        mask = scores >= 0
        update = wire.update(mask[live], received, structure, wire.division.real.gather(values))
        held = Held(structure, bitset.pack(mask[live]))
        latent = scores if self.chosen(model).restart == "latent" else None
        own = Kept(held, wire.division.local.gather(values), buffers, latent)
        gates = self.gate.forward(scores, None)
        return Local(own, update, wire.division.under(model, values, gates, buffers), loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The frozen weights under the received mask, within the device's structure when it has one."""
        model, live = task.assignment.model, np.ones(received.share.size, np.bool_)
        division = self.division(model)
        if kept:
            live = division.expand(kept.held.structure)
        values, buffers = self.own_values(model, kept, received)
        return division.under(model, values, self.gate.forward(self.scores(received.share, live), None), buffers)

    def own_values(self, model: Model, kept: Kept | None, received: Received) -> tuple[F32, F32]:
        """Copies of parameters and statistics: frozen ones as drawn, the device's own, the server's real gates."""
        division, values = self.division(model), model.parameters.copy()
        division.real.scatter(received.real, values)
        if kept:
            division.local.scatter(kept.local, values)
        return values, (kept.buffers if kept else model.buffers).copy()

    def scores(self, share: F32, live: Bits, own: F32 | None = None) -> F32:
        """Scores from received shares, or the device's own where its bit came back; -inf, dead, outside `live`."""
        scores: F32 = np.float32(self.radius) * (2 * share - 1)
        if own is not None:
            scores = np.where((own >= 0) == (share >= 0.5), own, scores)
        return np.where(live, scores, np.float32(-np.inf))

    def prune(self, task: Task, values: F32, buffers: F32, share: F32) -> Packed:
        """The structure of the largest |W (s_after - s_before)| of an epoch. `values` and `buffers` are trained too."""
        model = task.assignment.model
        division = self.division(model)
        if not division.groups:
            return bitset.pack(np.zeros(0, np.bool_))
        before = self.scores(share, np.ones(share.size, np.bool_))
        scores = before.copy()
        self.train(task, values, buffers, scores, 1, "prune")
        return division.choose(np.abs((scores - before) * division.masked.gather(model.parameters)))

    def train(self, task: Task, values: F32, buffers: F32, scores: F32, epochs: int, phase: str) -> float:
        """SGD on `scores` and on the float32 parameters in `values`, in place; the masked parts of it are scratch."""
        model, layers = task.assignment.model, []
        division, choice = self.division(model), self.chosen(model)
        for b, place in zip(division.masked.blocks, division.masked.places, strict=True):
            lasso = GroupLasso(b.shape, choice.group_lasso) if choice.group_lasso else None
            frozen, sgd = model.parameters[b.span], Sgd(b.size, choice.lr, self.momentum)
            layers.append((b.span, masked_step(self.gate, frozen, scores[place], sgd, lasso)))
        free = Blocks(division.real.blocks + division.local.blocks)
        own, sgd, loss = free.gather(values), Sgd(free.size, self.local_lr, self.momentum), EpochLoss()
        for span, layer in layers:
            layer.effective(values[span])
        for batch in task.batches(epochs, self.batch, phase):
            g = task.gradient(values, buffers, batch)
            loss.add(batch, g)
            buffers[:] = g.buffers
            for span, layer in layers:
                layer.step(g.parameters[span], values[span])
            sgd.step(own, free.gather(g.parameters))
            free.scatter(own, values)
        return loss.mean
