"""Other forms of a personal model: proved before they are written, or refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import typer
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from edge_client.artifacts import Run, making, writer
from edge_client.artifacts.cli import artifact
from edge_client.artifacts.int8 import Int8
from edge_client.artifacts.making import Limits, make
from edge_client.bundle import Bundle, Input, Normalisation
from edge_client.card import card, describe, read
from edge_client.equality import probes
from edge_client.errors import BundleError, CompactionError, ConfigError, DataError
from edge_client.named_bundles import packaged
from edge_client.targets import Classification, Regression


def personal(seed: int = 0, whole: bool = False) -> bytes:
    """A small convolutional model, or one that reads integers."""
    rng = np.random.default_rng(seed)
    make_node = helper.make_node
    if whole:
        nodes = [
            make_node("Gather", ["table", "x"], ["a"]),
            make_node("ReduceMean", ["a", "axis"], ["logits"], keepdims=0),
        ]
        stored = {"table": rng.standard_normal((9, 4)).astype(np.float32), "axis": np.array([1])}
        x, out = helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 5]), [4]
    else:
        nodes = [
            make_node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1, 1, 1]),
            make_node("Relu", ["a"], ["c"]),
            make_node("Flatten", ["c"], ["f"]),
            make_node("Gemm", ["f", "v", "d"], ["logits"], transB=1),
        ]
        shapes = {"w": (6, 1, 3, 3), "b": (6,), "v": (5, 6 * 64), "d": (5,)}
        stored = {k: (rng.standard_normal(s) * 0.3).astype(np.float32) for k, s in shapes.items()}
        x, out = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8]), [5]
    graph = helper.make_graph(
        nodes,
        "personal",
        [x],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", *out])],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def samples(n: int = 200) -> np.ndarray:
    return np.random.default_rng(1).random((n, 1, 8, 8)).astype(np.float32)


class Copy:
    """A writer whose artifact is the model with its bias of output `at` moved by `off`."""

    exact, native, at, off = True, False, 0, 0.0

    def write(self, model: bytes, samples: Any, progress: Any) -> bytes:
        moved = onnx.load_from_string(model)
        (bias,) = (t for t in moved.graph.initializer if t.name == "d")
        values = numpy_helper.to_array(bias).copy()
        values[self.at] += self.off
        bias.CopyFrom(numpy_helper.from_array(values, "d"))
        return bytes(moved.SerializeToString())

    def open(self, data: bytes) -> Run:
        session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
        return lambda x: np.asarray(session.run(None, {"x": x})[0])


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> type[Copy]:
    kind = type("Copies", (Copy,), {})
    monkeypatch.setattr(making, "writer", lambda _: kind())
    return kind


def test_int8_is_a_quarter_of_the_size_and_its_error_is_measured_on_samples_it_was_not_calibrated_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    write = Int8.write
    monkeypatch.setattr(Int8, "write", lambda self, m, x, p: seen.append(x) or write(self, m, x, p))
    x, out = samples(), tmp_path / "int8.onnx"
    proof = make(personal(), "int8", out, x, target=Classification(classes=5))
    assert len(seen[0]) == proof.samples == 100
    assert not {s.tobytes() for s in seen[0]} & {s.tobytes() for s in x[1::2]}
    assert proof.agreement is not None
    assert proof.agreement > 0.95
    assert 1e-4 < proof.error_rms < 0.1  # the error of int8, not of float
    assert {t.data_type for t in onnx.load(out).graph.initializer} >= {TensorProto.INT8}
    session = ort.InferenceSession(out.read_bytes(), providers=["CPUExecutionProvider"])
    expected = ort.InferenceSession(personal(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    found = session.run(None, {"x": x})[0]
    errors = np.sqrt(((found - expected) ** 2).mean(axis=0)) / expected.std(axis=0)
    assert 0.5 * proof.error_rms < errors.max() < 2 * proof.error_rms


def unlike(n: int = 600) -> tuple[bytes, np.ndarray]:
    """A regression of two numbers whose scales are 1000 and 1, and samples."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Gemm", ["r", "v", "d"], ["y"]),
    ]
    last = rng.standard_normal((16, 2)) * np.array([250, 0.25])
    stored = {"w": rng.standard_normal((8, 16)), "v": last, "d": np.zeros(2)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString()), rng.standard_normal((n, 8)).astype(np.float32)


