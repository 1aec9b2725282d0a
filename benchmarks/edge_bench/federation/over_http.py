"""Runs a simulation's federations again over HTTP, one client process a device, and compares both bit for bit.

    python -m edge_bench.federation.over_http benchmarks/configs/masks_mnist.toml --method coupled --json result.json

Each method of the simulation runs in one process (`simulate`) and as a coordinator with its devices on loopback
(`fleet`), with the same seed, data and cohorts. Compared are the server's state, every device's `personal.onnx`, every
round's record (its devices, payload bytes by kind, loss, scores; not its duration) and the final scores. The command
ends with code 1 when anything differs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from edge_kernels import counter

from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.curves import mean, moved, shown
from edge_bench.federation.fleet import Ended, Fleet, fleet
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import SimulationConfig, open_simulation
from edge_bench.simulation.simulate import Simulated
from edge_client.bundle import Bundle, digest
from edge_client.compaction.personal import write_smallest
from edge_client.data import DeviceData
from edge_client.protocol.messages import Round, Scores


@dataclass(frozen=True)
class Outcome:
    """How a federation ended, and what it carried. Digests are SHA-256."""

    state: str
    """Of the server's state, as `GET /v1/federations/{id}/state` answers it."""
    models: Mapping[str, str]
    """Of each device's `personal.onnx` without its metadata."""
    rounds: Sequence[Round]
    """The rounds' records, with 0 seconds and no cost."""
    scores: Scores | None
    """Of every device's own model."""

    def payload_bytes(self) -> dict[str, int]:
        """Of all devices and rounds, up and down, with what is sent once and the downlinks after the last round."""
        up, down, last = (sum(moved(r.traffic, side) for r in self.rounds) for side in ("up", "down", "last"))
        return {"up": up, "down": down + last}


def outcome(state: str, models: Mapping[str, Path], rounds: Sequence[Round], scores: Scores | None) -> Outcome:
    """The outcome of a federation whose devices' models are these files."""
    timeless = [r.model_copy(update={"seconds": 0.0, "cost": {}}) for r in rounds]
    return Outcome(state, {name: digest(graph(path)) for name, path in models.items()}, timeless, scores)


def graph(path: Path) -> bytes:
    """A model without its metadata: a simulation's names no federation."""
    model = onnx.load(path)
    del model.metadata_props[:]
    return bytes(model.SerializeToString(deterministic=True))


def in_one_process(bundle: Bundle, devices: Mapping[str, DeviceData], result: Simulated, folder: Path) -> Outcome:
    """The outcome of a simulation; its devices' models are written to `folder` as a device writes its own."""
    models = {name: folder / f"{name}.onnx" for name in devices}
    for name, data in devices.items():
        write_smallest(bundle, result.personal[name], models[name], data.x)
    return outcome(result.state_sha256, models, [row.record for row in result.rows], result.final)


def over_http(ended: Ended) -> Outcome:
    """The outcome of a real federation."""
    return outcome(digest(ended.state), ended.models, ended.rounds, ended.scores())


def differences(one: Outcome, other: Outcome) -> list[str]:
    """The parts of the outcomes that are not equal."""
    return [f.name for f in fields(Outcome) if getattr(one, f.name) != getattr(other, f.name)]


def compare(config: SimulationConfig, label: str, bundle: Bundle, running: Fleet, result: Simulated) -> dict[str, Any]:
    """Run the method `label` for real and set the simulation's result beside it; one record, ready for JSON."""
    started = time.monotonic()
    ended = running.run(
        config.federation(label, len(running.devices), running.bundle).model_copy(update={"name": label}),
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
    method: Annotated[str | None, typer.Option(help="Only these methods, comma-separated.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's `rounds`.")] = None,
    bundle: Annotated[str | None, typer.Option(help="Instead of the file's `bundle`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Run a simulation's methods in one process and over HTTP, and compare every byte they came to."""
    check_writable(json_file)
    origin = provenance.origin()
    checked, found, devices = open_simulation(config, method, rounds=rounds, bundle=bundle)
    results = run_all(checked, found, devices)
    records = {}
    with (
        tempfile.TemporaryDirectory(prefix="maskfleet-over-http-") as folder,
        fleet(Path(folder), found, devices) as running,
    ):
        for label, result in results.items():
            records[label] = compare(checked, label, found, running, result)
            print(_said(label, records[label]), flush=True)
    settings = checked.model_dump(mode="json", exclude={"methods", "bundle"})
    write_json(json_file, {**origin, "settings": settings, "methods": records})
    if any(record["differences"] for record in records.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_module(main)
