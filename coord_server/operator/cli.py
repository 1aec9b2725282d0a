"""`maskfleet federation ...`: the operator's commands, REST underneath."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coord_server import aggregation
from coord_server.auth import OPERATOR_ENV, OPERATOR_FILE
from coord_server.operator.client import Operator
from edge_client.errors import ConfigError, first_fault
from edge_client.methods import below, make_method
from edge_client.named_bundles import bundle_folder
from edge_client.protocol.cost import UNITS, in_words, over_rounds
from edge_client.protocol.messages import Device, Failure, Federation, FederationConfig, Phase, Round, TokenRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

app = typer.Typer(help="Create, watch and steer federations on a coordinator.", no_args_is_help=True)

Url = Annotated[str, typer.Option(envvar="MASKFLEET_URL", help="The coordinator's address.")]
TokenFile = Annotated[Path, typer.Option(help=f"File with the operator's token, unless {OPERATOR_ENV} is set.")]
Id = Annotated[str, typer.Argument(help="The federation's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
T = TypeVar("T")
URL = "http://127.0.0.1:8750"
TOKEN_FILE = Path("coordinator") / OPERATOR_FILE
DIGEST = re.compile("[0-9a-f]{64}")
REMOVED, NOT_READY, FAILED = "removed", "not ready", "failed"  # a device's state; empty when it takes part
WHOLE: dict[str, tuple[str, ...]] = {  # columns of unbroken words
    "phase": get_args(Phase),
    "state": (REMOVED, NOT_READY, FAILED),
    "method": ("standalone",),
}
NAMES = {"id": 24, "device": 30}  # columns to copy from: a name of so many characters stays in one line
DIGITS = 12  # of a digest that is shown
UNKNOWN = "-"  # a round's loss or score when no device reported one


def _operator(url: str, token_file: Path) -> Operator:
    token = os.environ.get(OPERATOR_ENV, "").strip()
    if not token:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"no operator token: {token_file}: {error.strerror}; set {OPERATOR_ENV}, or name the coordinator's "
                f"DATA/{OPERATOR_FILE} with --token-file"
            ) from None
    return Operator(url, token)


def read_settings(path: Path) -> dict[str, Any]:
    """A federation's settings from TOML or, when its name ends in .json, JSON. Raises ConfigError."""
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is malformed: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no table of settings")
    return found


def check_settings(settings: dict[str, Any], where: str) -> FederationConfig:
    """The settings as a config. Raises ConfigError naming the first that does not fit."""
    try:
        return FederationConfig.model_validate(settings)
    except ValidationError as error:
        fault = first_fault(error, "settings", FederationConfig.model_fields)
        raise ConfigError(f"{where}, {fault}") from None


def _show(ask: Callable[[Operator], T], table: Callable[[T], Any], url: str, token_file: Path, as_json: bool) -> None:
    """Print what the coordinator answers: as JSON, or what `table` makes of it."""
    with _operator(url, token_file) as operator:
        found = ask(operator)
    if as_json:
        print(json.dumps(to_jsonable_python(found), indent=1))
    else:
        Console().print(*table(found), sep="\n")


def _plain(text: str) -> Text:
    """Text of a device or coordinator without markup and control characters."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _failure(who: str, failure: Failure) -> Text:
    return _plain(f"{who} failed ({failure.kind}): {failure.reason}")


def _table(*heads: str) -> Table:
    """A table for narrow terminals: text that does not fit continues in the next line, and nothing is cut off.

    A column of NAMES gives up no width to the others; its values come from `_name`.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for head in heads:
        words = (*head.split(), *WHOLE.get(head, ()))
        table.add_column(
            head,
            overflow="fold",
            no_wrap=head in WHOLE or head in NAMES,
            min_width=max((len(word) for word in words), default=0),
        )
    return table


def _name(head: str, name: str) -> str:
    """A name in lines of its column's width: one line for all but very long names."""
    most = NAMES[head]
    return "\n".join(name[at : at + most] for at in range(0, len(name), most))


