"""Hostile bytes: the memory of every decoder is bounded by d, at millions of positions. Mutations: test_fuzz.py."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, counts, fuse, klms, png
from edge_kernels.codecs.streams import varint

D = 1_000_000


def peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
    except CodecError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("rate", [0.0005, 0.02, 0.25, 0.5, 0.97, 1.0])
def test_decoding_takes_at_most_four_times_the_mask_and_its_positions(rate: float) -> None:
    mask = counter.uniform(6, D) < rate
    for name in codecs.names():
        payload = codecs.encode(name, mask, D)
        found = codecs.decode(name, payload, D)
        assert peak(lambda: codecs.decode(name, payload, D)) <= 4 * max(D, found.nbytes), name  # noqa: B023


def test_huge_payloads_and_headers_that_claim_huge_sizes_allocate_little() -> None:
    claims = [b"\xff" * 40, b"\x10" + b"\xff\xff\xff\xff\x0f" * 8, b"\x0f" + b"\0" * 100 + b"\xff" * 40,
              bytes([0x8F, 0x80, 0x80, 0x80, 0x80, 0x08, 0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F])]  # fmt: skip
    for name in codecs.names():
        for claim in claims:
            assert peak(lambda: codecs.decode(name, claim, D)) < 1_000_000, name  # noqa: B023
        for huge in (
            b"\0" * 30_000_000,
            b"\xff" * 30_000_000,
        ):  # the network layer limits the bytes; the decoder makes no copy
            assert peak(lambda: codecs.decode(name, huge, 1000)) < 1_000_000, name  # noqa: B023


@pytest.mark.parametrize("d", [D, 8 * D])
def test_filters_and_images_of_zeros_allocate_at_most_four_times_the_mask(d: int) -> None:
    small = fuse.HEADER.pack(0, d // 8, 1 << 15, 1, 1 << 15, 3 << 15) + bytes(3 << 15)
    assert peak(lambda: codecs.decode("fuse8-png", png.encode_filter(small), d)) < 4 * d
    # As many cells as a reader accepts, and many more: a megabyte of zeros deflates to a kilobyte.
    length = fuse.geometry(d)[0]
    for most in (fuse.most_cells(d), 64 + 8 * d):
        segments = most // length - 2
        cells = (segments + 2) * length
        head = fuse.HEADER.pack(0, d, length, segments, segments * length, cells)
        bomb = png.encode_filter(head + bytes(cells))
        assert len(bomb) < d // 50
        assert peak(lambda: codecs.decode("fuse8-png", bomb, d)) <= 4 * d  # noqa: B023
        for width in (8, 16, 32):
            data = head + bytes(cells * width // 8)
            assert peak(lambda: codecs.decode(f"fuse{width}", data, d)) <= 4 * d  # noqa: B023


def test_an_image_of_many_empty_chunks_takes_little_memory() -> None:
    chunk = b"\0\0\0\0IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")
    image = png.encode_filter(fuse.encode(np.arange(5, dtype=np.uint32), D, 8))
    many = image[:33] + chunk * (D // 100) + image[33:]
    assert len(codecs.decode("fuse8-png", many, D)) >= 5
    assert peak(lambda: codecs.decode("fuse8-png", many, D)) <= 4 * D


@pytest.mark.parametrize("fill", [b"\xff", b"\0", b"\xaa"])
def test_lists_of_ones_allocate_at_most_four_times_the_mask(fill: bytes) -> None:
    for k in (0, 5, 32):
        head = bytes([16]) + varint(D // 2) + bytes([k]) + varint((1 << 16) + (D >> k % 32))
        assert peak(lambda: codecs.decode("rice", head + fill * (D // 4), D)) <= 4 * D  # noqa: B023


@pytest.mark.parametrize("blocks", [0, 1, D // 4096, D // 4096 + 1, D // 8, D // 8 + 1, 30 * D])
def test_a_mask_by_klms_takes_at_most_its_share_however_many_blocks_it_claims(blocks: int) -> None:
    prior, data = np.full(D, 0.5, np.float32), b"\xff" * blocks
    assert peak(lambda: klms.decode(data, prior, 1)) <= 25 * D + (2 << 20)


def test_counts_take_at_most_four_times_their_memory_and_that_of_a_segment() -> None:
    d = 4 * D
    before = (counter.uint64(3, d) % np.uint64(4)).astype(np.uint8)
    now = np.where(counter.uniform(4, d) < 0.02, 0, before).astype(np.uint8)
    payload = counts.encode(now, 3, before)
    assert peak(lambda: counts.decode(payload, d, 3, before)) <= 4 * d + (8 << 20)
