"""Meters by name: those of this project and of other packages, what is there, and which one is taken.

An entry point of the group `maskfleet.meters` is a `Family`: its `find` gives a meter or raises MeterError with the
reason; for a missing permission the reason is the command that grants it. `--meter` takes `NAME`,
`NAME:OPTION=VALUE,...`, `auto` or `none`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from edge_client.errors import ConfigError, MeterError, suggestion
from edge_client.extras import installed, load
from edge_client.measure.energy import Meter

NONE, AUTO = "none", "auto"
Options = Mapping[str, str]
Where = Literal["here", "android", "apart"]
OF: Mapping[Where, str] = {"here": "this machine", "android": "a phone (--adb)"}


@dataclass(frozen=True)
class Family:
    """Meters of one kind. `find(options)` opens one or raises MeterError.

    `where` names the machine that they measure: this one ("here"), a phone behind adb ("android"), or any device wired
    to them ("apart": taken only by name). `auto` takes the lowest `rank` that is there. `options` are the names that
    `find` accepts. An `exported` recording is a file that a person exports once a measurement.
    """

    find: Callable[[Options], Meter]
    rank: int
    where: Where = "here"
    options: tuple[str, ...] = ()
    exported: bool = False


@dataclass(frozen=True)
class Choice:
    """The meter that is taken, None without one; a sentence why; and for every other family why not it."""

    meter: Meter | None
    why: str
    others: Mapping[str, str]

    @property
    def lines(self) -> list[str]:
        """The choice, then a line for each family that was not taken."""
        return [self.why, *(f"  not {name}: {why}" for name, why in sorted(self.others.items()))]

    @property
    def brief(self) -> str:
        """The choice in a line."""
        return self.why + ("; `maskfleet bench meters` says why" if self.meter is None and self.others else "")


def families() -> tuple[dict[str, Family], dict[str, str]]:
    """Every installed family by name, and why the others do not load: a sentence on "it"."""
    found, faults = dict[str, Family](), dict[str, str]()
    for name, entry in installed("maskfleet.meters").items():
        try:
            found[name] = load(entry, "it", lambda made: isinstance(made, Family), "Family")
        except ConfigError as error:
            faults[name] = str(error)
    return found, faults


def choose(
    asked: str,
    where: Where = "here",
    known: Mapping[str, Family] | None = None,
    more: Options | None = None,
    exported: bool = False,
) -> Choice:
    """The meter for `asked`. `more` are options for all families that accept them (an adb serial).

    `auto` without any meter gives a choice of none. A named meter that is absent raises MeterError. One that measures
    another device than `where`, or an exported recording without `exported`, raises ConfigError.
    """
    (found, faults), more = families() if known is None else (known, {}), more or {}
    name, _, words = asked.partition(":")
    if name == NONE:
        return Choice(None, "no energy meter: switched off", {})
    if name == AUTO:
        return _first(found, faults, where, more)
    if name in faults:
        raise MeterError(f"meter {name}: {faults[name]}")
    family = found.get(name)
    if family is None:
        near, names = suggestion(name, found), ", ".join(sorted(found))
        raise ConfigError(f"there is no meter {name!r}; choose {AUTO}, {NONE} or one of {names}{near}")
    if family.where not in (where, "apart"):
        raise ConfigError(f"meter {name} measures {OF[family.where]}, and the model runs on {OF[where]}")
    if family.exported and not exported:
        raise ConfigError(f"meter {name} reads a file exported by hand: it is for `maskfleet bench` alone")
    options = {**_known(family, more), **_options(name, family, words)}
    try:
        meter = _opened(family, options)
    except MeterError as error:
        raise MeterError(f"meter {name}: {error}") from error
    return Choice(meter, f"meter {meter.name}: {meter.what}", {})


def _first(found: Mapping[str, Family], faults: Mapping[str, str], where: Where, more: Options) -> Choice:
    """The meter of lowest rank that is there, and why not each of the others."""
    others = dict(faults)
    taken: Meter | None = None
    for key, family in sorted(found.items(), key=lambda item: (item[1].rank, item[0])):
        if family.where == "apart":
            others[key] = f"measures another device; ask for it with --meter {key}"
        elif family.where != where:
            others[key] = f"measures {OF[family.where]}, not {OF[where]}"
        elif taken is not None:
            others[key] = f"{taken.name} comes first; ask for it with --meter {key}"
        else:
            try:
                taken = _opened(family, _known(family, more))
            except ConfigError as error:
                others[key] = str(error)
    if taken is None:
        return Choice(None, "no energy meter found", others)
    return Choice(taken, f"meter {taken.name}: {taken.what}", others)


def _opened(family: Family, options: Options) -> Meter:
    """The family's meter. Raises MeterError, ConfigError."""
    try:
        return family.find(options)
    except ConfigError:  # a MeterError is one
        raise
    except Exception as error:  # code of another package may fail in any way
        raise MeterError(f"its code fails: {type(error).__name__}: {error}") from error


def _known(family: Family, more: Options) -> dict[str, str]:
    return {key: value for key, value in more.items() if key in family.options}


def _options(name: str, family: Family, words: str) -> dict[str, str]:
    """``a=1,b=2`` as a table. Raises ConfigError for an option that the family does not accept."""
    table = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in family.options:
            known = ", ".join(f"{o}=..." for o in family.options) or "none"
            raise ConfigError(f"meter {name} does not know {word!r}; its options: {known}")
        table[key] = value
    return table


def number(options: Options, key: str, default: float, least: float = 0.0, most: float = 1e9) -> float:
    """A number among the options, hexadecimal as 0x... too. Raises ConfigError."""
    text = options.get(key)
    if text is None:
        return default
    try:
        value = float(int(text, 16)) if text.lower().startswith("0x") else float(text)
    except ValueError:
        value = -1.0
    if not least < value <= most:
        raise ConfigError(f"{key}={text}: give a number above {least:g}, at most {most:g}")
    return value
