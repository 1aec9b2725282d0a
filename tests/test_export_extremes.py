"""Export at large values and at zeros: what PyTorch keeps finite, the graphs keep finite, and the proof looks there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from onnx import ModelProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array

torch = pytest.importorskip("torch")
from edge_bench.exporting.cases import rows  # noqa: E402
from edge_export import draws, onnx_operators, proof, rounding  # noqa: E402
from edge_export.rounding import Rounding  # noqa: E402
from edge_export.witness import Step  # noqa: E402
from edge_export.writer import Graphs, proved_graphs  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call  # noqa: E402
from torch.nn import functional  # noqa: E402

from edge_client.errors import ModelError  # noqa: E402


def _proved(module: nn.Module, *sample: int) -> Graphs:
    return proved_graphs(module, torch.zeros(2, *sample), {"kind": "classification"})


@pytest.mark.parametrize("function", [lambda x: functional.celu(x, 0.5), lambda x: torch.expm1(-x.abs())])
def test_the_exponential_minus_one_is_finite_far_below_zero(function: object) -> None:
    case = rows(function)
    assert _proved(case.make(), *case.sample).shown.gradient <= 1e-5


def test_the_logarithm_of_one_plus_little_keeps_its_digits() -> None:
    case = rows(lambda x: 1e6 * torch.log1p(1e-6 * x.abs()) + torch.log1p(x.square()))
    assert _proved(case.make(), *case.sample).shown.output <= 1e-6


def test_norms_of_constant_images_do_not_make_the_proof_refuse_a_right_graph() -> None:
    """On zeros both norms divide what is left of a constant less its mean: the mean's rounding, 300 times as large."""
    torch.manual_seed(1)
    inner = [nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU()]
    outer = [nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU()]
    found = _proved(nn.Sequential(*inner, *outer, nn.Flatten(), nn.Linear(256, 4)), 1, 8, 8)
    assert found.shown.gradient <= 1e-5


def test_batch_norms_of_large_images_are_no_fault() -> None:
    """On zeros the first layer is a constant, and ONNX Runtime's mean of 8,192 equal values is off by 64 roundings."""
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4)]
    second = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    found = _proved(nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 5)), 1, 64, 64)
    assert found.shown.gradient <= 1e-5


class _Neighbours(nn.Module):
    """A layer whose results are averaged over a graph's nodes before a norm: its bias is nothing but rounding there."""

    def __init__(self) -> None:
        super().__init__()
        near = (torch.rand(7, 7) > 0.5).float() + torch.eye(7)
        self.register_buffer("near", near / near.sum(1, keepdim=True))
        self.layer, self.norm, self.head = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm((self.near @ self.layer(x)).transpose(1, 2))
        made: Tensor = self.head(functional.relu(x).mean(2))
        return made


def test_a_gradient_that_a_constant_s_rounding_alone_makes_is_measured_against_the_largest() -> None:
    """Rows of float32 sum to one up to rounding, so the gradient of the bias is zero up to rounding, in float64 too."""
    assert _proved(_Neighbours(), 7, 6).shown.gradient <= 1e-5


def _naive_expm1(w: onnx_operators.Writer, a: object, out: Tensor) -> str:
    half = w.op("Mul", w.tensor(a.self), w.constant(0.5, out.dtype))  # type: ignore[attr-defined]
    return w.op("Mul", w.op("Mul", w.op("Sinh", half), w.op("Exp", half)), w.constant(2.0, out.dtype))


def _clipped(w: onnx_operators.Writer, a: object, out: Tensor) -> str:
    x = w.op("Min", w.tensor(a.self), w.constant(20.0, out.dtype))  # type: ignore[attr-defined]
    return w.op("Asinh", x)


def test_the_proof_sees_wrong_values_at_large_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = onnx_operators.operators
    monkeypatch.setattr("edge_export.graphs.operators", lambda: {**made(), "asinh": _clipped})
    case = rows(torch.asinh)
    with pytest.raises(ModelError, match=r"differently from the module .* on 2 large samples"):
        _proved(case.make(), *case.sample)


