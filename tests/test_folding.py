"""Folding packed masks: the counts equal the sums of the unpacked masks, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.folding import Packed, Tally
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray


def pack(mask: NDArray[np.bool_]) -> Packed:
    return np.packbits(mask, bitorder="little")


def random_masks(d: int, count: int, seed: int) -> list[NDArray[np.bool_]]:
    return [counter.uniform(counter.key(seed, i), d) < 0.2 + 0.6 * (i % 3) / 2 for i in range(count)]


def test_three_masks_of_three_positions_by_hand() -> None:
    tally = Tally(3)
    for mask in ([1, 0, 1], [1, 0, 0], [1, 1, 0]):
        tally.add(np.packbits(mask, bitorder="little"))
    assert tally.counts().tolist() == [3, 1, 1]
    assert tally.total == 3


def test_no_masks_give_counts_of_zero() -> None:
    assert Tally(5).counts().tolist() == [0] * 5
    assert Tally(0).counts().tolist() == []


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([0, 1, 7, 8, 63, 64, 65, 1000]), st.integers(0, 40), st.integers(0, 99))
def test_the_counts_are_the_sums_of_the_unpacked_masks(d: int, count: int, seed: int) -> None:
    masks = random_masks(d, count, seed)
    tally = Tally(d)
    for mask in masks:
        tally.add(pack(mask))
    assert tally.total == count
    assert tally.counts().tolist() == sum(masks, np.zeros(d, np.int64)).tolist()


@pytest.mark.parametrize("count", [1, 255, 256, 257])
def test_counts_have_the_smallest_dtype_that_holds_the_number_of_masks(count: int) -> None:
    tally = Tally(70)
    for _ in range(count):
        tally.add(pack(np.ones(70, np.bool_)))
    assert tally.counts().tolist() == [count] * 70
    assert tally.counts().dtype == np.min_scalar_type(count)


def test_counts_may_be_read_between_additions() -> None:
    masks = random_masks(200, 40, 1)
    tally = Tally(200)
    expected = np.zeros(200, np.int64)
    for mask in masks:
        tally.add(pack(mask))
        expected += mask
        assert tally.counts().tolist() == expected.tolist()


def test_masks_wider_than_a_tile_are_summed() -> None:
    d = 3 * (1 << 21) + 77
    masks = random_masks(d, 5, 2)
    tally = Tally(d)
    for mask in masks:
        tally.add(pack(mask))
    assert np.array_equal(tally.counts(), np.sum(masks, axis=0))


def test_masks_at_any_byte_address_are_summed() -> None:
    masks = random_masks(6400, 40, 7)
    tally = Tally(6400)
    for i, mask in enumerate(masks):
        room = np.zeros(808 + i % 8, np.uint8)
        room[i % 8 :][:800] = pack(mask)
        tally.add(room[i % 8 :][:800])
    assert np.array_equal(tally.counts(), np.sum(masks, axis=0))


def test_an_added_mask_is_not_changed_and_may_change_later() -> None:
    mask = np.tile(np.uint8([0b1010_0101, 0xFF, 0, 1]), 100)
    before = mask.copy()
    tally = Tally(3200)
    for _ in range(3):
        tally.add(mask)
    assert np.array_equal(mask, before)
    mask[:] = 0
    assert np.array_equal(tally.counts(), 3 * np.unpackbits(before, bitorder="little"))


def test_a_mask_that_does_not_fit_is_refused_and_not_counted() -> None:
    tally = Tally(10)
    for mask, reason in (
        (np.zeros(1, np.uint8), r"uint8\[2\], not uint8\[1\]"),
        (np.zeros(2, np.int64), "int64"),
        (np.array([0, 4], np.uint8), "after position 9"),
    ):
        with pytest.raises(ValueError, match=reason):
            tally.add(mask)
    assert tally.total == 0


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
    assert peak <= 4 * d
