"""The command line: it lists all commands without importing them, prints sentences and never tracebacks."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from coord_server.operator.cli import check_settings, read_settings
from edge_client import cli, events
from edge_client.bundle import MANIFEST, Init, Input, Layer, Manifest, Part, Tensor, digest
from edge_client.commands.exit_codes import ExitCode
from edge_client.errors import ConfigError
from edge_client.events import Event
from edge_client.targets import Classification


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`maskfleet ARGUMENTS` in a process of its own, after the Python statements `code`."""
    program = f"import sys\n{code}\nfrom edge_client.cli import main\nsys.argv = ['maskfleet', *sys.argv[1:]]\nmain()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)


def with_commands(tmp_path: Path, source: str, **entries: str) -> str:
    """Statements that install module `extra_room` with `source`, and commands NAME = "extra_room:ATTRIBUTE"."""
    (tmp_path / "extra_room.py").write_text(textwrap.dedent(source))
    made = [EntryPoint(name.replace("__", "."), value, "maskfleet.commands") for name, value in entries.items()]
    pairs = [(e.name, e.value) for e in made]
    return (
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.metadata as m\n"
        f"found = [m.EntryPoint(n, v, 'maskfleet.commands') for n, v in {pairs!r}]\n"
        "m.entry_points = lambda **_: found"
    )


def test_help_lists_every_command_with_its_summary_and_imports_none_of_them(tmp_path: Path) -> None:
    code = with_commands(
        tmp_path,
        '''
        import typer
        raise SystemExit("imported")
        def fly() -> None:
            """Leave the ground."""
        fleet = typer.Typer(help="Look at fleets.")
        ''',
        fly="extra_room:fly",
        fleet="extra_room:fleet",
    )
    done = run("--help", code=code)
    assert done.returncode == 0, done.stderr
    for text in ("join", "Leave the ground.", "Look at fleets."):
        assert text in done.stdout


def test_a_command_of_another_room_runs_with_its_own_options_and_errors(tmp_path: Path) -> None:
    code = with_commands(
        tmp_path,
        '''
        import typer
        from edge_client.errors import DataError
        fleet = typer.Typer()
        @fleet.command()
        def show(name: str, wide: bool = False) -> None:
            """Show one."""
            print(name, wide)
        @fleet.command()
        def sink() -> None:
            """Fail."""
            raise DataError("sample 3 is wet")
        def build(size: int) -> None:
            """Build."""
            print("size", size)
        def crash() -> None:
            """Crash."""
            print(1 // 0)
        ''',
        fleet="extra_room:fleet",
        bundle__build="extra_room:build",
        crash="extra_room:crash",
    )
    assert run("fleet", "show", "north", "--wide", code=code).stdout == "north True\n"
    assert run("bundle", "build", "3", code=code).stdout == "size 3\n"
    assert "build" in run("bundle", "--help", code=code).stdout
    sunk = run("fleet", "sink", code=code)
    assert (sunk.returncode, sunk.stderr) == (ExitCode.DATA, "maskfleet: sample 3 is wet\n")
    crashed = run("crash", code=code)
    assert crashed.returncode == ExitCode.INTERNAL
    assert "ZeroDivisionError" in crashed.stderr
    assert "Traceback" not in crashed.stderr
    assert "Traceback" in run("crash", code="import os\nos.environ['MASKFLEET_DEBUG'] = '1'\n" + code).stderr


@pytest.mark.parametrize(
    ("module", "extra"), [("fastapi", "server"), ("torch", "author"), ("sklearn", "bench"), ("zstandard", "peers")]
)
def test_a_command_whose_package_is_missing_names_the_extra_to_install(tmp_path: Path, module: str, extra: str) -> None:
    code = with_commands(
        tmp_path,
        f'''
        def now() -> None:
            """Needs a package when called."""
            import {module}
        ''',
        now="extra_room:now",
    )
    done = run("now", code=f"sys.modules[{module!r}] = None\n{code}")
    assert done.returncode == ExitCode.CONFIG
    assert f"pip install 'maskfleet[{extra}]'" in done.stderr
    assert module in done.stderr


