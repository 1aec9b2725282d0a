"""Evaluation graphs in ONNX's own text form: one of each way in which channels meet. No torch, milliseconds each.

Every graph reads `x` and the tensors listed, and writes `logits`; tensors with one axis are biases, scales and the
like. `masked` gives values with whole rows of the weights masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx import parser

from edge_client.align import Align
from edge_client.bundle import F32, MANIFEST, Bundle, Init, Input, Layer, Manifest, Part, Tensor, digest
from edge_client.compaction.personal import PersonalReport, write_personal
from edge_client.targets import Classification
from edge_client.task import Personal

Kind = Literal["act", "weight"]


@dataclass(frozen=True)
class Graph:
    """`rows` says for each weight that is masked which axis holds its outputs and in how many blocks (gates)."""

    x: tuple[int, ...]
    tensors: dict[str, tuple[int, ...]]
    body: str
    rows: dict[str, tuple[int, int]]
    biases: Mapping[str, str]
    """The bias of each weight, which a mask of kind "act" clears too."""
    dtype: Literal["float32", "int64"] = "float32"
    classes: int = 3

    def model(self) -> onnx.ModelProto:
        """The graph, its tensors inputs by name."""
        size = ",".join(map(str, self.x))
        kind = {"float32": "float", "int64": "int64"}[self.dtype]
        inputs = [f"{kind}[n,{size}] x"]
        inputs += [f"float[{','.join(map(str, shape))}] {name}" for name, shape in self.tensors.items()]
        head = '<ir_version: 10, opset_import: ["" : 20]>'
        text = f"{head} g ({', '.join(inputs)}) => (float[n,{self.classes}] logits) {{ {self.body} }}"
        model: onnx.ModelProto = parser.parse_model(text)
        onnx.checker.check_model(model)
        return model


MEAN = (
    "hw = Constant <value_ints = [2, 3]> () m = ReduceMean <keepdims = 0> ({v}, hw) "
    "logits = Gemm <transB = 1> (m, o, ob)"
)


def _image(body: str, last: str, tensors: dict[str, tuple[int, ...]], out: int = 8) -> Graph:
    """A graph on images of 2 channels whose value `last` of `out` channels is averaged and read by a linear layer."""
    every = {**tensors, "o": (3, out), "ob": (3,)}
    rows = {name: (1 if name.startswith("up") else 0, 1) for name, shape in tensors.items() if len(shape) == 4}
    biases = {name: f"{name}b" for name in rows if f"{name}b" in tensors}
    return Graph((2, 6, 6), every, body + MEAN.format(v=last), rows, biases)


CONV = "Conv <pads = [1, 1, 1, 1]>"
_LSTM_SHAPES = {"w": (1, 24, 4), "r": (1, 24, 6), "wb": (1, 48), "o": (3, 6), "ob": (3,)}
GRAPHS: dict[str, Graph] = {
    "chain with a flatten": Graph(
        (2, 6, 6),
        {"a": (8, 2, 3, 3), "ab": (8,), "b": (6, 8, 3, 3), "bb": (6,), "c": (10, 54), "cb": (10,), "o": (3, 10)},
        f"u = {CONV} (x, a, ab) v = Relu(u) w = {CONV} (v, b, bb) e = Elu(w) "
        "p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e) f = Flatten(p) "
        "h = Gemm <transB = 1> (f, c, cb) s = Softplus(h) logits = Gemm <transB = 1> (s, o)",
        {"a": (0, 1), "b": (0, 1), "c": (0, 1)},
        {"a": "ab", "b": "bb", "c": "cb"},
    ),
    "residual": _image(
        f"s = {CONV} (x, a, ab) r = Relu(s) u = {CONV} (r, b, bb) v = Relu(u) w = {CONV} (v, c, cb) y = Add(r, w) "
        f"z = Relu(y) t = {CONV} (z, d, db) q = Add(z, t) ",
        "q",
        {n + k: s for n, s in (("a", (8, 2, 3, 3)), ("b", (6, 8, 3, 3)), ("c", (8, 6, 3, 3)), ("d", (8, 8, 3, 3)))
         for k, s in (("", s), ("b", s[:1]))},
    ),
    "concatenation": _image(
        f"s = {CONV} (x, a, ab) r = Gelu(s) u = {CONV} (r, b, bb) v = HardSwish(u) w = Concat <axis = 1> (r, v) "
        f"y = {CONV} (w, c, cb) z = Concat <axis = 1> (w, y) t = {CONV} (z, d, db) ",
        "t",
        {n + k: s for n, s in (("a", (4, 2, 3, 3)), ("b", (6, 4, 3, 3)), ("c", (5, 10, 3, 3)), ("d", (8, 15, 3, 3)))
         for k, s in (("", s), ("b", s[:1]))},
    ),
    "depthwise": _image(
        "s = Conv (x, a, ab) r = Clip(s) u = Conv <group = 8, pads = [1, 1, 1, 1]> (r, b, bb) v = Relu(u) "
        "w = Conv (v, c, cb) ",
        "w",
        {"a": (8, 2, 1, 1), "ab": (8,), "b": (8, 1, 3, 3), "bb": (8,), "c": (8, 8, 1, 1), "cb": (8,)},
    ),
    "groups": _image(
        "s = Conv (x, a, ab) r = Relu(s) u = Conv <group = 3, pads = [1, 1, 1, 1]> (r, b, bb) v = Relu(u) "
        "w = Conv (v, c, cb) ",
        "w",
        {"a": (9, 2, 1, 1), "ab": (9,), "b": (12, 3, 3, 3), "bb": (12,), "c": (8, 12, 1, 1), "cb": (8,)},
    ),
    "shuffle and split": _image(
        "h = Constant <value_ints = [4, 4]> () s = Conv (x, a, ab) l, g = Split <axis = 1> (s, h) v = Conv (g, b, bb) "
        "w = Concat <axis = 1> (l, v) k = Constant <value_ints = [-1, 2, 4, 6, 6]> () w5 = Reshape(w, k) "
        "t5 = Transpose <perm = [0, 2, 1, 3, 4]> (w5) j = Constant <value_ints = [-1, 8, 6, 6]> () t = Reshape(t5, j) "
        "y = Relu(t) z = Conv (y, c, cb) ",
        "z",
        {"a": (8, 2, 1, 1), "ab": (8,), "b": (4, 4, 1, 1), "bb": (4,), "c": (8, 8, 1, 1), "cb": (8,)},
    ),
    "transposed skip": _image(
        f"s = {CONV} (x, a, ab) r = Relu(s) p = Conv <strides = [2, 2]> (r, b, bb) q = Relu(p) "
        "u = ConvTranspose <strides = [2, 2], kernel_shape = [3, 3], pads = [1, 1, 1, 1], output_padding = [1, 1]> "
        f"(q, up, upb) w = Concat <axis = 1> (r, u) y = {CONV} (w, c, cb) ",
        "y",
        {"a": (4, 2, 3, 3), "ab": (4,), "b": (6, 4, 2, 2), "bb": (6,), "up": (6, 4, 3, 3), "upb": (4,),
         "c": (8, 8, 3, 3), "cb": (8,)},
    ),
    "squeeze and excite": _image(
        f"s = {CONV} (x, a, ab) r = Relu(s) g = GlobalAveragePool(r) d1 = Conv (g, b, bb) d = Relu(d1) "
        f"e1 = Conv (d, c, cb) e = Sigmoid(e1) y = Mul(r, e) z = {CONV} (y, d2, d2b) ",
        "z",
        {"a": (8, 2, 3, 3), "ab": (8,), "b": (4, 8, 1, 1), "bb": (4,), "c": (8, 4, 1, 1), "cb": (8,),
         "d2": (8, 8, 3, 3), "d2b": (8,)},
    ),
    "norms and slopes": _image(
        f"s = {CONV} (x, a, ab) n = BatchNormalization <epsilon = 0.001> (s, g, h, mu, va) p = PRelu(n, sl) "
        f"u = {CONV} (p, b, bb) i = InstanceNormalization <epsilon = 0.001> (u, ig, ih) "
        f"v = Relu(i) w = {CONV} (v, c, cb) ",
        "w",
        {"a": (6, 2, 3, 3), "ab": (6,), "g": (6,), "h": (6,), "mu": (6,), "va": (6,), "sl": (6, 1, 1),
         "b": (8, 6, 3, 3), "bb": (8,), "ig": (8,), "ih": (8,), "c": (8, 8, 3, 3), "cb": (8,)},
    ),
    "group norm": _image(
        f"u = {CONV} (x, a, ab) parts = Constant <value_ints = [0, 4, -1]> () r = Reshape(u, parts) "
        "l = Constant <value_ints = [2]> () mu = ReduceMean(r, l) d = Sub(r, mu) e = Mul(d, d) va = ReduceMean(e, l) "
        "tiny = Constant <value_float = 0.001> () ve = Add(va, tiny) s = Sqrt(ve) n = Div(d, s) "
        "image = Constant <value_ints = [0, 12, 6, 6]> () i = Reshape(n, image) "
        "row = Constant <value_ints = [1, 12, 1, 1]> () g4 = Reshape(g, row) k = Mul(i, g4) "
        f"h4 = Reshape(h, row) j = Add(k, h4) v = Relu(j) w = {CONV} (v, b, bb) z = Relu(w) ",
        "z",
        {"a": (12, 2, 3, 3), "ab": (12,), "g": (12,), "h": (12,), "b": (8, 12, 3, 3), "bb": (8,)},
    ),
    "norm over channels": Graph(
        (4, 5),
        {"a": (5, 8), "ab": (8,), "g": (8,), "h": (8,), "b": (8, 12), "bb": (12,), "c": (12, 8), "cb": (8,),
         "o": (3, 8), "ob": (3,)},
        "s1 = MatMul(x, a) s = Add(s1, ab) n = LayerNormalization <axis = -1> (s, g, h) u1 = MatMul(n, b) "
        "u = Add(u1, bb) v = Gelu(u) w1 = MatMul(v, c) w = Add(w1, cb) y = Add(s, w) "
        "t = Constant <value_ints = [1]> () m = ReduceMean <keepdims = 0> (y, t) logits = Gemm <transB = 1> (m, o, ob)",
        {"a": (1, 1), "b": (1, 1), "c": (1, 1)},
        {"a": "ab", "b": "bb", "c": "cb"},
    ),
    "heads": Graph(
        (4, 6),
        {**dict.fromkeys("qkv", (6, 12)), **{f"{k}b": (12,) for k in "qkv"}, "p": (12, 8), "pb": (8,), "o": (3, 8),
         "ob": (3,)},
        "sh = Constant <value_ints = [-1, 4, 3, 4]> () fl = Constant <value_ints = [-1, 4, 12]> () "
        + "".join(
            f"{k}1 = MatMul(x, {k}) {k}2 = Add({k}1, {k}b) {k}3 = Reshape({k}2, sh) "
            f"{k}4 = Transpose <perm = {perm}> ({k}3) "
            for k, perm in (("q", "[0, 2, 1, 3]"), ("k", "[0, 2, 3, 1]"), ("v", "[0, 2, 1, 3]"))
        )
        + "s = MatMul(q4, k4) w = Softmax <axis = -1> (s) y = MatMul(w, v4) z = Transpose <perm = [0, 2, 1, 3]> (y) "
        "f = Reshape(z, fl) u1 = MatMul(f, p) u = Add(u1, pb) t = Constant <value_ints = [1]> () "
        "m = ReduceMean <keepdims = 0> (u, t) logits = Gemm <transB = 1> (m, o, ob)",
        {"q": (1, 1), "k": (1, 1), "v": (1, 1), "p": (1, 1)},
        {k: f"{k}b" for k in "qkvp"},
    ),
    "fused heads": Graph(
        (4, 6),
        {"a": (6, 36), "ab": (36,), "p": (12, 8), "pb": (8,), "o": (3, 8), "ob": (3,)},
        "sh = Constant <value_ints = [-1, 4, 3, 3, 4]> () fl = Constant <value_ints = [-1, 4, 12]> () "
        "a1 = MatMul(x, a) a2 = Add(a1, ab) a3 = Reshape(a2, sh) a4 = Transpose <perm = [2, 0, 3, 1, 4]> (a3) "
        + "".join(
            f"i{k} = Constant <value_int = {i}> () {k} = Gather <axis = 0> (a4, i{k}) " for i, k in enumerate("qkv")
        )
        + "kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, kt) w = Softmax <axis = -1> (s) y = MatMul(w, v) "
        "z = Transpose <perm = [0, 2, 1, 3]> (y) f = Reshape(z, fl) u1 = MatMul(f, p) u = Add(u1, pb) "
        "t = Constant <value_ints = [1]> () m = ReduceMean <keepdims = 0> (u, t) logits = Gemm <transB = 1> (m, o, ob)",
        {"a": (1, 1), "p": (1, 1)},
        {"a": "ab", "p": "pb"},
    ),
    "lstm": Graph(
        (5, 4),
        _LSTM_SHAPES,
        "s = Transpose <perm = [1, 0, 2]> (x) y, last = LSTM <hidden_size = 6> (s, w, r, wb) "
        "z = Constant <value_ints = [0]> () h = Squeeze(last, z) logits = Gemm <transB = 1> (h, o, ob)",
        {"w": (1, 4), "r": (1, 4)},
        {"w": "wb"},
    ),
    "gru of two directions": Graph(
        (5, 4),
        {"w": (2, 18, 4), "r": (2, 18, 6), "wb": (2, 36), "o": (3, 12), "ob": (3,)},
        "s = Transpose <perm = [1, 0, 2]> (x) "
        'y, last = GRU <hidden_size = 6, direction = "bidirectional", linear_before_reset = 1> (s, w, r, wb) '
        "t = Transpose <perm = [0, 2, 1, 3]> (y) k = Constant <value_ints = [5, -1, 12]> () f = Reshape(t, k) "
        "i = Constant <value_ints = [0]> () m = ReduceMean <keepdims = 0> (f, i) logits = Gemm <transB = 1> (m, o, ob)",
        {"w": (1, 3), "r": (1, 3)},
        {"w": "wb"},
    ),
    "one layer twice": Graph(
        (6,),
        {"a": (8, 6), "ab": (8,), "s": (8, 8), "sb": (8,), "o": (3, 8), "ob": (3,)},
        "u = Gemm <transB = 1> (x, a, ab) v = Tanh(u) w = Gemm <transB = 1> (v, s, sb) y = Tanh(w) "
        "z = Gemm <transB = 1> (y, s, sb) t = Tanh(z) logits = Gemm <transB = 1> (t, o, ob)",
        {"a": (0, 1), "s": (0, 1)},
        {"a": "ab", "s": "sb"},
    ),
    "embedding": Graph(
        (7,),
        {"e": (9, 6), "c": (8, 6, 3), "cb": (8,), "o": (3, 8), "ob": (3,)},
        "g = Gather(e, x) t = Transpose <perm = [0, 2, 1]> (g) u = Conv <pads = [1, 1]> (t, c, cb) v = Mish(u) "
        "a = Constant <value_ints = [2]> () m = ReduceMean <keepdims = 0> (v, a) logits = Gemm <transB = 1> (m, o, ob)",
        {"e": (1, 1), "c": (0, 1)},
        {"c": "cb"},
        dtype="int64",
    ),
}  # fmt: skip

MERGED_HEADS = Graph(
    (5, 6),
    {**dict.fromkeys("qkv", (6, 8)), **{f"{k}b": (8,) for k in "qkv"}, "o": (3, 8), "ob": (3,)},
    "sh = Constant <value_ints = [-1, 5, 2, 4]> () fl = Constant <value_ints = [-1, 5, 8]> () "
    "mq = Constant <value_ints = [-1, 5, 4]> () mk = Constant <value_ints = [-1, 4, 5]> () "
    "ms = Constant <value_ints = [-1, 5, 5]> () ps = Constant <value_ints = [-1, 2, 5, 5]> () "
    "py = Constant <value_ints = [-1, 2, 5, 4]> () "
    + "".join(
        f"{k}1 = MatMul(x, {k}) {k}2 = Add({k}1, {k}b) {k}3 = Reshape({k}2, sh) "
        f"{k}4 = Transpose <perm = {perm}> ({k}3) {k}5 = Reshape({k}4, m{m}) "
        for k, perm, m in (("q", "[0, 2, 1, 3]", "q"), ("k", "[0, 2, 3, 1]", "k"), ("v", "[0, 2, 1, 3]", "q"))
    )
    + "s = MatMul(q5, k5) s4 = Reshape(s, ps) w4 = Softmax <axis = -1> (s4) n = Shape <start = 0, end = 1> (x) "
    "c = Constant <value_ints = [2, 5, 5]> () b = Concat <axis = 0> (n, c) w5 = Expand(w4, b) w = Reshape(w5, ms) "
    "y = MatMul(w, v5) "
    "y4 = Reshape(y, py) z = Transpose <perm = [0, 2, 1, 3]> (y4) f = Reshape(z, fl) "
    "t = Constant <value_ints = [1]> () m = ReduceMean <keepdims = 0> (f, t) u = Gemm <transB = 1> (m, o, ob) "
    "e = Constant <value_float = 1e-6> () logits = Mul(u, e)",
    dict.fromkeys("qkv", (1, 1)),
    {k: f"{k}b" for k in "qkv"},
)
"""An attention whose batch and heads share an axis, as PyTorch's exporter writes it; outputs far below 1."""
MERGED_ROWS = Graph(
    (4, 6),
    {"a": (8, 6), "ab": (8,), "b": (8, 8), "bb": (8,), "o": (3, 8), "ob": (3,)},
    "r = Constant <value_ints = [-1, 6]> () s = Constant <value_ints = [-1, 4, 8]> () x1 = Reshape(x, r) "
    "y = Gemm <transB = 1> (x1, a, ab) v = Tanh(y) u = MatMul(v, b) w1 = Add(u, bb) w = Softmax <axis = 1> (w1) "
    "z = Reshape(w, s) t = Constant <value_ints = [1]> () m = ReduceMax <keepdims = 0> (z, t) "
    "logits = Gemm <transB = 1> (m, o, ob)",
    {"a": (0, 1), "b": (1, 1)},
    {"a": "ab", "b": "bb"},
)

