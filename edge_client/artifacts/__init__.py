"""Other forms of a personal model, for other engines: made by writers.

A writer is an entry point of the group `maskfleet.artifacts`. It turns the bytes of `personal.onnx` into an artifact's
and opens an artifact to run it. `making` writes an artifact and proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_client.errors import ConfigError
from edge_client.extras import installed, load

ADVICE = "keep the ONNX model and report it"
BATCH = 16  # samples of one call while proving
Run = Callable[[NDArray[Any]], NDArray[Any]]


class Writer(Protocol):
    """One kind of artifact."""

    exact: bool
    """Whether its outputs are the model's to rounding."""
    native: bool
    """Whether its engine may crash: it is then proved in a process of its own."""

    def write(self, model: bytes, samples: NDArray[Any] | None, progress: Callable[[str], None]) -> bytes:
        """The artifact of the ONNX `model`. `samples` [n, ...] of the device calibrate it; None for an exact one.

        Raises ConfigError for a model it cannot take.
        """
        ...

    def open(self, data: bytes) -> Run:
        """The outputs of an artifact for a batch of at most `BATCH` samples."""
        ...


def writer(kind: str) -> Writer:
    """The writer of `kind`. Raises ConfigError when there is none or it needs what is not installed."""
    found = installed("maskfleet.artifacts")
    if kind not in found:
        raise ConfigError(f"there is no artifact {kind!r}; choose one of {', '.join(sorted(found))}")
    made: Writer = load(found[kind], f"artifact {kind!r}", callable, "class of writers")()
    return made
