"""The guard of a round: which updates are far beyond the round's others, and what becomes of them.

An update could outweigh all others by the size of its change or by its weight in the mean. Three figures are therefore
compared with their median over the round's updates (of an even number the lower middle one, so that half of the updates
cannot raise it): the norm of the change of the parameters, that of the batch-norm statistics, and the weight. Honest
devices differ, so only a large multiple counts. With fewer than three updates there is no majority to compare with, and
nothing is limited.

Under "clip" a change is scaled down to the multiple of the median norm (to nothing when the median is 0) and a weight
is lowered to the multiple of the median weight; so one update of n moves a weighted mean by at most ``MOST_NORM *
median norm`` times its share, which is at most ``MOST_WEIGHT / (MOST_WEIGHT + (n - 1) / 2)``. Under "drop" such an
update is left out. A method whose updates are bounded by construction (a mask adds 0 or 1 to each count) has no
influence to compare.
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
    norm, statistics, weight = (
        median_low([getattr(i, name) for i in influences.values()]) for name in ("norm", "statistics", "weight")
    )
    found = {}
    for device, i in sorted(influences.items()):
        norm_scale = _scale(i.norm, MOST_NORM * norm)
        statistics_scale = _scale(i.statistics, MOST_NORM * statistics)
        scale, most = min(norm_scale, statistics_scale), MOST_WEIGHT * weight
        reasons = []
        if norm_scale < 1:
            reasons.append(f"its change has norm {i.norm:.4g}, the round's median is {norm:.4g}")
        if statistics_scale < 1:
            reasons.append(f"its statistics change by {i.statistics:.4g}, the round's median is {statistics:.4g}")
        if i.weight > most:
            reasons.append(f"it claims weight {i.weight:.4g}, the round's median is {weight:.4g}")
        if reasons:
            done = "left out" if how == "drop" else _clipped(scale, i.weight, most)
            found[device] = Limit(scale, min(i.weight, most), how == "drop", f"{done}: {'; '.join(reasons)}")
    return found


def _scale(norm: float, most: float) -> float:
    """What a change of this norm is multiplied by; 1 within the limit."""
    return 1.0 if norm <= most else most / norm


def _clipped(scale: float, weight: float, most: float) -> str:
    done = [f"change times {scale:.3g}"] if scale < 1 else []
    done += [f"weight {most:.4g}"] if weight > most else []
    return f"clipped to {' and '.join(done)}"
