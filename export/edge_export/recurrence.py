"""Recurrent layers and linear layers on sequences, in the form that a training graph takes them.

PyTorch unrolls an LSTM into a dozen operators per time step, forward and again backward: a window of 128 steps becomes
thousands of nodes. Here all that is independent of the previous step is one product over all steps: the input's share
of the gates, the gradients of the weights, the derivatives of the gates. The rest is one operator each way, which
`recurrence_onnx` turns into a `Scan`. `rewriting` replaces a module's calls while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.errors import ModelError
from edge_export.recurrence_single import DOMAIN, Gru, Rnn


@torch.library.custom_op(f"{DOMAIN}::lstm", mutates_args=())
def _lstm(gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States [t, n, h], cells [t, n, h] and activated gates i, f, g, o [t, n, 4h] of one layer, one direction.

    `gates` [t, n, 4h] is the input's share with the biases, `weight` [4h, h] the recurrent one, `hidden` and `cell`
    [n, h] are where it starts.
    """
    states, cells, acts = [], [], []
    for share in gates:
        i, f, g, o = torch.addmm(share, hidden, weight.t()).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = f * cell + i * g
        hidden = o * cell.tanh()
        states.append(hidden)
        cells.append(cell)
        acts.append(torch.cat([i, f, g, o], 1))
    return torch.stack(states), torch.stack(cells), torch.stack(acts)


@_lstm.register_fake
def _(gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*gates.shape[:2], weight.shape[1])
    return gates.new_empty(shape), gates.new_empty(shape), torch.empty_like(gates)


