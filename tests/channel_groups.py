"""Channel groups written down by hand."""

from __future__ import annotations

from edge_kernels.channels import ChannelGroup, Place, Role


def between(
    size: int,
    made: str,
    read: str,
    *,
    bias: str | None = None,
    repeat: int = 1,
    norm: tuple[str, ...] = (),
    name: str | None = None,
) -> ChannelGroup:
    """The `size` outputs of layer `made`, `repeat` entries each in the inputs of layer `read`.

    `norm` are a batch-norm's weight, bias, mean and variance.
    """
    roles: tuple[Role, ...] = ("scales", "shifts", "holds", "holds")
    places = [Place(made, 0, "makes")]
    places += [Place(bias, 0, "shifts")] if bias else []
    places += [Place(tensor, 0, role) for tensor, role in zip(norm, roles, strict=False)]
    places.append(Place(read, 1, "reads", step=repeat, repeat=repeat))
    return ChannelGroup(name or made, size, tuple(places))
