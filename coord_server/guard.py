"""The guard of a round: how much one update may move the global value, and what becomes of one that would move it more.

An update could outweigh all others by the size of its change or by its weight in the mean. Four figures are therefore
compared with their medians over the round's updates: the norm of the change of the parameters, that of the batch-norm
statistics, the weight, and norm times weight. The median of an even number of updates is the lower of the two in the
middle, so half of the updates cannot raise it. With fewer than three updates there is no majority to compare with, and
nothing is limited.

Under "clip" an update beyond a limit is brought back to it: its change is scaled down, its weight lowered. Under "drop"
it is left out. The guard bounds the influence of one device; it does not stop several that act together. A method
whose updates are bounded by construction (a mask adds 0 or 1 to each count) has no influence to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from edge_client.methods import Influence

MOST_NORM = 3.0  # times the median norm, of the parameters' change and of the statistics'
MOST_WEIGHT = 10.0  # times the median weight: sample counts of honest devices differ widely
MOST_PRODUCT = 5.0  # times the median of norm x weight, which is what an update adds to the mean
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
    norm, statistics, weight, product = map(median_low, zip(*map(_figures, influences.values()), strict=True))
    found = {}
    for device, i in sorted(influences.items()):
        compared = (
            (i.norm, norm, MOST_NORM, "its change has norm {}"),
            (i.statistics, statistics, MOST_NORM, "its statistics change by {}"),
            (i.weight, weight, MOST_WEIGHT, "it claims weight {}"),
            (i.norm * i.weight, product, MOST_PRODUCT, "its norm times its weight is {}"),
        )
        reasons = [
            f"{text.format(f'{figure:.4g}')}, the round's median is {median:.4g}"
            for figure, median, most, text in compared
            if figure > most * median
        ]
        if reasons:
            scale = min(_share(i.norm, MOST_NORM * norm), _share(i.statistics, MOST_NORM * statistics))
            lowered = min(i.weight, MOST_WEIGHT * weight)
            lowered *= _share(i.norm * scale * lowered, MOST_PRODUCT * product)
            done = "left out" if how == "drop" else f"clipped to change times {scale:.3g} and weight {lowered:.4g}"
            found[device] = Limit(scale, lowered, how == "drop", f"{done}: {'; '.join(reasons)}")
    return found


def said(limited: int) -> str | None:
    """A sentence when the guard limited so many updates of a federation; None when it limited none."""
    if not limited:
        return None
    updates = "an update" if limited == 1 else f"{limited} updates"
    return (
        f"the guard limited {updates} far beyond the others of the round, as happens with uneven data; "
        'guard = "none" counts each as it is'
    )


def capped(weights: Sequence[int]) -> list[float]:
    """The weights of a mean in the round's record, each at most MOST_WEIGHT times the median of three or more."""
    return [min(w, MOST_WEIGHT * median_low(weights)) for w in weights] if len(weights) >= FEWEST else list(weights)


def _figures(i: Influence) -> tuple[float, float, float, float]:
    return i.norm, i.statistics, i.weight, i.norm * i.weight


def _share(figure: float, most: float) -> float:
    """What brings `figure` down to `most`: a factor of 0..1."""
    return 1.0 if figure <= most else most / figure
