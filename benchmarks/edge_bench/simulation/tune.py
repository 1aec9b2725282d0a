"""`maskfleet tune`: a method's few important settings, searched on the validation part.

The method names the settings and ranges that are worth a search (`Method.search`). A trial is a simulation that trains
on the devices' training parts and scores on their validation parts; no trial uses test samples. The first trial
(number 0 in the record, printed as 1) is the file as it stands. Later ones are drawn by Optuna's TPE, keyed by the
seed and the number of trials before them, so that the same seed gives the same trials however often the search was
interrupted. Trials lie in an SQLite file beside the output. A trial whose score after a round is below the median of
the earlier ones at that round is given up.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import optuna
import typer
from edge_kernels import counter
from sqlalchemy.exc import SQLAlchemyError

from edge_bench import own_model, provenance, records, toml_text
from edge_bench.bundles import NAMES, is_named
from edge_bench.command_line import check_writable, name_from, plain_console, saying_when_stopped, write_json
from edge_bench.curves import amount, mean, shown
from edge_bench.progress import PAUSE, Steps
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import SimulationConfig, prepare, read_simulation
from edge_bench.simulation.simulate import RoundRow
from edge_bench.simulation.split import ABOUT
from edge_bench.simulation.workers import WorkerEndedError
from edge_client import toml
from edge_client.authored import described, is_place
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError
from edge_client.methods import Method, Range, Search
from edge_client.named_bundles import packaged

RANDOM = 6  # trials drawn at random before the sampler learns from them
COMPARED = 4  # trials that end before one can be given up
GIVEN_UP, ENDED = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE
SIZES = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}


class _GivenUp(Exception):
    """Raised inside a simulation to end a trial."""


@dataclass(frozen=True)
class Trial:
    """One simulation: the settings that it changed, its mean score over devices, payload bytes of one device in all."""

    number: int
    settings: Mapping[str, Any]
    state: Literal["ended", "given up", "failed"]
    score: float | None
    bytes: float | None
    rounds: int
    reason: str = ""

    @property
    def words(self) -> str:
        """The changed settings in a line."""
        changed = ", ".join(f"{k} = {toml_text.inline(v)}" for k, v in self.settings.items())
        return changed or "as configured"


@dataclass(frozen=True)
class Plan:
    """What is searched: a simulation whose score is the validation part's, its bundle and its devices' data."""

    config: SimulationConfig
    bundle: Bundle
    devices: Mapping[str, DeviceData]
    trials: int
    seed: int
    most_bytes: float | None = None


def suggested(trial: optuna.Trial, search: Search) -> dict[str, Any]:
    """A value for each setting; numbers are rounded to three digits, so that a file of them can be read."""
    found: dict[str, Any] = {}
    for name, values in search.items():
        if not isinstance(values, Range):
            found[name] = trial.suggest_categorical(name, values)
        elif isinstance(values.low, int) and isinstance(values.high, int):
            found[name] = trial.suggest_int(name, values.low, values.high, log=values.log)
        else:
            found[name] = float(f"{trial.suggest_float(name, values.low, values.high, log=values.log):.3g}")
    return found


def search(
    label: str,
    plan: Plan,
    storage: optuna.storages.BaseStorage,
    progress: Callable[[Trial, RoundRow | None], None] = lambda trial, row: None,
    said: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """All trials of one method, those found in `storage` first.

    `progress` is called when a new trial begins, without a row, and after each of its rounds; `said` when it ends.

    Raises ConfigError when `storage` has trials of another configuration, the method names nothing to search, or no
    device has validation samples.
    """
    if not any(len(d.y_test) for d in plan.devices.values()):
        raise ConfigError("no device has validation samples to score on; give the devices more data")
    method = plan.config.method(label)
    asked = method.search
    if not asked:
        raise ConfigError(f"the method of {label!r} names no settings to search; set some in its `search`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            storage=storage, study_name=label, direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(COMPARED, max(1, plan.config.rounds // 5)),
        )  # fmt: skip
    _check_same(study, label, plan, method)
    for running in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        study.tell(running.number, state=optuna.trial.TrialState.FAIL)  # it was killed; its place is drawn again
    done = _done(study)
    for number in range(len(done), plan.trials):
        key = counter.key(plan.seed, "tune", label, number) % 2**32
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=key)
        trial = study.ask()
        settings = suggested(trial, asked) if number else {}
        done.append(_tried(study, trial, Trial(number, settings, "ended", None, None, 0), label, plan, progress))
        said(done[-1])
    return done


def _tried(
    study: optuna.Study,
    trial: optuna.Trial,
    new: Trial,
    label: str,
    plan: Plan,
    progress: Callable[[Trial, RoundRow | None], None],
) -> Trial:
    """Run one trial and store how it ended. Raises WorkerEndedError."""
    rounds = 0

    def watch(_: str, row: RoundRow) -> None:
        nonlocal rounds
        rounds = row.record.round
        progress(new, row)
        if row.record.score_before is not None and rounds > 1:
            trial.report(row.record.score_before.mean, rounds)
            if new.number and trial.should_prune():
                raise _GivenUp

    progress(new, None)
    table = {**plan.config.methods[label], **new.settings}
    config = plan.config.model_copy(update={"methods": {label: table}, "final_epochs": False})
    try:
        (result,) = run_all(config, plan.bundle, plan.devices, watch, models=False).values()
    except _GivenUp:
        ended = Trial(new.number, new.settings, "given up", None, None, rounds, "below the median of earlier trials")
    except WorkerEndedError:
        raise  # the trial is made again
    except MaskfleetError as error:
        ended = Trial(new.number, new.settings, "failed", None, None, rounds, str(error))
    else:
        assert result.final is not None, "some device has samples to score on"
        spent = records.traffic([row.record for row in result.rows], result.devices)["bytes_per_device"]
        ended = Trial(new.number, new.settings, "ended", result.final.mean, spent, rounds)
        if plan.most_bytes is not None:
            trial.set_constraint("bytes", spent - plan.most_bytes)
    trial.set_user_attr("trial", asdict(ended))
    # A failed trial counts as one that was given up: the sampler then keeps away from its settings.
    study.tell(trial, ended.score, state=ENDED if ended.state == "ended" else GIVEN_UP)
    return ended


def _done(study: optuna.Study) -> list[Trial]:
    stored = study.get_trials(deepcopy=False, states=[ENDED, GIVEN_UP])
    return [Trial(**t.user_attrs["trial"]) for t in stored]


def _check_same(study: optuna.Study, label: str, plan: Plan, method: Method) -> None:
    """Refuse a file with trials of another configuration."""
    config = plan.config.model_dump(mode="json", exclude={"methods", "processes", "bundle"})
    what = {
        "bundle": plan.bundle.sha256, "config": config, "seed": plan.seed,
        "table": plan.config.methods[label], "most_bytes": plan.most_bytes,
        "search": {k: vars(v) if isinstance(v, Range) else list(v) for k, v in method.search.items()},
        "revision": method.revision,
    }  # fmt: skip
    text = json.dumps(what, sort_keys=True)
    before = study.user_attrs.get("asked", text)
    if before != text:
        one, other = json.loads(before), json.loads(text)
        differs = ", ".join(k for k in other if one.get(k) != other[k])
        raise ConfigError(
            f"the stored trials of {label!r} are of another {differs}; give another --out, or delete the .trials file"
        )
    study.set_user_attr("asked", text)


def best(trials: Sequence[Trial], most_bytes: float | None = None) -> Trial:
    """The trial of the highest score within the bound; of equal ones that of fewest bytes. Raises ConfigError."""
    ended = [t for t in trials if t.score is not None and t.bytes is not None]
    within = [t for t in ended if most_bytes is None or cast(float, t.bytes) <= most_bytes]
    if not ended:
        raise ConfigError(f"no trial came to its end; the last reason: {trials[-1].reason}")
    if not within:
        least = min(cast(float, t.bytes) for t in ended)
        raise ConfigError(f"no trial stays within {amount(most_bytes or 0)}; the fewest bytes were {amount(least)}")
    return max(within, key=lambda t: (cast(float, t.score), -cast(float, t.bytes)))


def open_plan(
    file: Path, methods: str | None, trials: int, seed: int | None, most_bytes: float | None
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a simulation's TOML file, and the file's table.

    Raises ConfigError, BundleError or DataError.
    """
    config = read_simulation(file, methods=methods)
    config = config.model_copy(update={"data": config.data.model_copy(update={"evaluate": "validation"})})
    bundle, data = prepare(config)
    plan = Plan(config, bundle, data.devices, trials, config.seed if seed is None else seed, most_bytes)
    return plan, toml.read(file)


