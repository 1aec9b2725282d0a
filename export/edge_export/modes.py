"""A module's copy in training or evaluation mode, as the author means it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from edge_client import authored
from edge_client.errors import ModelError


def duplicate(module: nn.Module) -> nn.Module:
    """A deep copy; values that a hook computes from parameters, as `weight_norm` does, are copied without history."""
    known: dict[int, Tensor] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad:
                known[id(value)] = value.detach().clone()
    try:
        made = copy.deepcopy(module, known)
    except Exception as error:  # an object of the author's may raise anything
        raise ModelError(
            f"{_uncopied(module)} cannot be copied ({type(error).__name__}: {error}), and the export runs copies; make "
            "it outside the module"
        ) from error
    for part in made.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.num_batches_tracked = None  # counts what no graph needs
    return made


def _uncopied(module: nn.Module) -> str:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            try:
                copy.deepcopy(value) if name not in vars(nn.Module()) else None
            except Exception:  # as above
                return f"attribute {'.'.join(filter(None, (path, name)))!r}"
    return "the module"


def in_training(module: nn.Module) -> nn.Module:
    """`module` in training mode. In a module that is in it already, parts that the author holds in evaluation stay."""
    return module if module.training else module.train()


@contextmanager
def slow_paths() -> Iterator[None]:
    """Attention layer by layer: outside training PyTorch would run a fused kernel, which calls no part and no hook.

    A mask is used as it is. To choose a kernel, PyTorch would compare it with the causal one, which no trace can do.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mock.patch.object(transformer, "_detect_is_causal_mask", _hinted):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _hinted(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """What the caller says of a mask; None counts as no."""
    return bool(is_causal)


@contextmanager
def running(on: str, advice: str = "") -> Iterator[None]:
    """Whatever the author's forward raises within the block becomes a ModelError; `on` is the mode and the batch."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the author's forward may raise anything
        place = authored.place_of(error) or "the module"
        if isinstance(error, IndexError) and str(error) == "index out of range in self":
            advice += (
                "; the numbers of a sample are drawn here, so an embedding's ids among them need limits, such as "
                "x[:, 0].long().clamp(0, rows - 1)"
            )
        raise ModelError(f"the module does not run {on}: {place}: {authored.described(error)}{advice}") from error


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set `module` to evaluation mode within the block, and every part of it back to its own mode afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), slow_paths():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
