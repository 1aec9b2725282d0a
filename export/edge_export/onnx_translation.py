"""PyTorch's ONNX exporter without its messages, with the settings and operators of a bundle's graphs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import onnx
import torch
from torch.export import ExportedProgram

from edge_export.recurrence_onnx import translations

OPSET = 20


def to_onnx(program: ExportedProgram) -> onnx.ModelProto:
    """`program` as ONNX of opset `OPSET`."""
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
