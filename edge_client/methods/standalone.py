"""Standalone: every device trains alone, nothing is exchanged.

The yardstick that says what a federation is worth to a device. It is given the same rounds and at least as many
local epochs as the method it is compared with; the server only keeps the time.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from edge_client.bundle import Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Method, Personal, Task, Total
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training.loop import train_parameters


class Standalone(Method):
    """Local SGD with momentum from the bundle's initial values, round after round."""

    name: ClassVar[str] = "standalone"

    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    # --- server half: empty hands

    def start(self, model: Model, seed: int) -> Arrays:
        """Nothing."""
        return {}

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """Nothing but the call to train."""
        return Payload()

    def exchanged(self, model: Model) -> int:
        """All parameters could be; none are."""
        return model.manifest.d

    def update_limit(self, model: Model) -> int:
        """No arrays at all."""
        return 0

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """An update without arrays."""
        if update.arrays:
            raise PayloadError(f"the payload holds arrays {sorted(update.arrays)}; a standalone device sends none")
        return {}

    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Nothing to add."""
        return total, record

    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """Nothing changed."""
        return state

    # --- client half

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Go on from the device's own model."""
        own = self.personal(task, kept, downlink)
        parameters, buffers = own.parameters.copy(), own.buffers.copy()
        loss = train_parameters(task, parameters, buffers, self.lr, self.momentum, self.epochs, self.batch)
        trained = Personal(parameters, buffers)
        return Local({"parameters": parameters, "buffers": buffers}, Payload(), trained, loss)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """What the device kept, or the initial values."""
        model = task.assignment.model
        return Personal(kept.get("parameters", model.parameters), kept.get("buffers", model.buffers))
