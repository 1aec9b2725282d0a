"""The fields of a node of an ONNX graph."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, helper


def settings(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