def test_join_imports_no_server_and_no_torch(tmp_path: Path) -> None:
    check = (
        "import atexit\n"
        "bad = {'torch', 'fastapi', 'uvicorn', 'sqlalchemy', 'sklearn', 'matplotlib', 'coord_server', 'edge_bench'}\n"
        "atexit.register(lambda: print('BAD', sorted(bad & sys.modules.keys())))"
    )
    data = tmp_path / "mine.npz"
    np.savez(data, x=np.zeros((2, 3)), y=np.arange(2))
    options = ("--token", "t", "--data", str(data), "--state", str(tmp_path / "state"), "--patience", "0")
    done = run("join", "http://127.0.0.1:9", *options, code=check)
    assert done.returncode == ExitCode.UNREACHABLE, done.stderr
    assert "127.0.0.1:9 gave no usable answer" in done.stderr
    assert "BAD []" in done.stdout


@pytest.mark.parametrize("group", ["federation", "bench"])
def test_a_group_has_no_option_that_changes_the_shell_and_looks_as_all_others_do(group: str) -> None:
    said = run(group, "--help").stdout
    assert "completion" not in said
    assert said.startswith("Usage: ")


def test_wrong_usage_ends_with_code_2() -> None:
    assert run("join").returncode == ExitCode.CONFIG
    assert run("nonsense").returncode == ExitCode.CONFIG
    wrong = run("join", "fleet.example.org", "--token", "t", "--data", "d.npz")
    assert wrong.returncode == ExitCode.CONFIG
    assert "not the address of a coordinator" in wrong.stderr


def test_a_full_disk_behind_standard_output_is_no_fault_of_maskfleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "build", lambda: full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.STATE
    assert "No space left on device; free some space" in capsys.readouterr().err


def test_a_bundle_s_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    from coord_server.operator.cli import create

    file = tmp_path / "fleet.toml"
    file.write_text('bundle = "digit"\nrounds = 1\n')
    folder = re.escape(str(tmp_path / "digit"))
    with pytest.raises(
        ConfigError, match=rf"bundle 'digit': there is no folder {folder}; name .*did you mean 'digits'"
    ):
        create(file)
    file.write_text('bundle = "model.py:build"\nrounds = 1\n')
    with pytest.raises(ConfigError, match=r"'model\.py:build' is a function; `maskfleet export model\.py:build -o"):
        create(file)


def test_a_bad_device_name_is_a_sentence_and_leaves_no_state_folder(tmp_path: Path) -> None:
    options = ("--token", "t", "--data", "d.npz", "--state", str(tmp_path / "state"), "--device", "a b")
    done = run("join", "http://127.0.0.1:9", *options)
    assert (done.returncode, "'a b' is not a device name" in done.stderr) == (ExitCode.CONFIG, True), done.stderr
    assert not (tmp_path / "state").exists()


def test_a_settings_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name, text in (("a.toml", 'name = "a"'), ("a.json", '{"name": "a"}')):
        (tmp_path / name).write_text(text, "utf-8-sig")
        assert read_settings(tmp_path / name) == {"name": "a"}


def test_a_settings_file_in_json_may_not_have_a_key_twice(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"method": {"lr": 1, "lr": 2}}')
    with pytest.raises(ConfigError, match="the key 'lr' is there twice; correct it there"):
        read_settings(tmp_path / "a.json")


def test_settings_that_do_not_fit_each_other_are_refused_without_the_whole_table() -> None:
    table = {"name": "a", "bundle": "0" * 64, "method": {"name": "fedavg"}, "rounds": 1, "cohort": 1, "min_updates": 3}
    with pytest.raises(ConfigError, match=r"^a\.toml, settings: min_updates 3 is more than the cohort of 1; lower it$"):
        check_settings(table, "a.toml")


def test_an_export_to_a_file_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "data.py").write_text("x = 1\n")
    for out in ("data.py", "data.py/bundle"):
        options = ("--input", "3", "-o", str(tmp_path / out))
        done = run("export", f"{tmp_path / 'model.py'}:make", *options)
        assert (done.returncode, "is a file" in done.stderr) == (ExitCode.CONFIG, True), done.stderr
    assert (tmp_path / "data.py").read_text() == "x = 1\n"


