"""A personal model says of itself what it takes and gives, and runs on samples with nothing but its file."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_client.bundle import Init, Input, Manifest, Normalisation, Tensor
from edge_client.card import card, describe, read
from edge_client.commands.predict import predict, predict_file
from edge_client.data import DataFile, fit
from edge_client.errors import BundleError, ConfigError, DataError
from edge_client.targets import Classification, Regression, Sequence, Target

RAW = Normalisation(mean=(1.0, 2.0), std=(2.0, 4.0))


def manifest(target: Target, names: tuple[str, ...] = (), how: Normalisation | None = None) -> Manifest:
    row = Tensor(name="w", shape=(1,), offset=0, init=Init(kind="constant", scale=1.0))
    takes = Input(shape=(2,), normalisation=how)
    return Manifest(name="twice", input=takes, target=target, class_names=names, parameters=(row,), layers=())


def model(path: Path, target: Target, names: tuple[str, ...] = (), how: Normalisation | None = None) -> Path:
    """A file whose outputs are its two inputs, shaped as the target has them, with its card."""
    made = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["out"])],
        "twice",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", *target.output])],
        [helper.make_tensor("shape", TensorProto.INT64, [1 + len(target.output)], [-1, *target.output])],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=8), path)
    facts = card(manifest(target, names, how), federation="fleet-1", licence="for tests", source="")
    describe(path, facts)
    return path


def data(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


X = np.array([[0.0, 3.0], [2.0, 0.0], [0.0, 1.0]], np.float32)


def test_a_file_says_where_it_is_from_and_reads_back_what_it_takes(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", Classification(classes=2), ("no", "yes"), RAW)
    props = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert (props["maskfleet.federation"], props["maskfleet.licence"]) == ("fleet-1", "for tests")
    assert "maskfleet.source" not in props
    assert props["maskfleet.version"]
    found = read(props, "m.onnx")
    assert (found.input.shape, found.input.normalisation, found.class_names) == ((2,), RAW, ("no", "yes"))
    assert found.target == Classification(classes=2)
    for broken in ({}, {**props, "maskfleet.target": '{"kind": "oracle"}'}):
        with pytest.raises(BundleError, match=r"m\.onnx.*metadata"):
            read(broken, "m.onnx")


def test_classes_have_their_names_probabilities_and_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.onnx", Classification(classes=2), ("no", "yes"))
    file = data(tmp_path / "d.npz", x=X, y=np.array([1, 0, 0]))
    predict(path, file)
    probability = 1 / (1 + np.exp(-np.array([3.0, 2.0, 1.0])))
    assert capsys.readouterr().out.splitlines() == [
        f"0: yes {probability[0]:.3f}",
        f"1: no {probability[1]:.3f}",
        f"2: yes {probability[2]:.3f}",
        "score 0.6667 on 3 samples",
    ]
    predict(path, file, out=tmp_path / "p.csv", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["classes"], said["names"], said["score"]) == ([1, 0, 1], ["yes", "no", "yes"], pytest.approx(2 / 3))
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [(r["class"], r["name"]) for r in rows] == [("1", "yes"), ("0", "no"), ("1", "yes")]
    assert [float(r["probability"]) for r in rows] == pytest.approx(probability, abs=1e-6)
    predict(path, file, out=tmp_path / "p.npz")
    assert "3 predictions in" in capsys.readouterr().out
    with np.load(tmp_path / "p.npz") as z:
        np.testing.assert_array_equal(z["outputs"], X)


def test_test_samples_in_the_file_have_a_score_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path / "m.onnx", Classification(classes=2), ("no", "yes"))
    test = {"x_test": X[:2], "y_test": np.array([0, 0])}
    file = data(tmp_path / "d.npz", x=X, y=np.array([1, 0, 0]), **test)
    predict(path, file)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "score 0.6667 on 3 samples",
        "score 0.5000 on the file's 2 test samples",
    ]
    predict(path, file, as_json=True)
    assert {"test_samples": 2, "test_score": 0.5}.items() <= json.loads(capsys.readouterr().out).items()
    predict(path, data(tmp_path / "none.npz", x=X, y=np.array([1, 0, 0]), x_test=X[:0], y_test=np.array([], np.int64)))
    assert "test samples" not in capsys.readouterr().out
    for i, (wrong, said) in enumerate([
        ({"y_test": np.array([0])}, "2 samples in x_test but 1 labels in y_test"),
        ({"y_test": np.array([0, 7])}, "y_test"),
        ({"x_test": np.float32(3)}, r"x_test has shape \(\)"),
        ({"x_test": X[:2, :1]}, r"x_test has shape \(2, 1\)"),
    ]):  # fmt: skip
        found = predict_file(path, data(tmp_path / f"wrong{i}.npz", x=X, **{**test, **wrong}))
        assert found.tested is None
        assert len(found.outputs) == len(X)
        assert re.search(f"{said}.*the test samples have no score", found.doubts[-1])
    alone = data(tmp_path / "alone.npz", x=X, x_test=X[:2])
    assert predict_file(path, alone).tested is None


def test_raw_samples_are_normalised_once(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", Regression(outputs=2), how=RAW)
    due = (X - np.array([1.0, 2.0])) / np.array([2.0, 4.0])
    np.testing.assert_allclose(predict_file(path, data(tmp_path / "raw.npz", x=X)).outputs, due)
    done = data(tmp_path / "done.npz", x=due.astype(np.float32), normalised=True)
    np.testing.assert_allclose(predict_file(path, done).outputs, due, rtol=1e-6)


def test_a_device_s_file_is_normalised_as_prediction_does(tmp_path: Path) -> None:
    m = manifest(Regression(outputs=2), how=RAW)
    parts = {"x_val": X[:1], "y_val": X[:1], "x_test": X[1:2], "y_test": X[1:2]}
    found = fit(DataFile(tmp_path, {"x": X, "y": X, **parts}), m)
    due = (X - np.array([1.0, 2.0])) / np.array([2.0, 4.0])
    for got, wanted in ((found.x, due), (found.x_val, due[:1]), (found.x_test, due[1:2])):
        np.testing.assert_allclose(got, wanted)
    done = fit(DataFile(tmp_path, {"x": X, "y": X, **parts, "normalised": np.True_}), m)
    np.testing.assert_array_equal(done.x, X)
    with pytest.raises(DataError, match="has shape"):
        fit(DataFile(tmp_path, {"x": X[:, :1], "y": X}), m)


def test_samples_on_another_scale_are_predicted_with_a_warning_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model(tmp_path / "m.onnx", Regression(outputs=2), how=RAW)
    predict(path, data(tmp_path / "right.npz", x=X))
    assert not capsys.readouterr().err
    predict(path, data(tmp_path / "far.npz", x=100 * X))
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3
    assert printed.err.startswith(f"maskfleet: warning: {tmp_path}/far.npz: as the model takes them, samples lie ")


def test_a_channel_of_an_image_is_a_feature() -> None:
    how = Normalisation(mean=(1.0, 10.0), std=(1.0, 2.0))
    x = np.arange(16.0).reshape(2, 2, 2, 2)
    made = how.apply(x)
    np.testing.assert_array_equal(made[:, 0], x[:, 0] - 1)
    np.testing.assert_array_equal(made[:, 1], (x[:, 1] - 10) / 2)
    with pytest.raises(ValueError, match="3 features"):
        Input(shape=(3, 2, 2), normalisation=how)
    with pytest.raises(ValueError, match="int64"):
        Input(shape=(2,), dtype="int64", normalisation=how)
    with pytest.raises(ValueError, match="leave `between` out"):
        Input(shape=(2,), normalisation=how, between=(0.0, 1.0))
    with pytest.raises(ValueError, match="the lowest value, then the highest"):
        Input(shape=(2,), between=(1.0, 0.0))


def test_steps_and_numbers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = model(tmp_path / "s.onnx", Sequence(steps=1, classes=2), ("a", "b"))
    predict(steps, data(tmp_path / "s.npz", x=X, y=np.array([[1], [0], [1]])), out=tmp_path / "s.csv")
    assert "score 1.0000 on 3 samples" in capsys.readouterr().out
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert lines[:2] == ["sample,step,class,name,probability", "0,0,1,b,0.952574"]
    predict(steps, tmp_path / "s.npz")
    assert capsys.readouterr().out.startswith("0: b (mean probability 0.953)")
    numbers = model(tmp_path / "r.onnx", Regression(outputs=2))
    predict(numbers, data(tmp_path / "r.npz", x=np.tile(X, (10, 1))))
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("0: 0 3", 21, "... and 10 more; --out FILE.csv writes all")


def test_what_does_not_fit_is_a_sentence(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", Classification(classes=2))
    fits = data(tmp_path / "fits.npz", x=X)
    for arrays, words in (
        ({"y": np.zeros(3)}, "lacks the array x"),
        ({"x": X[:, :1]}, r"shape \(3, 1\), the model takes \[n, 2\]"),
        ({"x": X[:0]}, "n of 1 at least"),
        ({"x": np.full((1, 2), np.nan)}, "sample 0 holds NaN"),
        ({"x": X.astype("U1")}, "give numbers"),
        ({"x": X, "y": np.array([0, 1, 2])}, "outside 0..1"),
        ({"x": X, "y": np.array([0, 1])}, "3 samples in x but 2 labels in y"),
    ):
        with pytest.raises(DataError, match=words):
            predict_file(path, data(tmp_path / "bad.npz", **arrays))
    with pytest.raises(ConfigError, match=r"\.npz or \.csv"):
        predict(path, fits, out=tmp_path / "p.txt")
    with pytest.raises(ConfigError, match="there is no file"):
        predict_file(tmp_path / "none.onnx", fits)
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with pytest.raises(BundleError, match="cannot open"):
        predict_file(tmp_path / "junk.onnx", fits)
    model(tmp_path / "other.onnx", Classification(classes=2))
    describe(tmp_path / "other.onnx", card(manifest(Classification(classes=3))))
    with pytest.raises(BundleError, match="metadata says"):
        predict_file(tmp_path / "other.onnx", fits)


def test_the_command_runs_without_a_server_or_torch(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", Classification(classes=2), ("\x1b[31mred", "b"))
    file = data(tmp_path / "d.npz", x=X[1:2])
    code = (
        "import sys, atexit\nfrom edge_client.cli import main\n"
        "atexit.register(lambda: print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'fastapi', 'coord_server', 'edge_bench'})))\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "predict", str(path), str(file)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0: \N{REPLACEMENT CHARACTER}[31mred 0.881", "[]"]
