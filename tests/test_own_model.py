"""`bundle = "model.py:build"`: exported once, found by its content, refused with a sentence; the author's errors."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench.data.own import DeviceFiles
from edge_bench.data.sources import Samples
from edge_bench.own_model import ExportConfig, command, open_module, settings, sources
from edge_bench.simulation import cli as simulate_cli
from edge_bench.simulation.file import find_bundle, read_config
from typer import Typer
from typer.testing import CliRunner

from edge_client.authored import AuthorError
from edge_client.bundle import Bundle, Manifest, Normalisation
from edge_client.data import DataFile
from edge_client.errors import ConfigError, DataError, ModelError

MODEL = """
from torch import nn
from .parts import WIDTH

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
"""


def samples(*shape: int, y: Any = None, dtype: Any = np.float32) -> Samples:
    n = 6
    return Samples(np.zeros((n, *shape), dtype), np.arange(n) % 3 if y is None else y, np.arange(n))


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "parts.py").write_text("WIDTH = 8\n")
    return f"{tmp_path}/model.py:build"


def test_what_the_table_leaves_out_the_data_say() -> None:
    found = settings(ExportConfig(), samples(1, 4, 4))
    assert (found["shape"], found["dtype"], found["target"]) == ((1, 4, 4), "float32", {"kind": "classification"})
    tokens = settings(ExportConfig(classes=9), samples(7, dtype=np.int64, y=np.zeros((6, 7), np.int64)))
    assert (tokens["shape"], tokens["dtype"], tokens["target"]) == ((7,), "int64", {"kind": "sequence", "classes": 9})
    fleet = DeviceFiles({"a": DataFile("a", {"x": np.zeros((5, 2)), "y": np.zeros(5)})})
    assert settings(ExportConfig(), fleet)["target"] == {"kind": "regression"}
    assert settings(ExportConfig(input=(4, 4)), samples(16))["shape"] == (4, 4)


def test_only_files_of_the_folder_that_are_imported_count(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    for name, text in {
        "model.py": "import numpy, near\nfrom .net.deep import x\nfrom . import beside",
        "near.py": "def f():\n    import late",
        "late.py": "import model",
        "beside.py": "",
        "net/deep.py": "",
        "other.py": "",
        "broken.py": "x = (",
    }.items():
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in sources(tmp_path / "model.py")}
    assert found == {"model.py", "near.py", "late.py", "beside.py", "net/deep.py"}
    assert sources(tmp_path / "broken.py") == [tmp_path / "broken.py"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a cache of its own."""
    monkeypatch.setenv("MASKFLEET_BUNDLES", str(tmp_path / "cache"))


