"""A model as data: the manifest, its parts, and the flat vectors laid out by it.

A bundle is a folder: `manifest.json` and the parts it names with their SHA-256 (the graphs of `backends.PARTS`, and
`weights.safetensors` where no seed draws the values). Its digest is the SHA-256 of the manifest's bytes. Nothing in it
is code.

All parameters lie in one float32 vector of length `manifest.d`, in the order of the parameter table; batch-norm
statistics in a second one of length `manifest.buffers_d`. `edge_export` builds bundles.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from edge_kernels import counter
from edge_kernels.channels import ChannelGroup, LayerKind
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edge_client.errors import BundleError, first_fault
from edge_client.protocol.patterns import DIGEST, NAME
from edge_client.protocol.payload import without_repeats
from edge_client.targets import AnyTarget

F32 = NDArray[np.float32]
Bits = NDArray[np.bool_]
Packed = NDArray[np.uint8]  # bits, eight in a byte
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
WARNINGS = "warnings.txt"  # beside the parts, never sent: what users of the bundle should know, a line each

MAX_TENSORS = 100_000  # rows of a table
MAX_MANIFEST = 4 << 20  # bytes of a manifest on the wire: it has one row a tensor
MAX_VALUES = 1 << 32  # of a dimension, a sample or a table; a device's own limit, --max-parameters, is lower
Shape = Annotated[tuple[Annotated[int, Field(gt=0, le=MAX_VALUES)], ...], Field(max_length=8)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Init(_Data):
    """How a seed makes one tensor: `uniform` in [-scale, scale), `sign` in {-scale, +scale}, or `constant` scale."""

    kind: Literal["uniform", "sign", "constant"]
    scale: float


class Tensor(_Data):
    """One row of the parameter or buffer table: `size` float32 values from `offset` of its flat vector."""

    name: str
    shape: Shape
    offset: Annotated[int, Field(ge=0, le=MAX_VALUES)]
    init: Init
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of float32 values."""
        return prod(self.shape)

    @property
    def span(self) -> slice:
        """Where the tensor lies in its flat vector."""
        return slice(self.offset, self.offset + self.size)


class Layer(_Data):
    """A maskable layer, in forward order: its weights (an LSTM has two) and bias-like parameters by name.

    `gates` names the equal blocks along axis 0 of every weight (`("i", "f", "g", "o")` for an LSTM), else empty.
    """

    name: str
    kind: LayerKind
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


def _ascending(ends: tuple[float, float]) -> tuple[float, float]:
    if not ends[0] < ends[1]:
        raise ValueError("give the lowest value, then the highest")
    return ends


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is the name of two classes; give each its own")
    return names


ClassNames = Annotated[tuple[str, ...], Field(max_length=MAX_TENSORS), AfterValidator(_distinct)]
"""What the classes are called, in their order; empty when they have no names."""


class Normalisation(_Data):
    """What raw samples go through before the model, ``(x - mean) / std``.

    Each has one value, one for each feature, or one for each value of a sample, in C order. A feature is an index of a
    sample's first axis (a channel of an image), or of the only one.
    """

    mean: Annotated[tuple[FiniteFloat, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    std: Annotated[tuple[Annotated[FiniteFloat, Field(gt=0)], ...], Field(min_length=1, max_length=MAX_TENSORS)]

    def apply(self, x: NDArray[np.generic]) -> F32:
        """Raw samples [n, *shape] as the model takes them, computed in float64."""
        mean, std = (self._beside(values, x.shape[1:]) for values in (self.mean, self.std))
        made: F32 = ((x.astype(np.float64) - mean) / std).astype(np.float32)
        return made

    @staticmethod
    def _beside(values: tuple[float, ...], sample: tuple[int, ...]) -> NDArray[np.float64]:
        return np.array(values).reshape(sample if len(values) == prod(sample) else (-1, *(1,) * (len(sample) - 1)))


Between = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ascending)]
"""The lowest and the highest value of the samples that a model is made for; a few may lie outside."""


