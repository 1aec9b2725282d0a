"""Codecs of sets of positions: hand-made examples, round trips, the plain readers, rates against the entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import codec_readers
import numpy as np
import pytest
from edge_bench.testing import check_codec
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, auto, classes, describe, entropy, rans, rice, streams
from edge_kernels.coupling import coupling_contexts
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

QUICK = settings(deadline=None, max_examples=40)  # the machine may be busy
EXACT = codecs.names(exact_only=True)


def flips(d: int, rate: float, word: str = "flips") -> NDArray[np.bool_]:
    return counter.uniform(counter.key(word, d, int(rate * 1e6)), d) < rate


def entropy_of(mask: NDArray[np.bool_], contexts: NDArray[Any] | None = None) -> float:
    """The bits of the mask if the flips of each context are independent, at the context's own rate."""
    contexts = np.zeros(len(mask), np.uint8) if contexts is None else contexts
    size = np.bincount(contexts).astype(float)
    flip = np.bincount(contexts[mask], minlength=len(size)).astype(float)
    rate = np.divide(flip, size, out=np.zeros_like(size), where=size > 0)
    inner = (rate > 0) & (rate < 1)
    p, n = rate[inner], size[inner]
    return float(-(n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum())


@st.composite
def masks(draw: st.DrawFn) -> NDArray[np.bool_]:
    """Masks of up to 3000 positions: with one rate, in runs, or with two rates."""
    d = draw(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 1000, 3000]))
    u = counter.uniform(draw(st.integers(0, 2**32)), d)
    rate = draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3, 0.5, 0.8, 0.999, 1.0]))
    other = draw(st.sampled_from([rate, 0.0, 0.5, 1.0]))
    burst = draw(st.sampled_from([1, 1, 3, 50]))
    if burst > 1:  # runs of ones, or runs of one rate, among zeros
        starts = np.repeat(u[: -(-d // burst)] < rate, burst)[:d]
        return starts & (counter.uniform(d, d) < draw(st.sampled_from([0.5, 1.0])))
    return u < np.where(np.arange(d) < draw(st.integers(0, max(d, 1))), rate, other)


# --- by hand


def test_bits_put_position_zero_in_the_lowest_bit_of_the_first_byte() -> None:
    assert codecs.encode("bits", np.array([0, 3, 9]), 12) == bytes([0b00001001, 0b00000010])


def test_the_rice_bytes_of_a_small_set_match_a_calculation_by_hand() -> None:
    # The gaps before positions 1, 2, 5 are 1, 0, 2. Parameter 2 costs 3 + 3 + 1 = 7 bits. Parameter 1 costs 6 bits: the
    # unary codes 01, 1, 001. So k = 0, U = 6, and the bits are 0 1 1 0 0 1 from the lowest up.
    assert codecs.encode("rice", np.array([1, 2, 5]), 12) == bytes([16, 3, 0, 6, 0b100110])


def test_an_empty_set_costs_two_bytes_in_entropy() -> None:
    # No contexts: mode 15. The offset 0 takes two bits. The prediction is 12 // 32 = 0, so the difference 0 is a one.
    assert codecs.encode("entropy", np.zeros(12, bool), 12) == bytes([15, 0b100])


def test_auto_names_its_codec_in_the_first_byte() -> None:
    assert codecs.encode("auto", np.zeros(7, bool), 7) == b"\0\0"
    assert auto.codec_of(codecs.encode("auto", flips(100_000, 0.01), 100_000)) == "entropy"
    uneven = np.zeros(100_000, bool)
    uneven[:2000] = flips(2000, 0.5)
    assert auto.codec_of(codecs.encode("auto", uneven, 100_000)) == "rice"
    assert auto.codec_of(codecs.encode("auto", flips(100_000, 0.5), 100_000)) == "bits"


# --- for all sets


@pytest.mark.parametrize("name", [*codecs.names(), "bloom:0.2"])
def test_every_codec_keeps_the_contract(name: str) -> None:
    check_codec(codecs.codec(name))


@QUICK
@given(masks(), st.sampled_from(EXACT))
def test_an_exact_codec_gives_back_the_set(mask: NDArray[np.bool_], name: str) -> None:
    payload = codecs.encode(name, mask, len(mask))
    found = codecs.decode(name, payload, len(mask))
    assert found.dtype == np.uint32
    assert np.array_equal(found, np.flatnonzero(mask))
    assert payload == codecs.encode(name, np.flatnonzero(mask), len(mask))  # positions or a mask: the same bytes
    assert np.array_equal(codecs.decode_mask(name, payload, len(mask)), mask)


@QUICK
@given(masks(), st.integers(1, 300), st.booleans(), st.sampled_from(["entropy", "auto"]))
def test_contexts_change_the_bytes_but_not_the_set(mask: NDArray[np.bool_], levels: int, wide: bool, name: str) -> None:
    dtype = np.uint16 if wide or levels > 256 else np.uint8
    contexts = (counter.uint64(levels, len(mask)) % np.uint64(levels)).astype(dtype)
    payload = codecs.encode(name, mask, len(mask), contexts)
    assert np.array_equal(codecs.decode(name, payload, len(mask), contexts), np.flatnonzero(mask))


@QUICK
@given(masks())
def test_the_readers_written_from_the_specification_agree(mask: NDArray[np.bool_]) -> None:
    d, expected = len(mask), np.flatnonzero(mask).tolist()
    contexts = (counter.uint64(9, d) % np.uint64(6)).astype(np.uint8)
    assert codec_readers.rice(codecs.encode("rice", mask, d), d) == expected
    assert codec_readers.entropy(codecs.encode("entropy", mask, d), d) == expected
    assert codec_readers.entropy(codecs.encode("entropy", mask, d, contexts), d, contexts.tolist()) == expected


def test_the_plain_reader_agrees_on_payloads_with_classes_and_many_lanes() -> None:
    d = 30_000
    contexts = (counter.uint64(3, d) % np.uint64(4)).astype(np.uint8)
    mask = counter.uniform(4, d) < np.array([0.001, 0.05, 0.4, 0.97])[contexts]
    payload = codecs.encode("entropy", mask, d, contexts)
    assert payload[0] == 0  # every context is a class
    assert codec_readers.entropy(payload, d, contexts.tolist()) == np.flatnonzero(mask).tolist()
    finer = contexts * np.uint8(4) + (np.arange(d) % 4).astype(np.uint8)
    merged = codecs.encode("entropy", mask, d, finer)
    assert merged == bytes([2]) + payload[1:]  # four neighbours are a class
    assert codec_readers.entropy(merged, d, finer.tolist()) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("mode", [0, 11, 15])
def test_a_payload_of_no_positions_is_its_mode(mode: int) -> None:
    none = np.zeros(0, np.uint8)
    assert codecs.decode("entropy", bytes([mode]), 0, none).tolist() == []
    assert codec_readers.entropy(bytes([mode]), 0, []) == []


def test_sets_across_block_and_tile_borders_come_back() -> None:
    d = 300_000
    contexts = (np.arange(d) // 1000 % 40).astype(np.uint8)
    for mask in (flips(d, 0.4), np.arange(d) % 65536 >= 65535, np.arange(d) >= d - 1, np.arange(d) % 3 != 0):
        for name in EXACT:
            payload = codecs.encode(name, mask, d, contexts)
            assert np.array_equal(codecs.decode_mask(name, payload, d, contexts), mask), name


@pytest.mark.parametrize("name", ["rice", "entropy"])
def test_positions_of_the_longest_vector_come_back(name: str) -> None:
    ends = [0, 2**31, 2**32 - 2]
    assert codecs.decode(name, codecs.encode(name, np.array(ends), codecs.MAX_D), codecs.MAX_D).tolist() == ends


def test_payloads_whose_last_byte_has_any_number_of_unused_bits_come_back() -> None:
    for i in range(200):
        mask = flips(1000 + i, 0.05)
        assert (
            codecs.decode_mask("entropy", codecs.encode("entropy", mask, len(mask)), len(mask)).tolist()
            == mask.tolist()
        )


def test_a_list_of_unary_numbers_ends_before_other_ones_that_follow_it() -> None:
    numbers = np.zeros(70_000, np.uint32)  # more bits than are searched at a time
    numbers[[0, 69_999]] = 3
    bits = np.concatenate([streams.unary(numbers), np.ones(100_000, np.bool_)])
    found, used = streams.read_unary(bits, 70_000)
    assert found.tolist() == numbers.tolist()
    assert used == 70_006


def test_rice_takes_the_cheapest_of_all_its_parameters() -> None:
    ascending = [2**k * (3 if thirds else 1) for k, thirds in map(rice._parameter, range(9))]
    assert ascending == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    for i, rate in enumerate(np.geomspace(1e-5, 0.5, 60)):
        gaps = np.random.default_rng(i).geometric(rate, 500).astype(np.uint32) - np.uint32(1)
        due = min(rice._cost(gaps, k, thirds) for k in range(25) for thirds in (False, True))
        assert rice._cost(gaps, *rice._best(gaps)) == due


@pytest.mark.parametrize(("size", "log"), [(256, 16), (512, 8), (513, 8)])
def test_rice_cuts_gaps_that_become_longer_into_small_blocks(size: int, log: int) -> None:
    positions = np.cumsum(np.where(np.arange(size) < 256, 2, 3000)).astype(
        np.uint32
    )  # the first 256 are near each other
    payload = codecs.encode("rice", positions, 1_000_000)
    assert payload[0] == log
    assert codecs.decode("rice", payload, 1_000_000).tolist() == positions.tolist()


# --- rates


@pytest.mark.parametrize("rate", [0.0005, 0.002, 0.01, 0.05, 0.1, 0.15, 0.21, 0.25])
def test_rice_is_within_three_per_cent_and_entropy_within_one_of_the_entropy_at_a_million(rate: float) -> None:
    mask = flips(1_000_000, rate)
    bound = entropy_of(mask) / 8
    assert len(codecs.encode("rice", mask, len(mask))) <= 1.03 * bound
    assert len(codecs.encode("entropy", mask, len(mask))) <= 1.01 * bound


def test_blocks_of_rice_adapt_to_uneven_flips() -> None:
    d = 1_000_000
    rates = np.where(np.arange(d) // 50_000 % 2 == 0, 0.2, 0.001)
    mask = counter.uniform(8, d) < rates
    bound = entropy_of(mask, (rates > 0.1).astype(np.uint8)) / 8
    assert len(codecs.encode("rice", mask, d)) <= 1.08 * bound < 0.85 * entropy_of(mask) / 8


def test_coupled_samples_cost_about_their_conditional_entropy() -> None:
    d = 300_000
    theta = np.random.default_rng(0).beta(0.3, 0.3, d)
    moved = np.clip(theta + 0.1 * (counter.uniform(1, d) - 0.5), 0, 1)
    u = counter.uniform(2, d)
    mask = (u < theta) != (u < moved)
    contexts = coupling_contexts(theta, u)
    payload = codecs.encode("entropy", mask, d, contexts)
    assert np.array_equal(codecs.decode_mask("entropy", payload, d, contexts), mask)
    bound = entropy_of(mask, contexts) / 8
    assert len(payload) <= 1.01 * bound + 128  # the flip counts of 168 contexts
    assert len(payload) < 0.75 * entropy_of(mask) / 8


def test_useless_contexts_cost_at_most_a_few_bytes() -> None:
    mask = flips(5000, 0.02)
    contexts = (counter.uint64(1, 5000) % np.uint64(256)).astype(np.uint8)
    assert len(codecs.encode("entropy", mask, 5000, contexts)) <= len(codecs.encode("entropy", mask, 5000)) + 16


def test_coupling_contexts_have_bins_of_the_odds_ratio_and_of_theta() -> None:
    theta = np.array([0.5, 0.5, 0.5, 0.75, 0.25, 0.0, 1.0])
    u = np.array([0.5, 0.2, 2 / 3, 0.25, 0.75, 1.0, 0.0])
    # The odds ratios less one are 0; 3, whose piecewise linear log2 is 1.5; 1; 8 twice; and 1e18 twice.
    assert coupling_contexts(theta, u).tolist() == [
        0 * 4 + 2,
        (24 + 4) * 4 + 2,
        (24 + 0) * 4 + 2,
        (24 + 9) * 4 + 3,
        (24 + 9) * 4 + 1,
        41 * 4 + 0,
        41 * 4 + 3,
    ]


@pytest.mark.parametrize("step", [0.1, 0.3, 1.0])
def test_coupled_samples_of_a_million_cost_one_per_cent_more_than_the_bound_of_their_contexts(step: float) -> None:
    d = 1_000_000
    rng = np.random.default_rng(3)
    theta, u = np.clip(rng.beta(0.3, 0.3, d), 0.01, 0.99), counter.uniform(7, d)
    logit = np.log(theta / (1 - theta))
    mask = (u < theta) != (u < 1 / (1 + np.exp(-(logit + rng.normal(0, step, d)))))
    contexts = coupling_contexts(theta, u)
    payload = codecs.encode("entropy", mask, d, contexts)
    assert len(payload) <= 1.01 * entropy_of(mask, contexts >> 2) / 8 + 10
    assert np.array_equal(codecs.decode_mask("entropy", payload, d, contexts), mask)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1)), max_size=40), st.integers(0, 2**32))
def test_flip_counts_come_back_from_their_differences_to_the_predictions(
    groups: list[tuple[int, float]], tail: int
) -> None:
    sizes = np.array([size for size, _ in groups], np.int64)
    flips = np.array([int(size * rate) for size, rate in groups], np.int64)
    written = classes.count_bits(sizes, flips)
    more = np.array([tail >> i & 1 for i in range(32)], np.bool_)
    found, used = classes.read_counts(np.concatenate([written, more]), sizes)
    assert found.tolist() == flips.tolist()
    assert used == len(written)


@pytest.mark.parametrize(
    ("size", "flipped", "lanes"),
    [(1000, 0, 0), (1000, 10, 1), (10**6, 10**4, 34), (10**6, 5 * 10**5, 244), (10**9, 10**8, 1 << 14)],
)
def test_the_number_of_lanes_by_hand(size: int, flipped: int, lanes: int) -> None:
    # 10 of 1000: 7 bits a gap, 3 of them raw; 70 bits. 10,000 of a million: 70,000 >> 11 is less than 30,000 >> 4.
    # Half a million: 2 bits a gap, none raw, so 10**6 >> 12.
    assert entropy._Model.of(np.array([size]), np.array([flipped])).lanes == lanes


def test_predicted_flip_counts_are_those_of_the_plain_reader() -> None:
    """Rates whose ratio is below, at and beyond the limits 1/4 and 4."""
    for before in range(0, 130, 3):
        for last in range(0, 130, 3):
            sizes, flips = np.array([300, 300, 5000]), np.array([before, last, 0])
            for offset in (0, 3):
                due = codec_readers.expected([before, last], sizes.tolist(), offset)
                assert classes._expected(flips, sizes, 2, offset) == due


@QUICK
@given(masks(), st.booleans())
def test_auto_is_one_byte_larger_than_the_best(mask: NDArray[np.bool_], with_contexts: bool) -> None:
    contexts = (np.arange(len(mask)) % 3).astype(np.uint8) if with_contexts else None
    assert one_byte_over_the_best(mask, contexts)


def test_auto_is_one_byte_larger_than_the_best_for_every_set_out_of_eight() -> None:
    for number in range(256):
        mask = np.unpackbits(np.array([number], np.uint8)).view(np.bool_)
        assert one_byte_over_the_best(mask)


def one_byte_over_the_best(mask: NDArray[np.bool_], contexts: NDArray[np.uint8] | None = None) -> bool:
    d = len(mask)
    best = min(len(codecs.encode(name, mask, d, contexts)) for name in ("bits", "rice", "entropy"))
    return len(codecs.encode("auto", mask, d, contexts)) == best + 1


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.95])
def test_auto_costs_less_than_the_entropy_of_independent_flips_on_sets_in_bursts(rate: float) -> None:
    d, burst = 60_000, 50
    half = np.repeat(counter.uniform(counter.key("bursts", d), d // burst) < rate, burst) & flips(d, 0.5)
    assert one_byte_over_the_best(half)
    assert one_byte_over_the_best(half, (np.arange(d) % 5).astype(np.uint8))
    if rate < 0.5:
        assert len(codecs.encode("auto", half, d)) < 0.95 * min(entropy_of(half) / 8, d / 8)


# --- refusals


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(CodecError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("positions", "d"),
    [([3, 2], 10), ([2, 2], 10), ([10], 10), ([-1], 10), ([0.5], 10), ([[1]], 10), ([0], 0), ([1], -1), ([1], 2**32)],
)
def test_input_that_is_not_a_set_below_d_is_refused(positions: list[Any], d: int) -> None:
    with pytest.raises(CodecError, match=r"sorted, distinct|integers or a bool|flat array|is outside 0"):
        codecs.encode("bits", np.array(positions), d)


def test_messages_name_the_value_and_say_what_to_do() -> None:
    assert "'zip'" in raised(lambda: codecs.encode("zip", np.zeros(1, bool), 1))
    assert "use np.unique" in raised(lambda: codecs.encode("bits", np.array([3, 2]), 10))
    assert "10 bits take uint8[2], not uint8[3]; is d right?" in raised(lambda: codecs.decode("bits", b"abc", 10))
    assert "6 unused bits after position 9" in raised(lambda: codecs.decode("bits", b"\xff\xff", 10))
    assert "pass the same contexts" in raised(lambda: codecs.decode("entropy", b"\0\1", 10))
    wrong = np.zeros(3, np.uint8)
    assert "shape (10,)" in raised(lambda: codecs.decode("entropy", b"\0\1", 10, wrong))
    assert "quantise more coarsely" in raised(
        lambda: codecs.encode("entropy", np.arange(5000) > 0, 5000, np.arange(5000, dtype=np.uint16))
    )


def test_rice_refuses_a_position_at_d() -> None:
    only = bytes([16, 1, 0, 6, 0b100000])  # one gap of 5, k = 0: 000001 in unary
    assert codecs.decode("rice", only, 6).tolist() == [5]
    assert "a position is 5, not below 5" in raised(lambda: codecs.decode("rice", only, 5))


@pytest.mark.parametrize("unary", [0b100001, 0b000001, 0b000000])
def test_rice_refuses_unary_bits_that_do_not_match_the_block(unary: int) -> None:
    assert "unary bits" in raised(lambda: codecs.decode("rice", bytes([16, 1, 0, 6, unary]), 12))


def test_rice_refuses_long_numbers_and_needless_complements() -> None:
    whole = codecs.encode("rice", np.array([1, 2, 5]), 12)
    assert whole[:4] == bytes([16, 3, 0, 6])
    for longer in (bytes([16, 0x83, 0, 0, 6]) + whole[4:], bytes([16, 3, 0, 0x86, 0]) + whole[4:]):
        assert "longer than necessary" in raised(lambda longer=longer: codecs.decode("rice", longer, 12))  # type: ignore[misc]
    # Six of twelve positions are listed themselves, not as a complement.
    half = codecs.encode("rice", np.arange(6), 12)
    assert half[0] < 128
    assert "6 of 12 positions are too many for a complement" in raised(
        lambda: codecs.decode("rice", bytes([half[0] | 128]) + half[1:], 12)
    )


def test_entropy_refuses_coders_that_do_not_end_in_their_initial_states(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = rans.encode

    def from_higher_states(entries: Any, tables: rans.Tables, states: Any) -> NDArray[np.uint16]:
        states += np.uint64(1 << 16)  # carries the same 16 bits
        return encode(entries, tables, states)

    positions = np.flatnonzero(flips(3000, 0.1)).astype(np.uint32)
    assert np.array_equal(entropy.decode(entropy.encode(positions, 3000), 3000), positions)
    monkeypatch.setattr(rans, "encode", from_higher_states)
    payload = entropy.encode(positions, 3000)
    assert "do not end in their initial states" in raised(lambda: codecs.decode("entropy", payload, 3000))


@pytest.mark.parametrize("mode", [12, 14, 16, 20, 31, 128])
def test_a_mode_that_no_writer_chooses_is_refused_even_if_an_older_version_did(mode: int) -> None:
    contexts = (np.arange(400) % 4).astype(np.uint8)
    payload = bytes([mode]) + codecs.encode("entropy", flips(400, 0.1), 400, contexts)[1:]
    due = f"{mode} is not the first byte of an entropy payload; was another codec or an older version used?"
    assert raised(lambda: codecs.decode("entropy", payload, 400, contexts)) == due
    assert raised(lambda: codecs.decode("auto", b"\2" + payload, 400, contexts)) == due
    assert raised(lambda: describe.describe("entropy", payload, 400)) == due


@pytest.mark.parametrize("name", EXACT)
def test_every_truncation_and_extension_is_refused(name: str) -> None:
    mask = flips(400, 0.1)
    payload = codecs.encode(name, mask, 400)
    assert codecs.decode(name, payload, 400).tolist() == np.flatnonzero(mask).tolist()
    for damaged in (*(payload[:end] for end in range(len(payload))), payload + b"\0"):
        with pytest.raises(CodecError):
            codecs.decode(name, damaged, 400)


@QUICK
@given(st.sampled_from(codecs.names()), st.binary(max_size=200), st.integers(0, 3000))
def test_random_bytes_decode_to_a_set_or_are_refused(name: str, data: bytes, d: int) -> None:
    assert is_set_or_refused(name, data, d)


@QUICK
@given(
    masks(),
    st.sampled_from(codecs.names()),
    st.integers(0, 2**30),
    st.integers(0, 255),
    st.sampled_from([0, -1, 1, 8, 999]),
)
def test_damaged_payloads_decode_to_a_set_or_are_refused(
    mask: NDArray[np.bool_], name: str, at: int, byte: int, more: int
) -> None:
    payload = bytearray(codecs.encode(name, mask, len(mask)))
    if payload:
        payload[at % len(payload)] = byte
    assert is_set_or_refused(name, bytes(payload), max(len(mask) + more, 0))


def is_set_or_refused(name: str, data: bytes, d: int) -> bool:
    try:
        found = codecs.decode(name, data, d).astype(np.int64)
    except CodecError as error:
        return len(str(error)) > 20
    return len(found) == 0 or bool(found[-1] < d and (np.diff(found) > 0).all())


@pytest.mark.parametrize("log", [0, 7, 17, 31])
def test_a_rice_block_of_a_size_that_no_writer_chooses_is_refused(log: int) -> None:
    payload = codecs.encode("rice", np.array([1, 2, 5]), 12)
    assert payload[0] == 16
    with pytest.raises(CodecError, match=f"{log} is not the first byte of a rice payload"):
        codecs.decode("rice", bytes([log]) + payload[1:], 12)
