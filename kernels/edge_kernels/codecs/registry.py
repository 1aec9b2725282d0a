"""Codecs by name: the built-in ones, then those that other packages add by an entry point.

An entry point names one codec object. It is looked up when its name is first used and never at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from edge_kernels.codecs.sets import CodecError

Codec = TypeVar("Codec")
Result = TypeVar("Result")


def find(name: str, builtin: Mapping[str, Codec], group: str, what: str) -> Codec:
    """The codec `name`. Raises CodecError with the choices; `what` names the kind of codec."""
    return builtin[name] if name in builtin else cast(Codec, _load(name, group, what, tuple(builtin)))


def with_parameter(what: str, family: str, text: str, make: Callable[[str], Codec] | None) -> Codec:
    """The codec ``FAMILY:TEXT``. Raises CodecError with the choices."""
    if make is None:
        raise CodecError(f"{what} {family!r} takes no parameter, not {text!r}")
    try:
        return make(text)
    except ValueError as error:
        raise CodecError(f"{what} '{family}:{text}': {error}") from None


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
