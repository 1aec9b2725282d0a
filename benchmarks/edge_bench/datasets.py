"""Data sets divided over devices: which device holds which samples, and which of these train, validate and test.

UCI HAR is divided by person and each person's part by recording, because neighbouring windows share half their
samples. Digits (scikit-learn's), MNIST, Fashion-MNIST and a subset of CIFAR-100 are divided by class. Nothing is
downloaded: the files must be at the given path, in the folder $MASKFLEET_DATA, or in `shared/data` beside the checkout.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal
from zipfile import BadZipFile

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edge_client.bundle import Manifest
from edge_client.data import DeviceData, check, split
from edge_client.errors import ConfigError, DataError

HELD_OUT = 0.2  # of a device's samples (or recordings) for validation, and as much again for testing
FEWEST = 10  # samples a device must get; a division that leaves one with fewer is drawn again

_FILES = {
    "har": "har/ucihar_raw.npz",
    "mnist": "mnist",
    "fashion-mnist": "fashion-mnist",
    "cifar100": "cifar100/cifar100_9k_2k.npz",
}
# What the pre-trained ResNets expect of red, green and blue.
_CIFAR_MEAN, _CIFAR_DEVIATION = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)


class DataConfig(BaseModel):
    """The table `[data]` of a simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["har", "digits", "mnist", "fashion-mnist", "cifar100"]
    path: Path | None = None
    """The data set's file or folder; None looks where this module's docstring says."""
    devices: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """HAR: the first so many persons (None: all 30). Others: over how many devices (None: 10)."""
    split: Literal["natural", "dirichlet", "classes"] = "natural"
    """HAR knows `natural` (by person). Others: `natural` is an even deal, `classes` gives a device some classes."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """Dirichlet concentration: small is uneven."""
    classes: Annotated[int, Field(ge=1, le=1000)] = 2
    """Classes a device holds with `split = "classes"`."""
    inside: Literal["recording", "window"] = "recording"
    """HAR: a device's held-out samples are whole recordings, or (as published tables do it) single windows."""
    samples: Annotated[int, Field(ge=FEWEST)] | None = None
    """Use only so many samples of the whole data set (None: all); not for HAR."""
    labels: Annotated[tuple[Annotated[int, Field(ge=0, lt=1000)], ...], Field(min_length=1)] | None = None
    """Use only the samples of these classes, numbered anew in this order (None: all); not for HAR."""
    evaluate: Literal["validation", "test"] = "test"
    """`validation`: train on the training part, report on the validation part, to choose settings.
    `test`: train on both, report on the test part."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a device's training samples that it holds as its own validation part, whole units only; 0: none."""


@dataclass(frozen=True)
class Samples:
    """A divided data set: `x` float32[n, features], `y` int64[n]; `owner` int64[n], the person or device of each.

    Samples of one `unit` int64[n] (a recording) are never parted between training and testing.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    owner: NDArray[np.int64]
    unit: NDArray[np.int64]


def find(name: str, path: Path | None) -> Path:
    """The data set's file or folder. Raises DataError naming every place where it is not."""
    if path is not None:
        tried = [path, path / _FILES[name], path / Path(_FILES[name]).name]
    else:
        roots = [Path(os.environ["MASKFLEET_DATA"])] if "MASKFLEET_DATA" in os.environ else []
        roots += [Path(__file__).resolve().parents[3] / "shared" / "data", Path("..") / "shared" / "data"]
        tried = [root / _FILES[name] for root in roots]
    for candidate in tried:
        if candidate.exists() and (candidate.is_file() or not _FILES[name].endswith(".npz")):
            return candidate
    raise DataError(f"data set {name!r} is not at {', '.join(map(str, tried))}; give its path or set MASKFLEET_DATA")


