"""`python -m edge_bench`: every benchmark in a line, read from the sources without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from edge_client.cli import summary
from edge_client.extras import installed

HERE = Path(__file__).parent
COMMAND = re.compile(r"^`+python -m [^`]*`+: |: ``python -m [^`]*``")
MARK = '__name__ == "__main__"'


def modules() -> Iterator[tuple[str, str]]:
    """What can be started by `python -m`, and the first line of its docstring."""
    for file in sorted(HERE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = ".".join(("edge_bench", *file.relative_to(HERE).with_suffix("").parts))
        if file == Path(__file__) or not (MARK in text or file.name == "__main__.py"):
            continue
        said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        # A sentence that holds the command has its description before or after a colon.
        yield f"python -m {name.removesuffix('.__main__')}", COMMAND.sub("", said)


def commands() -> Iterator[tuple[str, str]]:
    """The commands that measure something, and their summaries."""
    for entry in installed("maskfleet.commands").values():
        if entry.module.partition(".")[0] == "edge_bench" or entry.name == "bench":
            yield f"maskfleet {entry.name.replace('.', ' ')}", summary(entry)


def main() -> None:
    """Print the list."""
    rows = [*commands(), *modules()]
    wide = max(len(name) for name, _ in rows)
    for name, said in rows:
        print(f"{name:<{wide}}  {said}".rstrip())
    print("\n--help after any of them says more.")


if __name__ == "__main__":
    main()
