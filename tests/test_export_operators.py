"""Export by operator: each case against float64 autograd, dropout, what is refused, and that the proof can fail."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edge_client import authored
from edge_client.bundle import views
from edge_client.errors import ModelError
from edge_client.graph.check import check_graph
from edge_client.training import open_trainer

torch = pytest.importorskip("torch")
from edge_bench.exporting.cases import CASES, Branches, Buffered, Case, Held, Sequences, Unused  # noqa: E402
from edge_bench.exporting.operators import certify  # noqa: E402
from edge_export import export_bundle, programs  # noqa: E402
from edge_export.dropout import PRIME, Drops, kept  # noqa: E402
from edge_export.proof import prove  # noqa: E402
from edge_export.rewriting import weight_norm  # noqa: E402
from edge_export.witness import Witness  # noqa: E402
from edge_export.writer import proved_graphs  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from edge_client.targets import Classification  # noqa: E402

CLASSIFICATION = {"kind": "classification"}
SLOW = {  # `python -m edge_bench.exporting.operators` has them all
    "adaptive max-pool of equal windows", "attention function", "average pool", "average pool 1d, ceil",
    "average pool 3d", "batch-norm 1d", "batch-norm without factors", "bicubic upsampling", "bilinear with corners",
    "causal attention", "celu", "channel shuffle", "conv3d", "convolution with padding same",
    "depthwise convolution", "dilated convolution", "einsum", "global average pool", "gru of two layers, both ways",
    "gru without biases", "hardtanh", "instance norm with statistics", "layer norm of two axes",
    "linear upsampling", "lstm of two layers, both ways, dropout", "masked multi-head attention", "max-pool 1d",
    "max-pool 3d", "max-pool ceil, dilated", "multi-head attention", "nearest to any size", "pad layers",
    "pixel unshuffle", "prelu per channel", "reflect padding", "relu", "relu6", "replicate padding",
    "rnn with relu", "transformer encoder", "transformer with dropout", "transposed conv1d", "transposed conv3d",
}  # fmt: skip


def test_a_head_of_zeros_with_the_classes_shares_as_its_bias_is_no_classifier_of_probabilities(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), _prior(nn.Linear(4, 3)))
    example, target = torch.zeros(2, 5), Classification(classes=3)
    bundle = export_bundle(module, example, tmp_path / "b", name="b", target=target, torch_part=False)
    assert bundle.manifest.d == 6 * 4 + 5 * 3


@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOW])
def test_loss_gradients_statistics_and_outputs_equal_float64_autograd(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made, _ = certify(case.make(), case.example())
    assert made.shown.gradient <= 1e-5
    assert max(made.shown.statistic, made.shown.output) <= 1e-5
    for part in (made.train, made.evaluation):
        onnx.checker.check_model(part, full_check=False)
        if name in ("gru", "dropout", "attention with biases as keys"):
            (tmp_path / "g").write_bytes(part.SerializeToString())
            check_graph(tmp_path / "g", "graph", case.sample)


def test_a_gradient_outside_the_exporter_agrees(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.AvgPool2d(2, divisor_override=3), nn.Flatten())
    module.append(nn.Linear(27, 3))
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5) % 3
    bundle = export_bundle(module, x, tmp_path / "b", name="b", target=CLASSIFICATION, torch_part=False)
    model = bundle.model()
    got = open_trainer("onnxruntime", bundle).gradient(model.parameters, model.buffers, x.numpy(), y.numpy())
    functional.cross_entropy(module(x), y).backward()
    for name, value in views(bundle.manifest.parameters, got.parameters).items():
        np.testing.assert_allclose(value, module.get_parameter(name).grad.numpy(), atol=1e-6, err_msg=name)


def test_only_what_a_step_moves_is_a_buffer_of_the_bundle() -> None:
    made = proved_graphs(Buffered(), torch.zeros(2, 5, dtype=torch.int64), CLASSIFICATION)
    assert made.tables.buffers == ()
    held = proved_graphs(Held(), torch.zeros(2, 2, 7, 8), CLASSIFICATION)
    assert [r.name for r in held.tables.buffers] == [
        f"{norm}.running_{what}" for norm in ("norm", "moving") for what in ("mean", "var")
    ]


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x * self.scale)
        return logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_buffers_of_other_floats_become_float32_where_that_changes_no_value(dtype: torch.dtype) -> None:
    module = Scaled(torch.tensor([0.5, 2, -3, 1, 0.25], dtype=dtype))
    assert proved_graphs(module, torch.zeros(2, 5), CLASSIFICATION).shown.output <= 1e-6
    assert module.scale.dtype == dtype  # the author's own stays
    with pytest.raises(ModelError, match=r"tensor 'scale' is torch\.float64; call module\.float\(\)"):
        proved_graphs(Scaled(torch.full((5,), 0.1, dtype=torch.float64)), torch.zeros(2, 5), CLASSIFICATION)


def test_a_slice_of_all_samples_is_no_operator() -> None:
    made = proved_graphs(Odd(lambda _, y: y[: y.shape[0]]), torch.zeros(2, 5), CLASSIFICATION)
    assert [node.op_type for node in made.evaluation.graph.node] == ["Gemm", "Gemm"]


def test_names_of_the_graphs_own_get_a_prefix() -> None:
    made = proved_graphs(Unused(), torch.zeros(2, 5), CLASSIFICATION)
    names = [r.name for r in made.tables.parameters]
    assert {"model.x", "model.y", "model.loss", "model.c0", "model.idle.weight"} <= set(names)
    assert not next(r for r in made.tables.parameters if r.name == "model.r1.bias").trainable


def test_attention_is_maskable_by_its_projections() -> None:
    module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Flatten(), nn.Linear(40, 3))
    made = proved_graphs(module, torch.zeros(2, 5, 8), CLASSIFICATION)
    assert [layer.name for layer in made.tables.layers] == [
        "0.self_attn.in_proj", "0.self_attn.out_proj", "0.linear1", "0.linear2", "2",
    ]  # fmt: skip


class Reader(nn.Module):
    """A transformer's encoder whose steps see those before them, by the mask that PyTorch's documentation gives."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(5))
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, mask=self.mask).flatten(1))
        return logits


