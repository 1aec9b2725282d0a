"""A bundle by name: packaged ones, a folder relative to the file that names it, and what is said of any other."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from edge_bench.simulation.file import find_bundle

from coord_server.operator import cli
from edge_client import extras
from edge_client.bundle import MANIFEST, WARNINGS, Bundle
from edge_client.cli import build
from edge_client.errors import BundleError, ConfigError
from edge_client.named_bundles import bundle_folder, packaged
from edge_client.protocol.messages import Federation, FederationConfig


def test_every_packaged_bundle_opens_by_its_name() -> None:
    assert {"digits", "har"} <= packaged().keys()
    for name, folder in packaged().items():
        assert folder.name == name
        assert Bundle.open(folder).part("eval.onnx").is_file()


def test_a_bundle_of_another_package_does_not_replace_ours_and_a_package_that_is_gone_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("digits", "theirs"):
        (tmp_path / "aaa" / "models" / name).mkdir(parents=True)
        (tmp_path / "aaa" / "models" / name / MANIFEST).touch()
    (tmp_path / "aaa" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, added = packaged(), [EntryPoint(p, f"{p}:models", "maskfleet.bundles") for p in ("aaa", "gone", "gone.too")]
    monkeypatch.setattr(extras, "entry_points", lambda group: [*added, *entry_points(group=group)])
    assert packaged() == {**ours, "theirs": tmp_path / "aaa" / "models" / "theirs"}


def test_a_folder_is_relative_to_the_file_that_names_it_and_dot_slash_means_no_packaged_one(tmp_path: Path) -> None:
    for name in ("mine", "digits"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_bytes((packaged()["har"] / MANIFEST).read_bytes())
    assert bundle_folder("mine", tmp_path) == tmp_path / "mine"
    assert bundle_folder("digits", tmp_path) == packaged()["digits"]
    assert bundle_folder("./digits", tmp_path) == tmp_path / "digits"
    assert find_bundle(str(tmp_path / "mine")).manifest.name == "har"
    with pytest.raises(
        ConfigError, match="'nowhere': there is no folder nowhere; name a bundle's folder, or one of digits"
    ):
        bundle_folder("nowhere", Path())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder .*empty holds no manifest.*digits.*har"):
        bundle_folder("empty", tmp_path)


def test_a_federation_is_created_from_a_packaged_bundle_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploaded = list[Path]()

    class Operator:
        caution: str | None = None

        def __init__(self, *_: str) -> None: ...
        def __enter__(self) -> Operator:
            return self

        def __exit__(self, *_: object) -> None: ...
        def upload_bundle(self, folder: Path) -> str:
            uploaded.append(folder)
            return "a" * 64

        def create(self, config: FederationConfig) -> Federation:
            return Federation(
                id=config.bundle[:3], config=config, phase=None, round=0, devices=0, updates=0, caution=self.caution
            )

    monkeypatch.setattr(cli, "Operator", Operator)
    monkeypatch.setenv("MASKFLEET_OPERATOR_TOKEN", "t")
    file = tmp_path / "fleet.toml"
    file.write_text('name = "f"\nbundle = "digits"\nrounds = 1\ncohort = 1\n[method]\nname = "fedavg"\n')
    cli.create(file)
    assert capsys.readouterr() == ("aaa\n", "")
    cli.create(file, bundle="har")
    assert uploaded == [packaged()["digits"], packaged()["har"]]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MANIFEST).write_bytes((packaged()["har"] / MANIFEST).read_bytes())
    (tmp_path / "mine" / WARNINGS).write_text("the weights are drawn\n")
    file.write_text(file.read_text().replace('"digits"', '"mine"'))
    capsys.readouterr()
    cli.create(file)
    assert capsys.readouterr() == ("aaa\n", "warning: the weights are drawn\n")
    (tmp_path / "mine" / WARNINGS).write_bytes(b"damaged \xff\n")
    cli.create(file)
    assert capsys.readouterr() == ("aaa\n", "warning: damaged \N{REPLACEMENT CHARACTER}\n")
    Operator.caution = "method fedavg: odd"
    cli.create(file, bundle="har")
    assert capsys.readouterr() == ("aaa\n", "warning: method fedavg: odd\n")


def test_bench_and_compact_take_names_by_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / MANIFEST).write_bytes((packaged()["har"] / MANIFEST).read_bytes())
    monkeypatch.chdir(tmp_path)
    opened = list[Path]()

    def noted(folder: Path) -> Bundle:
        opened.append(folder)
        raise BundleError("seen")

    monkeypatch.setattr(Bundle, "open", noted)
    for command in (["bench"], ["compact", "--out", "small.onnx", "values.safetensors"]):
        for name in ("digits", "./digits"):
            with pytest.raises(BundleError, match="seen"):
                build()([*command[:1], name, *command[1:]], standalone_mode=False)
    assert opened == 2 * [packaged()["digits"], Path("digits")]
