"""A user's own Python files: what they may import, and how their mistakes are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client import authored
from edge_client.authored import AuthorError, load, place_of, theirs
from edge_client.errors import ConfigError, DataError


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_a_file_with_postponed_annotations_and_a_dataclass_is_loaded(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "sizes.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\nfrom typing import ClassVar\n"
        "@dataclass\nclass Sizes:\n    kind: ClassVar[str] = 'a'\n    widths: list[int] = field(default_factory=list)\n"
        "def make() -> Sizes:\n    return Sizes([4])\n",
    )
    assert load(f"{file}:make", "a function")().widths == [4]


def test_a_file_imports_its_neighbours_by_name_relatively_and_while_it_is_called(tmp_path: Path) -> None:
    written(tmp_path, "near_one.py", "ONE = 1\n")
    written(tmp_path, "parts/__init__.py", "TWO = 2\n")
    written(tmp_path, "near_late.py", "THREE = 3\n")
    file = written(
        tmp_path,
        "three-in-all.py",
        "from near_one import ONE\nfrom .parts import TWO\ndef make():\n    from near_late import THREE\n"
        "    return ONE, TWO, THREE\n",
    )
    assert load(f"{file}:make", "a function")() == (1, 2, 3)


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        written(tmp_path, f"{folder}/part.py", f"NAME = {folder!r}\n")
    files = [
        written(tmp_path, f"{f}/net.py", "from .part import NAME\ndef make():\n    return NAME\n") for f in ("a", "b")
    ]
    assert [load(f"{file}:make", "a function")() for file in files] == ["a", "b"]


def test_a_changed_file_is_run_again(tmp_path: Path) -> None:
    file = written(tmp_path, "net.py", "def make():\n    return 1\n")
    assert load(f"{file}:make", "a function")() == 1
    file.write_text("def make():\n    return 22\n")
    assert load(f"{file}:make", "a function")() == 22


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\ny = x +\n", 2, r"'y = x \+': SyntaxError: invalid syntax"),
        ("import numpy\nimport no_such_package_here\n", 2, "ModuleNotFoundError: No module named"),
        ("def f():\n    return {}['key']\nf()\n", 2, r"in f: \"return \{\}\['key'\]\": KeyError: 'key'"),
        ("from ..above import x\n", 1, "ImportError"),
    ],
)
def test_an_exception_while_importing_is_the_user_s_with_its_line(
    text: str, line: int, words: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "broken.py", text)
    with pytest.raises(AuthorError, match=rf"broken\.py, line {line}.*{words}") as raised:
        load(f"{file}:make", "a function")
    assert "\n" not in str(raised.value)


def test_the_line_is_the_innermost_of_the_user_s_own_and_not_a_library_s(tmp_path: Path) -> None:
    written(tmp_path, "deep.py", "import json\ndef parse():\n    return json.loads('{')\n")
    file = written(tmp_path, "top.py", "from deep import parse\ndef make():\n    return parse()\n")
    make = load(f"{file}:make", "a function")
    with pytest.raises(AuthorError, match=r"deep\.py, line 3, in parse: .*JSONDecodeError"), theirs("top"):
        make()


def test_an_error_of_the_project_passes_and_one_without_a_line_names_the_place() -> None:
    with pytest.raises(DataError, match=r"^too few$"), theirs("here"):
        raise DataError("too few")
    assert place_of(ValueError("never raised")) is None


def test_the_traceback_is_there_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKFLEET_DEBUG", "1")
    file = written(tmp_path, "broken.py", "1 / 0\n")
    with pytest.raises(AuthorError, match="ZeroDivisionError"):
        load(f"{file}:make", "a function")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("net.py:mak", r"no callable 'mak'; define a model; did you mean 'make'\?"),
        ("net.py:", "no callable ''"),
        ("gone.py:make", "there is no file"),
        ("net.py", r"write FILE\.py:FUNCTION"),
        ("a-b:make", r"write FILE\.py:FUNCTION"),
        ("json:lads", "did you mean 'loads'"),
    ],
)
def test_a_place_that_names_nothing_is_refused_with_the_nearest_name(place: str, words: str, tmp_path: Path) -> None:
    written(tmp_path, "net.py", "def make():\n    return 7\n")
    given = f"{tmp_path}/{place}" if ".py" in place else place
    with pytest.raises(ConfigError, match=words):
        load(given, "a model")


def test_an_installed_module_has_a_place_too() -> None:
    assert load("json:loads", "a function")("[1]") == [1]
    assert authored.is_place("x/model.py:build")
    assert not authored.is_place("digits")


@pytest.mark.parametrize(("code", "said"), [("'no data here'", "SystemExit: no data here"), ("3", "SystemExit: 3")])
def test_a_function_that_ends_the_process_is_named(tmp_path: Path, code: str, said: str) -> None:
    file = written(tmp_path, "script.py", f"import sys\ndef load():\n    sys.exit({code})\n")
    with pytest.raises(AuthorError, match=rf"script\.py, line 3, in load: .*: {said}$"), theirs("here"):
        load(f"{file}:load", "a function")()
