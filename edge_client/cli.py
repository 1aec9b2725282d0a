"""The command `maskfleet`: `join` lives here; everything else is an entry point.

An entry point of the group `maskfleet.commands` is a function with typer annotations, or a typer.Typer; a name
with a dot ("bundle.export") puts it into a group. Nothing of another room is imported until its command is called:
the list in `--help` reads the first line of its docstring from the source file. Every MaskfleetError of any command
becomes its message and its exit code here, so no command prints a traceback.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.errors import ConfigError, MaskfleetError
from edge_client.exit_codes import ExitCode, exit_code

if TYPE_CHECKING:
    from edge_client.events import Event

EXTRA_OF_PACKAGE = {"coord_server": "server", "edge_export": "author", "edge_bench": "bench"}
EXTRA_OF_MODULE = {"sklearn": "bench"}  # imported under another name than it is installed by
EXTRAS_OF_OTHERS = ("all", "dev")
QUIET = 30.0  # seconds: the same wait is said again after so long where lines cannot be overwritten


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


# --- join


class _Plain:
    """One line an event, for logs and pipes; a wait that only goes on is not repeated at once."""

    def __init__(self) -> None:
        self._said, self._at = "", 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "asking":
            return  # said when it comes to a wait
        subject = event.text.partition(";")[0]
        if event.kind == "wait" and subject == self._said and time.monotonic() < self._at + QUIET:
            return
        self._said, self._at = subject, time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {_shown(event.text)}", flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Terminal:
    """Events as lines, the present wait or training in one live line below them with the time it ends."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("starting")
        self._status.start()

    def __call__(self, event: Event) -> None:
        from rich.markup import escape

        if event.kind in ("asking", "wait", "training"):
            until = "" if event.seconds is None else time.strftime(" (%H:%M:%S)", time.localtime(_end(event.seconds)))
            self._status.update(escape(_shown(event.text)) + until)
        else:
            mark = {"sent": "green", "done": "bold green", "dropped": "yellow"}.get(event.kind, "none")
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] [{mark}]{escape(_shown(event.text))}[/]")

    def close(self) -> None:
        """Take the live line away."""
        self._status.stop()


