"""The trainer contract: every backend gives the same numbers on the same bundle."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.backends import PARTS
from edge_client.bundle import Bundle
from edge_client.errors import BundleError, ConfigError
from edge_client.named_bundles import packaged
from edge_client.targets import Classification, Regression, Sequence, Target
from edge_client.training import open_trainer

torch = pytest.importorskip("torch")
from edge_bench import models  # noqa: E402
from edge_bench.testing import trainers  # noqa: E402
from edge_export import export_bundle  # noqa: E402
from exported import SHARED, spread  # noqa: E402
from exported import exported as exported_once  # noqa: E402
from torch import nn  # noqa: E402

EXECUTORCH = find_spec("executorch") is not None  # its programs take minutes to make, so it is no part of `dev`
BACKENDS = [name for name in PARTS if EXECUTORCH or name != "executorch"]
REFERENCE = "torch"


def with_programs(bundle: Bundle) -> Bundle:
    """The bundle with the parts of every backend tried here."""
    if not EXECUTORCH:
        return bundle
    from edge_export.executorch.parts import add_parts

    return add_parts(bundle)


def _avg_pool_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 2, groups=2, dilation=2, padding=1),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class _SensorLstm(nn.Module):
    """A linear layer at each time step, two LSTM layers, a linear layer on the last step; float windows [n, t, f]."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, 5)
        self.lstm = nn.LSTM(5, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.mix(x))
        return self.head(states[:, -1])