def test_what_overflows_in_pytorch_too_is_no_fault() -> None:
    case = rows(lambda x: torch.sinh(x) + x.exp())
    assert _proved(case.make(), *case.sample).shown.gradient <= 1e-5


class _OfIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(functional.celu(self.table(x)).flatten(1))
        return logits


def test_a_model_of_integers_has_large_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    example = torch.zeros(2, 5, dtype=torch.int64)
    proved_graphs(_OfIntegers(), example, {"kind": "classification"})
    monkeypatch.setattr(onnx_operators, "_expm1", _naive_expm1)
    with pytest.raises(ModelError, match="on a large batch"):
        proved_graphs(_OfIntegers(), example, {"kind": "classification"})


class _Tagger(nn.Module):
    """Large embeddings saturate the gates: some gradients are what rounding leaves of 1 - sigmoid(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(7, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(x))[0])
        return logits


def _to_prove(module: nn.Module, example: Tensor, kind: str) -> tuple[Any, ...]:
    """What the export gives to `proof.prove`."""
    with mock.patch("edge_export.writer.prove") as prove:
        proved_graphs(module, example, {"kind": kind})
    return tuple(prove.call_args.args)


def _bent(train: ModelProto, name: str, factor: float) -> ModelProto:
    """`train` with an output multiplied where a parameter's or an input's entry is beyond 8."""
    made = ModelProto.FromString(train.SerializeToString())
    for node in made.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}:right" if k == name else k for k in names]
    large = next(
        i.name for i in made.graph.input if i.name in ("embed.weight", "x") and i.type.tensor_type.elem_type == 1
    )
    for key, value in (("bent:factor", factor), ("bent:one", 1.0), ("bent:beyond", 8.0)):
        made.graph.initializer.append(from_array(np.float32(value), key))
    made.graph.node.extend(
        [
            make_node("ReduceMax", [large], ["bent:most"], keepdims=0),
            make_node("Greater", ["bent:most", "bent:beyond"], ["bent:is"]),
            make_node("Where", ["bent:is", "bent:factor", "bent:one"], ["bent:times"]),
            make_node("Mul", [f"{name}:right", "bent:times"], [name]),
        ]
    )
    return made


@pytest.mark.parametrize("seed", [8, 19])
def test_saturated_gates_are_no_fault_and_one_percent_on_top_of_them_is(seed: int) -> None:
    torch.manual_seed(seed)
    given = _to_prove(_Tagger(), torch.zeros(2, 6, dtype=torch.int64), "sequence")
    assert proof.prove(*given).gradient <= 1e-5
    for name in ("grad:lstm.weight_ih_l0", "grad:lstm.weight_hh_l0", "grad:embed.weight", "grad:head.weight"):
        with pytest.raises(ModelError, match=r"differently from the module .* large samples"):
            proof.prove(*given[:2], _bent(given[2], name, 1.01), given[3])


def test_a_gradient_is_seen_where_the_module_is_certain_or_its_head_has_a_thousand_times_the_others() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    given = _to_prove(module, torch.zeros(2, 6), "classification")
    proof.prove(*given)
    for name in (f"grad:{k}" for k, _ in module.named_parameters()):
        with pytest.raises(ModelError, match=r"differently from the module .* large samples"):
            proof.prove(*given[:2], _bent(given[2], name, 1.01), given[3])


def test_rounding_at_random_moves_what_float32_rounds_and_nothing_else() -> None:
    x = torch.linspace(-9, 9, 1000).float().double()
    with Rounding(torch.Generator().manual_seed(0)):
        made, kept = [x.exp(), x.sigmoid(), x.clone().mul_(0.1)], [x.relu(), x.flip(0), x * 2, x.view(10, 100), 0 * x]
    for found, right in zip(made, [x.exp(), x.sigmoid(), x * 0.1], strict=True):
        assert torch.equal(found, found.float().double())
        assert 0 < ((found - right).abs() / right.abs().clamp(min=1e-9)).median() < 3 * rounding.EPS
    assert (made[1] - x.sigmoid()).abs()[:100].max() > 0.9 * rounding.EPS  # of one, as in ONNX Runtime
    for found, right in zip(kept, [x.relu(), x.flip(0), x * 2, x.view(10, 100), 0 * x], strict=True):
        assert torch.equal(found, right)


class _Centred(nn.Module):
    """Features less their mean over time before a batch-norm, as in audio: the running mean is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        logits: Tensor = self.head(self.norm(y - y.mean(2, keepdim=True)).relu().mean(2))
        return logits


