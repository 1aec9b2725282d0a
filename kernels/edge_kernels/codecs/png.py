"""Codec `fuse8-png`: an 8-bit fuse filter as a grayscale PNG, the payload of the DeltaMask paper.

The pixels, row by row, are the bytes of the `fuse8` payload and zeros up to a full rectangle; the width is the least
w with w * w >= their number. Written as signature, IHDR (8 bits, gray, no interlace), one IDAT of zlib data with
filter 0 before every row, IEND. A reader accepts several IDATs, nothing else that differs.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

from edge_kernels.codecs import fuse
from edge_kernels.codecs.sets import CodecError, Positions, check_size

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LEVEL = 9


def encode(positions: Positions, d: int) -> bytes:
    """The set's `fuse8` filter as a PNG file."""
    return encode_filter(fuse.encode(positions, d, 8))


def encode_filter(data: bytes) -> bytes:
    """A serialised filter as a PNG file."""
    body = np.frombuffer(data, np.uint8)
    width = math.isqrt(len(body) - 1) + 1
    height = -(-len(body) // width)
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


def filter_bytes(data: bytes, d: int) -> bytes:
    """The serialised filter in a PNG file; inflates no more than a filter of d keys can have. Raises CodecError."""
    if data[:8] != _SIGNATURE:
        raise CodecError("the payload is not a PNG file")
    chunks = _chunks(data)
    if not chunks or chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13 or chunks[-1] != (b"IEND", b""):
        raise CodecError("the PNG file does not run from IHDR to IEND")
    if any(kind != b"IDAT" for kind, _ in chunks[1:-1]):
        raise CodecError("the PNG file has chunks besides IDAT; only plain gray images are read")
    width, height, *mode = struct.unpack(">IIBBBBB", chunks[0][1])
    if mode != [8, 0, 0, 0, 0]:
        raise CodecError("the PNG image is not 8-bit gray without interlacing")
    most = fuse.HEADER.size + 64 + 8 * d
    if not width or not height or not (width - 1) * (height - 1) < width * (height - 1) + 1 <= most:
        raise CodecError(f"a PNG image of {width} x {height} pixels is not one of a filter of {d} positions")
    if width > 2 * math.isqrt(most) + 2:
        raise CodecError(f"a PNG image {width} pixels wide is too wide for {d} positions")
    size = height * (width + 1)
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(b"".join(part for _, part in chunks[1:-1]), size + 1)
    except zlib.error as error:
        raise CodecError(f"the PNG image does not inflate: {error}") from None
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        raise CodecError(f"the PNG image does not inflate to its {height} rows; it is damaged")
    rows = np.frombuffer(raw, np.uint8).reshape(height, width + 1)
    if rows[:, 0].any():
        raise CodecError("the PNG image uses row filters; only filter 0 is read")
    pixels = rows[:, 1:].tobytes()
    if len(pixels) < fuse.HEADER.size:
        raise CodecError("the PNG image is too small for a filter's header")
    used = fuse.HEADER.size + int(fuse.HEADER.unpack_from(pixels)[-1])
    if not len(pixels) - width < used <= len(pixels) or any(pixels[used:]):
        raise CodecError(f"the filter's {used} bytes do not fill the PNG image's {len(pixels)} pixels")
    return pixels[:used]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """(type, data) of every chunk, checksums verified. Raises CodecError."""
    out = []
    at = 8
    while at < len(data):
        if len(data) - at < 12:
            raise CodecError("the PNG file ends within a chunk; it is truncated")
        length = int.from_bytes(data[at : at + 4], "big")
        if length > len(data) - at - 12:
            raise CodecError("a PNG chunk runs past the end of the file; it is truncated or damaged")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if zlib.crc32(kind + body) != int.from_bytes(data[at + 8 + length : at + 12 + length], "big"):
            raise CodecError("a PNG chunk's checksum is wrong; the file is damaged")
        out.append((kind, body))
        at += 12 + length
    return out
