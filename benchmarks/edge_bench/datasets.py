"""Data sets divided over devices, as the table `[data]` of a simulation says.

`sources` reads the files, `partition` says which device gets what, and this module joins them to the bundle's input.
UCI HAR, FEMNIST and Shakespeare are divided by who made the samples; the others by chance or by class. docs/data.md
describes each data set and every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edge_bench import partition, sources
from edge_bench.partition import FEWEST, Share
from edge_bench.sources import Samples, find
from edge_client.bundle import Manifest
from edge_client.data import DeviceData, check, split
from edge_client.errors import ConfigError, DataError

__all__ = ["DataConfig", "divide", "find", "load", "read", "write"]

_MAKERS = {"har": "person", "femnist": "writer", "shakespeare": "role"}  # how devices of natural splits are called
_DEPENDENT = ("har", "shakespeare")  # neighbouring samples of one maker belong together, so nothing else divides them


class DataConfig(BaseModel):
    """The table `[data]` of a simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["har", "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "femnist", "shakespeare", "npz"]
    path: Path | None = None
    """The data set's file or folder; None looks where `sources` says. `npz` needs it."""
    devices: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """By maker: the first so many (None: all). Others: over how many devices (None: 10)."""
    split: Literal["natural", "iid", "dirichlet", "classes"] = "natural"
    """`natural`: by maker where the data set knows makers, else as `iid`, an even deal. `dirichlet`: each class by
    Dirichlet shares. `classes`: a device holds some classes only."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """Dirichlet concentration: small is uneven."""
    classes: Annotated[int, Field(ge=1, le=1000)] = 2
    """Classes a device holds with `split = "classes"`."""
    per_class: Annotated[int, Field(ge=1)] | None = None
    """`split = "classes"`: training samples of each class a device holds; None deals out all samples."""
    validation_per_class: Annotated[int, Field(ge=0)] = 5
    """With `per_class`: validation samples of each class beside them, which the device keeps."""
    test_per_class: Annotated[int, Field(ge=1)] = 100
    """With `per_class`: test samples of each class a device holds."""
    balance: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `per_class`: training samples of a device's last class over those of its first."""
    inside: Literal["recording", "window"] = "recording"
    """HAR: a device's held-out samples are whole recordings, or (as published tables do it) single windows."""
    characters: Annotated[int, Field(ge=1)] = 5000
    """Shakespeare: only roles with at least so many characters."""
    standardise: bool = False
    """`npz`: features by mean and deviation of all devices' training samples together (HAR always is)."""
    samples: Annotated[int, Field(ge=FEWEST)] | None = None
    """Use only so many samples of the whole data set (None: all); not with makers."""
    labels: Annotated[tuple[Annotated[int, Field(ge=0, lt=1000)], ...], Field(min_length=1)] | None = None
    """Use only the samples of these classes, numbered anew in this order (None: all); not with makers."""
    evaluate: Literal["validation", "test"] = "test"
    """`validation`: train on the training part, report on the validation part, to choose settings.
    `test`: train on both, report on the test part."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a device's training samples that it holds as its own validation part, whole units only; 0: none."""


def read(config: DataConfig) -> Samples:
    """All samples of a data set, of the classes that `labels` keeps. Raises DataError or ConfigError."""
    if config.name == "digits":
        s = sources.read_digits()
    elif config.name == "npz":
        if config.path is None:
            raise ConfigError('data set "npz" needs `path`, the file with arrays x and y')
        s = sources.read_npz(config.path)
    else:
        path = find(config.name, config.path)
        if config.name == "har":
            s = sources.read_har(path)
        elif config.name == "femnist":
            s = sources.read_femnist(path)
        elif config.name == "shakespeare":
            s = sources.read_shakespeare(path, config.characters)
        else:
            s = sources.read_cifar(path) if config.name.startswith("cifar") else sources.read_mnist(path)
    if config.labels is None:
        return s
    y = _classes(config, s)
    number = np.full(max(int(y.max()), *config.labels) + 1, -1)
    number[list(config.labels)] = np.arange(len(config.labels))
    kept = np.flatnonzero(number[y] >= 0)
    return _chosen(s, kept, number[y[kept]])


def _chosen(s: Samples, rows: NDArray[np.int64], y: NDArray[Any] | None = None) -> Samples:
    """Only these rows, with labels `y` of theirs."""
    return Samples(
        s.x[rows],
        s.y[rows] if y is None else y,
        s.unit[rows],
        None if s.owner is None else s.owner[rows],
        s.names,
        None if s.published is None else s.published[rows],
        s.sequential,
    )


def _classes(config: DataConfig, s: Samples) -> NDArray[np.int64]:
    """One class a sample, int64[n]. Raises ConfigError for labels that are not classes."""
    if s.y.ndim != 1 or not np.issubdtype(s.y.dtype, np.integer) or s.y.min(initial=0) < 0:
        raise ConfigError(f"the labels of {config.name} are no classes; leave out `labels`, and divide it otherwise")
    return s.y.astype(np.int64)


def divide(config: DataConfig, seed: int) -> tuple[Samples, dict[str, Share]]:
    """The samples that are used, and by device which of them it holds. Raises DataError or ConfigError."""
    natural = config.split == "natural"
    if config.name in _DEPENDENT and (not natural or config.samples is not None or config.labels is not None):
        called = "UCI HAR" if config.name == "har" else "Shakespeare"
        raise ConfigError(
            f"{called} is divided by {_MAKERS[config.name]}; leave out `samples`, `labels`, and `split` or set it to "
            '"natural"'
        )
    if config.per_class is not None and config.split != "classes":
        raise ConfigError(f'per_class = {config.per_class} needs split = "classes"')
    s = read(config)
    if natural and s.owner is not None:
        if config.samples is not None or config.labels is not None:
            raise ConfigError(
                f'`samples` and `labels` do not go with devices by maker; set split = "iid" for {config.name}'
            )
        return _by_maker(config, s, s.owner, seed)
    rows = np.sort(counter.permutation(counter.key(seed, "samples"), len(s.y))[: config.samples])
    s = _chosen(s, rows)
    count = config.devices or 10
    if config.per_class is not None:
        numbers = config.per_class, config.validation_per_class, config.test_per_class
        classes = _classes(config, s)
        shares = partition.few_of_classes(classes, s.published, count, seed, config.classes, numbers, config.balance)
        return s, {f"device-{k:0{len(str(count - 1))}d}": share for k, share in enumerate(shares)}
    return s, _parts(s, deal(config, s, seed), "device", seed)


def _by_maker(config: DataConfig, s: Samples, owner: NDArray[np.int64], seed: int) -> tuple[Samples, dict[str, Share]]:
    makers = np.unique(owner)
    label = _MAKERS.get(config.name, "device")
    if config.devices is not None and config.devices > len(makers):
        raise ConfigError(f"{config.name} has {len(makers)} {label}s; devices = {config.devices} is too many")
    rows = np.flatnonzero(np.isin(owner, makers[: config.devices]))
    s = _chosen(s, rows)
    if config.name == "har" and config.inside == "window":
        s = Samples(s.x, s.y, np.arange(len(s.y)), s.owner)
    return s, _parts(s, owner[rows], label, seed)


def deal(config: DataConfig, s: Samples, seed: int) -> NDArray[np.int64]:
    """Which device gets each sample, int64[n]. Raises ConfigError when the devices are too many for the data."""
    count, n = config.devices or 10, len(s.y)
    if count * FEWEST > n:
        raise ConfigError(f"{count} devices cannot each get {FEWEST} of {n} samples; use fewer devices")
    if config.split in ("natural", "iid"):
        return partition.evenly(n, count, seed)
    classes = config.classes if config.split == "classes" else None
    return partition.by_class(_classes(config, s), count, seed, config.alpha, classes)


def _parts(s: Samples, owner: NDArray[np.int64], label: str, seed: int) -> dict[str, Share]:
    """By device the rows of its parts; -1 owns nothing."""
    people = np.unique(owner[owner >= 0])
    width = len(str(people.max()))
    plain = s.y if s.y.ndim == 1 and np.issubdtype(s.y.dtype, np.integer) else np.zeros(len(s.y), np.int64)
    shares = {}
    for p in people.tolist():
        mine, stream = np.flatnonzero(owner == p), counter.key(seed, "parts", p)
        if s.sequential:
            part = partition.in_order(len(mine))
        elif s.published is not None and s.owner is not None:
            part = partition.published_part(s.published[mine], s.unit[mine], stream)
        else:
            part = partition.hold_out(plain[mine], s.unit[mine], stream)
        shares[s.names[p] if s.names else f"{label}-{p:0{width}d}"] = Share.of(mine, part)
    return shares


def load(config: DataConfig, seed: int, manifest: Manifest) -> dict[str, DeviceData]:
    """Every device's data by its name, in the shape and dtype of the bundle's input.

    Features of HAR are standardised with the mean and deviation of all devices' training samples together.
    Raises DataError or ConfigError.
    """
    s, shares = divide(config, seed)
    x: NDArray[Any] = s.x
    if config.name == "har" or config.standardise:
        train = x[np.sort(np.concatenate([share.train for share in shares.values()]))].astype(np.float64)
        x = (x - train.mean(axis=0)) / np.maximum(train.std(axis=0), 1e-6)
    x = _shaped(x, manifest.input.shape)
    devices = {}
    for name, share in shares.items():
        trained, validated, reported = share.train, share.train[:0], share.validation
        if config.evaluate == "test":
            reported = share.test
            if config.per_class is not None:
                validated = share.validation
            else:
                trained = np.sort(np.concatenate([share.train, share.validation]))
        if not len(trained):
            raise DataError(f"{config.name}, {name} has no samples to train on; leave it out of the data")
        if config.validation:
            stay, gone = split(s.unit[trained], seed, "validation", config.validation, must=False)
            trained, validated = trained[stay], np.sort(np.concatenate([validated, trained[gone]]))
        sides = (check(manifest, x[i], s.y[i], f"{config.name}, {name}") for i in (trained, validated, reported))
        devices[name] = DeviceData(*(array for side in sides for array in side))
    return devices


def _shaped(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`x` as samples of `shape`; 28x28 images get a margin of two pixels where the model takes 32x32."""
    if prod(x.shape[1:]) == 28 * 28 and shape == (1, 32, 32):
        return np.pad(x.reshape(-1, 1, 28, 28), ((0, 0), (0, 0), (2, 2), (2, 2)))
    return x.reshape(-1, *shape) if prod(x.shape[1:]) == prod(shape) else x


def write(devices: Mapping[str, DeviceData], folder: Path) -> dict[str, Path]:
    """One .npz file a device, as `maskfleet join --data` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, data in devices.items():
        paths[name] = folder / f"{name}.npz"
        np.savez(paths[name], **vars(data), normalised=np.True_)
    return paths
