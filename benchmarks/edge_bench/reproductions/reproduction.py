"""What a reproduction is: a row or figure of a paper as data, one TOML file in the folder `reproductions`.

Every task (a bundle, a division of data, rounds) meets every method and every seed; one combination is a cell. The
table `[full]` holds what is different at the paper's own scale. Nothing runs here: `reproduce` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_bench.bundles import REVISIONS
from edge_bench.simulation.file import SimulationConfig, read_config
from edge_client import toml
from edge_client.bundle import digest
from edge_client.errors import ConfigError, first_fault, suggestion
from edge_client.methods import Method
from edge_client.protocol.messages import Guard

FOLDER = Path(__file__).parent

Measure = Literal["final", "after", "best"]
"""Which score is compared: of the personal models after the last round, of these after local epochs, or of the best
round's cohort after its local epochs."""


class Task(BaseModel):
    """What all methods are run on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bundle: str
    data: dict[str, Any]
    """A simulation's table `[data]`, checked when the task is run: --list needs no data set."""
    rounds: Annotated[int, Field(ge=1)]
    cohort: Annotated[int, Field(ge=1)]
    methods: dict[str, dict[str, Any]] = {}
    """Settings that differ from the method's own table in this task."""


class Paper(BaseModel):
    """What the paper prints for a method: its score in per cent, the spread, and the rest in its own words."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    score: float | None = None
    spread: float | None = None
    says: str = ""


class Attempt(BaseModel):
    """A setting that was compared on the validation part, with what it scored."""

    model_config = ConfigDict(frozen=True, extra="allow")
    task: str
    label: str
    settings: dict[str, Any]
    """Those that differ from the method's own table."""


class Reproduction(BaseModel):
    """A reproduction's TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: str
    reference: str
    """The paper, and which table or figure."""
    minutes: Annotated[int, Field(ge=1)]
    """How long one seed takes on two quiet cores, about."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    tasks: Annotated[dict[str, Task], Field(min_length=1)]
    methods: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    paper: dict[str, dict[str, Paper]] = {}
    """By task and method."""
    measure: Measure = "final"
    baseline: str = "fedavg"
    """The method whose bytes the others' are compared with."""
    final_epochs: bool = True
    small: bool = False
    """Also measure one device's pruned model beside the whole network (`small`)."""
    guard: Guard = "none"
    """What papers have: an uneven weight counts in full."""
    notes: str = ""
    tried: tuple[Attempt, ...] = ()
    full: dict[str, Any] = {}


@dataclass(frozen=True)
class Cell:
    """One method on one task with one seed: `config` has that method alone, under its label."""

    task: str
    label: str
    config: SimulationConfig

    @property
    def name(self) -> str:
        return f"{self.task}/{self.label}/{self.config.seed}"


def names() -> list[str]:
    """All reproductions that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read(name: str, full: bool = False) -> Reproduction:
    """The reproduction `name`, at the paper's scale when `full`. Raises ConfigError."""
    if name not in names():
        raise ConfigError(f"there is no reproduction {name!r}{suggestion(name, names()) or ';'} see --list")
    return parse((FOLDER / f"{name}.toml").read_text("utf-8"), name, full)


def parse(text: str, name: str, full: bool = False) -> Reproduction:
    """The content of a reproduction's file. Raises ConfigError naming the setting."""
    try:
        content = toml.loads(text)
        parsed = Reproduction.model_validate(merged(content, content.get("full", {})) if full else content)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"reproduction {name!r} is not TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(
            f"reproduction {name!r}, setting {first_fault(error, 'table', Reproduction.model_fields)}"
        ) from None
    for what, labels in _labels(parsed).items():
        unknown = sorted(set(labels) - parsed.methods.keys())
        if unknown:
            raise ConfigError(f"reproduction {name!r}: {what} names the methods {unknown}, which have no table")
    if set(parsed.paper) - parsed.tasks.keys():
        raise ConfigError(f"reproduction {name!r}: `paper` names tasks that are not among {sorted(parsed.tasks)}")
    return parsed


