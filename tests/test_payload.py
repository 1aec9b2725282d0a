"""The payload container: the reader takes any JSON that means a payload and refuses the rest with one error."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from edge_client.errors import PayloadError
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.metrics import with_metrics
from edge_client.protocol.payload import FILE_HEADER_BYTES, HEADER_BYTES, Payload, count, decode, encode, vector

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
    "value", [{}, {"a": 1}, ["text"], [None], [True], [[1]], None, True, 2**53, [-(2**53)]]
)  # fmt: skip
def test_foreign_metadata_is_refused(value: object) -> None:
    with pytest.raises(PayloadError, match="metadata"):
        decode(worded(json.dumps(value)))


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": {}}, {"a": None}, [], "{}", 7, None])
def test_metadata_is_an_object_of_texts(metadata: object) -> None:
    with pytest.raises(PayloadError, match="not an object of texts"):
        decode(crafted({"__metadata__": metadata}))


def test_metadata_may_be_missing_or_empty_and_is_then_not_written() -> None:
    for header in ({}, {"__metadata__": {}}):
        assert decode(crafted(header)) == Payload()
    assert encode(Payload()) == b"\x02" + bytes(7) + b"{}"


def test_a_short_payload_has_a_short_header() -> None:
    """Some updates are 200 bytes: the header of one array may cost 80 bytes, with metrics 120."""
    arrays = {"up": np.zeros(200, np.uint8)}
    assert len(encode(Payload(arrays))) - 200 <= 80
    metrics = DeviceMetrics(samples=600, loss=0.1235, score_before=0.9123, score_after=0.9456, test_samples=100)
    assert len(encode(with_metrics(Payload(arrays), metrics))) - 200 <= 120


def crafted(header: object, arrays: bytes = b"") -> bytes:
    """A container with this header, a value or its text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + arrays


def worded(text: str) -> bytes:
    """A container of no arrays whose metadata `a` has this text."""
    return crafted({"__metadata__": {"a": text}})


META = {"word": "1"}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
NUMBERS = st.one_of(INTEGERS, st.floats(allow_nan=False, allow_infinity=False))
WORDS = st.dictionaries(NAMES, st.one_of(NAMES, NUMBERS, st.lists(NUMBERS, max_size=3)))
DTYPES = ("f2", "f4", "f8", "u1", "i1", "u2", "u4", "i4", "u8", "i8", "?")
ARRAYS = st.dictionaries(
    NAMES,
    st.builds(
        lambda dtype, shape: (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=8),
    ),
    max_size=4,
)
PAYLOADS = st.builds(Payload, ARRAYS, WORDS)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A container's header and arrays."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def same(left: Payload, right: Payload) -> bool:
    """Equal metadata, and arrays of equal bytes, shapes and dtypes."""
    arrays = [{n: (a.dtype, a.shape, a.tobytes()) for n, a in p.arrays.items()} for p in (left, right)]
    return arrays[0] == arrays[1] and left.meta == right.meta


@given(PAYLOADS)
def test_what_may_be_written_is_read_back_with_dtypes_and_shapes_and_written_again_to_the_same_bytes(
    content: Payload,
) -> None:
    data = encode(content, FILE_HEADER_BYTES)
    back = decode(data, FILE_HEADER_BYTES)
    assert same(back, content)
    assert encode(back, FILE_HEADER_BYTES) == data


@given(PAYLOADS)
def test_arrays_begin_at_a_multiple_of_the_widest_of_their_types(content: Payload) -> None:
    data = encode(content, FILE_HEADER_BYTES)
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % max((a.itemsize for a in content.arrays.values()), default=1) == 0
    assert all(a.flags.aligned for a in decode(data, FILE_HEADER_BYTES).arrays.values())


@given(st.integers(-(2**53) + 1, 2**53 - 1), st.sampled_from(["{}", "{}.0", "{}.00e0", "{}E0", "{}0e-1"]))
def test_an_integral_number_is_an_integer_however_it_is_written(value: int, form: str) -> None:
    back = decode(worded(form.format(value))).meta["a"]
    assert type(back) is int or abs(value) > 2**53 // 10  # value * 10 in a double
    assert back == value
    assert encode(Payload({}, {"a": float(value)})) == encode(Payload({}, {"a": value}))


@given(PAYLOADS, st.randoms(use_true_random=False), st.sampled_from([(",", ":"), (" , ", " : "), (",\n\t", ":\r\n")]))
def test_another_writer_may_order_and_space_the_header_as_it_likes(
    content: Payload, order: random.Random, separators: tuple[str, str]
) -> None:
    header, arrays = parts(encode(content, FILE_HEADER_BYTES))
    names = list(header)
    order.shuffle(names)
    turned = {name: dict(reversed(header[name].items())) for name in names}
    text = json.dumps(turned, ensure_ascii=False, separators=separators) + " " * order.randrange(9)
    assert same(decode(crafted(text, arrays), FILE_HEADER_BYTES), content)


