"""Device-rounds per second: the simulator beside a plain PyTorch loop, and beside Flower's simulator if it is there.

    python -m edge_bench.timing.speed --json benchmarks/results/speed/speed.json

All of them run FedAvg with momentum on the same network, samples, cohort size, batch size and epochs, one thread a
process: `maskfleet simulate`'s code with one process and with every core; a loop over devices in PyTorch, one process;
Flower with that loop's body as its client, every core. Devices have no test samples, so that nothing is scored. The
clock starts after the first round, which opens sessions and starts workers: imports, start-up and data are left out.
Flower is measured when `flwr` and `ray` can be imported; they are no dependencies of this project.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coord_server.engine import choose_cohort
from edge_bench import provenance
from edge_bench.command_line import check_writable, known_names, run_module, write_json
from edge_bench.simulation.simulate import Simulated, run
from edge_bench.simulation.workers import cores
from edge_bench.timing.speed_case import CASES, Case, export, name_of, samples, train
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.training import open_trainer


def plain_loop(case: Case) -> tuple[float, torch.Tensor]:
    """Seconds of the rounds after the first, and the final parameters, of a loop in PyTorch."""
    net, names, config = case.network(), [name_of(case, d) for d in range(case.devices)], case.config()
    model = parameters_to_vector(net.parameters()).detach().clone()
    statistics = [b.clone() for b in net.buffers()]
    started = 0.0
    for round_ in range(1, case.rounds + 1):
        if round_ == 2:
            started = time.perf_counter()
        total, sums = torch.zeros_like(model), [torch.zeros(b.shape) for b in statistics]
        for name in choose_cohort(config, tuple(names), round_, 1, case.cohort):
            vector_to_parameters(model.clone(), net.parameters())  # a copy: the parameters become views of it
            with torch.no_grad():
                for b, value in zip(net.buffers(), statistics, strict=True):
                    b.copy_(value)
            train(net, case, names.index(name), round_)
            total += parameters_to_vector(net.parameters()).detach()
            for s, b in zip(sums, net.buffers(), strict=True):
                s += b
        model = total / case.cohort
        statistics = [(s / case.cohort).to(b.dtype) for s, b in zip(sums, statistics, strict=True)]
    return time.perf_counter() - started, model


def simulator(case: Case, bundle: Bundle, processes: int, models: bool = False) -> tuple[float, Simulated]:
    """Seconds of the rounds after the first, of this project's simulator, and how the run ended."""
    devices = {}
    for d in range(case.devices):
        x, y = samples(case, d)
        devices[name_of(case, d)] = DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])
    stamps: list[float] = []
    config = case.config().model_copy(update={"bundle": bundle.sha256})
    trainer = open_trainer("onnxruntime", bundle)
    ended = run(
        config, case.method, bundle, trainer, devices, processes=processes, models=models,
        progress=lambda row: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return stamps[-1] - stamps[0], ended


def measure(case: Case, folder: Path, flower: Callable[[Case], float] | None) -> dict[str, Any]:
    """Device-rounds per second of each simulator, the best of two turns of each."""
    bundle, turns = export(case, folder / case.name), case.cohort * (case.rounds - 1)
    runs: dict[str, Callable[[], float]] = {
        "maskfleet, one process": lambda: simulator(case, bundle, 1)[0],
        f"maskfleet, {cores()} processes": lambda: simulator(case, bundle, cores())[0],
        "plain PyTorch loop": lambda: plain_loop(case)[0],
    }
    if flower is not None:
        runs["flower"] = lambda: flower(case)
    seconds: dict[str, float] = {}
    for _ in range(2):
        for name, go in runs.items():
            seconds[name] = min(go(), seconds.get(name, np.inf))
    rates = {name: round(turns / s, 2) for name, s in seconds.items()}
    ours = max(rate for name, rate in rates.items() if name.startswith("maskfleet"))
    return {
        "case": {**vars(case), "parameters": bundle.manifest.d, "steps": case.epochs * -(-case.samples // case.batch)},
        "device_rounds_per_second": rates,
        "one_process_against_plain_loop": round(rates["maskfleet, one process"] / rates["plain PyTorch loop"], 2),
        "against_plain_loop": round(ours / rates["plain PyTorch loop"], 2),
        **({"against_flower": round(ours / rates["flower"], 2)} if "flower" in rates else {}),
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    only: Annotated[str | None, typer.Option(help="Only these cases, comma-separated.")] = None,
) -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    check_writable(json_file)
    content = provenance.origin()
    flower: Callable[[Case], float] | None = None
    if find_spec("flwr") is not None and find_spec("ray") is not None:
        from edge_bench.timing.speed_flower import flower_seconds

        flower, content["flower"] = flower_seconds, {name: version(name) for name in ("flwr", "ray")}
    else:
        print("Flower is not installed (pip install 'flwr[simulation]'), so it is not measured")
        content["flower"] = None
    content["cases"] = []
    cases = {case.name: case for case in CASES}
    chosen = known_names(only, "--only", cases, "there is no case")
    with TemporaryDirectory(prefix="maskfleet-speed-") as folder:
        for name in chosen:
            found = measure(cases[name], Path(folder), flower)
            content["cases"].append(found)
            print(name, found["device_rounds_per_second"], flush=True)
            write_json(json_file, content)  # after each case: all of them take a while


if __name__ == "__main__":
    run_module(main)