def test_an_encoder_takes_a_mask() -> None:
    assert proved_graphs(Reader(), torch.zeros(2, 5, 8), CLASSIFICATION).shown.output <= 1e-6


# --- dropout


def test_kept_entries_have_the_wanted_share_and_differ_by_key_call_sample_and_place() -> None:
    key = torch.tensor([77])
    mask = kept((64, 32, 10), 0.3, key, 1)
    assert abs(mask.double().mean().item() - 0.7) < 0.01
    assert torch.equal(mask, kept((64, 32, 10), 0.3, key, 1))
    flat = mask.reshape(64, -1).double() - 0.7
    between = (flat @ flat.t() / flat.shape[1]).fill_diagonal_(0).abs().max()  # of two samples
    across = (flat.t() @ flat / 64).fill_diagonal_(0).abs().mean()  # of two places
    assert between < 0.06
    assert across < 0.03
    for other in (kept((64, 32, 10), 0.3, key + 1, 1), kept((64, 32, 10), 0.3, key, 2)):
        assert abs((other == mask).double().mean().item() - (0.49 + 0.09)) < 0.02


@pytest.mark.parametrize("key", [0, 1, PRIME - 1])
def test_every_key_is_as_good(key: int) -> None:
    assert abs(kept((50, 200), 0.5, torch.tensor([key]), 3).double().mean().item() - 0.5) < 0.02


