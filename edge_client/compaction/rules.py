"""The rule of each node."""

from __future__ import annotations

from onnx import NodeProto

from edge_client.compaction import convolutions, maps, moves, products, recurrent
from edge_client.compaction.study import OPAQUE, Rule, Study


def rule(s: Study, node: NodeProto) -> Rule:
    """How `node` is analysed and written."""
    if convolutions.is_convolution(s, node):
        return convolutions.CONVOLUTION
    if products.is_product(s, node):
        return products.PRODUCT
    if products.is_embedding(s, node):
        return products.EMBEDDING
    if recurrent.is_recurrent(s, node):
        return recurrent.RECURRENT
    if moves.is_move(s.net, node):
        return moves.MOVE
    if maps.behaviour(s, node) is not None:
        return maps.MAP
    return OPAQUE
