"""Value codecs: what they write, that rounding is unbiased, and what a damaged payload is."""

from __future__ import annotations

import re

import numpy as np
import pytest
from edge_bench.testing import check_codec
from edge_kernels import counter
from edge_kernels.codecs import CodecError, quantised, registry, values
from edge_kernels.codecs.streams import varint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

FINITE = st.floats(-(2.0**99), 2.0**99, width=32)


def decoded(name: str, v: np.ndarray, stream: int) -> np.ndarray:
    return values.decode(name, values.encode(name, v, stream), len(v), stream)


def test_floats_are_little_endian() -> None:
    assert values.encode("float16", np.array([1.0, -2.0]), 0).hex() == "003c00c0"
    assert values.encode("float32", np.array([1.0, -2.0]), 0).hex() == "0000803f000000c0"
    assert values.decode("float16", bytes.fromhex("003c00c0"), 2, 0).tolist() == [1.0, -2.0]


def test_stochastic8_is_a_scale_for_each_block_and_a_byte_for_each_value() -> None:
    v = np.zeros(513, np.float32)
    v[[0, 1, 2, 512]] = 254, -254, 2, -0.5
    data = values.encode("stochastic8", v, 9)
    assert len(data) == 2 * 4 + 513
    assert np.frombuffer(data, "<f4", 2).tolist() == [254.0, 0.5]
    assert np.frombuffer(data, np.int8)[8:].tolist() == [127, -127, 1, *[0] * 509, -127]
    assert values.decode("stochastic8", data, 513, 9).tolist() == v.tolist()  # all of them lie on levels


def test_stochastic8_is_unbiased_and_repeats_itself() -> None:
    v = np.linspace(-1, 1, 101, dtype=np.float32)
    decoded = [values.decode("stochastic8", values.encode("stochastic8", v, s), 101, s) for s in range(2000)]
    # A level is 1/127 wide; the standard error of the mean of 2000 roundings is at most 1/127/2/sqrt(2000).
    assert np.abs(np.mean(decoded, axis=0) - v).max() < 5 / 127 / 2 / 2000**0.5
    assert np.std(decoded, axis=0).max() > 0.3 / 127
    assert values.encode("stochastic8", v, 1) == values.encode("stochastic8", v, 1)
    assert values.encode("stochastic8", v, 1) != values.encode("stochastic8", v, 2)


@given(v=arrays(np.float32, st.integers(0, 1100), elements=FINITE), stream=st.integers(0, 2**64 - 1))
def test_every_codec_stays_within_its_limit_and_its_error(v: np.ndarray, stream: int) -> None:
    for name in ("float32", "float16", "stochastic8"):
        if name == "float16":
            v = np.clip(v, -60000, 60000)
        data = values.encode(name, v, stream)
        assert len(data) <= values.limit(len(v))
        got = values.decode(name, data, len(v), stream)
        assert got.dtype == np.float32
        assert (got[v == 0] == 0).all()
        largest = [np.abs(v[low : low + values.BLOCK]).max() for low in range(0, len(v), values.BLOCK)]
        step = np.repeat(np.array(largest, np.float64) / 127, values.BLOCK)[: len(v)] * 1.0001
        bound = {"float32": 0.0, "float16": np.abs(v) * 2.0**-11 + 2.0**-25, "stochastic8": step + 1e-44}[name]
        assert (np.abs(got.astype(np.float64) - v) <= bound).all()


