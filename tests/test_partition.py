"""Divisions of a data set by class: what Dirichlet's alpha does to the shares, and the fewest samples of a device."""

from __future__ import annotations

import numpy as np
import pytest
from edge_bench.data import partition

from edge_client.errors import ConfigError

DEVICES, CLASSES, EACH = 4, 500, 100


def variance(alpha: float, seed: int = 0) -> float:
    """The variance, over classes and devices, of the share that a device has of a class."""
    y, one = np.repeat(np.arange(CLASSES), EACH), np.ones(CLASSES * EACH, np.int64)
    owner = partition.by_class(y, one, DEVICES, seed, alpha, None)
    held = np.bincount(y * DEVICES + owner, minlength=CLASSES * DEVICES)
    return float(np.var(held / EACH))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_the_shares_of_a_class_have_the_variance_of_dirichlet_with_this_alpha(alpha: float) -> None:
    """(1 / K) (1 - 1 / K) / (K alpha + 1) for K devices; .134, .0375 and .0046 for four."""
    due = 1 / DEVICES * (1 - 1 / DEVICES) / (DEVICES * alpha + 1)
    assert variance(alpha) == pytest.approx(due, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_seed_a_larger_alpha_gives_more_even_shares(seed: int) -> None:
    assert variance(0.05, seed) > variance(0.5, seed) > variance(5.0, seed) > variance(50.0, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_division_that_leaves_a_device_too_few_samples_is_drawn_again(seed: int) -> None:
    """Nearly all of each of six classes goes to one of four devices: most draws forget a device."""
    y = np.repeat(np.arange(6), 30)
    owner = partition.by_class(y, np.ones(180, np.int64), 4, seed, 0.1, None)
    assert np.bincount(owner, minlength=4).min() >= partition.FEWEST


def test_groups_count_as_their_samples_towards_the_fewest() -> None:
    """Twelve groups of one class: of five samples each two are enough, of four each three are."""
    y = np.zeros(12, np.int64)
    for size, fewest in ((5, 2), (4, 3)):
        draws = [partition.by_class(y, np.full(12, size), 3, seed, 1.0, None) for seed in range(30)]
        assert min(np.bincount(owner, minlength=3).min() for owner in draws) == fewest


@pytest.mark.parametrize(
    ("n", "parts"), [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (2, 0, 0)), (3, (1, 1, 1)), (4, (2, 1, 1)), (5, (3, 1, 1)),
                     (7, (5, 1, 1)), (8, (4, 2, 2)), (10, (6, 2, 2)), (100, (60, 20, 20))],
)  # fmt: skip
def test_of_samples_in_order_the_last_fifth_tests_and_three_are_enough(n: int, parts: tuple[int, int, int]) -> None:
    found = partition.in_order(n)
    assert tuple(np.bincount(found, minlength=3).tolist()) == parts
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize(("others", "due"), [(10, 1), (40, 4), (200, 20)])
def test_of_samples_beside_a_published_test_part_a_tenth_validates(others: int, due: int) -> None:
    test = np.arange(others + 30) < 30
    part = partition.published_part(test, np.arange(len(test)), 5)
    assert (part[test] == 2).all()
    assert np.bincount(part, minlength=3).tolist() == [others - due, due, 30]


def test_without_published_test_samples_a_fifth_of_each_class_tests() -> None:
    y = np.repeat(np.arange(3), 100)

    def drawn(train: int, test: int) -> partition.Share:
        (share,) = partition.few_of_classes(y, None, 1, 0, 3, (train, 5, test), 1.0)
        return share

    whole = drawn(75, 20)
    assert [len(rows) for rows in (whole.train, whole.validation, whole.test)] == [225, 15, 60]
    assert len(np.unique(np.concatenate([whole.train, whole.validation, whole.test]))) == 300
    for train, test in ((76, 20), (75, 21)):
        with pytest.raises(ConfigError, match="has 80 samples to train on and 20 to test on, too few for 1 devices"):
            drawn(train, test)


def test_where_no_draw_leaves_every_device_enough_that_is_said() -> None:
    """Each class goes whole to one device, and there are more devices than classes."""
    y = np.repeat(np.arange(2), 50)
    with pytest.raises(ConfigError, match="no division left every one of 5 devices 10 samples; raise alpha"):
        partition.by_class(y, np.ones(100, np.int64), 5, 0, 1e-4, None)


@pytest.mark.parametrize(("count", "classes"), [(100, 2), (7, 3), (3, 2), (5, 10)])
def test_each_device_has_its_classes_and_each_class_as_many_devices_as_any_other(count: int, classes: int) -> None:
    y = np.repeat(np.arange(10), 1000)
    owner = partition.by_class(y, np.ones(len(y), np.int64), count, 1, 0.5, classes)
    held = np.zeros((count, 10), bool)
    held[owner[owner >= 0], y[owner >= 0]] = True
    assert (held.sum(axis=1) == classes).all()
    assert np.ptp(held.sum(axis=0)) <= 1
    if count == 100:  # any two digits, not only neighbours
        assert len({tuple(np.flatnonzero(row)) for row in held}) > 20


@pytest.mark.parametrize(("classes", "advice"), [(2, "samples; lower devices"), (None, "raise alpha or lower devices")])
def test_a_division_that_cannot_be_is_refused_with_what_to_change(classes: int | None, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        partition.by_class(np.arange(20) % 2, np.ones(20, np.int64), 15, 0, 0.5, classes)
