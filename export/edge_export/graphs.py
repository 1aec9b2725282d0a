"""The graphs of a bundle, traced from a PyTorch module: `train.onnx`, `eval.onnx` and `model.pt2`.

`train.onnx` is one training step as an ordinary graph: the forward pass, the target's loss and the backward pass are
traced into ATen operators (`torch.func.vjp` under `make_fx`), translated by PyTorch's own ONNX exporter and reduced by
`onnx_passes`. It runs without autograd and without a training build of ONNX Runtime.

`eval.onnx` is the forward pass in the form that compaction rewrites: `Gemm` with `transB=1` for a linear layer, one
`BatchNormalization` node for a batch-norm, `Flatten` where channels become features. So it contains no layer's shape.

`model.pt2` is the forward pass in training mode, which the PyTorch backend runs; autograd differentiates it there. Its
tensors are zeros: values always come from the bundle's flat vectors.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call, vjp
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edge_client.errors import ModelError
from edge_client.targets import Target
from edge_export import decompositions
from edge_export.onnx_passes import free_flattens, tidy
from edge_export.recurrence import rewritten
from edge_export.recurrence_onnx import translations

OPSET = 20


def train_graph(
    module: nn.Module, example: Tensor, parameters: list[str], buffers: list[str], trainable: list[str], target: Target
) -> onnx.ModelProto:
    """The step of `module` with the target's loss: inputs `parameters`, `buffers`, `x`, `y` by name, dynamic batch.

    Outputs are `loss`, `grad:<name>` for each name of `trainable`, and `new:<name>` for each of `buffers`.
    """
    module = copy.deepcopy(module).train()
    values: dict[str, Tensor] = {k: v.detach() for k, v in module.named_parameters()}
    stats: dict[str, Tensor] = {k: v.detach() for k, v in module.named_buffers()}
    counters = [k for k in stats if k not in buffers]

    def step(ps: list[Tensor], bs: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        fixed = {k: p for k, p in zip(parameters, ps, strict=True) if k not in trainable}

        def forward(free: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            state = {k: b.clone() for k, b in zip(buffers, bs, strict=True)}
            state |= {k: torch.zeros_like(stats[k], device=x.device) for k in counters}
            with rewritten():
                outputs = functional_call(module, {**fixed, **dict(zip(trainable, free, strict=True)), **state}, (x,))
            return target.torch_loss(outputs, y), [state[k] for k in buffers]

        free = [p for k, p in zip(parameters, ps, strict=True) if k in trainable]
        made: tuple[Any, ...] = vjp(forward, free, has_aux=True)
        loss, back, new = made
        (gradients,) = back(torch.ones_like(loss))
        return [loss, *gradients, *new]

    labels = torch.from_numpy(target.labels(example.shape[0]))
    inputs = ([values[k] for k in parameters], [stats[k] for k in buffers], example, labels)
    graph = make_fx(step, decomposition_table=decompositions.table(), tracing_mode="symbolic")(*_fake(*inputs))
    n = torch.export.Dim("n", min=1)
    shapes = ([None] * len(parameters), [None] * len(buffers), {0: n}, {0: n})
    model = _to_onnx(torch.export.export(graph, inputs, dynamic_shapes=shapes))
    outputs = ["loss", *(f"grad:{k}" for k in trainable), *(f"new:{k}" for k in buffers)]
    return tidy(model, [*parameters, *buffers, "x", "y"], outputs)


def _fake(ps: list[Tensor], bs: list[Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """The inputs without storage: every size a constant but the batch, which is a symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(t: Tensor, batched: bool) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if batched and i == 0 else DimDynamic.STATIC for i in range(t.ndim)]
        made: Tensor = mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        return made

    if x.shape[0] < 2:
        raise ModelError(f"the example batch must hold at least 2 samples to trace a dynamic batch, got {x.shape[0]}")
    return [fake(p, False) for p in ps], [fake(b, False) for b in bs], fake(x, True), fake(y, True)


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
    """`module` in evaluation mode, dynamic batch: inputs `parameters`, `buffers`, `x` by name, output `logits`."""
    module = copy.deepcopy(module).eval()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = [state[name].detach() for name in (*parameters, *buffers)]
    shapes = ([None] * len(tensors), {0: torch.export.Dim("n", min=1)})
    with torch.no_grad():
        wrapped = _Forward(module, parameters, buffers)
        program = torch.export.export(wrapped, (tensors, example), dynamic_shapes=shapes)
    return free_flattens(tidy(_to_onnx(program), [*parameters, *buffers, "x"], ["logits"]))


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


def _to_onnx(program: ExportedProgram) -> onnx.ModelProto:
    """`program` as ONNX of opset `OPSET`, without the exporter's messages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made: Any = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False, custom_translation_table=translations()
            )
    finally:
        logger.setLevel(level)
    model: onnx.ModelProto = made.model_proto
    return model
