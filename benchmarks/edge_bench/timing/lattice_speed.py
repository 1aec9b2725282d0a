"""What Lattice's numbers cost beside the training, in CPU time: HAR's MLP, ten devices, five epochs a round.

    python -m edge_bench.timing.lattice_speed --json benchmarks/results/speed/lattice.json

A device's figures: `receive` decodes the downlink into weights, `train` is the SGD, `send` turns the change into whole
numbers and codes them. The coordinator's: `downlink` for each audience, `update` (read and folded) for each device, and
`finish`. Each is the median over the rounds after the first, in ms; `receive_last` is that of the last round alone,
whose numbers are the rarest. `coding_per_training` is (receive + send) / train; the figures are those of the turn in
which it is lowest. `encode` and `decode` are ns a parameter for 2**20 of them.
Everything is measured with the compiled loops, if numba is installed, and with numpy alone.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar
from unittest import mock

import numpy as np
import typer
from edge_kernels import counter, lattice, lattice_model
from edge_kernels.codecs import arrivals

from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.timing import speed_case
from edge_client.data import DeviceData
from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.lattice.train import train
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Course, Task
from edge_client.training import open_trainer

ROUNDS, DEVICES, TURNS = 5, 10, 2
MILLION = 1 << 20
T = TypeVar("T")


class Clock:
    """CPU milliseconds by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[..., T], *args: Any, **more: Any) -> T:
        start = time.process_time()
        result = call(*args, **more)
        self.spent[name].append(1e3 * (time.process_time() - start))
        return result


def federation(folder: Path) -> dict[str, float]:
    """The medians of a federation whose devices miss every fifth round."""
    case = speed_case.CASES[1]
    bundle = speed_case.export(case, folder)
    course, trainer, method, clock = (
        Course(bundle.model(), speed_case.SEED, ROUNDS, DEVICES),
        open_trainer("onnxruntime", bundle),
        Lattice(lr=speed_case.LR),
        Clock(),
    )
    data = [speed_case.samples(case, device) for device in range(DEVICES)]
    held = [DeviceData(x, y, x[:0], y[:0], x[:0], y[:0]) for x, y in data]
    state, records, kept = method.start(course), dict[int, Any](), dict[int, Any]()
    with mock.patch.object(method_module, "train", partial(clock, "train", train)):
        for round_ in range(1, ROUNDS + 1):
            if round_ == 2:
                clock.spent.clear()
            sent, updates, total = dict[str, bytes](), dict[int, tuple[Assignment, bytes]](), None
            for place in range(DEVICES):
                if round_ > 2 and (place + round_) % 5 == 0:
                    continue
                record = records.get(place)
                audience = method.audience(course, round_, record)
                if audience not in sent:
                    sent[audience] = encode(clock("downlink", method.downlink, course, round_, state, record))
                a = Assignment(course, round_, f"device-{place}", place)
                received = clock("receive", method.receive, a, kept.get(place), decode(sent[audience]))
                task = Task(a, trainer, held[place], place)
                local = clock("local", method.local_round, task, kept.get(place), received)
                update = Payload(local.update.arrays, {"samples": task.samples})
                kept[place], updates[place] = local.kept, (a, encode(update))
            for place, (a, data_) in updates.items():
                record = records.get(place)
                total, records[place] = clock("update", _folded, method, a, state, total, record, data_)
            took_part = [a.device for a, _ in updates.values()]
            state = method.sized(state, DEVICES)
            state, _ = clock("finish", method.finish, course, round_, took_part, state, total)
    clock.spent["send"] = [x - y for x, y in zip(clock.spent["local"], clock.spent["train"], strict=True)]
    names = ("receive", "receive_last", "send", "train", "downlink", "update", "finish")
    clock.spent["receive_last"] = clock.spent["receive"][-len(updates) :]
    found = {name: round(float(np.median(clock.spent[name])), 2) for name in names}
    return {**found, "coding_per_training": round((found["receive"] + found["send"]) / found["train"], 2)}


def _folded(method: Lattice, a: Assignment, state: Any, total: Any, record: Any, data: bytes) -> Any:
    return method.fold(a, state, total, method.read_update(a, state, record, decode(data)), record)


def coder() -> dict[str, float]:
    """Nanoseconds a parameter to encode and decode a device's numbers, one in 250 of them not 0; the best of 3."""
    rng, side = np.random.default_rng(1), 1 << 10
    rows, columns = (np.exp(rng.normal(size=side)) for _ in range(2))
    size = np.outer(rows, columns).ravel() * 0.003
    dither = (counter.uint64(1, MILLION) >> np.uint64(32)).astype(np.uint32)
    past = np.floor(rng.laplace(size=MILLION) * 4 * size + rng.random(MILLION)).astype(np.int32)
    values = np.floor(rng.laplace(size=MILLION) * size + dither * 2.0**-32).astype(np.int32)
    known, clock = lattice.up(dither, [(slice(0, MILLION), side, side)], past), Clock()
    for _ in range(3):
        data = clock("encode", lattice.encode, values, known)
        clock("decode", lattice.decode, data, known)
    return {name: round(min(spent) * 1e6 / MILLION, 1) for name, spent in clock.spent.items()}


def turn(compiled: bool) -> dict[str, float]:
    """One measurement of everything."""
    with ExitStack() as stack:
        if not compiled:
            for module in (arrivals, lattice_model):
                stack.enter_context(mock.patch.object(module, "loops", return_value=None))
        folder = stack.enter_context(TemporaryDirectory())
        return {**federation(Path(folder) / "bundle"), **coder()}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure, and print the best of each figure's turns."""
    check_writable(json_file)
    content = provenance.origin()
    turns: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(TURNS):
        if find_spec("numba") is not None:
            turns["with numba"].append(turn(True))
        turns["numpy alone"].append(turn(False))
    content["figures"] = {
        name: min(found, key=lambda figures: figures["coding_per_training"]) for name, found in turns.items()
    }
    print(json.dumps(content["figures"], indent=2))
    write_json(json_file, content)


if __name__ == "__main__":
    run_module(main)
