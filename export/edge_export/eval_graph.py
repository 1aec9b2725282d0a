"""The forward pass as a canonical ONNX graph: parameters and statistics as named inputs, `x` -> `logits`.

It has the form that compaction rewrites: `Gemm` with `transB=1` for a linear layer, one `BatchNormalization` node for a
batch-norm, `Flatten` where channels become features. So the graph contains no layer's shape. The output is named
`logits` whatever the target.
"""

from __future__ import annotations

import copy

import onnx
import torch
from torch import Tensor, nn
from torch.func import functional_call

from edge_export.flattens import free_flattens
from edge_export.onnx_passes import tidy
from edge_export.onnx_translation import to_onnx


class _Forward(nn.Module):
    """`module` as a function of its tensors; `module` itself is hidden from PyTorch's registration."""

    def __init__(self, module: nn.Module, parameters: list[str], buffers: list[str]) -> None:
        super().__init__()
        self.run = (module,)
        self.names = [*parameters, *buffers]

    def forward(self, tensors: list[Tensor], x: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.run[0], dict(zip(self.names, tensors, strict=True)), (x,))
        return logits


def eval_graph(module: nn.Module, example: Tensor, parameters: list[str], buffers: list[str]) -> onnx.ModelProto:
    """`module` in evaluation mode with a dynamic batch."""
    module = copy.deepcopy(module).eval()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = [state[name].detach() for name in (*parameters, *buffers)]
    shapes = ([None] * len(tensors), {0: torch.export.Dim("n", min=1)})
    with torch.no_grad():
        wrapped = _Forward(module, parameters, buffers)
        program = torch.export.export(wrapped, (tensors, example), dynamic_shapes=shapes)
    return free_flattens(tidy(to_onnx(program), [*parameters, *buffers, "x"], ["logits"]))
