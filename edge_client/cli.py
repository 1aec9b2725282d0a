"""The command `maskfleet`: `join` lives here; every other command is an entry point.

An entry point of the group `maskfleet.commands` is a function with typer annotations, or a typer.Typer; a name with a
dot ("bundle.inspect") puts it into a group. A command's module is imported when the command is called: the list in
`--help` reads the first line of its docstring from the source file. Every MaskfleetError of any command becomes its
message and its exit code here, so no command prints a traceback.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from edge_client.align import Align
from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.commands.stopping import end_on_signals
from edge_client.errors import MaskfleetError
from edge_client.events import Log, Terminal, shown
from edge_client.extras import installed, load, needs
from edge_client.files import FULL

PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def join(
    url: Annotated[str, typer.Argument(help="The coordinator's address, like https://fleet.example.org.")],
    token: Annotated[str, typer.Option(help="The join token.", envvar="MASKFLEET_TOKEN")],
    data: Annotated[Path, typer.Option(help="This device's data: an .npz file with x and y.")],
    device: Annotated[str | None, typer.Option(help="This device's name. [default: host name and six digits]")] = None,
    state: Annotated[
        Path | None, typer.Option(help="State folder. [default: ~/.local/state/maskfleet/..., one for each token]")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Training backend. [default: the federation's, else onnxruntime]")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Ask for work once, do what there is, and end.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="End after so many rounds. [default: the last]")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads for training.")] = 1,
    poll: Annotated[
        float, typer.Option(min=0.0, max=600.0, help="Seconds the coordinator may hold a request for work.")
    ] = 25.0,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds without a usable answer before giving up.")
    ] = 3600.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the personal model goes: an .onnx file, or a folder. [default: the state folder]"),
    ] = None,
    personalise: Annotated[
        Literal["best", "global", "local"] | None,
        typer.Option(help="The model to keep; best: on the validation samples. [default: the federation's choice]"),
    ] = None,
    max_parameters: Annotated[
        int, typer.Option(min=1, help="Most parameters of a model; a larger one is refused before it takes memory.")
    ] = 1 << 25,
    meter: Annotated[
        str, typer.Option(help="Energy meter: auto, none, or one that `maskfleet bench meters` lists.")
    ] = "auto",
    align: Annotated[
        Align, typer.Option(help="Widths of the personal model's layers: by a rule, as masked, or measured here.")
    ] = "rule",
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(
            help="Print a line for each event, as text or JSON. [default: a live display, text without terminal]"
        ),
    ] = None,
    secret: Annotated[
        int | None, typer.Option(min=0, help="The device's own randomness, for experiments only. [default: drawn]")
    ] = None,
) -> None:
    """Take part in a federation with this device's data, and end with its personal model.

    Can be stopped at any time, by Ctrl-C or by pulling the plug: the same command resumes.
    """
    end_on_signals()
    from edge_client.device.client import Client  # numpy and httpx only now: --help stays fast
    from edge_client.logs import set_up

    set_up(log_format or "text", "warning", sys.stdout if log_format else sys.stderr)
    say = Terminal() if sys.stdout.isatty() and log_format is None else Log(log_format == "json")
    client = Client(
        url,
        token.strip(),  # a service's file of variables, or a pasted one, may have a space at its end
        data,
        device=device,
        state=state,
        backend=backend,
        threads=threads,
        patience=patience,
        poll=poll,
        out=out,
        personalise=personalise,
        max_parameters=max_parameters,
        align=align,
        secret=secret,
        meter=meter,
    )
    try:
        result = client.run(rounds, once, say)
    finally:
        say.close()
    if result.report is not None:
        r = result.report
        where = "" if result.personal is None else f"; model in {result.personal}"
        print(
            f"score {r.score:.3f} on {r.test_samples} test samples; "
            f"{r.parameters_dense} -> {r.parameters_compact} parameters{where}"
        )
        if r.uncompacted is not None:
            print(f"maskfleet: the model is the masked dense one, not compacted: {r.uncompacted}", file=sys.stderr)
            raise typer.Exit(ExitCode.COMPACTION)
    if result.ended == "stopped":
        raise typer.Exit(ExitCode.STOPPED)


# --- the other commands


class _Lazy(TyperGroup):
    """Commands of entry points by their names within this group, each imported when it is called."""

    def __init__(self, entries: Mapping[str, EntryPoint], **settings: Any) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode=None, **settings)
        self.entries = entries

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*self.commands, *(name.partition(".")[0] for name in self.entries)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command as `--help` lists it."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in self.entries:
            return TyperCommand(cmd_name, help=summary(self.entries[cmd_name]), rich_markup_mode=None)
        prefix = f"{cmd_name}."
        below = {name.removeprefix(prefix): e for name, e in self.entries.items() if name.startswith(prefix)}
        return _Lazy(below, name=cmd_name, help=f"Commands: {', '.join(below)}.") if below else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, imported."""
        entry = self.entries.get(args[0])
        return super().resolve_command(ctx, args) if entry is None else (args[0], _load(entry), args[1:])