def test_an_output_that_dies_beside_a_large_one_is_found_and_numbers_have_no_labels(tmp_path: Path) -> None:
    model, x = unlike()
    with pytest.raises(CompactionError, match=r"artifact has an error of [\d.]+ standard deviations in output 1"):
        make(model, "int8", tmp_path / "a.onnx", x)
    proof = make(model, "int8", tmp_path / "a.onnx", x, Limits(error=9), target=Regression(outputs=2))
    assert proof.agreement is None
    assert proof.worst == 1
    assert proof.error_rms > 0.25


def test_an_exact_artifact_whose_small_output_is_wrong_is_refused(tmp_path: Path, copies: type[Copy]) -> None:
    """The second output is wrong by a thousandth of its deviation, a millionth of the first one's."""
    model, x = unlike()

    assert make(model, "copy", tmp_path / "good", x).error_std == 0.0
    copies.at, copies.off = 1, 1e-3
    for given in (None, x):
        with pytest.raises(CompactionError, match="copy artifact's outputs differ"):
            make(model, "copy", tmp_path / "bad", given)


def test_an_output_that_does_not_vary_is_measured_by_its_size(tmp_path: Path) -> None:
    """A masked output is its bias alone: its standard deviation is 0."""
    model = onnx.load_from_string(personal())
    (last,) = (t for t in model.graph.initializer if t.name == "v")
    weight = numpy_helper.to_array(last).copy()
    weight[2] = 0
    last.CopyFrom(numpy_helper.from_array(weight, "v"))
    assert make(bytes(model.SerializeToString()), "int8", tmp_path / "a.onnx", samples()).error_rms < 0.25


def test_int8_beyond_its_limits_is_refused_with_the_figures_and_nothing_is_written(tmp_path: Path) -> None:
    for limits in (Limits(agreement=1.0, error=1e-6), Limits(agreement=0.0, error=1e-6)):
        with pytest.raises(CompactionError, match=r"same label for [0-9.]+%.*standard deviations in output \d"):
            make(personal(), "int8", tmp_path / "a.onnx", samples(), limits, target=Classification(classes=5))
    assert not list(tmp_path.iterdir())


def test_an_exact_artifact_that_differs_is_refused_with_or_without_samples(tmp_path: Path, copies: type[Copy]) -> None:
    for given in (None, samples()):
        copies.off = 0.0
        assert make(personal(), "copy", tmp_path / "good", given).error_std == 0.0
        copies.off = 1e-3
        with pytest.raises(CompactionError, match="copy artifact's outputs differ"):
            make(personal(), "copy", tmp_path / "bad", given)
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_an_exact_artifact_that_differs_at_large_inputs_only_is_refused(tmp_path: Path, copies: type[Copy]) -> None:
    def clipped(self: Copy, model: bytes, samples: Any, progress: Any) -> bytes:
        made = onnx.load_from_string(model)
        made.graph.node[0].input[0] = "clipped"
        bounds = [numpy_helper.from_array(np.float32(v), k) for k, v in (("low", -50), ("high", 50))]
        made.graph.initializer.extend(bounds)
        made.graph.node.insert(0, helper.make_node("Clip", ["x", "low", "high"], ["clipped"]))
        return bytes(made.SerializeToString())

    copies.write = clipped  # type: ignore[method-assign]
    for given in (None, samples()):
        with pytest.raises(CompactionError, match="on large inputs the copy artifact's outputs differ"):
            make(personal(), "copy", tmp_path / "bad", given)


def test_a_model_that_overflows_at_extreme_inputs_has_artifacts(tmp_path: Path, copies: type[Copy]) -> None:
    copies.write = lambda self, data, samples, progress: data  # type: ignore[assignment, method-assign]
    model = _model(["n", 3], helper.make_node("Exp", ["x"], ["out"]))
    assert make(model, "copy", tmp_path / "out").error_std == 0.0


