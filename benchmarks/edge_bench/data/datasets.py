"""Data sets divided over devices, by the table `[data]` of a simulation.

`table` has the keys, `sources` and `own` read, `partition` decides which device gets what, `scaling` brings
samples into the model's form, and this module joins them. docs/data.md describes each data set and every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from edge_kernels import counter
from numpy.typing import NDArray

from edge_bench.data import own as own_data
from edge_bench.data import partition, scaling
from edge_bench.data.own import DeviceFiles
from edge_bench.data.partition import FEWEST, Rows, Share, Units
from edge_bench.data.sources import Samples
from edge_bench.data.table import SPLITS, DataConfig, Shape, source
from edge_client.bundle import Manifest, Normalisation
from edge_client.data import DeviceData, check, fit, split
from edge_client.errors import ConfigError, DataError

_SPARE = 1 << 28  # bytes of memory to leave free


@dataclass(frozen=True)
class Divided:
    """Every device's data by its name, in the form that the model takes.

    `classes` are the labels' names, () when they have none. With `normalised` the samples are not raw: `normalisation`
    is what raw ones went through, None when that is unknown or too long for a manifest.
    """

    devices: dict[str, DeviceData]
    classes: tuple[str, ...] = ()
    normalised: bool = False
    normalisation: Normalisation | None = None


def read(config: DataConfig, shape: Shape = None) -> Samples | DeviceFiles:
    """All samples of a data set whose class is in `labels`, for a model whose input has `shape`.

    Raises DataError or ConfigError.
    """
    s = source(config.name).read(config, shape)
    if config.name == "hf" and isinstance(s, Samples) and s.decode is None:
        for key in sorted({"size", "colour", "mean", "deviation"} & config.model_fields_set):
            raise ConfigError(f"[data] {key} is for images, and {config.called} holds numbers; leave it out")
    if config.labels is None or isinstance(s, DeviceFiles):
        return s
    y = _classes(config, s)
    if missing := sorted(set(config.labels) - set(np.unique(y).tolist())):
        raise ConfigError(f"{config.called} has no sample of class {missing[0]}; leave it out of `labels`")
    number = np.full(max(int(y.max()), *config.labels) + 1, -1)
    number[list(config.labels)] = np.arange(len(config.labels))
    kept = np.flatnonzero(number[y] >= 0)
    names = tuple(s.classes[label] for label in config.labels) if s.classes else ()
    return replace(_chosen(s, kept, number[y[kept]]), classes=names)


def _chosen(s: Samples, rows: NDArray[np.int64], y: NDArray[Any] | None = None) -> Samples:
    """Only these rows; `y` replaces their labels."""
    return replace(
        s,
        x=s.x[rows],
        y=s.y[rows] if y is None else y,
        unit=s.unit[rows],
        owner=None if s.owner is None else s.owner[rows],
        published=None if s.published is None else s.published[rows],
    )


def _classes(config: DataConfig, s: Samples) -> NDArray[np.int64]:
    """One class a sample, int64[n]. Raises ConfigError for labels that are not classes."""
    if s.y.ndim != 1 or not np.issubdtype(s.y.dtype, np.integer) or s.y.min(initial=0) < 0:
        raise ConfigError(f"the labels of {config.called} are no classes; leave out `labels`, and divide it otherwise")
    return s.y.astype(np.int64)


def divide(config: DataConfig, seed: int, s: Samples) -> tuple[Samples, dict[str, Share]]:
    """Of all samples `s` those that are used, and by device which of them it holds.

    Raises DataError or ConfigError.
    """
    if config.split == "natural" and s.owner is not None:
        if config.samples is not None or config.labels is not None:
            raise ConfigError(
                f'`samples` and `labels` do not go with devices by maker; set split = "iid" for {config.called}'
            )
        return _by_maker(config, s, s.owner, seed)
    chosen = "" if config.labels is None else " of these labels"
    if config.samples is not None and config.samples > len(s.y):
        raise ConfigError(f"samples = {config.samples}, but {config.called} has {len(s.y)}{chosen}; lower it")
    rows = np.sort(counter.permutation(counter.key(seed, "samples"), len(s.y))[: config.samples])
    s = _chosen(s, rows)
    count = config.count
    if config.per_class is not None:
        if len(np.unique(s.unit)) < len(s.y):
            raise ConfigError(f"{config.called} has groups, and `per_class` draws single samples; leave it out")
        numbers = config.per_class, config.validation_per_class, config.test_per_class
        classes = _classes(config, s)
        shares = partition.few_of_classes(classes, s.published, count, seed, config.classes, numbers, config.balance)
        return s, {f"device-{k:0{len(str(count - 1))}d}": share for k, share in enumerate(shares)}
    if source(config.name).pooled:
        s = replace(s, published=None)
    return s, _parts(s, deal(config, s, seed), "device", seed)


def _by_maker(config: DataConfig, s: Samples, owner: NDArray[np.int64], seed: int) -> tuple[Samples, dict[str, Share]]:
    makers = np.unique(owner)
    label = source(config.name).maker
    if config.devices is not None and config.devices > len(makers):
        raise ConfigError(f"{config.called} has {len(makers)} {label}s; devices = {config.devices} is too many")
    rows = np.flatnonzero(np.isin(owner, makers[: config.devices]))
    s = _chosen(s, rows)
    if config.inside == "window":
        s = replace(s, unit=np.arange(len(s.y)))
    return s, _parts(s, owner[rows], label, seed, s.names)


def deal(config: DataConfig, s: Samples, seed: int) -> NDArray[np.int64]:
    """Which device gets each sample, int64[n]; samples of one unit go to one device.

    Raises ConfigError when the devices are too many for the data.
    """
    count, n = config.count, len(s.y)
    if count * FEWEST > n:
        raise ConfigError(
            f"devices = {count} takes {count * FEWEST} samples, {FEWEST} each, and there are {n}; "
            "use fewer devices, or more samples"
        )
    _, first, unit, size = np.unique(s.unit, return_index=True, return_inverse=True, return_counts=True)
    if len(size) < count:
        raise ConfigError(f"{count} devices cannot each get one of {len(size)} groups; use fewer devices")

    def classes() -> NDArray[np.int64]:
        y = _classes(config, s)
        if (y != y[first][unit]).any():
            raise ConfigError(
                f'a group of {config.called} has several classes; set split = "iid", or leave out `group`'
            )
        return y[first]

    return SPLITS[config.split].deal(config, Units(size, classes), seed)[unit]


def _parts(
    s: Samples, owner: NDArray[np.int64], label: str, seed: int, names: tuple[str, ...] = ()
) -> dict[str, Share]:
    """By device the rows of its parts; -1 owns nothing. `names` are those of owners; others are LABEL-NUMBER."""
    people = np.unique(owner[owner >= 0])
    width = len(str(people.max()))
    plain = s.y if s.y.ndim == 1 and np.issubdtype(s.y.dtype, np.integer) else np.zeros(len(s.y), np.int64)
    shares = {}
    for p in people.tolist():
        mine, stream = np.flatnonzero(owner == p), counter.key(seed, "parts", p)
        if s.sequential:
            part = partition.in_order(len(mine))
        elif s.published is not None:
            part = partition.published_part(s.published[mine], s.unit[mine], stream)
        else:
            part = partition.hold_out(plain[mine], s.unit[mine], stream)
        shares[names[p] if names else f"{label}-{p:0{width}d}"] = Share.of(mine, part)
    return shares


def load(
    config: DataConfig, seed: int, manifest: Manifest, found: Samples | DeviceFiles | None = None
) -> dict[str, DeviceData]:
    """Every device's data by its name. Raises as `divided` does."""
    return divided(config, seed, manifest, found).devices


