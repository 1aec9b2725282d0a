"""The bound: multiply-adds of a masked module when every contraction keeps only what matters, found by numbers alone.

The module runs in float64 on a few samples with every contraction watched (linear layers, convolutions, products of
matrices, einsum, attention, recurrent layers, interpolation). `counting` has the cost of each.

Nothing of the exporter or of compaction is used: a channel counts as dead because of the numbers, not of the graph.
Two things are adapted. The flat sides of a ReLU and a clamp are given a slope of a quarter, so that a unit which
happens to be off on every sample counts as live: no exact compaction may remove it. LSTM, GRU and RNN run as loops, so
that their gates and states can be watched; steps are united.

The bound is not always reachable by an exact graph of ordinary layers: an index of a product that is constant on one
side still counts, but one that cancels (a constant added to every score before a softmax) does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edge_bench.compaction.counting import SAMPLES, Layer, Site, count
from edge_bench.compaction.zoo.case import Case

SLOPE = 0.25


@dataclass(frozen=True)
class Bound:
    """Multiply-adds of one sample: all, and those between live entries. `parts` are the same for each contraction."""

    dense: int
    live: int
    parts: tuple[tuple[str, int, int], ...]


@torch.enable_grad()
def bound(module: nn.Module, case: Case) -> Bound:
    """The bound of `module`, which is masked already and in evaluation mode."""
    module = copy.deepcopy(module).double().eval().requires_grad_(False)
    x = _samples(case)
    watch = _Watch()
    with _from_embeddings(module) if case.ids is not None else nullcontext(), watch:
        outputs = module(x if case.ids is not None else x.requires_grad_())
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # Averaging places would let their gradients cancel by symmetry; random weights do not.
    torch.autograd.backward((outputs * weights).sum())
    sites = [s for s in watch.sites.values() if s.out]
    largest = max((float(t.grad.abs().max()) for s in sites for t in s.out if t.grad is not None), default=0.0)
    layers = {id(site): layer for layer in watch.layers for site in (layer.x, layer.h)}
    parts = tuple((s.kind, *count(s, layers.get(id(s)), largest)) for s in sites)
    return Bound(sum(p[1] for p in parts), sum(p[2] for p in parts), parts)


def _samples(case: Case) -> Tensor:
    """Samples of several sizes and both signs, so that every unit leaves its flat side somewhere."""
    x = case.batch(SAMPLES, seed=11)
    if case.ids is not None:
        return x
    sizes = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 2.0, 1.0, 5.0, 1.0]).view(-1, *[1] * (x.ndim - 1))
    return (x * sizes).double()


@contextmanager
def _from_embeddings(module: nn.Module) -> Iterator[None]:
    """Gradients start at the embeddings' outputs where ids have none."""

    def hook(part: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()

    tables = (p for p in module.modules() if isinstance(p, nn.Embedding | nn.EmbeddingBag))
    handles = [p.register_forward_hook(hook) for p in tables]
    yield
    for handle in handles:
        handle.remove()


# --- watching


class _Watch(TorchFunctionMode):
    """Notes every contraction that depends on the input, and replaces what cannot be watched by its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[object, Site] = {}
        self.layers: list[Layer] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("relu", "relu_", "relu6", "hardtanh", "hardtanh_", "relu6_"):
            return functional.leaky_relu(args[0], SLOPE)
        if name in ("clamp", "clamp_min", "clamp_max", "clip") and args[0].requires_grad:
            return SLOPE * args[0] + (1 - SLOPE) * func(*args, **kwargs)
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9:
            return _recurrent(self, name, *args)
        if name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
            return _cell(self, name.removesuffix("_cell"), *args)
        if name == "scaled_dot_product_attention":
            return _attention(self, *args, **kwargs)
        if name == "multi_head_attention_forward":
            return _multi_head(self, *args, **kwargs)
        if name in ("gt", "ge", "__gt__", "__ge__"):  # a comparison has no gradient, yet it decides
            return torch.sigmoid(args[0] - args[1])
        if name == "where" and args[0].dtype != torch.bool:
            return args[0] * args[1] + (1 - args[0]) * args[2]
        if name in ("__matmul__", "__rmatmul__", "matmul", "bmm", "mm"):
            a, b = (args[1], args[0]) if name == "__rmatmul__" else args[:2]
            return self.product(a, b)
        if name in ("baddbmm", "addmm"):
            return args[0] + self.product(args[1], args[2])
        if name == "einsum":
            return self._einsum(func, *args)
        if name == "bilinear":
            return self._bilinear(*args)
        if name == "interpolate":
            return self._interpolate(func, *args, **kwargs)
        if name == "linear":
            return self.linear(*args, **kwargs)
        if name.startswith("conv") and name[-2:] in ("1d", "2d", "3d"):
            return self._convolution(func, name, *args, **kwargs)
        return func(*args, **kwargs)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, key: object = None) -> Tensor:
        """A linear layer on the last axis; calls of one `key` are the steps of one layer."""
        if not x.requires_grad:
            return functional.linear(x, weight, bias)
        site = self.sites.setdefault(key or len(self.sites), Site("features"))
        site.each += x.numel() // x.shape[-1] // SAMPLES - (1 if not site.a else 0)
        return self._note(site, x, None, lambda a, _: functional.linear(a, weight, bias))

    def _convolution(self, func: Callable[..., Tensor], name: str, *args: Any, **kwargs: Any) -> Tensor:
        x, weight = args[0], args[1]
        if not x.requires_grad:
            return func(*args, **kwargs)
        transposed = "transpose" in name
        place = 6  # convNd(x, w, b, stride, padding, dilation, groups); transposed: ..., output_padding, groups
        groups = kwargs.get("groups", args[place] if len(args) > place else 1)
        site = self.sites.setdefault(len(self.sites), Site("channels", groups=int(groups)))
        out = self._note(site, x, None, lambda a, _: func(a, *args[1:], **kwargs))
        places = prod(x.shape[2:] if transposed else out.shape[2:])
        site.each = prod(weight.shape[2:]) * places * (len(x) // SAMPLES)
        return out

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        if not (a.requires_grad or b.requires_grad):
            return torch.matmul(a, b)
        if not b.requires_grad and b.ndim == 2:
            return self.linear(a, b.t())
        site = self.sites.setdefault(len(self.sites), Site("product"))
        return self._note(site, a, b, torch.matmul)

    def _einsum(self, func: Callable[..., Tensor], equation: str, *operands: Any) -> Tensor:
        """From left to right, two at a time, each time without the letters that nothing later reads."""
        parts = list(operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands)
        equation = equation.replace(" ", "")
        if len(parts) == 1:
            return func(equation, *parts)
        left, _, right = equation.partition("->")
        letters = left.split(",")
        while len(parts) > 2:
            later = {*"".join(letters[2:]), *right}
            made = "".join(dict.fromkeys(c for c in letters[0] + letters[1] if c in later))
            parts[:2] = [self._einsum(func, f"{letters[0]},{letters[1]}->{made}", *parts[:2])]
            letters[:2] = [made]
        equation, (a, b) = f"{','.join(letters)}->{right}", parts
        if not (a.requires_grad or b.requires_grad):
            return func(equation, a, b)
        site = self.sites.setdefault(len(self.sites), Site("einsum", equation=equation))
        return self._note(site, a, b, lambda p, q: func(equation, p, q))

    def _bilinear(self, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = self._einsum(torch.einsum, "ni,oij,nj->no", a, weight, b)
        return made if bias is None else made + bias

    def _interpolate(self, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Axis by axis, each a product with a constant matrix; the nearest mode only repeats."""
        out, mode = func(x, *args, **kwargs), kwargs.get("mode", args[2] if len(args) > 2 else "nearest")
        if not mode.endswith("linear"):
            return out
        letters = "nabcd"[: x.ndim]
        for axis in range(2, x.ndim):
            lines = torch.eye(x.shape[axis], dtype=x.dtype)[:, None]
            corners = kwargs.get("align_corners", args[3] if len(args) > 3 else None)
            lines = functional.interpolate(lines, out.shape[axis], mode="linear", align_corners=corners)[:, 0]
            old = letters[axis]
            x = self._einsum(torch.einsum, f"{letters},{old}z->{letters.replace(old, 'z')}", x, lines)
        return x

    def _note(self, site: Site, a: Tensor, b: Tensor | None, run: Callable[[Tensor, Any], Tensor]) -> Tensor:
        """Run on copies of the operands, whose gradients are those through this contraction alone."""
        copies = [t if t is None or not t.requires_grad else t.clone() for t in (a, b)]
        out = run(copies[0], copies[1])  # type: ignore[arg-type]
        for tensor, kept in zip((*copies, out), (site.a, site.b, site.out), strict=True):
            if tensor is not None:
                if tensor.requires_grad:
                    tensor.retain_grad()
                kept.append(tensor)
        return out


def _attention(
    watch: _Watch, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    scores = watch.product(q, k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return watch.product(torch.softmax(scores, -1), v)


def _multi_head(
    watch: _Watch, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor,
    bias_k: None, bias_v: None, zero: bool, dropout: float, out_weight: Tensor, out_bias: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`nn.MultiheadAttention` without masks, on [t, n, width], by its definition."""
    if query is key and key is value:
        parts = watch.linear(query, weight, bias).chunk(3, -1)
    else:
        rows = zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
        parts = tuple(watch.linear(x, w, b) for x, w, b in rows)
    q, k, v = (p.reshape(*p.shape[:-1], heads, -1).permute(1, 2, 0, 3) for p in parts)
    joined = _attention(watch, q, k, v).permute(2, 0, 1, 3).flatten(2)
    return watch.linear(joined, out_weight, out_bias), None


def _step(
    watch: _Watch, kind: str, from_x: Tensor, state: tuple[Tensor, Tensor], w: Tensor, b: Tensor | None, key: object
) -> tuple[Tensor, Tensor]:
    """One step of a recurrent layer: its state and cell (of all but an LSTM the state again)."""
    h, c = state
    if not h.requires_grad:  # the first state is a constant, watched all the same
        h = h.clone().requires_grad_()
    from_h = watch.linear(h, w, b, key)
    if kind == "lstm":
        return _lstm(from_x + from_h, c)
    if kind == "gru":
        return _gru(from_x, from_h, h)
    made = functional.leaky_relu(from_x + from_h, SLOPE) if kind == "rnn_relu" else torch.tanh(from_x + from_h)
    return made, made


def _cell(
    watch: _Watch, kind: str, x: Tensor, state: Any, w_in: Tensor, w_state: Tensor,
    b_in: Tensor | None = None, b_state: Tensor | None = None,
) -> Any:  # fmt: skip
    """`nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`; the calls of one cell are its steps."""
    state = tuple(state) if kind == "lstm" else (state, state)
    from_x = watch.linear(x, w_in, b_in, (id(w_in), "x"))
    made = _step(watch, kind, from_x, state, w_state, b_state, (id(w_state), "h"))
    return made if kind == "lstm" else made[0]


def _recurrent(
    watch: _Watch, kind: str, x: Tensor, state: Any, weights: Sequence[Tensor], biased: bool, layers: int,
    dropout: float, training: bool, both: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`torch.lstm`, `torch.gru` or a plain recurrence by its definition."""
    x = x.transpose(0, 1) if batch_first else x
    each, place, last = 4 if biased else 2, 0, []
    call = len(watch.sites)
    for layer in range(layers):
        made = []
        for direction in range(1 + both):
            w_in, w_state, *bias = weights[place : place + each]
            b_in, b_state = bias or (None, None)
            place += each
            first = state[0] if kind == "lstm" else state
            h = first[layer * (1 + both) + direction]
            c = state[1][layer * (1 + both) + direction] if kind == "lstm" else h
            key = (call, layer, direction)
            from_x = watch.linear(x, w_in, b_in, (*key, "x"))
            outputs: list[Tensor] = []
            for t in range(len(x)) if not direction else reversed(range(len(x))):
                h, c = _step(watch, kind, from_x[t], (h, c), w_state, b_state, key)
                outputs.append(h)
            reads = watch.sites.get((*key, "x"))
            if reads is not None:
                layer_of = Layer(kind == "gru", reads, watch.sites[key], w_in, w_state, bool(direction))
                watch.layers.append(layer_of)
            last.append((h, c))
            made.append(torch.stack(outputs[::-1] if direction else outputs))
        x = torch.cat(made, -1)
    x = x.transpose(0, 1) if batch_first else x
    states = torch.stack([h for h, _ in last])
    return (x, states, torch.stack([c for _, c in last])) if kind == "lstm" else (x, states)


def _lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(from_x: Tensor, from_h: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    (rx, zx, nx), (rh, zh, nh) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    z = torch.sigmoid(zx + zh)
    h = (1 - z) * torch.tanh(nx + torch.sigmoid(rx + rh) * nh) + z * h
    return h, h
