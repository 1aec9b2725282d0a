"""The graphs of the suite by name: written for it (`chains`, `joins`, `sequences`) and published ones (`known`)."""

from __future__ import annotations

from edge_bench.compaction.zoo import chains, joins, known, sequences
from edge_bench.compaction.zoo.case import Case

__all__ = ["FAMILIES", "ZOO", "Case"]

FAMILIES: dict[str, tuple[Case, ...]] = {
    "chains": chains.CASES,
    "joins": joins.CASES,
    "sequences": sequences.CASES,
    "known": known.CASES,
}
ZOO: dict[str, Case] = {c.name: c for cases in FAMILIES.values() for c in cases}
