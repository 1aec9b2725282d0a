"""What a federated method is: one class in one file, its client half and its server half side by side.

Each file or folder here is a method, but for `shared`: what several of them use.

A method's fields are its configuration; its functions are pure: values in, values out, seeded by the assignment,
numpy only, no network, no disk, no framework. The coordinator, the device and the simulator call the very same ones.

One round, as the engine of either side runs it::

    server   audience(course, round, record)           -> str       devices of one audience receive the same bytes
             downlink(course, round, state, record)    -> Payload   made once for each audience
    device   receive(a, kept, downlink)                -> Received  the downlink, decoded once
             local_round(task, kept, received)         -> Local     what it keeps, uploads, and its trained model
    server   read_update(a, state, record, payload)    -> Update    checked and decoded, or PayloadError
             fold(a, state, total, update, record)     -> total, record   one at a time, ordered by device name
             sized(state, fleet)                       -> state     how many devices the federation has
             finish(course, round, took_part, state, total) -> state, records

Rounds count from 1. After the last round every device asks for one more downlink (round `rounds + 1`) and makes its
`personal` model from it.

A method defines small dataclasses for its values: State (global, on the server), Record (what the server keeps of one
device), Kept (what a device keeps), and, in memory only, what it received, a decoded update and a round's total. The
first three are named by `state_type`, `record_type` and `kept_type`, because `edge_client.flat` stores them. A record
or kept value is None until the first one is written.

A method that codes against values of an earlier round raises `LostError` in `receive` when the device no longer holds
them. The caller then reports that to the server, which drops the device's record, or keeps what `lost` leaves of it; so
the next downlink is the one for a device of which nothing is known, and the method needs no code for repair.
"""

from __future__ import annotations

import inspect
import json
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Annotated, Any, ClassVar

import numpy as np
from edge_kernels import codecs
from edge_kernels.codecs import values
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from edge_client.bundle import Model, digest
from edge_client.errors import ConfigError, first_fault, suggestion
from edge_client.extras import installed, load, subclass_of
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Personal, Task

ALL = "all"
"""The audience of every device, for methods whose downlink depends on nothing but the state."""

SetCodecName = Annotated[str, AfterValidator(codecs.checked_name)]
"""A setting that names a set codec; an unknown name is refused with the choices."""
ValueCodecName = Annotated[str, AfterValidator(values.checked_name)]
"""The same for value codecs."""


@dataclass(frozen=True)
class Range:
    """Values of a numeric setting worth trying, from `low` to `high`: whole numbers when both are. `log`: by ratios."""

    low: float
    high: float
    log: bool = False


MORE_EPOCHS = "more epochs"
"""The hint that a report replaces by how many epochs another method has that scores more."""

Search = Mapping[str, Range | tuple[Any, ...]]
"""By setting the values that `maskfleet tune` tries: a range, or each of a tuple."""


@dataclass(frozen=True)
class Influence:
    """What an update could do to the global value.

    `norm` and `statistics` are the Euclidean norms of its changes of the parameters and of the batch-norm statistics,
    which have scales of their own; `weight` is the weight that it claims.
    """

    norm: float
    weight: float
    statistics: float = 0.0


