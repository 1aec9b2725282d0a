"""Small modules, one for each operator or habit that export supports: what `operators` and the tests run.

A case is a module, one sample's shape and the dtype of its values. Every module ends in three logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 3


@dataclass(frozen=True)
class Case:
    """`make()` gives the module, which takes batches of `sample`; `integers` from 0 up to this number, or floats."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    integers: int = 0

    def example(self) -> Tensor:
        """A batch of two."""
        return torch.zeros((2, *self.sample), dtype=torch.int64 if self.integers else torch.float32)


class Through(nn.Module):
    """A linear layer or convolution, `function` of what it gives, and a head on the flattened rest."""

    def __init__(self, first: nn.Module, function: Any, features: int, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.head = first, nn.ModuleList(parts), nn.Linear(features, CLASSES)
        self.function = (function,)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.function[0](self.first(x), *self.parts).flatten(1))
        return logits


def rows(function: Any, *parts: nn.Module, features: int = 6) -> Case:
    """`function` of rows of six."""
    return Case(lambda: Through(nn.Linear(5, 6), function, features, *parts), (5,))


def lines(function: Any, features: int, *parts: nn.Module) -> Case:
    """`function` of [n, 4, 9]."""
    return Case(lambda: Through(nn.Conv1d(2, 4, 3, padding=1), function, features, *parts), (2, 9))


def images(function: Any, features: int, *parts: nn.Module) -> Case:
    """`function` of [n, 4, 7, 8]."""
    return Case(lambda: Through(nn.Conv2d(2, 4, 3, padding=1), function, features, *parts), (2, 7, 8))


def volumes(function: Any, features: int, *parts: nn.Module) -> Case:
    """`function` of [n, 4, 5, 4, 6]."""
    return Case(lambda: Through(nn.Conv3d(2, 4, 3, padding=1), function, features, *parts), (2, 5, 4, 6))


def steps(function: Any, features: int, *parts: nn.Module) -> Case:
    """`function` of [n, 5, 8]."""
    return Case(lambda: Through(nn.Linear(4, 8), function, features, *parts), (5, 4))


def _part(x: Tensor, part: nn.Module) -> Tensor:
    made: Tensor = part(x)
    return made


def _self_attention(x: Tensor, part: nn.Module) -> Tensor:
    made: Tensor = part(x, x, x)[0]
    return made


def _causal(x: Tensor, part: nn.Module) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    made: Tensor = part(x, x, x, attn_mask=mask, need_weights=False)[0]
    return made


def _heads(x: Tensor, **settings: Any) -> Tensor:
    q = x.reshape(-1, 5, 2, 4).transpose(1, 2)
    made: Tensor = functional.scaled_dot_product_attention(q, q.flip(2), (q * 0.5).tanh(), **settings)
    return made


class Buffered(nn.Module):
    """Buffers of every kind that stay as they are: a table of floats, places, a permutation, a mask, infinities."""

    mask: Tensor
    bar: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(30, CLASSES)
        self.register_buffer("places", torch.arange(5) + 2)
        self.register_buffer("order", torch.tensor([3, 0, 4, 1, 2]))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))
        self.register_buffer("bar", torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, 5]."""
        y = self.embed(x) + self.embed(self.places)
        y = y[:, self.order] * self.scale
        y = torch.where(self.mask, y, -y)
        y = torch.softmax(y @ y.transpose(1, 2) + self.bar, -1) @ y
        logits: Tensor = self.head(y.flatten(1))
        return logits


class Held(nn.Module):
    """Batch-norm that its author keeps in evaluation mode, beside one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.b, self.moving, self.head = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 3 * 4, CLASSES)
        self.norm.eval()

    def train(self, mode: bool = True) -> Held:
        """All but the first norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, 2, 7, 8]."""
        y = self.moving(self.b(self.norm(self.a(x)).relu())).relu()
        logits: Tensor = self.head(y.flatten(1))
        return logits


class Unused(nn.Module):
    """Parameters without use, frozen ones, and names that a graph uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(()))
        self.loss, self.c0 = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.v7, self.r1 = nn.Linear(5, 6), nn.Linear(6, CLASSES)
        self.idle = nn.Linear(4, 7)
        self.r1.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, 5]."""
        logits: Tensor = self.r1((self.v7(x) * self.x + self.y * self.c0).tanh() * self.loss)
        return logits


