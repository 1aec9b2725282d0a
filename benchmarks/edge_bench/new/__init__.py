"""`maskfleet new`: a project with a model and data of one's own, or a package with a method. Both run as written."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from edge_bench.bundles import can_export
from edge_bench.command_line import filling, name_from
from edge_client.errors import ConfigError
from edge_client.methods import installed_methods

TEMPLATES = Path(__file__).parent / "templates"
Template = Literal["cnn", "lstm", "vit", "mlp"]
RATE = {"cnn": 0.03, "lstm": 0.2, "vit": 0.02, "mlp": 0.03}
ROUNDS = {"cnn": 12, "lstm": 20, "vit": 12, "mlp": 12}
"""Chosen by the scores of Lattice and FedAvg on the validation part."""


def new(
    folder: Annotated[Path, typer.Argument(help="An empty or a new folder; its name is the project's.")],
    template: Annotated[Template, typer.Option(help="The model to begin with.")] = "cnn",
    method: Annotated[
        str | None, typer.Option(help="Write a package with a method of this name instead, like acme_masks.")
    ] = None,
) -> None:
    """Write a small project, model.py, data.py, simulate.toml and federation.toml, that runs at once."""
    files = project(folder.resolve().name, template) if method is None else package(folder.resolve().name, method)
    with filling(folder):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
    typer.echo(f"wrote {', '.join(files)} to {folder}")
    for line in advice(folder) if method is None else [f"next: {_enter(folder)} && pip install -e '.[test]' && pytest"]:
        typer.echo(line)


def project(name: str, template: Template) -> dict[str, str]:
    """The files of a project by their names."""
    sources = {file: file for file in ("data.py", "simulate.toml", "federation.toml", "README.md")}
    called = name_from(name, "project")
    values = {"PROJECT": called, "ROUNDS": str(ROUNDS[template]), "LR": str(RATE[template])}
    files = {}
    for target, source in {"model.py": f"model_{template}.py", **sources}.items():
        text = (TEMPLATES / source).read_text("utf-8")
        files[target] = re.sub(rf"\b({'|'.join(values)})\b", lambda found: values[found[0]], text)
    return files


def package(name: str, method: str) -> dict[str, str]:
    """The files of a package with a method. Raises ConfigError for a name that cannot be a module's, or is taken."""
    if not re.fullmatch("[a-z][a-z0-9_]*", method) or keyword.iskeyword(method):
        raise ConfigError(f"--method {method!r}: use small letters, digits and _, and begin with a letter")
    if method in installed_methods() or find_spec(method) is not None:
        raise ConfigError(f"--method {method!r}: there is such a method or Python module already; choose another name")
    sources = {
        f"{method}/__init__.py": "method.py",
        f"tests/test_{method}.py": "test_method.py",
        "pyproject.toml": "method_pyproject.toml",
        "simulate.toml": "method_simulate.toml",
        "README.md": "method_README.md",
    }
    class_name = "".join(part.capitalize() for part in method.split("_"))
    called = name_from(name, method)
    found = {}
    for target, source in sources.items():
        text = (TEMPLATES / source).read_text("utf-8").replace("PROJECT", called)
        found[target] = re.sub(r"\bMine\b", class_name, re.sub(r"\bmine\b", method, text))
    return found


def advice(folder: Path) -> list[str]:
    """What can be run now, and what has to be installed for the rest."""
    data = [] if find_spec("sklearn") else ["data.py reads scikit-learn's digits; run: pip install 'maskfleet[bench]'"]
    if can_export():
        return [*data, f"next: {_enter(folder)} && maskfleet simulate simulate.toml"]
    return [
        *data,
        f"next: {_enter(folder)} && maskfleet simulate simulate.toml --bundle digits",
        "model.py needs torch, which devices do not; run: pip install 'maskfleet[author]', then leave out --bundle",
    ]


def _enter(folder: Path) -> str:
    """The shell command that changes to a folder, also to one whose name looks like an option."""
    return f"cd {shlex.quote(f'./{folder}' if str(folder).startswith('-') else str(folder))}"
