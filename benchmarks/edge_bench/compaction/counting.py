"""What a watched contraction costs: multiply-adds between all its entries, and between the live ones.

An entry of a contraction's input or output is live when

- it differs from sample to sample: what is the same for every sample is a constant, whatever the place, and
- the outputs' gradient reaches it. For an input that is the gradient through this contraction alone.

Entries are channels (convolutions), features (linear layers, also each feature after a flatten), or entries of one head
(products of two activations), united over samples and over places or steps. A contraction then costs as many
multiply-adds as it has triples (input entry, output entry, place) with both entries live; within the groups of a
grouped convolution, and within one head of attention.

LSTM, GRU and RNN are counted as what one dense layer needs at least: a unit has all its gates, and where dead units and
inputs add other amounts at each step, as those with biases do, further inputs or units must bring them, one for each
dimension of these amounts over time. Behind the reset gate of a GRU only units can: inputs are added in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SAMPLES = 11  # a prime that no axis of the graphs has as a factor, so that the samples' axis is known by its size
VARIES = 1e-10  # of a tensor's largest value: less is rounding
REACHES = 1e-11  # of the largest gradient of a tensor
REACHES_AT_ALL = 1e-16  # of the largest gradient of any tensor
ROUNDED = 1e-7  # of the amounts' size: float32 rounds off as much


@dataclass
class Site:
    """One contraction. `a` and `b` are its operands, `b` None where it is a weight; lists hold the steps of a loop.

    `kind` is how entries lie: "channels" (axis 1), "features" (last axis), "product" (matrices).
    """

    kind: str
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    groups: int = 1
    each: int = 1  # multiply-adds of one pair of entries: places times taps
    equation: str = ""


@dataclass(frozen=True)
class Layer:
    """One direction of a recurrent layer: where it reads inputs [t, n, i] and states [n, h], a list of the steps."""

    gated: bool  # a GRU, whose last gate multiplies what it reads of the states
    x: Site
    h: Site
    from_x: Tensor  # [gates * h, i]
    from_h: Tensor  # [gates * h, h]
    backwards: bool


def count(site: Site, layer: Layer | None, largest: float) -> tuple[int, int]:
    """Multiply-adds of a contraction for one sample: all, and the live ones. `layer` is the recurrent one it is of.

    `largest` is the largest entry of any output's gradient.
    """
    if layer is not None:
        return _count_recurrent(site, layer, largest)
    varies_a, reached_a = _live(site.a, largest)
    varies_out, reached_out = _live(site.out, largest)
    out = varies_out & reached_out  # of every axis but the samples'
    if site.kind == "einsum":
        return _count_einsum(site, largest, out)
    if site.kind == "product":
        varies_b, reached_b = _live(site.b, largest)
        # An index counts when either side varies and matters; rows and columns by what they produce.
        index = (varies_a & reached_a).any(-2) | (varies_b & reached_b).any(-1)
        rows, columns = out.any(-1).sum(-1), out.any(-2).sum(-1)
        live = int((index.sum(-1) * rows * columns).sum())
        return out.numel() * varies_a.shape[-1], live
    # Of a convolution's tensor the channels are axis 1. What was folded into the samples' axis lies before them.
    axis = varies_a.ndim - (site.a[0].ndim - 1) if site.kind == "channels" else -1
    a, o = _only(varies_a & reached_a, axis), _only(out, axis)
    a, o = a.view(site.groups, -1), o.view(site.groups, -1)
    return site.groups * a.shape[1] * o.shape[1] * site.each, int((a.sum(1) * o.sum(1)).sum()) * site.each


def _count_recurrent(site: Site, layer: Layer, largest: float) -> tuple[int, int]:
    """Multiply-adds of a recurrent layer's inputs or of its states for one sample, in one dense layer."""
    h = layer.from_h.shape[1]
    (moves_h, reached_h), (moves_x, reached_x) = _live(layer.h.a, largest), _live(layer.x.a, largest)
    rows = [m & r for m, r in (_live(s.out, largest) for s in (layer.x, layer.h))]
    units = (moves_h & reached_h) | torch.stack([_only(r, -1) for r in rows]).any(0).view(-1, h).any(0)
    inputs = _only(moves_x & reached_x, -1)
    # what does not vary adds this at each step, [t, gates, units]
    states = torch.stack([a[0] for a in layer.h.a]).detach() * ~moves_h
    read = layer.x.a[0][:, 0].detach() * ~_only(moves_x, -1)
    before = (read @ layer.from_x.T).view(len(read), -1, h)[..., units]
    behind = (states @ layer.from_h.T).view(len(read), -1, h)[..., units]
    behind = behind.flip(0) if layer.backwards else behind
    more = _dimensions(behind[:, -1:]) if layer.gated else 0
    parts = [before[:, :-1] + behind[:, :-1], before[:, -1:], behind[:, -1:]] if layer.gated else [before + behind]
    extra = max(0, _dimensions(torch.cat(parts, 1)) - more)
    wide = len(layer.from_h) // h * (int(units.sum()) + more)
    taken = int(inputs.sum()) + extra if site is layer.x else int(units.sum()) + more
    return site.a[0].shape[-1] * len(layer.from_h) * site.each, wide * taken * site.each


