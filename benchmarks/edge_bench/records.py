"""What a run reports in its JSON file: one record for each method, made of its rounds' records.

The demo and the simulator share it, so their figures compare line by line: `federation.record` and `simulation.record`
add what only they have. Bytes are those of the payloads; what is sent only once (a structure) is listed apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from coord_server.aggregation import sum_kinds
from edge_bench.curves import curve, mean, moved
from edge_client.protocol.messages import Round, Scores, Traffic

Record = dict[str, Any]


def traffic(rounds: Sequence[Round], devices: int) -> Record:
    """Bytes per device and round up and down, bits per parameter, what is sent once, and bytes in all.

    `devices` is how many the federation has.
    """
    last = moved(rounds[-1].traffic, "last")
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
        "one_time_bytes_down_per_device": sum(sum(r.traffic.one_time_down.values()) for r in rounds) / len(once),
        "last_bytes_down_per_device": last / devices,
        "bytes_per_device": (sum(moved(r.traffic, "up") + moved(r.traffic, "down") for r in rounds) + last) / devices,
        "devices": devices,
        "device_rounds": turns,
        "bytes_by_kind": {side: sum_kinds(getattr(r.traffic, side) for r in rounds) for side in Traffic.model_fields},
        "seconds_per_round": median(r.seconds for r in rounds),
    }


def spread(scores: Scores | None, suffix: str = "") -> Record:
    """The scores over devices, each under a name that ends with `suffix`."""
    return {f"score_{k}{suffix}": None if scores is None else getattr(scores, k) for k in Scores.model_fields}


def measured(rounds: Sequence[Round], devices: int, final: Scores | None, start: Scores | None) -> Record:
    """What the record of a federation has, simulated or real; `start` is what the bundle's own values score."""
    points = [vars(p) for p in curve(rounds, devices, mean(final))]
    guarded = sum(len(r.guarded) for r in rounds)
    return {
        **spread(final),
        "score_start": mean(start),
        **traffic(rounds, devices),
        "guarded": guarded,
        "curve": points,
    }
