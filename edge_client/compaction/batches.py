"""Products of matrices in their plainest form: every batch axis by itself.

The exporter writes a product of [n, heads, t, d] arrays as one of [n * heads, t, d]: an `Expand` that changes nothing,
a `Reshape` that joins the batch axes before each factor, and one behind the product that parts them again. In the
merged axis the heads cannot be told from the batch, so no head could be cut by itself, nor get a constant of its own.
"""

from __future__ import annotations

from onnx import NodeProto, helper

from edge_client.compaction.net import Net, drop_unused


def part_batches(net: Net) -> None:
    """Write the products of `net` whose batch axes are joined on the axes they were joined from, in place."""
    makers = {n.output[0]: n for n in net.nodes}
    users = net.users()
    made: list[NodeProto] = []
    for node in net.nodes:
        made.append(node)
        if node.op_type != "Reshape" or net.data(node) != [0]:
            continue
        product = makers.get(node.input[0])
        if product is None or product.op_type != "MatMul" or len(users.get(product.output[0], [])) != 1:
            continue
        factors = [_parted(net, makers, name) for name in product.input]
        if None in factors:
            continue
        first, second = (str(f) for f in factors)
        lead = net.shapes[first][:-2]
        due = (*lead, net.shapes[first][-2], net.shapes[second][-1])
        same = net.shapes[second][:-2] == lead and net.moving[first][:-2] == net.moving[second][:-2]
        if same and net.shapes[node.output[0]] == due and net.moving[node.output[0]][:-2] == net.moving[first][:-2]:
            made[-1] = helper.make_node("MatMul", [first, second], [node.output[0]])
    net.nodes = made
    drop_unused(net)


def _parted(net: Net, makers: dict[str, NodeProto], name: str) -> str | None:
    """The value whose batch axes a `Reshape` joins into the first of the three axes of `name`; None when none does."""
    join = makers.get(name)
    if join is None or join.op_type != "Reshape" or net.data(join) != [0]:
        return None
    value: str = join.input[0]
    shape = net.shapes[name]
    before = net.shapes[value]
    if len(shape) != 3 or len(before) < 4 or before[-2:] != shape[-2:] or any(net.moving[value][-2:]):
        return None
    # Every sample is by itself only where the batch is the outermost axis.
    if net.moving[value] != (True, *(False,) * (len(before) - 1)):
        return None
    spread = makers.get(value)
    while spread is not None and spread.op_type == "Expand" and net.data(spread) == [0]:
        given = spread.input[0]
        if net.shapes[given] != net.shapes[value] or net.moving[given] != net.moving[value]:
            break
        value, spread = given, makers.get(given)
    found: str = value
    return found
