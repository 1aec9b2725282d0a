"""The witness of the proof: the author's own module, one step by autograd, in float64 or float32.

Nothing of the exporter's own forms takes part, dropout's draws excepted. A step must leave every parameter as it was,
and every buffer that is no statistic: what a graph holds as a constant must be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from edge_client.errors import ModelError
from edge_client.targets import Target
from edge_export.draws import KEY, Values, same_values
from edge_export.dropout import Drops, repeatable
from edge_export.modes import duplicate, in_training, running
from edge_export.rewriting import Rewriting
from edge_export.rounding import Rounding


@dataclass(frozen=True)
class Step:
    """What one step starts from: parameters and buffers by name, a batch and its labels."""

    values: Values
    buffers: Values
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Copies:
    """One copy of a module for each mode; what a run keeps in them stays apart from the author's module."""

    evaluation: nn.Module
    training: nn.Module


@dataclass(frozen=True)
class Witness:
    """The module, its target, the parameters that get gradients and the buffers that a step may move."""

    module: nn.Module
    target: Target
    trainable: Sequence[str]
    statistics: Sequence[str]

    def copies(self) -> Copies:
        """Copies that have not run."""
        return Copies(duplicate(self.module).eval(), in_training(duplicate(self.module)))

    def step(
        self,
        step: Step,
        wide: bool = False,
        copies: Copies | None = None,
        rounding: Rounding | None = None,
    ) -> Values:
        """loss, grad:<name>, new:<name> and logits; the logits alone where PyTorch refuses to train on one sample.

        `wide` is for float64; `copies` are used again, by default new ones are made. Raises ModelError.
        """
        advice = "; write forward so that it takes any number of samples" if len(step.x) == 1 else ""
        with running(f"on {len(step.x)} samples", advice), rounding or nullcontext():
            return self._step(step, wide, copies or self.copies())

    def _step(self, step: Step, wide: bool, copies: Copies) -> Values:
        def cast(t: Tensor) -> Tensor:
            return t.double() if wide and t.is_floating_point() else t.clone()

        def started(module: nn.Module) -> Values:
            if wide:
                _cast_attributes(module, cast)
            return {k: cast(v) for k, v in (step.values | step.buffers).items()}

        found: Values = {}
        with _float64() if wide else nullcontext():
            state = started(copies.evaluation)
            with torch.no_grad():
                found["logits"] = functional_call(copies.evaluation, state, (cast(step.x),))
            self._check_kept(step, state, evaluating=True)
            state = started(copies.training)
            free = {k: state[k].requires_grad_() for k in self.trainable}
            with Rewriting(repeatable(Drops(torch.tensor([KEY])))), torch.enable_grad():
                try:
                    outputs = functional_call(copies.training, state, (cast(step.x),))
                    _check_alike(outputs, found["logits"])
                    loss = self.target.torch_loss(outputs, cast(step.y))
                except ValueError as error:
                    if len(step.x) == 1 and "more than 1 value per channel" in str(error):
                        return found  # PyTorch refuses one value per channel; the graph is defined there
                    raise
            gradients = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
        self._check_kept(step, state, evaluating=False)
        found["loss"] = loss.detach()
        for (name, value), g in zip(free.items(), gradients, strict=True):
            found[f"grad:{name}"] = torch.zeros_like(value) if g is None else g.to_dense()
        return found | {f"new:{k}": state[k].detach() for k in self.statistics}

    def _check_kept(self, step: Step, state: Values, evaluating: bool) -> None:
        """Raise ModelError for a tensor that a run changed, but for statistics in training."""
        for name, before in (step.values | step.buffers).items():
            after = state[name].detach()
            if (name in self.statistics and not evaluating) or same_values(after, before):
                continue
            if name in step.values:
                raise ModelError(
                    f"parameter {name!r} changes in forward; compute a new tensor from it, such as w.clamp(-1, 1)"
                )
            if evaluating:
                raise ModelError(
                    f"buffer {name!r} changes in evaluation mode, where devices keep no change; change it only "
                    "`if self.training`"
                )
            raise ModelError(
                f"buffer {name!r} changes on some batches only; let every training step move it, as by torch.where"
            )


def _check_alike(outputs: Any, evaluated: Tensor) -> None:
    """Raise ModelError when what the module returns in training is no tensor like that in evaluation."""
    shape = getattr(outputs, "shape", None)
    if shape != evaluated.shape:
        what = type(outputs).__name__ if shape is None else f"outputs of shape {tuple(shape)}"
        raise ModelError(
            f"the module returns {what} in training mode and outputs of shape {tuple(evaluated.shape)} in evaluation "
            "mode; return the same outputs in both, without those of auxiliary heads"
        )


class _Wide(TorchFunctionMode):
    """Whatever the module's code makes as float32 is float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func in (torch.nan_to_num, Tensor.nan_to_num):
            return _finite(*args, **(kwargs or {}))
        return func(*map(_widened, args), **{k: _widened(v) for k, v in (kwargs or {}).items()})


def _finite(x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """`torch.nan_to_num` with the limits of float32, as the module has them."""
    most = torch.finfo(torch.float32).max
    return torch.nan_to_num(x, nan, most if posinf is None else posinf, -most if neginf is None else neginf)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def _cast_attributes(module: nn.Module, cast: Callable[[Tensor], Tensor]) -> None:
    """Cast the tensors that `module` holds as plain attributes."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                vars(part)[name] = cast(value)