def changed(r: Reproduction, settings: Iterable[str], labels: Collection[str]) -> Reproduction:
    """The reproduction with `METHOD.SETTING=VALUE` settings in every task, values as in TOML.

    `labels` are the methods that run. Raises ConfigError for a setting of another.
    """
    tables = {label: dict(table) for label, table in r.methods.items()}
    own = {name: {label: dict(table) for label, table in task.methods.items()} for name, task in r.tasks.items()}
    for setting in settings:
        where, equals, value = setting.partition("=")
        label, dot, field = where.partition(".")
        if not (equals and dot) or label not in labels:
            raise ConfigError(f"--set {setting!r}: write METHOD.SETTING=VALUE; the methods are {sorted(labels)}")
        try:
            tables[label][field] = toml.loads(f"v = {value}")["v"]
        except toml.TOMLDecodeError:  # a word without quotes
            tables[label][field] = value
        for methods in own.values():  # a task's own value would be used in its place
            methods.get(label, {}).pop(field, None)
    tasks = {name: task.model_copy(update={"methods": own[name]}) for name, task in r.tasks.items()}
    return r.model_copy(update={"methods": tables, "tasks": tasks})


def _labels(parsed: Reproduction) -> dict[str, Mapping[str, Any]]:
    """Every table that is keyed by method, by what it is."""
    return {
        **{f"tasks.{name}.methods": task.methods for name, task in parsed.tasks.items()},
        **{f"paper.{name}": figures for name, figures in parsed.paper.items()},
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`; tables are merged, everything else is replaced."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def cells(
    r: Reproduction,
    seeds: tuple[int, ...],
    only: Collection[str] | None = None,
    evaluate: Literal["validation", "test"] = "test",
) -> Iterator[Cell]:
    """The cells, seed by seed, so that the first seed of every method is done first. Raises ConfigError."""
    for seed in seeds:
        for task_name, task in r.tasks.items():
            for label, table in r.methods.items():
                if only is not None and label not in only:
                    continue
                method = {"name": label, **merged(table, task.methods.get(label, {}))}
                config = read_config(
                    {
                        "bundle": task.bundle,
                        "data": {**task.data, "evaluate": evaluate},
                        "methods": {label: method},
                        "rounds": task.rounds,
                        "cohort": task.cohort,
                        "seed": seed,
                        "guard": r.guard,
                        "personalise": "global",
                        "final_epochs": r.final_epochs,
                    }
                )
                yield Cell(task_name, label, config)


def method_of(cell: Cell) -> Method:
    """The cell's method."""
    return cell.config.method(cell.label)


def key(cell: Cell) -> str:
    """The digest of a cell's settings in the reproduction's file; the method's label does not count.

    `personalise` does not either: it is "global" in every cell, because papers score the model of the last downlink.
    """
    config = cell.config.model_dump(mode="json", exclude_unset=True, exclude={"processes", "personalise"})
    content = {**config, "methods": list(cell.config.methods.values())}
    return digest(json.dumps(content, sort_keys=True).encode())[:16]


def revisions(method: Method, bundle: str) -> dict[str, int]:
    """What a run says of the versions of its method and its bundle."""
    return {"revision": method.revision, "bundle_revision": REVISIONS.get(bundle, 1)}


def stands(run: Mapping[str, Any], method: Method, bundle: str) -> bool:
    """Whether a finished cell would end the same today: its method, its settings and its bundle are the present ones.

    A setting that the method gained within a revision is absent from the run; its default changes nothing. A run
    without a revision is of the first.
    """
    then = run["settings"]
    same = all(value == then.get(name, value) for name, value in method.model_dump(mode="json").items())
    return same and all(run.get(name, 1) == value for name, value in revisions(method, bundle).items())
