"""Graphs written to break compaction: divisions, einsum, cells, starts of decoders, attention in rarer forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.compaction.zoo.case import CLASSES, Case, Net, conv, normed, pooled

IMAGE, STEPS = (3, 12, 12), 9


def _quotient() -> nn.Module:
    """One branch over another, both pruned apart."""

    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(m.c(m.a(x) / (1 + m.b(x).abs())))

    return Net(wiring, a=conv(3, 12), b=conv(3, 12), c=normed(12, 10), head=pooled(10))


def _local_response() -> nn.Module:
    return nn.Sequential(conv(3, 12), nn.ReLU(), nn.LocalResponseNorm(3), normed(12, 10), pooled(10))


def _cosine() -> nn.Module:
    """Features and prototypes of length one."""

    def wiring(m: Any, x: Tensor) -> Any:
        return 8 * functional.linear(functional.normalize(m.b(torch.relu(m.a(x)))), functional.normalize(m.w))

    return Net(wiring, a=nn.Linear(16, 12), b=nn.Linear(12, 8), w=nn.Parameter(torch.randn(CLASSES, 8)))


def _capsules() -> nn.Module:
    """Vectors of four, squashed to lengths below one."""

    def wiring(m: Any, x: Tensor) -> Any:
        u = m.a(x).view(-1, 6, 4)
        n = (u**2).sum(-1, keepdim=True)
        return m.head(torch.relu(m.b((u * n / (1 + n) / torch.sqrt(n + 1e-8)).flatten(1))))

    return Net(wiring, a=nn.Linear(16, 24), b=nn.Linear(24, 12), head=nn.Linear(12, CLASSES))


def _skeletons() -> nn.Module:
    """A graph convolution over joints: channels times a fixed matrix, by einsum."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(torch.einsum("nctv,vw->nctw", m.a(x), m.joints))
        return m.head(torch.relu(m.t(y)).mean((2, 3)))

    made = Net(wiring, a=conv(3, 12, 1), t=nn.Conv2d(12, 14, (3, 1), padding=(1, 0)), head=nn.Linear(14, CLASSES))
    made.register_buffer("joints", torch.rand(7, 7) * (torch.rand(7, 7) > 0.5))
    return made


def _nodes() -> nn.Module:
    """A graph convolution with the matrix on the left."""

    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(torch.relu(m.near @ m.b(torch.relu(m.near @ m.a(x)))).mean(1))

    made = Net(wiring, a=nn.Linear(8, 12), b=nn.Linear(12, 14), head=nn.Linear(14, CLASSES))
    made.register_buffer("near", torch.rand(7, 7))
    return made


def _bilinear() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(torch.relu(m.b(torch.relu(m.a(x)), torch.relu(m.c(x)))))

    return Net(wiring, a=nn.Linear(16, 10), c=nn.Linear(16, 8), b=nn.Bilinear(10, 8, 12), head=nn.Linear(12, CLASSES))


def _lengths() -> nn.Module:
    """A convolution as directions and lengths."""
    a = nn.utils.parametrizations.weight_norm(conv(3, 12))
    return Net(lambda m, x: m.head(torch.relu(m.b(torch.relu(m.a(x))))), a=a, b=conv(12, 10), head=pooled(10))


def _steps() -> nn.Module:
    """A convolution of every step, steps and samples in one axis."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.c(x.flatten(0, 1)).amax((2, 3)).unflatten(0, (-1, 4))
        return m.head(torch.relu(m.h(y.mean(1))))

    return Net(wiring, c=normed(3, 8), h=nn.Linear(8, 10), head=nn.Linear(10, CLASSES))


# --- recurrence


def _rnn() -> nn.Module:
    return Net(lambda m, x: m.head(m.f(x)[0].mean(1)), f=nn.RNN(8, 12, batch_first=True), head=nn.Linear(12, CLASSES))


def _lstm_cell() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[0], 10)
        for t in range(x.shape[1]):
            h, c = m.f(x[:, t], (h, c))
        return m.head(h)

    return Net(wiring, f=nn.LSTMCell(8, 10), head=nn.Linear(10, CLASSES))


def _gru_cell() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], 10)
        states = []
        for t in range(x.shape[1]):
            h = m.f(x[:, t], h)
            states.append(h)
        return m.head(torch.stack(states, 1).mean(1))

    return Net(wiring, f=nn.GRUCell(8, 10), head=nn.Linear(10, CLASSES))


def _decoder(kind: type[nn.LSTM] | type[nn.GRU], both: bool) -> Callable[[], nn.Module]:
    """A layer that starts from another layer's last state."""

    def make() -> nn.Module:
        def wiring(m: Any, x: Tensor) -> Any:
            return m.head(m.d(x[:, -4:], m.e(x)[1])[0].mean(1))

        e, d = (kind(8, 10, batch_first=True, bidirectional=both) for _ in range(2))
        return Net(wiring, e=e, d=d, head=nn.Linear(20 if both else 10, CLASSES))

    return make


