"""The fields of a node of an ONNX graph, and the gates of recurrent ones."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, helper

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""How many gates a recurrent operator has: its weights hold one block of rows for each."""


def settings(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
