"""Masked models of sequential networks, and what they give in ONNX Runtime and in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator
from sequential_bundle import Act, Conv, Flatten, Linear, Norm, random_personal, sequential_bundle

from edge_client.bundle import Bundle, views
from edge_client.task import Personal


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


MLP = (Linear(3), Act(), Linear(2))
MLP_VALUES = {
    "linear0.weight": [[1, 2], [0, 0], [3, -1]],  # unit 1 has no inputs and a bias of 2
    "linear0.bias": [0.5, 2, 0],
    "linear1.weight": [[1, 10, 0], [0, -20, 0]],  # unit 2 is never read
    "linear1.bias": [0.25, 0],
}


def settled(bundle: Bundle, personal: Personal) -> Personal:
    """`personal` with the statistics that long training leaves: those of its batches, 1e-20 for what never moved."""
    buffers = personal.buffers.copy()
    values = {**views(bundle.manifest.parameters, personal.parameters), **views(bundle.manifest.buffers, buffers)}
    x = np.random.default_rng(0).standard_normal((64, *bundle.manifest.input.shape)).astype(np.float32)
    model = onnx.load(bundle.part("eval.onnx"))
    for norm in [n for n in model.graph.node if n.op_type == "BatchNormalization"]:
        model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(norm.input[0], onnx.TensorProto.FLOAT, None))
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        feed = {i.name: {**values, "x": x}[i.name] for i in session.get_inputs()}
        read = session.run(None, feed)[0].astype(np.float64)
        axes = (0, *range(2, read.ndim))
        values[norm.input[3]][:], values[norm.input[4]][:] = read.mean(axes), read.var(axes) + 1e-20
    return replace(personal, buffers=buffers)


def in_float64(bundle: Bundle, personal: Personal, x: np.ndarray) -> np.ndarray:
    """The masked model's outputs, every operation in float64, by onnx's own evaluator."""
    tensors = {
        **views(bundle.manifest.parameters, personal.parameters),
        **views(bundle.manifest.buffers, personal.buffers),
    }
    feed = {name: value.astype(np.float64) for name, value in {**tensors, "x": x}.items()}
    logits = ReferenceEvaluator(onnx.load(bundle.part("eval.onnx"))).run(None, feed)[0]
    assert logits.dtype == np.float64
    return logits


N = Norm(1e-5)
NORMED = (Conv(8, padding=1), N, Act(), Conv(8, padding=1), N, Act(), Flatten(), Linear(16), N, Act(), Linear(4))
STILL = [5, 8, 9]  # seeds of models that float32 batch-norm takes 3e-5 to 7e-5 away from the right logits


def still(folder: Path, seed: int) -> tuple[Bundle, Personal]:
    """A masked CNN many units of which have no inputs but constants, with biases, after long training."""
    bundle = sequential_bundle(folder, (1, 6, 6), NORMED)
    personal = settled(bundle, random_personal(bundle, seed, 0.4, 0.3))
    assert (personal.buffers == np.float32(1e-20)).any()
    return bundle, personal


Y = np.zeros(32, np.int64)
X = np.random.default_rng(1).standard_normal((32, 1, 6, 6)).astype(np.float32)
