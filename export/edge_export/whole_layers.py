"""Layers that an evaluation graph holds whole: linear, LSTM, GRU, RNN.

Tracing alone would unroll a recurrence and flatten a sequence. Each is an operator of its own here, which
`onnx_layers` writes as ONNX's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.recurrence_single import DOMAIN


@torch.library.custom_op(f"{DOMAIN}::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op(f"{DOMAIN}::lstm_layer", mutates_args=())
def _lstm_layer(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States [t, n, ways * h], last states and last cells [ways, n, h] of one layer on `x` [t, n, f]."""
    made: tuple[Tensor, Tensor, Tensor] = torch.lstm(
        x, (hidden, cell), list(weights), biased, 1, 0.0, False, bidirectional, False
    )
    return made


@_lstm_layer.register_fake
def _(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = hidden.shape[0] * hidden.shape[2]
    return x.new_empty((*x.shape[:2], wide)), torch.empty_like(hidden), torch.empty_like(cell)


@torch.library.custom_op(f"{DOMAIN}::gru_layer", mutates_args=())
def _gru_layer(
    x: Tensor, hidden: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool
) -> tuple[Tensor, Tensor]:
    """States [t, n, ways * h] and last states [ways, n, h]."""
    made: tuple[Tensor, Tensor] = torch.gru(x, hidden, list(weights), biased, 1, 0.0, False, bidirectional, False)
    return made


@_gru_layer.register_fake
def _(x: Tensor, hidden: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], hidden.shape[0] * hidden.shape[2])), torch.empty_like(hidden)


@torch.library.custom_op(f"{DOMAIN}::rnn_layer", mutates_args=())
def _rnn_layer(
    x: Tensor, hidden: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool, activation: str
) -> tuple[Tensor, Tensor]:
    """As `gru_layer`; `activation` is "Tanh" or "Relu"."""
    run = torch.rnn_tanh if activation == "Tanh" else torch.rnn_relu
    made: tuple[Tensor, Tensor] = run(x, hidden, list(weights), biased, 1, 0.0, False, bidirectional, False)
    return made


@_rnn_layer.register_fake
def _(
    x: Tensor, hidden: Tensor, weights: Sequence[Tensor], biased: bool, bidirectional: bool, activation: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], hidden.shape[0] * hidden.shape[2])), torch.empty_like(hidden)


def _layers(run: Callable[..., tuple[Tensor, ...]], states: int, *settings: Any) -> Callable[..., Any]:
    """`torch.lstm` and its kin out of single layers; `states` is the number of tensors that a layer starts from."""

    def whole(x: Tensor, start: Any, weights: Any, biased: Any, *rest: Any) -> Any:
        layers, _, _, bidirectional, batch_first = rest
        starts = start if states == 2 else (start,)
        x = x.transpose(0, 1) if batch_first else x
        ways, width = 2 if bidirectional else 1, 4 if biased else 2
        ends: list[list[Tensor]] = [[] for _ in range(states)]
        for layer in range(layers):
            at = slice(layer * ways, (layer + 1) * ways)
            own = list(weights[layer * ways * width : (layer + 1) * ways * width])
            x, *last = run(x, *(s[at] for s in starts), own, bool(biased), bool(bidirectional), *settings)
            for found, end in zip(ends, last, strict=True):
                found.append(end)
        return x.transpose(0, 1) if batch_first else x, *(torch.cat(e) for e in ends)

    return whole


def table() -> dict[Any, Callable[..., Any]]:
    """The function that stands for each of PyTorch's."""
    return {
        functional.linear: _linear,
        torch.lstm: _layers(_lstm_layer, 2),
        torch.gru: _layers(_gru_layer, 1),
        torch.rnn_tanh: _layers(_rnn_layer, 1, "Tanh"),
        torch.rnn_relu: _layers(_rnn_layer, 1, "Relu"),
    }
