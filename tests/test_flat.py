"""Typed values become named arrays and come back equal; what does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from edge_client.flat import from_arrays, to_arrays
from edge_client.protocol.payload import Arrays, Payload, decode, encode


@dataclass(frozen=True)
class Inner:
    x: np.ndarray[Any, Any]
    steps: int | None = None


@dataclass(frozen=True)
class Value:
    values: np.ndarray[Any, Any]
    count: int
    share: float
    known: bool
    text: str
    inner: Inner
    maybe: Inner | None


def same(a: Value, b: Value) -> bool:
    return {k: v.tobytes() for k, v in to_arrays(a).items()} == {k: v.tobytes() for k, v in to_arrays(b).items()}


DTYPES = st.sampled_from([np.float32, np.uint8, np.int64, np.bool_])
ARRAY = arrays(DTYPES, array_shapes(min_dims=1, max_dims=3, min_side=0))
INNER = st.builds(Inner, ARRAY, st.none() | st.integers(-(2**63), 2**63 - 1))
NAME = st.text("abc-_09.", min_size=1, max_size=5)


@given(
    value=st.builds(
        Value, ARRAY, st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.text(max_size=9),
        INNER, st.none() | INNER,
    )
)  # fmt: skip
def test_a_value_comes_back_equal_through_a_payload(value: Value) -> None:
    stored = decode(encode(Payload(to_arrays(value)))).arrays
    found = from_arrays(Value, stored)
    assert same(found, value)
    assert (found.count, found.share, found.known, found.text) == (value.count, value.share, value.known, value.text)
    assert (found.maybe is None) == (value.maybe is None)
    assert found.inner.steps == value.inner.steps
    assert found.values.dtype == value.values.dtype
    assert found.values.shape == value.values.shape


def test_nested_fields_are_named_by_their_path_and_none_is_absent() -> None:
    one = np.ones(1)
    value = Value(one, 3, 0.5, True, "é", Inner(one, 7), None)
    assert set(to_arrays(value)) == {"values", "count", "share", "known", "text", "inner.x", "inner.steps"}
    assert to_arrays(None) == {}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"values": None}, "lacks 'values'"),
        ({"inner.x": None}, "lacks 'inner.x'"),
        ({"other": np.ones(1)}, "other"),
        ({"count": np.ones(1)}, "'count' is float64"),
        ({"count": np.ones(2, np.int64)}, "'count' is int64"),
        ({"maybe.steps": np.array(1)}, "lacks 'maybe.x'"),
    ],
)
def test_arrays_that_are_not_the_value_are_refused(change: dict[str, Any], word: str) -> None:
    one = np.ones(1)
    stored: Arrays = {**to_arrays(Value(one, 3, 0.5, True, "", Inner(one), None)), **change}
    with pytest.raises(ValueError, match=word):
        from_arrays(Value, {k: v for k, v in stored.items() if v is not None})


def test_a_field_of_another_kind_is_refused_by_name() -> None:
    @dataclass
    class Bad:
        items: list[int]

    with pytest.raises(TypeError, match="'items' holds list"):
        to_arrays(Bad([1]))