class Twice(nn.Module):
    """A block that runs twice, a weight used twice, changes in place and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = (
            nn.Linear(5, 6),
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, 5]."""
        y = self.block(self.block(self.first(x)))
        z = y.clone()
        z[:, 2:4] += 1.5
        z.view(-1, 2, 3)[:, 0].mul_(0.5)
        z[:, 5] = y[:, 0] * 2
        made: Tensor = self.head(z + y @ cast(nn.Linear, self.block[0]).weight.t())
        return made


class Branches(nn.Module):
    """Another function in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, 5]."""
        y = self.first(x)
        y = y.tanh() if self.training else y.relu() * 2
        made: Tensor = self.head(y)
        return made


class Sequences(nn.Module):
    """Embedding, a recurrent layer and the last step."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 5), layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, t]."""
        logits: Tensor = self.head(self.layer(self.embed(x))[0][:, -1])
        return logits


class Begun(Sequences):
    """The same, of sequences that begin with an id of the network's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of [n, t]."""
        return super().forward(torch.cat([torch.full((x.shape[0], 1), 10), x], 1))


def sequences(make: Callable[[], nn.Module], width: int) -> Case:
    """A recurrent layer on six steps of width 5."""
    return Case(lambda: Sequences(make(), width), (6,), 11)


def _normed(x: Tensor) -> Tensor:
    made: Tensor = x / x.norm(dim=-1, keepdim=True)
    return made + x.std(1, keepdim=True) * x.var(-1, keepdim=True, unbiased=False)


def _standard(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, (1,), keepdim=True, unbiased=False)
    spread, _ = torch.std_mean(x, dim=1, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) + spread


