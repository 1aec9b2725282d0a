"""The entropy coder of Lattice: exact both ways, close to the entropy, and refusing what is damaged."""

from __future__ import annotations

import tracemalloc

import lattice_reader
import numpy as np
import pytest
from edge_kernels import counter, lattice, lattice_model
from edge_kernels.codecs import CodecError, arrivals
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]


def spans_of(*shapes: tuple[int, int]) -> list[lattice.Span]:
    ends = np.cumsum([0, *(rows * columns for rows, columns in shapes)]).tolist()
    return [(slice(a, b), *shape) for a, b, shape in zip(ends[:-1], ends[1:], shapes, strict=True)]


def drawn(d: int, *words: int | str) -> NDArray[np.uint32]:
    return (counter.uint64(counter.key("coder", *words), d) >> np.uint64(32)).astype(np.uint32)


def sizes(shapes: list[tuple[int, int]], rate: float) -> F64:
    """The Laplace scale of every element: a factor of its tensor, row and column, `rate` on average."""
    rng = np.random.default_rng(5)
    parts = [np.exp(rng.normal() + rng.normal(size=(r, 1)) + rng.normal(size=(1, c))).ravel() for r, c in shapes]
    b = np.concatenate(parts)
    scaled: F64 = b * (rate / b.mean())
    return scaled


def numbers(b: F64, dither: NDArray[np.uint32], seed: int) -> I32:
    return np.floor(np.random.default_rng(seed).laplace(size=len(b)) * b + dither * 2.0**-32).astype(np.int32)


def history(b: F64) -> I32:
    return np.sum([numbers(b, drawn(len(b), "past", i), 100 + i) for i in range(20)], axis=0).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[I32, lattice.Known]:
    side = st.integers(0, 40)
    shapes = draw(st.lists(st.one_of(st.tuples(side, side), side.map(lambda n: (n, 1))), max_size=4))
    spans = spans_of(*shapes)
    d = spans[-1][0].stop if spans else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]))
    top = draw(st.sampled_from([1, 2, 20, 1000, 2**31 - 1]))
    values = (rng.integers(-top, top, d, endpoint=True) * (rng.random(d) < share)).astype(np.int32)
    if d and top > 1000:
        values[rng.integers(d)] = -(2**31)
    held = (rng.integers(-(2**31), 2**31, d) >> draw(st.integers(0, 31))).astype(np.int32)
    one, two = (rng.integers(0, 2**32, d, dtype=np.uint32) for _ in range(2))
    kind = draw(st.sampled_from(["up", "down", "whole", "alike"]))
    if kind == "up":
        return values, lattice.up(one, spans, held)
    if kind == "whole":
        return values, lattice.whole(spans)
    return values, lattice.down(one, two if kind == "down" else one & 1, spans, held)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_what_is_decoded_is_what_was_encoded_whatever_both_sides_know(case: tuple[I32, lattice.Known]) -> None:
    values, known = case
    data = lattice.encode(values, known)
    assert lattice.encode(values, known) == data
    found = lattice.decode(data, known)
    assert found.dtype == np.int32
    assert np.array_equal(found, values)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 15))
def test_numbers_whose_low_bits_travel_as_they_are_are_read_by_both_readers(
    case: tuple[I32, lattice.Known], low: int
) -> None:
    values, known = case
    data = lattice._encoded(values, known, low)
    assert data is not None
    if not values.any():
        with pytest.raises(CodecError, match="zeros"):
            lattice.decode(data, known)
        return
    assert np.array_equal(lattice.decode(data, known), values)
    shapes = [(rows, columns) for _, rows, columns in known.spans]
    fall, rise = known.distances(slice(None)) or (None, None)
    plain = [x if x is None else x.tolist() for x in (fall, rise, known.held)]
    if len(values) < 500:
        assert lattice_reader.values(data, shapes, *plain) == values.tolist()


def test_the_size_of_minus_two_to_the_31_is_two_to_the_31() -> None:
    """int32 has no such number, and |N| counts in the factors of rows and columns."""
    values, held = np.tile([1, 0, -2], 20).astype(np.int32), np.zeros(60, np.int32)
    held[7] = -(2**31)
    known = lattice.up(drawn(60), spans_of((6, 10)), held)
    data = lattice.encode(values, known)
    dither = drawn(60).tolist()
    assert lattice_reader.values(data, [(6, 10)], dither, [2**32 - 1 - u for u in dither], held.tolist()) == (
        values.tolist()
    )


def test_a_million_large_numbers_are_coded_near_their_entropy() -> None:
    """In lists alone they take more steps than a reader allows. Low bits are taken off within 32."""
    values = np.rint(np.random.default_rng(3).laplace(size=1_000_000) * 240).astype(np.int32)
    values[:2] = -(2**31), 2**31 - 1
    known = lattice.whole(spans_of((1000, 1000)))
    data = lattice.encode(values, known)
    assert data[0] >> 4 > 0
    assert np.array_equal(lattice.decode(data, known), values)
    assert 8 * len(data) / len(values) < np.log2(2 * np.e * 240) + 0.3
    with pytest.raises(CodecError, match="cut"):
        lattice.decode(data[:100_000], known)