class About(_Data):
    """What an author says of the samples of a bundle, beside their shape."""

    class_names: ClassNames = ()
    """What the classes are called, in their order."""
    normalisation: Normalisation | None = None
    """What raw samples go through before the module."""
    between: Between | None = None
    """The lowest and the highest value of samples that are not normalised."""


Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Input(_Data):
    """One sample: its shape without the batch axis, and its dtype.

    With `normalisation` a device's files hold raw samples, which are normalised when they are read; the graphs take
    normalised ones. Without one, `between` has the scale of samples. With `ids` samples are rows of tables: the
    least id and the end of ids, one pair for all values of a sample or one for each, in C order.
    """

    shape: Shape
    dtype: Literal["float32", "int64"] = "float32"
    normalisation: Normalisation | None = None
    between: Between | None = None
    ids: Annotated[tuple[tuple[Id, Id], ...], Field(min_length=1)] | None = None

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The least id and the end of ids of each value of a sample, int64[*shape]; None without `ids`."""
        if self.ids is None:
            return None
        low, end = (np.broadcast_to(b, prod(self.shape)).reshape(self.shape) for b in np.array(self.ids, np.int64).T)
        return low, end

    @model_validator(mode="after")
    def _bounds_each_value(self) -> Input:
        if self.ids is not None and len(self.ids) not in (1, prod(self.shape)):
            raise ValueError(f"{len(self.ids)} bounds of ids, a sample has {prod(self.shape)} values")
        return self

    @model_validator(mode="after")
    def _normalises_features(self) -> Input:
        how = self.normalisation
        if how is None:
            return self
        if self.dtype != "float32":
            raise ValueError(f"samples of {self.dtype} cannot be normalised")
        if self.between is not None:
            raise ValueError("the normalisation says on what scale samples are; leave `between` out")
        features = self.shape[0] if self.shape else 1
        wrong = {len(values) for values in (how.mean, how.std)} - {1, features, prod(self.shape)}
        if wrong:
            raise ValueError(f"the normalisation has {wrong.pop()} values, a sample has {features} features")
        return self


PartName = Annotated[str, Field(pattern=NAME)]
"""A plain file name: it becomes one in every folder the bundle is fetched to."""


class Part(_Data):
    """A file of the bundle, content-addressed."""

    sha256: Annotated[str, Field(pattern=DIGEST)]
    size: Annotated[int, Field(ge=0)]


class Manifest(_Data):
    """Everything about a model that is not weights or graph."""

    format: Literal[1] = 1
    name: str
    input: Input
    target: AnyTarget
    parameters: Annotated[tuple[Tensor, ...], Field(max_length=MAX_TENSORS)]
    buffers: Annotated[tuple[Tensor, ...], Field(max_length=MAX_TENSORS)] = ()
    layers: Annotated[tuple[Layer, ...], Field(max_length=MAX_TENSORS)]
    groups: tuple[ChannelGroup, ...] = ()
    """Channels that leave together; the evaluation graph and the training graph can do without any of them."""
    stopped: tuple[str, ...] = ()
    """A line for each layer whose channels form no group: which operator stops it."""
    seed: int | None = None
    """The weights' seed; None when part `weights.safetensors` holds them."""
    class_names: ClassNames = ()
    draws: bool = False
    """Whether a training step drops entries at random (dropout): its graph then has the input `key` int64[1]."""
    parts: dict[PartName, Part] = {}

    @model_validator(mode="after")
    def _tables_tile_their_vectors(self) -> Manifest:
        for table in (self.parameters, self.buffers):
            end = 0
            for tensor in table:
                if tensor.offset != end:
                    raise ValueError(
                        f"tensor {tensor.name!r} starts at {tensor.offset}, the one before it ends at {end}"
                    )
                end += tensor.size
                if end > MAX_VALUES:
                    raise ValueError(f"tensor {tensor.name!r} ends at {end}, at most {MAX_VALUES} values are read")
        if prod(self.input.shape) > MAX_VALUES:
            raise ValueError(f"a sample of shape {self.input.shape} has more than {MAX_VALUES} values")
        return self

    @model_validator(mode="after")
    def _names_fit(self) -> Manifest:
        if MANIFEST in self.parts:
            raise ValueError(f"a part is named {MANIFEST}, which is the manifest's own name")
        names = [t.name for t in (*self.parameters, *self.buffers)]
        if len(set(names)) != len(names):
            raise ValueError("two tensors have the same name")
        if len({g.name for g in self.groups}) != len(self.groups):
            raise ValueError("two channel groups have the same name")
        if self.class_names and len(self.class_names) != (self.target.output or (0,))[-1]:
            raise ValueError(f"{len(self.class_names)} class names for outputs of shape {self.target.output}")
        unknown = {n for layer in self.layers for n in (*layer.weights, *layer.biases)} - set(names)
        if unknown:
            raise ValueError(f"layers name tensors that no table has: {sorted(unknown)}")
        return self

    @property
    def d(self) -> int:
        """Number of parameters."""
        return sum(t.size for t in self.parameters)

    @property
    def buffers_d(self) -> int:
        """Number of batch-norm statistics."""
        return sum(t.size for t in self.buffers)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every row of both tables by name."""
        return {t.name: t for t in (*self.parameters, *self.buffers)}

    def to_bytes(self) -> bytes:
        """The manifest's canonical JSON, without those optional entries that are empty."""
        silent: dict[str, Any] = {} if self.class_names else {"class_names": True}
        silent["input"] = {name for name in ("normalisation", "between", "ids") if getattr(self.input, name) is None}
        return (self.model_dump_json(indent=1, exclude=silent) + "\n").encode()


