"""`maskfleet federation ...`: the operator's commands, REST underneath."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python
from rich.console import Console

from coord_server.auth import OPERATOR_ENV, OPERATOR_FILE, TOKEN_FILE, URL, sendable
from coord_server.operator import tables
from coord_server.operator.client import Operator
from coord_server.operator.show import look, overview, settings_table, show_live
from edge_client import toml
from edge_client.bundle import Bundle
from edge_client.cli import PLAIN
from edge_client.errors import ConfigError, first_fault
from edge_client.files import write_whole
from edge_client.named_bundles import bundle_folder
from edge_client.protocol import patterns
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.operator import TokenRequest
from edge_client.protocol.payload import without_repeats

app = typer.Typer(help="Create, watch and steer federations on a coordinator.", no_args_is_help=True, **PLAIN)

Url = Annotated[str, typer.Option(envvar="MASKFLEET_URL", help="The coordinator's address.")]
TokenFile = Annotated[Path, typer.Option(help=f"File with the operator's token, unless {OPERATOR_ENV} is set.")]


def of_a_path(given: str) -> str:
    """A name or an id, which becomes a part of an address. Raises BadParameter for what no name can be."""
    if not NAME.fullmatch(given):
        raise typer.BadParameter(f"{given!r} is no name: letters, digits, '.', '_' and '-', 64 at most")
    return given


Id = Annotated[str, typer.Argument(metavar="ID", help="The federation's id.", callback=of_a_path)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
PRESENCE = 300.0  # seconds, for a federation whose settings cannot be read
NAME = re.compile(patterns.NAME)
WIDE = 500  # columns of what is no terminal
DIGEST = re.compile(patterns.DIGEST)


def connected(url: str, token_file: Path) -> Operator:
    """The operator of a coordinator. Raises ConfigError without a token."""
    token, source = os.environ.get(OPERATOR_ENV, "").strip(), OPERATOR_ENV
    if not token:
        source = str(token_file)
        try:
            token = token_file.read_text(errors="replace").strip()
        except OSError as error:
            raise ConfigError(
                f"no operator token: {token_file}: {error.strerror}; set {OPERATOR_ENV}, or name the coordinator's "
                f"DATA/{OPERATOR_FILE} with --token-file"
            ) from None
    if not sendable(token):
        raise ConfigError(f"{source} holds no valid token (one line of printable ASCII); copy it from the coordinator")
    return Operator(url, token)


def read_settings(path: Path) -> dict[str, Any]:
    """A federation's settings from TOML or, when its name ends in .json, JSON. Raises ConfigError."""
    if path.suffix != ".json":
        return toml.read(path)
    try:
        found = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=without_repeats)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its path and permissions") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; correct it there") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no table of settings; write one JSON object")
    return found


def check_settings(settings: dict[str, Any], where: str) -> FederationConfig:
    """The settings as a config. Raises ConfigError naming the first that does not fit."""
    try:
        return FederationConfig.model_validate(settings)
    except ValidationError as error:
        fault = first_fault(error, "settings", FederationConfig.model_fields)
        raise ConfigError(f"{where}, {fault}") from None


def asked(message: type[M], **given: Any) -> M:
    """A request of the options `given`; None stands for one that is left out. Raises ConfigError."""
    try:
        return message.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        where, _, why = first_fault(error).partition(" ")
        raise ConfigError(f"--{where.replace('_', '-')} {why}") from None


def _say(found: T, table: Callable[[T], Any], as_json: bool) -> None:
    """Print what the coordinator answered: as JSON, or what `table` makes of it."""
    if as_json:
        print(json.dumps(to_jsonable_python(found), indent=1))
    else:
        # Into a pipe lines stay whole, so that commands can be copied.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
        Console(highlight=False, emoji=False, width=width).print(*table(found), sep="\n")