def read_har(path: Path, inside: str) -> Samples:
    """UCI HAR's raw windows, 9 x 128 values each, by person; the units are recordings or single windows."""
    try:
        with np.load(path, allow_pickle=False) as z:
            x, y, person, recording = (z[k] for k in ("x", "y", "subject", "segment"))
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} is not the UCI HAR archive (keys x, y, subject, segment): {error}") from None
    unit = np.arange(len(y)) if inside == "window" else recording.astype(np.int64)
    return Samples(x.astype(np.float32).reshape(len(x), -1), y.astype(np.int64), person.astype(np.int64), unit)


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """scikit-learn's 1797 digits, 8 x 8 values in 0..1. Raises ConfigError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("the digits come with scikit-learn; run: pip install 'maskfleet[bench]'") from None
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes, gzipped: images uint8[n, 28, 28] or labels uint8[n]. Raises DataError."""
    try:
        data = gzip.decompress(path.read_bytes())
        if data[:3] != b"\0\0\x08":
            raise ValueError("its first bytes are not those of an idx file of bytes")
        axes = data[3]
        shape = np.frombuffer(data, ">u4", axes, 4).astype(int)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a gzipped idx file: {error}") from None


def read_mnist(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The 60,000 training images, values in 0..1 (each device's test part is cut from them, as from the others)."""
    x = read_idx(folder / "train-images-idx3-ubyte.gz")
    scaled: NDArray[np.float32] = x.reshape(len(x), -1) / np.float32(255)
    return scaled, read_idx(folder / "train-labels-idx1-ubyte.gz").astype(np.int64)


def read_cifar100(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The CIFAR-100 subset's images, float32[n, 3 * 32 * 32] channels first, normalised. Raises DataError."""
    try:
        with np.load(path, allow_pickle=False) as z:
            x, y = z["x"], z["y"]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} is not the CIFAR-100 archive (keys x, y): {error}") from None
    scaled = (x.astype(np.float32) / 255 - _CIFAR_MEAN) / _CIFAR_DEVIATION
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)).reshape(len(x), -1), y.astype(np.int64)


def read(config: DataConfig) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All samples of a data set that is not divided by nature, of the classes that `labels` keeps."""
    if config.name == "digits":
        x, y = read_digits()
    else:
        path = find(config.name, config.path)
        x, y = read_cifar100(path) if config.name == "cifar100" else read_mnist(path)
    if config.labels is None:
        return x, y
    number = np.full(max(int(y.max()), *config.labels) + 1, -1)
    number[list(config.labels)] = np.arange(len(config.labels))
    kept = number[y] >= 0
    return x[kept], number[y[kept]]


def deal(config: DataConfig, y: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Which device gets each sample, int64[n]. Raises ConfigError when the devices are too many for the data."""
    count = config.devices or 10
    if count * FEWEST > len(y):
        raise ConfigError(f"{count} devices cannot each get {FEWEST} of {len(y)} samples; use fewer devices")
    classes = np.unique(y)
    owner = np.empty(len(y), np.int64)
    if config.split == "natural":
        owner[counter.permutation(counter.key(seed, "deal"), len(y))] = np.arange(len(y)) % count
        return owner
    rng = np.random.default_rng(counter.key(seed, "deal"))
    for _ in range(1000):
        if config.split == "classes":
            held = [
                {int(classes[(k * config.classes + j) % len(classes)]) for j in range(config.classes)}
                for k in rng.permutation(count)
            ]
            share = np.array([[float(c in h) for h in held] for c in classes])
            share /= np.maximum(share.sum(axis=1, keepdims=True), 1)
        else:
            share = rng.dirichlet(np.full(count, config.alpha), len(classes))
        for c, part in zip(classes, share, strict=True):
            of_class = np.flatnonzero(y == c)
            if not part.any():
                owner[of_class] = -1  # a class that no device holds
                continue
            cuts = np.floor(np.cumsum(part)[:-1] * len(of_class) + 0.5).astype(int)
            for k, chosen in enumerate(np.split(rng.permutation(of_class), cuts)):
                owner[chosen] = k
        if np.bincount(owner[owner >= 0], minlength=count).min() >= FEWEST:
            return owner
    raise ConfigError(f"no division left every one of {count} devices {FEWEST} samples; raise alpha or lower devices")


