"""The guard of a round: which updates are far beyond what the round's others say, and what becomes of them.

An update claims two things that could outweigh all others: the norm of its change and its weight in the mean. Each is
compared with the median over the round's updates. Honest devices differ, so only a large multiple counts. With fewer
than three updates there is no majority to compare with, and nothing is limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from edge_client.methods import Influence

MOST_NORM = 5.0  # times the median norm
MOST_WEIGHT = 20.0  # times the median weight: sample counts of honest devices differ widely
FEWEST = 3  # updates


@dataclass(frozen=True)
class Limit:
    """What becomes of one update: left out, or its change times `scale` with `weight`; `reason` is for the record."""

    scale: float
    weight: float
    drop: bool
    reason: str


def limits(influences: Mapping[str, Influence], how: Literal["clip", "drop", "none"]) -> dict[str, Limit]:
    """The limits of a round's updates, by device; most rounds have none."""
    if how == "none" or len(influences) < FEWEST:
        return {}
    norm = median_low([i.norm for i in influences.values()])
    weight = median_low([i.weight for i in influences.values()])
    found = {}
    for device, i in influences.items():
        reasons = []
        if i.norm > MOST_NORM * norm:
            reasons.append(f"norm {i.norm:.4g}, median {norm:.4g}")
        if i.weight > MOST_WEIGHT * weight:
            reasons.append(f"weight {i.weight:.4g}, median {weight:.4g}")
        if reasons:
            scale = min(1.0, MOST_NORM * norm / i.norm) if i.norm else 1.0
            verb = "dropped" if how == "drop" else "clipped"
            text = f"{verb}: {'; '.join(reasons)}"
            found[device] = Limit(scale, min(i.weight, MOST_WEIGHT * weight), how == "drop", text)
    return found
