"""A multilayer perceptron with ReLU in twenty lines of numpy, so that methods are tested without any engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from channel_groups import between
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import F32, Init, Input, Layer, Manifest, Model, Tensor, generate, views
from edge_client.data import DeviceData
from edge_client.narrow import Channels, narrow
from edge_client.targets import Classification
from edge_client.task import Assignment, Course, Task
from edge_client.training import Gradient, Trainer
from edge_client.training.narrowed import Embedded


def mlp(*sizes: int, bias: bool = True) -> Manifest:
    """Layers "0", "1", ... of weights "0.w" [out, in] (Kaiming uniform) and biases "0.b" (zero)."""
    tables: list[Tensor] = []
    layers: list[Layer] = []
    end = 0
    for i, (inner, out) in enumerate(pairwise(sizes)):
        names = []
        for name, shape, init in (
            (f"{i}.w", (out, inner), Init(kind="uniform", scale=(6 / inner) ** 0.5)),
            (f"{i}.b", (out,), Init(kind="constant", scale=0.0)),
        )[: 2 if bias else 1]:
            tables.append(Tensor(name=name, shape=shape, offset=end, init=init))
            end += tables[-1].size
            names.append(name)
        layers.append(Layer(name=str(i), kind="linear", weights=(names[0],), biases=tuple(names[1:])))
    return Manifest(
        name="mlp",
        input=Input(shape=(sizes[0],)),
        target=Classification(classes=sizes[-1]),
        parameters=tuple(tables),
        layers=tuple(layers),
        seed=1,
    )


def grouped(m: Manifest) -> Manifest:
    """An `mlp` with the hidden units of each layer as a channel group."""
    groups = []
    for a, b in pairwise(m.layers):
        size = m.tensors[a.weights[0]].shape[0]
        groups.append(between(size, a.weights[0], b.weights[0], bias=a.biases[0] if a.biases else None, name=a.name))
    return m.model_copy(update={"groups": tuple(groups)})


def model(m: Manifest) -> Model:
    return Model(m, generate(m.parameters, 1), generate(m.buffers, 1))


@dataclass
class NumpyMlp:
    """A trainer for `mlp`; counts its gradient calls."""

    manifest: Manifest
    calls: int = field(default=0)
    rests: int = field(default=0)

    def rest(self) -> None:
        self.rests += 1

    def _forward(self, parameters: F32, x: NDArray[Any]) -> tuple[dict[str, F32], list[F32]]:
        v, acts = views(self.manifest.parameters, parameters), [x]
        for i in range(len(self.manifest.layers)):
            z = acts[-1] @ v[f"{i}.w"].T + v.get(f"{i}.b", np.float32(0))
            acts.append(np.maximum(z, 0) if i < len(self.manifest.layers) - 1 else z)
        return v, acts

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return self._forward(parameters, x)[1][-1]

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        self.calls += 1
        v, acts = self._forward(parameters, x)
        flat = np.zeros(self.manifest.d, np.float32)
        g, rows = views(self.manifest.parameters, flat), np.arange(len(y))
        z = acts[-1] - acts[-1].max(axis=1, keepdims=True)
        e = np.exp(z)
        p = e / e.sum(axis=1, keepdims=True)
        loss = float((np.log(e.sum(axis=1)) - z[rows, y]).mean())
        p[rows, y] -= 1
        p /= len(y)
        for i in reversed(range(len(self.manifest.layers))):
            g[f"{i}.w"][:] = p.T @ acts[i]
            if f"{i}.b" in g:
                g[f"{i}.b"][:] = p.sum(axis=0)
            p = (p @ v[f"{i}.w"]) * (acts[i] > 0)
        return Gradient(loss, flat, buffers)

    def narrow(self, kept: Channels) -> NumpyMlp:
        return type(self)(narrow(self.manifest, kept).manifest)


class CountingSteps(NumpyMlp):
    """Each step adds 1 to the statistics."""

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        return replace(super().gradient(parameters, buffers, x, y), buffers=buffers + np.float32(1))


@dataclass
class Steady:
    """A trainer whose gradient is always the same vector; it notes the parameters it was asked about.

    Every call adds one to the statistics.
    """

    manifest: Manifest
    value: F32
    asked: list[F32] = field(default_factory=list)

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any]) -> Gradient:
        self.asked.append(parameters.copy())
        return Gradient(1.0, self.value, buffers + np.float32(1))

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        return np.zeros((len(x), self.manifest.target.classes), np.float32)

    def narrow(self, kept: Channels) -> Trainer:
        return Embedded(self, kept)


def counted(m: Manifest) -> Manifest:
    """The network with two statistics that begin at 0."""
    zero = Init(kind="constant", scale=0.0)
    return m.model_copy(update={"buffers": (Tensor(name="n", shape=(2,), offset=0, init=zero),)})


class CountingSamples(NumpyMlp):
    """Each batch adds its samples to every statistic."""

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        return replace(super().gradient(parameters, buffers, x, y), buffers=buffers + np.float32(len(x)))


def clusters(m: Manifest, seed: int, count: int = 40) -> DeviceData:
    """Classes as noisy corners, learnable by a small network; the same samples train and test, none validate."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % m.target.classes
    corners = np.random.default_rng(0).standard_normal((m.target.classes, *m.input.shape))
    x = (2 * corners[y] + rng.standard_normal((count, *m.input.shape))).astype(np.float32)
    return DeviceData(x, y, x[:0], y[:0], x, y)


def course(m: Manifest, rounds: int = 5) -> Course:
    return Course(model(m), seed=3, rounds=rounds, cohort=3)


def assignment(m: Manifest, device: str = "a", round_: int = 1, rounds: int = 5) -> Assignment:
    return Assignment(course(m, rounds), round_, device)


def secret(device: str) -> int:
    """A device's own randomness."""
    return counter.key("secret", device)


def task(m: Manifest, device: str = "a", round_: int = 1, data: DeviceData | None = None) -> Task:
    return Task(assignment(m, device, round_), NumpyMlp(m), clusters(m, 1) if data is None else data, secret(device))
