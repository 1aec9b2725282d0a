"""The record of a run: bytes, bits and seconds of three rounds by hand, and what is said of a poor end."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from edge_bench import advice, records, tables
from edge_bench.federation.record import federation
from edge_bench.simulation.record import simulated
from lattice_fleet import NORMED
from numpy_mlp import course, mlp, model
from rich.console import Console

from edge_client.methods import make_method
from edge_client.protocol.messages import Round, Scores, Traffic


def played(round_: int, devices: list[str], seconds: float, bits: float, **sides: dict[str, int]) -> Round:
    return Round(
        round=round_,
        devices=devices,
        traffic=Traffic(**sides),
        bits_per_parameter_up=bits,
        bits_per_parameter_down=2 * bits,
        loss=None,
        score_before=None,
        score_after=None,
        seconds=seconds,
    )


ROUNDS = [
    played(1, ["a", "b"], 1.0, 4.0, up={"moves": 60}, down={"change": 80}, one_time_down={"units": 30}),
    played(2, ["a"], 2.0, 1.0, up={"moves": 30, "header": 6}, down={"change": 16}, one_time_up={"units": 10}),
    played(3, ["a"], 9.0, 1.0, up={"moves": 24}, down={"change": 24}, last_down={"counts": 100}),
]
"""Four turns of "a" and "b"; "c" and "d" took part in none, and receive the last downlink as those do."""


def test_traffic_is_for_each_turn_of_a_device_and_what_is_sent_once_for_each_device_that_took_part() -> None:
    found = records.traffic(ROUNDS, 4)
    assert found["device_rounds"] == 4
    assert found["bytes_up_per_device_round"] == (60 + 36 + 24) / 4
    assert found["bytes_down_per_device_round"] == (80 + 16 + 24) / 4
    assert found["one_time_bytes_up_per_device"] == 10 / 2
    assert found["one_time_bytes_down_per_device"] == 30 / 2
    assert found["bytes_by_kind"]["up"] == {"moves": 114, "header": 6}


def test_all_bytes_of_a_device_are_those_of_the_whole_federation_and_its_last_downlinks() -> None:
    found = records.traffic(ROUNDS, 4)
    assert found["last_bytes_down_per_device"] == 100 / 4
    assert found["bytes_per_device"] == (120 + 10 + 120 + 30 + 100) / 4


def test_bits_are_the_mean_over_turns_and_seconds_the_median_of_the_rounds() -> None:
    found = records.traffic(ROUNDS, 4)
    assert found["bits_per_parameter_up"] == pytest.approx((2 * 4 + 1 + 1) / 4)
    assert found["bits_per_parameter_down"] == pytest.approx(2 * (2 * 4 + 1 + 1) / 4)
    assert found["seconds_per_round"] == 2.0


def test_bytes_of_devices_that_no_round_counts_are_told_apart() -> None:
    """The rounds count 130 bytes up and 150 down, and 100 after the last one."""
    devices = [SimpleNamespace(bytes_up=100, bytes_down=200, messages_up={}, messages_down={}) for _ in range(2)]
    ended: Any = SimpleNamespace(rounds=ROUNDS, devices=devices, scores=lambda: None)
    found = federation(ended)
    assert found["uncounted_bytes_per_device"] == {"up": (200 - 130) / 2, "down": (400 - 150 - 100) / 2}


def test_the_best_round_is_the_one_whose_devices_score_most_after_training() -> None:
    def scores(mean: float) -> Scores:
        return Scores(mean=mean, worst=0, p10=0, best=1)

    rounds = [
        r.model_copy(update={"score_before": scores(before), "score_after": scores(after)})
        for r, before, after in zip(ROUNDS, (0.1, 0.5, 0.6), (0.4, 0.9, 0.7), strict=True)
    ]
    rows = [SimpleNamespace(record=r, everyone=None) for r in rounds]
    ends = {"final": None, "final_after": None, "start": None, "vain_bytes": 0, "kept_share": 1.0}
    digests = {"state_sha256": "", "personal_sha256": ""}
    method = make_method({"name": "fedavg"})
    result: Any = SimpleNamespace(method=method, course=course(mlp(2, 2)), rows=rows, devices=4, **ends, **digests)
    found = simulated(result)
    assert found["best_round"] == {"round": 2, "score_before": 0.5, "score_after": 0.9}


@pytest.mark.parametrize(("score", "named"), [(0.51, False), (0.45, True), (0.26, True)])
def test_a_method_is_named_below_half_of_the_best_ones_score(score: float, named: bool) -> None:
    methods = {name: make_method({"name": name}) for name in ("fedavg", "fedpm")}
    records = {"fedavg": {"score_mean": 1.0, "score_start": 0.1}, "fedpm": {"score_mean": score, "score_start": 0.1}}
    assert bool(advice.warnings(records, methods)) is named


@pytest.mark.parametrize(("mine", "alone", "hinted"), [(1, 5, True), (5, 5, False), (5, 1, False)])
def test_a_method_of_fewer_epochs_than_training_alone_is_advised_to_take_as_many(
    mine: int, alone: int, hinted: bool
) -> None:
    methods = {
        "mine": make_method({"name": "fedavg", "epochs": mine}),
        "standalone": make_method({"name": "standalone", "epochs": alone}),
    }
    records = {name: {"score_mean": score, "score_start": 0.1} for name, score in (("mine", 0.6), ("standalone", 0.9))}
    (said,) = advice.warnings(records, methods)
    assert (f"epochs = {alone}, as standalone has (here {mine}), then " in said) is hinted


@pytest.mark.parametrize(("after", "hinted"), [(0.95, True), (0.8, False), (None, False)])
def test_where_one_more_round_on_the_device_would_reach_the_base_the_first_hint_is_a_model_of_its_own(
    after: float | None, hinted: bool
) -> None:
    methods = {name: make_method({"name": name}) for name in ("fedavg", "standalone")}
    records: dict[str, Any] = {
        name: {"score_mean": score, "score_start": 0.1} for name, score in (("fedavg", 0.6), ("standalone", 0.9))
    }
    records["fedavg"]["score_mean_after_local_epochs"] = after
    (said,) = advice.warnings(records, methods)
    first = advice.PERSONAL.format(0.95) + ", then "
    assert f"helps: {first if hinted else ''}lr (here 0.01)" in said
    (said,) = advice.warnings(records, methods, chosen=True)  # each device has one already
    assert "helps: lr (here 0.01)" in said


def test_the_rate_of_a_hint_is_the_one_that_the_model_s_devices_train_at() -> None:
    methods = {name: make_method({"name": name}) for name in ("fedavg", "standalone")}
    records = {
        name: {"score_mean": score, "score_start": 0.1} for name, score in (("fedavg", 0.6), ("standalone", 0.9))
    }
    whole = model(NORMED)
    for seed, rate in ((1, "0.01"), (None, "0.003")):  # trained weights with batch-norm statistics have a lower one
        own = replace(whole, manifest=whole.manifest.model_copy(update={"seed": seed}))
        (said,) = advice.warnings(records, methods, model=own)
        assert f"lr (here {rate})" in said


@pytest.mark.parametrize(
    ("labels", "width", "due"),
    [
        (("fedavg", "lattice"), 80, 74),
        (("fedavg", "federated_pruning", "federated_pruning_lamp"), 80, 80),
        (("fedavg", "federated_pruning", "federated_pruning_lamp"), 100, 89),
        (("fedavg", "a_label_of_a_user_s_own_that_is_longer"), 80, 96),
    ],
)
def test_the_table_keeps_every_label_and_figure_whole(labels: tuple[str, ...], width: int, due: int) -> None:
    record = {
        "score_mean": 0.912, "score_worst": 0.8, "score_mean_after_local_epochs": 0.93, "seconds_per_round": 12.05,
        "bytes_up_per_device_round": 45_123.0, "bytes_down_per_device_round": 74.5e6, "bytes_per_device": 13.1e9,
        "bits_per_parameter_up": 0.987, "bits_per_parameter_down": 32.02,
    }  # fmt: skip
    console = Console(width=width, record=True, soft_wrap=True, file=io.StringIO())
    console.print(tables.table(dict.fromkeys(labels, record), "a title", console))
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines if "─" in line) == due
    for label in labels:
        (row,) = (line for line in lines if line.startswith(f"{label} "))
        figures = ["0.912", "0.800", "0.930", "45.1", "kB", "74.5", "MB", "0.99", "32.0", "13.1", "GB", "12.05"]
        assert row.split() == [label, *figures]
