"""What `maskfleet demo` prints at its end: few columns, each explained, and conclusions in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table

from edge_bench.advice import ALONE
from edge_bench.curves import amount, shown
from edge_bench.records import Record
from edge_client.bench.tables import plain_table
from edge_client.methods import Method

REFERENCE = "fedavg"
TRAINED = "score_mean_after_local_epochs"
WIDTH = 79

CHOICE: Mapping[str, str] = {
    "lattice": "first: FedAvg's score at few bytes, and small fast models",
    "fedavg": "when bytes cost nothing, and as the score to compare with",
    "coupled": "to learn masks of a good pre-trained network in few bytes",
    "fedmask": "to learn masks of frozen weights, each device its own structure",
    "hermes": "when each device shall prune as far as its own score allows",
    "federated_pruning": "for one smaller network of all devices, in float32",
    "standalone": "when devices have no network; what any other method has to beat",
}
"""When to choose a method, in a few words; docs/choosing.md has all."""


def end(
    title: str, records: Mapping[str, Record], compact: Mapping[str, float], methods: Mapping[str, Method]
) -> Group:
    """All that the demo prints at its end; the first method's models were compacted."""
    first = next(iter(records))
    small = small_models(first, records[first], compact, records.get(REFERENCE))
    return Group(table(records, title), "", small, "", conclusions(first, records, compact), "", choices(methods))


def table(records: Mapping[str, Record], title: str) -> Table:
    """One line a method: scores, bytes, seconds; within 80 columns."""
    out = plain_table(title, gap=2)
    out.add_column("method", overflow="fold")
    for head in ("score", "worst", "trained on", "bytes", "of fedavg's", "s a round"):
        out.add_column(head, justify="right", no_wrap=True)
    whole = records.get(REFERENCE)
    for label, r in records.items():
        share = (
            ""
            if whole is None or label in (REFERENCE, ALONE)
            else f"1/{whole['bytes_per_device'] / r['bytes_per_device']:,.0f}"
        )
        out.add_row(
            label, shown(r["score_mean"], ".3f"), shown(r["score_worst"], ".3f"), shown(r.get(TRAINED), ".3f"),
            amount(r["bytes_per_device"]), share, f"{r['seconds_per_round']:.1f}",
        )  # fmt: skip
    out.caption = (
        "score: how good each device's own model is on its own test samples, mean\n"
        "  weighted by these (accuracy for labels, R^2 for numbers); worst: the lowest;\n"
        "  trained on: the mean after the last round's own training, before its models\n"
        "  were averaged; bytes: payloads of one device, both ways, in all; s a round:\n"
        "  seconds, all devices on this one machine"
    )
    return out


def small_models(label: str, record: Record, compact: Mapping[str, float], whole: Record | None) -> Table:
    """The first method's models beside the whole network, whose score is FedAvg's where that ran."""
    out = plain_table(gap=2)
    out.add_column("model on a device")
    for head in ("parameters", "one sample takes", "score"):
        out.add_column(head, justify="right", no_wrap=True)
    rows = [(f"whole network, {REFERENCE}'s best", "dense", _best(whole)), (label, "compact", record["score_mean"])]
    for name, size, score in rows:
        took = f"{compact[f'latency_{size}_ms']:.3f} ms"
        out.add_row(name, f"{compact[f'parameters_{size}']:,.0f}", took, shown(score, ".3f"))
    return out


def conclusions(label: str, records: Mapping[str, Record], compact: Mapping[str, float]) -> str:
    """The figures of the first method in sentences, beside FedAvg, the whole network and training alone.

    The other methods count with the better of their two scores.
    """
    r, whole, alone, said = records[label], records.get(REFERENCE), records.get(ALONE), []
    if whole is not None and label != REFERENCE:
        share = whole["bytes_per_device"] / r["bytes_per_device"]
        said.append(f"{label} scores {_points(r, whole)} {REFERENCE} at its best, at 1/{share:,.0f} of its bytes.")
    share = compact["parameters_compact"] / compact["parameters_dense"]
    faster = compact["latency_dense_ms"] / compact["latency_compact_ms"]
    said.append(f"A device's model has {share:.0%} of the parameters and runs {faster:.1f} times as fast.")
    if alone is not None and label != ALONE:
        said.append(f"Training alone reaches {shown(_best(alone), '.3f')}: {label} scores {_points(r, alone)} that.")
    return "\n".join(textwrap.fill(s, WIDTH, subsequent_indent="  ") for s in said)


def _best(r: Record | None) -> float | None:
    """The better of a method's scores: as its devices end, or as they had trained in the last round."""
    found = [s for s in (r["score_mean"], r.get(TRAINED)) if s is not None] if r is not None else []
    return max(found, default=None)


def _points(r: Record, other: Record) -> str:
    best = _best(other)
    if r["score_mean"] is None or best is None:
        return "beside (there are no test samples)"
    points = round(100 * (r["score_mean"] - best), 1)
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} than" if points else "the same as"


def choices(methods: Mapping[str, Method]) -> str:
    """When to choose each of these methods, a line each."""
    width = max(map(len, methods))
    lines = [f"  {label:{width}}  {CHOICE[m.name]}" for label, m in methods.items() if m.name in CHOICE]
    return "\n".join(["which to choose (docs/choosing.md has all)", *lines])