NAMES = [*values.VALUES, "eden:4", "eden:0.1", "drive:mse", "drive+:mse", "qsgd:1", "qsgd:255", "topk:0.97", "topk:1",
         "stc:1"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_writer_takes_what_its_reader_returns_and_refuses_what_is_larger(name: str) -> None:
    most = np.float32(values.codec(name).most)
    for v in (np.full(8200, -most), np.where(np.arange(70) == 5, most, 0)):
        decoded(name, v, 3)
        if name != "float32":
            with pytest.raises(CodecError, match="beyond the range of"):
                values.encode(name, v * np.float32(1.0000002), 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_keeps_the_contract(name: str) -> None:
    check_codec(values.codec(name))


def test_parts_are_the_whole_vector_one_after_another() -> None:
    assert values.encode_parts("sign", np.zeros(0), (), 3) == b""
    assert values.decode_parts("sign", b"", (), 3).shape == (0,)
    with pytest.raises(CodecError):
        values.decode_parts("sign", b"\0", (), 3)
    for ends in ((), (199,), (90, 199), (201,), (90, 201), (90, 80, 200), (-1, 200)):
        with pytest.raises(CodecError, match="parts"):
            values.encode_parts("sign", np.ones(200), ends, 3)
    for ends in ((90, 80, 200), (-1,), (-1, 200)):
        with pytest.raises(CodecError, match="parts"):
            values.decode_parts("sign", b"", ends, 3)


@pytest.mark.parametrize("name", [*values.VALUES])
@given(data=st.binary(max_size=300), at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_hostile_bytes_decode_to_finite_values_or_are_refused(name: str, data: bytes, at: int, byte: int) -> None:
    damaged = bytearray(values.encode(name, np.linspace(-1, 1, 200), 3))
    damaged[at % len(damaged)] = byte
    for payload in (data, bytes(damaged)):
        try:
            got = values.decode(name, payload, 200, 3)
        except CodecError:
            continue
        assert np.isfinite(got).all()


ENDS = (90, 90, 93, 200)  # a part may be empty


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_coded_by_themselves_with_their_lengths(name: str) -> None:
    v = np.linspace(-1, 2, 200, dtype=np.float32)
    data = values.encode_parts(name, v, ENDS, 3)
    at, due = 0, []
    for i, (low, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        part = values.encode(name, v[low:end], counter.key(3, i))
        head = varint(len(part))
        assert data[at : at + len(head) + len(part)] == head + part
        at += len(head) + len(part)
        due += values.decode(name, part, end - low, counter.key(3, i)).tolist()
    assert at == len(data) <= values.limit(200, len(ENDS))
    assert values.decode_parts(name, data, ENDS, 3).tolist() == due
    assert values.encode_parts(name, v, (200,), 3) == values.encode(name, v, 3)
    assert values.decode_parts(name, values.encode(name, v, 3), (200,), 3).tolist() == decoded(name, v, 3).tolist()


@pytest.mark.parametrize("name", [*values.VALUES])
@given(data=st.binary(max_size=300), at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_hostile_parts_decode_to_finite_values_or_are_refused(name: str, data: bytes, at: int, byte: int) -> None:
    damaged = bytearray(values.encode_parts(name, np.linspace(-1, 1, 200), ENDS, 3))
    damaged[at % len(damaged)] = byte
    for payload in (data, bytes(damaged)):
        try:
            got = values.decode_parts(name, payload, ENDS, 3)
        except CodecError:
            continue
        assert np.isfinite(got).all()
    for wrong in (damaged[:-1], damaged + b"\0"):
        with pytest.raises(CodecError):
            values.decode_parts(name, bytes(wrong), ENDS, 3)


def test_a_name_is_kept_with_its_parameter_in_one_form() -> None:
    assert values.checked_name("topk:0.10") == "topk:0.1"
    assert [values.checked_name(name) for name in ("eden", "eden:1.0", "qsgd:07")] == ["eden", "eden:1", "qsgd:7"]
    assert values.checked_name("drive:mse") == "drive:mse"
    for theirs in ("theirs:1234567", "theirs:1e5", "theirs:0012", "theirs:2024_01", "theirs:0.123456789"):
        assert registry.one_form(theirs, values.VALUES) == theirs
    assert values.encode("eden", np.ones(9), 0) == values.encode("eden:1", np.ones(9), 0)
    with pytest.raises(CodecError, match="'float16' takes no parameter"):
        values.codec("float16:2")
    for name in ("topk:nan", "qsgd:many"):
        with pytest.raises(CodecError, match=name):
            values.codec(name)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (("eden:0.0001", "eden:0.9999"), ("eden:0.00009", "eden:0")),
        (("qsgd:1", "qsgd:255"), ("qsgd:0", "qsgd:256")),
        (("topk:0.000001", "stc:1"), ("topk:0.0000009", "stc:1.0001")),
    ],
)
def test_a_parameter_has_a_least_and_a_greatest_value(good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    for name in good:
        values.codec(name)
    for name in bad:
        with pytest.raises(CodecError, match=name):
            values.codec(name)


@pytest.mark.parametrize("name", list(values.VALUES))
def test_what_is_not_a_payload_of_the_codec_is_refused(name: str) -> None:
    data = values.encode(name, np.ones(600), 0)
    for wrong in (data[:-1], data + b"\0", b"", b"\xff" * len(data)):
        with pytest.raises(CodecError):
            values.decode(name, wrong, 600, 0)
    for v in ([np.nan], [np.inf], [1e300], [[1.0]]):
        with pytest.raises(CodecError):
            values.encode(name, np.array(v), 0)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(CodecError, match="take 4 bytes, not 3"):
        values.decode("float32", b"abc", 1, 0)
    with pytest.raises(CodecError, match=re.escape("magnitude 1e+09 is beyond the range of float16, 65504")):
        values.encode("float16", np.array([1, -1e9]), 0)
    with pytest.raises(CodecError, match="no value codec is called 'zip'; choose one of float32, float16, stochastic8"):
        values.encode("zip", np.ones(1), 0)
    level = np.float32(1).tobytes() + b"\x80"
    with pytest.raises(CodecError, match="-128"):
        values.decode("stochastic8", level, 1, 0)


def test_the_largest_uniform_number_rounds_the_largest_value_no_further_than_to_the_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float64 1 + (1 - 2**-53) is 2, one more than there are levels."""
    monkeypatch.setattr(quantised.counter, "uniform", lambda stream, n: np.full(n, 1 - 2.0**-53))
    v = np.array([-3.0], np.float32)
    for levels in (1, 2, 255):
        assert quantised.decode_qsgd(quantised.encode_qsgd(v, 0, levels), 1, 0, levels).tolist() == [-3.0]
