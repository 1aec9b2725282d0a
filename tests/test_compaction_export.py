"""Personal models of exported networks: the proof blames no rounding of norms on compaction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_client.bundle import MANIFEST, WEIGHTS, Bundle, Input, Manifest, Part, digest, views
from edge_client.compaction.personal import write_personal
from edge_client.equality import TOLERANCE
from edge_client.targets import Classification
from edge_client.task import Personal

torch = pytest.importorskip("torch")
from edge_export.graphs import eval_graph  # noqa: E402
from edge_export.groups import with_groups  # noqa: E402
from edge_export.tables import tables  # noqa: E402
from safetensors.torch import save  # noqa: E402
from torch import nn  # noqa: E402


def exported(module: nn.Module, folder: Path, sample: tuple[int, ...] = (1, 8, 8)) -> Bundle:
    """What a device needs of a bundle to make its personal model: no training graph, which takes seconds."""
    example = torch.zeros(3, *sample)
    found = tables(module, example, "he", None)
    parameters, buffers = [r.name for r in found.parameters], [r.name for r in found.buffers]
    parts = {
        "eval.onnx": eval_graph(module, example, parameters, buffers).SerializeToString(),
        WEIGHTS: save({name: module.state_dict()[name] for name in (*parameters, *buffers)}),
    }
    manifest = Manifest(
        name="net",
        input=Input(shape=sample),
        target=Classification(classes=4),
        parameters=found.parameters,
        buffers=found.buffers,
        layers=found.layers,
        parts={name: Part(sha256=digest(data), size=len(data)) for name, data in parts.items()},
    )
    manifest = with_groups(manifest, {"eval.onnx": onnx.load_from_string(parts["eval.onnx"])})
    for name, data in {**parts, MANIFEST: manifest.to_bytes()}.items():
        (folder / name).write_bytes(data)
    return Bundle.open(folder)


def sensor() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(16, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()),
        *(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)),
    )


def test_pytorchs_own_weights_masked_for_long_compact_although_float32_batch_norm_is_far_off(tmp_path: Path) -> None:
    """A fifth of each layer's weights and units live; the statistics are those PyTorch keeps over 450 steps."""
    torch.manual_seed(2)
    module, x = sensor(), torch.randn(100, 1, 16)
    with torch.no_grad():
        for weight in (w for w in module.parameters() if w.ndim > 1 and w.shape[0] > 4):
            weight *= (torch.rand_like(weight) < 0.2) & (torch.rand(weight.shape[0], *[1] * (weight.ndim - 1)) < 0.2)
        for _ in range(450):
            module.train()(x[torch.randperm(100)[:20]])
        right = module.double().eval()(x.double()).numpy()
    bundle = exported(module.float(), tmp_path, (1, 16))
    model, table = bundle.model(), bundle.manifest
    values = {**views(table.parameters, model.parameters), **views(table.buffers, model.buffers), "x": x.numpy()}
    assert values["1.running_var"].min() < 1e-20
    masked = ort.InferenceSession(str(bundle.part("eval.onnx")), providers=["CPUExecutionProvider"])
    logits = masked.run(None, {i.name: values[i.name] for i in masked.get_inputs()})[0]
    assert np.abs(logits - right).max() > TOLERANCE
    personal = Personal(model.parameters, model.buffers, model.parameters != 0)
    report = write_personal(bundle, personal, tmp_path / "personal.onnx", x.numpy())
    assert report.max_abs_diff <= TOLERANCE / 5
    assert report.parameters_compact < report.parameters_dense / 5
    compact = ort.InferenceSession(str(tmp_path / "personal.onnx"), providers=["CPUExecutionProvider"])
    assert np.abs(compact.run(None, {"x": x.numpy()})[0] - right).max() <= TOLERANCE / 5


@pytest.mark.parametrize("seed", [1, 6, 10])
def test_the_norm_of_constant_channels_does_not_make_the_proof_refuse_a_right_model(seed: int, tmp_path: Path) -> None:
    """A channel without weights is constant: less its mean it is a rounding, which the norm multiplies by 300."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)]
    bundle = exported(nn.Sequential(*layers), tmp_path, (1, 8, 8))
    model, random = bundle.model(), np.random.default_rng(seed)
    values = model.parameters + random.normal(0, 0.3, model.parameters.size).astype(np.float32)
    values[bundle.manifest.tensors["0.weight"].span].reshape(8, -1)[:4] = 0
    personal = Personal(values, model.buffers, values != 0)
    assert write_personal(bundle, personal, tmp_path / "personal.onnx").layers["0.weight"] == (8, 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_that_hardly_vary_behind_norms_of_constant_channels_do_not_make_the_proof_refuse(
    seed: int, tmp_path: Path
) -> None:
    """The mean of a normalised channel is nearly the same for every sample, so its rounding is large beside it."""
    torch.manual_seed(seed)
    layers = [
        *(nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.InstanceNorm2d(24, affine=True), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)),
    ]
    bundle = exported(nn.Sequential(*layers), tmp_path, (3, 16, 16))
    model = bundle.model()
    values = model.parameters.copy()
    for name, units in (("0.weight", 16), ("3.weight", 24)):
        values[bundle.manifest.tensors[name].span].reshape(units, -1)[: units // 2] = 0
    report = write_personal(bundle, Personal(values, model.buffers, values != 0), tmp_path / "personal.onnx")
    assert report.layers == {"0.weight": (16, 8), "3.weight": (24, 12), "8.weight": (4, 4)}


@pytest.mark.parametrize("seed", [1, 4])
def test_three_norms_of_constant_channels_need_a_reference_whose_norms_are_float64(seed: int, tmp_path: Path) -> None:
    """Each multiplies the rounding of the one before: more than the allowance for one rounding of the values."""
    torch.manual_seed(seed)
    layers = [
        *(nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    ]
    bundle = exported(nn.Sequential(*layers), tmp_path, (3, 16, 16))
    model = bundle.model()
    values = model.parameters.copy()
    for name in ("0.weight", "3.weight", "6.weight"):
        values[bundle.manifest.tensors[name].span].reshape(16, -1)[:8] = 0
    report = write_personal(bundle, Personal(values, model.buffers, values != 0), tmp_path / "personal.onnx")
    assert report.layers["6.weight"] == (16, 8)
