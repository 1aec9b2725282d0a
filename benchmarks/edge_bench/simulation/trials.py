"""A search's trials: each a simulation, drawn by Optuna's TPE, kept in an SQLite file.

The first trial (number 0 in the record, printed as 1) is the configuration as it stands. Later ones are keyed by the
seed and the number of trials before them, so that the same seed gives the same trials however often the search was
interrupted. A trial whose score after a round is below the median of the earlier ones at that round is given up.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import optuna
from edge_kernels import counter
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from edge_bench import records, toml_text
from edge_bench.curves import amount
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import SimulationConfig
from edge_bench.simulation.simulate import RoundRow
from edge_bench.simulation.workers import WorkerEndedError
from edge_client.authored import described
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError, StateError
from edge_client.methods import Method, Range, Search

RANDOM = 6  # trials drawn at random before the sampler learns from them
COMPARED = 4  # trials that end before one can be given up
GIVEN_UP, ENDED = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE


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
        key = counter.key(plan.config.seed, "tune", label, number) % 2**32
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
    config = plan.config.model_dump(mode="json", exclude={"methods", "processes", "bundle", "export", "data"})
    what = {
        "bundle": plan.bundle.sha256, "data": _digest(plan.devices), "config": config,
        "table": plan.config.methods[label], "most_bytes": plan.most_bytes,
        "search": {k: vars(v) if isinstance(v, Range) else list(v) for k, v in method.search.items()},
        "revision": method.revision,
    }  # fmt: skip
    text = json.dumps(what, sort_keys=True)
    before = study.user_attrs.get("asked", text)
    if before != text:
        one, other = json.loads(before), json.loads(text)
        differs = ", ".join(k for k in {**one, **other} if one.get(k) != other.get(k))
        raise ConfigError(
            f"the stored trials of {label!r} are of another {differs}; give another --out, or delete the .trials file"
        )
    study.set_user_attr("asked", text)


def _digest(devices: Mapping[str, DeviceData]) -> str:
    """SHA-256 of every device's samples: a file may change under its name, and its name by where the command runs."""
    found = sha256()
    for name, data in devices.items():
        for part, array in vars(data).items():
            found.update(repr((name, part, array.dtype.str, array.shape)).encode() + array.tobytes())
    return found.hexdigest()


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


def open_trials(database: Path) -> optuna.storages.BaseStorage:
    """The file of trials, made when it is not there. Raises ConfigError, or StateError when its disk fails."""
    try:
        connect = partial(sqlite3.connect, database.resolve(), check_same_thread=False)
        # Not by a URL: a folder's name may hold ? and %, which releases of SQLAlchemy read differently.
        return optuna.storages.RDBStorage("sqlite:///trials", engine_kwargs={"creator": connect})
    except OperationalError as error:  # its trials may all be there
        raise StateError(f"cannot use {database}: {error.orig}; mend its disk, or give another --out") from None
    except (SQLAlchemyError, RuntimeError) as error:  # RuntimeError: trials of another version of Optuna
        raise ConfigError(f"{database} holds no trials: {described(error)}; delete it, or give another --out") from None


@contextmanager
def alone(database: Path) -> Iterator[None]:
    """Keep other searches off the file of trials meanwhile. Raises ConfigError when there is one."""
    with database.with_name(f"{database.name}.lock").open("wb") as file:  # on NFS a lock of `database` stops SQLite
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another search is using {database}; wait for it to end, or give another --out"
            ) from None
        yield