def _gru_stream() -> nn.Module:
    """Two layers in both directions on one residual stream."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.i(x)
        y = y + m.f(y)[0]
        y = y + m.g(y)[0]
        return m.head(y.mean(1))

    f, g = (nn.GRU(16, 8, batch_first=True, bidirectional=True) for _ in range(2))
    return Net(wiring, i=nn.Linear(8, 16), f=f, g=g, head=nn.Linear(16, CLASSES))


# --- attention


def _cross() -> nn.Module:
    """Queries of five rows, keys and values of seven."""

    def wiring(m: Any, x: Tensor) -> Any:
        a, b = x[:, :5], x[:, 5:]
        q = m.q(a).view(-1, 5, 3, 8).transpose(1, 2)
        k, v = (layer(b).view(-1, 7, 3, 8).transpose(1, 2) for layer in (m.k, m.v))
        y = (torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, -1) @ v).transpose(1, 2).reshape(-1, 5, 24)
        return m.head(torch.relu(m.o(y)).mean(1))

    q, k, v = (nn.Linear(16, 24) for _ in range(3))
    return Net(wiring, q=q, k=k, v=v, o=nn.Linear(24, 16), head=nn.Linear(16, CLASSES))


def _rotary() -> nn.Module:
    """Four query heads on two heads of keys, rotated by their positions; no biases."""

    def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = t[..., :4], t[..., 4:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = (layer(x).view(-1, 6, n, 8).transpose(1, 2) for layer, n in ((m.q, 4), (m.k, 2), (m.v, 2)))
        q, k = turned(q, m.cos, m.sin), turned(k, m.cos, m.sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(m.later, -1e9)
        return m.head(m.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 6, 32))[:, -1])

    q, k, v, o = (nn.Linear(16, 32, bias=False), *(nn.Linear(16, 16, bias=False) for _ in range(2)), nn.Linear(32, 16))
    made = Net(wiring, q=q, k=k, v=v, o=o, head=nn.Linear(16, CLASSES))
    angles = torch.arange(6)[:, None] * (10000.0 ** (-torch.arange(4) / 4))
    made.register_buffer("cos", angles.cos())
    made.register_buffer("sin", angles.sin())
    made.register_buffer("later", torch.ones(6, 6, dtype=torch.bool).triu(1))
    return made


def _relative() -> nn.Module:
    """A learned score for each distance and head."""

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(x).view(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = m.table[m.distance.view(-1)].view(6, 6, 2).permute(2, 0, 1)
        y = ((q * 8**-0.5 @ k.transpose(-1, -2) + scores).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return m.head(m.o(y).mean(1))

    table = nn.Parameter(torch.randn(11, 2))
    made = Net(wiring, qkv=nn.Linear(16, 48), o=nn.Linear(16, 16), table=table, head=nn.Linear(16, CLASSES))
    made.register_buffer("distance", torch.arange(6)[:, None] - torch.arange(6) + 5)
    return made


def _places() -> nn.Module:
    """Attention between the places of an image (a non-local block)."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.s(x)
        t, p, g = m.t(y).flatten(2).transpose(1, 2), m.p(y).flatten(2), m.g(y).flatten(2).transpose(1, 2)
        return m.head(y + m.o(((t @ p).softmax(-1) @ g).transpose(1, 2).view(-1, 6, 6, 6)))

    t, p, g = (conv(12, 6, 1) for _ in range(3))
    return Net(wiring, s=normed(3, 12, stride=2), t=t, p=p, g=g, o=conv(6, 12, 1), head=pooled(12))


