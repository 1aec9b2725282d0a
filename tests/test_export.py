"""Export: the tables, the graphs' form, determinism, and the backward decompositions against autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge_client.bundle import Bundle, Manifest, views
from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.compaction.personal import write_personal
from edge_client.data import check
from edge_client.equality import TOLERANCE
from edge_client.errors import ConfigError, DataError, ModelError
from edge_client.targets import Classification, Sequence, Target
from edge_client.task import Personal
from edge_client.training import open_trainer

torch = pytest.importorskip("torch")
from edge_bench import models, pretrain  # noqa: E402
from edge_export import cli, export_bundle  # noqa: E402
from edge_export.decompositions import table  # noqa: E402
from edge_export.graphs import eval_graph  # noqa: E402
from edge_export.recurrence import lstm  # noqa: E402
from edge_export.rewriting import Rewriting  # noqa: E402
from edge_export.tables import tables  # noqa: E402
from torch import nn  # noqa: E402

aten = torch.ops.aten
DEMO = Path(pretrain.__file__).parent / "bundles"


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def test_a_line_comes_before_each_stage(tmp_path: Path) -> None:
    lines: list[str] = []
    export_bundle(
        _cnn(), torch.zeros(2, 1, 8, 8), tmp_path / "b", name="b", target=Classification(classes=3), torch_part=True,
        progress=lambda line: lines.append(line.split()[0]),
    )  # fmt: skip
    assert lines == ["tracing", "running", "writing", "finding"]


def test_maskable_weights_come_first_in_forward_order_then_everything_else() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)
            self.norm = nn.BatchNorm1d(4)
            self.first = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

    found = tables(Backwards(), torch.zeros(2, 5), "he", None)
    assert [t.name for t in found.parameters] == [
        "first.weight", "last.weight", "last.bias", "norm.weight", "norm.bias", "first.bias",
    ]  # fmt: skip
    assert [t.offset for t in found.parameters] == [0, 20, 32, 35, 39, 43]
    assert [(b.name, b.init.scale) for b in found.buffers] == [("norm.running_mean", 0.0), ("norm.running_var", 1.0)]
    assert [(la.name, la.weights, la.biases) for la in found.layers] == [
        ("first", ("first.weight",), ("first.bias",)),
        ("last", ("last.weight",), ("last.bias",)),
    ]


def test_an_lstm_is_one_layer_of_two_weights_with_gates_in_pytorchs_order() -> None:
    found = tables(models.NextCharacter(7, 4, 5, layers=1), torch.zeros(2, 3, dtype=torch.int64), "he", None)
    assert found.layers[0].gates == ("i", "f", "g", "o")
    assert found.layers[0].weights == ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
    assert found.parameters[0].shape == (20, 4)


class TiedHead(nn.Module):
    """The table that embeds characters also reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(11, 6), nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(self.embed(x))[0][:, -1])


class TiedLayers(nn.Module):
    """The first layer and the third share a weight, not their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


class TiedDecoder(nn.Module):
    """A layer is read forwards, then backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(nn.functional.linear(torch.relu(self.a(x)), self.a.weight.t())))


