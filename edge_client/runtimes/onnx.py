"""ONNX Runtime: a model as a session on processors, without messages of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from edge_client.errors import ConfigError, MaskfleetError

NOT_SPINNING: Mapping[str, str] = {"session.intra_op.allow_spinning": "0"}
"""For a device that trains: spinning threads would eat a phone's battery between batches."""
NO_SPINNING_AFTER: Mapping[str, str] = {"session.force_spinning_stop": "1"}
"""For measuring: the threads of a session that is not running must not take processors from the one that is."""


def open_onnx(
    model: Path | bytes,
    *,
    threads: int = 1,
    what: str = "",
    advice: str = "",
    refused: type[MaskfleetError] = ConfigError,
    settings: Mapping[str, str] | None = None,
    rewrite: bool = True,
    arena: bool = True,
    plan: bool = True,
) -> ort.InferenceSession:
    """A model, file or serialised, on `threads` threads. `rewrite` False keeps ONNX Runtime from changing the graph.

    `arena` False gives memory back after each run: for a model that runs a few times, in memory that others need.
    `plan` False holds what the first run took alone, and no block laid out for the next ones beside it.

    Raises `refused`, which names `what` or else the file and ends with `advice`, when it does not open.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = plan
    options.log_severity_level = 4  # an error is raised, and need not be printed too
    for name, value in (settings or {}).items():
        options.add_session_config_entry(name, value)
    if not rewrite:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a class of its own for every status
        name = what or (data if isinstance(data, str) else "the model")
        text = f"ONNX Runtime {ort.__version__} cannot open {name}: {error}"
        raise refused(f"{text}; {advice}" if advice else text) from None
