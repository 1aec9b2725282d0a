"""Codec klms: the mask's mean follows the target, at about twice the KL; anything else than its bytes is refused."""

from __future__ import annotations

import codec_readers
import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import CodecError, klms
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def kl(q: F64, p: F64) -> float:
    """In bits."""
    return float((q * np.log2(q / p) + (1 - q) * np.log2((1 - q) / (1 - p))).sum())


def means(target: F64, prior: F64, draws: int) -> tuple[F64, float]:
    """The mean of many masks, and of the bits that one takes."""
    total, size = np.zeros(len(prior)), 0
    for i in range(draws):
        data = klms.encode(target, prior, counter.key("shared", i), counter.key("own", i))
        total += klms.decode(data, prior, counter.key("shared", i))
        size += 8 * len(data)
    return total / draws, size / draws


def test_a_candidate_is_drawn_from_the_stream_as_specified() -> None:
    # Ten positions in one block; the position of place t has the uniform 256 t + 5 behind the ten numbers of the order.
    numbers = counter.uint64(77, 10 + 64 * 10)
    order = sorted(range(10), key=lambda i: numbers[i])
    uniforms = [int(numbers[10 + (256 * t + 5) // 4]) >> 16 & 0xFFFF for t in range(10)]
    mask = klms.decode(b"\5\5", np.full(10, 0.25), 77)  # two blocks: every second position of the order
    assert [bool(mask[order[2 * t + b]]) for t in range(5) for b in (0, 1)] == [
        uniforms[t] < 16384 for t in range(5) for _ in (0, 1)
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([0, 1, 7, 8, 9, 100, 1001]),
    st.sampled_from([0.0, 0.05, 0.6, 2.0]),
    st.integers(0, 2**64 - 1),
    st.sampled_from([np.float32, np.float64]),
)
def test_both_readers_agree_on_any_mask_and_the_same_draws_give_the_same_bytes(
    d: int, moved: float, stream: int, kind: type[np.floating]
) -> None:
    prior = counter.uniform(d, d).astype(kind)
    target = np.clip(prior + moved * (counter.uniform(d + 1, d) - 0.5), 0, 1)
    data = klms.encode(target, prior, stream, 2)
    assert data == klms.encode(target, prior, stream, 2)
    mask = klms.decode(data, prior, stream)
    assert mask.shape == (d,)
    assert mask.tolist() == codec_readers.klms(data, prior.tolist(), stream)


@pytest.mark.parametrize(("spread", "share"), [(0.2, 0.9), (0.4, 0.2), (0.9, 0.02)])
def test_the_mean_of_masks_comes_nine_tenths_of_the_way_at_twice_the_kl(spread: float, share: float) -> None:
    """Whether many probabilities move a little or few move far; the others stay."""
    d = 4000
    prior = np.clip(counter.uniform(3, d), 0.1, 0.9)
    target = prior.copy()
    moving = counter.uniform(4, d) < share
    target[moving] += (np.where(counter.uniform(5, d) < 0.5, 0.02, 0.98) - prior)[moving] * spread
    mean, size = means(target, prior, 150)
    way = (target - prior) / (prior * (1 - prior))
    assert float((mean - prior) @ way) / float((target - prior) @ way) == pytest.approx(0.89, abs=0.07)
    assert np.abs((mean - prior)[~moving]).mean() < 0.05
    assert size == pytest.approx(2 * kl(target, prior), abs=16)


def test_masks_of_a_target_that_is_the_prior_are_drawn_from_it() -> None:
    prior = np.clip(counter.uniform(3, 3000), 0.05, 0.95)
    mean, size = means(prior, prior, 200)
    z = (mean - prior) / np.sqrt(prior * (1 - prior) / 200)
    assert size == 8
    assert abs(z.mean()) < 0.08
    assert z.std() == pytest.approx(1, abs=0.08)


def test_probabilities_of_0_and_1_are_taken_for_the_next_that_both_sides_can_draw() -> None:
    prior = np.tile([0.0, 1.0], 500)
    mask = klms.decode(klms.encode(prior, prior, 1, 2), prior, 1)
    assert (mask == prior).mean() > 0.99
    moved = klms.decode(klms.encode(1 - prior, prior, 1, 2), prior, 1)  # 16 bits of KL each: as far as the bytes reach
    assert moved.shape == prior.shape


def test_a_wrong_number_of_bytes_and_a_wrong_d_are_refused() -> None:
    prior = np.full(9000, 0.5)
    for blocks in (0, 2, 1126):
        with pytest.raises(CodecError, match=r"not a byte for each of 3 to 1125 blocks; is d = 9000 right"):
            klms.decode(bytes(blocks), prior, 1)
    assert klms.decode(bytes(3), prior, 1).shape == klms.decode(bytes(1125), prior, 1).shape == (9000,)
    assert klms.decode(b"", prior[:0], 1).shape == (0,)


@pytest.mark.parametrize("values", [[1.5], [-0.1], [float("nan")], [[0.5]], [1]])
def test_values_that_are_not_probabilities_are_refused(values: list[float]) -> None:
    for target, prior in ((values, [0.5]), ([0.5], values)):
        with pytest.raises(CodecError, match="probabilities"):
            klms.encode(np.array(target), np.array(prior), 1, 2)


def test_a_target_of_another_length_is_refused() -> None:
    with pytest.raises(CodecError, match="2 entries and the prior 1"):
        klms.encode(np.array([0.5, 0.5]), np.array([0.5]), 1, 2)
