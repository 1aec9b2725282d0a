"""int8 for ONNX Runtime: static quantisation, calibrated on the device's own samples. No PyTorch.

Weights have a scale for each channel, activations one for each tensor. Some operators stay float: those that ONNX
Runtime does not quantise, such as recurrent layers, and products with several stored matrices, which it would not run.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from edge_client.artifacts import BATCH, Run
from edge_client.errors import ConfigError
from edge_client.graph.nodes import settings
from edge_client.runtimes.onnx import open_onnx


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self, name: str, samples: NDArray[Any]) -> None:
        self._batches = ({name: samples[i : i + BATCH]} for i in range(0, len(samples), BATCH))

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._batches, None)


def _batches_of_weights(graph: onnx.ModelProto) -> list[str]:
    """Products with several stored matrices, which get names: in int8, with a scale for each, they do not run."""
    ranks = {t.name: len(t.dims) for t in graph.graph.initializer}
    found = [n for n in graph.graph.node if n.op_type == "MatMul" and any(ranks.get(i, 0) > 2 for i in n.input)]
    for i, node in enumerate(found):
        node.name = node.name or f"product{i}"
    return [node.name for node in found]


def _store_transposes(graph: onnx.ModelProto) -> None:
    """A transpose of a stored matrix becomes a stored one, in place: the quantiser takes it for an activation."""
    stored = {t.name: t for t in graph.graph.initializer}
    for node in [n for n in graph.graph.node if n.op_type == "Transpose" and n.input[0] in stored]:
        turned = np.transpose(numpy_helper.to_array(stored[node.input[0]]), settings(node).get("perm"))
        graph.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(turned), node.output[0]))
        graph.graph.node.remove(node)


class Int8:
    """See :class:`edge_client.artifacts.Writer`."""

    exact = False
    native = False

    def write(self, model: bytes, samples: NDArray[Any] | None, progress: Callable[[str], None]) -> bytes:
        assert samples is not None
        graph = onnx.load_from_string(model)
        _store_transposes(graph)
        progress(f"calibrating on {len(samples)} samples")
        level = logging.root.level
        logging.root.setLevel(logging.ERROR)  # it warns that the model was not prepared, which compaction has done
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "int8.onnx"
                quantize_static(
                    graph,
                    path,
                    _Reader(graph.graph.input[0].name, samples),
                    quant_format=QuantFormat.QDQ,
                    per_channel=True,
                    activation_type=QuantType.QInt8,
                    weight_type=QuantType.QInt8,
                    nodes_to_exclude=_batches_of_weights(graph),
                )
                return path.read_bytes()
        except Exception as error:  # its steps raise whatever they meet
            raise ConfigError(
                f"ONNX Runtime {ort.__version__} cannot quantise this model: {error}; keep the float model"
            ) from error
        finally:
            logging.root.setLevel(level)

    def open(self, data: bytes) -> Run:
        session = open_onnx(data, what="the int8 model", advice="keep the float model")
        (name,) = (i.name for i in session.get_inputs())
        return lambda x: np.asarray(session.run(None, {name: x})[0])