def read_size(text: str | None) -> float | None:
    """Bytes from ``200000``, ``200kB`` or ``1.5MB``. Raises ConfigError."""
    if text is None:
        return None
    digits = text.rstrip("kKmMgGbB ")
    with suppress(KeyError, ValueError):
        if (size := float(digits) * SIZES[text[len(digits) :].strip().lower()]) > 0:
            return size
    raise ConfigError(f"--most-bytes {text!r}: give a number of bytes, like 200000, 200kB or 1.5MB")


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
        str | None, typer.Option(help="Only these methods, comma-separated. [default: the file's]")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Trials of each method.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Write the best settings here. [default: CONFIG.tuned.toml beside the file]")
    ] = None,
    most_bytes: Annotated[
        str | None, typer.Option(help="The most payload bytes of a device in all, like 200kB or 1.5MB.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the trials. [default: the file's]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every trial here.")] = None,
) -> None:
    """Search a method's important settings on the validation part, and write the best as a simulation's file.

    Can be stopped at any time: the same command goes on where it was, and a larger --trials adds to it.
    """
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
    bound = read_size(most_bytes)
    origin = provenance.origin()
    plan, content = open_plan(config, method, trials, seed, bound)
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
    with _alone(database), Steps(console, steps_due, PAUSE) as steps, saying_when_stopped(console, stopped):
        for label in plan.config.methods:
            results[label] = _searched(label, plan, storage, steps)
    found = {label: best(done, bound) for label, done in results.items()}
    out.write_text(f"# Written by: {origin['command']}\n{tuned_toml(content, plan, found, out, config)}", "utf-8")
    label = max(found, key=lambda k: found[k].score or 0.0)
    federation.write_text(
        federation_toml(name_from(out.name.partition(".")[0], "tuned"), plan, label, found[label]), "utf-8"
    )
    console.print("", *_lines(results, found), sep="\n")
    simulate, create = shlex.join(["simulate", str(out)]), shlex.join(["federation", "create", str(federation)])
    console.print(f"\nwrote {out}; its test score: maskfleet {simulate}")
    console.print(f"wrote {federation}, with {label}: maskfleet {create}")
    methods = {k: {"best": asdict(found[k]), "trials": [asdict(t) for t in done]} for k, done in results.items()}
    settings = plan.config.model_dump(mode="json", exclude={"processes"})
    write_json(json_file, {**origin, "settings": settings, "most_bytes": bound, "methods": methods})


