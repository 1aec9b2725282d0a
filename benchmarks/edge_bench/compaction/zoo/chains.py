"""Layers in a row: every activation, pool, padding, flatten and convolution kind in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.compaction.zoo.case import CLASSES, Case, Net, conv, normed, pooled

IMAGE = (3, 12, 12)


def activated(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Two convolutions and a hidden layer, each with the activation."""
    return nn.Sequential(
        conv(3, 12), make(), conv(12, 16, stride=2), nn.BatchNorm2d(16), make(),
        nn.Flatten(), nn.Linear(16 * 36, 20), make(), nn.Linear(20, CLASSES),
    )  # fmt: skip


def between(*middle: nn.Module, entries: int) -> nn.Sequential:
    """Convolution, `middle`, convolution, flatten of `entries` a channel, classifier (layer `last`)."""
    found = nn.Sequential(*normed(3, 12), *middle, conv(12, 10), nn.ReLU(), nn.Flatten())
    found.add_module("last", nn.Linear(10 * entries, CLASSES))
    return found


def _bias_free() -> nn.Module:
    return nn.Sequential(
        conv(3, 12, bias=False), nn.ReLU(), conv(12, 16, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 144, 14, bias=False), nn.ReLU(), nn.Linear(14, CLASSES, bias=False),
    )  # fmt: skip


def _conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 12, 5, padding=2, dilation=1), nn.BatchNorm1d(12), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(12, 16, 3, padding=2, dilation=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(),
        nn.Linear(16 * 8, CLASSES),
    )  # fmt: skip


def _conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 12, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(12, CLASSES),
    )  # fmt: skip


def _functional() -> nn.Module:
    """Reshapes and means written as tensor methods, in place where that is allowed."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = functional.relu_(m.a(x))
        y = functional.max_pool2d(m.b(y).clamp(min=0), 2)
        y = y.reshape(y.shape[0], -1)
        y = functional.relu(m.c(y)).view(-1, 4, 6).mean(1)
        return m.head(y)

    return Net(wiring, a=conv(3, 12), b=conv(12, 10), c=nn.Linear(360, 24), head=nn.Linear(6, CLASSES))


def _flatten_late() -> nn.Module:
    """Height and width are joined first, channels afterwards; then channels last."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(x)).flatten(2)  # [n, c, hw]
        y = torch.relu(m.b(y.flatten(1)))
        z = torch.relu(m.c(x)).permute(0, 2, 3, 1).flatten(1)  # [n, h * w * c]
        return m.head(torch.cat([y, torch.relu(m.d(z))], 1))

    return Net(
        wiring, a=conv(3, 12, stride=2), b=nn.Linear(12 * 36, 14), c=conv(3, 10, stride=2), d=nn.Linear(360, 10),
        head=nn.Linear(24, CLASSES),
    )  # fmt: skip


def _squeezed() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        y = functional.adaptive_avg_pool2d(torch.relu(m.a(x)), 1).squeeze(3).squeeze(2)
        z = torch.relu(m.b(y)).unsqueeze(1)
        return m.head(z).squeeze(1)

    return Net(wiring, a=conv(3, 16), b=nn.Linear(16, 12), head=nn.Linear(12, CLASSES))


def _channels_last() -> nn.Module:
    """ConvNeXt's block: linear layers and layer-norm on the last axis of an image."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        z = m.norm(m.deep(y).permute(0, 2, 3, 1))
        z = m.narrow(functional.gelu(m.wide(z))).permute(0, 3, 1, 2)
        return m.head((y + z).mean((2, 3)))

    return Net(
        wiring, stem=conv(3, 12, 4, stride=4, padding=0), deep=conv(12, 12, 3, groups=12), norm=nn.LayerNorm(12),
        wide=nn.Linear(12, 48), narrow=nn.Linear(48, 12), head=nn.Linear(12, CLASSES),
    )  # fmt: skip


def _pixel_shuffle() -> nn.Module:
    return nn.Sequential(
        normed(3, 16, stride=2), conv(16, 24), nn.PixelShuffle(2), nn.ReLU(), conv(6, 8), nn.ReLU(),
        nn.PixelUnshuffle(2), conv(32, 10), nn.ReLU(), pooled(10),
    )  # fmt: skip


def _dead_output() -> nn.Module:
    """A branch whose values are multiplied by zero, and one that no output reads."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(x))
        unread = m.unread(y)[:, :0].sum(1, keepdim=True)
        return m.head((torch.relu(m.b(y)) + 0.0 * m.nothing(y) + unread).mean((2, 3)))

    return Net(
        wiring, a=conv(3, 12), b=conv(12, 10), nothing=conv(12, 10), unread=conv(12, 4), head=nn.Linear(10, CLASSES)
    )


