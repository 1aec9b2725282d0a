"""The command `maskfleet reproduce`: runs a reproduction's cells, each once, and merges them into one result.

A cell (task, method, seed) is written to its own file when it ends, under a digest of its settings; a second start
runs only what is missing or has other settings now. `result.json` has every cell, means over the seeds, and where the
figures come from; cells are read from it too, so another seed or method costs only itself. `table.md` and the PNGs are
made from it (`results_page`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import JustifyMethod
from rich.table import Table

from edge_bench import advice, provenance
from edge_bench.command_line import check_folder, known_names, plain_console, saying_when_stopped, write_text
from edge_bench.curves import mean, shown
from edge_bench.data import datasets
from edge_bench.progress import PAUSE, Steps
from edge_bench.reproductions import reproduction, small
from edge_bench.reproductions.reproduction import Cell, Reproduction, key, method_of, stands
from edge_bench.reproductions.result_file import merge, rounded, write
from edge_bench.reproductions.results_page import RESULTS
from edge_bench.reproductions.stored_runs import CELLS, Run, known, stored
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import find_bundle
from edge_bench.simulation.record import simulated
from edge_bench.simulation.simulate import RoundRow
from edge_client.bench.tables import plain_table
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError


def run_cell(cell: Cell, bundle: Bundle, devices: Mapping[str, DeviceData], steps: Steps, compact: bool = False) -> Run:
    """Run one cell; with `compact` also measure a pruned model of its first device. Raises MaskfleetError."""

    def said(label: str, row: RoundRow) -> None:
        r = row.record
        score = f"loss {shown(r.loss, '.3f')}  score {shown(mean(r.score_before), '.3f')}"
        steps.step(f"{cell.name:28s} round {r.round:3d}/{cell.config.rounds}  {score}")

    result = run_all(cell.config, bundle, devices, said, models=compact)[cell.label]
    record = simulated(result)
    rounds = record.pop("rounds")
    slim = {
        **record,
        **reproduction.revisions(result.method, cell.config.bundle),
        "task": cell.task,
        "label": cell.label,
        "seed": cell.config.seed,
        "bytes_of_all_devices": record["bytes_per_device"] * record["devices"],
        "best_score": record.get("best_round", {}).get("score_after"),
        "rounds": {
            "loss": [r["loss"] for r in rounds],
            "score_before": [r["score_before"] and r["score_before"]["mean"] for r in rounds],
            "score_after": [r["score_after"] and r["score_after"]["mean"] for r in rounds],
            "bits_per_parameter_up": [r["bits_per_parameter_up"] for r in rounds],
            "bits_per_parameter_down": [r["bits_per_parameter_down"] for r in rounds],
        },
        "seconds": result.seconds,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    if compact and result.kept_share < 1:
        first = min(result.personal)
        slim["small"] = small.figures(bundle, result.personal[first], devices[first])
    short: Run = rounded(slim)
    return short


# --- the command


def prepare(wanted: Iterable[Cell], name: str) -> dict[str, tuple[Cell, str]]:
    """Every cell and its key, by the cell's name. Raises ConfigError when a method is not there."""
    keyed = {}
    for cell in wanted:
        try:
            method_of(cell)
        except MaskfleetError as error:
            raise ConfigError(f"reproduction {name!r} cannot run {cell.name}: {error}") from None
        keyed[cell.name] = cell, key(cell)
    return keyed


def listing() -> Table:
    """One line for each reproduction."""
    table = plain_table()
    for head in ("name", "what", "min/seed", "results"):
        justify: JustifyMethod = "right" if head == "min/seed" else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=head == "name")
    for name in reproduction.names():
        r = reproduction.read(name)
        table.add_row(name, r.title, str(r.minutes), _state(RESULTS / name))
    return table