@dataclass(frozen=True)
class Model:
    """What a method sees of a bundle: the manifest and the initial (or frozen) values, read-only.

    `parameters` is float32[d], `buffers` float32[buffers_d].
    """

    manifest: Manifest
    parameters: F32
    buffers: F32


def views(table: tuple[Tensor, ...], flat: F32) -> dict[str, F32]:
    """Each tensor of `table` as a view into `flat`, shaped."""
    return {t.name: flat[t.span].reshape(t.shape) for t in table}


def generate(table: tuple[Tensor, ...], seed: int) -> F32:
    """The flat vector that `seed` stands for: tensor `name` is drawn from stream ``key(seed, "weights", name)``."""
    flat = np.empty(sum(t.size for t in table), np.float32)
    for t in table:
        stream = counter.key(seed, "weights", t.name)
        if t.init.kind == "constant":
            flat[t.span] = t.init.scale
        elif t.init.kind == "uniform":
            flat[t.span] = t.init.scale * (2.0 * counter.uniform(stream, t.size) - 1.0)
        else:
            flat[t.span] = np.where(counter.uint64(stream, t.size) >> np.uint64(63), -t.init.scale, t.init.scale)
    return flat


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises BundleError."""
    try:
        found = Manifest.model_validate_json(data)
        json.loads(data, object_pairs_hook=without_repeats)
    except ValidationError as error:
        fault = first_fault(error, "manifest", Manifest.model_fields)
        other = "install the version of maskfleet that wrote it, or " if fault.startswith("format ") else ""
        raise BundleError(f"the manifest is malformed at {fault}; {other}export the bundle again") from None
    except ValueError as error:
        raise BundleError(f"the manifest is malformed: {error}; export the bundle again") from None
    return found


def digest(data: bytes) -> str:
    """SHA-256 in hex, the address of a part, a payload or a manifest."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A bundle's folder. Parts are checked against their digest each time they are read."""

    manifest: Manifest
    folder: Path

    @staticmethod
    def open(folder: Path) -> Bundle:
        """The bundle in `folder`. Raises BundleError when there is none or it is malformed."""
        path = folder / MANIFEST
        if not path.is_file():
            raise BundleError(f"{folder} holds no {MANIFEST}; name a folder written by `maskfleet export`")
        return Bundle(parse_manifest(path.read_bytes()), folder)

    @property
    def sha256(self) -> str:
        """Of the manifest's bytes: the bundle's address at a coordinator."""
        return digest((self.folder / MANIFEST).read_bytes())

    @property
    def warnings(self) -> list[str]:
        """What its export warned of."""
        path = self.folder / WARNINGS
        return path.read_text("utf-8", "replace").splitlines() if path.is_file() else []

    def part(self, name: str) -> Path:
        """Path of a part whose bytes match the manifest. Raises BundleError."""
        path, entry = self.folder / name, self.manifest.parts.get(name)
        if entry is None:
            raise BundleError(
                f"bundle {self.manifest.name!r} has no part {name!r}; it has {', '.join(sorted(self.manifest.parts))}"
            )
        if not path.is_file() or digest(path.read_bytes()) != entry.sha256:
            raise BundleError(f"{path} is missing or does not match its SHA-256; fetch or export the bundle again")
        return path

    def model(self) -> Model:
        """Initial values from the seed or from the weights part."""
        m = self.manifest
        if m.seed is not None:
            return Model(m, generate(m.parameters, m.seed), generate(m.buffers, m.seed))
        return stored_model(m, self.part(WEIGHTS), "export the bundle again")


def stored_model(manifest: Manifest, path: Path, advice: str) -> Model:
    """The values in a safetensors file that holds every tensor of the tables by name. Raises BundleError."""
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} does not open: {error}; {advice}") from None
    flats = []
    for table in (manifest.parameters, manifest.buffers):
        flat = np.empty(sum(t.size for t in table), np.float32)
        for t in table:
            value = stored.get(t.name)
            if value is None or value.shape != t.shape or value.dtype != np.float32:
                raise BundleError(f"{path} lacks float32 tensor {t.name!r} of shape {t.shape}; {advice}")
            flat[t.span] = value.reshape(-1)
        flats.append(flat)
    return Model(manifest, *flats)
