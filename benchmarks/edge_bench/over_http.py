"""Runs a simulation's federations again over HTTP, one client process a device, and compares both bit for bit.

    python -m edge_bench.over_http benchmarks/configs/masks_mnist.toml --only coupled --json result.json

Each method of the simulation runs in one process (`simulate`) and as a coordinator with its devices on loopback
(`demo`), with the same seed, data and cohorts. Compared are the server's state, every device's `personal.onnx`, every
round's record (its devices, payload bytes by kind, loss, scores; not its duration) and the final scores. The command
ends with code 1 when anything differs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from edge_kernels import counter

from edge_bench import datasets, provenance
from edge_bench.cli import read_toml, write_json
from edge_bench.curves import mean, shown
from edge_bench.demo import Ended, Fleet, fleet
from edge_bench.simulate import Simulated, SimulationConfig, find_bundle, read_config, run_all
from edge_client.bundle import Bundle, digest
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.data import DeviceData
from edge_client.errors import CompactionError, ConfigError
from edge_client.protocol.messages import Round, Scores


@dataclass(frozen=True)
class Outcome:
    """How a federation ended, and what it carried. Digests are SHA-256."""

    state: str
    """Of the server's state, as `GET /v1/federations/{id}/state` answers it."""
    models: Mapping[str, str]
    """Of each device's `personal.onnx`."""
    rounds: list[dict[str, Any]]
    """The rounds' records without their seconds."""
    scores: Scores | None
    """Of every device's own model."""

    def payload_bytes(self) -> dict[str, int]:
        """Of all devices and rounds, up and down, with what is sent once and the downlinks after the last round."""
        sides = {"up": ("up", "one_time_up"), "down": ("down", "one_time_down", "last_down")}
        return {
            side: sum(sum(r["traffic"][part].values()) for r in self.rounds for part in parts)
            for side, parts in sides.items()
        }


def _records(rounds: list[Round]) -> list[dict[str, Any]]:
    return [r.model_dump(mode="json", exclude={"seconds"}) for r in rounds]


def in_one_process(bundle: Bundle, devices: Mapping[str, DeviceData], result: Simulated, folder: Path) -> Outcome:
    """The outcome of a simulation; its devices' models are written to `folder` as a device writes its own."""
    models = {}
    for name, data in devices.items():
        path = folder / f"{name}.onnx"
        try:
            write_personal(bundle, result.personal[name], path, data.x)
        except CompactionError:  # a device then keeps the masked dense model too
            write_dense(bundle, result.personal[name], path, data.x)
        models[name] = digest(path.read_bytes())
    return Outcome(result.state_sha256, models, _records([row.record for row in result.rows]), result.final)


def over_http(ended: Ended) -> Outcome:
    """The outcome of a real federation."""
    models = {name: digest(path.read_bytes()) for name, path in ended.models.items()}
    return Outcome(digest(ended.state), models, _records(ended.rounds), ended.scores())


def differences(one: Outcome, other: Outcome) -> list[str]:
    """The parts of the outcomes that are not equal."""
    return [f.name for f in fields(Outcome) if getattr(one, f.name) != getattr(other, f.name)]


def compare(config: SimulationConfig, label: str, bundle: Bundle, running: Fleet, result: Simulated) -> dict[str, Any]:
    """Run the method `label` for real and set the simulation's result beside it; one record, ready for JSON."""
    started = time.monotonic()
    ended = running.run(
        label,
        {"name": label, **config.methods[label]},
        config.rounds,
        config.cohort,
        config.seed,
        backend=config.backend,
        secrets_of={device: counter.key(config.seed, "secret", device) for device in running.devices},
    )
    seconds = time.monotonic() - started
    folder = running.folder / f"{label}-in-one-process"
    folder.mkdir()
    simulated, real = in_one_process(bundle, running.devices, result, folder), over_http(ended)
    sides = {"simulator": simulated, "http": real}
    return {
        "differences": differences(simulated, real),
        "client_processes": len(real.models),
        "rounds": len(real.rounds),
        "state_sha256": {name: side.state for name, side in sides.items()},
        "models_sha256": {
            name: digest("".join(side.models[d] for d in sorted(side.models)).encode()) for name, side in sides.items()
        },
        "payload_bytes": {name: side.payload_bytes() for name, side in sides.items()},
        "score_mean": {name: mean(side.scores) for name, side in sides.items()},
        "seconds": {"simulator": result.seconds, "http": seconds},
    }


def _said(label: str, record: Mapping[str, Any]) -> str:
    """A record in a few lines."""
    lines = [f"{label}: {record['rounds']} rounds, {record['client_processes']} client processes"]
    for side in ("simulator", "http"):
        carried = record["payload_bytes"][side]
        lines += [
            f"  {side:9}  state   {record['state_sha256'][side]}",
            f"  {'':9}  models  {record['models_sha256'][side]}",
            f"  {'':9}  payload bytes up {carried['up']:,}, down {carried['down']:,}; "
            f"score {shown(record['score_mean'][side], '.4f')}; {record['seconds'][side]:.0f} s",
        ]
    unequal = record["differences"]
    return "\n".join([*lines, f"  DIFFERENT: {', '.join(unequal)}" if unequal else "  the same, bit for bit"])


def main(
    config: Annotated[Path, typer.Argument(help="A simulation's TOML file.")],
    only: Annotated[str | None, typer.Option(help="Only these methods, by label, comma-separated.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's `rounds`.")] = None,
    bundle: Annotated[str | None, typer.Option(help="Instead of the file's `bundle`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Run a simulation's methods in one process and over HTTP, and compare every byte they came to."""
    changes = {k: v for k, v in (("rounds", rounds), ("bundle", bundle)) if v is not None}
    checked = read_config(read_toml(config) | changes)
    wanted = list(checked.methods) if only is None else only.split(",")
    unknown = sorted(set(wanted) - checked.methods.keys())
    if unknown:
        raise ConfigError(f"{config} has no methods {unknown}; it has {sorted(checked.methods)}")
    found = find_bundle(checked.bundle)
    devices = datasets.load(checked.data, checked.seed, found.manifest)
    chosen = checked.model_copy(update={"methods": {label: checked.methods[label] for label in wanted}})
    results = run_all(chosen, found, devices)
    records = {}
    with (
        tempfile.TemporaryDirectory(prefix="maskfleet-over-http-") as folder,
        fleet(Path(folder), found, devices) as running,
    ):
        for label, result in results.items():
            records[label] = compare(chosen, label, found, running, result)
            print(_said(label, records[label]), flush=True)
    if json_file is not None:
        words = ["python -m edge_bench.over_http", config, *(["--only", only] if only is not None else [])]
        words += ["--rounds", rounds] if rounds is not None else []
        top = {
            **provenance.origin(" ".join(map(str, [*words, "--json", json_file]))),
            "settings": checked.model_dump(mode="json", exclude={"methods", "bundle"}),
        }
        write_json(json_file, {**top, "methods": records})
    if any(record["differences"] for record in records.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