class _CharacterTagger(nn.Module):
    """A label for each character: embedding, LSTM, a linear layer on every step; token ids [n, t]."""

    def __init__(self, characters: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 5)
        self.lstm = nn.LSTM(5, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class _MeanOverTime(nn.Module):
    """A linear layer at each time step, then the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.each(x).mean(1)


def _sequence_loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.transpose(1, 2), y)


LOSSES: dict[type[Target], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Classification: nn.functional.cross_entropy,
    Sequence: _sequence_loss,
    Regression: nn.functional.mse_loss,
}
"""PyTorch's own loss for each target, the reference that every backend is compared with."""


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    target: Target
    tokens: int = 0  # number of different tokens; 0: float input

    def loss(self, outputs: torch.Tensor, y: np.ndarray) -> torch.Tensor:
        return LOSSES[type(self.target)](outputs, torch.from_numpy(y))


CASES = {
    **{name: Case(n.make, n.sample, Classification(classes=n.classes)) for name, n in SHARED.items()},
    "avg-pool cnn": Case(_avg_pool_cnn, (2, 14, 14), Classification(classes=4)),
    "sensor lstm": Case(lambda: _SensorLstm(9, 6, 4), (16, 9), Classification(classes=4)),
    "mean over time": Case(_MeanOverTime, (6, 5), Classification(classes=3)),
    "lstm": Case(lambda: models.NextCharacter(11, 6, 9), (4,), Sequence(steps=4, classes=11), tokens=11),
    "character tagger": Case(lambda: _CharacterTagger(11, 6, 4), (5,), Sequence(steps=5, classes=4), tokens=11),
    "regression mlp": Case(lambda: models.mlp(6, 8, 2), (6,), Regression(outputs=2)),
}


@dataclass(frozen=True)
class Exported:
    case: Case
    module: nn.Module
    bundle: Bundle


@pytest.fixture(scope="module", params=list(CASES))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    case = CASES[request.param]
    if request.param in SHARED:
        shared = exported_once(request.param)
        return Exported(case, shared.module, with_programs(shared.bundle))
    torch.manual_seed(5)
    module = case.make()
    spread(module)
    x = np.zeros((2, *case.sample), np.int64 if case.tokens else np.float32)
    folder = tmp_path_factory.mktemp("bundle") / "b"
    bundle = export_bundle(module, torch.from_numpy(x), folder, name="c", target=case.target)
    return Exported(case, module, with_programs(bundle))


def _batch(case: Case, bundle: Bundle, n: int) -> trainers.Samples:
    return trainers.samples(bundle.manifest, n, n, case.tokens)


@pytest.mark.parametrize("n", [32, 7, 2])
def test_loss_gradients_and_statistics_equal_eager_pytorch_whatever_the_batch_size(exported: Exported, n: int) -> None:
    x, y = _batch(exported.case, exported.bundle, n)
    module = exported.case.make().train()
    module.load_state_dict(exported.module.state_dict())
    loss = exported.case.loss(module(torch.from_numpy(x)), y)
    loss.backward()
    m, start = exported.bundle.manifest, exported.bundle.model()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    expected = np.concatenate([state[t.name].grad.numpy().ravel() for t in m.parameters])
    stats = np.concatenate([np.zeros(0, np.float32), *(state[t.name].numpy().ravel() for t in m.buffers)])
    for backend in BACKENDS:
        got = open_trainer(backend, exported.bundle).gradient(start.parameters, start.buffers, x, y)
        assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5), backend
        assert trainers.distance(got.parameters, expected) < 1e-4, backend
        rounding = 1e-6 * max(1.0, float(np.linalg.norm(expected)))  # of a bias under batch-norm, whose gradient is 0
        for t in m.parameters:  # no layer hides behind a larger one
            norm = np.linalg.norm(expected[t.span])
            error = np.linalg.norm(got.parameters[t.span] - expected[t.span])
            assert error < 1e-4 * norm + rounding, (backend, t.name)
        np.testing.assert_allclose(got.buffers, stats, rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_sample_leaves_the_running_variance_and_moves_the_running_mean(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.1), nn.Linear(2, 2))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
        module[0].bias.zero_()
        module[1].running_var.copy_(torch.tensor([3.0, 5.0]))
        module[1].bias.copy_(torch.tensor([0.5, -1.0]))
        module[2].weight.copy_(torch.eye(2))
        module[2].bias.zero_()
    target = Classification(classes=2)
    bundle = with_programs(export_bundle(module, torch.zeros(2, 3), tmp_path / "b", name="b", target=target))
    start, rows = bundle.model(), {t.name: t.span for t in bundle.manifest.parameters}
    x, y = np.array([[4.0, 1.0, 0.0]], np.float32), np.array([0])
    share = 1 / (1 + np.exp(1.5))  # of the other label: the logits are the batch-norm's bias
    for backend in BACKENDS:
        trainer = open_trainer(backend, bundle)
        got = trainer.gradient(start.parameters, start.buffers, x, y)
        np.testing.assert_allclose(got.buffers, [0.4, 0.2, 3.0, 5.0], rtol=1e-6, err_msg=backend)
        assert got.loss == pytest.approx(-np.log(1 - share)), backend
        np.testing.assert_allclose(got.parameters[rows["1.bias"]], [-share, share], rtol=1e-5)
        for name in ("0.weight", "1.weight"):  # one sample is its own mean: nothing before the bias matters
            np.testing.assert_allclose(got.parameters[rows[name]], 0.0, atol=1e-6)
        two = trainer.gradient(start.parameters, start.buffers, np.concatenate([x, 0 * x]), np.array([0, 1]))
        np.testing.assert_allclose(two.buffers, [0.2, 0.1, 0.9 * 3 + 0.1 * 8, 0.9 * 5 + 0.1 * 2], rtol=1e-6)


def test_logits_equal_eager_pytorch_in_evaluation_mode(exported: Exported) -> None:
    start = exported.bundle.model()
    for n in (1, 33):
        x, _ = _batch(exported.case, exported.bundle, n)
        with torch.no_grad():
            expected = exported.module.eval()(torch.from_numpy(x)).numpy()
        for backend in BACKENDS:
            got = open_trainer(backend, exported.bundle).logits(start.parameters, start.buffers, x)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_fifty_identical_sgd_steps_end_at_the_same_model_on_every_backend(exported: Exported) -> None:
    bundle, tokens = exported.bundle, exported.case.tokens
    expected = trainers.trained(open_trainer(REFERENCE, bundle), bundle, tokens)
    for backend in BACKENDS:
        trainers.ends_where(open_trainer(backend, bundle), expected, bundle, tokens)


