"""Whole numbers near zero at a few bits each: the entropy coder of Lattice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import CodecError, counts, entropy
from edge_kernels.codecs.sets import positions_of
from edge_kernels.codecs.streams import Reader, varint

U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
Span = tuple[slice, int, int]
"""A tensor's place in the flat vector, its rows and its columns. The spans of a vector lie end to end."""


@dataclass(frozen=True)
class Known:
    """What both sides know of values int32[d]."""

    spans: Sequence[Span]
    fall: U32 | None
    rise: U32 | None
    held: I32 | None


def up(dither: U32, spans: Sequence[Span], held: I32) -> Known:
    """For a device's numbers ``floor(a + dither / 2**32)``; `held` int32[d] is the model's vector N."""
    return Known(spans, dither, ~dither, held)


def down(fall: U32, rise: U32, spans: Sequence[Span], held: I32) -> Known:
    """For a change of N: the least dither and the least ``~dither`` over the streams of the missed rounds."""
    return Known(spans, fall, rise, held)


def whole(spans: Sequence[Span]) -> Known:
    """For N itself, sent to a device that holds nothing."""
    return Known(spans, None, None, None)


def encode(values: I32, known: Known) -> bytes:
    """The values as bytes."""
    contexts = _contexts(known)
    mask = values != 0
    body = entropy.encode(positions_of(mask), len(values), contexts)
    rest = values[mask].astype(np.int64)
    zigzag = np.where(rest > 0, 2 * rest - 2, -2 * rest - 1).astype(np.uint32)
    top = int(zigzag.max(initial=1))
    return varint(len(body)) + body + varint(top) + counts.encode(zigzag, top)


def decode(data: bytes, known: Known) -> I32:
    """The values of :func:`encode` with what the writer knew. Raises CodecError."""
    contexts = _contexts(known)
    reader = Reader(data)
    body = reader.bytes(reader.varint()).tobytes()
    positions = entropy.decode(body, len(contexts), contexts)
    top = reader.varint()
    zigzag = counts.decode(reader.bytes(reader.left).tobytes(), len(positions), top).astype(np.int64)
    out = np.zeros(len(contexts), np.int32)
    out[positions] = np.where(zigzag % 2, -(zigzag + 1) // 2, zigzag // 2 + 1)
    return out


def _contexts(known: Known) -> NDArray[np.uint8]:
    d = sum(where.stop - where.start for where, _, _ in known.spans)
    if known.fall is None or known.rise is None:
        return np.zeros(d, np.uint8)
    if len(known.fall) != d or len(known.rise) != d:
        raise CodecError("the dither does not cover the spans")
    near = np.minimum(known.fall, known.rise)
    return (near.astype(np.float32).view(np.uint32) >> np.uint32(22)).astype(np.uint8)
