"""Hermes: every device prunes its own subnetwork while its validation score allows it; the server averages overlaps.

Li et al., "Hermes: an efficient federated learning framework for heterogeneous mobile clients", MobiCom 2021. A device
scores the model W (.) M_k that it received on its validation samples. Above `threshold`, and while its share of live
parameters is larger than `target`, it removes units of least norm. Then it trains with group lasso, on the smaller
network: a removed unit is gone, with its bias, its batch-norm row and its slices of the layers that read it.

- Down: the device's live `parameters` float32[d']; metadata `structure` names their units, absent for the whole model.
- Up: the trained live `parameters` float32[d'']; with them `units`, one bit a unit, if they are not those of the
  downlink. The paper sends one bit a parameter and counts neither. With a codec as setting `up` the change of the
  parameters instead, ``change.CODEC`` (`value_changes`). The residual of `feedback` is that of the live parameters.
- Batch-norm statistics stay on the device.

Where the paper leaves a choice (docs/methods/hermes.md): the ratio of live parameters, of those that belong to units,
falls by `rate` a step until it is at most `target`, the last step not further than that; units are removed by L2 norm,
the same share of each layer, never of the last; a parameter becomes the mean over the round's devices that have it,
whose weights are equal, and stays when none has. There is one global tensor. With ``state = "client"`` there is one for
each device: the means of the last round that it took part in, at first the bundle's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels.pruning import add_lasso_slope
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

from edge_client.blocks import frozen
from edge_client.bundle import F32, Model, Packed, views
from edge_client.errors import LostError, PayloadError
from edge_client.methods import ALL, Influence, bits_digest
from edge_client.methods.shared.averaging import distance, toward
from edge_client.methods.shared.shrinking import counts, parameters_with, shrunk, strongest
from edge_client.methods.shared.units import UNITS, Units, carried, held, read_units, require_groups, unpacked, whole
from edge_client.methods.shared.value_changes import Coded
from edge_client.protocol.payload import Payload, allow_only, vector
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.sgd import Sgd


@dataclass(frozen=True)
class State:
    """The global model, float32[d]; with ``state = "client"`` the bundle's, for devices without a record."""

    parameters: F32


@dataclass(frozen=True)
class Structure:
    """A device's units on the server, packed bits; with ``state = "client"`` also its live parameters, float32[d']."""

    units: Packed
    own: F32 | None = None


@dataclass(frozen=True)
class Kept:
    """A device's own: its units, packed bits, and its batch-norm statistics, float32[buffers_d].

    With feedback also its residual, float32[d'].
    """

    units: Packed
    buffers: F32
    residual: F32 | None = None


@dataclass(frozen=True)
class Received:
    """The model as the device uses it: its units, `parameters` float32[d] (zero elsewhere) and its own statistics.

    `known` is the name of the structure that the server sent the parameters for.
    """

    units: Units
    parameters: F32
    buffers: F32
    known: str


@dataclass(frozen=True)
class Update:
    """A device's live parameters, float32[d'], in its units; `before` are the server's values of them."""

    units: Units
    before: F32
    parameters: F32
    weight: float = 1.0


@dataclass(frozen=True)
class Total:
    """For each parameter the weighted sum over the devices that have it, and their weights, float64[d].

    With ``state = "client"`` also every device's units, packed bits.
    """

    sum: NDArray[np.float64]
    weight: NDArray[np.float64]
    units: dict[str, Packed]


