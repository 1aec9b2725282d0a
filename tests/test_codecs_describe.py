"""`describe` reads the header of a coded array correctly, and refuses any other bytes with a CodecError."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import codecs, counter, coupling
from edge_kernels.codecs import CodecError, counts, fuse, klms, png
from edge_kernels.codecs.describe import Description, describe, names
from edge_kernels.coupling import Cohort
from hypothesis import given, settings
from hypothesis import strategies as st

D = 3000


def flips(d: int, rate: float) -> np.ndarray:
    return counter.uniform(counter.key("describe", d), d) < rate


SETS = st.integers(1, 2000).flatmap(
    lambda d: st.tuples(st.just(d), st.sets(st.integers(0, d - 1), max_size=d).map(lambda s: np.array(sorted(s), "u4")))
)


@settings(deadline=None)
@given(SETS, st.sampled_from(codecs.names()))
def test_the_size_of_every_set_is_reported(given_set: tuple[int, np.ndarray], codec: str) -> None:
    d, positions = given_set
    data = codecs.encode(codec, positions, d)
    assert describe(codec, data, d)["members"] == len(positions)


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.02, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("codec", codecs.names())
def test_the_size_of_large_sets_is_reported(codec: str, rate: float) -> None:
    mask = flips(200_000, rate)
    assert describe(codec, codecs.encode(codec, mask, mask.size), mask.size)["members"] == np.count_nonzero(mask)


def test_the_fields_by_hand() -> None:
    positions = np.array([0, 3, 12], np.uint32)
    assert describe("bits", codecs.encode("bits", positions, 13), 13) == {"members": 3, "positions": 13}
    assert describe("bits", codecs.encode("bits", positions, 13)) == {"members": 3, "positions": 16}
    rice = describe("rice", codecs.encode("rice", positions, 13), 13)
    assert (rice["members"], rice["blocks"]) == (3, 1)
    assert describe("entropy", codecs.encode("entropy", positions, 13), 13) == {"members": 3, "contexts": "none"}
    assert describe("entropy", codecs.encode("entropy", positions, 13)) == {"contexts": "none"}
    assert describe("auto", codecs.encode("auto", positions, 13), 13)["inner_codec"] == "bits"


def test_a_complement_is_reported() -> None:
    data = codecs.encode("rice", flips(D, 0.9), D)
    said = describe("rice", data)
    assert said["listed"] == f"the {D - np.count_nonzero(flips(D, 0.9))} that are not in the set"
    assert "members" not in said


def test_a_payload_with_contexts_has_no_number_of_members() -> None:
    contexts = np.repeat(np.arange(3, dtype=np.uint8), D // 3)
    mask = counter.uniform(1, D) < np.array([0.01, 0.2, 0.9])[contexts]
    said = describe("entropy", codecs.encode("entropy", mask, D, contexts), D)
    assert said == {"contexts": "each with a rate of its own"}
    halves = 2 * contexts + (np.arange(D) % 2).astype(np.uint8)
    said = describe("entropy", codecs.encode("entropy", mask, D, halves), D)
    assert said == {"contexts": "2 neighbours merged, each with a rate of its own"}


@pytest.mark.parametrize("width", [8, 16, 32])
def test_the_geometry_of_a_filter_is_reported(width: int) -> None:
    mask = flips(D, 0.1)
    made = fuse.build(np.flatnonzero(mask).astype(np.uint32), width)
    assert describe(f"fuse{width}", made.to_bytes(), D) == {
        "members": made.size,
        "seed": f"{made.seed:016x}",
        "segment_length": made.segment_length,
        "segments": made.segments,
        "cells": len(made.fingerprints),
        "fingerprint_bits": width,
        "false_positive_rate": 2.0**-width,
        "expected_false_positives": round((D - made.size) / 2**width, 2),
    }


def test_the_width_and_height_of_an_image_are_reported() -> None:
    mask = flips(D, 0.1)
    raw = fuse.encode(np.flatnonzero(mask).astype(np.uint32), D, 8)
    image = png.encode_filter(raw)
    said = describe("fuse8-png", image, D)
    assert (said["width"], said["height"]) == struct.unpack(">II", image[16:24])
    assert {k: v for k, v in said.items() if k not in ("width", "height")} == describe("fuse8", raw, D)
    assert describe("fuse8-png", image)["members"] == np.count_nonzero(mask)


def test_the_number_of_counts_that_equal_their_prediction_is_reported() -> None:
    values = (counter.uint64(3, D) % np.uint64(4)).astype(np.uint8)
    said = describe("counts", counts.encode(values, 3), D)
    assert said == {"values": D, "segments": 1, "as_predicted": np.count_nonzero(values == 0), "contexts": "none"}
    predicted = describe("counts", counts.encode(values, 3, (values + flips(D, 0.02)) % np.uint8(4)), D)
    assert predicted["values"] == D
    long = np.zeros((1 << 20) + 5, np.uint8)
    assert describe("counts", counts.encode(long, 3), long.size)["as_predicted"] == f"{1 << 20} of the first {1 << 20}"
    assert describe("counts", b"", 0) == {"values": 0, "segments": 0}
    assert describe("counts", counts.encode(np.zeros(5, np.uint8), 0), 5) == {"values": 5, "segments": 1}


def test_the_mean_of_planes_is_reported() -> None:
    steps = (counter.uint64(9, 77) % np.uint64(6)).astype(np.uint32)
    data = bitset.pack_planes(steps, 3).tobytes()
    assert describe("planes", data, 77) == {
        "values": 77, "planes": 3, "greatest_possible": 7, "mean": pytest.approx(steps.mean())
    }  # fmt: skip
    with pytest.raises(CodecError, match="is d right"):
        describe("planes", data, 76 + 8)
    assert describe("planes", bytes(32), 5)["planes"] == 32
    with pytest.raises(CodecError, match="1 to 32 planes"):
        describe("planes", bytes(33), 5)


def coupled(d: int, devices: int, shift: float) -> tuple[np.ndarray, bytes, np.ndarray, bytes]:
    """The flips of a device and the net flips of a cohort, each plain and coded."""
    theta = np.clip(counter.uniform(1, d), 0.01, 0.99)
    uniforms = [counter.uniform(counter.key("device", i), d) for i in range(devices)]
    cohort = Cohort.empty(d)
    for u in uniforms:
        cohort.add(theta, u)
    moved = np.clip(theta + shift * (counter.uniform(2, d) - 0.5), 0, 1)
    net = np.stack([u < moved for u in uniforms]).sum(axis=0).astype(np.int32) - cohort.reference.astype(np.int32)
    own = (uniforms[0] < moved) ^ (uniforms[0] < theta)
    return own, coupling.encode_flips(own, theta, uniforms[0], None), net, coupling.encode_net(net, theta, cohort, None)


def test_the_model_and_the_checksum_of_coupled_flips_are_reported() -> None:
    own, data, net, netted = coupled(D, 4, 0.03)
    assert 0 < np.count_nonzero(own) < 64  # too few for a model
    said = describe("coupled", data, D)
    assert (said["members"], said["model"]) == (np.count_nonzero(own), "none")
    assert bytes.fromhex(str(said["checksum"]))[::-1] == data[:4]
    parts = describe("coupled-net", netted, D)
    assert parts["parts"] == netted[4] == 2 + np.abs(net).max()
    lengths = [int(n) for n in str(parts["bytes_of_parts"]).split(", ")]
    assert len(netted) == 5 + 4 * len(lengths) + sum(lengths)


def test_a_payload_with_a_model_has_no_number_of_members() -> None:
    own, data, _, netted = coupled(20_000, 4, 0.3)
    assert np.count_nonzero(own) > 64
    for said in (describe("coupled", data, 20_000), describe("coupled-net", netted, 20_000)):
        assert said["model"] == "fitted"
        assert "members" not in said


def test_net_flips_of_one_part_are_refused() -> None:
    part = b"\0" + codecs.encode("entropy", flips(D, 0.01), D)
    with pytest.raises(CodecError, match="at least 2 parts, not 1"):
        describe("coupled-net", b"abcd\1" + len(part).to_bytes(4, "little") + part, D)


def test_the_false_positives_of_a_bloom_filter_follow_from_its_filled_cells() -> None:
    mask = flips(D, 0.05)
    said = describe("bloom:0.1", codecs.encode("bloom:0.1", mask, D), D)
    assert said["false_positive_rate"] == pytest.approx(0.1, rel=0.1)
    assert said["expected_false_positives"] == pytest.approx(0.1 * np.count_nonzero(~mask), rel=0.1)


def test_a_mask_by_klms_has_a_byte_for_each_block() -> None:
    data, d = SAMPLES["klms"]
    assert describe("klms", data, d) == describe("klms", data) == {"blocks": len(data)}
    with pytest.raises(CodecError, match="is d = 100 right"):
        describe("klms", data, 100)


def samples() -> dict[str, tuple[bytes, int]]:
    """A payload of every codec and its d."""
    mask = flips(D, 0.05)
    _, own, _, net = coupled(D, 3, 0.1)
    found = {name: (codecs.encode(name, mask, D), D) for name in codecs.names()}
    found |= {"counts": (counts.encode(mask.astype(np.uint8), 3), D), "coupled": (own, D), "coupled-net": (net, D)}
    found["klms"] = klms.encode(np.where(mask, 0.9, 0.5), np.full(D, 0.5), 1, 2), D
    found["planes"] = bitset.pack_planes(mask.astype(np.uint32) * 3, 2).tobytes(), D
    return found


SAMPLES = samples()


def test_every_codec_has_a_sample() -> None:
    assert SAMPLES.keys() == set(names())
    with pytest.raises(CodecError, match="there is no codec 'zip'"):
        describe("zip", b"")


def attempt(codec: str, data: bytes, d: int | None) -> Description | None:
    try:
        return describe(codec, data, d)
    except CodecError:
        return None


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(SAMPLES)),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([0, 1, D, 2**32 - 1]),
)
def test_any_bytes_are_described_or_refused_in_memory_bounded_by_them(
    codec: str, rng: random.Random, with_d: bool, other_d: int
) -> None:
    data, d = SAMPLES[codec]
    out = bytearray(data if rng.random() < 0.8 else rng.randbytes(rng.randrange(80)))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(min(len(out), 60) + 1) if rng.random() < 0.7 else rng.randrange(len(out) + 1)
        choice = rng.randrange(4)
        if choice == 0 and at < len(out):
            out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif choice == 1:
            del out[at:]
        elif choice == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        else:
            del out[at : at + rng.choice((1, 2, 8))]
    tracemalloc.start()
    try:
        attempt(codec, bytes(out), rng.choice((d, other_d)) if with_d else None)
        assert tracemalloc.get_traced_memory()[1] < 24 * len(out) + 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", sorted(SAMPLES.keys() - {"counts"}))  # counts that can only be 0 take no bytes
def test_an_empty_payload_is_refused(codec: str) -> None:
    assert attempt(codec, b"", D) is None


def test_an_image_is_not_inflated_beyond_its_file() -> None:
    """A small file that inflates to a thousand times its size."""
    width = 1 << 13
    rows = np.zeros((width, width + 1), np.uint8)[: 1 << 9]
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(rows.tobytes()) for _ in range(width >> 9)) + packer.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, width, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    assert 500 * len(bomb) < rows[0].nbytes * width
    tracemalloc.start()
    try:
        assert attempt("fuse8-png", bomb, None) is None
        assert tracemalloc.get_traced_memory()[1] < 16 * len(bomb)
    finally:
        tracemalloc.stop()
