"""Fuse filters: no key is lost, the C library reads them and they read its filters, hostile files are refused."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import codec_readers
import numpy as np
import pytest
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, fuse, png
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTHS = (8, 16, 32)


def keys_below(d: int, rate: float) -> codecs.Positions:
    return np.flatnonzero(counter.uniform(counter.key("keys", d), d) < rate).astype(np.uint32)


def test_the_header_of_ten_keys_equals_that_of_the_c_library() -> None:
    built = fuse.build(np.arange(10, dtype=np.uint32), 8).to_bytes()
    assert struct.unpack("<Q5I", built[:28]) == (7923716467325023335, 10, 16, 1, 16, 48)
    assert len(built) == 28 + 48


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4000), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]), st.sampled_from(WIDTHS))
def test_a_filter_holds_all_its_keys_and_few_others(d: int, rate: float, width: int) -> None:
    keys = keys_below(d, rate)
    payload = codecs.encode(f"fuse{width}", keys, d)
    held = codecs.decode(f"fuse{width}", payload, d)
    assert np.isin(keys, held).all()
    assert len(held) - len(keys) <= d / 2**width + 6 * (d / 2**width) ** 0.5 + 4


def test_membership_equals_that_of_the_plain_reader() -> None:
    keys = keys_below(3000, 0.05)
    for width in WIDTHS:
        payload = codecs.encode(f"fuse{width}", keys, 3000)
        assert codecs.decode(f"fuse{width}", payload, 3000).tolist() == codec_readers.fuse(payload, 3000, width)


def built_by_the_c_library(keys: codecs.Positions, width: int) -> bytes:
    library = pytest.importorskip("pyfusefilter._xorfilter")
    ffi, lib = library.ffi, library.lib
    filter_ = ffi.new(f"binary_fuse{width}_t *")
    numbers = keys.astype(np.uint64)
    assert getattr(lib, f"binary_fuse{width}_allocate")(len(numbers), filter_)
    assert getattr(lib, f"binary_fuse{width}_populate")(ffi.from_buffer("uint64_t[]", numbers), len(numbers), filter_)
    out = bytearray(getattr(lib, f"binary_fuse{width}_serialization_bytes")(filter_))
    getattr(lib, f"binary_fuse{width}_serialize")(filter_, ffi.from_buffer("char[]", out))
    end = 28 + filter_.ArrayLength * width // 8
    getattr(lib, f"binary_fuse{width}_free")(filter_)
    assert not any(out[end:])  # for 16 bits the C library asks for four bytes that it never writes
    return bytes(out)


@pytest.mark.parametrize("width", [8, 16])
def test_the_c_library_and_numpy_read_each_others_filters(width: int) -> None:
    library = pytest.importorskip("pyfusefilter._xorfilter")
    ffi, lib = library.ffi, library.lib
    d = 20_000
    for keys in (keys_below(d, 0.03), keys_below(d, 0.0001), np.zeros(0, np.uint32)):
        for payload in (fuse.encode(keys, d, width), built_by_the_c_library(keys, width)):
            filter_ = ffi.new(f"binary_fuse{width}_t *")
            assert getattr(lib, f"binary_fuse{width}_deserialize")(filter_, ffi.from_buffer("char[]", payload))
            contain = getattr(lib, f"binary_fuse{width}_contain")
            held = [key for key in range(d) if contain(key, filter_)]
            assert fuse.decode(payload, d, width).tolist() == held
            getattr(lib, f"binary_fuse{width}_free")(filter_)


def test_a_filter_read_with_the_wrong_d_or_damaged_is_refused() -> None:
    keys = keys_below(1000, 0.1)
    payload = fuse.encode(keys, 1000, 8)
    with pytest.raises(CodecError, match="d is wrong"):
        fuse.decode(payload, 500, 8)
    damaged = bytearray(payload)
    damaged[28:] = bytes(len(payload) - 28)
    with pytest.raises(CodecError, match="positions match"):
        fuse.decode(bytes(damaged), 1000, 8)
    fields = list(struct.unpack("<Q5I", payload[:28]))
    for field, value in ((1, 1001), (2, 0), (2, 3), (2, 1 << 19), (3, 0), (4, 1), (5, 2**32 - 1)):
        wrong = list(fields)
        wrong[field] = value
        with pytest.raises(CodecError):
            fuse.decode(struct.pack("<Q5I", *wrong) + payload[28:], 1000, 8)
    for end in (0, 27, 28, len(payload) - 1):
        with pytest.raises(CodecError):
            fuse.decode(payload[:end], 1000, 8)


def test_a_filter_with_more_cells_than_builders_make_is_refused() -> None:
    # Two keys: the formula gives 12 cells in segments of 4. Six more segments are accepted, 9 in all.
    def empty(segments: int) -> bytes:
        return fuse.HEADER.pack(0, 2, 4, segments, 4 * segments, 4 * segments + 8) + bytes(4 * segments + 8)

    assert fuse.most_cells(2) == 36
    assert fuse.parse(empty(7), 50, 8).segments == 7
    with pytest.raises(CodecError, match="40 cells do not fit 8 segments of 4 and 2 keys"):
        fuse.parse(empty(8), 50, 8)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 100, 1000, 4321, 99_999, 1_000_000, 8_000_000, 2**32 - 1])
def test_the_limit_of_cells_allows_twice_the_segment_length_but_little_more(size: int) -> None:
    length, segments = fuse.geometry(size)
    assert (segments + 2) * length <= fuse.most_cells(size) - 3 * length
    assert size < 1_000_000 or fuse.most_cells(size) <= 1.2 * size


def test_four_bytes_after_a_16_bit_filter_must_be_zeros() -> None:
    payload = codecs.encode("fuse16", keys_below(1000, 0.05), 1000)
    with pytest.raises(CodecError, match="takes"):
        codecs.decode("fuse16", payload + b"junk", 1000)


# --- PNG

pytest.importorskip("PIL.Image")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image(width: int, height: int, data: bytes, mode: tuple[int, ...] = (8, 0, 0, 0, 0)) -> bytes:
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">II5B", width, height, *mode)) + chunk(b"IDAT", data)
            + chunk(b"IEND", b""))  # fmt: skip


@pytest.mark.parametrize(("d", "rate"), [(0, 0.0), (50, 0.1), (5000, 0.02), (1_000_000, 0.02)])
def test_the_image_holds_the_filter_and_deflates_its_empty_cells(d: int, rate: float) -> None:
    keys = keys_below(d, rate)
    payload = codecs.encode("fuse8-png", keys, d)
    filter_ = fuse.encode(keys, d, 8)
    assert png.filter_bytes(payload, d) == filter_
    assert np.array_equal(codecs.decode("fuse8-png", payload, d), fuse.decode(filter_, d, 8))
    assert len(payload) <= max(0.97 * len(filter_), len(filter_) + 70) if d < 1_000_000 else 0.97 * len(filter_)


def test_an_image_with_any_row_filters_and_several_data_chunks_is_read() -> None:
    body = fuse.encode(keys_below(300, 0.1), 300, 8)
    width, height = png.dimensions(png.encode_filter(body))
    pixels = np.zeros((height, width), np.uint8)
    pixels.ravel()[: len(body)] = np.frombuffer(body, np.uint8)
    rows = np.concatenate([np.ones((height, 1), np.uint8), np.diff(pixels, axis=1, prepend=np.uint8(0))], axis=1)
    data = zlib.compress(rows.tobytes())  # filter 1: the difference from the pixel to the left
    assert png.filter_bytes(image(width, height, data), 300) == body
    parts = image(width, height, data[:7]).replace(chunk(b"IEND", b""), chunk(b"IDAT", data[7:]) + chunk(b"IEND", b""))
    assert png.filter_bytes(parts, 300) == body


def refusal(data: bytes) -> str:
    """The message of the error, empty when the image is accepted."""
    try:
        png.decode(data, 300)
    except CodecError as error:
        return str(error)
    return ""


def test_any_other_png_is_refused_with_a_reason() -> None:
    body = fuse.encode(keys_below(300, 0.1), 300, 8)
    width, height = png.dimensions(png.encode_filter(body))
    pixels = np.zeros((height, width + 1), np.uint8)
    pixels[:, 1:].flat[: len(body)] = np.frombuffer(body, np.uint8)
    good = zlib.compress(pixels.tobytes())
    whole = image(width, height, good)
    assert png.filter_bytes(whole, 300) == body
    stained = pixels.copy()
    stained[-1, -1] = 1
    for bad, reason in (
        (b"", "not a PNG"),
        (image(width, height, good, (16, 0, 0, 0, 0)), "8-bit gray"),
        (image(width, height, good, (8, 2, 0, 0, 0)), "8-bit gray"),
        (image(width, height, good, (8, 0, 0, 0, 1)), "8-bit gray"),
        (image(width, height, good[: len(good) // 2]), "does not inflate"),
        (image(width, height, b"nonsense"), "does not inflate"),
        (image(width, height, zlib.compress(pixels[: height - 1].tobytes())), "does not inflate"),
        (image(width, height, zlib.compress(b"")), "does not inflate"),
        (image(width, height, good + b"x"), "does not inflate"),
        (image(width, height, zlib.compress(pixels.tobytes() + bytes(width + 1))), "does not inflate"),
        (image(width, height, zlib.compress(np.full_like(pixels, 9).tobytes())), "cannot be decoded"),
        (image(width + 1, height + 1, zlib.compress(bytes((width + 2) * (height + 1)))), "geometry"),
        (image(width + 2, height, good), "pixels does not hold"),
        (image(30000, 30000, good), "pixels does not hold"),
        (image(0, 0, good), "pixels does not hold"),
        (whole[:-12], "from IHDR to IEND"),
        (whole + chunk(b"IDAT", b""), "from IHDR to IEND"),
        (whole[:8] + whole[33:], "from IHDR to IEND"),
        (whole[:33] + whole[8:], "from IHDR to IEND"),
        (whole[:33] + chunk(b"tEXt", b"") + whole[33:], "besides IHDR"),
        (whole.replace(b"IDAT", b"tEXt"), "checksum"),
        (whole[:-4] + b"abcd", "checksum"),
        (whole[:40], "truncated"),
        (whole + bytes(5000), "more than a PNG image"),
        (image(width, height, zlib.compress(stained.tobytes())), "last row"),
    ):
        assert re.search(reason, refusal(bad)), reason
    larger = np.zeros((height + 1, width + 2), np.uint8)
    larger[:, 1:].flat[: len(body)] = np.frombuffer(body, np.uint8)
    assert "do not fill" in refusal(image(width + 1, height + 1, zlib.compress(larger.tobytes())))


def test_a_zip_bomb_is_not_inflated(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(200_000_000), 9)
    for name, side in (("wide", 14_000), ("narrow", 20)):
        (tmp_path / name).write_bytes(image(side, side, bomb))
    # A process of its own, since Pillow's memory shows only in the peak of the process.
    script = """
import resource, sys
from edge_kernels import codecs
codecs.decode("fuse8-png", codecs.encode("fuse8-png", codecs.mask_of([], 300), 300), 300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        codecs.decode("fuse8-png", open(path, "rb").read(), 10_000_000)
    except codecs.CodecError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    paths = [str(tmp_path / name) for name in ("wide", "narrow")]
    run = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    *refused, grown = run.stdout.splitlines()
    assert len(refused) == 2
    assert int(grown) < 20, "megabytes"


@pytest.mark.parametrize("length", [5, 6, 12, 24])
def test_segments_whose_length_is_no_power_of_two_are_refused(length: int) -> None:
    header = fuse.HEADER.pack(0, 100, length, 1, length, 3 * length)
    with pytest.raises(CodecError, match=f"1 segments of {length} cells are not the geometry"):
        fuse.parse(header + bytes(3 * length), 1000, 8)
    assert fuse.parse(fuse.HEADER.pack(0, 100, 16, 1, 16, 48) + bytes(48), 1000, 8).segment_length == 16
