"""`model.pt2`: the module as a `torch.export` program in training mode, data that the PyTorch backend runs.

It holds the forward pass only. Autograd differentiates it when it runs, so it shares nothing with `train.onnx` but
the module they came from. Its tensors are zeros: values always come from the bundle's flat vectors.
"""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn


def torch_program(module: nn.Module, example: Tensor) -> bytes:
    """`module` in training mode with a dynamic batch, saved by `torch.export.save`."""
    module = copy.deepcopy(module).train()
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    for tensor in program.state_dict.values():
        tensor.data.zero_()
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()