def _row(f: Federation) -> tuple[str, ...]:
    if f.config is None or f.phase is None:
        return ("",) * 6
    method = str(f.config.method.get("name"))
    rounds = f"{f.round}/{f.config.rounds}" + (f" try {f.attempt}" if f.attempt > 1 else "")
    waits = f"{f.updates} in, {f.expected} due"
    ends = "" if f.deadline_in is None else f"{f.deadline_in:.0f} s"
    return method, f.phase, rounds, str(f.devices), waits, ends


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="TOML (or .json) with the federation's settings.")],
    bundle: Annotated[Path | None, typer.Option(help="Bundle folder; default: the settings' `bundle`.")] = None,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Upload the bundle and create the federation; prints its id.

    `bundle` in the file is the name of a packaged bundle ("digits"), a folder relative to the file, or the digest of a
    bundle that the coordinator has.
    """
    settings = read_settings(file)
    folder = bundle
    named = settings.get("bundle")
    if folder is None and isinstance(named, str) and not DIGEST.fullmatch(named):
        folder = bundle_folder(named, file.parent)
    # A fault in the file shows before anything is uploaded.
    check_settings({**settings, "bundle": "0" * 64} if folder is not None else settings, str(file))
    with _operator(url, token_file) as operator:
        if folder is not None:
            settings["bundle"] = operator.upload_bundle(folder)
        print(operator.create(check_settings(settings, str(file))).id)


@app.command("list")
def list_(url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List the federations."""
    _show(lambda operator: operator.federations(), _federations, url, token_file, as_json)


def _federations(found: Sequence[Federation]) -> list[Table | Text]:
    table = _table("id", "method", "phase", "round", "devices", "updates", "ends in")
    for f in found:
        table.add_row(_name("id", f.id), *_row(f))
    return [table, *(_plain(f"fault of {f.id}: {f.fault}") for f in found if f.fault)]


