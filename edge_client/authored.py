"""A user's own Python files: a function is loaded from one, and an error that the user's code raises is shown as such.

`FILE.py:FUNCTION` names a function of a file, `package.module:FUNCTION` one of an installed package. A file may import
the files beside it, by name or relatively.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_client.errors import ConfigError, MaskfleetError, suggestion

_LIBRARIES = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = ("edge_client", "edge_kernels", "edge_export", "edge_bench", "coord_server")


class AuthorError(ConfigError):
    """The user's own code failed: its file, line and text, and the exception."""


def is_place(text: str) -> bool:
    """Whether `text` names a function of a Python file."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def stem(place: str) -> str:
    """The name of the file or module of `place`, without its folders or packages."""
    file = place.rpartition(":")[0]
    return Path(file).stem if file.endswith(".py") else file.rpartition(".")[2]


def load(place: str, what: str) -> Callable[..., Any]:
    """The function that `place` names; `what` describes it in an error, such as "a function that ...".

    Raises ConfigError when there is none, AuthorError when importing it fails.
    """
    file, _, name = place.rpartition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"{place!r}: there is no file {Path(file).resolve()}; correct the path")
    if not file or not (file.endswith(".py") or all(part.isidentifier() for part in file.split("."))):
        raise ConfigError(f"{place!r} does not name {what}; write FILE.py:FUNCTION")
    with theirs(file):
        module = _module(Path(file).resolve()) if file.endswith(".py") else importlib.import_module(file)
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"{file} has no callable {name!r}; define {what}{suggestion(name, names)}")
    call: Callable[..., Any] = found
    return call


def _module(path: Path) -> ModuleType:
    """The file run anew, as a module of a package that is its folder."""
    package = f"_author_{sha256(bytes(path.parent)).hexdigest()[:12]}"
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(path.parent)]
        sys.modules[package] = parent
    if str(path.parent) not in sys.path:  # as for a script: the file imports its neighbours by name, now or later
        sys.path.insert(0, str(path.parent))
    name = f"{package}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def theirs(what: str) -> Iterator[None]:
    """An exception within the block becomes an AuthorError; `what` stands for the place when no line is the user's.

    SystemExit is one, because `sys.exit` in the user's code would end the command without a sentence. The project's own
    errors pass. With MASKFLEET_DEBUG set the traceback is printed.
    """
    try:
        yield
    except MaskfleetError:
        raise
    except (Exception, SystemExit) as error:
        if os.environ.get("MASKFLEET_DEBUG"):
            traceback.print_exception(error)
        raise AuthorError(f"{place_of(error) or what}: {described(error)}") from error


def described(error: BaseException) -> str:
    """An exception's kind and its text in one line."""
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(error: BaseException) -> str | None:
    """Where in the user's own code `error` arose: file, line, function and the line's text; None when nowhere."""
    if isinstance(error, SyntaxError) and error.filename and not _foreign(error.filename):
        return _said(error.filename, error.lineno, "", error.text)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _foreign(f.filename)]
    if not frames:
        return None
    last = frames[-1]
    return _said(last.filename, last.lineno, "" if last.name == "<module>" else f", in {last.name}", last.line)


def _said(file: str, line: int | None, function: str, text: str | None) -> str:
    code = (text or "").strip()
    return f"{file}, line {line}{function}" + (f": {code!r}" if code else "")


def _foreign(file: str) -> bool:
    """Whether a frame's file belongs to Python, an installed package or this project."""
    if file.startswith("<"):
        return True
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts) or str(path).startswith(_LIBRARIES):
        return True
    ours = [Path(m.__file__).parent for m in map(sys.modules.get, _OURS) if m is not None and m.__file__]
    return any(path.is_relative_to(folder) for folder in ours)