def test_a_running_mean_of_zero_is_no_fault_and_one_percent_of_the_statistics_is() -> None:
    torch.manual_seed(0)
    given = _to_prove(_Centred(), torch.zeros(2, 2, 99), "classification")
    assert proof.prove(*given).statistic <= 1e-5
    with pytest.raises(ModelError, match=r"buffer 'norm.running_var' after a step differently"):
        proof.prove(*given[:2], _scaled(given[2], "new:norm.running_var", 1.01), given[3])


def test_a_statistic_or_gradient_that_is_only_rounding_is_allowed_no_share_of_the_largest() -> None:
    """The random roundings multiply such a tensor, which says nothing of how large it may be beside the others."""
    for kind in ("grad", "new"):
        true, own, rounded = (
            {f"{kind}:large": torch.ones(1), f"{kind}:small": torch.full((1,), small)} for small in (1e-8, 3e-8, 5e-8)
        )
        best = proof.Best()
        assert not best.add({k: t.numpy() for k, t in true.items()} | {f"{kind}:small": np.full(1, 0.05)}, own, true)
        best.allow(rounded, own, true)
        with pytest.raises(ModelError, match="'small'"):
            best.check(5)


class _OverSteps(nn.Module):
    """A layer on each of 2,048 steps, and the mean over them: its bias has the sum of 32,768 gradients of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x).relu().mean(1))
        return logits


def _scaled(train: ModelProto, name: str, factor: Any) -> ModelProto:
    """`train` with an output multiplied."""
    made = ModelProto.FromString(train.SerializeToString())
    for node in made.graph.node:
        node.output[:] = [f"{name}:right" if k == name else k for k in node.output]
    made.graph.initializer.append(from_array(np.asarray(factor, np.float32), "factor"))
    made.graph.node.append(make_node("Mul", [f"{name}:right", "factor"], [name]))
    return made


def test_a_long_sum_of_gradients_is_no_fault_and_one_percent_or_one_element_of_it_is() -> None:
    """ONNX Runtime sums one by one, PyTorch by halves: their errors differ by the length of the sum."""
    torch.manual_seed(1)
    given = _to_prove(_OverSteps(), torch.zeros(2, 2048, 3), "classification")
    proof.prove(*given)
    for name in ("grad:layer.bias", "grad:layer.weight"):
        one = np.ones(8 if name.endswith("bias") else (8, 3))
        one.flat[0] = 0.9
        for factor in (1.01, 0.0, one):
            with pytest.raises(ModelError, match=r"the gradient of 'layer.* differently from the module"):
                proof.prove(*given[:2], _scaled(given[2], name, factor), given[3])


def test_a_sum_is_rounded_by_its_terms_and_not_by_what_they_leave() -> None:
    x = torch.cat([torch.ones(3200), -torch.ones(3199)]).double()
    with Rounding(torch.Generator().manual_seed(0)):
        found = x.sum()
    assert abs(float(found) - 1) == pytest.approx(6399**2 / 16 * rounding.EPS, rel=1e-3)


class _Pointwise(nn.Module):
    """Norms of which each divides by a deviation of zero when the input is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8 if i else 1, 8, 1, bias=False), nn.BatchNorm2d(8)) for i in range(8)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = functional.relu6(part(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class _Deviations(nn.Module):
    """The mean and the deviation of a layer over seven steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        made: Tensor = self.head(torch.cat([y.mean(1), y.std(1)], 1))
        return made


def test_a_deviation_of_equal_steps_is_no_fault() -> None:
    """On zeros all steps are equal, so what moves the gradient of their deviation is the rounding of their mean."""
    assert _proved(_Deviations(), 7, 5).shown.gradient <= 1e-5


def test_norms_that_divide_rounding_errors_are_no_fault() -> None:
    assert _proved(_Pointwise(), 1, 7, 7).shown.output <= 1e-5


def test_the_proofs_values_let_every_layer_of_a_deep_network_reach_the_output() -> None:
    parts = [(nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for i in range(14)]
    net = nn.Sequential(*(layer for part in parts for layer in part), nn.Flatten(), nn.Linear(8 * 6 * 6, 3)).eval()
    values, buffers = draws.moved(net, torch.zeros(2, 3, 6, 6), torch.Generator().manual_seed(0))
    x = torch.randn(8, 3, 6, 6)

    def outputs() -> Tensor:
        made: Tensor = functional_call(net, values | buffers, (x,))
        return made.detach()

    right = outputs()
    for conv, _, _ in parts:
        hook = conv.register_forward_hook(lambda module, given, made: 1.01 * made)
        assert (outputs() - right).abs().max() > 1e-3 * right.abs().max()
        hook.remove()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.relu(x).sqrt(),
        lambda x: functional.relu(x).log().clamp(min=-5),
        lambda x: (1 / functional.relu(x)).clamp(max=5),
        lambda x: (x.detach().tanh() / functional.relu(x)).clamp(-5, 5),
        lambda x: functional.relu(x).rsqrt().clamp(max=5),
        lambda x: functional.relu(x).pow(-0.5).clamp(max=5),
    ],
)
def test_what_is_endless_at_zero_behind_a_relu_has_pytorchs_gradient_of_zero(
    function: Callable[[Tensor], Tensor],
) -> None:
    case = rows(function)
    assert _proved(case.make(), *case.sample).shown.gradient <= 1e-5


class _Noisy:
    """A witness whose rounding moves the gradient `by` so much of it in one draw in ten."""

    def __init__(self, by: float) -> None:
        self.draws, self.by, self.true = 0, by, {"loss": torch.ones(()), "grad:w": torch.ones(3)}

    def step(self, step: Step, wide: bool = False, rounding: Rounding | None = None) -> dict[str, Tensor]:
        self.draws += rounding is not None
        moved = rounding is not None and self.draws == 10
        return {k: t.double() * (1 + self.by if moved and k == "grad:w" else 1) for k, t in self.true.items()}


class _Off:
    """Graphs whose gradient is off `by` so much of it."""

    def __init__(self, by: float) -> None:
        self.by = by

    def step(self, step: Step) -> dict[str, Any]:
        return {"loss": np.ones((), np.float32), "grad:w": np.full(3, 1 + self.by, np.float32)}


@pytest.mark.parametrize(
    ("noise", "error", "right"), [(0.01, 0.01, True), (0.0, 0.01, False), (0.9, 4.0, False), (1.0, 1000.0, True)]
)
def test_noise_that_one_draw_in_ten_shows_excuses_four_times_its_size_and_any_error_where_no_digit_is_left(
    noise: float, error: float, right: bool
) -> None:
    witness: Any = _Noisy(noise)
    graphs: Any = _Off(error)
    step = Step({"w": torch.ones(3)}, {}, torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    if right:
        proved = proof._extreme(witness, graphs, step, witness.true, "large")
        assert witness.draws == 10
        assert ("grad:w" in proved) == (noise < 0.1)
        return
    with pytest.raises(ModelError, match="the gradient of 'w' differently"):
        proof._extreme(witness, graphs, step, witness.true, "large")
    assert witness.draws == proof.NUDGES
