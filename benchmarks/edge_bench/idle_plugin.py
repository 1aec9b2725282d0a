"""A method and a trainer that do nothing but move bytes: what `round_overhead` runs instead of training.

They are installed for that benchmark's processes only, through the entry points that any third party uses.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Bundle, Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Method, Personal, Task
from edge_client.methods.fedavg import add_weighted
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training import Gradient

DTYPES = {"float32": np.float32, "mask": np.uint8}


class Idle(Method):
    """Sends what it received: float32[d] both ways (averaged), or d packed bits (summed, then the majority).

    Bits are of at most 255 devices.
    """

    name: ClassVar[str] = "idle"
    kind: Literal["float32", "mask"]
    scale: Annotated[float, Field(gt=0)] = 1.0

    def _size(self, model: Model) -> int:
        return model.manifest.d if self.kind == "float32" else (model.manifest.d + 7) // 8

    def start(self, model: Model, seed: int) -> Arrays:
        """Random values: bytes that no link compresses."""
        random = np.random.default_rng(seed)
        if self.kind == "float32":
            return {"values": (self.scale * random.standard_normal(self._size(model))).astype(np.float32)}
        return {"values": random.integers(0, 256, self._size(model), dtype=np.uint8)}

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """The global values."""
        return Payload(state)

    def exchanged(self, model: Model) -> int:
        """All parameters."""
        return model.manifest.d

    def update_limit(self, model: Model) -> int:
        """The values' bytes."""
        return self._size(model) * np.dtype(DTYPES[self.kind]).itemsize

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """The values, checked as a real method checks them."""
        values = update.arrays.get("values")
        if values is None or values.dtype != DTYPES[self.kind] or values.shape != (self._size(a.model),):
            raise PayloadError(f"the update is not {self.kind}[{self._size(a.model)}]")
        if self.kind == "float32" and not np.isfinite(values).all():
            raise PayloadError("the update holds NaN or infinity")
        return {"values": values}

    def fold(
        self, a: Assignment, state: Arrays, total: Arrays, update: Arrays, record: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Sum."""
        values = update["values"]
        total.setdefault("count", np.zeros(1, np.int64))
        total["count"] += 1
        if self.kind == "float32":
            add_weighted(total.setdefault("sum", np.zeros(len(values))), 1.0, values)
        else:
            total.setdefault("sum", np.zeros(8 * len(values), np.uint8))
            total["sum"] += np.unpackbits(values)
        return total, record

    def finish(self, model: Model, round_: int, state: Arrays, total: Arrays) -> Arrays:
        """Mean or majority."""
        if self.kind == "float32":
            return {"values": np.divide(total["sum"], total["count"], out=total["sum"]).astype(np.float32)}
        return {"values": np.packbits(total["sum"] >= (int(total["count"][0]) + 1) // 2)}

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Send it back."""
        return Local({}, Payload(dict(downlink.arrays)), self.personal(task, kept, downlink), 0.0)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The bundle's own values."""
        return Personal(task.assignment.model.parameters, task.assignment.model.buffers)


class IdleTrainer:
    """Answers at once: no loss, no gradient, every sample in class 0."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.manifest = bundle.manifest

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        """Zero."""
        return Gradient(0.0, np.zeros_like(parameters), buffers)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        """Zero."""
        return np.zeros((len(x), self.manifest.classes), np.float32)
