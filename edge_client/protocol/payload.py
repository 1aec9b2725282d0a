"""The payload container: named arrays and a few words about them, as one safetensors file.

A reader in any language opens it. Strict for the writer: equal payloads give equal bytes. Liberal for the reader: any
JSON that means a payload is read, however another language's writer orders, spaces or escapes it. Everything else is
refused with a PayloadError before an array is used. docs/protocol.md gives each rule with its reason.

A value of the metadata is written as the text of its JSON, because safetensors allows text there only. What the arrays
mean is the method's business. A header is short, because some updates are a few hundred bytes: nothing is written that
the URL, the lease or the digest already has.

On the wire a header has at most `HEADER_BYTES`; a larger one is refused before it is parsed. Files that a device or a
coordinator stores for itself have the same form and may have up to `FILE_HEADER_BYTES`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from edge_kernels.codecs import CodecError
from numpy.typing import NDArray

from edge_client.errors import PayloadError

MEDIA_TYPE = "application/x-safetensors"
HEADER_BYTES = 4096  # of a payload on the wire: few arrays, few words, nothing to fill a memory with
FILE_HEADER_BYTES = 100_000_000  # of a stored file: what the safetensors format itself allows
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48  # product of the dimensions that are not 0, so that no reader's product overflows
MAX_INTEGER = 2**53 - 1  # of either sign: what every JSON reader holds exactly
_LENGTH = 8  # bytes that hold the header's length
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

Arrays = dict[str, np.ndarray[Any, Any]]
Meta = str | int | float | list[int] | list[int | float]

_DTYPES: dict[object, np.dtype[Any]] = {
    name: np.dtype(f"<{code}")
    for name, code in {"F16": "f2", "F32": "f4", "F64": "f8", "U8": "u1", "I8": "i1", "U16": "u2", "U32": "u4",
                       "I32": "i4", "U64": "u8", "I64": "i8", "BOOL": "?"}.items()
}  # fmt: skip
_NAMES = {dtype: str(name) for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Payload:
    """What one message carries. `meta` holds an update's metrics and the method's own values.

    A number in `meta` is a number, as in JSON: 1.0 is written, and read, as 1.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    meta: Mapping[str, Meta] = field(default_factory=dict)


def vector(payload: Payload, name: str, size: int) -> NDArray[np.float32]:
    """The array `name`, finite float32[size]. Raises PayloadError."""
    found = payload.arrays.get(name)
    said = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
    if found is None or found.dtype != np.float32 or found.shape != (size,):
        raise PayloadError(f"array {name!r} is {said}; it must be {size} finite float32 values")
    if not np.isfinite(found).all():
        raise PayloadError(f"array {name!r} holds NaN or infinity; lower the learning rate")
    return found


def count(payload: Payload, name: str, most: int) -> int:
    """The integer 1..`most` in metadata `name`. Raises PayloadError."""
    value = payload.meta.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise PayloadError(f"metadata {name} = {value!r}; it must be an integer from 1 to {most}")
    return value


def allow_only(payload: Payload, *names: str) -> None:
    """Raise PayloadError for an array of another name."""
    if set(payload.arrays) - set(names):
        raise PayloadError(f"the payload holds arrays {sorted(payload.arrays)}; only {sorted(names)} are used here")


def bytes_of(payload: Payload, name: str) -> bytes:
    """The bytes of the array `name`, uint8[n]. Raises PayloadError."""
    data = payload.arrays.get(name)
    if data is None:
        raise PayloadError(f"array {name!r} is missing; the payload holds {sorted(payload.arrays)}")
    if data.dtype != np.uint8 or data.ndim != 1:
        raise PayloadError(f"array {name!r} is {data.dtype}{list(data.shape)}; a codec's bytes are uint8[n]")
    return data.tobytes()


def coded(payload: Payload, name: str, others: tuple[str, ...] = ()) -> bytes:
    """`bytes_of`; beside this array only `others` are allowed."""
    allow_only(payload, name, *others)
    return bytes_of(payload, name)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """A CodecError of the block as a PayloadError: `what` cannot be decoded, and the reason."""
    try:
        yield
    except CodecError as error:
        raise PayloadError(f"{what} cannot be decoded: {error}") from None


def u8(data: bytes) -> NDArray[np.uint8]:
    """A codec's bytes as a payload's array."""
    return np.frombuffer(data, np.uint8)


