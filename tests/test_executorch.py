"""ExecuTorch programs, made and run. The trainer contract of `test_trainers` runs on them too when it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from edge_client.artifacts import make
from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_personal
from edge_client.errors import BundleError, ConfigError
from edge_client.task import Personal
from edge_client.training import open_trainer

pytest.importorskip("torch")
pytest.importorskip("executorch", reason="ExecuTorch is not installed: pip install 'maskfleet[author]'")
from edge_export.executorch.parts import add_parts
from exported import exported


@pytest.fixture(scope="module", params=["mlp", "max-pool cnn"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("executorch") / "b"
    shutil.copytree(exported(request.param).bundle.folder, folder)
    return add_parts(Bundle.open(folder), most=33)


def batch(bundle: Bundle, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng, m = np.random.default_rng(n), bundle.manifest
    return rng.standard_normal((n, *m.input.shape)).astype(np.float32), rng.integers(0, m.target.output[-1], n)


def test_every_gradient_equals_pytorchs_whatever_the_batch_size(bundle: Bundle) -> None:
    m, start = bundle.manifest, bundle.model()
    ours, truth = open_trainer("executorch", bundle), open_trainer("torch", bundle)
    for n in (33, 7, 2):
        x, y = batch(bundle, n)
        got, due = (t.gradient(start.parameters, start.buffers, x, y) for t in (ours, truth))
        assert got.loss == pytest.approx(due.loss, rel=1e-5)
        total = np.linalg.norm(due.parameters)
        assert np.linalg.norm(got.parameters - due.parameters) < 1e-5 * total
        for t in m.parameters:  # none hides behind a larger one
            norm = np.linalg.norm(due.parameters[t.span])
            assert np.linalg.norm(got.parameters[t.span] - due.parameters[t.span]) < 1e-5 * norm + 1e-6, t.name
        np.testing.assert_allclose(got.buffers, due.buffers, rtol=1e-5, atol=1e-6)


def test_logits_come_in_pieces_and_a_batch_that_is_too_large_to_train_on_is_refused(bundle: Bundle) -> None:
    start, (x, y) = bundle.model(), batch(bundle, 70)
    ours, truth = open_trainer("executorch", bundle), open_trainer("onnxruntime", bundle)
    found, due = (t.logits(start.parameters, start.buffers, x) for t in (ours, truth))
    np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"a batch of 70 samples is more than the 33 that train\.pte runs"):
        ours.gradient(start.parameters, start.buffers, x, y)


def test_a_part_that_is_no_program_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle.folder, folder)
    data = (folder / "train.pte").read_bytes()
    (folder / "train.pte").write_bytes(data[:100])
    start, (x, y) = bundle.model(), batch(bundle, 2)
    with pytest.raises(BundleError, match="SHA-256"):
        open_trainer("executorch", Bundle.open(folder)).gradient(start.parameters, start.buffers, x, y)


@pytest.mark.parametrize("kind", ["pte", "pte-int8"])
def test_a_personal_model_becomes_a_program_that_says_the_same(bundle: Bundle, kind: str, tmp_path: Path) -> None:
    start, (x, _) = bundle.model(), batch(bundle, 200)
    write_personal(bundle, Personal(start.parameters, start.buffers, None), tmp_path / "personal.onnx", x)
    proof = make((tmp_path / "personal.onnx").read_bytes(), kind, tmp_path / "out.pte", x)
    assert (tmp_path / "out.pte").read_bytes()[4:8] == b"ET12"
    if kind == "pte":
        assert proof.agreement == 1.0
        assert proof.error_std < 1e-5
    else:
        assert 1e-4 < proof.error_rms < 0.25
    assert onnx.load(tmp_path / "personal.onnx").graph.node
