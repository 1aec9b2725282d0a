"""Published architectures, at the sizes that devices run: those of `edge_bench.models` and a few more."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from edge_bench import models
from edge_bench.compaction.zoo.case import Case, Net, conv, normed, pooled
from edge_bench.compaction.zoo.joins import Dense

IMAGE = (3, 32, 32)


def vgg16(classes: int = 10) -> nn.Sequential:
    """VGG16 for 32x32 images: thirteen convolutions with batch-norm, one classifier. 313 M multiply-adds."""
    parts: list[nn.Module] = []
    inner = 3
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [*normed(inner, out)]
            inner = out
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, classes))


def densenet(growth: int = 12, layers: int = 6) -> nn.Sequential:
    """DenseNet with three blocks of `layers` layers and halving transitions."""
    parts: list[nn.Module] = [conv(3, 2 * growth, bias=False)]
    width = 2 * growth
    for last in (False, False, True):
        parts.append(Dense(width, growth, layers))
        width += layers * growth
        parts += [nn.BatchNorm2d(width), nn.ReLU()]
        if not last:
            parts += [conv(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*parts, pooled(width, 10))


class UNet(nn.Module):
    """Three levels with skips. The upper levels grow by ConvTranspose, or by Upsample and a convolution.

    The output is one row of classes for each place, [n, h * w, classes].
    """

    def __init__(self, width: int, transposed: bool, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(*normed(i, o), *normed(o, o)) for i, o in zip([3, *widths], widths, strict=False)
        )
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, 2)
            if transposed
            else nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), conv(2 * w, w))
            for w in (2 * width, width)
        )
        self.up = nn.ModuleList(nn.Sequential(*normed(2 * w, w), *normed(w, w)) for w in (2 * width, width))
        self.last = conv(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, h * w, classes] of images [n, 3, h, w]."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for grow, up, skip in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = up(torch.cat([skip, grow(x)], 1))
        y: Tensor = self.last(x).flatten(2).transpose(1, 2)
        return y


class ShuffleUnit(nn.Module):
    """ShuffleNetV2's unit: half of the channels pass, or with a stride both halves are convolved; then a shuffle."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        half, read = out // 2, inner if stride > 1 else inner // 2
        self.stride = stride
        self.branch = nn.Sequential(
            *normed(read, half, 1), conv(half, half, 3, bias=False, stride=stride, groups=half), nn.BatchNorm2d(half),
            *normed(half, half, 1),
        )  # fmt: skip
        if stride > 1:
            self.side = nn.Sequential(
                conv(inner, inner, 3, bias=False, stride=stride, groups=inner), nn.BatchNorm2d(inner),
                *normed(inner, half, 1),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, out, h / stride, w / stride]."""
        if self.stride > 1:
            y = torch.cat([self.side(x), self.branch(x)], 1)
        else:
            a, b = x.chunk(2, 1)
            y = torch.cat([a, self.branch(b)], 1)
        c, h, w = y.shape[1:]
        return y.view(-1, 2, c // 2, h, w).transpose(1, 2).reshape(-1, c, h, w)


def shufflenet() -> nn.Sequential:
    """ShuffleNetV2 0.5x for 32x32 images, two units fewer in its middle stage."""
    parts: list[nn.Module] = [*normed(3, 24)]
    inner = 24
    for out, count in ((48, 4), (96, 6), (192, 4)):
        parts += [ShuffleUnit(inner if i == 0 else out, out, 2 if i == 0 else 1) for i in range(count)]
        inner = out
    return nn.Sequential(*parts, *normed(inner, 256, 1), pooled(256, 10))


def gru_characters() -> nn.Module:
    """`NextCharacter` with a GRU of 128 units."""
    return Net(
        lambda m, x: m.head(m.cells(m.embedding(x))[0]),
        embedding=nn.Embedding(73, 8), cells=nn.GRU(8, 128, batch_first=True), head=nn.Linear(128, 73),
    )  # fmt: skip


def lstm_har() -> nn.Module:
    """Activity recognition: 9 sensor channels of 64 steps, an LSTM in both directions, the mean of its states."""
    return Net(
        lambda m, x: m.head(m.cells(x)[0].mean(1)),
        cells=nn.LSTM(9, 64, batch_first=True, bidirectional=True), head=nn.Linear(128, 6),
    )  # fmt: skip


CASES = (
    Case("MLP", partial(models.mlp, *models.HAR), (1152,), ("4",), quick=True),
    Case("LeNet", models.lenet, IMAGE, ("11",)),
    Case("EMNIST CNN", models.emnist_cnn, (1, 28, 28), ("9",)),
    Case("VGG9", partial(models.vgg9, 3), IMAGE, ("23",)),
    Case("VGG16", vgg16, IMAGE, ("45",)),
    Case("ResNet-20", partial(models.Resnet, 20, 10), IMAGE, ("linear",)),
    Case("ResNet-56", partial(models.Resnet, 56, 10), IMAGE, ("linear",)),
    Case("MobileNetV2", models.MobileNetV2, IMAGE, ("linear",)),
    Case("U-Net, transposed", partial(UNet, 8, True), IMAGE, ("last",)),
    Case("U-Net, upsampled", partial(UNet, 8, False), IMAGE, ("last",)),
    Case("ShuffleNetV2", shufflenet, IMAGE, ("20.2",)),
    Case("DenseNet", densenet, IMAGE, ("14.2",)),
    Case("SqueezeNet", partial(models.SqueezeNetBackbone, 10), IMAGE, ("head",)),
    Case("LSTM 2x256", partial(models.NextCharacter, 73), (20,), ("head",), ids=73),
    Case("LSTM both ways", lstm_har, (64, 9), ("head",)),
    Case("GRU", gru_characters, (20,), ("head",), ids=73),
    Case("ViT-tiny", models.VisionTransformer, IMAGE, ("head",)),
)  # fmt: skip
