"""Fuse filters: the C library and this one read each other, none loses a key, hostile files are refused."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import zlib

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


def test_the_header_of_ten_keys_is_the_c_librarys() -> None:
    built = fuse.build(np.arange(10, dtype=np.uint32), 8).to_bytes()
    assert struct.unpack("<Q5I", built[:28]) == (7923716467325023335, 10, 16, 1, 16, 48)
    assert len(built) == 28 + 48


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4000), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]), st.sampled_from(WIDTHS), st.booleans())
def test_a_filter_holds_all_its_keys_and_few_others(d: int, rate: float, width: int, numpy_only: bool) -> None:
    keys = keys_below(d, rate)
    payload = fuse.build(keys, width).to_bytes() if numpy_only else codecs.encode(f"fuse{width}", keys, d)
    held = codecs.decode(f"fuse{width}", payload, d)
    assert np.isin(keys, held).all()
    assert len(held) - len(keys) <= d / 2**width + 6 * (d / 2**width) ** 0.5 + 4


def test_membership_is_the_one_of_the_plain_reader() -> None:
    keys = keys_below(3000, 0.05)
    for width in WIDTHS:
        payload = codecs.encode(f"fuse{width}", keys, 3000)
        assert codecs.decode(f"fuse{width}", payload, 3000).tolist() == codec_readers.fuse(payload, 3000, width)


@pytest.mark.parametrize("width", [8, 16])
def test_the_c_library_and_numpy_read_each_others_filters(width: int) -> None:
    library = pytest.importorskip("pyfusefilter._xorfilter")
    ffi, lib = library.ffi, library.lib
    d = 20_000
    for keys in (keys_below(d, 0.03), keys_below(d, 0.0001), np.zeros(0, np.uint32)):
        ours = fuse.build(keys, width).to_bytes()
        theirs = fuse.encode(keys, d, width)
        for payload in (ours, theirs):
            filter_ = ffi.new(f"binary_fuse{width}_t *")
            assert getattr(lib, f"binary_fuse{width}_deserialize")(filter_, ffi.from_buffer("char[]", payload))
            contain = getattr(lib, f"binary_fuse{width}_contain")
            held = [key for key in range(d) if contain(key, filter_)]
            assert fuse.decode(payload, d, width).tolist() == held
            getattr(lib, f"binary_fuse{width}_free")(filter_)
    if width == 16:  # a buffer as long as the C library asks for has four bytes that it never writes
        assert np.array_equal(fuse.decode(ours + b"\0\0\0\0", d, 16), fuse.decode(ours, d, 16))


def test_without_the_c_library_numpy_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyfusefilter._xorfilter", None)
    keys = keys_below(5000, 0.02)
    assert fuse.encode(keys, 5000, 8) == fuse.build(keys, 8).to_bytes()


def test_false_positives_are_what_decoding_adds() -> None:
    keys = keys_below(50_000, 0.02)
    payload = fuse.encode(keys, 50_000, 8)
    extra = fuse.false_positives(payload, 50_000, 8, keys)
    assert 100 < len(extra) < 300  # about 49,000 / 256
    assert np.array_equal(np.union1d(extra, keys), fuse.decode(payload, 50_000, 8))


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


def test_a_filter_has_no_more_cells_than_builders_make_for_its_keys() -> None:
    # Two keys: 12 cells by the formula, segments of 4; 6 segments more are let pass, 9 in all.
    def empty(segments: int) -> bytes:
        return fuse.HEADER.pack(0, 2, 4, segments, 4 * segments, 4 * segments + 8) + bytes(4 * segments + 8)

    assert fuse.most_cells(2) == 36
    assert fuse.parse(empty(7), 50, 8).segments == 7
    with pytest.raises(CodecError, match="40 cells do not fit 8 segments of 4 and 2 keys"):
        fuse.parse(empty(8), 50, 8)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 100, 1000, 4321, 99_999, 1_000_000, 8_000_000, 2**32 - 1])
def test_the_limit_leaves_room_for_twice_the_segment_length_and_little_more(size: int) -> None:
    length, segments = fuse.geometry(size)
    assert (segments + 2) * length <= fuse.most_cells(size) - 3 * length
    assert size < 1_000_000 or fuse.most_cells(size) <= 1.2 * size


def test_four_bytes_after_a_filter_of_sixteen_bits_are_zeros() -> None:
    payload = codecs.encode("fuse16", keys_below(1000, 0.05), 1000)
    with pytest.raises(CodecError, match="takes"):
        codecs.decode("fuse16", payload + b"junk", 1000)


# --- PNG


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image(width: int, height: int, data: bytes, mode: tuple[int, ...] = (8, 0, 0, 0, 0)) -> bytes:
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">II5B", width, height, *mode)) + chunk(b"IDAT", data)
            + chunk(b"IEND", b""))  # fmt: skip


def test_the_image_is_an_ordinary_gray_png_of_the_filters_bytes() -> None:
    keys = keys_below(5000, 0.02)
    payload = codecs.encode("fuse8-png", keys, 5000)
    assert png.filter_bytes(payload, 5000) == fuse.encode(keys, 5000, 8)
    assert np.array_equal(codecs.decode("fuse8-png", payload, 5000), fuse.decode(fuse.encode(keys, 5000, 8), 5000, 8))
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.asarray(pillow.open(io.BytesIO(payload)))
    assert pixels.dtype == np.uint8
    assert pixels.tobytes().rstrip(b"\0") == fuse.encode(keys, 5000, 8).rstrip(b"\0")


def test_a_png_of_other_making_is_refused_with_a_reason() -> None:
    body = fuse.encode(keys_below(300, 0.1), 300, 8)
    side = int(len(body) ** 0.5) + 1
    pixels = np.zeros((side, side + 1), np.uint8)
    flat = np.zeros(side * side, np.uint8)
    flat[: len(body)] = np.frombuffer(body, np.uint8)
    height = -(-len(body) // side)
    pixels[:, 1:] = flat.reshape(side, side)
    good = zlib.compress(pixels[:height].tobytes())
    assert png.filter_bytes(image(side, height, good), 300) == body
    filtered = pixels[:height].copy()
    filtered[:, 0] = 1
    stained = pixels[:height].copy()
    stained[-1, -1] = 1
    for bad, reason in (
        (b"", "not a PNG"),
        (image(side, height, good, (16, 0, 0, 0, 0)), "8-bit gray"),
        (image(side, height, good, (8, 2, 0, 0, 0)), "8-bit gray"),
        (image(side, height, zlib.compress(filtered.tobytes())), "row filters"),
        (image(side, height, good[:-3]), "does not inflate"),
        (image(side, height, b"nonsense"), "does not inflate"),
        (image(side, height, good + b"x"), "does not inflate"),
        (image(side, height, zlib.compress(pixels[:height].tobytes() + bytes(side + 1))), "does not inflate"),
        (image(side, height, zlib.compress(pixels[: height - 1].tobytes())), "does not inflate"),
        (image(side, height, zlib.compress(b"")), "does not inflate"),
        (image(side, height - 1, good) if height == side else image(side, side, good), "do not fill"),
        (image(side + 1, height + 1, good), "do not fill|header|geometry"),
        (image(side + 2, height, good), "pixels is not one"),
        (image(30000, 30000, good), "pixels is not one"),
        (image(0, 0, good), "pixels is not one"),
        (image(side, height, good)[:-12], "from IHDR to IEND"),
        (image(side, height, good) + chunk(b"IDAT", b""), "from IHDR to IEND"),
        (image(side, height, good)[:8] + image(side, height, good)[33:], "from IHDR to IEND"),
        (image(side, height, good)[:33] + chunk(b"tEXt", b"") + image(side, height, good)[33:], "besides IHDR"),
        (image(side, height, good).replace(b"IDAT", b"tEXt"), "checksum"),
        (image(side, height, good)[:-4] + b"abcd", "checksum"),
        (image(side, height, good)[:40], "truncated"),
        (image(side, height, good) + bytes(5000), "more than a PNG image"),
        (image(side, height, zlib.compress(stained.tobytes())), "last row"),
    ):
        with pytest.raises(CodecError, match=reason):
            png.decode(bad, 300)


def test_a_zip_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    tracemalloc.start()
    for width, height in ((7000, 7000), (40, 40)):
        with pytest.raises(CodecError):
            png.decode(image(width, height, bomb), 300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
