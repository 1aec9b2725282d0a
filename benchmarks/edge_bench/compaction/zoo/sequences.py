"""Attention and recurrence: heads written in every usual way, transformer blocks, LSTM and GRU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_bench.compaction.zoo.case import CLASSES, Case, Net
from edge_bench.models.attention import TransformerBlock

STEPS, WIDTH, HEADS = 9, 24, 3


def _heads(y: Tensor) -> Tensor:
    """[n, t, heads * d] to [n, heads, t, d]."""
    return y.view(-1, STEPS, HEADS, y.shape[-1] // HEADS).transpose(1, 2)


def _joined(y: Tensor) -> Tensor:
    """The inverse of `_heads`."""
    return y.transpose(1, 2).reshape(-1, STEPS, HEADS * y.shape[-1])


def _separate() -> nn.Module:
    """Query, key and value by layers of their own; the values are wider than the keys."""

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = _heads(m.q(x)), _heads(m.k(x)), _heads(m.v(x))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        return m.head(torch.relu(m.out(_joined(weights @ v))).mean(1))

    return Net(
        wiring, q=nn.Linear(16, 24), k=nn.Linear(16, 24), v=nn.Linear(16, 36), out=nn.Linear(36, 20),
        head=nn.Linear(20, CLASSES),
    )  # fmt: skip


def _functional() -> nn.Module:
    """`scaled_dot_product_attention` on chunks of one layer."""

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = (_heads(part) for part in m.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v)
        return m.head((x + m.out(_joined(y))).mean(1))

    return Net(wiring, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES))


def _einsum() -> nn.Module:
    """One query head for all keys (multi-query attention), written with einsum."""

    def wiring(m: Any, x: Tensor) -> Any:
        q, k, v = _heads(m.q(x)), m.k(x), m.v(x)
        weights = torch.softmax(torch.einsum("nhtd,nsd->nhts", q, k), -1)
        return m.head(m.out(_joined(torch.einsum("nhts,nsd->nhtd", weights, v))).mean(1))

    return Net(
        wiring, q=nn.Linear(WIDTH, WIDTH), k=nn.Linear(WIDTH, 8), v=nn.Linear(WIDTH, 8), out=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one sequence, added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y, _ = self.attention(x, x, x, need_weights=False)
        logits: Tensor = self.head((x + y).mean(1))
        return logits


def _encoder(**settings: bool | str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, **settings)  # type: ignore[arg-type]
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda m, x: m.head(m.encoder(x).mean(1)), encoder=encoder, head=nn.Linear(WIDTH, CLASSES))


def _perceptron() -> nn.Module:
    """The transformer's two layers on [n, t, f], without attention."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.narrow(functional.gelu(m.wide(x)))
        return m.head(torch.relu(m.after(x + y)).mean(1))

    return Net(
        wiring, wide=nn.Linear(16, 48), narrow=nn.Linear(48, 16), after=nn.Linear(16, 20), head=nn.Linear(20, CLASSES)
    )


