"""LAMP scores against the paper's formula, the global threshold, and that both are the same on every machine."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import counter
from edge_kernels.pruning import keep_largest, lamp_scores, largest_first
from hypothesis import given
from hypothesis import strategies as st

from edge_client.methods import bits_digest

F32 = np.float32
floats = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0])


def by_definition(values: list[float]) -> list[Fraction]:
    """One layer's scores: w^2 over the squares of the weights not smaller; of equal ones the first is larger."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    scores, total = [Fraction(0)] * len(values), Fraction(0)
    for i in order:
        total += Fraction(values[i]) ** 2
        scores[i] = Fraction(values[i]) ** 2 / total if total else Fraction(0)
    if values:
        scores[order[0]] = Fraction(1)
    return scores


def test_lamp_by_hand() -> None:
    layer = np.array([1.0, -3.0, 2.0], F32)
    assert lamp_scores(layer, [slice(0, 3)]).tolist() == [1 / 14, 1.0, 4 / 13]


def test_the_largest_weight_of_every_layer_scores_one_even_among_zeros() -> None:
    values = np.array([1e-30, 0, 5, 7, 0, 0], F32)
    scores = lamp_scores(values, [slice(0, 2), slice(2, 4), slice(4, 6)])
    assert scores.tolist() == [1.0, 0.0, 25 / 74, 1.0, 1.0, 0.0]


def test_values_outside_all_layers_and_empty_layers_score_nothing() -> None:
    assert lamp_scores(np.ones(4, F32), [slice(1, 1), slice(2, 3)]).tolist() == [0, 0, 1, 0]


def test_equal_weights_are_ordered_by_their_index() -> None:
    assert lamp_scores(np.array([2, -2, 2], F32), [slice(0, 3)]).tolist() == [1, 1 / 2, 1 / 3]
    assert largest_first(np.array([1, -2, 2, 0, -0.0, 1], F32)).tolist() == [1, 2, 0, 5, 3, 4]


@given(st.lists(st.lists(floats, max_size=8), max_size=4))
def test_lamp_is_the_papers_formula_layer_by_layer(layers: list[list[float]]) -> None:
    ends = np.cumsum([0, *map(len, layers)]).tolist()
    values = np.array([w for layer in layers for w in layer], F32)
    scores = lamp_scores(values, [slice(a, b) for a, b in pairwise(ends)])
    due = [float(s) for layer in layers for s in by_definition(layer)]
    assert scores.tolist() == pytest.approx(due, rel=1e-12, abs=0)
    assert ((scores >= 0) & (scores <= 1)).all()


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0]), max_size=20), st.integers(-2, 25))
def test_the_count_largest_are_kept_and_ties_go_to_the_lower_index(scores: list[float], count: int) -> None:
    kept = keep_largest(np.array(scores), count)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert set(np.flatnonzero(kept)) == set(order[: max(0, count)])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 20))
def test_who_is_kept_among_fewer_is_kept_among_more(scores: list[float], count: int) -> None:
    fewer, more = keep_largest(np.array(scores), count), keep_largest(np.array(scores), count + 1)
    assert not (fewer & ~more).any()


def test_a_vector_of_this_project_has_the_same_mask_on_every_machine() -> None:
    """Shared with other implementations: uniform weights rounded to 1/64, so that there are many ties."""
    u = counter.uniform(counter.key(5, "lamp vector"), 1000)
    values = (np.floor(u * 128) / 64 - 1).astype(F32)
    kept = keep_largest(lamp_scores(values, [slice(0, 100), slice(100, 1000)]), 300)
    assert int(kept[:100].sum()) == KEPT_OF_THE_FIRST
    assert bits_digest(bitset.pack(kept)) == DIGEST


KEPT_OF_THE_FIRST = 71
DIGEST = "bd91bd83b3c13792"