def _constants() -> nn.Module:
    """Constants before, between and behind the layers, of one value and of one a channel."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(x * 2 - 0.5)) + 1.0
        y = m.b(y) * m.scale + m.shift
        y = 1.5 - torch.relu(y).amax((2, 3))
        return m.head(y) / 3

    scale, shift = nn.Parameter(torch.ones(14, 1, 1)), nn.Parameter(torch.zeros(14, 1, 1))
    return Net(wiring, a=conv(3, 12), b=conv(12, 14), scale=scale, shift=shift, head=nn.Linear(14, CLASSES))


def _first(name: str, make: Callable[[], nn.Module], needs: str = "", quick: bool = False) -> Case:
    return Case(name, make, IMAGE, ("8",), needs=needs, quick=quick)


CASES = (
    _first("relu", lambda: activated(nn.ReLU)),
    _first("gelu", lambda: activated(nn.GELU), "smooth activation", quick=True),
    _first("gelu tanh", lambda: activated(lambda: nn.GELU("tanh")), "smooth activation"),
    _first("silu", lambda: activated(nn.SiLU), "smooth activation"),
    _first("prelu", lambda: activated(nn.PReLU), "a learned slope"),
    _first("hardswish", lambda: activated(nn.Hardswish)),
    _first("elu", lambda: activated(nn.ELU)),
    _first("softplus", lambda: activated(nn.Softplus), "zero becomes log 2"),
    _first("mish", lambda: activated(nn.Mish)),
    _first("sigmoid", lambda: activated(nn.Sigmoid), "zero becomes a half"),
    _first("leaky tanh", lambda: activated(lambda: nn.Sequential(nn.LeakyReLU(0.1), nn.Tanh()))),
    Case("prelu by channel", lambda: between(conv(12, 12), nn.PReLU(12), entries=144), IMAGE, ("last",)),
    Case("bias-free", _bias_free, IMAGE, ("7",)),
    Case("batch-norm without affine", lambda: between(conv(12, 14), nn.BatchNorm2d(14, affine=False), nn.ReLU(),
         conv(14, 12), entries=144), IMAGE, ("last",)),
    Case("batch-norm first", lambda: nn.Sequential(nn.BatchNorm2d(3), between(entries=144)), IMAGE, ("1.last",)),
    Case("dilated", lambda: between(conv(12, 12, dilation=2, padding=2), nn.ReLU(), entries=144), IMAGE, ("last",)),
    Case("unpadded", lambda: between(conv(12, 12, padding=0), nn.ReLU(), conv(12, 12, 5, padding=0), nn.ReLU(),
         entries=36), IMAGE, ("last",), quick=True),
    Case("padding by mode same", lambda: between(conv(12, 12, 4, padding="same"), nn.ReLU(), entries=144), IMAGE,
         ("last",)),
    Case("reflect padding", lambda: between(nn.ReflectionPad2d(1), conv(12, 12, padding=0), nn.ReLU(), entries=144),
         IMAGE, ("last",), needs="padding that keeps a constant constant"),
    Case("padded with ones", lambda: between(nn.ConstantPad2d(1, 1.0), conv(12, 12, padding=0), nn.ReLU(),
         entries=144), IMAGE, ("last",), needs="padding by another value than zero"),
    Case("average pool counts padding", lambda: between(nn.AvgPool2d(3, 2, 1), entries=36), IMAGE, ("last",),
         needs="a constant channel differs at the border", quick=True),
    Case("average pool skips padding", lambda: between(nn.AvgPool2d(3, 2, 1, count_include_pad=False), entries=36),
         IMAGE, ("last",)),
    Case("average pool in ceil mode", lambda: between(nn.AvgPool2d(5, 2, ceil_mode=True), entries=25), IMAGE,
         ("last",)),
    Case("max-pool with padding", lambda: between(nn.MaxPool2d(3, 2, 1), entries=36), IMAGE, ("last",)),
    Case("max-pool in ceil mode", lambda: between(nn.MaxPool2d(3, 2, ceil_mode=True), entries=36), IMAGE, ("last",)),
    Case("adaptive pools", lambda: between(nn.AdaptiveMaxPool2d(6), conv(12, 12), nn.AdaptiveAvgPool2d((3, 2)),
         entries=6), IMAGE, ("last",)),
    Case("lp pool", lambda: between(nn.LPPool2d(2, 2), entries=36), IMAGE, ("last",)),
    Case("upsampled", lambda: between(nn.Upsample(scale_factor=2), conv(12, 12), nn.ReLU(), nn.AvgPool2d(4),
         entries=36), IMAGE, ("last",)),
    Case("transposed convolution", lambda: between(nn.ConvTranspose2d(12, 14, 3, 2, 1, 1), nn.BatchNorm2d(14),
         nn.ReLU(), conv(14, 12, stride=2), nn.ReLU(), entries=144), IMAGE, ("last",)),
    Case("conv1d", _conv1d, (4, 32), ("8",)),
    Case("conv3d", _conv3d, (2, 6, 6, 6), ("8",)),
    Case("functional", _functional, IMAGE, ("head",), needs="an axis of features split in two"),
    Case("flatten orders", _flatten_late, IMAGE, ("head",), quick=True),
    Case("squeeze", _squeezed, IMAGE, ("head",)),
    Case("channels last", _channels_last, IMAGE, ("head",), needs="layer norm ties channels"),
    Case("pixel shuffle", _pixel_shuffle, IMAGE, ("9.2",), needs="several channels become places"),
    Case("dead output", _dead_output, IMAGE, ("head",), needs="layers that influence nothing"),
    Case("constants", _constants, IMAGE, ("head",)),
)  # fmt: skip
