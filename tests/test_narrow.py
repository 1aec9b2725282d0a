"""A smaller network on the device: its tables, and both engines' gradients on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from channel_groups import between
from edge_kernels.channels import Place
from numpy_mlp import clusters, mlp, task

from edge_client.bundle import F32, Bundle, Init, Manifest, Tensor, views
from edge_client.errors import ConfigError
from edge_client.narrow import Channels, cuts, narrow
from edge_client.targets import Classification
from edge_client.training import Trainer, open_trainer
from edge_client.training.cut import cut, cut_graphs
from edge_client.training.narrowed import Embedded

torch = pytest.importorskip("torch")
from edge_export import export_bundle  # noqa: E402
from edge_export.group_trial import opened, unlike  # noqa: E402
from edge_export.groups import _without  # noqa: E402
from exported import SHARED, exported  # noqa: E402
from torch import Tensor as T  # noqa: E402
from torch import nn  # noqa: E402

BACKENDS = ["onnxruntime", "torch"]


def _avg_pool_cnn(a: int, b: int) -> nn.Sequential:
    """Average pools, whose backward repeats a gradient over a window, and a batch-norm between linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, a, 3, stride=2, dilation=2),
        nn.ReLU6(),
        nn.AvgPool2d(2),
        nn.Conv2d(a, b, 2, padding=1),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(b, 4),
        nn.BatchNorm1d(4),
        nn.Sigmoid(),
        nn.Linear(4, 5),
    )


def _depthwise_cnn(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, a, 3, stride=2),
        nn.BatchNorm2d(a),
        nn.ReLU6(),
        nn.Conv2d(a, a, 3, padding=1, groups=a),
        nn.BatchNorm2d(a),
        nn.ReLU6(),
        nn.Conv2d(a, b, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(b, 5),
    )


class _Recurrent(nn.Module):
    """An LSTM and a GRU on top."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(3, a, batch_first=True), nn.GRU(a, b, batch_first=True)
        self.last = nn.Linear(b, 5)

    def forward(self, x: T) -> T:
        steps, _ = self.second(self.first(x)[0])
        return self.last(steps[:, -1])


class _Padded(nn.Module):
    """A convolution of four groups, and a shortcut that adds channels of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parted = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1, groups=4)
        self.stem, self.wide, self.last = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 10, 3, padding=1), nn.Linear(10, 5)

    def forward(self, x: T) -> T:
        x = torch.relu(self.stem(torch.relu(self.parted(torch.relu(self.first(x))))))
        x = torch.relu(self.wide(x) + nn.functional.pad(x, (0, 0, 0, 0, 2, 2)))
        return self.last(x.mean((2, 3)))


def _both_ways() -> nn.Module:
    return nn.Sequential(_Last(nn.LSTM(3, 6, batch_first=True, bidirectional=True)), nn.Linear(12, 5))


class _Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: T) -> T:
        return self.layer(x)[0][:, -1]


def _weight_norm(a: int, b: int) -> nn.Sequential:
    """Weights as directions and lengths, in both of PyTorch's forms; a row that is cut has no direction."""
    first = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, a, 3))
    second = nn.utils.weight_norm(nn.Conv1d(a, b, 3))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(5 * b, 5))


