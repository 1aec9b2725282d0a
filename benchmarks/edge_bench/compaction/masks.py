"""Random structured masks on a PyTorch module: each layer prunes channels of its own, whatever its neighbours do.

Two kinds. ``weight``: a pruned channel's row of the weight is zero; its bias and batch-norm stay, so it still emits a
constant. ``act``: its bias and the scale and shift of the batch-norm behind it are zero too. A layer of `c` channels
keeps ``max(1, round(kept * c))`` of them. Of an LSTM or GRU a channel is a unit: its rows in every gate of both
weights. Layers under a sum draw their masks apart, so they disagree about most channels: the hard case.

Values that an untrained module leaves trivial are made ordinary first: biases, norms, and batch-norm statistics, which
come from the masked module's own activations so that no signal dies on its way through a deep network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from edge_bench.compaction.zoo.case import Case

MaskKind = Literal["weight", "act"]
KINDS: tuple[MaskKind, ...] = ("act", "weight")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1, nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CALIBRATION = 32  # samples behind the statistics


@dataclass(frozen=True)
class Rows:
    """Channels of one layer: the tensors' names, `axis` of the weights, and how many times the channels repeat there.

    A recurrent layer has 4 or 3 blocks (gates) of `channels` rows.
    """

    layer: str
    channels: int
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    axis: int = 0
    blocks: int = 1


@dataclass(frozen=True)
class Masked:
    """A masked module with its tensors by name, the mask of every parameter, and the channels kept by layer."""

    module: nn.Module
    masks: dict[str, Tensor]
    kept: dict[str, Tensor]


def masked(case: Case, kind: MaskKind, kept: float, seed: int = 0) -> Masked:
    """A fresh module of `case` with ordinary values, pruned to the share `kept` of every layer's channels."""
    torch.manual_seed(seed)
    module = case.make()
    _ordinary(module)
    random = torch.Generator().manual_seed(seed + 1)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in module.named_parameters()}
    stay: dict[str, Tensor] = {}
    for rows in prunable(module, case.whole):
        count = max(1, round(kept * rows.channels))
        chosen = torch.zeros(rows.channels, dtype=torch.bool)
        chosen[torch.randperm(rows.channels, generator=random)[:count]] = True
        stay[rows.layer] = chosen
        names = rows.weights if kind == "weight" else (*rows.weights, *rows.biases)
        for name in names:
            masks[name] &= _spread(chosen, masks[name], rows, 0 if name in rows.biases else rows.axis)
    if kind == "act":
        for norm, layer in _norms_behind(module, case).items():
            if layer in stay:
                masks |= {n: stay[layer].clone() for n in (f"{norm}.weight", f"{norm}.bias") if n in masks}
    with torch.no_grad():
        parameters = dict(module.named_parameters())
        for name, mask in masks.items():
            parameters[name].mul_(mask)
        _calibrate(module, case)
    return Masked(module.eval(), masks, stay)


