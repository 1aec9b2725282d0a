"""One training step as an ordinary ONNX graph: parameters, statistics and a batch in, loss and gradients out.

The forward pass, the target's loss and the backward pass are traced into one graph of ATen operators
(`torch.func.vjp` under `make_fx`), then translated by PyTorch's own ONNX exporter and reduced by `onnx_passes`. The
graph runs without autograd and without a training build of ONNX Runtime.
"""

from __future__ import annotations

import copy
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edge_client.errors import ModelError
from edge_client.targets import Target
from edge_export import decompositions
from edge_export.onnx_passes import tidy
from edge_export.onnx_translation import to_onnx
from edge_export.recurrence import rewritten


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
    model = to_onnx(torch.export.export(graph, inputs, dynamic_shapes=shapes))
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