def test_a_writer_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edge_export.executorch.artifacts", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ConfigError, match=r"'pte' needs .*, which is not installed; run: pip install 'maskfleet\[author"
    ):
        writer("pte")


def test_the_proof_runs_the_model_once_on_each_probe() -> None:
    seen: list[str] = []
    given = list(probes((3,), "float32"))

    def reference(x: Any) -> Any:
        seen.extend(p.name for p in given if np.array_equal(p.x, x))
        return x

    making._prove(reference, lambda x: x, given, "copy")
    assert seen == [p.name for p in given]


ENGINE = """
import os
import numpy as np


class Engine:
    exact, native = True, True

    def write(self, model, samples, progress):
        return {data!r}

    def open(self, data):
        def run(x):
            print("an engine's own line")
            if data == b"crash":
                os.abort()
            raise RuntimeError("operator aten::odd is not known")
        if data == b"closed":
            raise ValueError("no such format")
        return run
"""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"crash", "its engine crashed with SIGABRT"),
        (b"odd", "RuntimeError: operator aten::odd is not known"),
        (b"closed", "ValueError: no such format"),
    ],
)
def test_an_engine_that_crashes_or_fails_ends_in_a_sentence(
    data: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_engine.py").write_text(ENGINE.format(data=data))
    (tmp_path / "odd-1.dist-info").mkdir()
    (tmp_path / "odd-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (tmp_path / "odd-1.dist-info" / "entry_points.txt").write_text("[maskfleet.artifacts]\nodd = odd_engine:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "odd_engine", raising=False)
    with pytest.raises(CompactionError, match=f"the odd artifact does not run: {said}; keep the ONNX model"):
        make(personal(), "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_product_with_a_matrix_for_each_channel_stays_float(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = {"w": (4, 3, 3, 3), "m": (1, 4, 8, 5), "v": (160, 5)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["a", "m"], ["b"]),
        helper.make_node("Flatten", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["logits"]),
    ]
    ends = [("x", ["n", 3, 8, 8]), ("logits", ["n", 5])]
    graph = helper.make_graph(
        nodes,
        "g",
        *([helper.make_tensor_value_info(k, TensorProto.FLOAT, shape)] for k, shape in ends),
        [numpy_helper.from_array(0.3 * rng.standard_normal(v).astype(np.float32), k) for k, v in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    x, out = rng.standard_normal((64, 3, 8, 8)).astype(np.float32), tmp_path / "int8.onnx"
    assert make(model, "int8", out, x).error_rms < 0.1
    kept = {t.name: t.data_type for t in onnx.load(out).graph.initializer}
    assert kept["m"] == TensorProto.FLOAT
    assert kept["v_quantized"] == TensorProto.INT8


def test_a_matrix_that_a_second_layer_reads_transposed_is_int8_in_both(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["b", "t"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3, 8])],
        [numpy_helper.from_array(0.3 * rng.standard_normal((8, 32)).astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    x, out = rng.standard_normal((64, 3, 8)).astype(np.float32), tmp_path / "int8.onnx"
    make(model, "int8", out, x)
    stored = {t.name: (t.data_type, tuple(t.dims)) for t in onnx.load(out).graph.initializer}
    assert stored["w_quantized"] == (TensorProto.INT8, (8, 32))
    assert stored["t_quantized"] == (TensorProto.INT8, (32, 8))


def test_samples_are_asked_for_where_they_are_needed_and_checked(tmp_path: Path, copies: type[Copy]) -> None:
    out = tmp_path / "out"
    copies.exact = False
    with pytest.raises(DataError, match="needs samples of the device; name its data with --data"):
        make(personal(), "copy", out)
    copies.exact = True
    with pytest.raises(DataError, match="needs samples"):  # integers: no probe can be drawn
        make(personal(whole=True), "copy", out)
    with pytest.raises(DataError, match=r"float32\[200, 1, 8, 8\], the model takes \[n, 5\]"):
        make(personal(whole=True), "copy", out, samples())
    with pytest.raises(BundleError, match=r"cannot open the model: .*name a personal\.onnx"):
        make(b"no model", "copy", out)


def _model(output: list[int | str], *nodes: onnx.NodeProto, more: tuple[str, ...] = (), takes: int = 3) -> bytes:
    """A graph of `nodes` from x [n, takes] to `out` of shape `output`, and `more` outputs beside it."""
    made = [
        helper.make_tensor_value_info(k, TensorProto.FLOAT, s)
        for k, s in [("out", output), *((m, ["n", 3]) for m in more)]
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", takes])
    weight = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    graph = helper.make_graph(nodes, "g", [x], made, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            _model([], helper.make_node("ReduceMean", ["x"], ["out"], keepdims=0)),
            r"outputs are out \[\], not one value",
        ),
        (
            _model(
                ["n", 3], helper.make_node("Relu", ["x"], ["out"]), helper.make_node("Neg", ["x"], ["b"]), more=("b",)
            ),
            r"outputs are out \['n', 3\], b \['n', 3\]",
        ),
        (
            _model([1, 3], helper.make_node("ReduceMean", ["x"], ["out"], keepdims=1)),
            r"the model gives \[1, 1\] for 16 samples",
        ),
    ],
)
def test_a_model_of_no_or_several_outputs_a_sample_is_refused(
    tmp_path: Path, copies: type[Copy], model: bytes, sentence: str
) -> None:
    copies.write = lambda self, data, samples, progress: data  # type: ignore[assignment]
    with pytest.raises(BundleError, match=sentence):
        make(model, "copy", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_samples_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    x = samples()
    x[3, 0, 1, 1] = np.nan
    with pytest.raises(DataError, match="sample 3 holds NaN or infinity; clean the data"):
        make(personal(), "int8", tmp_path / "out", x)


def test_an_unknown_kind_lists_those_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no artifact 'abacus'.*choose one of int8, pte, pte-int8"):
        make(personal(), "abacus", tmp_path / "out")


def test_the_command_writes_the_file_and_prints_its_size_and_error(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(artifact)
    (tmp_path / "personal.onnx").write_bytes(personal())
    np.savez(tmp_path / "d.npz", x=samples(), y=np.zeros(200, np.int64))
    options = ["--kind", "int8", "-o", "small.onnx", "--data", "d.npz"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(app, ["personal.onnx", *options])
        assert done.exit_code == 0, done.output
        size = (tmp_path / "small.onnx").stat().st_size
        assert f"small.onnx: {size:,} bytes" in done.output
        assert "the worst output is off by" in done.output
        missing = CliRunner().invoke(app, ["absent.onnx", *options])
        assert isinstance(missing.exception, ConfigError)


def test_a_file_of_raw_samples_calibrates_with_what_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw samples lie outside what the model was trained on, so their ranges would waste most of int8's steps."""
    seen: list[np.ndarray] = []
    write = Int8.write
    monkeypatch.setattr(Int8, "write", lambda self, m, x, p: seen.append(x) or write(self, m, x, p))
    takes = Input(shape=(1, 8, 8), normalisation=Normalisation(mean=(128.0,), std=(64.0,)))
    manifest = Bundle.open(packaged()["digits"]).manifest.model_copy(update={"input": takes})
    model, data, out = tmp_path / "personal.onnx", tmp_path / "raw.npz", tmp_path / "int8.onnx"
    model.write_bytes(personal())
    describe(model, card(manifest, federation="f"))
    app = typer.Typer()
    app.command()(artifact)

    def calibrated(**arrays: np.ndarray) -> np.ndarray:
        np.savez(data, y=np.zeros(200, np.int64), **arrays)
        given = [str(model), "--kind", "int8", "-o", str(out), "--data", str(data)]
        done = CliRunner().invoke(app, given, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return seen[-1]

    raw = np.random.default_rng(2).integers(0, 256, (200, 1, 8, 8)).astype(np.uint8)
    taken = ((raw - 128.0) / 64.0).astype(np.float32)
    assert calibrated(x=raw).tobytes() == taken[np.linspace(0, 199, 200).astype(int)[::2]].tobytes()
    assert calibrated(x=taken + 1, normalised=np.True_).tobytes() == (taken + 1)[::2].tobytes()
    entries = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert read(entries, "int8").input == takes  # so that `maskfleet predict` runs the artifact too
