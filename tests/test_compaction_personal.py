"""A personal model in ONNX: equal to the masked model, smaller, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from personal_models import MLP, MLP_VALUES, STILL, N, X, in_float64, run, still
from sequential_bundle import (
    Act,
    Conv,
    Flatten,
    Linear,
    Norm,
    Pool,
    Step,
    personal_of,
    random_personal,
    sequential_bundle,
)

import edge_client.compaction.personal as personal_module
from edge_client import equality
from edge_client.bundle import Bundle, Input, views
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.compaction.preparation import dense
from edge_client.compaction.smaller import Smaller
from edge_client.compaction.surgery import freeze, widen
from edge_client.compaction.tuning import aligned
from edge_client.equality import TOLERANCE
from edge_client.errors import BundleError, CompactionError, StateError
from edge_client.task import Personal


def test_an_mlp_loses_a_constant_unit_and_an_unread_one(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    report = write_personal(bundle, personal_of(bundle, MLP_VALUES), tmp_path / "personal.onnx")
    assert report.parameters_dense == 3 * 2 + 3 + 2 * 3 + 2
    assert report.parameters_live == 4 + 2 + 3 + 1
    assert report.parameters_compact == 2 + 1 + 2 + 2
    assert report.layers["linear0.weight"] == (3, 1)
    # by hand: h = relu(1*1 + 2*1 + .5) = 3.5; logits = [3.5 + 10*2 + .25, -20*2]
    np.testing.assert_allclose(run(tmp_path / "personal.onnx", np.ones((1, 2), np.float32)), [[23.75, -40.0]])


def forgetful(lost: float) -> Callable[..., Smaller]:
    """`aligned` with a part of the last layer's bias lost: what a compactor that forgets constants does."""

    def made(*given: Any) -> Smaller:
        result = aligned(*given)
        last = [n for n in result.model.graph.node if n.op_type == "Gemm"][-1]
        (bias,) = (t for t in result.model.graph.initializer if t.name == last.input[2])
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * np.float32(1 - lost), bias.name))
        return result

    return made


def test_dropping_the_constant_instead_of_folding_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is 20 here, and no file appears."""
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    monkeypatch.setattr(personal_module, "aligned", forgetful(1.0))
    with pytest.raises(CompactionError, match=r"differ from the masked model's by \d+"):
        write_personal(bundle, personal_of(bundle, MLP_VALUES), tmp_path / "personal.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.onnx", "manifest.json"]


def test_a_fault_of_compaction_itself_refuses_the_compact_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the device keeps its dense model and says why."""

    def faulty(*given: Any) -> Smaller:
        raise KeyError("v21")

    bundle = sequential_bundle(tmp_path, (2,), MLP)
    monkeypatch.setattr(personal_module, "aligned", faulty)
    with pytest.raises(CompactionError, match=r"does not handle this graph \(KeyError: 'v21'\); keep the dense model"):
        write_personal(bundle, personal_of(bundle, MLP_VALUES), tmp_path / "personal.onnx")


@pytest.mark.parametrize("padding", [0, 1])
def test_a_constant_dropped_from_a_cnn_would_be_wrong_by_more_than_a_tenth(tmp_path: Path, padding: int) -> None:
    steps = (Conv(4, padding=1), Norm(), Act(), Conv(3, padding=padding), Act(), Pool("avg", 2), Flatten(), Linear(2))
    bundle = sequential_bundle(tmp_path, (1, 6, 6), steps)
    personal = random_personal(bundle, 5, 1.0, 1.0)
    tensors = views(bundle.manifest.parameters, personal.parameters)
    tensors["conv0.weight"][:3] = 0
    tensors["norm1.weight"][:] = 1
    tensors["conv0.bias"][:], tensors["norm1.bias"][:] = 0.0, [0.5, 1.0, -1.0, 0.1]
    personal.buffers[:4], personal.buffers[4:] = 0.0, 1.0
    personal = replace(personal, mask=None)
    report = write_personal(bundle, personal, tmp_path / "personal.onnx")
    # only the live filter stays: behind padding the constants' border is a map
    assert report.layers["conv0.weight"] == (4, 1)
    tensors["norm1.bias"][:3] = 0.0  # the constants forgotten
    write_dense(bundle, personal, tmp_path / "wrong.onnx")
    x = np.random.default_rng(0).standard_normal((8, 1, 6, 6)).astype(np.float32)
    assert np.abs(run(tmp_path / "wrong.onnx", x) - run(tmp_path / "personal.onnx", x)).max() > 0.1


