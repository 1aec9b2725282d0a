"""FederatedPruning with LAMP: the server picks the mask, and what is pruned may come back.

Lin et al., "Federated Pruning: Improving Neural Network Efficiency with Federated Learning", Interspeech 2022, in the
unstructured form that FedMap's authors compare with. Each `every` rounds the server keeps the largest LAMP scores of
its whole model, on FedMap's schedules. Devices train the pruned model; the server adds the mean change at the mask.

- A pruned weight keeps its last value on the server, so the next mask may take it up again. That is the difference
  from FedMap, and why the mask has to travel.
- Down: `values` at the mask; ``mask.entropy`` as well to a device that took part in no round of this mask. Nothing in
  round 1. Up, and everything on the device: as in FedMap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels.pruning import keep_largest, lamp_scores

from edge_client.bundle import F32, Bits
from edge_client.errors import LostError
from edge_client.methods.fedmap import FedMap, Kept, Received, Record, State, Update
from edge_client.methods.shared.averaging import Total
from edge_client.methods.shared.pruned import (
    MASK,
    alive,
    check_fingerprint,
    decoded_mask,
    expanded,
    fingerprint,
    prunable,
    unpacked,
)
from edge_client.protocol.payload import Payload, allow_only, vector
from edge_client.task import Assignment, Course


@dataclass(frozen=True)
class Chosen(State):
    """The dense model theta float32[d] and the mask of the period to which round `since` belongs."""

    since: int = 1


class FederatedPruningLamp(FedMap):
    """Masks picked by the server from its dense model."""

    name: ClassVar[str] = "federated_pruning_lamp"
    state_type: ClassVar[type[State]] = Chosen

    dr: None = None

    def period(self, course: Course, round_: int) -> int:
        """Rounds of one period have one mask."""
        return self.prunings(course, round_) if self.schedule == "step" else min(round_, course.rounds)

    def chosen(self, course: Course, round_: int, theta: F32) -> Bits:
        """The mask of a round, of all weights and not only of those that the last one kept."""
        part = prunable(course.model.manifest)
        scores = lamp_scores(part.gather(theta), part.places)
        return keep_largest(scores, self.keep_count(course, round_))

    # --- server half

    def start(self, course: Course) -> Chosen:
        return Chosen(**vars(super().start(course)))

    def current(self, course: Course, round_: int, state: State) -> Chosen:
        """The state at the start of a round: in a new period with another mask."""
        assert isinstance(state, Chosen)
        if self.period(course, round_) == self.period(course, state.since):
            return state
        mask = bitset.pack(self.chosen(course, round_, state.theta))
        return replace(state, mask=mask, since=round_, trained=state.final())

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        """Devices that hold the mask receive values alone."""
        if round_ == 1:
            return "first"
        holds = record is not None and self.period(course, record.round) == self.period(course, round_)
        return "values" if holds else "whole"

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        """Of a whole downlink as FedMap has it, what the audience lacks."""
        audience = self.audience(course, round_, record)
        payload = super().downlink(course, round_, self.current(course, round_, state), None)
        arrays = {n: a for n, a in payload.arrays.items() if n != MASK or audience == "whole"}
        return Payload(arrays, payload.meta)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        return super().read_update(a, self.current(a.course, a.round, state), record, payload)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        """Move the values at the mask by the mean change; in a new period pick another mask."""
        manifest, (change, buffers), now = course.model.manifest, total, self.current(course, round_, state)
        theta = now.theta.copy()
        theta[alive(manifest, unpacked(manifest, now.mask))] += change.value
        statistics = buffers.value if self.sent_buffers(manifest) else now.buffers
        return self.current(course, round_ + 1, replace(now, theta=theta, buffers=statistics, trained=None)), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """The pruned model. Raises LostError, PayloadError."""
        manifest, arrays = a.model.manifest, downlink.arrays
        if not arrays and a.round == 1:
            return super().receive(a, kept, downlink)
        allow_only(downlink, "values", MASK, "buffers")
        if MASK in arrays:
            mask = decoded_mask(manifest, downlink)
        elif kept is None:
            raise LostError("values were received without a mask, and this device holds none")
        else:
            mask = unpacked(manifest, kept.mask)
        live = alive(manifest, mask)
        count = int(np.count_nonzero(live))
        if MASK not in arrays and "values" in arrays and arrays["values"].shape != (count,):
            raise LostError(f"{arrays['values'].size} values were received, the mask held here leaves {count}")
        values = vector(downlink, "values", count)
        check_fingerprint(downlink, fingerprint(bitset.pack(mask), values), LostError)
        own = a.model.buffers if kept is None else kept.buffers
        buffers = self.buffers(downlink, manifest) if self.sent_buffers(manifest) else own
        return Received(expanded(a.model, live, values), mask, buffers)
