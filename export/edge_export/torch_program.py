"""`model.pt2`: the module as a `torch.export` program in training mode, data that the PyTorch backend runs.

It holds the forward pass only. Autograd differentiates it when it runs, so it shares nothing with `train.onnx` but
the module they came from. Its tensors are zeros: values always come from the bundle's flat vectors.
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
    """A tensor of several names is read under the last of them; let it be the first, its name in the bundle."""
    names = program.graph_signature.inputs_to_parameters
    firsts: dict[Tensor, Node] = {}
    for node in program.graph.nodes:
        if node.name in names:
            first = firsts.setdefault(program.state_dict[names[node.name]], node)
            if first is not node:
                node.replace_all_uses_with(first)
