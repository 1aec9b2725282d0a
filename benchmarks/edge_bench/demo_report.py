"""What `maskfleet demo` says at its end: few columns, each explained, and conclusions in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from edge_bench.curves import amount, shown
from edge_bench.report import ALONE, Record
from edge_client.methods import Method

REFERENCE = "fedavg"
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


def table(records: Mapping[str, Record], title: str) -> Table:
    """One line a method: scores, bytes, seconds; within 80 columns."""
    out = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 2, 0, 0),
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    out.add_column("method", overflow="fold")
    for head in ("score", "worst device", "bytes", "against fedavg's", "seconds a round"):
        out.add_column(head, justify="right", no_wrap=True)
    whole = records.get(REFERENCE)
    for label, r in records.items():
        share = (
            ""
            if whole is None or label in (REFERENCE, ALONE)
            else f"1/{whole['bytes_per_device'] / r['bytes_per_device']:,.0f}"
        )
        out.add_row(
            label, shown(r["score_mean"], ".3f"), shown(r["score_worst"], ".3f"), amount(r["bytes_per_device"]), share,
            f"{r['seconds_per_round']:.1f}",
        )  # fmt: skip
    out.caption = (
        "score: how good each device's own model is on its own test samples, mean\n"
        "  over devices (accuracy for labels, R^2 for numbers); worst device: the\n"
        "  lowest; bytes: payloads of one device, both ways, in all; seconds a round:\n"
        "  of all devices on this one machine"
    )
    return out


def small_models(label: str, record: Record, compact: Mapping[str, float], whole: Record | None) -> Table:
    """The first method's models beside the whole network, whose score is FedAvg's where that ran."""
    out = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
    out.add_column("model on a device")
    for head in ("parameters", "one sample takes", "score"):
        out.add_column(head, justify="right", no_wrap=True)
    score = None if whole is None else whole["score_mean"]
    for name, size, found in (
        (f"whole network ({REFERENCE})", "dense", score),
        (label, "compact", record["score_mean"]),
    ):
        took = f"{compact[f'latency_{size}_ms']:.3f} ms"
        out.add_row(name, f"{compact[f'parameters_{size}']:,.0f}", took, shown(found, ".3f"))
    return out


def conclusions(label: str, records: Mapping[str, Record], compact: Mapping[str, float]) -> str:
    """What the figures of the first method say beside FedAvg, the whole network and training alone."""
    r, said = records[label], []
    if (whole := records.get(REFERENCE)) is not None and label != REFERENCE:
        share = whole["bytes_per_device"] / r["bytes_per_device"]
        said.append(f"{label} {_points(r, whole, REFERENCE)}, at 1/{share:,.0f} of its bytes.")
    share = compact["parameters_compact"] / compact["parameters_dense"]
    faster = compact["latency_dense_ms"] / compact["latency_compact_ms"]
    said.append(f"A device's model has {share:.0%} of the parameters and runs {faster:.1f} times as fast.")
    if (alone := records.get(ALONE)) is not None and label != ALONE:
        said.append(f"Training alone reaches {shown(alone['score_mean'], '.3f')}: {label} {_points(r, alone, 'that')}.")
    return "\n".join(textwrap.fill(s, WIDTH, subsequent_indent="  ") for s in said)


def _points(r: Mapping[str, Any], other: Mapping[str, Any], than: str) -> str:
    if r["score_mean"] is None or other["score_mean"] is None:
        return f"cannot be compared with {than}: no test samples"
    points = round(100 * (r["score_mean"] - other["score_mean"]), 1)
    return (
        f"scores {abs(points):.1f} points {'more' if points > 0 else 'less'} than {than}"
        if points
        else f"equals {than}"
    )


def choices(methods: Mapping[str, Method]) -> str:
    """When to choose each of these methods, a line each."""
    width = max(map(len, methods))
    lines = [f"  {label:{width}}  {CHOICE[m.name]}" for label, m in methods.items() if m.name in CHOICE]
    return "\n".join(["which to choose (docs/choosing.md has all)", *lines])