@torch.library.custom_op(f"{DOMAIN}::lstm_backward", mutates_args=())
def _lstm_backward(
    grad: Tensor, grad_cell: Tensor, through: Tensor, slopes: Tensor, forget: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates before activation [t, n, 4h], and of the states [n, h] and cells [n, h] at the start.

    `grad` [t, n, h] is that of the states, `grad_cell` [n, h] of the last cell, `through` [t, n, h] the derivative
    of a state by its cell, `slopes` [t, n, 4h] of cell, cell, cell and state by the gates, `forget` the gate f.
    """
    grad_hidden, gates = torch.zeros_like(grad_cell), []
    for t in range(grad.shape[0] - 1, -1, -1):
        total = grad[t] + grad_hidden
        of_cell = grad_cell + total * through[t]
        made = slopes[t] * torch.cat([of_cell, of_cell, of_cell, total], 1)
        grad_hidden, grad_cell = made @ weight, of_cell * forget[t]
        gates.append(made)
    return torch.stack(gates[::-1]), grad_hidden, grad_cell


@_lstm_backward.register_fake
def _(
    grad: Tensor, grad_cell: Tensor, through: Tensor, slopes: Tensor, forget: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(slopes), torch.empty_like(grad_cell), torch.empty_like(grad_cell)


class _Lstm(torch.autograd.Function):
    """`_lstm` and its derivative; all steps at once except the recurrence itself."""

    @staticmethod
    def forward(gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> Any:
        return _lstm(gates, weight, hidden, cell)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, hidden, cell = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(weight, hidden, cell, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad, grad_cells, _ = gradients
        weight, hidden, cell, states, cells, acts = ctx.saved_tensors
        i, f, g, o = acts.chunk(4, 2)
        squashed = cells.tanh()
        before = torch.cat([cell.unsqueeze(0), cells[:-1]])
        slopes = [g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o)]
        # Only the last cell is read outside: the others' gradients are zero.
        of_gates, of_hidden, of_cell = _lstm_backward(
            grad, grad_cells[-1], o * (1 - squashed * squashed), torch.cat(slopes, 2), f, weight
        )
        read = torch.cat([hidden.unsqueeze(0), states[:-1]]).reshape(-1, weight.shape[1])
        return of_gates, of_gates.reshape(-1, weight.shape[0]).t() @ read, of_hidden, of_cell


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` on [..., f] as one product over all rows, with no constraint on a dynamic batch."""
    if x.ndim == 2:  # no view, which a change in place would make autograd copy
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
    rows = x.reshape(-1, weight.shape[1])
    made = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return made.reshape(*x.shape[:-1], weight.shape[0])


def _time_first(x: Tensor, batch_first: bool) -> Tensor:
    """`x` as [t, n, f]. Raises ModelError where its time axis is that of the samples."""
    x = x.transpose(0, 1) if batch_first else x
    if isinstance(x.shape[0], torch.SymInt):
        raise ModelError("a recurrent layer runs over the samples instead of time; set batch_first=True")
    return x


def packed(*_: object) -> Any:
    """In the place of what packs sequences. Raises ModelError."""
    raise ModelError("packed sequences are not exported; give recurrent layers padded ones [n, t, f]")


Run = Callable[..., tuple[Tensor, ...]]
"""One layer in one direction: (x, input weight, recurrent weight, biases, *start) -> states, last of each state."""


def _stacked(run: Run, states: int) -> Callable[..., tuple[Tensor, ...]]:
    """`torch.lstm` and its kin on padded sequences out of `run`, whose layers start from so many states."""

    def whole(
        x: Tensor,
        start: Any,
        weights: list[Tensor],
        biased: bool,
        layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        x, starts = _time_first(x, batch_first), start if states == 2 else (start,)
        ways, width = 2 if bidirectional else 1, 4 if biased else 2
        ends: list[list[Tensor]] = []
        for layer in range(layers):
            if layer and training and dropout > 0:
                x = functional.dropout(x, dropout)
            made = []
            for way in range(ways):
                at = layer * ways + way
                of_input, recurrent, *biases = weights[at * width : (at + 1) * width]
                own, *last = run(x.flip(0) if way else x, of_input, recurrent, biases, *(s[at] for s in starts))
                made.append(own.flip(0) if way else own)
                ends.append(last)
            x = torch.cat(made, 2) if bidirectional else made[0]
        return x.transpose(0, 1) if batch_first else x, *(torch.stack(e) for e in zip(*ends, strict=True))

    return whole


def _lstm_layer(
    x: Tensor, of_input: Tensor, recurrent: Tensor, biases: list[Tensor], hidden: Tensor, cell: Tensor
) -> tuple[Tensor, ...]:
    gates = linear(x, of_input, biases[0] + biases[1] if biases else None)
    made: tuple[Tensor, ...] = _Lstm.apply(gates, recurrent, hidden, cell)  # type: ignore[no-untyped-call]
    states, cells, _ = made
    return states, states[-1], cells[-1]


def _gru_layer(
    x: Tensor, of_input: Tensor, recurrent: Tensor, biases: list[Tensor], start: Tensor
) -> tuple[Tensor, ...]:
    own = biases or [x.new_zeros(len(of_input))] * 2
    made: tuple[Tensor, Tensor] = Gru.apply(linear(x, of_input, own[0]), recurrent, own[1], start)  # type: ignore[no-untyped-call]
    return made[0], made[0][-1]


def _rnn_layer(relu: bool) -> Run:
    def layer(
        x: Tensor, of_input: Tensor, recurrent: Tensor, biases: list[Tensor], start: Tensor
    ) -> tuple[Tensor, ...]:
        share = linear(x, of_input, biases[0] + biases[1] if biases else None)
        states: Tensor = Rnn.apply(share, recurrent, start, relu)  # type: ignore[no-untyped-call]
        return states, states[-1]

    return layer


lstm = _stacked(_lstm_layer, 2)
gru = _stacked(_gru_layer, 1)
rnn_tanh = _stacked(_rnn_layer(relu=False), 1)
rnn_relu = _stacked(_rnn_layer(relu=True), 1)


def lstm_cell(
    x: Tensor, state: Sequence[Tensor], weight_x: Tensor, weight_h: Tensor,
    bias_x: Tensor | None = None, bias_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`torch.lstm_cell`, which itself changes tensors in place: such a graph is traced twice."""
    hidden, cell = state
    gates = functional.linear(x, weight_x, bias_x) + functional.linear(hidden, weight_h, bias_h)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_cell(
    x: Tensor, hidden: Tensor, weight_x: Tensor, weight_h: Tensor,
    bias_x: Tensor | None = None, bias_h: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`torch.gru_cell`; see `lstm_cell`."""
    r, z, n = functional.linear(x, weight_x, bias_x).chunk(3, 1)
    r_h, z_h, n_h = functional.linear(hidden, weight_h, bias_h).chunk(3, 1)
    n, z = (n + (r + r_h).sigmoid() * n_h).tanh(), (z + z_h).sigmoid()
    return (hidden - n) * z + n
