"""Codec `counts`: whole numbers 0 .. top at their entropy given a prediction, such as last round's counts. Lossless.

A value becomes its rank in the order p, p+1, p-1, p+2, ... modulo top + 1, where p is its prediction. The ranks 0, 1,
... are coded one after the other. Each is a set among the values not yet decided, written by `entropy` with the
prediction as context. By the chain rule the total is the conditional entropy. If most values equal their prediction,
the first set decides nearly everything. Ranks of 16 and more share a set per bit length and add raw low bits.

Bytes: segments of 2**20 values, the last one shorter. In a segment, each set is ``varint(length)`` and the `entropy`
payload; sets follow while any value is undecided and more than one class is possible. Then come the low bits of all
ranks of 16 and more, as bit planes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import entropy
from edge_kernels.codecs.sets import CodecError, Contexts, check_size, mask_of, positions_of
from edge_kernels.codecs.streams import PADDING, Reader, bit_lengths, framed, pack, planes

MAX_TOP = 2**31 - 2
_SEGMENT = 1 << 20  # values coded together; bounds the memory beside the result
_DIRECT = 16  # ranks with a class of their own
_WIDTH = 12  # class c >= 16 has c - 12 low bits
_LEVELS = 64  # the most contexts derived from predictions
_TILE = 1 << 16  # values assembled at a time

Counts = NDArray[np.unsignedinteger[Any]]


def encode(values: Counts, top: int, prediction: Counts | None = None) -> bytes:
    """Write unsigned values[d], all at most `top`.

    The reader needs the same `prediction`, of the same shape and range. The contexts are the prediction, coarsened to
    64 levels. Without a prediction the values are coded at their plain entropy.
    """
    _check(values, len(values), top, "values")
    guess, contexts = _given(prediction, len(values), top)
    return b"".join(_encode_segment(values[part], top, *_part(guess, contexts, part)) for part in segments(len(values)))


def segments(d: int) -> list[slice]:
    """The values that are coded together."""
    return [slice(low, min(low + _SEGMENT, d)) for low in range(0, d, _SEGMENT)]


def _part(guess: Counts, contexts: Contexts | None, part: slice) -> tuple[Counts, Contexts | None]:
    return (guess[part] if len(guess) > 1 else guess), (None if contexts is None else contexts[part])


def _encode_segment(values: Counts, top: int, guess: Counts, undecided: Contexts | None) -> bytes:
    ranks = _ranks(values, guess, top)
    classes = _classes(ranks)
    out = []
    low_bits = ranks[classes >= _DIRECT]
    for rank in range(_class_count(top) - 1):
        if not len(classes):
            break
        hit = classes == rank
        out.append(framed(entropy.encode(positions_of(hit), len(classes), undecided)))
        classes = classes[~hit]
        undecided = None if undecided is None else undecided[~hit]
    widths = bit_lengths(low_bits) - np.uint8(1) if len(low_bits) else np.zeros(0, np.uint8)
    return b"".join(out) + pack(planes(low_bits, widths))


def decode(data: bytes, d: int, top: int, prediction: Counts | None = None) -> Counts:
    """The values[d] of a payload, in the smallest unsigned dtype that holds `top`. Raises CodecError."""
    check_size(d)
    guess, contexts = _given(prediction, d, top)
    reader = Reader(data)
    out: Counts = np.empty(d, dtype_for(top))
    for part in segments(d):
        _decode_segment(reader, out[part], top, *_part(guess, contexts, part))
    reader.end()
    return out


def _decode_segment(reader: Reader, out: Counts, top: int, guess: Counts, contexts: Contexts | None) -> None:
    """Fill the segment `out`."""
    classes = _read_classes(reader, len(out), _class_count(top) - 1, contexts)
    planes_at, low_bits = _read_low_bits(reader, classes)
    for low in range(0, len(out), _TILE):
        ranks = classes[low : low + _TILE].astype(np.uint32)
        big = np.flatnonzero(ranks >= _DIRECT)
        widths = ranks[big] - np.uint32(_WIDTH)
        numbers = np.uint32(1) << widths
        for j in range(len(planes_at)):
            kept = np.flatnonzero(widths > j)
            numbers[kept] |= low_bits(planes_at[j], len(kept)).astype(np.uint32) << np.uint32(j)
            planes_at[j] += len(kept)
        ranks[big] = numbers
        if int(ranks.max()) > top:
            raise CodecError(f"rank {int(ranks.max())} is above {top}; the payload is damaged or top is wrong")
        out[low : low + _TILE] = _values(ranks, guess[low : low + _TILE] if len(guess) > 1 else guess, top)


def _read_classes(reader: Reader, d: int, last: int, contexts: Contexts | None) -> NDArray[np.uint8]:
    """The class of every value, at most `last`, from one set for each class below it. Uses masks only, for memory."""
    classes = np.full(d, last, np.uint8)
    undecided = np.ones(d, np.bool_)
    left = d
    for rank in range(last):
        if not left:
            break
        decided = mask_of(entropy.decode(reader.framed(), left, contexts), left)
        classes[undecided] = np.where(decided, np.uint8(rank), np.uint8(last))
        np.logical_not(decided, out=decided)
        undecided[undecided] = decided
        contexts = None if contexts is None else contexts[decided]
        left = int(np.count_nonzero(decided))
    return classes


def _read_low_bits(
    reader: Reader, classes: NDArray[np.uint8]
) -> tuple[list[int], Callable[[int, int], NDArray[np.bool_]]]:
    """The first bit of each plane of low bits, and a function that reads ``(start, count)`` bits."""
    of_class = np.zeros(256, np.int64)
    for low in range(0, len(classes), _TILE):  # in tiles: bincount copies to int64
        of_class += np.bincount(classes[low : low + _TILE], minlength=256)
    widest = max(int(np.flatnonzero(of_class).max(initial=0)) - _WIDTH, 0)
    counts = [int(of_class[max(_WIDTH + j + 1, _DIRECT) :].sum()) for j in range(widest)]
    total = sum(counts)
    raw = reader.bytes((total + 7) // 8)
    if total % 8 and raw[-1] >> (total % 8):
        raise CodecError(PADDING)

    def bits(start: int, count: int) -> NDArray[np.bool_]:
        some = np.unpackbits(raw[start // 8 : (start + count + 7) // 8], bitorder="little")
        return some[start % 8 : start % 8 + count].view(np.bool_)

    return [sum(counts[:j]) for j in range(widest)], bits


def dtype_for(top: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest unsigned dtype that holds `top`."""
    return np.dtype(np.min_scalar_type(top))


