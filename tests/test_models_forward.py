"""The benchmarks' models compute what their papers' tables say, written a second time on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from edge_bench import models  # noqa: E402
from edge_bench.models.attention import TransformerBlock  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

Layers = Iterator[Any]
"""The layers with parameters, in order: each call of a reference takes the next one's weights."""


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64 with random scales, shifts and statistics of its norms, so that each shows.

    The weights of convolutions without a norm are larger, so that some values exceed the 6 of ReLU6.
    """
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm):
            layer.weight.data.uniform_(1, 3, generator=generator)
            layer.bias.data.normal_(0, 0.5, generator=generator)
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            layer.weight.data *= 4
    for name, statistic in module.named_buffers():
        if name.endswith("running_mean"):
            statistic.normal_(0, 0.5, generator=generator)
        elif name.endswith("running_var"):
            statistic.uniform_(0.5, 2, generator=generator)
    return module.double().eval()


def layers_of(module: nn.Module) -> Layers:
    return (layer for layer in module.modules() if not list(layer.children()) and list(layer.parameters()))


def conv(x: Any, layer: Any, stride: int = 1, padding: int = 0, groups: int = 1) -> Any:
    return f.conv2d(x, layer.weight, layer.bias, stride, padding, 1, groups)


def linear(x: Any, layer: Any) -> Any:
    return x @ layer.weight.T + layer.bias


def norm(x: Any, layer: Any) -> Any:
    """Batch-norm with the stored statistics."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    centred = (x - layer.running_mean.reshape(shape)) / torch.sqrt(layer.running_var.reshape(shape) + 1e-5)
    return centred * layer.weight.reshape(shape) + layer.bias.reshape(shape)


def halved(x: Any) -> Any:
    """The largest of each square of 2x2 pixels."""
    return x.unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(4, 5))


def clipped(x: Any) -> Any:
    return x.clamp(0, 6)


def perceptron(x: Any, layers: Layers) -> Any:
    *hidden, last = layers
    for layer in hidden:
        x = linear(x, layer).relu()
    return linear(x, last)


def binary(x: Any, layers: Layers) -> Any:
    *hidden, last = layers
    for layer, normed in zip(hidden[::2], hidden[1::2], strict=True):
        x = norm(linear(x, layer), normed).sign()
    return linear(x, last)


def normed_convolutions(x: Any, layers: Layers) -> Any:
    """Two convolutions with batch-norm, a pool after each, then linear layers."""
    for _ in range(2):
        x = halved(norm(conv(x, next(layers), padding=1), next(layers)).relu())
    return perceptron(x.flatten(1), layers)


def convolutions(padding: int) -> Callable[[Any, Layers], Any]:
    """Two convolutions, a pool after each, then linear layers."""

    def reference(x: Any, layers: Layers) -> Any:
        for _ in range(2):
            x = halved(conv(x, next(layers), padding=padding).relu())
        return perceptron(x.flatten(1), layers)

    return reference


def vgg(x: Any, layers: Layers) -> Any:
    for place in range(6):
        x = norm(conv(x, next(layers), padding=1), next(layers)).relu()
        x = halved(x) if place in (1, 3, 4, 5) else x
    return linear(x.flatten(1), next(layers))


