"""Codec `fuse8-png`: an 8-bit fuse filter as a grayscale PNG, the payload of the DeltaMask paper.

The pixels, row by row, are the bytes of the `fuse8` payload, then zeros up to a full rectangle. The width is the least
w with w * w >= the number of bytes. Pillow, imported when it is needed, writes and reads the pixels. Before it reads a
payload, this module checks the chunks and their checksums, the image size against the largest filter of d keys, and
the length of the inflated data. A file holds no chunks but IHDR, IDAT and IEND, so Pillow decompresses nothing else.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator

from edge_kernels.codecs import fuse
from edge_kernels.codecs.sets import CodecError, Positions

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MODE = bytes([8, 0, 0, 0, 0])  # bit depth 8, gray, deflate, adaptive row filters, not interlaced


def encode(positions: Positions, d: int) -> bytes:
    """The set's `fuse8` filter as a PNG file."""
    return encode_filter(fuse.encode(positions, d, 8))


def encode_filter(data: bytes) -> bytes:
    """A serialised filter as a PNG file."""
    width, height = _shape(len(data))
    from PIL import Image

    image = Image.frombytes("L", (width, height), data.ljust(width * height, b"\0"))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=9)
    return out.getvalue()


def decode(data: bytes, d: int) -> Positions:
    """All positions that the image's filter holds, false positives included. Raises CodecError."""
    return fuse.decode(filter_bytes(data, d), d, 8)


def filter_bytes(data: bytes, d: int) -> memoryview:
    """The serialised filter in a PNG file of positions below `d`. Raises CodecError."""
    most = fuse.HEADER.size + fuse.most_cells(d)
    if len(data) > most + most // 64 + 1024:  # deflate and the chunks add less
        raise CodecError(f"{len(data)} bytes are more than a PNG image of a filter of {d} positions takes; is d right?")
    width, height = dimensions(data)
    if not height or not 0 <= width - height <= 1 or width * (height - 1) >= most:
        raise CodecError(f"an image of {width} x {height} pixels does not hold a filter of {d} positions")
    _check_rows(data, width, height)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            pixels = memoryview(image.tobytes())
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CodecError(f"the PNG image cannot be decoded: {error}") from None
    used = fuse.HEADER.size + fuse.fields(pixels, d)[-1]
    if (width, height) != _shape(used):
        raise CodecError(f"the filter's {used} bytes do not fill the PNG image's {width} x {height} pixels")
    if any(pixels[used:]):
        raise CodecError("the PNG image's last row does not end in zeros; it is damaged")
    return pixels[:used]


def dimensions(data: bytes) -> tuple[int, int]:
    """Width and height of an 8-bit gray PNG file of IHDR, IDAT and IEND chunks. Raises CodecError for any other."""
    if data[:8] != _SIGNATURE:
        raise CodecError("the payload is not a PNG file")
    last, header = b"", b""
    for kind, body in _chunks(data):
        if (kind == b"IHDR") != (last == b"") or last == b"IEND":
            raise CodecError("the PNG file does not run from IHDR to IEND")
        if kind == b"IHDR":
            header = bytes(body)
        elif kind not in (b"IDAT", b"IEND"):
            raise CodecError("the PNG file has chunks besides IHDR, IDAT and IEND; only plain images are read")
        last = kind
    if last != b"IEND":
        raise CodecError("the PNG file does not run from IHDR to IEND")
    if len(header) != 13 or header[8:] != _MODE:
        raise CodecError("the PNG image is not 8-bit gray without interlacing")
    width, height = struct.unpack_from(">II", header)
    return width, height


def _check_rows(data: bytes, width: int, height: int) -> None:
    """Raise CodecError unless the IDAT chunks inflate to exactly the rows of the image. Pillow reads fewer as zeros."""
    left = height * (width + 1)
    inflater = zlib.decompressobj()
    try:
        for kind, body in _chunks(data):
            if kind == b"IDAT" and left >= 0:
                left -= len(inflater.decompress(body, left + 1))
    except zlib.error as error:
        raise CodecError(f"the PNG image does not inflate: {error}") from None
    if left or not inflater.eof or inflater.unused_data:
        raise CodecError(f"the PNG image does not inflate to exactly {height} rows; it is damaged")


def _shape(count: int) -> tuple[int, int]:
    """Width and height of the image of so many bytes."""
    width = math.isqrt(count - 1) + 1
    return width, -(-count // width)


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """(type, data) of every chunk, its checksum verified, nothing copied. Raises CodecError."""
    view = memoryview(data)
    at = len(_SIGNATURE)
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
