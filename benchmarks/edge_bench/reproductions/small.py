"""What a device saves by a pruned model: multiply-adds, inference and training steps beside the whole network.

The models are those that a device writes: `personal.onnx` and the dense file that is built alike. Inference is one
sample, a training step is the gradient of one batch; whole and small take turns, so a busy moment affects both.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.data import DeviceData
from edge_client.measure.latency import in_turns, latency
from edge_client.measure.macs import macs
from edge_client.task import Personal
from edge_client.training import Trainer, open_trainer

BATCH = 32
STEPS = 60
WARM_UP = 5

WHICH = "whole", "small"
Figures = dict[str, float]


def figures(bundle: Bundle, personal: Personal, data: DeviceData) -> Figures:
    """Parameters, multiply-adds a sample, and milliseconds of an inference and a training step, `_whole` and `_small`.

    Raises CompactionError when the small model is not equal to the masked one.
    """
    sample = np.ascontiguousarray(data.x[:1])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("whole.onnx", "small.onnx")]
        write_dense(bundle, personal, files[0], data.x)
        report = write_personal(bundle, personal, files[1], data.x)
        inference = latency(files, sample)
        counts = [macs(file) for file in files]
    whole = open_trainer("onnxruntime", bundle)
    left = {g.name: report.layers[g.at("makes")[0].tensor][1] for g in bundle.manifest.groups}
    small = whole.narrow({name: np.arange(n, dtype=np.intp) for name, n in left.items()})
    step = step_times([whole, small], data)
    found = {
        "parameters": (report.parameters_dense, report.parameters_compact),
        "multiply_adds": counts,
        "inference_ms": inference,
        "step_ms": step,
    }
    return {f"{name}_{which}": float(v) for name, pair in found.items() for which, v in zip(WHICH, pair, strict=True)}


def step_times(trainers: list[Trainer], data: DeviceData) -> list[float]:
    """Median milliseconds of each trainer's gradient on one batch, timed in turns, the process's own CPU time.

    The values are constants: a step's time does not depend on them.
    """
    x, y = np.ascontiguousarray(data.x[:BATCH]), np.ascontiguousarray(data.y[:BATCH])
    steps = [
        partial(t.gradient, np.full(t.manifest.d, 0.01, np.float32), np.ones(t.manifest.buffers_d, np.float32), x, y)
        for t in trainers
    ]
    return [float(t) for t in np.median(in_turns(steps, STEPS, WARM_UP).cpu, axis=1)]
