"""The header of a coded array, as fields for `maskfleet payload inspect`. The rest of the payload is not decoded.

Fields that depend on d, such as the expected false positives, need d. The size of a set that was coded with contexts
cannot be read without the contexts. For any bytes, :func:`describe` returns a description or raises `CodecError`, in
memory bounded by the length of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from edge_kernels import bits as bitset
from edge_kernels.codecs import auto, bits, bloom, classes, counts, entropy, fuse, klms, png, rice
from edge_kernels.codecs.sets import MAX_D, CodecError, check_size, popcount
from edge_kernels.codecs.streams import Reader

Description = dict[str, str | int | float]
_KEYS_A_BYTE = 8  # an upper limit for the image of a filter: fingerprints hardly compress
_SHOWN = 12  # the most lengths that are listed


def describe(codec: str, data: bytes, d: int | None = None) -> Description:
    """The fields of the header of `data`, bytes of `codec`. Raises CodecError.

    `members` is the size of the coded set, if the header has it. The other fields depend on the codec.
    """
    codec = codec.partition(":")[0]
    if codec not in _READERS:
        raise CodecError(f"there is no codec {codec!r}; the codecs are {', '.join(_READERS)}")
    check_size(0 if d is None else d)
    return _READERS[codec](data, d)


def names() -> list[str]:
    """The codecs that :func:`describe` accepts: set codecs, and codecs of methods."""
    return list(_READERS)


# --- sets


def _bits(data: bytes, d: int | None) -> Description:
    count = 8 * len(data) if d is None else d
    return {"members": popcount(bits.packed(data, count)), "positions": count}


def _rice(data: bytes, d: int | None) -> Description:
    log, count, inverted = rice.read_head(Reader(data))
    if count > 8 * len(data) or (d is not None and count > d // 2):
        raise CodecError(f"{count} positions are more than this rice payload can list; it is damaged or d is wrong")
    found: Description = {"block": 1 << log, "blocks": -(-count >> log)}
    if not inverted:
        return {"members": count, **found}
    found = {"listed": f"the {count} that are not in the set", **found}
    return found if d is None else {"members": d - count, **found}


def _entropy(data: bytes, d: int | None) -> Description:
    reader = Reader(data)
    mode = classes.read_mode(reader)
    if mode != classes.UNCODED:
        own = "each with a rate of its own"
        return {"contexts": f"{1 << mode} neighbours merged, {own}" if mode else own}
    found: Description = {"contexts": "none"}
    if d is None:
        return found
    if len(data) > entropy.size_limit(d, 0):
        raise CodecError(f"{len(data)} bytes are more than entropy needs for any set out of {d}; is d right?")
    flips, _ = classes.read_counts(reader.peek_bits(256), np.array([d] if d else [], np.int64))
    return {"members": int(flips.sum()), **found}


def _auto(data: bytes, d: int | None) -> Description:
    inner = auto.codec_of(data)
    return {"inner_codec": inner, **describe(inner, data[1:], d)}


def _fuse(data: bytes | memoryview, d: int | None, width: int) -> Description:
    read = fuse.parse(bytes(data), MAX_D if d is None else d, width)
    found: Description = {
        "members": read.size,
        "seed": f"{read.seed:016x}",
        "segment_length": read.segment_length,
        "segments": read.segments,
        "cells": len(read.fingerprints),
        "fingerprint_bits": width,
        "false_positive_rate": 2.0**-width,
    }
    return found if d is None else {**found, "expected_false_positives": round((d - read.size) * 2.0**-width, 2)}


def _png(data: bytes, d: int | None) -> Description:
    keys = min(_KEYS_A_BYTE * len(data), MAX_D) if d is None else d
    width, height = png.dimensions(data)
    return {**_fuse(png.filter_bytes(data, keys), d, 8), "width": width, "height": height}


def _bloom(data: bytes, d: int | None) -> Description:
    read = bloom.parse(data)
    if d is not None and read.size > d:
        raise CodecError(f"{read.size} positions are more than {d}; the payload is damaged or d is wrong")
    rate = (popcount(read.packed) / max(read.cells, 1)) ** read.hashes
    found: Description = {"members": read.size, "hashes": read.hashes, "cells": read.cells, "false_positive_rate": rate}
    return found if d is None else {**found, "expected_false_positives": round((d - read.size) * rate, 2)}


# --- counts, samples, bit planes


def _counts(data: bytes, d: int | None) -> Description:
    """The first set of the first segment: the values that equal their prediction, which is 0 if there was none."""
    segments = [] if d is None else counts.segments(d)
    found: Description = {} if d is None else {"values": d, "segments": len(segments)}
    if not data:  # no counts, or top = 0
        return found
    if d == 0:
        raise CodecError(f"a payload of 0 counts has no bytes, not {len(data)}; is d right?")
    reader = Reader(data)
    first = _entropy(reader.framed(), segments[0].stop if segments else None)
    if "members" in first:
        found["as_predicted"] = first.pop("members")
        if len(segments) > 1:
            found["as_predicted"] = f"{found['as_predicted']} of the first {segments[0].stop}"
    return {**found, **first}


def _klms(data: bytes, d: int | None) -> Description:
    if d is not None:
        klms.check_blocks(len(data), d)
    return {"blocks": len(data)}


def _planes(data: bytes, d: int | None) -> Description:
    """Bit planes of d integers, least significant first."""
    if d is None:
        return {"bytes": len(data)}
    size = bitset.size(d)
    if not size or len(data) % size or not 1 <= len(data) // size <= 32:
        raise CodecError(f"1 to 32 planes of {d} bits take {size} bytes each, not {len(data)} in all; is d right?")
    ones = [popcount(bits.packed(data[low : low + size], d)) for low in range(0, len(data), size)]
    total = sum(count << plane for plane, count in enumerate(ones))
    return {"values": d, "planes": len(ones), "greatest_possible": (1 << len(ones)) - 1, "mean": total / d}


# --- coupled masks


def _coupled(data: bytes, d: int | None) -> Description:
    """A device's flips: the checksum of its mask, and a set."""
    if len(data) < 4:
        raise CodecError(f"coupled flips begin with a checksum of 4 bytes; the payload has {len(data)}")
    return {**_modelled(data[4:], d), "checksum": f"{int.from_bytes(data[:4], 'little'):08x}"}


