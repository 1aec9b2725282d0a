"""Latency of models timed in turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sequential_bundle import Act, Linear, random_personal, sequential_bundle

from edge_client.compaction.personal import write_dense
from edge_client.errors import ConfigError
from edge_client.measure.latency import FEWEST, latency


def model(folder: Path, width: int) -> Path:
    (folder / str(width)).mkdir()
    bundle = sequential_bundle(folder / str(width), (64,), (Linear(width), Act(), Linear(width), Act(), Linear(2)))
    write_dense(bundle, random_personal(bundle, 0, 1.0, 1.0), folder / f"{width}.onnx")
    return folder / f"{width}.onnx"


def test_a_model_of_a_hundred_times_the_work_is_slower_in_either_order(tmp_path: Path) -> None:
    small, large = model(tmp_path, 16), model(tmp_path, 1024)
    x = np.zeros((1, 64), np.float32)
    first, second = latency([small, large.read_bytes()], x)
    assert first < second
    second, first = latency([large, small], x)
    assert first < second


def test_what_cannot_be_timed_is_told(tmp_path: Path) -> None:
    path = model(tmp_path, 16)
    with pytest.raises(ConfigError, match=r"does not run on float32\[1, 3\]"):
        latency([path], np.zeros((1, 3), np.float32))
    with pytest.raises(ConfigError, match=r"cannot open .*missing\.onnx"):
        latency([tmp_path / "missing.onnx"], np.zeros((1, 64), np.float32))


def test_a_slow_model_is_timed_for_some_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("edge_client.measure.latency.onnx_call", lambda *given: lambda: calls.append(1))
    monkeypatch.setattr("edge_client.measure.latency.SECONDS", 0.0)
    latency([b"slow"], np.zeros((1, 64), np.float32))
    assert len(calls) == 1 + FEWEST
