"""The proof that two models say the same: each output by its own scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.equality import Probe, Sides, prove, spread
from edge_client.errors import CompactionError

F64 = NDArray[np.float64]
SIDES = Sides("the copy", "the model", "report it", "train again")
X = Probe("normal inputs", True, np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32))


def outputs(scales: list[float], off: list[float], cancels: bool = False) -> Callable[[Probe], F64]:
    """Outputs of these scales, each moved by `off`; the last is what is left of two large numbers if it `cancels`."""

    def run(probe: Probe) -> F64:
        made: F64 = probe.x[:, :1].astype(np.float64) * np.array(scales) + np.array(off)
        if cancels:
            made[:, -1] = 1e-6 * np.sin(1e6 * (probe.x[:, 0] + off[-1]))
        return made

    return run


def proved(scales: list[float], off: list[float], moves: list[float], cancels: bool = False) -> float:
    """Prove outputs moved by `off` equal to those that are not; a rounding moves these by `moves`."""
    still = [0.0] * len(scales)
    return prove(
        [X], outputs(scales, still, cancels), outputs(scales, off, cancels), outputs(scales, moves, cancels), SIDES
    )[1]


def test_an_output_is_compared_by_its_own_scale_and_not_by_a_larger_ones() -> None:
    assert proved([1000, 1], [1e-3, 1e-6], [0, 0]) <= 1e-5
    with pytest.raises(CompactionError, match="outputs differ from the model's by 0"):
        proved([1000, 1], [0, 1e-3], [0, 0])


def test_an_output_that_rounding_moves_does_not_excuse_another() -> None:
    scales = [1.0, 1.0, 1.0, 1.0]
    assert 1e-5 < proved(scales, [1e-4, 0, 0, 0], [1e-4, 0, 0, 0]) < 1e-3
    with pytest.raises(CompactionError):
        proved(scales, [0, 1e-4, 0, 0], [1e-4, 0, 0, 0])


def test_an_output_that_stays_by_chance_is_excused_by_what_the_median_one_moves() -> None:
    assert 1e-5 < proved([1.0] * 4, [1e-4] * 4, [1e-4, 1e-4, 1e-4, 0]) < 1e-3


def test_an_output_that_is_rounding_alone_is_excused_and_no_other() -> None:
    assert proved([1, 1, 1], [0, 0, 1e-6], [0, 0, 1e-6], cancels=True) > 1e-5
    with pytest.raises(CompactionError):
        proved([1, 1, 1], [0, 0, 1e-6], [0, 0, 0], cancels=True)
    with pytest.raises(CompactionError):  # beyond a tenth of all outputs' scale nothing is rounding
        proved([1, 1, 1], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9])


def test_of_few_samples_all_outputs_give_the_scale() -> None:
    one = np.array([[3.0, 4.0, 5.0]])
    assert spread(one) == pytest.approx([one.std()] * 3)
    many = np.arange(16.0)[:, None] * [1, 10]
    assert spread(many) == pytest.approx(many.std(axis=0))
