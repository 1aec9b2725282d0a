"""What a model predicts: its labels are checked, its outputs scored, its loss exported; third parties add a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequential_bundle import small_manifest

from edge_client.bundle import Bundle, Manifest, parse_manifest
from edge_client.compaction.personal import write_personal
from edge_client.data import DeviceData, check
from edge_client.device.local import run_round
from edge_client.equality import TOLERANCE
from edge_client.errors import BundleError, CompactionError, DataError, ModelError
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.payload import Payload
from edge_client.targets import LEFT_OUT, WORST, Classification, Regression, Sequence, Target
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import open_trainer
from edge_client.training.sgd import Sgd

TARGETS: list[Target] = [Classification(classes=3), Sequence(steps=4, classes=3), Regression(outputs=2)]
BACKENDS = ["onnxruntime", "torch"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.kind)
def test_a_target_survives_the_manifest_s_json(target: Target) -> None:
    manifest = small_manifest(target=target)
    again = parse_manifest(manifest.to_bytes())
    assert again.target == target
    assert type(again.target) is type(target)
    assert again == manifest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"classification"', b'"astrology"', "there is no target 'astrology' here, only .*'regression'"),
        (b'"kind": "classification",', b"", "there is no target None here"),
        (b'"classes": 2', b'"classes": 1', "target.classes = 1"),
        (b'"classes": 2', b'"classes": 1e99', "target.classes"),
        (b'"cross_entropy"', b'"guess"', "target.loss = 'guess'"),
        (b'"classes": 2', b'"classes": 2, "steps": 3', "target.steps"),
    ],
)
def test_a_manifest_with_an_unusable_target_is_refused_with_the_reason(old: bytes, new: bytes, said: str) -> None:
    data = small_manifest().to_bytes()
    assert old in data
    with pytest.raises(BundleError, match=said):
        parse_manifest(data.replace(old, new))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.kind)
def test_a_target_s_own_labels_pass_its_check_unchanged(target: Target) -> None:
    for n in (0, 1, 5):
        labels = target.labels(n)
        checked = target.check(labels, "mine")
        assert checked.dtype == labels.dtype
        assert np.array_equal(checked, labels)


CHECKS = [
    (TARGETS[0], np.zeros(3), r"labels have dtype float64; give integers 0\.\.2"),
    (TARGETS[0], np.array([0, 1, 3]), r"label 3 at index 2 is outside 0\.\.2, the model's 3 classes; number"),
    (TARGETS[0], np.eye(3)[[0, 1]], r"shape \(2, 3\), as one-hot ones have; give y\.argmax\(axis=-1\), shape \(2,\)"),
    (TARGETS[1], np.zeros((2, 4, 3), bool), r"as one-hot ones have; give y\.argmax\(axis=-1\), shape \(2, 4\)"),
    (TARGETS[0], np.zeros((3, 1), int), r"shape \(3, 1\); give \(3,\)"),
    (TARGETS[1], np.zeros(3, int), r"shape \(3,\); give \(3, 4\)"),
    (TARGETS[1], np.zeros((3, 5), int), r"shape \(3, 5\); give \(3, 4\)"),
    (TARGETS[0], np.array([0, LEFT_OUT]), r"label -100 at index 1 is outside"),
    (TARGETS[1], np.array([[0, 1, 2, 0], [0, 0, -1, 0]]), r"label -1 at index 1, 2.*; -100 marks a step without a"),
    (TARGETS[1], np.array([[0, -100, 2, 0], [-100] * 4]), r"sample 1 has no label, .* -100; leave the sample out"),
    (TARGETS[2], np.zeros(3), r"shape \(3,\); give 2 for each sample, shape \(3, 2\)"),
    (TARGETS[2], np.zeros((3, 1)), r"shape \(3, 1\); give 2"),
    (TARGETS[2], np.array([["a", "b"]]), "dtype <U1; give numbers"),
    (TARGETS[2], np.array([[0.0, 1.0], [np.nan, 0.0]]), "sample 1 is NaN"),
    (TARGETS[2], np.array([[0.0, 1e300]]), "sample 0 is NaN, infinite or beyond float32"),
]


@pytest.mark.parametrize(("target", "y", "said"), CHECKS)
def test_labels_that_do_not_fit_are_refused_with_the_value(target: Target, y: np.ndarray, said: str) -> None:
    with pytest.raises(DataError, match=f"mine.npz: .*{said}"):
        target.check(y, "mine.npz")


def test_one_number_a_sample_may_be_given_without_a_second_axis_and_integers_are_numbers() -> None:
    x, y = check(small_manifest(target=Regression(outputs=1)), np.zeros((3, 3)), np.array([1, 2, 3]), "mine")
    assert y.dtype == np.float32
    assert y.tolist() == [[1.0], [2.0], [3.0]]
    assert len(x) == 3


def test_accuracy_is_the_share_of_samples_or_steps_whose_largest_output_is_the_label_s() -> None:
    outputs = np.eye(3)[[0, 1, 2, 2]]
    assert TARGETS[0].score(outputs, np.array([0, 1, 0, 2])) == 0.75
    steps = np.stack([outputs, outputs])
    assert TARGETS[1].score(steps, np.array([[0, 1, 2, 2], [1, 1, 0, 2]])) == 0.75


def test_a_step_without_a_label_passes_the_check_and_counts_in_no_score() -> None:
    y = np.array([[0, 1, LEFT_OUT, 2], [1, LEFT_OUT, LEFT_OUT, LEFT_OUT]], np.int16)
    checked = TARGETS[1].check(y, "mine")
    assert checked.dtype == np.int64
    assert np.array_equal(checked, y)
    outputs = np.eye(3)[[[0, 1, 2, 0], [1, 0, 0, 0]]]
    assert TARGETS[1].score(outputs, checked) == 3 / 4


def test_r_squared_by_hand() -> None:
    y = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)  # squared deviations from 2.5: 5
    target = Regression(outputs=1)
    assert target.score(y, y) == 1.0
    assert target.score(np.full_like(y, 2.5), y) == 0.0
    assert target.score(y + 1, y) == pytest.approx(1 - 4 / 5)
    assert target.score(-y, y) == pytest.approx(1 - 4 * 30 / 5)
    same = np.full((3, 1), 7.0, np.float32)  # no deviation: R^2 is undefined
    assert target.score(same, same) == 1.0
    assert target.score(same + 1, same) == 0.0
    assert target.score(y * np.float32(np.nan), y) == WORST
    assert target.score(y * np.float32(1e30), y) == WORST


@given(st.integers(0, 2**32), st.floats(-1e4, 1e4), st.floats(0.01, 100))
def test_r_squared_does_not_depend_on_the_unit_or_the_origin(seed: int, origin: float, unit: float) -> None:
    random = np.random.default_rng(seed)
    y, outputs = random.standard_normal((2, 20, 3))
    target = Regression(outputs=3)
    moved = target.score(origin + unit * outputs, origin + unit * y)
    assert moved == pytest.approx(target.score(outputs, y), rel=1e-6, abs=1e-6)


# --- export, training and compaction of every target; needs torch

torch = pytest.importorskip("torch")
from edge_export import cli, export_bundle  # noqa: E402
from torch import nn  # noqa: E402

LETTERS = 7


class Tagger(nn.Module):
    """A label for each character: whether it equals the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(LETTERS, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def tagged(n: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(n).integers(0, 2, (n, 6))
    return x, np.diff(x, axis=1, prepend=x[:, :1] + 1) == 0


def curve(n: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(n).uniform(-1, 1, (n, 2))
    return x, np.stack([x[:, 0] * x[:, 1], x.sum(axis=1)], axis=1)


def learned(bundle: Bundle, backend: str, data: Any, lr: float) -> tuple[float, float, np.ndarray]:
    """Test scores before and after 150 steps, and the parameters."""
    x, y = check(bundle.manifest, *(np.asarray(a) + 0 for a in data(256)), "train")
    x_test, y_test = check(bundle.manifest, *(np.asarray(a) + 0 for a in data(200)), "test")
    trainer, target, start = open_trainer(backend, bundle), bundle.manifest.target, bundle.model()
    parameters, buffers = start.parameters.copy(), start.buffers.copy()
    before = target.score(trainer.logits(parameters, buffers, x_test), y_test)
    sgd = Sgd(len(parameters), lr=lr, momentum=0.9)
    for step in range(150):
        rows = slice(32 * (step % 8), 32 * (step % 8) + 32)
        sgd.step(parameters, trainer.gradient(parameters, buffers, x[rows], y[rows]).parameters)
    return before, target.score(trainer.logits(parameters, buffers, x_test), y_test), parameters


@pytest.mark.parametrize(
    ("make", "example", "target", "data", "lr", "good"),
    [
        (Tagger, torch.zeros(2, 6, dtype=torch.int64), Sequence(steps=6, classes=2), tagged, 0.5, 0.95),
        (
            lambda: nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2)),
            torch.zeros(2, 2),
            Regression(outputs=2),
            curve,
            0.1,
            0.9,
        ),
    ],
    ids=["sequence", "regression"],
)
def test_a_model_of_this_target_learns_on_every_backend_alike_and_compacts(
    make: Any, example: torch.Tensor, target: Target, data: Any, lr: float, good: float, tmp_path: Path
) -> None:
    bundle = export_bundle(make(), example, tmp_path / "b", name="b", target=target)
    ends = []
    for backend in BACKENDS:
        before, after, parameters = learned(bundle, backend, data, lr)
        assert before < good - 0.2
        assert after > good
        ends.append(parameters)
    assert np.linalg.norm(ends[0] - ends[1]) < 1e-2 * np.linalg.norm(ends[1])
    x, y = check(bundle.manifest, *(np.asarray(a) + 0 for a in data(256)), "train")
    assignment = Assignment(Course(bundle.model(), seed=1, rounds=2, cohort=1), 1, "a")
    task = Task(assignment, open_trainer("onnxruntime", bundle), DeviceData(x, y, x[:50], y[:50], x[:60], y[:60]), 0)
    downlink = Payload({"parameters": ends[0], "buffers": bundle.model().buffers})
    outcome = run_round(FedAvg(epochs=1, lr=0.01), task, {}, downlink)
    assert min(outcome.metrics.score_before, outcome.metrics.score_after) > good
    assert task.score(outcome.trained, "validation") > good
    sparse = np.where(np.random.default_rng(0).random(bundle.manifest.d) < 0.7, ends[0], np.float32(0))
    personal = Personal(sparse, bundle.model().buffers, sparse != 0)
    samples = np.asarray(data(32)[0], bundle.manifest.input.dtype)
    report = write_personal(bundle, personal, tmp_path / "personal.onnx", samples)
    assert report.max_scaled_diff <= TOLERANCE
    if bundle.manifest.input.dtype == "int64":
        with pytest.raises(CompactionError, match="give samples"):
            write_personal(bundle, personal, tmp_path / "unproved.onnx")


def test_the_loss_of_a_sequence_is_the_mean_over_the_steps_that_have_a_label() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, 4, 3, requires_grad=True)
    y = torch.tensor([[0, 1, LEFT_OUT, 2], [1, LEFT_OUT, LEFT_OUT, LEFT_OUT]])
    (got,) = torch.autograd.grad(loss := TARGETS[1].torch_loss(outputs, y), outputs)
    due = nn.functional.cross_entropy(outputs[y != LEFT_OUT], y[y != LEFT_OUT])
    (expected,) = torch.autograd.grad(due, outputs)
    torch.testing.assert_close(loss, due)
    torch.testing.assert_close(got, expected)