def resnet(x: Any, layers: Layers) -> Any:
    """Depth 14: two blocks in each stage; the shortcut has zeros for the new channels, half before and half after."""
    x = norm(conv(x, next(layers), padding=1), next(layers)).relu()
    for channels, strides in ((16, (1, 1)), (32, (2, 1)), (64, (2, 1))):
        for stride in strides:
            first, first_norm, second, second_norm = (next(layers) for _ in range(4))
            y = norm(conv(x, first, stride, 1), first_norm).relu()
            y = norm(conv(y, second, 1, 1), second_norm)
            x = x[:, :, ::stride, ::stride]
            zeros = x.new_zeros(len(x), (channels - x.shape[1]) // 2, *x.shape[2:])
            x = (torch.cat([zeros, x, zeros], 1) + y).relu()
    return linear(x.mean((2, 3)), next(layers))


# t, c, n of the paper's Table 2; strides of the paper where 224x224 images need them, and here.
STAGES = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
LARGE, SMALL = (1, 2, 2, 2, 1, 2, 1), (1, 1, 2, 2, 1, 2, 1)


def mobilenet(x: Any, layers: Layers) -> Any:
    x = clipped(norm(conv(x, next(layers), padding=1), next(layers)))
    for (expansion, out, repeats), first in zip(STAGES, SMALL, strict=True):
        for stride in [first] + [1] * (repeats - 1):
            y = clipped(norm(conv(x, next(layers)), next(layers))) if expansion > 1 else x
            y = clipped(norm(conv(y, next(layers), stride, 1, groups=y.shape[1]), next(layers)))
            y = norm(conv(y, next(layers)), next(layers))
            x = x + y if x.shape == y.shape else y
            assert x.shape[1] == out
    x = clipped(norm(conv(x, next(layers)), next(layers)))
    return linear(x.mean((2, 3)), next(layers))


def pixels(x: Any) -> Any:
    """Normalised images as 0..255, every pixel four times."""
    from edge_bench.data.sources import CIFAR_DEVIATION, CIFAR_MEAN

    deviation, mean = (torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (CIFAR_DEVIATION, CIFAR_MEAN))
    return f.interpolate(255 * (x * deviation + mean), scale_factor=2, mode="nearest")


def mobilenet_backbone(x: Any, layers: Layers) -> Any:
    def spatial(x: Any, stride: int, groups: int = 1) -> Any:
        if stride == 2:
            return conv(f.pad(x, (0, 1, 0, 1)), next(layers), 2, 0, groups)
        return conv(x, next(layers), 1, 1, groups)

    x = clipped(spatial((pixels(x) - 128) / 128, 2))
    for (expansion, _, repeats), first in zip(STAGES, LARGE, strict=True):
        for stride in [first] + [1] * (repeats - 1):
            y = clipped(conv(x, next(layers))) if expansion > 1 else x
            y = conv(clipped(spatial(y, stride, y.shape[1])), next(layers))
            x = x + y if x.shape == y.shape else y
    return linear(clipped(conv(x, next(layers))).mean((2, 3)), next(layers))


def squeezenet_backbone(x: Any, layers: Layers) -> Any:
    x = pixels(x).flip(1) - torch.tensor([103.939, 116.779, 123.68], dtype=torch.float64).reshape(3, 1, 1)
    x = conv(x, next(layers), 2).relu()
    for fires in (2, 2, 4):
        x = f.max_pool2d(x, 3, 2)
        for _ in range(fires):
            x = conv(x, next(layers)).relu()
            x = torch.cat([conv(x, next(layers)).relu(), conv(x, next(layers), padding=1).relu()], 1)
    return linear(x.mean((2, 3)), next(layers))


IMAGE, GREY = (3, 32, 32), (1, 28, 28)
REFERENCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any, Layers], Any]]] = {
    "mlp": (lambda: models.mlp(*models.DIGITS), (64,), perceptron),
    "binary mlp": (lambda: models.binary_mlp(*models.DIGITS), (64,), binary),
    "small cnn": (models.small_cnn, GREY, normed_convolutions),
    "fashion cnn": (lambda: models.image_cnn(10), GREY, normed_convolutions),
    "lenet": (models.lenet, IMAGE, convolutions(padding=0)),
    "emnist cnn": (models.emnist_cnn, GREY, convolutions(padding=2)),
    "mnist cnn": (models.mnist_cnn, GREY, convolutions(padding=0)),
    "vgg9": (lambda: models.vgg9(1, 10), (1, 32, 32), vgg),
    "resnet14": (lambda: models.Resnet(14, 10), IMAGE, resnet),
    "mobilenetv2": (models.MobileNetV2, IMAGE, mobilenet),
    "mobilenetv2 backbone": (lambda: models.MobileNetBackbone(10), IMAGE, mobilenet_backbone),
    "squeezenet backbone": (lambda: models.SqueezeNetBackbone(10), IMAGE, squeezenet_backbone),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_model_computes_its_layers_in_their_order(name: str) -> None:
    make, shape, reference = REFERENCES[name]
    torch.manual_seed(0)
    module = drawn(make())
    layers = layers_of(module)
    x = torch.randn(2, *shape, dtype=torch.float64)
    with torch.no_grad():
        found, due = module(x), reference(x, layers)
    assert next(layers, None) is None, "a layer was not used"
    assert found.std() > 1e-3
    torch.testing.assert_close(found, due, rtol=1e-6, atol=1e-6 * float(due.abs().max()))


# --- attention


def encoder_layer(block: TransformerBlock, width: int, heads: int) -> nn.Module:
    """torch's own layer with the block's weights."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    own = {
        "self_attn.in_proj": block.read,
        "self_attn.out_proj": block.out,
        "linear1": block.wide,
        "linear2": block.narrow,
        "norm1": block.norm1,
        "norm2": block.norm2,
    }
    values: dict[str, Any] = {}
    for name, part in own.items():
        joint = "_" if name.endswith("in_proj") else "."
        values |= {f"{name}{joint}weight": part.weight, f"{name}{joint}bias": part.bias}
    layer.load_state_dict(values)
    return layer.eval()


def test_a_transformer_block_is_torchs_encoder_layer() -> None:
    block = drawn(TransformerBlock(24, 3))
    assert isinstance(block, TransformerBlock)
    block.read.weight.data *= 8  # so that attention prefers some tokens
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(block(x), encoder_layer(block, 24, 3)(x))


def test_attention_weighs_values_as_torchs_own_function_does() -> None:
    block = drawn(TransformerBlock(8, 2))
    assert isinstance(block, TransformerBlock)
    for layer in (block.narrow, block.out):  # leaves x + attention
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    block.out.weight.data += torch.eye(8)
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        query, key, value = (
            part.reshape(1, 3, 2, 4).transpose(1, 2) for part in linear(block.norm1(x), block.read).chunk(3, -1)
        )
        mixed = f.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, 3, 8)
        torch.testing.assert_close(block(x), x + mixed)


def test_a_vision_transformer_cuts_images_into_patches_and_classifies_the_mean_token() -> None:
    module = drawn(models.VisionTransformer(10, 2, width=24, size=16))
    assert isinstance(module, models.VisionTransformer)
    nn.init.normal_(module.places)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        rows = [x[:, :, i : i + 4, j : j + 4].flatten(1) for i in range(0, 16, 4) for j in range(0, 16, 4)]
        filters = module.patches.weight.flatten(1)
        y = torch.stack(rows, 1) @ filters.T + module.patches.bias + module.places
        for block in module.blocks:
            assert isinstance(block, TransformerBlock)
            y = encoder_layer(block, 24, 3)(y)
        due = linear(f.layer_norm(y, (24,), module.norm.weight, module.norm.bias).mean(1), module.head)
        torch.testing.assert_close(module(x), due)


# --- recurrent


def test_the_recurrent_network_is_the_equations_of_two_layers_of_lstm() -> None:
    module = models.NextCharacter(11, embedding=3, hidden=4).double()
    ids = torch.randint(0, 11, (2, 6))
    weights = dict(module.lstm.named_parameters())
    with torch.no_grad():
        inputs = [module.embedding.weight[ids[:, t]] for t in range(6)]
        for layer in range(2):
            own = [weights[f"{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            state = cell = torch.zeros(2, 4, dtype=torch.float64)
            outputs = []
            for x in inputs:
                gates = x @ own[0].T + own[2] + state @ own[1].T + own[3]
                let_in, keep, new, let_out = gates.chunk(4, 1)
                cell = keep.sigmoid() * cell + let_in.sigmoid() * new.tanh()
                state = let_out.sigmoid() * cell.tanh()
                outputs.append(state)
            inputs = outputs
        due = torch.stack([linear(state, module.head) for state in inputs], 1)
        torch.testing.assert_close(module(ids), due)


def test_a_character_is_predicted_from_those_before_it_alone() -> None:
    module = models.NextCharacter(11, embedding=3, hidden=4)
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5:] = 10
    with torch.no_grad():
        same = [bool(torch.equal(a, b)) for a, b in zip(module(ids)[0], module(changed)[0], strict=True)]
    assert same == [True] * 5 + [False] * 3
