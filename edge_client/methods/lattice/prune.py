"""Lattice's pruning: which units the server keeps, and its state after it.

A unit's score is ||incoming weights|| * ||outgoing weights|| in the server's own model, so no device sends anything
for it. Where a batch-norm follows, its scale stands for the incoming weights, whose norm it cancels. Queries and keys
of an attention have no outgoing weights: there the incoming ones count alone. Linear layers keep the share `prune` of
their units. Convolutions keep the square root of that share: they have few of the parameters, and the same share for
all cost 10 points in a prototype on FEMNIST. Units that any other layer makes or reads stay: those of an LSTM, GRU or
RNN or of a weight-normalised layer, and those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from edge_kernels.channels import ChannelGroup, Role, by_channel
from edge_kernels.pruning import group_norms, keep_largest
from numpy.typing import NDArray

from edge_client.bundle import F32, Manifest, Packed, views
from edge_client.errors import ConfigError
from edge_client.methods.lattice.coordinates import cut_history, live, weights
from edge_client.methods.lattice.values import State
from edge_client.methods.shared.network import network
from edge_client.methods.shared.units import Units, require_groups
from edge_client.task import Course


def check(course: Course, prune: float, prune_after: int, prune_keep: Mapping[str, float]) -> None:
    """Raise ConfigError for a federation that cannot be pruned like this."""
    m = course.model.manifest
    require_groups(m)
    if unknown := set(prune_keep) - {g.name for g in m.groups}:
        known = ", ".join(g.name for g in m.groups)
        raise ConfigError(f"prune_keep names {', '.join(sorted(unknown))}, but the groups are {known}")
    if prune_after >= course.rounds:
        sooner = f"give prune_after = {max(course.rounds // 2, 1)}, " if course.rounds > 1 else ""
        raise ConfigError(
            f"prune = {prune} makes the network smaller after {prune_after} rounds (prune_after, by default 4), and "
            f"rounds = {course.rounds} leaves the smaller network none; give rounds = {prune_after + 1} or more, "
            f"{sooner}or leave prune out"
        )
    packed = choose(m, course.model.parameters, prune, prune_keep)
    if network(course, packed).units is None:
        raise ConfigError(
            f"prune = {prune} removes no unit of model {m.name!r}: its groups {[g.name for g in m.groups]} are too "
            "small, or a layer other than a plain linear one or a convolution makes or reads them, such as a recurrent "
            "or a weight-normalised one; name a group in prune_keep, leave prune out, or choose another model"
        )


def pruned(course: Course, state: State, unit: F32, prune: float, prune_keep: Mapping[str, float]) -> State:
    """The state of the smaller network; `unit` is what one count moves a weight of each tensor, float32[tensors]."""
    now = weights(network(course, None), unit, state.counts)
    units = choose(course.model.manifest, now, prune, prune_keep)
    net, own = network(course, units), len(state.statistics) > 0
    stays = live(net)
    return replace(
        state,
        counts=state.counts[stays],
        statistics=net.buffers(state.statistics) if own else state.statistics,
        history=cut_history(net, state.history),
        recent=net.buffers(state.recent.T).T if own else state.recent,
        bad=0,
        residual=state.residual[stays],
        velocity=state.velocity[stays],
        units=units,
    )


def choose(manifest: Manifest, parameters: F32, prune: float, prune_keep: Mapping[str, float]) -> Packed:
    """The units that stay, packed bits: of each group those of the highest score, of equal ones the lower index."""
    tensors = views(manifest.parameters, parameters)
    alive = [
        keep_largest(score(g, tensors), max(1, round(g.size * prune_keep.get(g.name, share(manifest, g, prune)))))
        for g in manifest.groups
    ]
    return Units(manifest, np.concatenate(alive)).packed


def share(manifest: Manifest, group: ChannelGroup, prune: float) -> float:
    """The share of its units that a group keeps."""
    kinds = {weight: layer.kind for layer in manifest.layers for weight in layer.weights}
    made, read = {kinds.get(p.tensor) for p in group.at("makes")}, {kinds.get(p.tensor) for p in group.at("reads")}
    if not made | read <= {"linear", "conv"}:  # a GRU, which is no layer of the manifest, has the kind None
        return 1.0
    return float(np.sqrt(prune)) if "conv" in made else prune


def score(group: ChannelGroup, tensors: Mapping[str, F32]) -> NDArray[np.float64]:
    """||incoming|| * ||outgoing|| of each unit, float64[size]; a norm of which there are no weights counts as 1."""

    def norms(role: Role) -> NDArray[np.float64]:
        places = group.at(role)
        if not places:
            return np.ones(group.size)
        return group_norms(by_channel(tensors[p.tensor], p, group.size) for p in places)

    return norms("scales" if group.at("scales") else "makes") * norms("reads")