def open_trials(database: Path) -> optuna.storages.BaseStorage:
    """The file of trials, made when it is not there. Raises ConfigError."""
    try:
        connect = partial(sqlite3.connect, database.resolve(), check_same_thread=False)
        # Not by a URL: a folder's name may hold ? and %, which releases of SQLAlchemy read differently.
        return optuna.storages.RDBStorage("sqlite:///trials", engine_kwargs={"creator": connect})
    except (SQLAlchemyError, RuntimeError) as error:  # RuntimeError: trials of another version of Optuna
        raise ConfigError(f"{database} holds no trials: {described(error)}; delete it, or give another --out") from None


@contextmanager
def _alone(database: Path) -> Iterator[None]:
    """Keep other searches off the file of trials meanwhile. Raises ConfigError when there is one."""
    with database.with_name(f"{database.name}.lock").open("wb") as file:  # on NFS a lock of `database` stops SQLite
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another search is using {database}; wait for it to end, or give another --out"
            ) from None
        yield


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
    for label, done in results.items():
        first, chosen = done[0], found[label]
        counts = ", ".join(f"{sum(t.state == s for t in done)} {s}" for s in ("ended", "given up", "failed"))
        before = first.state if first.score is None else f"{first.score:.3f} at {amount(first.bytes or 0)}"
        lines += [
            f"{label}: {before} as configured, {chosen.score:.3f} at {amount(chosen.bytes or 0)} tuned ({counts})",
            f"  {chosen.words}",
        ]
    return lines
