"""Matrix products, convolutions, pools, norms and activations as ONNX. See `onnx_writer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from edge_export.onnx_writer import Handler, Writer


def per_axis(values: Sequence[int], dims: int) -> list[int]:
    """An operator's per-axis setting, which PyTorch may give as one number."""
    return [int(values[i if len(values) > 1 else 0]) for i in range(dims)]


def _mm(w: Writer, a: Any, out: Any) -> str:
    return w.op("MatMul", w.tensor(a.self), w.tensor(a.mat2))


def _addmm(w: Writer, a: Any, out: Any) -> str:
    settings = {k: float(v) for k, v in (("alpha", a.alpha), ("beta", a.beta)) if v != 1}
    return w.op("Gemm", w.tensor(a.mat1), w.tensor(a.mat2), w.tensor(a.self), **settings)


def _linear(w: Writer, a: Any, out: Any) -> str:
    """One `Gemm` for rows, a product and a sum for sequences: the form that compaction reads."""
    x, weight = w.tensor(a.x), w.tensor(a.weight)
    bias = None if a.bias is None else w.tensor(a.bias)
    if out.ndim == 2:
        return w.op("Gemm", x, weight, *([bias] if bias else []), transB=1)
    made = w.op("MatMul", x, w.op("Transpose", weight, perm=[1, 0]))
    return w.op("Add", made, bias) if bias else made


def _convolution(w: Writer, a: Any, out: Any) -> str:
    dims, groups = out.ndim - 2, w.fixed(a.groups)
    if groups is None:
        raise w.refuse("has a group for each sample; multiply windows, of torch.nn.functional.unfold, by torch.bmm")
    padding = per_axis(a.padding, dims)
    settings: dict[str, Any] = {
        "strides": per_axis(a.stride, dims),
        "pads": padding * 2,
        "dilations": per_axis(a.dilation, dims),
        "group": groups,
    }
    inputs = [w.tensor(a.input), w.tensor(a.weight)]
    if a.bias is not None:
        inputs.append(w.tensor(a.bias))
    if not a.transposed:
        return w.op("Conv", *inputs, **settings)
    return w.op("ConvTranspose", *inputs, output_padding=per_axis(a.output_padding, dims), **settings)


