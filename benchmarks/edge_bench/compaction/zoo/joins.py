"""Graphs whose channels meet or part: sums, concatenations, splits, groups, gates, shared and tied layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.compaction.zoo.case import CLASSES, Case, Net, conv, normed, pooled

IMAGE = (3, 12, 12)


class PreActivation(nn.Module):
    """Batch-norm and ReLU before each convolution, the bare sum behind them."""

    def __init__(self, width: int, deep: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(deep))
        self.convs = nn.ModuleList(conv(width, width, bias=False) for _ in range(deep))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        y = x
        for norm, convolution in zip(self.norms, self.convs, strict=True):
            y = convolution(torch.relu(norm(y)))
        return x + y


class Projected(nn.Module):
    """A bottleneck whose shortcut is a strided 1x1 convolution with batch-norm."""

    def __init__(self, inner: int, middle: int, out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(*normed(inner, middle, 1), *normed(middle, middle, 3, stride=stride),
                                  conv(middle, out, 1, bias=False), nn.BatchNorm2d(out))  # fmt: skip
        self.shortcut = nn.Sequential(conv(inner, out, 1, bias=False, stride=stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, out, h / stride, w / stride]."""
        return torch.relu(self.main(x) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """A gate for each channel, from the means of all."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = conv(width, inner, 1), conv(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


class StochasticDepth(nn.Module):
    """A branch that training skips at random, scaled by its probability in evaluation."""

    def __init__(self, branch: nn.Module, keep: float) -> None:
        super().__init__()
        self.branch, self.keep = branch, keep

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = x + self.keep * self.branch(x)
        return made


def _residual(sign: float) -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        y = y + sign * m.b(torch.relu(m.a(y)))
        return m.head(torch.relu(y))

    return Net(wiring, stem=conv(3, 16), a=conv(16, 12), b=conv(12, 16), head=pooled(16))


def _input_residual() -> nn.Module:
    """The model's own input is added: three channels that no mask prunes."""

    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(torch.relu(x + m.b(torch.relu(m.a(x)))))

    return Net(wiring, a=conv(3, 12), b=conv(12, 3), head=pooled(3))


def _grown() -> nn.Module:
    """A sum after padding with zero channels, and one that broadcasts a single channel."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(x))
        y = functional.pad(y, (0, 0, 0, 0, 2, 4)) + m.b(y)
        return m.head(torch.relu(y + m.one(y)))

    return Net(wiring, a=conv(3, 10), b=conv(10, 16), one=conv(16, 1), head=pooled(16))


def _concat() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.stem(x))
        y = torch.cat([torch.relu(m.a(y)), m.b(y), x, functional.max_pool2d(y, 3, 1, 1)], 1)
        return m.head(torch.relu(m.c(y)))

    return Net(wiring, stem=conv(3, 12), a=conv(12, 8, 1), b=conv(12, 10), c=conv(8 + 10 + 3 + 12, 14), head=pooled(14))


def _concat_sum() -> nn.Module:
    """Concatenated channels are added to others: groups of two layers overlap one of a third."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.cat([m.a(x), m.b(x)], 1) + m.c(x)
        return m.head(m.d(torch.relu(y)))

    return Net(wiring, a=conv(3, 6), b=conv(3, 10), c=conv(3, 16), d=conv(16, 12), head=pooled(12))


class Dense(nn.Module):
    """Each layer reads everything before it."""

    def __init__(self, inner: int, growth: int, layers: int) -> None:
        super().__init__()
        widths = [inner + i * growth for i in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths)
        self.convs = nn.ModuleList(conv(w, growth, bias=False) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inner, h, w] to [n, inner + layers * growth, h, w]."""
        for norm, convolution in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, convolution(torch.relu(norm(x)))], 1)
        return x


def _split() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        a, b = m.stem(x).chunk(2, 1)
        c, d, e = torch.split(m.mid(torch.relu(a) * torch.sigmoid(b)), [4, 6, 6], 1)
        return m.head(torch.cat([torch.relu(d), c, torch.relu(e) + d], 1))

    return Net(wiring, stem=conv(3, 16), mid=conv(8, 16), head=pooled(16))


def _sliced() -> nn.Module:
    """Every other channel, the order reversed, a part left unread, and places cut from the border."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(x))
        y = m.b(torch.cat([y[:, ::2], y[:, 1:9:2].flip(1)], 1))[:, :10, 1:-1, 2:]
        return m.head(torch.relu(y))

    return Net(wiring, a=conv(3, 16), b=conv(12, 14), head=pooled(10))


def _gathered() -> nn.Module:
    """A fixed order of channels, stored as a buffer."""

    class Shuffled(nn.Module):
        order: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = conv(3, 16), conv(16, 12), pooled(12)
            self.register_buffer("order", torch.randperm(16, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(torch.relu(self.b(torch.relu(self.a(x))[:, self.order])))
            return y

    return Shuffled()


def _shuffled(groups: int = 4) -> nn.Module:
    """Grouped convolutions with a channel shuffle between them, as in ShuffleNet's first version."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.a(m.stem(x)))
        c, h, w = y.shape[1:]
        y = y.reshape(-1, groups, c // groups, h, w).transpose(1, 2).reshape(-1, c, h, w)
        return m.head(torch.relu(m.b(y)))

    return Net(
        wiring, stem=normed(3, 16), a=conv(16, 16, 1, groups=groups), b=conv(16, 24, groups=groups), head=pooled(24)
    )


def _depthwise() -> nn.Module:
    return nn.Sequential(
        normed(3, 12), normed(12, 12, groups=12), normed(12, 20, 1), normed(20, 20, stride=2, groups=20),
        normed(20, 24, 1), pooled(24),
    )  # fmt: skip


def _multiplier() -> nn.Module:
    """Depthwise layers with two outputs for each channel."""
    return nn.Sequential(
        normed(3, 16), normed(16, 32, groups=16), normed(32, 24, 1), normed(24, 48, groups=24), normed(48, 12, 1),
        pooled(12),
    )  # fmt: skip


def _inverted() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        for up, deep, down in ((m.u1, m.d1, m.w1), (m.u2, m.d2, m.w2)):
            y = y + down(m.gate(deep(up(y)))) if up is m.u1 else y + down(deep(up(y)))
        return m.head(y)

    def down() -> nn.Sequential:
        return nn.Sequential(conv(32, 8, 1, bias=False), nn.BatchNorm2d(8))

    return Net(
        wiring, stem=normed(3, 8), u1=normed(8, 32, 1), d1=normed(32, 32, groups=32), gate=SqueezeExcite(32, 8),
        w1=down(), u2=normed(8, 32, 1), d2=normed(32, 32, groups=32), w2=down(), head=pooled(8),
    )  # fmt: skip


def _shared() -> nn.Module:
    """One convolution is called three times in a row, one on two branches."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        for _ in range(3):
            y = torch.relu(m.again(y))
        a, b = torch.relu(m.both(y)), torch.relu(m.both(m.other(y)))
        return m.head(a - b)

    return Net(wiring, stem=normed(3, 12), again=conv(12, 12), both=conv(12, 16), other=conv(12, 12), head=pooled(16))


def _siamese() -> nn.Module:
    """One encoder reads both halves of the input; its features are compared."""

    def wiring(m: Any, x: Tensor) -> Any:
        a, b = m.encoder(x[:, :3]), m.encoder(x[:, 3:])
        return m.head(torch.cat([a * b, (a - b).abs()], 1))

    encoder = nn.Sequential(normed(3, 12), conv(12, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Net(wiring, encoder=encoder, head=nn.Linear(32, CLASSES))


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder's weight transposed; the code and the result are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder = nn.Linear(24, 20), nn.Linear(20, 12)
        self.back, self.head = nn.Parameter(torch.zeros(20)), nn.Linear(20 + 12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        code = torch.relu(self.encoder(torch.relu(self.first(x))))
        back = functional.linear(code, self.encoder.weight.t(), self.back)
        y: Tensor = self.head(torch.cat([torch.relu(back), code], 1))
        return y


class TiedEmbedding(nn.Module):
    """The classifier's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(30, 16), nn.Linear(16, 24)
        self.back, self.head = nn.Linear(24, 16), nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """[n, steps, 30] of ids [n, steps]."""
        y: Tensor = self.head(torch.relu(self.back(torch.relu(self.hidden(self.embedding(x))))))
        return y


def _two_heads() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        return torch.cat([m.left(torch.relu(m.a(y)).mean((2, 3))), m.right(torch.relu(m.b(y)).amax((2, 3)))], 1)

    return Net(
        wiring, stem=normed(3, 12), a=conv(12, 10), b=conv(12, 14), left=nn.Linear(10, 3), right=nn.Linear(14, 4)
    )


def _gates() -> nn.Module:
    """Learned scalars in front of branches, and a mixture weighted by a softmax."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        share = torch.softmax(m.mix, 0)
        return m.head(torch.relu(share[0] * m.a(y) + share[1] * m.b(y) + torch.tanh(m.gate) * y))

    gate, mix = nn.Parameter(torch.full((), 0.7)), nn.Parameter(torch.zeros(2))
    return Net(wiring, stem=normed(3, 12), a=conv(12, 12), b=conv(12, 12, 1), gate=gate, mix=mix, head=pooled(12))


def _squeeze_excite() -> nn.Module:
    return nn.Sequential(
        normed(3, 16), SqueezeExcite(16, 8), normed(16, 20, stride=2), SqueezeExcite(20, 8), pooled(20)
    )


def _spatial_gate() -> nn.Module:
    """A gate for every place, from the mean and the largest of all channels."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.stem(x)
        gate = torch.sigmoid(m.place(torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)))
        return m.head(torch.relu(m.after(y * gate)))

    return Net(wiring, stem=normed(3, 16), place=conv(2, 1, 5), after=conv(16, 12), head=pooled(12))


def _normalised(make: Callable[[int], nn.Module]) -> nn.Module:
    """A norm over channels or places between convolutions."""
    norms = [make(width) for width in (16, 24)]
    return nn.Sequential(conv(3, 16), norms[0], nn.ReLU(), conv(16, 24, stride=2), norms[1], nn.ReLU(), pooled(24))


def _layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 24), nn.LayerNorm(24), nn.ReLU(),
        nn.Linear(24, CLASSES),
    )  # fmt: skip


def _scaled() -> nn.Module:
    """Features divided by their length, as in retrieval: every channel influences all."""

    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(functional.normalize(torch.relu(m.b(torch.relu(m.a(x)))), dim=1))

    return Net(wiring, a=nn.Linear(24, 32), b=nn.Linear(32, 20), head=nn.Linear(20, CLASSES))


def _softmax_gate() -> nn.Module:
    """A softmax over channels in the middle: pruned channels keep their share of it."""

    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(torch.relu(m.b(torch.softmax(m.a(x), -1))))

    return Net(wiring, a=nn.Linear(24, 16), b=nn.Linear(16, 20), head=nn.Linear(20, CLASSES))


def _maxout() -> nn.Module:
    """The larger of two halves, and a minimum with a third layer."""

    def wiring(m: Any, x: Tensor) -> Any:
        a, b = m.a(x).chunk(2, 1)
        return m.head(torch.minimum(torch.maximum(a, b), m.b(x)))

    return Net(wiring, a=conv(3, 24), b=conv(3, 12), head=pooled(12))


def _product() -> nn.Module:
    """Two branches multiplied, one of them compared with zero."""

    def wiring(m: Any, x: Tensor) -> Any:
        a, b, c = m.a(x), m.b(x), m.c(x)
        return m.head(torch.where(c > 0, a * b, a))

    return Net(wiring, a=conv(3, 12), b=conv(3, 12), c=conv(3, 12), head=pooled(12))


def _gated_skip() -> nn.Module:
    """A U-Net's skip behind a gate that both sides make; the lower level grows by bilinear interpolation."""

    def wiring(m: Any, x: Tensor) -> Any:
        skip = m.down(x)
        y = nn.functional.interpolate(m.deep(nn.functional.max_pool2d(skip, 2)), scale_factor=2, mode="bilinear")
        y = m.up(y)
        gate = torch.sigmoid(m.gate(torch.relu(m.below(y) + m.beside(skip))))
        return m.head(m.join(torch.cat([skip * gate, y], 1)))

    return Net(
        wiring, down=normed(3, 12), deep=normed(12, 24), up=conv(24, 12), below=conv(12, 8, 1), beside=conv(12, 8, 1),
        gate=conv(8, 1, 1), join=normed(24, 16), head=pooled(16),
    )  # fmt: skip


CASES = (
    Case("residual", lambda: _residual(1.0), IMAGE, ("head.2",), quick=True),
    Case("residual with a negative scale", lambda: _residual(-0.5), IMAGE, ("head.2",)),
    Case("pre-activation", lambda: nn.Sequential(conv(3, 16), PreActivation(16), PreActivation(16), nn.BatchNorm2d(16),
         nn.ReLU(), pooled(16)), IMAGE, ("5.2",), quick=True),
    Case("projection", lambda: nn.Sequential(normed(3, 12), Projected(12, 8, 24, 2), Projected(24, 10, 16, 1),
         pooled(16)), IMAGE, ("3.2",)),
    Case("stochastic depth", lambda: nn.Sequential(normed(3, 16), StochasticDepth(normed(16, 16), 0.8),
         StochasticDepth(normed(16, 16), 0.6), pooled(16)), IMAGE, ("3.2",)),
    Case("the input is added", _input_residual, IMAGE, ("head.2",)),
    Case("padded and broadcast sums", _grown, IMAGE, ("head.2",)),
    Case("concat", _concat, IMAGE, ("head.2",), quick=True),
    Case("concat and sum", _concat_sum, IMAGE, ("head.2",)),
    Case("dense block", lambda: nn.Sequential(conv(3, 12), Dense(12, 8, 3), normed(36, 16, 1), Dense(16, 8, 2),
         nn.BatchNorm2d(32), nn.ReLU(), pooled(32)), IMAGE, ("6.2",)),
    Case("split and chunk", _split, IMAGE, ("head.2",), quick=True),
    Case("slices", _sliced, IMAGE, ("head.2",)),
    Case("gathered by a buffer", _gathered, IMAGE, ("head.2",)),
    Case("grouped and shuffled", _shuffled, IMAGE, ("head.2",), quick=True),
    Case("depthwise", _depthwise, IMAGE, ("5.2",), quick=True),
    Case("depthwise with a multiplier", _multiplier, IMAGE, ("4.2",)),
    Case("inverted residual with gate", _inverted, IMAGE, ("head.2",)),
    Case("shared layers", _shared, IMAGE, ("head.2",)),
    Case("siamese", _siamese, (6, 12, 12), ("head",)),
    Case("tied decoder", Tied, (24,), ("head",)),
    Case("tied embedding", TiedEmbedding, (9,), ("head",), ids=30),
    Case("two heads", _two_heads, IMAGE, ("left", "right")),
    Case("scalar gates", _gates, IMAGE, ("head.2",)),
    Case("squeeze and excite", _squeeze_excite, IMAGE, ("4.2",), quick=True),
    Case("spatial gate", _spatial_gate, IMAGE, ("head.2",), needs="a mean over channels"),
    Case("gated skip", _gated_skip, IMAGE, ("head.2",), needs="bilinear interpolation is a product with a constant"),
    Case("group norm", lambda: _normalised(partial(nn.GroupNorm, 4)), IMAGE, ("6.2",), needs="ties channels"),
    Case("one group norm", lambda: _normalised(partial(nn.GroupNorm, 1)), IMAGE, ("6.2",), needs="ties channels"),
    Case("instance norm", lambda: _normalised(partial(nn.InstanceNorm2d, affine=True)), IMAGE, ("6.2",)),
    Case("layer norm", _layer_norm, (24,), ("6",), needs="ties channels"),
    Case("normalised features", _scaled, (24,), ("head",), needs="ties channels"),
    Case("softmax over channels", _softmax_gate, (24,), ("head",), needs="ties channels"),
    Case("maxout", _maxout, IMAGE, ("head.2",)),
    Case("product and where", _product, IMAGE, ("head.2",)),
)  # fmt: skip