class _GroupNorms(nn.Module):
    """A residual block whose layers have group norms of different parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.GroupNorm(4, 12), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(12, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.Sequential(nn.Conv2d(8, 12, 1), nn.GroupNorm(6, 12, affine=False))
        self.head = nn.Linear(12, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        h = self.stem(x)
        return self.head((h + self.up(self.deep(h))).mean((2, 3)))


class _Pools(nn.Module):
    """A slope for all channels, and states that a maximum, weights of attention and a fixed graph bring together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope, self.score = nn.Linear(3, 10), nn.PReLU(), nn.Linear(10, 1)
        self.second, self.head = nn.Linear(10, 8), nn.Linear(38, 5)
        self.register_buffer("joints", torch.rand(6, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: T) -> T:
        """Logits."""
        h = self.slope(self.first(x))
        weights = self.score(h).softmax(1)
        parts = [(weights * h).sum(1), torch.max(h, 1)[0], torch.bmm(weights.transpose(1, 2), h).squeeze(1)]
        return self.head(torch.cat([*parts, (self.joints @ self.second(h)).relu().mean(1)], 1))


class _Joints(nn.Module):
    """Sums over parts of channels and over joints at once, with a learned graph of joints."""

    def __init__(self) -> None:
        super().__init__()
        self.joints = nn.Parameter(torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0)))
        self.first, self.second, self.head = nn.Conv1d(2, 24, 1), nn.Conv1d(8, 6, 1), nn.Linear(6, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        parts = self.first(x).unflatten(1, (3, 8))
        return self.head(self.second(torch.einsum("nkcv,kvw->ncw", parts, self.joints).relu()).relu().mean(2))


class _Cosine(nn.Module):
    """Logits are cosines of the samples' features and learned prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 6)
        self.prototypes = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: T) -> T:
        """Logits."""
        z = self.second(self.first(x).relu())
        return 5 * nn.functional.cosine_similarity(z[:, None], self.prototypes[None], dim=-1)


class _Standardised(nn.Module):
    """A convolution whose filters have the mean 0 and the variance 1, and a mixture of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 8, 3), nn.Linear(6, 5)
        self.kernels, self.share = nn.Parameter(torch.randn(3, 6, 8, 3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: T) -> T:
        """Logits."""
        w = self.first.weight
        w = (w - w.mean((1, 2, 3), True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        x = nn.functional.conv2d(x, w, self.first.bias).relu()
        mixed = (self.kernels * self.share.softmax(0)[:, None, None, None, None]).sum(0)
        return self.head(nn.functional.conv2d(x, mixed).relu().mean((2, 3)))


class _GraphAttention(nn.Module):
    """Heads whose scores are sums over their entries, weighed by a parameter of each head and entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 8, bias=False), nn.Linear(8, 5)
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: T) -> T:
        """Logits."""
        z = self.layer(x).unflatten(2, (4, 2))
        scores = (z * self.left).sum(-1)[:, :, None] + (z * self.right).sum(-1)[:, None]
        mixed = torch.einsum("nijh,njhd->nihd", nn.functional.leaky_relu(scores).softmax(2), z)
        return self.head(mixed.flatten(2).relu().mean(1))


class _Involution(nn.Module):
    """Windows by a table of their places, weighed by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.reduced, self.weights = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 9, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        x = self.stem(x).relu()
        windows = nn.functional.unfold(x, 3, padding=1).unflatten(1, (4, 9))
        return self.head((windows * self.weights(self.reduced(x)).flatten(2)[:, None]).sum(2).mean(2))


class _Patches(nn.Module):
    """A layer on overlapping patches, and their mean: its gradient is spread over as many as the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.each, self.head = nn.Unfold(3, padding=1), nn.Linear(18, 8), nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        return self.head(self.each(self.patches(x).transpose(1, 2)).relu().mean(1))


class _Rotary(nn.Module):
    """Causal attention of heads whose entries are rotated by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12, bias=False) for _ in range(4))
        self.first, self.head = nn.Linear(3, 12), nn.Linear(72, 5)
        turns = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def turned(self, x: T) -> T:
        """Queries or keys [n, heads, steps, entries], each pair of entries rotated."""
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: T) -> T:
        """Logits."""
        x = nn.functional.layer_norm(self.first(x), (12,))
        q, k, v = (m(x).view(-1, 6, 3, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.head((x + self.out(y.transpose(1, 2).reshape(-1, 6, 12))).flatten(1))


class _Placed(nn.Module):
    """Heads whose queries and keys stand beside the place of their step."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(3, 12), nn.Linear(3, 12), nn.Linear(3, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        q, k, v = (layer(x).unflatten(2, (4, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = x.unsqueeze(1).expand(-1, 4, -1, -1)
        w = (torch.cat([q, place], 3) @ torch.cat([k, place], 3).transpose(2, 3)).softmax(3)
        return self.head((w @ v).transpose(1, 2).flatten(2).relu().mean(1))


class _PaddedSteps(nn.Module):
    """A transformer that reads no step whose first value is high."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 12), nn.Linear(12, 5)
        layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: T) -> T:
        """Logits."""
        return self.head(self.encoder(self.first(x), src_key_padding_mask=x[..., 0] > 1).mean(1))


class _Embedded(nn.Module):
    """Rows of two embeddings, of which a recurrent layer and a convolution read the entries."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.units = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True)
        self.letters, self.wide = nn.Embedding(9, 8), nn.Conv1d(8, 4, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        ids = (4 * x + 4).long().clamp(0, 8)
        last = self.units(self.words(ids[..., 0]))[0][:, -1]
        return self.head(torch.cat([last, self.wide(self.letters(ids[..., 1]).transpose(1, 2)).amax(2)], 1))


class _Cells(nn.Module):
    """Steps one by one, which start from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(3, 6), nn.GRUCell(6, 8), nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        state, h = None, None
        for step in x.unbind(1):
            state = self.first(step, state)
            h = self.second(state[0], h)
        return self.head(h)


class _Embedding(nn.Module):
    """Rows of length one, and their distances from prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 5)
        self.prototypes = nn.Parameter(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: T) -> T:
        """Logits."""
        z = self.second(nn.functional.normalize(self.first(x)))
        near = (z.unsqueeze(1) - self.prototypes).square().sum(2)
        return self.head(z) - near.sum(1, keepdim=True)


class _Mirrored(nn.Module):
    """Borders that repeat the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1, padding_mode="replicate")
        self.second = nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect")
        self.head = nn.Linear(6, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


class _Enlarged(nn.Module):
    """Channels that become pixels, four of each channel that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 24, 1), nn.Conv2d(6, 8, 3), nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        x = nn.functional.pixel_shuffle(self.first(x), 2).relu()
        return self.head(self.second(x).relu().mean((2, 3)))


class _Shuffled(nn.Module):
    """Half of the channels pass by a layer, and a shuffle mixes both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Conv2d(2, 12, 3), nn.Conv2d(6, 6, 1), nn.Linear(12, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        a, b = self.first(x).relu().chunk(2, 1)
        x = torch.cat([a, self.layer(b).relu()], 1).unflatten(1, (2, 6)).transpose(1, 2).flatten(1, 2)
        return self.head(x.mean((2, 3)))


class _Sums(nn.Module):
    """Scores of two layers: a product that sums what an activation makes of their channels."""

    def __init__(self, activation: Callable[[T], T]) -> None:
        super().__init__()
        self.activation = (activation,)
        self.q, self.k, self.head = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(36, 5)

    def forward(self, x: T) -> T:
        """Logits."""
        q, k = (self.activation[0](layer(x)) for layer in (self.q, self.k))
        return self.head((q @ k.transpose(1, 2)).flatten(1))


def bundle_of(module: nn.Module, sample: tuple[int, ...], folder: Path, torch_part: bool = False) -> Bundle:
    """Of five classes; without PyTorch's programs, which take as long to make as all the rest."""
    target = Classification(classes=5)
    return export_bundle(module, torch.zeros(2, *sample), folder / "b", name="b", target=target, torch_part=torch_part)


Make = Callable[[int, int], nn.Module]
CHOICES = {"half": (2, 1), "one channel": (99, 0), "only the second layer": (1, 3)}  # every n-th channel from


OWN: dict[str, tuple[Make, tuple[int, ...]]] = {
    "average pool cnn": (_avg_pool_cnn, (2, 14, 14)),
    "depthwise cnn": (_depthwise_cnn, (2, 9, 9)),
    "recurrent": (_Recurrent, (6, 3)),
    "weight norm": (_weight_norm, (2, 9)),
}


@pytest.fixture(scope="module", params=[*SHARED, *OWN])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Make, Bundle]:
    if request.param in SHARED:
        return SHARED[request.param].of_size, exported(request.param).bundle
    make, sample = OWN[request.param]
    module = make(10, 8)
    if isinstance(module, nn.Sequential) and make is _avg_pool_cnn:
        module[0].requires_grad_(False)  # a frozen layer is cut as any other
    bundle = bundle_of(module, sample, tmp_path_factory.mktemp("bundle"), torch_part=True)
    assert [g.size for g in bundle.manifest.groups][:2] == [10, 8]
    return make, bundle


def _choice(m: Manifest, name: str) -> Channels:
    first, second = m.groups[:2]
    if name == "only the second layer":
        return {second.name: np.array([0, 2, second.size - 1])}
    step, start = CHOICES[name]
    return {g.name: np.arange(g.size)[start::step] for g in (first, second)}


def _random_values(m: Manifest) -> tuple[F32, F32]:
    rng = np.random.default_rng(7)
    return (0.3 * rng.standard_normal(m.d)).astype(np.float32), rng.uniform(0.5, 1.5, m.buffers_d).astype(np.float32)


def _batch(m: Manifest, n: int) -> tuple[F32, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, *m.input.shape)).astype(np.float32), rng.integers(0, 5, n)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_narrow_trainer_gives_the_whole_one_s_numbers_at_zeros_whatever_the_batch_size(
    case: tuple[Make, Bundle], choice: str
) -> None:
    bundle, m = case[1], case[1].manifest
    kept = _choice(m, choice)
    small = narrow(m, kept)
    parameters, buffers = _random_values(m)
    zeroed, cleared = np.zeros_like(parameters), np.zeros_like(buffers)
    zeroed[small.parameters], cleared[small.buffers] = parameters[small.parameters], buffers[small.buffers]
    own = parameters[small.parameters], buffers[small.buffers]
    for backend in BACKENDS:
        whole = open_trainer(backend, bundle)
        trainer = whole.narrow(kept)
        assert trainer.manifest == small.manifest
        for n in (1, 5, 16):
            x, y = _batch(m, n)
            expected, got = whole.gradient(zeroed, cleared, x, y), trainer.gradient(*own, x, y)
            assert got.loss == pytest.approx(expected.loss, rel=1e-6)
            scale = np.abs(expected.parameters).max()
            np.testing.assert_allclose(got.parameters, expected.parameters[small.parameters], rtol=0, atol=2e-5 * scale)
            np.testing.assert_allclose(got.buffers, expected.buffers[small.buffers], rtol=1e-6, atol=1e-6)
            logits = whole.logits(zeroed, cleared, x)
            np.testing.assert_allclose(trainer.logits(*own, x), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "sample", "groups"),
    [
        (_Padded, (2, 6, 6), {"first": 4, "stem": 6, "wide": 4}),
        (_both_ways, (6, 3), {"0.layer": 6}),
        (_GroupNorms, (2, 6, 6), {"stem.0": 2, "deep.0": 2}),
        (_Enlarged, (2, 6, 6), {"first": 6, "second": 8}),
        (_Shuffled, (2, 6, 6), {"first.weight:0": 6, "first.weight:6": 6, "layer": 6}),
        (_Embedded, (6, 2), {"words": 6, "units": 5, "letters": 8, "wide": 4}),
        (_Cells, (6, 3), {"first": 6, "second": 8}),
        (_Embedding, (3,), {"first": 8, "second": 6}),
        (_Mirrored, (2, 6, 6), {"first": 8, "second": 6}),
        (_Pools, (6, 3), {"first": 10, "second": 8}),
        (_Joints, (2, 6), {"first": 8, "second": 6}),
        (_Cosine, (3,), {"first": 8, "second": 6}),
        (_Standardised, (2, 6, 6), {"first": 8, "kernels": 6}),
        (_GraphAttention, (6, 3), {"layer": 4}),
        (_Involution, (2, 6, 6), {"reduced": 6}),
        (_Patches, (2, 6, 6), {"each": 8}),
        (_Rotary, (6, 3), {"q": 3}),
        (_Placed, (6, 3), {"q": 4}),
        (_PaddedSteps, (6, 3), {"encoder.layers.0.self_attn": 4, "encoder.layers.0.linear1": 16}),
    ],
)
def test_every_group_of_these_networks_can_be_cut(
    make: Callable[[], nn.Module], sample: tuple[int, ...], groups: dict[str, int], tmp_path: Path
) -> None:
    bundle = bundle_of(make(), sample, tmp_path)
    m, rng = bundle.manifest, np.random.default_rng(0)
    assert {g.name: g.size for g in m.groups} == groups
    whole = open_trainer("onnxruntime", bundle)
    for _ in range(3):
        kept = {g.name: np.sort(rng.choice(g.size, rng.integers(1, g.size), replace=False)) for g in m.groups}
        got, expected = whole.narrow(kept), Embedded(whole, kept)
        parameters, buffers = _random_values(got.manifest)
        x, y = _batch(m, 5)
        gradient = expected.gradient(parameters, buffers, x, y)
        made = got.gradient(parameters, buffers, x, y)
        assert made.loss == pytest.approx(gradient.loss, rel=1e-6)
        scale = np.abs(gradient.parameters).max()
        np.testing.assert_allclose(made.parameters, gradient.parameters, rtol=0, atol=1e-5 * scale)
        logits = expected.logits(parameters, buffers, x)
        np.testing.assert_allclose(got.logits(parameters, buffers, x), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "groups"),
    [(torch.tanh, {"q": 8}), (torch.relu, {"q": 8}), (nn.functional.softplus, {}), (torch.sigmoid, {})],
)
def test_channels_whose_sum_counts_what_they_emit_at_zero_form_no_group(
    activation: Callable[[T], T], groups: dict[str, int], tmp_path: Path
) -> None:
    m = bundle_of(_Sums(activation), (6, 3), tmp_path).manifest
    assert {g.name: g.size for g in m.groups} == groups
    assert groups or m.stopped == ("q: a sum over its channels counts what they emit at zero",)


