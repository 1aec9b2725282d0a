"""Which device gets which samples, and which of these train, validate and test. All draws follow from the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.data import split
from edge_client.errors import ConfigError

HELD_OUT = 0.2  # of a device's samples (or recordings) for validation, and as much again for testing
VALIDATION = 0.1  # of the training samples of a device whose test samples the publisher chose
FEWEST = 10  # samples a device must get; a division that leaves one with fewer is drawn again

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """Rows of the data set that one device holds, ascending."""

    train: Rows
    validation: Rows
    test: Rows

    @staticmethod
    def of(rows: Rows, part: NDArray[np.int8]) -> Share:
        """`rows` by `part`: 0 train, 1 validation, 2 test."""
        return Share(rows[part == 0], rows[part == 1], rows[part == 2])


@dataclass(frozen=True)
class Units:
    """What is dealt whole, single samples or groups of them: `size` int64[n] is how many samples each has.

    `classes()` is the class of each, int64[n]. It raises ConfigError for labels that are no classes, and for a unit of
    several.
    """

    size: NDArray[np.int64]
    classes: Callable[[], NDArray[np.int64]]


def evenly(n: int, count: int, seed: int) -> NDArray[np.int64]:
    """The device of each of `n` units, int64[n]: each gets as many, drawn at random."""
    owner = np.empty(n, np.int64)
    owner[counter.permutation(counter.key(seed, "deal"), n)] = np.arange(n) % count
    return owner


def by_class(
    y: NDArray[np.int64], size: NDArray[np.int64], count: int, seed: int, alpha: float, classes: int | None
) -> NDArray[np.int64]:
    """The device of each unit of one class `y` and of `size` samples, int64[n], -1 where a class has none.

    With `classes` each device holds that many classes, without each class is divided by Dirichlet(alpha) shares. Raises
    ConfigError when no draw leaves every device `FEWEST` samples.
    """
    present = np.unique(y)
    if classes is not None:
        _check_enough(classes, present)
    rng = np.random.default_rng(counter.key(seed, "deal"))
    for _ in range(1000):
        if classes is None:
            shares = rng.dirichlet(np.full(count, alpha), len(present))
        else:
            shares = _even_shares(rng, len(present), count, classes)
        owner = np.full(len(y), -1, np.int64)
        for c, share in zip(present, shares, strict=True):
            if not share.any():
                continue
            shuffled = rng.permutation(np.flatnonzero(y == c))
            cuts = np.floor(np.cumsum(share)[:-1] * len(shuffled) + 0.5).astype(int)
            for k, chosen in enumerate(np.split(shuffled, cuts)):
                owner[chosen] = k
        if np.bincount(owner[owner >= 0], size[owner >= 0], minlength=count).min() >= FEWEST:
            return owner
    advice = "lower devices" if classes is not None else "raise alpha or lower devices"
    raise ConfigError(f"no division left every one of {count} devices {FEWEST} samples; {advice}")


def _even_shares(rng: np.random.Generator, present: int, count: int, classes: int) -> NDArray[np.float64]:
    """Shares [present, count] of each class that `count` devices have when each holds `classes` of them, evenly.

    A device draws its classes from those with the fewest holders so far.
    """
    holds: NDArray[np.float64] = np.zeros((present, count))
    for k in range(count):
        fewest_first = np.lexsort((rng.random(present), holds.sum(axis=1)))  # equal ones in random order
        holds[fewest_first[:classes], k] = 1
    holds /= np.maximum(holds.sum(axis=1, keepdims=True), 1)
    return holds


def few_of_classes(
    y: NDArray[np.int64],
    published: NDArray[np.bool_] | None,
    count: int,
    seed: int,
    classes: int,
    samples: tuple[int, int, int],
    balance: float,
) -> list[Share]:
    """The setting of FedMask and Hermes: every device has a few samples of `classes` classes that it draws.

    `samples` are those a class gives to training, validation and testing. A device's first class has all its training
    samples, its last one `balance` times as many, the others between. Training and validation samples belong to one
    device; test samples may be shared. They are the published test samples of the class or, without such, a fifth of
    it. Raises ConfigError when a class has too few.
    """
    present = np.unique(y)
    _check_enough(classes, present)
    train, validate, test = samples
    wanted = np.maximum(np.round(np.linspace(train, balance * train, classes)), 1).astype(int)
    pools, tests = {}, {}
    for c in present.tolist():
        of_class = np.flatnonzero(y == c)
        mixed = of_class[counter.permutation(counter.key(seed, "class", c), len(of_class))]
        known = np.arange(len(mixed)) >= len(mixed) - len(mixed) // 5 if published is None else published[mixed]
        pools[c], tests[c] = mixed[~known], mixed[known]
    shares = []
    used = dict.fromkeys(pools, 0)
    for k in range(count):
        held = present[counter.permutation(counter.key(seed, "classes", k), len(present))[:classes]]
        parts: tuple[list[Rows], ...] = ([], [], [])
        for c, n in zip(held.tolist(), wanted.tolist(), strict=True):
            low, used[c] = used[c], used[c] + n + validate
            if used[c] > len(pools[c]) or test > len(tests[c]):
                raise ConfigError(
                    f"class {c} has {len(pools[c])} samples to train on and {len(tests[c])} to test on, too few for "
                    f"{count} devices; lower devices, per_class, validation_per_class or test_per_class"
                )
            parts[0].append(pools[c][low : low + n])
            parts[1].append(pools[c][low + n : used[c]])
            parts[2].append(tests[c][counter.permutation(counter.key(seed, "test", k, c), len(tests[c]))[:test]])
        shares.append(Share(*(np.sort(np.concatenate(p)) for p in parts)))
    return shares


def _check_enough(classes: int, present: NDArray[np.int64]) -> None:
    """Raise ConfigError when a device is to hold more classes than are `present`."""
    if classes > len(present):
        raise ConfigError(f"classes = {classes}, but the samples have {len(present)}; lower it")


def hold_out(y: NDArray[np.int64], unit: NDArray[np.int64], stream: int) -> NDArray[np.int8]:
    """Part of each of one device's samples: 0 train, 1 validation, 2 test, int8[n].

    Units (recordings, or single samples) go whole to one part; of every class with at least three units each part
    gets some, and the training part gets all of a class with fewer. Units of several classes are divided as if there
    were one class.
    """
    part = np.zeros(len(y), np.int8)
    pairs = np.unique(np.stack([unit, y]), axis=1).shape[1]
    strata = y if pairs == len(np.unique(unit)) else np.zeros(len(y), np.int64)
    for c in np.unique(strata):
        units = np.unique(unit[strata == c])
        if len(units) < 3:
            continue
        order = units[counter.permutation(counter.key(stream, int(c)), len(units))]
        held = max(1, round(HELD_OUT * len(units)))
        part[np.isin(unit, order[:held]) & (strata == c)] = 1
        part[np.isin(unit, order[held : 2 * held]) & (strata == c)] = 2
    return part


def in_order(n: int) -> NDArray[np.int8]:
    """Parts of `n` samples that follow one another in time: the last fifth tests, the fifth before it validates."""
    held = max(1, round(HELD_OUT * n)) if n >= 3 else 0
    return np.repeat(np.array([0, 1, 2], np.int8), [n - 2 * held, held, held])


def published_part(test: NDArray[np.bool_], unit: NDArray[np.int64], stream: int) -> NDArray[np.int8]:
    """Parts of one device's samples whose test samples are known: a tenth of the others' units validates."""
    part = np.where(test, 2, 0).astype(np.int8)
    rest = np.flatnonzero(~test)
    if len(rest):
        part[rest[split(unit[rest], stream, "validation", VALIDATION, must=False)[1]]] = 1
    return part
