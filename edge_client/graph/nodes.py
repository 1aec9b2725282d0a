"""The fields of a node of an ONNX graph, and what is common to some operators."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, helper

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""How many gates a recurrent operator has: its weights hold one block of rows for each."""
REARRANGING = frozenset(
    {"Expand", "Flatten", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose outputs hold entries of their first input alone."""


def settings(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def set_attribute(node: NodeProto, name: str, value: Any) -> None:
    """Give a node an attribute, or another value of it."""
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