def test_a_module_is_exported_again_only_when_its_content_changes(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    data = samples(1, 4, 4)

    def opened() -> tuple[Path, int]:
        made = open_module(place, ExportConfig(), data)
        return made.folder, capsys.readouterr().err.count("exporting")

    first, told = opened()
    assert told == 1
    (tmp_path / "data.py").write_text("x = 1")
    assert opened() == (first, 0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MASKFLEET_BUNDLES", str(tmp_path / "other"))
        weights = open_module(place, ExportConfig(), data).model().parameters
    assert np.array_equal(weights, open_module(place, ExportConfig(), data).model().parameters)
    capsys.readouterr()
    (tmp_path / "parts.py").write_text("WIDTH = 9\n")
    second, told = opened()
    assert (second != first, told) == (True, 1)
    (tmp_path / "trained.pt").write_bytes(b"weights")
    assert opened()[0] != second
    monkeypatch.setattr("edge_bench.own_model.can_export", lambda: False)  # no torch: what is there opens
    assert opened()[1] == 0
    with pytest.raises(ConfigError, match=r"maskfleet\[author\].*--bundle digits"):
        open_module(place, ExportConfig(seed=3), data)


BODY = """
import torch
from torch import nn
def build():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
"""


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ("", "the weights are drawn anew each time build() runs and count as trained; if they are random, pass --seed"),
        (
            "    for v in net.parameters():\n        v.data = torch.arange(v.numel()).reshape(v.shape) / 9\n",
            "",
        ),
        (
            "    net[0].load_state_dict({'weight': torch.eye(5, 4), 'bias': torch.zeros(5)})\n",
            "the weights of 3 are drawn anew each time build() runs and count as trained; for a new head, set head = ",
        ),
    ],
)
def test_weights_that_are_drawn_and_count_as_trained_are_named(
    loads: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(f"{BODY}{loads}    return net\n")
    place, table = f"{tmp_path}/model.py:build", ExportConfig()
    made = open_module(place, table, samples(4))
    for _ in range(2):  # exported, and found in the cache
        err = capsys.readouterr().err
        assert (f"warning: {words}" in err, "warning" in err) == (bool(words), bool(words))
        open_module(place, table, samples(4))
    capsys.readouterr()
    if not loads:
        open_module(place, ExportConfig(seed=1), samples(4))
        assert "warning" not in capsys.readouterr().err
    from edge_export.cli import export

    app = Typer()
    app.command()(export)
    done = CliRunner().invoke(app, [*command(place, table, made, None)[2:-1], str(tmp_path / "bundle")])
    assert done.exit_code == 0, done.output
    assert ("drawn anew" in done.output, words in done.output) == (bool(words), True)
    assert Bundle.open(tmp_path / "bundle").warnings == made.warnings
    assert bool(made.warnings) == bool(words)
    assert np.array_equal(Bundle.open(tmp_path / "bundle").model().parameters, made.model().parameters)


def test_no_seed_is_advised_where_no_rule_draws_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    from edge_export.factories import drawn

    def normed() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        net[1].running_mean.copy_(torch.arange(2))
        return net

    for build, tensor in ((lambda: torch.nn.GRU(3, 4), "weight_ih_l0"), (normed, "1.running_mean")):
        said = drawn(build, build(), "he")
        assert f"no rule draws {tensor} from a seed" in said
        assert "--seed" not in said


@pytest.mark.parametrize("seeds", ["torch.manual_seed(0)", "manual_seed(0)", "torch.random.manual_seed(0)"])
def test_random_weights_are_named_too_when_the_function_sets_a_seed_of_its_own(
    seeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    seeded = "from torch import manual_seed\n" + BODY.replace("    net", f"    {seeds}\n    net")
    (tmp_path / "model.py").write_text(f"{seeded}    return net\n")
    made = open_module(f"{tmp_path}/model.py:build", ExportConfig(), samples(4))
    assert "warning: the weights are drawn anew each time build() runs" in capsys.readouterr().err
    torch.manual_seed(0)
    assert np.array_equal(made.model().parameters[:20], torch.nn.Linear(4, 5).weight.detach().numpy().ravel())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build():\n    return nn.Linear(3)\n", r"model\.py, line 3, in build: 'return nn.Linear\(3\)': TypeError"),
        ("def build():\n    return 7\n", "returned a value of type int; it must return a torch.nn.Module"),
        ("def biuld():\n    pass\n", r"no callable 'build'; define a function that returns.*did you mean 'biuld'\?"),
        (
            "class Net(nn.Module):\n    def forward(self, x):\n        return self.layer(x)\n"
            "def build():\n    return Net()\n",
            r"does not run on .*model\.py, line 4, in forward: 'return self.layer\(x\)': AttributeError",
        ),
        (
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.l = nn.Linear(4, 3)\n"
            "    def forward(self, x):\n        x = self.l(x.flatten(1))\n        return x if x.sum() > 0 else -x\n"
            "def build():\n    return Net()\n",
            r"model\.py, line 8, in forward.*torch\.where",
        ),
        (
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.table = nn.Embedding(2, 3)\n"
            "    def forward(self, x):\n        return self.table(x.flatten(1)[:, 0].long() + 5)\n"
            "def build():\n    return Net()\n",
            r"model\.py, line 7, in forward.*samples? .*drawn here.*clamp\(0, rows - 1\)",
        ),
    ],
)
def test_a_mistake_in_the_model_is_the_author_s_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(f"from torch import nn\n{text}")
    with pytest.raises((AuthorError, ConfigError, ModelError), match=words) as raised:
        open_module(f"{tmp_path}/model.py:build", ExportConfig(), samples(4))
    assert "fault of maskfleet" not in str(raised.value)


