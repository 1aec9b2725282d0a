"""What a round costs a device, as it travels: one header beside the update, outside its digest.

An update's bytes follow from its assignment alone; seconds and joules do not, so they are no part of it. The header
has a few bytes a figure: seconds, joules, megabytes, degrees, in this order, empty where the device has none. A device
with a battery adds what is left of it, in percent::

    Maskfleet-Cost: 12.3,45.1,183,51
    Maskfleet-Cost: 12.3,,183,51,87
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Annotated

from pydantic import Field, ValidationError

from edge_client.errors import PayloadError, first_fault
from edge_client.protocol.messages import MeanCost, Message

COST_HEADER = "Maskfleet-Cost"
HEADER_MOST = 64  # characters
MOST = 1e9  # of any figure
FIGURE = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


class Cost(Message):
    """What one round cost one device; None where the device cannot tell."""

    seconds: Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)] | None = None
    """From the decoded downlink to the update, scores before and after included."""
    joules: Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)] | None = None
    """Above the device's power at rest: a short round may come out below it, and a mean of all is then still right."""
    megabytes: Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)] | None = None
    """The most that the process held."""
    celsius: Annotated[float, Field(ge=-100, le=300, allow_inf_nan=False)] | None = None
    """The processor's temperature afterwards."""
    battery: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """What is left in the battery afterwards, in percent; no part of a round's means."""


_FIELDS = tuple(Cost.model_fields)  # the header's order
UNITS = {"seconds": "s", "joules": "J", "megabytes": "MB", "celsius": "°C"}  # of the figures that every header has


def measured(figures: Mapping[str, float | None]) -> Cost:
    """The figures by name; one that is out of range, as of a broken sensor, is left out."""
    kept = {}
    for name, value in figures.items():
        with suppress(ValidationError):
            kept[name] = getattr(Cost.model_validate({name: value}), name)
    return Cost(**kept)


def to_header(cost: Cost) -> str:
    """The figures to three or four digits; empty when there is none."""
    names = _FIELDS if cost.battery is not None else UNITS
    values = (getattr(cost, name) for name in names)
    text = ",".join("" if v is None else _short(v) for v in values)
    return text if text.strip(",") else ""


def _short(value: float) -> str:
    return str(round(value)) if abs(value) >= 1000 else f"{value:.3g}"


def from_header(text: str) -> Cost:
    """The figures of a header. Raises PayloadError."""
    parts = text.split(",") if len(text) <= HEADER_MOST else []
    if len(parts) not in (len(UNITS), len(_FIELDS)):
        raise PayloadError(f"{COST_HEADER} = {text[:HEADER_MOST]!r}; send {', '.join(UNITS)}, with commas between")
    if not all(FIGURE.fullmatch(part) for part in parts if part):
        raise PayloadError(f"{COST_HEADER} = {text!r} holds a figure that is no number")
    try:
        return Cost.model_validate({k: float(v) for k, v in zip(_FIELDS, parts, strict=False) if v})
    except ValidationError as error:
        raise PayloadError(f"{COST_HEADER}, {first_fault(error)}") from None


def means(costs: Iterable[Cost]) -> dict[str, MeanCost]:
    """For each figure that a device gave: its mean, its most, and how many devices gave it."""
    every, found = list(costs), {}
    for name in UNITS:
        values = [v for v in (getattr(cost, name) for cost in every) if v is not None]
        if values:
            found[name] = MeanCost(mean=fmean(values), most=max(values), devices=len(values))
    return found


def over_rounds(rounds: Sequence[dict[str, MeanCost]]) -> dict[str, MeanCost]:
    """The figures of several rounds as one: means over all of their devices."""
    found = {}
    for name in UNITS:
        given = [r[name] for r in rounds if name in r]
        devices = sum(g.devices for g in given)
        if devices:
            mean = sum(g.mean * g.devices for g in given) / devices
            found[name] = MeanCost(mean=mean, most=max(g.most for g in given), devices=devices)
    return found


def in_words(figures: dict[str, float]) -> str:
    """Figures with their units, as ``12.3 s, 45.1 J``."""
    return ", ".join(f"{_short(figures[name])} {unit}" for name, unit in UNITS.items() if name in figures)