def test_the_version_is_the_distribution_s() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.split()[0], len(done.stdout.split(".")) >= 2) == (0, "maskfleet", True)


def test_inspect_shows_a_manifest_and_finds_a_damaged_part(tmp_path: Path) -> None:
    manifest = Manifest(
        name="tiny",
        input=Input(shape=(3,)),
        target=Classification(classes=2),
        parameters=(Tensor(name="out.weight", shape=(2, 3), offset=0, init=Init(kind="uniform", scale=0.5)),),
        layers=(Layer(name="out", kind="linear", weights=("out.weight",)),),
        seed=41,
        parts={"eval.onnx": Part(sha256=digest(b"graph"), size=5)},
    )
    (tmp_path / MANIFEST).write_bytes(manifest.to_bytes())
    (tmp_path / "eval.onnx").write_bytes(b"graph")
    done = run("bundle", "inspect", str(tmp_path))
    assert done.returncode == 0, done.stderr
    target = "float32[3], target classification (classes 2"
    for text in (digest(manifest.to_bytes()), "out.weight", "2x3", "seed 41", "eval.onnx", target):
        assert text in done.stdout
    (tmp_path / "eval.onnx").write_bytes(b"grapf")
    assert run("bundle", "inspect", str(tmp_path)).returncode == ExitCode.MALFORMED
    assert run("bundle", "inspect", str(tmp_path / "none")).returncode == ExitCode.CONFIG


def test_a_log_repeats_a_wait_only_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("edge_client.events.time.monotonic", lambda: now[0])
    say = events.Log()
    for after in (0.0, 5.0, 5.0, events.QUIET, 1.0):
        now[0] += after
        say(Event("wait", f"waiting: nothing; asking again in {after} s"))
    say(Event("wait", "waiting: something else; asking again in 1 s"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("waiting: ")[2].partition(";")[0] for line in lines] == [
        "nothing",
        "nothing",
        "something else",
    ]


def test_a_command_that_its_module_imports_has_the_summary_of_its_own_module() -> None:
    pytest.importorskip("coord_server")
    entry = EntryPoint("federation", "coord_server.operator.manage:app", "maskfleet.commands")
    assert cli.summary(entry) == "Create, watch and steer federations on a coordinator."


def test_an_entry_point_of_a_missing_module_has_no_summary_and_a_sentence() -> None:
    entry = EntryPoint("ghost", "no_such_module:command", "maskfleet.commands")
    assert cli.summary(entry) == ""
    with pytest.raises(ConfigError, match="no_such_module"):
        cli._load(entry)


def test_a_command_of_another_package_does_not_replace_join(tmp_path: Path) -> None:
    code = with_commands(tmp_path, "def theirs(): print('theirs')", join="extra_room:theirs")
    done = run("join", "--help", code=code)
    assert done.returncode == 0
    assert "Take part in a federation" in done.stdout


def test_an_entry_point_that_names_no_command_is_a_sentence() -> None:
    for where in ("edge_client.cli", "edge_client.cli:NoSuch"):
        with pytest.raises(
            ConfigError, match=r"`maskfleet ghost`.*(names no function or typer\.Typer|cannot be loaded)"
        ):
            cli._load(EntryPoint("ghost", where, "maskfleet.commands"))


def test_no_text_from_a_coordinator_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    events.Log()(Event("info", "a \x1b[2J b\r\x07 \u00e9"))
    assert "a \ufffd[2J b\ufffd\ufffd \u00e9\n" in capsys.readouterr().out


def test_the_public_names_load_when_they_are_used_and_importing_the_package_loads_nothing() -> None:
    program = (
        "import sys, edge_client\n"
        "assert not {'numpy', 'pydantic', 'httpx', 'onnx'} & sys.modules.keys()\n"
        "from edge_client import *\n"
        "from edge_client import Bundle, Client, Method\n"
        "from edge_client.device.client import Client as same\n"
        "assert Client is same\n"
        "assert not {'torch', 'onnx', 'fastapi'} & sys.modules.keys(), sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
