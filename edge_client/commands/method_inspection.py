"""`maskfleet method list` and `maskfleet method show`: the installed methods and their settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge_client.errors import ConfigError
from edge_client.methods import Method, Range, in_a_line, installed_methods, load_method, make_method

BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
USUAL: Mapping[str, str] = {
    "epochs": "Passes over a device's samples in a round.",
    "batch": "Samples of one step.",
    "lr": "Learning rate.",
    "momentum": "Of the local steps.",
    "weight_decay": "Of the local steps.",
    "up": "The value codec of what a device sends; other than float32 it codes the change.",
    "feedback": "The device adds to a change what the codec `up` lost of the change before.",
    "statistics": "Batch-norm statistics are averaged, or stay on the device.",
}
"""Settings that mean the same in every method."""


def methods() -> None:
    """List the installed methods, in a line each."""
    table = _table("method", "in a line")
    for name, found in installed_methods().items():
        try:
            words = in_a_line(load_method(found))
        except ConfigError as error:
            words = str(error)
        table.add_row(name, escape(words))
    _console().print(table)
    typer.echo("maskfleet method show NAME has the settings; docs/choosing.md says which method to choose")


def method(name: Annotated[str, typer.Argument(help="The method's name, as `maskfleet method list` has it.")]) -> None:
    """Show a method's settings: their defaults, what they take and mean, and what `maskfleet tune` searches."""
    made = make_method({"name": name})
    kind = type(made)
    console = _console()
    console.print(name, escape(in_a_line(kind)), "", sep="\n")
    table = _table("setting", "default", "takes", "meaning")
    schema, meanings = kind.model_json_schema(), descriptions(kind)
    for setting, field in kind.model_fields.items():
        default = _default(kind, setting, field.get_default(call_default_factory=True))
        table.add_row(setting, escape(default), escape(_takes(schema["properties"][setting])),
                      escape(meanings.get(setting, "")))  # fmt: skip
    console.print(table)
    if kind.drawn is not None:
        console.print("A default `A or B` is A for weights that a seed draws, B for weights from a file.")
    searched = "; ".join(f"{setting} {_values(values)}" for setting, values in kind.search.items())
    if searched:
        console.print(escape(f"`maskfleet tune` searches: {searched}"))
    if hints := made.hints():
        console.print(escape(f"what most often helps when it ends badly: {', then '.join(hints)}"))


def _default(kind: type[Method], setting: str, value: Any) -> str:
    """A default in words; one that depends on the bundle as "drawn weights' or trained weights'"."""
    if value is PydanticUndefined:
        return "required"
    if value is not None:
        return str(value)
    if hasattr(kind.drawn, setting):
        of = [getattr(choice, setting) for choice in (kind.drawn, kind.trained)]
        return " or ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in dict.fromkeys(of))
    return "none"


def descriptions(kind: type[Method]) -> dict[str, str]:
    """What each setting means, by its name: the docstring below it in the class or its bases, else the usual."""
    found = dict(USUAL)
    for base in reversed(kind.__mro__):
        if issubclass(base, Method) and base is not Method:
            found |= dict(_documented(base))
    return found


def _documented(kind: type) -> Iterator[tuple[str, str]]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # no source at hand
        return
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for line, after in pairwise(body):
        named = isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield line.target.id, " ".join(str(after.value.value).split())  # type: ignore[attr-defined]


def _takes(schema: Mapping[str, Any]) -> str:
    """A setting's values in a few words, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(filter(None, (_takes(s) for s in schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = {"integer": "whole number", "null": "", "boolean": "true or false", "string": "name", "array": "list",
            "object": "table"}.get(schema.get("type", ""), schema.get("type", "table"))  # fmt: skip
    return " ".join([kind, *(words.format(f"{schema[k]:g}") for k, words in BOUNDS.items() if k in schema)])


def _values(values: Range | tuple[Any, ...]) -> str:
    if isinstance(values, Range):
        return f"{values.low:g} to {values.high:g}" + (", by ratios" if values.log else "")
    return ", ".join(map(str, values))


def _table(*heads: str) -> Table:
    out = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        out.add_column(head, overflow="fold", no_wrap=head in ("method", "setting"))
    return out


def _console() -> Console:
    """Standard output; in a log or a pipe at least so wide that tables fit."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
