"""Every method's personal models, trained on digits: the compact model predicts what the masked network does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edge_bench.compaction import trained_models
from edge_bench.compaction.trained_models import CONFIG, row
from edge_bench.reproductions.reproduction import Cell, cells, parse
from onnx import numpy_helper

from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_personal
from edge_client.errors import ConfigError, DataError
from edge_client.task import Personal

pytest.importorskip("sklearn")
TASK = {
    "bundle": "digits",
    "data": {"name": "digits", "devices": 3, "samples": 300, "validation": 0.2},
    "rounds": 4,
    "cohort": 3,
}
SETUP = parse(CONFIG.read_text("utf-8"), "trained")
DIGITS = SETUP.model_copy(update={"tasks": {"digits": type(SETUP.tasks["har"]).model_validate(TASK)}})
SMALLER = {"lattice-pruned", "federated_pruning", "hidenseek", "fedmask-lasso"}  # whole units go in four rounds


def measured(label: str, timed: int = 0) -> dict[str, Any]:
    """The row of one method on digits."""
    (cell,) = cells(DIGITS, (0,), frozenset({label}))
    return row(cell, timed, runs=3)


@pytest.mark.parametrize("label", sorted(SETUP.methods))
def test_a_trained_personal_model_predicts_the_same_after_compaction(label: str) -> None:
    found = measured(label)
    assert (found["differing"], found["devices"]) == (0, 3)
    assert found["samples"] > 50
    assert found["error_std"] < 1e-5
    assert 0 < found["live_share"] <= 1
    assert found["parameter_ratio"] > 1.1 or label not in SMALLER


def test_a_compact_model_that_predicts_otherwise_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One class gets a large bias: the test samples of other classes differ."""

    def write(bundle: Bundle, personal: Personal, path: Path, *given: Any, **settings: Any) -> Any:
        report = write_personal(bundle, personal, path, *given, **settings)
        model = onnx.load(path)
        (last,) = (n for n in model.graph.node if "logits" in n.output)
        (bias,) = (t for t in model.graph.initializer if t.name == last.input[2])
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32([99] + 9 * [0]), bias.name))
        onnx.save(model, path)
        return report

    monkeypatch.setattr(trained_models, "write_personal", write)
    found = measured("fedavg")
    assert found["differing"] > 0.5 * found["samples"]
    assert found["error_std"] > 1


def test_time_and_int8_are_measured_beside_the_whole_network() -> None:
    found = measured("hidenseek", timed=1)
    assert found["differing_aligned"] == 0
    assert found["int8_agreement"] > 0.8
    assert found["int8_bytes"] < found["bytes"]
    assert min(found[k] for k in ("ms", "ms_dense", "speedup", "speedup_aligned", "speedup_int8")) > 0


def test_runs_of_which_none_has_a_result_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(cell: Cell, timed: int, runs: int) -> dict[str, Any]:
        if cell.label == "fedavg":
            raise DataError("no data")
        return {}

    monkeypatch.setattr(trained_models, "row", fails)
    monkeypatch.setattr(trained_models, "line", lambda found: "measured")
    with pytest.raises(ConfigError, match="none of 1 runs has a result"):
        trained_models.main(task="har", method="fedavg")
    assert "DataError: no data" in capsys.readouterr().out
    trained_models.main(task="har", method="fedavg,hidenseek")