def _modelled(data: bytes, d: int | None) -> Description:
    """A set under a model, whose bins are the contexts; the size can be read only if there is no model."""
    if not data or data[0] > 1:
        raise CodecError("the first byte of a set is 0 (no model) or 1; the payload is damaged")
    return {"model": "fitted"} if data[0] else {**_entropy(data[1:], d), "model": "none"}


def _net(data: bytes, d: int | None) -> Description:
    """A cohort's net flips: sets of where they are not 0, of their signs, and of their sizes beyond 1."""
    count = data[4] if len(data) > 4 else 0
    low = 5 + 4 * count
    if count < 2 or len(data) < low:
        raise CodecError(f"net flips have at least 2 parts, not {count}; the payload is damaged")
    lengths = np.frombuffer(data, "<u4", count, 5).astype(np.int64)
    if low + int(lengths.sum()) != len(data):
        raise CodecError(f"the parts of the net flips end at byte {low + int(lengths.sum())} of {len(data)}")
    shown = ", ".join(str(n) for n in lengths[:_SHOWN].tolist()) + (", ..." if count > _SHOWN else "")
    where = _modelled(data[low : low + int(lengths[0])], d)
    return {**where, "parts": count, "bytes_of_parts": shown, "checksum": f"{int.from_bytes(data[:4], 'little'):08x}"}


_READERS: Mapping[str, Callable[[bytes, int | None], Description]] = {
    "bits": _bits,
    "rice": _rice,
    "entropy": _entropy,
    "auto": _auto,
    **{f"fuse{width}": partial(_fuse, width=width) for width in (8, 16, 32)},
    "fuse8-png": _png,
    "bloom": _bloom,
    "counts": _counts,
    "klms": _klms,
    "planes": _planes,
    "coupled": _coupled,
    "coupled-net": _net,
}