class Method(BaseModel):
    """Base of every method: its fields are the configuration, `extra` keys are refused.

    `one_time` names update arrays that are sent once (a structure), `one_time_down` such arrays of downlinks (a head
    that stays): they are reported apart from the rounds' bytes. `search` has the few settings that `maskfleet tune`
    searches. `drawn` and `trained` hold the defaults that depend on the bundle, as attributes named like the settings:
    for weights that a seed draws, and for weights from a file. `rival` names the method whose score this one should
    reach; a simulation of both names a method that does not. `revision` is raised with a change after which the
    settings of a stored result give other bytes or another model: results of an earlier one are run again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: ClassVar[str]
    revision: ClassVar[int] = 1
    rival: ClassVar[str | None] = None
    search: ClassVar[Search] = {}
    drawn: ClassVar[Any] = None
    trained: ClassVar[Any] = None
    state_type: ClassVar[type[Any]]
    record_type: ClassVar[type[Any] | None] = None
    kept_type: ClassVar[type[Any] | None] = None
    one_time: ClassVar[frozenset[str]] = frozenset()
    one_time_down: ClassVar[frozenset[str]] = frozenset()

    # --- server half

    @abstractmethod
    def start(self, course: Course) -> Any:
        """The server's state before round 1."""
        ...

    def audience(self, course: Course, round_: int, record: Any) -> str:
        """The name of the group of devices that receive the same downlink in this round as one with this record."""
        return ALL

    @abstractmethod
    def downlink(self, course: Course, round_: int, state: Any, record: Any) -> Payload:
        """What the devices of one audience receive at the start of a round; `record` is that of any of them."""
        ...

    def stays(self, course: Course) -> str | None:
        """Which part of a trained model stays on the devices, in a few words; None when the state holds it whole."""
        return None

    def caution(self, course: Course) -> str | None:
        """A warning, in a sentence, about these settings with this model and number of rounds; None: no warning.

        `simulate` prints it; the coordinator logs it and has it in its answer when a federation is created.
        """
        return None

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        """What most often helps when the method ends badly, the likeliest first; not what these settings do already.

        `model` is the bundle's, None where it is not at hand.
        """
        return "lr", "more rounds"

    def unpruned(self) -> str | None:
        """A warning, in a sentence, for a network that should be pruned and is whole at the end; None: no warning.

        A device prints it for its own network, a simulation when it holds for every device.
        """
        return None

    @abstractmethod
    def exchanged(self, course: Course) -> int:
        """Parameters the method exchanges: what bits per parameter are counted over."""
        ...

    def paper_bytes(self, course: Course) -> tuple[int, int] | None:
        """Bytes up and down per device and round as the method's paper counts them; None when it counts as we do."""
        return None

    @abstractmethod
    def update_limit(self, course: Course) -> int:
        """The most bytes the arrays of an update may take together; more is refused unread."""
        ...

    @abstractmethod
    def read_update(self, a: Assignment, state: Any, record: Any, payload: Payload) -> Any:
        """The update, decoded and checked (names, dtypes, shapes, finite). Raises PayloadError.

        Metadata `samples` is the device's number of training samples, from its metrics; `local_round` does not add it.
        """
        ...

    def influence(self, a: Assignment, state: Any, update: Any) -> Influence | None:
        """How much an update could change the global value; None when the method bounds that by construction."""
        return None

    def limited(self, a: Assignment, state: Any, update: Any, scale: float, weight: float) -> Any:
        """The update with its change multiplied by `scale` (0..1) and its weight set to `weight`.

        Called only for updates whose `influence` is not None.
        """
        return update

    @abstractmethod
    def fold(self, a: Assignment, state: Any, total: Any, update: Any, record: Any) -> tuple[Any, Any]:
        """Add one update to the round's running total (None at first): memory O(d), not O(devices * d).

        Returns the total (which may be updated in place) and the device's new record; None leaves the one it has.
        """
        ...

    def sized(self, state: Any, fleet: int) -> Any:
        """The state of a federation with `fleet` devices. Called before every `finish`.

        These have asked for work at any time and are not removed. Their number may change between rounds.
        """
        return state

    @abstractmethod
    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: Any, total: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """The state after a round in which the devices `took_part` (at least one, sorted) were folded into `total`.

        Also the records that the round's outcome changes, by device: they replace what `fold` returned.
        """
        ...

    def lost(self, record: Any) -> Any:
        """What is left of the record of a device that reports that it lost what it kept; None: nothing.

        The next downlink for what is left must be readable without anything kept. Override it where the state still
        has a part of the device that its next update replaces.
        """
        return None

    def dropped(self, a: Assignment, update: Any, record: Any) -> Any:
        """The new record of a device whose update the guard dropped; None leaves the one it has.

        Override it where the next downlink builds on what the device has kept with that update.
        """
        return None

    def of_device(self, course: Course, state: Any, record: Any, everyone: Personal) -> Personal | None:
        """The model of a device with this record, bit for bit; None where a part of it is on the device alone.

        `everyone` is what the same state gives a device of which nothing is known (`global_model`).
        """
        return None

    # --- client half

    @abstractmethod
    def receive(self, a: Assignment, kept: Any, downlink: Payload) -> Any:
        """Decode the downlink, with what the device kept. Raises LostError, PayloadError.

        The same for every device of the audience that kept the same: a simulator gives the result to all of them, so
        the functions below leave it as it is.
        """
        ...

    @abstractmethod
    def local_round(self, task: Task, kept: Any, received: Any) -> Local:
        """Train on the device's data. `kept` is what the device kept from its last round, None at first."""
        ...

    @abstractmethod
    def personal(self, task: Task, kept: Any, received: Any) -> Personal:
        """The device's model as the downlink leaves it, before any further training."""
        ...


