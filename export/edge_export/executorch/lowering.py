"""A PyTorch module becomes an ExecuTorch program: traced with a dynamic batch, its products delegated to XNNPACK.

Two ways, which `delegate` names. "products" is for training steps, whose weights are inputs: only matrix products go
to XNNPACK, each on its own, because a delegate of many nodes changes the order of inputs and outputs, and the rest
runs on ExecuTorch's own kernels. "all" is for models with stored weights: XNNPACK takes whatever it can, or products
only where it fails on the whole, as on the transposes between two GRUs of both directions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Collection, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from edge_client.errors import ConfigError, ModelError
from edge_export.executorch.graph import Graph

TRACED = 16
"""Samples of the batch that is traced. Of one sample ExecuTorch's passes would make a constant."""

INSTALL = "install it with `pip install 'maskfleet[author]'`"


def check_installed() -> None:
    """Raise ConfigError when ExecuTorch is not installed."""
    if importlib.util.find_spec("executorch") is None:
        raise ConfigError(f"ExecuTorch is not installed; {INSTALL}")


def lower(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    batched: Collection[int],
    *,
    most: int,
    delegate: Literal["products", "all"],
) -> bytes:
    """`module` on `inputs` as the bytes of a `.pte` file with the one method `forward`.

    Axis 0 of the inputs at the places `batched` is the batch, of 1 to `most` samples. Raises ModelError when an
    operator has no ExecuTorch form, ConfigError when ExecuTorch is not installed.
    """
    check_installed()
    with quiet():
        from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig
        from executorch.backends.xnnpack.partition.config.generic_node_configs import BMMConfig
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
        from executorch.exir.passes.cse_pass import CSEPass

        if delegate == "products":
            partitioner = XnnpackPartitioner(
                configs=[LinearConfig, BMMConfig], per_op_mode=True, force_non_static_weights_for_f32_linear=True
            )
        else:
            partitioner = XnnpackPartitioner()
        try:
            program = exported(module, inputs, batched, most)
            edge: Any = to_edge_transform_and_lower(
                program,
                transform_passes=[CSEPass()],
                partitioner=[partitioner],
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
            )
            return bytes(edge.to_executorch().buffer)
        except ModelError:
            raise
        except Exception as error:  # each of ExecuTorch's passes raises errors of its own
            if delegate == "products":
                raise ModelError(f"the model cannot be lowered to ExecuTorch: {_reason(error)}") from error
    return lower(module, inputs, batched, most=most, delegate="products")


def exported(
    module: nn.Module, inputs: tuple[Tensor, ...], batched: Collection[int], most: int
) -> torch.export.ExportedProgram:
    """The program of `module` with a batch of 1 to `most`. Raises ModelError for what `operators` refuses."""
    n = torch.export.Dim("n", min=1, max=most)
    shapes: Any = tuple({0: n} if i in batched else None for i in range(len(inputs)))
    shapes = (shapes,) if isinstance(module, Graph) else shapes  # its forward takes *inputs, which count as one
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'no reason given'}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the messages and warnings that ExecuTorch and PyTorch write for their own developers."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
