"""Bit sequences that numpy reads and writes a whole list at a time, and a byte reader.

A *bit sequence* is a bool array. On the wire, bit i is bit ``i % 8`` (least significant first) of byte ``i // 8``, and
the padding of the last byte is 0. A list of numbers does not interleave its parts: all unary parts come first, then
the binary parts, plane by plane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs.sets import CodecError

Bits = NDArray[np.bool_]
UInts = NDArray[np.unsignedinteger[Any]]

PADDING = "padding bits are set; the payload is damaged"
_TILE = 1 << 16  # bits searched at a time


def unary(values: UInts) -> Bits:
    """Each value v as v zeros and a one."""
    ends = np.cumsum(values, dtype=np.int64)
    ends += np.arange(len(values))
    bits = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.bool_)
    bits[ends] = True
    return bits


def read_unary(bits: Bits, count: int) -> tuple[NDArray[np.int64], int]:
    """The first `count` values of a sequence made by :func:`unary`, int64, and the number of bits they took."""
    ends = np.empty(count, np.int64)
    found = low = 0
    while found < count and low < len(bits):  # in tiles: hostile bits may hold many more ones than `count`
        more = np.flatnonzero(bits[low : low + _TILE])[: count - found]
        np.add(more, low, out=ends[found : found + len(more)])
        found += len(more)
        low += _TILE
    if found < count:
        raise CodecError(f"the payload ends within a list of {count} numbers; it is truncated or damaged")
    used = int(ends[-1]) + 1 if count else 0
    ends[1:] -= ends[:-1].copy() + 1
    return ends, used


def planes(values: UInts, widths: UInts) -> Bits:
    """The low `widths[i]` bits of each value: bit 0 of all values that have one, then bit 1, and so on."""
    out = []
    for j in range(int(widths.max(initial=0))):
        kept = values[widths > j]
        out.append(((kept >> kept.dtype.type(j)) & kept.dtype.type(1)).astype(np.bool_))
    return np.concatenate(out) if out else np.zeros(0, np.bool_)


def read_planes(bits: Bits, widths: UInts) -> tuple[NDArray[np.uint32], int]:
    """The values of a sequence made by :func:`planes`, uint32, and the bits they took. Widths are at most 32."""
    values = np.zeros(len(widths), np.uint32)
    used = 0
    for j in range(int(widths.max(initial=0))):
        kept = np.flatnonzero(widths > j)
        part = bits[used : used + len(kept)]
        if len(part) < len(kept):
            raise CodecError("the payload ends within a bit plane; it is truncated or damaged")
        values[kept] |= part.astype(np.uint32) << np.uint32(j)
        used += len(kept)
    return values, used


def gamma(values: UInts) -> Bits:
    """Values v >= 0 as split Elias-gamma numbers v + 1: all bit lengths less one in unary, then the low bits."""
    numbers = values.astype(np.uint32) + np.uint32(1)
    widths = bit_lengths(numbers) - np.uint8(1)
    return np.concatenate([unary(widths), planes(numbers, widths)])


def read_gamma(bits: Bits, count: int) -> tuple[NDArray[np.uint32], int]:
    """The first `count` values of a sequence made by :func:`gamma`, and the number of bits they took."""
    widths, used = read_unary(bits, count)
    if int(widths.max(initial=0)) > 31:
        raise CodecError("the payload holds a number of more than 32 bits; it is damaged")
    small = widths.astype(np.uint8)
    low, more = read_planes(bits[used:], small)
    return low + (np.uint32(1) << small.astype(np.uint32)) - np.uint32(1), used + more


def bit_lengths(values: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The bit length of each value, 0 for 0. Exact, since float64 holds every uint32."""
    return np.frexp(values.astype(np.float64))[1].astype(np.uint8)


def pack(bits: Bits) -> bytes:
    """A bit sequence as bytes."""
    return np.packbits(bits, bitorder="little").tobytes()


def varint(value: int) -> bytes:
    """LEB128: seven bits a byte, least significant first, the top bit set on all bytes but the last."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def framed(data: bytes) -> bytes:
    """The length of `data` as a varint, then `data`."""
    return varint(len(data)) + data


class Reader:
    """Reads a payload from front to back. Every overrun is a CodecError."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def framed(self) -> bytes:
        """The bytes that :func:`framed` wrote."""
        return self.bytes(self.varint()).tobytes()

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """The next `count` bytes, uint8, without copying."""
        if count > self.left:
            raise CodecError(f"the payload ends {count - self.left} bytes early; it is truncated or d is wrong")
        self._at += count
        return self._data[self._at - count : self._at]

    def floats(self, count: int) -> NDArray[np.float32]:
        """The next `count` numbers, float32."""
        return self.bytes(4 * count).view("<f4").astype(np.float32)

    def bits(self, count: int) -> Bits:
        """The next `count` bits. Skips the padding of their last byte, which must be 0."""
        found = np.unpackbits(self.bytes(-(-count // 8)), bitorder="little").view(np.bool_)
        if found[count:].any():
            raise CodecError(PADDING)
        return found[:count]

    def byte(self) -> int:
        """The next byte."""
        return int(self.bytes(1)[0])

    def varint(self) -> int:
        """A number written by :func:`varint`, below 2**35, in as few bytes as it needs."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if shift and not byte:
                    raise CodecError("a number in the payload is longer than necessary; the payload is damaged")
                return value
        raise CodecError("the payload holds a length of more than five bytes; it is damaged")

    def peek_bits(self, most: int) -> Bits:
        """Up to `most` of the next bits, without moving on; :meth:`skip_bits` moves past those that were used."""
        ahead = self._data[self._at : self._at + (most + 7) // 8]
        return np.unpackbits(ahead, bitorder="little").view(np.bool_)

    def skip_bits(self, bits: Bits, used: int) -> None:
        """Move past the bytes of the first `used` of the peeked `bits`. Their padding must be 0."""
        whole = (used + 7) // 8
        if bits[used : whole * 8].any():
            raise CodecError(PADDING)
        self._at += whole

    def end(self) -> None:
        """Raise CodecError unless the whole payload has been read."""
        if self.left:
            raise CodecError(f"{self.left} bytes follow the end of the payload; it is damaged or d is wrong")
