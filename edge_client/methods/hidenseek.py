"""HideNseek: frozen random magnitudes, a network pruned before the first round, one sign per weight both ways.

Vallapuram, Zhou, Kwon, Lee, Xu, Hui, "HideNseek: Federated Lottery Ticket via Server-side Pruning and Sign
Supermask", arXiv 2206.04385, 2022. docs/methods/hidenseek.md argues for the readings chosen here.

- When the federation starts, the server drops the channels that carry the least synaptic flow (`synflow`), without
  data, and from then on nothing of them is trained or sent. Which channels stay travels once, a bit each.
- A device trains the smaller network: latents of its signs, with forward sign(s) and slope 1 - tanh(s)^2, and its own
  head. The server averages signs by samples, or counts them (signs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from edge_kernels import counter, synflow
from edge_kernels.folding import Tally
from pydantic import Field

from edge_client.bundle import F32, Manifest, Model, Packed, views
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import ALL, Influence, signs
from edge_client.methods.averaging import Mean
from edge_client.methods.signs import SignMasks, Update
from edge_client.methods.units import Units, chosen, unpacked
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Personal, Task
from edge_client.training.gates import Gate, SignTanh

UNITS = "units.bits"


@dataclass(frozen=True)
class State:
    """The votes for the smaller network's signs. `units`: packed bits over the channels of all groups in order."""

    signs: signs.State
    units: Packed


@dataclass(frozen=True)
class Record:
    """The last round in which a device reported. It holds the units since."""

    round: int


@dataclass(frozen=True)
class Kept:
    """What a device keeps: the units, and its own values of the smaller network."""

    own: signs.Kept
    units: Packed


@dataclass(frozen=True)
class Received:
    """A downlink: the votes, and the units that it brought or the device held."""

    signs: signs.Received
    units: Packed


class HideNseek(SignMasks):
    """Signs on the frozen magnitudes of a network pruned by SynFlow."""

    name: ClassVar[str] = "hidenseek"
    state_type: ClassVar[type[Any]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Any]] = Kept
    one_time_down: ClassVar[frozenset[str]] = frozenset({UNITS})
    gate: ClassVar[Gate] = SignTanh()

    keep: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the prunable channels that stay (one minus the paper's p_r); 1: no pruning."""
    prune_layers: tuple[str, ...] = ()
    """Channel groups to prune, by name or beginning of a name; none named: all."""
    iterations: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Steps of the pruning."""

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("lr", "a larger keep") if self.keep < 1 else ("lr",)

    def magnitudes(self, model: Model) -> F32:
        """The frozen |W|."""
        size: F32 = np.abs(self.division(model).masked.gather(model.parameters))
        return size

    def sureness(self, course: Course) -> F32:
        """Uniform, so that the latents of round 1 are uniform in (-1, 1) as in the paper."""
        key, n = counter.key(course.seed, "hidenseek", "first latents"), self.division(course.model).masked.size
        return counter.uniform(key, n).astype(np.float32)

    # --- pruning

    def prune(self, model: Model) -> Units:
        """The units that stay. Raises ConfigError where SynFlow cannot follow the bundle's layers."""
        m, keep = model.manifest, self.keep
        self.division(model)  # a model without a layer to mask is refused here, before any advice on pruning
        if keep == 1:
            return chosen(m, {})
        named = [g.name for g in m.groups if not self.prune_layers or g.name.startswith(self.prune_layers)]
        if not m.groups:
            raise ConfigError(
                f"model {m.name!r} has no channel groups, so no unit can be pruned; set keep = 1 to prune nothing, or "
                "choose another method"
            )
        if not named:
            raise ConfigError(
                f"prune_layers = {self.prune_layers!r} names none of the channel groups "
                f"{[g.name for g in m.groups]} of bundle {m.name!r}; name some of them, or set keep = 1"
            )
        layers = [name for layer in m.layers for name in layer.weights]
        try:
            kept = synflow.prune(views(m.parameters, model.parameters), layers, m.groups, named, keep, self.iterations)
        except ValueError as error:
            raise ConfigError(
                f"SynFlow prunes layers in one row, and those of bundle {m.name!r} are not; set keep = 1 to prune "
                f"nothing, or choose another method ({error})"
            ) from None
        return chosen(m, kept)

    def small(self, course: Course, units: Packed) -> Course:
        """The federation on the smaller network."""
        return replace(course, model=cut(course.model, read(course.model.manifest, units)))

    def exchanged(self, model: Model) -> int:
        """The signs of the smaller network."""
        return super().exchanged(cut(model, self.prune(model)))

    # --- server half

    def start(self, course: Course) -> State:
        units = self.prune(course.model).packed
        return State(super().start(self.small(course, units)), units)

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return "new" if record is None else ALL

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """The signs; the units as well for a device that may not hold them."""
        down = super().downlink(self.small(course, state.units), round_, state.signs, record)
        return Payload({**down.arrays, UNITS: state.units}, down.meta) if record is None else down

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        small = replace(a, course=self.small(a.course, state.units))
        return super().read_update(small, state.signs, record, payload)

    def influence(self, a: Assignment, state: State, update: Update) -> Influence | None:
        return super().influence(a, state.signs, update)

    def fold(
        self, a: Assignment, state: State, total: Tally | Mean | None, update: Update, record: Record | None
    ) -> tuple[Any, Record]:
        return super().fold(a, state.signs, total, update, record)[0], Record(a.round)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Tally | Mean
    ) -> tuple[State, Mapping[str, Record]]:
        return State(super().finish(course, round_, took_part, state.signs, total)[0], state.units), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        arrays = dict(downlink.arrays)
        units = arrays.pop(UNITS, kept.units if kept else None)
        if units is None:
            raise LostError(f"the downlink of round {a.round} is for a device that knows the units; this one does not")
        small = replace(a, course=self.small(a.course, units))
        return Received(super().receive(small, None, Payload(arrays, downlink.meta)), units)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Train the smaller network."""
        units = read(task.assignment.model.manifest, received.units)
        own = super().local_round(narrowed(task, units), self.own(kept, received), received.signs)
        trained = widened(task.assignment.model, units, own.trained)
        return replace(own, kept=Kept(own.kept, received.units), trained=trained)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        units = read(task.assignment.model.manifest, received.units)
        model = super().personal(narrowed(task, units), self.own(kept, received), received.signs)
        return widened(task.assignment.model, units, model)

    def own(self, kept: Kept | None, received: Received) -> signs.Kept | None:
        """What the device kept of the network that it received."""
        return kept.own if kept and np.array_equal(kept.units, received.units) else None


def read(m: Manifest, units: Packed) -> Units:
    """The units that bits name. Raises PayloadError."""
    try:
        return unpacked(m, units)
    except ValueError as error:
        raise PayloadError(f"the units are malformed: {error}; fetch the downlink again") from None


def cut(model: Model, units: Units) -> Model:
    """The smaller network, with the whole one's values."""
    return model if units.alive.all() else units.small.model(model)


def narrowed(task: Task, units: Units) -> Task:
    """The task on the smaller network."""
    return task if units.alive.all() else task.narrow(units.channels)


def widened(model: Model, units: Units, own: Personal) -> Personal:
    """A model of the smaller network as one of the whole: what went is 0."""
    return own if units.alive.all() else units.placed(own.parameters, own.buffers, model.buffers)