def test_the_bundle_names_classes_as_the_table_or_else_the_data_do(place: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def said(known: tuple[str, ...], **table: Any) -> Manifest:
        data = replace(samples(1, 4, 4), classes=known)
        return open_module(place, ExportConfig(**table), data).manifest

    assert said(("a", "b", "c")).class_names == ("a", "b", "c")
    assert said(("a", "b")).class_names == ()  # the model has three outputs
    how = {"mean": (1.0,), "std": (2.0,)}
    both = said(("a", "b", "c"), class_names=("x", "y", "z"), normalisation=how)
    assert (both.class_names, both.input.normalisation) == (("x", "y", "z"), Normalisation.model_validate(how))
    with pytest.raises(ModelError, match=r"2 class names for outputs of shape \(3,\)"):
        said((), class_names=("x", "y"))
    with pytest.raises(ValueError, match="'x' is the name of two classes"):
        said((), class_names=("x", "y", "x"))


def test_the_printed_command_exports_what_was_simulated(place: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    table = ExportConfig(seed=3, init="torch", target="classification")
    made = open_module(place, table, samples(1, 4, 4))
    from edge_export.cli import export

    words = command(place, table, made, tmp_path / "about.toml")
    (tmp_path / "about.toml").write_text('class_names = ["a", "b", "c"]\nnormalisation = { mean = [0.5], std = [2] }\n')
    assert words[:4] == ["maskfleet", "export", place, "--input"]
    app = Typer()
    app.command()(export)
    done = CliRunner().invoke(app, [*words[2:-1], str(tmp_path / "bundle")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = Bundle.open(tmp_path / "bundle")
    assert found.manifest.class_names == ("a", "b", "c")
    assert found.manifest.input.normalisation == Normalisation(mean=(0.5,), std=(2.0,))
    assert np.array_equal(found.model().parameters, made.model().parameters)
    tokens = samples(7, dtype=np.int64, y=np.zeros((6, 7), np.int64))
    (tmp_path / "words.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5))\n"
    )
    made = open_module(f"{tmp_path}/words.py:build", ExportConfig(), tokens)
    assert command("w.py:build", ExportConfig(), made, None) == shlex.split(
        "maskfleet export w.py:build --input 7 --dtype int64 --target sequence -o bundle"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("class_names = [", "is not TOML"),
        ("class_name = ['a']", r"setting class_name = \['a'\]: .*did you mean 'class_names'"),
        ("normalisation = { mean = [1], std = [0] }", "normalisation.std.0 = 0"),
        ("class_names = ['a', 'b', 'a']", "'a' is the name of two classes"),
        ("between = [1, 0]", "the lowest value, then the highest"),
    ],
)
def test_a_file_of_class_names_and_normalisation_is_checked(text: str | None, words: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from edge_export.factories import read_about

    if text is not None:
        (tmp_path / "about.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"--about .*about.toml.*{words}"):
        read_about(tmp_path / "about.toml")


LINEAR = "from torch import nn\ndef build():\n    return nn.Linear(4, 3)\n"


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        (LINEAR, {"dtype": np.int64}, r'dtype.*; whole numbers go in as int64.*`\[export\]` dtype = "float32"'),
        (
            LINEAR.replace("Linear(4, 3)", "Conv2d(1, 3, 2)"),
            {},
            r"conv2d.*; a sample is 4 values: .*`\[export\]` input",
        ),
        (LINEAR.replace("3", "1"), {}, 'classification.*; labels need an output for each class.*target = "regression"'),
    ],
)
def test_a_model_that_does_not_suit_the_data_is_refused_with_what_the_data_were_taken_for(
    text: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(ModelError, match=words):
        open_module(f"{tmp_path}/model.py:build", ExportConfig(), samples(4, **given))


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_one_hot_labels_are_refused_unless_the_table_says_what_they_are(dtype: Any) -> None:
    y = np.eye(3, dtype=dtype)[np.arange(6) % 3]
    with pytest.raises(DataError, match=r"labels are one-hot; give y\.argmax\(axis=1\)"):
        settings(ExportConfig(), samples(4, y=y))
    assert settings(ExportConfig(target="sequence"), samples(4, y=y))["target"] == {"kind": "sequence"}
    assert settings(ExportConfig(), samples(4, y=np.arange(6) > 2))["target"] == {"kind": "classification"}


def test_samples_without_an_axis_and_a_file_without_a_function_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples have no axis, x has shape \(6,\); .*x\[:, None\]"):
        settings(ExportConfig(), samples())
    assert settings(ExportConfig(input=(1,)), samples())["shape"] == (1,)
    for name in ("net.py", "a/net.py:build()", "net.py:"):
        with pytest.raises(ConfigError, match=r"names no function; write net\.py:FUNCTION"):
            find_bundle(name)


def test_a_model_s_file_and_table_are_checked(tmp_path: Path) -> None:
    base: dict[str, Any] = {"rounds": 1, "cohort": 1, "data": {"name": "digits"}, "methods": {"fedavg": {}}}
    with pytest.raises(ConfigError, match="there is no file"):
        open_module(f"{tmp_path}/model.py:build", ExportConfig(), samples(4))
    with pytest.raises(ConfigError, match=r"\[export\] is for a bundle of a Python file"):
        read_config({**base, "bundle": "digits", "export": {"seed": 1}})
    with pytest.raises(ConfigError, match=r"\[export\] setting inputs = 3: .*did you mean 'input'"):
        read_config({**base, "bundle": "a.py:b", "export": {"inputs": 3}})
    assert read_config({**base, "bundle": "a.py:b"}, tmp_path).bundle == f"{tmp_path}/a.py:b"
    assert read_config({**base, "bundle": "digits"}, tmp_path).bundle == "digits"


def test_one_file_simulates_an_own_model_on_own_data(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "data.py").write_text(
        "import numpy as np\ndef load():\n    y = np.arange(90) % 3\n"
        "    return {'x': np.eye(3, 16)[y].reshape(-1, 1, 4, 4), 'y': y, 'owner': np.arange(90) % 3}\n"
    )
    (tmp_path / "run.toml").write_text(
        'bundle = "model.py:build"\nrounds = 2\ncohort = 3\n[export]\nseed = 1\n'
        '[data]\nname = "python"\nfactory = "data.py:load"\n[methods.fedavg]\nlr = 0.1\n'
    )
    simulate_cli.simulate(tmp_path / "run.toml")
    said = capsys.readouterr().out
    assert "model: 163 parameters; data.py:load on 3 devices" in said
    simulate_cli.simulate(tmp_path / "run.toml", bundle=f"{tmp_path}/model.py:build", rounds=1)
    assert "exporting" not in capsys.readouterr().err
    assert "model" not in sys.modules  # the user's module has a name of its own