def below(label: str, score: float, base: float, than: str, hints: Sequence[str]) -> str | None:
    """A sentence when a method ends with a `score` below `base`, which is that of `than`; None when it does not."""
    if score >= base:
        return None
    advice = f"; what most often helps: {', then '.join(hints)}" if hints else ""
    return f"{label} ends at {score:.3f}, below {than} ({base:.3f}){advice}"


def pretrained(model: Model) -> bool:
    """Whether the bundle's weights come from a file; a seed's are random."""
    return model.manifest.seed is None


def trained_head(model: Model) -> bool:
    """Whether the last layer's weights are worth keeping: those of a pre-trained bundle, unless they are all 0."""
    m = model.manifest
    last = [m.tensors[name].span for layer in m.layers[-1:] for name in layer.weights]
    return pretrained(model) and any(model.parameters[span].any() for span in last)


def few_masked(model: Model, masked: int, kinds: str, others_train: bool = False) -> str | None:
    """A warning when masks cover fewer than half of the trainable parameters.

    `kinds` are the layers whose weights can have masks; `others_train`: each device trains the rest for itself.
    """
    trainable = sum(t.size for t in model.manifest.parameters if t.trainable)
    if 2 * masked >= trainable:
        return None
    stay = "on the device, which trains them" if others_train else "as the bundle has them"
    few = f"only {masked:,} of {trainable:,} trainable parameters have masks"
    return f"{few}: weights of {kinds}; the others stay {stay}"


def bits_digest(packed: NDArray[np.uint8]) -> str:
    """The 64-bit name of packed bits (a structure, a reference mask): the first 16 hex digits of their SHA-256."""
    return digest(packed.tobytes())[:16]


def installed_methods() -> dict[str, EntryPoint]:
    """The installed methods by name, in the order of names; none is loaded."""
    return installed("maskfleet.methods")


def load_method(found: EntryPoint) -> type[Method]:
    """The class of an installed method. Raises ConfigError."""
    kind: type[Method] = load(found, f"method {found.name!r}", subclass_of(Method), "complete subclass of Method")
    own = getattr(kind, "name", None)
    if own != found.name:  # results are written under the class's name
        raise ConfigError(f"method {found.name!r} has name = {own!r} in its class; write name = {found.name!r} there")
    return kind


def in_a_line(kind: type[Method]) -> str:
    """What a method is: the first paragraph of its module's docstring, else of its class's."""
    text = inspect.getdoc(sys.modules[kind.__module__]) or inspect.getdoc(kind) or ""
    return " ".join(text.partition("\n\n")[0].split())


def make_method(config: dict[str, Any]) -> Method:
    """The method that ``{"name": ..., **settings}`` describes. Raises ConfigError."""
    settings = dict(config)
    name = settings.pop("name", None)
    found = installed_methods()
    if not isinstance(name, str) or name not in found:
        what = "the method has no `name`" if name is None else f"there is no method {name!r}"
        raise ConfigError(f"{what}; choose one of {', '.join(found)}{suggestion(str(name), found)}")
    kind = load_method(found[name])
    try:  # as JSON: strict rules then take its lists for lists, tuples and sets alike
        return kind.model_validate_json(json.dumps(settings, default=str), strict=True)
    except ValidationError as error:
        fault = first_fault(error, "conflict", kind.model_fields)  # two settings that do not go together
        raise ConfigError(f"method {name!r}, setting {fault}") from None
