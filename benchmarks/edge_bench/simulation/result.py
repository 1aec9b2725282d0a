"""The result file of `maskfleet simulate --json`: its form, and the flat rows that a data frame is made of.

`maskfleet simulate --schema` prints the form as JSON Schema. `pandas.json_normalize(json.load(file), "rows")` has one
row for each method and round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from edge_bench.curves import Point
from edge_bench.simulation.file import SimulationConfig
from edge_client.protocol.messages import Round, Scores, Traffic


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Table):
    """One method's round. A score is None when no device of the cohort has test samples."""

    method: str
    """The method's label."""
    round: int
    devices: int
    """How many took part."""
    loss: float | None
    """Mean over the samples trained on."""
    score_before: float | None
    """Of the cohort's models as received, mean over devices weighted by their test samples."""
    score_before_worst: float | None
    score_after: float | None
    """Of the same after local training."""
    score_after_worst: float | None
    score_of_all_devices: float | None
    """Of every device's model from the downlink after the round, before `personalise` chooses; only with
    `evaluate_every`."""
    bytes_up: float
    """Payload bytes a device of the cohort sent, without what is sent once."""
    bytes_down: float
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    bytes_so_far: float | None
    """Payload bytes of one device both ways, mean over all devices, with the downlink after the round."""
    seconds: float


class SimulatedRound(Round):
    """A round's record as the coordinator writes it, and all devices' scores when they were measured."""

    score_of_all_devices: Scores | None = None


class BestRound(_Table):
    """The round with the best score of its cohort after local training."""

    round: int
    score_before: float | None
    score_after: float


class MethodResult(_Table):
    """How one method ended. Scores are of every device's personal model; the mean is weighted by test samples."""

    score_mean: float | None
    score_worst: float | None
    score_p10: float | None
    score_best: float | None
    score_start: float | None
    """Of the bundle's own values."""
    score_mean_after_local_epochs: float | None = None
    score_worst_after_local_epochs: float | None = None
    score_p10_after_local_epochs: float | None = None
    score_best_after_local_epochs: float | None = None
    bytes_up_per_device_round: float
    bytes_down_per_device_round: float
    bits_per_parameter_up: float
    bits_per_parameter_down: float
    one_time_bytes_up_per_device: float
    one_time_bytes_down_per_device: float
    last_bytes_down_per_device: float
    bytes_per_device: float
    """Both ways, all rounds and the last downlink, with what is sent once."""
    uncounted_bytes_per_device: dict[str, float]
    """Up and down beside these: downlinks that a device could not read, because it had lost what they build on."""
    devices: int
    device_rounds: int
    """Updates in all rounds together."""
    bytes_by_kind: Traffic
    """Of all devices and rounds."""
    seconds_per_round: float
    """The median."""
    guarded: int = 0
    """Updates that the guard clipped or left out; `rounds` have the reasons."""
    curve: list[Point]
    best_round: BestRound | None = None
    bytes_as_the_paper_counts: dict[str, float] | None = None
    kept_share: float
    """Mean over devices of the share of parameters that the personal model keeps."""
    state_sha256: str
    personal_sha256: str
    settings: dict[str, Any]
    """The method's name and every setting."""
    rounds: list[SimulatedRound]


class SimulationResult(_Table):
    """What `maskfleet simulate --json` writes."""

    command: str
    commit: str
    """Of the checkout that ran; empty outside one."""
    machine: dict[str, Any]
    """Processor, cores, load, system, versions."""
    rows: list[Row]
    methods: dict[str, MethodResult]
    """By label."""
    failed: dict[str, str]
    """By label, why a method has no result."""
    settings: SimulationConfig


def rows(methods: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each method and round, from the records of `record.simulated`."""
    for label, record in methods.items():
        so_far = {point["round"]: point["bytes"] for point in record["curve"]}
        for r in record["rounds"]:
            turns = len(r["devices"])
            scores = {
                f"{when}{suffix}": r[when] and r[when][field]
                for when in ("score_before", "score_after")
                for suffix, field in (("", "mean"), ("_worst", "worst"))
            }
            everyone = r.get("score_of_all_devices")
            yield Row(
                method=label,
                round=r["round"],
                devices=turns,
                loss=r["loss"],
                score_of_all_devices=everyone and everyone["mean"],
                bytes_up=sum(r["traffic"]["up"].values()) / turns,
                bytes_down=sum(r["traffic"]["down"].values()) / turns,
                bits_per_parameter_up=r["bits_per_parameter_up"],
                bits_per_parameter_down=r["bits_per_parameter_down"],
                bytes_so_far=so_far.get(r["round"]),
                seconds=r["seconds"],
                **scores,
            )


def result(
    origin: Mapping[str, Any], config: SimulationConfig, methods: Mapping[str, Any], failed: Mapping[str, str]
) -> SimulationResult:
    """The whole file, from `provenance.origin`, the records of `record.simulated` and the errors of failed methods."""
    return SimulationResult(
        **origin,
        rows=list(rows(methods)),
        methods={label: MethodResult.model_validate(record) for label, record in methods.items()},
        failed=dict(failed),
        settings=config,
    )
