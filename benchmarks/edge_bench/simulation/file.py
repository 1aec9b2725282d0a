"""A simulation's TOML file: its settings, and the bundle and the data that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_bench.bundles import NAMES, UNSEEN, is_named, open_named
from edge_bench.command_line import known_names
from edge_bench.data import datasets
from edge_bench.data.datasets import Divided
from edge_bench.data.table import DataConfig
from edge_bench.own_model import ExportConfig, open_module, with_warnings
from edge_client import toml
from edge_client.authored import is_place
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, first_fault
from edge_client.methods import Method, installed_methods, make_method
from edge_client.named_bundles import bundle_folder, packaged
from edge_client.protocol.messages import FederationConfig, Guard, Personalise


class SimulationConfig(BaseModel):
    """A simulation's TOML file. Each table `[methods.LABEL]` is one run; its `name` is LABEL when left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bundle: str
    """The name of a bundle ("digits", "mlp-har"; `docs/models.md` has all), a bundle's folder, or FILE.py:FUNCTION."""
    data: DataConfig
    export: ExportConfig = ExportConfig()
    """How a `bundle` of a Python file is exported."""
    methods: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    cohort: Annotated[int, Field(ge=1, le=1_000_000)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    backend: str = "onnxruntime"
    processes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that train devices at the same time; the results do not depend on it. None: as many as there are cores,
    once a method's remaining work is worth their start."""
    guard: Guard = "none"
    """What happens to an update whose norm or weight is far beyond the round's others. Simulated devices are honest, so
    nothing by default; a federation's default is "clip"."""
    personalise: Personalise = "best"
    """Which model a device ends with, as in a federation."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Every N rounds score what each device would make of the next downlink, before `personalise` chooses; 0: never."""
    final_epochs: bool = True
    """Also report every device's score after its local epochs from the final downlink."""

    def method(self, label: str) -> Method:
        """The method of the table `[methods.LABEL]`. Raises ConfigError."""
        return make_method({"name": label, **self.methods[label]})

    def federation(self, label: str, devices: int, bundle: str) -> FederationConfig:
        """The federation of `[methods.LABEL]` with so many devices; `bundle` is the address of the bundle."""
        return FederationConfig(
            name="simulation",  # a label need not be a federation's name
            bundle=bundle,
            method={"name": label, **self.methods[label]},
            rounds=self.rounds,
            cohort=self.cohort,
            min_devices=devices,
            seed=self.seed,
            backend=self.backend,
            guard=self.guard,
            personalise=self.personalise,
        )


def read_config(data: Mapping[str, Any], folder: Path = Path()) -> SimulationConfig:
    """Check a parsed TOML file, whose paths are relative to `folder`.

    Raises ConfigError with the setting and its value.
    """
    tables = data.get("methods")
    if "method" in data or not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) for t in tables.values()):
        raise ConfigError("a simulation needs a table [methods.NAME] for each method; add one, or give --method")
    models: dict[str, type[BaseModel]] = {"data": DataConfig, "export": ExportConfig}
    checked: dict[str, BaseModel] = {}
    for name, model in models.items():  # apart, so that a key is suggested from its own table
        if isinstance(data.get(name), Mapping):
            checked[name] = _checked(model, data[name], f"[{name}]")
    config = _checked(SimulationConfig, {**data, **checked}, "simulation")
    if config.export.model_fields_set and not is_place(config.bundle):
        raise ConfigError(f"[export] is for a bundle of a Python file (FILE.py:FUNCTION); bundle = {config.bundle!r}")
    refuse_seen(config.bundle, config.data)
    bundle = (
        config.bundle if is_named(config.bundle) else os.path.join(folder, config.bundle)
    )  # which keeps a leading ./
    return config.model_copy(update={"bundle": bundle, "data": config.data.beside(folder)})


def refuse_seen(bundle: str, data: DataConfig) -> None:
    """Raise ConfigError for devices with test samples that a pre-trained bundle was trained on."""
    name, owners = UNSEEN.get(bundle, ("", 0))
    if data.name == name and (data.split != "natural" or data.devices is None or data.devices > owners):
        raise ConfigError(
            f"bundle {bundle!r} was trained on all samples of {name}'s owners from {owners} on, test samples too; set "
            f'split = "natural" and devices = {owners} or fewer, or take another bundle'
        )


_M = TypeVar("_M", bound=BaseModel)


def _checked(model: type[_M], table: Any, called: str) -> _M:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{called} setting {first_fault(error, 'table', model.model_fields)}") from None


def read_simulation(file: Path, methods: str | None = None, **changes: Any) -> SimulationConfig:
    """A simulation's TOML file with the `changes` that are not None.

    `methods` names those that run, comma-separated: labels of the file, and installed methods, which run at their
    defaults. Raises ConfigError.
    """
    content = toml.read(file) | {k: v for k, v in changes.items() if v is not None}
    if (given := changes.get("bundle")) is not None:  # an option's path is relative to where the command runs
        content["bundle"] = given if is_named(given) else str(Path(given).resolve())
        content |= {} if is_place(given) else {"export": {}}
    tables = content.get("methods", {})
    if methods is not None and isinstance(tables, dict):
        there = [*tables, *(name for name in installed_methods() if name not in tables)]
        wanted = known_names(methods, "--method", there, "there is no method")
        content["methods"] = {label: tables.get(label, {}) for label in wanted}
    config = read_config(content, file.parent)
    for label in config.methods:  # a wrong name fails before data are read
        config.method(label)
    return config


def find_bundle(name: str) -> Bundle:
    """The bundle `name`: packaged, built on demand (`bundles.NAMES`), else a folder.

    Raises BundleError for a damaged one; ConfigError or DataError when there is none or it cannot be built.
    """
    if name in NAMES and name not in packaged():
        return open_named(name)
    file, extension, _ = Path(name).name.partition(".py")
    if extension and not is_place(name):
        raise ConfigError(f"bundle = {name!r} names no function; write {file}.py:FUNCTION, such as {file}.py:build")
    return with_warnings(Bundle.open(bundle_folder(name, Path(), *NAMES)))


def prepare(config: SimulationConfig) -> tuple[Bundle, Divided]:
    """The bundle, exported now when it is a function of a Python file, and every device's data.

    Raises BundleError, DataError or ConfigError.
    """
    if not is_place(config.bundle):
        bundle = find_bundle(config.bundle)
        return bundle, datasets.divided(config.data, config.seed, bundle.manifest)
    found = datasets.read(config.data, config.export.input)
    bundle = open_module(config.bundle, config.export, found, torch_part=config.backend == "torch")
    return bundle, datasets.divided(config.data, config.seed, bundle.manifest, found)


def open_simulation(
    file: Path, methods: str | None = None, **changes: Any
) -> tuple[SimulationConfig, Bundle, dict[str, DeviceData]]:
    """As `read_simulation`, with the bundle and every device's data. Raises ConfigError, BundleError or DataError."""
    config = read_simulation(file, methods, **changes)
    bundle, data = prepare(config)
    return config, bundle, data.devices
