"""Every results file names the command that wrote it, and every benchmark ends a bad start with a sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from edge_bench import provenance
from edge_bench.__main__ import modules

BENCHMARKS = Path(provenance.__file__).parent


@pytest.mark.parametrize(
    ("module", "argv", "command"),
    [
        (
            "edge_bench.timing.step_time",
            ["step_time.py", "--json", "x.json"],
            "python -m edge_bench.timing.step_time --json x.json",
        ),
        ("edge_bench.compaction.__main__", ["x.py", "--kept", "1"], "python -m edge_bench.compaction --kept 1"),
        (None, ["/venv/bin/maskfleet", "demo", "--json", "my file"], "maskfleet demo --json 'my file'"),
        (None, [r"maskfleet.exe", "demo"], "maskfleet demo"),
    ],
)
def test_the_command_is_that_of_the_process_and_can_be_given_again(
    module: str | None, argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else SimpleNamespace(name=module)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command() == command
    assert provenance.origin()["command"] == command


def test_a_benchmark_ends_with_its_name_and_a_sentence_when_its_file_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_bench.federation.over_http", "missing.toml", "--json", "x.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    why = "missing.toml cannot be read: No such file or directory; check its path and permissions"
    assert done.stderr.strip() == f"python -m edge_bench.federation.over_http: {why}"


def test_every_benchmark_starts_its_main_in_the_one_way() -> None:
    own = [f.name for f in BENCHMARKS.rglob("*.py") if "typer.run(" in f.read_text("utf-8")]
    assert own == ["command_line.py"]
    text = "".join(f.read_text("utf-8") for f in BENCHMARKS.rglob("*.py"))
    assert not re.findall(r"provenance\.origin\([^)]", text)


WITHOUT_EXTRAS = """
import contextlib, importlib.machinery, runpy, sys

absent, folder, names = sys.argv[1].split(","), sys.argv[2], sys.argv[3:]
real = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None: None if name.partition(".")[0] in absent else real(name, path, target)
)
sys.argv = ["-m"]  # as while `python -m` imports a package
import edge_bench
for name in names:
    sys.argv = [name, "--help"]
    with open(f"{folder}/{name}", "w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit:
            pass
        except BaseException:
            sys.excepthook(*sys.exc_info())
"""
ABSENT = """fastapi uvicorn sqlalchemy jinja2 segno prometheus_client torch executorch matplotlib sklearn
pyfusefilter xxhash zstandard constriction optuna smbus2 Monsoon usb numba playwright torch_pruning flwr starlette"""


def test_the_list_has_every_benchmark_and_none_ends_in_a_traceback_when_extras_are_missing(tmp_path: Path) -> None:
    listed = subprocess.run([sys.executable, "-m", "edge_bench"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^python -m (\S+)  +\S", listed, re.MULTILINE)
    assert set(names) == {row.split()[-1] for row, _ in modules()}
    assert {"maskfleet bench", "maskfleet reproduce"} <= {" ".join(line.split()[:2]) for line in listed.splitlines()}
    words = [",".join(ABSENT.split()), str(tmp_path), *names]
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *words], capture_output=True, text=True, timeout=300)
    for name in names:
        said = (tmp_path / name).read_text()
        needs = r"edge_bench: this benchmark needs \w+, which is not installed; run: pip install 'maskfleet\[\w+\]'\n"
        assert "Usage:" in said or re.fullmatch(needs, said), (name, said, done.stderr)


def test_a_commit_has_a_mark_when_anything_but_results_has_changed(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results" / "x.json"
    results.parent.mkdir(parents=True)
    for file in (tmp_path / "code.py", results):
        file.write_text("1")
    assert provenance.commit(tmp_path) == ""
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], check=True, cwd=tmp_path)
    clean = provenance.commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    results.write_text("2")
    assert provenance.commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit(tmp_path) == clean + "+"
