"""GRU and plain recurrent layers of one direction, in the form of `recurrence`: what has one state.

A step's work that depends on the previous one is an operator each way; all else is done for all steps at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DOMAIN = "maskfleet"


@torch.library.custom_op(f"{DOMAIN}::gru", mutates_args=())
def _gru(gates: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """States [t, n, h], and of each step r, z, n and the recurrent share of n [t, n, 4h].

    `gates` [t, n, 3h] is the input's share with its bias, `weight` [3h, h] and `bias` [3h] the recurrent ones,
    `hidden` [n, h] where it starts.
    """
    states, acts = [], []
    for share in gates:
        (xr, xz, xn), (hr, hz, hn) = share.chunk(3, 1), torch.addmm(bias, hidden, weight.t()).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        hidden = n + z * (hidden - n)
        states.append(hidden)
        acts.append(torch.cat([r, z, n, hn], 1))
    return torch.stack(states), torch.stack(acts)


@_gru.register_fake
def _(gates: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    h = weight.shape[1]
    return gates.new_empty((*gates.shape[:2], h)), gates.new_empty((*gates.shape[:2], 4 * h))


@torch.library.custom_op(f"{DOMAIN}::gru_backward", mutates_args=())
def _gru_backward(
    grad: Tensor, through: Tensor, slopes: Tensor, weight: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the states [t, n, h] and of the recurrent gates [t, n, 3h], and of the start [n, h].

    `grad` [t, n, h] is what comes from outside, `through` [t, n, h] the derivative of a state by the one before past
    the gates, `slopes` [t, n, 3h] that of a state by its recurrent gates. `hidden` [n, h] gives the start's shape.
    """
    of_hidden, totals, gates = torch.zeros_like(hidden), [], []
    for t in range(grad.shape[0] - 1, -1, -1):
        total = grad[t] + of_hidden
        made = slopes[t] * torch.cat([total, total, total], 1)
        of_hidden = total * through[t] + made @ weight
        totals.append(total)
        gates.append(made)
    return torch.stack(totals[::-1]), torch.stack(gates[::-1]), of_hidden


@_gru_backward.register_fake
def _(
    grad: Tensor, through: Tensor, slopes: Tensor, weight: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(slopes), torch.empty_like(hidden)


class Gru(torch.autograd.Function):
    """`_gru` and its derivative: states and gates from (gates, weight, bias, start)."""

    @staticmethod
    def forward(gates: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor) -> Any:
        return _gru(gates, weight, bias, hidden)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, _, hidden = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, hidden, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, hidden, states, acts = ctx.saved_tensors
        r, z, n, share = acts.chunk(4, 2)
        before = torch.cat([hidden.unsqueeze(0), states[:-1]])
        of_n = (1 - z) * (1 - n * n)
        of_r, of_z = of_n * share * r * (1 - r), (before - n) * z * (1 - z)
        totals, of_recurrent, of_start = _gru_backward(gradients[0], z, torch.cat([of_r, of_z, of_n * r], 2), weight, hidden)
        of_gates = torch.cat([totals, totals, totals], 2) * torch.cat([of_r, of_z, of_n], 2)
        rows = of_recurrent.reshape(-1, weight.shape[0])
        return of_gates, rows.t() @ before.reshape(-1, weight.shape[1]), rows.sum(0), of_start


@torch.library.custom_op(f"{DOMAIN}::rnn", mutates_args=())
def _rnn(share: Tensor, weight: Tensor, hidden: Tensor, relu: bool) -> Tensor:
    """States [t, n, h] from the input's share with both biases [t, n, h]; `relu` or else tanh."""
    states = []
    for own in share:
        made = torch.addmm(own, hidden, weight.t())
        hidden = made.relu() if relu else made.tanh()
        states.append(hidden)
    return torch.stack(states)


@_rnn.register_fake
def _(share: Tensor, weight: Tensor, hidden: Tensor, relu: bool) -> Tensor:
    return torch.empty_like(share)


@torch.library.custom_op(f"{DOMAIN}::rnn_backward", mutates_args=())
def _rnn_backward(grad: Tensor, slopes: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before activation [t, n, h] and of the start [n, h]; `slopes` [t, n, h] is the activation's."""
    of_hidden, found = torch.zeros_like(hidden), []
    for t in range(grad.shape[0] - 1, -1, -1):
        made = slopes[t] * (grad[t] + of_hidden)
        of_hidden = made @ weight
        found.append(made)
    return torch.stack(found[::-1]), of_hidden


@_rnn_backward.register_fake
def _(grad: Tensor, slopes: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(hidden)


class Rnn(torch.autograd.Function):
    """`_rnn` and its derivative."""

    @staticmethod
    def forward(share: Tensor, weight: Tensor, hidden: Tensor, relu: bool) -> Any:
        return _rnn(share, weight, hidden, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, hidden, ctx.relu = inputs
        ctx.save_for_backward(weight, hidden, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, hidden, states = ctx.saved_tensors
        slopes = (states > 0).to(states.dtype) if ctx.relu else 1 - states * states
        of_share, of_start = _rnn_backward(gradients[0], slopes, weight, hidden)
        before = torch.cat([hidden.unsqueeze(0), states[:-1]]).reshape(-1, weight.shape[1])
        return of_share, of_share.reshape(-1, weight.shape[0]).t() @ before, of_start, None
