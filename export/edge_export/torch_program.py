"""`model.pt2`: the module as a `torch.export` program in training mode, which the PyTorch backend runs.

It holds the forward pass only; autograd differentiates it at run time. So it shares only its module with `train.onnx`.
Its tensors are zeros: values always come from the bundle's flat vectors.
"""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node


def torch_program(module: nn.Module, example: Tensor) -> bytes:
    """`module` in training mode with a dynamic batch, saved by `torch.export.save`."""
    module = copy.deepcopy(module).train()
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    _read_under_first_names(program)
    for tensor in program.state_dict.values():
        tensor.data.zero_()
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _read_under_first_names(program: ExportedProgram) -> None:
    """The program reads a tensor of several names under the last one; read it under the first, as the bundle does."""
    names = program.graph_signature.inputs_to_parameters
    firsts: dict[Tensor, Node] = {}
    for node in program.graph.nodes:
        if node.name in names:
            first = firsts.setdefault(program.state_dict[names[node.name]], node)
            if first is not node:
                node.replace_all_uses_with(first)