def _dimensions(amounts: Tensor) -> int:
    """How many dimensions amounts [t, ...] have over time, beside a constant."""
    flat = amounts.flatten(1)
    return int((torch.linalg.svdvals(flat - flat.mean(0)) > ROUNDED * flat.norm()).sum())


def _count_einsum(site: Site, largest: float, out: Tensor) -> tuple[int, int]:
    """Triples by the equation itself, without its samples' axis: either side is live and the other is not zero."""
    left, _, right = site.equation.partition("->")
    (letters_a, letters_b), batch = left.split(","), right[0]
    live, some = [], []  # of each operand what varies and is reached, and what is not zero
    for tensors in (site.a, site.b):
        varies, reached = _live(tensors, largest)
        live.append(varies & reached)
        sizes = torch.stack([_samples_first(t.detach()).abs().amax(0) for t in tensors])
        some.append(sizes.any(0) if tensors[0].requires_grad else torch.ones_like(varies))  # zeros of a weight count
    equation = f"{letters_a},{letters_b},{right}->".replace(batch, "")

    def triples(a: Tensor, b: Tensor, made: Tensor = out) -> int:
        return int(torch.einsum(equation, a.double(), b.double(), made.double()))

    whole = [torch.ones_like(m) for m in (*live, out)]
    return triples(*whole), triples(live[0], some[1]) + triples(some[0], live[1]) - triples(*live)


def _only(live: Tensor, axis: int) -> Tensor:
    """United over every axis but one."""
    return live.movedim(axis, 0).reshape(live.shape[axis], -1).any(1)


def _live(tensors: list[Tensor], largest: float) -> tuple[Tensor, Tensor]:
    """(varies, is reached by the gradient) of every entry of a sample, united over the steps in `tensors`."""
    varies, reached = [], []
    for tensor in tensors:
        value = _samples_first(tensor.detach())
        spread = value.amax(0) - value.amin(0)
        varies.append(spread > VARIES * value.abs().max())
        gradient = torch.zeros_like(value) if tensor.grad is None else _samples_first(tensor.grad).abs()
        floor = max(REACHES * float(gradient.max()), REACHES_AT_ALL * largest)
        reached.append(gradient.amax(0) > floor)
    return torch.stack(varies).any(0), torch.stack(reached).any(0)


def _samples_first(tensor: Tensor) -> Tensor:
    """[samples, ...]: the samples' axis is the one whose size is a multiple of their number."""
    for axis, size in enumerate(tensor.shape):
        if size == SAMPLES:
            return tensor.movedim(axis, 0)
        if size and size % SAMPLES == 0:  # samples and heads in one axis
            split = (*tensor.shape[:axis], SAMPLES, size // SAMPLES, *tensor.shape[axis + 1 :])
            return tensor.reshape(split).movedim(axis, 0)
    return tensor.unsqueeze(0)  # the same for every sample
