"""The table `[data]` of a simulation: every key, every data set and every split by name.

UCI HAR, FEMNIST and Shakespeare are divided by who made the samples; the others by chance or by class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from edge_bench.data import images, partition, sources
from edge_bench.data import own as own_data
from edge_bench.data.own import DeviceFiles
from edge_bench.data.partition import FEWEST, Units
from edge_bench.data.sources import Samples, find
from edge_client.errors import ConfigError, suggestion

Shape: TypeAlias = "tuple[int, ...] | None"


@dataclass(frozen=True)
class Source:
    """A data set by name: `read(config, shape)` for a model whose input has `shape`, and the keys of `[data]` it uses.

    `maker` names the devices of a natural split. `dependent`: only the natural split is allowed, because neighbouring
    samples of one maker belong together. `pooled`: published test samples are dealt out like the others, except with
    `per_class`. `normalised`: the samples are normalised already, so a bundle's normalisation does not apply.
    """

    read: Callable[[DataConfig, Shape], Samples | DeviceFiles]
    keys: frozenset[str] = frozenset({"path"})
    maker: str = "device"
    dependent: bool = False
    pooled: bool = False
    normalised: bool = False


@dataclass(frozen=True)
class Split:
    """A division by name: `deal(config, units, seed)` is the device of each unit, int64[n], -1 where it goes to none.

    `keys` of `[data]` are those it uses.
    """

    deal: Callable[[DataConfig, Units, int], NDArray[np.int64]]
    keys: frozenset[str] = frozenset()


class DataConfig(BaseModel):
    """The table `[data]` of a simulation. A key that the data set or the split does not use is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    """A data set of docs/data.md: "har", "digits", ..., or of your own: "npz", "images", "hf", "python"."""
    path: Path | None = None
    """The data set's file or folder; None looks in the places of `sources`. `npz`, `images` and `hf` need it."""
    devices: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """By maker: the first so many (None: all). Others: over how many devices (None: 10)."""
    split: str = "natural"
    """`natural`: by maker where the data set has makers, else as `iid`, an even deal. `dirichlet`: each class by
    Dirichlet shares. `classes`: a device holds some classes only."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """`split = "dirichlet"`: its concentration; small is uneven."""
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
    """Own data: features by mean and deviation of all devices' training samples together (HAR always is)."""
    samples: Annotated[int, Field(ge=FEWEST)] | None = None
    """Use only so many samples of the whole data set (None: all); not with makers."""
    labels: Annotated[tuple[Annotated[int, Field(ge=0, lt=1000)], ...], Field(min_length=1)] | None = None
    """Use only the samples of these classes, numbered anew in this order (None: all); not with makers."""
    evaluate: Literal["validation", "test"] = "test"
    """`validation`: train on the training part, report on the validation part, to choose settings.
    `test`: train on both, report on the test part."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a device's training samples that it holds as its own validation part, whole units only; 0: none."""
    factory: str | None = None
    """`python`: the function, as FILE.py:FUNCTION or package.module:FUNCTION."""
    arguments: dict[str, Any] = {}
    """`python`, and data sets of other packages: keyword arguments of the function."""
    size: int | tuple[int, int] | None = None
    """Images: their side, or height and width; None: those of the model's input, else of the first image."""
    colour: images.Colour | None = None
    """Images: one channel or three; None: as many as the model's input has, else the first image."""
    mean: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    """Images: subtracted from values in 0..1, one for each channel or for all. None: 0."""
    deviation: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Images: what values in 0..1, less the mean, are divided by. None: 1."""
    features: str | None = None
    """`hf`: the column of the samples; None: the first one of images, else `x`."""
    label: str = "label"
    """`hf`: the column of the labels."""
    owner: str | None = None
    """`hf`: the column of a sample's device."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return _one_of(name, [*SOURCES, *own_data.others()], "data set")

    @field_validator("split")
    @classmethod
    def _divided(cls, split: str) -> str:
        return _one_of(split, SPLITS, "split")

    @field_validator("labels")
    @classmethod
    def _once(cls, labels: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if labels is not None and len(set(labels)) < len(labels):
            raise PydanticCustomError("twice", "name each class once")
        return labels

    @field_validator("size", mode="before")
    @classmethod
    def _sides(cls, size: Any) -> Any:
        sides = size if isinstance(size, list | tuple) else (size, size)
        if size is not None and not (len(sides) == 2 and all(type(n) is int and 1 <= n <= 4096 for n in sides)):
            raise PydanticCustomError("size", "give a side of 1 to 4096 pixels, or [height, width]")
        return size

    @model_validator(mode="after")
    def _nothing_unused(self) -> DataConfig:
        """Refuse a key that would change nothing."""
        own = source(self.name)
        owned = {key for s in SOURCES.values() for key in s.keys}
        faults = []
        for key in sorted(self.model_fields_set & owned - own.keys):
            users = [name for name, s in SOURCES.items() if key in s.keys]
            faults.append((key, f"the data set {self.name!r} does not use it; it is for {', '.join(users)}"))
        for key in ("split", "samples", "labels"):
            if own.dependent and getattr(self, key) not in (None, "natural"):
                faults.append((key, f"{self.name!r} is divided by {own.maker} and used whole; leave it out"))
        for key in sorted(self.model_fields_set):
            users = [f'split = "{name}"' for name, split in SPLITS.items() if key in split.keys]
            if users and key not in SPLITS[self.split].keys:
                faults.append((key, f"it is used only with {' or '.join(users)}; add that, or leave it out"))
            elif key in _OF_PER_CLASS and self.per_class is None:
                faults.append((key, "it is used only with `per_class`; add that, or leave it out"))
        if faults:
            key, why = faults[0]
            fault = InitErrorDetails(
                type=PydanticCustomError("unused", "{why}", {"why": why}), loc=(key,), input=_plain(getattr(self, key))
            )
            raise ValidationError.from_exception_data("data", [fault])
        return self

    def beside(self, folder: Path) -> DataConfig:
        """The same with `path` and a file in `factory` relative to `folder`."""
        changes: dict[str, Any] = {}
        if self.path is not None:
            changes["path"] = folder / self.path.expanduser()
        if self.factory is not None and ".py:" in self.factory:
            changes["factory"] = str(folder / self.factory)
        return self.model_copy(update=changes)

    @property
    def count(self) -> int:
        """The number of devices that samples without makers are divided over."""
        return self.devices or 10

    @property
    def called(self) -> str:
        """The data set in a heading: its name, or what a user's own data is read from."""
        if self.factory is not None:
            return self.factory.rpartition("/")[2]
        return self.path.name if self.path is not None and "standardise" in source(self.name).keys else self.name

    def form(self, shape: Shape) -> images.Form:
        """How images become samples for a model whose input has `shape`."""
        return images.form(shape, self.size, self.colour, self.mean, self.deviation)


_OF_PER_CLASS = frozenset({"validation_per_class", "test_per_class", "balance"})


def _evenly(config: DataConfig, units: Units, seed: int) -> NDArray[np.int64]:
    return partition.evenly(len(units.size), config.count, seed)


def _dirichlet(config: DataConfig, units: Units, seed: int) -> NDArray[np.int64]:
    return partition.by_class(units.classes(), units.size, config.count, seed, config.alpha, None)


def _by_classes(config: DataConfig, units: Units, seed: int) -> NDArray[np.int64]:
    return partition.by_class(units.classes(), units.size, config.count, seed, config.alpha, config.classes)


SPLITS: Mapping[str, Split] = {
    "natural": Split(_evenly),  # of samples without makers
    "iid": Split(_evenly),
    "dirichlet": Split(_dirichlet, frozenset({"alpha"})),
    "classes": Split(_by_classes, frozenset({"classes", "per_class"})),
}
"""Every split by name."""


def _one_of(name: str, names: Collection[str], what: str) -> str:
    """`name`, which is among `names`. Raises PydanticCustomError with the choices."""
    if name not in names:
        choices = ", ".join(names) + suggestion(name, names)
        raise PydanticCustomError(
            "unknown", "there is no such {what}; choose {choices}", {"what": what, "choices": choices}
        )
    return name


def _plain(value: Any) -> Any:
    """A setting as it was written."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _here(config: DataConfig) -> Path:
    """The path of a user's own data. Raises ConfigError."""
    if config.path is None:
        raise ConfigError(f'data set "{config.name}" needs `path`; add it under [data]')
    return config.path


def _python(config: DataConfig, shape: Shape) -> Samples | DeviceFiles:
    if config.factory is None:
        raise ConfigError('data set "python" needs `factory`, such as "my_data.py:load"')
    return own_data.call(config.factory, config.arguments)


def _installed(config: DataConfig, shape: Shape) -> Samples | DeviceFiles:
    return own_data.installed(config.name, config.arguments)


_PICTURES = frozenset({"path", "standardise", "size", "colour", "mean", "deviation"})
SOURCES: Mapping[str, Source] = {
    "har": Source(
        lambda c, _: sources.read_har(find(c.name, c.path)), frozenset({"path", "inside"}), "person",
        dependent=True, normalised=True,
    ),
    "femnist": Source(lambda c, _: sources.read_femnist(find(c.name, c.path)), maker="writer"),
    "shakespeare": Source(
        lambda c, _: sources.read_shakespeare(find(c.name, c.path), c.characters),
        frozenset({"path", "characters"}), "role", dependent=True,
    ),
    "digits": Source(lambda c, _: sources.read_digits(), frozenset()),
    **dict.fromkeys(("mnist", "fashion-mnist"), Source(lambda c, _: sources.read_mnist(find(c.name, c.path)))),
    **dict.fromkeys(
        ("cifar10", "cifar100"),
        Source(lambda c, _: sources.read_cifar(find(c.name, c.path)), pooled=True, normalised=True),
    ),
    "npz": Source(lambda c, _: own_data.read_npz(_here(c)), frozenset({"path", "standardise"})),
    "images": Source(lambda c, shape: images.read_folder(_here(c), c.form(shape)), _PICTURES),
    "hf": Source(
        lambda c, shape: own_data.read_hf(_here(c), c.features, c.label, c.owner, c.form(shape)),
        _PICTURES | {"features", "label", "owner"},
    ),
    "python": Source(_python, frozenset({"factory", "arguments", "standardise"})),
}  # fmt: skip
"""Every data set by name."""


def source(name: str) -> Source:
    """The data set `name`, also one of another package."""
    return SOURCES.get(name) or Source(_installed, frozenset({"arguments", "standardise"}))
