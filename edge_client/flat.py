"""Typed values as flat named arrays, and back: how a method's state, records and kept values are stored.

A value is a dataclass whose fields are arrays, numbers, booleans, text, dataclasses of the same kind, or optional ones
of these. `to_arrays` writes each field under its name, ``outer.inner`` for nested ones. A field that is None is absent,
so an optional dataclass has at least one field that is never None. `from_arrays` restores an equal value. The result is
one safetensors file in the store of either side.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from edge_client.protocol.payload import Arrays

T = TypeVar("T")

_SCALARS: dict[type, np.dtype[Any]] = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


def to_arrays(value: object) -> Arrays:
    """The fields of a dataclass as arrays by name; ``{}`` for None. Raises TypeError for a field of another kind."""
    out: Arrays = {}
    if value is not None:
        _write(value, "", out)
    return out


def from_arrays(kind: type[T], arrays: Mapping[str, np.ndarray[Any, Any]]) -> T:
    """The value of dataclass `kind` that `to_arrays` wrote. Raises ValueError when a field is missing or misshapen.

    Array fields are used as they are, not copied.
    """
    left = dict(arrays)
    value: T = _read(kind, "", left)
    if left:
        raise ValueError(f"{kind.__name__} has no field for the arrays {sorted(left)}")
    return value


def _write(value: Any, prefix: str, out: Arrays) -> None:
    for f in fields(value):
        _write_field(getattr(value, f.name), prefix + f.name, out)


def _write_field(item: Any, name: str, out: Arrays) -> None:
    if item is None:
        return
    if isinstance(item, np.ndarray):
        out[name] = item
    elif type(item) in _SCALARS:
        out[name] = np.array(item, _SCALARS[type(item)])
    elif isinstance(item, str):
        out[name] = np.frombuffer(item.encode(), np.uint8)
    elif is_dataclass(item):
        _write(item, f"{name}.", out)
    else:
        raise TypeError(f"field {name!r} holds {type(item).__name__}, which is not stored; use an array or a number")


@lru_cache(256)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: type, prefix: str, left: Arrays) -> Any:
    return kind(**{name: _read_field(hint, prefix + name, left) for name, hint in _hints(kind).items()})


def _read_field(hint: Any, name: str, left: Arrays) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (h for h in get_args(hint) if h is not types.NoneType)
        if not any(key == name or key.startswith(f"{name}.") for key in left):
            return None
    if is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, f"{name}.", left)
    if name not in left:
        raise ValueError(f"the stored value lacks {name!r}")
    array = left.pop(name)
    if hint is str:
        return array.tobytes().decode()
    if hint in _SCALARS:
        if array.shape != () or array.dtype != _SCALARS[hint]:
            raise ValueError(f"{name!r} is {array.dtype}{list(array.shape)}, not one {hint.__name__}")
        return hint(array)
    return array
