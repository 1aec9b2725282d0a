"""Folding packed masks: carry-save counters equal unpack-and-add, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.folding import Packed, Tally, overlap, popcount
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray


def pack(mask: NDArray[np.bool_]) -> Packed:
    return np.packbits(mask, bitorder="little")


def random_masks(d: int, count: int, seed: int) -> list[NDArray[np.bool_]]:
    return [counter.uniform(counter.key(seed, i), d) < 0.2 + 0.6 * (i % 3) / 2 for i in range(count)]


def test_three_masks_of_three_positions_by_hand() -> None:
    tally = Tally(3)
    for mask, weight in (([1, 0, 1], 1), ([1, 0, 0], 3), ([1, 1, 0], 1)):
        tally.add(np.packbits(mask, bitorder="little"), weight)
    assert tally.counts().tolist() == [5, 1, 1]
    assert tally.total == 5
    assert tally.at_least(1).tolist() == [0b111]
    assert tally.at_least(2).tolist() == [0b001]


def test_no_masks_count_nothing() -> None:
    assert Tally(5).counts().tolist() == [0] * 5
    assert Tally(0).counts().tolist() == []
    assert Tally(5).at_least(1).tolist() == [0]
    assert Tally(5).at_least(0).tolist() == [0b11111]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([0, 1, 7, 8, 63, 64, 65, 1000]), st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 300]), max_size=20),
       st.integers(0, 99))  # fmt: skip
def test_weighted_sums_and_votes_are_those_of_unpacked_masks(d: int, weights: list[int], seed: int) -> None:
    masks = random_masks(d, len(weights), seed)
    tally = Tally(d)
    for mask, weight in zip(masks, weights, strict=True):
        tally.add(pack(mask), weight)
    expected = sum((m * w for m, w in zip(masks, weights, strict=True)), np.zeros(d, np.int64))
    assert tally.counts().tolist() == expected.tolist()
    assert tally.counts().dtype == np.min_scalar_type(sum(weights))
    for threshold in (0, 1, 2, 7, 10**6):
        assert (
            np.unpackbits(tally.at_least(threshold), count=d, bitorder="little").tolist()
            == (expected >= threshold).tolist()
        )


def test_counts_may_be_read_between_additions() -> None:
    masks = random_masks(200, 40, 1)
    tally = Tally(200)
    expected = np.zeros(200, np.int64)
    for mask in masks:
        tally.add(pack(mask))
        expected += mask
        assert tally.counts().tolist() == expected.tolist()


def test_masks_wider_than_a_chunk_are_summed() -> None:
    d = 3 * (1 << 21) + 77
    masks = random_masks(d, 5, 2)
    tally = Tally(d)
    for mask in masks:
        tally.add(pack(mask))
    assert np.array_equal(tally.counts(), np.sum(masks, axis=0))


def test_overlap_counts_add_only_where_a_second_mask_is_set() -> None:
    masks, wheres = random_masks(500, 9, 3), random_masks(500, 9, 4)
    tally = Tally(500)
    for mask, where in zip(masks, wheres, strict=True):
        tally.add(pack(mask), where=pack(where))
    assert np.array_equal(tally.counts(), np.sum([m & w for m, w in zip(masks, wheres, strict=True)], axis=0))
    assert overlap(pack(masks[0]), pack(wheres[0])) == np.count_nonzero(masks[0] & wheres[0])
    assert popcount(pack(masks[1])) == np.count_nonzero(masks[1])


def test_masks_that_do_not_lie_on_words_count_too() -> None:
    masks = random_masks(6400, 40, 7)
    tally = Tally(6400)
    for i, mask in enumerate(masks):
        room = np.zeros(808 + i % 8, np.uint8)
        room[i % 8 :][:800] = pack(mask)
        tally.add(room[i % 8 :][:800])
    assert np.array_equal(tally.counts(), np.sum(masks, axis=0))


def test_a_mask_on_words_is_not_copied_and_not_changed() -> None:
    mask = np.tile(np.uint8([0b1010_0101, 0xFF, 0, 1]), 3_125_000)[:-1]
    before = mask.copy()
    tracemalloc.start()
    tally = Tally(99_999_991)
    for _ in range(15):
        tally.add(mask)
    assert tracemalloc.get_traced_memory()[0] < 2_000_000
    tracemalloc.stop()
    assert np.array_equal(tally.counts(), 15 * np.unpackbits(mask, count=99_999_991, bitorder="little"))
    assert np.array_equal(mask, before)


def test_a_weight_that_is_no_integer_is_refused_before_anything_is_counted() -> None:
    tally = Tally(3)
    with pytest.raises(TypeError):
        tally.add(np.uint8([0b101]), 1.5)  # type: ignore[arg-type]
    assert tally.total == 0
    assert tally.counts().tolist() == [0, 0, 0]


def test_a_mask_that_does_not_fit_is_refused() -> None:
    tally = Tally(10)
    for mask, weight, reason in (
        (np.zeros(1, np.uint8), 1, "uint8"),
        (np.zeros(2, np.int64), 1, "int64"),
        (np.array([0, 4], np.uint8), 1, "beyond position 9"),
        (np.zeros(2, np.uint8), -1, "whole numbers"),
    ):
        with pytest.raises(ValueError, match=reason):
            tally.add(mask, weight)
    with pytest.raises(ValueError, match="do not overlap"):
        overlap(np.zeros(1, np.uint8), np.zeros(2, np.uint8))


def test_a_hundred_masks_of_a_million_bits_take_little_memory() -> None:
    d = 1_000_000
    masks = [pack(mask) for mask in random_masks(d, 4, 6)]
    tracemalloc.start()
    tally = Tally(d)
    for i in range(100):
        tally.add(masks[i % 4])
    tally.counts()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 6 * d  # a tenth of the sixty megabytes allowed for ten million
