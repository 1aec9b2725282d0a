"""The benchmarks' models: their counts of parameters, and that each trains on ONNX Runtime with PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_client.targets import Classification, Sequence, Target
from edge_client.training import open_trainer

torch = pytest.importorskip("torch")
from edge_bench import models  # noqa: E402
from edge_export import export_bundle  # noqa: E402
from torch import nn  # noqa: E402

COUNTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (lambda: models.mlp(*models.HAR), 376_606),
    "binary mlp": (lambda: models.binary_mlp(*models.HAR), 377_406),
    "lenet": (models.lenet, 62_006),
    "emnist cnn": (models.emnist_cnn, 539_358),
    "mnist cnn": (models.mnist_cnn, 80_202),
    "femnist cnn": (lambda: models.image_cnn(62), 213_678),
    "fashion cnn": (lambda: models.image_cnn(10), 206_970),
    "vgg9": (lambda: models.vgg9(1, 10), 1_136_618),
    "vgg9, colour": (lambda: models.vgg9(3, 10), 1_137_194),
    "resnet20": (lambda: models.Resnet(20, 10), 269_722),
    "resnet56": (lambda: models.Resnet(56, 10), 853_018),
    "mobilenetv2": (models.MobileNetV2, 2_236_682),
    "lstm": (lambda: models.NextCharacter(73), 818_065),
    "lstm, small": (lambda: models.NextCharacter(73, hidden=128), 212_753),
    "vit": (lambda: models.VisionTransformer(10, 12), 5_362_378),
    "vit of depth 4": (lambda: models.VisionTransformer(10, 4), 1_803_466),
    "mobilenetv2 backbone": (lambda: models.MobileNetBackbone(10), 2_219_626),
    "squeezenet backbone": (lambda: models.SqueezeNetBackbone(10), 727_626),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_model_has_the_parameters_its_docstring_says(name: str) -> None:
    make, count = COUNTS[name]
    assert sum(p.numel() for p in make().parameters()) == count


def test_a_binary_activation_is_a_sign_whose_gradient_passes_where_it_is_not_saturated() -> None:
    x = torch.tensor([-3.0, -0.5, 0.25, 2.0], requires_grad=True)
    y = models.binary_mlp(1, 1, 1)[2](x)
    assert y.tolist() == [-1.0, -1.0, 1.0, 1.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0]


def _residual() -> nn.Module:
    """One of each kind of MobileNetV2's blocks: not widened, of stride 2, and one that adds its input."""
    from edge_bench.models.residual import InvertedResidual

    blocks = [InvertedResidual(3, 8, 1, 1), InvertedResidual(8, 12, 2, 6), InvertedResidual(12, 12, 1, 6)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


IMAGE, SMALL, TEN = (3, 32, 32), (3, 16, 16), Classification(classes=10)
# Small relatives of the deep ones, as depth only repeats blocks.
TRAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Target, tuple[str, ...]]] = {
    "binary mlp": (lambda: models.binary_mlp(12, 9, 10), (12,), TEN, ()),
    "lenet": (models.lenet, IMAGE, TEN, ()),
    "emnist cnn": (models.emnist_cnn, (1, 28, 28), Classification(classes=62), ()),
    "mnist cnn": (models.mnist_cnn, (1, 28, 28), TEN, ()),
    "femnist cnn": (lambda: models.image_cnn(62), (1, 28, 28), Classification(classes=62), ()),
    "vgg9": (lambda: models.vgg9(3, 10), IMAGE, TEN, ()),
    "lstm": (lambda: models.NextCharacter(73, hidden=16), (12,), Sequence(steps=12, classes=73), ()),
    "vit": (lambda: models.VisionTransformer(10, 1, width=24, size=16), SMALL, TEN, ()),
    "mobilenetv2": (_residual, SMALL, TEN, ()),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trains_on_onnx_runtime_with_the_gradients_of_pytorch(name: str, tmp_path: Path) -> None:
    make, shape, target, prefixes = TRAINED[name]
    torch.manual_seed(3)
    module = make().train()
    free = [n for n, _ in module.named_parameters() if n.startswith(prefixes)] if prefixes else None
    rng = np.random.default_rng(0)
    tokens = isinstance(target, Sequence)
    x = rng.integers(0, 73, (6, *shape)) if tokens else rng.standard_normal((6, *shape)).astype(np.float32)
    y = rng.integers(0, target.output[-1], (6, *target.output[:-1]))
    bundle = export_bundle(
        module, torch.from_numpy(x), tmp_path / "b", name="b", target=target, trainable=free, torch_part=False
    )
    start = bundle.model()
    got = open_trainer("onnxruntime", bundle).gradient(start.parameters, start.buffers, x, y)
    outputs = module(torch.from_numpy(x))
    loss = nn.functional.cross_entropy(outputs.flatten(0, -2), torch.from_numpy(y).flatten())
    loss.backward()
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = {n: p.grad for n, p in module.named_parameters()}
    assert any(t.trainable for t in bundle.manifest.parameters)
    for t in bundle.manifest.parameters:
        if t.trainable:
            expected = gradients[t.name].numpy().ravel()
            error = np.linalg.norm(got.parameters[t.span] - expected)
            assert error < 1e-4 * np.linalg.norm(expected) + 2e-6, t.name


def test_the_backbones_see_the_colours_their_weights_expect() -> None:
    from edge_bench.data.sources import CIFAR_DEVIATION, CIFAR_MEAN
    from edge_bench.models.backbones import _colours

    rgb = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4)).astype(np.float64)
    normalised = (rgb / 255 - CIFAR_MEAN[:, None, None]) / CIFAR_DEVIATION[:, None, None]
    x = torch.from_numpy(normalised.astype(np.float32))
    np.testing.assert_allclose(_colours(x, (0, 1, 2), 1 / 128, (128.0,) * 3).numpy(), (rgb - 128) / 128, atol=1e-4)
    bgr = rgb[:, ::-1] - np.array([103.939, 116.779, 123.68])[:, None, None]
    np.testing.assert_allclose(_colours(x, (2, 1, 0), 1.0, (103.939, 116.779, 123.68)).numpy(), bgr, atol=1e-2)
