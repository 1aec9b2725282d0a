"""Which columns of a meter's CSV file are the time and the power, by their names and units.

A name is words and perhaps a unit: ``Elapsed Time (s)``, ``voltage_mV``, ``Main current - A``. No factor is guessed: a
name or a unit that is in doubt is refused with a sentence that quotes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_client.errors import MeterError

WORDS = {
    "time": "time timestamp datetime date elapsed clock t",
    "power": "power pwr wattage p",
    "voltage": "voltage volt vbus u",
    "current": "current curr amperage ibus i",
}
"""Words of a column's name for what it holds."""
BASES = {
    "time": "s sec secs second seconds",
    "power": "w watt watts",
    "voltage": "v volt volts",
    "current": "a amp amps ampere amperes",
}
SYMBOLS = {"time": "s", "power": "W", "voltage": "V", "current": "A"}
PREFIXES = {"": 1.0, "n": 1e-9, "nano": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "micro": 1e-6, "m": 1e-3, "milli": 1e-3,
            "k": 1e3, "kilo": 1e3}  # fmt: skip
LONG = {60.0: "min mins minute minutes", 3600.0: "h hr hrs hour hours"}  # in seconds
UNITS = {p + base: (key, n) for key, bases in BASES.items() for base in bases.split() for p, n in PREFIXES.items()}
UNITS |= {word: ("time", n) for n, words in LONG.items() for word in words.split()}
"""What a unit measures, and how much of the base unit it is."""
ZONES = {"utc", "gmt", "local"}  # in brackets behind a time: no unit
PLAIN = """stamp unix epoch utc gmt local relative absolute system host of day in main avg average mean total active
real measured instantaneous dc bus load input output"""
"""Words that leave a quantity and its unit what they are."""
OTHER = "factor max min peak limit set apparent reactive rms shunt zone interval delta diff duration std error"
"""Words of what is no reading."""
KEYS = {word: key for key, words in WORDS.items() for word in words.split()}
MOST = 50  # lines above the heading
QUANTITY_ALONE, WITH_WORDS, UNIT_ALONE = 0, 1, 2
"""How surely a name is that of a quantity."""


@dataclass(frozen=True)
class Heading:
    """The line of names, at row `at`: for each quantity its column and how much of the base unit a number of it is.

    `date` is a column of dates beside one of times.
    """

    at: int
    names: Sequence[str]
    columns: Mapping[str, int]
    scales: Mapping[str, float]
    date: int | None


def heading(rows: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]], where: str) -> Heading:
    """The first row that names all quantities of one of `wanted`. Raises MeterError where there is none or a doubt."""
    for at, names in enumerate(rows):
        places = _places(names, wanted)
        if places:
            scales = {key: _scale(names, key, found, where) for key, found in places.items()}
            dates = [i for i, name in enumerate(names) if _parts(name)[0] == ["date"]]
            columns = {key: found[0] for key, found in places.items()}
            return Heading(at, names, columns, scales, dates[0] if len(dates) == 1 else None)
    due = ", or ".join(" and ".join(f"a {key}" for key in keys) for keys in wanted)
    like = ", or ".join(", ".join(f"{key} ({SYMBOLS[key]})" for key in keys) for keys in wanted)
    best = max(rows[:MOST], key=lambda names: len(_known(names)), default=[])
    known = _known(best)
    if not known:
        raise MeterError(f"{where} has no line of column names with {due}; name the columns like: {like}")
    said = ", ".join(name.strip() for name in best)
    alone = "; a current alone needs the supply's voltage as an option: volts=5" if "current" in known else ""
    raise MeterError(
        f"{where}: of the columns {said!r} only the {' and the '.join(known)} is known, and {due} are due; name them "
        f"like: {like}{alone}"
    )


def _known(names: Sequence[str]) -> list[str]:
    return sorted({_meaning(name)[0] for name in names} - {""})


def _places(names: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """The columns that may be each quantity of the surest of `wanted`; empty where a quantity is missing.

    A name that is the quantity's alone comes before one with more words, and that before a unit alone.
    """
    ranks: dict[str, dict[int, int]] = {}
    for i, name in enumerate(names):
        key, rank, _ = _meaning(name)
        ranks.setdefault(key, {})[i] = rank
    best = {key: min(found.values()) for key, found in ranks.items()}
    complete = [keys for keys in wanted if set(keys) <= ranks.keys()]
    if not complete:
        return {}
    chosen = min(complete, key=lambda keys: max(best[key] for key in keys if key != "time"))
    return {key: [i for i, rank in ranks[key].items() if rank == best[key]] for key in chosen}


def _scale(names: Sequence[str], key: str, places: Sequence[int], where: str) -> float:
    said = " and ".join(repr(names[i].strip()) for i in places)
    if len(places) > 1:
        raise MeterError(f"{where}: {said} may each be the {key}; remove all but one")
    scale = _meaning(names[places[0]])[2]
    if not scale:
        unit = SYMBOLS[key]
        raise MeterError(f"{where}: {said} has a unit that is not known; give the {key} in {unit}, m{unit} or u{unit}")
    return scale


def _parts(name: str) -> tuple[list[str], str]:
    """The words of a column's name, small, and its unit, "" without one."""
    bracket = re.search(r"[(\[]([^)\]]*)[)\]]", name)
    unit = bracket[1].strip(" .") if bracket else ""
    words = re.findall(r"[^\W\d_]+", name.replace(bracket[0], " ") if bracket else name)
    words = [word.lower() for word in words]
    if not bracket and words and words[-1] in UNITS and (words[-1] != "min" or "time" in words):  # else the least one
        unit = words.pop()
    return words, unit


def _meaning(name: str) -> tuple[str, int, float]:
    """What a column holds ("" for anything else), how surely (0 the most), and its unit's scale (0: not known)."""
    words, unit = _parts(name)
    keys = {KEYS[word] for word in words if word in KEYS}
    plain = all(word in KEYS or word in PLAIN.split() for word in words)
    if set(OTHER.split()) & set(words) or not (keys or plain):
        return "", 0, 0.0
    measured, scale = _unit(unit)
    if not keys:
        return measured, UNIT_ALONE, scale
    # "current power (W)" is a power
    key = measured if measured in keys else keys.pop() if len(keys) == 1 else ""
    rank = QUANTITY_ALONE if len(words) == 1 and words != ["date"] else WITH_WORDS
    if key == measured:
        return key, rank, scale
    bare = not unit or (key == "time" and (":" in unit or unit.lower() in ZONES))  # (hh:mm:ss)
    return (key, rank, 1.0 if bare else 0.0) if plain else ("", 0, 0.0)


def _unit(unit: str) -> tuple[str, float]:
    """What a unit measures, and how much of the base unit it is; "" and 0 for one that is not known."""
    mega = re.match(r"M[A-Za-z]$", unit)  # its small letter is milli
    return ("", 0.0) if mega else UNITS.get(unit.lower(), ("", 0.0))