BY_ELEMENT = Graph(
    (6,),
    {"a": (8, 6), "ab": (8,), "b": (8, 8), "bb": (8,), "o": (3, 8), "ob": (3,)},
    "i = Constant <value_ints = [0, 2, 1, 3, 4, 6, 5, 7]> () n = Shape <start = 0, end = 1> (x) "
    "c = Constant <value_ints = [8]> () s = Concat <axis = 0> (n, c) e = Expand(i, s) "
    "u = Gemm <transB = 1> (x, a, ab) v = GatherElements <axis = 1> (u, e) w = Relu(v) "
    "y = Gemm <transB = 1> (w, b, bb) z = ScatterElements <axis = 1> (y, e, y) t = Tanh(z) "
    "logits = Gemm <transB = 1> (t, o, ob)",
    {"a": (0, 1), "b": (0, 1)},
    {"a": "ab", "b": "bb"},
)
"""Units that swap places, but not the first, the last and the middle one."""
FRAMES = Graph(
    (4, 2, 5, 5),
    {"a": (8, 2, 3, 3), "ab": (8,), "p": (4, 8, 1, 1), "b": (6, 8, 3, 3), "bb": (6,), "o": (3, 24), "ob": (3,)},
    "r = Constant <value_ints = [-1, 2, 5, 5]> () s = Constant <value_ints = [-1, 4, 8, 5, 5]> () "
    "q = Constant <value_ints = [-1, 8, 5, 5]> () x1 = Reshape(x, r) y = Conv <pads = [1, 1, 1, 1]> (x1, a, ab) "
    "y1 = Reshape(y, s) y2 = Add(y1, p) y3 = Reshape(y2, q) v = Tanh(y3) z = Conv <pads = [1, 1, 1, 1]> (v, b, bb) "
    "m = GlobalAveragePool(z) f = Constant <value_ints = [-1, 24]> () u = Reshape(m, f) "
    "logits = Gemm <transB = 1> (u, o, ob)",
    {"a": (0, 1), "b": (0, 1)},
    {"a": "ab", "b": "bb"},
)
"""Convolutions on the frames of a film: what a pruned channel emits differs from frame to frame."""


