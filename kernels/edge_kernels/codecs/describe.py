"""What a coded array says of itself: the fields of its header, in words, without decoding what follows.

For people who look at a payload; no method and no decoder calls it. Fields that only a reader who knows d can tell
(members coded relative to d, expected false positives) are there when d is given. How many members a set coded with
contexts has, nobody can tell without the contexts. Headers are read by the codecs' own functions where they have
one; whatever the bytes, the answer is a description or a `CodecError`, in memory bounded by the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from edge_kernels import bits as bitset
from edge_kernels.codecs import auto, bits, classes, counts, entropy, fuse, klms, png
from edge_kernels.codecs.sets import MAX_D, CodecError, check_size, popcount
from edge_kernels.codecs.streams import Reader

Description = dict[str, str | int | float]
_KEYS_A_BYTE = 8  # an image of a filter has fewer keys: its fingerprints hardly deflate
_SHOWN = 12  # lengths that are listed


def describe(codec: str, data: bytes, d: int | None = None) -> Description:
    """The fields of the header of `data`, bytes of `codec`. Raises CodecError.

    `members` is the size of the coded set wherever the header tells it; other fields are the codec's own.
    """
    if codec not in _READERS:
        raise CodecError(f"no codec is called {codec!r}; there are {', '.join(_READERS)}")
    check_size(0 if d is None else d)
    return _READERS[codec](data, d)


def names() -> list[str]:
    """The codecs that are described: those of sets, and those of methods."""
    return list(_READERS)


# --- sets


def _bits(data: bytes, d: int | None) -> Description:
    count = 8 * len(data) if d is None else d
    return {"members": popcount(bits.packed(data, count)), "positions": count}


def _rice(data: bytes, d: int | None) -> Description:
    """Walks from block to block; positions are not made."""
    reader = Reader(data)
    flags, count = reader.byte(), reader.varint()
    log, inverted = flags & 31, bool(flags & 128)
    if flags & 96 or not 8 <= log <= 16 or count > 8 * len(data):
        raise CodecError(f"({flags}, {count}) do not begin a rice payload; is this another codec's?")
    found: Description = {"block": 1 << log, "blocks": -(-count >> log)}
    parameters = []
    for low in range(0, count, 1 << log):
        parameters.append(_rice_block(reader, min(1 << log, count - low)))
    reader.end()
    if parameters:
        found |= {"least_parameter": min(parameters), "greatest_parameter": max(parameters)}
    if d is not None and count > d // 2:
        raise CodecError(f"{count} of {d} positions are more than rice lists; is d right?")
    if inverted:
        found = {"listed": f"the {count} that are not in the set", **found}
        return found if d is None else {"members": d - count, **found}
    return {"members": count, **found}


def _rice_block(reader: Reader, gaps: int) -> int:
    """Passes a block and returns its Golomb parameter."""
    parameter, length = reader.byte(), reader.varint()
    k, thirds = parameter & 31, bool(parameter & 32)
    if parameter & 192 or not gaps <= length <= 8 * reader.left:
        raise CodecError(f"({parameter}, {length}) do not begin a rice block; the payload is damaged")
    ahead = reader.peek_bits(length + (k + 2) * gaps)
    used = length + (k + thirds) * gaps
    if thirds:
        used += int(np.count_nonzero(ahead[used - gaps : used]))
    reader.skip_bits(ahead, used)
    return (3 if thirds else 1) << k


def _entropy(data: bytes, d: int | None) -> Description:
    reader = Reader(data)
    mode = reader.byte()
    if mode != classes.UNCODED:
        if (mode & ~classes.MAPPED) not in classes.SHIFTS:
            raise CodecError(f"{mode} is no first byte of an entropy payload; is this another codec's?")
        merged = 1 << mode % classes.MAPPED
        listed = "put into listed classes" if mode & classes.MAPPED else "each with a rate of its own"
        return {"contexts": listed if merged == 1 else f"{merged} neighbours made one, {listed}"}
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
    """Inflates no more pixels than the filter's own header calls for."""
    keys = min(_KEYS_A_BYTE * len(data), MAX_D) if d is None else d
    found = _fuse(png.filter_bytes(data, keys), d, 8)
    width, height = struct.unpack_from(">II", data, 16)  # the file is checked: IHDR's body lies there
    return {**found, "width": width, "height": height}


