"""The payload container: named arrays and a few words about them, as one safetensors file.

A reader in any language opens it. All metadata sits under one key, which names the format, as canonical JSON, because
safetensors does not order its metadata and the same payload must be the same bytes. What the arrays mean is the
method's business; this module only guarantees that bytes from the network become arrays or a PayloadError.

What crosses the wire has a header of at most `HEADER_BYTES`; a larger one is refused before it is parsed. Files of
one's own (a state with one array for each device) have the same form and may have up to `FILE_HEADER_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from edge_client.errors import PayloadError

FORMAT = "maskfleet/1"
MEDIA_TYPE = "application/x-safetensors"
HEADER_BYTES = 4096  # room the header of what crosses the wire may take beside its arrays
FILE_HEADER_BYTES = 100_000_000  # that of a file of one's own: what the safetensors format itself allows
_LENGTH = 8  # bytes that hold the header's length

Arrays = dict[str, np.ndarray[Any, Any]]
Meta = str | int | float | list[int]

_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "U8": np.uint8, "I8": np.int8, "U16": np.uint16,
           "U32": np.uint32, "U64": np.uint64, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_}  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """What one message carries. `meta` says where it belongs, the device's figures, a method's own parameters."""

    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    meta: Mapping[str, Meta] = field(default_factory=dict)


def encode(payload: Payload, header_limit: int = HEADER_BYTES) -> bytes:
    """The payload's bytes; equal payloads give equal bytes. Raises PayloadError when the header is over its limit."""
    meta = json.dumps(dict(payload.meta), sort_keys=True, separators=(",", ":"), allow_nan=False)
    arrays = {name: np.ascontiguousarray(a) for name, a in payload.arrays.items()}
    data = save(arrays, {FORMAT: meta})
    size = _header_size(data)
    if size > header_limit:
        raise PayloadError(
            f"a payload of {len(arrays)} arrays needs a header of {size} bytes, at most {header_limit} are allowed; "
            "use fewer arrays and less metadata"
        )
    return data


def _header_size(data: bytes) -> int:
    """Bytes before the arrays, as the data's first eight claim."""
    return _LENGTH + int.from_bytes(data[:_LENGTH], "little")


def decode(data: bytes, header_limit: int = HEADER_BYTES) -> Payload:
    """Read a payload. Raises PayloadError for anything that `encode` could not have written."""
    end = _header_size(data)
    if end > header_limit:
        raise PayloadError(
            f"these {len(data)} bytes are not a maskfleet payload: they claim a header of {end} bytes, "
            f"at most {header_limit} are allowed"
        )
    try:
        header = json.loads(data[_LENGTH:end])
        said = header["__metadata__"]
        meta = json.loads(said[FORMAT]) if set(said) == {FORMAT} else None
        entries: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise PayloadError(f"these {len(data)} bytes are not a maskfleet payload: {error}") from None
    if not isinstance(meta, dict):
        raise PayloadError(f"the payload's metadata is not of format {FORMAT}; use a matching maskfleet version")
    if not all(isinstance(v, (str, int, float)) or _integers(v) for v in meta.values()):
        raise PayloadError("the payload's metadata holds something that is not a text, a number or a list of integers")
    arrays: Arrays = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise PayloadError(f"array {name!r} has dtype {entry['dtype']}, which payloads do not use")
        flat: np.ndarray[Any, Any] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
        try:
            arrays[name] = flat.reshape(entry["shape"])
        except (ValueError, OverflowError) as error:  # more dimensions, or larger ones, than an array can have
            raise PayloadError(f"array {name!r} has shape {entry['shape']!s:.60}: {error}") from None
    return Payload(arrays, meta)


def _integers(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)