def divided(config: DataConfig, seed: int, manifest: Manifest, found: Samples | DeviceFiles | None = None) -> Divided:
    """Every device's data in the shape and dtype of the bundle's input; `found` is what `read` gave.

    Raw samples are normalised by the bundle's normalisation, as on a device, or by `[data]`.
    Features of HAR are standardised with the mean and deviation of all devices' training samples together.
    Raises DataError or ConfigError.
    """
    raw = not source(config.name).normalised
    by_table = config.standardise or config.mean is not None or config.deviation is not None
    normalisation = manifest.input.normalisation
    if normalisation is not None and by_table:
        raise ConfigError(
            f"the bundle {manifest.name!r} says how raw samples are normalised, and so does [data]; leave out "
            "`standardise`, `mean` and `deviation`, or the bundle's normalisation"
        )
    if found is None:
        found = read(config, manifest.input.shape)
    if isinstance(found, DeviceFiles):
        return _fitted(config, found, seed, manifest)
    if found.classes:
        _check_classes(found.classes, manifest, config.called)
    manifest.target.check(found.y, config.called)  # here errors name a sample by its place in the whole
    s, shares = divide(config, seed, found)
    _check_memory(config, shares, manifest)
    scale = None
    if config.name == "har" or config.standardise:
        scale = scaling.scale_of(s.samples(np.sort(np.concatenate([share.train for share in shares.values()]))))
    devices = {}
    for name, share in shares.items():
        what = f"{config.called}, {name}"
        sides = []
        for rows in _sides(config, share, s.unit, seed, what):
            x = scaling.shaped(scaling.scaled(s.samples(rows), scale), manifest.input.shape)
            if raw and normalisation is not None and x.shape[1:] == manifest.input.shape and x.dtype.kind in "fiub":
                x = normalisation.apply(x)
            sides.append(check(manifest, x, s.y[rows], what))
        devices[name] = DeviceData(*(array for side in sides for array in side))
    said = normalisation if raw else None
    if by_table or scale is not None:
        one = s.samples(next(iter(shares.values())).train[:1])
        said = scaling.normalisation(config, scale, one.shape[1:], manifest.input.shape)
    return Divided(devices, s.classes, not raw or said is not None or by_table, said)


