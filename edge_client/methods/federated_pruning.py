"""FederatedPruning: the server picks a smaller network every few rounds, devices train it, pruned values wait.

Lin et al., "Federated Pruning: Improving Neural Network Efficiency with Federated Learning", Interspeech 2022
(arXiv 2209.06359), structured. Every `every` rounds the server keeps the share `keep` of each group's units, those of
the largest norm in the whole server model. Devices train that network and the server takes the mean of what comes back.
Parameters of pruned units keep their value on the server, so such a unit can return with the next choice.

- Down: the live `parameters` float32[d'] and `buffers`; metadata `structure` names the units. A device that was not
  sent them before receives `units` too, one bit a unit.
- Up: `parameters` float32[d'] and `buffers` of the trained network. With a codec as setting `up`
  the change of the parameters, ``change.CODEC`` (`value_changes`). The residual of `feedback` is that of the live
  parameters: a device drops what is left of a unit's change when it takes part while the unit is pruned.
- The paper's mask costs d H(keep) bits each way with every choice, `paper_bytes` counts so.

The first choice is made from the initial model, none after the last round. The final model has the units that were
trained last, also when no update was counted since the last choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Annotated, ClassVar

from pydantic import Field

from edge_client.blocks import frozen
from edge_client.bundle import F32, Model, Packed
from edge_client.errors import LostError
from edge_client.methods import Influence
from edge_client.methods.shared.averaging import Total, Update, Weights, added, influence, limited
from edge_client.methods.shared.shrinking import counts, parameters_with, strongest
from edge_client.methods.shared.units import UNITS, Units, carried, held, read_units, unpacked, whole
from edge_client.methods.shared.value_changes import Coded
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, allow_only, count, vector
from edge_client.task import Assignment, Course, Local, Personal, Task


@dataclass(frozen=True)
class State:
    """The whole server model, float32[d] and float32[buffers_d], and the units of this choice, packed bits.

    `period` numbers the choice: the whole periods of `every` rounds before it. `trained` are the units that were
    trained last, None where they are those of this choice.
    """

    parameters: F32
    buffers: F32
    units: Packed
    period: int
    trained: Packed | None = None


@dataclass(frozen=True)
class Holds:
    """The units that a device was sent, packed bits, in its record."""

    units: Packed


@dataclass(frozen=True)
class Kept:
    """The same units on the device; with feedback its residual, float32[d']."""

    units: Packed
    residual: F32 | None = None


@dataclass(frozen=True)
class Received:
    """The smaller network: its units, live parameters float32[d'] and statistics float32[buffers_d']."""

    units: Units
    parameters: F32
    buffers: F32


class FederatedPruning(Coded):
    """Federated averaging of a smaller network that the server chooses again and again."""

    name: ClassVar[str] = "federated_pruning"
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Holds]] = Holds
    kept_type: ClassVar[type[Kept]] = Kept

    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each group's units that devices train, at least one."""
    every: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Rounds from one choice to the next (the paper's s)."""

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("a larger keep", "lr") if self.keep < 1 else ("lr",)

    # --- server half

    def start(self, course: Course) -> State:
        m = course.model
        return State(m.parameters.copy(), m.buffers.copy(), self._choose(m, m.parameters).packed, 0)

    def audience(self, course: Course, round_: int, record: Holds | None) -> str:
        """Devices that hold the same units."""
        return "new" if record is None else unpacked(course.model.manifest, record.units).digest

    def downlink(self, course: Course, round_: int, state: State, record: Holds | None) -> Payload:
        if round_ > course.rounds and state.trained is not None:
            state = replace(state, units=state.trained)
        units, sent = unpacked(course.model.manifest, state.units), _live_values(course.model, state)
        arrays = {"parameters": sent.parameters, "buffers": sent.buffers}
        known = record is not None and record.units.tobytes() == state.units.tobytes()
        return Payload(arrays | ({} if known else {UNITS: state.units}), {"structure": units.digest})

    def exchanged(self, course: Course) -> int:
        return course.model.manifest.d

    def paper_bytes(self, course: Course) -> tuple[int, int]:
        """The live parameters as float32, whatever `up` is, and d H(keep) bits every `every` rounds, each way."""
        kept = self._live(course.model)
        share = kept / course.model.manifest.d
        entropy = 0.0 if share == 1 else -share * log2(share) - (1 - share) * log2(1 - share)
        size = 4 * kept + ceil(course.model.manifest.d * entropy / 8 / self.every)
        return size, size

    def update_limit(self, course: Course) -> int:
        """Four bytes a live parameter and a statistic; the slack of a codec."""
        return self.uplink.limit(self._live(course.model)) + 4 * course.model.manifest.buffers_d

    def read_update(self, a: Assignment, state: State, record: Holds | None, payload: Payload) -> Update:
        m, own = a.model.manifest, _live_values(a.model, state)
        fixed = frozen(m)[unpacked(m, state.units).places]
        parameters = self.uplink.read(a, "parameters", payload, own.parameters, fixed, "buffers")
        buffers = vector(payload, "buffers", own.buffers.size)
        return Update(parameters, buffers, count(payload, "samples", MAX_SAMPLES))

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        return influence(_live_values(a.model, state), update)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        return limited(_live_values(a.model, state), update, scale, weight)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Holds | None
    ) -> tuple[Total, Holds]:
        """Add to the means weighted by samples; the device now holds the units."""
        return added(total, update.samples, update.parameters, update.buffers), Holds(state.units)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Holds]]:
        """The means in place, the values of pruned units as they were, and after `every` rounds another choice.

        A choice that fell to a round without an update is made up for.
        """
        small = unpacked(course.model.manifest, state.units).small
        parameters, buffers, units, trained = state.parameters.copy(), state.buffers.copy(), state.units, None
        parameters[small.parameters], buffers[small.buffers] = total.parameters.value, total.buffers.value
        period = round_ // self.every if round_ < course.rounds else state.period
        if period != state.period:
            units, trained = self._choose(course.model, parameters).packed, state.units
        return State(parameters, buffers, units, period, trained), {}

    def of_device(self, course: Course, state: State, record: Holds | None, everyone: Personal) -> Personal | None:
        return everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """The smaller network. Raises LostError when its units were sent before and the device does not hold them."""
        m, name = a.model.manifest, downlink.meta.get("structure")
        allow_only(downlink, "parameters", "buffers", UNITS)
        if UNITS in downlink.arrays:
            units = read_units(m, downlink.arrays[UNITS])
        else:
            units = whole(m) if kept is None else held(m, kept.units)
        if units.digest != name:
            raise LostError(f"the parameters are of structure {name!r}, the device holds {units.digest!r}")
        parameters = vector(downlink, "parameters", units.places.size)
        return Received(units, parameters, vector(downlink, "buffers", units.small.buffers.size))

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Local SGD on the smaller network."""
        a, units = task.assignment, received.units
        t = task.narrow(units.channels)
        start = Weights(received.parameters, received.buffers)
        parameters, buffers, loss = self.descend(t, start, whole=a.model)
        residual = None if kept is None else carried(kept.residual, kept.units, units)
        fixed = frozen(a.model.manifest)[units.places]
        sent, left = self.uplink.send(a, "parameters", parameters, start.parameters, fixed, residual)
        trained = units.placed(parameters, buffers, a.model.buffers)
        return Local(Kept(units.packed, left), Payload({**sent, "buffers": buffers}), trained, loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The network that the server chose last; statistics of pruned units as initially."""
        return received.units.placed(received.parameters, received.buffers, task.assignment.model.buffers)

    # --- both

    def _counts(self, model: Model) -> list[int]:
        return [max(1, round(self.keep * n)) for n in counts(whole(model.manifest))]

    def _live(self, model: Model) -> int:
        return parameters_with(model.manifest, self._counts(model))

    def _choose(self, model: Model, parameters: F32) -> Units:
        return strongest(whole(model.manifest), parameters, self._counts(model))


def _live_values(model: Model, state: State) -> Weights:
    small = unpacked(model.manifest, state.units).small
    return Weights(state.parameters[small.parameters], state.buffers[small.buffers])