class _Jumping:
    """A session whose gradients are off in some of its runs, as where a deep network's activations turn."""

    def __init__(self, graph: onnx.ModelProto, runs: set[int]) -> None:
        self.session, self.runs, self.count = opened(graph), runs, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, outputs: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
        found, self.count = self.session.run(outputs, given), self.count + 1
        off = [name.startswith("grad:") and self.count in self.runs for name in outputs]
        return [1.1 * value if wrong else value for value, wrong in zip(found, off, strict=True)]


def test_a_gradient_that_jumps_in_one_draw_of_several_drops_no_group() -> None:
    bundle = exported("mlp").bundle
    m, graph = bundle.manifest, onnx.load(bundle.part("train.onnx"))
    assert not unlike(m, graph, _Jumping(graph, {5}), m.groups)  # type: ignore[arg-type]
    assert "at zero" in unlike(m, graph, _Jumping(graph, {2, 5}), m.groups)  # type: ignore[arg-type]


class _LinearAttention(nn.Module):
    """Weights that are products of elu + 1, which is 1 at zero, over their sums: most of the error cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(3, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        q, k = (nn.functional.elu(layer(x)) + 1 for layer in (self.q, self.k))
        w = q @ k.transpose(1, 2)
        out: T = self.head((w / w.sum(2, keepdim=True) @ self.v(x)).relu().mean(1))
        return out


class _InTraining(nn.Module):
    """A factor that a step alone has: the evaluation graph knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        h = self.a(x)
        y: T = self.head(h.relu())
        return y * (h.sigmoid() * h.sigmoid()).sum(1, keepdim=True) if self.training else y