def test_a_layer_without_bias_gets_one_only_when_a_constant_is_folded_into_it(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (2,), (Linear(3), Act(), Linear(2, bias=False)))
    values = {k: v for k, v in MLP_VALUES.items() if k != "linear1.bias"}
    report = write_personal(bundle, personal_of(bundle, values), tmp_path / "with.onnx")
    assert report.parameters_compact == 2 + 1 + 2 + 2
    np.testing.assert_allclose(run(tmp_path / "with.onnx", np.ones((1, 2), np.float32)), [[23.5, -40.0]])
    write_personal(bundle, personal_of(bundle, {**values, "linear0.bias": [0.5, -2, 0]}), tmp_path / "without.onnx")
    gemms = [n for n in onnx.load(tmp_path / "without.onnx").graph.node if n.op_type == "Gemm"]
    assert [len(n.input) for n in gemms] == [3, 2]


def test_batch_norm_becomes_part_of_the_layer_before_it(tmp_path: Path) -> None:
    bundle = sequential_bundle(
        tmp_path, (1, 6, 6), (Conv(4, bias=False), Norm(), Act(), Flatten(), Linear(3), Norm(), Act(), Linear(2))
    )
    write_personal(bundle, random_personal(bundle, 1, 1.0, 1.0), tmp_path / "personal.onnx")
    graph = onnx.load(tmp_path / "personal.onnx").graph
    assert [n.op_type for n in graph.node] == ["Conv", "Relu", "Flatten", "Gemm", "Relu", "Gemm"]
    assert [i.name for i in graph.input] == ["x"]
    assert not graph.value_info


def test_a_model_whose_layers_die_keeps_one_channel_and_its_constant_logits(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (1, 6, 6), (Conv(4, padding=1), Act(), Conv(4), Act(), Flatten(), Linear(2)))
    personal = personal_of(bundle, {"conv1.bias": [1, 2, 3, -4], "linear2.weight": np.ones((2, 64))})
    report = write_personal(bundle, personal, tmp_path / "personal.onnx")
    assert report.layers["conv0.weight"] == (4, 0)
    logits = run(tmp_path / "personal.onnx", np.ones((3, 1, 6, 6), np.float32))
    np.testing.assert_allclose(logits, np.full((3, 2), (1 + 2 + 3) * 16))


def test_the_dense_model_has_the_same_logits_and_every_channel(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    personal = personal_of(bundle, MLP_VALUES)
    write_dense(bundle, personal, tmp_path / "dense.onnx")
    write_personal(bundle, personal, tmp_path / "personal.onnx")
    assert (tmp_path / "dense.onnx").stat().st_size > (tmp_path / "personal.onnx").stat().st_size
    x = np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path / "dense.onnx", x), run(tmp_path / "personal.onnx", x), atol=1e-5)
    weights = {t.name: tuple(t.dims) for t in onnx.load(tmp_path / "dense.onnx").graph.initializer}
    assert weights["linear0.weight"] == (3, 2)