def _state(folder: Path) -> str:
    """In a few words, which results a folder has."""
    try:
        found = stored(folder)
    except ConfigError:
        return "result.json is damaged"
    if found is None or not found["runs"]:
        return "none yet"
    n = len({run["seed"] for run in found["runs"].values()})
    return f"{n} seed{'s' if n > 1 else ''}"


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which one; see --list.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List all reproductions.")] = False,
    full: Annotated[bool, typer.Option("--full", help="At the paper's scale, for a bigger machine.")] = False,
    methods: Annotated[
        str | None, typer.Option("--method", help="Only these methods, by label, comma-separated.")
    ] = None,
    tasks: Annotated[str | None, typer.Option("--task", help="Only these tasks, comma-separated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0. [default: the file's]")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write. [default: benchmarks/results/NAME]")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. [default: one a core]")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="METHOD.SETTING=VALUE, with --validation only.")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Score on the validation part, to choose settings.")
    ] = False,
) -> None:
    """Repeat a table or figure of a paper; finished parts are not run again."""
    console = plain_console()
    if show or name is None:
        console.print(listing())
        return
    r = reproduction.read(name, full)
    if changes and not validation:
        raise ConfigError("--set changes what a reproduction is; use it with --validation, then write the file")
    labels = known_names(methods, "--method", r.methods, f"{name} has no method")
    there = known_names(tasks, "--task", r.tasks, f"{name} has no task")
    folder = out or (RESULTS if RESULTS.is_dir() else Path("results")) / (f"{name}-full" if full else name)
    chosen = tuple(range(seeds)) if seeds else r.seeds
    used = reproduction.changed(r, changes or (), labels)
    cells = reproduction.cells(used, chosen, labels, "validation" if validation else "test")
    wanted = [cell for cell in cells if cell.task in there]
    _refuse_another(folder, name, full)
    done = known(folder, lambda said: advice.warn(console, [said]))
    keyed = prepare(wanted, name)
    owed = _missing(keyed, done)
    if owed:
        check_folder(folder)
    console.print(f"{name}: {r.title}; {len(keyed)} cells, {len(owed)} to run, into {folder}")
    stopped = "stopped; the same command goes on: cells that ended are kept, the one under way begins anew"
    steps_due = sum(cell.config.rounds for cell in owed.values())
    with Steps(console, steps_due, PAUSE) as steps, saying_when_stopped(console, stopped):
        failures = run_cells(owed, folder / CELLS, processes, validation, r.small, steps)
    done = known(folder)  # also what another start wrote there meanwhile
    finish(name, r, folder, done, full)
    if validation:
        for cell, sha in keyed.values():
            if sha in done:
                console.print(f"{cell.name}: {shown(done[sha]['score_mean'], '.4f')} on the validation part")
    else:
        if not owed and out is None:
            console.print("all figures are stored ones; --out FOLDER runs the cells on this machine")
        console.print((folder / "table.md").read_text("utf-8"))
    if failures:
        raise ConfigError("; ".join(f"{cell}: {why}" for cell, why in failures.items()))


def _missing(keyed: Mapping[str, tuple[Cell, str]], done: Mapping[str, Run]) -> dict[str, Cell]:
    """The cells by key that no finished run stands for."""
    return {
        sha: cell
        for cell, sha in keyed.values()
        if sha not in done or not stands(done[sha], method_of(cell), cell.config.bundle)
    }


def _refuse_another(folder: Path, name: str, full: bool) -> None:
    """Raise ConfigError when the folder's result is another reproduction's, whose runs would be lost."""
    there = stored(folder)
    if there is not None and (there.get("name", name), there.get("full", full)) != (name, full):
        scale = "full" if there.get("full") else "reduced"
        raise ConfigError(f"{folder} holds the {scale} result of {there['name']!r}; choose another --out")


def run_cells(
    cells: Mapping[str, Cell], folder: Path, processes: int | None, validation: bool, compact: bool, steps: Steps
) -> dict[str, str]:
    """Run cells, by digest, and write each to its file when it ends. Returns why cells failed, by name.

    Data and bundles stay open while the cells that follow have the same.
    """
    failures, bundles = dict[str, str](), dict[str, Bundle]()
    data: tuple[Any, dict[str, DeviceData]] = (None, {})
    for sha, cell in cells.items():
        config = cell.config.model_copy(update={"processes": processes})
        try:
            bundle = bundles.get(config.bundle) or find_bundle(config.bundle)
            bundles[config.bundle] = bundle
            if data[0] != (cell.task, config.seed):
                devices = datasets.load(config.data, config.seed, bundle.manifest)
                data = (cell.task, config.seed), devices
            run = run_cell(Cell(cell.task, cell.label, config), bundle, data[1], steps, compact)
        except MaskfleetError as error:
            failures[cell.name] = str(error)
            steps.say(f"{cell.name} failed: {error}")
            continue
        run |= {"cell": sha, "validation": validation}
        if validation:
            run = {k: v for k, v in run.items() if k not in ("rounds", "curve")}
        write_text(folder / f"{sha}.json", json.dumps(run) + "\n")
        steps.say(f"{cell.name}: {shown(run['score_mean'], '.4f')} in {run['seconds']:.0f} s")
        for warning in advice.warnings({cell.label: run}, {cell.label: method_of(cell)}, model=bundle.model()):
            steps.say(warning)
    return failures


def finish(name: str, r: Reproduction, folder: Path, done: Mapping[str, Run], full: bool) -> None:
    """Write the result of every finished cell of the present file, also of those that this start did not run."""
    seeds = tuple(sorted({run["seed"] for run in done.values() if not run["validation"]}))
    found: dict[str, tuple[Cell, Run, bool]] = {}
    for cell in reproduction.cells(r, seeds):
        try:
            run = done.get(key(cell))
            if run is not None:  # the file may have renamed its method
                standing = stands(run, method_of(cell), cell.config.bundle)
                found[cell.name] = cell, {**run, "label": cell.label}, standing
        except MaskfleetError:  # the method of another cell is not there
            continue
    # Runs of an earlier method stay, marked, until the row has one of the present method: no mean has both.
    anew = {(cell.task, cell.label) for cell, _, standing in found.values() if standing}
    current = {n: run for n, (cell, run, standing) in found.items() if standing or (cell.task, cell.label) not in anew}
    tried = {f"{run['task']}/{run['label']}/{run['cell']}": run for run in done.values() if run["validation"]}
    command = f"maskfleet reproduce {name}" + (" --full" if full else "")
    write(folder, merge(name, r, command, current, tried, full))
