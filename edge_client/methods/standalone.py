"""Standalone: every device trains alone, nothing is exchanged.

The baseline that a federation has to beat on each device. It is given the same rounds and at least as many
local epochs as the method it is compared with; the server only keeps the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from edge_client.errors import PayloadError
from edge_client.methods.shared.averaging import Weights
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Personal, Task


@dataclass(frozen=True)
class Nothing:
    """What the server holds: no values."""


class Standalone(LocalSgd):
    """Local SGD with momentum from the bundle's initial values, round after round."""

    name: ClassVar[str] = "standalone"
    state_type: ClassVar[type[Nothing]] = Nothing
    kept_type: ClassVar[type[Weights]] = Weights

    # --- server half

    def start(self, course: Course) -> Nothing:
        return Nothing()

    def downlink(self, course: Course, round_: int, state: Nothing, record: None) -> Payload:
        """Nothing but the call to train."""
        return Payload()

    def stays(self, course: Course) -> str:
        return "every device trains a model of its own"

    def exchanged(self, course: Course) -> int:
        """All parameters could be; none are."""
        return course.model.manifest.d

    def update_limit(self, course: Course) -> int:
        return 0

    def read_update(self, a: Assignment, state: Nothing, record: None, payload: Payload) -> Nothing:
        """An update without arrays."""
        if payload.arrays:
            raise PayloadError(f"the payload holds arrays {sorted(payload.arrays)}; a standalone device sends none")
        return Nothing()

    def fold(self, a: Assignment, state: Nothing, total: None, update: Nothing, record: None) -> tuple[None, None]:
        return None, None

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: Nothing, total: None
    ) -> tuple[Nothing, Mapping[str, None]]:
        return state, {}

    # --- client half

    def receive(self, a: Assignment, kept: Weights | None, downlink: Payload) -> Weights:
        """What the device kept, or the initial values."""
        return kept or Weights(a.model.parameters, a.model.buffers)

    def local_round(self, task: Task, kept: Weights | None, received: Weights) -> Local:
        """Go on from the device's own model."""
        parameters, buffers, loss = self.descend(task, received)
        return Local(Weights(parameters, buffers), Payload(), Personal(parameters, buffers), loss)

    def personal(self, task: Task, kept: Weights | None, received: Weights) -> Personal:
        return Personal(received.parameters, received.buffers)