def _gated() -> nn.Module:
    """A gated unit (SwiGLU) and one whose halves come from one layer (GLU)."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.down(functional.silu(m.gate(x)) * m.up(x))
        return m.head(functional.glu(m.both(y), -1).mean(1))

    return Net(
        wiring, gate=nn.Linear(16, 40), up=nn.Linear(16, 40), down=nn.Linear(40, 16), both=nn.Linear(16, 36),
        head=nn.Linear(18, CLASSES),
    )  # fmt: skip


def _mixer() -> nn.Module:
    """Layers over steps and over features in turn (MLP-Mixer)."""

    def wiring(m: Any, x: Tensor) -> Any:
        x = x + m.t2(functional.gelu(m.t1(x.transpose(1, 2)))).transpose(1, 2)
        x = x + m.f2(functional.gelu(m.f1(x)))
        return m.head(x.mean(1))

    return Net(
        wiring, t1=nn.Linear(STEPS, 20), t2=nn.Linear(20, STEPS), f1=nn.Linear(16, 32), f2=nn.Linear(32, 16),
        head=nn.Linear(16, CLASSES),
    )  # fmt: skip


def _first_token() -> nn.Module:
    """A learned token in front of the sequence is read at the end; positions are added."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.cat([m.token.expand(x.shape[0], -1, -1), m.read(x)], 1) + m.places
        return m.head(m.norm(m.block(y))[:, 0])

    return Net(
        wiring, read=nn.Linear(16, WIDTH), token=nn.Parameter(torch.zeros(1, 1, WIDTH)),
        places=nn.Parameter(torch.zeros(STEPS + 1, WIDTH)), block=TransformerBlock(WIDTH, HEADS),
        norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def _windows() -> nn.Module:
    """Attention within windows of an image, which join the batch; every second block shifts them (Swin)."""

    def within(m: Any, x: Tensor) -> Tensor:
        y = x.reshape(-1, 2, 3, 2, 3, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, 16)
        q, k, v = m.qkv(y).reshape(-1, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + m.places, -1)
        z: Tensor = m.out((weights @ v).transpose(1, 2).reshape(-1, 9, 16))
        return z.reshape(-1, 2, 2, 3, 3, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6, 6, 16)

    def wiring(m: Any, x: Tensor) -> Any:
        y = m.patches(x).permute(0, 2, 3, 1)
        y = y + within(m, m.norm(y))
        y = y + torch.roll(within(m, torch.roll(m.norm(y), (-1, -1), (1, 2))), (1, 1), (1, 2))
        return m.head(torch.relu(m.hidden(y)).mean((1, 2)))

    return Net(
        wiring, patches=nn.Conv2d(3, 16, 2, 2), norm=nn.LayerNorm(16), qkv=nn.Linear(16, 48), out=nn.Linear(16, 16),
        places=nn.Parameter(torch.zeros(2, 9, 9)), hidden=nn.Linear(16, 24), head=nn.Linear(24, CLASSES),
    )  # fmt: skip


def _latent() -> nn.Module:
    """A few learned queries read the sequence (Perceiver)."""

    def wiring(m: Any, x: Tensor) -> Any:
        y, q = m.read(x), m.queries.expand(x.shape[0], -1, -1)
        z = q + m.block(q, y, y, need_weights=False)[0]
        return m.head((z + m.down(functional.gelu(m.up(m.norm(z))))).flatten(1))

    return Net(
        wiring, read=nn.Linear(16, 16), queries=nn.Parameter(torch.zeros(1, 3, 16)), norm=nn.LayerNorm(16),
        block=nn.MultiheadAttention(16, 2, batch_first=True), up=nn.Linear(16, 32), down=nn.Linear(32, 16),
        head=nn.Linear(48, CLASSES),
    )  # fmt: skip


def _recurrent(make: Callable[..., nn.Module], layers: int, both: bool, last: bool) -> nn.Module:
    """A recurrent net on features; the last state or all of them are read."""

    def wiring(m: Any, x: Tensor) -> Any:
        y, _ = m.cells(x)
        return m.head(torch.relu(m.hidden(y[:, -1] if last else y)))

    width = 16 * (1 + both)
    return Net(
        wiring, cells=make(8, 16, layers, batch_first=True, bidirectional=both), hidden=nn.Linear(width, 14),
        head=nn.Linear(14, CLASSES),
    )  # fmt: skip


def _convolved() -> nn.Module:
    """Convolutions over time, then an LSTM, then a classifier of the last state."""

    def wiring(m: Any, x: Tensor) -> Any:
        y = torch.relu(m.conv(x.transpose(1, 2))).transpose(1, 2)
        return m.head(m.cells(y)[1][0][-1])

    return Net(
        wiring, conv=nn.Conv1d(8, 12, 3, padding=1), cells=nn.LSTM(12, 16, batch_first=True),
        head=nn.Linear(16, CLASSES),
    )  # fmt: skip


def _ids(make: Callable[..., nn.Module]) -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Any:
        return m.head(m.cells(m.embedding(x))[0])

    return Net(wiring, embedding=nn.Embedding(30, 8), cells=make(8, 20, 1, batch_first=True), head=nn.Linear(20, 30))


FEATURES, STATES = (STEPS, 16), (STEPS, 8)
CASES = (
    Case("attention, separate layers", _separate, FEATURES, ("head",)),
    Case("attention, one layer for all three", lambda: Net(lambda m, x: m.head(m.block(x).mean(1)),
         block=TransformerBlock(WIDTH, HEADS), head=nn.Linear(WIDTH, CLASSES)), (STEPS, WIDTH), ("head",), quick=True),
    Case("attention, scaled dot product", _functional, (STEPS, WIDTH), ("head",)),
    Case("attention, one head of keys", _einsum, (STEPS, WIDTH), ("head",)),
    Case("attention, torch's module", SelfAttention, (STEPS, WIDTH), ("head",)),
    Case("transformer encoder", _encoder, (STEPS, WIDTH), ("head",)),
    Case("transformer encoder, norm first", lambda: _encoder(norm_first=True, activation="gelu"), (STEPS, WIDTH),
         ("head",)),
    Case("perceptron over steps", _perceptron, FEATURES, ("head",), quick=True),
    Case("gated perceptron", _gated, FEATURES, ("head",)),
    Case("mixer", _mixer, FEATURES, ("head",), needs="layers over steps: places are channels there"),
    Case("windows in the batch", _windows, (3, 12, 12), ("head",), needs="windows and batch share an axis"),
    Case("queries of its own", _latent, FEATURES, ("head",), needs="a constant for every sample is reshaped"),
    Case("first token", _first_token, FEATURES, ("head",), needs="one token of the last is read"),
    Case("lstm", lambda: _recurrent(nn.LSTM, 1, False, True), STATES, ("head",), quick=True),
    Case("lstm of two layers", lambda: _recurrent(nn.LSTM, 2, False, False), STATES, ("head",)),
    Case("lstm both ways", lambda: _recurrent(nn.LSTM, 1, True, False), STATES, ("head",)),
    Case("lstm of two layers both ways", lambda: _recurrent(nn.LSTM, 2, True, False), STATES, ("head",)),
    Case("gru", lambda: _recurrent(nn.GRU, 1, False, True), STATES, ("head",)),
    Case("gru of two layers both ways", lambda: _recurrent(nn.GRU, 2, True, False), STATES, ("head",)),
    Case("convolution and lstm", _convolved, STATES, ("head",)),
    Case("lstm on ids", lambda: _ids(nn.LSTM), (STEPS,), ("head",), ids=30),
    Case("gru on ids", lambda: _ids(nn.GRU), (STEPS,), ("head",), ids=30),
)  # fmt: skip