def _check_classes(classes: tuple[str, ...], manifest: Manifest, what: str) -> None:
    """Raise DataError when labels with names are to be numbers, or the bundle numbers a name otherwise."""
    if manifest.target.labels(1).dtype.kind == "f":
        raise DataError(
            f"{what}: labels are names, such as {classes[0]!r}, and the model predicts numbers; give numbers, "
            "or export it for classification"
        )
    number = {name: i for i, name in enumerate(manifest.class_names)}
    if any(number.get(name, i) != i for i, name in enumerate(classes)):
        raise DataError(
            f"{what}: the classes are numbered {', '.join(classes)}, those of the bundle "
            f"{', '.join(manifest.class_names)}; give numbers, or export it with class_names in the order of the data"
        )


def _sides(config: DataConfig, share: Share, unit: NDArray[np.int64], seed: int, what: str) -> tuple[Rows, Rows, Rows]:
    """The rows a device trains on, validates on and is scored on. Raises DataError with too few to train on.

    With `per_class` the validation part is the device's own, whatever is scored: a method may need it.
    """
    trained, reported = share.train, share.validation
    validated = share.validation if config.per_class is not None else share.train[:0]
    if config.evaluate == "test":
        reported = share.test
        if config.per_class is None:
            trained = np.sort(np.concatenate([share.train, share.validation]))
    if len(trained) < (2 if config.evaluate == "test" else 1):  # a file with one training sample cannot `join`
        held = "1 sample" if len(trained) else "no samples"
        raise DataError(f"{what} has {held} to train on, and training needs at least 2; give it more, or leave it out")
    if config.validation:
        stay, gone = split(unit[trained], seed, "validation", config.validation, must=False)
        trained, validated = trained[stay], np.sort(np.concatenate([validated, trained[gone]]))
    return trained, validated, reported


def _fitted(config: DataConfig, fleet: DeviceFiles, seed: int, manifest: Manifest) -> Divided:
    """Each device's own file, split as a real device of a federation with the same seed splits it."""
    for key in ("split", "samples", "labels", "validation"):
        if key in config.model_fields_set:
            raise ConfigError(
                f"`{key}` divides a data set, but {config.called} has every device's own samples; leave it out"
            )
    names = list(fleet.devices)
    if config.devices is not None and config.devices > len(names):
        raise ConfigError(f"{config.called} has {len(names)} devices; devices = {config.devices} is too many")
    shape = manifest.input.shape
    files = dict(list(fleet.devices.items())[: config.devices])
    already = any("normalised" in f.arrays for f in fleet.devices.values())
    said = None if already else manifest.input.normalisation
    if config.standardise:
        scale = scaling.scale_of(np.concatenate([fit(file, manifest, seed).x for file in files.values()]))
        said = None if already else scaling.normalisation(config, scale, shape, shape)
        files = {
            name: replace(f, arrays={k: scaling.scaled(a, scale) if k[0] == "x" else a for k, a in f.arrays.items()})
            for name, f in files.items()
        }
    devices = {name: fit(file, manifest, seed) for name, file in files.items()}
    if config.evaluate == "validation":
        devices = {
            name: replace(d, x_test=d.x_val, y_test=d.y_val, x_val=d.x_val[:0], y_val=d.y_val[:0])
            for name, d in devices.items()
        }
    return Divided(devices, (), already or config.standardise or said is not None, said)


def _check_memory(config: DataConfig, shares: Mapping[str, Share], manifest: Manifest) -> None:
    """Raise DataError when the devices' samples would not fit into this machine's memory."""
    rows = sum(len(part) for share in shares.values() for part in (share.train, share.validation, share.test))
    needed = rows * prod(manifest.input.shape) * np.dtype(manifest.input.dtype).itemsize
    free = psutil.virtual_memory().available
    if needed > free - _SPARE:
        raise DataError(
            f"{config.called}: {rows:,} samples of {manifest.input.shape} take {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; lower `devices` or `samples`, or give the model smaller ones"
        )


def write(devices: Mapping[str, DeviceData], folder: Path, normalised: bool = True) -> dict[str, Path]:
    """One .npz file a device, as `maskfleet join --data` reads it. Raises DataError for a name that is no device's."""
    mark: dict[str, Any] = {"normalised": np.True_} if normalised else {}
    for name in devices:
        own_data.check_name(name, "data")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, data in devices.items():
        paths[name] = folder / f"{name}.npz"
        np.savez(paths[name], **{**vars(data), **mark})
    return paths
