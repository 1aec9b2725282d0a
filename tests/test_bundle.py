"""Manifest, flat layout, weights from a seed, and parts that do not match their digest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter
from safetensors.numpy import save_file
from sequential_bundle import small_manifest

from edge_client.bundle import (
    MANIFEST,
    MAX_TENSORS,
    Bundle,
    Init,
    Layer,
    Manifest,
    Part,
    Tensor,
    digest,
    generate,
    parse_manifest,
    views,
)
from edge_client.errors import BundleError


def test_a_manifest_survives_its_json_and_keeps_its_digest() -> None:
    manifest = small_manifest()
    assert parse_manifest(manifest.to_bytes()) == manifest
    assert digest(parse_manifest(manifest.to_bytes()).to_bytes()) == digest(manifest.to_bytes())


def test_two_classes_of_one_name_are_refused() -> None:
    assert small_manifest(class_names=("no", "yes")).class_names == ("no", "yes")
    with pytest.raises(ValueError, match="'no' is the name of two classes"):
        small_manifest(class_names=("no", "no"))


def test_sizes_follow_from_the_tables() -> None:
    assert (small_manifest().d, small_manifest().buffers_d) == (8, 2)


def test_views_share_memory_with_the_flat_vector() -> None:
    flat = np.zeros(8, np.float32)
    views(small_manifest().parameters, flat)["fc.weight"][1, 2] = 3.0
    assert flat[5] == 3.0


def test_weights_from_a_seed_follow_the_documented_formula() -> None:
    table = small_manifest().parameters
    u = counter.uniform(counter.key(5, "weights", "fc.weight"), 6)
    expected = np.float32(0.5 * (2.0 * u - 1.0))
    assert np.array_equal(generate(table, 5)[:6], expected)
    assert generate(table, 5)[6:].tolist() == [0.25, 0.25]


def test_signed_constant_weights_take_both_signs() -> None:
    table = (Tensor(name="w", shape=(1000,), offset=0, init=Init(kind="sign", scale=2.0)),)
    w = generate(table, 1)
    assert set(w.tolist()) == {-2.0, 2.0}
    assert 400 < (w > 0).sum() < 600


def test_a_gap_in_the_table_is_refused() -> None:
    table = (Tensor(name="a", shape=(2,), offset=1, init=Init(kind="constant", scale=0)),)
    with pytest.raises(ValueError, match="starts at 1"):
        small_manifest(parameters=table, layers=())


def test_a_layer_of_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        small_manifest(layers=(Layer(name="l", kind="linear", weights=("nowhere",)),))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"format": 2}'])
def test_malformed_manifests_raise_a_bundle_error(data: bytes) -> None:
    with pytest.raises(BundleError, match="malformed"):
        parse_manifest(data)


def test_a_manifest_that_has_a_key_twice_is_refused() -> None:
    """Readers differ in which of the two they take, and the digest would vouch for both models."""
    text = small_manifest().to_bytes()
    with pytest.raises(BundleError, match="malformed: the key 'name' is there twice; export"):
        parse_manifest(text.replace(b"{", b'{"name": "other", ', 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "format = 99.*install the version of maskfleet that wrote it, or export the bundle again"),
        (
            {"parameterz": [{"name": "a"}, {"name": "b"}]},
            "at parameterz: there is no such setting; did you mean 'parameters'",
        ),
    ],
)
def test_a_manifest_of_another_version_and_a_misspelt_field_are_named(change: dict[str, Any], words: str) -> None:
    m = small_manifest().model_dump(mode="json")
    if "parameterz" in change:
        del m["parameters"]
    with pytest.raises(BundleError, match=words):
        parse_manifest(json.dumps(m | change).encode())


def hostile(**changed: Any) -> bytes:
    """A manifest of one tensor, which no constructor would make."""
    tensor = {"name": "a", "shape": [2], "offset": 0, "init": {"kind": "constant", "scale": 0.0}}
    whole = json.loads(small_manifest(parameters=(), buffers=(), layers=()).to_bytes())
    tensor.update({k: v for k, v in changed.items() if k in tensor})
    return json.dumps({**whole, "parameters": [tensor], **{k: v for k, v in changed.items() if k in whole}}).encode()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"shape": [1] * 9}, "parameters.0.shape .*at most 8 items"),
        ({"shape": [2**32 + 1]}, "parameters.0.shape.0 .*less than or equal to 4294967296"),
        ({"shape": [2**32] * 8}, f"tensor 'a' ends at {2**256}, at most 4294967296"),
        ({"offset": 10**400}, "parameters.0.offset"),
        ({"input": {"shape": [2**32] * 8}}, "has more than 4294967296 values"),
        ({"input": {"shape": [1] * 100_000}}, "input.shape .*at most 8 items"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_they_are_used(changed: dict[str, Any], why: str) -> None:
    parse_manifest(hostile())
    with pytest.raises(BundleError, match=why):
        parse_manifest(hostile(**changed))


def test_the_rows_of_a_table_are_counted() -> None:
    row = {"name": "a", "shape": [1], "offset": 0, "init": {"kind": "constant", "scale": 0.0}}
    rows = [{**row, "name": str(i), "offset": i} for i in range(MAX_TENSORS + 1)]
    assert parse_manifest(hostile(parameters=rows[:-1])).d == MAX_TENSORS
    with pytest.raises(BundleError, match=r"parameters: .*at most 100000 items"):
        parse_manifest(hostile(parameters=rows))


def write_bundle(folder: Path, manifest: Manifest) -> Bundle:
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return Bundle.open(folder)


def test_stored_weights_are_laid_out_by_the_manifest(tmp_path: Path) -> None:
    weights = {
        "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fc.bias": np.array([7, 8], np.float32),
        "bn.mean": np.array([1, 2], np.float32),
    }
    save_file(weights, tmp_path / "weights.safetensors")
    data = (tmp_path / "weights.safetensors").read_bytes()
    parts = {"weights.safetensors": Part(sha256=digest(data), size=len(data))}
    model = write_bundle(tmp_path, small_manifest(seed=None, parts=parts)).model()
    assert model.parameters.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    assert model.buffers.tolist() == [1, 2]


def test_a_part_that_does_not_match_its_digest_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, small_manifest(parts={"eval.onnx": Part(sha256=digest(b"right"), size=5)}))
    (tmp_path / "eval.onnx").write_bytes(b"wrong")
    with pytest.raises(BundleError, match="SHA-256"):
        bundle.part("eval.onnx")
    (tmp_path / "eval.onnx").write_bytes(b"right")
    assert bundle.part("eval.onnx") == tmp_path / "eval.onnx"


def test_a_folder_without_manifest_and_an_unknown_part_are_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match="no part 'x'"):
        write_bundle(tmp_path, small_manifest()).part("x")


def test_a_model_cannot_be_changed_by_assignment(tmp_path: Path) -> None:
    model = write_bundle(tmp_path, small_manifest()).model()
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.parameters = model.buffers  # type: ignore[misc]