def _given(prediction: Counts | None, d: int, top: int) -> tuple[Counts, Contexts | None]:
    """Prediction and contexts as both sides use them; without a prediction a single 0, and no contexts."""
    if not 0 <= top <= MAX_TOP:
        raise CodecError(f"top = {top} is outside 0 .. {MAX_TOP}")
    if prediction is None:
        return np.zeros(1, dtype_for(top)), None
    _check(prediction, d, top, "the prediction")
    contexts = np.empty(d, np.uint8)
    for low in range(0, d, _TILE):
        part = prediction[low : low + _TILE]
        contexts[low : low + _TILE] = part.astype(np.uint64) * _LEVELS // (top + 1) if top >= _LEVELS else part
    return prediction, contexts


def _check(values: NDArray[Any], d: int, top: int, what: str) -> None:
    if values.shape != (d,) or values.dtype.kind != "u" or int(values.max(initial=0)) > top:
        raise CodecError(f"{what} must be unsigned integers of shape ({d},), all at most {top}")


def _ranks(values: Counts, guess: Counts, top: int) -> NDArray[np.uint32]:
    """The rank of every value in the order p, p+1, p-1, p+2, ... modulo top + 1."""
    ahead = values.astype(np.uint32)
    ahead += np.uint32(top + 1)
    ahead -= guess.astype(np.uint32)
    ahead %= np.uint32(top + 1)  # the distance above the prediction, modulo top + 1
    half = np.uint32((top + 1) // 2)
    return np.where(ahead <= half, np.maximum(2 * ahead, 1) - 1, 2 * (np.uint32(top + 1) - ahead)).astype(np.uint32)


def _values(ranks: NDArray[np.uint32], guess: Counts, top: int) -> Counts:
    """The inverse of :func:`_ranks`."""
    step = (ranks + np.uint32(1)) >> np.uint32(1)
    down = (ranks & np.uint32(1) == 0) & (ranks > 0)
    step[down] = np.uint32(top + 1) - step[down]
    step += guess.astype(np.uint32)
    step %= np.uint32(top + 1)
    values: Counts = step.astype(dtype_for(top))
    return values


def _classes(ranks: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The class of every rank: the rank itself below 16, then one class per bit length."""
    return np.where(ranks < _DIRECT, ranks, bit_lengths(ranks) + np.uint32(_DIRECT - 5)).astype(np.uint8)


def _class_count(top: int) -> int:
    return int(_classes(np.array([top], np.uint32))[0]) + 1