@given(st.sampled_from(["a", "__metadata__", "dtype", "shape", "data_offsets", "word"]), st.booleans())
def test_no_key_of_the_header_is_there_twice(key: str, other: bool) -> None:
    """Not even with an equal value: readers differ in which of two they take."""
    header = {"__metadata__": META, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header)
    start = text.index(json.dumps(key) + ": ")
    _, end = json.JSONDecoder().raw_decode(text, start + len(json.dumps(key)) + 2)
    entry = text[start:end]
    again = entry.replace("U8", "I8").replace('"1"', '"2"') if other else entry
    assert decode(crafted(text, b"\1"))
    with pytest.raises(PayloadError, match=f"the key '{key}' is there twice"):
        decode(crafted(text[:end] + ", " + again + text[end:], b"\1"))


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", "false", "[true]", "[NaN]"]
)
def test_only_finite_numbers_that_are_not_booleans_are_metadata(number: str) -> None:
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(worded(number))
    value = json.loads(number)
    with pytest.raises(PayloadError, match="cannot be written"):
        encode(Payload({}, {"x": value}))


@given(WORDS, st.randoms(use_true_random=False), st.booleans())
def test_another_writer_may_order_space_and_escape_the_metadata_as_it_likes(
    meta: dict[str, Any], order: random.Random, ascii_only: bool
) -> None:
    keys = list(meta)
    order.shuffle(keys)
    indent = order.choice((None, 1))
    texts = {key: f" {json.dumps(meta[key], indent=indent, ensure_ascii=ascii_only)}\n" for key in keys}
    back = decode(crafted({"__metadata__": texts}), FILE_HEADER_BYTES)
    assert back.meta == meta
    assert encode(back, FILE_HEADER_BYTES) == encode(Payload({}, meta), FILE_HEADER_BYTES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5E-5", 1.5e-5), ("0.000015", 1.5e-5), ("1.50", 1.5), ("1E5", 100000), ("-0", 0), ("-0.0", 0),
        ("1e22", 1e22),
        ('"\\u0061\\/"', "a/"), ('"\u00e9"', "\u00e9"), ('"\\u00E9"', "\u00e9"), ('"\x7f"', "\x7f"),
        ('"\\ud83d\\ude00"', "\U0001f600"), ("[ 1 , 2.0,3e0 ]", [1, 2, 3]),
    ],
)  # fmt: skip
def test_any_json_text_of_a_value_is_read(text: str, value: object) -> None:
    assert decode(worded(f" {text}\n")).meta == {"a": value}


@pytest.mark.parametrize("text", ['"\\ud800"', "01", ".5", "'a'", "[1,]", "1 1", "", "\ufeff1"])
def test_metadata_that_is_not_json_or_not_unicode_is_refused(text: str) -> None:
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(worded(text))


@pytest.mark.parametrize(
    "text", ['{"a":1}', "\ufeff{}", " {}", "[]", "{", '{"\ud800":{}}', '{"__metadata__":{"\\ud800":"1"}}']
)
def test_a_header_that_is_not_a_json_object_in_utf8_is_refused(text: str) -> None:
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(crafted(text))
    wide = text.encode("utf-16-le", "surrogatepass")
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(len(wide).to_bytes(8, "little") + wide)


@pytest.mark.parametrize(
    "shape",
    [[0, 2**62], [0, 2**63], [0] * 9, [0] * 65, [0, 2**40, 2**40], [0, 2**64], [-1], [1.5], [True], [2], 1, None],
)
def test_a_shape_that_no_array_of_these_bytes_has_is_refused(shape: object) -> None:
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
    with pytest.raises(PayloadError, match=r"array|shape"):
        decode(crafted({"__metadata__": META, "a": entry}))


def test_the_largest_empty_shapes_are_read() -> None:
    for shape in ([0] * 8, [0, 2**48], [2**24, 2**24, 0]):
        entry = {"dtype": "F64", "shape": shape, "data_offsets": [0, 0]}
        assert list(decode(crafted({"__metadata__": META, "a": entry})).arrays["a"].shape) == shape


@pytest.mark.parametrize(
    "entry", [{"dtype": "F8_E4M3"}, {"dtype": 7}, {"dtype": ["U8"]}, {"more": 1}, {"data_offsets": [0]},
              {"data_offsets": [0, True]}, {"data_offsets": [0.0, 1]}, {"data_offsets": [1, 0]}]
)  # fmt: skip
def test_an_entry_of_another_form_is_refused(entry: dict[str, object]) -> None:
    whole = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    assert decode(crafted({"__metadata__": META, "a": whole}, b"\0")).arrays["a"].tolist() == [0]
    with pytest.raises(PayloadError, match="array 'a'"):
        decode(crafted({"__metadata__": META, "a": whole | entry}, b"\0"))