def _spread(chosen: Tensor, like: Tensor, rows: Rows, axis: int) -> Tensor:
    """`chosen` for every entry of a tensor: gates repeat it, a grouped transposed convolution splits it."""
    size = like.shape[axis]
    if axis == 1 and size != rows.channels:  # [in, out / groups, ...]: row i belongs to group i // (in / groups)
        groups = rows.channels // size
        by_row = chosen.view(groups, size).repeat_interleave(like.shape[0] // groups, 0)
        return by_row.view(*by_row.shape, *[1] * (like.ndim - 2)).expand_as(like)
    shape = [1] * like.ndim
    shape[axis] = size
    return chosen.repeat(rows.blocks).view(shape).expand_as(like)


def prunable(module: nn.Module, whole: Collection[str]) -> Iterator[Rows]:
    """Every layer that has channels to prune, but those named in `whole`."""
    names = {id(p): n for n, p in module.named_parameters()}  # one name for a tensor that has several
    for layer, part in module.named_modules():
        if layer in whole:
            continue
        own = {n: names[id(p)] for n, p in part.named_parameters(recurse=False)}
        own |= {n: names[id(p)] for n, p in _parametrised(part)}
        if isinstance(part, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)):
            axis = 1 if isinstance(part, TRANSPOSED) else 0
            channels = part.weight.shape[axis] * (part.groups if isinstance(part, TRANSPOSED) else 1)
            biases = (own["bias"],) if "bias" in own else ()
            yield Rows(layer, int(channels), (own["weight"],), biases, axis)
        elif isinstance(part, nn.MultiheadAttention):
            yield Rows(f"{layer}.in", 3 * part.embed_dim, (own["in_proj_weight"],), (own["in_proj_bias"],))
        elif type(part) in GATES:
            for suffix in sorted({_suffix(n) for n in own}):  # l0, l0_reverse, l1, ...; of a cell none
                pick = tuple(own[n] for n in own if _suffix(n) == suffix and n.startswith("weight"))
                bias = tuple(own[n] for n in own if _suffix(n) == suffix and n.startswith("bias"))
                name = f"{layer}.{suffix}" if suffix else layer
                yield Rows(name, int(part.hidden_size), pick, bias, 0, GATES[type(part)])


def _parametrised(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A reparametrised tensor by its name, with the smallest parameter that has its rows, such as the lengths."""
    if is_parametrized(part):
        for name, made in part.parametrizations.items():  # type: ignore[union-attr,operator]
            rows = len(getattr(part, name))
            yield name, min((p for p in made.parameters() if len(p) == rows), key=lambda p: p.numel())


def _suffix(name: str) -> str:
    """What follows `weight_ih` in the name of a recurrent layer's parameter."""
    return "_".join(name.split("_")[2:])


def _ordinary(module: nn.Module) -> None:
    """Random biases, slopes, positions and factors of norms, where initialisation leaves zeros and ones."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            trivial = p.ndim <= 1 or bool((p == p.reshape(-1)[0]).all())
            if trivial and name.endswith("weight") and p.ndim == 1:
                p.uniform_(0.5, 1.5)
                if p.numel() == 1 or isinstance(_owner(module, name), nn.PReLU):
                    p.uniform_(0.1, 0.4)
            elif trivial and p.ndim:
                p.uniform_(-0.5, 0.5)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _calibrate(module: nn.Module, case: Case) -> None:
    """Statistics of random samples, moved a little; a constant channel's are drawn, since training leaves any there."""
    norms = [part for part in module.modules() if isinstance(part, NORMS)]
    if not norms:
        return
    for part in norms:
        part.momentum = 1.0
    module.train()
    module(case.batch(CALIBRATION, seed=7))
    module.eval()
    for part in norms:
        part.momentum = 0.1
        mean, variance = part.running_mean, part.running_var
        assert mean is not None
        assert variance is not None
        constant = variance < 1e-9
        mean += 0.2 * variance.sqrt() * torch.empty_like(mean).uniform_(-1, 1)
        variance *= torch.empty_like(variance).uniform_(0.7, 1.5)
        mean[constant] = torch.empty_like(mean).uniform_(-0.5, 0.5)[constant]
        variance[constant] = torch.empty_like(variance).uniform_(0.5, 2.0)[constant]


def _norms_behind(module: nn.Module, case: Case) -> dict[str, str]:
    """The layer whose output each batch-norm reads directly, by the batch-norm's name."""
    made: dict[int, tuple[str, Tensor]] = {}  # the tensor is held, so that its id stays its own
    found: dict[str, str] = {}
    hooks = []

    def after(layer: str) -> Any:
        def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(part, NORMS):
                if id(inputs[0]) in made:
                    found[layer] = made[id(inputs[0])][0]
            elif isinstance(output, Tensor):
                made[id(output)] = (layer, output)

        return hook

    for layer, part in module.named_modules():
        if isinstance(part, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, *NORMS)):
            hooks.append(part.register_forward_hook(after(layer)))
    module.eval()
    with torch.no_grad():
        module(case.batch(2))
    for handle in hooks:
        handle.remove()
    return found
