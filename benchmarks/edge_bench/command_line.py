"""What the commands of this package share: option values, result files, errors, a console."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from edge_bench import provenance
from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.errors import ConfigError, MaskfleetError, StateError, suggestion
from edge_client.files import disk, write_whole

N = TypeVar("N", int, float)


def names_of(text: str, option: str) -> list[str]:
    """The names of a comma-separated list, without spaces around them. Raises ConfigError for one twice, or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{option} {text!r}: name each one once, with commas between")
    return names


def numbers_of(text: str, option: str, kind: Callable[[str], N]) -> list[N]:
    """The numbers of a comma-separated list, made by `kind`, int or float. Raises ConfigError, also for one twice."""
    try:
        return [kind(word) for word in names_of(text, option)]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ConfigError(f"{option} {text!r}: give {whole}numbers with commas between") from None


def known_names(text: str | None, option: str, known: Collection[str], absent: str) -> list[str]:
    """`names_of` that are all `known`, or all of these without a text.

    Raises ConfigError beginning with `absent`, such as "FILE has no method".
    """
    names = [*known] if text is None else names_of(text, option)
    for name in names:
        if name not in known:
            raise ConfigError(f"{absent} {name!r}; known are {', '.join(sorted(known))}{suggestion(name, known)}")
    return names


def name_from(text: str, otherwise: str) -> str:
    """A name that a federation and a package can have: a hyphen for other characters; `otherwise` when none is left."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", text)[:64].strip("-") or otherwise


def check_writable(path: Path | None, option: str = "--json", source: Path | None = None) -> None:
    """Raise ConfigError, naming the `option` that gave the path, when `write_json` could not write there.

    Also when it would overwrite `source`, the file that the command reads. No path is nothing to check. Raise
    StateError where this user may not write.
    """
    if path is None:
        return
    if str(path) == "-" or path.parent == Path("/dev"):
        raise ConfigError(f"{option} {path} is no file; name one, as standard output has the tables")
    if source is not None and path.resolve() == source.resolve():
        raise ConfigError(f"{option} {path} would overwrite the file that is read; name another one")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for {option} {path}; make it, or name a file in another one")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise StateError(f"{option} {path} cannot be written: permission denied; name another file")


def check_new_folder(path: Path) -> None:
    """Raise ConfigError unless `path` is an empty folder, or nothing yet."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} is {'not empty' if path.is_dir() else 'a file'}; name an empty or a new folder")


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Write into a new or an empty folder; it is empty again when that fails. Raises ConfigError, StateError."""
    check_new_folder(folder)  # a long command has checked before: what somebody has put there since stays
    with disk(folder, "name another folder"):
        try:
            yield
        except BaseException:
            for written in folder.iterdir() if folder.is_dir() else ():
                shutil.rmtree(written) if written.is_dir() else written.unlink()
            raise


def check_folder(path: Path) -> None:
    """Raise ConfigError when no file could be written into this folder, the one that `--out` names.

    A folder that is not there yet is made later. Raise StateError where this user may not write.
    """
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"--out {path}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK):
        raise StateError(f"--out {path} cannot be written: permission denied; name another folder")


def check_plot(path: Path | None, json_file: Path | None) -> None:
    """Raise ConfigError when a picture could not be drawn, or not written there or only over `json_file`."""
    if path is None:
        return
    if json_file is not None and path.resolve() == json_file.resolve():
        raise ConfigError(f"--plot {path} and --json are one file; name another one")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: pictures are PNG; give a name that ends in .png")
    check_writable(path, "--plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib; run: pip install 'maskfleet[bench]'")


def write_text(path: Path, text: str) -> None:
    """Replace a result file at once, in a folder that is made. Raises StateError when it cannot be written."""
    elsewhere = "name another place"
    with disk(path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o666, elsewhere=elsewhere)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write a result file, if one is asked for. Raises StateError when it cannot be written."""
    if path is not None:
        write_text(path, json.dumps(content, indent=1) + "\n")


def run_module(main: Callable[..., None]) -> None:
    """Run `python -m edge_bench.ROOM.NAME`. An expected error ends it with one sentence and an exit code."""
    try:
        typer.run(main)
    except MaskfleetError as error:
        print(f"{provenance.program()}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def plain_console(least: int = 80) -> Console:
    """Standard output; at least so many columns in a log or a pipe, so that tables fit.

    Names from files are printed as they are: rich would take `[red]` and `:key:` in them for markup and a picture.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, least)
    return console


@contextmanager
def terminable() -> Iterator[list[ExitCode]]:
    """SIGTERM ends the block as Ctrl-C does. The last of what it yields is the exit code that is then due."""
    code = [ExitCode.INTERRUPTED]

    def stop(*_: object) -> None:
        code.append(ExitCode.TERMINATED)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield code
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def saying_when_stopped(console: Console, sentence: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with `sentence` and the exit code that is due."""
    with terminable() as code:
        try:
            yield
        except KeyboardInterrupt:
            console.print(sentence)
            raise typer.Exit(code[-1]) from None
