"""HideNseek: frozen random magnitudes, a network pruned before the first round, one sign per weight both ways.

Vallapuram, Zhou, Kwon, Lee, Xu, Hui, "HideNseek: Federated Lottery Ticket via Server-side Pruning and Sign
Supermask", arXiv 2206.04385, 2022. docs/methods/hidenseek.md argues for the readings chosen here.

- When the federation starts, the server drops the channels that carry the least synaptic flow (`synflow`), by the
  magnitudes times the first latents, without data. From then on nothing of them is trained or sent. Which channels
  stay travels once, a bit each.
- A device trains the smaller network: latents of its signs, with forward sign(s) and slope 1 - tanh(s)^2, and its own
  head. The server averages signs by samples, or counts them. That, and what travels, is in signs.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
from edge_kernels import counter, synflow
from pydantic import Field

from edge_client.bundle import F32, Model, views
from edge_client.errors import ConfigError
from edge_client.methods.shared.network import Network
from edge_client.methods.shared.signs import Record, SignMasks, with_signs
from edge_client.methods.shared.units import UNITS, ByIdentity, Units, chosen
from edge_client.task import Course
from edge_client.training.gates import Gate, SignTanh


class HideNseek(SignMasks):
    """Signs on the frozen magnitudes of a network pruned by SynFlow."""

    name: ClassVar[str] = "hidenseek"
    record_type: ClassVar[type[Record]] = Record
    one_time_down: ClassVar[frozenset[str]] = frozenset({UNITS})
    prunes: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # SynFlow sees the first latents
    gate: ClassVar[Gate] = SignTanh()

    keep: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the prunable channels that stay (one minus the paper's p_r); 1: no pruning."""
    prune_layers: tuple[str, ...] = ()
    """Channel groups to prune, by name or beginning of a name; none named: all."""
    iterations: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Steps of the pruning."""

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        return ("lr", "a larger keep") if self.keep < 1 else ("lr",)

    def magnitudes(self, model: Model) -> F32:
        """The frozen |W|."""
        size: F32 = np.abs(self.parts(model).masked.gather(model.parameters))
        return size

    def sureness(self, net: Network) -> F32:
        """Uniform, so that the latents of round 1 are uniform in (-1, 1) as in the paper."""
        drawn = first_latents(net.origin)
        return self.parts(net.model).masked.gather(drawn if net.units is None else drawn[net.units.places])

    def prune(self, course: Course) -> Units:
        """The units that stay. Raises ConfigError where SynFlow cannot follow the bundle's layers."""
        m, keep = course.model.manifest, self.keep
        self.parts(course.model)  # a model without a layer to mask is refused here, before any advice on pruning
        if keep == 1:
            return chosen(m, {})
        named = [g.name for g in m.groups if not self.prune_layers or g.name.startswith(self.prune_layers)]
        if not m.groups:
            raise ConfigError(
                f"model {m.name!r} has no channel groups, so no unit can be pruned; set keep = 1 to prune nothing, or "
                "choose another method"
            )
        if not named:
            raise ConfigError(
                f"prune_layers = {self.prune_layers!r} names none of the channel groups "
                f"{[g.name for g in m.groups]} of bundle {m.name!r}; name some of them, or set keep = 1"
            )
        try:
            return flowing(ByIdentity(course), tuple(named), keep, self.iterations)
        except ValueError as error:
            raise ConfigError(
                f"SynFlow prunes layers in one row, and those of bundle {m.name!r} are not; set keep = 1 to prune "
                f"nothing, or choose another method ({error})"
            ) from None


def first_latents(course: Course) -> F32:
    """The size of each weight's first latent, and 1 for a parameter that has none, float32[d]."""
    m = course.model.manifest
    masked, sizes = with_signs(m), np.ones(m.d, np.float32)
    key = counter.key(course.seed, "hidenseek", "first latents")
    masked.scatter(counter.uniform(key, masked.size).astype(np.float32), sizes)
    return sizes


@lru_cache(maxsize=4)
def flowing(same: ByIdentity, groups: tuple[str, ...], keep: float, iterations: int) -> Units:
    """The units that stay of these groups and all others, by the flow of |W| times the first latents.

    Raises ValueError where SynFlow cannot follow the layers. Cached, because `exchanged` needs them in every round.
    """
    course: Course = same.value
    m = course.model.manifest
    tensors = views(m.parameters, course.model.parameters * first_latents(course))
    layers = [name for layer in m.layers for name in layer.weights]
    return chosen(m, synflow.prune(tensors, layers, m.groups, groups, keep, iterations))
