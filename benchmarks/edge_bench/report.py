"""What a run reports: one record per method for the JSON file, and the table for the person who ran it.

The demo and the simulator write the same record from the same coordinator's rounds, so their figures compare line
by line. Bytes are those of the payloads; what is sent once (a structure) stands apart.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy
from rich.box import SIMPLE_HEAD
from rich.table import Table

from edge_bench.demo import Ended
from edge_bench.simulate import Simulated
from edge_client.bundle import Model
from edge_client.methods import Method
from edge_client.protocol.messages import Accuracy, Round

Record = dict[str, Any]


def traffic(rounds: Sequence[Round]) -> Record:
    """Bytes per device and round up and down, bits per parameter, and what each device sent once."""
    turns = sum(len(r.devices) for r in rounds)
    once = {d for r in rounds for d in r.devices}

    def per_turn(side: str) -> float:
        return sum(sum(getattr(r.traffic, side).values()) for r in rounds) / turns

    return {
        "bytes_up_per_device_round": per_turn("up"),
        "bytes_down_per_device_round": per_turn("down"),
        "bits_per_parameter_up": math.fsum(r.bits_per_parameter_up * len(r.devices) for r in rounds) / turns,
        "bits_per_parameter_down": math.fsum(r.bits_per_parameter_down * len(r.devices) for r in rounds) / turns,
        "one_time_bytes_up_per_device": sum(sum(r.traffic.one_time_up.values()) for r in rounds) / len(once),
        "bytes_by_kind": {
            side: _sum_kinds([getattr(r.traffic, side) for r in rounds]) for side in ("up", "down", "one_time_up")
        },
        "seconds_per_round": median(r.seconds for r in rounds),
    }


def _sum_kinds(tables: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {kind: sum(t.get(kind, 0) for t in tables) for kind in sorted({k for t in tables for k in t})}


def _spread(a: Accuracy, suffix: str = "") -> Record:
    return {f"accuracy_{k}{suffix}": v for k, v in a.model_dump().items()}


def simulated(result: Simulated, method: Method, model: Model) -> Record:
    """The record of one simulated method, with one row per round."""
    rounds = [row.record for row in result.rows]
    best = max(rounds, key=lambda r: r.accuracy_after.mean)
    record: Record = {**_spread(result.final), **traffic(rounds)}
    if result.final_after is not None:
        record |= _spread(result.final_after, "_after_local_epochs")
    record["best_round"] = {
        "round": best.round,
        "accuracy_before": best.accuracy_before.mean,
        "accuracy_after": best.accuracy_after.mean,
    }
    everyone = [(row.everyone.mean, row.record.round) for row in result.rows if row.everyone is not None]
    if everyone:
        record["best_round_of_all_devices"] = dict(zip(("accuracy_mean", "round"), max(everyone), strict=True))
    paper = method.paper_bytes(model)
    if paper is not None:
        record["bytes_as_the_paper_counts"] = {"up": paper[0], "down": paper[1]}
    record |= {
        "state_sha256": result.state_sha256,
        "personal_sha256": result.personal_sha256,
        "settings": {"name": method.name, **method.model_dump(mode="json")},
        "rounds": [
            {
                **row.record.model_dump(mode="json"),
                **({} if row.everyone is None else {"accuracy_of_all_devices": row.everyone.model_dump()}),
            }
            for row in result.rows
        ],
    }
    return record


def federation(ended: Ended) -> Record:
    """The record of one real federation.

    Where the last cohort was everyone, its accuracy after that round's local epochs stands beside the final one.
    """
    record: Record = {**_spread(ended.accuracy()), **traffic(ended.rounds)}
    if len(ended.rounds[-1].devices) == len(ended.devices):
        record |= _spread(ended.rounds[-1].accuracy_after, "_after_local_epochs")
    return record


def machine() -> Record:
    """The machine and versions a figure was measured with."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def table(records: Mapping[str, Record], title: str) -> Table:
    """One line per method, within 80 columns."""
    out = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("method", no_wrap=True)
    heads = "accuracy\nmean", "\nworst", "after\nepochs", "bytes\nup", "\ndown", "bits\nup", "\ndown", "s per\nround"
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    out.caption = (
        "accuracy: each device's model on its own test samples, and after its local epochs;\n"
        "bytes and bits per parameter: payloads per device and round, one-time ones apart"
    )
    for label, r in records.items():
        out.add_row(
            label,
            f"{r['accuracy_mean']:.1%}",
            f"{r['accuracy_worst']:.1%}",
            f"{r['accuracy_mean_after_local_epochs']:.1%}" if "accuracy_mean_after_local_epochs" in r else "",
            f"{r['bytes_up_per_device_round']:,.0f}",
            f"{r['bytes_down_per_device_round']:,.0f}",
            f"{r['bits_per_parameter_up']:.2f}",
            f"{r['bits_per_parameter_down']:.2f}",
            f"{r['seconds_per_round']:.2f}",
        )
    return out
