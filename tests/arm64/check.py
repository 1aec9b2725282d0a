"""python check.py CACHE [--json FILE]: the base install of a Debian arm64 root file system under qemu-user, tried.

`run.sh` makes CACHE/root. Tried there are: one gradient; the tests of the wire's bytes (codecs, counters, payloads),
with their committed vectors; `maskfleet bench`; a device that takes part in federations beside x86 devices, and its
personal model. Every federation runs twice, with the same seed, data and secrets: with x86 devices alone, and with one
of them emulated.

Codecs, masks and counters are integers and must have the same bytes everywhere. Training is float32, whose kernels
differ between processors: there the decoded updates and the models are compared, and the file says how far they are
apart. Seconds are qemu's and say nothing of a Raspberry Pi. The command ends with code 1 when a promise is broken.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import numpy as np
import onnxruntime as ort
import typer
from edge_bench import provenance
from edge_bench.command_line import write_json
from edge_bench.data import datasets
from edge_bench.federation.demo import BUNDLES, settings
from edge_bench.federation.fleet import Ended, Fleet, fleet
from edge_bench.federation.over_http import differences, over_http
from edge_bench.federation.processes import ProcessError
from edge_bench.simulation.file import find_bundle
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.data import DeviceData
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.payload import decode

HERE = Path(__file__).resolve().parent
PYTHON = "/opt/maskfleet/bin/python"  # in the root file system
METHODS = ("fedmask", "lattice")
ROUNDS = 2  # as many as a device's journal keeps
SEED = 1
CLOSE = 0.1  # how far the scores of one device on two processors may be apart
ROUNDING = 1e-5  # how far two processors' gradients may be apart, over the largest element
TESTS = (
    *("codecs_vectors", "payload_vectors", "counter", "codecs_counts", "codecs_fuse", "codecs_sets", "codecs_values"),
    *("flat", "folding"),
)


class Emulated:
    """The root file system CACHE/root, whose programs see CACHE and the tests at their own paths."""

    def __init__(self, cache: Path) -> None:
        self.command = [str(HERE / "emulate.sh"), str(cache / "root")]
        os.environ["SHARED"] = f"{cache}:{HERE.parent}"

    def run(self, *words: str) -> str:
        """A program's output. Raises ProcessError with its last lines."""
        done = subprocess.run([*self.command, *words], capture_output=True, text=True)
        if done.returncode:
            tail = "\n  ".join((done.stdout + done.stderr).splitlines()[-15:])
            raise ProcessError(f"{' '.join(words[:4])} ended with code {done.returncode}:\n  {tail}")
        return done.stdout


def installed(emulated: Emulated, cache: Path) -> dict[str, Any]:
    """What pip installed: the wheels' file names, and megabytes of the virtual environment."""
    described = json.loads((cache / "installed.json").read_text())["install"]
    code = (
        "import json, platform; from edge_bench import provenance;"
        "print(json.dumps({**provenance.machine(), 'machine': platform.machine(), 'libc': platform.libc_ver()[1]}))"
    )
    files = [p for p in (cache / "root/opt/maskfleet").rglob("*") if p.is_file() and not p.is_symlink()]
    return {
        "system": json.loads(emulated.run(PYTHON, "-c", code)),
        "wheels": sorted(Path(d["download_info"]["url"]).name for d in described),
        "megabytes": round(sum(p.stat().st_size for p in files) / 1e6),
    }


def tests(emulated: Emulated, cache: Path) -> dict[str, Any]:
    """Passed and skipped tests under emulation. Raises ProcessError when one fails."""
    report = cache / "tests.xml"
    files = [str(HERE.parent / f"test_{name}.py") for name in TESTS]
    options = ["-q", "-c", "/dev/null", "-p", "patient", "-p", "no:cacheprovider", f"--junitxml={report}"]
    emulated.run("/usr/bin/env", f"PYTHONPATH=/opt/tests:{HERE}", PYTHON, "-m", "pytest", *options, *files)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return {"files": TESTS, "passed": count - skipped, "skipped": skipped, "seconds": float(suite.attrib["time"])}


def update(folder: Path, round_: int) -> bytes:
    """The update of a round as the device's journal has it: a line, what the method keeps, the update."""
    line, _, rest = (folder / f"kept-{round_:07d}").read_bytes().partition(b"\n")
    return rest[json.loads(line)["kept"] :]