@app.command()
def show(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """Show a federation: phase, round, updates, deadline, fault, and its settings (--json: the whole digest)."""
    if as_json:
        _show(lambda operator: operator.federation(id_), _federation, url, token_file, as_json)
        return
    with _operator(url, token_file) as operator:
        found = operator.federation(id_)
        rounds, devices = (operator.rounds(id_), operator.devices(id_)) if found.round > 1 else ([], [])
    Console().print(*_federation(found), *cost_line(rounds), *warnings(found, rounds, devices), sep="\n")


def cost_line(rounds: Sequence[Round]) -> list[Text]:
    """What a round costs a device, as a mean over all rounds; nothing when no device said."""
    figures = over_rounds([r.cost for r in rounds])
    if not figures:
        return []
    return [Text(f"a device's round: {in_words({name: f.mean for name, f in figures.items()})} (mean of all rounds)")]


def warnings(found: Federation, rounds: Sequence[Round], devices: Sequence[Device]) -> list[Text]:
    """A sentence when the federation scores below where it started, on its devices' test samples.

    It started with what the cohort of round 1 received. It ends with the personal models that devices reported; before
    that, with what the cohort of the last closed round received.
    """
    scores = [s.mean for s in (r.score_before for r in rounds) if s is not None]
    reports = [d.report for d in devices if d.report is not None]
    final = aggregation.scores([r.score for r in reports], [r.test_samples for r in reports])
    if found.config is None or not scores:
        return []
    end = scores[-1] if final is None else final.mean
    try:
        method = make_method(found.config.method)
    except ConfigError:
        return []  # its package is not installed here
    sentence = below(method.name, end, scores[0], "the model that round 1 started from", method.hint)
    return [] if sentence is None else [Text(f"warning: {sentence}")]


def _federation(found: Federation) -> list[Table]:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    names = ("id", "method", "phase", "round", "devices", "updates", "deadline in", "fault")
    values: tuple[str | Text, ...] = (found.id, *_row(found), _plain(found.fault or ""))
    for name, value in zip(names, values, strict=True):
        if value and name != "method":  # which follows with its settings
            table.add_row(name, value)
    settings = {} if found.config is None else found.config.model_dump(mode="json")
    if "bundle" in settings:
        settings["bundle"] = settings["bundle"][:DIGITS]
    for name, setting in settings.items():
        if name != "name" and setting is not None:
            table.add_row(name, _plain(setting if isinstance(setting, str) else json.dumps(setting)))
    return [table]


@app.command()
def devices(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List a federation's devices: updates, bytes of payloads, score, last failure (--json: all bytes)."""
    _show(lambda operator: operator.devices(id_), _devices, url, token_file, as_json)


def _devices(found: Sequence[Device]) -> list[Table | Text]:
    table = _table("device", "updates", "up", "down", "score", "state")
    note = Text("\nup, down: bytes of payloads since enrolment (--json: bundle and messages too)")
    for d in found:
        score = "" if d.report is None else f"{d.report.score:.4f}"
        state = REMOVED if d.removed else NOT_READY if not d.ready else FAILED if d.failure is not None else ""
        table.add_row(
            _name("device", d.device), *(f"{n:,}" for n in (d.updates, d.bytes_up, d.bytes_down)), score, state
        )
    return [table, note, *(_failure(d.device, d.failure) for d in found if d.failure is not None)]


@app.command()
def remove(
    id_: Id,
    device: Annotated[str, typer.Argument(help="The device's name.")],
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Remove a device for good."""
    with _operator(url, token_file) as operator:
        operator.remove_device(id_, device)


@app.command()
def rounds(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List the closed rounds: scores, bits per parameter, payload bytes by kind, failures, guarded updates."""
    _show(lambda operator: operator.rounds(id_), _rounds, url, token_file, as_json)


def _rounds(found: Sequence[Round]) -> list[Table | Text]:
    table = _table(
        "round", "devices", "loss", "score", "worst", "bits/par up", "bits/par down", "seconds", "failed", "skipped"
    )
    for r in found:
        loss = UNKNOWN if r.loss is None else f"{r.loss:.4f}"
        after = r.score_after
        scores = (UNKNOWN, UNKNOWN) if after is None else (f"{after.mean:.4f}", f"{after.worst:.4f}")
        bits = (f"{r.bits_per_parameter_up:.3f}", f"{r.bits_per_parameter_down:.3f}")
        figures = (loss, *scores, *bits, f"{r.seconds:.1f}", str(len(r.failed) or ""))
        table.add_row(str(r.round), str(len(r.devices)), *figures, str(len(r.skipped) or ""))
    kinds = _table("round", "bytes up", "bytes down", "once up", "once down", "last down")
    for r in found:
        t = r.traffic
        sides = (t.up, t.down, t.one_time_up, t.one_time_down, t.last_down)
        kinds.add_row(str(r.round), *(_by_kind(side) for side in sides))
    costs = _table("round", *(f"{name} {unit}" for name, unit in UNITS.items()), "joules most", "devices")
    for r in found:
        most = r.cost.get("joules")
        means = (f"{r.cost[name].mean:.4g}" if name in r.cost else "" for name in UNITS)
        given = max((c.devices for c in r.cost.values()), default=0)
        costs.add_row(str(r.round), *means, "" if most is None else f"{most.most:.4g}", str(given or ""))
    spent: list[Table | Text] = [costs, Text()] if any(r.cost for r in found) else []
    notes = list[Text]()
    for r in found:
        notes += [_failure(f"round {r.round}: {device}", failure) for device, failure in r.failed.items()]
        notes += [_plain(f"round {r.round}: {device} {reason}") for device, reason in r.guarded.items()]
        notes += [_plain(f"round {r.round}: {device} skipped: its update could not be folded") for device in r.skipped]
    return [table, Text(), kinds, Text(), *spent, *notes]


def _by_kind(sizes: dict[str, int]) -> str:
    """Payload bytes of all devices together, one line for each kind."""
    return "\n".join(f"{kind} {size:,}" for kind, size in sizes.items())


@app.command()
def token(
    id_: Id,
    uses: Annotated[int, typer.Option(min=1, help="How many devices may enrol with it.")] = 1000,
    expires_in: Annotated[float, typer.Option(min=1.0, help="Seconds it is good for.")] = 7 * 86400.0,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Print a fresh join token."""
    with _operator(url, token_file) as operator:
        print(operator.token(id_, TokenRequest(uses=uses, expires_in=expires_in)).token)


def _operation(action: str) -> Callable[..., None]:
    def operate(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE) -> None:
        with _operator(url, token_file) as operator:
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
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Write the global state after the last closed round as a safetensors file."""
    with _operator(url, token_file) as operator:
        data = operator.state(id_)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    print(f"{output}: {len(data)} bytes")