def _shown(text: str) -> str:
    """What a coordinator says may hold anything: nothing in it moves a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _end(seconds: float) -> float:
    return time.time() + seconds


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
        float, typer.Option(min=0.0, max=600.0, help="Seconds the coordinator may hold a question for work.")
    ] = 25.0,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds without a usable answer before giving up.")
    ] = 3600.0,
    personal: Annotated[
        Path | None, typer.Option(help="Where the personal model goes. [default: personal.onnx in the state folder]")
    ] = None,
) -> None:
    """Take part in a federation with this device's data, and end with its personal model.

    Can be stopped at any time, by Ctrl-C or by pulling the plug: the same command goes on where it was.
    """
    from edge_client.client import Client  # numpy and httpx only now: --help stays fast

    say = _Terminal() if sys.stdout.isatty() else _Plain()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = Client(
            url,
            token,
            data,
            device=device,
            state=state,
            backend=backend,
            threads=threads,
            patience=patience,
            poll=poll,
            personal=personal,
        ).run(rounds, once, say)
    except KeyboardInterrupt as stop:
        say.close()
        print("stopped; nothing is lost: the same command resumes the round", file=sys.stderr, flush=True)
        code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
        raise typer.Exit(code) from None
    finally:
        say.close()
    if result.report is not None:
        r = result.report
        print(
            f"accuracy {r.accuracy:.1%} on {r.test_samples} test samples; "
            f"{r.parameters_dense} -> {r.parameters_compact} parameters; model in {result.personal}"
        )
        if r.uncompacted is not None:
            print(f"maskfleet: the model is the masked dense one, not compacted: {r.uncompacted}", file=sys.stderr)
            raise typer.Exit(ExitCode.COMPACTION)
    if result.ended == "stopped":
        raise typer.Exit(ExitCode.STOPPED)


# --- the other commands


def _summary(entry: EntryPoint) -> str:
    """First line of a command's docstring (or a typer.Typer's help), read from its source without running it."""
    package, *below = entry.module.split(".")
    try:
        spec = find_spec(package)  # of a package below another, this would import the one above
        if spec is None or spec.origin is None:
            return ""
        path = Path(spec.origin) if not below else Path(spec.origin).parent.joinpath(*below).with_suffix(".py")
        tree = ast.parse(path.read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            named = any(isinstance(t, ast.Name) and t.id == entry.attr for t in node.targets)
            texts = [k.value for k in node.value.keywords if k.arg == "help"]
            if named and texts and isinstance(texts[0], ast.Constant):
                return str(texts[0].value).partition("\n")[0]
    return ""


def _extra(package: str, missing: str | None) -> str:
    """Which extra brings module `missing` in, else the one that `package` needs anyway."""
    module = (missing or "").partition(".")[0].lower()
    if module in EXTRA_OF_MODULE:
        return EXTRA_OF_MODULE[module]
    for line in requires("maskfleet") or []:
        found = re.match(r"([\w.-]+).*;.*extra == ['\"](\w+)", line)
        if found and found[1].lower() == module and found[2] not in EXTRAS_OF_OTHERS:
            return found[2]
    return EXTRA_OF_PACKAGE.get(package, "all")


def _needs(command: str, package: str, error: ImportError) -> ConfigError:
    extra = _extra(package, error.name)
    return ConfigError(
        f"`maskfleet {command}` needs {error.name or error}, which is not installed; "
        f"run: pip install 'maskfleet[{extra}]'"
    )


def _stub(entry: EntryPoint) -> Callable[[], None]:
    def run() -> None:
        raise ConfigError(f"`maskfleet {entry.name}` was not loaded; report this as a fault of maskfleet")

    return run


def build(arguments: list[str]) -> typer.Typer:
    """The application. Of the other rooms' commands only the one that `arguments` calls is imported."""
    app = typer.Typer(
        name="maskfleet",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help="Federated learning of personal subnetworks for small devices.")(_version_option)
    app.command("join")(join)
    groups: dict[str, typer.Typer] = {}
    called = [a for a in arguments if not a.startswith("-")]
    for entry in sorted(entry_points(group="maskfleet.commands"), key=lambda e: e.name):
        words = entry.name.split(".")
        target = app
        if len(words) == 2:
            if words[0] not in groups:
                groups[words[0]] = typer.Typer(no_args_is_help=True, help=f"Commands about a {words[0]}.")
            target = groups[words[0]]
        if called[: len(words)] != words:
            target.command(words[-1], help=_summary(entry))(_stub(entry))
            continue
        loaded = _load(entry)
        if isinstance(loaded, typer.Typer):
            target.add_typer(loaded, name=words[-1])
        else:
            target.command(words[-1])(loaded)
    for name, group in groups.items():
        app.add_typer(group, name=name)
    return app


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except ImportError as error:
        raise _needs(entry.name.replace(".", " "), entry.module.partition(".")[0], error) from None


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"maskfleet {version('maskfleet')}")
        raise typer.Exit


def _version_option(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """The console script. Ends the process with a code of `edge_client.exit_codes`."""
    arguments = sys.argv[1:]
    try:
        build(arguments)()
    except MaskfleetError as error:
        print(f"maskfleet: {_shown(str(error))}", file=sys.stderr)
        sys.exit(exit_code(error))
    except ImportError as error:
        missing = _needs(arguments[0] if arguments else "", "", error)
        print(f"maskfleet: {missing}", file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    except Exception as error:
        if os.environ.get("MASKFLEET_DEBUG"):
            raise
        print(
            f"maskfleet: a fault of maskfleet itself: {type(error).__name__}: {error}; "
            "set MASKFLEET_DEBUG=1 to see where, and report it",
            file=sys.stderr,
        )
        sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
