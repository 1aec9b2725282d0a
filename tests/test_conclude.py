"""The end of a federation on a device: it has a model in any case, and the report says which and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from personal_models import MLP, MLP_VALUES, STILL, X, Y, in_float64, run, still
from sequential_bundle import personal_of, sequential_bundle

import edge_client.compaction.personal as personal_module
import edge_client.compaction.preparation as preparation
from edge_client.bundle import F32, Bundle, Manifest
from edge_client.compaction.net import Net
from edge_client.compaction.smaller import Smaller
from edge_client.compaction.tuning import aligned
from edge_client.data import DeviceData
from edge_client.device.conclude import conclude
from edge_client.errors import CompactionError
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import Trainer


class _Constant:
    """A trainer whose model takes every sample for class 0."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def logits(self, parameters: F32, buffers: F32, x: np.ndarray) -> np.ndarray:
        return np.tile(np.array([1, 0], np.float32), (len(x), 1))


def task_of(bundle: Bundle, x: np.ndarray, y: np.ndarray) -> Task:
    """The task after the last round, on these samples."""
    course = Course(bundle.model(), seed=1, rounds=1, cohort=1)
    data = DeviceData(x, y, x[:0], y[:0], x, y)
    return Task(Assignment(course, 2, "a"), cast(Trainer, _Constant(bundle.manifest)), data, secret=1)


def test_a_device_whose_compact_model_is_not_shown_equal_ends_with_the_dense_one_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    personal = personal_of(bundle, MLP_VALUES)
    x, y = np.ones((4, 2), np.float32), np.array([0, 0, 0, 1])
    task = task_of(bundle, x, y)
    path = tmp_path / "personal.onnx"
    good = conclude(bundle, task, personal, path)
    assert (good.uncompacted, good.parameters_compact, good.score) == (None, 7, 0.75)

    def wrong(*given: Any) -> Smaller:
        made = aligned(*given)
        (bias,) = (t for t in made.model.graph.initializer if t.name == made.model.graph.node[-1].input[2])
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(1), bias.name))
        return made

    monkeypatch.setattr(personal_module, "aligned", wrong)
    report = conclude(bundle, task, personal, path)
    assert report.uncompacted is not None
    assert "outputs differ" in report.uncompacted
    assert (report.parameters_dense, report.parameters_compact) == (17, 17)
    np.testing.assert_allclose(run(path, np.ones((1, 2), np.float32)), [[23.75, -40.0]])
    with pytest.raises(CompactionError, match="NaN"):
        conclude(bundle, task, Personal(np.full(17, np.nan, np.float32), personal.buffers), path)


def test_a_report_has_the_latency_of_each_model_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    personal, path = personal_of(bundle, MLP_VALUES), tmp_path / "personal.onnx"
    x, y = np.ones((4, 2), np.float32), np.zeros(4, np.int64)
    task = task_of(bundle, x, y)
    asked: list[tuple[tuple[int, ...], int]] = []

    def timed(models: Sequence[Path | bytes], sample: np.ndarray, threads: int = 1) -> tuple[float, ...]:
        asked.append((sample.shape, threads))
        # One millisecond for each weight that the model has.
        loaded = [onnx.load(m) if isinstance(m, Path) else onnx.load_model_from_string(m) for m in models]
        return tuple(float(sum(int(np.prod(w.dims)) for w in model.graph.initializer)) for model in loaded)

    monkeypatch.setattr("edge_client.device.conclude.latency", timed)
    report = conclude(bundle, task, personal, path, threads=3)
    assert (report.parameters_dense, report.parameters_compact) == (17, 7)
    assert (report.latency_dense_ms, report.latency_compact_ms) == (17, 7)
    assert asked == [((1, 2), 3)]

    def refuses(*given: object, **more: object) -> None:
        raise CompactionError("the compact model's outputs differ")

    monkeypatch.setattr(personal_module, "write_personal", refuses)
    report = conclude(bundle, task, personal, path, threads=3)
    assert (report.latency_dense_ms, report.latency_compact_ms, report.parameters_compact) == (17, 17, 17)


def test_the_end_writes_no_model_but_the_personal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, written = sequential_bundle(tmp_path, (2,), MLP), list[Path]()
    out = tmp_path / "out"
    out.mkdir()

    def timed(models: Sequence[Path | bytes], sample: np.ndarray, threads: int = 1) -> tuple[float, ...]:
        written.extend(out.rglob("*"))
        return tuple(1.0 for _ in models)

    monkeypatch.setattr("edge_client.device.conclude.latency", timed)
    task = task_of(bundle, np.ones((4, 2), np.float32), np.zeros(4, np.int64))
    conclude(bundle, task, personal_of(bundle, MLP_VALUES), out / "personal.onnx")
    assert written == [out / "personal.onnx"]


def test_a_device_ends_with_the_evaluation_graph_itself_when_nothing_folded_is_shown_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, personal = still(tmp_path, STILL[0])
    task = task_of(bundle, X, Y)

    def refused(*given: Any) -> Smaller:
        raise CompactionError("outputs differ")

    monkeypatch.setattr(personal_module, "aligned", refused)
    fold = preparation._fold_batch_norms

    def wrong(net: Net) -> None:
        fold(net)
        bias = next(n.input[2] for n in net.nodes if n.op_type == "Conv")
        net.constants[bias] = 1.001 * net.constants[bias]

    monkeypatch.setattr(preparation, "_fold_batch_norms", wrong)
    path = tmp_path / "personal.onnx"
    report = conclude(bundle, task, personal, path)
    assert report.uncompacted is not None
    assert report.parameters_compact == report.parameters_dense == bundle.manifest.d
    assert report.latency_compact_ms == report.latency_dense_ms > 0
    graph = onnx.load(path).graph
    masked = onnx.load(bundle.part("eval.onnx")).graph
    assert [n.op_type for n in graph.node] == [n.op_type for n in masked.node]
    assert {t.name for t in graph.initializer} == set(bundle.manifest.tensors)
    assert np.abs(run(path, X) - in_float64(bundle, personal, X)).max() < 1e-3
