"""The PyTorch backend: the bundle's `model.pt2`, differentiated by autograd.

It needs the extra `author` (torch) and exists for machines that have PyTorch anyway, and as the independent witness
of the exported training graph. `model.pt2` is the module in training mode, `model-eval.pt2` in evaluation mode.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch.func import functional_call

from edge_client.bundle import F32, Bundle, views
from edge_client.errors import BundleError
from edge_client.training import Gradient
from edge_client.training.narrowed import Engine


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> torch.Tensor:
    """`aten.batch_norm`, but one value per channel, whose unbiased variance is 0 / 0, leaves `var` as it is."""
    into = var.clone() if training and x.numel() == x.shape[1] else var
    out: torch.Tensor = torch.ops.aten.batch_norm.default(x, weight, bias, mean, into, training, momentum, eps, cudnn)
    return out


class TorchTrainer(Engine):
    """See :class:`edge_client.training.Trainer`."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        super().__init__(bundle.manifest)
        self._bundle = bundle
        torch.set_num_threads(threads)  # PyTorch has one setting for the whole process

    def _program(self, part: str) -> torch.fx.GraphModule:
        path = self._bundle.part(part)
        try:
            module: torch.fx.GraphModule = torch.export.load(path).module(check_guards=False)
        except Exception as error:  # PyTorch's loader raises whatever the archive makes it raise
            raise BundleError(
                f"PyTorch {torch.__version__} cannot open {part}: {error}; export the bundle again"
            ) from error
        for node in module.graph.nodes:
            if node.target == torch.ops.aten.batch_norm.default:
                node.target = _batch_norm
        module.recompile()
        # The hooks compare every input with the exported shapes again, at twice the cost of a small model's forward.
        module._forward_pre_hooks.clear()
        return module

    @cached_property
    def _train(self) -> torch.fx.GraphModule:
        return self._program("model.pt2")

    @cached_property
    def _eval(self) -> torch.fx.GraphModule:
        return self._program("model-eval.pt2")

    def _state(self, parameters: F32, buffers: F32) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        m = self.manifest
        if not parameters.flags.writeable:  # a payload's: torch has no read-only tensors and warns
            parameters = parameters.copy()
        values = {k: torch.from_numpy(v) for k, v in views(m.parameters, parameters).items()}
        stats = {k: torch.from_numpy(v.copy()) for k, v in views(m.buffers, buffers).items()}
        return values, stats

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        values, stats = self._state(parameters, buffers)
        free = {t.name: values[t.name].requires_grad_() for t in self.manifest.parameters if t.trainable}
        drawn = (torch.tensor([key]),) if self.manifest.draws else ()
        outputs = functional_call(self._train, {**values, **stats}, (torch.from_numpy(x), *drawn))
        loss: torch.Tensor = self.manifest.target.torch_loss(outputs, torch.from_numpy(y))
        gradients = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
        into = views(self.manifest.parameters, self._gradient)
        for name, gradient in zip(free, gradients, strict=True):
            into[name][...] = 0.0 if gradient is None else gradient.numpy()
        for name, view in views(self.manifest.buffers, self._statistics).items():
            view[...] = stats[name].numpy()
        return Gradient(float(loss.detach()), self._gradient, self._statistics)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        values, stats = self._state(parameters, buffers)
        with torch.no_grad():
            made: F32 = functional_call(self._eval, {**values, **stats}, (torch.from_numpy(x),)).numpy()
        return made
