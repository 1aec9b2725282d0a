"""A federation of Lattice played by hand, and a trainer whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from numpy_mlp import mlp
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32, Init, Manifest, Tensor
from edge_client.data import DeviceData
from edge_client.errors import LostError
from edge_client.methods.lattice.grid import spread, trainable
from edge_client.methods.lattice.method import MOVES, Lattice
from edge_client.methods.lattice.wire import up_head
from edge_client.narrow import Channels, narrow
from edge_client.protocol.payload import Payload
from edge_client.training import Gradient

M = mlp(6, 5, 3)
D = M.d
NORMED = M.model_copy(
    update={"buffers": (Tensor(name="mean", shape=(4,), offset=0, init=Init(kind="constant", scale=0.5)),)}
)


@dataclass
class Pull:
    """A trainer whose gradient is the first sample's label times a fixed vector: local changes are known."""

    manifest: Manifest
    directions: F32  # [classes, d]

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any]) -> Gradient:
        return Gradient(1.0, self.directions[int(y[0])], buffers + np.float32(0.25))

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return np.zeros((len(x), 3), np.float32)

    def narrow(self, kept: Channels) -> Pull:
        small = narrow(self.manifest, kept)
        return Pull(small.manifest, self.directions[:, small.parameters])


def pull(m: Manifest = M, seed: int = 0) -> Pull:
    return Pull(m, np.random.default_rng(seed).standard_normal((3, m.d)).astype(np.float32))


def samples(label: int, n: int = 8) -> DeviceData:
    """One batch of one label."""
    x, y = np.zeros((n, 6), np.float32), np.full(n, label)
    return DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])


THREE = {d: samples(i) for i, d in enumerate("abc")}


class LatticeFleet(Rounds):
    """A federation of Lattice by hand, whose devices send what the test wants. `lost` has (round, device)."""

    method: Lattice

    def __init__(
        self,
        method: Lattice,
        data: Mapping[str, DeviceData],
        seed: int = 3,
        cohort: int = 3,
        rounds: int = 60,
        m: Manifest = M,
        trainer: Any = None,
    ) -> None:
        super().__init__(method, m, rounds, seed=seed, cohort=cohort, data=data, trainer=trainer or pull(m))
        self.change: Callable[[str, Payload], Payload] = lambda device, update: update
        self.gain: Mapping[str, float] = {}
        self.lost: list[tuple[int, str]] = []

    def receive(self, device: str) -> Any:
        """The next downlink as the device decodes it; after a loss the whole one."""
        try:
            return super().receive(device)
        except LostError:
            self.lost.append((self.round + 1, device))
            self.lose(device)
            return super().receive(device)

    def train(self, device: str, place: int) -> Payload:
        update = super().train(device, place)
        if device in self.gain:
            head, moves = up_head(update.arrays[MOVES].tobytes())
            data = replace(head, gain=self.gain[device]).pack() + moves
            update = replace(update, arrays={**update.arrays, MOVES: np.frombuffer(data, np.uint8)})
        return self.change(device, update)

    def play(
        self, *devices: str, gain: float | Mapping[str, float] | None = None, dropped: bool = False, **more: Any
    ) -> None:
        """One round of these devices; their place is their order. When it is dropped, no update is counted."""
        for d in devices:
            self.receive(d)
        self.gain = gain if isinstance(gain, Mapping) else {} if gain is None else dict.fromkeys(devices, gain)
        super().play(
            *devices, **more, limits={d: Limit(1.0, 1.0, True, "as the test wants") for d in devices if dropped}
        )

    def moved(self) -> NDArray[np.float64]:
        """How far the model is from the bundle's."""
        return self.scaled(self.state.counts)

    def due(self) -> NDArray[np.float64]:
        """How far it would be with what the server has not applied."""
        return self.scaled(self.state.counts + self.state.residual.astype(np.float64))

    def scaled(self, counts: NDArray[Any]) -> NDArray[np.float64]:
        """Counts as a change of the weights."""
        return spread(trainable(self.m), self.method.unit(self.course, self.state.steps)).astype(np.float64) * counts
