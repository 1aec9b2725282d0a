"""The command `maskfleet simulate`: arguments in, progress and tables out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from edge_bench import advice, curves, provenance, tables
from edge_bench.command_line import check_plot, check_writable, plain_console, terminable, write_json
from edge_bench.data import histogram
from edge_bench.progress import Steps
from edge_bench.simulation import result
from edge_bench.simulation.comparison import InterruptedRun, run_all
from edge_bench.simulation.file import SimulationConfig, open_simulation
from edge_bench.simulation.record import simulated
from edge_bench.simulation.simulate import RoundRow, Simulated
from edge_client.bundle import Bundle
from edge_client.commands.exit_codes import ExitCode
from edge_client.data import DeviceData
from edge_client.errors import BundleError, ConfigError, MaskfleetError
from edge_client.targets import Classification, Sequence


def _labels(
    console: Console,
    config: SimulationConfig,
    bundle: Bundle,
    devices: Mapping[str, DeviceData],
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """Print which labels each device holds, draw it and write it. Raises ConfigError for a target without classes."""
    target = bundle.manifest.target
    if not isinstance(target, Classification | Sequence):
        raise ConfigError(f"--labels counts classes; the target of {bundle.manifest.name!r} is {target.kind}")
    console.print(histogram.table(devices, target.classes))
    if plot is not None:
        histogram.draw(devices, target.classes, plot, f"{config.data.called}, split {config.data.split}")
        console.print(f"wrote {plot}")
    if json_file is not None:
        held, settings = histogram.record(devices, target.classes), config.data.model_dump(mode="json")
        write_json(json_file, {"command": provenance.command(), "data": settings, "seed": config.seed, **held})


def _heading(console: Console, config: SimulationConfig, bundle: Bundle, devices: Mapping[str, DeviceData]) -> None:
    """Print what is run, and warnings on the data."""
    count, drawn = len(devices), min(config.cohort, len(devices))
    s = "s" * (count > 1)
    train, test = (sum(len(getattr(d, k)) for d in devices.values()) for k in ("y", "y_test"))
    console.print(
        f"{bundle.manifest.name}: {bundle.manifest.d:,} parameters; {config.data.called} on {count} device{s}, "
        f"{train} training and {test} {config.data.evaluate} samples; "
        f"rounds: {config.rounds} of {drawn} device{'s' * (drawn > 1)}"
    )
    if config.cohort > count:
        advice.warn(console, [f"cohort = {config.cohort} is more than {count} device{s}; set it to that or less"])
    advice.warn(console, histogram.untested(devices, config.data.evaluate))
    advice.warn(console, histogram.off_scale(devices, bundle.manifest.input))
    advice.warn(console, histogram.uncentred(devices))


def _played(
    console: Console, config: SimulationConfig, bundle: Bundle, devices: Mapping[str, DeviceData]
) -> tuple[dict[str, Simulated], dict[str, MaskfleetError], ExitCode]:
    """Run every method with a progress bar: results, failures, and the exit code that a signal makes due."""
    failures: dict[str, MaskfleetError] = {}
    with Steps(console, config.rounds * len(config.methods)) as steps, terminable() as code:

        def said(label: str, row: RoundRow) -> None:
            everyone = "" if row.everyone is None else f"  all devices {row.everyone.mean:.3f}"
            done = f"{label:12s} round {row.record.round:3d}/{config.rounds}"
            steps.step(f"{done}  {tables.outcome(row.record)}{everyone}")

        try:
            warn = partial(advice.warn, console)
            results = run_all(config, bundle, devices, said, failures.__setitem__, models=False, warn=warn)
        except KeyboardInterrupt:
            console.print("stopped before any method ended; there is no result")
            raise typer.Exit(code[-1]) from None
    return results, failures, code[-1]


def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="The simulation's TOML file (required); `maskfleet new` writes one.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every method's record and its rounds here.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's `rounds`.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's `seed`.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Only these methods, comma-separated: labels of the file, others at their defaults."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. [default: one a core]")] = None,
    bundle: Annotated[
        str | None, typer.Option(help="Instead of the file's `bundle`: a name, a folder or FILE.py:FUNCTION.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write score against bytes here, as a PNG.")] = None,
    labels: Annotated[
        bool,
        typer.Option(
            "--labels", help="Only print which labels devices hold (--plot: draw, --json: write it), and end."
        ),
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of --json's file, and end.")] = False,
) -> None:
    """Run federations on this machine, on the same engine and methods as the real thing, and compare them."""
    if schema:
        typer.echo(json.dumps(result.SimulationResult.model_json_schema(), indent=1))
        return
    if config is None:
        raise ConfigError("simulate: name a TOML file; `maskfleet new FOLDER` writes one")
    check_writable(json_file, source=config)
    check_plot(plot, json_file)
    if labels:  # nothing is trained, so the file needs no methods
        method = advice.ALONE
    checked, opened, devices = open_simulation(
        config, method, rounds=rounds, seed=seed, processes=processes, bundle=bundle
    )
    console = plain_console()
    origin = {} if json_file is None else provenance.origin()  # before anything runs: it has the load of others
    _heading(console, checked, opened, devices)
    if labels:
        _labels(console, checked, opened, devices, plot, json_file)
        return
    results, failures, code = _played(console, checked, opened, devices)
    failed = "\n".join(f"{label}: {error}" for label, error in failures.items())
    damaged = bool(failures) and all(isinstance(error, BundleError) for error in failures.values())
    ended = BundleError(failed) if damaged else ConfigError(failed)  # a damaged bundle has an exit code of its own
    if not results:
        raise ended
    model, tested = opened.model(), sum(len(d.y_test) for d in devices.values())
    records = {label: simulated(r) for label, r in results.items()}
    title = f"{checked.data.called}: every device's own model from the final downlink"
    console.print(tables.table(records, title, console), tables.by_kind(records), sep="\n\n")
    methods = {label: r.method for label, r in results.items()}
    chosen = checked.personalise == "best" and any(len(d.y_val) for d in devices.values())
    advice.warn(console, advice.warnings(records, methods, tested, model, chosen))
    if json_file is not None:
        reasons = {label: str(error) for label, error in failures.items()}
        found = result.result(origin, checked, records, reasons)
        write_json(json_file, found.model_dump(mode="json", exclude_unset=True))
    if plot is not None:
        lines = {label: [curves.Point(**p) for p in r["curve"]] for label, r in records.items()}
        curves.draw(lines, plot, f"{checked.data.called}: score after each round")
        console.print(f"wrote {plot}")
    if any(isinstance(error, InterruptedRun) for error in failures.values()):
        console.print(failed)
        raise typer.Exit(code)
    if failed:
        raise ended
