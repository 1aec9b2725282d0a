"""The graphs of the suite by name: written for it (`chains`, `joins`, `sequences`) and published ones (`known`)."""

from __future__ import annotations

from edge_bench.compaction.zoo import chains, joins, known, sequences
from edge_bench.compaction.zoo.case import Case

__all__ = ["ZOO", "Case"]

ZOO: dict[str, Case] = {c.name: c for c in (*chains.CASES, *joins.CASES, *sequences.CASES, *known.CASES)}
