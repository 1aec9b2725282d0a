"""The graphs of a bundle, traced from a PyTorch module: `train.onnx` and `eval.onnx`.

`train.onnx` is one training step as an ordinary graph: the forward pass, the target's loss and the backward pass are
traced into ATen operators (`torch.func.vjp` under `make_fx`), written as ONNX by `onnx_writer` and reduced by
`onnx_passes`. It runs without autograd and without a training build of ONNX Runtime. A model with dropout has a
further input, `key` int64[1]: what is dropped follows from it (see `dropout`).

`eval.onnx` is the forward pass in the form that compaction rewrites: `Gemm` with `transB=1` for a linear layer, one
`BatchNormalization` node for a batch-norm, `Flatten` where channels become features. So it contains no layer's shape.

Tensors that a training step moves are inputs of both graphs by name. All others are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize, vjp
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from edge_client.errors import ModelError
from edge_client.targets import Target
from edge_export import decompositions
from edge_export.batch_norm import Statistics
from edge_export.branches import BatchEnv, refuse_branches
from edge_export.dropout import Drops
from edge_export.modes import duplicate, in_training, slow_paths
from edge_export.onnx_layers import layers
from edge_export.onnx_moves import moves
from edge_export.onnx_operators import operators
from edge_export.onnx_passes import free_flattens, tidy
from edge_export.onnx_writer import Handler, to_onnx
from edge_export.refusals import Path, in_a_sentence
from edge_export.rewriting import Rewriting, evaluation_table, training_table


def train_graph(
    module: nn.Module, example: Tensor, parameters: list[str], buffers: list[str], trainable: list[str], target: Target
) -> onnx.ModelProto:
    """The step of `module` with the target's loss: inputs `parameters`, `buffers`, `x`, `y` by name, dynamic batch.

    Outputs are `loss`, `grad:<name>` for each name of `trainable`, and `new:<name>` for each of `buffers`. A model that
    draws has the input `key` as well.
    """
    author, module = module, in_training(duplicate(module))
    path = Path(module)
    values: dict[str, Tensor] = {k: v.detach() for k, v in module.named_parameters()}
    stats: dict[str, Tensor] = {k: v.detach() for k, v in module.named_buffers()}
    fixed_buffers = [k for k in stats if k not in buffers]
    drawn = False

    def step(ps: list[Tensor], bs: list[Tensor], x: Tensor, y: Tensor, key: Tensor) -> list[Tensor]:
        nonlocal drawn
        fixed = {k: p for k, p in zip(parameters, ps, strict=True) if k not in trainable}
        drops = Drops(key)
        norms = Statistics()

        def forward(free: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            state = {k: b.clone() for k, b in zip(buffers, bs, strict=True)}
            state |= {k: stats[k].clone() for k in fixed_buffers}
            state |= {**fixed, **dict(zip(trainable, free, strict=True))}
            with Rewriting({**training_table(), **drops.table(), **norms.table()}), slow_paths():
                outputs = functional_call(module, state, (x,))  # puts what forward assigns to a buffer into `state`
            return target.torch_loss(outputs, y), [norms.newest(state[k]) for k in buffers]

        free = [p for k, p in zip(parameters, ps, strict=True) if k in trainable]
        made: tuple[Any, ...] = vjp(forward, free, has_aux=True)
        loss, back, new = made
        (gradients,) = back(torch.ones_like(loss))
        drawn = drops.calls > 0
        return [loss, *gradients, *new]

    labels = torch.from_numpy(target.labels(example.shape[0]))
    key = torch.zeros(1, dtype=torch.int64)
    inputs = _fake([values[k] for k in parameters], [stats[k] for k in buffers], [example, labels], [key])
    ps, bs, (x, y), (key,) = inputs
    names = [*parameters, *buffers, "x", "y", "key"]
    outputs = ["loss", *(f"grad:{k}" for k in trainable), *(f"new:{k}" for k in buffers)]
    with in_a_sentence(author, example, path):
        traced = _traced(step, decompositions.table(), ps, bs, x, y, key)
        path.running.clear()
        return tidy(_written(traced, drawn), names[: None if drawn else -1], outputs)


def _traced(function: Callable[..., Any], table: dict[Any, Any], *inputs: Any) -> torch.fx.GraphModule:
    """`function` of fake tensors as ATen operators, none of which changes a tensor in place.

    Raises ModelError when the operators hold for some numbers of samples only.
    """
    made: torch.fx.GraphModule = make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*inputs)
    made.graph.eliminate_dead_code()
    if any(_mutates(n) for n in made.graph.nodes):  # traced once more: backward passes of our own do not allow it above
        pure = functionalize(made, remove="mutations")
        made = make_fx(pure, decomposition_table=table, tracing_mode="symbolic")(*inputs)
        made.graph.eliminate_dead_code()
    refuse_branches(inputs)
    return made


def _mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(traced: torch.fx.GraphModule, keyed: bool = True) -> onnx.ModelProto:
    """The traced graph as ONNX; without its last input unless `keyed`."""
    if not keyed:
        last = [n for n in traced.graph.nodes if n.op == "placeholder"][-1]
        traced.graph.erase_node(last)
    batch = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder" and n.meta["val"].ndim]
    if not any(isinstance(v.shape[0], torch.SymInt) and not v.shape[0].node.expr.is_number for v in batch):
        raise ModelError(
            "the forward pass holds for one number of samples only: int(), len(), range() or a list makes a Python "
            "number of the batch's size; use x.shape[0] itself, -1 in reshape, and operators on the whole batch"
        )
    table: dict[str, Handler] = {**operators(), **moves(), **layers()}
    return to_onnx(traced, table)


def _fake(*groups: list[Tensor]) -> list[list[Tensor]]:
    """Tensors without storage, by group; in the third group the first axis is the batch, a symbol."""
    mode = FakeTensorMode(shape_env=BatchEnv(), allow_non_fake_inputs=True)

    def fake(t: Tensor, batched: bool) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if batched and i == 0 else DimDynamic.STATIC for i in range(t.ndim)]
        made: Tensor = mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        return made

    return [[fake(t, i == 2) for t in group] for i, group in enumerate(groups)]


def eval_graph(module: nn.Module, example: Tensor, parameters: list[str], buffers: list[str]) -> onnx.ModelProto:
    """`module` in evaluation mode, dynamic batch: inputs `parameters`, `buffers`, `x` by name, output `logits`."""
    author, module = module, duplicate(module).eval()
    path = Path(module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = [*parameters, *buffers]
    fixed = {k: v for k, v in module.named_buffers() if k not in buffers}

    def forward(ps: list[Tensor], x: Tensor) -> list[Tensor]:
        given = {**dict(zip(names, ps, strict=True)), **{k: v.clone() for k, v in fixed.items()}}
        with Rewriting(evaluation_table()), slow_paths(), torch.no_grad():
            return [functional_call(module, given, (x,))]

    tensors, _, (x,) = _fake([state[k].detach() for k in names], [], [example])
    with in_a_sentence(author, example, path):
        traced = _traced(forward, decompositions.evaluation_table(), tensors, x)
        path.running.clear()
        return free_flattens(tidy(_written(traced), [*names, "x"], ["logits"]))