# --- counts, samples, bit planes


def _counts(data: bytes, d: int | None) -> Description:
    """The first set of the first segment: which values are just what was predicted, 0 without a prediction."""
    segments = [] if d is None else counts._segments(d)
    found: Description = {} if d is None else {"values": d, "segments": len(segments)}
    if not data:  # no counts, or none that could be anything but 0
        return found
    if d == 0:
        raise CodecError(f"{len(data)} bytes are no payload of no counts; is d right?")
    reader = Reader(data)
    first = _entropy(reader.bytes(reader.varint()).tobytes(), segments[0].stop if segments else None)
    if "members" in first:
        found["as_predicted"] = first.pop("members")
        if len(segments) > 1:
            found["as_predicted"] = f"{found['as_predicted']} of the first {segments[0].stop}"
    return {**found, **first}


def _klms(data: bytes, d: int | None) -> Description:
    reader = Reader(data)
    log, least, _, count = reader.byte(), reader.byte(), reader.byte(), reader.varint()
    if not klms.MIN_UNIT <= log <= klms.MAX_UNIT or not klms.MIN_BITS <= least <= klms.MAX_BITS:
        raise CodecError(f"({log}, {least}) are no first bytes of a klms payload; is this another codec's?")
    if count * least > 8 * reader.left or (d is not None and not min(d, 1) <= count <= -(-d >> log)):
        raise CodecError(f"{count} blocks do not fit {reader.left} bytes, or d; the payload is damaged or d is wrong")
    found: Description = {"blocks": count, "unit": 1 << log, "least_index_bits": least}
    return {**found, "mean_block": d / count} if d and count else found


def _planes(data: bytes, d: int | None) -> Description:
    """FedMask's shares in steps: bit planes of d integers, least significant first."""
    if d is None:
        return {"bytes": len(data)}
    size = bitset.size(d)
    if not size or len(data) % size or not 1 <= len(data) // size <= 32:
        raise CodecError(f"1 to 32 planes of {d} bits take {size} bytes each, and there are {len(data)}; is d right?")
    ones = [popcount(bits.packed(data[low : low + size], d)) for low in range(0, len(data), size)]
    total = sum(count << plane for plane, count in enumerate(ones))
    return {"values": d, "planes": len(ones), "greatest_possible": (1 << len(ones)) - 1, "mean": total / d}


# --- coupled masks


def _coupled(data: bytes, d: int | None) -> Description:
    """A device's flips: the checksum of the mask they make, and a set."""
    if len(data) < 4:
        raise CodecError(f"coupled flips begin with a checksum of 4 bytes, not {len(data)}")
    return {**_modelled(data[4:], d), "checksum": f"{int.from_bytes(data[:4], 'little'):08x}"}


def _modelled(data: bytes, d: int | None) -> Description:
    """A set under a model, whose bins are contexts that only both sides can make; without a model the size is told."""
    if not data or data[0] > 1:
        raise CodecError("a set begins with 0 (no model) or 1; the payload is damaged")
    return {"model": "fitted"} if data[0] else {**_entropy(data[1:], d), "model": "none"}


def _net(data: bytes, d: int | None) -> Description:
    """A cohort's net flips: where there are any, which way, and how many more than one, each a set."""
    count = data[4] if len(data) > 4 else 0
    low = 5 + 4 * count
    if count < 2 or len(data) < low:
        raise CodecError(f"net flips come in 2 parts or more, not {count}; is this payload whole?")
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
    "counts": _counts,
    "klms": _klms,
    "planes": _planes,
    "coupled": _coupled,
    "coupled-net": _net,
}
