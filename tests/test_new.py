"""What `maskfleet new` writes runs: every model, the page's commands from simulation to devices, a method's package."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from edge_bench import new as command
from edge_bench import own_model
from edge_bench.command_line import check_folder, check_writable, filling
from edge_bench.new import new, package, project
from edge_bench.simulation import cli as simulate_cli
from edge_bench.simulation.file import read_simulation
from processes import kept_port

from edge_client import toml
from edge_client.bundle import Bundle
from edge_client.errors import ConfigError, StateError, StorageFullError
from edge_client.methods import pretrained

pytest.importorskip("sklearn")
PAGE = Path(__file__).parents[1] / "docs" / "first-project.md"


@pytest.mark.parametrize("template", ["cnn", "lstm", "vit", "mlp"])
def test_every_project_simulates_at_once_on_drawn_weights_that_its_own_export_has_too(
    template: command.Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MASKFLEET_BUNDLES", str(tmp_path / "cache"))
    new(tmp_path / "mine", template)
    assert "maskfleet simulate simulate.toml\n" in capsys.readouterr().out
    simulate_cli.simulate(tmp_path / "mine" / "simulate.toml", rounds=1, method="standalone")
    told = capsys.readouterr()
    assert "data.py:load on 10 devices, 1299 training" in told.out
    assert "warning" not in told.err
    (made,) = (tmp_path / "cache").iterdir()
    bundle = Bundle.open(made)
    assert bundle.manifest.seed == 1
    assert not pretrained(bundle.model())
    table = read_simulation(tmp_path / "mine" / "simulate.toml").export
    line = " ".join(own_model.command("model.py:build", table, bundle, Path("devices/about.toml")))
    for page in (tmp_path / "mine" / "README.md", PAGE):
        assert f"{line}\n" in re.sub(" *#.*", "", page.read_text())


def test_without_torch_a_packaged_bundle_runs_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = find_spec
    monkeypatch.setattr("edge_bench.bundles.find_spec", lambda name: None if name == "torch" else real(name))
    new(tmp_path / "mine")
    said = capsys.readouterr().out
    options = re.search(r"maskfleet simulate simulate\.toml (.*)", said)
    assert options is not None
    assert "model.py needs torch" in said
    assert "maskfleet[author]" in said
    assert options[1] == "--bundle digits"
    simulate_cli.simulate(tmp_path / "mine" / "simulate.toml", rounds=1, method="standalone", bundle="digits")
    assert "digits: 6,570 parameters" in capsys.readouterr().out


def test_a_folder_with_files_and_a_bad_name_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ConfigError, match="is not empty; name an empty or a new folder"):
        new(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        new(tmp_path / "thesis.tex")
    for name, words in (
        ("Big", "small letters"),
        ("class", "small letters"),
        ("fedavg", "such a method"),
        ("json", "module"),
    ):
        with pytest.raises(ConfigError, match=words):
            new(tmp_path / "x", method=name)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("template", ["cnn", "lstm", "vit", "mlp"])
def test_a_project_s_two_files_have_the_model_s_rounds_and_rate_in_every_method(template: command.Template) -> None:
    files = project("mine", template)
    found, federation = (toml.loads(files[f"{name}.toml"]) for name in ("simulate", "federation"))
    rates = {table["lr"] for table in [*found["methods"].values(), federation["method"]]}
    assert rates == {command.RATE[template]}
    assert found["rounds"] == federation["rounds"] == command.ROUNDS[template]


def test_a_full_disk_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, encoding: str) -> int:
        write(path, text[:9], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(StorageFullError, match=r"cannot use .*own: No space left on device; free some space, then"):
            new(tmp_path / "own")
    new(tmp_path / "own")  # the same command again


def test_what_somebody_puts_into_a_folder_before_it_is_filled_stays(tmp_path: Path) -> None:
    """Such as during the export of an own model, before `data split` writes."""
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name an empty or a new folder"), filling(tmp_path):
        raise RuntimeError
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_result_that_this_user_may_not_write_is_the_disks_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StateError, match=r"--json .*r\.json cannot be written: permission denied"):
        check_writable(Path("r.json"))
    with pytest.raises(StateError, match=r"--out .*results cannot be written: permission denied"):
        check_folder(Path("results"))


@pytest.mark.parametrize("place", ["-", "/dev/stdout", "/dev/null"])
def test_a_result_goes_to_a_file(place: str) -> None:
    with pytest.raises(ConfigError, match=f"--json {place} is no file; name one, as standard output has the tables"):
        check_writable(Path(place))


@pytest.mark.parametrize("name", ["--x", "-", "a b", "it's"])
def test_the_command_that_is_printed_next_enters_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    new(Path(name), "mlp")
    enter = re.search(r"^next: (.*?) && ", capsys.readouterr().out, re.MULTILINE)
    assert enter is not None
    done = subprocess.run(["sh", "-c", f"{enter[1]} && pwd"], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / name}\n", done.stderr


def test_names_that_a_federation_cannot_have_are_made_so() -> None:
    assert 'name = "my-net-2"' in project("my net_2", "mlp")["federation.toml"]
    assert f'name = "{"n" * 64}"' in project("n" * 70, "mlp")["federation.toml"]


def test_a_method_is_under_thirty_lines_and_carries_its_name() -> None:
    files = package("acme-fleet", "acme_masks")
    text = files["acme_masks/__init__.py"]
    assert 0 < len(text.splitlines()) < 35
    assert 0 < len(text.partition("class AcmeMasks")[2].splitlines()) < 30
    assert 'acme_masks = "acme_masks:AcmeMasks"' in files["pyproject.toml"]
    assert "mine" not in "".join(files.values()).lower().replace("determine", "")


def test_the_method_s_package_passes_its_own_tests_and_runs_beside_others(tmp_path: Path) -> None:
    new(tmp_path / "acme", method="acme_masks")
    info = tmp_path / "acme" / "acme-0.1.0.dist-info"  # as an installer writes it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.1.0\n")
    entry = re.search(r'maskfleet\.methods"\]\n(.*)', (tmp_path / "acme" / "pyproject.toml").read_text())
    assert entry is not None
    (info / "entry_points.txt").write_text(f"[maskfleet.methods]\n{entry[1].replace(chr(34), '')}\n")
    path = os.pathsep.join([str(tmp_path / "acme"), *sys.path])
    for arguments in (
        ["pytest", "-q", "-p", "no:cacheprovider", "tests"],
        ["edge_client.cli", "simulate", "simulate.toml", "--rounds", "1", "--json", "result.json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=tmp_path / "acme", env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert "acme_masks" in done.stdout
    found = json.loads((tmp_path / "acme" / "result.json").read_text())["methods"]
    up = {label: record["bytes_up_per_device_round"] for label, record in found.items()}
    assert up["acme_masks"] < up["fedavg"] / 5  # a tenth of the values, with their places


# --- the page


def commands() -> list[str]:
    """The console lines of the page, in order."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A file to run in bash, for which `maskfleet` is this checkout's."""
    script = tmp_path / "page.sh"
    (tmp_path / "bin").mkdir()
    maskfleet = tmp_path / "bin" / "maskfleet"
    maskfleet.write_text(f'#!/bin/sh\nexec {sys.executable} -m edge_client.cli "$@"\n')
    maskfleet.chmod(0o755)
    return script


