"""Coupled Bernoulli masks: flips and net flips come back exactly, and shared knowledge makes them cheaper."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from collections.abc import Callable

import coupling_reader
import numpy as np
import pytest
from edge_kernels import bits, coupling
from edge_kernels.codecs import CodecError
from edge_kernels.coupling import Cohort
from hypothesis import given, settings
from hypothesis import strategies as st


def trained(d: int, seed: int, devices: int = 4) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """theta, the uniforms of each device, and its probabilities after some training in a common direction."""
    rng = np.random.default_rng(seed)
    theta = np.clip(rng.beta(0.4, 0.4, d), 0.01, 0.99)
    pull = rng.standard_normal(d) * (rng.random(d) < 0.3)
    logits = np.log(theta / (1 - theta))
    after = [1 / (1 + np.exp(-(logits + pull * rng.uniform(0.1, 0.5)))) for _ in range(devices)]
    return theta, [rng.random(d) for _ in range(devices)], after


def entropy_bits(flips: np.ndarray) -> float:
    p = flips.mean()
    return float(-flips.size * (p * np.log2(p) + (1 - p) * np.log2(1 - p)))


def test_the_reference_is_one_below_theta_and_the_distance_is_an_odds_ratio_less_one() -> None:
    reference, x = coupling.distance(np.array([0.5, 0.5]), np.array([0.25, 0.75]))
    assert reference.tolist() == [True, False]
    # odds 1 and 1/3, and odds 3 and 1
    assert x.tolist() == pytest.approx([2.0, 2.0])


def test_log2_is_exact_at_powers_of_two_and_linear_between() -> None:
    assert coupling.log2(np.array([0.25, 1.0, 8.0, 12.0])).tolist() == [-2.0, 0.0, 3.0, 3.5]


def test_activity_is_the_product_of_the_movement_of_a_row_and_of_a_column() -> None:
    net = np.array([0, 3, 0, 0, -1, 0], np.int32)  # two rows of three
    activity = coupling.history(net, [(2, 3)]).activity.reshape(2, 3)
    assert activity.argmax() == 1
    assert activity[0, 1] > activity[1, 1] > activity[1, 0]
    assert (coupling.history(net, [(6,)]).activity[[1, 4]] > coupling.history(net, [(6,)]).activity[0]).all()


def test_a_cohort_counts_reference_ones_and_devices_near_a_flip() -> None:
    cohort = Cohort.empty(2)
    cohort.add(np.array([0.5, 0.5]), np.array([0.49, 0.99]))
    cohort.add(np.array([0.5, 0.5]), np.array([0.01, 0.02]))
    assert cohort.reference.tolist() == [2, 1]
    assert cohort.down[0] > 0.9 > 0.1 > cohort.down[1]
    assert cohort.up[0] == 0.0


def test_activity_is_calculated_as_specified() -> None:
    activity = coupling.history(np.array([0, 3, 0, 0, -1, 0], np.int32), [(2, 3)]).activity
    # log2 is linear between powers of two. Rows: log2(3.5) = 1.75, log2(1.5) = .5. Columns: log2(4.5) = 2.125 and
    # log2(.5) = -1. All: log2(4 + 1) = 2.25.
    assert activity.reshape(2, 3).tolist() == [[-1.5, 1.625, -1.5], [-2.75, 0.375, -2.75]]


def test_a_device_at_distance_two_tenths_from_a_flip_counts_as_four_fifths() -> None:
    # 1 / (1 + (x / .4)**2): the distance of u = 1/4 from theta = 1/2 is 2, that of odds 1.2 from odds 1 is .2.
    cohort = Cohort.empty(2)
    cohort.add(np.array([0.5, 0.5]), np.array([0.25, 1.2 / 2.2]))
    assert cohort.down.tolist() == pytest.approx([1 / 26, 0.0])
    assert cohort.up.tolist() == pytest.approx([0.0, 0.8])


@pytest.mark.parametrize("known", [False, True])
def test_the_terms_are_those_of_the_plain_reader_to_the_last_bit(known: bool) -> None:
    d, rng = 600, np.random.default_rng(3)
    theta, u = np.clip(rng.beta(0.3, 0.3, d), 0.01, 0.99), rng.choice([0.0, 1 - 2.0**-53, 0.5, *rng.random(50)], d)
    down, up = (rng.choice([0, 1e-30, 1e-8, 1e-6, 0.3, 7], d).astype(np.float32) for _ in range(2))
    cohort = Cohort(np.zeros(d, np.int64), down, up)
    past = coupling.history(rng.integers(-2, 3, d).astype(np.int32), [(20, 30)]) if known else None
    plain = None if past is None else coupling_reader.Past(past.net.tolist(), past.activity.tolist())
    for found, due in (
        (coupling._flip_terms(theta, u, past), lambda i: coupling_reader.flip_terms(theta[i], u[i], i, plain)),
        (coupling._moved_terms(theta, cohort, past),
         lambda i: coupling_reader.moved_terms(theta[i], float(down[i]), float(up[i]), i, plain)),
        (coupling._way_terms(theta, cohort, past),
         lambda i: coupling_reader.way_terms(theta[i], float(down[i]), float(up[i]), i, plain)),
    ):  # fmt: skip
        assert np.stack(found(slice(0, d)), axis=1).tolist() == [due(i) for i in range(d)]


def test_bins_are_half_a_unit_of_log_odds_wide_from_minus_eleven_to_five() -> None:
    odds = np.array([-99.0, -11.0, -10.75, -10.5, 0.0, 4.49, 4.5, 99.0])
    bins = coupling._bins(np.array([2.0]), lambda s: [odds[s] / 2], len(odds))
    assert bins.tolist() == [0, 0, 0, 1, 22, 30, 31, 31]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.floats(0, 1), st.booleans())
def test_any_flips_come_back_however_bad_the_model_is(d: int, seed: int, rate: float, known: bool) -> None:
    rng = np.random.default_rng(seed)
    theta, u, flips = np.clip(rng.random(d), 0.01, 0.99), rng.random(d), rng.random(d) < rate
    past = coupling.history(rng.integers(-3, 4, d).astype(np.int32), [(d,)]) if known else None
    data = coupling.encode_flips(flips, theta, u, past)
    assert (coupling.decode_flips(data, theta, u, past) == flips).all()
    assert coupling.encode_flips(flips, theta, u, past) == data


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_any_net_flips_come_back(d: int, seed: int, masks: int, known: bool) -> None:
    rng = np.random.default_rng(seed)
    theta, cohort = np.clip(rng.random(d), 0.01, 0.99), Cohort.empty(d)
    for _ in range(masks):
        cohort.add(theta, rng.random(d))
    net = (rng.integers(0, masks + 1, d) - cohort.reference).astype(np.int32)
    past = coupling.history(rng.integers(-3, 4, d).astype(np.int32), [(d,)]) if known else None
    data = coupling.encode_net(net, theta, cohort, past)
    assert (coupling.decode_net(data, theta, cohort, past, masks) == net).all()


def test_shared_knowledge_makes_flips_cheaper() -> None:
    theta, u, after = trained(100_000, 1)
    flips = (u[0] < after[0]) ^ (u[0] < theta)
    net = sum((x < a).astype(int) - (x < theta) for x, a in zip(u, after, strict=True)).astype(np.int32)
    blind = entropy_bits(flips) / 8
    plain = len(coupling.encode_flips(flips, theta, u[0], None))
    assert plain < 0.7 * blind
    # The last round moved the same places, which saves more than the extra coefficients cost.
    past = coupling.history(net, [(100, 1000)])
    assert len(coupling.encode_flips(flips, theta, u[0], past)) < plain


def test_net_flips_cost_less_than_their_plain_entropy() -> None:
    theta, u, after = trained(100_000, 2)
    cohort = Cohort.empty(theta.size)
    for x in u:
        cohort.add(theta, x)
    net = sum((x < a).astype(int) - (x < theta) for x, a in zip(u, after, strict=True)).astype(np.int32)
    p = np.unique(net, return_counts=True)[1] / net.size
    assert len(coupling.encode_net(net, theta, cohort, None)) < 0.8 * -(p * np.log2(p)).sum() * net.size / 8


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_flips_and_net_flips_are_refused(data: st.DataObject) -> None:
    theta, u, after = trained(3000, 3)
    cohort = Cohort.empty(theta.size)
    for x in u:
        cohort.add(theta, x)
    flips = (u[0] < after[0]) ^ (u[0] < theta)
    net = sum((x < a).astype(int) - (x < theta) for x, a in zip(u, after, strict=True)).astype(np.int32)
    whole = data.draw(
        st.sampled_from(
            [coupling.encode_flips(flips, theta, u[0], None), coupling.encode_net(net, theta, cohort, None)]
        )
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "random"]))
    broken = {
        "flip": whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :],
        "cut": whole[:at],
        "random": data.draw(st.binary(max_size=200)),
    }[kind]
    for read in (
        lambda: coupling.decode_flips(broken, theta, u[0], None) == flips,
        lambda: coupling.decode_net(broken, theta, cohort, None, 4) == net,
    ):
        # A changed bit may leave the content unchanged (the last digit of a coefficient), but never give another.
        with contextlib.suppress(CodecError):
            assert read().all()


def test_decoding_with_another_theta_is_refused() -> None:
    theta, u, after = trained(20_000, 4)
    data = coupling.encode_flips((u[0] < after[0]) ^ (u[0] < theta), theta, u[0], None)
    with pytest.raises(CodecError):
        coupling.decode_flips(data, np.clip(theta + 0.05, 0.01, 0.99), u[0], None)


def test_a_checksum_covers_packed_masks_or_32_bit_counts_in_tiles_of_any_size() -> None:
    mask = np.array([1, 0, 0, 0, 0, 0, 0, 1, 1], bool)
    assert bits.checksum([mask]) == zlib.crc32(b"\x81\x01") == bits.checksum([mask[:8], mask[8:]])
    ones = np.array([2, 0, 258], np.uint32)
    four_each = b"\2\0\0\0\0\0\0\0\2\1\0\0"
    assert bits.checksum([ones]) == zlib.crc32(four_each) == bits.checksum([ones[:1], ones[1:].astype(int)])


def test_decoding_with_other_net_flips_is_refused_by_the_checksum() -> None:
    rng = np.random.default_rng(0)
    theta = np.clip(rng.beta(0.4, 0.4, 6000), 0.01, 0.99)
    u, net = rng.random(6000), (rng.integers(-3, 4, 6000) * (rng.random(6000) < 0.2)).astype(np.int32)
    moved = np.clip(theta + 0.1 * rng.standard_normal(6000), 0.01, 0.99)
    flips = (u < moved) ^ (u < theta)
    data = coupling.encode_flips(flips, theta, u, coupling.history(net, [(60, 100)]))
    said = []
    for _ in range(300):
        other, two = net.copy(), rng.integers(0, 6000, 2)
        other[two] = other[two[::-1]]
        try:  # if it decodes, the exchanged positions are in the same bins as before
            assert (coupling.decode_flips(data, theta, u, coupling.history(other, [(60, 100)])) == flips).all()
        except CodecError as error:
            said.append(str(error))
    assert any("checksum" in words for words in said)  # the codec itself did not fail


@pytest.mark.parametrize("d", [1, 100, 3000, 6000, 20_000, 300_000])
@pytest.mark.parametrize("share", [0.03, 0.5, 1.0])
def test_decoding_allocates_at_most_four_times_its_result_and_two_megabytes(d: int, share: float) -> None:
    rng = np.random.default_rng(d)
    theta, u = np.clip(rng.random(d), 0.01, 0.99), rng.random(d)
    cohort = Cohort.empty(d)
    cohort.add(theta, u)
    net = (rng.choice([-2, -1, 1, 2, 3], d) * (rng.random(d) < share)).astype(np.int32)
    flips, past = rng.random(d) < share, coupling.history(net, [(d,)])
    data = coupling.encode_flips(flips, theta, u, past)
    constant, members = 2 << 20, max(int(flips.sum()), 1)
    assert peak(lambda: coupling.decode_flips(data, theta, u, past)) <= 4 * max(d, 4 * members) + constant
    coded = coupling.encode_net(net, theta, cohort, past)
    positions = 4 * int(np.count_nonzero(net))  # four bytes for each that is not 0, beside the net flips
    assert peak(lambda: coupling.decode_net(coded, theta, cohort, past, 5)) <= 4 * 4 * d + positions + constant


def peak(call: Callable[[], object]) -> int:
    """The most bytes allocated at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
