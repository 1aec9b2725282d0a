"""Counts given a prediction: lossless, at the conditional entropy, refused when damaged."""

from __future__ import annotations

from functools import cache

import codec_readers
import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import CodecError, counts
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

QUICK = settings(deadline=None, max_examples=30)


def near(prediction: counts.Counts, top: int, stay: float) -> counts.Counts:
    """Values that mostly equal the prediction, else lie one above or anywhere."""
    d = len(prediction)
    u = counter.uniform(counter.key("near", d, top), d)
    drawn = (counter.uint64(counter.key("drawn", d, top), d) % np.uint64(top + 1)).astype(prediction.dtype)
    above = np.minimum(prediction + (prediction < top), top).astype(prediction.dtype)
    chosen: NDArray[np.unsignedinteger] = np.where(u < stay, prediction, np.where(u < (1 + stay) / 2, above, drawn))
    return chosen


def predictions(d: int, top: int) -> counts.Counts:
    return (counter.uint64(counter.key("before", d, top), d) % np.uint64(top + 1)).astype(counts.dtype_for(top))


def conditional_bits(values: counts.Counts, given_: counts.Counts, top: int) -> float:
    joint = np.zeros((top + 1, top + 1))
    np.add.at(joint, (given_, values), 1)
    shares = joint / np.maximum(joint.sum(axis=1, keepdims=True), 1)
    return float(-(joint * np.log2(np.where(joint > 0, shares, 1))).sum())


def test_counts_equal_to_the_prediction_cost_a_few_bytes() -> None:
    before = predictions(100_000, 10)
    payload = counts.encode(before, 10, before)
    assert len(payload) <= 40  # eleven contexts; in each, all values equal their prediction
    assert np.array_equal(counts.decode(payload, 100_000, 10, before), before)


def test_counts_that_can_only_be_zero_take_no_bytes() -> None:
    assert counts.encode(np.zeros(50, np.uint8), 0) == b""
    assert counts.decode(b"", 50, 0).tolist() == [0] * 50


@QUICK
@given(
    st.sampled_from([0, 1, 2, 50, 700]),
    st.sampled_from([0, 1, 2, 10, 15, 16, 17, 100, 255, 256, 5000]),
    st.booleans(),
    st.sampled_from([0.0, 0.9]),
)
def test_counts_come_back_and_the_plain_reader_agrees(d: int, top: int, predicted: bool, stay: float) -> None:
    before = predictions(d, top)
    now = near(before, top, stay)
    prediction = before if predicted else None
    payload = counts.encode(now, top, prediction)
    found = counts.decode(payload, d, top, prediction)
    assert found.dtype == counts.dtype_for(top)
    assert np.array_equal(found, now)
    if d <= 50:
        plain = codec_readers.counts(payload, d, top, before.tolist() if predicted else None)
        assert plain == now.tolist()


@pytest.mark.parametrize("top", [63, 64, 5000])
def test_predictions_are_contexts_in_at_most_64_levels(top: int) -> None:
    prediction = np.arange(top + 1, dtype=counts.dtype_for(top))
    due = [p if top < 64 else p * 64 // (top + 1) for p in range(top + 1)]
    contexts = counts._given(prediction, top + 1, top)[1]
    assert contexts is not None
    assert contexts.tolist() == due
    assert max(due) == 63


def test_segments_are_coded_one_after_the_other() -> None:
    d = (1 << 20) + 1000
    before = predictions(d, 3)
    now = near(before, 3, 0.99)
    for prediction in (before, None):
        assert np.array_equal(counts.decode(counts.encode(now, 3, prediction), d, 3, prediction), now)


def test_counts_of_ten_devices_cost_their_conditional_entropy() -> None:
    d = 200_000
    before = np.random.default_rng(0).binomial(10, np.random.default_rng(1).beta(0.3, 0.3, d)).astype(np.uint8)
    now = near(before, 10, 0.8)
    assert len(counts.encode(now, 10, before)) <= 1.02 * conditional_bits(now, before, 10) / 8
    alone = conditional_bits(now, np.zeros(d, np.uint8), 10) / 8
    assert len(counts.encode(now, 10)) <= 1.02 * alone


def test_a_rank_above_the_top_is_refused() -> None:
    # 12 has rank 23 and class 16, whether top is 31 or 17. But with top = 17, ranks end at 17.
    payload = counts.encode(np.array([12], np.uint8), 31)
    assert counts.decode(payload, 1, 31).tolist() == [12]
    with pytest.raises(CodecError, match="rank 23 is above 17"):
        counts.decode(payload, 1, 17)


def test_long_lengths_and_set_padding_are_refused() -> None:
    payload = counts.encode(np.array([12, 31, 0], np.uint8), 31)
    with pytest.raises(CodecError, match="longer than necessary"):
        counts.decode(bytes([payload[0] | 128, 0]) + payload[1:], 3, 31)
    payload = counts.encode(np.array([20], np.uint8), 40)  # class 17, five low bits
    assert payload[-1] < 32
    with pytest.raises(CodecError, match="padding"):
        counts.decode(payload[:-1] + bytes([payload[-1] | 128]), 1, 40)


def test_values_outside_the_range_are_refused() -> None:
    good = np.zeros(5, np.uint8)
    for call in (
        lambda: counts.encode(np.array([3], np.uint8), 2),
        lambda: counts.encode(np.array([1]), 2),
        lambda: counts.encode(good, 2, np.zeros(4, np.uint8)),
        lambda: counts.encode(good, 2, np.full(5, 3, np.uint8)),
        lambda: counts.encode(good, -1),
        lambda: counts.decode(b"\0", 5, 0),
    ):
        with pytest.raises(CodecError):
            call()


@cache
def half_stayed(top: int) -> bytes:
    before = predictions(300, top)
    return counts.encode(near(before, top, 0.5), top, before)


@QUICK
@given(st.integers(0, 2**30), st.integers(0, 255), st.sampled_from([3, 40]))
def test_damaged_counts_stay_within_their_range_or_are_refused(at: int, byte: int, top: int) -> None:
    before = predictions(300, top)
    payload = bytearray(half_stayed(top))
    payload[at % len(payload)] = byte
    try:
        found = counts.decode(bytes(payload), 300, top, before)
    except CodecError as error:
        assert len(str(error)) > 20  # noqa: PT017
    else:
        assert int(found.max()) <= top
    with pytest.raises(CodecError):
        counts.decode(bytes(payload[: at % len(payload)]), 300, top, before)
