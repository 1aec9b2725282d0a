"""The graphs of the suite by name: published ones (`known`), and others written for it."""

from __future__ import annotations

from edge_bench.compaction.zoo import chains, hostile, joins, known, sequences
from edge_bench.compaction.zoo.case import Case

__all__ = ["FAMILIES", "ZOO", "Case"]

FAMILIES: dict[str, tuple[Case, ...]] = {
    "chains": chains.CASES,
    "joins": joins.CASES,
    "sequences": sequences.CASES,
    "hostile": hostile.CASES,
    "known": known.CASES,
}
ZOO: dict[str, Case] = {c.name: c for cases in FAMILIES.values() for c in cases}