@given(PAYLOADS, st.data())
def test_arrays_tile_the_rest_of_the_file(content: Payload, data: st.DataObject) -> None:
    """No gap, no overlap, no byte too many: one moved end anywhere is refused."""
    header, arrays = parts(encode(content, FILE_HEADER_BYTES))
    with pytest.raises(PayloadError):
        decode(crafted(header, arrays + b"\0"), FILE_HEADER_BYTES)
    full = [name for name, array in content.arrays.items() if array.size]
    if full:
        with pytest.raises(PayloadError):
            decode(crafted(header, arrays[:-1]), FILE_HEADER_BYTES)
        entry = header[data.draw(st.sampled_from(full))]
        step = data.draw(st.sampled_from([-1, 1]))
        for ends in ([0], [1], [0, 1]):
            moved = [n + step * (i in ends) for i, n in enumerate(entry["data_offsets"])]
            entry["data_offsets"], before = moved, entry["data_offsets"]
            with pytest.raises(PayloadError):
                decode(crafted(header, arrays), FILE_HEADER_BYTES)
            entry["data_offsets"] = before


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_a_boolean_is_a_byte_of_0_or_1(values: list[int]) -> None:
    entry = {"dtype": "BOOL", "shape": [len(values)], "data_offsets": [0, len(values)]}
    data = crafted({"__metadata__": META, "a": entry}, bytes(values))
    if max(values) <= 1:
        assert decode(data).arrays["a"].tolist() == [v == 1 for v in values]
    else:
        with pytest.raises(PayloadError, match="neither 0 nor 1"):
            decode(data)


@given(PAYLOADS, st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=3))
def test_damage_is_refused_or_makes_a_payload_that_safetensors_reads_alike_and_we_write_again(
    content: Payload, damages: list[tuple[int, int]]
) -> None:
    damaged = bytearray(encode(content, FILE_HEADER_BYTES))
    for at, value in damages:
        damaged[at % len(damaged)] = value
    try:
        back = decode(bytes(damaged), FILE_HEADER_BYTES)
    except PayloadError:
        return
    theirs = dict(deserialize(bytes(damaged)))
    assert {n: (e["shape"], bytes(e["data"])) for n, e in theirs.items()} == {
        n: (list(a.shape), a.tobytes()) for n, a in back.arrays.items()
    }
    assert same(decode(encode(back, FILE_HEADER_BYTES), FILE_HEADER_BYTES), back)


def test_arrays_are_views_of_the_bytes_and_cannot_be_changed() -> None:
    data = encode(Payload({"p": np.zeros(1_000_000, np.float32), "m": np.zeros(1_000_000, np.bool_)}, EXAMPLE.meta))
    decode(data)
    tracemalloc.start()
    try:
        back = decode(data)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    for array in back.arrays.values():
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_arrays_of_a_writer_that_does_not_pad_its_header_are_read_and_are_aligned() -> None:
    expected = np.array([1.5, -2.0, 1e300])
    entry = {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]}
    for pad in range(8):
        array = decode(crafted(json.dumps({"__metadata__": META, "a": entry}) + " " * pad, expected.tobytes())).arrays[
            "a"
        ]
        assert array.tolist() == expected.tolist()
        assert array.flags.aligned


@pytest.mark.parametrize("array", [np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.zeros((1,) * 9), np.array(["a"])])
def test_what_no_reader_would_take_is_not_written(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(PayloadError, match="cannot be written"):
        encode(Payload({"a": array}))


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_forbidden_array_name_is_not_written(name: str) -> None:
    with pytest.raises(PayloadError, match="cannot be written"):
        encode(Payload({name: np.zeros(1)}))


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
    most = Payload({}, {"pad": "x" * empty})
    assert len(encode(most)) == HEADER_BYTES
    assert decode(encode(most)) == most
    more = Payload({}, {"pad": "x" * (empty + 1)})
    with pytest.raises(PayloadError, match="use fewer arrays"):
        encode(more)
    file = encode(more, FILE_HEADER_BYTES)
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        decode(file)
    assert decode(file, FILE_HEADER_BYTES) == more


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (None, r"'x' is missing; it must be 3 finite float32 values"),
        (np.zeros(2, np.float32), r"'x' is float32\[2\]; it must be 3"),
        (np.zeros((1, 3), np.float32), r"'x' is float32\[1, 3\]"),
        (np.zeros(3), r"'x' is float64\[3\]"),
        (np.array([0, np.inf, 0], np.float32), "'x' holds NaN or infinity"),
        (np.array([0, np.nan, 0], np.float32), "'x' holds NaN or infinity"),
    ],
)
def test_a_vector_of_another_form_is_refused_with_its_form(array: Any, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        vector(Payload({} if array is None else {"x": array}), "x", 3)


@pytest.mark.parametrize("value", [0, -1, 8, True, 2.0, "3", None])
def test_a_count_is_an_integer_within_its_range(value: Any) -> None:
    assert count(Payload({}, {"n": 7}), "n", 7) == 7
    with pytest.raises(PayloadError, match=f"metadata n = {value!r}; it must be an integer from 1 to 7"):
        count(Payload({}, {"n": value}), "n", 7)