def test_values_that_do_not_fit_are_refused_and_say_why(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    good = personal_of(bundle, MLP_VALUES)
    path = tmp_path / "personal.onnx"
    with pytest.raises(CompactionError, match=r"float32\[16\], the bundle float32\[17\]"):
        write_personal(bundle, replace(good, parameters=good.parameters[:-1]), path)
    bad = good.parameters.copy()
    bad[0] = np.nan
    with pytest.raises(CompactionError, match="1 of the parameters are NaN"):
        write_personal(bundle, Personal(bad, good.buffers), path)
    with pytest.raises(CompactionError, match="masked parameters are not zero"):
        write_personal(bundle, replace(good, mask=np.zeros(17, bool)), path)
    with pytest.raises(CompactionError, match="mask is bool"):
        write_personal(bundle, replace(good, mask=np.zeros(3, bool)), path)
    with pytest.raises(StateError, match="another place for the model"):
        write_personal(bundle, good, tmp_path / "no such folder" / "personal.onnx")
    assert not path.exists()
    (tmp_path / "eval.onnx").write_bytes(b"x")
    with pytest.raises(BundleError, match="SHA-256"):
        write_personal(bundle, good, path)


def in_float32(bundle: Bundle, personal: Personal, x: np.ndarray) -> np.ndarray:
    """The masked model's outputs as a trainer computes them."""
    session = ort.InferenceSession(str(bundle.part("eval.onnx")), providers=["CPUExecutionProvider"])
    tensors = {
        **views(bundle.manifest.parameters, personal.parameters),
        **views(bundle.manifest.buffers, personal.buffers),
        "x": x,
    }
    return session.run(None, {i.name: tensors[i.name] for i in session.get_inputs()})[0]


@pytest.mark.parametrize("seed", STILL)
def test_units_that_never_moved_do_not_keep_a_model_from_being_compacted(tmp_path: Path, seed: int) -> None:
    bundle, personal = still(tmp_path, seed)
    right = in_float64(bundle, personal, X)
    assert np.abs(in_float32(bundle, personal, X) - right).max() > TOLERANCE
    report = write_personal(bundle, personal, tmp_path / "personal.onnx", X)
    assert report.parameters_compact < report.parameters_dense / 4
    assert report.max_abs_diff <= TOLERANCE / 2
    assert np.abs(run(tmp_path / "personal.onnx", X) - right).max() <= TOLERANCE / 2


@pytest.mark.parametrize("lost", [1.0, 1e-4])
@pytest.mark.parametrize("seed", STILL)
def test_a_part_of_a_constant_lost_between_units_that_never_moved_is_refused(
    tmp_path: Path, seed: int, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, personal = still(tmp_path, seed)
    monkeypatch.setattr(personal_module, "aligned", forgetful(lost))
    with pytest.raises(CompactionError, match="outputs differ"):
        write_personal(bundle, personal, tmp_path / "personal.onnx", X)


def test_a_bias_is_rounded_after_the_batch_norm_behind_it_is_folded(tmp_path: Path) -> None:
    """By hand: 1 - (1 - 2**-26) = 2**-26, times 1 / sqrt(1e-5): float32 would make 0 of it."""
    bundle = sequential_bundle(tmp_path, (1,), (Linear(1), N, Linear(2)))
    model = onnx.load(bundle.part("eval.onnx"))
    tensors = {
        "linear0.weight": np.ones((1, 1), np.float32),
        "linear0.bias": np.array([1 + 2.0**-26]),
        "norm1.weight": np.ones(1, np.float32),
        "norm1.bias": np.zeros(1, np.float32),
        "norm1.running_mean": np.ones(1, np.float32),
        "norm1.running_var": np.zeros(1, np.float32),
        "linear1.weight": np.ones((2, 1), np.float32),
        "linear1.bias": np.zeros(2),
    }
    graph = dense(freeze(model, tensors)).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(values[graph.node[0].input[2]], 2.0**-26 / np.sqrt(1e-5), rtol=1e-6)


def test_the_dense_yardstick_of_latency_never_costs_the_compact_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, personal = still(tmp_path, STILL[0])
    monkeypatch.setattr(equality, "TOLERANCE", 0.0)
    monkeypatch.setattr(equality, "ROUNDINGS", 0.0)
    write_dense(bundle, personal, tmp_path / "dense.onnx", X)
    assert "BatchNormalization" in {n.op_type for n in onnx.load(tmp_path / "dense.onnx").graph.node}


def test_the_samples_given_are_probed_and_a_model_of_integers_needs_them(tmp_path: Path) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    personal = personal_of(bundle, MLP_VALUES)
    with pytest.raises(CompactionError, match="on the given samples the compact model's outputs differ"):
        write_personal(bundle, personal, tmp_path / "personal.onnx", np.full((1, 2), np.nan))
    with pytest.raises(CompactionError, match="does not run on the given samples"):
        write_personal(bundle, personal, tmp_path / "personal.onnx", np.zeros((1, 3)))
    integers = bundle.manifest.model_copy(update={"input": Input(shape=(2,), dtype="int64")})
    with pytest.raises(CompactionError, match="give samples to check on"):
        write_personal(replace(bundle, manifest=integers), personal, tmp_path / "personal.onnx")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = sequential_bundle(tmp_path, (2,), MLP)
    path = tmp_path / "personal.onnx"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        write_personal(bundle, personal_of(bundle, MLP_VALUES), path)
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


@st.composite
def networks(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """A random MLP or CNN on small inputs."""
    act = st.sampled_from(["relu", "relu6", "leaky_relu", "tanh", "sigmoid"]).map(Act)
    size, steps = 9, list[Step]()
    shape: tuple[int, ...] = (draw(st.integers(1, 6)),)
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 2)), size, size)
        for _ in range(draw(st.integers(1, 3))):
            conv = Conv(
                draw(st.integers(1, 6)),
                draw(st.sampled_from([1, 2, 3])),
                draw(st.integers(1, 2)) if size > 6 else 1,
                draw(st.integers(0, 2)),
                draw(st.integers(1, 2)) if size > 6 else 1,
                draw(st.booleans()),
            )
            reach = conv.dilation * (conv.kernel - 1)
            if size + 2 * conv.padding <= reach:
                continue
            size = (size + 2 * conv.padding - reach - 1) // conv.stride + 1
            steps += [conv, *draw(st.sampled_from([[], [Norm()]])), draw(act)]
            if size >= 4 and draw(st.booleans()):
                pool = Pool(draw(st.sampled_from(["max", "avg"])), 2, draw(st.integers(0, 1)), draw(st.booleans()))
                steps.append(pool)
                size = (size + 2 * pool.padding - 2) // 2 + 1
        steps.append(Flatten())
    for _ in range(draw(st.integers(0, 2))):
        steps += [
            Linear(draw(st.integers(1, 8)), draw(st.booleans())),
            *draw(st.sampled_from([[], [Norm()]])),
            draw(act),
        ]
    return shape, (*steps, Linear(draw(st.integers(2, 4)), draw(st.booleans())))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.integers(0, 2**32), st.sampled_from([0.3, 0.6, 1.0]), st.sampled_from([0.1, 0.5, 1.0]))
