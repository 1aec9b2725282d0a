"""The counter-based generator, which other languages must reproduce."""

from __future__ import annotations

import numpy as np
from edge_kernels import counter
from hypothesis import given
from hypothesis import strategies as st

M = (1 << 64) - 1


def mix(z: int) -> int:
    """The generator's definition, one number at a time, in plain integers."""
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M
    return z ^ (z >> 31)


def test_the_stream_of_key_zero_is_the_published_splitmix64_sequence() -> None:
    assert counter.uint64(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(0, M), st.integers(0, 2**40), st.integers(0, 50))
def test_any_slice_of_a_stream_follows_the_definition(key: int, start: int, count: int) -> None:
    expected = [mix((key + (i + 1) * 0x9E3779B97F4A7C15) & M) for i in range(start, start + count)]
    assert counter.uint64(key, count, start).tolist() == expected


def test_a_slice_across_internal_blocks_equals_that_of_the_whole_stream() -> None:
    whole = counter.uint64(7, 100_000)
    assert np.array_equal(counter.uint64(7, 40_000, 30_000), whole[30_000:70_000])


def test_keys_depend_on_every_word_and_on_their_order() -> None:
    keys = {counter.key(*w) for w in [(1, 2), (2, 1), (1,), (1, 2, 0), ("1", 2), (1, "2"), (), (0,)]}
    assert len(keys) == 8


def test_uniform_numbers_lie_in_the_half_open_unit_interval_with_mean_one_half() -> None:
    u = counter.uniform(counter.key("test"), 100_000)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.005


@given(st.integers(0, M), st.integers(0, 300))
def test_a_permutation_holds_every_index_once(key: int, count: int) -> None:
    assert sorted(counter.permutation(key, count).tolist()) == list(range(count))
