"""Second versions of methods, written from their pages in docs/methods alone: plain numpy over whole vectors.

A reference has a server and its devices in one object. It encodes nothing: what a payload carries is simply there.
`rehearse` plays it beside the method's own halves, which talk over bytes, and compares every model that a device
trains and every model that it would end with. Gradients and the order of batches are the task's, as for the method.
Where a rounding error would turn a mask, the reference goes on from the server's own values after it compared them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp
from rounds import Rounds

from coord_server.guard import Limit
from edge_client.bundle import F32, Init, Layer, Manifest, Tensor
from edge_client.errors import LostError
from edge_client.narrow import Channels, narrow
from edge_client.task import Personal
from edge_client.training import Gradient

F64 = NDArray[np.float64]
Places = NDArray[np.int64]


def centred(m: Manifest) -> Manifest:
    """The network with a statistic, as a batch-norm has: a running mean of the samples."""
    size = m.input.shape[0]
    mean = Tensor(name="mean", shape=(size,), offset=0, init=Init(kind="constant", scale=0.0))
    return m.model_copy(update={"buffers": (mean,)})


class CentredMlp(NumpyMlp):
    """A trainer of `centred` networks, which subtract the running mean from a sample."""

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return super().logits(parameters, buffers, x - buffers)

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64], key: int = 0) -> Gradient:
        found = super().gradient(parameters, buffers, x - buffers, y)
        mean = np.float32(0.9) * buffers + np.float32(0.1) * x.mean(axis=0)
        return Gradient(found.loss, found.parameters, mean)

    def narrow(self, kept: Channels) -> CentredMlp:
        return CentredMlp(narrow(self.manifest, kept).manifest)


class Reference(Protocol):
    """A second version of a method. A device is lost when it lost what its downlink builds on."""

    def train(self, device: str, round_: int) -> Personal | None:
        """The device's round, which the fleet has played: the model it trained, None when it is lost."""
        ...

    def close(self, round_: int, devices: Sequence[str], limits: Mapping[str, Limit]) -> None:
        """Fold what these devices trained last, within the guard's limits; the fleet has done so."""
        ...

    def personal(self, device: str, round_: int) -> Personal | None:
        """The model that the device would end with, None when it is lost."""
        ...

    def forget(self, device: str) -> None:
        """The device loses all that it kept."""
        ...

    def lost(self, device: str) -> None:
        """The server heard that the device is lost."""
        ...


def rehearse(fleet: Rounds, reference: Reference, seed: int, guarded: bool = True) -> None:
    """All rounds, of some devices each: some lost what they kept, some report too late, the guard limits or drops some.

    Devices whose updates the guard never limits are not `guarded`.
    """
    rng, devices, size = np.random.default_rng(seed), sorted(fleet.data), fleet.course.cohort
    for round_ in range(1, fleet.course.rounds + 1):
        count = size if rng.random() < 0.4 else rng.integers(1, size + 1)
        if rng.random() < 0.3:
            gone = rng.choice(devices)
            fleet.kept.pop(gone, None)
            reference.forget(gone)
        updates = {}
        for place, d in enumerate(sorted(rng.choice(devices, count, replace=False).tolist())):
            fleet.down[d] = fleet.ask(d)
            try:
                updates[d] = fleet.train(d, place)
            except LostError:
                assert reference.train(d, round_) is None, (round_, d, "lost")
                fleet.lose(d)
                reference.lost(d)
                continue
            assert_same(fleet.local[d].trained, reference.train(d, round_), (round_, d, "trained"))
        if len(updates) > 1 and rng.random() < 0.3:
            del updates[max(updates)]  # too late
        limited = list(updates)[:1] if guarded and rng.random() < 0.4 else []
        limits = {d: Limit(0.25, 3.0, bool(rng.random() < 0.5), "as the test wants") for d in limited}
        fleet.close(updates, limits)
        reference.close(round_, sorted(updates), limits)
        for d in devices:
            expected = reference.personal(d, round_ + 1)
            try:
                model = fleet.personal(d)
            except LostError:
                assert expected is None, (round_, d, "lost at the end")
                continue
            assert_same(model, expected, (round_, d, "personal"))


def assert_same(one: Personal, other: Personal | None, what: object) -> None:
    assert other is not None, (what, "not lost")
    for field in ("parameters", "buffers"):
        a, b = getattr(one, field), getattr(other, field)
        assert np.allclose(a, b, rtol=0, atol=1e-4), (what, field, np.abs(a - b).max())
    assert (one.mask is None) == (other.mask is None), what
    if one.mask is not None and other.mask is not None:
        assert np.array_equal(one.mask, other.mask), what


class Descent:
    """SGD with momentum on one vector."""

    def __init__(self, start: Any, lr: float, momentum: float) -> None:
        self.at: F64 = np.array(start, np.float64)
        self.speed = np.zeros_like(self.at)
        self.lr, self.momentum = lr, momentum

    def step(self, gradient: F64) -> None:
        self.speed = self.momentum * self.speed + gradient
        self.at = self.at - self.lr * self.speed


def places(m: Manifest, *names: str) -> Places:
    """Where these tensors lie in the flat vector, in its order."""
    spans = sorted((m.tensors[n].offset, m.tensors[n].size) for n in names)
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(low, low + size) for low, size in spans)])


def tensors(layer: Layer) -> tuple[str, ...]:
    """The names of a layer's weights and biases."""
    return (*layer.weights, *layer.biases)
