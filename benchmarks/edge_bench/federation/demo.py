"""`maskfleet demo`: real federations on this machine, one for each method, compared in one table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from edge_bench import advice, curves, provenance
from edge_bench.command_line import (
    check_new_folder,
    check_plot,
    check_writable,
    names_of,
    plain_console,
    saying_when_stopped,
    write_json,
)
from edge_bench.data import datasets
from edge_bench.data.sources import find
from edge_bench.data.table import DataConfig
from edge_bench.federation import demo_report
from edge_bench.federation.fleet import Ended, Fleet, fleet
from edge_bench.federation.record import federation
from edge_bench.simulation.comparison import starting_scores
from edge_bench.simulation.file import find_bundle
from edge_bench.tables import outcome
from edge_client.backends import DEFAULT_BACKEND
from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_dense
from edge_client.errors import ConfigError, DataError
from edge_client.measure.latency import latency
from edge_client.methods import make_method
from edge_client.protocol.messages import FederationConfig, Round
from edge_client.task import Personal
from edge_client.training import open_trainer

BUNDLES: Mapping[str, str] = {"har": "har", "digits": "digits-wide"}
"""The packaged bundle of each data set."""
# Settings of each method; other methods run with their defaults. Lattice's are those that docs/choosing.md names for
# small personal models. On the digits' validation parts (seeds 0 to 2) the rates 0.01, 0.03 and 0.1 differ by .6 points
# for FedAvg and 1.3 for Lattice; HAR's own table tried 0.03 and more. FedMask's were chosen on validation parts.
_FEDMASK: Mapping[str, Any] = {"keep": 0.8, "restart": "latent"}
_ALL: Mapping[str, Mapping[str, Any]] = {
    "lattice": {"lr": 0.03, "prune": 0.4, "prune_after": 4, "personal_epochs": 3},
    "fedavg": {"lr": 0.03},
    "standalone": {"lr": 0.03},
    "coupled": {"head": "mask", "theta0": 0.5, "epochs": 5, "batch": 32, "evaluate": "threshold"},
}
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "har": {**_ALL, "fedmask": {**_FEDMASK, "lr": 30.0}},
    "digits": {**_ALL, "fedmask": {**_FEDMASK, "lr": 10.0}},
}


def settings(method: str, data: str, rounds: int) -> dict[str, Any]:
    """A method's table for so many rounds, at least 2: pruning leaves the smaller network half of them or more."""
    table = {"name": method, **SETTINGS[data].get(method, {})}
    if "prune_after" in table:
        table["prune_after"] = min(table["prune_after"], rounds // 2)
    return table


def compaction(bundle: Bundle, ended: Ended, sample: Any, folder: Path) -> dict[str, float]:
    """Dense against compact, medians over devices: parameters as reported, latency measured again in turns.

    The devices measured while all of them ran; the machine is quiet now. `sample` is one input [1, *input].
    """
    model = bundle.model()
    dense = folder / "dense.onnx"
    write_dense(bundle, Personal(model.parameters, model.buffers), dense, sample)
    of_dense, *of_compact = latency([dense, *ended.models.values()], sample)
    reports = ended.reports
    return {
        "parameters_dense": reports[0].parameters_dense,
        "parameters_compact": median(r.parameters_compact for r in reports),
        "latency_dense_ms": of_dense,
        "latency_compact_ms": median(of_compact),
        "max_abs_diff": max(r.max_abs_diff or 0.0 for r in reports),
    }


def choose_data(text: str | None, devices: int) -> DataConfig:
    """`har:PATH`, `har` or `digits`; None takes UCI HAR when it is found and else the digits. Raises ConfigError."""
    digits = DataConfig(name="digits", devices=devices, split="dirichlet", alpha=1.0)
    if text is None:
        try:
            find("har", None)
        except DataError:
            return digits
        return DataConfig(name="har", devices=devices)
    if text == "digits":
        return digits
    name, _, path = text.partition(":")
    if name == "har":
        config = DataConfig(name="har", devices=devices, path=Path(path) if path else None)
        find("har", config.path)
        return config
    raise ConfigError(f"--data {text!r} is not known; give har, har:PATH or digits")


def _ran(
    running: Fleet, name: str, table: Mapping[str, Any], rounds: int, devices: int, seed: int, console: Console
) -> Ended:
    """The federation of one method, its rounds printed as they close."""

    def watch(done: list[Round]) -> None:
        stands = outcome(done[-1]) if done else "devices are joining"
        console.print(f"{name:12s} round {len(done):3d}/{rounds}  {stands}")

    asked = FederationConfig(
        name=name, bundle=running.bundle, method=dict(table), rounds=rounds, cohort=devices, seed=seed, guard="clip"
    )
    return running.run(asked, watch)


def demo(
    data: Annotated[
        str | None, typer.Option(help="har:PATH, har or digits. [default: UCI HAR when it is found, else digits]")
    ] = None,
    devices: Annotated[int, typer.Option(min=2, max=100, help="Client processes.")] = 10,
    rounds: Annotated[int, typer.Option(min=2, max=1000, help="Rounds of each method.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of cohorts, batches and the data's division.")] = 0,
    methods: Annotated[
        str, typer.Option("--method", help="Methods to run, comma-separated; the first one's models are compacted.")
    ] = "lattice,fedavg,standalone",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write score against bytes here, as a PNG.")] = None,
    keep_files: Annotated[
        Path | None, typer.Option(help="Keep data, logs and models in this empty or new folder.")
    ] = None,
) -> None:
    """Run real federations on this machine, a coordinator and ten devices, and compare methods in one table."""
    names = names_of(methods, "--method")
    if keep_files is not None:
        check_new_folder(keep_files)
    check_writable(json_file)
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
    with saying_when_stopped(console, "stopped; every process of the demo has ended"), ExitStack() as stack:
        folder = keep_files
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="maskfleet-demo-")))
        with fleet(folder, bundle, parts) as running:
            console.print(f"coordinator at {running.url}, {len(parts)} client processes for each method")
            ended = {name: _ran(running, name, tables[name], rounds, len(parts), seed, console) for name in names}
            compact = compaction(bundle, ended[names[0]], next(iter(parts.values())).x[:1], folder)
    records = {name: federation(e, start) for name, e in ended.items()}
    title = f"{chosen.name}: every device's own model after {rounds} rounds"
    lines = {name: [curves.Point(**p) for p in r["curve"]] for name, r in records.items() if r["curve"]}
    if lines:
        head = "\nscore after each round against a device's payload bytes so far, both ways"
        console.print(head, curves.sketch(lines), sep="\n")
    console.print("", demo_report.end(title, records, compact, made), sep="\n")
    advice.warn(console, advice.warnings(records, made, model=bundle.model()))
    run = {
        "data": chosen.model_dump(mode="json"), "devices": len(parts), "rounds": rounds, "seed": seed,
        "cohort": len(parts), "methods": tables,
    }  # fmt: skip
    write_json(json_file, {**origin, "methods": records, "compaction": compact, "settings": run})
    if plot is not None:
        curves.draw(lines, plot, title)
        console.print(f"wrote {plot}")
    kept = f"; files in {keep_files}" if keep_files else ""
    console.print(f"all of it took {time.monotonic() - started:.0f} s{kept}")
