"""The commands `maskfleet simulate` and `maskfleet demo`: arguments in, progress and tables out."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from edge_bench import curves, datasets, demo_report, histogram, provenance, report, result
from edge_bench.bundles import NAMES
from edge_bench.curves import mean, shown
from edge_bench.demo import BUNDLES, choose_data, compaction, fleet, settings
from edge_bench.progress import Steps
from edge_bench.simulate import (
    InterruptedRun,
    RoundRow,
    SimulationConfig,
    find_bundle,
    prepare,
    read_config,
    run_all,
    starting_scores,
)
from edge_client.authored import is_place
from edge_client.backends import DEFAULT_BACKEND
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError
from edge_client.exit_codes import ExitCode, exit_code
from edge_client.files import disk, write_whole
from edge_client.methods import make_method
from edge_client.named_bundles import packaged
from edge_client.protocol.messages import Round
from edge_client.targets import Classification, Sequence
from edge_client.training import open_trainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's content. Raises ConfigError."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        return content
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def method_names(text: str, option: str) -> list[str]:
    """The names of a comma-separated list, without spaces around them. Raises ConfigError for one twice, or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{option} {text!r}: name each method once, like lattice,fedavg")
    return names


def check_writable(path: Path, option: str = "--json", source: Path | None = None) -> None:
    """Raise ConfigError, naming the `option` that gave the path, when `write_json` could not write there.

    Also when it would overwrite `source`, the file that the command reads.
    """
    if source is not None and path.resolve() == source.resolve():
        raise ConfigError(f"{option} {path} would overwrite the file that is read; name another one")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for {option} {path}; make it, or name a file in another one")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: permission denied; name another file")


def check_plot(path: Path, json_file: Path | None) -> None:
    """Raise ConfigError when a picture could not be drawn, or not written there or only over `json_file`."""
    if json_file is not None and path.resolve() == json_file.resolve():
        raise ConfigError(f"--plot {path} and --json are one file; name another one")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: pictures are PNG; give a name that ends in .png")
    check_writable(path, "--plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib; run: pip install 'maskfleet[bench]'")