def test_what_a_padded_step_holds_changes_nothing_that_a_causal_model_learns(tmp_path: Path) -> None:
    example, target = torch.zeros(2, 6, dtype=torch.int64), Sequence(steps=6, classes=2)
    bundle = export_bundle(Tagger(), example, tmp_path / "b", name="b", target=target)
    x, y = (np.asarray(a) + 0 for a in tagged(9))
    y[:, 4:] = LEFT_OUT
    start, other = bundle.model(), x.copy()
    other[:, 4:] = LETTERS - 1
    for backend in BACKENDS:
        trainer = open_trainer(backend, bundle)
        one = trainer.gradient(start.parameters, start.buffers, x, y)
        kept = one.loss, one.parameters.copy()
        two = trainer.gradient(start.parameters, start.buffers, other, y)
        assert kept[0] == two.loss
        np.testing.assert_allclose(kept[1], two.parameters, atol=1e-7)


def test_the_sizes_of_a_target_follow_from_the_outputs_when_they_are_not_given(tmp_path: Path) -> None:
    def made(module: nn.Module, example: torch.Tensor, **target: Any) -> Target:
        bundle = export_bundle(module, example, tmp_path / "b", name="b", target=target, torch_part=False)
        return bundle.manifest.target

    letters, pair = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 2)
    assert made(Tagger(), letters, kind="sequence") == Sequence(steps=6, classes=2)
    assert made(Tagger(), letters, kind="sequence", classes=2) == Sequence(steps=6, classes=2)
    assert made(nn.Linear(2, 5), pair, kind="regression") == Regression(outputs=5)
    assert made(nn.Linear(2, 5), pair, kind="classification") == Classification(classes=5)
    with pytest.raises(ModelError, match=r"shape \[n, 5\], .*'classes': 4.* needs \[n, 4\]"):
        made(nn.Linear(2, 5), pair, kind="classification", classes=4)
    with pytest.raises(
        ModelError, match=r"\[n, 6, 2\] .* classification target, whose shape is \[n, classes\]; reshape"
    ):
        made(Tagger(), letters, kind="classification")
    with pytest.raises(
        ModelError, match=r"\[n, 5\] do not suit a sequence target, whose shape is \[n, steps, classes\]"
    ):
        made(nn.Linear(2, 5), pair, kind="sequence", classes=5)
    with pytest.raises(ModelError, match="do not suit a regression target: classes = 3: there is no such setting"):
        made(nn.Linear(2, 5), pair, kind="regression", classes=3)
    with pytest.raises(ModelError, match="there is no target 'divination'"):
        made(nn.Linear(2, 5), pair, kind="divination")