class TiedSequence(TiedHead):
    """The head reads each step, so that its product has three axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(self.embed(x))[0])


CHARACTERS = torch.zeros(2, 5, dtype=torch.int64)


def test_a_tied_weight_is_one_row_under_its_first_name_and_belongs_to_the_last_layer_that_reads_it() -> None:
    found = tables(TiedLayers(), torch.zeros(2, 6), "he", None)
    assert [t.name for t in found.parameters[:3]] == ["b.weight", "a.weight", "out.weight"]
    assert sum(t.size for t in found.parameters) == 36 + 36 + 18 + 6 + 6 + 6 + 3
    assert [(la.name, la.weights, la.biases) for la in found.layers] == [
        ("b", ("b.weight",), ("b.bias",)),
        ("c", ("a.weight",), ("a.bias", "c.bias")),
        ("out", ("out.weight",), ("out.bias",)),
    ]
    tied = tables(TiedHead(), CHARACTERS, "sign", ["out.weight"])
    assert (tied.layers[-1].name, tied.layers[-1].weights) == ("out", ("embed.weight",))
    (shared,) = (t for t in tied.parameters if t.trainable)  # by either of its names
    assert (shared.name, shared.init.kind, shared.init.scale) == ("embed.weight", "sign", pytest.approx((2 / 6) ** 0.5))


@pytest.mark.parametrize(
    ("make", "example", "classes"), [(TiedHead, CHARACTERS, 11), (TiedLayers, torch.ones(2, 6), 3)]
)
def test_every_backend_trains_and_compacts_a_model_of_tied_weights_as_the_module_itself(
    make: type[nn.Module], example: torch.Tensor, classes: int, tmp_path: Path
) -> None:
    bundle = export_bundle(make(), example, tmp_path / "b", name="tied", target=Classification(classes=classes), seed=5)
    model, random = bundle.model(), np.random.default_rng(0)
    x = random.integers(0, 11, (7, 5)) if example.dtype == torch.int64 else random.random((7, 6), np.float32)
    y = random.integers(0, classes, 7)
    module = make()
    state = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in views(bundle.manifest.parameters, model.parameters).items():
            state[name].copy_(torch.tensor(value))
    logits = module(torch.tensor(x))
    nn.functional.cross_entropy(logits, torch.tensor(y)).backward()
    for backend in ("onnxruntime", "torch"):
        trainer = open_trainer(backend, bundle)
        made = trainer.logits(model.parameters, model.buffers, x)
        np.testing.assert_allclose(made, logits.detach().numpy(), atol=1e-5)
        step = trainer.gradient(model.parameters, model.buffers, x, y)
        for name, gradient in views(bundle.manifest.parameters, step.parameters).items():
            np.testing.assert_allclose(gradient, np.asarray(state[name].grad), atol=1e-6, err_msg=f"{backend} {name}")
    kept = np.where(random.random(bundle.manifest.d) < 0.5, model.parameters, np.float32(0))
    report = write_personal(bundle, Personal(kept, model.buffers, kept != 0), tmp_path / "personal.onnx", x)
    assert report.max_abs_diff <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "example", "target"),
    [
        (TiedHead, CHARACTERS, Classification(classes=11)),
        (TiedSequence, CHARACTERS, Sequence(classes=11, steps=5)),
        (TiedDecoder, torch.ones(2, 6), Classification(classes=3)),
    ],
)
def test_a_weight_that_two_layers_read_is_stored_once_also_where_one_has_it_transposed(
    make: type[nn.Module], example: torch.Tensor, target: Target, tmp_path: Path
) -> None:
    bundle = export_bundle(make(), example, tmp_path / "b", name="tied", target=target, torch_part=False)
    model, x = bundle.model(), np.random.default_rng(0).integers(0, 11, (7, *example.shape[1:]))
    samples = x.astype(bundle.manifest.input.dtype)
    report = write_personal(bundle, Personal(model.parameters, model.buffers), tmp_path / "personal.onnx", samples)
    assert report.parameters_compact <= bundle.manifest.d


@pytest.mark.parametrize(
    ("init", "kind", "scale", "bias"),
    [("he", "uniform", (6 / 9) ** 0.5, 0.0), ("torch", "uniform", 1 / 3, 1 / 3), ("sign", "sign", (2 / 9) ** 0.5, 0.0)],
)
def test_a_seed_draws_by_the_rules_of_the_scheme(init: str, kind: str, scale: float, bias: float) -> None:
    found = {t.name: t.init for t in tables(_cnn(), torch.zeros(2, 1, 8, 8), init, None).parameters}
    assert (found["0.weight"].kind, found["0.weight"].scale) == (kind, pytest.approx(scale))
    assert found["0.bias"].scale == pytest.approx(bias)
    assert (found["1.weight"].kind, found["1.weight"].scale) == ("constant", 1.0)


def test_the_evaluation_graph_is_canonical() -> None:
    module = _cnn()
    names = [n for n, _ in module.named_parameters()]
    graph = eval_graph(module, torch.zeros(3, 1, 8, 8), names, ["1.running_mean", "1.running_var"]).graph
    assert [n.op_type for n in graph.node] == ["Conv", "BatchNormalization", "Relu", "MaxPool", "Flatten", "Gemm"]
    assert [i.name for i in graph.input] == [*names, "1.running_mean", "1.running_var", "x"]
    assert [o.name for o in graph.output] == ["logits"]
    assert graph.input[-1].type.tensor_type.shape.dim[0].dim_param == "n"
    gemm = {a.name: onnx.helper.get_attribute_value(a) for a in graph.node[-1].attribute}
    assert gemm == {"transB": 1}
    assert not graph.initializer


def test_the_committed_demo_bundles_are_what_export_builds(tmp_path: Path) -> None:
    total = 0
    for name in ("digits", "har"):
        stored, built = Bundle.open(DEMO / name), pretrain.build(name, tmp_path / name)
        total += sum(p.stat().st_size for p in (DEMO / name).iterdir())
        for part in stored.manifest.parts:
            a, b = onnx.load(stored.part(part)), onnx.load(built.part(part))
            assert onnx.printer.to_text(a.graph) == onnx.printer.to_text(b.graph)
        assert stored.manifest.model_copy(update={"parts": {}}) == built.manifest.model_copy(update={"parts": {}})
        if torch.__version__.startswith("2.13."):  # the version they were built with: the same bytes
            assert stored.manifest.to_bytes() == built.manifest.to_bytes()
        train = onnx.load(stored.part("train.onnx")).graph
        assert not [n for n in train.node if n.op_type == "Transpose"]
        assert not [n for n in train.node if n.name or n.doc_string or n.metadata_props]
    assert total < 100_000


def test_the_demo_bundles_load_without_torch_parts_and_from_a_seed() -> None:
    model = Bundle.open(DEMO / "har").model()
    assert model.manifest.seed == pretrain.SEED
    assert set(model.manifest.parts) == {"train.onnx", "eval.onnx"}
    assert model.parameters.shape == (376_606,)
    first = model.manifest.parameters[0]
    assert np.abs(model.parameters[first.span]).max() <= first.init.scale
    assert model.parameters[first.span].std() == pytest.approx(first.init.scale / 3**0.5, rel=0.01)


def test_vgg9_has_the_size_the_paper_prints() -> None:
    sizes = [
        sum(p.numel() for n, p in models.vgg9(1, classes).named_parameters() if p.ndim > 1 or n.startswith("23"))
        for classes in (10, 62)
    ]
    assert [round(4 * s / 2**20, 2) for s in sizes] == [4.33, 4.53]
    with torch.no_grad():
        assert models.vgg9()(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (nn.Linear(4, 3).double(), torch.zeros(2, 4), "float64"),
        (nn.Linear(4, 5), torch.zeros(2, 4), r"shape \[n, 5\].*needs \[n, 3\]"),
        (nn.LSTM(4, 3), torch.zeros(2, 5, 4), "returns tuple"),
        (nn.Linear(4, 3), torch.zeros(2, 4, dtype=torch.float64), "float32 or int64"),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3)), torch.zeros(2, 3), "no linear"),
    ],
)
def test_what_cannot_be_a_bundle_is_refused_with_a_reason(
    tmp_path: Path, module: nn.Module, example: torch.Tensor, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        export_bundle(module, example, tmp_path / "b", name="b", target=Classification(classes=3))
    assert not (tmp_path / "b").exists()


def test_a_target_of_an_unknown_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for target in ({"kind": "ranking"}, {"classes": 3}):
        with pytest.raises(ModelError, match=rf"no target {target.get('kind')!r} here, only \['classification', "):
            export_bundle(nn.Linear(4, 3), torch.zeros(2, 4), tmp_path / "b", name="b", target=target)


def test_a_seed_for_a_layer_that_no_rule_draws_is_refused_with_how_to_go_on(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.rnn(x)[0].mean(1))
            return out

    with pytest.raises(
        ModelError, match=r"no rule draws \['rnn.*from a seed; leave `seed` out, so that the module's own"
    ):
        export_bundle(
            Recurrent(), torch.zeros(2, 5, 4), tmp_path / "b", name="b", target=Classification(classes=3), seed=1
        )


def test_a_row_of_padding_stays_zero_and_so_is_not_drawn(tmp_path: Path) -> None:
    """No gradient reaches that row: drawn numbers would stay in every padded sample."""
    module = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))
    example, target = torch.zeros(2, 5, dtype=torch.int64), Classification(classes=3)
    with pytest.raises(ModelError, match=r"no rule draws \['0\.weight'\] from a seed; leave `seed` out"):
        export_bundle(module, example, tmp_path / "b", name="b", target=target, seed=1, torch_part=False)
    bundle = export_bundle(module, example, tmp_path / "b", name="b", target=target, torch_part=False)
    table = views(bundle.manifest.parameters, bundle.model().parameters)["0.weight"]
    assert not table[0].any()
    assert table[1:].all()


def test_class_names_and_the_normalisation_of_raw_samples_are_written_down_if_they_fit(tmp_path: Path) -> None:
    def exported(names: list[str], means: list[float]) -> Bundle:
        return export_bundle(
            nn.Linear(3, 2), torch.zeros(1, 3), tmp_path / "b", name="b", target={"kind": "classification"},
            torch_part=False, class_names=names, normalisation={"mean": means, "std": [2.0]},
        )  # fmt: skip

    made = exported(["no", "yes"], [0.0, 1.0, 2.0]).manifest
    assert made.class_names == ("no", "yes")
    assert made.input.normalisation is not None
    assert made.input.normalisation.mean == (0.0, 1.0, 2.0)
    for names, means, words in ((["a"], [0.0], "1 class names"), (["a", "b"], [0.0, 1.0], "3 features")):
        with pytest.raises(ModelError, match=words):
            exported(names, means)


def test_a_table_s_rows_bound_the_ids_of_samples_and_are_written_only_where_there_is_one(tmp_path: Path) -> None:
    tokens = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 3))
    example = torch.zeros(2, 3, dtype=torch.int64)
    bundle = export_bundle(
        tokens, example, tmp_path / "tokens", name="b", target=Classification(classes=3), torch_part=False
    )
    assert bundle.manifest.input.ids == ((0, 20),)
    assert Manifest.model_validate_json(bundle.manifest.to_bytes()) == bundle.manifest
    right = np.array([[0, 1, 19]])
    check(bundle.manifest, right, np.zeros(1, np.int64), "here")
    for id_ in (-1, 20):
        with pytest.raises(DataError, match=rf"here: sample 1 holds the id {id_}; the model's table has 0\.\.19"):
            check(bundle.manifest, np.array([[0, 1, 2], [3, id_, 5]]), np.zeros(2, np.int64), "here")
    features = export_bundle(
        models.mlp(4, 3), torch.zeros(2, 4), tmp_path / "b", name="b", target=Classification(classes=3),
        torch_part=False,
    )  # fmt: skip
    assert b'"ids"' not in features.manifest.to_bytes()


class LooksUp(nn.Module):
    """A table whose rows are looked up by what `ids` makes of the samples."""

    def __init__(self, ids: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.ids = nn.Embedding(20, 3), nn.Linear(3, 3), ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.table(self.ids(x)).reshape(x.shape[0], -1, 3).mean(1))
        return made


@pytest.mark.parametrize(
    ("ids", "bound"),
    [
        (lambda x: x.reshape(-1).int().unsqueeze(1), ((0, 20),)),
        (lambda x: x.permute(1, 0).transpose(0, 1).squeeze(-1), ((0, 20),)),
        (lambda x: x[:, :2], ((0, 20), (0, 20), (-(2**63), 2**63 - 1))),
        (lambda x: x + 1, ((-1, 19),)),
        (lambda x: x.flip(1) + torch.tensor([0, 5, 7]), ((-7, 13), (-5, 15), (0, 20))),
        (lambda x: (x > 3).long(), None),
        (lambda x: x.bool().long(), None),
        (lambda x: x.clamp(0, 19), None),
        (lambda x: 0 * x + torch.arange(3), None),
    ],
)
def test_samples_are_bound_by_the_table_that_they_index_behind_slices_and_offsets(
    ids: Callable[[torch.Tensor], torch.Tensor], bound: tuple[tuple[int, int], ...] | None, tmp_path: Path
) -> None:
    example = torch.zeros(2, 3, dtype=torch.int64)
    target = Classification(classes=3)
    bundle = export_bundle(LooksUp(ids), example, tmp_path / "b", name="b", target=target, torch_part=False)
    assert bundle.manifest.input.ids == bound
    if bound is not None:
        low, end = (np.array(bounds)[None].repeat(3 // len(bound), 1) for bounds in zip(*bound, strict=True))
        for x in (low, end - 1):
            check(bundle.manifest, x, np.zeros(1, np.int64), "here")
        for k in (k for k in range(3) if low[0, k] > -(2**63)):
            for x, id_ in ((low.copy(), low[0, k] - 1), (low.copy(), end[0, k])):
                x[0, k] = id_
                said = rf"sample 0 holds the id {id_}; the model's table has {low[0, k]}..{end[0, k] - 1}"
                with pytest.raises(DataError, match=said):
                    check(bundle.manifest, x, np.zeros(1, np.int64), "here")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ModelError, match="other files"):
        export_bundle(
            models.mlp(4, 3), torch.zeros(2, 4), tmp_path, name="b", target=Classification(classes=3), torch_part=False
        )
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_the_command_loads_a_factory_and_names_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("def make():\n    return 7\n")
    with pytest.raises(ConfigError, match="must return a torch"):
        cli.export(f"{file}:make", "4", tmp_path / "b")
    with pytest.raises(ConfigError, match="not a shape"):
        cli.export(f"{file}:make", "4,x", tmp_path / "b")


def test_the_command_says_what_devices_cannot_mask_and_that_nothing_is_compacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Embedding(9, 2), nn.LayerNorm(2), nn.Flatten(), nn.Linear(10, 3))\n"
    )
    cli.export(f"{file}:make", "5", tmp_path / "b", dtype="int64", torch_part=False)
    said = capsys.readouterr().out
    assert "\nnet: " in said  # the bundle's name is the file's
    assert "no method masks 0.weight: only linear" in said
    assert "prune whole channels refuse this model" in said


def test_a_model_that_cannot_be_exported_is_a_matter_of_usage() -> None:
    assert exit_code(ModelError("set p=0")) == ExitCode.CONFIG


CONVS = [
    # in, out, kernel, stride, padding, dilation, groups, size
    (3, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, (6, 7)),
    (40, 4, (3, 3), (2, 2), (1, 1), (1, 1), 1, (6, 7)),
    (40, 6, (2, 3), (2, 1), (0, 2), (1, 2), 2, (8, 9)),
    (6, 6, (3, 3), (2, 2), (1, 1), (1, 1), 6, (9, 9)),
    (5, 7, (1, 1), (3, 3), (0, 0), (1, 1), 1, (8, 8)),
    (4, 6, (5,), (2,), (2,), (2,), 2, (20,)),
    (2, 3, (2, 2, 2), (2, 1, 2), (1, 0, 1), (1, 1, 1), 1, (4, 5, 6)),
]


@pytest.mark.parametrize("case", CONVS)
def test_convolution_backward_equals_autograd(case: tuple) -> None:
    inner, out, kernel, stride, padding, dilation, groups, size = case
    x = torch.randn(3, inner, *size, dtype=torch.float64)
    w = torch.randn(out, inner // groups, *kernel, dtype=torch.float64)
    settings = (list(stride), list(padding), list(dilation), False, [0] * len(size), groups)
    g = torch.randn_like(aten.convolution.default(x, w, None, *settings))
    expected = aten.convolution_backward.default(g, x, w, [out], *settings, [True] * 3)
    got = table()[aten.convolution_backward.default](g, x, w, [out], *settings, [True] * 3)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [(2, 2, 0, (6, 7)), (3, 2, 1, (7, 8)), (3, 1, 1, (5, 5)), (2, 3, 0, (8, 9)), (3, 3, 0, (9, 11))],
)
def test_pool_backwards_equal_autograd_and_ties_go_to_the_first_maximum(
    kernel: int, stride: int, padding: int, size: tuple[int, int]
) -> None:
    x = torch.randint(0, 3, (2, 3, *size)).double()  # many ties
    k, s, p = [kernel] * 2, [stride] * 2, [padding] * 2
    out, indices = aten.max_pool2d_with_indices.default(x, k, s, p)
    g = torch.randn_like(out)
    expected = aten.max_pool2d_with_indices_backward.default(g, x, k, s, p, [1, 1], False, indices)
    got = table()[aten.max_pool2d_with_indices_backward.default](g, x, k, s, p, [1, 1], False, indices)
    torch.testing.assert_close(got, expected)
    expected = aten.avg_pool2d_backward.default(g, x, k, s, p, False, True, None)
    torch.testing.assert_close(table()[aten.avg_pool2d_backward.default](g, x, k, s, p, False, True, None), expected)


@pytest.mark.parametrize(
    ("axis", "start", "end", "step"),
    [(1, 0, 9, 2), (1, 1, 9, 3), (-1, 2, 8, 4), (2, -5, 2**63 - 1, 2), (1, 3, -2, 1), (2, 0, 1, 7), (1, 6, 6, 2)],
)
def test_the_backward_of_a_slice_equals_autograd(axis: int, start: int, end: int, step: int) -> None:
    x = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    made = aten.slice.Tensor(x, axis, start, end, step)
    g = torch.randn_like(made)
    (expected,) = torch.autograd.grad(made, x, g)
    got = table()[aten.slice_backward.default](g, x.shape, axis, start, end, step)
    torch.testing.assert_close(got, expected)


def test_a_model_that_slices_with_a_stride_trains_on_devices_with_the_gradients_of_autograd(tmp_path: Path) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4 * 3 * 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.conv(x))[:, :, ::3, 1:-1:2].flatten(1))

    module, x, y = Strided(), torch.randn(4, 2, 7, 8), torch.arange(4) % 3
    bundle = export_bundle(module, x, tmp_path / "b", name="b", target=Classification(classes=3), torch_part=False)
    model = bundle.model()
    got = open_trainer("onnxruntime", bundle).gradient(model.parameters, model.buffers, x.numpy(), y.numpy())
    nn.functional.cross_entropy(module(x), y).backward()
    for name, value in views(bundle.manifest.parameters, got.parameters).items():
        expected = module.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "settings", [{}, {"batch_first": True, "bias": False}, {"num_layers": 2, "bidirectional": True}]
)
def test_a_rewritten_lstm_equals_pytorchs_and_so_do_its_gradients(settings: dict[str, Any]) -> None:
    torch.manual_seed(2)
    module = nn.LSTM(3, 4, **settings).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    free = [x, *module.parameters()]
    found = []
    for mode in (nullcontext(), Rewriting({torch.lstm: lstm})):
        with mode:
            states, (hidden, cell) = module(x)
        found.append([states, *torch.autograd.grad((states**2).sum() + hidden.sum() + (3 * cell).sum(), free)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_an_operator_without_a_form_in_onnx_is_refused_in_one_plain_line(tmp_path: Path) -> None:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.linalg.qr(x.reshape(-1, 2, 2))[0].reshape(-1, 4))

    with pytest.raises(ModelError, match=r"forward: operator .linalg_qr. has no ONNX form; compute it") as refusal:
        export_bundle(
            Orthogonal(),
            torch.randn(2, 4),
            tmp_path / "b",
            name="b",
            target=Classification(classes=3),
            torch_part=False,
        )
    assert str(refusal.value).isprintable()