class Hermes(Coded):
    """Validation-gated structured pruning, group lasso, and the mean over the devices that hold a parameter."""

    name: ClassVar[str] = "hermes"
    revision: ClassVar[int] = 2  # shares are of the parameters in groups
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Structure]] = Structure
    kept_type: ClassVar[type[Kept]] = Kept

    target: Annotated[float, Field(gt=0, le=1)] = 0.3
    """The share of live parameters at which a device stops pruning (the paper's r_target)."""
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the live parameters that one step removes (r_p)."""
    threshold: FiniteFloat = 0.5
    """A device prunes when its validation score is above this (acc_threshold). Without samples the score is 0."""
    lasso: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    """Strength of the group lasso (lambda)."""
    state: Literal["global", "client"] = "global"
    """`client`: a device receives the means of its own last round, and nothing of rounds that it sat out."""
    batch: Annotated[int, Field(ge=1, le=65536)] = 16
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5

    # --- server half

    def start(self, course: Course) -> State:
        require_groups(course.model.manifest)
        return State(course.model.parameters.copy())

    def audience(self, course: Course, round_: int, record: Structure | None) -> str:
        if record is None:
            return ALL
        units = _units(course.model, record).digest
        return units if record.own is None else f"{units} {bits_digest(record.own.view(np.uint8))}"

    def downlink(self, course: Course, round_: int, state: State, record: Structure | None) -> Payload:
        units = _units(course.model, record)
        name = {} if units.alive.all() else {"structure": units.digest}
        return Payload({"parameters": _due(state, record, units)}, name)

    def stays(self, course: Course) -> str | None:
        return 'every device has averages of its own (state = "client")' if self.state == "client" else None

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("lr", "a larger target") if self.target < 1 else ("lr",)

    def unpruned(self) -> str | None:
        """Only devices know their validation scores. So a gate that stayed closed shows only at the end."""
        if self.target == 1:
            return None
        return (
            f"nothing was pruned: no validation score was above threshold = {self.threshold:g}, and it is 0 without "
            "validation samples; give devices some (validation = 0.2 under [data] of a simulation), or lower threshold"
        )

    def exchanged(self, course: Course) -> int:
        return course.model.manifest.d

    def update_limit(self, course: Course) -> int:
        """Four bytes a parameter and the bits of the units; the slack of a codec."""
        return self.uplink.limit(course.model.manifest.d) + len(whole(course.model.manifest).packed)

    def read_update(self, a: Assignment, state: State, record: Structure | None, payload: Payload) -> Update:
        """The device's parameters in its units: those on record, or new ones, which may only be fewer."""
        units = before = _units(a.model, record)
        if UNITS in payload.arrays:
            units = read_units(a.model.manifest, payload.arrays[UNITS])
            if (units.alive & ~before.alive).any():
                raise PayloadError("array 'units' has units that the device had pruned; they do not come back")
        own, fixed = _due(state, record, before, units), frozen(a.model.manifest)[units.places]
        return Update(units, own, self.uplink.read(a, "parameters", payload, own, fixed, UNITS))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        return Influence(distance(update.parameters, update.before), update.weight)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        return replace(update, parameters=toward(update.before, update.parameters, scale), weight=weight)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Structure | None
    ) -> tuple[Total, Structure]:
        """Add the device's values where it has any, and its weight there."""
        total = total or Total(np.zeros(state.parameters.size), np.zeros(state.parameters.size), {})
        places = update.units.places
        total.sum[places] += np.multiply(update.parameters, update.weight, dtype=np.float64)
        total.weight[places] += update.weight
        if self.state == "client":
            total.units[a.device] = update.units.packed
        return total, Structure(update.units.packed)

    def dropped(self, a: Assignment, update: Update, record: Structure | None) -> Structure:
        """The device's new units; with ``state = "client"`` the values that it had of them."""
        return Structure(update.units.packed, update.before if self.state == "client" else None)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Structure]]:
        """The mean over holders; what no device of the round holds stays."""
        held = total.weight > 0
        parameters = state.parameters.copy()
        parameters[held] = total.sum[held] / total.weight[held]
        if self.state == "client":
            m, held_by = course.model.manifest, total.units.items()
            return state, {d: Structure(units, parameters[unpacked(m, units).places]) for d, units in held_by}
        return State(parameters), {}

    def of_device(self, course: Course, state: State, record: Structure | None, everyone: Personal) -> Personal | None:
        """None for a device without a record: after a reported loss it may still hold units of its own."""
        if record is None or course.model.manifest.buffers:
            return None
        units = _units(course.model, record)
        return units.placed(_due(state, record, units), course.model.buffers, course.model.buffers)

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """The live parameters in place. A whole model is cut to the device's units.

        Raises LostError when the parameters are those of units that the device does not hold.
        """
        m = a.model.manifest
        allow_only(downlink, "parameters")
        every = whole(m)
        own = every if kept is None else held(m, kept.units)
        known = downlink.meta.get("structure", every.digest)
        if known not in (every.digest, own.digest):
            raise LostError(f"the parameters are of structure {known!r}, the device holds {own.digest!r}")
        sent = own if known == own.digest else every
        parameters = np.zeros(m.d, np.float32)
        parameters[sent.places] = vector(downlink, "parameters", sent.places.size)
        applied = own.applied(parameters, a.model.buffers if kept is None else kept.buffers)
        return Received(own, applied.parameters, applied.buffers, sent.digest)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Prune when the gate is open, then train the smaller network."""
        units = self._prune(task, received)
        a, small, t = task.assignment, units.small, task.narrow(units.channels)
        start = received.parameters[small.parameters]
        parameters, buffers = start.copy(), received.buffers[small.buffers]
        weights = [name for layer in small.manifest.layers for name in layer.weights]
        optimiser, loss = Sgd(parameters.size, self.learning_rate(a.model), self.momentum), EpochLoss()
        for batch in t.batches(self.epochs, self.batch):
            g = t.gradient(parameters, buffers, batch)
            loss.add(batch, g)
            buffers[:] = g.buffers
            if self.lasso:
                values, slopes = (views(small.manifest.parameters, v) for v in (parameters, g.parameters))
                for name in weights:
                    if small.manifest.tensors[name].trainable:
                        add_lasso_slope(values[name], self.lasso, slopes[name])
            optimiser.step(parameters, g.parameters)
        personal = units.placed(parameters, buffers, received.buffers)
        residual = None if kept is None else carried(kept.residual, kept.units, units)
        sent, left = self.uplink.send(a, "parameters", parameters, start, frozen(small.manifest), residual)
        if units.digest != received.known:
            sent[UNITS] = units.packed
        return Local(Kept(units.packed, personal.buffers, left), Payload(sent), personal, loss.mean)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """W (.) M_k."""
        return received.units.applied(received.parameters, received.buffers)

    def _prune(self, task: Task, received: Received) -> Units:
        """The units after this round's step: fewer when the gate is open."""
        units, m = received.units, received.units.manifest
        fixed = parameters_with(m, [0] * len(m.groups))
        # Parameters in no group do not count: more units would have to go in their place.
        now, goal = parameters_with(m, counts(units)) - fixed, self.target * (m.d - fixed)
        model = Personal(received.parameters[units.places], received.buffers[units.small.buffers])
        if now <= goal or task.narrow(units.channels).score(model, "validation") <= self.threshold:
            return units
        most = fixed + max(goal, (1 - self.rate) * now)
        return strongest(units, received.parameters, shrunk(units, most))


def _units(model: Model, record: Structure | None) -> Units:
    """The units on a device's record; all of them without a record."""
    return whole(model.manifest) if record is None else unpacked(model.manifest, record.units)


def _due(state: State, record: Structure | None, before: Units, units: Units | None = None) -> F32:
    """What a device with this record, whose units were `before`, receives of `units`; None: of all of them."""
    if record is None or record.own is None:
        return state.parameters[(units or before).places]
    return record.own if units is None else record.own[np.searchsorted(before.places, units.places)]
