"""Every error this project raises on purpose.

    MaskfleetError
    |-- BundleError      a model bundle is malformed, incomplete or does not match its digests
    |-- DataError        a device's data file does not fit the bundle (shape, labels, NaN)
    |-- DivergedError    training produced a loss, gradient or statistic that is not finite
    |-- PayloadError     bytes from the network are not the payload they should be
    |   `-- LostError    a downlink builds on values that this device no longer holds
    |-- ConfigError      a configuration names something unknown or out of range
    |   |-- ModelError   an author's model cannot become a bundle
    |   `-- MeterError   an energy meter is not there, or its recording cannot be used
    |-- ServerError      the coordinator refused a request (carries the problem+json)
    |-- UnreachableError the coordinator gave no usable answer for longer than the client's patience
    |-- StateError       a state folder cannot be written, read back or locked
    |   |-- StorageFullError         the disk or the coordinator's database takes nothing more
    |   |-- StorageDamagedError      what the coordinator stored is missing or not what was written
    |   `-- StorageUnreachableError  the coordinator's database or disk does not answer
    `-- CompactionError  a compact model could not be shown equal to its masked model

A message has what happened, the value, and what to do next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from reprlib import Repr
from typing import TYPE_CHECKING, Protocol

from edge_client.protocol.patterns import SENTENCES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class MaskfleetError(Exception):
    """Base of all errors raised on purpose; its text is meant for the person at the keyboard."""


class BundleError(MaskfleetError):
    """A bundle is malformed, incomplete, or a part's bytes do not match its SHA-256."""


class DataError(MaskfleetError):
    """A device's data does not fit the bundle's input shape, dtype or classes."""


class PayloadError(MaskfleetError):
    """Bytes from the network do not decode to the payload that was due."""


class DivergedError(MaskfleetError):
    """Training produced a loss, gradient or statistic that is not finite.

    `at_start`: the round's first gradient did; then the received model is the cause. A model whose first loss
    is finite and whose training then overflows counts as the device's: the two cannot be told apart from one device.
    """

    def __init__(self, message: str, at_start: bool) -> None:
        super().__init__(message)
        self.at_start = at_start

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str, bool]]:  # so that it crosses process boundaries
        return type(self), (str(self), self.at_start)


class LostError(PayloadError):
    """A downlink builds on values of an earlier round that this device no longer holds.

    The device reports it, sits the round out and receives everything with its next downlink.
    """


class ConfigError(MaskfleetError):
    """A configuration value is unknown or out of range."""


class ModelError(ConfigError):
    """An author's model cannot become a bundle: what is wrong with it, and what to change."""


class MeterError(ConfigError):
    """An energy meter is not there, cannot be read, or its recording does not cover what was measured."""


class CompactionError(MaskfleetError):
    """A compact model differs from the masked model it was cut from."""


class UnreachableError(MaskfleetError):
    """The coordinator gave no usable answer for longer than the client's patience."""


class StateError(MaskfleetError):
    """A state folder cannot be written (disk full, read-only), read back, or is in use by another process."""


class StorageFullError(StateError):
    """The disk or the coordinator's database takes nothing more: free space, then the same succeeds."""


class StorageDamagedError(StateError):
    """What the coordinator stored is missing or not what was written: restore its data folder."""


class StorageUnreachableError(StateError):
    """The coordinator's database or disk does not answer; the same request may succeed later."""


class ServerError(MaskfleetError):
    """The coordinator answered with an RFC 9457 problem.

    `status` is the HTTP status, `kind` the last part of the problem's type ("wrong-round", ...).
    """

    def __init__(self, message: str, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


# --- faults found by other libraries, in the same form


class _Shown(Repr):
    """Values in a sentence, cut short. True, False and None are written as in TOML and JSON."""

    def repr_bool(self, value: bool | None, _: int) -> str:
        return "null" if value is None else str(value).lower()

    repr_NoneType = repr_bool


_TABLE = "give a table, which is an object in JSON"
_WORDS = {
    "missing": "it is missing",
    "tuple_type": "give a list, in brackets",
    "dict_type": _TABLE,
    "model_attributes_type": _TABLE,
}
"""What is said in place of pydantic's words, by the kind of fault."""
_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100  # characters of a value in a sentence


class Faults(Protocol):
    """What pydantic, or FastAPI, found wrong."""

    def errors(self) -> Sequence[ErrorDetails]:
        """One entry a fault, at least one."""
        ...


def suggestion(name: str, names: Iterable[str]) -> str:
    """The one of `names` that was probably meant, as "; did you mean 'NAME'?"; "" when none is like it."""
    spelt = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), spelt, n=1)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""


def first_fault(error: Faults, whole: str = "message", names: Collection[str] = (), secret: bool = False) -> str:
    """The first fault as "FIELD = value: why". An unknown field comes before a missing one: it may be its misspelling.

    `whole` is said when it is no single field; for an unknown one of the outermost fields' `names` one is suggested,
    or all are said.
    With `secret` the value is left out.
    """
    faults = error.errors()
    unknown = [e for e in faults if e["type"] == "extra_forbidden"] if faults[0]["type"] == "missing" else []
    first = (unknown or faults)[0]
    where = ".".join(str(p) for p in first["loc"]) or whole
    unseen = secret or first["type"] in ("missing", "json_invalid")
    several = isinstance(first["input"], dict) and first["type"] == "value_error"  # the sentence names those at fault
    tables = several or (isinstance(first["input"], list) and any(isinstance(item, dict) for item in first["input"]))
    value = "" if unseen or tables else f" = {_SHOWN.repr(first['input'])}"  # tables fill a screen
    why = first["msg"].removeprefix("Value error, ")  # pydantic's, before a validator's own sentence
    why = SENTENCES.get(first.get("ctx", {}).get("pattern", ""), why)
    why = _WORDS.get(first["type"], why)
    if first["type"] == "extra_forbidden":
        why = "there is no such setting"
        if names and len(first["loc"]) == 1:
            why += suggestion(where, names) or f"; there are {', '.join(names)}"
    return f"{where}{value}: {why}"