def test_a_trainer_is_a_pure_function_and_opens_a_graph_only_when_it_needs_it(exported: Exported) -> None:
    for backend in BACKENDS:
        trainers.is_pure(open_trainer(backend, exported.bundle), exported.bundle, exported.case.tokens)


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_parameters_of_a_payload_which_cannot_be_changed_serve_as_any(exported: Exported) -> None:
    for backend in BACKENDS:
        trainers.takes_read_only(open_trainer(backend, exported.bundle), exported.bundle, exported.case.tokens)


def test_frozen_parameters_get_gradient_zero_and_damaged_parts_or_unknown_backends_are_refused(tmp_path: Path) -> None:
    module = models.mlp(5, 4, 3)
    free, target = {"2.weight", "2.bias"}, Classification(classes=3)
    bundle = export_bundle(module, torch.zeros(2, 5), tmp_path / "b", name="b", target=target, trainable=free)
    bundle = with_programs(bundle)
    start = bundle.model()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 5)).astype(np.float32), rng.integers(0, 3, 6)
    found = [open_trainer(b, bundle).gradient(start.parameters, start.buffers, x, y).parameters for b in BACKENDS]
    for t in bundle.manifest.parameters:
        assert t.trainable == t.name.startswith("2.")
        assert bool(found[0][t.span].any()) == t.trainable
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-5, atol=1e-7)
    with pytest.raises(ConfigError, match="'abacus'"):
        open_trainer("abacus", bundle)
    for part in bundle.manifest.parts.keys() - {"eval.onnx"}:
        (bundle.folder / part).write_bytes(b"not a graph")
    for backend in BACKENDS:
        with pytest.raises(BundleError, match="SHA-256"):
            open_trainer(backend, bundle).gradient(start.parameters, start.buffers, x, y)


def test_a_backend_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edge_client.training.torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = r"^training backend 'torch' needs torch, which is not installed; run: pip install 'maskfleet\[author\]'$"
    with pytest.raises(ConfigError, match=said):
        open_trainer("torch", Bundle.open(packaged()["digits"]))


def test_a_trainer_computes_on_as_many_threads_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    before, opened, open_session = torch.get_num_threads(), [], onnxruntime.InferenceSession

    def spy(graph: bytes, options: Any, **rest: Any) -> Any:
        opened.append((options.intra_op_num_threads, options.inter_op_num_threads))
        return open_session(graph, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    bundle = Bundle.open(packaged()["digits"])
    x = np.zeros((1, *bundle.manifest.input.shape), np.float32)
    start = bundle.model()
    try:
        for threads in (1, 2):
            trainer = open_trainer("onnxruntime", bundle, threads)
            trainer.logits(start.parameters, start.buffers, x)
            trainer.gradient(start.parameters, start.buffers, x, np.zeros(1, np.int64))
            open_trainer("torch", bundle, threads)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert opened == [(1, 1), (1, 1), (2, 1), (2, 1)]


def test_onnx_runtime_holds_no_activations_at_rest_and_no_second_block_for_them(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    bundle = export_bundle(network, torch.zeros(2, 6), tmp_path / "b", name="b", target=Classification(classes=3))
    trainer, m = open_trainer("onnxruntime", bundle), bundle.model()
    x, y = np.ones((4, 6), np.float32), np.zeros(4, np.int64)
    first = trainer.gradient(m.parameters, m.buffers, x, y).parameters.copy()
    train, logits = trainer._train[0], trainer._eval[0]
    assert not train.get_session_options().enable_mem_pattern
    assert not logits.get_session_options().enable_cpu_mem_arena
    held = weakref.ref(train)
    del train
    trainer.rest()
    gc.collect()
    assert held() is None
    assert np.array_equal(trainer.gradient(m.parameters, m.buffers, x, y).parameters, first)
