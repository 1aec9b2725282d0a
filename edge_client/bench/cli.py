"""`maskfleet bench MODEL...`, `maskfleet bench compare A B` and `maskfleet bench meters`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from edge_client.bench import android, compare, measure, plots
from edge_client.bench import report as reports
from edge_client.bench.measure import Settings
from edge_client.bench.subject import Subject, find_subject
from edge_client.bench.tables import plain_table
from edge_client.bench.training import Training, made_data, training
from edge_client.bench.variants import MAKERS
from edge_client.cli import PLAIN
from edge_client.errors import ConfigError
from edge_client.files import write_whole
from edge_client.measure import machine
from edge_client.measure.adb import connect
from edge_client.measure.meters import AUTO, choose
from edge_client.methods import make_method

SAMPLES = 320  # of a round whose data are made up
RUN = "run"
CROWD = 4  # threads a processor, beyond which nothing is learned and a start may take minutes


class _WithDefault(TyperGroup):
    """A group in which the first word that names no command belongs to `run`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = [RUN, *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        # An option first, as in `bench --keep 0.5 BUNDLE`, is one of `run` too.
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_WithDefault,
    help="Measure models: latency, memory, energy, training. `bench MODEL...` is `bench run MODEL...`.",
    no_args_is_help=True,
    **PLAIN,
)


