"""Which kind of operator a node is: the rule of its study, and the function that writes it."""

from __future__ import annotations

from onnx import NodeProto

from edge_client.compaction import convolutions, maps, moves, products, recurrent
from edge_client.compaction.study import OPAQUE, Rule, Study
from edge_client.compaction.writer import Rewrite, Writer


def rule(s: Study, node: NodeProto) -> Rule:
    """How `node` is studied."""
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


REWRITES: dict[Rule, Rewrite] = {
    convolutions.CONVOLUTION: convolutions.rewrite,
    products.PRODUCT: products.rewrite_product,
    products.EMBEDDING: products.rewrite_embedding,
    recurrent.RECURRENT: recurrent.rewrite,
    moves.MOVE: moves.rewrite,
    maps.MAP: maps.rewrite,
    OPAQUE: Writer.copy_whole,
}


def rewrite(s: Study, node: NodeProto) -> Rewrite:
    """How `node` is written on fewer elements."""
    return REWRITES[rule(s, node)]