def hold_out(y: NDArray[np.int64], unit: NDArray[np.int64], stream: int) -> NDArray[np.int8]:
    """Part of each of one device's samples: 0 train, 1 validation, 2 test, int8[n].

    Units (recordings, or single samples) go whole to one part; of every class with at least three units each part
    gets some, and the training part gets all of a class with fewer.
    """
    part = np.zeros(len(y), np.int8)
    for c in np.unique(y):
        units = np.unique(unit[y == c])
        if len(units) < 3:
            continue
        order = units[counter.permutation(counter.key(stream, int(c)), len(units))]
        held = max(1, round(HELD_OUT * len(units)))
        part[np.isin(unit, order[:held]) & (y == c)] = 1
        part[np.isin(unit, order[held : 2 * held]) & (y == c)] = 2
    return part


def _divided(config: DataConfig, seed: int) -> Samples:
    if config.name == "har":
        if config.split != "natural" or config.samples is not None or config.labels is not None:
            raise ConfigError(
                'UCI HAR is divided by person; leave out `samples`, `labels`, and `split` or set it to "natural"'
            )
        s = read_har(find("har", config.path), config.inside)
        people = np.unique(s.owner)
        if config.devices is not None and config.devices > len(people):
            raise ConfigError(f"UCI HAR has {len(people)} persons; devices = {config.devices} is too many")
        chosen = np.flatnonzero(np.isin(s.owner, people[: config.devices]))
        return Samples(s.x[chosen], s.y[chosen], s.owner[chosen], s.unit[chosen])
    x, y = read(config)
    chosen = np.sort(counter.permutation(counter.key(seed, "samples"), len(y))[: config.samples])
    owner = deal(config, y[chosen], seed)
    held = owner >= 0
    return Samples(x[chosen][held], y[chosen][held], owner[held], np.arange(int(held.sum())))


def load(config: DataConfig, seed: int, manifest: Manifest) -> dict[str, DeviceData]:
    """Every device's data by its name, in the shape and dtype of the bundle's input.

    Features of HAR are standardised with the mean and deviation of all devices' training samples together.
    Raises DataError or ConfigError.
    """
    s = _divided(config, seed)
    people = np.unique(s.owner)
    part = np.zeros(len(s.y), np.int8)
    for p in people:
        mine = s.owner == p
        part[mine] = hold_out(s.y[mine], s.unit[mine], counter.key(seed, "parts", int(p)))
    x: NDArray[Any] = s.x
    if config.name == "har":
        train = x[part == 0].astype(np.float64)
        x = (x - train.mean(axis=0)) / np.maximum(train.std(axis=0), 1e-6)
    if x.shape[1] == prod(manifest.input.shape):
        x = x.reshape(-1, *manifest.input.shape)
    fit, report = ((0,), 1) if config.evaluate == "validation" else ((0, 1), 2)
    label, width = ("person" if config.name == "har" else "device"), len(str(people.max()))
    devices = {}
    for p in people:
        mine, name = np.flatnonzero(s.owner == p), f"{label}-{int(p):0{width}d}"
        trained, reported = mine[np.isin(part[mine], fit)], mine[part[mine] == report]
        validated = trained[:0]
        if config.validation:
            stay, gone = split(s.unit[trained], seed, "validation", config.validation, must=False)
            trained, validated = trained[stay], trained[gone]
        sides = (check(manifest, x[i], s.y[i], f"{config.name}, {name}") for i in (trained, validated, reported))
        devices[name] = DeviceData(*(array for side in sides for array in side))
    return devices


def write(devices: Mapping[str, DeviceData], folder: Path) -> dict[str, Path]:
    """One .npz file a device, as `maskfleet join --data` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, data in devices.items():
        paths[name] = folder / f"{name}.npz"
        np.savez(paths[name], **vars(data))
    return paths