def masked(graph: Graph, kind: Kind, kept: float, seed: int) -> dict[str, F32]:
    """Random values with the share `kept` of each weight's outputs; the biases of the others are cleared by "act"."""
    random = np.random.default_rng(seed)
    values = {
        name: (random.uniform(0.3, 1.5, shape) if name in ("va", "g") else random.standard_normal(shape) * 0.5).astype(
            np.float32
        )
        for name, shape in graph.tensors.items()
    }
    gone: dict[str, np.ndarray] = {}
    for name, (axis, blocks) in graph.rows.items():
        size = graph.tensors[name][axis] // blocks
        own = gone["w"] if name == "r" else random.permutation(size)[round(kept * size) :]
        gone[name] = own
        rows = (np.arange(blocks)[:, None] * size + own).reshape(-1)
        np.moveaxis(values[name], axis, 0)[rows] = 0
        if kind == "act" and name in graph.biases:
            bias = values[graph.biases[name]]
            both = bias.reshape(*bias.shape[:-1], -1, size)
            both[..., own] = 0
    return values


def bundle_of(graph: Graph, folder: Path) -> Bundle:
    """A bundle of the graph, without groups."""
    data = graph.model().SerializeToString()
    (folder / "eval.onnx").write_bytes(data)
    rows, end = [], 0
    for name, shape in graph.tensors.items():
        rows.append(Tensor(name=name, shape=shape, offset=end, init=Init(kind="uniform", scale=1.0)))
        end += rows[-1].size
    manifest = Manifest(
        name="graph",
        input=Input(shape=graph.x, dtype=graph.dtype),
        target=Classification(classes=graph.classes),
        parameters=tuple(rows),
        layers=(Layer(name="o", kind="linear", weights=("o",)),),
        seed=0,
        parts={"eval.onnx": Part(sha256=digest(data), size=len(data))},
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return Bundle.open(folder)


def personal_of(values: Mapping[str, F32]) -> Personal:
    """The values as a personal model without statistics."""
    return Personal(np.concatenate([v.reshape(-1) for v in values.values()]), np.zeros(0, np.float32))


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def samples(graph: Graph) -> np.ndarray:
    random = np.random.default_rng(0)
    if graph.dtype == "int64":
        return random.integers(0, 9, (16, *graph.x))
    return random.standard_normal((16, *graph.x)).astype(np.float32)


def compact(
    graph: Graph, values: dict[str, F32], folder: Path, align: Align = "none"
) -> tuple[onnx.ModelProto, PersonalReport, float]:
    """The personal model, its report, and its largest error over the standard deviation of the outputs."""
    x = samples(graph)
    bundle, path = bundle_of(graph, folder), folder / "personal.onnx"
    report = write_personal(bundle, personal_of(values), path, x, align=align)
    model = onnx.load(folder / "personal.onnx")
    onnx.checker.check_model(model, full_check=True)
    right = run(graph.model(), {"x": x, **values})
    return model, report, float(np.abs(run(model, {"x": x}) - right).max() / right.std())


def weights(model: onnx.ModelProto, *operators: str) -> list[tuple[int, ...]]:
    """The shapes of the layers' weights in forward order."""
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    return [shapes[n.input[1]] for n in model.graph.node if n.op_type in operators and n.input[1] in shapes]
