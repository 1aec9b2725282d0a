"""Warm starts: a bundle with other weights, those of a file or of a federation's global model.

A federation that starts from given values gets a bundle of its own: the same graphs, and a weights part that holds the
values. So a model stays data with a digest, devices fetch and check it as ever, and methods need no change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from edge_client.bundle import F32, WEIGHTS, Manifest, Model, Part, Tensor, digest, views
from edge_client.errors import BundleError
from edge_client.task import Personal

Values = dict[str, F32]


def by_name(manifest: Manifest, model: Personal) -> Values:
    """The values of a model by the names of the bundle's tables."""
    return {**views(manifest.parameters, model.parameters), **views(manifest.buffers, model.buffers)}


def read_values(data: bytes) -> Values:
    """The arrays of a safetensors file. Raises BundleError."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BundleError(f"the body is not a safetensors file: {error}; send the tensors as one") from None


def limit(manifest: Manifest) -> int:
    """The most bytes that a safetensors file with the bundle's values has."""
    rows = len(manifest.parameters) + len(manifest.buffers)
    return 4 * (manifest.d + manifest.buffers_d) + 512 * rows + 65536


@dataclass(frozen=True)
class Derived:
    """A bundle made from another one: its model, its manifest as bytes and its weights as a safetensors file."""

    model: Model
    content: bytes
    weights: bytes

    @property
    def digest(self) -> str:
        """The bundle's digest."""
        return digest(self.content)


def derive(manifest: Manifest, values: Values) -> Derived:
    """The bundle with the graphs of the one of `manifest` and these values.

    Raises BundleError when the values are not those of the bundle's tables.
    """
    tables = manifest.parameters, manifest.buffers
    fitting = {t.name: _fitting(t, values) for table in tables for t in table}
    unknown = sorted(values.keys() - fitting.keys())
    if unknown:
        raise BundleError(f"the model has no tensors {unknown[:5]}; leave them out")
    weights = save(fitting)
    part = Part(sha256=digest(weights), size=len(weights))
    made = manifest.model_copy(update={"seed": None, "parts": {**manifest.parts, WEIGHTS: part}})
    empty = np.zeros(0, np.float32)
    flats = (np.concatenate([empty, *(fitting[t.name].reshape(-1) for t in table)]) for table in tables)
    return Derived(Model(made, *flats), made.to_bytes(), weights)


def _fitting(t: Tensor, values: Values) -> F32:
    """The tensor's value. Raises BundleError when it is missing, of another shape or kind, or not finite."""
    value = values.get(t.name)
    if value is None or value.shape != t.shape or value.dtype != np.float32:
        has = "none" if value is None else f"{value.dtype}{list(value.shape)}"
        raise BundleError(
            f"the model's tensor {t.name!r} is float32{list(t.shape)}, the values have {has} of that name; correct it"
        )
    if not np.isfinite(value).all():
        raise BundleError(f"tensor {t.name!r} holds values that are not finite; correct them")
    return np.ascontiguousarray(value)