def compared(here: bytes, there: bytes) -> dict[str, Any]:
    """Two updates: their bytes, and the share of equal elements of every array."""
    one, other = decode(here), decode(there)
    arrays = {
        name: {
            "dtype": str(a.dtype),
            "elements": [a.size, b.size],
            "equal": float(np.mean(a == b)) if a.shape == b.shape else None,
        }
        for name, a in one.arrays.items()
        if (b := other.arrays.get(name)) is not None
    }
    return {
        "same_bytes": here == there,
        "bytes": [len(here), len(there)],
        "same_arrays": {k: v.dtype for k, v in one.arrays.items()} == {k: v.dtype for k, v in other.arrays.items()},
        "arrays": arrays,
    }


def logits(model: Path, x: NDArray[Any]) -> NDArray[np.float32]:
    """The outputs of a personal model on this machine."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs: NDArray[np.float32] = session.run(None, {"x": x})[0]
    return outputs


def federation(running: Fleet, emulated: Emulated, method: str, device: str) -> dict[str, Any]:
    """One method's federation with x86 devices alone, again with `device` emulated, and the two compared."""
    table = settings(method, "digits", ROUNDS)
    secrets = {name: counter.key(SEED, "secret", name) for name in running.devices}
    measured = [PYTHON, str(HERE / "measured.py")]
    ended: dict[str, Ended] = {}
    cost: dict[str, Mapping[str, float]] = {}
    for side, python in (("x86_64", [sys.executable, measured[1]]), ("aarch64", [*emulated.command, *measured])):
        file = running.folder / f"{method}-{side}.json"
        started = time.monotonic()
        ended[side] = running.run(
            FederationConfig(
                name=f"{method}-{side}",
                bundle=running.bundle,
                method=table,
                rounds=ROUNDS,
                cohort=len(running.devices),
                seed=SEED,
                guard="clip",
            ),
            secrets_of=secrets,
            python_of={device: [*python, str(file)]},
        )
        if not file.is_file():
            raise ProcessError(f"{device} on {side} ended without a word; see {running.folder / f'{method}-{side}'}")
        cost[side] = json.loads(file.read_text())
        print(f"{method}: {side}, {time.monotonic() - started:.0f} s", flush=True)
    data = running.devices[device]
    report = {side: {d.device: d for d in e.devices}[device].report for side, e in ended.items()}
    model = {side: e.models[device] for side, e in ended.items()}
    outputs = {side: logits(path, data.x_test) for side, path in model.items()}
    places = [running.folder / f"{method}-{side}" / device for side in ended]
    found: dict[str, Any] = {
        "settings": table,
        "different": differences(*(over_http(e) for e in ended.values())),
        "updates": [compared(*(update(p, r) for p in places)) for r in range(1, ROUNDS + 1)],
        "personal": {
            "same_bytes": len({p.read_bytes() for p in model.values()}) == 1,
            "largest_difference_of_logits": float(np.abs(outputs["x86_64"] - outputs["aarch64"]).max()),
            "same_predictions": float(np.mean(outputs["x86_64"].argmax(1) == outputs["aarch64"].argmax(1))),
            "score_on_x86_64": {side: score(outputs[side], data) for side in outputs},
            **{side: None if r is None else r.model_dump(mode="json") for side, r in report.items()},
        },
        "cost": cost,
    }
    print(said(method, found), flush=True)
    return {**found, "broken": broken(method, found)}


def score(outputs: NDArray[np.float32], data: DeviceData) -> float:
    """The share of test samples whose largest logit is their label's."""
    return float(np.mean(outputs.argmax(1) == data.y_test))


def said(method: str, found: Mapping[str, Any]) -> str:
    """A federation's figures in a line."""
    same = ["the same bytes" if u["same_bytes"] else "other bytes" for u in found["updates"]]
    here, there = (found["personal"][side] for side in ("x86_64", "aarch64"))
    return (
        f"{method}: updates have {', '.join(same)}; score {here['score']:.3f} on x86-64, {there['score']:.3f} "
        f"emulated; {there['parameters_compact']:,} of {there['parameters_dense']:,} parameters"
    )