def test_any_compact_model_equals_its_masked_model(
    network: tuple[tuple[int, ...], tuple[Step, ...]], seed: int, unit_keep: float, weight_keep: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = sequential_bundle(Path(folder), *network)
        personal = random_personal(bundle, seed, unit_keep, weight_keep)
        report = write_personal(bundle, personal, Path(folder) / "personal.onnx")
        x = np.random.default_rng(seed).standard_normal((16, *network[0])).astype(np.float32)
        right, found = in_float64(bundle, personal, x), run(Path(folder) / "personal.onnx", x)
        rounding = np.abs(in_float32(bundle, personal, x) - right).max()  # of the dense model
    assert report.max_abs_diff <= TOLERANCE * 10
    scale = np.maximum(right.std(axis=0), equality.FAR * np.abs(right).max(axis=0))
    assert (np.abs(found - right) <= np.maximum(TOLERANCE * scale, 4 * rounding + 1e-7)).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.integers(0, 2**32))
def test_the_widened_graph_is_the_masked_model_and_no_less_exact(
    network: tuple[tuple[int, ...], tuple[Step, ...]], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = sequential_bundle(Path(folder), *network)
        personal = random_personal(bundle, seed, 0.6, 0.5)
        x = np.random.default_rng(seed).standard_normal((8, *network[0])).astype(np.float32)
        right, before = in_float64(bundle, personal, x), in_float32(bundle, personal, x)
        wide = widen(onnx.load(bundle.part("eval.onnx"))).SerializeToString()
    onnx.checker.check_model(wide, full_check=True)
    session = ort.InferenceSession(wide, providers=["CPUExecutionProvider"])
    tensors = {
        **views(bundle.manifest.parameters, personal.parameters),
        **views(bundle.manifest.buffers, personal.buffers),
        "x": x,
    }
    found = session.run(None, {i.name: tensors[i.name] for i in session.get_inputs()})[0]
    scale = max(1.0, float(np.abs(right).max()))
    assert np.abs(found - right).max() <= max(2e-6 * scale, np.abs(before - right).max())