def _pieces(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    c, d, e = torch.split(x, [1, 2, 3], 1)
    made = torch.stack([a, b * 2], 2).flatten(1) + torch.cat([e, d, c], 1)
    return made.roll(2, 1).flip(1) + x.repeat(1, 2)[:, 3:9] + x.tile(2)[:, ::2]


def _repeated(x: Tensor) -> Tensor:
    """What is repeated for each sample has several rows, as a mask of several heads."""
    rows = x.new_tensor([[1.0, 2.0], [3.0, 4.0]])
    return x * rows.repeat(x.shape[0], 3).reshape(-1, 2, 6).sum(1) + rows[:1].repeat(x.shape[0], 3)


def _changed(x: Tensor) -> Tensor:
    """Views and new tensors, changed in place, and a constant of forward's own."""
    y = x * 2
    y[:, 0] = 0
    y += torch.tensor([1.0, 2, 3, 4, 5, 6])
    w = y.new_zeros(y.shape)
    w[:, ::2] += x[:, ::2]
    w.transpose(0, 1)[1].mul_(3)
    return y.add_(w, alpha=0.5)


def _set(x: Tensor) -> Tensor:
    """One value where a mask of entries, or of whole rows, says so, and in columns by number."""
    y, z = x.clone(), torch.zeros_like(x)
    y[x < -0.2] = 0.3
    y[x[:, 0] > 0.4] = 0.0
    y[:, [0, 2]] = 0.5
    z[:, torch.tensor([0, 3])] = 1
    y.view(-1, 2, 3)[:, :, [0, 2]] += z.view(-1, 2, 3)[:, :, [0, 2]]
    return y


def _own_place(x: Tensor) -> Tensor:
    """Two steps of each sample, which its own values choose."""
    chosen = (x[..., :2] > 0).sum(1).clamp(max=4)
    return x[torch.arange(x.shape[0])[:, None], chosen]


def _others_places(x: Tensor) -> Tensor:
    """The same of the sample before, of the samples in another order, and of the first half of more samples."""
    chosen, n = (x[..., :2] > 0).sum(1).clamp(max=4), x.shape[0]
    made = x[torch.arange(-1, n - 1)[:, None], chosen] - x[torch.arange(0, -n, -1)[:, None], chosen]
    return made + torch.cat([x * 2, x])[torch.arange(n)[:, None], chosen]


def _pair(x: Tensor, layer: nn.Module) -> Tensor:
    """Both halves of a sample as two samples, less what the first sample has."""
    n = x.shape[0]
    y = layer(torch.cat([x[:n, :3], x[:, 3:]]))
    made: Tensor = (y[:n] - y[-n:]).abs() - y[:1] + torch.arange(3 * n)[n : 2 * n, None] * 0.1
    return made


def _picked(x: Tensor) -> Tensor:
    y = x.index_select(1, torch.tensor([5, 0, 0, 3]))
    z = x.gather(1, torch.tensor([[1, 1, 4]]).expand(x.shape[0], 3))
    return torch.cat([y, z, x[:, [2, 2, 5]], x.select(1, 4).unsqueeze(1)], 1)


def _masked(x: Tensor) -> Tensor:
    y = x.masked_fill(x > 0.5, 0.25) + torch.where(x.abs() < 0.3, x * 3, x.exp().clamp(max=2.0))
    y = y + torch.nan_to_num(1 / x.detach().relu()) * 1e-38
    return y.clamp(-1.0, 1.5) + torch.maximum(x, y * 0.5) - torch.minimum(x, x.new_tensor(0.1))


def _numbers(x: Tensor) -> Tensor:
    y = (x * x + 1).log() + (x * 0.1).sin() * x.cos() + x.abs().sqrt() + (x * x + 0.5) ** 1.5
    return y + x.square().rsqrt().clamp(max=3) + x.sign() * x.exp().log1p() + torch.erf(x) + x.atan() - x.sinh() / 9


def _einsum(x: Tensor) -> Tensor:
    y = torch.einsum("ntf,nsf->nts", x, x) * 0.1
    return torch.einsum("nts,nsf->ntf", y, x) + torch.einsum("ntf,ng->ntf", x, x[:, 0])


def _reduced(x: Tensor) -> Tensor:
    return torch.cat([x.amax(1), x.amin(1), x.sum(1), x.mean(1), x.max(1).values, x.logsumexp(1)], 1)


def _cast(x: Tensor) -> Tensor:
    counted = (x > 0).sum(1, keepdim=True).float() + x.shape[1] + (x > 0.1).long().cumsum(1)[:, :1]
    return x * counted + torch.arange(6) * 0.1 + torch.zeros(6, dtype=x.dtype)


def _transposed(x: Tensor) -> Tensor:
    y = x.transpose(1, 2).contiguous().view(-1, 40).reshape(-1, 8, 5).permute(0, 2, 1)
    return y.movedim(1, 2).reshape(-1, 5, 8).swapaxes(1, 2).unsqueeze(1).expand(-1, 2, -1, -1)


CASES: dict[str, Case] = {
    "relu": rows(_part, nn.ReLU()),
    "relu in place": rows(_part, nn.ReLU(inplace=True)),
    "relu6": rows(_part, nn.ReLU6()),
    "silu": rows(_part, nn.SiLU()),
    "mish": rows(_part, nn.Mish()),
    "gelu": rows(_part, nn.GELU()),
    "gelu tanh": rows(_part, nn.GELU("tanh")),
    "elu": rows(_part, nn.ELU(0.7)),
    "selu": rows(_part, nn.SELU()),
    "celu": rows(_part, nn.CELU(1.5)),
    "leaky relu": rows(_part, nn.LeakyReLU(0.2)),
    "prelu": rows(_part, nn.PReLU()),
    "prelu per channel": images(_part, 224, nn.PReLU(4)),
    "hardswish": rows(_part, nn.Hardswish()),
    "hardsigmoid": rows(_part, nn.Hardsigmoid()),
    "hardtanh": rows(_part, nn.Hardtanh()),
    "hardshrink, softshrink": rows(lambda x, a, b: a(x) + b(x), nn.Hardshrink(), nn.Softshrink()),
    "softplus": rows(_part, nn.Softplus(2.0, 5.0)),
    "softsign, tanhshrink": rows(lambda x, a, b: a(x) + b(x), nn.Softsign(), nn.Tanhshrink()),
    "logsigmoid": rows(_part, nn.LogSigmoid()),
    "threshold": rows(_part, nn.Threshold(0.1, 0.7)),
    "glu": rows(_part, nn.GLU(), features=3),
    "softmax, log_softmax": rows(lambda x: x.softmax(1) + x.log_softmax(1)),
    "multi-head attention": steps(_self_attention, 40, nn.MultiheadAttention(8, 2, batch_first=True)),
    "attention with biases as keys": steps(
        _self_attention, 40, nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    ),
    "masked multi-head attention": steps(_causal, 40, nn.MultiheadAttention(8, 2, batch_first=True)),
    "transformer encoder layer": steps(_part, 40, nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "transformer encoder": steps(
        _part, 40,
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2,
            enable_nested_tensor=False,
        ),
    ),
    "attention function": steps(_heads, 40),
    "causal attention": steps(lambda x: _heads(x, is_causal=True), 40),
    "scaled attention with a mask": steps(
        lambda x: _heads(x, attn_mask=torch.ones(5, 5).tril().bool(), scale=0.3), 40
    ),
    "conv1d": lines(_part, 4 * 4, nn.Conv1d(4, 4, 3, 2)),
    "conv3d": volumes(_part, 4 * 2 * 1 * 2, nn.Conv3d(4, 4, 3, 2)),
    "dilated convolution": images(_part, 4 * 3 * 4, nn.Conv2d(4, 4, 3, dilation=2)),
    "grouped convolution": images(_part, 6 * 4 * 4, nn.Conv2d(4, 6, 3, 2, 1, groups=2)),
    "depthwise convolution": images(_part, 8 * 4 * 4, nn.Conv2d(4, 8, 3, 2, 1, groups=4)),
    "convolution with padding same": images(_part, 224, nn.Conv2d(4, 4, (2, 3), padding="same")),
    "circular padding": images(_part, 224, nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "replicate padding": images(_part, 224, nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")),
    "reflect padding": images(_part, 224, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "pad layers": images(lambda x, *p: p[2](p[1](p[0](x))), 4 * 12 * 14, nn.ZeroPad2d((1, 2, 0, 1)),
                         nn.ReflectionPad2d((2, 1, 1, 1)), nn.ReplicationPad2d((0, 0, 1, 1))),
    "transposed conv1d": lines(_part, 3 * 19, nn.ConvTranspose1d(4, 3, 3, 2)),
    "transposed conv2d": images(_part, 6 * 14 * 16, nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)),
    "transposed conv3d": volumes(_part, 2 * 6 * 5 * 7, nn.ConvTranspose3d(4, 2, 2)),
    "max-pool": images(_part, 4 * 4 * 4, nn.MaxPool2d(3, 2, 1)),
    "max-pool ceil, dilated": images(lambda x, a, b: torch.cat([a(x).flatten(1), b(x).flatten(1)], 1), 100,
                                     nn.MaxPool2d(2, 2, ceil_mode=True), nn.MaxPool2d(2, (2, 2), dilation=2)),
    "max-pool 1d": lines(_part, 4 * 5, nn.MaxPool1d(2, ceil_mode=True)),
    "max-pool 3d": volumes(_part, 4 * 2 * 2 * 3, nn.MaxPool3d(2)),
    "average pool": images(_part, 4 * 4 * 4, nn.AvgPool2d(3, 2, 1)),
    "average pool, counting inside": images(_part, 4 * 4 * 5, nn.AvgPool2d(3, 2, 1, True, False)),
    "average pool, own divisor": images(_part, 4 * 3 * 4, nn.AvgPool2d(2, divisor_override=3)),
    "average pool 1d, ceil": lines(_part, 4 * 5, nn.AvgPool1d(2, ceil_mode=True)),
    "average pool 3d": volumes(_part, 4 * 2 * 2 * 3, nn.AvgPool3d(2)),
    "adaptive average pool": images(_part, 4 * 3 * 5, nn.AdaptiveAvgPool2d((3, 5))),
    "adaptive average pool 1d, 3d": lines(_part, 4 * 4, nn.AdaptiveAvgPool1d(4)),
    "global average pool": images(_part, 4, nn.AdaptiveAvgPool2d(1)),
    "adaptive max-pool": images(_part, 4 * 3 * 5, nn.AdaptiveMaxPool2d((3, 5))),
    "adaptive max-pool of equal windows": images(_part, 4 * 4, nn.AdaptiveMaxPool2d((1, 4))),
    "batch-norm": images(_part, 224, nn.BatchNorm2d(4)),
    "batch-norm without factors": images(_part, 224, nn.BatchNorm2d(4, affine=False)),
    "batch-norm 1d": rows(_part, nn.BatchNorm1d(6, momentum=0.3)),
    "batch-norm held in evaluation": Case(Held, (2, 7, 8)),
    "layer norm": steps(_part, 40, nn.LayerNorm(8)),
    "layer norm of two axes": steps(_part, 40, nn.LayerNorm((5, 8), elementwise_affine=False)),
    "group norm": images(_part, 224, nn.GroupNorm(2, 4)),
    "instance norm": images(_part, 224, nn.InstanceNorm2d(4, affine=True)),
    "instance norm with statistics": images(_part, 224, nn.InstanceNorm2d(4, track_running_stats=True)),
    "rms norm": steps(_part, 40, nn.RMSNorm(8)),
    "weight norm": Case(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3)),
        (5,),
    ),
    "weight norm by hook": Case(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 6)), nn.Linear(6, 3)), (5,)),
    "dropout": rows(_part, nn.Dropout(0.4)),
    "dropout of channels": images(_part, 224, nn.Dropout2d(0.4)),
    "alpha dropout": rows(_part, nn.AlphaDropout(0.3)),
    "transformer with dropout": steps(_part, 40, nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)),
    "lstm": sequences(lambda: nn.LSTM(5, 4, batch_first=True), 4),
    "lstm of two layers, both ways, dropout": sequences(
        lambda: nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True, dropout=0.2), 8
    ),
    "gru": sequences(lambda: nn.GRU(5, 4, batch_first=True), 4),
    "gru of two layers, both ways": sequences(lambda: nn.GRU(5, 4, 2, bidirectional=True, batch_first=True), 8),
    "gru without biases": sequences(lambda: nn.GRU(5, 4, batch_first=True, bias=False), 4),
    "gru after an id of its own": Case(lambda: Begun(nn.GRU(5, 4, batch_first=True), 4), (6,), 11),
    "rnn": sequences(lambda: nn.RNN(5, 4, batch_first=True), 4),
    "rnn with relu": sequences(lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True), 4),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(9, 4, 0), nn.Flatten(), nn.Linear(20, 3)), (5,), 9),
    "embedding bag": Case(lambda: nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=2), nn.Linear(4, 3)), (5,), 9),
    "embedding bag, largest": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(9, 4, mode="max", padding_idx=0), nn.Linear(4, 3)), (5,), 9
    ),
    "distances": rows(lambda x, p: torch.cdist(x, p.weight), nn.Linear(6, 6)),
    "bilinear": rows(lambda x, p: p(x, x.flip(1)), nn.Bilinear(6, 6, 6)),
    "bilinear upsampling": images(_part, 4 * 14 * 16, nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear with corners": images(_part, 4 * 9 * 5, nn.Upsample((9, 5), mode="bilinear", align_corners=True)),
    "nearest upsampling": images(_part, 4 * 14 * 16, nn.Upsample(scale_factor=2)),
    "nearest to any size": images(_part, 4 * 9 * 13, nn.Upsample((9, 13))),
    "bicubic upsampling": images(_part, 4 * 9 * 13, nn.Upsample((9, 13), mode="bicubic")),
    "linear upsampling": lines(_part, 4 * 18, nn.Upsample(scale_factor=2, mode="linear")),
    "pixel shuffle": images(_part, 224, nn.PixelShuffle(2)),
    "pixel unshuffle": images(lambda x, p: p(x[:, :, :6]), 192, nn.PixelUnshuffle(2)),
    "channel shuffle": images(_part, 224, nn.ChannelShuffle(2)),
    "unfold": images(_part, 16 * 42, nn.Unfold(2)),
    "tensor unfold": lines(lambda x: x.unfold(2, 3, 2), 48),
    "cumsum": steps(lambda x: x.cumsum(1), 40),
    "einsum": steps(_einsum, 40),
    "std, var, norm": rows(_normed),
    "var_mean, std_mean": rows(_standard),
    "chunk, split, cat, stack, roll, flip": rows(_pieces),
    "repeated for each sample": rows(_repeated),
    "views changed in place": rows(_changed),
    "one value by a mask, or by numbers": rows(_set),
    "a place in each sample": steps(_own_place, 16),
    "places in other samples": steps(_others_places, 16),
    "two samples of one": rows(_pair, nn.Linear(3, 6)),
    "gather, index_select, indices": rows(_picked, features=11),
    "masked_fill, where, clamp": rows(_masked),
    "numbers": rows(_numbers),
    "reductions": steps(_reduced, 48),
    "casts, comparisons, counts": rows(_cast),
    "views and moves": steps(_transposed, 80),
    "buffers that stay": Case(Buffered, (5,), 9),
    "unused, frozen and odd names": Case(Unused, (5,)),
    "shared, in place, views": Case(Twice, (5,)),
    "training and evaluation differ": Case(Branches, (5,)),
}  # fmt: skip