def broken(method: str, found: Mapping[str, Any]) -> list[str]:
    """The promises that a federation's figures break, a sentence each."""
    personal = found["personal"]
    here, there = personal["x86_64"], personal["aarch64"]
    faults = []
    if there["uncompacted"] is not None:
        faults.append(f"the emulated device kept the masked dense model: {there['uncompacted']}")
    if there["score"] != personal["score_on_x86_64"]["aarch64"]:
        faults.append(f"its model scores {there['score']} there and {personal['score_on_x86_64']['aarch64']} here")
    if not abs(there["score"] - here["score"]) <= CLOSE:
        faults.append(f"its score is {there['score']}, that of the same device on x86-64 {here['score']}")
    if not all(u["same_arrays"] for u in found["updates"]):
        faults.append("its updates hold other arrays than those of the same device on x86-64")
    return [f"{method}: {fault}" for fault in faults]


def gradient(emulated: Emulated, folder: Path, data: Path) -> dict[str, Any]:
    """How far the processors' gradients of one batch are apart, beside the largest element."""
    found = []
    for name, python in (("x86_64", [sys.executable]), ("aarch64", [*emulated.command, PYTHON])):
        file = folder / f"gradient-{name}.npy"
        done = subprocess.run([*python, str(HERE / "gradient.py"), str(folder / "bundle"), str(data), str(file)])
        if done.returncode:
            raise ProcessError(f"gradient.py ended with code {done.returncode} on {name}")
        found.append(np.load(file))
    here, there = found
    apart = float(np.abs(here - there).max() / np.abs(here).max())
    faults = [] if apart <= ROUNDING else [f"gradient: {apart:.2g} apart, {ROUNDING:g} is due to rounding"]
    return {"apart": apart, "equal_elements": float(np.mean(here == there)), "broken": faults}


def bench(emulated: Emulated, folder: Path) -> dict[str, Any]:
    """The report of `maskfleet bench` on the bundle, with half of every layer's units kept."""
    few = ["--keep", "0.5", "--threads", "1", "--runs", "50", "--warm-up", "5", "--seconds", "10", "--cold-starts", "1"]
    program = str(Path(PYTHON).with_name("maskfleet"))
    emulated.run(program, "bench", str(folder / "bundle"), *few, "--output", str(folder / "bench"))
    report: dict[str, Any] = json.loads((folder / "bench" / "report.json").read_text())
    del report["command"]  # has this machine's folders
    return {**report, "options": few}


def main(
    cache: Annotated[Path, typer.Argument(help="The folder that run.sh filled.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, comma-separated.")] = ",".join(METHODS),
) -> None:
    """Try the base install under emulation and compare it with this machine."""
    origin = {**provenance.origin(), "command": f"make test-arm64 ARGS='{' '.join(sys.argv[2:])}'"}
    emulated = Emulated(cache)
    result: dict[str, Any] = {**origin, "emulator": emulator(), "broken": [], "installed": installed(emulated, cache)}
    print(f"{len(result['installed']['wheels'])} packages, {result['installed']['megabytes']} MB", flush=True)
    folder = cache / "federations"
    shutil.rmtree(folder, ignore_errors=True)
    bundle = find_bundle(BUNDLES["digits"])
    config = datasets.DataConfig(name="digits", devices=3, split="dirichlet", alpha=1.0)
    devices = datasets.load(config, SEED, bundle.manifest)
    shutil.copytree(bundle.folder, folder / "bundle")

    def attempt(what: str, call: Callable[[], dict[str, Any]]) -> None:
        """Put one step's figures, or the sentence of its failure, into the result and its file."""
        started = time.monotonic()
        try:
            result[what] = call()
            result["broken"] += result[what].pop("broken", [])
        except ProcessError as error:
            result["broken"].append(f"{what}: {error}")
        print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)
        if json_file is not None:
            write_json(json_file, result)

    with fleet(folder, bundle, devices) as running:
        device = min(devices)
        attempt("gradient", lambda: gradient(emulated, folder, running.files[device]))
        attempt("tests", lambda: tests(emulated, cache))
        attempt("bench", lambda: bench(emulated, folder))
        for method in methods.split(","):
            attempt(method, lambda method=method: federation(running, emulated, method, device))  # type: ignore[misc]
    for fault in result["broken"]:
        print(f"broken: {fault}")
    if result["broken"]:
        raise typer.Exit(1)


def emulator() -> str:
    """The emulator's version line."""
    return subprocess.run(
        ["qemu-aarch64-static", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]


if __name__ == "__main__":
    typer.run(main)
