"""EDEN, DRIVE and DRIVE+: unbiased over rotations, the papers' errors and bits, and what is refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from edge_kernels import counter
from edge_kernels.codecs import CodecError, rotation, values
from edge_kernels.codecs.rotation import CENTROIDS, hadamard, lengths, two_means
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


def vector(d: int) -> np.ndarray:
    """Values of both signs, some larger than others."""
    rng = np.random.default_rng(d)
    return (rng.standard_normal(d) * np.linspace(0.2, 1, d)).astype(np.float32)


def decoded(name: str, v: np.ndarray, stream: int) -> np.ndarray:
    return values.decode(name, values.encode(name, v, stream), len(v), stream)


def error(name: str, v: np.ndarray, stream: int = 1) -> float:
    """The squared error over the squared length."""
    return float(np.square(decoded(name, v, stream) - v).sum() / np.square(v).sum())


def sylvester(log: int) -> np.ndarray:
    """The Hadamard matrix of 2**log rows."""
    h = np.ones((1, 1))
    for _ in range(log):
        h = np.block([[h, h], [h, -h]])
    return h


def test_hadamard_is_sylvesters_matrix() -> None:
    h = sylvester(7)
    x = np.random.default_rng(0).integers(-9, 9, (3, 128)).astype(np.float32)
    assert np.array_equal(hadamard(x), x @ h.T)
    assert np.array_equal(hadamard(x[:, :8].copy()), x[:, :8] @ h[:8, :8].T)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_centroids_are_a_fixed_point_of_lloyd_max_on_the_normal_distribution(bits: int) -> None:
    table = np.array(CENTROIDS[bits])
    edges = [0.0, *((table[1:] + table[:-1]) / 2), math.inf]
    density = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges]
    mass = [math.erf(e / math.sqrt(2)) / 2 for e in edges]
    means = [(density[i] - density[i + 1]) / (mass[i + 1] - mass[i]) for i in range(len(table))]
    assert np.abs(means - table).max() < 1e-4


@given(st.integers(0, 10**6))
def test_the_blocks_hold_all_values_and_pad_fewer_than_64(d: int) -> None:
    found = lengths(d)
    assert 0 <= sum(count * n for count, n in found) - d < 64
    assert all(n & (n - 1) == 0 for _, n in found)
    assert len(found) <= 8


@pytest.mark.parametrize(
    ("name", "bits"), [("eden:1", 1), ("eden:2", 2), ("eden:4", 4), ("drive", 1), ("drive:mse", 1)]
)
def test_the_bytes_are_a_factor_a_block_and_the_bits(name: str, bits: int) -> None:
    d = 8192 * 2 + 128 + 3  # blocks of 8192, 8192, 128 and, padded, 64
    assert len(values.encode(name, vector(d), 0)) == 4 * 4 + (8192 * 2 + 128 + 64) * bits // 8
    assert len(values.encode("eden:0.25", vector(8192), 0)) == 4 + 8192 // 4 // 8
    assert len(values.encode("drive+", vector(8192), 0)) == 8 + 8192 // 8


@pytest.mark.parametrize("name", ["eden:1", "eden:2", "eden:0.25", "drive", "drive+"])
def test_the_mean_over_many_rotations_approaches_the_vector(name: str) -> None:
    v = vector(300)
    runs = 400
    mean = np.mean([decoded(name, v, s) for s in range(runs)], axis=0)
    # A run's relative squared error is `error`; that of an unbiased mean is smaller by the number of runs.
    single = np.mean([error(name, v, s) for s in range(20)])
    assert np.square(mean - v).sum() / np.square(v).sum() < 3 * single / runs
    assert (mean @ v) / (v @ v) == pytest.approx(1, abs=0.02 if name == "eden:0.25" else 1e-3)


@pytest.mark.parametrize(("share", "sent"), [(0.01, 1), (0.03, 2), (0.1, 6)])
def test_few_coordinates_of_a_block_cost_the_papers_error(share: float, sent: int) -> None:
    """A factor by the coordinates that travel alone would blow up where these are near 0."""
    errors = [error(f"eden:{share}", vector(64), s) for s in range(500)]
    assert np.mean(errors) == pytest.approx(math.pi / 2 * 64 / sent - 1, rel=0.02)
    assert max(errors) < 1.5 * np.mean(errors)


@pytest.mark.parametrize("name", ["eden:1", "eden:2", "drive", "drive+"])
def test_few_large_values_come_back_without_bias(name: str) -> None:
    v = np.zeros(256, np.float32)
    v[[3, 77]] = 1, 0.5  # one rotation gives the mean (1, 0.5) of only a few vectors
    runs = 600
    found = np.array([decoded(name, v, s) for s in range(runs)], np.float64)
    noise = np.square(found - v).sum(axis=1).mean() / runs
    assert np.square(found.mean(axis=0) - v).sum() < 1.6 * noise


@pytest.mark.parametrize(
    ("name", "due"),
    [
        ("eden:1", math.pi / 2 - 1),
        ("drive", math.pi / 2 - 1),
        ("drive:mse", 1 - 2 / math.pi),
        ("drive+", math.pi / 2 - 1),
        ("drive+:mse", 1 - 2 / math.pi),
        ("eden:0.5", math.pi - 1),
        ("eden:2", 1 / (1 - 0.1175) - 1),
        ("eden:4", 1 / (1 - 0.009497) - 1),
    ],
)
def test_the_error_is_the_papers(name: str, due: float) -> None:
    # EDEN's error is 1 / (1 - D) - 1 with D the error of the Lloyd-Max quantiser of N(0, 1).
    assert error(name, vector(1 << 16)) == pytest.approx(due, rel=0.03)


def test_eden_at_one_bit_is_drive_and_its_inner_product_with_the_vector_is_exact() -> None:
    v = vector(5000)
    assert decoded("eden", v, 7) == pytest.approx(decoded("drive", v, 7), rel=1e-5, abs=1e-5)
    assert decoded("eden:2", v, 3) @ v == pytest.approx(v @ v, rel=1e-4)


def rotation_of_64(stream: int) -> np.ndarray:
    """The orthogonal matrix of a block of 64: signs and Hadamard, twice."""
    h = sylvester(6) / 8
    first, second = (
        [1 - 2 * (int(counter.uint64(counter.key(stream, "signs", r), 1)[0]) >> i & 1) for i in range(64)]
        for r in (0, 1)
    )
    found: np.ndarray = h @ np.diag(second) @ h @ np.diag(first)
    return found


@pytest.mark.parametrize("least_error", [False, True])
def test_drive_is_the_papers_formula(least_error: bool) -> None:
    """The signs of R x times |x|_2^2 / |R x|_1, which is unbiased, or times |R x|_1 / d, of least error."""
    x, stream = vector(64).astype(np.float64), 5
    rotated = rotation_of_64(stream) @ x
    scale = np.abs(rotated).sum() / 64 if least_error else x @ x / np.abs(rotated).sum()
    due = rotation_of_64(stream).T @ (scale * np.sign(rotated))
    assert decoded("drive:mse" if least_error else "drive", x.astype(np.float32), stream) == pytest.approx(
        due, abs=1e-5
    )


@pytest.mark.parametrize("least_error", [False, True])
def test_drive_plus_is_the_papers_formula_with_the_best_of_all_cuts(least_error: bool) -> None:
    x, stream = vector(64).astype(np.float64), 5
    rotation_ = rotation_of_64(stream)
    rotated = np.sort(rotation_ @ x)
    halves = [(rotated[:k], rotated[k:]) for k in range(1, 64)]
    costs = [sum(np.square(half - half.mean()).sum() for half in cut) for cut in halves]
    low, high = halves[int(np.argmin(costs))]
    c = np.where(rotation_ @ x < high[0], low.mean(), high.mean())
    scale = 1 if least_error else (x @ x) / (c @ c)
    name = "drive+:mse" if least_error else "drive+"
    assert decoded(name, x.astype(np.float32), stream) == pytest.approx(scale * rotation_.T @ c, abs=1e-5)


@given(arrays(np.float32, (2, 12), elements=st.floats(-8, 8, width=32)))
def test_two_means_are_the_best_cut_of_the_sorted_values(z: np.ndarray) -> None:
    low, means = two_means(z)
    for row, lower, (upper_mean, lower_mean) in zip(z.astype(np.float64), low, means, strict=True):
        found = np.square(row - np.where(lower, lower_mean, upper_mean)).sum()
        ranked = np.sort(row)
        cuts = [(ranked[:k], ranked[k:]) for k in range(1, 12)]
        assert found <= min(sum(np.square(c - c.mean()).sum() for c in cut) for cut in cuts) + 1e-9
        assert upper_mean >= lower_mean


@pytest.mark.parametrize("d", [64, 320, 4992])  # without padding, on which the other may be better
def test_two_centroids_are_never_worse_than_signs(d: int) -> None:
    for stream in range(20):
        assert error("drive+:mse", vector(d), stream) <= error("drive:mse", vector(d), stream) + 1e-6
        assert error("drive+", vector(d), stream) <= error("drive", vector(d), stream) + 1e-6


def test_zeros_stay_zeros_and_equal_streams_give_equal_bytes() -> None:
    for name in ("eden:1", "eden:0.1", "drive", "drive:mse", "drive+", "drive+:mse"):
        assert not decoded(name, np.zeros(100, np.float32), 1).any()
        assert not values.encode(name, np.zeros(0), 1)
        assert values.encode(name, vector(90), 1) == values.encode(name, vector(90), 1)
        assert values.encode(name, vector(90), 1) != values.encode(name, vector(90), 2)


def test_damage_is_named() -> None:
    data = values.encode("eden:0.1", vector(100), 0)  # one block of 128, 13 coordinates of it
    assert len(data) == 4 + 2
    with pytest.raises(CodecError, match="padding"):
        values.decode("eden:0.1", data[:-1] + b"\xff", 100, 0)
    for factor in (np.nan, np.inf, -1e-30):
        with pytest.raises(CodecError, match="negative or not finite"):
            values.decode("eden:0.1", np.float32(factor).tobytes() + data[4:], 100, 0)
    with pytest.raises(CodecError, match="take 6 bytes"):
        values.decode("eden:0.1", data + b"\0", 100, 0)
    with pytest.raises(CodecError, match="finite values"):
        values.decode("eden", np.float32(3e38).tobytes() + b"\0" * 8, 64, 0)
    for upper, lower in ((1, 2), (np.nan, 0), (0, np.nan), (np.inf, 0), (0, -np.inf)):
        with pytest.raises(CodecError, match="out of order"):
            values.decode("drive+", np.array([upper, lower], "<f4").tobytes() + b"\0" * 8, 64, 0)
    with pytest.raises(CodecError, match="finite values"):
        values.decode("drive+", np.array([3e38, -3e38], "<f4").tobytes() + b"\0" * 8, 64, 0)


@pytest.mark.parametrize("name", ["eden:5", "eden:x", "eden:0", "eden:", "eden:1.5", "drive:best", "drive+:best"])
def test_a_bad_parameter_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(CodecError, match=re.escape(f"'{name}'")):
        values.codec(name)
    assert rotation.BLOCK == 8192


@pytest.mark.parametrize(("share", "sent"), [(0.26, 17), (0.25, 16), (0.24, 15), (0.001, 1)])
def test_below_one_bit_the_coordinates_of_a_block_are_the_nearest_whole_number_and_at_least_one(
    share: float, sent: int
) -> None:
    """Of 64: 16.64, 16, 15.36 and .064."""
    assert len(rotation.encode(vector(64), 0, share)) == 4 + -(-sent // 8)
    assert int(np.count_nonzero(rotation._Out.of(64, share, 0).chosen)) == sent