class _Decay(nn.Module):
    """A sum that counts channels at zero, and a parameter of which only values below 1 give numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.decay = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, x: T) -> T:
        h = self.a(x)
        y: T = self.head(h.relu()) * (1 - self.decay * self.decay).sqrt()
        return y * (h.sigmoid() * h.sigmoid()).sum(1, keepdim=True)


class _Shifted(nn.Module):
    """A sum over channels that counts dead ones where a sample is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 8), nn.Linear(3, 5)

    def forward(self, x: T) -> T:
        h = self.a(x) + (x[:, :1] - 6).relu()
        return self.head(x) * (h * h).sum(1, keepdim=True)


class _Crowded(nn.Module):
    """A sum over heads that counts what stands beside dead ones where a sample is large."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(3, 12), nn.Linear(3, 12), nn.Linear(3, 12), nn.Linear(3, 5)

    def forward(self, x: T) -> T:
        q, k, v = (layer(x).unflatten(2, (4, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        beside = (x - 6).relu().unsqueeze(1).expand(-1, 4, -1, -1)
        h = (q @ k.transpose(2, 3)).softmax(3) @ torch.cat([v, beside], 3)
        return self.head(x.mean(1)) * (h * h).sum((1, 2, 3)).unsqueeze(1)


@pytest.mark.parametrize(
    ("make", "sample", "gone"),
    [
        (_LinearAttention, (6, 3), "q"),
        (_InTraining, (3,), "a"),
        (_Decay, (3,), "a"),
        (_Shifted, (3,), "a"),
        (_Crowded, (6, 3), "q"),
    ],
)
def test_an_error_that_is_small_or_needs_training_or_large_samples_or_stands_beside_no_number_is_found(
    make: Callable[[], nn.Module], sample: tuple[int, ...], gone: str, tmp_path: Path
) -> None:
    m = bundle_of(make(), sample, tmp_path).manifest
    assert gone not in {g.name for g in m.groups}
    assert f"{gone}: a sum over its channels counts what they emit at zero" in m.stopped


class _Scaled(nn.Module):
    """A parameter without axes, as CLIP's scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: T) -> T:
        y: T = self.head(self.a(x).relu()) * self.scale.exp()
        return y


