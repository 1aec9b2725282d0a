"""Device-rounds per second: the simulator beside a plain PyTorch loop, and beside Flower's simulator if it is there.

    python -m edge_bench.speed --json benchmarks/results/speed/speed.json

All of them run FedAvg with momentum on the same network, samples, cohort size, batch size and epochs, one thread a
process: `maskfleet simulate`'s code with one process and with every core; a loop over devices in PyTorch, one process;
Flower with that loop's body as its client, every core. Devices have no test samples, so that nothing is scored. The
clock starts after the first round, which opens sessions and starts workers: imports, start-up and data are left out.
Flower is measured when `flwr` and `ray` can be imported; they are no dependencies of this project.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from edge_export.writer import export_bundle
from edge_kernels import counter
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coord_server.engine import choose_cohort
from edge_bench import provenance
from edge_bench.command_line import check_writable, known_names, run_module, write_json
from edge_bench.models import DIGITS, HAR, mlp, small_cnn
from edge_bench.simulate import run
from edge_bench.workers import cores
from edge_client.bundle import MANIFEST, Bundle, digest
from edge_client.data import DeviceData
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import FederationConfig
from edge_client.targets import Classification
from edge_client.training import open_trainer

SEED, LR, MOMENTUM = 3, 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """What all simulators run: a network and how much of it."""

    name: str
    shape: tuple[int, ...]
    classes: int
    devices: int
    cohort: int
    samples: int
    epochs: int
    batch: int
    rounds: int

    def network(self) -> nn.Module:
        """The network, freshly initialised from a fixed seed."""
        torch.manual_seed(SEED)
        sizes = {"digits-mlp": DIGITS, "har-mlp": HAR}.get(self.name)
        return small_cnn() if sizes is None else mlp(*sizes)

    @property
    def method(self) -> FedAvg:
        return FedAvg(epochs=self.epochs, batch=self.batch, lr=LR, momentum=MOMENTUM)

    def config(self) -> FederationConfig:
        return FederationConfig(
            name=self.name, bundle="0" * 64, method={"name": "fedavg", **self.method.model_dump()},
            rounds=self.rounds, cohort=self.cohort, min_devices=self.devices, seed=SEED, guard="none",
        )  # fmt: skip


CASES = (
    Case("digits-mlp", (64,), 10, devices=1000, cohort=100, samples=40, epochs=5, batch=20, rounds=6),
    Case("har-mlp", (1152,), 6, devices=60, cohort=10, samples=300, epochs=5, batch=32, rounds=5),
    Case("small-cnn", (1, 28, 28), 10, devices=100, cohort=20, samples=100, epochs=2, batch=20, rounds=5),
)


@lru_cache(4096)
def samples(case: Case, device: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """One device's training samples: noise around a centre for each class."""
    rng = np.random.default_rng((SEED, device))
    centres = np.random.default_rng(SEED).standard_normal((case.classes, *case.shape), np.float32)
    y = rng.integers(case.classes, size=case.samples)
    return centres[y] + rng.standard_normal((case.samples, *case.shape), np.float32), y


def name_of(case: Case, device: int) -> str:
    return f"device-{device:0{len(str(case.devices - 1))}d}"


# --- the simulators


def train(net: nn.Module, case: Case, device: int, round_: int) -> None:
    """A device's local round in PyTorch, in place."""
    x, y = (torch.from_numpy(a) for a in samples(case, device))
    optimiser = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    net.train()
    for epoch in range(case.epochs):
        stream = counter.key(SEED, "batches", "train", name_of(case, device), round_, epoch)
        order = torch.from_numpy(counter.permutation(stream, case.samples))
        for low in range(0, case.samples, case.batch):
            chosen = order[low : low + case.batch]
            optimiser.zero_grad()
            torch.autograd.backward(functional.cross_entropy(net(x[chosen]), y[chosen]))
            optimiser.step()


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
            vector_to_parameters(model, net.parameters())
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


def simulator(case: Case, bundle: Bundle, processes: int) -> float:
    """Seconds of the rounds after the first, of this project's simulator."""
    devices = {}
    for d in range(case.devices):
        x, y = samples(case, d)
        devices[name_of(case, d)] = DeviceData(x, y, x[:0], y[:0], x[:0], y[:0])
    stamps: list[float] = []
    config = case.config().model_copy(update={"bundle": digest((bundle.folder / MANIFEST).read_bytes())})
    trainer = open_trainer("onnxruntime", bundle)
    run(
        config, case.method, bundle, trainer, devices, processes=processes, models=False,
        progress=lambda row: stamps.append(time.perf_counter()),
    )  # fmt: skip
    return stamps[-1] - stamps[0]


def export(case: Case, folder: Path) -> Bundle:
    """The case's network as a bundle."""
    target = Classification(classes=case.classes)
    return export_bundle(
        case.network(), torch.zeros(2, *case.shape), folder, name=case.name, target=target, torch_part=False
    )


def measure(case: Case, folder: Path, flower: Callable[[Case], float] | None) -> dict[str, Any]:
    """Device-rounds per second of each simulator, the best of two turns of each."""
    bundle, turns = export(case, folder / case.name), case.cohort * (case.rounds - 1)
    runs: dict[str, Callable[[], float]] = {
        "maskfleet, one process": lambda: simulator(case, bundle, 1),
        f"maskfleet, {cores()} processes": lambda: simulator(case, bundle, cores()),
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
        from edge_bench.speed_flower import flower_seconds

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
