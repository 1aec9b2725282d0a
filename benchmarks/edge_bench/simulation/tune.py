"""`maskfleet tune`: a method's few important settings, searched on the validation part.

The method names the settings and ranges that are worth a search (`Method.search`). A trial is a simulation that trains
on the devices' training parts and scores on their validation parts; no trial uses test samples. `trials` draws, runs
and keeps them, beside the output.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import optuna
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from edge_bench import own_model, provenance, toml_text
from edge_bench.bundles import NAMES, is_named
from edge_bench.command_line import (
    check_writable,
    name_from,
    plain_console,
    saying_when_stopped,
    write_json,
    write_text,
)
from edge_bench.curves import amount, mean, shown
from edge_bench.progress import PAUSE, Steps
from edge_bench.simulation.file import prepare, read_simulation
from edge_bench.simulation.simulate import RoundRow
from edge_bench.simulation.split import ABOUT
from edge_bench.simulation.trials import Plan, Trial, alone, best, open_trials, search
from edge_client import toml
from edge_client.authored import is_place
from edge_client.errors import ConfigError
from edge_client.named_bundles import packaged


def open_plan(file: Path, methods: str | None, trials: int, most_bytes: float | None) -> tuple[Plan, dict[str, Any]]:
    """The plan of a simulation's TOML file, and the file's table.

    Raises ConfigError, BundleError or DataError.
    """
    config = read_simulation(file, methods=methods)
    config = config.model_copy(update={"data": config.data.model_copy(update={"evaluate": "validation"})})
    bundle, data = prepare(config)
    plan = Plan(config, bundle, data.devices, trials, most_bytes)
    return plan, toml.read(file)


def read_size(text: str | None) -> float | None:
    """Bytes from ``200000``, ``200kB`` or ``1.5MB``. Raises ConfigError."""
    if text is None:
        return None
    size = 0
    with suppress(ValidationError):
        size = TypeAdapter(ByteSize).validate_python(text)
    if not size:
        raise ConfigError(f"--most-bytes {text!r}: give a number of bytes, like 200000, 200kB or 1.5MB")
    return float(size)


def tuned_toml(content: Mapping[str, Any], plan: Plan, found: Mapping[str, Trial], out: Path, file: Path) -> str:
    """The file with the best settings. Its paths stay relative when it lies beside the file that was tuned."""
    tables = {label: {**plan.config.methods[label], **found[label].settings} for label in found}
    table: dict[str, Any] = {**content, "methods": tables}
    if out.resolve().parent != file.resolve().parent:
        moved = plan.config.data.model_dump(mode="json", include=set(content["data"]))
        places = {
            k: str(Path(moved[k]).resolve()) for k in moved if k == "path" or (k == "factory" and ".py:" in moved[k])
        }
        table["data"] = {**content["data"], **places}
        if not is_named(content["bundle"]):
            table["bundle"] = str(Path(plan.config.bundle).resolve())
    return toml_text.dumps(table)


def federation_toml(name: str, plan: Plan, label: str, trial: Trial) -> str:
    """The same method as a file for `maskfleet federation create`."""
    table = {**plan.config.methods[label], **trial.settings}
    config = plan.config.model_copy(update={"methods": {label: table}})
    bundle = config.bundle if config.bundle in packaged() else str(plan.bundle.folder.resolve())
    # What the file leaves out is the federation's own default.
    silent = {"backend", "guard", "personalise"} - config.model_dump(exclude_defaults=True).keys()
    run = config.federation(label, len(plan.devices), plan.bundle.sha256)
    given = run.model_dump(mode="json", exclude_unset=True, exclude=silent)
    return _whence(plan) + toml_text.dumps({**given, "name": name, "bundle": bundle})


def _whence(plan: Plan) -> str:
    """A comment on a bundle that lies in the cache: how it was made, and how to write it elsewhere."""
    place, m = plan.config.bundle, plan.bundle.manifest
    if is_place(place):
        described = m.class_names or m.input.normalisation or m.input.between
        about = Path("devices") / ABOUT if described else None
        line = shlex.join(own_model.command(place, plan.config.export, plan.bundle, about))
        split = f"\n# `maskfleet data split` writes {about}." if about else ""
        return f'# The bundle lies in the cache. For one of your own, with bundle = "bundle":\n# {line}{split}\n'
    return f"# The bundle {place!r}, built into the cache.\n" if place in NAMES and place not in packaged() else ""


def tune(
    config: Annotated[Path, typer.Argument(help="A simulation's TOML file.")],
    method: Annotated[
        str | None,
        typer.Option(help="Only these methods, comma-separated: labels of the file, others from their defaults."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Trials of each method.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Write the best settings here. [default: CONFIG.tuned.toml beside the file]")
    ] = None,
    most_bytes: Annotated[
        str | None, typer.Option(help="The most payload bytes of a device in all, like 200kB or 1.5MB.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every trial here.")] = None,
) -> None:
    """Search a method's important settings on the validation part, and write the best as a simulation's file.

    Can be stopped at any time: the same command goes on where it was, and a larger --trials adds to it.
    """
    out, database, federation = _outputs(config, out, json_file)
    bound = read_size(most_bytes)
    origin = provenance.origin()
    plan, content = open_plan(config, method, trials, bound)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_trials(database)
    console = plain_console()
    count, validated = len(plan.devices), sum(len(d.y_test) for d in plan.devices.values())
    console.print(
        f"{trials} trial{'s' * (trials > 1)} of {', '.join(plan.config.methods)}; {plan.config.rounds} "
        f"round{'s' * (plan.config.rounds > 1)} on {count} devices, "
        f"scored on {validated} validation samples; trials lie in {database}"
    )
    results: dict[str, list[Trial]] = {}
    stopped = "stopped; the same command goes on: trials that ended are kept, the last begins anew"
    steps_due = trials * plan.config.rounds * len(plan.config.methods)
    with alone(database), Steps(console, steps_due, PAUSE) as steps, saying_when_stopped(console, stopped):
        for label in plan.config.methods:
            results[label] = _searched(label, plan, storage, steps)
    found, without = dict[str, Trial](), list[str]()
    for label, done in results.items():
        try:
            found[label] = best(done, bound)
        except ConfigError as error:
            without.append(f"{label}: {error}")
    if not found:
        raise ConfigError("\n".join(without))
    write_text(out, f"# Written by: {origin['command']}\n{tuned_toml(content, plan, found, out, config)}")
    label, name = max(found, key=lambda k: found[k].score or 0.0), name_from(out.name.partition(".")[0], "tuned")
    write_text(federation, federation_toml(name, plan, label, found[label]))
    console.print("", *_lines(results, found), sep="\n")
    simulate, create = shlex.join(["simulate", str(out)]), shlex.join(["federation", "create", str(federation)])
    console.print(f"\nwrote {out}; its test score: maskfleet {simulate}")
    console.print(f"wrote {federation}, with {label}: maskfleet {create}")
    methods = {
        label: {"best": asdict(found[label]) if label in found else None, "trials": [asdict(t) for t in done]}
        for label, done in results.items()
    }
    settings = plan.config.model_dump(mode="json", exclude={"processes"})
    write_json(json_file, {**origin, "settings": settings, "most_bytes": bound, "methods": methods})
    if without:
        raise ConfigError("\n".join(without))


def _outputs(config: Path, out: Path | None, json_file: Path | None) -> tuple[Path, Path, Path]:
    """The files of the best settings, of the trials and of the federation. Raises ConfigError unless all differ."""
    if out is None:
        out = config.parent / f"{config.stem}.tuned.toml"
    check_writable(out, "--out", source=config)
    check_writable(json_file, source=config)
    database, federation = out.with_suffix(".trials"), out.with_suffix(".federation.toml")
    written = [file.resolve() for file in (out, database, federation)]
    if len({config.resolve(), *written}) < 4:
        raise ConfigError(
            f"--out {out}: the trials lie in {database.name}, the federation in {federation.name}; choose another, so "
            f"that these and {config} are four files"
        )
    if json_file is not None and json_file.resolve() in written:
        named = ", ".join(file.name for file in written)
        raise ConfigError(f"--json {json_file} would overwrite a file of --out ({named}); name another one")
    return out, database, federation


def _searched(label: str, plan: Plan, storage: optuna.storages.BaseStorage, steps: Steps) -> list[Trial]:
    """`search`, whose new trials and rounds are counted on `steps`."""
    rounds, ran = plan.config.rounds, list[Trial]()

    def watch(trial: Trial, row: RoundRow | None) -> None:
        name = f"{label} trial {trial.number + 1}/{plan.trials}"
        if row is None:
            steps.step(f"{name}  begins: {trial.words}", 0)
        else:
            score = shown(mean(row.record.score_before), ".3f")
            steps.step(f"{name}  round {row.record.round:3d}/{rounds}  score {score}")

    def said(trial: Trial) -> None:
        ran.append(trial)
        outcome = trial.state if trial.score is None else f"score {trial.score:.3f}  {amount(trial.bytes or 0)}"
        steps.skip(rounds - trial.rounds)
        steps.say(f"{label} trial {trial.number + 1}/{plan.trials}  {outcome}  {trial.words}")

    found = search(label, plan, storage, watch, said)
    steps.skip((plan.trials - len(ran)) * rounds)
    return found


def _lines(results: Mapping[str, Sequence[Trial]], found: Mapping[str, Trial]) -> list[str]:
    """For each method: what it scored as configured and with the best settings, and which these are."""
    lines = ["score on the validation part, payload bytes of a device in all"]
    for label, chosen in found.items():
        done, first = results[label], results[label][0]
        counts = ", ".join(f"{sum(t.state == s for t in done)} {s}" for s in ("ended", "given up", "failed"))
        before = first.state if first.score is None else f"{first.score:.3f} at {amount(first.bytes or 0)}"
        lines += [
            f"{label}: {before} as configured, {chosen.score:.3f} at {amount(chosen.bytes or 0)} tuned ({counts})",
            f"  {chosen.words}",
        ]
    return lines