def answer(ask: Callable[[Operator], T], table: Callable[[T], Any], url: str, token_file: Path, as_json: bool) -> None:
    """Print what a coordinator answers to `ask`, as `_say` does."""
    with connected(url, token_file) as operator:
        found = ask(operator)
    _say(found, table, as_json)


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="TOML (or .json) with the federation's settings.")],
    bundle: Annotated[
        str | None, typer.Option(help="Bundle's folder or name; default: the settings' `bundle`.")
    ] = None,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Upload the bundle and create the federation; prints its id.

    `bundle` in the file is the name of a packaged bundle ("digits"), a folder relative to the file, or the digest of a
    bundle that the coordinator has.
    """
    settings = read_settings(file)
    folder, named = None, settings.get("bundle")
    if bundle is not None:
        folder = bundle_folder(bundle, Path())
    elif isinstance(named, str) and not DIGEST.fullmatch(named):
        folder = bundle_folder(named, file.parent)
    # A fault in the file shows before anything is uploaded.
    check_settings({**settings, "bundle": "0" * 64} if folder is not None else settings, str(file))
    with connected(url, token_file) as operator:
        if folder is not None:
            settings["bundle"] = operator.upload_bundle(folder)
            for line in Bundle.open(folder).warnings:
                print(f"warning: {line}", file=sys.stderr)
        made = operator.create(check_settings(settings, str(file)))
    if made.caution is not None:
        print(f"warning: {made.caution}", file=sys.stderr)
    print(made.id)


@app.command("list")
def list_(url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List the federations."""
    answer(lambda operator: operator.federations(), tables.federations, url, token_file, as_json)


@app.command()
def show(
    id_: Id,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the federation ends; Ctrl-C leaves.")] = False,
    config: Annotated[bool, typer.Option("--config", help="Print the settings instead.")] = False,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
    as_json: AsJson = False,
) -> None:
    """Show a federation: what runs, how well, who is missing and why, what to do next."""
    if watch + config + as_json > 1:
        raise ConfigError("--watch, --config and --json exclude each other; give one of them")
    with connected(url, token_file) as operator:
        if as_json:
            _say(operator.federation(id_), lambda _: [], True)
        elif config:
            _say(operator.federation(id_), settings_table, False)
        elif watch:
            show_live(lambda before: look(operator, id_, url, before), Console(highlight=False, emoji=False))
        else:
            _say(look(operator, id_, url), overview, False)


@app.command()
def devices(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List a federation's devices: updates, bytes of payloads, score, when last seen, state (--json: all bytes)."""
    with connected(url, token_file) as operator:
        config, found = operator.federation(id_).config, operator.devices(id_)
    presence = PRESENCE if config is None else config.presence_seconds
    _say(found, lambda devices: tables.devices(devices, presence), as_json)


@app.command()
def remove(
    id_: Id,
    device: Annotated[str, typer.Argument(help="The device's name.", callback=of_a_path)],
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Remove a device for good."""
    with connected(url, token_file) as operator:
        operator.remove_device(id_, device)
    print(f"{device}: removed from {id_}")


@app.command()
def rounds(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List the closed rounds: scores, bits per parameter, payload bytes by kind, failures, guarded updates."""
    answer(lambda operator: operator.rounds(id_), tables.rounds, url, token_file, as_json)


@app.command()
def token(
    id_: Id,
    uses: Annotated[int, typer.Option(help="How many devices may enrol with it.")] = 1000,
    expires_in: Annotated[float, typer.Option(help="Seconds it is good for.")] = 7 * 86400.0,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Print a fresh join token."""
    with connected(url, token_file) as operator:
        print(operator.token(id_, asked(TokenRequest, uses=uses, expires_in=expires_in)).token)


def _operation(action: str) -> Callable[..., None]:
    def operate(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE) -> None:
        with connected(url, token_file) as operator:
            f = operator.operate(id_, action)
        print(f"{f.id}: {f.phase}, round {f.round}" + (f" of {f.config.rounds}" if f.config else ""))

    return operate


for _action, _help in {
    "start": "Begin round 1 with the devices there are.",
    "pause": "Stop the round's clock; updates under way are still taken.",
    "resume": "Go on after a pause.",
    "stop": "End a federation for good; its state can still be exported.",
}.items():
    app.command(_action, help=_help)(_operation(_action))


@app.command()
def export(
    id_: Id,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the method's state here, as safetensors.")
    ] = None,
    onnx: Annotated[Path | None, typer.Option(help="Write the global model here, ready to run.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="An .npz file: verify the model on its x too; a model of integers needs it."),
    ] = None,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Write the global model as ONNX, or the method's state, after the last closed round.

    The model is verified before it is written: it is run against the masked network on random inputs.
    """
    if output is None and onnx is None:
        raise ConfigError("nothing to write; give --onnx FILE for the model, or --output FILE for the method's state")
    with connected(url, token_file) as operator:
        if output is not None:
            written = operator.state(id_)
            write_whole(output, written, mode=0o666, elsewhere="choose another --output")
            print(f"{output}: {len(written)} bytes")
            why = operator.federation(id_).no_global_model
            if why is not None:
                print(f"warning: this is no model that all devices share: {why}", file=sys.stderr)
        if onnx is not None:
            from coord_server.operator.export import export_onnx  # onnx is needed only here

            print(export_onnx(operator, id_, onnx, data))
