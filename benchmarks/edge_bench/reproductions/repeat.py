"""A simulation for several seeds, one run after another into one JSON file. A second start continues the first.

    python -m edge_bench.reproductions.repeat benchmarks/configs/masks_mnist.toml --seeds 0,1,2 --out results.json

The file holds every run's record with a row per round (what `maskfleet simulate --json` writes), the settings, the
command, the commit and the machine. A method whose settings, revision or bundle's revision have changed is run again;
with other settings of the simulation everything is. `summary` has the mean over the seeds of the score and of bits per
parameter in the last round.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from edge_bench import provenance
from edge_bench.command_line import check_writable, numbers_of, run_module, write_json
from edge_bench.curves import shown
from edge_bench.reproductions.reproduction import revisions, stands
from edge_bench.reproductions.stored_runs import fitting
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import open_simulation
from edge_bench.simulation.record import simulated
from edge_client.errors import ConfigError

ROW = ("round", "bits_per_parameter_up", "bits_per_parameter_down", "loss", "score_before", "score_after", "traffic",
       "score_of_all_devices")  # fmt: skip


def slim(record: dict[str, Any]) -> dict[str, Any]:
    """A run's record with the compared columns of its rounds."""
    rounds = [{k: r[k] for k in ROW if k in r} for r in record["rounds"]]
    for r in rounds:
        for moment in ("score_before", "score_after"):
            r[moment] = r[moment] and r[moment]["mean"]
    return {**record, "rounds": rounds}


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By method: the final scores of the seeds, and their mean bits per parameter, last round and all rounds."""
    labels = dict.fromkeys(name.rsplit("/", 1)[0] for name in runs)
    table = {}
    for label in labels:
        mine = [r for name, r in runs.items() if name.rsplit("/", 1)[0] == label]
        measured = [r["score_mean"] for r in mine if r["score_mean"] is not None]
        table[label] = {
            "score": [r["score_mean"] for r in mine],
            "score_mean": mean(measured) if measured else None,
            "last_round_bits_up": mean(r["rounds"][-1]["bits_per_parameter_up"] for r in mine),
            "last_round_bits_down": mean(r["rounds"][-1]["bits_per_parameter_down"] for r in mine),
            "all_rounds_bits_up": mean(r["bits_per_parameter_up"] for r in mine),
            "all_rounds_bits_down": mean(r["bits_per_parameter_down"] for r in mine),
        }
    return table


def _stored(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs of an earlier start, none when it had other settings. Raises ConfigError when the file is another's."""
    if not path.exists():
        return {}
    try:
        found = fitting(json.loads(path.read_bytes()), {"runs": dict, "summary": dict, "settings": dict})
        for run in found["runs"].values():
            fitting(run, {"settings": dict, "rounds": list})
    except ValueError as error:
        raise ConfigError(f"--out {path} is not a file of this command ({error}); name another one") from None
    runs: dict[str, dict[str, Any]] = found["runs"] if found["settings"] == settings else {}
    return runs


def main(
    config: Annotated[Path, typer.Argument(help="The simulation's TOML file.")],
    out: Annotated[Path, typer.Option(help="The JSON file; runs in it with the same settings are not repeated.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,2",
    only: Annotated[str | None, typer.Option(help="Only these methods, by label, comma-separated.")] = None,
    bundle: Annotated[str | None, typer.Option(help="Instead of the file's `bundle`.")] = None,
) -> None:
    """Run every method of a simulation for every seed."""
    check_writable(out, "--out", source=config)
    origin, runs = provenance.origin(), dict[str, dict[str, Any]]()
    for i, seed in enumerate(numbers_of(seeds, "--seeds", int)):
        checked, found, devices = open_simulation(config, only, seed=seed, bundle=bundle)
        settings = checked.model_dump(mode="json", exclude={"methods", "seed", "processes"})
        runs = runs if i else _stored(out, settings)
        for label, table in checked.methods.items():
            name, method = f"{label}/{seed}", checked.method(label)
            if name in runs and stands(runs[name], method, checked.bundle):
                continue
            one = checked.model_copy(update={"methods": {label: table}})
            record = simulated(run_all(one, found, devices)[label], found.model())
            runs[name] = {
                **slim(record),
                **revisions(method, checked.bundle),
                "command": provenance.command(),
                "commit": provenance.commit(),
            }
            print(f"{name}: {shown(record['score_mean'], '.4f')}", flush=True)
            write_json(out, {**origin, "settings": settings, "summary": summary(runs), "runs": runs})


if __name__ == "__main__":
    run_module(main)
