"""Personal models as ExecuTorch programs for XNNPACK, in float32 or int8. See `edge_client.artifacts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from numpy.typing import NDArray

from edge_client.artifacts import BATCH, Run
from edge_client.errors import BundleError, ModelError
from edge_export.executorch.graph import Graph
from edge_export.executorch.lowering import TRACED, check_installed, exported, lower, quiet

MOST = 32
"""Samples of the largest batch: a program reserves the memory of its largest batch."""


class Pte:
    """A `.pte` file in float32."""

    exact = True
    native = True

    def __init__(self) -> None:
        check_installed()

    def write(self, model: bytes, samples: NDArray[Any] | None, progress: Callable[[str], None]) -> bytes:
        graph, x = _opened(model)
        progress(f"lowering {len(graph.onnx.node)} operators")
        return lower(graph, (x,), [0], most=MOST, delegate="all")

    def open(self, data: bytes) -> Run:
        from edge_client.runtimes.executorch import open_pte

        program = open_pte(data, what="the artifact", refused=BundleError)
        return lambda x: program(x)[0]


class PteInt8(Pte):
    """A `.pte` file in int8, by XNNPACK's quantiser: weights per channel, activations per tensor."""

    exact = False

    def write(self, model: bytes, samples: NDArray[Any] | None, progress: Callable[[str], None]) -> bytes:
        assert samples is not None
        graph, x = _opened(model)
        with quiet():
            from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
                XNNPACKQuantizer,
                get_symmetric_quantization_config,
            )
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

            quantiser = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
            try:
                prepared = prepare_pt2e(exported(graph, (x,), [0], MOST).module(), quantiser)
                progress(f"calibrating on {len(samples)} samples")
                for i in range(0, len(samples), BATCH):
                    prepared(torch.from_numpy(samples[i : i + BATCH]))
                converted = convert_pt2e(prepared)
            except ModelError:
                raise
            except Exception as error:  # each of its passes raises errors of its own
                raise ModelError(f"XNNPACK's quantiser cannot take this model: {error}; keep the float one") from error
        progress(f"lowering {len(graph.onnx.node)} operators")
        return lower(converted, (x,), [0], most=MOST, delegate="all")


def _opened(model: bytes) -> tuple[Graph, torch.Tensor]:
    """The model as a module, and a batch to trace it with. Raises ModelError for an operator without a form."""
    loaded = onnx.load_from_string(model)
    graph = Graph(loaded)
    (value,) = (i for i in loaded.graph.input if i.name in graph.inputs)
    sizes = [TRACED, *(d.dim_value for d in value.type.tensor_type.shape.dim[1:])]
    whole = value.type.tensor_type.elem_type == onnx.TensorProto.INT64
    return graph, torch.zeros(sizes, dtype=torch.int64 if whole else torch.float32)