def encode(payload: Payload, header_limit: int = HEADER_BYTES) -> bytes:
    """The payload's bytes; equal payloads give equal bytes. Raises PayloadError for what no payload may hold."""
    arrays = {name: np.asarray(a, order="C") for name, a in payload.arrays.items()}
    header: dict[str, Any] = {}
    try:
        checked = _checked(dict(payload.meta))
        if checked:
            header[_METADATA] = {key: _dumped(checked[key]) for key in sorted(checked)}
        for name, a in arrays.items():
            _text(name)
            _shape(list(a.shape))
            if name == _METADATA or a.dtype not in _NAMES:
                raise ValueError(f"array {name!r} of {a.dtype} is not one that a payload can hold")
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"this payload cannot be written: {error}") from None
    names, end = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)), 0
    for name in names:
        a, begin, end = arrays[name], end, end + arrays[name].nbytes
        header[name] = {"dtype": _NAMES[a.dtype], "shape": list(a.shape), "data_offsets": [begin, end]}
    text = _dumped(header).encode()
    text += b" " * (-len(text) % max((a.itemsize for a in arrays.values()), default=1))  # aligns the arrays
    if _LENGTH + len(text) > header_limit:
        raise PayloadError(
            f"a payload of {len(arrays)} arrays needs a header of {_LENGTH + len(text)} bytes, at most {header_limit} "
            "are allowed; use fewer arrays and less metadata"
        )
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *(arrays[name].data for name in names)])


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def decode(data: bytes, header_limit: int = HEADER_BYTES) -> Payload:
    """Read a payload. Raises PayloadError for anything that `encode` or another conforming writer cannot write.

    The arrays are read-only views of `data`.
    """
    end = _header_size(data)
    if end > header_limit:
        raise PayloadError(
            f"these {len(data)} bytes are not a maskfleet payload: they claim a header of {end} bytes, "
            f"at most {header_limit} are allowed"
        )
    try:
        if not _LENGTH < end <= len(data) or data[_LENGTH] != ord("{"):
            raise ValueError("they do not begin with a header's length and a JSON object")
        header = _json(data[_LENGTH:end].decode())
        meta = _metadata(header.pop(_METADATA, {}))
        spans = [_span(name, entry) for name, entry in header.items()]
        return Payload(_arrays(data, end, spans), meta)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"these {len(data)} bytes are not a maskfleet payload: {error}") from None


def _header_size(data: bytes) -> int:
    """Bytes before the arrays, as the data's first eight claim."""
    return _LENGTH + int.from_bytes(data[:_LENGTH], "little")


# --- metadata


def _metadata(entry: object) -> dict[str, Meta]:
    """The metadata behind the header's `__metadata__`. Raises ValueError."""
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ValueError("the metadata is not an object of texts")
    return _checked({key: _json(value) for key, value in entry.items()})


def _checked(meta: Mapping[str, object]) -> dict[str, Meta]:
    """Metadata with every integral number as an int. Raises ValueError for what metadata may not hold."""
    found: dict[str, Meta] = {}
    for key, value in meta.items():
        _text(key)
        if isinstance(value, str):
            _text(value)
            found[key] = value
        elif isinstance(value, list):
            found[key] = [_number(item, key) for item in value]
        else:
            found[key] = _number(value, key)
    return found


def _number(value: object, key: str = "") -> int | float:
    """A finite number: an int where it is integral and every JSON reader holds it exactly. Raises ValueError."""
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() and abs(value) <= MAX_INTEGER else value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER:
        return value
    raise ValueError(f"metadata {key:.60} = {value!s:.60} is not a text, a finite number or a list of them")


def _text(value: object) -> None:
    """Raise ValueError for what is not Unicode text; half a surrogate pair is not."""
    if not isinstance(value, str):
        raise ValueError(f"{value!s:.60} is not a text")
    if not value.isascii():
        value.encode()


def _json(text: str) -> Any:
    """A JSON value with every key once; a NaN is left to those who check numbers. Raises ValueError."""
    return json.loads(text, object_pairs_hook=without_repeats)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads`. Raises ValueError for a key that is there twice.

    Readers differ in which of the two they take.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r:.60} is there twice")
    return found


# --- arrays

_Span = tuple[int, int, str, np.dtype[Any], list[int]]  # begin, end, name, dtype, shape


def _span(name: str, entry: object) -> _Span:
    """An array's place, from its entry in the header. Raises ValueError."""
    _text(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"array {name!r:.60} does not have dtype, shape and data_offsets alone")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(f"array {name!r:.60} has dtype {entry['dtype']!s:.60}, which payloads do not use")
    dtype, shape, offsets = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    size = _shape(shape) * dtype.itemsize
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ValueError(f"array {name!r:.60} takes {size} bytes, its data_offsets are {offsets!s:.60}")
    return offsets[0], offsets[1], name, dtype, shape


def _shape(shape: object) -> int:
    """The elements of an array of this shape. Raises ValueError."""
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
        raise ValueError(f"{shape!s:.60} is not a shape of at most {MAX_DIMENSIONS} dimensions and 2**48 elements")
    return math.prod(shape)


def _counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _arrays(data: bytes, start: int, spans: list[_Span]) -> Arrays:
    """Views of the arrays, by name; they tile `data` from `start` on. Raises ValueError."""
    at, out = 0, {}
    for begin, end, name, dtype, shape in sorted(spans, key=lambda s: s[:2]):
        if begin != at:
            raise ValueError(f"array {name!r:.60} begins at byte {begin!s:.60}, the one before it ends at {at}")
        if end > len(data) - start:
            raise ValueError(f"array {name!r:.60} ends at byte {end!s:.60} of {len(data) - start}")
        flat: np.ndarray[Any, Any] = np.frombuffer(data, np.uint8, end - begin, start + begin)
        if dtype == np.bool_ and flat.max(initial=0) > 1:
            raise ValueError(f"array {name!r:.60} is BOOL and holds a byte that is neither 0 nor 1")
        typed = flat.view(dtype)  # not aligned where a writer did not pad its header: numpy then needs a copy
        out[name] = (typed if typed.flags.aligned else flat.copy().view(dtype)).reshape(shape)
        at = end
    if at != len(data) - start:
        raise ValueError(f"the arrays end at byte {at} of {len(data) - start}")
    return out
