"""The payload container: what encode writes decode reads, everything else is refused with one error."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import PayloadError
from edge_client.protocol.payload import Payload, decode, encode

EXAMPLE = Payload(
    {"mask": np.arange(5, dtype=np.uint8), "head": np.array([[1.5, -2.0]], np.float32)},
    {"samples": 12, "loss": 0.25, "method": "fedmask"},
)


def test_a_payload_survives_the_round_trip() -> None:
    back = decode(encode(EXAMPLE))
    assert back.meta == EXAMPLE.meta
    assert back.arrays.keys() == EXAMPLE.arrays.keys()
    for name, array in EXAMPLE.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert np.array_equal(back.arrays[name], array)


def test_equal_payloads_give_equal_bytes_whatever_the_order_of_their_names() -> None:
    turned = Payload(dict(reversed(EXAMPLE.arrays.items())), dict(reversed(EXAMPLE.meta.items())))
    assert {encode(EXAMPLE) for _ in range(20)} == {encode(turned)}


def test_the_container_is_a_plain_safetensors_file() -> None:
    from safetensors.numpy import load

    assert np.array_equal(load(encode(EXAMPLE))["head"], EXAMPLE.arrays["head"])


def test_an_empty_payload_is_allowed() -> None:
    assert decode(encode(Payload())) == Payload({}, {})


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_a_payload_error(data: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(data)


@given(st.integers(0, len(encode(EXAMPLE)) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(PayloadError):
        decode(encode(EXAMPLE)[:length])


@given(st.integers(0, 8 * len(encode(EXAMPLE)) - 1))
def test_a_flipped_bit_is_refused_or_still_a_payload_of_the_same_size(bit: int) -> None:
    data = bytearray(encode(EXAMPLE))
    data[bit // 8] ^= 1 << bit % 8
    try:
        back = decode(bytes(data))
    except PayloadError:
        return
    assert sum(a.nbytes for a in back.arrays.values()) <= len(data)


@pytest.mark.parametrize(
    "meta", [{}, {"format": 2}, {"format": 1, "nested": {}}, {"format": 1, "list": []}, [], 7, None, "text"]
)
def test_foreign_metadata_is_refused(meta: object) -> None:
    header = json.dumps({"__metadata__": {"maskfleet": json.dumps(meta)}}).encode()
    with pytest.raises(PayloadError):
        decode(len(header).to_bytes(8, "little") + header)


def test_not_a_number_cannot_enter_the_metadata() -> None:
    with pytest.raises(ValueError):
        encode(Payload({}, {"loss": float("nan")}))