def test_every_backend_drops_the_same_entries_and_repeats(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 3))
    bundle = export_bundle(module, torch.zeros(2, 5), tmp_path / "b", name="b", target=CLASSIFICATION)
    assert bundle.manifest.draws
    model, random = bundle.model(), np.random.default_rng(0)
    x, y = random.standard_normal((9, 5)).astype(np.float32), np.arange(9) % 3
    found: dict[str, list[Any]] = {}
    for backend in ("onnxruntime", "torch"):
        trainer = open_trainer(backend, bundle)
        steps = [trainer.gradient(model.parameters, model.buffers, x, y, key).parameters.copy() for key in (4, 4, 5)]
        assert np.array_equal(steps[0], steps[1])
        assert abs(steps[0] - steps[2]).max() > 1e-3
        found[backend] = [*steps, trainer.logits(model.parameters, model.buffers, x)]
    for a, b in zip(*found.values(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(found["torch"][3], module.eval()(torch.tensor(x)).detach(), atol=1e-6)


class _StochasticDepth(nn.Module):
    """A branch that is left out of some samples, as torchvision and timm write it (`each`), or of all."""

    def __init__(self, each: bool = True) -> None:
        super().__init__()
        self.each = each
        self.stem, self.branch, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        y = self.branch(x)
        if self.training:
            y = y * y.new_empty((y.shape[0], 1) if self.each else ()).bernoulli_(0.7).div_(0.7)
        return self.head(x + y)


@pytest.mark.parametrize("each", [True, False])
def test_stochastic_depth_leaves_out_the_same_samples_on_every_backend(tmp_path: Path, each: bool) -> None:
    bundle = export_bundle(_StochasticDepth(each), torch.zeros(2, 5), tmp_path / "b", name="b", target=CLASSIFICATION)
    assert bundle.manifest.draws
    model, random = bundle.model(), np.random.default_rng(0)
    x, y = random.standard_normal((9, 5)).astype(np.float32), np.arange(9) % 3
    trainers = [open_trainer(backend, bundle) for backend in ("onnxruntime", "torch")]
    own = [[t.gradient(model.parameters, model.buffers, x, y, k).parameters.copy() for k in range(9)] for t in trainers]
    np.testing.assert_allclose(own[0], own[1], atol=1e-6)
    assert np.ptp(own[0], axis=0).max() > 1e-3
    wanted = torch.empty(4000, 1)
    drawn = Drops(torch.tensor([7])).bernoulli(wanted, 0.7)
    assert drawn is wanted
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.mean() == pytest.approx(0.7, abs=0.03)


def test_the_torch_backend_evaluates_what_the_module_does_outside_training(tmp_path: Path) -> None:
    module = nn.Sequential(Branches())
    module[0].register_buffer("idle", torch.arange(3))
    bundle = export_bundle(module, torch.zeros(2, 5), tmp_path / "b", name="b", target=CLASSIFICATION)
    model, x = bundle.model(), torch.randn(4, 5)
    made = open_trainer("torch", bundle).logits(model.parameters, model.buffers, x.numpy())
    np.testing.assert_allclose(made, module.eval()(x).detach(), atol=1e-6)


class _Causal(nn.Module):
    """An encoder and a decoder under a causal mask, without a hint that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 8), nn.Linear(8, 3)
        self.both = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.both(x, x, self.mask, self.mask).mean(1))


class _Captured(_Causal):
    """The encoder's forward, held as an attribute before the export."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = self.both.encoder.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(self.first(x), self.mask).mean(1))


@pytest.mark.parametrize("make", [_Causal, _Captured])
def test_a_transformer_under_a_causal_mask_is_exported_with_pytorch_s_programs(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    bundle = export_bundle(make(), torch.zeros(2, 5, 3), tmp_path / "b", name="b", target=CLASSIFICATION)
    assert {"model.pt2", "model-eval.pt2"} <= bundle.manifest.parts.keys()


# --- refusals


class Odd(nn.Module):
    """A linear layer, `function` of its outputs, a head."""

    def __init__(self, function: Any, **buffers: Any) -> None:
        super().__init__()
        self.first, self.head, self.function, self.calls = nn.Linear(5, 6), nn.Linear(6, 3), (function,), 0
        for name, value in buffers.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function[0](self, self.first(x)))


class _Probabilities(nn.Linear):
    """A classifier that gives logits in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x).softmax(1)


class _ByHand(nn.Linear):
    """A classifier that gives probabilities, without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x).exp()
        return made / made.sum(1, keepdim=True)


def _prior(head: nn.Linear) -> nn.Linear:
    """A head that begins with the classes' shares as its outputs, which no training keeps so."""
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.7, 0.2, 0.1]))
    return head


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Marked(Tensor):
    pass


