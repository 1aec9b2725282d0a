"""The parameter and buffer tables of a module: order, layers, and how a seed would draw each tensor.

Weights of maskable layers come first, in forward order, so that the masked part of a model is a few contiguous spans.
Biases, norm parameters and all others follow in the module's own order.

A tensor that several parts of a module share is one row, under the first of its names. As a weight it belongs to the
last layer that reads it, so that a tied head stays the head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from edge_client.bundle import Init, Layer
from edge_client.bundle import Tensor as Row
from edge_client.errors import ModelError
from edge_export.draws import buffers_by_step, probes, same_values
from edge_export.modes import duplicate, slow_paths

InitScheme = Literal["he", "torch", "sign"]
"""How a seed draws weights: `he` uniform in +-sqrt(6 / fan_in) with zero biases; `torch` PyTorch's default, uniform
in +-1 / sqrt(fan_in), biases too; `sign` the constant +-sqrt(2 / fan_in) with zero biases. An LSTM's own scale is
1 / sqrt(hidden) in all of them, an embedding has PyTorch's variance 1, a norm starts at weight 1 and bias 0."""

_MASKABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM)
_PROJECTIONS = ("in_proj", "q_proj", "k_proj", "v_proj")  # of attention, whose weights are parameters of its own


@dataclass(frozen=True)
class Tables:
    """The manifest's tables of a module."""

    parameters: tuple[Row, ...]
    buffers: tuple[Row, ...]
    layers: tuple[Layer, ...]


def tables(module: nn.Module, example: Tensor, init: InitScheme, trainable: Collection[str] | None) -> Tables:
    """The tables of `module`; `trainable` names the parameters that get gradients (None: those that require them)."""
    values = dict(module.named_parameters())
    stats = _statistics(module, example)
    for name, value in (*values.items(), *stats.items()):
        if value.dtype != torch.float32:
            raise ModelError(f"parameter {name!r} is {value.dtype}, and only float32 is trained; keep it as a buffer")
        if not value.numel():
            raise ModelError(f"tensor {name!r} has no values (its shape is {tuple(value.shape)}); remove it")
        if not bool(value.isfinite().all()):
            raise ModelError(
                f"tensor {name!r} holds an infinite value or NaN and is trained; start it from finite values"
            )
    layers = _layers(module, example)
    if not layers:
        raise ModelError(
            "the module has no linear, convolution or LSTM layer that its forward pass runs and whose weight is a "
            "parameter; one that is computed (weight_norm, prune) becomes one by torch.nn.utils.prune.remove or "
            "parametrize.remove_parametrizations, and a parameter of your own as the weight of a torch.nn.Linear"
        )
    weights = list(dict.fromkeys(name for layer in layers for name in layer.weights))
    order = [*weights, *(name for name in values if name not in weights)]
    if trainable is None:
        free = {n for n, v in values.items() if v.requires_grad}
    else:
        first = _first_names(module)
        free = {first.get(n, n) for n in trainable}
    if trainable is None and not free:
        raise ModelError(
            "no parameter requires a gradient, so devices would train nothing; call requires_grad_() on those to train"
        )
    if free - set(values) or not free:
        raise ModelError(f"trainable names {sorted(free - set(values))}, the module's parameters are {sorted(values)}")
    rules = _rules(module, init)
    return Tables(
        parameters=_rows({name: values[name] for name in order}, rules, free),
        buffers=_rows(stats, rules, set()),
        layers=layers,
    )


def _statistics(module: nn.Module, example: Tensor) -> dict[str, Tensor]:
    """The float buffers that a training step moves, and every norm's running statistics. All others are constants.

    Raises ModelError for a buffer of another dtype that a step changes, or of another shape.
    """
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for name in ("running_mean", "running_var")
    }
    start, *later = buffers_by_step(module, probes(module, example))
    moved = {k for k, b in start.items() if any(not same_values(b, state[k]) for state in later)}
    found = {k: b for k, b in module.named_buffers() if k in own or k in moved}
    for name, buffer in found.items():
        if not buffer.is_floating_point():
            raise ModelError(
                f"buffer {name!r} ({str(buffer.dtype).removeprefix('torch.')}) changes in forward; devices keep "
                "float32 buffers only: register it as float32, or do not change it"
            )
        if any(state[name].shape != buffer.shape for state in later if name in state):
            raise ModelError(f"buffer {name!r} changes its shape in forward; give it its final shape in __init__")
    return found


def _rows(values: dict[str, Tensor], rules: dict[str, Init], trainable: Collection[str]) -> tuple[Row, ...]:
    rows, offset = [], 0
    for name, value in values.items():
        shape = tuple(value.shape)
        rule = rules.get(name) or Init(kind="uniform", scale=value.detach().abs().max().item())
        rows.append(Row(name=name, shape=shape, offset=offset, init=rule, trainable=name in trainable))
        offset += value.numel()
    return tuple(rows)


def _layers(module: nn.Module, example: Tensor) -> tuple[Layer, ...]:
    copy = duplicate(module).eval()
    names: dict[nn.Module, str] = {
        m: n
        for n, m in copy.named_modules()
        if isinstance(m, nn.MultiheadAttention) or (isinstance(m, _MASKABLE) and _weighted(m))
    }
    called: list[nn.Module] = []
    for m in names:
        m.register_forward_hook(lambda m, _in, _out: called.append(m))
    with torch.no_grad(), slow_paths():
        copy(example)
    first = _first_names(module)
    return _each_tensor_once([layer for m in dict.fromkeys(called) for layer in _layers_of(names[m], m, first)])


