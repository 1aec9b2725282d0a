"""What engines share: the vectors they answer in, their last narrow trainers, and one for those that cannot cut."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.bundle import F32, Manifest
from edge_client.narrow import Channels, content, cuts, narrow
from edge_client.training import Gradient, Trainer

MOST = 8
"""Narrow trainers that a trainer holds: a device needs one or two, a simulation one for each of its last devices."""


class Narrowed:
    """The last narrow trainers of one trainer."""

    def __init__(self) -> None:
        self._made: OrderedDict[bytes, Trainer] = OrderedDict()

    def get(self, whole: Trainer, kept: Channels, make: Callable[[], Trainer]) -> Trainer:
        """The trainer for the channels `kept`, made when it is not held; `whole` itself when nothing goes.

        Raises ConfigError when the channels cannot be cut.
        """
        if not cuts(whole.manifest, kept):
            return whole
        key = content(kept)
        trainer = self._made.pop(key, None) or make()
        self._made[key] = trainer
        if len(self._made) > MOST:
            self._made.popitem(last=False)
        return trainer


class Engine(Trainer):
    """A trainer that answers in vectors of its own, and whose narrow ones run the whole network."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._narrowed = Narrowed()
        self._gradient: F32 = np.zeros(manifest.d, np.float32)
        self._statistics: F32 = np.zeros(manifest.buffers_d, np.float32)

    def rest(self) -> None:
        """What an engine holds between gradients is its own matter; most have nothing to give back."""

    def narrow(self, kept: Channels) -> Trainer:
        return self._narrowed.get(self, kept, lambda: Embedded(self, kept))


class Embedded(Trainer):
    """The whole network with zeros in all that a narrow one lacks: the same numbers, without the savings."""

    def __init__(self, whole: Trainer, kept: Channels) -> None:
        self._whole, self._narrow = whole, narrow(whole.manifest, kept)
        self.manifest = self._narrow.manifest
        self._parameters: F32 = np.zeros(whole.manifest.d, np.float32)
        self._buffers: F32 = np.zeros(whole.manifest.buffers_d, np.float32)
        self._narrowed = Narrowed()

    def _fill(self, parameters: F32, buffers: F32) -> None:
        self._parameters[self._narrow.parameters] = parameters
        self._buffers[self._narrow.buffers] = buffers

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        self._fill(parameters, buffers)
        g = self._whole.gradient(self._parameters, self._buffers, x, y, key)
        return Gradient(g.loss, g.parameters[self._narrow.parameters], g.buffers[self._narrow.buffers])

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        self._fill(parameters, buffers)
        return self._whole.logits(self._parameters, self._buffers, x)

    def rest(self) -> None:
        self._whole.rest()

    def narrow(self, kept: Channels) -> Trainer:
        return self._narrowed.get(self, kept, lambda: Embedded(self, kept))
