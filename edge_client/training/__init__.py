"""Loss, gradients and logits of a bundle: one contract, several engines.

A trainer is opened on a bundle and is a pure function of what it is given: it holds a session, never weights.
Engines are entry points of the group `maskfleet.trainers`; `onnxruntime` is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_client.backends import installed
from edge_client.bundle import F32, Bundle, Manifest
from edge_client.extras import load
from edge_client.narrow import Channels


@dataclass(frozen=True)
class Gradient:
    """One batch's mean loss, its gradient float32[d] and the batch-norm statistics after it, float32[buffers_d].

    The gradient is zero at parameters that are not trainable. Both arrays may be overwritten by the next call.
    """

    loss: float
    parameters: F32
    buffers: F32


class Trainer(Protocol):
    """What every backend gives. Batches may have any size from 1 up; the last one of an epoch is smaller."""

    manifest: Manifest

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        """Training-mode forward and backward at `parameters` float32[d].

        `x` is [n, *input.shape], `y` as the target has it.

        Dropout follows from `key`, 0 .. 2**31 - 2, alone: the same key drops the same entries, on every engine.

        Batch-norm follows PyTorch, and is defined for one value per channel too, where PyTorch refuses: the output is
        the bias, the running mean moves as ever and the running variance, for want of an unbiased one, stays.
        """
        ...

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        """Evaluation-mode forward: the model's outputs, float32[n, ...] as the target has them."""
        ...

    def rest(self) -> None:
        """Give back the memory that only gradients need; the next one may take longer."""
        ...

    def narrow(self, kept: Channels) -> Trainer:
        """The same engine on the network with the channels `kept` alone (see `edge_client.narrow`).

        Its loss, gradients, statistics and logits are, to rounding, those of this trainer at the values that are zero
        in everything dropped. An engine may compute them that way (`narrowed.Embedded`), without being faster. Equal
        channels give the same trainer as long as it is among the last few; this one when nothing is dropped. Raises
        ConfigError when the channels cannot be cut.
        """
        ...


def load_backend(backend: str) -> Callable[[Bundle, int], Trainer]:
    """The function that opens a bundle with this backend, on a number of threads.

    Raises ConfigError for a backend that is not installed or does not load.
    """
    opener: Callable[[Bundle, int], Trainer] = load(
        installed(backend), f"training backend {backend!r}", callable, "function that opens a bundle"
    )
    return opener


def open_trainer(backend: str, bundle: Bundle, threads: int = 1) -> Trainer:
    """The trainer `backend` on `bundle`. Raises ConfigError as `load_backend` does."""
    return load_backend(backend)(bundle, threads)