def test_the_command_exports_every_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\ndef make():\n    return nn.Linear(3, 2)\n")
    for options, expected in (
        ({}, "target kind classification, classes 2, loss cross_entropy"),
        ({"classes": 2}, "target kind classification, classes 2, loss cross_entropy"),
        ({"target": "regression", "outputs": 2}, "target kind regression, outputs 2, loss mean_squared_error"),
        ({"target": "sequence", "input_": "7,3"}, "target kind sequence, steps 7, classes 2, loss cross_entropy"),
    ):
        cli.export(f"{file}:make", out=tmp_path / "b", torch_part=False, **{"input_": "3", **options})
        assert expected in capsys.readouterr().out
    with pytest.raises(ModelError, match="needs"):
        cli.export(f"{file}:make", input_="3", out=tmp_path / "b", classes=3, torch_part=False)


# --- a third party's target: one file, installed by an entry point

HINGE = '''
from typing import Literal
import numpy as np
from edge_client.errors import DataError
from edge_client.targets import Target

class Margin(Target):
    """A sign for each sample: labels and outputs float32[n, 1]."""
    kind: Literal["margin"] = "margin"
    margin: float = 1.0

    @property
    def output(self):
        return (1,)

    def labels(self, n):
        return np.zeros((n, 1), np.float32)

    def check(self, y, what):
        if not np.isin(y, (-1, 1)).all():
            raise DataError(f"{what}: give -1 and 1")
        return y.reshape(-1, 1).astype(np.float32)

    def score(self, outputs, y):
        return float((np.sign(outputs) == y).mean())

    def torch_loss(self, outputs, y):
        return (self.margin - outputs * y).clamp(min=0).mean()
'''


