"""Bundles of sequential networks in the canonical eval.onnx form, written by hand: no torch, milliseconds each.

The channel groups are written down beside the nodes, so they do not depend on the analysis of graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from edge_kernels.channels import ChannelGroup, Place, Role
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edge_client.bundle import F32, MANIFEST, Bundle, Init, Input, Layer, Manifest, Part, Tensor, digest
from edge_client.targets import Classification
from edge_client.task import Personal


@dataclass(frozen=True)
class Conv:
    out: int
    kernel: int = 3
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    bias: bool = True


@dataclass(frozen=True)
class Linear:
    out: int
    bias: bool = True


@dataclass(frozen=True)
class Norm:
    epsilon: float = 1e-3


@dataclass(frozen=True)
class Act:
    kind: Literal["relu", "relu6", "leaky_relu", "tanh", "sigmoid"] = "relu"


@dataclass(frozen=True)
class Pool:
    kind: Literal["max", "avg"] = "max"
    kernel: int = 2
    padding: int = 0
    counted: bool = False


@dataclass(frozen=True)
class Flatten:
    pass


Step = Conv | Linear | Norm | Act | Pool | Flatten
SLOPE = 0.25
ACTS = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


@dataclass
class _Build:
    shape: tuple[int, ...]  # of one sample
    value: str = "x"
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    groups: list[ChannelGroup] = field(default_factory=list)

    def node(self, kind: str, inputs: Sequence[str], **attributes: object) -> None:
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [self.value, *inputs], [out], **attributes))
        self.value = out

    def belongs(self, *places: Place) -> None:
        if self.groups:
            self.groups[-1] = replace(self.groups[-1], places=(*self.groups[-1].places, *places))

    def layer(self, kind: Literal["linear", "conv"], weight: tuple[int, ...], bias: bool) -> list[str]:
        name = f"{kind}{len(self.layers)}"
        self.parameters[f"{name}.weight"] = weight
        if bias:
            self.parameters[f"{name}.bias"] = weight[:1]
        biases = (f"{name}.bias",) if bias else ()
        if self.groups:
            repeat = weight[1] // self.groups[-1].size
            self.belongs(Place(f"{name}.weight", 1, "reads", 0, repeat, repeat))
        self.layers.append(Layer(name=name, kind=kind, weights=(f"{name}.weight",), biases=biases))
        self.groups.append(ChannelGroup(name, weight[0], (Place(f"{name}.weight", 0, "makes"),)))
        self.belongs(*(Place(b, 0, "shifts") for b in biases))
        return [f"{name}.weight", *biases]

    def add(self, step: Step) -> None:
        if isinstance(step, Conv):
            names = self.layer("conv", (step.out, self.shape[0], step.kernel, step.kernel), step.bias)
            self.node(
                "Conv",
                names,
                kernel_shape=[step.kernel] * 2,
                strides=[step.stride] * 2,
                pads=[step.padding] * 4,
                dilations=[step.dilation] * 2,
            )
            reach = step.dilation * (step.kernel - 1)
            self.shape = (step.out, *[(n + 2 * step.padding - reach - 1) // step.stride + 1 for n in self.shape[1:]])
        elif isinstance(step, Linear):
            self.node("Gemm", self.layer("linear", (step.out, self.shape[0]), step.bias), transB=1)
            self.shape = (step.out,)
        elif isinstance(step, Norm):
            name = f"norm{len(self.nodes)}"
            names = tuple(f"{name}.{t}" for t in ("weight", "bias", "running_mean", "running_var"))
            self.parameters.update(dict.fromkeys(names[:2], self.shape[:1]))
            self.buffers.update(dict.fromkeys(names[2:], self.shape[:1]))
            roles: tuple[Role, ...] = ("scales", "shifts", "holds", "holds")
            self.belongs(*(Place(t, 0, role) for t, role in zip(names, roles, strict=True)))
            self.node("BatchNormalization", names, epsilon=step.epsilon)
        elif isinstance(step, Act):
            if step.kind == "leaky_relu":
                self.node("LeakyRelu", [], alpha=SLOPE)
            elif step.kind == "relu6":
                bounds = [f"bound{len(self.nodes)}.{i}" for i in range(2)]
                for bound, limit in zip(bounds, (0.0, 6.0), strict=True):
                    self.constants.append(numpy_helper.from_array(np.float32(limit), bound))
                self.node("Clip", bounds)
            else:
                self.node(ACTS[step.kind], [])
        elif isinstance(step, Pool):
            counted = {"count_include_pad": int(step.counted)} if step.kind == "avg" else {}
            self.node(
                "MaxPool" if step.kind == "max" else "AveragePool",
                [],
                kernel_shape=[step.kernel] * 2,
                strides=[step.kernel] * 2,
                pads=[step.padding] * 4,
                **counted,
            )
            self.shape = (
                self.shape[0],
                *[(n + 2 * step.padding - step.kernel) // step.kernel + 1 for n in self.shape[1:]],
            )
        else:
            self.node("Flatten", [], axis=1)
            self.shape = (int(np.prod(self.shape)),)


def sequential_bundle(folder: Path, shape: tuple[int, ...], steps: Sequence[Step]) -> Bundle:
    """A bundle with eval.onnx for `steps` on samples of `shape`; it ends with a layer that makes the logits."""
    build = _Build(shape)
    for step in steps:
        build.add(step)
    build.nodes[-1].output[0] = "logits"
    tensors = {**build.parameters, **build.buffers}
    graph = helper.make_graph(
        build.nodes,
        "eval",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape]),
            *[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in tensors.items()],
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", *build.shape])],
        build.constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    data = onnx.shape_inference.infer_shapes(model).SerializeToString()  # stale shapes once channels go
    (folder / "eval.onnx").write_bytes(data)
    manifest = Manifest(
        name="sequential",
        input=Input(shape=shape),
        target=Classification(classes=build.shape[0]),
        parameters=_table(build.parameters),
        buffers=_table(build.buffers),
        layers=tuple(build.layers),
        groups=tuple(build.groups[:-1]),
        seed=0,
        parts={"eval.onnx": Part(sha256=digest(data), size=len(data))},
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return Bundle.open(folder)


def personal_of(bundle: Bundle, values: Mapping[str, object]) -> Personal:
    """A personal model with the given tensors; the others are zero."""
    manifest = bundle.manifest
    parameters, buffers = np.zeros(manifest.d, np.float32), np.zeros(manifest.buffers_d, np.float32)
    for table, flat in ((manifest.parameters, parameters), (manifest.buffers, buffers)):
        for t in table:
            if t.name in values:
                flat[t.span] = np.asarray(values[t.name], np.float32).reshape(-1)
    return Personal(parameters, buffers, parameters != 0)


def random_personal(bundle: Bundle, seed: int, unit_keep: float, weight_keep: float) -> Personal:
    """Random weights of variance 1/fan-in, whole units and single weights masked, now and then a gamma of 0."""
    random = np.random.default_rng(seed)
    values: dict[str, F32] = {}
    for t in (*bundle.manifest.parameters, *bundle.manifest.buffers):
        value = random.standard_normal(t.shape)
        if len(t.shape) > 1:
            value *= np.sqrt(2.0 / np.prod(t.shape[1:]))
            value *= random.random(t.shape) < weight_keep
            value *= (random.random(t.shape[0]) < unit_keep).reshape(-1, *[1] * (len(t.shape) - 1))
        elif t.name.endswith("running_var"):
            value = random.uniform(0.05, 2.0, t.shape)
        elif t.name.startswith("norm") and t.name.endswith("weight"):
            value = random.uniform(0.5, 1.5, t.shape) * (random.random(t.shape) < 0.9)
        values[t.name] = value.astype(np.float32)
    return personal_of(bundle, values)


def _table(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensor, ...]:
    rows, end = [], 0
    for name, shape in shapes.items():
        rows.append(Tensor(name=name, shape=shape, offset=end, init=Init(kind="uniform", scale=1.0)))
        end += rows[-1].size
    return tuple(rows)


def small_manifest(**changes: object) -> Manifest:
    """A 3-2 linear layer with batch-norm statistics."""
    fields: dict[str, object] = {
        "name": "small",
        "input": Input(shape=(3,)),
        "target": Classification(classes=2),
        "parameters": (
            Tensor(name="fc.weight", shape=(2, 3), offset=0, init=Init(kind="uniform", scale=0.5)),
            Tensor(name="fc.bias", shape=(2,), offset=6, init=Init(kind="constant", scale=0.25)),
        ),
        "buffers": (Tensor(name="bn.mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.0)),),
        "layers": (Layer(name="fc", kind="linear", weights=("fc.weight",), biases=("fc.bias",)),),
        "seed": 5,
        **changes,
    }
    return Manifest.model_validate(fields)