def _load(entry: EntryPoint) -> Any:
    """The command behind an entry point. Raises ConfigError when it, or a package it needs, does not load."""
    name = entry.name.replace(".", " ")
    return _command(load(entry, f"`maskfleet {name}`", callable, "function or typer.Typer"), name.split()[-1])


def _command(what: Any, name: str) -> Any:
    if isinstance(what, typer.Typer):
        return typer.main.get_command(what)
    app = typer.Typer(**PLAIN)
    app.command(name)(what)
    return typer.main.get_command(app)


def summary(entry: EntryPoint) -> str:
    """First line of a command's docstring (or a typer.Typer's help), read from its source without running it."""
    package, *below = entry.module.split(".")
    try:
        spec = find_spec(package)  # for a module inside a package, find_spec would import the package
        if spec is None or spec.origin is None:
            return ""
        path = Path(spec.origin) if not below else Path(spec.origin).parent.joinpath(*below).with_suffix(".py")
        if not path.is_file():
            path = path.with_suffix("") / "__init__.py"
        tree = ast.parse(path.read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.ImportFrom) and not node.level and any(n.name == entry.attr for n in node.names):
            return summary(EntryPoint(entry.name, f"{node.module}:{entry.attr}", entry.group))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            named = any(isinstance(t, ast.Name) and t.id == entry.attr for t in node.targets)
            texts = [k.value for k in node.value.keywords if k.arg == "help"]
            if named and texts and isinstance(texts[0], ast.Constant):
                return str(texts[0].value).partition("\n")[0]
    return ""


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"maskfleet {version('maskfleet')}")
        raise typer.Exit


def _options(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Federated learning for small devices: one model together, one of its own on each."""


def build() -> TyperGroup:
    """The command with all its subcommands."""
    own = typer.Typer(**PLAIN)
    own.callback()(_options)
    options = typer.main.get_group(own)
    here = {"join": _command(join, "join")}
    return _Lazy(
        {name: e for name, e in installed("maskfleet.commands").items() if name not in here},
        name="maskfleet",
        help=_options.__doc__,
        params=options.params,
        callback=options.callback,
        commands=here,
    )


def main() -> None:
    """The console script. Ends the process with a code of `edge_client.commands.exit_codes`."""
    try:
        build()()
    except MaskfleetError as error:
        print(f"maskfleet: {shown(str(error))}", file=sys.stderr)
        sys.exit(exit_code(error))
    except ImportError as error:
        command = " ".join(["maskfleet", *sys.argv[1:2]])
        print(f"maskfleet: {needs(f'`{command}`', '', error)}", file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    except Exception as error:
        if os.environ.get("MASKFLEET_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in FULL:  # standard output, or a temporary file
            print(f"maskfleet: {error.strerror}; free some space, then run the same command again", file=sys.stderr)
            sys.exit(ExitCode.STATE)
        print(
            f"maskfleet: a fault of maskfleet itself: {type(error).__name__}: {error}; "
            "set MASKFLEET_DEBUG=1 to see where, and report it",
            file=sys.stderr,
        )
        sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
