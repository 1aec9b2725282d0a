"""Importance sampling: the decoded sample follows the target and costs about the KL."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import CodecError, klms
from hypothesis import given, settings
from hypothesis import strategies as st


def kl_bits(q: np.ndarray, p: np.ndarray) -> float:  # type: ignore[type-arg]
    return float((q * np.log2(q / p) + (1 - q) * np.log2((1 - q) / (1 - p))).sum())


def test_a_candidate_is_drawn_from_the_stream_as_specified() -> None:
    # Bits = 4, unit 16: one block of 10 positions; candidate 5 uses numbers 5 * 3 .. 5 * 3 + 2 of the stream.
    prior = np.full(10, 0.25)
    payload = bytes([4, 4, 0, 1, 0b10111])  # log2(unit), bits, k, one block; one unit: 1; no extra bits: 1; index 5
    numbers = counter.uint64(77, 3, 15)
    uniforms = [int(n) >> shift & 0xFFFF for n in numbers for shift in (0, 16, 32, 48)][:10]
    assert klms.decode(payload, prior, 77).tolist() == [u < 16384 for u in uniforms]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([0, 1, 15, 16, 17, 500, 3000]), st.integers(4, 9), st.sampled_from([0.0, 0.05, 0.6]))
def test_any_sample_decodes_and_encoding_is_deterministic(d: int, bits: int, moved: float) -> None:
    prior = counter.uniform(d, d).astype(np.float32)
    target = np.clip(prior + moved * (counter.uniform(d + 1, d) - 0.5), 0, 1)
    payload = klms.encode(target, prior, 1, 2, bits, margin=2)
    assert payload == klms.encode(target, prior, 1, 2, bits, margin=2)
    assert klms.decode(payload, prior, 1).shape == (d,)


def test_samples_follow_the_target_and_cost_a_few_times_the_kl() -> None:
    d, draws = 2000, 60
    prior = np.full(d, 0.5)
    target = np.where(np.arange(d) % 10 == 0, 0.8, 0.5)
    got = np.zeros(d)
    size = 0
    for i in range(draws):
        payload = klms.encode(target, prior, counter.key("shared", i), counter.key("own", i), bits=9, margin=4)
        got += klms.decode(payload, prior, counter.key("shared", i))
        size += len(payload)
    moved = got[::10].mean() / draws
    assert 0.76 < moved < 0.82  # few candidates bias the sample slightly towards the prior
    assert abs(np.delete(got, slice(None, None, 10)).mean() / draws - 0.5) < 0.01
    assert size * 8 / draws < 4.5 * kl_bits(target, prior)


def test_blocks_follow_the_kl_and_a_dense_unit_gets_a_longer_index() -> None:
    prior = np.full(4096, 0.5)
    target = prior.copy()
    target[:16] = 0.99  # 14 bits of KL in the first unit alone
    calm = klms.encode(prior, prior, 1, 2)
    payload = klms.encode(target, prior, 1, 2)
    assert len(calm) <= 8
    assert len(payload) <= 12
    assert klms.decode(payload, prior, 1)[:16].mean() > 0.85


def test_truncated_and_extended_payloads_and_a_wrong_d_are_refused() -> None:
    prior = counter.uniform(5, 900)
    payload = klms.encode(np.clip(prior + 0.2, 0, 1), prior, 1, 2, bits=4, margin=1)
    for end in range(len(payload)):
        with pytest.raises(CodecError):
            klms.decode(payload[:end], prior, 1)
    with pytest.raises(CodecError):
        klms.decode(payload + b"\0", prior, 1)
    with pytest.raises(CodecError):
        klms.decode(payload, prior[:500], 1)


@pytest.mark.parametrize("values", [[1.5], [-0.1], [float("nan")], [[0.5]], [1]])
def test_values_that_are_not_probabilities_are_refused(values: list[float]) -> None:
    with pytest.raises(CodecError, match="probabilities"):
        klms.encode(np.array(values), np.array([0.5]), 1, 2)


def test_an_index_has_four_to_sixteen_bits_and_a_smaller_margin() -> None:
    for bits, margin in ((3, 1), (17, 3), (8, 8)):
        with pytest.raises(CodecError, match="4 to 16 bits"):
            klms.encode(np.array([0.5]), np.array([0.5]), 1, 2, bits, margin)