def overhang(
    size: Sequence[int], made: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """How far the last window of each axis reaches past the padded input: more than 0 with ceil_mode only."""
    return [
        max((m - 1) * s + d * (k - 1) + 1 - n - 2 * p, 0)
        for n, m, k, s, p, d in zip(size, made, kernel, stride, padding, dilation, strict=True)
    ]


def _max_pool(w: Writer, a: Any, out: Any) -> list[str | None]:
    dims = len(a.kernel_size)
    kernel, padding, dilation = (per_axis(v, dims) for v in (a.kernel_size, a.padding, a.dilation))
    stride = per_axis(a.stride, dims) if a.stride else kernel
    size, made = w.meta(a.self).shape[-dims:], out[0].shape[-dims:]
    extra = overhang([int(n) for n in size], [int(n) for n in made], kernel, stride, padding, dilation)
    settings: dict[str, Any] = {"dilations": dilation} if dilation != [1] * dims else {}
    pads = [*padding, *(p + e for p, e in zip(padding, extra, strict=True))]
    name = w.tensor(a.self)
    if any(e and p + e >= d * (k - 1) + 1 for p, e, d, k in zip(padding, extra, dilation, kernel, strict=True)):
        raise w.refuse("has windows of ceil_mode outside its input; use ceil_mode=False")
    batched = out[0].ndim == dims + 2
    if not batched:
        raise w.refuse("pools tensors without a batch axis; keep [n, c, ...]")
    return [w.op("MaxPool", name, kernel_shape=kernel, strides=stride, pads=pads, **settings), None]


def shares(
    size: Sequence[int], made: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    include_padding: bool, divisor: int | None,
) -> NDArray[np.float64]:  # fmt: skip
    """By how much PyTorch divides the sum of each window of an average pool, float64 of shape `made`."""
    if divisor is not None:
        return np.full(tuple(made), float(divisor))
    total = np.ones(())
    for n, m, k, s, p in zip(size, made, kernel, stride, padding, strict=True):
        low = np.arange(m) * s - p
        high = np.minimum(low + k, n + p)
        if not include_padding:
            low, high = low.clip(min=0), high.clip(max=n)
        total = total[..., None] * (high - low)
    return total


def _avg_pool(w: Writer, a: Any, out: Any) -> str:
    dims = len(a.kernel_size)
    kernel, padding = per_axis(a.kernel_size, dims), per_axis(a.padding, dims)
    stride = per_axis(a.stride, dims) if a.stride else kernel
    size, made = [int(n) for n in w.meta(a.self).shape[-dims:]], [int(n) for n in out.shape[-dims:]]
    if out.ndim != dims + 2:
        raise w.refuse("pools tensors without a batch axis; keep [n, c, ...]")
    x = w.tensor(a.self)
    if kernel == size and not any(padding) and a.divisor_override is None and made == [1] * dims:
        return w.op("GlobalAveragePool", x)
    whole = int(np.prod(kernel))
    extra = overhang(size, made, kernel, stride, padding, [1] * dims)
    divisors = shares(size, made, kernel, stride, padding, bool(a.count_include_pad), a.divisor_override)
    if any(padding) or any(extra):  # zeros written out: operators differ in what they count at the border
        high = [p + e for p, e in zip(padding, extra, strict=True)]
        x = w.op("Pad", x, w.ints([0, 0, *padding, 0, 0, *high]), w.constant(0.0, out.dtype))
    pooled = w.op("AveragePool", x, kernel_shape=kernel, strides=stride)
    if bool((divisors == whole).all()):
        return pooled
    factor = whole / divisors
    if bool((factor == factor.flat[0]).all()):
        factor = factor.flat[0]
    return w.op("Mul", pooled, w.constant(factor, out.dtype))


def _batch_norm_eval(w: Writer, a: Any, out: Any) -> list[str | None]:
    channels = int(w.meta(a.input).shape[1])
    if getattr(a, "training", False):
        raise w.refuse("takes the statistics of the batch; use batch-norm with running statistics")

    def row(value: Any, default: float) -> str:
        return w.constant([default] * channels, torch.float32) if value is None else w.tensor(value)

    inputs = [
        w.tensor(a.input),
        row(a.weight, 1.0),
        row(a.bias, 0.0),
        w.tensor(a.running_mean),
        w.tensor(a.running_var),
    ]
    return [w.op("BatchNormalization", *inputs, epsilon=float(a.eps)), None, None]


def _layer_norm(w: Writer, a: Any, out: Any) -> list[str]:
    shape = [int(n) for n in a.normalized_shape]
    weight = w.constant(np.ones(shape), torch.float32) if a.weight is None else w.tensor(a.weight)
    bias = "" if a.bias is None else w.tensor(a.bias)
    return [*w.ops("LayerNormalization", 3, w.tensor(a.input), weight, bias, axis=-len(shape), epsilon=float(a.eps))]


def _activation(kind: str, **names: str) -> Handler:
    """`kind` with each ONNX setting from the argument of PyTorch's name."""

    def made(w: Writer, a: Any, out: Any) -> str:
        settings = {k: float(getattr(a, v)) for k, v in names.items() if isinstance(getattr(a, v), int | float)}
        return w.op(kind, w.tensor(a.self, out.dtype), **settings)

    return made


def _gelu(w: Writer, a: Any, out: Any) -> str:
    return w.op("Gelu", w.tensor(a.self), approximate=a.approximate)


def _silu(w: Writer, a: Any, out: Any) -> str:
    x = w.tensor(a.self)
    return w.op("Mul", x, w.op("Sigmoid", x))


def _threshold_backward(w: Writer, a: Any, out: Any) -> str:
    """`grad` where the input is above the threshold: times 1 or 0, but selected where it may be infinite at 0."""
    above, grad = w.op("Greater", w.tensor(a.self), w.constant(a.threshold, out.dtype)), w.tensor(a.grad_output)
    if w.endless:
        return w.op("Where", above, grad, w.constant(0.0, out.dtype))
    return w.op("Mul", grad, w.op("Cast", above, to=TensorProto.FLOAT))


def _hardsigmoid(w: Writer, a: Any, out: Any) -> str:
    return w.op("HardSigmoid", w.tensor(a.self), alpha=1 / 6, beta=0.5)


def _elu(w: Writer, a: Any, out: Any) -> str:
    """``scale * (max(x, 0) + alpha * (exp(min(x, 0) * input_scale) - 1))``: the graph that no table has wrong."""
    x = w.tensor(a.self)
    if a.scale == 1 and a.input_scale == 1:
        return w.op("Elu", x, alpha=float(a.alpha))
    zero = w.constant(0.0, out.dtype)
    below = w.op("Mul", w.op("Min", x, zero), w.constant(float(a.input_scale), out.dtype))
    below = w.op("Mul", w.op("Elu", below, alpha=1.0), w.constant(float(a.alpha), out.dtype))
    return w.op("Mul", w.op("Add", w.op("Max", x, zero), below), w.constant(float(a.scale), out.dtype))


def _prelu(w: Writer, a: Any, out: Any) -> str:
    return w.op("PRelu", w.tensor(a.self), w.tensor(a.weight))


def _softplus(w: Writer, a: Any, out: Any) -> str:
    x, beta = w.tensor(a.self), float(a.beta)
    scaled = x if beta == 1 else w.op("Mul", x, w.constant(beta, out.dtype))
    soft = w.op("Softplus", scaled)
    soft = soft if beta == 1 else w.op("Mul", soft, w.constant(1 / beta, out.dtype))
    return w.op("Where", w.op("Greater", scaled, w.constant(float(a.threshold), out.dtype)), x, soft)


# --- recurrent layers, whole: PyTorch's order of the gates on the left


def _recurrent(kind: str, order: str, wanted: str) -> Handler:
    """ONNX's operator of one layer, one or two directions: weights [gates * h, f] come in the order `order`."""

    def made(w: Writer, a: Any, out: Any) -> list[str]:
        ways = 2 if a.bidirectional else 1
        hidden = int(out[1].shape[-1])
        width = 4 if a.biased else 2
        parts: dict[str, list[str]] = {"w": [], "r": [], "b": []}
        for way in range(ways):
            names = [w.tensor(t) for t in a.weights[way * width : (way + 1) * width]]
            turned = [_reordered(w, n, order, wanted) for n in names]
            parts["w"].append(turned[0])
            parts["r"].append(turned[1])
            if a.biased:
                parts["b"].append(w.op("Concat", turned[2], turned[3], axis=0))

        def stacked(values: list[str]) -> str:
            wide = [w.op("Unsqueeze", v, w.ints([0])) for v in values]
            return wide[0] if len(wide) == 1 else w.op("Concat", *wide, axis=0)

        bias = stacked(parts["b"]) if a.biased else ""
        inputs = [w.tensor(a.x), stacked(parts["w"]), stacked(parts["r"]), bias, "", w.tensor(a.hidden)]
        settings: dict[str, Any] = {"hidden_size": hidden}
        if ways == 2:
            settings["direction"] = "bidirectional"
        if kind == "GRU":
            settings["linear_before_reset"] = 1
        if kind == "RNN":
            settings["activations"] = [a.activation] * ways
        if kind == "LSTM":
            inputs.append(w.tensor(a.cell))
        results = w.ops(kind, 3 if kind == "LSTM" else 2, *inputs, **settings)
        states = w.op("Transpose", results[0], perm=[0, 2, 1, 3])  # [t, ways, n, h]
        states = w.reshape(states, out[0].shape)
        return [states, *results[1:]]

    return made


def _reordered(w: Writer, name: str, order: str, wanted: str) -> str:
    if order == wanted:
        return name
    blocks = dict(zip(order, w.ops("Split", len(order), name, axis=0, num_outputs=len(order)), strict=True))
    return w.op("Concat", *(blocks[g] for g in wanted), axis=0)


def _own(kind: str, outputs: int) -> Handler:
    """An operator of `recurrence`, which `recurrence_onnx` replaces by a Scan."""

    def made(w: Writer, a: Any, out: Any) -> list[str] | str:
        tensors = [w.tensor(v) for v in vars(a).values() if not isinstance(v, bool)]
        flags = {k: int(v) for k, v in vars(a).items() if isinstance(v, bool)}
        found = w.ops(kind, outputs, *tensors, domain="maskfleet", **flags)
        return found if outputs > 1 else found[0]

    return made


def layers() -> dict[str, Handler]:
    """The table of this module, by ATen name."""
    pools = dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _max_pool)
    averages = dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _avg_pool)
    norms = dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit"),
        _batch_norm_eval,
    )
    return {
        **pools, **averages, **norms,
        "mm": _mm, "bmm": _mm, "addmm": _addmm, "convolution": _convolution, "native_layer_norm": _layer_norm,
        "gelu": _gelu, "silu": _silu, "mish": _activation("Mish"), "hardswish": _activation("HardSwish"),
        "hardsigmoid": _hardsigmoid, "elu": _elu, "leaky_relu": _activation("LeakyRelu", alpha="negative_slope"),
        "softplus": _softplus, "threshold_backward": _threshold_backward, "_prelu_kernel": _prelu,
        "maskfleet.linear": _linear,
        "maskfleet.lstm_layer": _recurrent("LSTM", "ifgo", "iofg"),
        "maskfleet.gru_layer": _recurrent("GRU", "rzn", "zrn"),
        "maskfleet.rnn_layer": _recurrent("RNN", "h", "h"),
        "maskfleet.lstm": _own("Lstm", 3), "maskfleet.lstm_backward": _own("LstmBackward", 3),
        "maskfleet.gru": _own("Gru", 2), "maskfleet.gru_backward": _own("GruBackward", 3),
        "maskfleet.rnn": _own("Rnn", 1), "maskfleet.rnn_backward": _own("RnnBackward", 2),
    }  # fmt: skip
