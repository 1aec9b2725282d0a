"""The record of a run: bytes, bits and seconds of two rounds by hand."""

from __future__ import annotations

import pytest
from edge_bench import report

from edge_client.protocol.messages import Round, Traffic


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
    found = report.traffic(ROUNDS, 4)
    assert found["device_rounds"] == 4
    assert found["bytes_up_per_device_round"] == (60 + 36 + 24) / 4
    assert found["bytes_down_per_device_round"] == (80 + 16 + 24) / 4
    assert found["one_time_bytes_up_per_device"] == 10 / 2
    assert found["one_time_bytes_down_per_device"] == 30 / 2
    assert found["bytes_by_kind"]["up"] == {"moves": 114, "header": 6}


def test_all_bytes_of_a_device_are_those_of_the_whole_federation_and_its_last_downlinks() -> None:
    found = report.traffic(ROUNDS, 4)
    assert found["last_bytes_down_per_device"] == 100 / 4
    assert found["bytes_per_device"] == (120 + 10 + 120 + 30 + 100) / 4


def test_bits_are_the_mean_over_turns_and_seconds_the_median_of_the_rounds() -> None:
    found = report.traffic(ROUNDS, 4)
    assert found["bits_per_parameter_up"] == pytest.approx((2 * 4 + 1 + 1) / 4)
    assert found["bits_per_parameter_down"] == pytest.approx(2 * (2 * 4 + 1 + 1) / 4)
    assert found["seconds_per_round"] == 2.0