def test_numbers_of_twenty_bits_are_coded_however_many_there_are() -> None:
    values = np.random.default_rng(4).integers(-(2**20), 2**20, 600_000).astype(np.int32)
    known = lattice.whole(spans_of((600, 1000)))
    assert np.array_equal(lattice.decode(lattice.encode(values, known), known), values)


def numpy_alone(patch: pytest.MonkeyPatch, few: int) -> None:
    """Without compiled loops; up to `few` lanes are read one symbol at a time, more of them together."""
    patch.setattr(arrivals, "loops", lambda _: None)
    patch.setattr(arrivals, "FEW", few)
    patch.setattr(lattice_model, "loops", lambda _: None)


@pytest.fixture(params=[None, 0, arrivals.MAX_LANES], ids=["compiled", "lanes together", "symbol by symbol"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading."""
    if request.param is None:
        pytest.importorskip("numba")
    else:
        numpy_alone(monkeypatch, request.param)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_numpy_alone_writes_and_reads_the_same_bytes(case: tuple[I32, lattice.Known]) -> None:
    pytest.importorskip("numba")
    values, known = case
    data = lattice.encode(values, known)
    for few in (0, arrivals.MAX_LANES):
        with pytest.MonkeyPatch.context() as patch:
            numpy_alone(patch, few)
            assert lattice.encode(values, known) == data
            assert np.array_equal(lattice.decode(data, known), values)


@pytest.mark.parametrize("top", [1, 2**20, 2**31 - 1])
def test_sums_of_large_numbers_do_not_wrap(top: int) -> None:
    values = np.full((7, 5000), top, np.int32)
    assert (lattice_model._sum(values, 0, top) == 7 * top).all()
    assert (lattice_model._sum(values, 1, top) == 5000 * top).all()


def test_zeros_take_no_bytes_and_a_single_number_few() -> None:
    known = lattice.up(drawn(5000), spans_of((50, 100)), np.zeros(5000, np.int32))
    one = np.zeros(5000, np.int32)
    assert lattice.encode(one, known) == b""
    assert not lattice.decode(b"", known).any()
    one[int(drawn(5000).argmax())] = 1
    assert len(lattice.encode(one, known)) <= 12
    assert lattice.encode(np.zeros(0, np.int32), lattice.whole([])) == b""
    assert len(lattice.decode(b"", lattice.whole([]))) == 0


@pytest.mark.parametrize("rate", [0.002, 0.01, 0.1])
def test_a_device_s_numbers_take_little_more_than_if_the_scale_of_every_element_were_known(rate: float) -> None:
    shapes = [(300, 300), (300, 1), (30, 300)]
    b = sizes(shapes, rate)
    dither = drawn(len(b), "now")
    values = numbers(b, dither, 1)

    def below(x: F64) -> F64:
        return np.where(x < 0, np.exp(np.minimum(x, 0) / b) / 2, 1 - np.exp(-np.maximum(x, 0) / b) / 2)

    u = dither * 2.0**-32
    entropy = -np.log2(np.maximum(below(values + 1 - u) - below(values - u), 1e-15)).sum() / 8
    plain = values.astype(np.float64)
    of_value = np.unique(plain, return_counts=True)[1]
    without = (of_value * -np.log2(of_value / len(b))).sum() / 8
    size = len(lattice.encode(values, lattice.up(dither, spans_of(*shapes), history(b))))
    assert entropy < size < 1.16 * entropy + 40
    assert size < 0.75 * without + 40


def test_the_coder_of_lists_stays_within_3_percent_and_40_bytes_of_the_code_length_of_its_probabilities() -> None:
    rng = np.random.default_rng(2)
    for n, mean, lanes in ((300, 0.05, 1), (20_000, 0.01, 1), (200_000, 0.002, 1), (200_000, 0.05, 16), (4000, 0.9, 8)):
        hazards = np.clip(rng.exponential(mean, n) * 2**20, arrivals.LEAST, arrivals.MOST).astype(np.uint32)
        chances = -np.expm1(hazards * -(2.0**-20))
        flags = rng.random(n) < chances
        writer = arrivals.Writer(lanes)
        writer.code(arrivals.ends(hazards), flags.nonzero()[0])
        data = writer.bytes()
        ideal = -np.log2(np.where(flags, chances, 1 - chances)).sum() / 8
        assert ideal <= len(data) <= 1.03 * ideal + 40
        reader = arrivals.Reader(data, lanes)
        assert np.array_equal(reader.code(arrivals.ends(hazards)), flags.nonzero()[0])
        reader.end()


def test_what_both_sides_know_saves_bytes() -> None:
    shapes = [(200, 250), (200, 1)]
    b = sizes(shapes, 0.01)
    spans, held, dither = spans_of(*shapes), history(b), drawn(len(b), "now")
    values = numbers(b, dither, 1)
    known = len(lattice.encode(values, lattice.up(dither, spans, held)))
    unheld = len(lattice.encode(values, lattice.up(dither, spans, 0 * held)))
    blind = len(lattice.encode(values, lattice.whole(spans)))
    assert known < 0.95 * unheld < 0.7 * blind


def test_the_merged_sum_of_a_cohort_takes_less_than_its_parts() -> None:
    shapes = [(200, 250), (200, 1)]
    b = sizes(shapes, 0.01)
    spans, held, common = spans_of(*shapes), history(b), drawn(len(b), "now")
    mine = [common + np.uint32((place << 32) // 8) for place in range(8)]
    parts = [numbers(b, u, i) for i, u in enumerate(mine)]
    apart = sum(len(lattice.encode(m, lattice.up(u, spans, held))) for m, u in zip(parts, mine, strict=True))
    fall, rise = np.minimum.reduce(mine), np.minimum.reduce([~u for u in mine])
    total = np.sum(parts, axis=0).astype(np.int32)
    merged = lattice.encode(total, lattice.down(fall, rise, spans, held))
    assert np.array_equal(lattice.decode(merged, lattice.down(fall, rise, spans, held)), total)
    assert len(merged) < 0.9 * apart


@pytest.fixture(scope="module")
def payload() -> tuple[bytes, lattice.Known, I32]:
    shapes = [(60, 50), (60, 1)]
    b = sizes(shapes, 0.2)
    known = lattice.up(drawn(len(b)), spans_of(*shapes), history(b))
    values = numbers(b, drawn(len(b)), 1)
    return lattice.encode(values, known), known, values


@pytest.mark.usefixtures("reader")
def test_other_knowledge_on_the_two_sides_is_noticed(payload: tuple[bytes, lattice.Known, I32]) -> None:
    data, known, _ = payload
    assert known.fall is not None
    assert known.held is not None
    others = [
        lattice.up(known.fall, known.spans, np.roll(known.held, 1)),
        lattice.up(np.roll(known.fall, 1), known.spans, known.held),
        lattice.up(known.fall, spans_of((50, 60), (60, 1)), known.held),
        lattice.whole(known.spans),
    ]
    for other in others:
        with pytest.raises(CodecError):
            lattice.decode(data, other)


@pytest.mark.usefixtures("reader")
def test_every_cut_every_extra_byte_and_every_changed_byte_is_refused(
    payload: tuple[bytes, lattice.Known, I32],
) -> None:
    data, known, _ = payload
    changed = [data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :] for i in range(0, len(data), 3)]
    for bad in [data[:i] for i in range(1, len(data), 5)] + [data + bytes(n) for n in (1, 2, 3, 300)] + changed:
        with pytest.raises(CodecError):
            lattice.decode(bad, known)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=80), st.sampled_from([0, 1, 61, 700]))
def test_random_bytes_are_refused(data: bytes, columns: int) -> None:
    with pytest.raises(CodecError):
        lattice.decode(data, lattice.whole(spans_of((30, columns))))


@pytest.mark.usefixtures("reader")
def test_a_small_payload_cannot_cost_much_work() -> None:
    spans = spans_of((1000, 1000))
    for guess in (0, 50, 100):  # one lane whose state says member, member, ...
        for state in (b"\0\0\0\1", b"\0\0\0\xff"):
            with pytest.raises(CodecError, match="more than 4096 steps"):
                lattice.decode(bytes([0, guess, 0]) + state + bytes(60_000), lattice.whole(spans))


def test_values_and_knowledge_of_another_size_or_type_are_refused() -> None:
    spans, held = spans_of((2, 3)), np.zeros(6, np.int32)
    with pytest.raises(CodecError, match=r"int32\[6\]"):
        lattice.encode(np.zeros(5, np.int32), lattice.whole(spans))
    with pytest.raises(CodecError, match=r"int32\[6\]"):
        lattice.encode(np.zeros(6, np.int64), lattice.whole(spans))  # type: ignore[arg-type]
    for known in (
        lattice.up(np.zeros(5, np.uint32), spans, held),
        lattice.up(np.zeros(6, np.uint32), spans, held[:5]),
        lattice.whole([(slice(1, 7), 2, 3)]),
        lattice.whole([(slice(0, 6), 2, 2)]),
    ):
        with pytest.raises(CodecError):
            lattice.decode(b"\0\0\0\0\0\0\1", known)


def test_many_large_numbers_take_less_than_fifty_vectors_of_memory() -> None:
    d, rng = 300_000, np.random.default_rng(0)
    values = np.floor(rng.laplace(size=d) * 8 + drawn(d) * 2.0**-32).astype(np.int32)
    known = lattice.up(drawn(d), spans_of((600, 500)), np.zeros(d, np.int32))
    lattice.encode(values, known)  # loads the compiled loops, if there are any
    tracemalloc.start()
    try:
        lattice.encode(values, known)
        assert tracemalloc.get_traced_memory()[1] < 50 * 4 * d
    finally:
        tracemalloc.stop()
