"""The payload container: what encode writes decode reads, everything else is refused with one error."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import PayloadError
from edge_client.protocol.payload import FILE_HEADER_BYTES, HEADER_BYTES, Payload, decode, encode

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
    "meta", [{"nested": {}}, {"list": ["text"]}, {"list": [1.5]}, {"list": [True]}, {"none": None}, [], 7, None, "text"]
)
def test_foreign_metadata_is_refused(meta: object) -> None:
    with pytest.raises(PayloadError, match="metadata"):
        decode(crafted({"__metadata__": {"maskfleet/1": json.dumps(meta)}}))


@pytest.mark.parametrize("keys", [{}, {"maskfleet/2": "{}"}, {"maskfleet/1": "{}", "more": "x"}])
def test_a_foreign_format_is_refused(keys: dict[str, str]) -> None:
    with pytest.raises(PayloadError, match="not of format maskfleet/1"):
        decode(crafted({"__metadata__": keys}))


def crafted(header: object, arrays: bytes = b"") -> bytes:
    """A container with a header of one's own."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + arrays


META = {"maskfleet/1": "{}"}


@pytest.mark.parametrize("shape", [[0, 2**63], [0] * 65, [0, 2**40, 2**40], [0, 2**64], [-1], [1.5]])
def test_a_shape_that_no_array_can_have_is_refused(shape: list[float]) -> None:
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
    with pytest.raises(PayloadError):
        decode(crafted({"__metadata__": META, "a": entry}))


def test_a_header_over_its_limit_is_refused_before_it_is_parsed() -> None:
    peak = 40_000_000 // 40
    huge = crafted({"__metadata__": META, "a": list(range(5_000_000))})
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=f"at most {HEADER_BYTES} are allowed"):
            decode(huge)
        assert tracemalloc.get_traced_memory()[1] < peak
    finally:
        tracemalloc.stop()
    with pytest.raises(PayloadError, match="claim a header of 1844674407370955"):
        decode(b"\xff" * 8 + b"{}")


def test_the_largest_header_is_sent_and_one_byte_more_is_not_but_may_lie_in_a_file() -> None:
    empty = HEADER_BYTES - len(encode(Payload({}, {"pad": ""})))
    # The format rounds a header up to a multiple of 8 bytes.
    most = Payload({}, {"pad": "x" * (empty - empty % 8)})
    assert len(encode(most)) <= HEADER_BYTES
    assert decode(encode(most)) == most
    more = Payload({}, {"pad": "x" * (empty + 8)})
    with pytest.raises(PayloadError, match="use fewer arrays"):
        encode(more)
    file = encode(more, FILE_HEADER_BYTES)
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(file)
    assert decode(file, FILE_HEADER_BYTES) == more


def test_not_a_number_cannot_enter_the_metadata() -> None:
    with pytest.raises(ValueError):
        encode(Payload({}, {"loss": float("nan")}))