def test_a_third_party_adds_a_target_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "hinge-1.dist-info"
    info.mkdir(parents=True)
    (site / "hinge_target.py").write_text(HINGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hinge\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[maskfleet.targets]\nmargin = hinge_target:Margin\n")
    monkeypatch.syspath_prepend(str(site))
    torch.manual_seed(0)
    wanted = {"kind": "margin", "margin": 0.5}
    bundle = export_bundle(nn.Linear(2, 1), torch.zeros(2, 2), tmp_path / "b", name="b", target=wanted)
    manifest: Manifest = bundle.manifest
    assert manifest.target.model_dump() == wanted
    x, y = check(manifest, np.array([[1.0, 2.0], [2.0, -1.0], [-1.0, 0.5]]), np.array([1, -1, 1]), "mine")
    weight, bias = (bundle.model().parameters[t.span] for t in manifest.parameters)
    expected = np.maximum(0.5 - (x @ weight + bias) * y[:, 0], 0).mean()
    gradients = []
    for backend in BACKENDS:
        trainer = open_trainer(backend, bundle)
        g = trainer.gradient(bundle.model().parameters, bundle.model().buffers, x, y)
        assert g.loss == pytest.approx(float(expected), rel=1e-5)
        gradients.append(g.parameters)
    assert np.abs(gradients[0]).max() > 0
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-6)
    with pytest.raises(DataError, match="mine: give -1 and 1"):
        check(manifest, x, np.array([0, 1, 1]), "mine")
    monkeypatch.undo()
    with pytest.raises(BundleError, match="there is no target 'margin' here"):
        Bundle.open(bundle.folder)