def _weighted(module: nn.Module) -> bool:
    """Whether the weight is a parameter, and not computed from others as by `weight_norm`."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own or (isinstance(module, nn.LSTM) and "weight_ih_l0" in own)


def _layers_of(name: str, module: nn.Module, first: dict[str, str]) -> list[Layer]:
    """The layers of one part: attention has its projections in and the one out."""
    if not isinstance(module, nn.MultiheadAttention):
        return [_layer(name, module, first)]
    prefix, own = f"{name}." if name else "", dict(module.named_parameters(recurse=False))
    found = []
    for kind in _PROJECTIONS:
        if f"{kind}_weight" in own:
            biases = (first[f"{prefix}{kind}_bias"],) if f"{kind}_bias" in own else ()
            weights = (first[f"{prefix}{kind}_weight"],)
            found.append(Layer(name=prefix + kind, kind="linear", weights=weights, biases=biases))
    return [*found, *([_layer(f"{prefix}out_proj", module.out_proj, first)] if _weighted(module.out_proj) else [])]


def _first_names(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter, the first name of the same tensor: the one `named_parameters` uses."""
    firsts: dict[Tensor, str] = {}
    return {n: firsts.setdefault(p, n) for n, p in module.named_parameters(remove_duplicate=False)}


def _each_tensor_once(layers: list[Layer]) -> tuple[Layer, ...]:
    """`layers` in forward order. A layer whose weights all belong to a later one is left out; its biases go there."""
    owner = {name: i for i, layer in enumerate(layers) for name in layer.weights}
    for layer in layers:
        owner.update(dict.fromkeys(layer.biases, owner[layer.weights[0]]))
    weights = dict.fromkeys(name for layer in layers for name in layer.weights)
    biases = dict.fromkeys(name for layer in layers for name in layer.biases)
    found = []
    for i, layer in enumerate(layers):
        own = {
            "weights": tuple(name for name in weights if owner[name] == i),
            "biases": tuple(name for name in biases if owner[name] == i),
        }
        if own["weights"]:
            found.append(layer.model_copy(update=own))
    return tuple(found)


def _layer(name: str, module: nn.Module, first: dict[str, str]) -> Layer:
    prefix = f"{name}." if name else ""
    own = [n for n, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
    weights = tuple(first[prefix + n] for n in own if n.startswith("weight"))
    biases = tuple(first[prefix + n] for n in own if n.startswith("bias"))
    if isinstance(module, nn.LSTM):
        if module.proj_size:
            raise ModelError(f"LSTM {name!r} has a projection (proj_size={module.proj_size}); use a Linear after it")
        return Layer(name=name or "lstm", kind="lstm", weights=weights, biases=biases, gates=("i", "f", "g", "o"))
    kind: Literal["linear", "conv"] = "linear" if isinstance(module, nn.Linear) else "conv"
    return Layer(name=name or kind, kind=kind, weights=weights, biases=biases)


def _rules(module: nn.Module, init: InitScheme) -> dict[str, Init]:
    """How a seed draws each tensor that a rule covers; a maskable layer's rule has priority over an embedding's."""
    rules: dict[str, Init] = {}
    first = _first_names(module)
    for prefix, part in sorted(module.named_modules(), key=lambda item: not isinstance(item[1], _MASKABLE)):
        own = part.named_parameters(recurse=False, remove_duplicate=False)
        for name, value in (*own, *part.named_buffers(recurse=False)):
            rule = _rule(part, name, value, init)
            if rule is not None:
                full = f"{prefix}.{name}" if prefix else name
                rules.setdefault(first.get(full, full), rule)
    return rules


def _rule(part: nn.Module, name: str, value: Tensor, init: InitScheme) -> Init | None:
    if isinstance(part, nn.LSTM):
        bound = part.hidden_size**-0.5
        if init == "sign" and name.startswith("weight"):
            return Init(kind="sign", scale=bound / 3**0.5)
        return Init(kind="uniform", scale=bound)
    if isinstance(part, nn.Embedding):  # a row of padding is zero, unlike the others, and no step trains it
        return Init(kind="uniform", scale=3**0.5) if part.padding_idx is None else None
    projection = isinstance(part, nn.MultiheadAttention) and name.startswith(_PROJECTIONS)
    if projection or (isinstance(part, _MASKABLE) and _weighted(part)):
        weight = dict(part.named_parameters(recurse=False)).get("weight", value)
        fan_in = int(weight[0].numel()) if weight.ndim > 1 else int(getattr(part, "embed_dim", 1))
        if name.endswith("bias"):
            return Init(kind="uniform", scale=fan_in**-0.5) if init == "torch" else Init(kind="constant", scale=0)
        if init == "sign":
            return Init(kind="sign", scale=(2 / fan_in) ** 0.5)
        return Init(kind="uniform", scale=((6 if init == "he" else 1) / fan_in) ** 0.5)
    if bool((value == value.flatten()[0]).all()):  # norms, their statistics, scalars: the value they start from
        if name.startswith("running_"):
            return Init(kind="constant", scale=float(name == "running_var"))
        return Init(kind="constant", scale=value.detach().flatten()[0].item())
    return None


def unseeded(module: nn.Module, init: InitScheme, tensors: Iterable[str]) -> list[str]:
    """Those of the `tensors` that no rule covers: a bundle with these must carry its weights."""
    rules = _rules(module, init)
    return [name for name in tensors if name not in rules]