def write_text(path: Path, text: str) -> None:
    """Replace a result file at once, in a folder that is made. Raises StateError when it cannot be written."""
    elsewhere = "name another place"
    with disk(path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o666, elsewhere=elsewhere)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file. Raises StateError when it cannot be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def run_module(main: Callable[..., None]) -> None:
    """Run `python -m edge_bench.NAME`; an error of ours ends it with its message and its exit code."""
    try:
        typer.run(main)
    except MaskfleetError as error:
        print(f"{provenance.program()}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def plain_console(least: int = 80) -> Console:
    """Standard output; at least so many columns in a log or a pipe, so that tables fit."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, least)
    return console


def open_simulation(
    file: Path, only: str | None = None, methods: str | None = None, **changes: Any
) -> tuple[SimulationConfig, Bundle, dict[str, DeviceData]]:
    """As `read_simulation`, with the bundle and every device's data. Raises ConfigError, BundleError or DataError."""
    config = read_simulation(file, only, methods, **changes)
    return config, *prepare(config)


def read_simulation(
    file: Path, only: str | None = None, methods: str | None = None, **changes: Any
) -> SimulationConfig:
    """A simulation's TOML file with the `changes` that are not None.

    `only` names methods by label, comma-separated, and so does `methods`, at their defaults where the file has no
    table for them. Raises ConfigError.
    """
    content = read_toml(file) | {k: v for k, v in changes.items() if v is not None}
    if (given := changes.get("bundle")) is not None:  # an option's path is relative to where the command runs
        content["bundle"] = given if given in (*packaged(), *NAMES) else str(Path(given).resolve())
        content |= {} if is_place(given) else {"export": {}}
    tables = content.get("methods", {})
    if methods is not None and isinstance(tables, dict):
        content["methods"] = {label: tables.get(label, {}) for label in method_names(methods, "--method")}
    config = read_config(content, file.parent)
    if only is not None:
        wanted = method_names(only, "--only")
        unknown = sorted(set(wanted) - config.methods.keys())
        if unknown:
            raise ConfigError(f"{file} has no methods {unknown}; it has {sorted(config.methods)}")
        config = config.model_copy(update={"methods": {label: config.methods[label] for label in wanted}})
    for label, table in config.methods.items():  # a wrong name fails before data are read
        make_method({"name": label, **table})
    return config


def _outcome(r: Round) -> str:
    """A round's figures in a few words."""
    before, after = (shown(mean(scores), ".3f") for scores in (r.score_before, r.score_after))
    return f"loss {shown(r.loss, '.3f')}  score {before}, after local epochs {after}"


def _warn(console: Console, sentences: list[str]) -> None:
    """A paragraph each, after an empty line."""
    if sentences:
        console.print("", *(textwrap.fill(f"warning: {s}", 79, subsequent_indent="  ") for s in sentences), sep="\n")


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
        held = histogram.record(devices, target.classes)
        settings = config.data.model_dump(mode="json")
        write_json(json_file, {"command": provenance.command(), "data": settings, "seed": config.seed, **held})


@contextmanager
def _terminable() -> Iterator[list[ExitCode]]:
    """SIGTERM ends the block as Ctrl-C does. The last of what it yields is the exit code that is then due."""
    code = [ExitCode.INTERRUPTED]

    def stop(*_: object) -> None:
        code.append(ExitCode.TERMINATED)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield code
    finally:
        signal.signal(signal.SIGTERM, before)


def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="The simulation's TOML file (required); see benchmarks/configs.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every method's record and its rounds here.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's `rounds`.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's `seed`.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Only these of the file's methods, by label, comma-separated.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="These methods, comma-separated, at their defaults where the file has no table for them."),
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
        raise ConfigError("simulate: name a TOML file, e.g. benchmarks/configs/har_fedmask.toml")
    if json_file is not None:
        check_writable(json_file, source=config)
    if plot is not None:
        check_plot(plot, json_file)
    checked, opened, devices = open_simulation(
        config, only, method, rounds=rounds, seed=seed, processes=processes, bundle=bundle
    )
    console = plain_console()
    train, test = (sum(len(getattr(d, k)) for d in devices.values()) for k in ("y", "y_test"))
    console.print(
        f"{opened.manifest.name}: {opened.manifest.d:,} parameters; {checked.data.called} on {len(devices)} devices, "
        f"{train} training and {test} {checked.data.evaluate} samples; "
        f"rounds: {checked.rounds} of {checked.cohort} devices"
    )
    _warn(console, histogram.untested(devices, checked.data.evaluate))
    if labels:
        _labels(console, checked, opened, devices, plot, json_file)
        return
    failures: dict[str, MaskfleetError] = {}
    with Steps(console, checked.rounds * len(checked.methods)) as steps:

        def said(label: str, row: RoundRow) -> None:
            everyone = "" if row.everyone is None else f"  all devices {row.everyone.mean:.3f}"
            steps.step(f"{label:12s} round {row.record.round:3d}/{checked.rounds}  {_outcome(row.record)}{everyone}")

        with _terminable() as code:
            try:
                results = run_all(checked, opened, devices, said, failures.__setitem__, models=False)
            except KeyboardInterrupt:
                console.print("stopped before any method ended; there is no result")
                raise typer.Exit(code[-1]) from None
    failed = "; ".join(f"{label}: {error}" for label, error in failures.items())
    if not results:
        raise ConfigError(failed)
    model = opened.model()
    made = {label: make_method({"name": label, **checked.methods[label]}) for label in results}
    records = {label: report.simulated(r, made[label], model) for label, r in results.items()}
    title = f"{checked.data.called}: every device's own model from the final downlink"
    console.print(report.table(records, title), report.by_kind(records), sep="\n\n")
    _warn(console, report.warnings(records, made))
    if json_file is not None:
        reasons = {label: str(error) for label, error in failures.items()}
        write_json(json_file, result.result(checked, records, reasons).model_dump(mode="json", exclude_unset=True))
    if plot is not None:
        curves.draw({label: [curves.Point(**p) for p in r["curve"]] for label, r in records.items()}, plot, title)
        console.print(f"wrote {plot}")
    if any(isinstance(error, InterruptedRun) for error in failures.values()):
        console.print(failed)
        raise typer.Exit(code[-1])
    if failed:
        raise ConfigError(failed)


def demo(
    data: Annotated[
        str | None, typer.Option(help="har:PATH, har or digits. [default: UCI HAR when it is found, else digits]")
    ] = None,
    devices: Annotated[int, typer.Option(min=2, max=100, help="Client processes.")] = 10,
    rounds: Annotated[int, typer.Option(min=2, max=1000, help="Rounds of each method.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of cohorts, batches and the data's division.")] = 0,
    methods: Annotated[
        str, typer.Option(help="Methods to run, comma-separated; the first one's models are compacted.")
    ] = "lattice,fedavg,standalone",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write score against bytes here, as a PNG.")] = None,
    keep_files: Annotated[
        Path | None, typer.Option(help="Keep data, logs and models in this empty or new folder.")
    ] = None,
) -> None:
    """Run real federations on this machine, a coordinator and ten devices, and compare methods in one table."""
    names = method_names(methods, "--methods")
    if keep_files is not None and keep_files.exists() and any(keep_files.iterdir()):
        raise ConfigError(f"{keep_files} is not empty; give --keep-files a new folder")
    if json_file is not None:
        check_writable(json_file)
    if plot is not None:
        check_plot(plot, json_file)
    chosen = choose_data(data, devices)
    tables = {n: settings(n, chosen.name, rounds) for n in names}
    made = {n: make_method(table) for n, table in tables.items()}
    bundle = find_bundle(BUNDLES[chosen.name])
    parts = datasets.load(chosen, seed, bundle.manifest)
    start = starting_scores(bundle, open_trainer(DEFAULT_BACKEND, bundle), parts)
    console = plain_console()
    console.print(
        f"{chosen.name}: {len(parts)} devices, {sum(len(d.y) for d in parts.values())} training and "
        f"{sum(len(d.y_test) for d in parts.values())} test samples; a network of {bundle.manifest.d:,} parameters; "
        f"{rounds} rounds of each method"
    )
    started = time.monotonic()
    origin = provenance.origin()
    records: dict[str, Any] = {}
    compact: dict[str, float] = {}
    with ExitStack() as stack:
        folder = keep_files
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="maskfleet-demo-")))
        try:
            with fleet(folder, bundle, parts) as running:
                console.print(f"coordinator at {running.url}, {len(parts)} client processes for each method")
                for name in names:

                    def watch(done: list[Round], name: str = name) -> None:
                        outcome = _outcome(done[-1]) if done else "devices are joining"
                        console.print(f"{name:12s} round {len(done):3d}/{rounds}  {outcome}")

                    ended = running.run(name, tables[name], rounds, len(parts), seed, watch)
                    records[name] = report.federation(ended, start)
                    if not compact:
                        compact = compaction(bundle, ended, next(iter(parts.values())).x_test[:1], folder)
        except KeyboardInterrupt:
            console.print("stopped; every process of the demo has ended")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    title = f"{chosen.name}: every device's own model after {rounds} rounds"
    lines = {name: [curves.Point(**p) for p in r["curve"]] for name, r in records.items() if r["curve"]}
    if lines:
        head = "\nscore after each round against a device's payload bytes so far, both ways"
        console.print(head, curves.sketch(lines), sep="\n")
    console.print("", demo_report.end(title, records, compact, made), sep="\n")
    _warn(console, report.warnings(records, made))
    if json_file is not None:
        run: dict[str, Any] = {
            "data": chosen.model_dump(mode="json"),
            "devices": len(parts),
            "rounds": rounds,
            "seed": seed,
        }
        run |= {"cohort": len(parts), "methods": tables}
        write_json(
            json_file,
            {**origin, "methods": records, "compaction": compact, "settings": run},
        )
    if plot is not None:
        curves.draw(lines, plot, title)
        console.print(f"wrote {plot}")
    console.print(
        f"all of it took {time.monotonic() - started:.0f} s" + (f"; files in {keep_files}" if keep_files else "")
    )