def _linear_attention() -> nn.Module:
    """Attention without a softmax, by einsum of three operands."""

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = (layer(x).view(-1, STEPS, 3, 8) for layer in (m.q, m.k, m.v))
        q, k = torch.relu(q) + 0.1, torch.relu(k) + 0.1
        both = torch.einsum("nshd,nshm->nhmd", k, v)
        scale = 1 / torch.einsum("nlhd,nhd->nlh", q, k.sum(1))
        return m.head(m.o(torch.einsum("nlhd,nhmd,nlh->nlhm", q, both, scale).reshape(-1, STEPS, 24)).mean(1))

    q, k, v = (nn.Linear(16, 24) for _ in range(3))
    return Net(wiring, q=q, k=k, v=v, o=nn.Linear(24, 12), head=nn.Linear(12, CLASSES))


def _selective() -> nn.Module:
    """Two kernels, weighed by channel with a softmax over the kernels."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.s(x)
        u = torch.stack([m.a(y), m.b(y)], 1)
        z = torch.relu(m.f(u.sum(1).mean((2, 3))))
        weights = torch.stack([m.p(z), m.q(z)], 1).softmax(1)[..., None, None]
        return m.head(m.c((u * weights).sum(1)))

    return Net(
        wiring, s=normed(3, 12), a=normed(12, 12), b=normed(12, 12, dilation=2, padding=2), f=nn.Linear(12, 8),
        p=nn.Linear(8, 12), q=nn.Linear(8, 12), c=normed(12, 10), head=pooled(10),
    )  # fmt: skip


ROWS = (STEPS, 16)
CASES = (
    Case("quotient of branches", _quotient, IMAGE, ("head.2",), needs="a dead dividend"),
    Case("local response norm", _local_response, IMAGE, ("4.2",), needs="a dead dividend"),
    Case("cosine classifier", _cosine, (16,), (), needs="a dead dividend"),
    Case("capsules", _capsules, (16,), ("head",), needs="a dead dividend"),
    Case("graph convolution, einsum", _skeletons, (3, 8, 7), ("head",), quick=True, needs="a matrix with three axes"),
    Case("graph convolution, matrix first", _nodes, (7, 8), ("head",), needs="a constant first factor"),
    Case("bilinear", _bilinear, (16,), ("head",), needs="a weight of three axes"),
    Case("weight norm", _lengths, IMAGE, ("head.2",), needs="a weight made of others"),
    Case("convolution of each step", _steps, (4, 3, 8, 8), ("head",), needs="steps in the samples' axis"),
    Case("rnn", _rnn, (STEPS, 8), ("head",), needs="one gate"),
    Case("lstm cell", _lstm_cell, (5, 8), ("head",), needs="an unrolled loop"),
    Case("gru cell", _gru_cell, (5, 8), ("head",), needs="an unrolled loop"),
    Case("decoder, lstm both ways", _decoder(nn.LSTM, True), (STEPS, 8), ("head",), needs="starts from another layer"),
    Case("decoder, gru", _decoder(nn.GRU, False), (STEPS, 8), ("head",), needs="starts from another layer"),
    Case("gru both ways on a stream", _gru_stream, (STEPS, 8), ("head",), needs="few units beside many dead ones"),
    Case("attention across rows", _cross, (12, 16), ("head",), needs="an average of a constant"),
    Case("attention, rotary and grouped keys", _rotary, (6, 16), ("head",), needs="pairs of entries"),
    Case("attention, relative positions", _relative, (6, 16), ("head",), needs="an average of a constant"),
    Case("attention of places", _places, IMAGE, ("head.2",), needs="an average of a constant"),
    Case("linear attention", _linear_attention, ROWS, ("head",), needs="three operands"),
    Case("selective kernels", _selective, IMAGE, ("head.2",), needs="a softmax over branches"),
)