def test_a_parameter_without_axes_takes_no_group_away(tmp_path: Path) -> None:
    m = bundle_of(_Scaled(), (3,), tmp_path).manifest
    assert ({g.name: g.size for g in m.groups}, m.stopped) == ({"a": 8}, ())


def test_a_group_whose_cut_graph_would_run_batches_of_one_size_alone_is_named_instead(tmp_path: Path) -> None:
    class Filters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Conv2d(1, 8, 1), nn.Linear(8, 5)
            self.register_buffer("bank", torch.rand(6, 4, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: T) -> T:
            return self.head((self.a(x).transpose(2, 3) @ self.bank).relu().mean((2, 3)))

    m = bundle_of(Filters(), (1, 6, 7), tmp_path).manifest
    assert (m.groups, m.stopped) == ((), ("a: an operator merges them with the samples of a batch",))


class _Dropping(nn.Module):
    """Dropout of entries, of channels and of an attention's weights, which hold samples and heads in one axis."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.wide, self.heads = nn.Conv1d(3, 8, 1), nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=True)
        self.hidden, self.head, self.weights = nn.Linear(8, 6), nn.Linear(6, 5), weights

    def forward(self, x: T) -> T:
        y = nn.functional.dropout1d(self.wide(x.transpose(1, 2)), 0.2, self.training).transpose(1, 2)
        y = self.heads(y, y, y, need_weights=self.weights)[0]
        return self.head(nn.functional.dropout(self.hidden(y).relu(), 0.4, self.training).mean(1))


def test_a_narrow_step_drops_what_the_whole_one_drops(tmp_path: Path) -> None:
    bundle = bundle_of(_Dropping(weights=False), (6, 3), tmp_path)
    m = bundle.manifest
    assert m.draws
    assert {g.name: g.size for g in m.groups} == {"wide": 8, "heads": 4, "heads.out_proj": 8, "hidden": 6}
    kept, whole = _choice(m, "half"), open_trainer("onnxruntime", bundle)
    parameters, buffers = _random_values(narrow(m, kept).manifest)
    for n, key in ((5, 3), (1, 2**31 - 2)):
        expected = Embedded(whole, kept).gradient(parameters, buffers, *_batch(m, n), key)
        got = whole.narrow(kept).gradient(parameters, buffers, *_batch(m, n), key)
        assert got.loss == pytest.approx(expected.loss, rel=1e-6)
        scale = np.abs(expected.parameters).max()
        np.testing.assert_allclose(got.parameters, expected.parameters, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("last", [nn.Dropout(0.2, inplace=True), nn.ReLU(inplace=True)], ids=["dropout", "relu"])
def test_channels_are_followed_through_a_change_in_place_of_flattened_features(tmp_path: Path, last: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last, nn.Linear(4, 3))
    m = export_bundle(
        net, torch.zeros(2, 1, 5, 5), tmp_path / "b", name="b", target={"kind": "classification"}, torch_part=False
    ).manifest
    assert ({g.name: g.size for g in m.groups}, m.stopped) == ({"0": 4}, ())


def test_heads_whose_weights_are_dropped_beside_the_samples_form_no_group(tmp_path: Path) -> None:
    """Which weights are dropped follows from the number of heads there; a narrow step did not run."""
    m = bundle_of(_Dropping(weights=True), (6, 3), tmp_path).manifest
    assert {g.name: g.size for g in m.groups} == {"wide": 8, "heads.out_proj": 8, "hidden": 6}
    assert m.stopped == ("heads: an operator merges them with the samples of a batch",)


def test_of_two_groups_that_only_together_have_a_fault_the_second_is_left_out() -> None:
    first, second, third = (between(4, name, f"{name}.read") for name in "abc")
    stopped: list[str] = []
    kept = _without(lambda g: "why" if first in g and second in g else "", (first, second, third), stopped)
    assert (kept, stopped) == ((first, third), ["b: why"])


def test_a_group_of_which_a_graph_cannot_lose_all_but_one_channel_is_named_instead(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(3, 8), nn.Linear(8, 5)

        def forward(self, x: T) -> T:
            p, q = self.a(x).chunk(2, 1)
            return self.head(torch.cat([p.relu(), q.tanh()], 1))

    m = bundle_of(Halves(), (3,), tmp_path).manifest
    assert (m.groups, len(m.stopped)) == ((), 1)
    assert "loses all its channels" in m.stopped[0]


def test_a_narrow_trainer_gives_the_numbers_of_pytorch_s_own_module_of_that_size(case: tuple[Make, Bundle]) -> None:
    make, bundle = case
    m = bundle.manifest
    small = narrow(m, _choice(m, "half"))
    module = make(*(g.size for g in small.manifest.groups[:2])).train()
    parameters, buffers = _random_values(small.manifest)
    state = {**views(small.manifest.parameters, parameters), **views(small.manifest.buffers, buffers)}
    module.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    x, y = _batch(m, 6)
    loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for backend in BACKENDS:
        got = open_trainer(backend, bundle).narrow(_choice(m, "half")).gradient(parameters, buffers, x, y)
        assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, gradient in views(small.manifest.parameters, got.parameters).items():
            trainable = small.manifest.tensors[name].trainable
            expected = tensors[name].grad.numpy() if trainable else np.zeros_like(gradient)
            np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=5e-6)
        for name, statistic in views(small.manifest.buffers, got.buffers).items():
            np.testing.assert_allclose(statistic, tensors[name].numpy(), rtol=1e-5, atol=1e-6)


def test_the_cut_graphs_are_valid_onnx_with_the_smaller_sizes_everywhere(case: tuple[Make, Bundle]) -> None:
    bundle, m = case[1], case[1].manifest
    made = cut_graphs(bundle, _choice(m, "half"), ("train.onnx", "eval.onnx"))
    shapes = {t.name: list(t.shape) for t in (*made.manifest.parameters, *made.manifest.buffers)}
    for name, data in made.graphs.items():
        onnx.checker.check_model(data, full_check=True)
        graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(data), strict_mode=True, data_prop=True).graph
        found = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)}
        assert found == found | shapes
        if name == "train.onnx":
            assert found == found | {f"grad:{t.name}": list(t.shape) for t in made.manifest.parameters if t.trainable}
            assert found == found | {f"new:{t.name}": list(t.shape) for t in made.manifest.buffers}


def test_narrowing_twice_is_narrowing_once_by_the_channels_of_both(case: tuple[Make, Bundle]) -> None:
    bundle, m = case[1], case[1].manifest
    once = {g.name: np.arange(g.size)[::2] for g in m.groups}
    twice = {name: np.arange(len(channels))[1:] for name, channels in once.items()}
    both = {name: channels[1:] for name, channels in once.items()}
    first, direct = narrow(m, once), narrow(m, both)
    second = narrow(first.manifest, twice)
    np.testing.assert_array_equal(first.parameters[second.parameters], direct.parameters)
    np.testing.assert_array_equal(first.buffers[second.buffers], direct.buffers)
    parameters, buffers = _random_values(direct.manifest)
    x, y = _batch(m, 4)
    for backend in BACKENDS:
        whole = open_trainer(backend, bundle)
        expected = whole.narrow(both).gradient(parameters, buffers, x, y).parameters.copy()
        got = whole.narrow(once).narrow(twice).gradient(parameters, buffers, x, y).parameters
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def _two_layers() -> Manifest:
    m = mlp(3, 4, 2)
    group = between(4, "0.w", "1.w", bias="0.b", name="0")
    return m.model_copy(update={"groups": (group,)})


def test_the_places_of_a_narrow_network_are_the_rows_and_slices_of_its_channels() -> None:
    small = narrow(_two_layers(), {"0": np.array([1, 3])})
    # 0.w [4, 3] at 0, 0.b [4] at 12, 1.w [2, 4] at 16, 1.b [2] at 24
    assert small.parameters.tolist() == [3, 4, 5, 9, 10, 11, 13, 15, 17, 19, 21, 23, 24, 25]
    assert [(t.name, t.shape, t.offset) for t in small.manifest.parameters] == [
        ("0.w", (2, 3), 0),
        ("0.b", (2,), 6),
        ("1.w", (2, 2), 8),
        ("1.b", (2,), 12),
    ]
    assert small.manifest.groups[0].size == 2
    assert Manifest.model_validate_json(small.manifest.to_bytes()) == small.manifest


@pytest.mark.parametrize("channels", [[], [3, 1], [1, 1], [-1, 2], [0, 4]])
def test_channels_that_are_none_unordered_or_unknown_are_refused(channels: list[int]) -> None:
    with pytest.raises(ConfigError, match="at least one of its 4 channels, in ascending order"):
        narrow(_two_layers(), {"0": np.array(channels, np.intp)})
    with pytest.raises(ConfigError, match="no channel group 'z'"):
        narrow(_two_layers(), {"z": np.array([0])})


def test_groups_whose_places_do_not_fit_are_refused() -> None:
    m = _two_layers()
    (group,) = m.groups
    for bad in (Place("1.w", 1, "reads", repeat=2), Place("1.w", 2, "reads"), Place("z", 0, "makes")):
        wrong = replace(group, places=(*group.places, bad))
        with pytest.raises(ConfigError, match=f"tensor '{bad.tensor}' with shape .* has no such entries of axis"):
            narrow(m.model_copy(update={"groups": (wrong,)}), {"0": np.array([1])})


def test_two_groups_of_one_name_are_refused() -> None:
    m = _two_layers()
    with pytest.raises(ValueError, match="two channel groups have the same name"):
        Manifest.model_validate_json(m.model_copy(update={"groups": m.groups * 2}).model_dump_json())


def test_two_groups_may_share_an_axis_and_a_smaller_group_knows_its_places_there() -> None:
    """A layer reads the outputs of two others side by side."""
    a, b = (between(2, f"{k}.w", "c.w", name=k) for k in "ab")
    b = replace(b, places=(b.places[0], Place("c.w", 1, "reads", start=2)))
    rows, end = [], 0
    for name, shape in (("a.w", (2, 3)), ("b.w", (2, 3)), ("c.w", (1, 4))):
        rows.append(Tensor(name=name, shape=shape, offset=end, init=Init(kind="constant", scale=0.0)))
        end += rows[-1].size
    m = _two_layers().model_copy(update={"parameters": tuple(rows), "layers": (), "groups": (a, b)})
    small = narrow(m, {"a": np.array([1]), "b": np.array([0])})
    assert small.parameters.tolist() == [3, 4, 5, 6, 7, 8, 13, 14]
    assert [g.places[-1].of(g.size).tolist() for g in small.manifest.groups] == [[[0]], [[1]]]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([("CumSum", ["h", "one"], ["logits"])], "^CumSum is not an operator"),
        ([("LogSoftmax", ["h"], ["logits"])], "works along the axis of the channels"),
        ([("ReduceMean", ["h"], ["logits"])], "works along the axis of the channels"),
        ([("MatMul", ["h", "w2"], ["logits"])], "joins values of which different channels stay"),
        ([("Add", ["h", "w3"], ["logits"])], "output 'logits' would lose channels"),
        ([("Shape", ["h"], ["s"]), ("Cast", ["s"], ["logits"])], "computes with the number of channels"),
        ([("Relu", ["h"], ["logits"])], "output 'logits' would lose channels"),
    ],
)
def test_a_graph_that_mixes_the_channels_is_refused_with_the_node_and_the_reason(
    nodes: list[tuple[str, list[str], list[str]]], why: str
) -> None:
    floats, h = onnx.TensorProto.FLOAT, onnx.helper
    made = [h.make_node("Gemm", ["x", "w"], ["h"], transB=1)]
    made += [h.make_node(op, reads, gives, **({"to": floats} if op == "Cast" else {})) for op, reads, gives in nodes]
    inputs = [
        h.make_tensor_value_info(n, floats, s)
        for n, s in (("x", ["n", 3]), ("w", [4, 3]), ("w2", [4, 2]), ("w3", [1, 4]))
    ]
    one = onnx.numpy_helper.from_array(np.array(1), "one")
    graph = h.make_graph(made, "g", inputs, [h.make_tensor_value_info("logits", floats, None)], [one])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=10)
    with pytest.raises(ConfigError, match=why):
        cut(model, (3,), {"w": (np.array([True, False, True, True]), None)})


def test_equal_channels_give_the_same_trainer_and_all_channels_the_whole_one(case: tuple[Make, Bundle]) -> None:
    bundle, m = case[1], case[1].manifest
    for backend in BACKENDS:
        whole = open_trainer(backend, bundle)
        made = whole.narrow(_choice(m, "half"))
        assert whole.narrow(_choice(m, "half")) is made
        assert whole.narrow(_choice(m, "one channel")) is not made
        assert whole.narrow({g.name: np.arange(g.size) for g in m.groups}) is whole
        assert whole.narrow({}) is whole


def test_a_trainer_holds_only_its_last_narrow_ones(case: tuple[Make, Bundle]) -> None:
    whole: Trainer = open_trainer("torch", case[1])
    g = case[1].manifest.groups[0]
    first = whole.narrow({g.name: np.array([0])})
    for i in range(7):
        whole.narrow({g.name: np.array([0, i + 1 if i < 5 else 1, *([] if i < 5 else [i - 2])])[: 2 + i // 5]})
        assert whole.narrow({g.name: np.array([0])}) is first  # used again and again
    for i in range(8):
        whole.narrow({g.name: np.array([i % 4, 4 + i // 4])})
    assert whole.narrow({g.name: np.array([0])}) is not first


def test_a_narrow_task_has_the_same_batches_and_the_smaller_model() -> None:
    m = _two_layers()
    t = task(m, data=clusters(m, 1))
    kept: Channels = {"0": np.array([0, 2])}
    small, places = t.narrow(kept), narrow(m, kept)
    assert small.assignment.model.manifest == small.trainer.manifest == places.manifest
    np.testing.assert_array_equal(small.assignment.model.parameters, t.assignment.model.parameters[places.parameters])
    assert (small.secret, small.assignment.device, small.assignment.round) == (t.secret, "a", 1)
    for a, b in zip(t.batches(2, 16), small.batches(2, 16), strict=True):
        np.testing.assert_array_equal(a.x, b.x)
        np.testing.assert_array_equal(a.y, b.y)
    zeroed = np.zeros(m.d, np.float32)
    zeroed[places.parameters] = small.assignment.model.parameters
    batch = next(t.batches(1, 16))
    none = np.zeros(0, np.float32)
    expected = t.gradient(zeroed, none, batch).parameters[places.parameters]
    got = small.gradient(small.assignment.model.parameters, none, batch).parameters
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_tensor_that_no_cut_names_keeps_its_place_in_order() -> None:
    m = _two_layers()
    extra = Tensor(name="z", shape=(2,), offset=m.d, init=Init(kind="constant", scale=0.0))
    m = m.model_copy(update={"parameters": (*m.parameters, extra)})
    assert set(cuts(m, {"0": np.array([1])})) == {"0.w", "0.b", "1.w"}
    assert narrow(m, {"0": np.array([1])}).parameters[-2:].tolist() == [m.d - 2, m.d - 1]
