"""What a federated method is: one class in one file, its client half and its server half side by side.

A method's fields are its configuration; its functions are pure: values in, values out, seeded by the assignment,
numpy only, no network, no disk, no framework. The coordinator, the device and the simulator call the very same ones.

One round, as the engine of either side runs it::

    server   state, records            what the server keeps: one global value, one per device
             downlink(a, state, record)            -> Payload      what device `a.device` receives
    device   local_round(task, kept, downlink)     -> Local        what it keeps, uploads, and its trained model
    server   read_update(a, state, record, payload)-> Arrays       checked and decoded, or PayloadError
             fold(a, state, total, update, record) -> total, record  one update at a time, ordered by device name
             finish(model, round, state, total)    -> state        the next round's global value

Round numbers start at 1. After the last round every device asks for one more downlink (round `rounds + 1`) and makes
its `personal` model from it. Everything kept is a flat dict of arrays, so either side stores it as one safetensors
file. A method that needs a probing round, a state per device or a coded downlink decides so from `a.round` and
`record`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from edge_client.bundle import F32, Model, digest
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, first_fault
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training import Trainer

Total = dict[str, Any]
"""A round's running sums: arrays, and tallies of packed masks (`edge_kernels.folding`). Never stored."""


@dataclass(frozen=True)
class Assignment:
    """One device's part in one round, as both sides know it. All shared randomness is keyed by these fields."""

    model: Model
    seed: int
    rounds: int
    round: int
    device: str


@dataclass(frozen=True)
class Task:
    """An assignment on the device that has it: its engine and its data."""

    assignment: Assignment
    trainer: Trainer
    data: DeviceData


@dataclass(frozen=True)
class Personal:
    """A device's own model: effective parameters float32[d] (mask applied), statistics float32[buffers_d].

    `mask` is bool[d], False where a parameter was masked away; None for a dense model.
    """

    parameters: F32
    buffers: F32
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Local:
    """What one local round leaves: `kept` on the device, `update` for the server, the trained model, its mean loss.

    With `took_part` False the device could not train and its update only says why: it reports no samples, so that
    nothing of it counts in the round's means.
    """

    kept: Arrays
    update: Payload
    trained: Personal
    loss: float
    took_part: bool = True


class Method(BaseModel):
    """Base of every method: its fields are the configuration, `extra` keys are refused.

    `one_time` names update arrays that are sent once (a structure), `one_time_down` such arrays of downlinks (a head
    that stays): they are reported apart from the rounds' bytes.
    `shared_downlink` says that `downlink` does not depend on device or record, so it is made and stored once a round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: ClassVar[str]
    one_time: ClassVar[frozenset[str]] = frozenset()
    one_time_down: ClassVar[frozenset[str]] = frozenset()
    shared_downlink: ClassVar[bool] = True

    # --- server half

    @abstractmethod
    def start(self, model: Model, seed: int) -> Arrays:
        """The server's global state before round 1."""
        ...

    @abstractmethod
    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """What the device receives at the start of `a.round`."""
        ...

    @abstractmethod
    def exchanged(self, model: Model) -> int:
        """Parameters the method exchanges: what bits per parameter are counted over."""
        ...

    def paper_bytes(self, model: Model) -> tuple[int, int] | None:
        """Bytes up and down per device and round as the method's paper counts them; None when it counts as we do."""
        return None

    @abstractmethod
    def update_limit(self, model: Model) -> int:
        """The most bytes the arrays of an update may take together; more is refused unread."""
        ...

    @abstractmethod
    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """The update's arrays, decoded and checked (names, dtypes, shapes, finite). Raises PayloadError."""
        ...

    @abstractmethod
    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Add one update to the round's running total ({} at first): memory O(d), not O(devices * d).

        Returns the total (which may be updated in place) and the device's new record.
        """
        ...

    @abstractmethod
    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """The global state after a round, from the state before it and the round's total."""
        ...

    # --- client half

    @abstractmethod
    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Train on the device's data. `kept` is what the device kept from its last round, {} at first."""
        ...

    @abstractmethod
    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The device's model as the downlink leaves it, before any further training."""
        ...


def origin(method: Method, a: Assignment) -> dict[str, str | int]:
    """What the metadata of a device's payload says of where it belongs: method, round and device."""
    return {"method": method.name, "round": a.round, "device": a.device}


def bits_digest(packed: NDArray[np.uint8]) -> str:
    """The 64-bit name of packed bits (a structure, a reference mask): the first 16 hex digits of their SHA-256."""
    return digest(packed.tobytes())[:16]


def make_method(config: dict[str, Any]) -> Method:
    """The method that ``{"name": ..., **settings}`` describes. Raises ConfigError."""
    settings = dict(config)
    name = settings.pop("name", None)
    found = {e.name: e for e in entry_points(group="maskfleet.methods")}
    if not isinstance(name, str) or name not in found:
        raise ConfigError(f"there is no method {name!r}; choose one of {sorted(found)}")
    try:
        make: type[Method] = found[name].load()
    except Exception as error:  # it is somebody else's package, which may fail in any way
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"method {name!r} cannot be loaded ({why}); install its package anew") from error
    try:
        return make(**settings)
    except ValidationError as error:
        raise ConfigError(f"method {name!r}, setting {first_fault(error)}") from None