@app.command(RUN)
def run(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="A bundle's folder or name, or .onnx and .pte files side by side."),
    ],
    personal: Annotated[
        Path | None, typer.Option(help="Safetensors with `parameters`, or `mask`, for masked and compact variants.")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Instead of --personal: keep this share of each group's largest units."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="An .npz file as for `join`; without it the samples are noise.")
    ] = None,
    variants: Annotated[
        str, typer.Option(help=f"Of a bundle: some of {','.join(MAKERS)}, with commas; `all` that can be made.")
    ] = "all",
    shape: Annotated[
        str | None, typer.Option(help="Of model files: the input's shape, like 1,3,224,224, where axes are free.")
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads, like 1,4; `all`: every processor.")] = "1,all",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each variant.")] = Settings.runs,
    warm_up: Annotated[int, typer.Option(min=0, help="Runs before them.")] = Settings.warm_up,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Most seconds of runs for each number of threads.")
    ] = Settings.seconds,
    meter: Annotated[
        str, typer.Option(help="auto, none, or a meter with options, like ina219:bus=1,shunt=0.1.")
    ] = AUTO,
    energy_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds a variant runs for its joules.")
    ] = Settings.energy_seconds,
    cold_starts: Annotated[
        int, typer.Option(min=0, help="Processes for cold start and memory; 0: none.")
    ] = Settings.cold_starts,
    method: Annotated[str, typer.Option(help="The method of the training round; `none`: no training.")] = "lattice",
    adb: Annotated[str | None, typer.Option(help="Measure on this phone: its serial, or `auto`.")] = None,
    runner: Annotated[
        list[Path] | None, typer.Option(help="For --adb: the engine's runner built for Android, then its libraries.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report.json, report.md and report.png.")
    ] = None,
) -> None:
    """Measure a bundle's variants, or model files side by side."""
    if adb is not None and not runner:
        raise ConfigError(
            "a phone needs a runner: --runner executor_runner for .pte files, --runner onnxruntime_perf_test "
            "--runner libonnxruntime.so for .onnx files; docs/bench.md says how they are built"
        )
    if runner and adb is None:
        raise ConfigError("--runner is for a phone; name it with --adb SERIAL, or --adb auto")
    if method != "none":
        make_method({"name": method})
    before = machine.state()  # the load is not yet the benchmark's own
    if output is not None:
        _folder(output)
    phone = None if adb is None else connect(None if adb == AUTO else adb)
    most = len(os.sched_getaffinity(0))
    if phone is None:
        chosen = choose(meter, exported=True)
    else:
        chosen = choose(meter, "android", more={"serial": phone.serial}, exported=True)
        if "all" in threads.split(","):
            most = android.processors(phone)
    settings = Settings(_threads(threads, most), runs, warm_up, seconds, energy_seconds, cold_starts)
    command = shlex.join(["maskfleet", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as scratch:
        wanted = tuple(MAKERS) if variants == "all" else tuple(dict.fromkeys(variants.replace(" ", "").split(",")))
        sizes = None if shape is None else _numbers("--shape", shape)
        subject = find_subject(models, personal, keep, data, sizes, wanted, Path(scratch))
        if phone is not None and runner is not None:
            found = android.report(subject, command, phone, runner, settings, chosen, _say)
        else:
            trains = _training(subject, method, settings.threads[0])
            found = measure.report(subject, command, settings, chosen, trains, _say, before)
    if output is not None:  # before the tables, whose reader may be gone: `bench ... | head`
        _write(found, output)
    reports.show(found, Console(emoji=False))


def _say(text: str) -> None:
    print(f"maskfleet: {text}", file=sys.stderr, flush=True)


def _training(subject: Subject, method: str, threads: int) -> Training | None:
    """A step and a round of `method` on the subject's bundle; None for model files, and for the method "none"."""
    if subject.bundle is None or method == "none":
        return None
    samples = made_data(subject.bundle, SAMPLES) if subject.data is None else subject.data
    return training(subject.bundle, samples, {"name": method}, threads=threads)


def _threads(text: str, most: int) -> tuple[int, ...]:
    found = _numbers("--threads", text.replace("all", str(most)))
    if max(found) > CROWD * most:
        raise ConfigError(f"--threads {max(found)} is more than {CROWD} times the {most} processors; give fewer")
    return tuple(sorted(set(found)))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise ConfigError(f"{option} {text}: give numbers from 1 up, with commas between")
    return found


def _folder(output: Path) -> None:
    """Make the report's folder, and see that it can be written, before anything is measured."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {output}: {error.strerror}; choose another --output") from None


def _write(found: dict[str, Any], output: Path) -> None:
    """The report's three files, the figures first; the picture where matplotlib is installed."""
    picture = output / "report.png"
    text = json.dumps(found, indent=1, ensure_ascii=False)
    page = reports.markdown(found, picture.name if plots.available() else None)
    for name, content in (("report.json", f"{text}\n"), ("report.md", page)):
        write_whole(output / name, content.encode(), mode=0o666, elsewhere="choose another --output")
    if plots.available():
        plots.draw(found, picture)
    else:
        print("maskfleet: no picture without matplotlib; run: pip install 'maskfleet[bench]'", file=sys.stderr)
    print(f"maskfleet: report in {output}", file=sys.stderr)


@app.command("compare")
def compare_(
    first: Annotated[Path, typer.Argument(help="A report.json, or the folder that holds it.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Compare two reports: which is faster, or needs less."""
    a, b = compare.read(first), compare.read(second)
    found = compare.pairs(a, b)
    if not found:
        raise ConfigError(
            f"{first} and {second} have no row of the same variant, engine and threads; measure both alike"
        )
    several = len({p.engine for p in found}) > 1
    table = plain_table()
    for head in ("variant", *["engine"] * several, "thr", "ms", "second is", "joules", "memory"):
        table.add_column(head)
    for p in found:
        figures = f"{reports.figure(p.first)} -> {reports.figure(p.second)}", f"{p.ratio:.2f}x, {p.verdict}"
        table.add_row(escape(p.variant), *[p.engine] * several, str(p.threads), *figures, p.joules, p.memory)
    console = Console(emoji=False)
    console.print(table)
    for text in compare.cautions(a, b):
        console.print(f"caution: {text}", markup=False, highlight=False, soft_wrap=True)


@app.command("meters")
def meters(
    on_phone: Annotated[bool, typer.Option("--adb", help="Meters of a phone behind adb.")] = False,
) -> None:
    """List the energy meters: the one that `auto` takes, and why not the others."""
    for line in choose(AUTO, "android" if on_phone else "here").lines:
        print(line)
