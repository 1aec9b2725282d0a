"""Codec `fuse8-png`: an 8-bit fuse filter as a grayscale PNG, the payload of the DeltaMask paper.

The pixels, row by row, are the bytes of the `fuse8` payload and zeros up to a full rectangle; the width is the least
w with w * w >= their number. Written as signature, IHDR (8 bits, gray, no interlace), one IDAT of zlib data with
filter 0 before every row, IEND. A reader accepts several IDATs and any deflate stream, nothing else that differs.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from edge_kernels.codecs import fuse
from edge_kernels.codecs.sets import CodecError, Positions, check_size

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LEVEL = 9
_PIECE = 1 << 16  # bytes inflated at a time


def encode(positions: Positions, d: int) -> bytes:
    """The set's `fuse8` filter as a PNG file."""
    return encode_filter(fuse.encode(positions, d, 8))


def encode_filter(data: bytes) -> bytes:
    """A serialised filter as a PNG file."""
    body = np.frombuffer(data, np.uint8)
    width, height = _shape(len(body))
    rows = np.zeros((height, width + 1), np.uint8)  # column 0: filter type 0
    pixels = np.zeros(height * width, np.uint8)
    pixels[: len(body)] = body
    rows[:, 1:] = pixels.reshape(height, width)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _LEVEL)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def decode(data: bytes, d: int) -> Positions:
    """All positions that the image's filter holds, false positives included. Raises CodecError."""
    check_size(d)
    return fuse.decode(filter_bytes(data, d), d, 8)


def filter_bytes(data: bytes, d: int) -> memoryview:
    """The serialised filter in a PNG file of positions below `d`. Raises CodecError.

    The filter's own header is checked before the rest is inflated, and no more than it calls for ever is.
    """
    most = fuse.HEADER.size + fuse.most_cells(d)
    if len(data) > most + most // 64 + 1024:  # deflate and the chunks add less
        raise CodecError(f"{len(data)} bytes are more than a PNG image of a filter of {d} positions takes; is d right?")
    if data[:8] != _SIGNATURE:
        raise CodecError("the payload is not a PNG file")
    width, height = _dimensions(data)
    if not height or not 0 <= width - height <= 1 or width * (height - 1) >= most:
        raise CodecError(f"a PNG image of {width} x {height} pixels is not one of a filter of {d} positions")
    pieces = _inflated(part for kind, part in _chunks(data) if kind == b"IDAT")
    begun = bytearray()
    for piece in pieces:
        begun += piece
        if len(begun) >= height + fuse.HEADER.size:
            break
    where = [i + i // width + 1 for i in range(fuse.HEADER.size)]  # every row begins with the type of its filter
    if len(begun) <= where[-1]:
        raise CodecError("the PNG image does not inflate to a filter's header; it is damaged")
    used = fuse.HEADER.size + fuse.fields(bytes(begun[i] for i in where), d)[-1]
    if (width, height) != _shape(used):
        raise CodecError(f"the filter's {used} bytes do not fill the PNG image's {width} x {height} pixels")
    raw = np.empty(height * (width + 1), np.uint8)
    end = 0
    for piece in itertools.chain([bytes(begun)], pieces):
        if end + len(piece) > len(raw):
            raise CodecError(f"the PNG image does not inflate to its {height} rows; it is damaged")
        raw[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
        end += len(piece)
    if end < len(raw):
        raise CodecError(f"the PNG image does not inflate to its {height} rows; it is damaged")
    if raw[:: width + 1].any():
        raise CodecError("the PNG image uses row filters; only filter 0 is read")
    for row in range(height):  # in place, as a copy would double the memory
        raw[row * width : (row + 1) * width] = raw[row * (width + 1) + 1 : (row + 1) * (width + 1)]
    if raw[used : height * width].any():
        raise CodecError("the PNG image's last row does not end in zeros; it is damaged")
    return raw.data[:used]


def _shape(count: int) -> tuple[int, int]:
    """Width and height of the image of so many bytes."""
    width = math.isqrt(count - 1) + 1
    return width, -(-count // width)


def _dimensions(data: bytes) -> tuple[int, int]:
    """Width and height in the first chunk of a file whose chunks, all checked, are IHDR, IDATs and IEND."""
    last = b""
    width = height = 0
    for index, (kind, body) in enumerate(_chunks(data)):
        if (kind == b"IHDR") != (index == 0) or last == b"IEND":
            raise CodecError("the PNG file does not run from IHDR to IEND")
        if kind == b"IHDR" and len(body) == 13:
            width, height, *mode = struct.unpack(">IIBBBBB", body)
            if mode != [8, 0, 0, 0, 0]:
                raise CodecError("the PNG image is not 8-bit gray without interlacing")
        elif kind not in (b"IDAT", b"IEND") or (kind == b"IEND" and len(body)):
            raise CodecError("the PNG file has chunks besides IHDR, IDAT and an empty IEND; only plain images are read")
        last = kind
    if last != b"IEND":
        raise CodecError("the PNG file does not run from IHDR to IEND")
    return width, height


def _inflated(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """The zlib stream of the IDATs, inflated a piece at a time. Raises CodecError where it is not one whole stream."""
    inflater = zlib.decompressobj()
    for part in parts:
        for low in range(0, len(part), _PIECE):
            rest: bytes | memoryview = part[low : low + _PIECE]
            while not inflater.eof:
                try:
                    piece = inflater.decompress(rest, _PIECE)
                except zlib.error as error:
                    raise CodecError(f"the PNG image does not inflate: {error}") from None
                yield piece
                rest = inflater.unconsumed_tail
                if not rest and len(piece) < _PIECE:
                    break
            else:
                if len(rest):
                    raise CodecError("the PNG image does not inflate: bytes follow its stream")
    if not inflater.eof or inflater.unused_data:
        raise CodecError("the PNG image does not inflate: its stream is cut or bytes follow it")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """(type, data) of every chunk, its checksum verified, nothing copied. Raises CodecError."""
    view = memoryview(data)
    at = 8
    while at < len(data):
        if len(data) - at < 12:
            raise CodecError("the PNG file ends within a chunk; it is truncated")
        length = int.from_bytes(view[at : at + 4], "big")
        if length > len(data) - at - 12:
            raise CodecError("a PNG chunk runs past the end of the file; it is truncated or damaged")
        kind, body = data[at + 4 : at + 8], view[at + 8 : at + 8 + length]
        if zlib.crc32(body, zlib.crc32(kind)) != int.from_bytes(view[at + 8 + length : at + 12 + length], "big"):
            raise CodecError("a PNG chunk's checksum is wrong; the file is damaged")
        yield kind, body
        at += 12 + length
