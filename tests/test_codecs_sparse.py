"""Top-k, sparse ternary, QSGD, signs and Bloom filters: what travels, what is lost, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, sparse, values
from edge_kernels.codecs.sparse import largest, ternary
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

V = np.array([0, -5, 3, 0.5, -3, 1], np.float32)


def decoded(name: str, v: np.ndarray, stream: int = 0) -> np.ndarray:
    return values.decode(name, values.encode(name, v, stream), len(v), stream)


# --- sparse


def test_topk_by_hand() -> None:
    assert decoded("topk:0.5", V).tolist() == [0, -5, 3, 0, -3, 0]
    assert decoded("topk:0.3", V).tolist() == [0, -5, 3, 0, 0, 0]  # a tie goes to the lower position
    assert decoded("topk:1", V).tolist() == V.tolist()


def test_sparse_ternary_by_hand() -> None:
    assert decoded("stc:0.5", V).tolist() == pytest.approx([0, -11 / 3, 11 / 3, 0, -11 / 3, 0])


@given(arrays(np.float32, st.integers(0, 60), elements=st.sampled_from([0, 1, -1, 2, -2.5, 7])), st.integers(0, 60))
def test_the_largest_are_those_of_a_stable_sort(v: np.ndarray, count: int) -> None:
    due = [i for i in np.argsort(-np.abs(v), kind="stable")[:count] if v[i] != 0]
    assert largest(v, count).tolist() == sorted(due)


def test_a_share_of_values_takes_their_positions_and_four_bytes_or_a_bit_each() -> None:
    d = 100_000
    v = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    entropy = d * (-0.01 * np.log2(0.01) - 0.99 * np.log2(0.99)) / 8
    assert len(values.encode("topk:0.01", v, 0)) == pytest.approx(4 * 1000 + entropy, rel=0.01)
    assert len(values.encode("stc", v, 0)) == pytest.approx(4 + 1000 / 8 + entropy, rel=0.02)


def test_contexts_make_positions_and_signs_cheaper_and_come_back() -> None:
    d = 50_000
    u = counter.uniform(1, d)
    where, leaning = (u * 4).astype(np.uint16), (counter.uniform(2, d) * 2).astype(np.uint8)
    v = np.where(u < 0.04, 1.0, 0.1) * np.where(leaning == 1, -1, 1) * (1 + counter.uniform(3, d))
    t = ternary(v.astype(np.float32), 0.03, (d // 2, d))
    known, plain = sparse.write(t, d, where, leaning), sparse.write(t, d)
    assert len(known) < 0.8 * len(plain)
    for data, contexts in ((known, (where, leaning)), (plain, ())):
        back = sparse.read(data, d, 0.03, (d // 2, d), *contexts)
        assert back.positions.tolist() == t.positions.tolist()
        assert back.values.tolist() == t.values.tolist()
    assert t.magnitudes[0] == pytest.approx(np.abs(v[: d // 2][t.dense(d)[: d // 2] != 0]).mean(), rel=1e-6)


def test_more_positions_than_the_fraction_allows_are_refused() -> None:
    data = values.encode("topk:1", V, 0)
    with pytest.raises(CodecError, match="5 values are sent, at most 2 are allowed"):
        values.decode("topk:0.3", data, 6, 0)
    with pytest.raises(CodecError, match="3 values are sent, at most 2 are allowed"):  # 2.5 is rounded to 2
        values.decode("stc:0.5", values.encode("stc:0.6", V[1:], 0), 5, 0)


# --- quantised


def test_qsgd_by_hand_and_its_bytes() -> None:
    v = np.zeros(513, np.float32)
    v[[0, 1, 512]] = 3, -4, 2
    assert decoded("qsgd:5", v).tolist() == v.tolist()  # 3/5 and 4/5 of the norm 5 are levels, 2 is its bucket's norm
    assert len(values.encode("qsgd:5", v, 0)) < 8 + 60


@pytest.mark.parametrize("levels", [1, 4, 100])
def test_qsgd_is_unbiased_within_the_papers_variance(levels: int) -> None:
    v = np.linspace(-1, 1, 512, dtype=np.float32)  # one bucket, 500 times
    runs = decoded(f"qsgd:{levels}", np.tile(v, 500)).reshape(500, 512).astype(np.float64)
    norm = np.linalg.norm(v)
    assert np.abs(runs.mean(axis=0) - v).max() < 5 * norm / levels / 2 / 500**0.5
    squared = np.square(runs - v).sum(axis=1).mean()
    assert squared < min(512 / levels**2, 512**0.5 / levels) * norm**2  # lemma 3.1
    assert np.abs(runs - v).max() < norm / levels * 1.001


def test_signs_take_a_bit_and_keep_the_mean_magnitude() -> None:
    assert decoded("sign", V).tolist() == pytest.approx([12.5 / 6, -12.5 / 6, 12.5 / 6, 12.5 / 6, -12.5 / 6, 12.5 / 6])
    assert len(values.encode("sign", np.ones(801), 0)) == 4 + 101


# --- Bloom filters


@pytest.mark.parametrize(("name", "rate"), [("bloom", 0.01), ("bloom:0.35", 0.35), ("bloom:0.5", 0.5)])
def test_a_bloom_filter_has_every_position_and_the_given_share_of_others(name: str, rate: float) -> None:
    d = 40_000
    mask = counter.uniform(9, d) < 0.5
    data = codecs.encode(name, mask, d)
    found = codecs.decode_mask(name, data, d)
    assert found[mask].all()
    assert found[~mask].mean() == pytest.approx(rate, rel=0.12)
    assert 8 * len(data) / d == pytest.approx(0.5 * 1.4427 * np.log2(1 / rate), rel=0.06)


def test_a_filter_that_lacks_positions_it_claims_is_refused() -> None:
    data = bytearray(codecs.encode("bloom:0.1", np.arange(50), 1000))
    data[4:] = b"\0" * len(data[4:])
    with pytest.raises(CodecError, match="of 50 positions are in the filter"):
        codecs.decode("bloom:0.1", bytes(data), 1000)
    with pytest.raises(CodecError, match="rate of false positives"):
        codecs.codec("bloom:0.9")
    with pytest.raises(CodecError, match="takes no parameter"):
        codecs.codec("rice:2")
