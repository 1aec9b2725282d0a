"""Codecs by name: the built-in ones, then those that other packages add by an entry point.

A codec does not hold its name: the table's key, or the entry point's name, is all that names it. An entry point is
looked up when its name is first used and never at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, cast

from edge_kernels.codecs.sets import CodecError


class _Parametrised(Protocol):
    @property
    def with_parameter(self) -> Callable[[str], Any] | None: ...


Codec = TypeVar("Codec", bound=_Parametrised)
Result = TypeVar("Result")


def find(name: str, builtin: Mapping[str, Codec], group: str, what: str) -> Codec:
    """The codec ``NAME`` or ``NAME:PARAMETER``. Raises CodecError with the choices; `what` is the kind of codec."""
    family, colon, text = name.partition(":")
    found = builtin[family] if family in builtin else _load(family, group, what, tuple(builtin))
    if not isinstance(found, kind := type(next(iter(builtin.values())))):
        raise CodecError(f"{what} {family!r} has an entry point that names no {kind.__name__}; mend it")
    if not colon:
        return found
    if found.with_parameter is None:
        raise CodecError(f"{what} {family!r} takes no parameter, not {text!r}")
    try:
        return cast(Codec, found.with_parameter(text))
    except ValueError as error:
        raise CodecError(f"{what} {name!r}: {error}") from None


def one_form(name: str, builtin: Mapping[str, object]) -> str:
    """The name with a parameter that is a number in its shortest form, so that ``topk:0.10`` is ``topk:0.1``.

    Parameters of other packages' codecs stay as they are: 1e5 may be a word there.
    """
    family, colon, text = name.partition(":")
    if family in builtin:
        with suppress(ValueError):
            return f"{family}{colon}{float(text):g}"
    return name


def names(builtin: Mapping[str, object], group: str) -> list[str]:
    """The built-in names in their order, then the added ones."""
    return [*builtin, *sorted({e.name for e in entry_points(group=group)} - set(builtin))]


def decode(what: str, name: str, builtin: Mapping[str, object], call: Callable[[], Result]) -> Result:
    """The result of a decoder; what one of another package raises becomes a CodecError."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, CodecError) or name in builtin:
            raise
        raise CodecError(f"{what} {name!r} failed ({type(error).__name__}: {error}); is the payload whole?") from error


@cache  # an error is not cached, so a package that is installed later is found
def _load(name: str, group: str, what: str, builtin: tuple[str, ...]) -> Any:
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:  # code of another package may fail in any way
                why = f"{type(error).__name__}: {error}"
                raise CodecError(f"{what} {name!r} cannot be loaded ({why}); install its package anew") from error
    choices = ", ".join(names(dict.fromkeys(builtin), group))
    raise CodecError(f"no {what} is called {name!r}; choose one of {choices}")
