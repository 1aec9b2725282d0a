"""`maskfleet compact`: values in a safetensors file become a small model."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import onnx
import pytest
from personal_models import MLP, MLP_VALUES, run
from safetensors.numpy import save_file
from sequential_bundle import personal_of, sequential_bundle

from edge_client.bundle import views
from edge_client.cli import join
from edge_client.compaction.command import compact
from edge_client.compaction.personal import write_personal
from edge_client.device.client import Client
from edge_client.device.conclude import conclude
from edge_client.errors import BundleError


def test_values_become_a_model_on_what_their_zeros_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    personal = personal_of(bundle, MLP_VALUES)
    stored = {k: np.ascontiguousarray(v) for k, v in views(bundle.manifest.parameters, personal.parameters).items()}
    save_file(stored, tmp_path / "values.safetensors")
    compact(str(tmp_path), tmp_path / "values.safetensors", tmp_path / "small.onnx", align="none")
    np.testing.assert_allclose(run(tmp_path / "small.onnx", np.ones((1, 2), np.float32)), [[23.75, -40.0]])
    assert sum(np.prod(t.dims) for t in onnx.load(tmp_path / "small.onnx").graph.initializer) == 7
    assert "17 -> 7 parameters" in capsys.readouterr().out


def test_every_way_to_a_compact_model_has_the_same_widths_by_default() -> None:
    defaults = [inspect.signature(f).parameters["align"].default for f in (write_personal, conclude, compact, join)]
    assert {*defaults, Client.__dataclass_fields__["align"].default} == {"rule"}


def test_what_does_not_fit_is_refused_with_the_tensor(tmp_path: Path) -> None:
    sequential_bundle(tmp_path, (2,), MLP)
    save_file({"linear0.bias": np.zeros(3, np.float32)}, tmp_path / "values.safetensors")
    for file, words in (
        ("values.safetensors", "lacks float32 tensor 'linear0.weight'"),
        ("missing.safetensors", "does not open"),
    ):
        with pytest.raises(BundleError, match=words):
            compact(str(tmp_path), tmp_path / file, tmp_path / "small.onnx")
    assert not (tmp_path / "small.onnx").exists()
