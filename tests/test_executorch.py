"""ExecuTorch programs, made and run. The trainer contract of `test_trainers` runs on them too when it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge_client.artifacts.making import make
from edge_client.bundle import MANIFEST, Bundle, Part, digest
from edge_client.compaction.personal import write_personal
from edge_client.errors import BundleError, CompactionError, ConfigError, ModelError
from edge_client.measure import engines
from edge_client.runtimes.onnx import open_onnx
from edge_client.task import Personal
from edge_client.training import open_trainer

pytest.importorskip("torch")
pytest.importorskip("executorch", reason="ExecuTorch is not installed: pip install 'maskfleet[author]'")
import torch
from coordination import Fleet
from edge_export import export_bundle
from edge_export.executorch import parts
from edge_export.executorch.operators import TABLE
from edge_export.executorch.parts import add_parts
from exported import exported
from exports_of_digits import PATH, ended, with_digits

from edge_client.runtimes.executorch import open_pte


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


def test_a_bundle_with_dropout_is_not_trained_without_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    start, ours = bundle.model(), open_trainer("executorch", bundle)
    monkeypatch.setattr(ours, "manifest", bundle.manifest.model_copy(update={"draws": True}))
    with pytest.raises(ConfigError, match="holds no dropout"):
        ours.gradient(start.parameters, start.buffers, *batch(bundle, 2))


def test_the_largest_batch_may_be_smaller_than_most_programs_have(tmp_path: Path) -> None:
    shutil.copytree(exported("mlp").bundle.folder, tmp_path / "b")
    small = add_parts(Bundle.open(tmp_path / "b"), most=2)
    start, (x, y) = small.model(), batch(small, 3)
    ours, truth = open_trainer("executorch", small), open_trainer("onnxruntime", small)
    found, due = (t.gradient(start.parameters, start.buffers, x[:2], y[:2]).parameters for t in (ours, truth))
    np.testing.assert_allclose(found, due, atol=1e-6)
    with pytest.raises(ConfigError, match=r"a batch of 3 samples is more than the 2 that train\.pte runs"):
        ours.gradient(start.parameters, start.buffers, x, y)


def test_a_part_that_is_no_program_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle.folder, folder)
    data = (folder / "train.pte").read_bytes()
    start, (x, y) = bundle.model(), batch(bundle, 2)
    for damaged in (data[:100], b"no program"):
        (folder / "train.pte").write_bytes(damaged)
        parts = {**bundle.manifest.parts, "train.pte": Part(sha256=digest(damaged), size=len(damaged))}
        (folder / MANIFEST).write_bytes(bundle.manifest.model_copy(update={"parts": parts}).to_bytes())
        with pytest.raises(BundleError, match=r"ExecuTorch cannot open train\.pte: .*; export the bundle again"):
            open_trainer("executorch", Bundle.open(folder)).gradient(start.parameters, start.buffers, x, y)


def test_a_program_that_computes_something_else_is_not_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle.folder, folder)
    made = [bundle.part(f"{part}.pte").read_bytes() for part in ("train", "eval")]
    lowered = iter(2 * made)  # right the first time
    monkeypatch.setattr(parts, "lower", lambda *_, **__: next(lowered))
    parts.add_parts(Bundle.open(folder), most=33)
    graph = onnx.load(folder / "eval.onnx")
    last = next(n for n in graph.graph.node if "logits" in n.output)
    last.output[0] = "half"
    graph.graph.node.append(onnx.helper.make_node("Add", ["half", "half"], ["logits"]))
    changed = graph.SerializeToString()
    (folder / "eval.onnx").write_bytes(changed)
    entries = {**bundle.manifest.parts, "eval.onnx": Part(sha256=digest(changed), size=len(changed))}
    (folder / MANIFEST).write_bytes(bundle.manifest.model_copy(update={"parts": entries}).to_bytes())
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(ModelError, match=r"eval\.pte gives another logits than eval\.onnx for 33 samples"):
        parts.add_parts(Bundle.open(folder), most=33)
    assert (folder / MANIFEST).read_bytes() == before


def test_the_proof_sees_a_small_gradient_a_thousandth_off_and_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    small = exported("max-pool cnn").bundle
    inputs, outputs = parts.train_names(small.manifest)
    session, factors = open_onnx(small.part("train.onnx")), dict.fromkeys(outputs, 1.0)

    def program(*values: np.ndarray) -> list[np.ndarray]:
        found = session.run(outputs, dict(zip(inputs, values, strict=True)))
        return [factors[name] * value for name, value in zip(outputs, found, strict=True)]

    monkeypatch.setattr("edge_client.runtimes.executorch.open_pte", lambda *_, **__: program)
    factors["grad:4.bias"] = -1.0  # before a batch-norm
    parts._prove(small, "train", b"", inputs, outputs, 33)
    for name in (n for n in outputs if n != "grad:4.bias"):
        factors[name] = 1.001
        with pytest.raises(ModelError, match=f"train.pte gives another {name} than train.onnx for 33 samples"):
            parts._prove(small, "train", b"", inputs, outputs, 33)
        factors[name] = 1.0


@pytest.mark.parametrize("unread", ["x", "y"])
def test_the_proof_sees_a_program_that_reads_no_ids_or_no_labels(
    unread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(20, 3))
    ids = torch.zeros(2, 5, dtype=torch.int64)
    small = export_bundle(module, ids, tmp_path / "b", name="b", target={"kind": "classification"}, torch_part=False)
    inputs, outputs = parts.train_names(small.manifest)
    session = open_onnx(small.part("train.onnx"))

    def program(*values: np.ndarray) -> list[np.ndarray]:
        given = dict(zip(inputs, values, strict=True))
        return session.run(outputs, {**given, unread: np.zeros_like(given[unread])})

    monkeypatch.setattr("edge_client.runtimes.executorch.open_pte", lambda *_, **__: program)
    with pytest.raises(ModelError, match=r"train\.pte gives another loss than train.onnx for 33 samples"):
        parts._prove(small, "train", b"", inputs, outputs, 33)


def test_a_model_with_dropout_has_no_programs(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(), torch.nn.Linear(5, 3))
    made = export_bundle(
        module, torch.zeros(2, 4), tmp_path / "b", name="b", target={"kind": "classification"}, torch_part=False
    )
    with pytest.raises(ModelError, match="cannot draw what dropout drops; leave out --executorch, or dropout"):
        add_parts(made)


def test_a_relu_that_falls_the_other_way_in_one_draw_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    small = exported("max-pool cnn").bundle
    inputs, outputs = parts.train_names(small.manifest)
    session, off = open_onnx(small.part("train.onnx")), [1.003]

    def program(*values: np.ndarray) -> list[np.ndarray]:
        found = session.run(outputs, dict(zip(inputs, values, strict=True)))
        factor = off.pop() if off else 1.0
        return [
            factor * value if name.startswith("grad:") else value for name, value in zip(outputs, found, strict=True)
        ]

    monkeypatch.setattr("edge_client.runtimes.executorch.open_pte", lambda *_, **__: program)
    parts._prove(small, "train", b"", inputs, outputs, 33)
    off += [1.003] * parts.DRAWS
    with pytest.raises(ModelError, match=r"train\.pte gives another grad:.* for 33 samples"):
        parts._prove(small, "train", b"", inputs, outputs, 33)


def test_threads_that_are_replaced_leave_the_programs_before_them_running(bundle: Bundle) -> None:
    start, (x, y) = bundle.model(), batch(bundle, 7)
    first = open_trainer("executorch", bundle, 1)
    due = first.gradient(start.parameters, start.buffers, x, y).parameters.copy()
    for threads in (2, 1, 2):
        other = open_trainer("executorch", bundle, threads)
        for trainer in (other, first):
            found = trainer.gradient(start.parameters, start.buffers, x, y).parameters
            np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-6)


def test_a_program_is_measured_on_one_sample_whatever_its_largest_batch(bundle: Bundle, tmp_path: Path) -> None:
    start, file = bundle.model(), tmp_path / "m.pte"
    write_personal(bundle, Personal(start.parameters, start.buffers, None), tmp_path / "personal.onnx")
    make((tmp_path / "personal.onnx").read_bytes(), "pte", file)
    shape, dtype = engines.sample_of(file)
    assert (shape, dtype) == ((1, *bundle.manifest.input.shape), "float32")
    (found,) = engines.open_model(file, engines.batch(shape, dtype))()
    assert tuple(found.shape) == (1, *bundle.manifest.target.output)
    assert engines.largest_batch(file) == 32
    with pytest.raises(ConfigError, match=r"m\.pte does not run on float32.*lower it for a batch of 33"):
        engines.open_model(file, engines.batch((33, *shape[1:]), dtype))


@pytest.mark.parametrize("kind", ["pte", "pte-int8"])
def test_a_personal_model_becomes_a_program_that_says_the_same(bundle: Bundle, kind: str, tmp_path: Path) -> None:
    start, (x, _) = bundle.model(), batch(bundle, 200)
    write_personal(bundle, Personal(start.parameters, start.buffers, None), tmp_path / "personal.onnx", x)
    proof = make(
        (tmp_path / "personal.onnx").read_bytes(), kind, tmp_path / "out.pte", x, target=bundle.manifest.target
    )
    assert (tmp_path / "out.pte").read_bytes()[4:8] == b"ET12"
    if kind == "pte":
        assert proof.agreement == 1.0
        assert proof.error_std < 1e-5
    else:
        assert 1e-4 < proof.error_rms < 0.25
    assert onnx.load(tmp_path / "personal.onnx").graph.node


def test_gelu_by_tanh_is_not_the_exact_one_that_the_delegate_computes(tmp_path: Path) -> None:
    rng, make_node, info = np.random.default_rng(0), onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = [onnx.numpy_helper.from_array(rng.standard_normal((12, 12)).astype(np.float32), name) for name in "ab"]
    nodes = [
        make_node("MatMul", ["x", "a"], ["h"]),
        make_node("Gelu", ["h"], ["g"], approximate="tanh"),
        make_node("MatMul", ["g", "b"], ["logits"]),
    ]
    ends = ([info(name, onnx.TensorProto.FLOAT, ["n", 12])] for name in ("x", "logits"))
    graph = onnx.helper.make_graph(nodes, "g", *ends, weights)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    assert make(model.SerializeToString(), "pte", tmp_path / "g.pte").error_std < 1e-5


def test_what_xnnpack_cannot_take_whole_is_lowered_with_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import executorch.exir
    from edge_export.executorch.lowering import lower

    made, seen = executorch.exir.to_edge_transform_and_lower, []

    def failing(program: object, **settings: Any) -> object:
        seen.append(settings["partitioner"])
        if len(seen) == 1:
            raise RuntimeError("output node is already in the inputs")
        return made(program, **settings)

    monkeypatch.setattr(executorch.exir, "to_edge_transform_and_lower", failing)
    module, x = torch.nn.Linear(3, 2).eval(), torch.randn(5, 3)
    program = open_pte(lower(module, (x,), [0], most=8, delegate="all"))
    np.testing.assert_allclose(program(x.numpy())[0], module(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert len(seen) == 2


def test_an_operator_that_the_engine_fails_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weight = onnx.numpy_helper.from_array(np.ones((2, 1, 3, 3, 3), np.float32), "w")
    nodes = [make_node("Conv", ["x", "w"], ["h"]), make_node("Flatten", ["h"], ["logits"])]
    ends = ([info(k, onnx.TensorProto.FLOAT, shape)] for k, shape in (("x", ["n", 1, 3, 3, 3]), ("logits", ["n", 2])))
    graph = onnx.helper.make_graph(nodes, "g", *ends, [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    make(model.SerializeToString(), "pte", tmp_path / "good.pte")
    conv = lambda _, x, w: torch.nn.functional.conv3d(x, w)  # noqa: E731
    monkeypatch.setitem(TABLE, "Conv", conv)
    with pytest.raises(CompactionError, match=r"run: operator aten::convolution\.out fails: .*; keep the ONNX"):
        make(model.SerializeToString(), "pte", tmp_path / "bad.pte")


def test_the_coordinator_hands_out_a_program(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> list[bytes]:
        files = []
        for kind in ("pte", "onnx"):
            found = await ended(fleet, (await fleet.operator("POST", PATH, json={"kind": kind})).json())
            assert found["state"] == "ready", found
            files.append((await fleet.operator("GET", f"{PATH}/{found['id']}/file")).content)
        return files

    program, graph = with_digits(tmp_path, script)
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    (due,) = open_onnx(graph).run(None, {"x": x})
    np.testing.assert_allclose(open_pte(program)(x)[0], due, rtol=1e-5, atol=1e-5)


MODULE = """
from torch import nn


def make() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
"""


def test_the_export_command_writes_programs_that_train_and_says_only_what_it_does(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    command = [sys.executable, "-m", "edge_client.cli", "export", "model.py:make", "--input", "1,8,8", "-o", "b"]
    done = subprocess.run([*command, "--executorch"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "train.pte: gives what train.onnx gives" in done.stdout
    assert ".cpp" not in done.stdout + done.stderr
    made = Bundle.open(tmp_path / "b")
    start, (x, y) = made.model(), batch(made, 5)
    found, due = (
        open_trainer(e, made).gradient(start.parameters, start.buffers, x, y) for e in ("executorch", "torch")
    )
    np.testing.assert_allclose(found.parameters, due.parameters, rtol=1e-4, atol=1e-6)