def test_the_commands_of_the_page_run_as_they_are_written(shell: Path, tmp_path: Path) -> None:
    """With one round instead of twelve, a free port, and a wait for what goes on in the background."""
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    if shutil.which("bash") is None:
        pytest.skip("the page's commands are for bash")
    number, kept = kept_port()
    port = str(number)
    lines = [
        "set -e",
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        f'export MASKFLEET_URL="http://127.0.0.1:{port}"',
    ]
    for line in commands():
        lines.append(line.replace("8750", port))
        if line.startswith("cd first"):
            lines.append("sed -i 's/^rounds = 12/rounds = 1/' simulate.toml federation.toml")
        if line.startswith("maskfleet serve"):
            lines.append("for i in $(seq 300); do maskfleet federation list >/dev/null 2>&1 && break; sleep 0.1; done")
    # A bare `wait` would wait for the coordinator too: devices that have ended may be off the list.
    lines += ["devices=$(jobs -p | tail -n +2)", '[ -z "$devices" ] || wait $devices', "echo the end"]
    shell.write_text("\n".join(lines) + "\n")
    environment = {
        **os.environ, "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    with kept:
        done = subprocess.run(
            ["bash", str(shell)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drawn anew" not in done.stdout + done.stderr
    first = tmp_path / "first"
    assert (first / "result.json").is_file()
    assert (first / "result.png").is_file()
    assert len(list((first / "devices").glob("*.npz"))) == 10
    assert all((first / f"state-{k}" / "personal.onnx").is_file() for k in (1, 2, 3))
    assert "lattice, " in done.stdout  # what `federation show` begins with
    assert (tmp_path / "my-method" / "my_method" / "__init__.py").is_file()