class _Bound(nn.Module):
    """A layer that forward calls through a function, which a copy of the module shares."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer = nn.Linear(6, 6)
        self.run = lambda x: layer(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.run(x)
        return made


class _Doubled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def _table(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4, **settings), nn.Flatten(), nn.Linear(20, 3))


class Packed(nn.LSTM):
    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        states, last = super().forward(packed)
        return nn.utils.rnn.pad_packed_sequence(states, batch_first=True)[0], last


class _Bags(nn.EmbeddingBag):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(), torch.arange(0, x.numel(), x.shape[1]))


def _kept(value: Any) -> nn.Module:
    part = nn.Tanh()
    part.kept = value
    return nn.Sequential(nn.Linear(5, 6), part, nn.Linear(6, 3))


def _count(module: Odd, y: Tensor) -> Tensor:
    module.calls += 1
    return y * module.calls


class _Recomputed(nn.Linear):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # as networks with an option that saves memory have it
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def _fussy(module: Any, y: Tensor) -> Tensor:
    if module.training and bool((module.first.bias != 0).any()):
        raise ValueError("the bias has moved")
    return module.e(y)


def _whole_count(module: Any, y: Tensor) -> Tensor:
    module.i += 1
    return y


def _moving(module: Any, y: Tensor) -> Tensor:
    module.e.mul_(0.5)
    return y + module.e.clamp(min=0)


def _half_set(module: Any, y: Tensor) -> Tensor:
    both = torch.cat([y, -y])
    both[: y.shape[0]] = y.tanh()
    return both[: y.shape[0]] - both[y.shape[0] :]


def _columns_set(module: Any, y: Tensor) -> Tensor:
    made = y.clone()
    made[:, module.e] = 0.0
    return made


def _beside(values: Tensor) -> nn.Module:
    made = nn.Linear(5, 3)
    made.table = nn.Parameter(values, requires_grad=False)
    return made


class _Auxiliary(nn.Linear):
    """A classifier that gives the outputs of a second head as well, in training only."""

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return (made, made) if self.training else made


REFUSED = {
    "python state": (Odd(_count), "attribute 'calls' changes in every run"),
    "batch size": (Odd(lambda _, y: y * 2 if len(y) > 8 else y), "number of samples only"),
    "large batches": (Odd(lambda _, y: y * 2 if y.shape[0] >= 100 else y), r"number of samples n .* where n < 100;"),
    "one large batch": (Odd(lambda _, y: y * 2 if y.shape[0] == 777 else y), r"number of samples n .* Ne\(n, 777\)"),
    "a size as a factor": (Odd(lambda _, y: y * min(y.shape[0], 64)), r"number of samples n .* where n <= 64;"),
    "large batches after a convolution": (
        nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 1, 1), nn.Flatten(),
                      Odd(lambda _, y: y * 2 if y.shape[0] > 99 else y)), r"number of samples n .* where n <= 99;"),
    "a value": (Odd(lambda _, y: y if y.sum() > 0 else -y), "reads a tensor's values in Python"),
    "item": (Odd(lambda _, y: y * y.max().item()), "a tensor's value as a Python number; keep it a tensor"),
    "selection": (Odd(lambda _, y: y[y[:, 0] > -1e9]), "picks entries by a mask.*use where"),
    "padded batch": (
        Odd(lambda _, y: functional.pad(y, (0, 0, 0, y.shape[0])).reshape(2, -1, 6).sum(0)),
        "has a width .*use torch.cat",
    ),
    "randomness": (Odd(lambda _, y: y + torch.randn_like(y)), "forward: operator 'randn_like'.*torch.nn.Dropout"),
    "probabilities": (nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), "and the loss takes a softmax itself; return the"),
    "clamped probabilities": (
        nn.Sequential(nn.Linear(5, 3), nn.Softmax(1), nn.Hardtanh(1e-7, 1 - 1e-7), nn.Flatten()),
        "the loss takes a softmax itself; return the logits$",
    ),
    "probabilities by hand": (_ByHand(5, 3), "the loss takes a softmax itself; return the logits$"),
    "probabilities in evaluation": (_Probabilities(5, 3), "in evaluation mode, and the loss.*logits in both modes$"),
    "probabilities of which a step drops some": (
        nn.Sequential(nn.Linear(5, 3), nn.Softmax(1), nn.Dropout(0.2)),
        "in evaluation mode, and the loss.*logits in both modes$",
    ),
    "sort": (Odd(lambda _, y: y.sort(1).values), "forward: operator 'sort'.*ties"),
    "product": (Odd(lambda _, y: y.cumprod(1)), "forward: operator 'cumprod'.*cumsum"),
    "rrelu": (nn.Sequential(nn.Linear(5, 6), nn.RReLU(), nn.Linear(6, 3)), "module '1': operator 'rrelu"),
    "counted buffer": (Odd(_whole_count, i=torch.zeros((), dtype=torch.int64)), r"buffer 'i' \(int64\) changes"),
    "infinite": (Odd(_moving, e=torch.tensor([1.0, 1, 1, 1, 1, -torch.inf])), "'e' holds an inf"),
    "statistics": (
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)),
        "module '1': .*track_running_stats=True",
    ),
    "momentum": (
        nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.BatchNorm1d(6, momentum=None)), nn.Linear(6, 3)),
        "module '1.0': .*momentum=0.1",
    ),
    "a scripted module": (
        nn.Sequential(nn.Linear(5, 6), torch.jit.script(nn.Linear(6, 3))), "module '1' is a TorchScript.*without"),
    "a function that holds a layer": (
        nn.Sequential(nn.Linear(5, 6), _Bound(), nn.Linear(6, 3)), "^attribute '1.run' is a function .*; make it a"),
    "a compiled module": (torch.compile(nn.Linear(5, 3)), "is compiled; .*without torch.compile"),
    "an old function": (Odd(lambda _, y: _Sign.apply(y)), r"autograd.Function of the old form.*setup_context"),
    "an input in place": (_Doubled(), r"forward \(.*'x.mul_\(2\)'\) changes a tensor in place.* x = x.clone\(\)"),
    "sparse gradients": (_table(sparse=True), "module '0' has sparse gradients; set sparse=False"),
    "a table that forward scales": (_table(max_norm=0.5), "module '0' changes its table.*max_norm=None"),
    "orthogonal": (
        nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Linear(5, 3)),
        "module '0.parametrizations.weight.0': operator 'linalg_matrix_exp'.*remove_parametrizations"),
    "buckets": (
        Odd(lambda m, y: torch.bucketize(y, m.e).float(), e=torch.arange(3.0)), r"'bucketize'.*\(x.unsqueeze\(-1\)"),
    "complex numbers": (Odd(lambda _, y: torch.polar(y.abs(), y).abs()), "operator 'polar'.*imaginary parts in two te"),
    "the batch as a number": (Odd(lambda _, y: y / int(y.shape[0])), r"int\(\), len\(\).*x.shape\[0\] itself"),
    "a forward that fails on other parameters": (
        Odd(_fussy, e=nn.BatchNorm1d(6)), r"in training mode on \(16, 5\): .*_fussy: .*ValueError: the bias has moved"),
    "checkpoints": (
        nn.Sequential(nn.Linear(5, 6), nn.Sequential(_Recomputed(False)), nn.Linear(6, 3)),
        "^module '1.0' calls torch.utils.checkpoint; call the function without checkpoint$"),
    "checkpoints of the old form": (
        nn.Sequential(nn.Linear(5, 6), _Recomputed(True), nn.Linear(6, 3)), "^module '1' calls torch.utils.ch"),
    "a tensor without values": (Odd(lambda _, y: y, e=torch.empty(6, device="meta")), "'e' is on the device 'meta'"),
    "a plain tensor without values": (_kept(torch.empty(6, device="meta")), "'1.kept' is on the device 'meta'"),
    "a sparse tensor": (_kept(torch.eye(6).to_sparse()), "'1.kept' is quantized, sparse.*a plain dense tensor"),
    "a sparse tensor in a list": (_kept([torch.eye(6).to_sparse_csr()]), "^tensor '1.kept.0' is quantized, sparse.*"),
    "a subclass of tensors": (
        Odd(lambda m, y: y * m.e, e=torch.ones(6).as_subclass(_Marked)), "^tensor 'e' is a _Marked, .*as_subclass"),
    "a bfloat16 attribute": (
        Odd(lambda m, y: y * m.e[0], e=[torch.ones(6).bfloat16()]),
        "^the module's own forward computes with a bfloat16 tensor; keep it as float32, or as a"),
    "complex tensors kept": (
        Odd(lambda m, y: y * m.e.real, e=torch.fft.fft(torch.arange(6.0)).conj()), "sines and cosines"),
    "packed sequences": (
        Case(lambda: Sequences(Packed(5, 4, batch_first=True), 4), (6,), 11).make(),
        "module 'layer': packed sequences are not exported; give .* padded ones"),
    "a part of a batch set": (Odd(_half_set), "own forward: operator 'slice_scatter' replaces a part of the batch; wr"),
    "columns by a mask": (
        Odd(_columns_set, e=torch.arange(6) < 2), "'index_put' picks entries by a mask.*, or index by numbers"),
    "rows of one column by a mask": (
        Odd(lambda _, y: y.clone().index_put((y[:, 0] < 0, torch.tensor(2)), y.new_tensor(0.5))), "entries by a mask"),
    "rows by a mask": (
        Odd(lambda m, y: y.clone().index_put((y[:, 0] < 0,), m.e), e=torch.arange(6.0)), "picks entries by a mask"),
    "a value added by a mask": (
        Odd(lambda _, y: y.clone().index_put((y < 0,), y.new_tensor(0.5), accumulate=True)), "picks entries by a mask"),
    "samples as time": (
        Case(lambda: Sequences(nn.GRU(5, 4), 4), (6,), 11).make(),
        "module 'layer': a recurrent layer runs over the samples.*; set batch_first=True"),
    "a kernel for each sample": (
        Odd(lambda m, y: functional.conv1d(y.reshape(1, -1, 6), y[:, :3].unsqueeze(1), groups=y.shape[0]).view(
            -1, 4) @ m.e, e=torch.ones(4, 6)), "'convolution' has a group for each sample; multiply windows, .*bmm"),
    "bags by offsets": (nn.Sequential(_Bags(9, 4), nn.Linear(4, 3)), "module '0': .*offsets.*whole rows"),
    "a sampled grid": (
        Odd(lambda _, y: functional.grid_sample(y.view(-1, 1, 2, 3), functional.affine_grid(
            y.view(-1, 2, 3), (y.shape[0], 1, 2, 3))).flatten(1)), "own forward: operator 'affine_grid' has no"),
    "two inputs": (
        nn.Bilinear(5, 5, 3), "^the module's forward takes input1 and input2, .*; join them in one x, and take them"),
    "nothing to train": (
        nn.Linear(5, 3).requires_grad_(False), r"^no parameter requires a gradient, .*; call requires_grad_\(\) on"),
    "auxiliary outputs": (
        _Auxiliary(5, 3), r"returns tuple in training mode and .* \(\d+, 3\) in evaluation mode; return the same"),
    "a batch of one squeezed": (
        Odd(lambda _, y: y.unsqueeze(1).squeeze()), r"on 1 samples\); .* such as a squeeze\(\) without an axis"),
    "pruned weights": (
        prune.random_unstructured(nn.Linear(5, 3), "weight", 0.5), r"a parameter; .* by .*prune.remove or"),
    "a parameter of integers": (
        _beside(torch.arange(3)), "parameter 'table' is torch.int64, .*; keep it as a buffer"),
    "a parameter without values": (
        _beside(torch.zeros(0)), r"tensor 'table' has no values \(its shape is \(0,\)\); remove it"),
    "numbers without an axis of their own": (
        nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), r"shape \(2,\) for a batch of 2; .*: \[n, 1\], not \[n\]"),
    "a lock": (Odd(_whole_count, i=torch.zeros(()), f=threading.Lock()), "attribute 'f' cannot be copied"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_in_a_sentence_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    module, sentence = REFUSED[name]
    example = torch.zeros(
        2, 5, dtype=torch.int64 if isinstance(next(module.children(), None), nn.Embedding | nn.EmbeddingBag) else None
    )
    with pytest.raises(ModelError, match=sentence) as refusal:
        export_bundle(module, example, tmp_path / "b", name="b", target=CLASSIFICATION, torch_part=False)
    assert str(refusal.value).isprintable()
    assert not list(tmp_path.iterdir())


def test_a_graph_whose_channels_crash_the_search_for_groups_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_export.groups.find_groups", lambda *_: 1 // 0)
    with pytest.raises(ModelError, match=r"^the model's channels cannot be followed .*: ZeroDivisionError: .*; report"):
        export_bundle(
            nn.Linear(5, 3), torch.zeros(2, 5), tmp_path / "b", name="b", target=CLASSIFICATION, torch_part=False
        )


@pytest.mark.parametrize(
    "name",
    [
        "distances",
        "repeated for each sample",
        "two samples of one",
        "places in other samples",
        "gru after an id of its own",
    ],
)
def test_a_bundle_is_written_with_pytorch_s_programs_and_graphs_that_a_device_takes(name: str, tmp_path: Path) -> None:
    """PyTorch chooses a kernel for distances by the number of samples; a device must know the size of every value."""
    case = CASES[name]
    bundle = export_bundle(case.make(), case.example(), tmp_path / "b", name="b", target=CLASSIFICATION)
    assert {programs.TRAIN, programs.EVAL} <= bundle.manifest.parts.keys()
    for part in (programs.TRAIN, programs.EVAL):
        assert b"/edge_export/" not in bundle.part(part).read_bytes(), "it names files of the author's machine"


def test_pytorchs_parts_are_proved_as_they_are_stored() -> None:
    def made(slope: float, drop: float = 0.5) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.LeakyReLU(slope), nn.Dropout(drop), nn.Linear(6, 3))

    module, example = made(0.1), torch.zeros(2, 5)
    parameters, buffers = [k for k, _ in module.named_parameters()], ["1.running_mean", "1.running_var"]
    witness = Witness(module, Classification(classes=3), parameters, buffers)
    given = [*parameters, *buffers]
    right = programs.torch_programs(module, example, given, draws=True)
    programs.prove_programs(witness, example, right, draws=True)
    other = programs.torch_programs(made(0.101), example, given, draws=True)
    dropped = programs.torch_programs(made(0.1, 0.4), example, given, draws=True)
    for part, wrong, tensor in (
        (programs.TRAIN, other, "the training loss"),
        (programs.TRAIN, dropped, "the training loss"),
        (programs.EVAL, other, "the output in evaluation mode"),
    ):
        with pytest.raises(ModelError, match=rf"^model.pt2 computes {tensor} differently .*--no-torch-part"):
            programs.prove_programs(witness, example, {**right, part: wrong[part]}, draws=True)


def test_infinities_in_a_buffer_that_stays_are_exported() -> None:
    bar = torch.zeros(6).index_fill(0, torch.tensor([2]), float("-inf"))
    made, _ = certify(Odd(lambda m, y: torch.softmax(y + m.bar, 1), bar=bar), torch.zeros(2, 5))
    assert made.shown.gradient <= 1e-5


def test_a_module_file_with_postponed_annotations_and_a_dataclass_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\nfrom typing import ClassVar\n"
        "from torch import nn\n@dataclass\nclass Sizes:\n    width: int = 4\n    kind: ClassVar[str] = 'a'\n"
        "def make():\n    return nn.Linear(Sizes().width, 3)\n"
    )
    assert authored.load(f"{file}:make", "a model")().in_features == 4


# --- the proof fails when a graph is wrong


def _mutants(graph: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
    """Graphs with one thing wrong, each still valid."""
    found = {}

    def changed(name: str, kind: str, edit: Any) -> None:
        made = copy.deepcopy(graph)
        node = next((n for n in made.graph.node if n.op_type == kind), None)
        if node is not None and edit(made, node):
            found[name] = made

    def to(kind: str) -> Any:
        def edit(_: Any, node: Any) -> bool:
            node.op_type = kind
            return True

        return edit

    def scale(made: Any, node: Any) -> bool:
        for tensor in made.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if value.dtype == np.float32 and tensor.name in node.input and abs(value).max() > 0:
                tensor.CopyFrom(numpy_helper.from_array((value * 1.01).astype(np.float32), tensor.name))
                return True
        return False

    changed("another comparison", "Greater", to("Less"))
    changed("another mean", "ReduceMean", to("ReduceSum"))
    changed("a factor", "Mul", scale)
    changed("a product", "Mul", to("Add"))
    return found


def test_the_proof_refuses_graphs_with_one_thing_wrong() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    made = proved_graphs(module, torch.zeros(2, 5), CLASSIFICATION)
    mutants = _mutants(made.train)
    assert len(mutants) >= 3
    for mutant in mutants.values():
        with pytest.raises(ModelError, match=r"differently from the module|do not run|cannot open"):
            prove(made.witness, made.example, mutant, made.evaluation)
    other = proved_graphs(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Linear(6, 3)),
                          torch.zeros(2, 5), CLASSIFICATION)  # fmt: skip
    with pytest.raises(ModelError, match="output in evaluation mode"):
        prove(made.witness, made.example, made.train, other.evaluation)


class Cancelling(nn.Module):
    """A linear layer and a parameter whose gradient is a small sum of large terms."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.small = nn.Linear(5, 3), nn.Parameter(torch.tensor([1e-6]))
        terms = torch.randn(64) * 1e3
        self.register_buffer("terms", terms - (terms.sum() - 1) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * (1 + (self.small.expand(64) * self.terms).sum())


def test_one_inexact_gradient_does_not_excuse_another() -> None:
    module = Cancelling()
    made = proved_graphs(module, torch.zeros(2, 5), CLASSIFICATION)
    assert made.shown.gradient > 5e-5
    wrong, output = copy.deepcopy(made.train), "grad:head.bias"
    node = next(n for n in wrong.graph.node if output in n.output)
    node.output[list(node.output).index(output)] = "right"
    factor = np.array(1 + made.shown.gradient / 2, np.float32)
    wrong.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    wrong.graph.node.append(onnx.helper.make_node("Mul", ["right", "factor"], [output]))
    with pytest.raises(ModelError, match=r"gradient of 'head\.bias' differently"):
        prove(made.witness, made.example, wrong, made.evaluation)


def test_zeros_that_hide_a_fault_are_moved_away_first() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.init.zeros_(module[2].weight)
    made = proved_graphs(module, torch.zeros(2, 5), CLASSIFICATION)
    wrong = proved_graphs(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 5), CLASSIFICATION)
    with pytest.raises(ModelError, match="differently"):
        prove(made.witness, made.example, wrong.train, made.evaluation)


def test_integers_up_to_the_embedding_take_part_in_the_proof() -> None:
    case = Case(lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3)), (3,), 50)
    made, _ = certify(case.make(), case.example())
    assert made.shown.gradient <= 1e-5


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_the_rewritten_weight_norm_takes_the_axes_that_pytorch_takes(dim: int) -> None:
    v = torch.arange(1.0, 61.0).reshape(3, 4, 5)
    g = 2 * torch.norm_except_dim(v, 2, dim)
    assert torch.allclose(weight_norm(v, g, dim), torch._weight_norm(v, g, dim))
